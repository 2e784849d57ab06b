"""The newest table, which mostly arrives as changes (design: table-change).

A change applies to one table and fits no other. If a change is lost, late or repeated, later ones may not fit. Then the process
asks for the whole table, and asks again for as long as only changes come.

``AssignedPartitions`` are the partitions of sources that the table assigns to a worker.
"""

from __future__ import annotations

from flux.dataflow.plan import FromSource, Plan
from flux.exchange.producer import Producer
from flux.wire.control import NewTable, TableChanged
from flux.worker.source_scheduler import SourceScheduler
from partitioning.ids import SourcePartition, StreamId
from partitioning.table import Table, changed_by


class TableFollower:
    """The newest table of one process."""

    def __init__(self, again_s: float) -> None:
        """Begin without a table. ``again_s``: seconds that an answer may take."""
        self.table: Table | None = None
        #: A change came that does not fit, and the whole table has not come since.
        self.missed = False
        self._again_s = again_s
        self._ask_at = 0.0

    @property
    def epoch(self) -> int:
        return -1 if self.table is None else self.table.epoch

    def take(self, command: NewTable | TableChanged) -> Table | None:
        """Take a table or a change. Return the table to go by from now on; None: it stays as it is."""
        if isinstance(command, NewTable):
            if command.table.epoch < self.epoch:
                return None
            self.missed = False
            newer = command.table.epoch > self.epoch
            self.table = command.table
            return self.table if newer else None
        change = command.change
        if change.epoch <= self.epoch:
            return None
        if self.table is None or change.base != self.epoch:
            self.missed = True
            return None
        try:
            self.table = changed_by(self.table, change)
        except ValueError:
            self.missed = True
            return None
        self.missed = False
        return self.table

    def heard_of(self, epoch: int) -> None:
        """Note the epoch by which the controller goes. It has sent that table before it said so."""
        self.missed |= epoch > self.epoch

    def ask(self, now: float) -> bool:
        """Tell whether it is time to ask for the whole table."""
        if not self.missed or now < self._ask_at:
            return False
        self._ask_at = now + self._again_s
        return True


class AssignedPartitions:
    """The partitions of sources that the table assigns to a worker, as they come and go (design: seek). ``producers`` of all
    streams that begin there."""

    def __init__(self, plan: Plan, worker: int, reading: SourceScheduler, producers: dict[StreamId, Producer]) -> None:
        self._plan = plan
        self._worker = worker
        self._reading = reading
        self._producers = producers
        self._epoch = -1

    def on_table(self, table: Table, before: Table | None) -> None:
        self._epoch = table.epoch
        if before is not None and before.sources == table.sources:
            return
        mine = {
            SourcePartition(source.id, partition)
            for source in self._plan.sources
            if source.worker_partitions
            for partition, worker in enumerate(table.sources[source.id])
            if worker == self._worker
        }
        self._read_only(mine, mine)

    def read_again(self, edge: int, partition: int) -> list[Producer]:
        """Read a partition of a source anew, because a replica has taken over from a checkpoint and is the only one that lacks
        some of its rows. Return the producers that begin."""
        origin, mine = self._plan.edges[edge], set(self._reading.sources)
        assert isinstance(origin, FromSource)
        return self._read_only(mine - {SourcePartition(origin.source, partition)}, mine)

    def _read_only(self, kept: set[SourcePartition], mine: set[SourcePartition]) -> list[Producer]:
        """Go on with the kept sources, and end the others. Return the producers of those that begin now, to have all of
        ``mine``."""
        for producer in self._reading.keep_only(kept):
            producer.log.clear()
            del self._producers[producer.stream]
        begun = list(self._reading.begin(mine, self._epoch))
        self._producers.update((producer.stream, producer) for producer in begun)
        return begun
