"""The phases of a connection to a port, as its connecting end sees it (design: mutual-proof), and the steps between them.

    WAITING --dialled--> MEETING --accepted--> READY
    MEETING, READY --ended--> ENDED --hung up--> WAITING

Messages that came before the end are still read in ENDED, also the last message of a handshake, and the end may be told twice.
An event that is not among the steps cannot happen: it is a mistake of the caller.
"""

from __future__ import annotations

from enum import Enum, StrEnum


class LinkPhase(StrEnum):
    """Phase of a connection."""

    #: There is no connection, until it is time to dial.
    WAITING = "waiting"
    #: Both ends prove the secret to each other.
    MEETING = "meeting"
    READY = "ready"
    #: The connection has ended, and its socket is still to be closed.
    ENDED = "ended"


class LinkEvent(Enum):
    """Event that may change the phase of a connection. Its value describes the event for people."""

    DIALLED = "there is a new connection"
    ACCEPTED = "the other end has proved the secret, and accepted the proof of this one"
    ENDED = "the connection has closed, or the other end is not to be talked to"
    HUNG_UP = "its socket is closed"


STEPS: dict[tuple[LinkPhase, LinkEvent], LinkPhase] = {
    (LinkPhase.WAITING, LinkEvent.DIALLED): LinkPhase.MEETING,
    (LinkPhase.MEETING, LinkEvent.ACCEPTED): LinkPhase.READY,
    (LinkPhase.MEETING, LinkEvent.ENDED): LinkPhase.ENDED,
    (LinkPhase.READY, LinkEvent.ENDED): LinkPhase.ENDED,
    (LinkPhase.ENDED, LinkEvent.ENDED): LinkPhase.ENDED,
    (LinkPhase.ENDED, LinkEvent.ACCEPTED): LinkPhase.ENDED,
    (LinkPhase.ENDED, LinkEvent.HUNG_UP): LinkPhase.WAITING,
}


def after(phase: LinkPhase, event: LinkEvent) -> LinkPhase:
    """Return the phase that follows."""
    assert (phase, event) in STEPS, f"{event.name} of a connection in phase {phase}"
    return STEPS[phase, event]
