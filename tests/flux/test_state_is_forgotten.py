"""State of joins, ranks and deduplication under keys that never come back: bounded while they come, and gone behind them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from stepped import CHECKPOINT, FROM_CHECKPOINT, Stepped

from flux.joins.as_of import AsOfJoin, AsOfSpec
from flux.joins.join import Join
from flux.joins.join_spec import LEFT, JoinSpec, TimeBound
from flux.operators.operator import Operator
from flux.ranks.dedup import Dedup, DedupSpec
from flux.ranks.top import Last, OrderColumn, RankSpec, TopOfWindow
from flux.windows.window import Window

TIME = pa.timestamp("us", "UTC")
SCHEMA = pa.schema([("key", pa.int64()), ("ts", TIME), ("text", pa.string())])
OTHERS = pa.schema([("key", pa.int64()), ("at", TIME), ("other", pa.string())])
#: Keys of a turn, microseconds between two turns, and turns for which rows are of use.
KEYS, TURN_US, USEFUL = 1_000, 1_000, 4
TTL = USEFUL * TURN_US
NEWEST = OrderColumn("ts", True, True)


class Case(NamedTuple):
    make: Callable[[], Operator]
    inputs: int
    #: Rows that are given for a row of the first input.
    gives: int


def join(how: str, ttl: int | None = None) -> Case:
    bounds = () if ttl else (TimeBound(LEFT, False, 1, 0), TimeBound(LEFT, True, 1, TTL))
    spec = JoinSpec(how, ((0,), (0,)), (("key", 0), ("other", 5)), (1, 1), bounds, None, ttl)
    return Case(partial(Join, spec, SCHEMA, OTHERS), 2, 2 if how == "full_outer" else 0)


CASES = {
    "an inner join with bounds": join("inner"),
    "a full outer join with bounds": join("full_outer"),
    "an inner join with a time to live": join("inner", TTL),
    "ranks within windows": Case(
        partial(TopOfWindow, RankSpec(2, (NEWEST,), tuple(SCHEMA.names), window=Window("ts", TTL, TTL))), 1, 1
    ),
    "last rows": Case(
        partial(Last, RankSpec(1, (NEWEST,), tuple(SCHEMA.names), ttl=TTL, time="ts", backward=True)), 1, 1
    ),
    "a deduplication": Case(partial(Dedup, DedupSpec(TTL, "ts")), 1, 1),
    "an as-of join": Case(partial(AsOfJoin, AsOfSpec(("ts", "at"), TTL, True)), 2, 1),
}


def rows(schema: pa.Schema, turn: int, number: int) -> pa.RecordBatch:
    """Make rows of keys that no other turn has, nor the other input."""
    keys = (turn * KEYS + np.arange(KEYS)) * 2 + number
    times = turn * TURN_US + np.arange(KEYS) % TURN_US
    texts = [f"a text of the key {key}" for key in keys.tolist()]
    return pa.record_batch([pa.array(keys), pa.array(times).cast(schema.field(1).type), pa.array(texts)], schema=schema)


@pytest.mark.parametrize("name", CASES)
def test_keys_that_never_come_back_leave_nothing_behind(name: str) -> None:
    case, schemas = CASES[name], [SCHEMA, OTHERS]
    stepped = Stepped(case.make, schemas[: case.inputs], ("key",))
    sizes, turns, given = [], 40, 0
    for turn in range(turns):
        if turn % 10 == 5:
            stepped.happen(CHECKPOINT)
        if turn % 10 == 7:
            stepped.happen(FROM_CHECKPOINT)
        for number in range(case.inputs):
            given += len(stepped.give(rows(schemas[number], turn, number), number))
        sizes.append(stepped.operator.state_bytes())
        given += len(stepped.move(*[(turn + 1) * TURN_US - 1] * case.inputs))
    assert max(sizes[turns // 2 :]) <= 1.3 * max(sizes[: turns // 2]), "flat"
    given += len(stepped.move(*[(turns + 2 * USEFUL) * TURN_US] * case.inputs))
    assert stepped.operator.state_bytes() < 100_000 < min(sizes[USEFUL:])
    assert given == case.gives * turns * KEYS, "each row once"
