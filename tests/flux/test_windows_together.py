"""Windows of several partitions in one call give the same results as each alone with its own rows (design:
together)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flux
from flux.operators.operator import Context, move_watermarks
from flux.windows.open_panes import TooManyPanes
from flux.windows.window import NEVER
from partitioning.errors import FailedPartition

SCHEMA = pa.schema([("k", pa.int64()), ("ts", pa.timestamp("us")), ("x", pa.int64())])
WINDOWS: dict[str, Any] = {
    "tumbling": flux.window("ts", "10 microseconds"),
    "hopping": flux.window("ts", "10 microseconds", "3 microseconds"),
}
PARTITIONS = 3


class Totals(flux.Aggregate):
    n = flux.count()
    total = flux.sum("x")
    most = flux.max("x")


def made(window: Any, mode: str = "append", partitions: int = PARTITIONS) -> list[Any]:
    operators = [flux.stage(key="k", window=window)(Totals).make() for _ in range(partitions)]
    for partition, operator in enumerate(operators):
        operator.open(Context("totals", partition, partitions, ("k",), (SCHEMA,), mode, watermarks=[NEVER]))
    return operators


def batch(rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
    columns = zip(*rows, strict=True)
    return pa.RecordBatch.from_arrays(
        [pa.array(c, t) for c, t in zip(columns, SCHEMA.types, strict=True)], schema=SCHEMA
    )


TIMES = st.integers(-30, 60)
ROW = st.tuples(st.none() | st.integers(0, 5), TIMES, st.none() | st.integers(-9, 9))
#: Rows of which some have no time.
ODD_ROW = st.tuples(st.integers(0, 5), st.none() | TIMES, st.integers(-9, 9))
PARTS = st.lists(st.lists(ROW, min_size=1, max_size=12), min_size=PARTITIONS, max_size=PARTITIONS)
ODD_PARTS = st.lists(st.lists(ODD_ROW, min_size=1, max_size=4), min_size=PARTITIONS, max_size=PARTITIONS)
#: The watermark of one partition moves, its state is copied, or a checkpoint of it is taken.
EVENT = st.tuples(st.sampled_from(["watermark", "copy", "checkpoint"]), st.integers(0, PARTITIONS - 1), TIMES)


@settings(deadline=None, max_examples=120)
@given(st.lists(PARTS | ODD_PARTS | EVENT, max_size=12), st.sampled_from(sorted(WINDOWS)))
def test_state_and_results_are_those_of_each_partition_alone(steps: list[Any], window: str) -> None:
    ours, theirs = made(WINDOWS[window]), made(WINDOWS[window])
    assert all(operator.processes_many for operator in ours)
    for number, step in enumerate(steps):
        for operator in (*ours, *theirs):
            operator.context.step = number
        if isinstance(step, tuple):
            what, at, time = step
            assert happened(ours[at], what, time) == happened(theirs[at], what, time)
            continue
        parts = [batch(rows) for rows in step]
        behind = pa.concat_batches([batch([(1, 1, 1)]), *parts]).slice(1)  # rows are read by address
        assert ours[0].process_many(ours, behind, [part.num_rows for part in parts]) is None
        assert [list(operator.process(part)) for operator, part in zip(theirs, parts, strict=True)] == [[], [], []]
    for our, their in zip(ours, theirs, strict=True):
        assert (our._flux_left_out(), our.needs_from()) == (their._flux_left_out(), their.needs_from())
        assert our.snapshot() == their.snapshot()
        assert shown(our.finish()) == shown(their.finish())


def happened(operator: Any, what: str, time: int) -> Any:
    """Let an event happen, and return its result."""
    if what == "watermark":
        return shown(move_watermarks(operator, operator.context, [max(time, operator.context.watermark)]))
    if what == "copy":
        return operator.restore(operator.snapshot())
    return plain(operator.changes())


def plain(value: Any) -> Any:
    """Return a state with lists in place of arrays, whose texts have addresses."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    return (
        repr(value.to_pydict()) if isinstance(value, pa.Table) else repr(getattr(value, "to_pylist", lambda: value)())
    )


def shown(batches: Any) -> list[Any]:
    return [row for each in batches for row in each.to_pylist()]


@pytest.mark.parametrize(
    ("window", "mode", "goes"),
    [
        (WINDOWS["tumbling"], "append", True),
        (WINDOWS["tumbling"], "complete", True),
        (WINDOWS["tumbling"], "update", False),
        (flux.session_window("ts", "5 microseconds"), "append", False),
        (flux.window(flux.NOW, "1 second"), "append", False),
    ],
)
def test_windows_go_together_where_nothing_is_given_before_they_end(window: Any, mode: str, goes: bool) -> None:
    (operator,) = made(window, mode, 1)
    assert operator.processes_many is goes


def test_a_row_that_does_not_fit_names_its_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = batch([(1, 1, 1), (1, 2, 2), (1, 3, 3), (1, (1 << 62) + 1, 1)])
    with pytest.raises(FailedPartition, match="away from 1970") as raised:
        Totals.process_many(made(WINDOWS["tumbling"]), rows, [1, 1, 2])
    assert raised.value.at == 2
    monkeypatch.setattr("flux.windows.open_panes.PANES_MAX", 2)
    rows = batch([(1, 1, 1), (1, 1, 2), (1, 11, 3), (1, 21, 1), (1, 1, 1)])
    with pytest.raises(FailedPartition) as raised:
        Totals.process_many(made(WINDOWS["tumbling"]), rows, [1, 3, 1])
    assert raised.value.at == 1
    assert isinstance(raised.value.error, TooManyPanes)
    most = (1 << 63) - 1
    rows = batch([(1, 1, 1), (1, 11, most), (1, 1, most), (1, 1, 1), (1, 1, 1)])
    monkeypatch.undo()
    with pytest.raises(FailedPartition, match="sum of column 'x'") as raised:
        Totals.process_many(made(WINDOWS["tumbling"]), rows, [1, 3, 1])
    assert raised.value.at == 1
