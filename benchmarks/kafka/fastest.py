"""Up to which rate one row in a hundred at most gets older than a bound, for each system by itself.

Each rate is a run of its own: a new query, new topics, the same warm-up. Rates double until one fails, then those in between are
tried, until what passes and what fails are close. One run decides about a rate; neighbours on the machine decide with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Rates that are tried: the first, the least and the most, and how close those that pass and that fail are at the end.
FIRST, LEAST, MOST, CLOSE = 4_000, 250, 1_000_000, 1.25
#: What is told of the highest rate that passes.
_TOLD = ("p50_ms", "p99_ms", "worst_second_ms", "cores", "broker_cores", "load_cores", "lost", "duplicated")

Measure = Callable[[int], dict[str, Any]]


def fastest(measure: Measure, p99_ms: float) -> dict[str, Any]:
    """``sustained_rows_per_s``, 0 if no rate passes, and its figures behind ``sustained_``; ``sustained_rows_per_core_s``: for
    each core that the system itself used. ``measure``: the figures at a rate; one that cannot be measured is too fast."""
    passed, failed, rate = 0, 0, FIRST
    best: dict[str, Any] = {}
    while LEAST <= rate <= MOST:
        found = measure(rate)
        if "not_run" in found:
            return found
        if holds(found, p99_ms):
            passed, best = rate, found
        else:
            failed = rate
        if passed and failed and failed / passed <= CLOSE:
            break
        rate = round((passed * failed) ** 0.5) if passed and failed else 2 * rate if passed else rate // 2
    figures = {f"sustained_{name}": best.get(name) for name in _TOLD} if best else {}
    cores = best.get("cores")
    per_core = round(passed / cores) if cores else None
    return {"sustained_rows_per_s": passed, "sustained_rows_per_core_s": per_core} | figures


def holds(found: dict[str, Any], p99_ms: float) -> bool:
    """A rate at which records are lost is not sustained."""
    return found.get("p99_ms") is not None and found["p99_ms"] <= p99_ms and not found.get("lost")
