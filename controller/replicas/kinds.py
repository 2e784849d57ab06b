"""Kinds of replicas in the rows of a table: the wanted ones, missing and surplus ones, and heirs. Each kind answers for itself
(``flux.replica.kinds``; design: kinds).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from flux.dataflow.plan import StagePlan
from flux.replica.kinds import kind_of, registered
from partitioning.ids import STANDBY
from partitioning.table import ReplicaAt

#: The reason why an operator that needs all of its rows cannot have this kind.
NEEDS_UNKNOWN = (
    "keeps no state, only where rows come in once more: it is for functions, for aggregates with windows that end, and for "
    "operators that define needs_from(). Take "
    f"recovery={STANDBY!r} for this one"
)


def may_lead(replica: ReplicaAt) -> bool:
    return kind_of(replica).leads_as is not None


def as_primary(replica: ReplicaAt) -> ReplicaAt:
    """Return the replica as the table lists it as primary."""
    kind = kind_of(replica).leads_as
    assert kind is not None, f"{replica} cannot lead"
    return replica if kind == replica.kind else replace(replica, kind=kind)


def outlives_primary(replica: ReplicaAt) -> bool:
    """Tell whether an arrived replica has everything committed and goes on with the next primary (design: no-commit)."""
    kind = kind_of(replica)
    return kind.commits or kind.orders_itself


def wanted(stage: StagePlan) -> list[str]:
    """Return the kinds of all replicas that each partition of a stage is to have, the primary's first."""
    return [name for name, number in counts(stage).items() for _ in range(number)]


def counts(stage: StagePlan) -> dict[str, int]:
    """Count the wanted replicas by kind, in the order of kinds. Kinds that are not wanted are left out."""
    return {
        kind.name: number for kind in registered() if kind.wanted is not None and (number := kind.wanted(stage)) > 0
    }


def surplus(stage: StagePlan, replicas: tuple[ReplicaAt, ...]) -> list[ReplicaAt]:
    """Find the replicas of kinds of which a partition has too many. The primary is never among them."""
    enough = counts(stage)
    return [
        replica
        for replica in replicas[1:]
        if kind_of(replica).wanted is not None and _number(replica.kind, replicas) > enough.get(replica.kind, 0)
    ]


def missing(stage: StagePlan, replicas: tuple[ReplicaAt, ...]) -> str | None:
    """Return the first kind of which a partition has too few; None: it has enough of each."""
    return _lacking(counts(stage), replicas)


def incomplete(stage: StagePlan, rows: Sequence[tuple[ReplicaAt, ...]], mixed: bool = True) -> list[int]:
    """Find the partitions of a stage that have too few replicas of some kind. One that has lost all of them has none that could
    be copied: its stage has failed.

    ``rows`` has the replicas of each partition; ``mixed``: there may be replicas of kinds that are not wanted."""
    enough = counts(stage)
    # Called for every partition of a query, and counting by kind takes several times as long.
    if len(enough) == 1 and not mixed:
        (number,) = enough.values()
        return [partition for partition, replicas in enumerate(rows) if 0 < len(replicas) < number]
    return [partition for partition, replicas in enumerate(rows) if replicas and _lacking(enough, replicas)]


def _lacking(enough: Mapping[str, int], replicas: tuple[ReplicaAt, ...]) -> str | None:
    return next((kind for kind, number in enough.items() if _number(kind, replicas) < number), None)


def _number(kind: str, replicas: tuple[ReplicaAt, ...]) -> int:
    return sum(replica.kind == kind for replica in replicas)
