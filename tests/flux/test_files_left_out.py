"""Files that are linked, incomplete, bad or gone: each file once, and rows that are left out are left out in every
life."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from folders_read import LONG_S, drain, fails, gives_nothing, numbers, started, take, write
from pyarrow import fs

import flux
from flux.connectors.files.completion import AGAIN_S, SHOWN_S, Completion
from flux.connectors.files.errors import BadFile, FileError, FileGone, gone
from flux.connectors.files.formats import ParquetFormat
from flux.connectors.files.listing import FoundFile, Rules, listed
from flux.connectors.files.reader import FILE_ROWS
from flux.connectors.files.source import FilesReader
from flux.dataflow.source import RowStart
from flux.dataflow.source_reader import SourceSettings
from flux.exchange.slices import ROTATION_ROWS

LOCAL = fs.LocalFileSystem()


def names(folder: Path, **rules: Any) -> list[str]:
    return sorted(listed(LOCAL, str(folder), Rules(**rules)))


def test_links_give_each_file_once_under_its_own_name(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside / "day-1", inside / "day-2" / "deep", outside):
        folder.mkdir(parents=True)
        (folder / f"{folder.name}.parquet").touch()
    (inside / "a-latest").symlink_to("day-1")
    (inside / "day-2" / "loop").symlink_to("..")
    (inside / "day-2" / "self").symlink_to(".")
    (inside / "circle").symlink_to("circle")
    (inside / "nowhere").symlink_to("nothing")
    (inside / "elsewhere").symlink_to(outside)
    (outside / "back").symlink_to(inside)
    (inside / "a-file.parquet").symlink_to("day-1/day-1.parquet")
    (inside / "only.parquet").symlink_to(outside / "out.parquet")
    (inside / "hidden").symlink_to("_old")
    os.link(inside / "day-1" / "day-1.parquet", inside / "day-1" / "twice.parquet")
    expected = ["day-1/day-1.parquet", "day-2/deep/deep.parquet", "elsewhere/out.parquet"]
    assert names(inside, recursive=True) == expected
    (inside / "a-latest").unlink()
    (inside / "a-latest").symlink_to("day-2")
    assert names(inside, recursive=True) == expected, "whatever link there is, a file keeps its name"
    assert names(inside) == ["a-file.parquet", "only.parquet"], "its own name is not below this folder"
    assert names(inside / "day-2" / "self" / "deep") == ["deep.parquet"]


def test_a_link_to_a_folder_of_a_day_does_not_read_it_twice(tmp_path: Path) -> None:
    (tmp_path / "day-1").mkdir()
    (tmp_path / "latest").symlink_to("day-1")
    (tmp_path / "day-1" / "loop").symlink_to("..")
    write(tmp_path / "day-1", "a.parquet", 0)
    reader = started(tmp_path, recursiveFileLookup=True)
    rows = reader.read(0, None)
    assert [n for n, _ in take(rows, 3)] == [0, 1, 2]
    (tmp_path / "day-2").mkdir()
    write(tmp_path / "day-2", "a.parquet", 3)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("day-2")
    assert [n for n, _ in take(rows, 3)] == [3, 4, 5]
    gives_nothing(rows)
    rows.close()


def test_a_second_name_of_a_file_is_no_other_file(tmp_path: Path) -> None:
    first = write(tmp_path, "b.parquet", 0)
    rows = started(tmp_path).read(0, None)
    take(rows, 3)
    os.link(first, tmp_path / "a.parquet")
    gives_nothing(rows)
    rows.close()


def test_a_name_that_is_no_utf8_is_told(tmp_path: Path) -> None:
    with open(os.fsencode(tmp_path) + b"/a\xff.parquet", "wb"):
        pass
    fails(started(tmp_path), FileError, r"a\\xff.parquet' is no UTF-8.*pathGlobFilter")
    write(tmp_path, "b.parquet", 0)
    assert numbers(started(tmp_path, pathGlobFilter="b*"), 3) == [0, 1, 2]


def found(size: int, mtime_ns: int = 1) -> FoundFile:
    return FoundFile("a", size, mtime_ns, 7)


def test_a_file_is_looked_at_when_it_rests_and_bad_when_it_rests_too_long() -> None:
    completion = Completion(1.0, 300.0)
    assert not completion.is_due(found(1), 10.0)
    assert not completion.is_due(found(2), 10.9)
    assert not completion.is_due(found(2), 11.8), "it has grown since"
    assert completion.is_due(found(2), 11.9)
    assert not completion.note("a", "no footer", 11.9)
    assert not completion.is_due(found(2), 11.9 + AGAIN_S - 1)
    assert completion.is_due(found(2), 11.9 + AGAIN_S)
    assert completion.note("a", "no footer", 11.9 + AGAIN_S), "a warning"
    assert not completion.note("a", "no footer", 12.0 + 2 * AGAIN_S), "and no other"
    assert completion.bad(310.8) == {}
    assert completion.is_due(found(2), 310.9), "once more before it is bad"
    completion.note("a", "a bad footer", 310.9)
    assert completion.bad(310.9) == {found(2): "a bad footer"}
    assert not completion.is_due(found(2, mtime_ns=2), 311.0)
    assert completion.bad(999.0) == {}, "somebody works on it"
    completion.keep([])
    assert not len(completion)


def test_only_files_that_stay_incomplete_are_shown() -> None:
    completion = Completion(0.0, 300.0)
    for now, shown in ((1.0, {}), (1.0 + SHOWN_S, {"a": "no footer"})):
        if completion.is_due(found(1), now):
            completion.note("a", "no footer", now)
        assert completion.lacking() == shown


def damaged(folder: Path, name: str = "bad.parquet") -> Path:
    """Write a file that ends like one of parquet, with a damaged footer."""
    path = write(folder, name, 0)
    data = bytearray(path.read_bytes())
    data[-30:-8] = b"\xff" * 22
    path.write_bytes(data)
    return path


def quick(folder: Path, kept: Any = None, **options: Any) -> FilesReader:
    reader = started(folder, kept=kept, **options)
    reader.configure(SourceSettings(bad_file_after_s=0.15))
    return reader


@pytest.mark.parametrize("kind", ["damaged", "text"])
def test_a_file_that_never_is_complete_is_seen_and_then_an_error(tmp_path: Path, kind: str) -> None:
    if kind == "damaged":
        damaged(tmp_path)
        why = "its footer cannot be read"
    else:
        (tmp_path / "bad.parquet").write_text("n\n1\n2\n3\n")
        why = "it has no footer"
    write(tmp_path, "good.parquet", 5)
    reader = started(tmp_path)
    rows = reader.read(0, None)
    assert [n for n, _ in take(rows, 3)] == [5, 6, 7]
    gives_nothing(rows)
    assert rows.lag() == (1, 2), "one is there that is not read"
    rows.close()
    reader = quick(tmp_path)
    fails(
        reader,
        BadFile,
        rf"bad\.parquet: {why}.*has not changed for 0\.15 s \(spark\.flux\.files\.badAfter\).*ignoreCorruptFiles",
    )
    (tmp_path / "bad.parquet").unlink()
    assert numbers(quick(tmp_path, kept={"ledger": reader.id}), 3) == [5, 6, 7], "its removal is a way out"


def test_a_file_that_stays_incomplete_is_shown_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flux.connectors.files.completion.SHOWN_S", 0.0)
    damaged(tmp_path)
    reader = started(tmp_path)
    (shown,) = reader.unread_files()["incomplete"].items()
    assert shown[0] == "bad.parquet"
    assert shown[1].startswith("its footer cannot be read")


def test_a_file_that_never_is_complete_is_put_aside_by_name(tmp_path: Path) -> None:
    bad = damaged(tmp_path)
    (tmp_path / "empty.parquet").touch()
    reader = quick(tmp_path, ignoreCorruptFiles=True)
    rows = reader.read(0, None)
    drained_until(rows, lambda: reader.unread_files()["corrupt"])
    assert list(reader.unread_files()["corrupt"]) == ["bad.parquet"]
    assert rows.lag() == (0, 0)
    write(tmp_path, "good.parquet", 5)
    assert [n for n, _ in take(rows, 3)] == [5, 6, 7]
    rows.close()
    later = quick(tmp_path, kept={"ledger": reader.id})
    assert numbers(later, 3) == [5, 6, 7], "it stays aside, also where others would be an error"
    assert list(later.unread_files()["corrupt"]) == ["bad.parquet"]
    write(tmp_path, "bad.parquet", 8)
    assert bad.exists()
    assert numbers(later, 6) == [5, 6, 7, 8, 9, 10], "a mended one is read"
    assert later.unread_files()["corrupt"] == {}


def drained_until(rows: Any, over: Any) -> None:
    end = time.monotonic() + LONG_S
    while not over():
        assert time.monotonic() < end
        assert next(rows) is None
        time.sleep(0.002)


def test_the_rest_of_a_bad_file_is_left_out_in_every_life(tmp_path: Path) -> None:
    """Rows of whole blocks before the bad row are given, as Spark gives rows that it has read."""
    write(tmp_path, "a.parquet", 0, rows=4, group=2)
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    write(tmp_path, "b.parquet", 10)
    os.utime(tmp_path / "a.parquet", (1, 1))
    reader = started(tmp_path)
    fails(broken(tmp_path, data, reader), BadFile, r"behind row 0.*onChanged='ignore'.*ignoreCorruptFiles=True", [0, 0])
    again = started(tmp_path, kept={"ledger": reader.id}, ignoreCorruptFiles=True, onChanged="ignore")
    assert numbers(again, 3) == [10, 11, 12]
    (why,) = again.unread_files()["corrupt"].values()
    assert why.startswith("from row 0 on: ")
    (tmp_path / "a.parquet").write_bytes(data)
    mended = started(tmp_path, kept={"ledger": reader.id}, onChanged="ignore")
    assert numbers(mended, 3) == [10, 11, 12], "another life has the same rows, though the file is whole now"


def broken(folder: Path, data: bytes, reader: FilesReader) -> FilesReader:
    """Let the reader find the file whole, and then destroy its pages; size and time stay."""
    numbers(reader, 1)
    path = folder / "a.parquet"
    about = path.stat()
    path.write_bytes(data[:4] + b"\xff" * 20 + data[24:])
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    return reader


def test_text_that_does_not_fit_from_some_row_on_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flux.connectors.files.formats.BLOCK_BYTES", 1000)
    (tmp_path / "a.csv").write_text("1\n" * 40_000 + "x\n" + "2\n" * 3)
    (tmp_path / "b.csv").write_text("3\n")
    os.utime(tmp_path / "a.csv", (1, 1))
    reader = started(tmp_path, format="csv", settle=0, ignoreCorruptFiles="true")
    read = numbers(reader, 1, start=None)
    assert read[0] == 1
    rows = reader.read(0, None)
    values: list[int] = []
    end = time.monotonic() + LONG_S
    while 3 not in values and time.monotonic() < end:
        taken = next(rows)
        values += [] if taken is None else taken.batch.column(0).to_pylist()
    rows.close()
    ones = values.count(1)
    assert values == [1] * ones + [3]
    assert 30_000 < ones <= 40_000
    (why,) = reader.unread_files()["corrupt"].values()
    assert why.startswith(f"from row {ones} on: ")
    later = started(tmp_path, format="csv", settle=0, kept={"ledger": reader.id})
    assert numbers(later, 2, start=[0, ones - 1]) == [1, 3]
    assert numbers(later, 1, start=[0, ones]) == [3]


@pytest.mark.parametrize("changed", ["fail", "ignore"])
def test_a_file_that_is_gone_is_no_dead_end(tmp_path: Path, changed: str) -> None:
    gone = write(tmp_path, "a.parquet", 0)
    reader = started(tmp_path)
    numbers(reader, 3)
    write(tmp_path, "b.parquet", 10)
    gone.unlink()
    kept = {"ledger": reader.id}
    told = r"a\.parquet was found, and is gone.*ignoreMissingFiles=True, which leaves out"
    fails(started(tmp_path, kept=kept, onChanged=changed), FileGone, told)
    again = started(tmp_path, kept=kept, onChanged=changed, ignoreMissingFiles=True)
    assert numbers(again, 3) == [10, 11, 12]
    assert list(again.unread_files()["missing"]) == ["a.parquet"]
    write(tmp_path, "a.parquet", 0)
    os.utime(tmp_path / "a.parquet", (1, 1))
    assert numbers(started(tmp_path, kept=kept, onChanged="ignore"), 3) == [10, 11, 12], "the same in another life"


def test_rows_are_known_by_file_and_row(tmp_path: Path) -> None:
    for number in range(4):
        write(tmp_path, f"{number}.parquet", 10 * number, rows=5)
    for partition in range(2):
        rows = started(tmp_path, partitions=2).read(partition, None)
        found: list[int] = []
        while len(found) < 10:
            taken = next(rows)
            found += [] if taken is None else taken.numbers.tolist()
        rows.close()
        assert found == [*range(5), *range(FILE_ROWS, FILE_ROWS + 5)], "the first and the second file of the partition"


@pytest.mark.parametrize("partitions", [1, 2, 3, 5, 12, 17, 32, 100, 4096])
def test_small_files_go_to_all_partitions_of_a_stage_without_a_key(partitions: int) -> None:
    turns = {file * FILE_ROWS // ROTATION_ROWS % partitions for file in range(partitions)}
    assert len(turns) == partitions
    assert FILE_ROWS % ROTATION_ROWS == 0


def test_a_file_whose_rows_are_applied_is_not_needed_any_more(tmp_path: Path) -> None:
    gone = write(tmp_path, "a.parquet", 0)
    reader = started(tmp_path)
    rows = reader.read(0, None)
    (position,) = {tuple(position) for _, position in take(rows, 3)}
    rows.close()
    gone.unlink()
    write(tmp_path, "b.parquet", 10)
    assert numbers(reader, 3, start=RowStart(3, [*position])) == [10, 11, 12]
    fails(started(tmp_path, kept={"ledger": reader.id}), FileGone, "is gone", RowStart(2, None))


def test_rows_behind_a_file_that_is_half_gone_are_not_taken_for_its_rows(tmp_path: Path) -> None:
    """Number the next file anew: one row of three is applied everywhere, and the other two perhaps somewhere."""
    gone = write(tmp_path, "a.parquet", 0)
    reader = started(tmp_path, ignoreMissingFiles=True)
    numbers(reader, 3)
    gone.unlink()
    write(tmp_path, "b.parquet", 10)
    rows = reader.read(0, RowStart(1, None))
    while (taken := next(rows)) is None:
        time.sleep(0.002)
    rows.close()
    assert taken.batch.column(0).to_pylist() == [10, 11, 12]
    assert taken.numbers.tolist() == [FILE_ROWS + row for row in range(3)]
    (why,) = reader.unread_files()["missing"].values()
    assert why.startswith("from row 1 on: ")


def test_a_location_of_a_release_that_counted_rows_is_refused(tmp_path: Path) -> None:
    reader = started(tmp_path)
    with pytest.raises(flux.UsageError, match=r"counted the rows of files.*another checkpointLocation"):
        reader.prepare({"ledger": reader.id})


def test_what_the_session_ignores_is_ignored_unless_the_source_says_otherwise(tmp_path: Path) -> None:
    gone = write(tmp_path, "a.parquet", 0)
    reader = started(tmp_path)
    numbers(reader, 3)
    write(tmp_path, "b.parquet", 10)
    gone.unlink()
    strict = started(tmp_path, kept={"ledger": reader.id}, ignoreMissingFiles=False)
    strict.configure(SourceSettings(ignore_missing_files=True))
    fails(strict, FileGone, "is gone")
    lax = started(tmp_path, kept={"ledger": reader.id})
    lax.configure(SourceSettings(ignore_missing_files=True))
    assert numbers(lax, 3) == [10, 11, 12]


def test_a_file_that_is_gone_while_it_is_opened_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "a.parquet", 0)
    reader = started(tmp_path)
    watch = reader._watched()
    monkeypatch.setattr(watch, "where", lambda found: (path.unlink(), str(path))[1])
    fails(reader, FileGone, "is gone")


def test_two_lives_that_disagree_are_told(tmp_path: Path) -> None:
    from flux.connectors.files.watch import CORRUPT, MISSING, EarlyEnd
    from flux.connectors.ledger import LedgerBroken

    write(tmp_path, "a.parquet", 0)
    reader = started(tmp_path, ignoreMissingFiles=True)
    numbers(reader, 3)
    mine, others = reader._watched(), started(tmp_path, kept={"ledger": reader.id})._watched()
    others.known(0)
    mine.end(0, EarlyEnd(2, CORRUPT, "why"), 0, mine.enter(0))
    others.end(0, EarlyEnd(2, MISSING, "the same"), 0, other := others.enter(0))
    with pytest.raises(LedgerBroken, match=r"a\.parquet: 2 rows of it count, but this reader can give 1: why not"):
        others.end(0, EarlyEnd(1, MISSING, "why not"), 0, other)


def test_a_reader_that_was_given_up_ends_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away the mount of the first reader, while the next one, in another process, gives all rows."""
    from flux.connectors.ledger import LedgerBroken

    path = write(tmp_path, "a.parquet", 0, rows=100, group=10)
    reader = started(tmp_path, ignoreMissingFiles=True)
    kept = {"ledger": reader.id}
    blocked, opened = threading.Event(), threading.Event()

    def lost(self: Any, files: Any, path: str, skip: int) -> Any:
        opened.set()
        blocked.wait(LONG_S)
        raise gone(path)

    with monkeypatch.context() as patched:
        patched.setattr(ParquetFormat, "read", lost)
        given_up = reader.read(0, None)
        assert opened.wait(LONG_S)
    later = started(tmp_path, kept=kept, ignoreMissingFiles=True)
    assert numbers(later, 100) == [*range(100)]
    blocked.set()
    with pytest.raises(
        LedgerBroken, match=r"a\.parquet cannot be left out from row 0 on, it is gone: a newer reader reads"
    ):
        drain(given_up)
    given_up.close()
    assert path.exists()
    assert numbers(started(tmp_path, kept=kept, ignoreMissingFiles=True), 100) == [*range(100)], "nor in a third life"


