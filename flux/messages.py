"""What producers and consumers of a stream say to each other (DESIGN 3).

A connection of a stream starts with Hello, answered by Resume; Data flows one way, Ack the other. Every answer names
its question: Data and Ack carry the nonce of the Resume that they answer to, and Data numbers its messages, so that a
lost one is seen and leads to a new handshake (Reset).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, NamedTuple

import msgspec

#: Numbers that a peer may send: what is beyond is malformed, and never reaches 64 bit arithmetic.
Natural = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
#: Bytes of one message, so that sums of them stay numbers too.
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of everything on the wire; the tag is the name of the class."""


class Hello(Message, frozen=True):
    """Producer: I am this life (``incarnation``) of the stream's producer; where shall I go on? ``worker`` hosts the
    replica of a stage, or reads the source, that produces the stream; -1 for an ingress task."""

    edge: int
    producer: int
    incarnation: int
    epoch: int
    worker: int = -1


class Mark(NamedTuple):
    """A point of a source's stream: its running checksum through ``sequence``."""

    sequence: int
    checksum: int


class Resume(Message, frozen=True):
    """Consumer: send from here on. ``next`` has (partition, next sequence needed) for every partition hosted.

    ``through``, ``behind``: what is applied already, as in Ack. ``granted`` is the number of payload bytes that may be
    sent under this nonce, counted from its start. ``shown``: points of the stream as earlier incarnations sent it, by
    sequence: the last is the newest received, and some of the others are applied."""

    edge: int
    producer: int
    nonce: int
    epoch: int
    next: list[tuple[int, int]]
    through: int
    behind: list[tuple[int, int]]
    granted: int
    shown: list[Mark] = []


class Data(Message, frozen=True):
    """Batch ``sequence``, or rather the slices of it for the partitions of one worker.

    Batches ``first`` .. ``sequence`` - 1 have no rows for these partitions. ``partitions`` and ``rows`` run in parallel
    with the rows of the payload; ``runs`` says how many partitions each payload frame holds. ``last``: the stream ends
    with this batch. ``checksum`` is the stream's running checksum including this batch, 0 where none is kept.
    ``created`` is the time at which the oldest row of the batch entered the query."""

    edge: int
    producer: int
    nonce: Natural
    number: Natural
    first: Natural
    sequence: Natural
    partitions: list[Natural]
    rows: list[Natural]
    runs: list[Natural]
    nbytes: Size
    last: bool = False
    checksum: int = 0
    created: float = 0.0


class Ack(Message, frozen=True):
    """Consumer: everything through ``through`` is applied by each of my partitions, except those in ``behind``
    (partition, through). ``epoch`` is that of the table I go by: it tells which incarnations of replicas are meant."""

    edge: int
    producer: int
    nonce: int
    epoch: int
    through: int
    behind: list[tuple[int, int]]
    granted: int


class Standby(Message, frozen=True):
    """Consumer: I read this stream from another replica of its producer; here is what I have applied, as in Ack."""

    edge: int
    producer: int
    epoch: int
    through: int
    behind: list[tuple[int, int]]


class Reset(Message, frozen=True):
    """Consumer: something is missing or I do not know you; say Hello again."""

    edge: int
    producer: int
    reason: str


class Refuse(Message, frozen=True):
    """Consumer: go away, and why. ``code``: "stale" or "edge"."""

    edge: int
    producer: int
    code: str
    reason: str


class Fetch(Message, frozen=True):
    """Egress task: give me bytes of the collected output of a partition of a collecting stage."""

    stage: int
    partition: int
    offset: Natural


class Chunk(Message, frozen=True):
    """Answer to Fetch: one payload frame; ``total`` is the size of the whole output in bytes."""

    stage: int
    partition: int
    offset: int
    total: int


class StepKind(IntEnum):
    """What a step is for."""

    SLICES = 0
    #: The timers that are due.
    TICK = 1
    #: The end of the input.
    FINISH = 2


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One step in the order of a partition, and the time that the operator is told, which never falls from one to the
    next. ``slices`` (edge, producer, sequence) are applied together; only steps for slices have any."""

    now: float
    created: float
    slices: list[tuple[int, int, int]]
    kind: StepKind = StepKind.SLICES


class PartitionOrder(msgspec.Struct, frozen=True, array_like=True):
    """Entries ``first``, ``first`` + 1, ... for one replica; steps below ``committed`` may be applied. ``term`` is the
    epoch in which the sender became primary."""

    stage: int
    partition: int
    incarnation: int
    term: int
    first: int
    entries: list[Entry]
    committed: int


class Orders(Message, frozen=True):
    """Primaries to the other replicas on one worker: the order of steps."""

    items: list[PartitionOrder]


class PartitionSeen(msgspec.Struct, frozen=True, array_like=True):
    """All entries of the primary of ``term`` below ``through`` are received, all steps below ``applied`` applied;
    ``checksum`` is the running checksum of the output of the steps below ``checked``."""

    stage: int
    partition: int
    incarnation: int
    term: int
    through: int
    applied: int
    checked: int
    checksum: int


class OrdersSeen(Message, frozen=True):
    """Answer to Orders: what each replica has received."""

    items: list[PartitionSeen]


class Install(Message, frozen=True):
    """Primary to a new replica: part of a copy of its state at a step boundary, in one payload frame (DESIGN 5, step 2).

    ``copy`` numbers the copies that this primary takes, ``offset`` says where in it the part begins, ``total`` how many
    bytes it has; the last of them are its signature (``transfers.sign``). An empty part asks how far it has come."""

    stage: int
    partition: int
    incarnation: int
    copy: int
    offset: int
    total: int


class Installed(Message, frozen=True):
    """Answer to Install: ``through`` bytes of the copy are there; ``done``: the replica has come to life and follows."""

    stage: int
    partition: int
    incarnation: int
    copy: int
    through: int
    done: bool


DataPlane = (
    Hello | Resume | Standby | Data | Ack | Reset | Refuse | Fetch | Chunk | Orders | OrdersSeen | Install | Installed
)
