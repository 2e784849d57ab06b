"""Workers of one query in virtual time: the loops of ``flux.shell.worker_loop`` with costs in place of work, so that the waits
of a row do not depend on the machine.

A turn, a step, a message and a batch take a fixed time each, and a message travels for a fixed time. Everything else is the real
code: state machines, rests and pace. Nothing is lost and no table changes.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from controller.replicas.placement import FarApart
from controller.replicas.spread import WorkerPlace
from flux.dataflow.plan import Plan
from flux.exchange.producer import ToWorker
from flux.state.sender import Aside
from flux.worker.core import WorkerCore
from flux.worker.effects import ToConnection
from flux.worker.pacing import GatherRest, Pacing
from partitioning.table import Table


@dataclass(frozen=True)
class Costs:
    """Seconds of a worker's thread, and of the way of a message."""

    turn_s: float = 100e-6
    step_s: float = 60e-6
    read_s: float = 60e-6
    message_s: float = 40e-6
    way_s: float = 200e-6


class VirtualWorker:
    """One worker with its own time, which is ahead of that of the others while it works."""

    def __init__(self, workers: VirtualWorkers, node: int) -> None:
        self.core = WorkerCore(workers.plan, node, lambda: self.now, len(workers.table.endpoints))
        self.now = 0.0
        self._workers = workers
        self._node = node
        self._rests, self._pace = GatherRest(), Pacing()
        self._inbox: list[tuple[float, int, Callable[[float], None]]] = []

    def hear(self, at: float, number: int, take: Callable[[float], None]) -> None:
        heapq.heappush(self._inbox, (at, number, take))

    @property
    def heard_at(self) -> float:
        return self._inbox[0][0] if self._inbox else math.inf

    def turn(self) -> None:
        """Take one turn as the loop of a worker does, and go on to the time at which the next one begins."""
        core, began, costs = self.core, self.now, self._workers.costs
        rows, steps, aged_s = core.rows_in, core.steps, core.aged_s
        self.now += costs.turn_s
        busy = through = False
        end = self.now + 0.002
        while self._stepped():
            busy = True
            if self.now >= end:
                break
        else:
            through = True
        through = through or not core.has_work
        while core.read(through, self.now):
            busy = True
            self.now += costs.read_s
        self._flush()
        rest = waited_s = 0.0
        if not (busy or core.has_work):
            rest = self._rests.rest(self._pace.rest_max_s)
            until = max(min(core.due(), core.reading.due(self.now)), self.now + rest)
            goes_on = max(self.now + rest, min(until, self.heard_at))
            waited_s = goes_on - self.now
            self.now = goes_on
        heard = False
        while self.heard_at <= self.now:
            heard = True
            heapq.heappop(self._inbox)[2](self.now)
            self.now += costs.message_s
        if heard:
            self._flush()
        worked_s = self.now - began - waited_s
        self._rests.worked(worked_s, core.rows_in - rows, core.steps - steps)
        if self._pace.turn(worked_s, waited_s, core.rows_in - rows, core.steps - steps, core.aged_s - aged_s):
            core.set_pace(self._pace)

    def _stepped(self) -> bool:
        if not self.core.work(self.now):
            return False
        self.now += self._workers.costs.step_s
        return True

    def _flush(self) -> None:
        for effect in list(self.core.poll(self.now)):
            if isinstance(effect, ToWorker):
                self._workers.to_port(self._node, effect, self.now)
                self.now += self._workers.costs.message_s
            elif isinstance(effect, ToConnection):
                self._workers.to_link(self._node, effect, self.now)
                self.now += self._workers.costs.message_s
            else:
                assert not isinstance(effect, Aside), "nothing is copied"


class VirtualWorkers:
    """All workers of a query. Partitions are placed as the controller places them."""

    def __init__(self, plan: Plan, workers: int, costs: Costs | None = None) -> None:
        self.plan, self.costs = plan, costs or Costs()
        placement = FarApart({worker: WorkerPlace.of("", "", f"e{worker}") for worker in range(workers)})
        self.table: Table = placement.first_table(plan, {worker: str(worker) for worker in range(workers)})
        self._numbers = itertools.count()
        #: Messages from one worker to another.
        self.messages = 0
        self.workers = [VirtualWorker(self, worker) for worker in range(workers)]
        self._in_turn = self.workers[0]
        for worker in self.workers:
            worker.core.on_table(self.table, 0.0)

    @property
    def cores(self) -> Sequence[WorkerCore]:
        return [worker.core for worker in self.workers]

    def clock(self) -> float:
        """Return the time of the worker in turn, for sources and operators."""
        return self._in_turn.now

    def to_port(self, sender: int, effect: ToWorker, now: float) -> None:
        core = self.workers[effect.worker].core
        self._send(effect.worker, now, lambda at: core.on_data_plane(sender, effect.message, effect.batches, at))

    def to_link(self, sender: int, effect: ToConnection, now: float) -> None:
        assert isinstance(effect.connection, int)
        core, message = self.workers[effect.connection].core, effect.message
        self._send(effect.connection, now, lambda at: core.on_answer(sender, message, at))

    def _send(self, worker: int, now: float, take: Callable[[float], None]) -> None:
        self.messages += 1
        self.workers[worker].hear(now + self.costs.way_s, next(self._numbers), take)

    def run(self, until: float, look: Callable[[Any], None] | None = None) -> None:
        """Run to a time. ``look`` is called after each turn with its worker."""
        while True:
            worker = min(self.workers, key=lambda each: each.now)
            if worker.now >= until:
                return
            self._in_turn = worker
            worker.turn()
            if look is not None:
                look(worker)
