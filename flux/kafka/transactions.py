"""Which record batches belong to transactions that were aborted (read_committed).

A broker tells of those in an answer: producer, and offset of the first record. A transaction ends with a control batch of its
producer, which says whether it was aborted. Whoever reads an answer piece by piece follows it from its first batch to its last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from flux.kafka import kernels

_ABORT = 0


class Aborted(NamedTuple):
    """A transaction that was aborted, as an answer to a fetch tells it."""

    producer: int
    first_offset: int


class Transactions:
    """Of one answer. False where it tells of none."""

    def __init__(self, aborted: Iterable[Aborted] = ()) -> None:
        self._waiting = sorted(aborted, key=lambda each: each.first_offset, reverse=True)
        self._under_way: set[int] = set()  # producers

    def __bool__(self) -> bool:
        return bool(self._waiting or self._under_way)

    def copy(self) -> Transactions:
        made = Transactions()
        made._waiting, made._under_way = list(self._waiting), set(self._under_way)
        return made

    def follow(self, batches: np.ndarray, control: Callable[[int], int]) -> np.ndarray:
        """Whether each of the next batches belongs to one of them. ``control``: what control batch i says.

        A loop over batches, not rows, and only in answers that tell of such transactions."""
        found = np.zeros(len(batches), np.bool_)
        columns = [kernels.BASE, kernels.LAST_DELTA, kernels.ATTRIBUTES, kernels.PRODUCER]
        for i, (base, delta, attributes, producer) in enumerate(batches[:, columns].tolist()):
            while self._waiting and self._waiting[-1].first_offset <= base + delta:
                self._under_way.add(self._waiting.pop().producer)
            if attributes & kernels.CONTROL:
                if producer in self._under_way and control(i) == _ABORT:
                    self._under_way.discard(producer)
            elif attributes & kernels.TRANSACTIONAL:
                found[i] = producer in self._under_way
        return found
