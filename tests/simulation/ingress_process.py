"""The ingress task of the simulation, as ``flux.shell.ingress_loop``: one attempt of one task of the job that reads a source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from flux.dataflow.plan import Plan
from flux.errors import FluxError, NonDeterministicInputError, RefusedError
from flux.tasks.ingress import IngressTask
from flux.tasks.micro_batches import MicroBatch
from flux.wire.control import Failure, Goodbye, NewTable, PlanChanged, TableSeen
from partitioning.table import Table
from tests.simulation.process import HELD_BACK_S, TURN_S, Process

if TYPE_CHECKING:
    from tests.simulation.run import Simulation


class IngressProcess(Process):
    """One attempt of one task of the Spark job that reads a source."""

    def __init__(
        self,
        sim: Simulation,
        source: int,
        partition: int,
        attempt: int,
        batches: Iterator[pa.RecordBatch],
        plan: Plan,
        micro_batch: MicroBatch | None = None,
    ) -> None:
        """Make an attempt. ``plan``: the plan that travels with the task; ``micro_batch``: the micro-batch to which the partition
        belongs."""
        super().__init__(sim, "ingress", partition, attempt)
        self.edges = [edge.id for edge in plan.edges_of_source(source)]
        self._plan, self._micro_batch = plan, micro_batch
        self.source = source
        self.core: IngressTask | None = None  # type: ignore[assignment]
        self.drained = False
        self._batches: Iterator[pa.RecordBatch] | None = batches
        self._ready = False
        self._read_at = 0.0

    @property
    def midway(self) -> bool:
        """Whether the attempt has sent some rows and not all."""
        return self.core is not None and self._batches is not None and self.core.streams.rows > 0

    def welcomed(self, incarnation: int, workers: int) -> None:
        if self.core is None:
            self.core = IngressTask(self._plan, self.source, self.index, incarnation, self._micro_batch)
            for producer in self.core.producers.values():
                self.sim.ledger.watch_producer(producer, self._current, self.careless)

    def _current(self) -> bool:
        member = self.sim.controller.members.ingress.get((tuple(self.edges), self.index))
        return member is not None and member.about.attempt == self.attempt

    def on_new_table(self, table: Table) -> None:
        assert self.core is not None
        if self.core.on_table(table, self.world.now):
            self._ready = True
            self.report(TableSeen(node=self.node, epoch=table.epoch))

    def on_plan_changed(self, order: PlanChanged) -> None:
        assert self.core is not None
        seen = self.core.plans.on_changed(order, self.node)
        if seen is not None:
            self.report(seen)
        if self.core.plans.held is not None:
            self.on_new_table(self.core.plans.held)

    def on_whole_table(self, order: NewTable, newer: bool) -> None:
        assert self.core is not None
        if not newer and self.core.plans.held is None:  # an earlier report may be lost
            self.report(TableSeen(node=self.node, epoch=self.newest.epoch))

    def on_goodbye_seen(self) -> None:
        if not self.dead:
            self.sim.spark.finished(self)

    def beat(self, now: float) -> None:
        if now >= self._beat_at and self.drained:
            self.report(Goodbye(node=self.node))
        for asked in () if self.core is None else self.core.plans.asks(self.node, now):
            self.report(asked)
        super().beat(now)

    def on_stop(self) -> None:
        """End the attempt if no stage reads its source any more; Spark may try the task again before its job is cancelled."""
        if self.source not in self.sim.plan.sources:
            self.sim.counts["tasks told that nothing reads their source"] += 1
            self.sim.spark.failed(self)

    def on_rejected(self) -> None:
        self.sim.counts["attempts that came after a newer one"] += 1
        self.sim.spark.failed(self)

    def on_answer(self, worker: int, message: Any) -> None:
        assert self.core is not None
        self._guarded(lambda: self.core.on_answer(worker, message, self.world.now))

    def _guarded(self, call: Any) -> None:
        try:
            call()
        except RefusedError as error:
            if error.code != "stale":
                raise
            self.sim.counts["attempts that gave way to a newer one"] += 1
            self.sim.spark.failed(self)
        except NonDeterministicInputError as error:
            self.fail(error)

    def fail(self, error: FluxError) -> None:
        """Report an error. The controller ends the query, unless it has heard of a newer attempt; Spark tries again anyway."""
        self.report(Failure(node=-1, kind=type(error).__name__, message=str(error)))
        self.sim.counts["attempts that read other rows"] += 1
        self.sim.spark.failed(self)

    def turn(self) -> None:
        self._guarded(self._turn_guarded)

    def _turn_guarded(self) -> None:
        core, now = self.core, self.world.now
        assert core is not None
        if self._ready and self._batches is not None:
            if not core.has_room:
                self.sim.counts["turns with a full log"] += 1
            elif now >= self._read_at:
                self._read_at = now + self.world.random.random() * self.sim.faults.read_s
                self._append(core, now)
        for producer in core.producers.values():
            self.sim.ledger.publish(producer)
        for effect in core.poll(now):
            self.send(effect)
        self.beat(now)
        self.note_credit()
        for stream, producer in core.producers.items():
            self.sim.ledger.check_log(producer.log, stream, "an ingress task")
        if core.drained and not self.drained:
            self.drained = True
            self.report(Goodbye(node=self.node))
        reads = self._ready and self._batches is not None and core.has_room
        rest = min(self.sim.plan.settings.resend_timeout / 4, self._beat_at - now)
        self.wake(max(min(rest, self._read_at - now) if reads else rest, TURN_S * self.slowness))

    def _append(self, core: IngressTask, now: float) -> None:
        assert self._batches is not None
        batch = next(self._batches, None)
        if batch is None and not self.sim.may_end(self.source, self.index):
            self._batches = iter(())
            self._read_at = now + HELD_BACK_S
        elif batch is None:
            self._batches = None
            core.finish(now)
            self.sim.strikes.last_batch()
        else:
            core.append(batch, now)
