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
    """The phases of a move."""

    #: In the queue, for the first time or again.
    WAITING = "waiting"
    #: An addition on its target is under way.
    UNDER_WAY = "under way"
    DONE = "done"
    GIVEN_UP = "given up"


class MoveEvent(Enum):
    """The events of a move."""

    BEGUN = "the target is in the table"
    SOURCE_DROPPED = "the target has taken the place of the source"
    INTERRUPTED = "its addition has failed, or its target has replaced another replica that was lost"
    GIVEN_UP = "it cannot be done any more, or has failed too often"


@dataclass(frozen=True, slots=True)
class MoveStep:
    """A step from one phase to the next."""

    #: The next phase.
    to: MovePhase
    #: The message that goes out with it, if any.
    tells: type | None = None
    #: The kind of its event in the history; empty: it has none.
    event: str = ""


STEPS: dict[tuple[MovePhase, MoveEvent], MoveStep] = {
    (MovePhase.WAITING, MoveEvent.BEGUN): MoveStep(MovePhase.UNDER_WAY, TableChanged),
    (MovePhase.UNDER_WAY, MoveEvent.SOURCE_DROPPED): MoveStep(MovePhase.DONE, TableChanged, "move"),
    (MovePhase.UNDER_WAY, MoveEvent.INTERRUPTED): MoveStep(MovePhase.WAITING),
    (MovePhase.UNDER_WAY, MoveEvent.GIVEN_UP): MoveStep(MovePhase.GIVEN_UP, event="move given up"),
    (MovePhase.WAITING, MoveEvent.GIVEN_UP): MoveStep(MovePhase.GIVEN_UP, event="move given up"),
}


def after(phase: MovePhase, event: MoveEvent) -> MoveStep:
    """Return the step that follows."""
    assert (phase, event) in STEPS, f"{event.name} of a move in phase {phase}"
    return STEPS[phase, event]
