"""Compilation of the kernels, or their loading from the disk cache, before rows wait for them.

Law: after ``warm_up`` no kernel is compiled any more, for columns of any type. It takes a quarter
of a second in a new process, and some seconds once after an installation.
"""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pyarrow as pa

from partitioning import find_kernels, kernels
from partitioning.accumulators import EXACT_MEAN, EXACT_SUM, accumulator
from partitioning.clustering import Clustering, cluster_by_key
from partitioning.key_index import KeyIndex
from partitioning.keyed_state import JointUpdate, KeyedState, TypedMeasure
from partitioning.slot_tables import KEYS_MIN


def is_warm() -> bool:
    """Tell whether every kernel is in the disk cache, so that ``warm_up`` only loads. False if numba's cache cannot be read."""
    named = [*vars(kernels).items(), *vars(find_kernels).items()]
    made = [kernel for name, kernel in named if hasattr(kernel, "signatures") and name[0] != "_"]
    try:
        return all(kernel._cache._cache_file._load_index() for kernel in made)
    except (AttributeError, OSError):  # this part of numba is private and may change
        return False


def warm_up() -> None:
    """Put a few rows through every kernel."""
    rows = KEYS_MIN + 1  # one more than the tables have room for, so that they double
    numbers = pa.array([None, *range(rows - 1)])
    strings = pa.array([str(number) for number in range(rows)])
    decimals = pa.array([Decimal(1)] * rows, pa.decimal128(9, 2))
    batch = pa.record_batch({"number": numbers, "string": strings})
    for key in ([0, 1], [0]):
        cluster_by_key(batch, key, 2)
        Clustering(batch.schema, key, 2).each_by_key(batch, [rows - 1, 1])
    for columns in ([numbers], [strings], [numbers, strings]):
        index = KeyIndex([pa.field("key", column.type) for column in columns])
        index.slots(columns)
        index.keys(np.zeros(1, np.int32))
        index.find(columns)
    slots = np.zeros(rows, np.int32)
    for column in (numbers, numbers.cast(pa.float64()), decimals, strings):
        for measure in ("count", "min", "max") if column is strings else ("count", "sum", "min", "max", "mean"):
            made = accumulator(measure, "column", column.type)
            made.update(slots, column, 1)
            made.result()
    for measure in (EXACT_SUM, EXACT_MEAN):
        made, other = (accumulator(measure, "column", pa.float64()) for _ in range(2))
        made.update(slots, numbers.cast(pa.float64()), 1)
        other.merge(slots[:1], made, 1)
        other.result()
    _together(numbers)
    kernels.count_rows(slots, np.zeros(1, np.int64))
    kernels.touched(slots, np.zeros(1, np.int64), 1, np.empty(rows, np.int32))
    number, one = np.zeros(1, np.int64), np.zeros(1, np.int32)
    kernels.choose_run(one, np.array([0, 1]), number + 1, number, number, np.ones(1, bool), number, one)
    kernels.choose_slices(one, np.array([0, 1]), np.ones(1, bool), np.ones(1, bool), np.empty((5, 1), np.int64))
    cells, none, readers = np.zeros((1, 1), np.int64), np.empty(0, np.int64), np.ones(1, bool)
    kernels.raise_marks(
        number - 1, 0, readers, none, none, number, 0, cells, number, number, np.empty((0, 0), bool), 1 << 62, number.copy()
    )  # fmt: skip
    kernels.any_owed(number, number, number, 0, readers)
    kernels.first_below(number, one, 0)
    heads, sessions, shut = one - 1, np.zeros((2, 4), np.int64), np.zeros(2, bool)
    outs = (np.empty(1, np.int32) for _ in range(3))
    kernels.join_sessions(one, number.ctypes.data, 0, heads, sessions, np.zeros(2, np.int32), 0, *outs)
    kernels.ended_sessions(sessions, shut, 2, 0, np.empty(2, np.int32))
    kernels.unlink_sessions(one, heads, sessions, shut)
    _join(one, number)
    state, late = np.zeros(3, np.int64), np.zeros(1, np.bool_)
    kernels.judge_times(number.ctypes.data, 1, 0, 0, 1, state, late)
    kernels.chain_rows(one, 0, number, number, number, number - 1)
    kernels.gather_chains(one, number, number, number, number)
    kernels.note_changed(slots, np.zeros(1, np.uint8), np.empty(rows, np.int32), 0)


def _join(one: np.ndarray, number: np.ndarray) -> None:
    """Call the kernels that serve joins."""
    heads, at, gone, least = one - 1, np.zeros((1, 8), np.int64), np.zeros(1, bool), np.zeros((1, 2), np.int64)
    kernels.put_rows(number, number, number, number, at, 0)
    kernels.link_rows(one, heads, at, 0, 1)
    kernels.pair_rows(one, number, number, number, heads, at, 0, 0, -2, False, number.copy(), number.copy())
    kernels.first_of_each(number, gone.copy(), gone.copy())
    kernels.skip_gone(one, gone, heads.copy(), at)
    kernels.note_least(at, 0, 1, least)
    kernels.forget_rows(at, gone, 1, 0, 0, least, number.copy())


def _together(numbers: pa.Array) -> None:
    """Call the kernels that serve several states at once."""
    state = KeyedState([pa.field("key", numbers.type)], {"sum": TypedMeasure("sum", "column", numbers.type)})
    update = JointUpdate([state], [len(numbers)])
    slots = update.slots([numbers])
    update.update(slots, [numbers])
    update.results(update.touched(slots))


if __name__ == "__main__":
    warm_up()
