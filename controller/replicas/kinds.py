"""Kinds of replicas at the controller: the answers that differ from kind to kind. Workers ask other questions
(``flux.replica.kinds``; design: kinds).

Two more answers are the same for all kinds today: any worker may hold a replica, and when its worker is lost, the
replica is dropped and the sweep adds another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec.structs import replace

import flux.replica.kinds as at_workers
from flux.dataflow.plan import StagePlan
from partitioning.ids import ACTIVE, STANDBY, UPSTREAM
from partitioning.table import ReplicaAt


class KindRules(Protocol):
    """The rules of one kind of replicas."""

    @property
    def name(self) -> str:
        """The name of the kind, as in the table."""

    @property
    def role(self) -> str:
        """The name in reports of a live replica that is not the primary."""

    @property
    def leads_as(self) -> str | None:
        """The kind that the replica has as a primary; None: it cannot be one."""

    @property
    def safe(self) -> bool:
        """While a replica of this kind has arrived, the partition is not lost."""

    @property
    def at_once(self) -> bool:
        """A new primary of this kind goes on without restoring anything, so that another replica may be given up in its
        favour."""

    def wanted(self, stage: StagePlan) -> int:
        """Return the number of replicas of this kind that each partition of a stage is to have."""


class ActiveRules:
    name = ACTIVE
    role = "secondary"
    leads_as: str | None = ACTIVE
    safe = True
    at_once = True

    def wanted(self, stage: StagePlan) -> int:
        return stage.replicas if stage.recovery == ACTIVE else 1


class StandbyRules:
    name = STANDBY
    role = "standby"
    leads_as: str | None = ACTIVE
    safe = True
    at_once = False

    def wanted(self, stage: StagePlan) -> int:
        return stage.replicas - 1 if stage.recovery == self.name else 0


class UpstreamRules(StandbyRules):
    name = UPSTREAM


#: The reason why an operator that needs all of its rows cannot have this kind.
NEEDS_UNKNOWN = (
    "keeps no state, only where rows come in once more: it is for functions, and for operators that define needs_from(). Take "
    f"recovery={STANDBY!r} for this one"
)
#: In the order in which replicas are placed and repaired: the first kind of a partition leads.
_known: dict[str, KindRules] = {kind.name: kind for kind in (ActiveRules(), StandbyRules(), UpstreamRules())}


def register(kind: KindRules) -> None:
    """Add a kind that ``flux.replica.kinds.register`` has added before."""
    commits = at_workers.kind_named(kind.name).commits
    assert commits or not (kind.safe or kind.leads_as), (
        f"{kind.name}: it may lack what is committed (design: no-commit)"
    )
    _known[kind.name] = kind


def unregister(name: str) -> None:
    del _known[name]


def known() -> list[str]:
    return list(_known)


def kind_of(replica: ReplicaAt) -> KindRules:
    return _known[replica.kind]


def may_lead(replica: ReplicaAt) -> bool:
    return kind_of(replica).leads_as is not None


def as_primary(replica: ReplicaAt) -> ReplicaAt:
    """Return the replica as the table lists it as primary."""
    kind = kind_of(replica).leads_as
    assert kind is not None, f"{replica} cannot lead"
    return replica if kind == replica.kind else replace(replica, kind=kind)


def outlives_primary(replica: ReplicaAt) -> bool:
    """Tell whether an arrived replica has everything committed and goes on with the next primary (design: no-commit)."""
    return at_workers.kind_of(replica).commits


def wanted(stage: StagePlan) -> list[str]:
    """Return the kinds of all replicas that each partition of a stage is to have, the primary's first."""
    return [kind.name for kind in _known.values() for _ in range(kind.wanted(stage))]


def counts(stage: StagePlan) -> dict[str, int]:
    """Count the wanted replicas by kind, in the order of kinds. Kinds that are not wanted are left out."""
    return {kind.name: number for kind in _known.values() if (number := kind.wanted(stage))}


def surplus(stage: StagePlan, replicas: tuple[ReplicaAt, ...]) -> list[ReplicaAt]:
    """Find the replicas of kinds of which a partition has too many. The primary is never among them."""
    return [
        replica
        for replica in replicas[1:]
        if sum(other.kind == replica.kind for other in replicas) > _known[replica.kind].wanted(stage)
    ]


def missing(stage: StagePlan, replicas: tuple[ReplicaAt, ...]) -> str | None:
    """Return the first kind of which a partition has too few; None: it has enough of each."""
    for kind in _known.values():
        if sum(replica.kind == kind.name for replica in replicas) < kind.wanted(stage):
            return kind.name
    return None


def incomplete(stage: StagePlan, rows: Sequence[tuple[ReplicaAt, ...]], mixed: bool = True) -> list[int]:
    """Find the partitions of a stage that have too few replicas of some kind.

    ``rows`` has the replicas of each partition; ``mixed``: there may be replicas of kinds that are not wanted."""
    kinds = wanted(stage)
    if (
        len(set(kinds)) == 1 and not mixed
    ):  # called for every partition of a query, and counting by kind takes several times as long
        enough = len(kinds)
        return [partition for partition, replicas in enumerate(rows) if len(replicas) < enough]
    return [partition for partition, replicas in enumerate(rows) if missing(stage, replicas) is not None]
