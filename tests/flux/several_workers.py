"""Several workers as state machines that bring each other their messages: no socket and no sleep."""

from __future__ import annotations

from typing import Any

from one_worker import Feeder

from flux.dataflow.plan import Plan
from flux.exchange.producer import ToWorker
from flux.worker.core import WorkerCore
from flux.worker.effects import ToConnection, ToController
from partitioning.table import Table


class SeveralWorkers:
    """Workers of one plan, and a producer of stream 0.0 for each of those in ``fed``."""

    def __init__(self, plan: Plan, table: Table, fed: tuple[int, ...] = (0, 1)) -> None:
        self.cores = [WorkerCore(plan, worker) for worker in table.endpoints]
        for core in self.cores:
            core.on_table(table, 0.0)
        self.feeders = [Feeder(self.cores[worker]) for worker in fed]
        for feeder in self.feeders:
            feeder.hello()
            feeder.answers = lambda now=0.0: []  # ``pass_on`` takes all effects
        #: Messages between workers, with their sender.
        self.sent: list[tuple[int, Any]] = []
        #: Reports to the controller.
        self.reports: list[Any] = []
        #: Tells whether a message of a secondary is lost on its way to worker 0.
        self.loses: Any = lambda message: False
        #: Links over which nothing comes: sender and receiver.
        self.cut: set[tuple[int, int]] = set()
        self.pass_on(0.0)

    def pass_on(self, now: float) -> None:
        """Let all workers work, and deliver their messages to each other, until nothing is under way."""
        busy = True
        while busy:
            busy = False
            for me, core in enumerate(self.cores):
                while core.work(now):
                    busy = True
                for effect in core.poll(now):
                    busy |= self._pass(me, effect, now)

    def _pass(self, me: int, effect: Any, now: float) -> bool:
        """Bring an effect to its receiver, and tell whether it is for another worker."""
        if isinstance(effect, ToController):
            self.reports.append(effect.message)
        if isinstance(effect, ToWorker):
            self.sent.append((me, effect.message))
            if (me, effect.worker) not in self.cut and not (me and self.loses(effect.message)):
                self.cores[effect.worker].on_data_plane(f"worker {me}", effect.message, effect.batches, now)
            return True
        if isinstance(effect, ToConnection) and str(effect.connection).startswith("worker"):
            other = int(str(effect.connection).split()[1])
            self.sent.append((me, effect.message))
            if (me, other) not in self.cut:
                self.cores[other].on_answer(me, effect.message, now)
            return True
        return False

    def go_on(self, begin: float, end: float) -> None:
        for tick in range(round((end - begin) * 20)):
            self.pass_on(begin + tick / 20)

    def of(self, kind: Any) -> list[Any]:
        return [message for _, message in self.sent if isinstance(message, kind)]

    def told(self, kind: Any) -> list[Any]:
        return [report for report in self.reports if isinstance(report, kind)]
