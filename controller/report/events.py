"""Events of replicas and workers, kept for ``lastProgress``, the history and the log."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, replace
from typing import Any

#: Events kept for ``lastProgress`` and the history.
HISTORY_KEPT = 1000
#: Events in each progress report: the newest ones.
RECENT = 20


@dataclass(frozen=True)
class Event:
    """An event of a partition, a stage, a worker or the query, for people."""

    #: One of these:
    #: - for a partition: "take-over", "repair", "move", "divergence", "behind" (a replica that lags) and "caught up", "drop" (a
    #:   replica that stood still), "failed attempt" to add a replica, "move given up", "begins empty" (its last replica was lost)
    #: - for a stage (``partition`` is -1): "protect" (a request for other replicas), "protected", "protect given up"
    #: - for a worker (``stage`` is empty and ``partition`` -1): "join", "loss", "drain"
    #: - for a stage that has failed, or depends on one: "stage failed"
    #: - for the plan: "plan" (a version that is running), "plan refused"
    #: - for the query: "scale", "balance" (a note of a policy), "tentative" (a failure of inputs that is over: results were
    #:   tentative), "link" (a link between two workers that was down, and is up again)
    #: - for any of these: "warning"
    kind: str
    #: By the wall clock, once it is in the log.
    at: float
    stage: str
    partition: int
    #: The worker of the replica from now on; -1: none.
    worker: int
    why: str
    #: Time from beginning to end.
    seconds: float = 0.0
    #: For how long the primary stood still for the copy of state.
    stall_ms: float = 0.0
    #: The worker of the replica before; -1: none.
    source: int = -1
    #: Size of the copied state.
    bytes: int = 0
    #: The number of the request to which the event belongs; 0: none.
    request: int = 0

    def __str__(self) -> str:
        text = self.kind
        if self.stage:
            text += f" of {self.stage}" + (f"/{self.partition}" if self.partition >= 0 else "")
        if self.source >= 0:
            text += f" from worker {self.source}" + (f" to worker {self.worker}" if self.worker >= 0 else "")
        elif self.worker >= 0:
            text += f" {'on' if self.stage else 'of'} worker {self.worker}"
        text += f": {self.why}"
        if self.seconds:
            text += f"; took {self.seconds:.3f} s"
        if self.bytes:
            text += f", {self.bytes:,} bytes of state"
        return text + (f", stall {self.stall_ms:.1f} ms" if self.stall_ms else "")


class EventLog:
    """The newest events, and those that ``news`` has not returned yet."""

    def __init__(self) -> None:
        self.kept: deque[Event] = deque(maxlen=HISTORY_KEPT)
        # Bounded as well: a controller without a shell, which would take the news, must not grow.
        self._news: deque[Event] = deque(maxlen=HISTORY_KEPT)
        self.wall_ahead = 0.0  # the wall clock, which events show, minus the controller's ``now``

    def note(self, event: Event) -> Event:
        """Keep an event, and return it as it is kept, with the time of the wall clock."""
        event = replace(event, at=event.at + self.wall_ahead)
        self.kept.append(event)
        self._news.append(event)
        return event

    def news(self) -> list[Event]:
        """Return the events since the last call."""
        news = list(self._news)
        self._news.clear()
        return news

    def recent(self) -> list[dict[str, Any]]:
        return [asdict(event) for event in list(self.kept)[-RECENT:]]
