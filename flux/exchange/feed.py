"""One way over which a worker reads a stream: a connection to one replica of its producer, under one handshake (design:
handshake, feeds).

Law: the messages of a feed are numbered, and none is taken behind a gap before the next handshake. A gap in one feed of a stream
concerns no other.

Left to others: the rows and the progress of the stream (``flux.exchange.inbound``), the choice of the replica
(``flux.worker.subscriptions``).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum


class FeedPhase(Enum):
    """A phase of a feed. A handshake leads to IN_ORDER from any."""

    #: Nothing is read, until a producer says Hello.
    UNREAD = "unread"
    #: Messages are taken, each with the next number under the nonce.
    IN_ORDER = "in order"
    #: A message under the nonce was lost or spoilt: none is taken before the next handshake.
    BROKEN = "broken"


UNREAD, IN_ORDER, BROKEN = FeedPhase
#: Statements under an earlier nonce that may have been under way when the Resume of the newest one was sent.
UNDER_WAY = 2


@dataclass(slots=True)
class Feed:
    """One feed of a stream. One without a connection brings nothing."""

    #: The connection to the producer; None: there is none.
    connection: Hashable = None
    #: That of the last Resume; -1: there was none.
    nonce: int = -1
    #: The epoch of the table that the producer went by when it said Hello.
    epoch: int = -1
    #: The worker whose replica of the producer is read; -1: the producer is not of a stage, or none is read.
    worker: int = -1
    phase: FeedPhase = UNREAD
    #: The number of the next message under the nonce.
    number: int = 0
    #: Payload received under the nonce.
    received_bytes: int = 0
    #: Messages under the nonce that have brought something new.
    firsts: int = 0
    #: Statements that have come on its connection under an earlier nonce.
    outdated: int = 0

    def goes_on_without_resume(self, nonce: int) -> bool:
        """Take note of the nonce of a statement, and tell whether its producer goes on as if it had not got the last Resume."""
        self.outdated += nonce < self.nonce
        return self.outdated > UNDER_WAY and nonce < self.nonce

    def validate(self) -> None:
        """Check the invariants that hold between any two events. AssertionError names the broken one."""
        read = self.phase is not UNREAD
        assert read == (self.connection is not None), f"{self.phase.value} on connection {self.connection}"
        assert read == (self.nonce >= 0), f"{self.phase.value} under nonce {self.nonce}"


@dataclass
class Counters:
    """Counts of refused messages and slices.

    ``duplicate``: slices taken before; ``stale``: of another handshake, life or epoch; ``refused``: from connections that have
    not proved the secret, or that no process of this query would send; ``switched``: streams that went on from another replica
    of their producer."""

    duplicate: int = 0
    stale: int = 0
    gap: int = 0
    misrouted: int = 0
    refused: int = 0
    malformed: int = 0
    switched: int = 0
