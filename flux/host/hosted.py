"""What a worker hosts by the newest table, as its other parts look at it."""

from __future__ import annotations

from collections.abc import Collection

from flux.dataflow.plan import FromStage, Plan
from flux.replicas.kinds import Follower, Kind, kind_of
from flux.replicas.order import OrderLog
from flux.replicas.replica import Replica
from flux.replicas.standby import Standby
from partitioning.ids import PartitionKey, StreamId
from partitioning.table import ReplicaAt, Table


class Hosted:
    """What the table has ``placed`` here, by stage and partition: ``replicas`` with an operator, ``followers`` (without one) and
    ``awaited`` (state not come yet -> incarnation); ``epoch`` of the newest ``table``, -1 before the first. The owner of the
    replicas says ``note`` when others live here than before, and ``note_roles`` when others lead."""

    def __init__(self, plan: Plan, worker: int) -> None:
        self.worker = worker
        self.epoch = -1
        self.table: Table | None = None
        self.placed: dict[PartitionKey, ReplicaAt] = {}
        self.replicas: dict[PartitionKey, Replica] = {}
        self.followers: dict[PartitionKey, Follower] = {}
        self.awaited: dict[PartitionKey, int] = {}
        self._stages = [stage.id for stage in plan.stages]
        self._edges = plan.edges
        self._ordered = plan.settings.ordered
        self._of_stage: dict[int, dict[int, Replica]] = {}
        self._partitions: dict[int, dict[int, None]] = {}
        self._newest: dict[int, int] = {}
        self._secondary: dict[int, frozenset[int]] = {}

    def validate(self) -> None:
        """What holds between any two events. AssertionError says what does not."""
        table, secondary = self.table, self._secondary
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
            if self._ordered and table is not None:  # else every replica is for itself
                self._validate_role(replica, table.stages[key.stage][key.partition])
        held = len(self.replicas) + len(self.followers) + len(self.awaited)
        assert held == len(self.placed), f"{held} replicas are here, the table lists {len(self.placed)}"
        noted = sum([len(mine) for mine in self._partitions.values()])
        assert noted == len(self.replicas), f"{noted} partitions are noted, {len(self.replicas)} are here"

    def _validate_role(self, replica: Replica, row: tuple[ReplicaAt, ...]) -> None:
        leader = row[0].worker
        assert replica.primary == (leader == self.worker), f"{replica.where}: worker {leader} leads"
        if replica.primary:
            since, peers = replica.leads_since, replica.order.peers
            assert replica.incarnation <= since <= self.epoch, f"{replica.where}: leads since {since} of {self.epoch}"
            known = len(peers) == len(row) - 1
            for other in row[1:]:
                peer = peers.get(other.worker)
                known &= peer is not None and peer.incarnation == other.incarnation
            assert known, f"{replica.where}: its peers are {sorted(peers)}, the table lists {row}"

    def note(self) -> None:
        for stage in self._stages:
            mine = {key.partition: replica for key, replica in self.replicas.items() if key.stage == stage}
            self._of_stage[stage] = mine
            self._partitions[stage] = dict.fromkeys(sorted(mine))
            self._newest[stage] = max((replica.reads_since for replica in mine.values()), default=-1)

    def note_roles(self) -> None:
        for stage in self._stages:
            mine = self._of_stage[stage]
            self._secondary[stage] = frozenset(p for p, replica in mine.items() if not replica.primary)

    def note_secondary(self, stage: int, partition: int) -> None:
        self._secondary[stage] |= {partition}

    def begins_on_disk(self, key: PartitionKey) -> bool:
        """Whether the replica placed here is live and has no state yet: it goes on from what the vault keeps. One that is
        added has its state before it is live."""
        return key in self.awaited and self.placed[key].live

    def restores(self, stage: int) -> bool:
        """Whether a replica of a stage here is to lead, and its state is still to come from the vault or to be restored."""
        return bool(self.begin_on_disk(stage)) or any(standby.leads for standby in self.standbys_of(stage))

    def begin_on_disk(self, stage: int | None = None) -> list[PartitionKey]:
        """Those of a stage here, or of all."""
        return [key for key in self.awaited if stage in (None, key.stage) and self.placed[key].live]

    def kind_here(self, key: PartitionKey) -> Kind:
        """Of the replica that the table places here."""
        return kind_of(self.placed[key])

    def of_stage(self, stage: int) -> dict[int, Replica]:
        """Replicas of a stage here, by partition."""
        return self._of_stage[stage]

    def partitions(self, stage: int) -> Collection[int]:
        """Partitions of a stage with a replica here, ascending."""
        return self._partitions[stage]

    def besides(self, replica: Replica) -> list[int]:
        """The other partitions of its stage that have a replica here at this moment."""
        stage, but = replica.stage.id, replica.partition
        return [partition for s, partition in self.replicas if s == stage and partition != but]

    def newest(self, stage: int) -> int:
        """The epoch since when all replicas of a stage here read; -1 without any."""
        return self._newest[stage]

    def secondary(self, stage: int) -> frozenset[int]:
        """Partitions of a stage that follow a primary elsewhere."""
        return self._secondary[stage]

    def orders_of(self, stage: int) -> list[OrderLog]:
        """Order logs of all replicas of a stage here."""
        replicas = [replica.order for key, replica in self.replicas.items() if key.stage == stage]
        return [*replicas, *(standby.order for standby in self.standbys_of(stage))]

    def standbys_of(self, stage: int) -> list[Standby]:
        """Those of a stage here, also one that is about to lead."""
        return [s for key, s in self.followers.items() if key.stage == stage and isinstance(s, Standby)]

    def awaited_of(self, stage: int) -> list[int]:
        return [key.partition for key in self.awaited if key.stage == stage]

    def producers_of(self, stream: StreamId) -> dict[int, tuple[int, bool]]:
        """Replicas of the partition that produces a stage's stream: worker -> (incarnation, may be read from)."""
        edge = self._edges[stream.edge]
        assert isinstance(edge, FromStage)
        assert self.table is not None
        partitions = self.table.stages[edge.stage]
        if stream.producer >= len(partitions):
            return {}
        return {
            replica.worker: (replica.incarnation, replica.live and (place == 0 or kind_of(replica).releases))
            for place, replica in enumerate(partitions[stream.producer])
        }

    def reader_of(self, source: int, partition: int) -> int | None:
        """The worker that reads a partition of a source; None: the source has no such partition."""
        assert self.table is not None
        readers = self.table.sources[source]
        return readers[partition] if partition < len(readers) else None
