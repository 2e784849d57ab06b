"""What workers, ingress tasks and the controller say to each other: commands and reports (design: controller).

Reports are past facts, commands are imperatives. The controller is not on the data path: rows flow while it is slow.
"""

from __future__ import annotations

import msgspec

from flux.wire.numbers import Id, Natural, Sequence
from flux.wire.statistics import Statistics
from partitioning.table import Table, TableChange


class Control(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of the control messages; the tag is the name of the class."""


class Register(Control, frozen=True):
    """A process joins. ``role`` is "worker", "ingress" or "vault"; ``index`` is the Spark partition of its task and ``attempt``
    the number of the task's attempt, which only grows. An "egress" task takes no part: it asks for the newest table, as
    often as it wants. ``node``: the id that this life of the process has already, if
    it has lost its connection and comes on another. ``domain``: label of its rack or zone. ``first_epoch`` that is above
    everything that a vault has kept."""

    role: str
    index: Id
    attempt: Sequence
    host: str
    pid: Natural
    executor: str = ""
    endpoint: str = ""
    edges: list[Id] = []
    node: Id = -1
    domain: str = ""
    first_epoch: Natural = 0


class Welcome(Control, frozen=True):
    """The id of this life of the worker; ``incarnation`` of the streams of an ingress task; ``workers`` that the query
    began with."""

    node: Id
    incarnation: Sequence
    workers: Natural = 1


class Rejected(Control, frozen=True):
    """The registration is refused; the process must exit."""

    reason: str


class RegisterAgain(Control, frozen=True):
    """This connection is not known: commands and reports may be lost. Register again, with the id that you have."""


class NewTable(Control, frozen=True):
    """The newest table. ``complete`` lists the edges whose streams are all known: edge -> producers."""

    table: Table
    complete: dict[Id, list[Id]]


class TableChanged(Control, frozen=True):
    """The newest table, as what differs from the one before."""

    change: TableChange


class TableMissed(Control, frozen=True):
    """A change came for another table than that of ``epoch``, by which this process goes: please send all of it."""

    node: Id
    epoch: Sequence


class EdgeComplete(Control, frozen=True):
    """These are all the producers of an edge, there will be no more."""

    edge: Id
    producers: list[Id]


class Heartbeat(Control, frozen=True):
    """A worker is alive and has got this far: ``progress`` grows whenever its main loop turns."""

    node: Id
    progress: Natural
    stats: Statistics


class InStep(Control, frozen=True):
    """A worker is alive and in ``method`` of the user's code, for long: said beside its loop, which cannot. ``row``: the first
    of the step, for people."""

    node: Id
    stage: Id
    partition: Id
    step: Natural
    method: str
    row: str = ""


class HeartbeatSeen(Control, frozen=True):
    """So that a worker without a controller notices and ends. ``epoch`` of the newest table: a process that goes by an older
    one has missed a change, though no other has followed."""

    epoch: Sequence = -1


class TableSeen(Control, frozen=True):
    """This process goes by the table of ``epoch``: from here on its producers keep what new replicas will need."""

    node: Id
    epoch: Sequence


class ReplicaCaughtUp(Control, frozen=True):
    """Primary: a replica follows the order without a gap. ``safe``: it has received all that is committed, and its
    copy of the state holds nothing that is not. ``bytes``: of the copy; ``stall_ms``: how long the primary stood still
    for it. ``steps_behind``: what it has still to apply, ``replay_s``: seconds that this takes by estimate."""

    node: Id
    stage: Id
    partition: Id
    worker: Id
    incarnation: Sequence
    safe: bool
    stall_ms: float = 0.0
    bytes: Natural = 0
    steps_behind: Natural = 0
    replay_s: float = 0.0


class ReplicaDiverged(Control, frozen=True):
    """Primary: a secondary gave other output for the same steps."""

    node: Id
    stage: Id
    partition: Id
    worker: Id
    incarnation: Sequence
    step: Natural


class CopyState(Control, frozen=True):
    """Controller to the worker of a primary: copy the state to a new replica (design: copy)."""

    stage: Id
    partition: Id
    worker: Id
    incarnation: Sequence


class LastCheckpoints(Control, frozen=True):
    """Controller to workers: the query is stopped, and will go on later. Give the vault a checkpoint of each partition now, so
    that little has to be repeated then."""


class Checkpointed(Control, frozen=True):
    """Worker: the vault has them."""

    node: Id


class PartitionFinished(Control, frozen=True):
    """A partition of a stage has applied all of its input and handed on all of its output."""

    node: Id
    stage: Id
    partition: Id


class Goodbye(Control, frozen=True):
    """An ingress task has done its work: all that it read is applied. Repeated until answered. A worker says it once, when
    it was told to stop and its task ends well."""

    node: Id


class GoodbyeSeen(Control, frozen=True):
    """The task may end: no newer attempt has taken its place, which others may rely on instead."""


class Failure(Control, frozen=True):
    """Something failed that no retry can mend. ``kind`` is the class of the error that the user shall see, ``traceback`` that
    of the user's code."""

    node: Id
    kind: str
    message: str
    traceback: str = ""


class Stop(Control, frozen=True):
    """End now."""

    reason: str


ToController = (
    Register
    | Heartbeat
    | InStep
    | TableSeen
    | TableMissed
    | ReplicaCaughtUp
    | ReplicaDiverged
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
    | HeartbeatSeen
    | CopyState
    | LastCheckpoints
    | GoodbyeSeen
    | Stop
)
