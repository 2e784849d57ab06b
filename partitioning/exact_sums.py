"""Sums and means of doubles that are rounded once, when a result is asked for.

Law: a result depends on the rows alone, not on their order, nor on how they were split into updates and merged. A sum is kept as
several doubles without a rounding error (Shewchuk 1997, as fsum of Python does): two or three for values of a like size,
forty at most. The terms of a state may depend on the order; their sum does not.

A partial sum beyond the range of doubles is an error, because another order of the rows might have stayed within.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from partitioning import kernels
from partitioning.accumulators import Accumulator, _doubles, _one
from partitioning.columns import raw
from partitioning.errors import SumOverflowError

#: Terms of a slot for which there is room at the beginning. It doubles for all slots when one needs more.
TERMS_MIN = 4


class ExactSum(Accumulator):
    """The sum of a column of numbers, as the double that is nearest to it."""

    name = "sum"
    result_type = pa.float64()
    _arrays = ("_terms", "_used", "_beyond", "_counts")

    def __init__(self, column: str, type_: pa.DataType) -> None:
        super().__init__(column, type_)
        self._terms = np.zeros((0, TERMS_MIN), np.float64)
        self._used = np.zeros(0, np.int64)
        #: The sum of the values that are infinite or NaN.
        self._beyond = np.zeros(0, np.float64)
        self._counts = np.zeros(0, np.int64)

    @property
    def parts(self) -> tuple[str, ...]:
        return ("terms", "beyond", "counts")

    def state(self, slots: np.ndarray | None = None) -> list[tuple[str, pa.Array]]:
        which = slice(0, self.size) if slots is None else slots
        used, terms = self._used[which], self._terms[which]
        there = np.arange(terms.shape[1]) < used[:, None]
        offsets = pa.array(np.concatenate([[0], np.cumsum(used)]))
        listed = pa.LargeListArray.from_arrays(offsets, pa.array(terms[there]))
        return [("terms", listed), ("beyond", pa.array(self._beyond[which])), ("counts", pa.array(self._counts[which]))]

    def load(self, state: Iterable[tuple[str, pa.Array]]) -> None:
        state = list(state)
        self._terms, self._used = _unlisted(_one(state, "terms"), TERMS_MIN)
        self._beyond = _one(state, "beyond").to_numpy(zero_copy_only=False).astype(np.float64)
        self._counts = _one(state, "counts").to_numpy(zero_copy_only=False).astype(np.int64)
        self.size = self._room = len(self._counts)

    def put(self, slots: np.ndarray, state: Iterable[tuple[str, pa.Array]], size: int) -> None:
        """Replace the state of some slots, each below ``size``, by a newer one."""
        self._grow(size)
        state = list(state)
        terms, used = _unlisted(_one(state, "terms"), self._terms.shape[1])
        self._widen(terms.shape[1])
        self._terms[slots, : terms.shape[1]], self._used[slots] = terms, used
        self._beyond[slots] = _one(state, "beyond").to_numpy(zero_copy_only=False)
        self._counts[slots] = _one(state, "counts").to_numpy(zero_copy_only=False)

    def _widen(self, terms: int) -> None:
        """Make room for this number of terms in each slot."""
        wider = terms - self._terms.shape[1]
        if wider > 0:
            self._terms = np.pad(self._terms, ((0, 0), (0, wider)))

    def _add(self, slots: np.ndarray, column: pa.Array | None) -> None:
        values, done = raw(column), 0
        while done < len(slots):
            done, problem = kernels.add_exactly(
                slots, *values, done, self._terms, self._used, self._beyond, self._counts
            )  # fmt: skip
            self._solve(problem)

    def _merge(self, slots: np.ndarray, other: Any, every: slice) -> None:
        left, done = other._used[every].copy(), 0
        while done < len(slots):
            done, problem = kernels.merge_exactly(
                slots, done, other._terms, left, other._beyond, self._terms, self._used, self._beyond
            )  # fmt: skip
            self._solve(problem)
        self._counts[slots] += other._counts[every]

    def _solve(self, problem: int) -> None:
        if problem == 2:
            raise SumOverflowError(self.column, self.result_type, "exact sum, or a part of it,")
        if problem:
            self._widen(2 * self._terms.shape[1])

    def _sums(self, slots: np.ndarray) -> np.ndarray:
        sums = np.empty(len(slots), np.float64)
        kernels.round_sums(np.asarray(slots, np.int32), self._terms, self._used, self._beyond, sums)
        return sums

    def _result(self, slots: np.ndarray) -> pa.Array:
        return _doubles(self._sums(slots), self._counts[slots] > 0)


class ExactMean(ExactSum):
    """The mean of a column of numbers: its exact sum, divided when a result is asked for. An integer counts as the double that
    is nearest to it."""

    name = "mean"

    def _result(self, slots: np.ndarray) -> pa.Array:
        counts = self._counts[slots]
        return _doubles(self._sums(slots) / np.maximum(counts, 1), counts > 0)


def _unlisted(listed: pa.Array, terms_min: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the terms of each slot, and their number, from a column of lists."""
    offsets = listed.offsets.to_numpy()
    used = np.diff(offsets).astype(np.int64)
    terms = np.zeros((len(used), max(terms_min, int(used.max(initial=0)))), np.float64)
    terms[np.arange(terms.shape[1]) < used[:, None]] = listed.values.to_numpy()[offsets[0] : offsets[-1]]
    return terms, used
