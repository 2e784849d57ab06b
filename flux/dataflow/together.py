"""Aggregates of several partitions of a stage that apply their rows in one call (design: together).

Small batches cost what is called for them, and a batch touches most partitions. So the rows of all partitions go through each
kernel together: how many partitions there are is no multiplier of Python work, but for a look at what has grown. Law: state and
results are those of ``process`` of each partition with its own rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from flux.dataflow.aggregate import Aggregate
from flux.dataflow.chained import Chained
from flux.dataflow.operator import Operator
from partitioning import kernels
from partitioning.errors import SumOverflowError
from partitioning.keyed_state import KeyIndex
from partitioning.several import keys_each, result_each, slots_each, update_each


class Results(NamedTuple):
    """Of all partitions, one behind the other: those of partition k are rows ``ends[k - 1]`` to ``ends[k]``, exclusive."""

    batch: pa.RecordBatch
    ends: list[int]


class Places(NamedTuple):
    """Where the state of an operator is: int64[2 + measures, 5] (see ``kernels``), as long as there is room for so much."""

    rooms: tuple[int, ...]
    at: np.ndarray


#: Rows of ``Places.at``.
TABLE, MARKS, MEASURES = 0, 1, 2


class FailedPartition(Exception):
    """The rows of one partition cannot be applied; ``at``: where it is in what was given."""

    def __init__(self, at: int, error: Exception) -> None:
        super().__init__(at, error)
        self.at, self.error = at, error


def aggregate_of(operator: Operator) -> Aggregate | None:
    """The aggregate that gets the rows of an operator; what it gives may go through a second one of the same stage."""
    first = operator.first if isinstance(operator, Chained) else operator
    return first if isinstance(first, Aggregate) else None


def goes_together(of_stage: Operator) -> bool:
    """Whether it can apply its rows in one call with others of its stage: an aggregate with a key whose rows nobody else
    looks at, of measures that have a kernel for it."""
    operator = aggregate_of(of_stage)
    if operator is None or operator._index is None:
        return False
    kind, same = type(operator), ("process", "_touched", "_results", "_clear")
    own = any(getattr(kind, name) is not getattr(Aggregate, name) for name in same)
    return not own and all(made.in_one_call for made in operator._accumulators)


def process_each(operators: Sequence[Aggregate], batch: pa.RecordBatch, rows: Sequence[int]) -> Results | None:
    """``process`` of each, with so many rows of the batch, one partition behind the other; each has some. All are of one stage,
    and the rows of the same input of it. None: they give nothing now. FailedPartition where a sum, or a key, does
    not fit."""
    first, which = operators[0], operators[0].context.input
    indexes = [_index(operator) for operator in operators]
    row_ends = list(accumulate(rows))
    ends = np.array(row_ends)
    places = np.array([_ready_for(operators, at, more) for at, more in enumerate(rows)])
    slots = slots_each(indexes, [batch.column(at) for at in first._keys_at[which]], ends, places, TABLE)
    for operator, index in zip(operators, indexes, strict=True):
        operator._size = size = len(index)
        for made in operator._accumulators:
            made.size = max(made.size, size)
    for measure, (made, at) in enumerate(zip(first._accumulators, first._columns_at[which], strict=True), MEASURES):
        failed = update_each(made, slots, None if at is None else batch.column(at), ends, places, measure)
        if failed >= 0:
            raise FailedPartition(failed, SumOverflowError(made.column, made.result_type))
    if not first._updates:
        _note_changes(operators, slots, row_ends)
        return None
    touched, found = np.empty(len(slots), np.int32), np.empty(len(ends), np.int64)
    kernels.touched_each(slots, ends, places, MARKS, touched, found)
    touched = touched[: found[-1]]
    _note_changes(operators, touched, found.tolist())
    columns = keys_each(indexes, touched, found, places, TABLE)
    for measure, made in enumerate(first._accumulators, MEASURES):
        columns.append(result_each(made, touched, found, places, measure))
    return Results(pa.RecordBatch.from_arrays(columns, schema=first._output), found.tolist())


def _index(operator: Aggregate) -> KeyIndex:
    assert operator._index is not None
    return operator._index


def _ready_for(operators: Sequence[Aggregate], at: int, rows: int) -> np.ndarray:
    """Where it keeps its state, as kernels take it, with room for so many new keys: table of keys, marks, measure by measure.
    Looked up again only when something has grown: an address of an array takes longer than all the rest."""
    operator = operators[at]
    index, size = _index(operator), operator._size + rows
    words = index.words
    try:
        if words is not None:
            words.reserve(rows)
        for made in operator._accumulators:
            made.reserve(size)
        mark = operator._next_mark(size)
    except MemoryError as error:
        raise FailedPartition(at, error) from error
    found = operator._places
    rooms = (
        0 if words is None else words.capacity,
        len(operator._marks),
        *[made.room for made in operator._accumulators],
    )
    if found is None or found.rooms != rooms:
        table = (0,) * 5 if words is None else words.places()
        marks = operator._marks.ctypes.data, 0, len(operator._marks), 0, 0
        measures = [(*made.places(), 0, 0) for made in operator._accumulators]
        found = operator._places = Places(rooms, np.array([table, marks, *measures], np.int64))
    found.at[MARKS, 1] = mark
    kept: np.ndarray = found.at
    return kept


def _note_changes(operators: Sequence[Aggregate], slots: np.ndarray, ends: Sequence[int]) -> None:
    start = 0
    for operator, end in zip(operators, ends, strict=True):
        if operator._changed.noting:
            operator._changed.note(slots[start:end], operator._size)
        start = end
