"""The order logs of one partition alone, under random schedules: no rows, no controller, thousands of runs in a second.

A replica that may take over has every step that any replica holds for committed, although messages are lost or late and
replicas come and go. The whole simulation shows this, too, but seldom gets to the few moments on which the promises of a
primary to its only secondary depend.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace

from flux.replica.order_exchange import CaughtUp, on_seen, outgoing, seen
from flux.replica.order_log import OrderLog
from flux.replica.output_checksums import OutputChecksums
from flux.wire.messages import OrderEntry, PartitionOrder, PartitionSeen
from partitioning.table import ReplicaAt

#: A primary sends again after one of these numbers of events: soon, or so late that the next step is there before.
AGAIN = (3.0, 15.0, 40.0)
EVENTS = 150
#: Term of the log of a replica that has no state and takes no orders.
NOTHING_YET = -2
#: Most replicas of the partition at a time, the one being added included.
COPIES_MAX = 4


class Lost(Exception):
    """A broken law: a committed step is not there any more, or another step is in its place."""


@dataclass(frozen=True)
class Copy:
    """A copy of the state of a primary, for a replica that has none."""

    incarnation: int
    order: OrderLog
    #: The steps in that state.
    past: dict[int, OrderEntry]


class Model(SimpleNamespace):
    """The parts of a replica at which pairing looks. ``live`` and ``safe`` are the controller's view, and ``past`` holds the
    steps that the replica has applied."""

    def __init__(self, worker: int, incarnation: int, order: OrderLog, live: bool) -> None:
        super().__init__(
            stage=SimpleNamespace(id=0), partition=0, worker=worker, incarnation=incarnation, order=order, live=live,
            safe=live, leads_since=-1, applied=order.base, past={}, held_back=False, step_s=0.0, gone=[], steady=True,
            output=SimpleNamespace(exit=None, compared=False, checksums=OutputChecksums()),
        )  # fmt: skip

    @property
    def progress(self) -> int:
        return int(self.applied)


@dataclass
class Schedule:
    """One run of random events."""

    seed: int
    losses: float
    replicas: list[Model] = field(default_factory=list)
    #: By sender and receiver: the messages under way, in order. Some are lost.
    channels: dict[tuple[int, int], deque[object]] = field(default_factory=dict)
    official: dict[int, OrderEntry] = field(default_factory=dict)
    epoch: int = 0
    now: float = 0.0
    decided: int = 0

    def run(self) -> None:
        """Take random events and check the law after each. Raise Lost if it is broken."""
        self.rng = random.Random(self.seed)
        self.again = self.rng.choice(AGAIN)
        for worker in range(self.rng.choice([2, 2, 3])):
            self.replicas.append(Model(worker, 0, OrderLog(), True))
        self.replicas[0].leads_since = 0
        self._lead()
        weighted = [(self._decide, 4), (self._tell, 6), (self._deliver, 12), (self._apply, 3), (self._add, 1)]
        weighted += [(self._copy, 2), (self._lose, 1)]
        steps = self.rng.choices([step for step, _ in weighted], [weight for _, weight in weighted], k=EVENTS)
        for step in steps:
            self.now += 1.0
            step()
            self._check()

    # ---- actions of the primary and the secondaries

    @property
    def primary(self) -> Model:
        return self.replicas[0]

    def _lead(self) -> None:
        peers = [ReplicaAt(replica.worker, replica.incarnation, replica.live) for replica in self.replicas[1:]]
        self.primary.order.lead(peers, self.primary.applied)

    def _decide(self) -> None:
        self.decided += 1
        self.primary.order.append(OrderEntry(0.0, 0.0, [(0, self.epoch, self.decided)]))

    def _apply(self) -> None:
        """Let a replica apply some steps. Only a primary may apply steps that are not committed yet."""
        replica = self.rng.choice(self.replicas)
        most = replica.order.end if replica is self.primary else replica.order.committed
        replica.applied = self.rng.randint(replica.applied, max(most, replica.applied))
        replica.past |= {step: replica.order[step] for step in range(replica.order.base, replica.applied)}
        replica.order.trim(replica.applied)

    def _tell(self) -> None:
        for worker, items in outgoing([self.primary], self.now, self.again).items():
            self._send(self.primary.worker, worker, items[0])

    def _send(self, sender: int, receiver: int, message: object) -> None:
        if self.rng.random() >= self.losses:
            self.channels.setdefault((sender, receiver), deque()).append(message)

    def _deliver(self) -> None:
        flowing = [pair for pair, messages in self.channels.items() if messages]
        if not flowing:
            return
        sender, receiver = self.rng.choice(flowing)
        message = self.channels[sender, receiver].popleft()
        replica = next((replica for replica in self.replicas if replica.worker == receiver), None)
        if replica is None:
            return
        if isinstance(message, Copy):
            if replica.order.term == NOTHING_YET and replica.incarnation == message.incarnation:
                replica.order, replica.applied, replica.past = message.order, message.order.base, message.past
        elif isinstance(message, PartitionOrder):
            if replica is not self.primary and self._meant(message, replica):
                given = message.term, message.first, message.entries, message.committed, replica.applied
                if replica.order.term != NOTHING_YET and replica.order.on_orders(*given):
                    self._send(receiver, sender, seen(replica))  # type: ignore[arg-type]
        elif isinstance(message, PartitionSeen) and replica is self.primary:
            for report in on_seen(replica, sender, message, self.now):  # type: ignore[arg-type]
                if isinstance(report, CaughtUp):
                    self._caught_up(report)

    def _meant(self, message: PartitionOrder, replica: Model) -> bool:
        return message.incarnation == replica.incarnation

    # ---- actions of the controller

    def _caught_up(self, report: CaughtUp) -> None:
        for replica in self.replicas[1:]:
            if (replica.worker, replica.incarnation) == (report.worker, report.incarnation):
                if report.safe:
                    replica.safe = replica.live
                elif not replica.live:
                    replica.live = True
                    self.epoch += 1
                    self._lead()

    def _add(self) -> None:
        if len(self.replicas) < COPIES_MAX and all(replica.safe for replica in self.replicas):
            self.epoch += 1
            order = OrderLog()
            order.term = NOTHING_YET
            worker = min({*range(COPIES_MAX)} - {replica.worker for replica in self.replicas})
            self.replicas.append(Model(worker, self.epoch, order, False))
            self._lead()

    def _copy(self) -> None:
        for replica in self.replicas[1:]:
            if not replica.live:
                order = OrderLog(self.primary.applied)
                order.adopt(self.primary.order.since(self.primary.applied), self.primary.order.committed)
                self.primary.order.note_copy(replica.worker, self.primary.applied)
                self.primary.order.note_copy_arrived(
                    replica.worker
                )  # orders may overtake the copy here: it is the harder case
                past = {step: entry for step, entry in self.primary.past.items() if step < self.primary.applied}
                self._send(self.primary.worker, replica.worker, Copy(replica.incarnation, order, past))

    def _lose(self) -> None:
        """Lose a worker with the messages that it had not sent yet. If its replica led, a safe one takes over."""
        if sum(replica.safe for replica in self.replicas) < 2:
            return
        lost = self.rng.choice(self.replicas)
        self.epoch += 1
        took_over = lost is self.primary
        self.replicas.remove(lost)
        if took_over:
            self.replicas = [replica for replica in self.replicas if replica.safe]
            self.primary.leads_since = self.epoch
        listed = {replica.worker for replica in self.replicas}
        for (sender, _), messages in self.channels.items():
            # Messages under way to a replica that is gone reach the next replica on that worker.
            if sender not in listed:
                while len(messages) > self.rng.randint(0, 4):
                    messages.pop()
        self._lead()

    # ---- the law

    def _check(self) -> None:
        for replica in self.replicas:
            order = replica.order
            for step in range(order.base, order.committed):
                if self.official.setdefault(step, order[step]) != order[step]:
                    raise Lost(f"step {step} on {replica.worker} is committed, and another elsewhere")
        reached = len(self.official)
        for replica in self.replicas:
            order = replica.order
            if not replica.safe:
                continue
            if order.end < reached:
                raise Lost(f"{replica.worker} has {order.end} steps of {reached}")
            for step in range(order.base, reached):
                if order[step] != self.official[step]:
                    raise Lost(f"{replica.worker} has another step {step}")
            for step, entry in replica.past.items():
                if self.official.get(step, entry) != entry:
                    raise Lost(f"{replica.worker} has applied another step {step}")
