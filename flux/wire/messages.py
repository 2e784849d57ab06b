"""Messages between producers and consumers of a stream, and between replicas of a partition (design: handshake).

A connection of a stream starts with Hello, answered by Resume; Data flows one way, Ack the other. Every answer names
its question: Data and Ack carry the nonce of the Resume that they answer to, and Data numbers its messages, so that a
lost one is seen and leads to a new handshake (Reset).

In all messages ``edge`` and ``producer`` name a stream, ``stage`` and ``partition`` a partition of a stage. ``epoch`` is the
epoch of the table that the sender goes by, if its field says nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import NamedTuple

import msgspec

from flux.windows.window import NEVER
from flux.wire.frames import Checksum, Id, Natural, Position, Sequence, Size, Time


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of everything on the wire; the tag is the name of the class."""


class Hello(Message, frozen=True):
    """Greeting of a producer, which asks a consumer where to go on."""

    edge: Id
    producer: Id
    #: This life of the stream's producer.
    incarnation: Sequence
    epoch: Sequence
    #: The worker with the replica, or with the reader of the source, that produces the stream; -1: an ingress task.
    worker: Id = -1


class Mark(NamedTuple):
    """A point of a source's stream at which its checksum is known. Sequences of numbered rows count rows, or come with them
    (design: numbered-rows, row-numbers). Copies of state and journals keep it: add a field at the end, with a default."""

    sequence: Sequence
    #: The running checksum of the stream through ``sequence``; of numbered rows, the checksum of the rows ``begin`` to
    #: ``sequence`` alone.
    checksum: Checksum
    #: The first row of the checksum, for numbered rows.
    begin: Sequence = -1
    #: The reader's position behind the rows, for numbered rows.
    position: Position = b""
    #: The number of rows from ``begin`` to ``sequence``; -1: not known. A log that has fewer of them later has lost some. As many
    #: with another checksum are other rows.
    rows: Sequence = -1
    #: The stream's watermark behind ``sequence``, for sources with event time (design: late-rows).
    watermark: Time = NEVER
    #: Late rows through ``sequence``, for such sources.
    late: Natural = 0
    #: Rows in succession through ``sequence`` whose times are not believed, and the least of these times (design: max-ahead).
    doubted: Natural = 0
    doubted_from: Time = NEVER


def end_mark(sequence: int) -> Mark:
    """Return the mark of the end of numbered rows. No life of the source may have anything else at its number."""
    return Mark(sequence, 0)


class Needed(NamedTuple):
    """The first batch of a stream that a partition still needs."""

    partition: Id
    sequence: Natural


class AppliedThrough(NamedTuple):
    """A partition that has applied less of a stream than the others of its message."""

    partition: Id
    #: Inclusive.
    through: Sequence


class Resume(Message, frozen=True):
    """Answer of a consumer to Hello: a request for the stream from certain batches on."""

    edge: Id
    producer: Id
    #: The number of this handshake. Data and acks carry it.
    nonce: Sequence
    epoch: Sequence
    #: One entry for every partition on this worker.
    next: list[Needed]
    #: See Ack.
    through: Sequence
    #: See Ack.
    behind: list[AppliedThrough]
    #: Bytes of payload that may be sent under this nonce, counted from the start of the handshake.
    granted: Natural
    #: Points of the stream as earlier incarnations sent it, by sequence. The last one is the newest that was received; some of
    #: the others are applied. For rows that bring their numbers, the end is shown as well if an order on this worker has it.
    shown: list[Mark] = []
    #: Exclusive: numbered rows below this have been received, or are in an order on this worker.
    front: Natural = 0
    #: The life of the source's stream that is answered; -1: the stream is of a stage, whose replicas have lives of their own.
    incarnation: Sequence = -1


class ElementKind(IntEnum):
    """The two kinds of elements of a stream (``flux.exchange.log``)."""

    ROWS = 0
    END = 1


#: Batches of one run at most.
RUN_BATCHES = 256


