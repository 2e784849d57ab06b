"""Timers that the operator of one partition has set: part of the replica's state (design: timers).

Law: the set of timers follows from the applied steps and nothing else, so it is the same on every replica at the same step.
Each name has one timer. Timers are few: an operator with a deadline per key keeps the deadlines in its own state, as columns,
and sets one timer for the earliest.

Left to others: deciding when a timer is due for all replicas (replica), waking up in time (stage_worker).
"""

from __future__ import annotations

import math

from flux.errors import UsageError

#: The most timers of one partition. An operator that needs more has a timer per key, which belongs in its state.
TIMERS_MAX = 1024


class Timers:
    """The timers of one partition."""

    def __init__(self) -> None:
        #: By name, the time in seconds since the epoch.
        self.pending: dict[str, float] = {}
        #: The earliest of these times, infinite if there is none.
        self.next = math.inf

    def set(self, at: float, name: str) -> None:
        try:
            seconds = float(at)
        except (TypeError, ValueError):
            seconds = math.nan
        if not math.isfinite(seconds):
            raise UsageError(f"set_timer: expected a time in seconds since the epoch, got {at!r}")
        if not isinstance(name, str):
            raise UsageError(f"set_timer: the name of a timer must be a string, got {name!r}")
        if name not in self.pending and len(self.pending) >= TIMERS_MAX:
            raise UsageError(
                f"set_timer: {TIMERS_MAX} timers are set, no more are taken; keep deadlines of keys in the operator's "
                "state and set one timer for the earliest"
            )
        self.pending[name] = seconds
        self._note_next()

    def cancel(self, name: str) -> None:
        self.pending.pop(name, None)
        self._note_next()

    def due(self, now: float) -> list[str]:
        """Return the names of the due timers, the earliest first."""
        return [name for at, name in sorted((at, name) for name, at in self.pending.items() if at <= now)]

    def take(self, name: str, now: float) -> bool:
        """Take off a timer that fires now. False: it is no longer due, because a timer that has just fired cancelled it or put it
        off."""
        if self.pending.get(name, math.inf) > now:
            return False
        self.cancel(name)
        return True

    def replace(self, pending: dict[str, float]) -> None:
        self.pending = dict(pending)
        self._note_next()

    def _note_next(self) -> None:
        self.next = min(self.pending.values(), default=math.inf)
