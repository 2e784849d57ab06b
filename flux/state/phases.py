"""The phases of a copy of state on its way (design: copy, copy-in-parts): which event leads where, at both of its ends.

At the worker of the primary:

    ROOM --ready--> BOUNDARY --between steps--> COPYING --copied--> SENDING --alive--> OVER
                    BOUNDARY --replay point--> UNACKED --copied--> SENDING
    SENDING --lacking--> OVER
    ROOM, BOUNDARY, UNACKED, SENDING --dropped--> OVER

A copy that is small, or of unknown size, begins in BOUNDARY. It is not dropped while it is COPYING: another thread reads the
state, and the partition stands still until that is done.

At the worker of the new replica:

    RECEIVING --whole--> DECODING --decoded--> RESTORING --restored--> ALIVE
    RECEIVING, DECODING, RESTORING --dropped--> FORGOTTEN

An event that is not among the steps is a mistake of the caller.
"""

from __future__ import annotations

from enum import Enum, StrEnum


class OutPhase(StrEnum):
    #: Another thread makes memory ready.
    ROOM = "room"
    #: Until the partition is between two steps.
    BOUNDARY = "boundary"
    #: The partition stands still.
    COPYING = "copying"
    #: A replay point waits until all consumers have acked the output before it.
    UNACKED = "unacked"
    #: Parts travel, until the other end says that the replica lives.
    SENDING = "sending"
    OVER = "over"


class OutEvent(Enum):
    """The events at the primary's end."""

    READY = "the memory is there"
    BETWEEN_STEPS = "the partition is between two steps"
    POINT = "the partition is between two steps, and that is noted as a replay point"
    COPIED = "the state is copied"
    ALIVE = "the other end says that the replica lives"
    LACKING = "the other end has not what these are the changes of"
    DROPPED = "the replica is gone, or has a state, or the partition has another primary"


class InPhase(StrEnum):
    #: Parts come.
    RECEIVING = "receiving"
    #: All of them are here, and the signature is checked.
    DECODING = "decoding"
    #: The operator takes its state.
    RESTORING = "restoring"
    ALIVE = "alive"
    FORGOTTEN = "forgotten"


class InEvent(Enum):
    """The events at the new replica's end."""

    WHOLE = "the last part is here"
    DECODED = "its signature is right, and it is decoded"
    RESTORED = "the operator has its state"
    DROPPED = "its signature is wrong, a newer copy comes, or the table places no such replica here"


OUT_STEPS: dict[tuple[OutPhase, OutEvent], OutPhase] = {
    (OutPhase.ROOM, OutEvent.READY): OutPhase.BOUNDARY,
    (OutPhase.BOUNDARY, OutEvent.BETWEEN_STEPS): OutPhase.COPYING,
    (OutPhase.BOUNDARY, OutEvent.POINT): OutPhase.UNACKED,
    (OutPhase.COPYING, OutEvent.COPIED): OutPhase.SENDING,
    (OutPhase.UNACKED, OutEvent.COPIED): OutPhase.SENDING,
    (OutPhase.SENDING, OutEvent.ALIVE): OutPhase.OVER,
    (OutPhase.SENDING, OutEvent.LACKING): OutPhase.OVER,
    (OutPhase.ROOM, OutEvent.DROPPED): OutPhase.OVER,
    (OutPhase.BOUNDARY, OutEvent.DROPPED): OutPhase.OVER,
    (OutPhase.UNACKED, OutEvent.DROPPED): OutPhase.OVER,
    (OutPhase.SENDING, OutEvent.DROPPED): OutPhase.OVER,
}

IN_STEPS: dict[tuple[InPhase, InEvent], InPhase] = {
    (InPhase.RECEIVING, InEvent.WHOLE): InPhase.DECODING,
    (InPhase.DECODING, InEvent.DECODED): InPhase.RESTORING,
    (InPhase.RESTORING, InEvent.RESTORED): InPhase.ALIVE,
    (InPhase.RECEIVING, InEvent.DROPPED): InPhase.FORGOTTEN,
    (InPhase.DECODING, InEvent.DROPPED): InPhase.FORGOTTEN,
    (InPhase.RESTORING, InEvent.DROPPED): InPhase.FORGOTTEN,
}


def after_out(phase: OutPhase, event: OutEvent) -> OutPhase:
    """Return the phase that follows at the primary's end."""
    assert (phase, event) in OUT_STEPS, f"{event.name} of a copy in phase {phase}"
    return OUT_STEPS[phase, event]


def after_in(phase: InPhase, event: InEvent) -> InPhase:
    """Return the phase that follows at the new replica's end."""
    assert (phase, event) in IN_STEPS, f"{event.name} of a copy in phase {phase}"
    return IN_STEPS[phase, event]
