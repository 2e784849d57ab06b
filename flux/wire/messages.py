"""What producers and consumers of a stream say to each other (design: handshake).

A connection of a stream starts with Hello, answered by Resume; Data flows one way, Ack the other. Every answer names
its question: Data and Ack carry the nonce of the Resume that they answer to, and Data numbers its messages, so that a
lost one is seen and leads to a new handshake (Reset).
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import msgspec

from flux.wire.numbers import Checksum, Id, Natural, Position, Sequence, Size


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of everything on the wire; the tag is the name of the class."""


class Hello(Message, frozen=True):
    """Producer: I am this life (``incarnation``) of the stream's producer; where shall I go on? ``worker`` hosts the
    replica of a stage, or reads the source, that produces the stream; -1 for an ingress task."""

    edge: Id
    producer: Id
    incarnation: Sequence
    epoch: Sequence
    worker: Id = -1


class Mark(NamedTuple):
    """A point of a source's stream: its running checksum through ``sequence``.

    Where rows are numbered (design: numbered-rows), the checksum of the rows ``begin`` to ``sequence`` alone; ``position``:
    where the reader goes on behind them."""

    sequence: Sequence
    checksum: Checksum
    begin: Sequence = -1
    position: Position = b""


#: The end of numbered rows, at whose number nothing else may stand in another life.
def end_mark(sequence: int) -> Mark:
    return Mark(sequence, 0)


class Needed(NamedTuple):
    """A partition needs the batches of a stream from ``sequence`` on."""

    partition: Id
    sequence: Natural


class AppliedThrough(NamedTuple):
    """A partition has applied a stream through ``through``, which is less than others have."""

    partition: Id
    through: Sequence


class Resume(Message, frozen=True):
    """Consumer: send from here on. ``next``: of every partition hosted.

    ``through``, ``behind``: what is applied already, as in Ack. ``granted`` is the number of payload bytes that may be
    sent under this nonce, counted from its start. ``shown``: points of the stream as earlier incarnations sent it, by
    sequence: the last is the newest received, and some of the others are applied. ``front``: numbered rows below have come or
    are in an order here."""

    edge: Id
    producer: Id
    nonce: Sequence
    epoch: Sequence
    next: list[Needed]
    through: Sequence
    behind: list[AppliedThrough]
    granted: Natural
    shown: list[Mark] = []
    front: Natural = 0


class ElementKind(IntEnum):
    """What an element of a stream is (``flux.stream.elements``)."""

    ROWS = 0
    END = 1


#: Batches of one run at most.
RUN_BATCHES = 256


class Data(Message, frozen=True):
    """Batch ``sequence``, or rather the slices of it for the partitions of one worker.

    Batches ``first`` .. ``sequence`` - 1 have no rows for these partitions. ``partitions`` and ``rows`` run in parallel
    with the rows of the payload; ``runs`` says how many partitions each payload frame holds. Without rows the element
    is for every partition. ``checksum`` is the stream's running checksum including this batch, 0 where none is kept.
    ``created`` is the time at which the oldest row of the batch entered the query. ``mark``: of numbered rows,
    the newest through ``sequence``, whoever has got its rows.

    Or a run of several batches (``flux.stream.runs``): ``batches`` are their numbers, the last is ``sequence``, and
    ``counts`` the rows of each for each partition. The payload is one frame, batch by batch; within a batch the
    partitions come in the order of ``partitions``."""

    edge: Id
    producer: Id
    nonce: Natural
    number: Natural
    first: Natural
    sequence: Natural
    partitions: list[Natural]
    rows: list[Natural]
    runs: list[Natural]
    nbytes: Size
    element: ElementKind = ElementKind.ROWS
    checksum: Checksum = 0
    created: float = 0.0
    batches: list[Natural] = []
    counts: list[Natural] = []
    mark: Mark | None = None


class Ack(Message, frozen=True):
    """Consumer: everything through ``through`` is applied by each of my partitions, except those in ``behind``.
    ``epoch`` is that of the table I go by: it tells which incarnations of replicas are meant."""

    edge: Id
    producer: Id
    nonce: Sequence
    epoch: Sequence
    through: Sequence
    behind: list[AppliedThrough]
    granted: Natural


class Acks(Message, frozen=True):
    """Consumer: acks of several streams that one worker produces."""

    items: list[Ack]


class ReadsElsewhere(Message, frozen=True):
    """Consumer: I read this stream from another replica of its producer; here is what I have applied, as in Ack."""

    edge: Id
    producer: Id
    epoch: Sequence
    through: Sequence
    behind: list[AppliedThrough]


class Reset(Message, frozen=True):
    """Consumer: something is missing or I do not know you; say Hello again."""

    edge: Id
    producer: Id
    reason: str


class Refuse(Message, frozen=True):
    """Consumer: go away, and why. ``code``: "stale" or "edge"."""

    edge: Id
    producer: Id
    code: str
    reason: str


class Fetch(Message, frozen=True):
    """Egress task: give me bytes of the collected output of a partition of a collecting stage."""

    stage: Id
    partition: Id
    offset: Natural


class Chunk(Message, frozen=True):
    """Answer to Fetch: one payload frame; ``total`` is the size of the whole output in bytes."""

    stage: Id
    partition: Id
    offset: Natural
    total: Natural


