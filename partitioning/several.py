"""Keyed state of several partitions, looked up and updated in one call.

The cost of a small batch is call overhead, so one call serves all partitions. Their rows lie one behind the other: the rows of
partition k end at row ``ends[k]`` (int64, exclusive). ``places[k, which]`` (int64[5], from ``places()`` of a table or an
accumulator) has the addresses of the table of partition k, or of one of its accumulators.

Law: keys, slots and measures equal those of separate calls for each partition with its own rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from partitioning import kernels
from partitioning.accumulators import Accumulator, Count
from partitioning.columns import fixed_column, raw
from partitioning.keyed_state import KeyIndex


def slots_each(
    indexes: Sequence[KeyIndex], columns: Sequence[pa.Array], ends: np.ndarray, places: np.ndarray, which: int
) -> np.ndarray:
    """Find the slots of all rows, as ``KeyIndex.slots`` does.

    Keys of one word take a single call, for which every table must have room already. Other keys take a call for each
    partition."""
    if indexes[0].words is None:
        return np.concatenate([
            index.slots([column.slice(start, end - start) for column in columns])
            for index, (start, end) in zip(indexes, _parts(ends), strict=True)
        ])  # fmt: skip
    (column,), (type_,) = columns, indexes[0].types
    if column.type != type_ or len(column) != ends[-1]:
        # Kernels read by address: a wrong type or length would read outside of the column.
        raise TypeError(f"expected {ends[-1]} rows of {type_}, not {len(column)} rows of {column.type}")
    out = np.empty(len(column), np.int32)
    whole = kernels.find_words_each(*raw(column), ends, out, places, which)
    assert whole, "a table had no room for its rows"
    return out


def keys_each(
    indexes: Sequence[KeyIndex], slots: np.ndarray, ends: np.ndarray, places: np.ndarray, which: int
) -> list[pa.Array]:
    """Return the keys of slots, as ``KeyIndex.keys`` does."""
    if indexes[0].words is None:
        found = [index.keys(slots[start:end]) for index, (start, end) in zip(indexes, _parts(ends), strict=True)]
        return [pa.concat_arrays(columns) for columns in zip(*found, strict=True)]
    words, valid = np.empty(len(slots), np.uint64), np.empty(len(slots), np.bool_)
    whole = kernels.take_words_each(slots, ends, places, which, words, valid) == len(slots)
    return [fixed_column(indexes[0].types[0], words, None if whole else valid)]


def update_each(
    made: Accumulator, slots: np.ndarray, column: pa.Array | None, ends: np.ndarray, places: np.ndarray, which: int
) -> int:
    """Update accumulators that are all like ``made`` and have room, as ``Accumulator.update`` does.

    Return the first partition whose sum does not fit, or -1."""
    assert made.each is not None
    if column is not None and (column.type != made.type or len(column) != ends[-1]):
        raise TypeError(f"expected {ends[-1]} rows of {made.type}, not {len(column)} rows of {column.type}")
    if column is None or (isinstance(made, Count) and not column.null_count):
        return int(kernels.update_each(made.each, slots, 0, 0, 0, 0, made.flip, ends, places, which))
    if isinstance(made, Count):
        validity = column.buffers()[0]
        about = kernels.COUNT_VALID, slots, 0, validity.address, column.offset, 0
        return int(kernels.update_each(*about, made.flip, ends, places, which))
    return int(kernels.update_each(made.each, slots, *raw(column), made.flip, ends, places, which))


def result_each(made: Accumulator, slots: np.ndarray, ends: np.ndarray, places: np.ndarray, which: int) -> pa.Array:
    """Return the results of slots, as ``Accumulator.result`` does, for accumulators like ``made``."""
    assert made.each is not None
    words, valid = np.empty(len(slots), np.int64), np.empty(len(slots), np.bool_)
    whole = kernels.gather_each(made.each, slots, ends, places, which, made.flip, words, valid) == len(slots)
    return made.column_of(words, None if whole else valid)


def _parts(ends: np.ndarray) -> list[tuple[int, int]]:
    """Return begin and end of the rows of each partition."""
    each = ends.tolist()
    return list(zip([0, *each], each, strict=False))
