"""Where the output of a replica goes: one outlet per outgoing edge, or out of the dataflow."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from flux.stream.producer import Producer
from partitioning.cluster import cluster_by_key, whole

#: Step, position, batch.
Held = tuple[int, int, pa.RecordBatch]


@dataclass(frozen=True)
class Outlet:
    """Where output goes: the stream of this partition on one outgoing edge. ``key`` empty: rotate over partitions."""

    producer: Producer
    key: tuple[int, ...]

    def send(self, batch: pa.RecordBatch, created: float) -> None:
        by_rank, partitions = self.producer.by_rank, self.producer.partitions
        if self.key:
            data = cluster_by_key(batch, self.key, partitions, by_rank)
        else:
            turn = (self.producer.stream.producer + self.producer.next_sequence) % partitions
            data = whole(batch, turn, partitions, by_rank)
        self.producer.append(data, created)


class Exit:
    """Where the output of a last stage leaves the dataflow. ``position`` of the next batch: every replica numbers its output
    alike, because it is the same. A batch is held until its step is committed and it has left, here or elsewhere; ``leads``: the
    sink has been told where this replica goes on."""

    def __init__(self) -> None:
        self.position = 0
        self.leads = False
        self._held: deque[Held] = deque()

    def add(self, step: int, batch: pa.RecordBatch) -> None:
        self._held.append((step, self.position, batch))
        self.position += 1

    @property
    def next(self) -> int:
        """Position of the next batch that leaves here."""
        return self._held[0][1] if self._held else self.position

    def committed(self, below: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Position and batch of what the steps below have given, each once."""
        while self._held and self._held[0][0] < below:
            _, position, batch = self._held.popleft()
            yield position, batch

    def forget(self, below: int) -> None:
        """Batches of positions ``below``, which have left for good."""
        while self._held and self._held[0][1] < below:
            self._held.popleft()

    def state(self) -> tuple[int, list[Held]]:
        """What a copy of the replica needs: it may have to hand on what this one holds."""
        return self.position, list(self._held)

    def adopt(self, state: tuple[int, list[Held]]) -> None:
        self.position, held = state
        self._held = deque(held)

    def validate(self) -> None:
        """What holds between any two events. AssertionError says what does not."""
        if self._held:
            first = self._held[0][1]
            assert first + len(self._held) == self.position, f"{len(self._held)} from {first} on, below {self.position}"
