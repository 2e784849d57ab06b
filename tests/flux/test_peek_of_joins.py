"""Tentative results of joins: those of a copy that gets the same rows and watermark, and nothing changes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from flux.expressions.tree import Column, FunctionCall
from flux.joins.as_of import AsOfJoin, AsOfSpec
from flux.joins.join import Join
from flux.joins.join_spec import KINDS, LEFT, RIGHT, JoinSpec, TimeBound
from tests.flux.peeked import PeekedLine, examples, followed, rises

TIME = pa.timestamp("us", "UTC")
SCHEMA = pa.schema([("key", pa.string()), ("ts", TIME), ("n", pa.int64()), ("text", pa.string())])
OTHER = pa.schema([("key", pa.string()), ("at", TIME), ("m", pa.int64()), ("words", pa.string())])
SCHEMAS = [SCHEMA, OTHER]
ROWS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", None]), st.integers(0, 30) | st.none(), st.integers(0, 3), st.sampled_from(["", "x"])
    ),
    min_size=1,
    max_size=5,
)


def batch(number: int, rows: list[tuple]) -> tuple[int, pa.RecordBatch]:
    arrays = [
        pa.array(column, pa.int64()).cast(TIME) if field.type == TIME else pa.array(column, field.type)
        for column, field in zip(zip(*rows, strict=True), SCHEMAS[number], strict=True)
    ]
    return number, pa.RecordBatch.from_arrays(arrays, schema=SCHEMAS[number])


BATCHES = st.builds(batch, st.integers(0, 1), ROWS)
STEPS = st.lists(BATCHES | rises(2), min_size=1, max_size=8)
OVERLAY = st.lists(st.tuples(st.integers(0, 8), BATCHES).map(lambda each: (each[0], *each[1])), max_size=3)
REST = FunctionCall("less_or_equal", (Column("2", pa.int64()), Column("6", pa.int64())), pa.bool_())
#: Bounds of the left time by the right one, and of the right time by the left one.
BOUNDS = [
    (),
    (TimeBound(LEFT, True, 1, 4), TimeBound(LEFT, False, 1, -3)),
    (TimeBound(LEFT, True, 1, 0),),
    (TimeBound(RIGHT, True, 1, 5),),
]


def join(how: str, bounds: tuple, rest: Any, ttl: int | None, times: tuple) -> Any:
    outputs = [("key", 0), ("ts", 1), ("n", 2), ("text", 3)]
    if how not in ("left_semi", "left_anti"):
        outputs += [("at", 5), ("m", 6), ("words", 7)]
    spec = JoinSpec(how, ((0,), (0,)), tuple(outputs), times, bounds, rest, ttl)
    return partial(Join, spec, SCHEMA, OTHER)


@examples(40)
@given(
    steps=STEPS, overlay=OVERLAY, how=st.sampled_from(KINDS), bounds=st.sampled_from(BOUNDS),
    rest=st.sampled_from([None, REST]), ttl=st.sampled_from([None, 6]), data=st.data(),
)  # fmt: skip
def test_joins_are_peeked_at(
    steps: Any, overlay: Any, how: str, bounds: tuple, rest: Any, ttl: int | None, data: Any
) -> None:
    times = (1, 1) if bounds else data.draw(st.sampled_from([(1, 1), (1, None), (None, 1)]))
    made = join(how, bounds, rest, ttl, times)
    followed(lambda: PeekedLine(made, (), SCHEMAS, "append"), steps, overlay, data)


@examples(15)
@given(
    steps=STEPS, overlay=OVERLAY, tolerance=st.sampled_from([None, 3]), outer=st.booleans(), data=st.data()
)  # fmt: skip
def test_as_of_joins_are_peeked_at(steps: Any, overlay: Any, tolerance: int | None, outer: bool, data: Any) -> None:
    made = partial(AsOfJoin, AsOfSpec(("ts", "at"), tolerance, outer))
    followed(lambda: PeekedLine(made, ("key",), SCHEMAS, "append"), steps, overlay, data)
