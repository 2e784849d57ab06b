"""Comparison of evidence: steps are the same by their slices, batches by their rows in any layout. Also the order logs of a
worker."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from flux.exchange.inbound import RowSlice, Slice
from flux.exchange.log import LogEntry, Rows
from flux.exchange.slices import RowNumbers
from flux.replica.kinds import Follower
from flux.replica.order_log import OrderLog
from flux.replica.replica import Replica
from flux.wire.messages import StepKind
from flux.worker.core import WorkerCore
from partitioning.clustering import Clustered


def order_of(replica: Replica | Follower) -> OrderLog | None:
    """Return the order log of a replica; None if the replica has received nothing yet."""
    order: OrderLog | None = replica.order  # type: ignore[union-attr]  # of a witness
    return order


def orders_of(core: WorkerCore) -> list[OrderLog]:
    """List the order logs of all replicas that a worker hosts."""
    orders = map(order_of, [*core.replicas.values(), *core.hosted.followers.values()])
    return [order for order in orders if order is not None]


def step_of(kind: StepKind, now: float, slices: Iterable[Any]) -> Any:
    return kind, now, tuple(tuple(one) for one in slices)


def batches_of(slice_: Slice) -> list[int]:
    """List the numbers of the batches with rows in a slice, in order; or of its numbered rows; or of the word that it is."""
    run = slice_.run if isinstance(slice_, RowSlice) else None
    if isinstance(run, RowNumbers):
        return list(run.numbers.tolist())
    return [slice_.sequence] if run is None else run.sequences


def through(slices: Sequence[Slice]) -> list[tuple[int, int, int]]:
    """Return the end of each stream in these slices, one after the other, as an order states it."""
    said: list[tuple[int, int, int]] = []
    for slice_ in slices:
        if said and said[-1][:2] == slice_.stream:
            said.pop()
        said.append((*slice_.stream, slice_.sequence))
    return said


def same_batch(one: LogEntry, other: LogEntry, altered: bool = False) -> bool:
    """Tell whether two batches have the same rows. ``altered``: leave out the origin that rows name."""
    if one.element.kind != other.element.kind:
        return False
    if not np.array_equal(np.sort(one.touches), np.sort(other.touches)):
        return False
    if not isinstance(one.element, Rows) or not isinstance(other.element, Rows):
        return True
    return _same_rows(one.element.data, other.element.data, altered)


def _same_rows(one: Clustered, other: Clustered, altered: bool) -> bool:
    def of(batch: pa.RecordBatch) -> pa.RecordBatch:
        # Rows that go to an aggregate name no origin.
        return batch.drop_columns(["hop"]) if altered and "hop" in batch.schema.names else batch

    if np.array_equal(one.by_rank, other.by_rank):
        return np.array_equal(one.offsets, other.offsets) and of(one.batch).equals(of(other.batch))
    return all(of(one.rows_of(p)).equals(of(other.rows_of(p))) for p in one.by_rank.tolist())
