"""The output log of a query: its sink keeps the contract of sinks, and its readers go on by cursor."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from flux.dataflow.sink import Position
from flux.errors import QueryFailed, UsageError
from flux.eventlog.streams import Retention
from flux.outputs.catalogue import NoSuchOutput, OutputCatalogue, OutputExists
from flux.outputs.cursor import CursorGone, cursor_of
from flux.outputs.reader import OutputReader
from flux.outputs.row_text import json_rows
from flux.outputs.sink import OutputLogSink
from flux.testing import check_sink
from flux.vault.location import Folder
from tests.flux.results import COLUMNS, opened_sink, results, written


@pytest.fixture(autouse=True)
def no_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave flushes out: power is lost in the model alone, and hundreds of them take a minute on a busy disk."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(os, "fdatasync", lambda file: None)


def test_the_sink_keeps_the_contract_of_sinks(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)

    def outside() -> list[pa.RecordBatch]:
        if not (tmp_path / "outputs.json").exists():
            return []
        reader = OutputReader(str(tmp_path), "delays")
        try:
            return reader.after("oldest", 1 << 20).batches
        finally:
            reader.close()

    batches = [results(1, 2), results(3), results(4, 5, 6), results(7)]
    check_sink(OutputLogSink(str(tmp_path), "delays"), batches, outside)


def test_a_primary_that_wakes_late_changes_nothing_and_the_rightful_one_goes_on(tmp_path: Path) -> None:
    late = opened_sink(tmp_path)
    written(late, 0, results(1))
    rightful = opened_sink(tmp_path)
    assert rightful.committed(0) == 1
    with pytest.raises(QueryFailed, match="taken over") as raised:
        written(late, 1, results(2))
    assert late.is_transient(raised.value)
    written(late, 1, results(2))  # the second attempt: it does not know yet that it was given up
    with pytest.raises(QueryFailed, match="taken over"):
        written(rightful, 1, results(2))
    assert rightful.committed(0) == 2
    written(rightful, 1, results(2))
    written(rightful, 2, results(3))
    assert _values(tmp_path) == [1, 2, 3]


def test_joined_batches_keep_a_number_each(tmp_path: Path) -> None:
    sink = opened_sink(tmp_path)
    given = [(Position(0, at), results(at)) for at in range(5)]
    sink.write_joined(given)
    assert sink.committed(0) == 5
    sink.write_joined([*given[3:], (Position(0, 5), results(5))])
    assert _values(tmp_path) == [0, 1, 2, 3, 4, 5]


def test_a_torn_record_at_the_end_is_written_again(tmp_path: Path) -> None:
    sink = opened_sink(tmp_path)
    written(sink, 0, results(1))
    written(sink, 1, results(*range(100)))
    (log,) = tmp_path.glob("outputs/*/log-0")
    (segment,) = log.glob("journal-*")
    segment.write_bytes(segment.read_bytes()[:-3])
    for mark in log.glob("published-*"):
        mark.unlink()  # it was not flushed, and the machine has crashed
    again = opened_sink(tmp_path)
    assert again.committed(0) == 1
    written(again, 1, results(*range(100)))
    assert _values(tmp_path) == [1, *range(100)]


def test_another_life_without_a_checkpoint_follows_behind(tmp_path: Path) -> None:
    written(opened_sink(tmp_path), 0, results(1, 2))
    other = opened_sink(tmp_path, query="query-2")
    assert other.committed(0) == 0
    written(other, 0, results(1, 2))
    assert _values(tmp_path) == [1, 2, 1, 2]


def test_an_output_that_was_removed_ends_its_writer_and_is_not_made_again(tmp_path: Path) -> None:
    sink = opened_sink(tmp_path)
    written(sink, 0, results(1))
    OutputCatalogue(Folder(tmp_path)).remove("delays")
    with pytest.raises((QueryFailed, OSError)):
        written(sink, 1, results(2))
    with pytest.raises(QueryFailed, match="removed while a query wrote to it"):
        sink.committed(0)
    assert not list(tmp_path.glob("outputs/*/log-0"))
    with pytest.raises(NoSuchOutput, match="no query 'delays'"):
        OutputReader(str(tmp_path), "delays")


def test_a_query_that_starts_again_finds_its_own_output_or_is_refused(tmp_path: Path) -> None:
    sink = opened_sink(tmp_path)
    kept = {"output": OutputCatalogue(Folder(tmp_path)).get("delays").id}
    sink.prepare(1, kept)
    other = OutputLogSink(str(tmp_path), "delays")
    other.check(pa.schema([pa.field("value", pa.string())]))
    with pytest.raises(OutputExists, match="with columns `value` BIGINT, mode append and 1 partitions, and not with"):
        other.prepare(1, None)
    OutputCatalogue(Folder(tmp_path)).remove("delays")
    with pytest.raises(UsageError, match="was removed and registered again"):
        sink.prepare(1, kept)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda at: OutputLogSink(at, "a b"), "name: expected letters"),
        (lambda at: OutputLogSink(at, "delays", mode="complete"), "expected mode 'append' or 'update', got 'complete'"),
        (lambda at: OutputLogSink(at, "delays", Retention(bytes=3)), "retain.bytes: expected"),
    ],
    ids=["name", "mode", "retain"],
)
def test_an_output_that_cannot_be_is_refused_at_the_start(tmp_path: Path, make: object, said: str) -> None:
    tmp_path.chmod(0o700)
    with pytest.raises(UsageError, match=said):
        make(str(tmp_path)).check(COLUMNS)  # type: ignore[operator]


def test_columns_with_dictionaries_are_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    coded = pa.schema([pa.field("s", pa.list_(pa.dictionary(pa.int32(), pa.string())))])
    with pytest.raises(UsageError, match="column 's' has type"):
        OutputLogSink(str(tmp_path), "delays").check(coded)


# ---- readers


def test_a_reader_goes_on_from_its_cursor_also_within_a_record(tmp_path: Path) -> None:
    sink = opened_sink(tmp_path)
    written(sink, 0, results(*range(10)))
    first = OutputReader(str(tmp_path), "delays").after("oldest", 4)
    assert _of(first.batches) == [0, 1, 2, 3]
    rest = OutputReader(str(tmp_path), "delays").after(str(first.cursor))
    assert _of(rest.batches) == [4, 5, 6, 7, 8, 9]
    assert rest.missed == []
    newest = OutputReader(str(tmp_path), "delays")
    assert newest.after("newest").cursor == rest.cursor
    written(sink, 1, results(10))
    assert _of(newest.after(str(rest.cursor)).batches) == [10]


def test_a_reader_that_comes_late_is_told_what_it_has_missed(tmp_path: Path) -> None:
    sink = opened_sink(tmp_path, retain=Retention("1 second", 1 << 20))
    wide = np.random.default_rng(1).integers(1 << 62, size=(12, 1 << 15))  # 256 KB each
    reader = OutputReader(str(tmp_path), "delays")
    cursor = str(reader.after("oldest").cursor)
    for at, values in enumerate(wide):
        written(sink, at, pa.record_batch([pa.array(values)], schema=COLUMNS))
    found = reader.after(cursor, 10)
    (missed,) = found.missed
    assert (missed.partition, missed.first) == (0, 0)
    assert missed.next == found.pieces[0].first > 0
    assert missed.next % (1 << 15) == 0
    assert found.cursor.positions == (missed.next + 10,)


def test_a_cursor_of_an_earlier_output_of_the_same_name_is_gone(tmp_path: Path) -> None:
    written(opened_sink(tmp_path), 0, results(1))
    cursor = str(OutputReader(str(tmp_path), "delays").after().cursor)
    OutputCatalogue(Folder(tmp_path)).remove("delays")
    opened_sink(tmp_path)
    with pytest.raises(CursorGone, match="Begin with after=oldest"):
        OutputReader(str(tmp_path), "delays").after(cursor)


@pytest.mark.parametrize(
    "text",
    ["", "1", "oldest ", "../../etc", f"{'a' * 32}", f"{'a' * 32}-", f"{'a' * 32}--1", f"{'a' * 32}-1.2",
     f"{'a' * 32}-٣", f"{'a' * 32}-{1 << 62}", f"{'a' * 32}-1{'.1' * 70}", f"{'a' * 32}-1\n", "a" * 100_000],
)  # fmt: skip
def test_a_text_that_is_no_cursor_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="after: expected a cursor"):
        cursor_of(text, "a" * 32, 1)


def test_rows_are_json_of_columns() -> None:
    window = pa.array(
        [{"start": 0, "end": None}], pa.struct([("start", pa.timestamp("us", "UTC")), ("end", pa.int64())])
    )
    batch = pa.record_batch([pa.array(['a"\n\x01é']), pa.array([float("inf")]), window], ["text", "x", "window"])
    assert json.loads(json_rows(batch)) == [
        {"text": 'a"\n\x01é', "x": None, "window": {"start": "1970-01-01T00:00:00.000000Z", "end": None}}
    ]
    assert b"\n" not in json_rows(batch)
    assert json_rows(batch.slice(1)) == b"[]"


def _values(folder: Path) -> list[int]:
    reader = OutputReader(str(folder), "delays")
    try:
        return _of(reader.after("oldest").batches)
    finally:
        reader.close()


def _of(batches: list[pa.RecordBatch]) -> list[int]:
    return [value for batch in batches for value in batch.column("value").to_pylist()]
