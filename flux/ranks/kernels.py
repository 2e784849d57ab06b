"""Compiled loops of ranks and duplicates. No policy here: callers choose columns and sizes.

All are in this one file because the on-disk cache of a kernel is renewed when its own file changes, not when the file of a
function that it calls does. Every kernel releases the interpreter lock.
"""

from __future__ import annotations

import numpy as np
from numba import njit

Array = np.ndarray

kernel = njit(cache=True, nogil=True, error_model="numpy")


# ---- duplicates ----------------------------------------------------------------------------------


@kernel
def first_rows(slots: Array, times: Array, ttl: int, ends: Array, out: Array) -> int:
    """Write the rows that are no duplicates to ``out``, and return their number. ends[slot] is the last time at which the key of
    a slot is a duplicate; it moves to ``ttl`` behind each row that is given."""
    count = 0
    for i in range(slots.size):
        s, t = slots[i], times[i]
        if t > ends[s]:
            ends[s] = t + ttl
            out[count] = i
            count += 1
    return count
