"""Memory that a worker keeps although it is free (design: kept-memory).

C's allocator returns a large piece to the operating system as soon as it is free, and asks for another one for the next
batch. To touch fresh memory for the first time takes longer than to fill it, several times as long in a virtual machine,
where the host has to find it first; and a moved state needs a few times its size. So what is free is kept, up to a bound,
until the worker ends.

Only glibc lets this be said; elsewhere nothing changes.
"""

from __future__ import annotations

import ctypes
from typing import Any

#: Parameters of mallopt (malloc.h).
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
#: Larger pieces have memory of their own, which is returned.
LARGEST_BYTES = 1 << 30


def keep(nbytes: int) -> bool:
    """Keep up to so many bytes that are free at the end of the heap. Whether the allocator could be told; with 0 bytes it
    is left alone."""
    libc = _glibc()
    if libc is None or nbytes <= 0:
        return False
    # One heap for all threads: those of other threads are small, and what is larger is mapped anew each time.
    wanted = ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, LARGEST_BYTES), (_TRIM_THRESHOLD, nbytes))
    return all(libc.mallopt(name, value) == 1 for name, value in wanted)


def give_back() -> None:
    """Return what is free: Spark may use the process for something else."""
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
