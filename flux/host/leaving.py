"""Output that leaves the dataflow from a worker: that of last stages, and reports that their partitions are complete.

All output passes here, when it is committed and not before (design: leaving). Egress tasks ask for the output kept for them; the
output of a stage with a sink goes ``Outside``, from the primary; readers come for the output kept for them (``offering``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Protocol

import pyarrow as pa

from flux.dataflow.collect import Collect
from flux.dataflow.plan import Plan
from flux.dataflow.readers import Readers
from flux.dataflow.sink import ahead
from flux.errors import QueryFailed
from flux.host.effects import ToConnection, ToController
from flux.host.offering import Offering
from flux.replicas.exit import Exit
from flux.replicas.offer import Offer
from flux.replicas.replica import Replica
from flux.wire.control import PartitionFinished
from flux.wire.messages import Chunk, Fetch, Pull
from partitioning.ids import PartitionKey
from partitioning.table import FIRST_EPOCH

#: Bytes of one answer to an egress task: large enough to be fast, small enough not to hold up the data path.
CHUNK_BYTES = 4 << 20


class Outside(Protocol):
    """The way of committed output of stages with a sink to the outside (design: sink). It is called by the state machine, and
    hands output on without waiting."""

    def has(self, stage: int, partition: int) -> int:
        """Return the number below which the outside has all positions for good; 0: not known yet. Only partitions with a primary
        here are asked for."""

    def begins(self, stage: int, partition: int, position: int, first: bool) -> None:
        """Begin with the batch at this position, because a replica here is primary from now on. The outside may have it and more,
        unless this is the ``first`` primary of the query."""

    def write(self, stage: int, partition: int, position: int, batch: pa.RecordBatch) -> None:
        """Take batch ``position`` of a partition's output: one after the other from the position with which it ``begins``."""

    def recovered(self, stage: int, partition: int, position: int, note: Any) -> None:
        """Note that no earlier primary can have brought outside the batch ``position`` or a later one (design: ahead). ``note``:
        the note of the operator before the sink about the earlier ones; None: there is none."""

    def compared(self, stage: int, partition: int) -> bool:
        """Return whether the outside has been found to have nothing behind the position that ``recovered`` told."""

    def ends(self, stage: int, partition: int) -> None:
        """End, because the replica is primary here no longer. Its successor brings the rest outside."""


