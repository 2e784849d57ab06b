"""The phases of an addition: the phase that follows each event, the message that goes out with it, and its time limit
(design: add-replica).

    RETAIN --confirmed--> READY --turn--> COPY --follows--> FOLLOWS --listed--> LIVE --complete--> SAFE
    READY --follows--> FOLLOWS, of a kind without a state
    RETAIN, READY, COPY, FOLLOWS, LIVE --dropped--> DROPPED

An addition begins in RETAIN with the table that lists the new replica, or in READY if producers keep nothing for its
kind. Additions of a batch begin with one table, and one table lists them as live; only the copies go one by one. An
event that is not in the table of steps is a mistake of the caller, which has to check first whether a report is meant for this
phase.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, StrEnum

from controller.replicas.attempts import CONFIRM_MAX_S, READY_MAX_S, SAFE_MAX_S
from flux.wire.control import CopyState, TableChanged


class Phase(StrEnum):
    """The phases of an addition. Each comment tells how long the phase lasts."""

    #: Until every process goes by the table that lists the replica.
    RETAIN = "retain"
    #: Until its turn comes: few partitions stand still for a copy at the same time.
    READY = "ready"
    #: Until the replica follows the order of its primary.
    COPY = "copy"
    #: Until a table lists it as live, with others of its batch.
    FOLLOWS = "follows"
    #: Until it has everything that is committed; in a move, also until the remaining replicas keep up well enough.
    LIVE = "live"
    #: It may take over: the addition is done.
    SAFE = "safe"
    #: Its worker or its primary was lost, or the attempt took too long.
    DROPPED = "dropped"


class AdditionEvent(Enum):
    """The events of an addition."""

    CONFIRMED = "every process goes by the table that lists the replica"
    TURN = "another copy is through"
    FOLLOWS = "its primary says that it follows the order"
    LISTED = "a table that lists it as live is on its way"
    COMPLETE = "its primary says that it has everything committed"
    DROPPED = "a table without it is on its way"


@dataclass(frozen=True, slots=True)
class AdditionStep:
    """A step from one phase to the next."""

    #: The next phase.
    to: Phase
    #: The message that goes out with it, if any.
    tells: type | None
    #: The longest time in the next phase.
    limit_s: float = math.inf


STEPS: dict[tuple[Phase, AdditionEvent], AdditionStep] = {
    (Phase.RETAIN, AdditionEvent.CONFIRMED): AdditionStep(Phase.READY, None, READY_MAX_S),
    # The phase COPY has another limit: the number of copies that are ordered (``attempts.COPIES_MAX``), with more patience
    # each time.
    (Phase.READY, AdditionEvent.TURN): AdditionStep(Phase.COPY, CopyState),
    # The controller itself ends the phase FOLLOWS, after at most ``batches.LISTED_EVERY_S``.
    (Phase.COPY, AdditionEvent.FOLLOWS): AdditionStep(Phase.FOLLOWS, None),
    # A kind without a state needs no copy.
    (Phase.READY, AdditionEvent.FOLLOWS): AdditionStep(Phase.FOLLOWS, None),
    (Phase.FOLLOWS, AdditionEvent.LISTED): AdditionStep(Phase.LIVE, TableChanged, SAFE_MAX_S),
    # If the addition is a move, a table without the source goes out.
    (Phase.LIVE, AdditionEvent.COMPLETE): AdditionStep(Phase.SAFE, None),
} | {
    (phase, AdditionEvent.DROPPED): AdditionStep(Phase.DROPPED, TableChanged)
    for phase in (Phase.RETAIN, Phase.READY, Phase.COPY, Phase.FOLLOWS, Phase.LIVE)
}

#: The longest time that an addition may be in each phase.
LIMIT_S: dict[Phase, float] = {Phase.RETAIN: CONFIRM_MAX_S} | {
    step.to: step.limit_s for step in STEPS.values() if any(phase == step.to for phase, _ in STEPS)
}


def after(phase: Phase, heard: AdditionEvent) -> Phase:
    """Return the phase that follows."""
    assert (phase, heard) in STEPS, f"{heard.name} of an addition in phase {phase}"
    return STEPS[phase, heard].to
