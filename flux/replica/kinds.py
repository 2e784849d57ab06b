"""Kinds of replicas: the questions whose answers differ from kind to kind, and no others (design: kinds).

A table names the kind of each replica. A process that follows a table looks up the kind once, and keeps the answers that it
needs for every step. Two more answers are the same for all kinds today: any worker may hold a replica, and when its worker
is lost, the replica is dropped and the sweep adds another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from flux.arguments import MARKS
from flux.errors import ProtocolError
from flux.replica.release import CommittedOnly, ReleasePolicy
from partitioning.ids import ACTIVE, DISK, INDEPENDENT, STANDBY, UPSTREAM, PartitionKey
from partitioning.table import ReplicaAt

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

    def birth(self, stage: int) -> int:
        """Return the epoch whose replicas of a stage begin empty."""

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


@dataclass(frozen=True, kw_only=True)
class ReplicaKind:
    """One kind of replicas: its answers for workers, then its answers for the controller.

    A kind is one object for all replicas, and holds no state of theirs. Law: without ``commits`` a replica may lack committed
    steps, so its kind has neither ``safe`` nor ``leads_as``: it can neither save its partition nor lead it (design: no-commit).
    A kind that ``orders_itself`` is the exception, because there are no steps that replicas have in common.
    """

    #: Name in tables.
    name: str

    #: While another replica leads, it applies the committed steps, and its output is compared.
    applies: bool
    #: Consumers may read its output while another replica leads.
    releases: bool
    #: The meaning of its acks for producers.
    acks: AckMeaning
    #: Once it is live, a step is committed only when it has received the entry.
    commits: bool
    #: It needs a copy of the primary's state before it can follow.
    copies: bool
    #: Its checkpoints are replay points, without state and output, if that is possible.
    replays: bool
    #: It orders its own steps, whichever replica is the first in the table (design: independent).
    orders_itself: bool = False
    #: Installs a replica that the table places here and that is not here yet. The call is repeated with each table until it is.
    install: Callable[[ReplicaInstaller, PartitionKey, ReplicaAt], None]
    #: Makes the policy by which output leaves a replica with an operator.
    release: Callable[[Sequence[EdgeOutput]], ReleasePolicy] = CommittedOnly

    #: Name in reports of a live replica that is not the primary.
    role: str
    #: Name of the kind that the replica has as a primary; None: it cannot be one.
    leads_as: str | None
    #: While a replica of this kind has arrived, the partition is not lost.
    safe: bool
    #: A new primary of this kind goes on without restoring anything, so that another replica may be given up in its favour.
    at_once: bool
    #: Tells the number of its replicas that each partition of a stage is to have. None: the controller neither places replicas
    #: of this kind, nor repairs or drops them.
    wanted: Callable[[StagePlan], int] | None


def _install_active(host: ReplicaInstaller, key: PartitionKey, replica: ReplicaAt) -> None:
    if not replica.live:
        host.await_copy(key, replica.incarnation)
    elif replica.empty or replica.incarnation == host.birth(key.stage):
        host.create(key, replica.incarnation)
    else:  # an added replica has its state long before it is live
        host.await_disk(key, replica.incarnation)


def _install_standby(host: ReplicaInstaller, key: PartitionKey, replica: ReplicaAt) -> None:
    if replica.live:
        assert replica.incarnation == host.birth(key.stage), f"the checkpoint of replica {key} is lost"
        host.keep_checkpoints(key, replica.incarnation)
    else:
        host.await_copy(key, replica.incarnation)


def _install_disk(host: ReplicaInstaller, key: PartitionKey, replica: ReplicaAt) -> None:
    host.keep_checkpoints(key, replica.incarnation)


def _others(recovery: str) -> Callable[[StagePlan], int]:
    """Make the answer of a kind that stands beside the primary where the stage says so."""
    return lambda stage: stage.replicas - 1 if stage.recovery == recovery else 0


#: The kind that applies every step itself, and can lead at any moment.
active = ReplicaKind(
    name=ACTIVE,
    applies=True,
    releases=True,
    acks=AckMeaning.APPLIED,
    commits=True,
    copies=True,
    replays=False,
    install=_install_active,
    role="secondary",
    leads_as=ACTIVE,
    safe=True,
    at_once=True,
    wanted=lambda stage: 0 if stage.order == MARKS else stage.replicas if stage.recovery == ACTIVE else 1,
)
#: The kind that applies rows as they come, beside others of its kind alone. Each gives equal batches, because results come at
#: marks of event time (design: independent).
independent = replace(
    active,
    name=INDEPENDENT,
    commits=False,
    orders_itself=True,
    role=INDEPENDENT,
    leads_as=INDEPENDENT,
    wanted=lambda stage: stage.replicas if stage.order == MARKS else 0,
)
#: The kind that holds a checkpoint of the primary's state, and the order of the steps after it. It takes over by restoring the
#: checkpoint, reading on from its positions, and repeating the order (design: standby).
standby = ReplicaKind(
    name=STANDBY,
    applies=False,
    releases=False,
    acks=AckMeaning.CHECKPOINT,
    commits=True,
    copies=True,
    replays=False,
    install=_install_standby,
    role="standby",
    leads_as=ACTIVE,
    safe=True,
    at_once=False,
    wanted=_others(STANDBY),
)
#: A standby of a stage that needs few of its earlier rows: in place of checkpoints it gets points from which to begin with an
#: empty operator (design: replay-point).
upstream = replace(standby, name=UPSTREAM, replays=True, wanted=_others(UPSTREAM))
#: A standby at the vault, which keeps its checkpoint and order in a directory. It never leads: a worker gets its content
#: instead. The rows of tables for workers have one each, which the controller's own table does not list.
disk = replace(standby, name=DISK, install=_install_disk, role="vault replica", leads_as=None, safe=False, wanted=None)

#: In the order in which replicas are placed and repaired: the first kind of a partition leads.
_known: dict[str, ReplicaKind] = {kind.name: kind for kind in (active, independent, standby, upstream, disk)}


def register(kind: ReplicaKind) -> None:
    """Add a kind, to be placed after those before it. Every process of a query needs it before the first table."""
    assert kind.commits or kind.orders_itself or not (kind.safe or kind.leads_as), (
        f"{kind.name}: a kind without commits may lack committed steps, so it is neither safe nor leads (design: no-commit)"
    )
    _known[kind.name] = kind


def unregister(name: str) -> None:
    del _known[name]


def registered() -> tuple[ReplicaKind, ...]:
    return tuple(_known.values())


def kind_named(name: str) -> ReplicaKind:
    kind = _known.get(name)
    if kind is None:
        raise ProtocolError(f"no kind of replicas is called {name!r} here, only {', '.join(sorted(_known))}")
    return kind


def kind_of(replica: ReplicaAt) -> ReplicaKind:
    return kind_named(replica.kind)


def without_streams() -> frozenset[str]:
    """Return the names of the kinds that read no streams."""
    return frozenset(name for name, kind in _known.items() if kind.acks is AckMeaning.NOTHING)


def without_rows() -> frozenset[str]:
    """Return the names of the kinds for which producers keep rows that do not travel."""
    return frozenset(name for name, kind in _known.items() if kind.acks is AckMeaning.CHECKPOINT)


def keeps_checkpoints(kind: ReplicaKind) -> bool:
    return kind.acks is AckMeaning.CHECKPOINT


def compared(stage: StagePlan) -> bool:
    """Tell whether other replicas apply the same steps, or may repeat them later, so that their output can be compared."""
    return stage.replicas > 1


def replicated(stage: StagePlan) -> bool:
    """Tell whether each partition of the stage is to have several replicas."""
    return stage.replicas > 1
