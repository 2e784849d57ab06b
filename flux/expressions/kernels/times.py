"""Functions of dates, timestamps and intervals. ``zone`` is the session's; None where a time has none
(TIMESTAMP_NTZ)."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as is_

from flux.expressions.kernels import calendar, decimals
from flux.expressions.kernels.values import (
    ANSI,
    LEGACY,
    ExpressionError,
    Ints,
    Value,
    arrays,
    floats,
    integers,
    made,
    overflow,
    quotient,
    settled,
    valid,
)
from flux.expressions.types import DATE, bounds

_DATE_PARTS = ("year", "quarter", "month", "week", "day", "weekday", "dayofweek", "dayofyear", "yearofweek")
TRUNCATIONS = {
    **dict.fromkeys(("YEAR", "YYYY", "YY"), "year"),
    "QUARTER": "quarter",
    **dict.fromkeys(("MONTH", "MON", "MM"), "month"),
    "WEEK": "week",
    **dict.fromkeys(("DAY", "DD"), "day"),
    "HOUR": "hour",
    "MINUTE": "minute",
    "SECOND": "second",
    "MILLISECOND": "millisecond",
    "MICROSECOND": "microsecond",
}
UNITS = {
    "MICROSECOND": 1,
    "MILLISECOND": 1_000,
    "SECOND": calendar.SECOND,
    "MINUTE": calendar.MINUTE,
    "HOUR": calendar.HOUR,
    "DAY": calendar.DAY,
    "WEEK": 7 * calendar.DAY,
}
MONTH_UNITS = {"MONTH": 1, "QUARTER": 3, "YEAR": 12}


def date_part(to: pa.DataType, value: Value, part: str) -> Value:
    """Return a part of dates as an integer."""
    (value,) = arrays(value)
    days = integers(value)
    year, month, day = calendar.civil(days)
    found: Ints
    if part == "week":
        found = calendar.week_of_year(days)[1]
    elif part == "yearofweek":
        found = calendar.week_of_year(days)[0]
    elif part == "weekday":
        found = calendar.weekday(days)
    elif part == "dayofweek":
        found = (calendar.weekday(days) + 1) % 7 + 1
    elif part == "dayofyear":
        found = calendar.day_of_year(days)
    else:
        found = {"year": year, "month": month, "day": day, "quarter": (month - 1) // 3 + 1}[part]
    return made(found, valid(value), to)


def time_part(to: pa.DataType, value: Value, part: str, zone: str | None) -> Value:
    """Return hour, minute or second of local time; "fraction" gives seconds with six digits behind the point."""
    (value,) = arrays(value)
    of_day = calendar.local(integers(value), zone) % calendar.DAY
    if part == "fraction":
        micros = made(of_day % calendar.MINUTE, valid(value), pa.int64())
        whole = pc.cast(micros, pa.decimal128(19, 0))
        return pc.cast(pc.multiply(whole, pa.scalar("0.000001").cast(pa.decimal128(7, 6))), to)
    unit, limit = {"hour": (calendar.HOUR, 24), "minute": (calendar.MINUTE, 60), "second": (calendar.SECOND, 60)}[part]
    return made(of_day // unit % limit, valid(value), to)


def _first_day(days: Ints, unit: str) -> Ints:
    """Return the first day of the week, month, quarter or year of each day."""
    if unit == "week":
        return days - calendar.weekday(days)
    year, month, _ = calendar.civil(days)
    ones = np.ones_like(year)
    month = {"year": ones, "quarter": (month - 1) // 3 * 3 + 1, "month": month}[unit]
    return calendar.days_from(year, month, ones)


def truncate_date(to: pa.DataType, value: Value, unit: str) -> Value:
    """Return dates cut to a unit, a week at least; null for others."""
    (value,) = arrays(value)
    name = TRUNCATIONS.get(unit.upper())
    if name not in ("year", "quarter", "month", "week"):
        return pa.nulls(len(value), to)
    return made(_first_day(integers(value), name), valid(value), to)


def truncate_time(to: pa.DataType, value: Value, unit: str, zone: str | None) -> Value:
    """Return times cut to a unit of local time; null for an unknown unit."""
    (value,) = arrays(value)
    name = TRUNCATIONS.get(unit.upper())
    if name is None:
        return pa.nulls(len(value), to)
    times = integers(value)
    if name in ("second", "millisecond", "microsecond"):
        step = UNITS[name.upper()]
        return made(times // step * step, valid(value), to)
    there = calendar.local(times, zone)
    if name in ("day", "hour", "minute"):
        step = UNITS[name.upper()]
        return made(calendar.instants(there // step * step, zone, there - times), valid(value), to)
    first = _first_day(there // calendar.DAY, name) * calendar.DAY
    return made(calendar.instants(first, zone, there - times), valid(value), to)


def add_to_time(to: pa.DataType, value: Value, interval: Value, zone: str | None, sign: int = 1) -> Value:
    """Add a day-time or a calendar interval: its months and whole days by the clock on the wall, the rest as time
    that passes."""
    if isinstance(interval, pa.Scalar) and is_.is_duration(interval.type) and interval.is_valid:
        micros = sign * int(interval.cast(pa.int64()).as_py())
        whole = abs(micros) // calendar.DAY * (1 if micros > 0 else -1)
        return _moved_by(to, value, (0, whole, micros - whole * calendar.DAY), zone)
    if is_.is_duration(interval.type):
        value, interval = arrays(value, interval)
        moved = integers(interval) * sign
        days = quotient(moved, calendar.DAY)
        return _moved(to, value, interval, days * 0, days, moved - days * calendar.DAY, zone)
    given = interval.as_py() or (0, 0, 0)
    return _moved_by(to, value, (sign * given[0], sign * given[1], sign * (given[2] // 1000)), zone)


def _moved_by(to: pa.DataType, value: Value, interval: tuple[int, int, int], zone: str | None) -> pa.Array:
    """Return times moved by months, days and microseconds, the same for all."""
    (value,) = arrays(value)
    months, days, micros = interval
    if zone is None or calendar.is_utc(zone):
        days, micros = 0, micros + days * calendar.DAY
    if not months and not days:
        try:
            moved = pc.add_checked(value.view(pa.int64()), pa.scalar(micros, pa.int64()))
        except pa.ArrowInvalid:
            pass  # the slow way finds the row
        else:
            return moved.view(to)
    ones = np.ones(len(value), np.int64)
    return _moved(to, value, value, ones * months, ones * days, ones * micros, zone)


def _moved(
    to: pa.DataType, value: pa.Array, other: pa.Array, months: Ints, days: Ints, micros: Ints, zone: str | None
) -> pa.Array:
    times, where = integers(value), valid(value, other)
    with np.errstate(over="ignore"):
        near = times + micros
        rough = times.astype(np.float64) + micros + days * float(calendar.DAY) + months * 31.0 * calendar.DAY
        if months.any() or days.any():
            there = calendar.local(times, zone)
            of_day = there % calendar.DAY
            day = calendar.days_of(there)
            if months.any():
                day = calendar.add_months(day, months)
            near = calendar.instants((day + days) * calendar.DAY + of_day, zone, there - times) + micros
    bad = where & (np.abs(rough) > 2.0**63)
    return settled(made(near, where, to), bad, ANSI, lambda at: _too_far(value[at].as_py(), to))


def _too_far(shown: object, to: pa.DataType) -> ExpressionError:
    return ExpressionError("DATETIME_OVERFLOW", f"{shown} and the interval are beyond the last time there is")


def add_unit(to: pa.DataType, value: Value, count: Value, unit: str, zone: str | None) -> Value:
    """Add a number of units: TIMESTAMPADD. Weeks, days and more go by the clock on the wall."""
    value, count = arrays(value, count)
    many = integers(count)
    zero = np.zeros_like(many)
    if unit in MONTH_UNITS:
        return _moved(to, value, count, many * MONTH_UNITS[unit], zero, zero, zone)
    if unit in ("DAY", "WEEK"):
        return _moved(to, value, count, zero, many * (7 if unit == "WEEK" else 1), zero, zone)
    return _moved(to, value, count, zero, zero, many * UNITS[unit], zone)


def difference_in(to: pa.DataType, start: Value, end: Value, unit: str, zone: str | None) -> Value:
    """Return how many whole units of local time are between two times: TIMESTAMPDIFF."""
    start, end = arrays(start, end)
    first, last = (calendar.local(integers(each), zone) for each in (start, end))
    if unit in UNITS:
        return made(quotient(last - first, UNITS[unit]), valid(start, end), to)
    day, end_day = first // calendar.DAY, last // calendar.DAY
    earlier = last % calendar.DAY < first % calendar.DAY
    later = last % calendar.DAY > first % calendar.DAY
    # Java moves the end by the day that is not whole before it counts months.
    end_day = end_day - ((end_day > day) & earlier) + ((end_day < day) & later)
    (y1, m1, d1), (y2, m2, d2) = calendar.civil(day), calendar.civil(end_day)
    months = quotient((y2 * 12 + m2) * 32 + d2 - (y1 * 12 + m1) * 32 - d1, 32)
    return made(quotient(months, MONTH_UNITS[unit]), valid(start, end), to)


def subtract_times(to: pa.DataType, left: Value, right: Value, zone: str | None) -> Value:
    """Return the interval between two times by the clock on the wall."""
    left, right = arrays(left, right)
    return made(calendar.local(integers(left), zone) - calendar.local(integers(right), zone), valid(left, right), to)


def subtract_dates(to: pa.DataType, left: Value, right: Value) -> Value:
    """Return the interval between two dates, or the number of days where ``to`` is INT."""
    left, right = arrays(left, right)
    days = integers(left) - integers(right)
    return made(days if is_.is_integer(to) else days * calendar.DAY, valid(left, right), to)


def add_days(to: pa.DataType, value: Value, days: Value, sign: int = 1) -> Value:
    value, days = arrays(value, days)
    moved = integers(value) + sign * integers(days)
    # Spark adds 32-bit integers, which wrap around.
    return made(moved.astype(np.int32), valid(value, days), to)


def add_months_to_date(to: pa.DataType, value: Value, months: Value) -> Value:
    if is_.is_interval(months.type):
        months = pa.scalar(months.as_py()[0] if months.is_valid else None, pa.int32())
    value, months = arrays(value, months)
    moved, where = calendar.add_months(integers(value), integers(months)), valid(value, months)
    bad = where & (np.abs(moved) >= 2**31)
    return settled(made(moved, where, to), bad, ANSI, lambda at: overflow(to, f"{value[at]} and {months[at]} months"))


def add_interval_to_date(to: pa.DataType, value: Value, interval: Value, mode: str) -> Value:
    """Add a calendar interval without a part of a day."""
    months, days, nanoseconds = interval.as_py()
    if nanoseconds:
        raise ExpressionError(
            "ILLEGAL_DAY_TIME", "an interval with hours cannot be added to a date; cast it to a timestamp"
        )
    (value,) = arrays(value)
    moved = calendar.add_months(integers(value), np.full(len(value), months, np.int64)) + days
    return made(moved, valid(value), to)


def last_day(to: pa.DataType, value: Value) -> Value:
    (value,) = arrays(value)
    days = integers(value)
    year, month, day = calendar.civil(days)
    return made(days - day + calendar.month_length(year, month), valid(value), to)


def from_epoch(to: pa.DataType, value: Value, per_second: int) -> Value:
    """Return timestamps of numbers since the epoch, of which ``per_second`` are a second."""
    (value,) = arrays(value)
    factor = calendar.SECOND // per_second
    if is_.is_floating(value.type):
        numbers = floats(value) * calendar.SECOND
        where = valid(value) & np.isfinite(numbers)
        return made(np.trunc(np.where(where, numbers, 0)).astype(np.int64), where, to)
    if is_.is_decimal(value.type):
        micros = decimals.multiply(pa.decimal256(76, value.type.scale), value, pa.scalar(Decimal(factor)), ANSI)
        return pc.cast(decimals.to_integer(pa.int64(), micros, LEGACY), to)
    numbers_ = integers(value)
    low, high = bounds(pa.int64())
    bad = valid(value) & ((numbers_ > high // factor) | (numbers_ < -(-low // factor)))
    kept = made(np.where(bad, 0, numbers_) * factor, valid(value), to)
    return settled(kept, bad, ANSI, lambda at: overflow(to, value[at].as_py()))


def to_epoch(to: pa.DataType, value: Value, per_second: int, towards_zero: bool = False) -> Value:
    """Return how many units since the epoch a timestamp is, cut to the unit before, or towards the epoch."""
    (value,) = arrays(value)
    unit = calendar.SECOND // per_second
    return made(quotient(integers(value), unit) if towards_zero else integers(value) // unit, valid(value), to)


def interval_part(to: pa.DataType, value: Value, unit: str) -> Value:
    """Return the days of a day-time interval, or its hours, minutes or seconds below the next unit; all have its
    sign."""
    (value,) = arrays(value)
    size, limit = {"day": (calendar.DAY, 0), "hour": (calendar.HOUR, 24), "minute": (calendar.MINUTE, 60)}[unit]
    whole = quotient(integers(value), size)
    return made(np.fmod(whole, limit) if limit else whole, valid(value), to)


def day_number(to: pa.DataType, value: Value) -> Value:
    return pc.cast(value, pa.int32())


def from_day_number(to: pa.DataType, value: Value) -> Value:
    return pc.cast(pc.cast(value, pa.int32()), DATE)


def date_to_seconds(to: pa.DataType, value: Value, zone: str | None) -> Value:
    """Return the second since the epoch at which each date begins in the zone."""
    (value,) = arrays(value)
    return made(calendar.instants(integers(value) * calendar.DAY, zone) // calendar.SECOND, valid(value), to)


def make_date(to: pa.DataType, year: Value, month: Value, day: Value, mode: str) -> Value:
    year, month, day = arrays(year, month, day)
    numbers = integers(year), integers(month), integers(day)
    there = calendar.exists(*numbers) & (np.abs(numbers[0]) < 5_879_611)
    where = valid(year, month, day)
    days = calendar.days_from(numbers[0], np.clip(numbers[1], 1, 12), np.clip(numbers[2], 1, 31))
    bad = where & ~there
    return settled(
        made(days, where & there, to),
        bad,
        mode,
        lambda at: ExpressionError(
            "DATETIME_FIELD_OUT_OF_BOUNDS",
            f"there is no date {year[at]}-{month[at]}-{day[at]}. Use try_make_date to get null",
        ),
    )


def multiply_interval(to: pa.DataType, interval: Value, count: Value) -> Value:
    """Multiply a day-time interval by an integer; an overflow is an error in every mode."""
    interval, count = arrays(interval, count)
    micros, many = integers(interval), integers(count)
    with np.errstate(over="ignore"):
        product = micros * many
    where = valid(interval, count)
    bad = where & (np.abs(micros.astype(np.float64) * many) >= 2.0**63)
    return settled(made(product, where, to), bad, ANSI, lambda at: overflow(to, f"{micros[at]} us * {many[at]}"))