class Pull(Message, frozen=True):
    """Reader to the worker of a primary: give me the output of a partition from ``position`` on, up to ``bytes_max``. I have the
    positions below ``acknowledged`` for good. ``waits``: where there is nothing yet, answer a little later."""

    stage: Id
    partition: Id
    position: Natural
    acknowledged: Natural
    bytes_max: Natural
    waits: bool


class Pulled(Message, frozen=True):
    """Answer to Pull: ``count`` batches from ``position`` on, as an Arrow IPC stream in one payload frame where there are any.

    Positions below ``left`` are acknowledged and gone, those below ``end`` committed; ``finished``: no more will come;
    ``full``: no more will come before something is acknowledged. ``leads``: whether the primary is here; else nothing else of
    this means anything."""

    stage: Id
    partition: Id
    position: Natural
    count: Natural = 0
    left: Natural = 0
    end: Natural = 0
    finished: bool = False
    full: bool = False
    leads: bool = True


class StepKind(IntEnum):
    """What a step is for."""

    SLICES = 0
    #: The timers that are due.
    TICK = 1
    #: The end of the input.
    FINISH = 2


class OrderEntry(msgspec.Struct, frozen=True, array_like=True):
    """One step in the order of a partition, and the time that the operator is told, which never falls from one to the
    next. ``slices`` (edge, producer, sequence) are applied together: all rows of a stream for this partition through this
    batch, which has some, as far as they are not applied. Only steps for slices have any. ``rows``: of the step, by which
    its slices are compared; -1: not known."""

    now: float
    created: float
    slices: list[tuple[Id, Id, Natural]]
    kind: StepKind = StepKind.SLICES
    rows: Sequence = -1


class PartitionOrder(msgspec.Struct, frozen=True, array_like=True):
    """Entries ``first``, ``first`` + 1, ... for one replica; steps below ``committed`` may be applied. ``term`` is the
    epoch in which the sender became primary. The outside has the batches of the output at positions below ``left``.
    ``checksum``: of the output of the first ``checked`` steps, all of them committed; 0 of 0 steps for a replica that applies
    them itself, and is asked."""

    stage: Id
    partition: Id
    incarnation: Sequence
    term: Sequence
    first: Natural
    entries: list[OrderEntry]
    committed: Natural
    left: Natural = 0
    checked: Natural = 0
    checksum: Checksum = 0


class Orders(Message, frozen=True):
    """Primaries to the other replicas on one worker: the order of steps."""

    items: list[PartitionOrder]


class PartitionSeen(msgspec.Struct, frozen=True, array_like=True):
    """All entries of the primary of ``term`` below ``received_below`` are received, all steps below ``applied`` applied;
    ``checksum`` is the running checksum of the output of the steps below ``checked``; ``left``: as in ``PartitionOrder``, as far
    as it has been heard."""

    stage: Id
    partition: Id
    incarnation: Sequence
    term: Sequence
    received_below: Natural
    applied: Natural
    checked: Natural
    checksum: Checksum
    left: Natural = 0


class OrdersSeen(Message, frozen=True):
    """Answer to Orders: what each replica has received."""

    items: list[PartitionSeen]


class Install(Message, frozen=True):
    """Primary to a new replica: part of a copy of its state at a step boundary, in one payload frame (design: copy).

    Or to a standby, which keeps it as a checkpoint. ``copy`` numbers the copies that this primary takes, ``offset`` says where
    in it the part begins, ``total`` how many bytes it has; the last of them are its signature (``arrivals.sign``). ``term``:
    the epoch in which the sender became primary. An empty part asks how far it has come. ``base``: the copy is what has changed
    since the checkpoint of this term and number, which the standby has; -1: it is whole (design: changes)."""

    stage: Id
    partition: Id
    incarnation: Sequence
    copy: Natural
    offset: Natural
    total: Natural
    term: Sequence = 0
    base: Sequence = -1


class Installed(Message, frozen=True):
    """Answer to Install: ``received_bytes`` of the copy are there; ``done``: the replica has come to life and follows, or the
    standby has the checkpoint. ``lacks``: the standby has not what these are the changes of."""

    stage: Id
    partition: Id
    incarnation: Sequence
    copy: Natural
    received_bytes: Natural
    done: bool
    lacks: bool = False


class Restore(Message, frozen=True):
    """Worker to the vault: a replica here, of this life, is to be primary: give it what you keep of its partition."""

    stage: Id
    partition: Id
    incarnation: Sequence
    worker: Id


class Press(Message, frozen=True):
    """Producer to the workers of primaries and standbys: rows are kept only because the checkpoints of these partitions lack
    them, as far as I have heard (design: press)."""

    edge: Id
    producer: Id
    partitions: list[Natural]


#: What a worker says to the data port of another.
ToPort = Hello | Data | Orders | Install | Press | Restore
#: What is said to a data port, also by an egress task or a reader of output.
Asked = ToPort | Fetch | Pull
#: What a producer is answered by a worker that consumes its stream.
ToProducer = Resume | ReadsElsewhere | Ack | Reset | Refuse
#: What is answered at a data port.
Answered = ToProducer | Acks | Chunk | Pulled | OrdersSeen | Installed
