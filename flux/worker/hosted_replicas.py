"""The replicas that a worker hosts by the newest table, as its other parts see them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flux.dataflow.plan import FromStage, Plan
from flux.replica.kinds import Follower, ReplicaKind, kind_of
from flux.replica.order_log import OrderLog
from flux.replica.replica import Replica
from flux.state.standby import Standby
from partitioning.ids import PartitionKey, StreamId
from partitioning.table import ReplicaAt, Table, differing


class PlacedRow(NamedTuple):
    """The row of one partition in a table. ``mine``: the replica that it places on this worker."""

    key: PartitionKey
    row: tuple[ReplicaAt, ...]
    mine: ReplicaAt | None


@dataclass(frozen=True)
class TableUpdate:
    """The newest table, as one worker sees it, and its differences from the table ``before``."""

    table: Table
    before: Table | None
    #: Partitions of each stage whose replicas are not as before.
    changed: list[Sequence[int]]
    #: The rows of these partitions.
    rows: list[PlacedRow]


def _stage(table: Table, stage: int) -> Sequence[tuple[ReplicaAt, ...]]:
    return table.stages[stage] if stage < len(table.stages) else ()


class HostedReplicas:
    """The replicas that the table has ``placed`` on this worker, by stage and partition.

    Their owner calls ``note`` when other replicas live here than before, and ``note_roles`` when others are primary."""

    def __init__(self, plan: Plan, worker: int) -> None:
        self.worker = worker
        #: Epoch of the newest table; -1 before the first.
        self.epoch = -1
        self.table: Table | None = None
        self.placed: dict[PartitionKey, ReplicaAt] = {}
        #: Replicas with an operator.
        self.replicas: dict[PartitionKey, Replica] = {}
        #: Replicas without an operator.
        self.followers: dict[PartitionKey, Follower] = {}
        #: Incarnations of replicas whose state has not come yet.
        self.awaited: dict[PartitionKey, int] = {}
        self._stages: list[int] = []
        self._edges = plan.edges
        self._ordered = plan.settings.ordered
        #: By stage, for others to read: its replicas with an operator here, by partition.
        self.of_stage: dict[int, dict[int, Replica]] = {}
        #: By stage: the partitions of these replicas, ascending.
        self.partitions: dict[int, Collection[int]] = {}
        #: By stage: the epoch since which all of these replicas read; -1 without any.
        self.newest: dict[int, int] = {}
        #: By stage: the partitions that follow a primary elsewhere.
        self.secondary: dict[int, frozenset[int]] = {}
        self.go_by(plan)

    def go_by(self, plan: Plan) -> None:
        """Go by this version of the plan, whose table comes next."""
        self._stages, self._edges = [stage.id for stage in plan.stages], plan.edges
        for noted in (self.of_stage, self.partitions, self.newest, self.secondary):
            for stage in [each for each in noted if each not in plan.stages]:
                del noted[stage]
        if self.table is not None:
            for stage in [each for each in self._stages if each not in self.of_stage]:
                self.of_stage[stage], self.partitions[stage], self.newest[stage] = {}, {}, -1
                self.secondary[stage] = frozenset()

    def validate(self) -> None:
        """Check the invariants that hold between any two events. AssertionError names the broken one."""
        table, secondary = self.table, self.secondary
        for kept in self.followers.values():
            if isinstance(kept, Standby):
                kept.validate()
        for key, placed in self.placed.items():
            replica = self.replicas.get(key)
            if replica is None:
                follower = self.followers.get(key)
                here = self.awaited.get(key) if follower is None else follower.incarnation
                assert here == placed.incarnation, f"{key} of epoch {placed.incarnation} is not here"
                continue
            assert replica.incarnation == placed.incarnation, f"{replica.where} is that of epoch {replica.incarnation}"
            follows = key.partition in secondary[key.stage]
            assert follows != replica.primary, f"{replica.where} is noted as {'secondary' if follows else 'primary'}"
            if self._ordered and table is not None:  # otherwise replicas are independent of each other
                self._validate_role(replica, table.stages[key.stage][key.partition])
        held = len(self.replicas) + len(self.followers) + len(self.awaited)
        assert held == len(self.placed), f"{held} replicas are here, the table lists {len(self.placed)}"
        noted = sum([len(mine) for mine in self.partitions.values()])
        assert noted == len(self.replicas), f"{noted} partitions are noted, {len(self.replicas)} are here"

    def _validate_role(self, replica: Replica, row: tuple[ReplicaAt, ...]) -> None:
        leader = row[0].worker
        assert replica.leads == (leader == self.worker), f"{replica.where}: worker {leader} leads"
        if replica.leads:
            since, peers = replica.leads_since, replica.order.peers
            assert replica.incarnation <= since <= self.epoch, f"{replica.where}: leads since {since} of {self.epoch}"
            known = len(peers) == len(row) - 1
            for other in row[1:]:
                peer = peers.get(other.worker)
                known &= peer is not None and peer.incarnation == other.incarnation
            assert known, f"{replica.where}: its peers are {sorted(peers)}, the table lists {row}"

    def follow(self, table: Table) -> TableUpdate:
        """Go by this table, which is newer."""
        before, self.epoch, self.table = self.table, table.epoch, table
        changed: list[Sequence[int]] = [
            range(len(rows)) if before is None else differing(_stage(before, stage), rows)
            for stage, rows in enumerate(table.stages)
        ]
        rows = [
            PlacedRow(PartitionKey(stage, partition), row, next((r for r in row if r.worker == self.worker), None))
            for stage, partitions in enumerate(changed)
            for partition in partitions
            for row in (table.row(stage, partition),)
        ]
        return TableUpdate(table, before, changed, rows)

    def note(self) -> None:
        found: dict[int, dict[int, Replica]] = {stage: {} for stage in self._stages}
        for key, replica in self.replicas.items():
            if key.stage in found:
                found[key.stage][key.partition] = replica
        for stage, mine in found.items():
            self.of_stage[stage] = mine
            self.partitions[stage] = dict.fromkeys(sorted(mine))
            self.newest[stage] = max((replica.reads_since for replica in mine.values()), default=-1)

    def note_roles(self) -> None:
        for stage in self._stages:
            mine = self.of_stage[stage]
            self.secondary[stage] = frozenset(p for p, replica in mine.items() if not replica.primary)

    def add(self, replica: Replica) -> list[int]:
        """Add a replica that comes to life, as a secondary until it gets another role. Return the other partitions of its stage
        that have a replica here."""
        self.replicas[replica.key] = replica
        self.note()
        if not replica.primary:
            self.secondary[replica.key.stage] |= {replica.partition}
        return [partition for partition in self.of_stage[replica.key.stage] if partition != replica.partition]

    def birth(self, stage: int) -> int:
        """Return the epoch in which a stage begins empty."""
        assert self.table is not None
        return self.table.birth(stage)

    def kind(self, key: PartitionKey) -> ReplicaKind:
        """Return the kind of the replica that the table places here."""
        return kind_of(self.placed[key])

    def leads(self, key: PartitionKey) -> bool:
        """Tell whether the table names this worker's replica of a partition as the primary."""
        assert self.table is not None
        return self.table.replicas(*key)[0].worker == self.worker

    def begins_on_disk(self, key: PartitionKey) -> bool:
        """Tell whether the replica placed here is live and has no state yet: it goes on from the vault's state. A replica that is
        added has its state before it is live."""
        return key in self.awaited and self.placed[key].live

    def restores(self, stage: int) -> bool:
        """Tell whether a replica of a stage here will be primary, and its state has still to come from the vault or to be
        restored."""
        return bool(self.begin_on_disk(stage)) or any(standby.leads for standby in self.standbys_of(stage))

    def begin_on_disk(self, stage: int | None = None) -> list[PartitionKey]:
        """List the replicas of a stage here, or of all stages, that begin with the vault's state."""
        return [key for key in self.awaited if stage in (None, key.stage) and self.placed[key].live]

    def besides(self, replica: Replica) -> list[int]:
        """List the other partitions of its stage that have a replica here at this moment."""
        stage, but = replica.stage.id, replica.partition
        return [partition for s, partition in self.replicas if s == stage and partition != but]

    def orders_of(self, stage: int) -> list[OrderLog]:
        """List the order logs of all replicas of a stage here."""
        replicas = [replica.order for key, replica in self.replicas.items() if key.stage == stage]
        return [*replicas, *(standby.order for standby in self.standbys_of(stage))]

    def standbys_of(self, stage: int) -> list[Standby]:
        """List the standbys of a stage here, including one that is about to become primary."""
        return [s for key, s in self.followers.items() if key.stage == stage and isinstance(s, Standby)]

    def awaited_of(self, stage: int) -> list[int]:
        return [key.partition for key in self.awaited if key.stage == stage]

    def producers_of(self, stream: StreamId) -> dict[int, tuple[int, bool]]:
        """Return the replicas of the partition that produces a stage's stream: worker -> (incarnation, may be read from)."""
        edge = self._edges[stream.edge]
        assert isinstance(edge, FromStage)
        assert self.table is not None
        partitions = _stage(self.table, edge.stage)
        if stream.producer >= len(partitions):
            return {}
        return {
            replica.worker: (replica.incarnation, replica.live and (place == 0 or kind_of(replica).releases))
            for place, replica in enumerate(partitions[stream.producer])
        }

    def reader_of(self, source: int, partition: int) -> int | None:
        """Return the worker that reads a partition of a source; None: the source has no such partition."""
        assert self.table is not None
        readers = self.table.sources[source]
        return readers[partition] if partition < len(readers) else None
