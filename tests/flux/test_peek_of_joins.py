"""Tentative results of joins: those of a copy that gets the same rows and watermark, and nothing changes."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from flux.expressions.tree import Column, FunctionCall
from flux.joins.as_of import AsOfJoin, AsOfSpec
from flux.joins.join import Join
from flux.joins.join_spec import KINDS, LEFT, RIGHT, JoinSpec, TimeBound
from tests.flux.peeked import SEEDS, PeekedLine, examples, followed

TIME = pa.timestamp("us", "UTC")
SCHEMA = pa.schema([("key", pa.string()), ("ts", TIME), ("n", pa.int64()), ("text", pa.string())])
OTHER = pa.schema([("key", pa.string()), ("at", TIME), ("m", pa.int64()), ("words", pa.string())])
SCHEMAS = [SCHEMA, OTHER]


def drawn(number: int, random: Random) -> pa.RecordBatch:
    choices: list[list[Any]] = [["a", "b", None], [*range(30), None], [0, 1, 2, 3], ["", "x"]]
    rows = [tuple(map(random.choice, choices)) for _ in range(random.randint(1, 5))]
    arrays = [
        pa.array(column, pa.int64()).cast(TIME) if field.type == TIME else pa.array(column, field.type)
        for column, field in zip(zip(*rows, strict=True), SCHEMAS[number], strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMAS[number])


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


@examples(16)
@given(
    how=st.sampled_from(KINDS), bounds=st.sampled_from(BOUNDS),
    rest=st.sampled_from([None, REST]), ttl=st.sampled_from([None, 6]), seed=SEEDS,
)  # fmt: skip
def test_joins_are_peeked_at(how: str, bounds: tuple, rest: Any, ttl: int | None, seed: int) -> None:
    times = (1, 1) if bounds else [(1, 1), (1, None), (None, 1)][seed % 3]
    made = join(how, bounds, rest, ttl, times)
    followed(lambda: PeekedLine(made, (), SCHEMAS, "append"), drawn, seed)


@examples(6)
@given(
    tolerance=st.sampled_from([None, 3]), outer=st.booleans(), seed=SEEDS
)  # fmt: skip
def test_as_of_joins_are_peeked_at(tolerance: int | None, outer: bool, seed: int) -> None:
    made = partial(AsOfJoin, AsOfSpec(("ts", "at"), tolerance, outer))
    followed(lambda: PeekedLine(made, ("key",), SCHEMAS, "append"), drawn, seed)
