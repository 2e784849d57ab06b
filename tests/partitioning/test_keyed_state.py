"""Groups are a separate object: an aggregate has one, a windowed operator one for each pane."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partitioning.errors import FailedPartition, StateMismatchError, SumOverflowError
from partitioning.keyed_state import JointUpdate, KeyedState, TypedMeasure

TYPES = {"i": pa.int32(), "u": pa.uint64(), "f": pa.float64(), "d": pa.decimal128(38, 2), "s": pa.string()}
MEASURES = {
    f"{kind}_{column}": TypedMeasure(kind, column, type_)
    for column, type_ in TYPES.items()
    for kind in (("count", "min", "max") if column == "s" else ("count", "sum", "mean", "min", "max"))
    if (kind, column) not in (("sum", "u"), ("mean", "u"))
} | {"rows": TypedMeasure("count")}
KEYS = {
    "one word": [pa.field("k", pa.int64())],
    "two columns": [pa.field("k", pa.int64()), pa.field("t", pa.string())],
    "no key": [],
}
ROW = st.tuples(
    st.none() | st.integers(0, 6),
    st.none() | st.sampled_from("ab"),
    st.none() | st.integers(-9, 9),
    st.none() | st.sampled_from([0, 1, 2**64 - 1]),
    # Sums of these numbers are exact, so that they do not depend on the order of the additions.
    st.none() | st.sampled_from([0.0, -0.5, 3.0, float("nan")]),
    st.none()
    | st.sampled_from([Decimal(0), Decimal("-0.01"), Decimal(2**70), Decimal(-(2**70)), Decimal(2**64) / 100]),
    st.none() | st.text("ab\0é", max_size=9),
)
SCHEMA = pa.schema([("k", pa.int64()), ("t", pa.string()), *TYPES.items()])


def batch(rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
    columns = zip(*rows, strict=True) if rows else [()] * len(SCHEMA)
    return pa.RecordBatch.from_arrays(
        [pa.array(c, t) for c, t in zip(columns, SCHEMA.types, strict=True)], schema=SCHEMA
    )


def add(state: KeyedState, rows: pa.RecordBatch) -> None:
    slots = state.slots([rows.column(field.name) for field in state.keys], rows.num_rows)
    state.update(slots, [None if m.column is None else rows.column(m.column) for m in state.measures.values()])
    state.note(state.touched(slots))


def filled(keys: list[pa.Field], rows: pa.RecordBatch) -> KeyedState:
    state = KeyedState(keys, MEASURES)
    if rows.num_rows:
        add(state, rows)
    return state


def told(state: KeyedState) -> str:
    return repr([column.to_pylist() for column in state.results(np.arange(len(state), dtype=np.int32))])


@settings(deadline=None, max_examples=60)
@given(st.lists(ROW, max_size=25), st.lists(ROW, max_size=25), st.sampled_from(sorted(KEYS)), st.booleans())
def test_two_states_merged_are_the_state_of_all_rows(
    rows: list[Any], later: list[Any], key: str, restored: bool
) -> None:
    ours, theirs = filled(KEYS[key], batch(rows)), filled(KEYS[key], batch(later))
    if restored:
        for state in (ours, theirs):
            state.restore(state.snapshot())
    base = ours.empty()
    base.restore(ours.snapshot())
    ours.changes()
    before = told(theirs)
    ours.merge(theirs)
    assert told(ours) == told(filled(KEYS[key], batch(rows + later)))
    assert told(theirs) == before
    changed = ours.changes()
    assert changed is not None
    base.apply_changes(changed)
    assert told(base) == told(ours)
    add(ours, batch([(1, "a", 1, 1, 1.0, Decimal(1), "x")]))
    add(base, batch([(1, "a", 1, 1, 1.0, Decimal(1), "x")]))
    assert told(base) == told(ours)


def test_merged_sums_of_decimals_carry_from_word_to_word() -> None:
    type_ = TYPES["d"]
    values = [Decimal(f"{sign}{n}") / 100 for n in (0, 1, 2**63, 2**64, 2**64 - 1, 10**37) for sign in "+-"]
    kinds = {"sum": TypedMeasure("sum", "d", type_), "least": TypedMeasure("min", "d", type_)}
    for one in values:
        states = [KeyedState([pa.field("k", pa.int64())], kinds) for _ in range(3)]
        for state, column in zip(states, ([one] * len(values), values), strict=False):
            state.update(state.slots([pa.array(range(len(values)))], len(values)), [pa.array(column, type_)] * 2)
        states[0].merge(states[1])
        both = pa.array([value for other in values for value in (one, other)], type_)
        states[2].update(states[2].slots([pa.array([k // 2 for k in range(len(both))])], len(both)), [both] * 2)
        assert told(states[0]) == told(states[2])


def test_a_merged_sum_that_does_not_fit_is_an_error() -> None:
    kinds = {"sum": TypedMeasure("sum", "i", pa.int64())}
    one, other = KeyedState([], kinds), KeyedState([], kinds)
    for state in (one, other):
        state.update(state.slots([], 1), [pa.array([2**62])])
    with pytest.raises(SumOverflowError, match="sum of column 'i' does not fit int64"):
        one.merge(other)


def test_states_of_other_keys_or_measures_are_refused() -> None:
    state = KeyedState(KEYS["one word"], {"rows": TypedMeasure("count")})
    other = KeyedState(KEYS["no key"], {"rows": TypedMeasure("count")})
    with pytest.raises(
        StateMismatchError, match=r"of no key: count\(\) cannot be merged into one of k int64: count\(\)"
    ):
        state.merge(other)
    with pytest.raises(StateMismatchError, match=r"has columns \['rows.counts'\], expected \['key.0', 'rows.counts'\]"):
        state.restore(other.snapshot())
    state.changes()
    changes = filled(KEYS["one word"], batch([])).empty().changes()
    assert changes is None, "there was no call before"
    state.update(state.slots([pa.array([1, 2])], 2), [None])
    state.note(np.array([0, 1], np.int32))
    changes = state.changes()
    assert changes is not None
    with pytest.raises(StateMismatchError, match="of a state of 0 keys cannot be applied to one of 2"):
        state.apply_changes(changes)


def test_a_state_of_few_rows_has_little_memory_of_its_own() -> None:
    """Bound the memory of a small state, because a windowed operator has one for each pane."""
    pane = KeyedState(KEYS["one word"], {"rows": TypedMeasure("count"), "i": TypedMeasure("sum", "i", pa.int32())})
    pane.update(pane.slots([pa.array([1])], 1), [None, pa.array([1], pa.int32())])
    assert pane.nbytes < 8192


def test_several_states_take_their_rows_in_one_call() -> None:
    kinds = {"rows": TypedMeasure("count"), "i": TypedMeasure("sum", "i", pa.int64())}
    states = [KeyedState(KEYS["one word"], kinds) for _ in range(2)]
    update = JointUpdate(states, [2, 3])
    slots = update.slots([pa.array([5, 5, 7, 8, 7])])
    update.update(slots, [None, pa.array([1, 2, 10, 20, 30])])
    touched = update.touched(slots)
    assert touched.ends.tolist() == [1, 3]
    assert [column.to_pylist() for column in update.results(touched)] == [[5, 7, 8], [2, 2, 1], [3, 40, 20]]
    assert [len(state) for state in states] == [1, 2]
    more = JointUpdate(states, [1, 1])
    slots = more.slots([pa.array([5, 7])])
    with pytest.raises(FailedPartition) as raised:
        more.update(slots, [None, pa.array([1, 2**63 - 1])])
    assert raised.value.at == 1
    assert not KeyedState(KEYS["no key"], kinds).joins
    assert not KeyedState(KEYS["one word"], {"s": TypedMeasure("min", "s", pa.string())}).joins
