"""Readers of Python data sources that are closed while they have no rows, and the calls that a stream's data source
gets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

import flux

#: Readers run in threads.
LONG_S = 30.0


class Offsets(DataSource):
    """A stream whose end is one more each time it is asked. Offset n has the row n, but for those in ``empty``."""

    asked = 0
    end = 1 << 40
    empty: Callable[[int], bool] = staticmethod(lambda n: False)
    committed: list[int] = []

    @classmethod
    def name(cls) -> str:
        return "offsets"

    def schema(self) -> str:
        return "n long"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        return OffsetsReader()


class OffsetsReader(DataSourceStreamReader):
    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return {"n": 0}

    def latestOffset(self, start: dict[str, int], limit: Any) -> dict[str, int]:  # noqa: N802
        Offsets.asked += 1
        return {"n": min(start["n"] + 1, Offsets.end)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [InputPartition(n) for n in range(start["n"], end["n"])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        ns = [] if Offsets.empty(partition.value) else [partition.value]
        yield pa.record_batch([pa.array(ns, pa.int64())], names=["n"])

    def commit(self, end: dict[str, int]) -> None:
        Offsets.committed.append(end["n"])


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("asked", 0), ("end", 1 << 40), ("committed", [])):
        monkeypatch.setattr(Offsets, name, value)


def reader(ledger: Path, start: Any = None, kept: Any = None, **options: Any) -> Any:
    read = flux.datasource(Offsets, stream=True, ledger=ledger, **options).reader  # type: ignore[attr-defined]
    read.kept = read.prepare(kept)
    rows = read.read(0, start)
    rows.kept = read.kept
    return rows


def until(reached: Callable[[], Any]) -> None:
    end = time.monotonic() + LONG_S
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.001)


def ends(rows: Any) -> None:
    """Close a reader, and check that it leaves no thread behind."""
    rows.close()
    rows._thread.join(LONG_S)
    assert not rows._thread.is_alive()


def test_a_stream_that_goes_on_without_rows_ends_when_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Offsets, "empty", staticmethod(lambda n: True))
    rows = reader(tmp_path, poll="1ms")
    until(lambda: Offsets.asked >= 3)
    assert next(rows) is None
    ends(rows)


def test_a_stream_that_goes_on_without_rows_is_not_asked_without_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pause between questions, because each answer is an entry of the ledger."""
    monkeypatch.setattr(Offsets, "empty", staticmethod(lambda n: n >= 5))
    rows = reader(tmp_path, poll="1h")
    until(lambda: Offsets.asked >= 6)
    rows._thread.join(0.05)
    assert Offsets.asked == 6
    ends(rows)


def test_what_an_earlier_life_found_without_rows_is_gone_through_without_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Offsets, "empty", staticmethod(lambda n: True))
    first = reader(tmp_path, poll="1ms")
    until(lambda: Offsets.asked >= 9)
    ends(first)
    monkeypatch.setattr(Offsets, "empty", staticmethod(lambda n: n != 7))
    again = reader(tmp_path, poll="1h", kept=first.kept)
    assert taken(again, 1) == [(7, [8, 0, 1])]
    ends(again)


class Slow(DataSource):
    """Three partitions without rows, read one after the other. Each waits for a gate."""

    gate = threading.Event()
    begun: list[int] = []

    def schema(self) -> str:
        return "n long"

    def reader(self, schema: StructType) -> DataSourceReader:
        return SlowReader()


class SlowReader(DataSourceReader):
    def partitions(self) -> list[InputPartition]:
        return [InputPartition(n) for n in range(3)]

    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        Slow.begun.append(partition.value)
        assert Slow.gate.wait(LONG_S)
        return iter(())


def test_a_batch_source_that_is_closed_begins_no_further_partition() -> None:
    source = flux.datasource(Slow, partitions=1)
    rows = source.reader.read(0, None)  # type: ignore[attr-defined]
    until(lambda: Slow.begun)
    rows.close()
    Slow.gate.set()
    ends(rows)
    assert Slow.begun == [0]


def taken(rows: Any, count: int) -> list[tuple[int, Any]]:
    """Take ``count`` rows, each with the position behind its batch."""
    found: list[tuple[int, Any]] = []
    end = time.monotonic() + LONG_S
    while len(found) < count:
        assert time.monotonic() < end, found
        given = next(rows)
        if given is None:
            time.sleep(0.001)
        else:
            found += [(n, given.position) for n in given.batch.column("n").to_pylist()]
    return found


def test_the_last_end_is_committed_once_all_its_rows_are_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Offsets, "end", 4)
    rows = reader(tmp_path, poll="1ms", commit=True)
    positions = [position for _, position in taken(rows, 4)]
    rows.applied(positions[-1])
    until(lambda: Offsets.committed)
    ends(rows)
    assert Offsets.committed == [4]


def test_an_end_without_rows_is_committed_with_the_rows_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Offsets, "end", 4)
    monkeypatch.setattr(Offsets, "empty", staticmethod(lambda n: n >= 2))
    rows = reader(tmp_path, poll="1ms", commit=True)
    rows.applied(taken(rows, 2)[-1][1])
    until(lambda: Offsets.committed[-1:] == [4])
    ends(rows)


def test_a_later_life_commits_what_was_before_it_once_something_is_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Offsets, "end", 3)
    first = reader(tmp_path, poll="1ms", commit=True)
    position = taken(first, 3)[-1][1]
    ends(first)
    monkeypatch.setattr(Offsets, "end", 5)
    later = reader(tmp_path, position, first.kept, poll="1ms", commit=True)
    following = taken(later, 2)
    assert [n for n, _ in following] == [3, 4]
    assert not Offsets.committed
    later.applied(position)
    until(lambda: Offsets.committed == [3])
    later.applied(following[-1][1])
    until(lambda: Offsets.committed == [3, 5])
    ends(later)