class Data(Message, frozen=True):
    """The slices of a batch, or of a run of batches, for the partitions of one worker.

    An element without rows (the end) is for every partition and has no slices. A run (``flux.exchange.slices``) has one payload
    frame, batch by batch; within a batch the partitions come in the order of ``partitions``."""

    edge: Id
    producer: Id
    #: That of the Resume that these data follow.
    nonce: Natural
    #: The number of this message under its nonce. A gap shows that a message was lost.
    number: Natural
    #: Batches from ``first`` to ``sequence`` - 1 have no rows for these partitions, apart from those in ``batches``.
    first: Natural
    #: The number of the batch; of a run, the number of its last batch.
    sequence: Natural
    #: The partitions of the slices, in the order of the rows of the payload.
    partitions: list[Natural]
    #: Rows of each slice, parallel to ``partitions``.
    rows: list[Natural]
    #: Slices in each payload frame.
    runs: list[Natural]
    #: Size of the payload, as it counts against the credit.
    nbytes: Size
    element: ElementKind = ElementKind.ROWS
    #: The running checksum of the stream, including this batch; 0 for a stream without checksums.
    checksum: Checksum = 0
    #: The time at which the oldest row of the batch entered the query.
    created: float = 0.0
    #: Numbers of the batches of a run, ascending. Empty for a single batch.
    batches: list[Natural] = []
    #: Rows of a run: for each batch, the rows of each partition.
    counts: list[Natural] = []
    #: The newest mark through ``sequence`` of numbered rows, whichever worker has got the rows.
    mark: Mark | None = None
    #: The stream's watermark behind ``sequence`` (design: watermark-statements); None: none is stated.
    watermark: Time | None = None
    #: See Mark, as for the fields below.
    late: Natural = 0
    doubted: Natural = 0
    doubted_from: Time = NEVER


class Ack(Message, frozen=True):
    """Positions that the partitions of a worker have applied."""

    edge: Id
    producer: Id
    #: That of the handshake under which the stream is read.
    nonce: Sequence
    #: The epoch of the consumer's table. It tells which incarnations of replicas are meant.
    epoch: Sequence
    #: Inclusive: each partition of this worker has applied the stream through this batch, except those in ``behind``.
    through: Sequence
    behind: list[AppliedThrough]
    #: See Resume. It only grows under one nonce.
    granted: Natural


class Acks(Message, frozen=True):
    """Acks of several streams that one worker produces."""

    items: list[Ack]


#: Limit of partition numbers in one message of acks: a tenth of the bound of a message.
ACK_ENTRIES = 30_000


def in_messages(acks: Iterable[Ack]) -> Iterator[list[Ack]]:
    """Divide acks among messages, because a message beyond its bound is refused whole."""
    some: list[Ack] = []
    entries = 0
    for ack in acks:
        if some and entries + len(ack.behind) > ACK_ENTRIES:
            yield some
            some, entries = [], 0
        some.append(ack)
        entries += 1 + len(ack.behind)
    yield some


class ReadsElsewhere(Message, frozen=True):
    """Answer of a consumer that reads the stream from another replica of its producer, with the positions that it has applied."""

    edge: Id
    producer: Id
    epoch: Sequence
    #: See Ack.
    through: Sequence
    #: See Ack.
    behind: list[AppliedThrough]


class Reset(Message, frozen=True):
    """Request of a consumer for a new Hello: a message is missing, or the producer is not known here."""

    edge: Id
    producer: Id
    reason: str


class Refuse(Message, frozen=True):
    """Final refusal of a producer by a consumer."""

    edge: Id
    producer: Id
    #: "stale": a later life of the producer has taken over. "edge": the consumer's plan has no such edge.
    code: str
    #: For people.
    reason: str


class Fetch(Message, frozen=True):
    """Request of an egress task for bytes of the collected output of a partition."""

    stage: Id
    partition: Id
    #: The first byte that is wanted.
    offset: Natural


class Chunk(Message, frozen=True):
    """Answer to Fetch, with one payload frame."""

    stage: Id
    partition: Id
    #: The first byte of the payload.
    offset: Natural
    #: Bytes of the whole output.
    total: Natural


class Pull(Message, frozen=True):
    """Request of a reader, to the worker of a primary, for the output of a partition."""

    stage: Id
    partition: Id
    #: The first batch that is wanted.
    position: Natural
    #: Exclusive: the reader has the positions below this for good, and the primary forgets them.
    acknowledged: Natural
    bytes_max: Natural
    #: If there is nothing yet, the answer may come a little later.
    waits: bool


