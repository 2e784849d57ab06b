"""Tentative results of a replica's operator, read from it or given by a copy: neither changes it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flux
from flux.errors import UserCodeError
from flux.operators.operator import Operator
from flux.replica.step_queue import ReplicaStep
from flux.shadows.forked_operator import ForkedOperator
from flux.shadows.peeked_operator import PeekedOperator
from flux.shadows.tentative_operator import OverlayRows
from flux.windows.window import NEVER, SessionWindow, Window
from flux.wire.messages import OrderEntry, StepKind
from partitioning.ids import PartitionKey, StreamId
from tests.flux.peeked import PeekedLine, examples, table_of
from tests.flux.test_peek_of_windows import ROWS, SCHEMA, batch, spent

NUMBERS = pa.schema([("n", pa.int64())])


class Guard:
    """A guard that lets each call through."""

    def __init__(self, line: PeekedLine) -> None:
        self.snapshot = lambda: line.operator.snapshot()

    def call(self, doing: str, step: ReplicaStep | None, code: Callable[..., Any], *given: Any) -> Any:
        return code(*given)


class Beside:
    """The steps of a replica without its exchange, and its tentative results."""

    def __init__(self, make: Callable[[], Operator], key: tuple[str, ...], schema: pa.Schema, way: Any) -> None:
        self.line = PeekedLine(make, key, [schema], "append", kind=None)
        self.replica = SimpleNamespace(
            operator=self.line.operator, context=self.line.context, guard=Guard(self.line), where="stage s, partition 0",
            stage=SimpleNamespace(make=make, output_mode="append"),
        )  # fmt: skip
        self.tentative = way(self.replica)

    def step(self, kind: StepKind, rows: pa.RecordBatch | None = None, marks: Any = (), now: float = 0.0) -> None:
        line, entry = self.line, OrderEntry(now, now, [], kind, watermarks=list(marks))
        line.context.now = now
        if rows is not None:
            line.rows(0, rows, now)
        elif kind is StepKind.TICK:
            for name in line.context.timers.due(now):
                line.context.timers.take(name, now)
                line.given += line.operator.on_timer(name) or ()
        else:
            line.watermarks(marks)
        slices: Any = [SimpleNamespace(input=0)] if rows is not None else []
        self.tentative.stable(ReplicaStep(PartitionKey(0, 0), line.context.step, entry, slices, rows))

    def mark(self, after: int, through: int, *overlay: OverlayRows) -> list[pa.RecordBatch] | None:
        before = self.line.checksum()
        given: list[pa.RecordBatch] | None = self.tentative.mark(after, through, overlay)
        assert self.line.checksum() == before
        return given


def peeked(replica: Any) -> PeekedOperator:
    return PeekedOperator(replica, checked_every=1)


def forked(replica: Any) -> ForkedOperator:
    return ForkedOperator(replica, 3.0)


class Counted(flux.Aggregate):
    n = flux.count()
    total = flux.sum("amount")
    last = flux.max("text")


@examples(10)
@given(
    steps=st.lists(st.lists(ROWS, min_size=1, max_size=4), max_size=4), later=st.lists(st.tuples(
        st.integers(1, 6), st.lists(ROWS, max_size=3), st.lists(ROWS, max_size=3)), min_size=1, max_size=4),
    window=st.sampled_from([Window("ts", 4, 4), Window("ts", 9, 3), SessionWindow("ts", 2)]),
)  # fmt: skip
def test_a_copy_gives_what_the_operator_itself_gives(steps: Any, later: Any, window: Any) -> None:
    """Tentative rows come with their mark, and stable ones behind it. The order of groups is that of the rows in each."""

    def make() -> Counted:
        made = Counted()
        made._flux_window = window
        return made

    read, copied = (Beside(make, ("user",), SCHEMA, way) for way in (peeked, forked))
    for each in (read, copied):
        for rows in steps:
            each.step(StepKind.SLICES, batch(rows))
        each.step(StepKind.WATERMARK, marks=[3])
    reached, overlay = 3, []
    for rise, tentative, stable in later:
        through = reached + rise
        if tentative:
            overlay.append(OverlayRows(0, behind(tentative, reached), through))
        results = [each.mark(reached, through, *overlay) for each in (read, copied)]
        assert sorted(table_of(results[0] or ())) == sorted(table_of(results[1] or ()))
        reached = through
        for each in (read, copied):
            if stable:
                each.step(StepKind.SLICES, behind(stable, reached))


def behind(rows: Any, time: int) -> pa.RecordBatch:
    """Return rows with times from this one on."""
    return batch([(*row[:2], time + (row[2] or 0), *row[3:]) for row in rows])


def numbers(*given: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(given, pa.int64())], schema=NUMBERS)


class Running(flux.Operator):
    """The sum until now, told at each watermark, and by a timer."""

    schema = "n BIGINT"

    def __init__(self) -> None:
        self.sum, self.closed = 0, False

    def process(self, batch: pa.RecordBatch) -> Any:
        self.sum += sum(batch.column("n").to_pylist())
        self.context.set_timer(9.0, "late")

    def on_timer(self, name: str) -> Any:
        self.sum += 1000

    def on_watermark(self) -> Any:
        return numbers(self.sum)


def sums(given: Any) -> Any:
    return given and [row for each in given for row in each.column("n").to_pylist()]


def test_a_copy_follows_the_steps_of_the_operator() -> None:
    beside = Beside(Running, (), NUMBERS, forked)
    beside.step(StepKind.SLICES, numbers(1))
    assert sums(beside.mark(NEVER, 10, OverlayRows(0, numbers(20), 10))) == [21]
    beside.step(StepKind.SLICES, numbers(2))
    beside.step(StepKind.TICK, now=9.0)
    assert sums(beside.mark(10, 20, OverlayRows(0, numbers(20), 10), OverlayRows(0, numbers(300), 20))) == [1323]
    assert beside.line.operator.sum == 1003  # type: ignore[attr-defined]


def test_a_copy_gives_each_mark_once() -> None:
    beside = Beside(Running, (), NUMBERS, forked)
    assert sums(beside.mark(NEVER, 10)) == [0]
    assert sums(beside.mark(10, 20)) == [0]
    assert beside.mark(NEVER, 10, OverlayRows(0, numbers(1), 10)) is None
    assert sums(beside.mark(20, 30)) == [0]


def test_a_copy_gets_rows_of_a_mark_that_come_after_the_mark_was_given_and_no_second_ones() -> None:
    beside, late = Beside(Running, (), NUMBERS, forked), StreamId(0, 1)
    assert sums(beside.mark(NEVER, 10, OverlayRows(0, numbers(20), 10, StreamId(0, 0)))) == [20]
    both = OverlayRows(0, numbers(21), 10, StreamId(0, 0)), OverlayRows(0, numbers(300), 10, late)
    assert sums(beside.mark(10, 20, *both)) == [320], "the rows of the other stream, and no revision of the first"


def test_tentative_rows_that_are_void_leave_with_the_copy_once_in_a_bound() -> None:
    beside = Beside(Running, (), NUMBERS, forked)
    assert sums(beside.mark(NEVER, 10, OverlayRows(0, numbers(20), 10))) == [20]
    beside.step(StepKind.SLICES, numbers(20), now=2.0)
    beside.tentative.forget()
    assert sums(beside.mark(10, 20)) == [40], "counted twice, because the copy is younger than the bound"
    beside.step(StepKind.SLICES, numbers(1), now=3.0)
    assert sums(beside.mark(20, 30)) == [21]
    beside.step(StepKind.SLICES, numbers(1), now=7.0)
    assert sums(beside.mark(30, 40)) == [22]


@pytest.mark.parametrize("kind", [StepKind.WATERMARK, StepKind.FORFEIT])
def test_a_copy_is_made_anew_when_the_stable_watermark_moves(kind: StepKind) -> None:
    """Make the copy anew, because rows that were missing are behind its watermark."""
    beside = Beside(spent(Window("ts", 10, 10)), ("user",), SCHEMA, forked)
    row = ("a", 1, 5, 1, 0.1, 5, "x")
    beside.step(StepKind.SLICES, batch([row]))
    first = beside.mark(NEVER, 20)
    assert first is not None
    assert first[0].column("n").to_pylist() == [1]
    beside.step(StepKind.SLICES, batch([row]), now=4.0)
    beside.step(kind, marks=[6], now=4.0)
    again = beside.mark(6, 20)
    assert again is not None
    assert again[0].column("n").to_pylist() == [2]


def test_a_copy_is_closed_and_counted() -> None:
    beside = Beside(spent(Window("ts", 10, 10)), ("user",), SCHEMA, forked)
    assert beside.tentative.nbytes == 0
    beside.step(StepKind.SLICES, batch([("a", 1, 5, 1, 0.1, 5, "x")]))
    beside.mark(NEVER, 20)
    assert beside.tentative.nbytes > 0
    beside.tentative.close()
    assert beside.tentative.nbytes == 0


def test_an_operator_that_changes_when_it_is_peeked_at_is_told() -> None:
    class Counting(Running):
        def peek(self, watermark: int, overlay: Any = (), after: int = NEVER) -> list[pa.RecordBatch]:
            self.sum += 1
            return []

    line = Beside(Counting, (), NUMBERS, peeked)
    with pytest.raises(UserCodeError, match=r"Counting\.peek\(\) has changed the state"):
        line.tentative.mark(NEVER, 10, [])


def test_the_watermark_of_tentative_output_is_that_of_the_operator() -> None:
    read = Beside(spent(SessionWindow("ts", 2)), ("user",), SCHEMA, peeked)
    assert read.tentative.output_watermark(50) == 49
    assert read.line.context.watermarks == [NEVER]


@pytest.mark.parametrize(
    ("window", "reach", "aligned"), [(Window("ts", 8, 4), 8, True), (SessionWindow("ts", 2), None, False)]
)
def test_windows_say_how_far_a_row_reaches(window: Any, reach: int | None, aligned: bool) -> None:
    read = Beside(spent(window), ("user",), SCHEMA, peeked)
    assert (read.tentative.reach, read.tentative.aligned) == (reach, aligned)
