"""Constant intervals that are added to times, as distances between two times."""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa

from flux.expressions.kernels.calendar import is_utc
from flux.expressions.tree import Expression, FunctionCall
from flux.expressions.types import CALENDAR, DAY_TIME, TIMESTAMP_NTZ

DAY_US = 86_400_000_000


class Shifted(NamedTuple):
    """A time as another one and a distance."""

    base: Expression
    #: Microseconds.
    offset: int
    #: Whether the distance is the same for all times; else, as for days in a time zone, it may differ by a day.
    exact: bool


def shifted(time: Expression) -> Shifted:
    """Return a time without the constant intervals that are added to it."""
    if not isinstance(time, FunctionCall) or time.function != "add_to_time":
        return Shifted(time, 0, True)
    value, interval = time.arguments
    options = dict(time.options)
    length = _length(interval)
    if length is None:
        return Shifted(time, 0, True)
    base, offset, exact = shifted(value)
    fixed = abs(length) < DAY_US or value.type == TIMESTAMP_NTZ or options["zone"] is None or is_utc(options["zone"])
    return Shifted(base, offset + options.get("sign", 1) * length, exact and fixed)


def _length(interval: Expression) -> int | None:
    """Return the microseconds of an interval, with days of 24 hours; None: it is no constant, or has months."""
    if interval.columns():
        return None
    value = interval.evaluate(pa.record_batch({"": [0]}))
    if not value[0].is_valid:
        return None
    if interval.type == DAY_TIME:
        return int(value.cast(pa.int64())[0].as_py())
    if interval.type == CALENDAR:
        months, days, nanos = value[0].as_py()
        return None if months else days * DAY_US + nanos // 1_000
    return None
