"""Time zones, days, months and parts of times, by columns of int64.

Instants are microseconds since the epoch, local times the same number for the clock on the wall, days count from
1970-01-01. The calendar is the proleptic Gregorian one, as in Spark.

A zone is a table of transitions, found from Python's zone data by sampling it every few days and halving the interval
wherever the offset has changed. Instants behind the table are moved by whole cycles of 400 years, in which the
calendar repeats.
"""

from __future__ import annotations

import datetime
import functools
import re
import zoneinfo

import numpy as np

from flux.expressions.kernels.values import Bools, Ints

SECOND = 1_000_000
MINUTE, HOUR, DAY = 60 * SECOND, 3_600 * SECOND, 86_400 * SECOND
#: Samples are nearer to each other than any two transitions of a zone, but for a few of wars and of one
#: summer.
_STEP_S = 6 * 86_400
#: The first and the last second of the table: 1800 and 2450. From 2050 on, no zone has a rule that ends.
_FIRST_S, _LAST_S = -5_364_662_400, 15_147_388_800
_CYCLE_S = 146_097 * 86_400
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_FIXED = re.compile(r"(?:UTC|GMT|UT)?([+-])(\d{1,2})(?::(\d{1,2})|(\d{2}))?(?::?(\d{2}))?")
#: Names that Java takes for zones, too.
_SHORT = {
    "ACT": "Australia/Darwin",
    "AET": "Australia/Sydney",
    "AGT": "America/Argentina/Buenos_Aires",
    "ART": "Africa/Cairo",
    "AST": "America/Anchorage",
    "BET": "America/Sao_Paulo",
    "BST": "Asia/Dhaka",
    "CAT": "Africa/Harare",
    "CNT": "America/St_Johns",
    "CST": "America/Chicago",
    "CTT": "Asia/Shanghai",
    "EAT": "Africa/Addis_Ababa",
    "ECT": "Europe/Paris",
    "IET": "America/Indiana/Indianapolis",
    "IST": "Asia/Kolkata",
    "JST": "Asia/Tokyo",
    "MIT": "Pacific/Apia",
    "NET": "Asia/Yerevan",
    "NST": "Pacific/Auckland",
    "PLT": "Asia/Karachi",
    "PNT": "America/Phoenix",
    "PRT": "America/Puerto_Rico",
    "PST": "America/Los_Angeles",
    "SST": "Pacific/Guadalcanal",
    "VST": "Asia/Ho_Chi_Minh",
    "EST": "-05:00",
    "MST": "-07:00",
    "HST": "-10:00",
}
_UTC = ("UTC", "Z", "GMT", "UT", "Etc/UTC", "+00:00", "UTC+0", "GMT+0", "GMT0", "UCT", "Zulu", "Etc/GMT")


def is_utc(zone: str) -> bool:
    return zone in _UTC


def is_zone(zone: str) -> bool:
    """Tell whether there is such a zone, by its region or as a fixed offset."""
    try:
        _transitions(zone)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        return False
    return True


@functools.cache
def _transitions(zone: str) -> tuple[Ints, Ints]:
    """Return the seconds since the epoch at which offsets change, and the offset in seconds before the first and
    behind each."""
    zone = _SHORT.get(zone, zone)
    fixed = _FIXED.fullmatch(zone)
    if is_utc(zone) or fixed:
        offset = 0
        if fixed:
            sign, hours, apart, joined, seconds = fixed.groups()
            minutes = apart or joined
            offset = int(hours) * 3600 + int(minutes or 0) * 60 + int(seconds or 0)
            if offset > 18 * 3600 or int(minutes or 0) > 59 or int(seconds or 0) > 59:
                raise ValueError(f"no zone {zone}: offsets are at most 18 hours")
            offset = -offset if sign == "-" else offset
        return np.zeros(0, np.int64), np.array([offset], np.int64)
    info = zoneinfo.ZoneInfo(zone)

    def offset_at(second: int) -> int:
        moment = (_EPOCH + datetime.timedelta(seconds=second)).astimezone(info)
        there = moment.utcoffset()
        assert there is not None
        return there.days * 86_400 + there.seconds

    times, offsets = [], [offset_at(_FIRST_S)]
    for low in range(_FIRST_S, _LAST_S, _STEP_S):
        high = low + _STEP_S
        behind = offset_at(high)
        if behind == offsets[-1]:
            continue
        while high - low > 1:
            middle = (low + high) // 2
            if offset_at(middle) == offsets[-1]:
                low = middle
            else:
                high = middle
        times.append(high)
        offsets.append(behind)
    return np.array(times, np.int64), np.array(offsets, np.int64)


