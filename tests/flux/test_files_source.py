"""Files that keep coming, without Spark: the choice of files, their order, and the rows that a later life reads
again."""

from __future__ import annotations

import copy
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from folders_read import LONG_S, ROWS, drain, fails, given, gives_nothing, numbers, started, take, write

import flux
from flux.connectors.files.errors import BadFile, FileChanged, FileError, FileGone, gone
from flux.connectors.files.formats import ParquetFormat
from flux.connectors.files.listing import FoundFile
from flux.connectors.files.reader import FILE_ROWS
from flux.connectors.files.source import FilesReader
from flux.connectors.files.watch import Watch
from flux.connectors.ledger import LedgerBroken
from flux.dataflow import threaded_reader
from flux.dataflow.source import RowStart
from flux.dataflow.source_reader import SourceSettings


def until(there: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + LONG_S
    while not there():
        assert time.monotonic() < end, what
        time.sleep(0.002)


def test_files_that_come_later_are_read_later_whatever_their_time(tmp_path: Path) -> None:
    write(tmp_path, "b.parquet", 0)
    reader = started(tmp_path)
    rows = reader.read(0, None)
    assert [n for n, _ in take(rows, 3)] == [0, 1, 2]
    old = tmp_path / ".a.hidden"
    pq.write_table(pa.table({"n": range(3, 6)}), old)
    os.utime(old, (1, 1))
    os.replace(old, tmp_path / "a.parquet")
    assert [n for n, _ in take(rows, 3)] == [3, 4, 5]
    rows.close()
    assert numbers(started(tmp_path, kept={"ledger": reader.id}), 6) == [0, 1, 2, 3, 4, 5], "and so in a later life"
    assert numbers(started(tmp_path), 6) == [3, 4, 5, 0, 1, 2], "another query finds both together, and goes by time"


def test_a_later_life_goes_on_at_any_position(tmp_path: Path) -> None:
    for number in range(4):
        write(tmp_path, f"{number}.parquet", 10 * number, rows=5)
    reader = started(tmp_path, partitions=2)
    everything = numbers(reader, 10, partition=1)
    assert sorted(everything + numbers(reader, 10, partition=0)) == sorted(
        10 * number + row for number in range(4) for row in range(5)
    )
    for row in range(5):
        assert numbers(reader, 10 - row, 1, [1, row]) == everything[row:]
        assert numbers(reader, 5 - row, 1, [3, row]) == everything[5 + row :]


def test_behind_a_file_the_next_one_begins(tmp_path: Path) -> None:
    """Begin the next file at once behind the last row, so that a file whose rows have left the query may go."""
    gone = write(tmp_path, "a.parquet", 0)
    reader = started(tmp_path, partitions=2)
    rows = reader.read(0, None)
    assert {tuple(position) for _, position in take(rows, 3)} == {(2, 0)}
    rows.close()
    gone.unlink()
    write(tmp_path, "b.parquet", 3)
    write(tmp_path, "c.parquet", 6)
    assert numbers(reader, 3, 1) + numbers(reader, 3, 0, [2, 0]) == [3, 4, 5, 6, 7, 8]


def test_partitions_share_the_files_between_them_each_once(tmp_path: Path) -> None:
    reader = started(tmp_path, partitions=3)
    readers = [reader.read(partition, None) for partition in range(3)]
    for number in range(10):
        write(tmp_path, f"{number}.parquet", 3 * number)
    found: list[int] = []
    end = time.monotonic() + LONG_S
    while len(found) < 30 and time.monotonic() < end:
        for rows in readers:
            given = next(rows)
            found += [] if given is None else given.batch.column(0).to_pylist()
    for rows in readers:
        gives_nothing(rows)
        rows.close()
    assert sorted(found) == list(range(30))
    assert sum(rows.lag()[1] for rows in readers) == 10
    assert all(at == end for at, end in (rows.lag() for rows in readers))


def test_hidden_and_temporary_names_are_left_out(tmp_path: Path) -> None:
    for name in (".a.parquet", "_a.parquet", "a.parquet.tmp", "a._COPYING_"):
        pq.write_table(pa.table({"n": [-1]}), tmp_path / name)
    (tmp_path / "_temporary").mkdir()
    pq.write_table(pa.table({"n": [-1]}), tmp_path / "_temporary" / "x.parquet")
    (tmp_path / "_SUCCESS").touch()
    write(tmp_path, "with space ü%20.parquet", 0)
    rows = started(tmp_path, recursiveFileLookup=True).read(0, None)
    assert [n for n, _ in take(rows, 3)] == [0, 1, 2]
    gives_nothing(rows)
    rows.close()


def test_a_parquet_file_is_read_when_it_has_its_footer(tmp_path: Path) -> None:
    whole = write(tmp_path, ".whole", 0, rows=1000).read_bytes()
    growing = tmp_path / "a.parquet"
    rows = started(tmp_path).read(0, None)
    with growing.open("wb") as out:
        for part in range(0, len(whole) - 1, 2000):
            out.write(whole[part : part + 2000][: len(whole) - 1 - part])
            out.flush()
            assert next(rows) is None
        gives_nothing(rows)
        out.write(whole[-1:])
    assert [n for n, _ in take(rows, 1000)] == list(range(1000))
    rows.close()


def test_a_file_of_text_is_read_when_nobody_writes_any_more(tmp_path: Path) -> None:
    reader = started(tmp_path, format="csv", settle="300ms")
    rows = reader.read(0, None)
    with (tmp_path / "a.csv").open("w") as out:
        for number in range(20):
            out.write(f"{number}\n")
            out.flush()
            os.utime(out.fileno())
            assert next(rows) is None
            time.sleep(0.02)
    assert [n for n, _ in take(rows, 20)] == list(range(20))
    rows.close()


def test_a_file_that_grows_after_it_was_found_ends_the_query(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1\n2\n")
    reader = started(tmp_path, format="csv", settle=0)
    rows = reader.read(0, None)
    take(rows, 2)
    with (tmp_path / "a.csv").open("a") as out:
        out.write("3\n")
    with pytest.raises(FileChanged, match=r"a\.csv was changed.*had 4 bytes.*has 6"):
        drain(rows)
    rows.close()
    fails(reader, FileChanged, r"a\.csv was changed", [0, 1])
    assert numbers(started(tmp_path, format="csv", onChanged="ignore", kept={"ledger": reader.id}), 1, 0, [0, 2]) == [3]


def test_a_file_that_is_written_anew_under_its_name_ends_the_query(tmp_path: Path) -> None:
    path = write(tmp_path, "a.parquet", 0)
    reader = started(tmp_path)
    rows = reader.read(0, None)
    take(rows, 3)
    write(tmp_path, "a.parquet", 7)
    later = path.stat().st_mtime + 5
    os.utime(path, (later, later))
    with pytest.raises(FileChanged):
        drain(rows)
    rows.close()


def test_a_file_that_is_renamed_is_read_once(tmp_path: Path) -> None:
    first, second = write(tmp_path, "a.parquet", 0), write(tmp_path, "b.parquet", 3)
    reader = started(tmp_path)
    rows = reader.read(0, None)
    take(rows, 6)
    os.rename(first, tmp_path / "c.parquet")
    gives_nothing(rows)
    rows.close()
    os.rename(second, tmp_path / "d.parquet")
    later = started(tmp_path, kept={"ledger": reader.id})
    rows = later.read(0, None)
    assert [n for n, _ in take(rows, 6)] == [0, 1, 2, 3, 4, 5], "found under their new names"
    gives_nothing(rows)
    rows.close()


def test_a_new_file_at_the_place_on_disk_of_an_old_one_is_read(tmp_path: Path) -> None:
    reader = started(tmp_path)
    rows = reader.read(0, None)
    for number in range(5):
        path = write(tmp_path, f"{number}.parquet", 3 * number)
        assert [n for n, _ in take(rows, 3)] == [3 * number, 3 * number + 1, 3 * number + 2]
        path.unlink()
    rows.close()


def test_a_file_that_is_gone_before_it_was_read_ends_the_query(tmp_path: Path) -> None:
    path = write(tmp_path, "a.parquet", 0)
    reader = started(tmp_path)
    numbers(reader, 3)
    path.unlink()
    fails(reader, FileGone, r"a\.parquet was found, and is gone")


def test_a_copy_that_gets_the_time_of_its_original_at_the_end_has_not_changed(tmp_path: Path) -> None:
    path = write(tmp_path, "a.parquet", 0)
    reader = started(tmp_path)
    rows = reader.read(0, None)
    take(rows, 3)
    os.utime(path, (1, 1))
    gives_nothing(rows)
    rows.close()


def test_a_ledger_that_was_removed_is_told(tmp_path: Path) -> None:
    write(tmp_path, "a.parquet", 0)
    reader = started(tmp_path)
    numbers(reader, 3)
    reader.forget()
    assert sorted(os.listdir(tmp_path)) == ["a.parquet"]
    for start in ([1, 0], [0, 2]):
        fails(
            started(tmp_path, kept={"ledger": reader.id}),
            LedgerBroken,
            "has [01] files",
            start if start[1] else [2, 0],
        )


def test_the_ledger_of_another_query_stays(tmp_path: Path) -> None:
    write(tmp_path, "a.parquet", 0)
    one, other = started(tmp_path), started(tmp_path)
    numbers(one, 3)
    numbers(other, 3)
    one.forget()
    assert numbers(other, 3) == [0, 1, 2]
    assert os.listdir(tmp_path / "_flux") == [other.id]


def test_an_entry_that_names_no_files_is_told(tmp_path: Path) -> None:
    write(tmp_path, "a.parquet", 0)
    reader = started(tmp_path)
    folder = tmp_path / "_flux" / reader.id
    folder.mkdir(parents=True)
    (folder / "000000000000.json").write_text('{"files": [["a"]]}\n')
    fails(reader, LedgerBroken, "names no files")


def test_a_folder_that_spark_streams_to_is_read_by_its_log(tmp_path: Path) -> None:
    log = tmp_path / "_spark_metadata"
    log.mkdir()
    write(tmp_path, "part-failed.parquet", -9)
    good = write(tmp_path, "part-1 ü.parquet", 0)
    rows = started(tmp_path).read(0, None)
    gives_nothing(rows)
    said = {"path": good.as_uri(), "size": good.stat().st_size, "isDir": False, "action": "add"}
    (log / ".0.tmp").write_text("v1\nhalf")
    (log / "0").write_text(f"v1\n{json.dumps(said)}")
    assert [n for n, _ in take(rows, 3)] == [0, 1, 2]
    more = write(tmp_path, "part-2.parquet", 3)
    (log / "9.compact").write_text("v1\n" + "\n".join(json.dumps({**said, "path": p.as_uri()}) for p in (good, more)))
    assert [n for n, _ in take(rows, 3)] == [3, 4, 5]
    gives_nothing(rows)
    rows.close()


def test_columns_are_found_by_name_and_cast(tmp_path: Path) -> None:
    schema = "n long, Name string, missing double"
    table = {"other": [0], "NAME": pa.array(["x"]).dictionary_encode(), "n": pa.array([1], pa.int8())}
    pq.write_table(pa.table(table), tmp_path / "a")
    rows = started(tmp_path, schema=schema).read(0, None)
    end = time.monotonic() + LONG_S
    while (given := next(rows)) is None and time.monotonic() < end:
        time.sleep(0.002)
    assert given is not None
    assert given.batch.to_pylist() == [{"n": 1, "Name": "x", "missing": None}]
    rows.close()


@pytest.mark.parametrize(
    ("format", "text", "options"),
    [
        ("csv", "1,x,2.5\n,,\n", {}),
        ("csv", "b;c;a;d\nx;2.5;1;0\n;;;0\n", {"header": "true", "sep": ";"}),
        ("csv", "1,'x',NA\nNA,NA,NA\n", {"quote": "'", "nullValue": "NA"}),
        ("json", '{"a": 1, "b": "x", "c": 2.5, "d": [1]}\n{}\n', {}),
    ],
)
def test_text_is_read_by_column(tmp_path: Path, format: str, text: str, options: dict[str, Any]) -> None:
    (tmp_path / "f").write_text(text)
    (tmp_path / "empty").touch()
    reader = started(tmp_path, schema="a long, b string, c double", format=format, settle=0, **options)
    rows = reader.read(0, None)
    found: list[Any] = []
    end = time.monotonic() + LONG_S
    while len(found) < 2 and time.monotonic() < end:
        given = next(rows)
        found += [] if given is None else given.batch.to_pylist()
    rows.close()
    expected = {"a": 1, "b": "x", "c": None if "nullValue" in options else 2.5}
    assert found == [expected, {"a": None, "b": None, "c": None}]
    assert numbers(reader, 1, 0, [0, 1]) == [None]


@pytest.mark.parametrize(
    ("format", "data"),
    [
        ("csv", b"1\nx\n"),
        ("csv", b"1,2\n"),
        ("json", b'{"n": "x"}\n'),
        ("json", b'{"n": 1}\n{"n":\n'),
        ("json", b"[1, 2]\n"),
        ("parquet", None),
    ],
)
def test_a_file_of_other_rows_is_named(tmp_path: Path, format: str, data: bytes | None) -> None:
    path = tmp_path / "some file"
    if data is None:
        pq.write_table(pa.table({"n": ["x"]}), path)
    else:
        path.write_bytes(data)
    fails(started(tmp_path, format=format, settle=0), BadFile, "some file: cannot be read")


@pytest.mark.parametrize("ending", ["gz", "bz2", "zst"])
def test_text_that_is_compressed_is_read_by_its_ending(tmp_path: Path, ending: str) -> None:
    with pa.output_stream(str(tmp_path / f"a.csv.{ending}"), compression="detect") as out:
        out.write(b"1\n2\n")
    assert numbers(started(tmp_path, format="csv", settle=0), 2) == [1, 2]


def test_bytes_that_are_no_text_do_not_get_through(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b'{"s": "\xff\xfe"}\n')
    fails(started(tmp_path, format="json", schema="s string", settle=0), BadFile, "UTF8|UTF-8")


def test_a_file_without_any_of_the_columns_is_named(tmp_path: Path) -> None:
    write(tmp_path, "a.parquet", 0)
    fails(started(tmp_path, schema="other long"), BadFile, "none of the columns other")


def test_folders_of_a_partitioned_table_are_not_left_out_silently(tmp_path: Path) -> None:
    (tmp_path / "day=1").mkdir()
    write(tmp_path / "day=1", "a.parquet", 0)
    fails(started(tmp_path), FileError, "recursiveFileLookup=True")
    assert numbers(started(tmp_path, recursiveFileLookup=True), 3) == [0, 1, 2]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Name the folder at once, as Spark does; when the query starts; and while it runs."""
    folder = tmp_path / "a folder, ü"
    for path in (folder, str(folder), f"file://{tmp_path}/nowhere"):
        with pytest.raises(flux.UsageError, match=r"there is no folder .* Check the name, or make the folder first"):
            flux.files(path, schema=ROWS)
    folder.mkdir()
    reader = started(folder)
    folder.rmdir()
    fails(reader, FileGone, "a folder, ü is not there")
    with pytest.raises(flux.UsageError, match="there is no folder"):
        reader.prepare(None)
    for pattern, told in (
        ("*.parquet", r"/there', and its files with pathGlobFilter='\*\.parquet'"),
        ("*/a.parquet", "the folder above; recursiveFileLookup=True"),
        ("{a,b}.csv", "no braces"),
    ):
        with pytest.raises(flux.UsageError, match=rf"is a pattern, and a folder is wanted\. .*{told}"):
            flux.files(tmp_path / "there" / pattern, schema="n BIGINT")
    with pytest.raises(flux.UsageError, match=r"is a file. Name its folder, .* pathGlobFilter='a.parquet'"):
        flux.files(write(tmp_path, "a.parquet", 0), schema=ROWS)


@pytest.mark.parametrize("sensitive", [False, True])
def test_columns_of_csv_files_are_found_as_the_session_tells_names_apart(tmp_path: Path, sensitive: bool) -> None:
    schema = "N long, Text string"
    (tmp_path / "0.csv").write_text('\ufeff\n"n",other,TEXT\n1,x,a\n')
    (tmp_path / "1.csv").write_text("TEXT,Text,N\nb,c,2\n")  # an exact name comes first
    reader = started(tmp_path, format="csv", schema=schema, header=True, settle=0)
    reader.configure(SourceSettings(case_sensitive=sensitive))
    rows = reader.read(0, None)
    found = [row for batch in given(rows, 2) for row in batch.to_pylist()]
    rows.close()
    first = {"N": None, "Text": None} if sensitive else {"N": 1, "Text": "a"}
    assert found == [first, {"N": 2, "Text": "c"}]
    if not sensitive:
        (tmp_path / "2.csv").write_text("n,TEXT,text\n3,d,e\n")
        fails(
            started(tmp_path, format="csv", schema=schema, header=True, settle=0),
            BadFile,
            "Text is there several times",
        )


def test_the_schema_of_a_parquet_file_that_is_there_is_found(tmp_path: Path) -> None:
    with pytest.raises(flux.UsageError, match=r"no parquet file in .* yet: give schema"):
        flux.files(tmp_path)
    (tmp_path / "0").write_bytes(b"half")
    pq.write_table(pa.table({"s": pa.array(["x"]).dictionary_encode()}), tmp_path / "1")
    assert flux.files(tmp_path).declared == pa.schema([("s", pa.string())])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"format": "orc"}, "one of parquet, csv, json"),
        ({"partitions": 0}, "1 to 4096"),
        ({"partitions": True}, "1 to 4096"),
        ({"maxFilesPerTrigger": 1}, "no triggers"),
        ({"latestFirst": "true"}, "the order in which they are found"),
        ({"CLEANSOURCE": "delete"}, "nothing is removed"),
        ({"what": 1}, "no option 'what'"),
        ({"header": True}, "for format='csv'"),
        ({"format": "csv", "header": 1}, "True or False"),
        ({"format": "csv", "sep": "||"}, "one character"),
        ({"format": "csv", "sep": ""}, "one character"),
        ({"format": "csv", "schema": None}, "need a schema"),
        ({"format": "csv", "schema": "a array<int>"}, "CSV file cannot hold column a"),
        ({"format": "json", "schema": "a struct<b: date>"}, "JSON file cannot hold column a"),
        ({"schema": 5}, "DDL"),
        ({"schema": pa.schema([])}, "names no column"),
        ({"pathGlobFilter": "*.{a,b}"}, "pattern"),
        ({"onChanged": "warn"}, "'fail' or 'ignore'"),
        ({"poll": 0}, "poll must be"),
        ({"settle": -1}, "settle must be"),
        ({"ledger": "s3://bucket/x"}, "disk or network mount"),
        ({"recursiveFileLookup": 1}, "True or False"),
    ],
)
def test_wrong_options_are_refused_at_once(tmp_path: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(flux.UsageError, match=told):
        flux.files(tmp_path, **{"schema": ROWS, **options})


@pytest.mark.parametrize("path", ["", None, 5])
def test_a_path_that_is_none_is_refused(path: Any) -> None:
    with pytest.raises(flux.UsageError, match="path of a folder"):
        flux.files(path, schema=ROWS)


def test_a_file_system_without_a_ledger_is_refused() -> None:
    with pytest.raises(flux.UsageError, match="ledger="):
        flux.files("mock://host/folder", schema=ROWS)


def test_a_folder_that_does_not_answer_makes_its_partitions_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hold up a look at the folder, as on a mount whose server is away."""
    monkeypatch.setattr(threaded_reader, "SILENCE_S", 0.1)
    answers = threading.Event()
    answers.set()
    listed = Watch.listed

    def slowly(watch: Watch) -> Any:
        assert answers.wait(LONG_S)
        return listed(watch)

    monkeypatch.setattr(Watch, "listed", slowly)
    reader = started(tmp_path, partitions=2)
    both = [reader.read(partition, None) for partition in range(2)]
    try:
        until(lambda: all(rows.pauses() for rows in both), "looks at the folder")
        answers.clear()
        until(lambda: all(next(rows) is flux.SILENT for rows in both), "silence")
        before = [rows.pauses() for rows in both]
        answers.set()
        until(lambda: all(rows.pauses() > was for rows, was in zip(both, before, strict=True)), "looks again")
        assert [next(rows) for rows in both] == [None, None]
    finally:
        answers.set()
        for rows in both:
            rows.close()


def patient(folder: Path, **options: Any) -> FilesReader:
    """Start a reader of a folder without which results go on."""
    reader = started(folder, **options)
    reader.configure(SourceSettings(may_be_silent=True, ignore_missing_files=True))
    return reader


def test_a_folder_that_cannot_be_read_is_silent_where_results_go_on_without_it_and_no_row_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Take the folder away in the middle of a file. The rest of the file is not left out for good, although the rest of
    a corrupt file would be."""
    folder, away, read = tmp_path / "in", tmp_path / "away", ParquetFormat.read
    folder.mkdir()

    def on_a_mount(format: ParquetFormat, *where: Any) -> Any:
        for batch in read(format, *where):
            for first in range(0, batch.num_rows, 2):
                if not folder.exists():
                    raise BadFile("input/output error")
                yield batch.slice(first, 2)

    monkeypatch.setattr(ParquetFormat, "read", on_a_mount)
    monkeypatch.setattr(threaded_reader, "AHEAD_BYTES", 0)
    write(folder, "a.parquet", 0, rows=10, group=2)
    write(folder, "b.parquet", 10, rows=2)
    reader = patient(folder, ledger=tmp_path)
    reader._corrupt = True
    rows = reader.read(0, None)
    try:
        found = [value for value, _ in take(rows, 2)]
        before = time.monotonic()  # its thread may notice at once
        os.rename(folder, away)
        end = before + LONG_S
        while (taken := next(rows)) is not flux.SILENT:
            found += [] if taken is None else taken.batch.column(0).to_pylist()
            assert time.monotonic() < end
        assert found == [*range(len(found))]
        assert 2 <= len(found) < 10
        assert rows._silence.startswith(f"the folder {folder} is not there")
        since = rows._asked_in_vain_since()
        assert since is not None
        assert since >= before
        os.rename(away, folder)
        write(folder, "c.parquet", 12)
        found += [value for value, _ in take(rows, 15 - len(found))]
        assert found == [*range(15)]
        until(lambda: next(rows) is None, "an answer")
        assert rows._unanswered_at is None
        assert reader.unread_files() == {"incomplete": {}, "missing": {}, "corrupt": {}}
    finally:
        rows.close()


def test_a_file_that_was_gone_with_its_folder_and_is_there_again_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bring the folder back before the reader asks whether the file went with the folder."""
    where, fails = Watch.where, iter([True, False, True])

    def on_a_mount(watch: Watch, found: FoundFile) -> str:
        if next(fails, False):
            raise gone(found.name)
        return where(watch, found)

    monkeypatch.setattr(Watch, "where", on_a_mount)
    write(tmp_path, "a.parquet", 0)
    write(tmp_path, "b.parquet", 3)
    rows = patient(tmp_path).read(0, None)
    try:
        assert [value for value, _ in take(rows, 6)] == [0, 1, 2, 3, 4, 5]
    finally:
        rows.close()


@pytest.mark.parametrize("ignores", [False, True])
def test_a_file_that_could_not_be_read_for_a_moment_is_no_bad_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ignores: bool
) -> None:
    """Bring the mount back before the reader asks for the folder."""
    read, fails = ParquetFormat.read, iter([True])

    def on_a_mount(format: ParquetFormat, *where: Any) -> Any:
        for batch in read(format, *where):
            yield batch.slice(0, 1)
            if next(fails, False):
                raise BadFile("input/output error")
            yield batch.slice(1)

    monkeypatch.setattr(ParquetFormat, "read", on_a_mount)
    write(tmp_path, "a.parquet", 0)
    write(tmp_path, "b.parquet", 3)
    reader = patient(tmp_path)
    reader._corrupt = ignores
    rows = reader.read(0, None)
    try:
        assert [value for value, _ in take(rows, 6)] == [0, 1, 2, 3, 4, 5]
        assert reader.unread_files() == {"incomplete": {}, "missing": {}, "corrupt": {}}
    finally:
        rows.close()


def test_a_file_that_is_bad_at_the_same_row_twice_is_left_out_in_spite_of_patience(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = ParquetFormat.read

    def damaged(format: ParquetFormat, files: Any, path: str, skip: int) -> Any:
        for batch in read(format, files, path, skip):
            if path.endswith("a.parquet"):
                raise BadFile(f"{path}: damaged")
            yield batch

    monkeypatch.setattr(ParquetFormat, "read", damaged)
    write(tmp_path, "a.parquet", 0)
    write(tmp_path, "b.parquet", 3)
    reader = patient(tmp_path)
    reader._corrupt = True
    rows = reader.read(0, None)
    try:
        assert [value for value, _ in take(rows, 3)] == [3, 4, 5]
        assert list(reader.unread_files()["corrupt"]) == ["a.parquet"]
    finally:
        rows.close()
    fails(patient(tmp_path), BadFile, "damaged")


def test_a_reader_that_begins_while_its_folder_cannot_be_read_waits_for_its_ledger(tmp_path: Path) -> None:
    folder, away = tmp_path / "in", tmp_path / "away"
    folder.mkdir()
    write(folder, "a.parquet", 0)
    reader = patient(folder)
    rows = reader.read(0, None)
    (*_, (_, position)) = take(rows, 3)
    rows.close()
    os.rename(folder, away)
    later = copy.copy(reader)
    later._watch = None
    waits = later.read(0, RowStart(FILE_ROWS, position, position))
    try:
        until(lambda: next(waits) is flux.SILENT, "silence")
        os.rename(away, folder)
        write(folder, "b.parquet", 3)
        assert [value for value, _ in take(waits, 3)] == [3, 4, 5]
    finally:
        waits.close()


def test_other_errors_of_a_folder_end_the_query_as_ever(tmp_path: Path) -> None:
    reader = started(tmp_path)
    reader.configure(SourceSettings(may_be_silent=True))
    (tmp_path / "day=1").mkdir()
    fails(reader, FileError, "partitioned table")


def test_a_partition_has_paused_when_the_folder_was_looked_at_and_not_when_it_asks_again(tmp_path: Path) -> None:
    """Count looks, not questions: looks at a slow store are rare, and a file may have come since the last one."""
    reader = started(tmp_path, partitions=2, poll="10ms")
    watch = reader._watched()
    both = [reader.read(partition, None) for partition in range(2)]
    try:
        until(lambda: all(rows.pauses() for rows in both), "looks at the folder")
        with watch._lock:
            watch._look_at = time.monotonic() + LONG_S
        time.sleep(0.05)
        before = [rows.pauses() for rows in both]
        time.sleep(0.1)
        assert [rows.pauses() for rows in both] == before
    finally:
        for rows in both:
            rows.close()
