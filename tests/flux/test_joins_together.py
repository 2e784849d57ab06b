"""Joins of several partitions in one call give the same results as each alone with its own rows (design: together)."""

from __future__ import annotations

from random import Random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flux.joins import join
from flux.joins.join import Join
from flux.joins.join_spec import LEFT, RIGHT, JoinSpec
from flux.operators.batches import given_batches
from flux.operators.operator import JointOutput, move_watermarks
from flux.windows.window import END_OF_TIME
from partitioning.errors import FailedPartition
from tests.flux.test_joins import (
    KEY_TYPES,
    batch_of,
    bounded,
    opened,
    rest_of,
    said,
    schema_of,
    steps_of,
    travelled,
    unbounded,
)

PARTITIONS = 3


def alone(operators: list[Join], parts: list[pa.RecordBatch]) -> list[list[pa.RecordBatch]]:
    return [list(given_batches(each.process(part))) for each, part in zip(operators, parts, strict=True)]


def together(operators: list[Join], parts: list[pa.RecordBatch]) -> list[list[pa.RecordBatch]]:
    """Return the batches of each operator, which the worker makes of the output of one call."""
    behind = pa.concat_batches([parts[0], *parts]).slice(parts[0].num_rows)  # rows are read by address
    found = Join.process_many(operators, behind, [part.num_rows for part in parts])
    if found is None:
        return [[] for _ in operators]
    if not isinstance(found, JointOutput):
        return [list(given_batches(each)) for each in found]
    starts = [0, *found.ends]
    cut = [found.batch.slice(start, end - start) for start, end in zip(starts, found.ends, strict=False)]
    return [[part] if part.num_rows else [] for part in cut]


def lines(outputs: list[list[pa.RecordBatch]]) -> list[Any]:
    """Return the rows of each batch of each operator; floats as text, because NaN is not equal to itself."""
    return [
        [said(list(zip(*map(pa.Array.to_pylist, batch.columns), strict=True))) for batch in each] for each in outputs
    ]


@pytest.mark.parametrize("keys", KEY_TYPES)
@settings(deadline=None, max_examples=12)
@given(seed=st.integers(0, 1 << 32), few=st.booleans())
def test_state_and_output_are_those_of_each_partition_alone(keys: str, seed: int, few: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if few:  # a row completes more pairs than fit a batch
            patch.setattr(join, "PAIRS_MAX", 3)
            patch.setattr(join, "KEYS_MIN", 1)
        apply_both(Random(seed), keys)


def apply_both(draw: Random, keys: str) -> None:
    """Apply drawn steps to partitions in one call, and to equal ones alone, and compare them."""
    spec, schema = draw.choice([bounded, unbounded])(draw, keys), schema_of(keys)
    ours, theirs = ([opened(spec, schema) for _ in range(PARTITIONS)] for _ in range(2))
    assert all(each.processes_many for each in ours)
    for kind, what, rows in steps_of(draw, keys, spec):
        for at, operator in enumerate([*ours, *theirs]):
            operator.context.step += 1
            operator.context.now += at % PARTITIONS / 1_000_000
        if kind == "marks":
            marks = [mark if at is not None else END_OF_TIME for mark, at in zip(what, spec.times, strict=True)]
            moved = [[list(given_batches(move_watermarks(each, each.context, marks))) for each in some]
                     for some in (ours, theirs)]  # fmt: skip
            assert lines(moved[0]) == lines(moved[1])
        elif kind == "rows":
            for operator in (*ours, *theirs):
                operator.context.input = what
            parts = [batch_of(schema, draw.sample(rows, draw.randint(1, len(rows)))) for _ in range(PARTITIONS)]
            assert lines(together(ours, parts)) == lines(alone(theirs, parts))
    for our, their in zip(ours, theirs, strict=True):
        assert (our._flux_left_out(), our.needs_from()) == (their._flux_left_out(), their.needs_from())
        assert our.context.timers.pending == their.context.timers.pending
        assert repr(travelled(our.snapshot())) == repr(travelled(their.snapshot()))
        assert lines([list(given_batches(our.finish()))]) == lines([list(given_batches(their.finish()))])


SCHEMA = pa.schema([("k", pa.int64()), ("n", pa.int64()), ("text", pa.string())])
OUTPUTS = (("k", 0), ("n", 1), ("there", 4), ("text", 5))


def rows_of_key(key: int, count: int, text: str = "") -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [pa.array([key] * count), pa.array(range(count)), pa.array([text] * count)], schema=SCHEMA
    )


def waiting(counts: list[int], text: str = "") -> list[Join]:
    """Return a join for each partition, with this many right rows of key 1."""
    made = [opened(JoinSpec("inner", ((0,), (0,)), OUTPUTS, ttl=None), SCHEMA) for _ in counts]
    for operator, count in zip(made, counts, strict=True):
        operator.context.input = RIGHT
        alone([operator], [rows_of_key(1, count, text)])
        operator.context.input = LEFT
    return made


def test_output_of_one_batch_a_partition_is_joint_and_several_batches_are_made_when_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = [rows_of_key(1, 2), rows_of_key(2, 2), rows_of_key(1, 3)]
    found = Join.process_many(waiting([5, 5, 5]), pa.concat_batches(parts), [2, 2, 3])
    assert isinstance(found, JointOutput)
    assert found.ends == [10, 10, 25]
    monkeypatch.setattr(join, "KEYS_MIN", 4)
    monkeypatch.setattr(join, "PAIRS_MAX", 4)
    operators = waiting([5, 40, 5])
    taken: list[int] = []
    whole = Join._given
    monkeypatch.setattr(Join, "_given", lambda self, *given: (taken.append(1), whole(self, *given))[1])
    parts[1] = rows_of_key(1, 2)
    found = Join.process_many(operators, pa.concat_batches(parts), [2, 2, 3])
    assert isinstance(found, list)
    assert len(taken) == 6, "the third batch of a partition is made before it is asked for"
    assert [sum(batch.num_rows for batch in each) for each in map(list, found)] == [10, 80, 15]


def test_large_output_is_not_copied_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "JOINT_BYTES_MAX", 1000)
    parts = [rows_of_key(1, 1), rows_of_key(1, 1)]
    found = Join.process_many(waiting([2, 2], "x" * 600), pa.concat_batches(parts), [1, 1])
    assert isinstance(found, list)
    assert [[batch.num_rows for batch in each] for each in map(list, found)] == [[2], [2]]


def test_an_error_names_its_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    def holds(operator: Join, *_: Any) -> Any:
        raise ArithmeticError(f"of {operator.context.partition}")

    spec = JoinSpec("inner", ((0,), (0,)), (("k", 0),), rest=rest_of("number"), ttl=None)
    operators = [opened(spec, schema_of("number")) for _ in range(2)]
    for at, operator in enumerate(operators):
        operator.context.partition = at
    monkeypatch.setattr(Join, "_holds", holds)
    draw = Random(1)
    (rows,) = [rows for kind, _, rows in steps_of(draw, "number", spec) if kind == "rows"][:1]
    part = batch_of(schema_of("number"), rows)
    operators[1].context.input = RIGHT
    alone(operators[1:], [part])
    for operator in operators:
        operator.context.input = LEFT
    with pytest.raises(FailedPartition, match="of 1") as raised:
        Join.process_many(operators, pa.concat_batches([part, part]), [part.num_rows] * 2)
    assert raised.value.at == 1
