"""What leaves the dataflow from a worker: output of last stages, and the word that a partition of these is complete.

Everything passes here, when it is committed and not before (design: leaving). Output that is kept for egress tasks is asked for;
the output of a stage with a sink goes ``Outside``, from the primary; readers come for what is kept for them (``offering``).
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
    """Brings the committed output of stages with a sink outside (design: sink). Called by the state machine: it hands on what it
    gets and does not wait."""

    def has(self, stage: int, partition: int) -> int:
        """The outside has the positions below this number for good; 0: not known yet. Only of partitions that lead here."""

    def begins(self, stage: int, partition: int, position: int, first: bool) -> None:
        """A replica here is primary from now on, and the next batch is this one. The outside may have it and more, unless this is
        the ``first`` primary of the query."""

    def write(self, stage: int, partition: int, position: int, batch: pa.RecordBatch) -> None:
        """Batch ``position`` of a partition's output: one after the other from where it ``begins``."""

    def recovered(self, stage: int, partition: int, position: int, note: Any) -> None:
        """No earlier primary can have brought outside the batch ``position`` or a later one (design: ahead). ``note``: what the
        operator before the sink says of the earlier ones, None if it says nothing."""

    def ends(self, stage: int, partition: int) -> None:
        """The replica is primary here no longer. What was not brought outside by now is its successor's."""


class Leaving:
    """``tell`` the shell. ``wake`` a replica that has room again. ``finished_at``: when the last partition here came to its end,
    by the wall clock."""

    def __init__(
        self,
        worker: int,
        plan: Plan,
        replicas: Mapping[PartitionKey, Replica],
        tell: Callable[[ToConnection | ToController], None],
        wake: Callable[[PartitionKey], None],
    ) -> None:
        self.outside: Outside | None = None
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
        """A replica is made: its output leaves here if its stage has a sink."""
        sink = replica.stage.sink
        if isinstance(sink, Readers):
            replica.exit = Offer(sink.kept_max(replica.stage.partitions))
        elif sink is not None:
            replica.exit = Exit(self._kept_max)

    def close(self, replica: Replica) -> None:
        """A replica is given up."""
        out = replica.exit
        if out is not None and out.leads and not isinstance(out, Offer) and self.outside is not None:
            self.outside.ends(*replica.key)

    def exits(self) -> Iterator[Exit]:
        """What is kept here for sinks, also by secondaries: what they keep is not outside for certain. Of what is kept for
        readers, the primary knows what they can read."""
        if self._sinks:
            for replica in self._replicas.values():
                if replica.exit is not None and (replica.primary or not isinstance(replica.exit, Offer)):
                    yield replica.exit

    def flush(self, now: float) -> None:
        """Hand on what is committed by now."""
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
        """When ``flush`` has something to do, if nothing happens before."""
        return self._offering.due()

    def _hand_on(self, replica: Replica, out: Exit, outside: Outside) -> None:
        """It is kept until the outside has it: the next primary may have to hand it on again."""
        if not out.leads:
            out.leads = True
            outside.begins(*replica.key, out.left, replica.leads_since == FIRST_EPOCH)
        for position, batch in out.hand_on(replica.order.committed):
            if (made := out.recovered(position)) is not None:
                outside.recovered(*replica.key, made, out.note)
            outside.write(*replica.key, position, batch)
        if (made := out.recovered()) is not None:
            outside.recovered(*replica.key, made, out.note)
        full = not out.has_room
        out.forget(outside.has(*replica.key))
        if full and out.has_room:
            self._wake(replica.key)

    def note_end(self, replica: Replica, wall: float) -> None:
        self.ends += replica.finished
        if replica.finished and not replica.outlets:
            self.finished_at = wall

    def report(self, replica: Replica) -> None:
        """Once, when the end of a last stage's partition is committed and the outside has all of its output: the word may end the
        query."""
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
        return replica.exit is None or replica.exit.left >= replica.exit.position

    def on_asked(self, connection: Hashable, asked: Fetch | Pull, now: float) -> bool:
        """By an egress task or a reader; False: it is not here, or not complete."""
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
