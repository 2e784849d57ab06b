"""Highest rate at which at most one row in a hundred gets older than a bound, for each system by itself.

Each rate is a run of its own: a new query, new topics, the same warm-up. Rates double until one fails, then rates in between are
tried, until the highest that passes and the lowest that fails are close. One run decides about a rate, so neighbours on the
machine have an influence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Rates to try: the first, the lowest and the highest; and the ratio of failed to passed rate at which the search ends.
FIRST, LEAST, MOST, CLOSE = 4_000, 250, 1_000_000, 1.25
#: Figures of the highest rate that passes.
_TOLD = ("p50_ms", "p99_ms", "worst_second_ms", "cores", "broker_cores", "load_cores", "lost", "duplicated")

Measure = Callable[[int], dict[str, Any]]


def fastest(measure: Measure, p99_ms: float) -> dict[str, Any]:
    """Search the highest rate.

    Return ``sustained_rows_per_s``, 0 if no rate passes, and its figures behind ``sustained_``; ``sustained_rows_per_core_s``
    is for each core that the system itself used. ``measure`` gives the figures at a rate; a rate that cannot be measured is too
    high."""
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
    """Tell whether a rate is sustained. With lost records it is not."""
    return found.get("p99_ms") is not None and found["p99_ms"] <= p99_ms and not found.get("lost")
