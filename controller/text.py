"""Counts and lists of numbers in sentences for people, the same everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from partitioning.ids import ACTIVE, STANDBY


def count(number: int, one: str, many: str = "") -> str:
    """Format a count, for example "1 worker", "2 workers", "3 replicas"."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def listed(numbers: Iterable[int]) -> str:
    """Format numbers, for example "0, 1, 2"; "none" if there are none."""
    return ", ".join(map(str, numbers)) or "none"


def some(names: Sequence[str], most: int, noun: str = "") -> str:
    """Format the first names and the number of the others, for example "a, b and 3 more"."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more{' ' * bool(noun)}{noun}" if more > 0 else "")


def named(one: str, numbers: Iterable[int]) -> str:
    """Format named numbers, for example "slot 1", "workers 0, 2"."""
    known = list(numbers)
    return f"{one if len(known) == 1 else one + 's'} {listed(known)}"


def duration(seconds: float) -> str:
    """Write a limit of time, such as "30 s", without digits that say nothing."""
    return f"{round(seconds, 1) or seconds:g} s"


def technique(replicas: int, recovery: str) -> str:
    """Describe the protection of a stage, such as "2 active replicas", "1 active replica and 1 standby"."""
    if recovery != ACTIVE and replicas > 1:
        kept = count(replicas - 1, STANDBY) if recovery == STANDBY else f"{replicas - 1} {recovery}"
        return f"1 active replica and {kept}"
    return count(replicas, "active replica")
