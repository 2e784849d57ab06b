"""The phases of a move: the phase that follows each event, and the message that goes out with it (design: move).

    WAITING --begun--> UNDER_WAY --source dropped--> DONE
    UNDER_WAY --interrupted--> WAITING
    WAITING, UNDER_WAY --given up--> GIVEN_UP

Law: every move ends as DONE or GIVEN_UP, each with an event in the history. A move to a named worker begins at most
``move_queue.BEGIN_MAX`` times.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum

from flux.wire.control import TableChanged


class MovePhase(StrEnum):
    #: In the queue, for the first time or again.
    WAITING = "waiting"
    #: An addition on its target is under way.
    UNDER_WAY = "under way"
    DONE = "done"
    GIVEN_UP = "given up"


class MoveEvent(Enum):
    BEGUN = "the target is in the table"
    SOURCE_DROPPED = "the target has taken the place of the source"
    INTERRUPTED = "its addition has failed, or its target has replaced another replica that was lost"
    GIVEN_UP = "it cannot be done any more, or not after so many attempts"


@dataclass(frozen=True, slots=True)
class Step:
    """``to``: the next phase; ``tells``: the message that goes out with it; ``event``: its kind in the history, empty:
    none."""

    to: MovePhase
    tells: type | None = None
    event: str = ""


STEPS: dict[tuple[MovePhase, MoveEvent], Step] = {
    (MovePhase.WAITING, MoveEvent.BEGUN): Step(MovePhase.UNDER_WAY, TableChanged),
    (MovePhase.UNDER_WAY, MoveEvent.SOURCE_DROPPED): Step(MovePhase.DONE, TableChanged, "move"),
    (MovePhase.UNDER_WAY, MoveEvent.INTERRUPTED): Step(MovePhase.WAITING),
    (MovePhase.UNDER_WAY, MoveEvent.GIVEN_UP): Step(MovePhase.GIVEN_UP, event="move given up"),
    (MovePhase.WAITING, MoveEvent.GIVEN_UP): Step(MovePhase.GIVEN_UP, event="move given up"),
}


def after(phase: MovePhase, event: MoveEvent) -> Step:
    """The step that follows."""
    assert (phase, event) in STEPS, f"{event.name} of a move in phase {phase}"
    return STEPS[phase, event]
