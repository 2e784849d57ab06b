"""The phases of a query: the phase that follows each event, and the message that all processes get with it.

    STARTING --all here--> RUNNING --all out--> FINISHED
    RUNNING, FINISHED --all gone--> STARTING
    STARTING, RUNNING, FINISHED --over--> ENDED

A query with a checkpoint location that loses its last worker starts again from the location (design: all-gone). A query in
STARTING waits for ``spark.flux.workers.timeout`` at most. The others have no limit: a query may run for ever, and output is kept
until it is fetched.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum

from flux.wire.control import NewTable, Stop


class QueryPhase(StrEnum):
    #: Workers are still to join.
    STARTING = "starting"
    RUNNING = "running"
    #: All output is there, and is kept until it is fetched.
    FINISHED = "finished"
    #: All processes are told to stop.
    ENDED = "ended"


class QueryEvent(Enum):
    ALL_HERE = "the last worker that was waited for has joined, and the first table is made"
    ALL_GONE = "the last worker was lost, and the checkpoint location has everything"
    ALL_OUT = "the last partition of the last stages is complete"
    OVER = "it was stopped, it has failed, or it has finished and keeps no output"


@dataclass(frozen=True, slots=True)
class Step:
    """A step from one phase to the next. ``to`` is the next phase; ``tells`` the message to all processes, None: there is
    none."""

    to: QueryPhase
    tells: type | None = None


STEPS: dict[tuple[QueryPhase, QueryEvent], Step] = {
    (QueryPhase.STARTING, QueryEvent.ALL_HERE): Step(QueryPhase.RUNNING, NewTable),
    (QueryPhase.RUNNING, QueryEvent.ALL_OUT): Step(QueryPhase.FINISHED),
    (QueryPhase.RUNNING, QueryEvent.ALL_GONE): Step(QueryPhase.STARTING),
    (QueryPhase.FINISHED, QueryEvent.ALL_GONE): Step(QueryPhase.STARTING),
    (QueryPhase.STARTING, QueryEvent.OVER): Step(QueryPhase.ENDED, Stop),
    (QueryPhase.RUNNING, QueryEvent.OVER): Step(QueryPhase.ENDED, Stop),
    (QueryPhase.FINISHED, QueryEvent.OVER): Step(QueryPhase.ENDED, Stop),
}


def after(phase: QueryPhase, event: QueryEvent) -> QueryPhase:
    """Return the phase that follows."""
    assert (phase, event) in STEPS, f"{event.name} of a query that is {phase}"
    return STEPS[phase, event].to
