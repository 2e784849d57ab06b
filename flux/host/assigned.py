"""The partitions of sources that the table assigns to a worker, as they come and go (design: seek)."""

from __future__ import annotations

from flux.dataflow.plan import FromSource, Plan
from flux.host.reading import Reading
from flux.stream.producer import Producer
from partitioning.ids import SourcePartition, StreamId
from partitioning.table import Table


class Assigned:
    """The assigned sources of one worker. ``producers`` of all streams that begin there."""

    def __init__(self, plan: Plan, worker: int, reading: Reading, producers: dict[StreamId, Producer]) -> None:
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
