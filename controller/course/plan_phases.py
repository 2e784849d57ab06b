"""The phases of a change of the plan: the phase that follows each event, and the message that goes out with it (design:
change-of-plan).

    REQUESTED --turn--> STORING --kept--> TOLD --confirmed--> LISTED --seen--> RUNNING
    REQUESTED --refused--> REFUSED
    REQUESTED --gone--> RUNNING
    STORING, TOLD --refused--> REVOKING --forgotten--> REFUSED

Law: a change that is refused has been named by no table, so no process has gone by it, and no further event touches it. A change
that is LISTED is not refused any more. One change at a time is in a phase between REQUESTED and RUNNING.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, StrEnum

from controller.replicas.addition_limits import CONFIRM_MAX_S
from flux.wire.control import PlanChanged, TableChanged

#: The longest time for which a change waits for the checkpoint location.
STORE_MAX_S = 60.0


class PlanPhase(StrEnum):
    #: Until the changes before it are over.
    REQUESTED = "waiting"
    #: Until the checkpoint location has it; a query without one does not wait.
    STORING = "being stored"
    #: Until each process has confirmed it.
    TOLD = "being confirmed"
    #: Until each process goes by the table that names it.
    LISTED = "beginning"
    RUNNING = "running"
    #: Until the checkpoint location has forgotten it.
    REVOKING = "being taken back"
    REFUSED = "refused"

    @property
    def over(self) -> bool:
        return self in (PlanPhase.RUNNING, PlanPhase.REFUSED)


class PlanEvent(Enum):
    TURN = "the change before it is over, and it fits the newest plan"
    KEPT = "the checkpoint location has it"
    CONFIRMED = "every process has the plan that it makes"
    SEEN = "every process goes by the table that names it"
    REFUSED = "it does not fit, a process cannot take it, or one has not answered in time"
    GONE = "the stage that it removes has failed, and is gone already"
    FORGOTTEN = "the checkpoint location does not have it any more"


@dataclass(frozen=True, slots=True)
class PlanStep:
    """A step from one phase to the next: the phase that follows, the message to all processes, and the limit of its time."""

    to: PlanPhase
    tells: type | None = None
    limit_s: float = math.inf


STEPS: dict[tuple[PlanPhase, PlanEvent], PlanStep] = {
    (PlanPhase.REQUESTED, PlanEvent.TURN): PlanStep(PlanPhase.STORING, limit_s=STORE_MAX_S),
    (PlanPhase.STORING, PlanEvent.KEPT): PlanStep(PlanPhase.TOLD, PlanChanged, CONFIRM_MAX_S),
    # A process that is silent then is given up, as always.
    (PlanPhase.TOLD, PlanEvent.CONFIRMED): PlanStep(PlanPhase.LISTED, TableChanged),
    (PlanPhase.LISTED, PlanEvent.SEEN): PlanStep(PlanPhase.RUNNING),
    (PlanPhase.REQUESTED, PlanEvent.REFUSED): PlanStep(PlanPhase.REFUSED),
    (PlanPhase.REQUESTED, PlanEvent.GONE): PlanStep(PlanPhase.RUNNING),
    (PlanPhase.STORING, PlanEvent.REFUSED): PlanStep(PlanPhase.REVOKING, limit_s=STORE_MAX_S),
    (PlanPhase.TOLD, PlanEvent.REFUSED): PlanStep(PlanPhase.REVOKING, limit_s=STORE_MAX_S),
    (PlanPhase.REVOKING, PlanEvent.FORGOTTEN): PlanStep(PlanPhase.REFUSED),
}

#: The longest time in each phase.
LIMIT_S: dict[PlanPhase, float] = {PlanPhase.REQUESTED: math.inf} | {step.to: step.limit_s for step in STEPS.values()}


def after(phase: PlanPhase, event: PlanEvent) -> PlanPhase:
    """Return the phase that follows."""
    assert (phase, event) in STEPS, f"{event.name} of a change of the plan that is {phase}"
    return STEPS[phase, event].to
