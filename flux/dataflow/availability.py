"""Availability: a bound on the time to a result, also while an input is missing (design: availability).

A stage with availability gives a tentative result where the stable one is late because a stream says nothing, and the stable
result when the stream is back. Stable results do not depend on it: not a row, nor their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flux.errors import UsageError
from flux.settings import Settings, parse_seconds
from flux.windows.durations import UNITS, microseconds, words

#: Policies for tentative results: ``process`` gives each as soon as may be, ``delay`` as late as the bound allows, ``suspend``
#: none but the first.
POLICIES = ("process", "delay", "suspend")
#: Answers to state that has reached its limit while an input is missing: its sources stand still, or windows close without it.
STOP, FORFEIT = OVERFLOWS = ("stop", "forfeit")
#: The longest bound. A result that is a day old is no answer to a failure.
LONGEST_US = UNITS["day"]
#: Rows of a partition are taken to come once in a step of the windows behind them, or in this time, in microseconds.
PACE_US = UNITS["second"]
#: The time that a hop between two workers is allowed, in microseconds. Messages wait for up to 32 ms at a busy worker.
HOP_US = 50_000


@dataclass(frozen=True)
class Availability:
    """The bound of a stage and its policies."""

    #: Microseconds from the time at which a row comes into the query to a result with it: one bound for all stages in between.
    bound_us: int
    #: The policy while an input is missing.
    failure: str = "process"
    #: The policy from the return of the input to the last correction.
    stabilization: str = "process"
    #: The answer to state beyond ``max_state``.
    overflow: str = "stop"
    #: Bytes of state of one worker while an input is missing; None: no limit.
    max_state: int | None = None
    #: Stages behind this one, at most, up to the result that has the bound.
    stages_behind: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.bound_us <= LONGEST_US:
            raise UsageError(
                f"availability: expected a time above zero and up to {words(LONGEST_US)}, as in availability='3s', got "
                f"{words(self.bound_us)}"
            )
        _check("availability_failure", self.failure, POLICIES)
        _check("availability_stabilization", self.stabilization, POLICIES)
        _check("overflow", self.overflow, OVERFLOWS)

    def __str__(self) -> str:
        return f"results within {words(self.bound_us)} (failure: {self.failure}, stabilization: {self.stabilization})"


def _check(what: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"{what} must be one of {', '.join(known)}; got {value!r:.100}")


def bound_of_stage(given: Any) -> int | None:
    """Return the bound that a stage asks for, in microseconds; None: it asks for none. UsageError: it is no time."""
    if given is None:
        return None
    if isinstance(given, str) and " " in given.strip():
        bound = microseconds(given, "availability")
    else:
        bound = round(parse_seconds("availability", given) * 1e6)
    return Availability(bound).bound_us


def of_settings(settings: Settings, bound_us: int | None = None) -> Availability | None:
    """Return the availability of a stage that asks for a bound of its own, or for none. None: it has no availability."""
    bound = round(settings.availability * 1e6) if bound_us is None else bound_us
    if not bound:
        return None
    return Availability(
        bound, settings.availability_failure, settings.availability_stabilization, settings.availability_overflow,
        settings.availability_max_state or None,
    )  # fmt: skip
