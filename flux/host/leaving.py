"""What leaves the dataflow from a worker: output of last stages, and the word that a partition of these is complete.

Everything passes here, when it is committed and not before (design: leaving). Output that is kept for egress tasks is asked for;
other output goes to the ``sink``, if there is one, from the primary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Protocol

import pyarrow as pa

from flux.dataflow.collect import Collect
from flux.host.effects import ToConnection, ToController
from flux.replicas.outlet import Exit
from flux.replicas.replica import Replica
from flux.wire.control import PartitionFinished
from flux.wire.messages import Chunk, Fetch
from partitioning.ids import PartitionKey

#: Bytes of one answer to an egress task: large enough to be fast, small enough not to hold up the data path.
CHUNK_BYTES = 4 << 20


class Sink(Protocol):
    """Who gets the committed output of last stages (design: sink). Called by the state machine: it hands on what it gets and does
    not wait."""

    def has(self, stage: int, partition: int) -> int:
        """Batches of a partition's output that it has for good, whoever primary was: positions below this number."""

    def begins(self, stage: int, partition: int, position: int) -> None:
        """A replica here is primary from now on, and the next batch is this one. After a take-over it may be one that the sink
        has had; what lies between ``has`` and it is lost."""

    def write(self, stage: int, partition: int, position: int, batch: pa.RecordBatch) -> None:
        """Batch ``position`` of a partition's output: one after the other from where it ``begins``."""


class Leaving:
    """``tell`` the shell. ``finished_at``: when the last partition here came to its end, by the wall clock."""

    def __init__(
        self, worker: int, replicas: Mapping[PartitionKey, Replica], tell: Callable[[ToConnection | ToController], None]
    ) -> None:
        self.sink: Sink | None = None
        self.finished_at: float | None = None
        self._worker = worker
        self._replicas = replicas
        self._tell = tell

    def open(self, replica: Replica) -> None:
        """A replica is made: its output leaves here if its stage is a last one and somebody wants it."""
        if self.sink is not None and not replica.stage.edges_out:
            replica.exit = Exit()

    def flush(self) -> None:
        """Hand on what is committed by now."""
        if self.sink is not None:
            for replica in self._replicas.values():
                if replica.exit is not None:
                    self._hand_on(replica, replica.exit, self.sink)
                    self.report(replica)

    @staticmethod
    def _hand_on(replica: Replica, out: Exit, sink: Sink) -> None:
        """A secondary keeps its output until the sink has it: it may have to hand it on itself."""
        if not out.leads:
            out.forget(sink.has(*replica.key))
            if not replica.primary:
                return
            out.leads = True
            sink.begins(*replica.key, out.next)
        for position, batch in out.committed(replica.order.committed):
            sink.write(*replica.key, position, batch)

    def note_end(self, replica: Replica, wall: float) -> None:
        if replica.finished and not replica.outlets:
            self.finished_at = wall

    def report(self, replica: Replica) -> None:
        """Once, when the end of a last stage's partition is committed and the sink has all of its output: the word may end the
        query."""
        if replica.complete and not replica.outlets and not replica.said_complete and self._has_left(replica):
            replica.said_complete = True
            finished = PartitionFinished(node=self._worker, stage=replica.stage.id, partition=replica.partition)
            self._tell(ToController(finished))

    def _has_left(self, replica: Replica) -> bool:
        out = replica.exit
        return out is None or self.sink is None or self.sink.has(*replica.key) >= out.position

    def on_fetch(self, connection: Hashable, fetch: Fetch) -> bool:
        """A part of kept output; False: it is not here, or not complete."""
        replica = self._replicas.get(PartitionKey(fetch.stage, fetch.partition))
        if replica is None or not isinstance(replica.operator, Collect) or not replica.complete:
            return False
        found = replica.operator.read(fetch.offset, CHUNK_BYTES)
        if found is not None:
            data, total = found
            self._tell(ToConnection(connection, Chunk(fetch.stage, fetch.partition, fetch.offset, total), data))
        return True
