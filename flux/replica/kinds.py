"""Kinds of replicas at a worker: the questions whose answers differ from kind to kind, and no others (design: kinds).

A table names the kind of each replica. A process that follows a table looks up the kind once, and keeps the answers that it
needs for every step. The questions of the controller are in ``controller.replicas.kinds``.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from flux.errors import ProtocolError
from flux.replica.release import CommittedOnly, ReleasePolicy
from partitioning.ids import ACTIVE, DISK, STANDBY, UPSTREAM, PartitionKey
from partitioning.table import FIRST_EPOCH, ReplicaAt

if TYPE_CHECKING:
    from flux.dataflow.plan import StagePlan
    from flux.replica.output import EdgeOutput
    from flux.wire.messages import PartitionOrder, PartitionSeen


class AckMeaning(Enum):
    """The meaning of a replica's ack for a producer."""

    NOTHING = "it reads no streams: producers keep no rows for it, and wait for no ack"
    APPLIED = "the rows through there are in its state"
    CHECKPOINT = (
        "it reads no streams, and the rows through there are in its checkpoint: producers keep later ones for it"
    )


class Follower(Protocol):
    """A replica that keeps the order of its partition and has no operator."""

    incarnation: int

    def on_orders(self, item: PartitionOrder) -> PartitionSeen | None:
        """Take orders, and return the answer; None: the orders are of a deposed primary, or of no use."""


class ReplicaInstaller(Protocol):
    """The worker, as far as kinds install their replicas there."""

    def create(self, key: PartitionKey, incarnation: int) -> None:
        """Install a replica with an operator, which begins empty."""

    def await_copy(self, key: PartitionKey, incarnation: int) -> None:
        """Install a replica with an operator, which comes to life with a copy of the primary's state."""

    def await_disk(self, key: PartitionKey, incarnation: int) -> None:
        """Install a replica with an operator, which goes on from the vault's checkpoint."""

    def keep_order(self, key: PartitionKey, follower: Follower) -> None:
        """Install a replica without an operator."""

    def keep_checkpoints(self, key: PartitionKey, incarnation: int) -> None:
        """Install a replica without an operator, whose first checkpoint is the empty state."""


class Kind(Protocol):
    """The answers of one kind.

    ``applies``: while another replica leads, it applies the committed steps, and its output is compared; ``releases``:
    consumers may then read its output; ``acks``: see ``AckMeaning``; ``commits``: once it is live, a step is committed only
    when it has received the entry; ``copies``: it needs a copy of the primary's state before it can follow; ``replays``: its
    checkpoints are replay points, without state and output, if that is possible."""

    @property
    def name(self) -> str: ...
    @property
    def applies(self) -> bool: ...
    @property
    def releases(self) -> bool: ...
    @property
    def acks(self) -> AckMeaning: ...
    @property
    def commits(self) -> bool: ...
    @property
    def copies(self) -> bool: ...
    @property
    def replays(self) -> bool: ...

    def release(self, outlets: Sequence[EdgeOutput]) -> ReleasePolicy:
        """Make the policy by which output leaves a replica with an operator."""

    def install(self, host: ReplicaInstaller, key: PartitionKey, replica: ReplicaAt) -> None:
        """Install a replica that the table places here and that is not here yet. The call is repeated with each table until it
        is."""


class Active:
    """The kind that applies every step itself, and can lead at any moment."""

    name = ACTIVE
    applies = True
    releases = True
    acks = AckMeaning.APPLIED
    commits = True
    copies = True
    replays = False
    release = CommittedOnly

    def install(self, host: ReplicaInstaller, key: PartitionKey, replica: ReplicaAt) -> None:
        if not replica.live:
            host.await_copy(key, replica.incarnation)
        elif replica.incarnation == FIRST_EPOCH:
            host.create(key, replica.incarnation)
        else:  # an added replica has its state long before it is live
            host.await_disk(key, replica.incarnation)


class Standby:
    """The kind that holds a checkpoint of the primary's state, and the order of the steps after it. It takes over by restoring
    the checkpoint, reading on from its positions, and repeating the order (design: standby)."""

    name = STANDBY
    applies = False
    releases = False
    acks = AckMeaning.CHECKPOINT
    commits = True
    copies = True
    replays = False
    release = CommittedOnly

    def install(self, host: ReplicaInstaller, key: PartitionKey, replica: ReplicaAt) -> None:
        if replica.live:
            assert replica.incarnation == FIRST_EPOCH, f"the checkpoint of replica {key} is lost"
            host.keep_checkpoints(key, replica.incarnation)
        else:
            host.await_copy(key, replica.incarnation)


class Upstream(Standby):
    """A standby of a stage that needs few of its earlier rows: in place of checkpoints it gets points from which to begin with
    an empty operator (design: replay-point)."""

    name = UPSTREAM
    replays = True


class Disk(Standby):
    """A standby at the vault, which keeps its checkpoint and order in a directory. It never leads: a worker gets its content
    instead."""

    name = DISK

    def install(self, host: ReplicaInstaller, key: PartitionKey, replica: ReplicaAt) -> None:
        host.keep_checkpoints(key, replica.incarnation)


active = Active()
standby = Standby()
_known: dict[str, Kind] = {kind.name: kind for kind in (active, standby, Upstream(), Disk())}


def register(kind: Kind) -> None:
    _known[kind.name] = kind


def unregister(name: str) -> None:
    del _known[name]


def kind_named(name: str) -> Kind:
    kind = _known.get(name)
    if kind is None:
        raise ProtocolError(f"no kind of replicas is called {name!r} here, only {', '.join(sorted(_known))}")
    return kind


def kind_of(replica: ReplicaAt) -> Kind:
    return kind_named(replica.kind)


def without_streams() -> frozenset[str]:
    """Return the names of the kinds that read no streams."""
    return frozenset(name for name, kind in _known.items() if kind.acks is AckMeaning.NOTHING)


def without_rows() -> frozenset[str]:
    """Return the names of the kinds for which producers keep rows that do not travel."""
    return frozenset(name for name, kind in _known.items() if kind.acks is AckMeaning.CHECKPOINT)


def keeps_checkpoints(kind: Kind) -> bool:
    return kind.acks is AckMeaning.CHECKPOINT


def compared(stage: StagePlan) -> bool:
    """Tell whether other replicas apply the same steps, or may repeat them later, so that their output can be compared."""
    return stage.replicas > 1


def replicated(stage: StagePlan) -> bool:
    """Tell whether each partition of the stage is to have several replicas."""
    return stage.replicas > 1
