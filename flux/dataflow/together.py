"""Aggregates of several partitions of a stage that apply their rows in one call (design: together).

The cost of a small batch is call overhead, and a batch touches most partitions. So the rows of all partitions go through each
kernel together: Python work does not grow with the number of partitions, except for a check of which arrays have grown. Law:
state and results are those of ``process`` of each partition with its own rows.
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
    """Results of all partitions, one behind the other: rows ``ends[k - 1]`` to ``ends[k]``, exclusive, belong to partition k."""

    batch: pa.RecordBatch
    ends: list[int]


class Places(NamedTuple):
    """Addresses of the state of an operator: int64[2 + measures, 5] (see ``kernels``). They are valid while ``rooms``, the
    capacities of the arrays, stay the same."""

    rooms: tuple[int, ...]
    at: np.ndarray


#: Rows of ``Places.at``.
TABLE, MARKS, MEASURES = 0, 1, 2


class FailedPartition(Exception):
    """Rows of one partition cannot be applied; ``at`` is the index of the partition among those of the call."""

    def __init__(self, at: int, error: Exception) -> None:
        super().__init__(at, error)
        self.at, self.error = at, error


def aggregate_of(operator: Operator) -> Aggregate | None:
    """Return the aggregate that gets the rows of an operator; its output may go through a second operator of the same stage."""
    first = operator.first if isinstance(operator, Chained) else operator
    return first if isinstance(first, Aggregate) else None


def goes_together(of_stage: Operator) -> bool:
    """Return whether an operator can apply its rows in one call with others of its stage: an aggregate with a key, of measures
    that have a kernel for it, without methods of a subclass that look at the rows."""
    operator = aggregate_of(of_stage)
    if operator is None or operator._index is None:
        return False
    kind, same = type(operator), ("process", "_touched", "_results", "_clear")
    own = any(getattr(kind, name) is not getattr(Aggregate, name) for name in same)
    return not own and all(made.in_one_call for made in operator._accumulators)


def process_each(operators: Sequence[Aggregate], batch: pa.RecordBatch, rows: Sequence[int]) -> Results | None:
    """Do ``process`` of each operator with its share of the batch: ``rows[k]`` rows, at least one, for operator k, one operator
    behind the other. All are of one stage, and the rows are of the same input of it. None: the stage gives no output now. Raises
    FailedPartition if a sum, or a key, does not fit."""
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
    """Return the addresses of an operator's state, as kernels take them, with room for ``rows`` new keys: table of keys, marks,
    then each measure. They are looked up again only if an array has grown: an array's address takes longer than all the rest."""
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
