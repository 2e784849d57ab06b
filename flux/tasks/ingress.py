"""The sending side of a Spark ingress task, without I/O: one partition of one source (design: ingress, newest-attempt).

A task that Spark retries is a new incarnation of the same producers: it makes the same batches again, and the workers tell it
the first one that they need.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from flux.dataflow.plan import Plan
from flux.exchange.consumer_map import Consumers
from flux.exchange.log import LogMeter
from flux.exchange.producer import Producer, ToWorker
from flux.exchange.source_streams import SourceStreams
from flux.operators.batches import conform
from flux.tasks.micro_batches import MicroBatch, MicroBatchStreams
from flux.windows.lateness import BatchLateness
from flux.windows.window import NEVER
from flux.wire.messages import Acks
from flux.wire.statistics import PartitionRead, Statistics
from flux.worker.table_follower import PlanFollower
from partitioning.ids import StreamId
from partitioning.table import Table


class IngressTask:
    """The producers of one partition of a DataFrame."""

    def __init__(
        self, plan: Plan, source: int, partition: int, incarnation: int, micro_batch: MicroBatch | None = None
    ) -> None:
        """Begin at the first row. ``micro_batch``: the one of a streaming query to which the partition belongs; None: the
        partition is the whole input."""
        settings = plan.settings
        self.plan = plan
        self.plans = PlanFollower(plan, runs_code=False)
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
        producers = list(self.producers.values())
        self.streams: SourceStreams
        if micro_batch is None:
            self.streams = SourceStreams(
                edges, producers, self.source.name, batch_bytes=settings.batch_max_bytes,
                event_time=self.source.event_time, judge=BatchLateness(NEVER),
            )  # fmt: skip
        else:
            self.streams = MicroBatchStreams(
                edges, producers, self.source.name, micro_batch, settings.batch_max_bytes, self.source.event_time
            )  # fmt: skip
        self._partition = partition
        #: Rows that came and had been applied before.
        self._left_out = 0
        self.first_row_at: float | None = None
        #: Seconds by which the wall clock is ahead of ``now``, renewed by the shell; rows carry the wall clock's time.
        self.wall_ahead = 0.0

    @property
    def has_room(self) -> bool:
        return self.streams.has_room

    @property
    def drained(self) -> bool:
        return self.streams.drained

    def find_start(self) -> bool:
        """Look for the first row to send, and tell whether it is known."""
        return self.streams.find_start() if isinstance(self.streams, MicroBatchStreams) else True

    def needed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return a batch without the rows before the first one to send. It is called once for every batch that comes."""
        if not isinstance(self.streams, MicroBatchStreams):
            return batch
        before = min(self.streams.left_out - self._left_out, batch.num_rows)
        self._left_out += before
        if before and self.streams.timed is not None:
            self.streams.timed.see(conform(batch.slice(0, before), self.source.schema, f"source {self.source.name}"))
        return batch.slice(before) if before else batch

    def append(self, batch: pa.RecordBatch, now: float) -> pa.RecordBatch | None:
        """Append a batch. Return the rows for which there is no room now, or which must come in another batch; None if there are
        none."""
        created = now + self.wall_ahead
        if self.first_row_at is None:
            self.first_row_at = created
        batch = conform(batch, self.source.schema, f"source {self.source.name}")
        if not isinstance(self.streams, MicroBatchStreams):
            self.streams.append(batch, created)
            return None
        rest = self.streams.give(batch, created)
        return rest if rest.num_rows else None

    def finish(self, now: float) -> None:
        """End the streams, or the micro-batch. NonDeterministicInputError: the micro-batch had more rows when it was read
        before."""
        if isinstance(self.streams, MicroBatchStreams):
            self.streams.finish_batch(self._left_out)
        else:
            self.streams.finish(now + self.wall_ahead)

    @property
    def newest(self) -> int:
        """The greatest time of all rows that came, also of those that had been applied before."""
        return NEVER if self.streams.timed is None else self.streams.timed.newest

    @property
    def late(self) -> int:
        """The late ones of all rows that came, also of those that had been applied before."""
        return 0 if self.streams.timed is None else self.streams.timed.late

    @property
    def end(self) -> int:
        """The number behind the last row, as the stream counts rows."""
        return max(producer.next_sequence for producer in self.producers.values())

    @property
    def sent(self) -> list[int]:
        """Numbers behind the last row that has travelled, by edge, in this micro-batch or an earlier one."""
        return self.streams.sent if isinstance(self.streams, MicroBatchStreams) else []

    def on_table(self, table: Table, now: float) -> bool:
        """Follow the newest table. Return False if its plan has still to come."""
        if not self.plans.may_follow(table):
            return False
        if table.plan > self.plan.version:
            self._go_by(table.plan)
        for stream, producer in self.producers.items():
            if stream.edge not in self.plan.edges:
                continue
            consumer = self.plan.edges[stream.edge].consumer
            producer.on_table(table, consumer, now, self._consumers[consumer])

        return True

    def _go_by(self, version: int) -> None:
        """Go by another version of the plan. The last edge, if it is removed, takes rows and drops them until the program ends
        the job of its source."""
        plan = self.plans.of(version)
        assert plan is not None
        self.plan = plan
        self.plans.go_by(version)
        for stream in [stream for stream in self.producers if stream.edge not in plan.edges]:
            if self.streams.close(stream.edge) is not None:
                del self.producers[stream]

    def on_answer(self, worker: int, message: Any, now: float) -> None:
        for one in message.items if isinstance(message, Acks) else (message,):
            producer = self.producers.get(StreamId(one.edge, one.producer))
            if producer is not None:
                producer.on_answer(worker, one, now)

    def poll(self, now: float) -> Iterator[ToWorker]:
        for stream, producer in self.producers.items():
            if stream.edge in self.plan.edges:
                yield from producer.poll(now)
            else:
                producer.log.clear()

    def stats(self) -> Statistics:
        """Return the figures for a heartbeat."""
        about: Statistics = {"source_rows": self.streams.rows}
        if isinstance(self.streams, MicroBatchStreams):
            # Each micro-batch is a task of its own, so the rows of several tasks add up. The controller adds them by the numbers
            # of their rows, as for a source in the workers; ``source_rows`` would be those of one task that reads everything.
            first, elements, rows = self.streams.first or 0, self.streams.elements, self.streams.rows
            about = {"sources": [PartitionRead(self.source.id, self._partition, first, elements, rows)]}
        return about | {
            "log_bytes": self.meter.bytes,
            "peak_log_bytes": self.meter.peak,
            "first_row_at": self.first_row_at,
        }
