"""The consumers of the streams into one stage, by the newest table (design: consumers-at).

All producers of a process that send to the stage share them. They follow a table by its differences from the table before. A
producer itself keeps only the progress of its own stream: the acks of each worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from flux.replica.kinds import without_rows, without_streams
from partitioning.table import ReplicaAt, Table, differing


@dataclass(frozen=True)
class ConsumersAt:
    """The replicas of the stage on one worker, by partition in ascending order, h in all.

    partitions  int64[h]
    since       int64[h]: incarnation of the replica
    coming      bool[h]: the replica is not live
    reads       bool[h]: rows travel to it; other replicas ack the positions in their checkpoints
    empty       bool[h]: it began without the state of an earlier one, which is lost (design: converge)
    slots       int64[h]: its column in ``Producer``'s matrix of acks
    hosts       bool[partitions of the stage]: the worker has a replica of the partition, and rows travel to it"""

    partitions: np.ndarray
    since: np.ndarray
    coming: np.ndarray
    reads: np.ndarray
    empty: np.ndarray
    slots: np.ndarray
    hosts: np.ndarray

    @cached_property
    def at(self) -> dict[int, int]:
        """Index of each partition in the arrays."""
        return {partition: place for place, partition in enumerate(self.partitions.tolist())}

    @cached_property
    def all_read(self) -> bool:
        return bool(self.reads.all())

    @cached_property
    def any_reads(self) -> bool:
        return bool(self.reads.any())

    def same_lives(self, other: ConsumersAt) -> bool:
        """Tell whether these are the same replicas, live or not, and rows travel to the same of them."""
        return (
            np.array_equal(self.partitions, other.partitions)
            and np.array_equal(self.since, other.since)
            and np.array_equal(self.reads, other.reads)
        )

    def kept_from(self, before: ConsumersAt, values: np.ndarray, new: int) -> np.ndarray:
        """Take ``values`` over for the replicas that were there ``before``, and ``new`` for the others."""
        places = np.searchsorted(before.partitions, self.partitions)
        places[places == len(before.partitions)] = 0
        same = (before.partitions[places] == self.partitions) & (before.since[places] == self.since)
        return np.where(same, values[places], new)


class Ranks(NamedTuple):
    """The partitions of the stage in the order in which rows are clustered, see ``Table.partitions_by_rank``."""

    by_rank: np.ndarray
    rank_of: np.ndarray


class Consumers:
    """The consumers of one stage.

    ``of_worker`` has an entry for each worker, which is another object only if it has changed. ``width`` is the number of
    columns of the matrix of acks: the most replicas of one partition. ``changes`` grows with each table that changes anything
    here. ``keeps``, bool[partitions, width], marks the replicas to which no rows travel; ``kept``: there are any.
    ``begun_empty``: a replica has begun without the state of an earlier one (design: converge)."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.epoch = -1
        self.of_worker: dict[int, ConsumersAt] = {}
        self.ranks = Ranks(np.empty(0, np.int32), np.empty(0, np.int32))
        self.width = 1
        self.changes = 0
        self.keeps = np.zeros((0, 1), bool)
        self.kept = self.begun_empty = False
        self._rows: tuple[tuple[ReplicaAt, ...], ...] = ()
        #: By worker and partition: the replica there.
        self._hosted: dict[int, dict[int, ReplicaAt]] = {}
        #: By partition and worker: the column of the replica in the matrix of acks.
        self._slots: list[dict[int, int]] = []
        #: Kinds of replicas that no stream has to know.
        self._no_streams: frozenset[str] = frozenset()

    def follow(self, table: Table) -> None:
        """Follow a table, if it is newer."""
        if table.epoch <= self.epoch:
            return
        before, rows = self._rows, table.stages[self.stage]
        self.epoch, self._rows = table.epoch, rows
        no_streams = without_streams()
        if not before or no_streams != self._no_streams:
            self._hosted, self._slots, self._no_streams, self.of_worker = {}, [{} for _ in rows], no_streams, {}
            changed, before = list(range(len(rows))), ((),) * len(rows)
        else:
            changed = differing(before, rows)
        if not changed:
            return
        self.changes += 1
        touched = {worker for partition in changed for worker in self._change(partition, rows[partition])}
        no_rows = without_rows()
        for worker in touched:
            self._renew(worker, len(rows), no_rows)
        self._note_keeps(len(rows))
        self.begun_empty = any(at.empty.any() for at in self.of_worker.values())
        if not len(self.ranks.by_rank) or any(_primary(before[p]) != _primary(rows[p]) for p in changed):
            by_rank = table.partitions_by_rank(self.stage)
            rank_of = np.empty_like(by_rank)
            rank_of[by_rank] = np.arange(len(by_rank), dtype=by_rank.dtype)
            self.ranks = Ranks(by_rank, rank_of)

    def asked(self, partition: int) -> list[int]:
        """Return the workers with the primary of a partition, and with the replicas to which no rows travel."""
        no_rows = without_rows()
        return [r.worker for place, r in enumerate(self._rows[partition]) if place == 0 or r.kind in no_rows]

    def _note_keeps(self, partitions: int) -> None:
        keepers = [at for at in self.of_worker.values() if not at.all_read]
        if keepers or self.kept or self.keeps.shape != (partitions, self.width):
            self.keeps = np.zeros((partitions, self.width), bool)
            for at in keepers:
                self.keeps[at.partitions, at.slots] = ~at.reads
        self.kept = bool(keepers)

    def _change(self, partition: int, replicas: tuple[ReplicaAt, ...]) -> set[int]:
        """Follow the new row of a partition, and return the workers that it concerns."""
        slots = self._slots[partition]
        now = {replica.worker: replica for replica in replicas if replica.kind not in self._no_streams}
        touched = set()
        for worker in [worker for worker in slots if worker not in now]:
            del slots[worker], self._hosted[worker][partition]
            touched.add(worker)
        for worker, replica in now.items():
            hosted = self._hosted.setdefault(worker, {})
            if hosted.get(partition) != replica:
                hosted[partition] = replica
                touched.add(worker)
            if worker not in slots:
                taken = set(slots.values())
                slots[worker] = next(slot for slot in range(len(taken) + 1) if slot not in taken)
                self.width = max(self.width, slots[worker] + 1)
        return touched

    def _renew(self, worker: int, partitions: int, no_rows: frozenset[str]) -> None:
        """Describe the replicas on a worker anew. ``no_rows``: kinds of replicas to which no rows travel."""
        hosted = self._hosted[worker]
        if not hosted:
            del self._hosted[worker]
            self.of_worker.pop(worker, None)
            return
        mine = sorted(hosted)
        reads = np.array([hosted[p].kind not in no_rows for p in mine], bool)
        hosts = np.zeros(partitions, bool)
        hosts[mine] = reads
        self.of_worker[worker] = ConsumersAt(
            np.array(mine, np.int64),
            np.array([hosted[p].incarnation for p in mine], np.int64),
            np.array([not hosted[p].live for p in mine], bool),
            reads,
            np.array([hosted[p].empty for p in mine], bool),
            np.array([self._slots[p][worker] for p in mine], np.int64),
            hosts,
        )


def _primary(replicas: tuple[ReplicaAt, ...]) -> int:
    return replicas[0].worker if replicas else -1
