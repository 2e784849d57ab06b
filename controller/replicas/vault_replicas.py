"""Replicas in a checkpoint location, if a query has one (design: vault).

The controller's own table has workers only: the replica that each partition has at the vault is not placed, moved or repaired.
The table that goes out lists it last in each row: primaries wait for its acks, and producers keep rows for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from msgspec.structs import replace

from controller.replicas.placement import Placement
from controller.replicas.table_changes import changed
from partitioning.ids import DISK, PartitionKey
from partitioning.table import FIRST_EPOCH, ReplicaAt, Table

Rows = tuple[tuple[ReplicaAt, ...], ...]


class VaultReplicas:
    """The replicas at the vault. ``first_epoch`` of this life of the query is above all that earlier lives have left there."""

    def __init__(self) -> None:
        self.first_epoch = FIRST_EPOCH
        self._restored_at = FIRST_EPOCH  # epoch of the next table in which all primaries come from the directory
        self._vault: ReplicaAt | None = None
        self._endpoint = ""
        self._table: Table | None = None
        self._shown: Table | None = None

    def open(self, vault: int, endpoint: str, first_epoch: int) -> None:
        """Note the registration of the vault."""
        self.first_epoch = self._restored_at = first_epoch
        self._endpoint = endpoint
        self._vault = ReplicaAt(vault, first_epoch, kind=DISK)

    def first(self, table: Table) -> Table:
        """Make the first table of this life: only primaries, which go on from the checkpoint location, if it holds anything. The
        sweep adds the other replicas."""
        epoch = self._restored_at
        if epoch == FIRST_EPOCH:
            return table
        stages = tuple(tuple((ReplicaAt(replicas[0].worker, epoch),) for replicas in rows) for rows in table.stages)
        return replace(table, epoch=epoch, stages=stages)

    def begin_again(self, epoch: int) -> None:
        """Note that all workers are lost, so that the next first table has this epoch."""
        self._restored_at = epoch

    def shown(self, table: Table) -> Table:
        """Make the table that goes out. Unchanged rows stay the same objects."""
        if self._vault is None:
            return table
        if table is not self._table:
            before, shown = self._table.stages if self._table else (), self._shown.stages if self._shown else ()
            stages = tuple(
                self._stage(rows, before[stage : stage + 1], shown[stage : stage + 1], self._vault)
                for stage, rows in enumerate(table.stages)
            )
            endpoints = {**table.endpoints, self._vault.worker: self._endpoint}
            self._table, self._shown = table, replace(table, stages=stages, endpoints=endpoints)
        assert self._shown is not None
        return self._shown

    @staticmethod
    def _stage(rows: Rows, before: tuple[Rows, ...], shown: tuple[Rows, ...], vault: ReplicaAt) -> Rows:
        """Return the rows of a stage as they go out. ``before``, ``shown``: as they were, and as they went out, if the stage was
        there."""
        if before and rows is before[0]:
            return shown[0]
        known = (
            list(zip(*before, *shown, strict=True))
            if before and len(before[0]) == len(rows)
            else [((), ())] * len(rows)
        )
        return tuple(
            last if row is old and old else (*row, vault) if row else ()
            for row, (old, last) in zip(rows, known, strict=True)
        )


def revived(table: Table, orphans: Iterable[PartitionKey], placement: Placement, empty: bool = False) -> Table | None:
    """Give new primaries to partitions whose only replica is that at the vault, in the same epoch. They are dealt to the workers
    with the fewest primaries. ``empty``: there is none at a vault either, and they begin empty. None: no worker is left."""
    held = Counter(replicas[0].worker for rows in table.stages for replicas in rows if replicas)
    rows = {}
    for key in orphans:
        fit = placement.candidates(key, (), then=lambda worker: (held[worker], worker))
        # If none fits, all remaining workers are leaving.
        fit = fit or sorted(table.endpoints, key=lambda worker: (held[worker], worker))
        if not fit:
            return None
        held[fit[0]] += 1
        rows[key] = (ReplicaAt(fit[0], table.epoch, empty=empty),)
    made = changed(table, {key: lambda _, row=row: row for key, row in rows.items()})  # type: ignore[misc]
    return replace(made, epoch=table.epoch)
