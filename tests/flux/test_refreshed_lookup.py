"""Lookups in tables that are read anew, against a model in plain Python: whatever the cuts, the watermarks, the copies and the
changes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from flux.expressions.steps import RowStep, RowSteps, Select, Where
from flux.expressions.tree import Case, Column, Literal
from flux.joins.lookup import LookupTable
from flux.joins.refreshed_lookup import RefreshedLookup, RefreshedSpec
from flux.windows.window import END_OF_TIME, FIRST_VERSION, NEVER
from tests.flux.stepped import CHECKPOINT, Stepped, events

LONG, BOOLEAN = pa.int64(), pa.bool_()
LEFT = pa.schema([("item", LONG), ("n", LONG)])
TABLE = pa.schema([("id", LONG), ("price", LONG)])
RIGHT = TABLE.append(pa.field("version", LONG))


def made(how: str = "left_outer", rows: Any = ()) -> Any:
    first = LookupTable(table(rows), (0,), ["id", "price", "found"], ("item",), "id in table prices")
    found, no = Column("found", BOOLEAN), Literal(False, BOOLEAN)
    chain: list[RowStep] = []
    if how in ("inner", "left_semi"):
        chain.append(Where(found))
    elif how == "left_anti":
        chain.append(Where(Case(((found, no),), Literal(True, BOOLEAN), BOOLEAN)))
    names = ["item", "n"] if how.endswith(("semi", "anti")) else ["item", "n", "price"]
    chain.append(Select(tuple((name, Column(name, LONG)) for name in names)))
    behind = RowSteps.of(pa.schema([*LEFT, *first.added]), chain)
    return partial(RefreshedLookup, RefreshedSpec(first, behind, "10 minutes"))


def table(rows: Any) -> pa.Table:
    columns = list(zip(*rows, strict=True)) if rows else [[], []]
    return pa.table([pa.array(each, LONG) for each in columns], schema=TABLE)


def batch(schema: pa.Schema, rows: Any) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) if rows else [[] for _ in schema]
    return pa.record_batch([pa.array(each, LONG) for each in columns], schema=schema)


def stepped(how: str = "left_outer", rows: Any = ()) -> Stepped:
    return Stepped(made(how, rows), [LEFT, RIGHT], ("item",))


KEYS = st.sampled_from([0, 1, 2, None])
TABLES = st.dictionaries(st.integers(0, 2), st.integers(10, 99), max_size=3)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), how=st.sampled_from(["inner", "left_outer", "left_semi", "left_anti"]))
def test_each_row_meets_the_version_that_was_in_force_before_its_step(data: Any, how: str) -> None:
    first = data.draw(TABLES)
    ours, versions, sent, told = stepped(how, list(first.items())), {0: first}, 0, 0
    steps = data.draw(st.integers(1, 14))
    for number, event in enumerate(data.draw(events(steps))):
        ours.happen(event)
        match data.draw(st.integers(0, 3)):
            case 0:  # all rows of the next version, cut anywhere, before it counts
                sent += 1
                versions[sent] = data.draw(TABLES)
                rows = [(*row, FIRST_VERSION + sent) for row in versions[sent].items()]
                cut = data.draw(st.integers(0, len(rows)))
                assert ours.give(batch(RIGHT, rows[:cut]), 1) == ours.give(batch(RIGHT, rows[cut:]), 1) == []
            case 1 if told < sent:  # versions may be passed over
                told = data.draw(st.integers(told + 1, sent))
                assert ours.move(NEVER, FIRST_VERSION + told + 1) == []
            case _:
                rows = [(key, number) for key in data.draw(st.lists(KEYS, max_size=5))]
                assert ours.give(batch(LEFT, rows)) == expected(how, rows, versions[told])
    if data.draw(st.booleans()) and versions[sent]:
        ours.move(END_OF_TIME, END_OF_TIME)
        assert ours.give(batch(LEFT, [(0, 0)])) == expected(how, [(0, 0)], versions[sent])


def expected(how: str, rows: Any, prices: dict[int, int]) -> list[tuple]:
    if how in ("left_semi", "left_anti"):
        return [row for row in rows if (row[0] in prices) == (how == "left_semi")]
    return [(*row, prices.get(row[0])) for row in rows if how == "left_outer" or row[0] in prices]


def test_a_version_without_rows_of_a_partition_counts_there_too() -> None:
    ours = stepped(rows=[(1, 10)])
    assert ours.give(batch(LEFT, [(1, 0)])) == [(1, 0, 10)]
    ours.move(NEVER, FIRST_VERSION + 1)
    assert ours.give(batch(LEFT, [(1, 0)])) == [(1, 0, 10)], "the version with which the query began"
    ours.move(NEVER, FIRST_VERSION + 2)
    assert ours.give(batch(LEFT, [(1, 0)])) == [(1, 0, None)]


def test_changes_have_a_version_once() -> None:
    ours = stepped()
    ours.happen(CHECKPOINT)
    ours.give(batch(RIGHT, [(key, key, FIRST_VERSION + 1) for key in range(1000)]), 1)
    ours.move(NEVER, FIRST_VERSION + 2)
    assert ours.operator.changes()["rows"].num_rows == 1000
    ours.give(batch(LEFT, [(1, 0)]))
    assert ours.operator.changes()["rows"] is None
