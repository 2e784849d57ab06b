"""Results at marks: any order of the same rows gives the same batches."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flux
from flux.operators import windowed_groups
from flux.operators.attributes import open_operator
from flux.operators.batches import given_batches
from flux.operators.operator import Context, last_output, move_watermarks
from flux.windows.window import NEVER, SessionWindow, Window
from partitioning.accumulators import EXACT_SUM, accumulator
from partitioning.errors import SumOverflowError

SCHEMA = pa.schema(
    [("user", pa.string()), ("ts", pa.timestamp("us", tz="UTC")), ("amount", pa.float64()), ("units", pa.int64())]
)
WINDOWS: list[Any] = [
    Window("ts", 10, 10), Window("ts", 12, 4), Window("ts", 40, 2, 1), SessionWindow("ts", 7), flux.windows.window.Closing("ts"),
]  # fmt: skip
Row = tuple[str | None, int, float | None, int | None]


def stage(window: Any) -> Any:
    @flux.stage(key="user", window=window)
    class Spent(flux.Aggregate):
        n = flux.count()
        total = flux.sum("amount", exact=True)
        average = flux.mean("amount", exact=True)
        least = flux.min("amount")
        most = flux.max("user")
        units = flux.sum("units")
        per_unit = flux.mean("units", exact=True)
        kinds = flux.count_distinct("units")

    return Spent


def batch(rows: list[Row]) -> pa.RecordBatch:
    columns = [pa.array([row[at] for row in rows], field.type) for at, field in enumerate(SCHEMA)]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


class Copy:
    """An operator, its context, and the batches that it has given."""

    def __init__(self, made: Any) -> None:
        self.made, self.given = made, []
        self.operator, self.context = made.make(), self.fresh()
        open_operator(self.operator, self.context)

    def fresh(self) -> Context:
        context = Context("Spent", key=("user",), schemas=(SCHEMA,), output_mode=self.made.output_mode)
        context.watermarks, context._flux_at_marks = [NEVER], True
        return context

    def take(self, output: Any) -> None:
        self.given += [given for given in given_batches(output) if given.num_rows]

    def restart(self) -> None:
        state, watermarks = self.operator.snapshot(), self.context.watermarks
        self.operator, self.context = self.made.make(), self.fresh()
        open_operator(self.operator, self.context)
        self.operator.restore(state)
        self.context.watermarks = watermarks

    def run(self, rows: list[Row], random: Random) -> list[pa.RecordBatch]:
        """Apply the rows in a random order and cut, with random watermarks that are true, and perhaps a restart."""
        rows = random.sample(rows, len(rows))
        while rows:
            count = random.randint(1, len(rows))
            mine, rows = rows[:count], rows[count:]
            self.take(self.operator.process(batch(mine)))
            bound = min((ts for _, ts, _, _ in rows), default=200)
            if bound > self.context.watermark and random.random() < 0.7:
                low = max(self.context.watermark, bound - 30)
                self.take(move_watermarks(self.operator, self.context, [random.randint(low, bound)]))
            if random.random() < 0.2:
                self.restart()
        self.take(last_output(self.operator, self.context))
        return self.given


#: Values whose sum depends on the order if it is rounded row by row.
CHOSEN = [1e100, 1.0, -1e100, 0.1, -0.0, 1e-300, math.inf, math.nan]
AMOUNTS = st.one_of(st.none(), st.sampled_from(CHOSEN), st.floats(-1e9, 1e9))
UNITS = st.one_of(st.none(), st.integers(-3, 3))
ROWS = st.lists(
    st.tuples(st.sampled_from([None, "a", "b", "cc", ""]), st.integers(-40, 150), AMOUNTS, UNITS),
    min_size=1,
    max_size=40,
)


@given(ROWS, st.sampled_from([*WINDOWS, None]), st.integers(0, 1 << 30))
@settings(max_examples=60, deadline=None)
def test_any_order_of_the_same_rows_gives_the_same_batches(rows: list[Row], window: Any, seed: int) -> None:
    made, random = stage(window), Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windowed_groups, "RESULT_ROWS_MAX", 3)
        first, second = (Copy(made).run(rows, random) for _ in range(2))
    # Compare bytes: -0.0 is not 0.0, and NaN is NaN.
    assert [each.serialize() for each in first] == [each.serialize() for each in second]
    for each in first:
        each.validate(full=True)


@given(ROWS, st.sampled_from(WINDOWS), st.integers(0, 1 << 30))
@settings(max_examples=30, deadline=None)
def test_results_at_marks_are_those_without_them(rows: list[Row], window: Any, seed: int) -> None:
    made = stage(window)
    operator, context = made.make(), Context("Spent", key=("user",), schemas=(SCHEMA,), output_mode="append")
    context.watermarks = [NEVER]
    open_operator(operator, context)
    plain = [*given_batches(operator.process(batch(rows))), *last_output(operator, context)]
    found = Copy(made).run(rows, Random(seed))

    def listed(batches: list[pa.RecordBatch]) -> list[str]:
        return sorted(str(row) for each in batches for row in each.to_pylist())

    assert listed(found) == listed(plain)


def test_a_watermark_between_two_marks_gives_no_session_and_states_the_mark_before_it() -> None:
    copy = Copy(stage(SessionWindow("ts", 40)))  # marks are 10 us apart
    copy.take(copy.operator.process(batch([("a", 3, 1.0, 1)])))
    copy.take(move_watermarks(copy.operator, copy.context, [49]))  # the session is final from 44 on
    assert copy.given == []
    assert copy.operator.output_watermark() == 39
    copy.take(move_watermarks(copy.operator, copy.context, [50]))
    assert [each.num_rows for each in copy.given] == [1]
    assert copy.operator.output_watermark() == 49


VALUES = st.one_of(st.floats(-1e300, 1e300), st.sampled_from([1e16, 1.0, -1e16, 2.0**-1074, 0.1, -0.1]))


@given(st.lists(st.lists(VALUES, max_size=12), min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_an_exact_sum_is_that_of_fsum_however_it_is_put_together(parts: list[list[float]]) -> None:
    made = accumulator(EXACT_SUM, "x", pa.float64())
    for part in parts:
        other = accumulator(EXACT_SUM, "x", pa.float64())
        other.update(np.full(len(part), 1, np.int32), pa.array(part, pa.float64()), 2)
        loaded = accumulator(EXACT_SUM, "x", pa.float64())
        loaded.load(other.state())
        made.merge(np.array([1, 0], np.int32), loaded, 2)
        if len(parts) == 2:
            made.put(np.array([0], np.int32), made.state(np.array([0], np.int32)), 2)
    values = [value for part in parts for value in part]
    answer = math.fsum(values) if values else None
    assert made.result().to_pylist() == [answer, None]


def test_a_sum_with_more_terms_than_there_is_room_for_is_exact_and_one_beyond_doubles_is_an_error() -> None:
    values = [2.0**exponent for exponent in range(-1000, 1000, 60)]
    made = accumulator(EXACT_SUM, "x", pa.float64())
    made.update(np.zeros(len(values) + 1, np.int32), pa.array([*values, -(2.0**980)]), 1)
    assert made.result().to_pylist() == [math.fsum([*values, -(2.0**980)])]
    huge = accumulator(EXACT_SUM, "x", pa.float64())
    with pytest.raises(SumOverflowError, match="exact sum"):
        huge.update(np.zeros(3, np.int32), pa.array([1e308, 1e308, -1e308]), 1)


def test_an_operator_says_why_it_needs_the_order_of_rows() -> None:
    class Rounded(flux.Aggregate):
        total = flux.sum("amount")

    class Own(flux.Aggregate):
        n = flux.count()

        def close(self) -> None:
            pass

    class Own2(flux.Operator):
        def process(self, batch: pa.RecordBatch) -> None:
            return None

    assert "flux.sum('amount', exact=True)" in Rounded()._flux_needs_order((SCHEMA,), "append")
    assert "methods of its own" in Own()._flux_needs_order((SCHEMA,), "append")
    assert "may depend" in Own2()._flux_needs_order((SCHEMA,), "complete")
    assert "update" in stage(None).make()._flux_needs_order((SCHEMA,), "update")
    assert stage(WINDOWS[0]).make()._flux_needs_order((SCHEMA,), "append") == ""
