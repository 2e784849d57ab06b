"""Times of rows, as numbers."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

#: Times further away from 1970 are refused: the ends of their windows would not fit into 64 bits.
TIME_MAX = 1 << 62


def microseconds_of(column: pa.Array) -> np.ndarray:
    """Return times as int64 microseconds since the epoch, without nulls; finer times are rounded down. A time of a coarser unit
    that does not fit into 64 bits becomes one beyond ``TIME_MAX``, which callers refuse; the product would be near 1970."""
    found: np.ndarray = column.view(pa.int64()).to_numpy(zero_copy_only=False)
    unit = column.type.unit
    if unit == "ns":
        return found // 1_000
    if unit == "us":
        return found
    each = 1_000 if unit == "ms" else 1_000_000
    most = TIME_MAX // each + 1
    product: np.ndarray = np.clip(found, -most, most) * each
    return product


def microseconds_at(now: float) -> int:
    """Return the time of a step in whole microseconds: at a timer that was set for a whole microsecond, at least that one."""
    return round(now * 1_000_000)


def as_text(time: int) -> str:
    """Return microseconds since the epoch as a time for people, in UTC."""
    return f"{np.datetime64(time, 'us')} UTC"
