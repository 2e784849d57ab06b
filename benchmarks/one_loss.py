"""The loss of one worker of a large cluster, seen by the controller.

The controller is real, and so are the bytes of all messages between it and the workers. The workers are simulated, in virtual
time: they only answer. Every worker confirms every table. A primary copies its state within ``COPY_S`` and reports that the new
replica follows, and later that it is safe. Heartbeats and rounds of balance are left out: they come with and without a loss.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from controller.decide.board import Tell
from controller.decide.controller import Controller
from flux.dataflow.plan import Plan
from flux.wire.codec import decode_report
from flux.wire.control import CopyState, NewTable, Register, ReplicaCaughtUp, TableChanged, TableSeen, ToController
from flux.wire.frames import encode
from partitioning.ids import PartitionKey
from partitioning.table import Table

#: Time of a message from one process to another, until it has been read there.
LATENCY_S = 0.002
#: Time until a worker goes by a new table.
FOLLOW_S = 0.005
#: Time from the order for a copy of a small state until the new replica follows.
COPY_S = 0.010
#: Longest time between two looks of the controller at its clock.
TICK_S = 0.01


@dataclass
class Outcome:
    """Costs of a loss. ``plan_s`` are the CPU seconds of the controller from the loss until the tables are encoded that name
    the heirs and the first replicas to add; ``cpu_s`` those until everything is repaired; ``repair_s`` the virtual time until
    then."""

    epochs: int = 0
    additions: int = 0
    plan_s: float = 0.0
    cpu_s: float = 0.0
    repair_s: float = 0.0
    received: Counter[int] = field(default_factory=Counter)  # bytes by worker
    sent: Counter[int] = field(default_factory=Counter)
    messages: int = 0

    @property
    def bytes_max(self) -> int:
        return max(self.received[worker] + self.sent[worker] for worker in self.received | self.sent)


class LargeCluster:
    def __init__(self, plan: Plan, workers: int) -> None:
        never = replace(plan.settings, heartbeat_timeout=1e9, heartbeat_last_timeout=1e9, balance_enabled=False)
        self.plan = replace(plan, settings=never)
        self.core = Controller(self.plan, workers, 0.0)
        self.now = 0.0
        self._coming: list[tuple[float, int, int, ToController]] = []
        self._number = count()
        self._outcome = Outcome()
        for worker in range(workers):
            about = Register(
                role="worker", index=worker, attempt=0, host=f"h{worker}", pid=1, executor=f"e{worker}",
                endpoint=f"tcp://10.0.{worker // 256}.{worker % 256}:40001", edges=[],
            )  # fmt: skip
            self._perform(self.core.on_report(worker, about, 0.0))
        self._run()

    @property
    def table(self) -> Table:
        assert self.core.table is not None
        return self.core.table

    def lose(self, worker: int) -> Outcome:
        """Run everything from the loss of this worker to the end of its repair."""
        outcome = self._outcome = Outcome()
        before, epoch, began = self.core.repairs.done, self.table.epoch, self.now
        start = time.process_time()
        effects = self.core.on_closed(worker, self.now)
        outcome.plan_s = outcome.cpu_s = time.process_time() - start
        encoding = outcome.cpu_s
        self._perform(effects)
        outcome.plan_s += outcome.cpu_s - encoding
        self._run()
        outcome.epochs = self.table.epoch - epoch
        outcome.additions = self.core.repairs.done - before
        outcome.repair_s = self.now - began
        return outcome

    def _run(self) -> None:
        """Run until no event is left."""
        while self._coming or self.core.repairs.under_way:
            tick = self.now + TICK_S
            while self._coming and self._coming[0][0] <= tick:
                self.now, _, worker, message = heapq.heappop(self._coming)
                frame = encode(message)
                self._outcome.sent[worker] += len(frame)
                self._outcome.messages += 1
                start = time.process_time()
                effects = self.core.on_report(worker, decode_report(frame), self.now)
                self._outcome.cpu_s += time.process_time() - start
                self._perform(effects)
            self.now = tick
            start = time.process_time()
            effects = self.core.on_tick(self.now)
            self._outcome.cpu_s += time.process_time() - start
            self._perform(effects)

    def _perform(self, effects: list[Tell]) -> None:
        """Send messages as the server does: a message to all is encoded once."""
        encoded: dict[int, int] = {}
        start = time.process_time()
        for effect in effects:
            if id(effect.command) not in encoded:
                encoded[id(effect.command)] = len(encode(effect.command))
        self._outcome.cpu_s += time.process_time() - start
        known: set[int] = set()
        for effect in effects:
            worker, command = effect.connection, effect.command
            assert isinstance(worker, int)
            self._outcome.received[worker] += encoded[id(command)]
            self._outcome.messages += 1
            if isinstance(command, NewTable):
                self._answer(worker, FOLLOW_S, TableSeen(node=worker, epoch=command.table.epoch))
            elif isinstance(command, TableChanged):
                self._answer(worker, FOLLOW_S, TableSeen(node=worker, epoch=command.change.epoch))
                if id(command) not in known:
                    known.add(id(command))
                    self._note_live(command)
            elif isinstance(command, CopyState):
                self._caught_up(worker, command.stage, command.partition, command.worker, command.incarnation, False)

    def _note_live(self, command: TableChanged) -> None:
        """Tell primaries that these replicas have everything committed."""
        for row in command.change.rows:
            addition = self.core.repairs.under_way.get(PartitionKey(row.stage, row.partition))
            for other in row.replicas[1:]:
                if addition is not None and other.live and other.incarnation == addition.incarnation:
                    self._caught_up(
                        row.replicas[0].worker, row.stage, row.partition, other.worker, other.incarnation, True
                    )

    def _caught_up(self, primary: int, stage: int, partition: int, worker: int, incarnation: int, safe: bool) -> None:
        about: dict[str, Any] = {"stall_ms": 1.5, "bytes": 100_000}
        message = ReplicaCaughtUp(
            node=primary, stage=stage, partition=partition, worker=worker, incarnation=incarnation, safe=safe, **about
        )
        self._answer(primary, FOLLOW_S if safe else COPY_S, message)

    def _answer(self, worker: int, after_s: float, message: ToController) -> None:
        at = self.now + after_s + 2 * LATENCY_S
        heapq.heappush(self._coming, (at, next(self._number), worker, message))