def offsets_at(instants: Ints, zone: str) -> Ints:
    """Return the offset of local time from UTC at each instant, in microseconds."""
    times, offsets = _transitions(zone)
    if not len(times):
        return np.full(len(instants), offsets[0] * SECOND, np.int64)
    seconds = instants // SECOND
    beyond = seconds > _LAST_S
    if beyond.any():
        seconds = np.where(beyond, seconds - ((seconds - _LAST_S) // _CYCLE_S + 1) * _CYCLE_S, seconds)
    # Rows of one batch are often between two transitions.
    low, high = (
        np.searchsorted(times, (int(seconds.min()), int(seconds.max())), side="right") if len(seconds) else (0, 0)
    )
    if low == high:
        return np.full(len(instants), offsets[low] * SECOND, np.int64)
    return offsets[low : high + 1][np.searchsorted(times[low:high], seconds, side="right")] * SECOND


def local(instants: Ints, zone: str | None) -> Ints:
    """Return local times; None: the times are local already."""
    return instants if zone is None or is_utc(zone) else instants + offsets_at(instants, zone)


def instants(times: Ints, zone: str | None, offset: Ints | None = None) -> Ints:
    """Return the instants of local times, as Java resolves them: in an overlap ``offset`` if that is one of the two,
    else the earlier instant; in a gap the time moved by the length of the gap."""
    if zone is None or is_utc(zone):
        return times
    before, behind = offsets_at(times - DAY, zone), offsets_at(times + DAY, zone)
    early, late = times - before, times - behind
    early_fits, late_fits = offsets_at(early, zone) == before, offsets_at(late, zone) == behind
    made = np.where(early_fits | ~late_fits, early, late)
    if offset is not None:
        own = times - offset
        made = np.where(offsets_at(own, zone) == offset, own, made)
    return made


def days_of(times: Ints) -> Ints:
    """Return the day of each local time."""
    return times // DAY


def civil(days: Ints) -> tuple[Ints, Ints, Ints]:
    """Return year, month and day of the month (Howard Hinnant, chrono-compatible low-level date algorithms)."""
    shifted = days + 719_468
    era = shifted // 146_097
    of_era = shifted - era * 146_097
    year_of_era = (of_era - of_era // 1460 + of_era // 36_524 - of_era // 146_096) // 365
    of_year = of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    shifted_month = (5 * of_year + 2) // 153
    day = of_year - (153 * shifted_month + 2) // 5 + 1
    month = np.where(shifted_month < 10, shifted_month + 3, shifted_month - 9)
    return year_of_era + era * 400 + (month <= 2), month, day


def days_from(year: Ints, month: Ints, day: Ints) -> Ints:
    """Return the days since the epoch of dates that exist."""
    year = year - (month <= 2)
    era = year // 400
    of_era = year - era * 400
    of_year = (153 * np.where(month > 2, month - 3, month + 9) + 2) // 5 + day - 1
    return np.asarray(era * 146_097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719_468, np.int64)


def month_length(year: Ints, month: Ints) -> Ints:
    leap = (year % 4 == 0) & ((year % 100 != 0) | (year % 400 == 0))
    lengths = np.array([31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31], np.int64)
    return np.asarray(lengths[(month - 1) % 12] + ((month == 2) & leap), np.int64)


def exists(year: Ints, month: Ints, day: Ints) -> Bools:
    """Tell which dates exist."""
    within = (month >= 1) & (month <= 12) & (day >= 1)
    return np.asarray(within & (day <= month_length(year, month)), np.bool_)


def add_months(days: Ints, months: Ints) -> Ints:
    """Return the same day of a later month, or the last day of that month if it is shorter."""
    year, month, day = civil(days)
    count = year * 12 + (month - 1) + months
    year, month = count // 12, count % 12 + 1
    return days_from(year, month, np.minimum(day, month_length(year, month)))


def weekday(days: Ints) -> Ints:
    """Return the day of the week, Monday being 0."""
    return np.asarray((days + 3) % 7, np.int64)


def week_of_year(days: Ints) -> tuple[Ints, Ints]:
    """Return the year and week of ISO 8601: the week belongs to the year of its Thursday."""
    thursday = days - weekday(days) + 3
    year, _, _ = civil(thursday)
    first = days_from(year, np.ones_like(year), np.ones_like(year))
    return year, (thursday - first) // 7 + 1


def day_of_year(days: Ints) -> Ints:
    year, _, _ = civil(days)
    first = days_from(year, np.ones_like(year), np.ones_like(year))
    return np.asarray(days - first + 1, np.int64)
