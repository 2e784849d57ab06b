"""The table of replicas: the owners of all partitions, immutable and numbered by epoch (design: epoch).

The controller makes tables, all other processes only read them. A table with a higher epoch replaces one with a lower
epoch. The first replica of a partition is its primary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from operator import is_not
from typing import Annotated

import msgspec
import numpy as np

from partitioning.ids import ACTIVE

#: Epoch of the first table. Its replicas begin empty; those of later epochs begin with a copy of state.
FIRST_EPOCH = 0


#: Of a stage, a source, a partition or a worker: what comes from outside counts from 0.
Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
Epoch = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class ReplicaAt(msgspec.Struct, frozen=True, array_like=True):
    """One replica of a partition. ``incarnation``: epoch of the table that introduced it; ``live``: commits need its
    ack; ``kind``: the part that it plays (``flux.replicas.kinds``)."""

    worker: Number
    incarnation: Epoch
    live: bool = True
    kind: str = ACTIVE


class Table(msgspec.Struct, frozen=True):
    """``stages[stage][partition]`` lists the replicas, the primary first; ``sources[source][partition]`` is the worker
    that reads this partition of a source inside the workers; ``endpoints`` says where a worker's data port is."""

    epoch: Epoch
    stages: tuple[tuple[tuple[ReplicaAt, ...], ...], ...]
    sources: tuple[tuple[Number, ...], ...]
    endpoints: dict[Number, str]

    def replicas(self, stage: int, partition: int) -> tuple[ReplicaAt, ...]:
        return self.stages[stage][partition]

    def partitions_by_rank(self, stage: int) -> np.ndarray:
        """Partitions of a stage, those with the same primary next to each other: clustering in this order makes the
        rows for one worker one contiguous range. int32[partitions]."""
        owners = [replicas[0].worker if replicas else -1 for replicas in self.stages[stage]]
        return np.argsort(np.array(owners), kind="stable").astype(np.int32)


class RowChange(msgspec.Struct, frozen=True, array_like=True):
    """The replicas of one partition are these now."""

    stage: Number
    partition: Number
    replicas: tuple[ReplicaAt, ...]


class ReaderChange(msgspec.Struct, frozen=True, array_like=True):
    """This worker reads a partition of a source now."""

    source: Number
    partition: Number
    worker: Number


class TableChange(msgspec.Struct, frozen=True, array_like=True):
    """What differs from the table of epoch ``base`` (design: table-change). ``endpoints`` of workers that have come; ``gone``:
    workers that have left."""

    base: Epoch
    epoch: Epoch
    rows: list[RowChange]
    readers: list[ReaderChange]
    endpoints: dict[Number, str]
    gone: list[Number]


def change_between(before: Table, after: Table) -> TableChange:
    """What turns one table into the other: as large as what differs, not as the tables."""
    return TableChange(
        before.epoch,
        after.epoch,
        [
            RowChange(stage, partition, after.stages[stage][partition])
            for stage, (one, other) in enumerate(zip(before.stages, after.stages, strict=True))
            for partition in differing(one, other)
        ],
        [
            ReaderChange(source, partition, after.sources[source][partition])
            for source, (one, other) in enumerate(zip(before.sources, after.sources, strict=True))
            for partition in differing(one, other)
        ],
        {worker: at for worker, at in after.endpoints.items() if before.endpoints.get(worker) != at},
        [worker for worker in before.endpoints if worker not in after.endpoints],
    )


def changed_by(table: Table, change: TableChange) -> Table:
    """The table after it. ValueError if the change is of another table, or of what the table does not have. What does not
    change stays the same object: nobody need look at it again."""
    if change.base != table.epoch:
        raise ValueError(f"a change of the table of epoch {change.base} does not fit that of epoch {table.epoch}")
    stages: list[tuple[tuple[ReplicaAt, ...], ...]] = list(table.stages)
    sources: list[tuple[int, ...]] = list(table.sources)
    rows: dict[int, list[tuple[ReplicaAt, ...]]] = {}
    readers: dict[int, list[int]] = {}
    try:
        for row in change.rows:
            rows.setdefault(row.stage, list(stages[row.stage]))[row.partition] = row.replicas
        for reader in change.readers:
            readers.setdefault(reader.source, list(sources[reader.source]))[reader.partition] = reader.worker
    except IndexError as error:
        raise ValueError("a change of a partition that the table does not have") from error
    for stage, replicas in rows.items():
        stages[stage] = tuple(replicas)
    for source, workers in readers.items():
        sources[source] = tuple(workers)
    endpoints = {worker: at for worker, at in table.endpoints.items() if worker not in change.gone}
    return Table(change.epoch, tuple(stages), tuple(sources), endpoints | change.endpoints)


def differing(before: Sequence[object], after: Sequence[object]) -> list[int]:
    """Where two rows of a table are not the same. Tables share what they have in common, so most need no look inside."""
    if before is after:
        return []
    assert len(before) == len(after), "a stage keeps its partitions"
    others = compress(range(len(after)), map(is_not, before, after))
    return [place for place in others if before[place] != after[place]]


def spread(partitions: int, workers: Iterable[int], start: int = 0) -> list[int]:
    """Deal partitions to workers round robin, from ``workers[start]`` on."""
    order = list(workers)
    return [order[(start + partition) % len(order)] for partition in range(partitions)]
