"""Messages between the controller and the other processes: commands and reports (design: controller).

Reports are past facts, commands are imperatives. The controller is not on the data path: rows flow while it is slow.

In all messages ``node`` is the id of one life of a process, as Welcome gave it. In reports it is the sender's.
"""

from __future__ import annotations

import msgspec

from flux.windows.window import END_OF_TIME, NEVER
from flux.wire.frames import Id, Natural, Sequence, Time
from flux.wire.messages import Mark
from flux.wire.statistics import Statistics
from partitioning.table import Table, TableChange


class Control(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of the control messages; the tag is the name of the class."""


class Register(Control, frozen=True):
    """Registration of a process, or of a further connection of a process that is registered already.

    An egress task takes no part in the query: it asks for the newest table as often as it needs one."""

    #: "worker", "ingress", "vault" or "egress".
    role: str
    #: The Spark partition of the process's task.
    index: Id
    #: The number of the task's attempt. A later attempt has a higher one.
    attempt: Sequence
    host: str
    pid: Natural
    executor: str = ""
    #: The data port.
    endpoint: str = ""
    #: The edges whose streams an ingress task produces.
    edges: list[Id] = []
    #: The id that this life of the process has already, if it has lost its connection and comes on another; else -1.
    node: Id = -1
    #: Label of its rack or zone.
    domain: str = ""
    #: An epoch above all that a vault has kept.
    first_epoch: Natural = 0


class Welcome(Control, frozen=True):
    """Acceptance of a registration."""

    #: The id of this life of the process.
    node: Id
    #: That of the streams of an ingress task.
    incarnation: Sequence
    #: The number of workers with which the query began.
    workers: Natural = 1


class Rejected(Control, frozen=True):
    """Refusal of a registration. The process must exit."""

    reason: str


class RegisterAgain(Control, frozen=True):
    """Request to register again with the id that the process has: its connection is not known, so that commands and reports may
    have been lost."""


class NewTable(Control, frozen=True):
    """The whole newest table."""

    table: Table
    #: Producers of each edge, for the edges whose producers are all known.
    complete: dict[Id, list[Id]]
    #: Watermarks of edges from micro-batches, as far as there are any.
    watermarks: dict[Id, Time] = {}


class TableChanged(Control, frozen=True):
    """The newest table, as its differences from the table before."""

    change: TableChange


class TableMissed(Control, frozen=True):
    """Request for the whole table: a change came for another table than the one this process goes by."""

    node: Id
    #: The epoch of the table that this process goes by.
    epoch: Sequence


class EdgeComplete(Control, frozen=True):
    """Notice that all producers of an edge are known. There will be no others."""

    edge: Id
    producers: list[Id]


class EdgeWatermark(Control, frozen=True):
    """Notice of the watermark of an edge from micro-batches: all rows of the batches before have been applied everywhere, and no
    row below it comes (design: batch-watermarks)."""

    edge: Id
    watermark: Time


class PlanChanged(Control, frozen=True):
    """A change of the plan, for all processes. The table that names it follows when all have answered (design: plan-version)."""

    #: That of the plan which the change makes.
    version: Natural
    #: By ``flux.dataflow.plan_change.encode_change``.
    change: bytes


class PlanSeen(Control, frozen=True):
    """Answer to PlanChanged: the process has the plan, or cannot have it."""

    node: Id
    version: Natural
    #: The reason for which the process cannot have the plan: code that cannot be loaded, or a schema that does not fit.
    error: str = ""


class GetPlan(Control, frozen=True):
    """Request for the changes of the plan after a version. Each is answered with a PlanChanged of its own, in order."""

    node: Id
    #: The newest that the process has.
    version: Natural


class EdgeBorn(Control, frozen=True):
    """Report of the reader of a running source in a worker: a new edge is to begin with this row or batch. Nothing is sent on it
    before the answer (design: edge-of-a-source)."""

    node: Id
    edge: Id
    producer: Id
    number: Natural
    #: The newest point before it from which the source can be read again; sequence -1: its start.
    mark: Mark


class EdgeStored(Control, frozen=True):
    """Answer to EdgeBorn, to all workers: the stream begins with this row or batch for good, whichever worker reads it."""

    edge: Id
    producer: Id
    number: Natural
    #: The point that the report has named.
    mark: Mark


class Heartbeat(Control, frozen=True):
    """Sign of life of a process, with its statistics."""

    node: Id
    #: Grows whenever the main loop of the process turns.
    progress: Natural
    stats: Statistics


class InStep(Control, frozen=True):
    """Sign of life of a worker whose loop is in a long call of the user's code. A second thread sends it, as the loop cannot."""

    node: Id
    stage: Id
    partition: Id
    step: Natural
    #: The method's name, as the user knows it.
    method: str
    #: The first row of the step, for people.
    row: str = ""


class HeartbeatSeen(Control, frozen=True):
    """Answer to a heartbeat. A worker without a controller gets none, notices it, and ends."""

    #: The epoch of the newest table. A process that goes by an older one has missed a change, even if no other change has
    #: followed.
    epoch: Sequence = -1
    #: The least watermark of the partitions of sources that other workers read (design: alignment); the least time: there is none
    #: to wait for.
    others_at: Time = NEVER
    #: Readers that results go on without, and whose watermark is above this, stand still (design: state-stop).
    stands_at: Time = END_OF_TIME


class TableSeen(Control, frozen=True):
    """Notice that a process goes by a table. From here on its producers keep every batch that new replicas of that table need."""

    node: Id
    epoch: Sequence


class ReplicaCaughtUp(Control, frozen=True):
    """Report of a primary that another replica follows its order without a gap."""

    node: Id
    stage: Id
    partition: Id
    #: The worker with the other replica.
    worker: Id
    #: That of the other replica.
    incarnation: Sequence
    #: The replica has received everything that is committed, and its copy of the state holds nothing that is not committed.
    safe: bool
    #: For how long the primary stood still to make the copy.
    stall_ms: float = 0.0
    #: Size of the copy.
    bytes: Natural = 0
    #: Steps that the replica has still to apply.
    steps_behind: Natural = 0
    #: Estimated time for these steps, in seconds.
    replay_s: float = 0.0


class ReplicaDiverged(Control, frozen=True):
    """Report of a primary that a secondary gave other output for the same steps."""

    node: Id
    stage: Id
    partition: Id
    #: The worker with the secondary.
    worker: Id
    #: That of the secondary.
    incarnation: Sequence
    #: Exclusive: the outputs of the steps below this differ.
    step: Natural


class Unreached(Control, frozen=True):
    """Report that rows, or acks of its output, have not come to a primary for ``spark.flux.link.unreached``, and that another
    replica of its partition has them (design: unreached)."""

    node: Id
    stage: Id
    partition: Id
    #: The worker with the primary.
    primary: Id
    #: That of the primary.
    leader: Sequence
    #: The worker with the other replica.
    worker: Id
    #: That of the other replica.
    incarnation: Sequence
    #: The edge and the producer of the stream.
    edge: Id
    producer: Id
    #: Acks of its output are missing; else rows of its input.
    acks: bool


class CopyState(Control, frozen=True):
    """Order to the worker of a primary: copy the state to a new replica (design: copy)."""

    stage: Id
    partition: Id
    #: The worker with the new replica.
    worker: Id
    #: That of the new replica.
    incarnation: Sequence


class LastCheckpoints(Control, frozen=True):
    """Order to all workers: read nothing more, and give the vault checkpoints of all rows that were read.

    The query is stopped and will go on later; with these checkpoints it will have little to repeat. The order is repeated when
    other replicas lead, as after the loss of a worker."""

    #: The epoch of the table whose primaries are meant. A worker without this table waits for it.
    epoch: Sequence = -1


class Checkpointed(Control, frozen=True):
    """Report of a worker that the vault has the last checkpoints."""

    node: Id
    #: That of the order.
    epoch: Sequence = -1
    #: The checkpoints have all rows that this worker has read. If not, it has waited too long for that.
    settled: bool = True


class PartitionFinished(Control, frozen=True):
    """Report that a partition of a stage has applied all of its input and handed on all of its output."""

    node: Id
    stage: Id
    partition: Id


class Goodbye(Control, frozen=True):
    """Report of an ingress task that all its rows are applied. It is repeated until it is answered.

    A worker sends it once, when it was told to stop and its task ends well."""

    node: Id


class GoodbyeSeen(Control, frozen=True):
    """Permission for an ingress task to end: no newer attempt has taken its place, on which others might rely instead."""


class Failure(Control, frozen=True):
    """Report of a failure that no retry can mend."""

    node: Id
    #: The class of the error that the user will see.
    kind: str
    message: str
    #: The traceback of the user's code.
    traceback: str = ""
    #: The stage in which it has happened, if the rest of the process goes on; else -1.
    stage: Id = -1


class Stop(Control, frozen=True):
    """Order to end now."""

    reason: str


ToController = (
    Register
    | Heartbeat
    | InStep
    | TableSeen
    | TableMissed
    | PlanSeen
    | GetPlan
    | EdgeBorn
    | ReplicaCaughtUp
    | ReplicaDiverged
    | Unreached
    | PartitionFinished
    | Checkpointed
    | Goodbye
    | Failure
)
FromController = (
    Welcome
    | Rejected
    | RegisterAgain
    | NewTable
    | TableChanged
    | EdgeComplete
    | EdgeWatermark
    | PlanChanged
    | EdgeStored
    | HeartbeatSeen
    | CopyState
    | LastCheckpoints
    | GoodbyeSeen
    | Stop
)
