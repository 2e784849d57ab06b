"""Lengths of time as Spark writes them, such as "10 minutes" or "1 hour 30 seconds", in whole microseconds."""

from __future__ import annotations

import re
from fractions import Fraction

from flux.errors import UsageError

#: Microseconds of each unit, by its singular.
UNITS = {
    "microsecond": 1,
    "millisecond": 1_000,
    "second": 1_000_000,
    "minute": 60_000_000,
    "hour": 3_600_000_000,
    "day": 86_400_000_000,
    "week": 604_800_000_000,
}
#: Units without a fixed length.
CALENDAR = ("month", "year")
#: Longer than any window: the distance between the first and the last time that Spark knows.
LONGEST_US = 10_000 * 366 * UNITS["day"]
_PART = re.compile(r"\s*([+-]?[0-9]+(?:\.[0-9]+)?)\s*([a-z]+)\s*")


def microseconds(text: str, what: str) -> int:
    """Return the length of a duration. UsageError: it is no duration of fixed length; ``what`` names the argument."""
    if not isinstance(text, str):
        raise UsageError(f"{what}: expected a duration as text, as in '10 minutes', got {text!r:.100}")
    rest, total = re.sub(r"^\s*interval\b", "", text.lower()), Fraction(0)
    if not rest.strip():
        raise UsageError(f"{what}: expected a duration, as in '10 minutes', got {text!r:.100}")
    while rest:
        part = _PART.match(rest)
        unit = part[2].removesuffix("s") if part else ""
        if unit in CALENDAR:
            raise UsageError(
                f"{what}: a {unit} has no fixed length; say it in days, as in '30 days'; got {text!r:.100}"
            )
        if part is None or unit not in UNITS:
            raise UsageError(
                f"{what}: expected numbers with units ({', '.join(UNITS)}), as in '1 hour 30 minutes', got {text!r:.100}"
            )
        total += Fraction(part[1]) * UNITS[unit]
        rest = rest[part.end() :]
    if total.denominator != 1:
        raise UsageError(f"{what}: {text!r:.100} is no whole number of microseconds")
    if abs(total) > LONGEST_US:
        raise UsageError(f"{what}: {text!r:.100} is longer than all of time")
    return int(total)


def words(length: int) -> str:
    """Return microseconds as a duration in the largest unit of which they are a whole number, such as "90 seconds"."""
    unit, size = max(((unit, size) for unit, size in UNITS.items() if length % size == 0), key=lambda each: each[1])
    if length == 0:
        unit, size = "second", 1
    return f"{length // size} {unit}{'' if length == size else 's'}"
