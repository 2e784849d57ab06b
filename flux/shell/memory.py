"""Free memory that a worker keeps (design: kept-memory).

C's allocator returns a large piece to the operating system as soon as it is free, and asks for another one for the next
batch. The first touch of fresh memory takes longer than filling it, several times as long in a virtual machine,
where the host has to find it first; and a moved state needs a few times its size. So free memory is kept, up to a bound,
until the worker ends.

Only glibc has such settings; elsewhere nothing changes.
"""

from __future__ import annotations

import ctypes
from typing import Any

#: Parameters of mallopt (malloc.h).
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
#: Larger pieces have memory of their own, which is returned.
LARGEST_BYTES = 1 << 30


def keep(nbytes: int) -> bool:
    """Keep up to ``nbytes`` of free memory at the end of the heap. Return whether the allocator has accepted the settings; with 0
    bytes they are left alone."""
    libc = _glibc()
    if libc is None or nbytes <= 0:
        return False
    # One heap for all threads: heaps of other threads are small, and larger pieces of theirs are mapped anew each time.
    wanted = ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, LARGEST_BYTES), (_TRIM_THRESHOLD, nbytes))
    return all(libc.mallopt(name, value) == 1 for name, value in wanted)


def give_back() -> None:
    """Return free memory to the operating system: Spark may use the process for something else."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(ctypes.c_size_t(0))


def _glibc() -> Any:
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018
    except (OSError, AttributeError, TypeError):
        return None
    return libc
