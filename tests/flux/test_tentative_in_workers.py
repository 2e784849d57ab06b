"""Workers with real sockets: a partition falls silent, its windows are shown tentatively, and stable ones take their places."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from harness import LIMIT_S, ThreadQuery
from outside_store import ALONE, until

import flux

SCHEMA = pa.schema([("site", pa.string()), ("ts", pa.timestamp("us", "UTC"))])
WINDOW_US = 100_000
#: Windows of both partitions, and those of which partition 1 is silent at first.
BOTH, ALL = 5, 10
BACK = threading.Event()


def rows(window: int, site: str) -> pa.RecordBatch:
    times = [WINDOW_US * window] * 4  # none is later than another one, and so late
    return pa.record_batch([pa.array([site] * 4), pa.array(times, pa.timestamp("us", "UTC"))], schema=SCHEMA)


def read(partition: int) -> Iterator[pa.RecordBatch | None]:
    """Yield four rows of each site for each window, in either partition. Neither ends before the other is back."""
    for window in range(ALL + 1):
        while partition == 1 and window >= BOTH and not BACK.is_set():
            yield None
        yield pa.concat_batches([rows(window, "a"), rows(window, "b")])
    end = time.monotonic() + LIMIT_S
    while not BACK.is_set() and time.monotonic() < end:
        yield None


@flux.stage(key="site", window=flux.window("ts", "100 milliseconds"), partitions=2, replicas=2, availability="400ms")
class PerSite(flux.Aggregate):
    n = flux.count()


@flux.stage(key="site", partitions=2, replicas=2, availability="400ms")
class OwnPerSite(flux.Operator):
    """An operator of the user's own with the results of ``PerSite``. It has no windows, so its marks are those of its
    shadow."""

    schema = pa.schema([("window_start", pa.timestamp("us", "UTC")), ("site", pa.string()), ("n", pa.int64())])

    def __init__(self) -> None:
        self.counts: dict[tuple[int, str], int] = {}

    def process(self, batch: pa.RecordBatch) -> Any:
        for at, site in zip(
            batch.column("ts").cast(pa.int64()).to_pylist(), batch.column("site").to_pylist(), strict=True
        ):
            key = at // WINDOW_US, site
            self.counts[key] = self.counts.get(key, 0) + 1

    def on_watermark(self) -> Any:
        over = sorted(key for key in self.counts if (key[0] + 1) * WINDOW_US <= self.context.watermark)
        rows = [(start * WINDOW_US, site, self.counts.pop((start, site))) for start, site in over]
        if not rows:
            return None
        arrays = [pa.array(each, field.type) for each, field in zip(zip(*rows, strict=True), self.schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


class Board(flux.Sink):
    """A sink with a table by window and site for each partition."""

    def __init__(self) -> None:
        #: Calls of all partitions.
        self.calls: list[tuple[str, list[Any]]] = []
        self.views: dict[int, flux.TentativeView] = {}

    def __deepcopy__(self, memo: Any) -> BoardOfPartition:
        return BoardOfPartition(self)

    def write(self, batch: pa.RecordBatch, position: flux.Position) -> None:
        raise AssertionError("the pattern is not called")

    tentative = undo = write  # type: ignore[assignment]


class BoardOfPartition(Board):
    def __init__(self, pattern: Board) -> None:
        self.calls, self.views = pattern.calls, pattern.views

    def open(self, context: flux.SinkContext) -> None:
        self.view = self.views[context.partition] = flux.TentativeView(["window_start", "site"])

    def write(self, batch: pa.RecordBatch, position: flux.Position) -> None:
        self.view.write(batch)
        self.calls.append(("write", batch.to_pylist()))

    def tentative(self, batch: pa.RecordBatch, through: int) -> None:
        self.view.tentative(batch, through)
        self.calls.append(("tentative", batch.to_pylist()))

    def undo(self, start: int | None, end: int | None) -> None:
        self.view.undo(start, end)
        self.calls.append(("undo", [start, end]))

    def corrected(self, through: int) -> None:
        self.calls.append(("corrected", [through]))


def counts(shown: list[dict[str, Any]]) -> dict[tuple[int, str], int]:
    found = {}
    for row in shown:
        found[round(row["window_start"].timestamp() * 1e6) // WINDOW_US, row["site"]] = row["n"]
    return found


@pytest.mark.parametrize("stage", [PerSite, OwnPerSite])
def test_windows_are_shown_while_a_partition_is_silent_and_corrected_when_it_is_back(stage: Any) -> None:
    """Show such windows at two sinks. The second sink stands in a stage of its own, behind the stage of the first."""
    BACK.clear()
    board = Board()
    behind = Board() if stage is PerSite else board
    counted = stage(flux.source(read, SCHEMA, 2, "readings").withWatermark("ts", "0 seconds"))
    outputs = [counted.to(each) for each in dict.fromkeys((board, behind))]
    with ThreadQuery(*outputs, progress_interval="100ms", **ALONE) as query:
        query.started()
        silent = {(window, site) for window in range(BOTH, ALL) for site in "ab"}

        def shown(board: Board = board) -> dict[tuple[int, str], int]:
            return counts([row for name, given in list(board.calls) if name == "tentative" for row in given])

        until(lambda: silent <= shown().keys(), "the windows without partition 1 are shown")
        until(lambda: silent <= shown(behind).keys(), "and behind the stage as well")
        assert {key: shown()[key] for key in silent} == dict.fromkeys(silent, 4), board.calls
        assert {key: shown(behind)[key] for key in silent} == dict.fromkeys(silent, 4), behind.calls
        stable = counts([row for name, given in list(board.calls) if name == "write" for row in given])
        assert not stable.keys() & silent
        until(lambda: query.server.progress[-1]["availability"]["state"] == "tentative", "reports say so")
        BACK.set()
        query.wait()
        events = [event.why for event in query.server.core.repairs.history if event.kind == "tentative"]
    for each in (board, behind):
        stable = counts([row for name, given in each.calls if name == "write" for row in given])
        assert stable == {(window, site): 8 for window in range(ALL + 1) for site in "ab"}
        left = [row for view in each.views.values() for row in view.table().to_pylist()]
        assert not any(row["tentative"] for row in left), "nothing tentative is left"
        assert counts(left) == stable
        assert sum(name == "corrected" for name, _ in each.calls) >= 1
    assert not events or "tentative rows" in events[0]