class Pulled(Message, frozen=True):
    """Answer to Pull. If it has batches, one payload frame holds them as an Arrow IPC stream."""

    stage: Id
    partition: Id
    #: The first batch of the payload.
    position: Natural
    #: Batches in the payload.
    count: Natural = 0
    #: Exclusive: positions below this are acknowledged and gone.
    left: Natural = 0
    #: Exclusive: positions below this are committed.
    end: Natural = 0
    #: No more will come.
    finished: bool = False
    #: No more will come before the reader acknowledges.
    full: bool = False
    #: The primary is on this worker. If not, the other fields mean nothing.
    leads: bool = True


class StepKind(IntEnum):
    """The reasons for a step."""

    #: Rows.
    SLICES = 0
    #: The timers that are due.
    TICK = 1
    #: The end of the input.
    FINISH = 2
    #: A watermark that has risen.
    WATERMARK = 3
    #: A watermark that goes past streams that do not answer: rows that they bring for the time below it are left out.
    FORFEIT = 4
    #: A change of the plan, from which on the partition feeds other edges. It is no step of the operator (design: edge-begins).
    CHANGE = 5

    @property
    def moves_watermarks(self) -> bool:
        return self in (StepKind.WATERMARK, StepKind.FORFEIT)


class OrderEntry(msgspec.Struct, frozen=True, array_like=True):
    """One step in the order of a partition."""

    #: The time that the operator is told. It never falls from one step to the next.
    now: float
    #: The time at which the oldest row of the step entered the query.
    created: float
    #: Edge, producer and sequence of each slice; only steps for slices have any. A slice stands for all rows of its stream for
    #: this partition through this batch that no earlier step has applied, and the batch has some.
    slices: list[tuple[Id, Id, Natural]]
    kind: StepKind = StepKind.SLICES
    #: Rows of the step; -1: not known. Replicas compare their slices with it, so that a source that was read again with other
    #: rows is noticed before they are applied.
    rows: Sequence = -1
    #: The watermark of each input from this step on; only steps for watermarks have any.
    watermarks: list[Time] = []
    #: The version of the plan whose edges the partition feeds from this step on; only changes have one.
    version: Natural = 0


