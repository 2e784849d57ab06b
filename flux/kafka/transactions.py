"""Record batches of aborted transactions, for readers with read_committed.

An answer of a broker lists such transactions: producer, and offset of the first record. A transaction ends with a control
batch of its producer, which commits or aborts it. A reader that takes an answer piece by piece follows it from its first
batch to its last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from flux.kafka import kernels

_ABORT = 0


class Aborted(NamedTuple):
    """Aborted transaction, as an answer to a fetch lists it."""

    #: Id of the producer.
    producer: int
    #: Offset of the transaction's first record.
    first_offset: int


class Transactions:
    """Aborted transactions of one answer. False if there are none."""

    def __init__(self, aborted: Iterable[Aborted] = ()) -> None:
        #: Transactions that begin behind the batches that were followed, the next one last.
        self._waiting = sorted(aborted, key=lambda each: each.first_offset, reverse=True)
        self._under_way: set[int] = set()  # producers with an aborted transaction that has begun and not ended

    def __bool__(self) -> bool:
        return bool(self._waiting or self._under_way)

    def copy(self) -> Transactions:
        made = Transactions()
        made._waiting, made._under_way = list(self._waiting), set(self._under_way)
        return made

    def follow(self, batches: np.ndarray, control: Callable[[int], int]) -> np.ndarray:
        """Tell for each of the next batches whether it belongs to an aborted transaction. ``control`` returns the kind of
        control batch i.

        This is a loop over batches, not rows, and runs only for answers with such transactions."""
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
