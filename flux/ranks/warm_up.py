"""Compilation of the kernels of this room, or their loading from the disk cache, before rows wait for them."""

from __future__ import annotations

import functools
from decimal import Decimal

import numpy as np
import pyarrow as pa

from flux.ranks import kernels
from flux.ranks.best_rows import BestOrder, BestRows
from flux.ranks.order_keys import SortColumn


@functools.cache
def warm_up() -> None:
    """Put a row through every kernel, once in a process."""
    slot, numbers = np.zeros(1, np.int32), np.zeros(1, np.int64)
    kernels.first_rows(slot, numbers, 0, numbers.copy(), numbers.copy())
    batch = pa.record_batch({
        "number": pa.array([1, 2], pa.int64()), "text": pa.array(["a", None]), "decimal": pa.array([Decimal(1), None]),
        "list": pa.array([[1], None]),
    })  # fmt: skip
    for ttl, times in ((None, None), (1, np.zeros(2, np.int64))):
        for ties in (False, True):
            best = BestRows(batch.schema, [], BestOrder(1, (SortColumn(0),), ties, ttl))
            best.add(batch, times, tell=True)
            best.add(batch, times, tell=True)
            list(best.ranked(1))


if __name__ == "__main__":
    warm_up()
