"""Tentative results at a sink: in order with ``write``, never in its way, and taken back by the next primary."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from harness import LIMIT_S
from outside_store import until
from scripted import feed, made, work
from test_sink import Echo, leaving

import flux
from flux.dataflow.sink import TentativeEnd, TentativeOutput, TentativeUndo, shows_tentative
from flux.errors import UsageError
from flux.settings import Settings
from flux.shadows.shown_rows import ShownRows
from flux.shell import sink_threads
from flux.shell.sink_threads import SinkThreads

SCHEMA = pa.schema([("x", pa.int64())])


def one(x: int) -> pa.RecordBatch:
    return pa.record_batch([pa.array([x])], schema=SCHEMA)


class Board(flux.Sink):
    """A sink that notes its calls. ``before`` is called first, and may raise or wait."""

    def __init__(self, before: Callable[..., None] = lambda *call: None) -> None:
        self.before = before
        self.calls: list[Any] = []

    def __deepcopy__(self, memo: Any) -> Board:
        return self

    def _call(self, *call: Any) -> None:
        self.before(*call)
        self.calls.append(call)

    def write(self, batch: pa.RecordBatch, position: flux.Position) -> None:
        self._call("write", position.sequence)

    def tentative(self, batch: pa.RecordBatch, through: int) -> None:
        self._call("tentative", batch.column(0)[0].as_py(), through)

    def undo(self, start: int | None, end: int | None) -> None:
        self._call("undo", start, end)

    def corrected(self, through: int) -> None:
        self._call("corrected", through)


def threads(sink: flux.Sink, first: bool = True, position: int = 0, **options: Any) -> SinkThreads:
    stage = SimpleNamespace(id=0, name="last", partitions=1, sink=sink)
    plan = SimpleNamespace(query="q", stages=[stage], settings=Settings.of(**options), forgotten={}, location="")
    made = SinkThreads(plan, lambda: None)  # type: ignore[arg-type]
    made.begins(0, 0, position, first)
    return made


class Held:
    """A call that is under way until it is let go, or that fails until then."""

    def __init__(self, *call: Any, error: Exception | None = None) -> None:
        self.call, self.error = call, error
        self.entered, self.free = threading.Event(), threading.Event()

    def __call__(self, *call: Any) -> None:
        if call == self.call and not self.free.is_set():
            self.entered.set()
            if self.error is not None:
                raise self.error
            assert self.free.wait(LIMIT_S)


def test_tentative_rows_come_in_order_with_stable_ones() -> None:
    board = Board()
    made = threads(board)
    made.write(0, 0, 0, one(0))
    made.tell(0, 0, TentativeOutput(one(7), 10))
    made.write(0, 0, 1, one(1))
    until(lambda: made.has(0, 0) == 2, "the tentative row is between the stable ones")
    made.tell(0, 0, TentativeUndo(0, 10))
    made.write(0, 0, 2, one(7))
    made.tell(0, 0, TentativeEnd(10))
    until(lambda: len(board.calls) == 6, "all calls are made")
    assert board.calls == [
        ("write", 0), ("tentative", 7, 10), ("write", 1), ("undo", 0, 10), ("write", 2), ("corrected", 10),
    ]  # fmt: skip


def test_rows_that_are_void_before_the_sink_has_taken_them_are_never_shown() -> None:
    held = Held("write", 0)
    board = Board(held)
    made = threads(board)
    made.write(0, 0, 0, one(0))
    assert held.entered.wait(LIMIT_S)
    for x, through in ((1, 10), (2, 20), (3, 30)):
        made.tell(0, 0, TentativeOutput(one(x), through))
    made.tell(0, 0, TentativeUndo(10, 20))
    held.free.set()
    until(lambda: ("undo", 10, 20) in board.calls, "the undo is told")
    assert board.calls == [("write", 0), ("tentative", 1, 10), ("tentative", 3, 30), ("undo", 10, 20)]
    assert made._queues[0, 0].tentative_bytes == 0  # type: ignore[index]


def test_tentative_rows_that_the_outside_refuses_for_a_while_are_tried_again_until_stable_ones_wait() -> None:
    held = Held("tentative", 7, 10, error=ConnectionError("away"))
    board = Board(held)
    made = threads(board, sink_retry_timeout="10s")
    made.tell(0, 0, TentativeOutput(one(7), 10))
    assert held.entered.wait(LIMIT_S)
    made.write(0, 0, 0, one(0))
    until(lambda: made.has(0, 0) == 1, "the stable row is written though the tentative one cannot be")
    assert board.calls == [("write", 0)]
    made.check()
    held.free.set()
    made.tell(0, 0, TentativeOutput(one(8), 20))
    until(lambda: len(board.calls) == 2, "later ones are shown")
    assert board.calls[1] == ("tentative", 8, 20)


def test_an_undo_is_tried_again_and_an_error_in_tentative_is_one_of_the_sink() -> None:
    held = Held("undo", 0, 10, error=TimeoutError())
    board = Board(held)
    made = threads(board)
    made.tell(0, 0, TentativeUndo(0, 10))
    assert held.entered.wait(LIMIT_S)
    made.write(0, 0, 0, one(0))
    held.free.set()
    until(lambda: len(board.calls) == 2, "nothing is left out")
    assert board.calls == [("undo", 0, 10), ("write", 0)]

    broken = threads(Board(Held("tentative", 7, 10, error=ValueError("no such table"))))
    broken.tell(0, 0, TentativeOutput(one(7), 10))
    until(lambda: not broken._failed.empty(), "the error is there")
    with pytest.raises(flux.UserCodeError, match="no such table"):
        broken.check()


def test_tentative_rows_that_wait_are_bounded_and_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_threads, "TENTATIVE_BYTES", 2 * sink_threads._cost(TentativeOutput(one(0), 0)))
    held = Held("write", 0)
    board = Board(held)
    made = threads(board)
    made.write(0, 0, 0, one(0))
    assert held.entered.wait(LIMIT_S)
    for x in range(5):
        made.tell(0, 0, TentativeOutput(one(x), 10 * x))
    held.free.set()
    until(lambda: len(board.calls) == 3, "the newest are shown")
    assert board.calls[1:] == [("tentative", 3, 30), ("tentative", 4, 40)]
    assert made._queues[0, 0].left_out == 3  # type: ignore[index]


def test_each_primary_but_the_first_begins_with_an_undo_of_everything() -> None:
    board = Board()
    first = threads(board)
    first.write(0, 0, 0, one(0))
    until(lambda: first.has(0, 0) == 1, "it is written")
    heir = threads(board, first=False, position=1)
    heir.write(0, 0, 1, one(1))
    until(lambda: heir.has(0, 0) == 2, "its successor goes on")
    assert board.calls == [("write", 0), ("undo", None, None), ("write", 1)]


def test_a_sink_that_does_not_define_tentative_hears_nothing() -> None:
    class Plain(flux.Sink):
        written: list[int] = []

        def write(self, batch: pa.RecordBatch, position: flux.Position) -> None:
            self.written.append(position.sequence)

    made = threads(Plain(), first=False)
    made.tell(0, 0, TentativeOutput(one(7), 10))
    made.tell(0, 0, TentativeUndo(None, None))
    made.write(0, 0, 0, one(0))
    until(lambda: made.has(0, 0) == 1, "the stable row is written")
    made.check()
    assert not shows_tentative(Plain())
    assert Plain.written == [0]


def test_a_worker_tells_the_sink_of_a_primary_behind_its_committed_output() -> None:
    replica = made(Echo, 2)
    replica.follow()
    found, outside, _ = leaving(replica)
    told: list[Any] = []
    outside.tell = lambda *call: told.append((call, len(outside.written)))
    replica.stage = replace(replica.stage, sink=Board())
    found.tell(replica, TentativeEnd(5))
    assert told == [], "only a primary shows anything"
    replica.lead(0, [])
    feed(replica, 0, 7)
    work(replica, 1.0)
    found.tell(replica, TentativeEnd(5))
    assert told == [((*replica.key, TentativeEnd(5)), 1)]
    assert found.shown[replica.key].rows == 0
    assert (outside.begun, outside.written) == ([0], [(0, [7])])
    replica.stage = replace(replica.stage, sink=flux.Sink())
    found.tell(replica, TentativeEnd(6))
    assert len(told) == 1


def test_rows_that_a_correction_changes_are_counted() -> None:
    shown = ShownRows()
    shown.write(one(5))
    for x, through in ((1, 10), (2, 20), (3, 20)):
        shown.tell(TentativeOutput(one(x), through))
    shown.tell(TentativeUndo(0, 10))
    shown.write(one(1))
    shown.tell(TentativeUndo(10, 20))
    shown.write(one(2))
    shown.write(one(4))
    assert (shown.rows, shown.changed) == (3, 0)
    shown.tell(TentativeEnd(20))
    assert (shown.rows, shown.changed) == (3, 1), "3 has become 4"
    shown.tell(TentativeOutput(one(1), 30))
    assert (shown.rows, shown.changed) == (1, 0), "another failure"


@pytest.mark.parametrize(
    ("methods", "problem"),
    [
        ({"tentative": Board.tentative}, r"defines tentative\(\) and not undo\(start, end\)"),
        ({"undo": Board.undo}, r"defines undo\(\) and not tentative\(batch, through\)"),
        ({"corrected": Board.corrected}, r"defines corrected\(\) and not tentative\(batch, through\)"),
        ({"tentativ": Board.tentative}, "did you mean 'tentative'"),
        (
            {"tentative": 5},
            r"Half.tentative is 5: for a sink it is a method that is called as tentative\(batch, through\)",
        ),
        (
            {"tentative": lambda self, batch: None, "undo": Board.undo},
            r"Half.tentative is tentative\(batch\): for a sink",
        ),
        ({"tentative": Board.tentative, "undo": lambda self: None}, r"undo\(\): for .* called as undo\(start, end\)"),
        ({"corrected": lambda self, a, b: None}, r"Half.corrected is corrected\(a, b\): .* corrected\(through\)"),
    ],
)
def test_half_a_contract_is_refused(methods: dict[str, Any], problem: str) -> None:
    flow = flux.stage(partitions=1)(lambda batch: batch)(flux.source(lambda partition: iter([one(0)]), SCHEMA, 1))
    with pytest.raises(UsageError, match=problem):
        flow.to(type("Half", (flux.Sink,), {"write": Board.write, **methods})())
