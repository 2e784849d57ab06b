"""The phases of an addition: the phase that follows each event, the message that goes out with it, and its time limit
(design: add-replica).

    RETAIN --confirmed--> READY --turn--> COPY --follows--> FOLLOWS --listed--> LIVE --complete--> SAFE
    READY --follows--> FOLLOWS, of a kind without a state
    RETAIN, READY, COPY, FOLLOWS, LIVE --dropped--> DROPPED

An addition begins in RETAIN with the table that lists the new replica, or in READY if producers keep nothing for its
kind. Additions of a batch begin with one table, and one table lists them as live; only the copies go one by one. Any
event that is not in the table of steps is a mistake of the caller: it checks first whether a report is meant for this
phase.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, StrEnum

from controller.replicas.attempts import CONFIRM_MAX_S, READY_MAX_S, SAFE_MAX_S
from flux.wire.control import CopyState, TableChanged


class Phase(StrEnum):
    #: Until every process goes by the table that lists the replica.
    RETAIN = "retain"
    #: Until it is its turn: few partitions stand still for a copy at the same time.
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


class Heard(Enum):
    """The events of an addition."""

    CONFIRMED = "every process goes by the table that lists the replica"
    TURN = "another copy is through"
    FOLLOWS = "its primary says that it follows the order"
    LISTED = "a table that lists it as live is on its way"
    COMPLETE = "its primary says that it has everything committed"
    DROPPED = "a table without it is on its way"


@dataclass(frozen=True, slots=True)
class Step:
    """``to``: the next phase; ``tells``: the message that goes out with it, None: none has to; ``limit_s``: the longest
    time in it."""

    to: Phase
    tells: type | None
    limit_s: float = math.inf


STEPS: dict[tuple[Phase, Heard], Step] = {
    (Phase.RETAIN, Heard.CONFIRMED): Step(Phase.READY, None, READY_MAX_S),
    # The phase COPY has another limit: the number of copies that are ordered (``attempts.COPIES_MAX``), each with more
    # patience.
    (Phase.READY, Heard.TURN): Step(Phase.COPY, CopyState),
    # The controller itself ends the phase FOLLOWS, after ``batches.LISTED_EVERY_S`` at most.
    (Phase.COPY, Heard.FOLLOWS): Step(Phase.FOLLOWS, None),
    # Of a kind without a state, before anybody asks for a copy.
    (Phase.READY, Heard.FOLLOWS): Step(Phase.FOLLOWS, None),
    (Phase.FOLLOWS, Heard.LISTED): Step(Phase.LIVE, TableChanged, SAFE_MAX_S),
    # Of a move there is a table without the source.
    (Phase.LIVE, Heard.COMPLETE): Step(Phase.SAFE, None),
} | {
    (phase, Heard.DROPPED): Step(Phase.DROPPED, TableChanged)
    for phase in (Phase.RETAIN, Phase.READY, Phase.COPY, Phase.FOLLOWS, Phase.LIVE)
}

#: The longest time that an addition may be in each phase.
LIMIT_S: dict[Phase, float] = {Phase.RETAIN: CONFIRM_MAX_S} | {
    step.to: step.limit_s for step in STEPS.values() if any(phase == step.to for phase, _ in STEPS)
}


def after(phase: Phase, heard: Heard) -> Phase:
    """The phase that follows."""
    assert (phase, heard) in STEPS, f"{heard.name} of an addition in phase {phase}"
    return STEPS[phase, heard].to
