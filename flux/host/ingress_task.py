"""The sending side of a Spark ingress task, without I/O: one partition of one source (design: ingress, newest-attempt).

A task that Spark retries is a new incarnation of the same producers: it regenerates the same batches and the workers
tell it from which one on they are needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from flux.dataflow.batches import conform
from flux.dataflow.plan import Plan
from flux.stream.consumers import Consumers
from flux.stream.log import LogMeter
from flux.stream.producer import Producer, ToWorker
from flux.stream.source_streams import SourceStreams
from flux.wire.messages import Acks
from flux.wire.statistics import Statistics
from partitioning.ids import StreamId
from partitioning.table import Table


class IngressTask:
    def __init__(self, plan: Plan, source: int, partition: int, incarnation: int) -> None:
        settings = plan.settings
        self.plan = plan
        self.source = plan.sources[source]
        edges = plan.edges_of_source(source)
        self.meter = LogMeter()
        share = max(settings.log_max_bytes // len(edges), 1)
        self.producers = {
            StreamId(edge.id, partition): Producer(
                StreamId(edge.id, partition), incarnation, edge.partitions, share, settings.resend_timeout,
                self.meter, run_max_rows=settings.step_max_rows,
            )
            for edge in edges
        }  # fmt: skip
        self._consumers = {edge.consumer: Consumers(edge.consumer) for edge in edges}
        self.streams = SourceStreams(edges, list(self.producers.values()), self.source.name)
        self.first_row_at: float | None = None
        self.wall_ahead = 0.0  # of the wall clock to ``now``, renewed by the shell; rows carry the wall clock's time

    @property
    def has_room(self) -> bool:
        return self.streams.has_room

    @property
    def drained(self) -> bool:
        return self.streams.drained

    def append(self, batch: pa.RecordBatch, now: float) -> None:
        created = now + self.wall_ahead
        if self.first_row_at is None:
            self.first_row_at = created
        self.streams.append(conform(batch, self.source.schema, f"source {self.source.name}"), created)

    def finish(self, now: float) -> None:
        self.streams.finish(now + self.wall_ahead)

    def on_table(self, table: Table, now: float) -> None:
        for stream, producer in self.producers.items():
            consumer = self.plan.edges[stream.edge].consumer
            producer.on_table(table, consumer, now, self._consumers[consumer])

    def on_answer(self, worker: int, message: Any, now: float) -> None:
        for one in message.items if isinstance(message, Acks) else (message,):
            producer = self.producers.get(StreamId(one.edge, one.producer))
            if producer is not None:
                producer.on_answer(worker, one, now)

    def poll(self, now: float) -> Iterator[ToWorker]:
        for producer in self.producers.values():
            yield from producer.poll(now)

    def stats(self) -> Statistics:
        """What a heartbeat reports."""
        return {
            "source_rows": self.streams.rows,
            "log_bytes": self.meter.bytes,
            "peak_log_bytes": self.meter.peak,
            "first_row_at": self.first_row_at,
        }
