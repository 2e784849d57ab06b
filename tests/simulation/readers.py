"""A reader of the output that a simulated query keeps for readers: one in the program of the query, or Spark with a checkpoint.

The rules are in ``flux.tasks.output_pull``; this module connects them with controller and workers. Rows that are read land
``Outside`` under its laws: nothing is left out, a batch that comes again is the same, and at the end everything is there. The
reader of Spark has for good the rows before its checkpoint, is lost now and then, and goes on from the checkpoint.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from flux.dataflow.sink import QueryReaders
from flux.errors import ProtocolError, QueryFailed
from flux.shell.output_loops import decoded
from flux.tasks.output_pull import OutputPull, PullQuestion
from flux.wire.codec import decode_command
from flux.wire.control import NewTable, Register
from flux.wire.frames import encode
from flux.wire.messages import Pulled
from partitioning.ids import PartitionKey
from tests.simulation.network import Link
from tests.simulation.outside import LEFT_OUT
from tests.simulation.timed_rows import tuples
from tests.simulation.violation import Violation

if TYPE_CHECKING:
    from tests.simulation.run import Simulation

#: Seconds between two turns, at most; probabilities that a reader is lost in a turn, and that it writes its checkpoint.
TURN_S, LOST, KEPT = 0.005, 0.01, 0.5
#: Bytes of one answer: some batches, so that there are many answers.
ANSWER_BYTES = 400


class Reader:
    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._rng = random.Random(f"reader {sim.seed}")
        self._turn_s = self._rng.choice([0.001, TURN_S])
        self._keeps = self._rng.random() < 0.6  # a checkpoint, as Spark does
        self._stages = [stage for stage in sim.plan.stages if isinstance(stage.sink, QueryReaders)]
        self.calm_at = 0.0  # from then on, and when all faults have ended, the reader is lost no more
        self._pulling: dict[int, OutputPull] = {}
        self._links: dict[str, Link] = {}
        if self._stages:
            self._control = sim.network.link(sim.server.hears, self._hear_order, data=False)
            self._begin()
            sim.world.after(self._turn_s, self._turn)

    def _begin(self) -> None:
        """Begin to read from the checkpoint, or, in a program, behind the last row read."""
        for link in self._links.values():
            link.closed = True
        self._links = {}
        for stage in self._stages:
            kept = {at: self._sim.outside.kept[PartitionKey(stage.id, at)] for at in range(stage.partitions)}
            self._pulling[stage.id] = OutputPull(stage.id, kept, ANSWER_BYTES, acknowledging=not self._keeps)
            for partition, below in kept.items():
                self._pulling[stage.id].acknowledge(partition, below)

    def _turn(self) -> None:
        sim, now = self._sim, self._sim.world.now
        if sim.controller.phase == "ended":
            return
        if self._keeps and now < max(self.calm_at, sim.strikes.calm_at) and self._rng.random() < LOST:
            sim.counts["readers that began again"] += 1
            self._begin()
        for stage, pulling in self._pulling.items():
            for _ in range(self._rng.randint(1, 4)):
                self._take(stage, pulling)
            if self._keeps and (pulling.all_read or self._rng.random() < KEPT):
                self._keep(stage, pulling)
            for ask in pulling.asks(now):
                self._ask(ask)
            if pulling.wants_table(now):
                self._control.send(encode(Register(role="egress", index=0, attempt=0, host="host", pid=0)))
        sim.world.after(self._turn_s, self._turn)

    def _take(self, stage: int, pulling: OutputPull) -> None:
        got = pulling.take()
        if got is not None:
            rows = tuples(got.batch)
            self._sim.outside.land(PartitionKey(stage, got.partition), got.position, rows)
            if not self._keeps:  # in a program, rows that were handed out count as read
                self._sim.outside.kept[PartitionKey(stage, got.partition)] = got.position + 1

    def _keep(self, stage: int, pulling: OutputPull) -> None:
        for partition, part in pulling.parts.items():
            taken = part.position - part.queued
            self._sim.outside.kept[PartitionKey(stage, partition)] = taken
            pulling.acknowledge(partition, taken)

    def _ask(self, ask: PullQuestion) -> None:
        link = self._links.get(ask.endpoint)
        if link is None:
            server = self._sim.listening[ask.endpoint]
            link = self._links[ask.endpoint] = self._sim.network.link(server.hear_data, self._hear_answer, data=True)
            self._sim.counts["workers that a reader came to"] += 1
        link.send((ask.pull, ()))

    def _hear_order(self, frame: bytes) -> None:
        try:
            order = decode_command(frame)
        except ProtocolError:
            return
        if isinstance(order, NewTable):
            for pulling in self._pulling.values():
                pulling.on_table(order.table)

    def _hear_answer(self, content: Any) -> None:
        answer, payload = content
        if not isinstance(answer, Pulled) or answer.stage not in self._sim.plan.stages:
            return  # a stage that has failed since has no more readers
        schema = self._sim.plan.stages[answer.stage].output_schema
        assert schema is not None
        try:
            batches = decoded([] if payload is None else [payload], schema)
            self._pulling[answer.stage].on_pulled(answer, batches, self._sim.world.now)
        except QueryFailed as error:
            raise Violation(LEFT_OUT, str(error)) from error
