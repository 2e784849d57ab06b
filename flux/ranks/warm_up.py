"""Compilation of the kernels of this room, or their loading from the disk cache, before rows wait for them."""

from __future__ import annotations

import functools

import numpy as np

from flux.ranks import kernels


@functools.cache
def warm_up() -> None:
    """Put a row through every kernel, once in a process."""
    slot, numbers = np.zeros(1, np.int32), np.zeros(1, np.int64)
    kernels.first_rows(slot, numbers, 0, numbers.copy(), numbers.copy())


if __name__ == "__main__":
    warm_up()
