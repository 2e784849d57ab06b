"""Kinds of replicas at the controller. It asks these questions beside those that workers ask (``flux.replicas.kinds``;
design: kinds).

Two more answers are the same for all kinds so far: any worker may hold a replica, and when its holder is lost, the
replica is dropped and the sweep adds another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec.structs import replace

import flux.replicas.kinds as at_workers
from flux.dataflow.plan import StagePlan
from partitioning.ids import ACTIVE, STANDBY, UPSTREAM
from partitioning.table import ReplicaAt


class Kind(Protocol):
    """``role``: name in reports of a live replica that is not the primary; ``leads_as``: its kind once it is primary, None:
    it cannot be; ``safe``: as long as one of this kind has arrived, the partition is not lost; ``at_once``: it goes on without
    restoring anything first, so that something may be given up in its favour."""

    @property
    def name(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def leads_as(self) -> str | None: ...
    @property
    def safe(self) -> bool: ...
    @property
    def at_once(self) -> bool: ...

    def wanted(self, stage: StagePlan) -> int:
        """How many of this kind each partition of a stage is to have."""


class Active:
    name = ACTIVE
    role = "secondary"
    leads_as: str | None = ACTIVE
    safe = True
    at_once = True

    def wanted(self, stage: StagePlan) -> int:
        return stage.replicas if stage.recovery == ACTIVE else 1


class Standby:
    name = STANDBY
    role = "standby"
    leads_as: str | None = ACTIVE
    safe = True
    at_once = False

    def wanted(self, stage: StagePlan) -> int:
        return stage.replicas - 1 if stage.recovery == self.name else 0


class Upstream(Standby):
    name = UPSTREAM


#: Of an operator that needs all of its rows.
NEEDS_UNKNOWN = (
    "keeps no state, only where rows come in once more: it is for functions, and for operators that define needs_from(). Take "
    f"recovery={STANDBY!r} for this one"
)
#: In the order in which they are placed and repaired: the first of a partition leads.
_known: dict[str, Kind] = {kind.name: kind for kind in (Active(), Standby(), Upstream())}


def register(kind: Kind) -> None:
    """After ``flux.replicas.kinds.register``."""
    commits = at_workers.kind_named(kind.name).commits
    assert commits or not (kind.safe or kind.leads_as), (
        f"{kind.name}: it may lack what is committed (design: no-commit)"
    )
    _known[kind.name] = kind


def unregister(name: str) -> None:
    del _known[name]


def known() -> list[str]:
    return list(_known)


def kind_of(replica: ReplicaAt) -> Kind:
    return _known[replica.kind]


def may_lead(replica: ReplicaAt) -> bool:
    return kind_of(replica).leads_as is not None


def as_primary(replica: ReplicaAt) -> ReplicaAt:
    """The replica as it is listed when it leads."""
    kind = kind_of(replica).leads_as
    assert kind is not None, f"{replica} cannot lead"
    return replica if kind == replica.kind else replace(replica, kind=kind)


def outlives_primary(replica: ReplicaAt) -> bool:
    """Whether it has everything committed once it has arrived, and goes on with the next primary (design: no-commit)."""
    return at_workers.kind_of(replica).commits


def wanted(stage: StagePlan) -> list[str]:
    """Kinds of all replicas that each partition of a stage is to have, the primary's first."""
    return [kind.name for kind in _known.values() for _ in range(kind.wanted(stage))]


def counts(stage: StagePlan) -> dict[str, int]:
    """How many of each kind that is wanted at all, in the same order."""
    return {kind.name: number for kind in _known.values() if (number := kind.wanted(stage))}


def surplus(stage: StagePlan, replicas: tuple[ReplicaAt, ...]) -> list[ReplicaAt]:
    """Replicas of kinds of which a partition has too many; the primary is not among them."""
    return [
        replica
        for replica in replicas[1:]
        if sum(other.kind == replica.kind for other in replicas) > _known[replica.kind].wanted(stage)
    ]


def missing(stage: StagePlan, replicas: tuple[ReplicaAt, ...]) -> str | None:
    """The first kind of which a partition has too few; None: it has enough of each."""
    for kind in _known.values():
        if sum(replica.kind == kind.name for replica in replicas) < kind.wanted(stage):
            return kind.name
    return None


def incomplete(stage: StagePlan, rows: Sequence[tuple[ReplicaAt, ...]], mixed: bool = True) -> list[int]:
    """Partitions of a stage that have too few of some kind. ``rows``: the replicas of each; ``mixed``: there may be
    replicas of other kinds than those that are wanted."""
    kinds = wanted(stage)
    if (
        len(set(kinds)) == 1 and not mixed
    ):  # of every partition of a query: to count by kind takes several times as long
        enough = len(kinds)
        return [partition for partition, replicas in enumerate(rows) if len(replicas) < enough]
    return [partition for partition, replicas in enumerate(rows) if missing(stage, replicas) is not None]