class Leaving:
    """The output that leaves from one worker. ``tell`` passes a message to the shell; ``wake`` is called for a
    replica that has room again."""

    def __init__(
        self,
        worker: int,
        plan: Plan,
        replicas: Mapping[PartitionKey, Replica],
        tell: Callable[[ToConnection | ToController], None],
        wake: Callable[[PartitionKey], None],
    ) -> None:
        self.outside: Outside | None = None
        #: Time, by the wall clock, at which the last partition here came to its end.
        self.finished_at: float | None = None
        #: Replicas here that have come to their end. It grows before others can hear of the end.
        self.ends = 0
        self._worker = worker
        self._replicas = replicas
        self._tell = tell
        self._wake = wake
        self._plan = plan
        self._sinks = any(stage.sink is not None for stage in plan.stages)
        self._kept_max = plan.settings.sink_max_bytes
        self._offering = Offering(replicas, tell, wake)

    def open(self, replica: Replica) -> None:
        """Give a new replica an exit, if its stage has a sink."""
        sink = replica.stage.sink
        if isinstance(sink, Readers):
            replica.exit = Offer(sink.kept_max(replica.stage.partitions))
        elif sink is not None:
            replica.exit = Exit(self._kept_max)

    def close(self, replica: Replica) -> None:
        """End the output of a replica that is given up."""
        out = replica.exit
        if out is not None and out.leads and not isinstance(out, Offer) and self.outside is not None:
            self.outside.ends(*replica.key)

    def exits(self) -> Iterator[Exit]:
        """Yield the output kept here for sinks. It includes that of secondaries, because their kept output is not certainly
        outside. Output kept for readers is yielded only from the primary, which knows the rows that they can read."""
        if self._sinks:
            for replica in self._replicas.values():
                if replica.exit is not None and (replica.primary or not isinstance(replica.exit, Offer)):
                    yield replica.exit

    def flush(self, now: float) -> None:
        """Hand on the output that is committed by now."""
        if self._sinks:
            for replica in self._replicas.values():
                out = replica.exit
                if out is not None:
                    if replica.primary and isinstance(out, Offer):
                        self._offering.show(replica, out)
                    elif replica.primary and self.outside is not None:
                        self._hand_on(replica, out, self.outside)
                    self.report(replica)
            self._offering.flush(now)

    def due(self) -> float:
        """Return the time at which ``flush`` has something to do, if nothing happens before."""
        return self._offering.due()

    def _hand_on(self, replica: Replica, out: Exit, outside: Outside) -> None:
        """Hand on output. It is kept until the outside has it, because the next primary may have to hand it on again."""
        if not out.leads:
            out.leads = True
            outside.begins(*replica.key, out.left, replica.leads_since == FIRST_EPOCH)
        for position, batch in out.hand_on(replica.order.committed):
            if (made := out.recovered(position)) is not None:
                outside.recovered(*replica.key, made, out.note)
            outside.write(*replica.key, position, batch)
        if (made := out.recovered()) is not None:
            outside.recovered(*replica.key, made, out.note)
        compares, full = out.compares, not out.has_room
        out.outside_has(outside.has(*replica.key), compares and outside.compared(*replica.key))
        if (full and out.has_room) or out.compares != compares:
            self._wake(replica.key)

    def note_end(self, replica: Replica, wall: float) -> None:
        self.ends += replica.finished
        if replica.finished and not replica.outlets:
            self.finished_at = wall

    def report(self, replica: Replica) -> None:
        """Report once that the end of a last stage's partition is committed and the outside has all of its output. The report may
        end the query."""
        if replica.complete and not replica.outlets and not replica.said_complete and self._has_left(replica):
            if replica.exit is not None and replica.exit.left > replica.exit.position:
                if self._plan.durable:
                    where = f"sink {replica.stage.sink!r} of stage {replica.stage.name}, partition {replica.partition}"
                    what = (
                        f"the outside has {replica.exit.left} batches, and the whole output is {replica.exit.position}"
                    )
                    raise QueryFailed(ahead(where, what, self._plan.location))
                raise QueryFailed(
                    f"{replica.where}: its sink says that the outside has {replica.exit.left} batches, but its whole output is "
                    f"{replica.exit.position}. Positions count anew in each query: keep them with SinkContext.query"
                )
            replica.said_complete = True
            finished = PartitionFinished(node=self._worker, stage=replica.stage.id, partition=replica.partition)
            self._tell(ToController(finished))

    @staticmethod
    def _has_left(replica: Replica) -> bool:
        out = replica.exit
        return out is None or (out.left >= out.position and not out.compares)

    def on_asked(self, connection: Hashable, asked: Fetch | Pull, now: float) -> bool:
        """Answer an egress task or a reader. Return False if the output is not here, or not complete."""
        return (
            self._on_fetch(connection, asked)
            if isinstance(asked, Fetch)
            else self._offering.on_pull(connection, asked, now)
        )

    def _on_fetch(self, connection: Hashable, fetch: Fetch) -> bool:
        replica = self._replicas.get(PartitionKey(fetch.stage, fetch.partition))
        if replica is None or not isinstance(replica.operator, Collect) or not replica.complete:
            return False
        found = replica.operator.read(fetch.offset, CHUNK_BYTES)
        if found is not None:
            data, total = found
            self._tell(ToConnection(connection, Chunk(fetch.stage, fetch.partition, fetch.offset, total), data))
        return True