@pytest.mark.parametrize("newest", [[0, 30], [1, 0], [1, 5]])
def test_a_file_of_which_one_replica_has_more_rows_is_not_left_out(tmp_path: Path, newest: list[int]) -> None:
    path = write(tmp_path, "a.parquet", 0, rows=100, group=10)
    reader = started(tmp_path, ignoreMissingFiles=True)
    numbers(reader, 30)
    path.unlink()
    write(tmp_path, "b.parquet", 1000)
    told = r"a\.parquet is needed from row 20 on, in spite of ignoreMissingFiles: it is gone\. .*only a part of it has"
    fails(reader, FileGone, told, RowStart(20, [0, 20], newest))
    assert numbers(reader, 3, start=RowStart(20, [0, 20], [0, 20])) == [1000, 1001, 1002], (
        "all replicas have the same rows"
    )


@pytest.mark.parametrize("last", ["bad", "empty"])
def test_files_without_rows_do_not_count_in_the_lag(tmp_path: Path, last: str) -> None:
    (tmp_path / "a.csv").write_text("n\n1\n")
    (tmp_path / "b.csv").write_text("n\nx\n" if last == "bad" else "n\n")
    os.utime(tmp_path / "a.csv", (1, 1))
    reader = started(tmp_path, format="csv", header=True, settle=0, ignoreCorruptFiles=True)
    rows = reader.read(0, None)
    take(rows, 1)
    drained_until(rows, lambda: rows.lag() == (2, 2))
    rows.close()


def test_the_reason_of_a_file_that_is_left_out_is_short(tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text("x\n")
    reader = started(tmp_path, format="csv", settle=0, ignoreCorruptFiles=True)
    rows = reader.read(0, None)
    drained_until(rows, lambda: reader.unread_files()["corrupt"])
    rows.close()
    ((name, why),) = reader.unread_files()["corrupt"].items()
    assert name == "bad.csv"
    assert re.fullmatch(
        r"from row 0 on: In CSV column #0: (Row #1: )?CSV conversion error to int64: invalid value 'x'", why
    )


def test_options_that_are_no_flags_are_refused(tmp_path: Path) -> None:
    for option in ("ignoreMissingFiles", "ignoreCorruptFiles"):
        with pytest.raises(Exception, match=f"{option} must be True or False"):
            started(tmp_path, **{option: 1})