class PartitionOrder(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive entries of the order of a partition, for one replica."""

    stage: Id
    partition: Id
    #: That of the replica that is to follow.
    incarnation: Sequence
    #: The epoch in which the sender became primary.
    term: Sequence
    #: The step of the first entry.
    first: Natural
    entries: list[OrderEntry]
    #: Exclusive: steps below this may be applied.
    committed: Natural
    #: Exclusive: the outside has the batches of the output at positions below this.
    left: Natural = 0
    #: Exclusive: ``checksum`` covers the steps below this, all of them committed. 0 for a replica that applies the steps
    #: itself: it is asked for its own checksum instead.
    checked: Natural = 0
    #: The running checksum of the primary's output.
    checksum: Checksum = 0
    #: Each applied step with rows has given one batch of output until now (design: rows-that-are-gone).
    steady: bool = True


class Orders(Message, frozen=True):
    """Orders of steps, from the primaries on one worker to the other replicas on another."""

    items: list[PartitionOrder]


class PartitionSeen(msgspec.Struct, frozen=True, array_like=True):
    """Positions of one replica in the order of its primary."""

    stage: Id
    partition: Id
    #: That of the replica that answers.
    incarnation: Sequence
    #: The term of the primary that is answered.
    term: Sequence
    #: Exclusive: all entries below this are received.
    received_below: Natural
    #: Exclusive: all steps below this are applied.
    applied: Natural
    #: Exclusive: ``checksum`` covers the output of the steps below this.
    checked: Natural
    #: The running checksum of the replica's output. Another one than the primary's is a divergence.
    checksum: Checksum
    #: See PartitionOrder; as far as this replica knows.
    left: Natural = 0
    #: Rows of the applied steps that were passed over because they are gone. Another number than the primary's is a divergence.
    gone: Natural = 0


class OrdersSeen(Message, frozen=True):
    """Answer to Orders, one item for each replica."""

    items: list[PartitionSeen]


class Install(Message, frozen=True):
    """Part of a copy of a primary's state, taken at a step boundary, in one payload frame (design: copy).

    It goes to a new replica, or to a standby, which keeps the copy as a checkpoint. A part without bytes asks how many bytes have
    arrived. The last bytes of a copy are its signature (``flux.state.receiver.sign``)."""

    stage: Id
    partition: Id
    #: That of the receiving replica.
    incarnation: Sequence
    #: The number of the copy among all copies that this primary takes.
    copy: Natural
    #: The first byte of this part in the copy.
    offset: Natural
    #: Bytes of the whole copy.
    total: Natural
    #: The epoch in which the sender became primary.
    term: Sequence = 0
    #: The number of the checkpoint of this term, held by the standby, to which the copy is changes (design: changes). -1: the
    #: copy is whole.
    base: Sequence = -1


class Installed(Message, frozen=True):
    """Answer to Install."""

    stage: Id
    partition: Id
    incarnation: Sequence
    #: See Install.
    copy: Natural
    #: Bytes of the copy that have arrived.
    received_bytes: Natural
    #: The new replica has come to life and follows the order; or the standby keeps the checkpoint.
    done: bool
    #: The standby does not have the checkpoint that the changes are based on.
    lacks: bool = False


class Restore(Message, frozen=True):
    """Request of a worker to the vault for the checkpoint and the order of a partition, for a replica that is to be primary."""

    stage: Id
    partition: Id
    #: That of the replica on the worker.
    incarnation: Sequence
    worker: Id


class Press(Message, frozen=True):
    """Request of a producer, to the workers of primaries and standbys, for new checkpoints (design: press).

    The producer keeps rows only because checkpoints lack them, as far as it has heard."""

    edge: Id
    producer: Id
    #: Partitions whose checkpoints lack rows of the stream.
    partitions: list[Natural]
    #: Whether checkpoints are wanted of partitions that have applied nothing since the last ones: to say how far their streams
    #: are (design: needed-no-more).
    anew: bool = False


class Settled(Message, frozen=True):
    """Statement of a producer of numbered rows, to all workers with consumers: no later life gives the rows through a mark
    (design: needed-no-more)."""

    edge: Id
    producer: Id
    #: The life of the producer.
    incarnation: Sequence
    #: The table whose replicas have all applied these rows, in checkpoints where they keep these.
    epoch: Sequence
    mark: Mark


class Passed(Message, frozen=True):
    """Statement of a producer whose rows bring their numbers, to a worker: no row below a number comes any more in this
    handshake (design: rows-that-are-gone)."""

    edge: Id
    producer: Id
    #: That of the handshake.
    nonce: Sequence
    #: The number of the next message under the nonce: the statement is about a worker that has all messages before it.
    number: Sequence
    #: Rows below this number were given by an earlier life, as the worker has said in its ``Resume``.
    below: Sequence


class Bound(Message, frozen=True):
    """Statement about a stream: no row comes behind element ``sequence`` with a time below ``watermark`` (design:
    watermark-statements).

    It is state and no element: only the newest counts, it may be lost and is repeated. It costs no credit, because the stream
    that holds the watermark back may be the one without."""

    edge: Id
    producer: Id
    #: That of the handshake.
    nonce: Sequence
    #: The number of the next message under the nonce: the statement is for a worker that has all messages before it.
    number: Natural
    #: Elements from ``first`` to ``sequence`` - 1 have no rows for this worker, apart from those that it has been sent.
    first: Natural
    sequence: Natural
    watermark: Time
    #: The reader of the source has nothing now, and asks others not to wait for the stream.
    idle: bool = False


class Unread(Message, frozen=True):
    """Statement of a replica of a stage, to a worker that reads the stream from another replica: it could read elements here, of
    which it has acked none for ``spark.flux.link.timeout`` (design: owed-rows)."""

    edge: Id
    producer: Id
    #: The worker with the replica.
    worker: Id
    #: Exclusive: the elements are below this.
    end: Natural


class WantTentative(Message, frozen=True):
    """Request of a shadow to the shadow of a producer, for tentative marks that it has missed (design: tentative-lane)."""

    edge: Id
    producer: Id
    #: The worker that asks.
    worker: Id
    #: Marks behind this event time of the stream are wanted.
    after: Time


class Tentative(Message, frozen=True):
    """Tentative rows of one mark of a stream, for the shadows on one worker, with one payload frame if there are rows (design:
    tentative-lane). It is state and no element: it may be lost, late and repeated, and nothing acks it."""

    edge: Id
    producer: Id
    #: The life of the producer's shadow. A later one voids the marks of earlier ones.
    life: Natural
    #: The number of this result within the life: of a mark, the highest counts.
    revision: Natural
    #: The mark of the stream before this one.
    after: Time
    through: Time
    #: Elements of the stream below this were stable when the rows were made.
    sequence: Natural
    #: The time at which the mark could first have been complete.
    created: float
    #: Partitions with rows, in the order of the payload; the others of the worker have none.
    partitions: list[Natural]
    #: Rows of each, parallel to ``partitions``.
    rows: list[Natural]


class UnorderedRows(msgspec.Struct, frozen=True, array_like=True):
    """Slices of a stream at a secondary that no order names."""

    stage: Id
    partition: Id
    #: That of the secondary.
    incarnation: Sequence
    edge: Id
    producer: Id
    #: Exclusive: the newest of them is below this.
    end: Natural


class Unordered(Message, frozen=True):
    """Statement of the secondaries on a worker, to the primaries on another: slices have been without an order for
    ``spark.flux.link.timeout`` (design: borrowed-rows)."""

    worker: Id
    items: list[UnorderedRows]


class Borrow(Message, frozen=True):
    """Request of a primary for slices that it lacks, in answer to ``Unordered``, or to ``WantAck``. They come as Data, and the
    stream's watermark as Bound."""

    stage: Id
    partition: Id
    #: That of the secondary; in answer to WantAck, that of the producer.
    incarnation: Sequence
    edge: Id
    producer: Id
    #: The number of this loan. Its messages carry it.
    nonce: Natural
    #: The first element that the primary lacks.
    next: Natural
    #: Bytes that it takes.
    room: Size
    #: The lender is the reader of the source, and the slices are those in its log.
    of_log: bool = False


class UnackedElement(msgspec.Struct, frozen=True, array_like=True):
    """An element of the output of a partition, which a replica of a consumer has not acked at the primary."""

    stage: Id
    partition: Id
    #: That of the secondary which is asked.
    incarnation: Sequence
    #: That of the primary.
    leader: Sequence
    edge: Id
    sequence: Natural


class Unacked(Message, frozen=True):
    """Question of the primaries on a worker to their secondaries on another: these elements have waited for acks for
    ``spark.flux.link.unreached``. A secondary that has all acks of one tells the controller (design: unreached)."""

    worker: Id
    items: list[UnackedElement]


class WantAck(Message, frozen=True):
    """Request of the reader of a source, to a worker whose acks do not come, for its acks (design: relayed-answers). The only
    replica of a partition borrows the rows that it lacks (design: read-loans)."""

    edge: Id
    producer: Id
    #: The life of the producer.
    incarnation: Sequence
    #: Exclusive: the newest element in the log is below this.
    end: Natural = 0


class Relayed(Message, frozen=True):
    """Message of one worker to another that travels over a third, because it, or its answer, does not come directly (design:
    relayed-answers). The worker between the two sends it on as it is, and answers nothing. The payload of Data, one frame at
    most, travels with it."""

    origin: Id
    #: The worker between the two. An answer goes the same way back.
    over: Id
    to: Id
    message: Orders | OrdersSeen | WantAck | Acks | Unordered | Borrow | Data | Bound


#: Messages of a worker to the data port of another.
ToPort = (
    Hello | Data | Orders | Install | Press | Restore | Settled | Passed | Bound | Unread | Unordered | Unacked
    | WantTentative | Tentative | Relayed
)  # fmt: skip
#: Messages to a data port, also of egress tasks and readers of output.
Asked = ToPort | Fetch | Pull
#: Answers to a producer by a worker that consumes its stream.
ToProducer = Resume | ReadsElsewhere | Ack | Reset | Refuse
#: Answers of a data port.
Answered = ToProducer | Acks | Chunk | Pulled | OrdersSeen | Installed | Borrow
