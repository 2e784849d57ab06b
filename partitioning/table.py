"""The table of replicas: the owners of all partitions, immutable and numbered by epoch (design: epoch).

The controller makes tables, all other processes only read them. A table with a higher epoch replaces one with a lower
epoch. The first replica of a partition is its primary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress, zip_longest
from operator import is_not
from typing import Annotated, TypeVar

import msgspec
import numpy as np

from partitioning.ids import ACTIVE

T = TypeVar("T")
#: Epoch of the first table. Its replicas begin empty. Replicas of later epochs begin with a copy of state, unless their stage was
#: born in that epoch (``Table.birth``).
FIRST_EPOCH = 0


#: Number of a stage, source, partition or worker. Numbers from outside must not be negative.
Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
Epoch = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
#: Version of a plan.
Version = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
#: Number of partitions of a stage or source.
Width = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]


class ReplicaAt(msgspec.Struct, frozen=True, array_like=True):
    """One replica of a partition."""

    worker: Number
    #: The epoch of the table that introduced it.
    incarnation: Epoch
    #: Commits need its ack.
    live: bool = True
    #: See ``flux.replica.kinds``.
    kind: str = ACTIVE
    #: It began empty in that epoch, because the last replica before it was lost (design: converge).
    empty: bool = False


class Table(msgspec.Struct, frozen=True):
    """The owners of all partitions in one epoch."""

    epoch: Epoch
    #: By stage and partition: the replicas, the primary first. A removed stage has no partitions.
    stages: tuple[tuple[tuple[ReplicaAt, ...], ...], ...]
    #: By source and partition: the worker that reads the partition, for sources inside the workers. A removed source has none.
    sources: tuple[tuple[Number, ...], ...]
    #: The data port of each worker.
    endpoints: dict[Number, str]
    #: The version of the plan that it is for. A process without that plan does not go by the table (design: plan-version).
    plan: Version = 0
    #: The epoch in which the replicas of a stage began empty, for stages that came after the first table.
    born: dict[Number, Epoch] = {}

    def birth(self, stage: int) -> int:
        """Return the epoch whose replicas of a stage begin empty. Later replicas begin with a copy of state."""
        return self.born.get(stage, FIRST_EPOCH)

    def has(self, stage: int) -> bool:
        """Tell whether the table has the partitions of a stage, each of which may have lost its last replica."""
        return stage < len(self.stages) and bool(self.stages[stage])

    def row(self, stage: int, partition: int) -> tuple[ReplicaAt, ...]:
        """Return the replicas of a partition; none: the stage, or the partition, is not in the table."""
        rows = self.stages[stage] if stage < len(self.stages) else ()
        return rows[partition] if partition < len(rows) else ()

    def replicas(self, stage: int, partition: int) -> tuple[ReplicaAt, ...]:
        return self.stages[stage][partition]

    def partitions_by_rank(self, stage: int) -> np.ndarray:
        """Return the partitions of a stage, with those of the same primary next to each other, as int32[partitions].

        Clustering in this order makes the rows for one worker one contiguous range."""
        owners = [replicas[0].worker if replicas else -1 for replicas in self.stages[stage]]
        return np.argsort(np.array(owners), kind="stable").astype(np.int32)


class RowChange(msgspec.Struct, frozen=True, array_like=True):
    """The new replicas of one partition."""

    stage: Number
    partition: Number
    replicas: tuple[ReplicaAt, ...]


class ReaderChange(msgspec.Struct, frozen=True, array_like=True):
    """The new reader of a partition of a source."""

    source: Number
    partition: Number
    worker: Number


class TableChange(msgspec.Struct, frozen=True, array_like=True):
    """The differences of a table from the table before (design: table-change)."""

    #: The epoch of the table before.
    base: Epoch
    epoch: Epoch
    rows: list[RowChange]
    readers: list[ReaderChange]
    #: The data ports of workers that have joined.
    endpoints: dict[Number, str]
    #: Workers that have left.
    gone: list[Number]
    #: See ``Table``.
    plan: Version = 0
    #: Stages that were born in this epoch.
    born: list[Number] = []
    #: New numbers of partitions, of stages and of sources that came or were removed.
    stage_widths: dict[Number, Width] = {}
    source_widths: dict[Number, Width] = {}


def change_between(before: Table, after: Table) -> TableChange:
    """Compare two tables. The result is as large as their differences, not as the tables."""
    stages, sources = _aligned(before.stages, after.stages), _aligned(before.sources, after.sources)
    return TableChange(
        before.epoch,
        after.epoch,
        [
            RowChange(stage, partition, other[partition])
            for stage, (one, other) in enumerate(stages)
            for partition in differing(one, other)
            if partition < len(other)
        ],
        [
            ReaderChange(source, partition, other[partition])
            for source, (one, other) in enumerate(sources)
            for partition in differing(one, other)
            if partition < len(other)
        ],
        {worker: at for worker, at in after.endpoints.items() if before.endpoints.get(worker) != at},
        [worker for worker in before.endpoints if worker not in after.endpoints],
        after.plan,
        [stage for stage, epoch in after.born.items() if before.born.get(stage) != epoch],
        _widths(before.stages, after.stages),
        _widths(before.sources, after.sources),
    )


def _widths(before: Sequence[Sequence[T]], after: Sequence[Sequence[T]]) -> dict[int, int]:
    """Return the numbers of partitions that have changed. Sources without any in the workers, such as DataFrames, are told when
    they come: all processes have the same table."""
    return {id_: len(row) for id_, row in enumerate(after) if id_ >= len(before) or len(row) != len(before[id_])}


def _aligned(before: Sequence[T], after: Sequence[T]) -> list[tuple[T | tuple[()], T | tuple[()]]]:
    """Pair the stages or sources of two tables by their ids."""
    return list(zip_longest(before, after, fillvalue=()))


def changed_by(table: Table, change: TableChange) -> Table:
    """Apply a change to a table. Rows that do not change stay the same objects, so that readers can skip them.

    ValueError: the change is for another table, or for a partition that the table does not have."""
    if change.base != table.epoch:
        raise ValueError(f"a change of the table of epoch {change.base} does not fit that of epoch {table.epoch}")
    stages: list[tuple[tuple[ReplicaAt, ...], ...]] = _resized(table.stages, change.stage_widths, ())
    sources: list[tuple[int, ...]] = _resized(table.sources, change.source_widths, 0)
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
    born = {stage: epoch for stage, epoch in table.born.items() if stages[stage]}
    born.update(dict.fromkeys(change.born, change.epoch))
    return Table(change.epoch, tuple(stages), tuple(sources), endpoints | change.endpoints, change.plan, born)


def _resized(rows: Sequence[tuple[T, ...]], widths: dict[int, int], nothing: T) -> list[tuple[T, ...]]:
    """Return the rows of a table with other numbers of partitions, which the change fills in."""
    made = list(rows)
    for id_, width in sorted(widths.items()):
        made.extend([()] * (id_ + 1 - len(made)))
        made[id_] = (nothing,) * width
    return made


def differing(before: Sequence[object], after: Sequence[object]) -> list[int]:
    """Return the indices at which two rows of a table differ. Tables share equal rows, so most need no look inside. A stage that
    comes or goes differs everywhere; others keep their number of partitions."""
    if before is after:
        return []
    if len(before) != len(after):
        assert not (before and after), "a stage keeps its partitions"
        return list(range(max(len(before), len(after))))
    others = compress(range(len(after)), map(is_not, before, after))
    return [place for place in others if before[place] != after[place]]


def spread(partitions: int, workers: Iterable[int], start: int = 0) -> list[int]:
    """Deal partitions to workers round robin, beginning with ``workers[start]``."""
    order = list(workers)
    return [order[(start + partition) % len(order)] for partition in range(partitions)]
