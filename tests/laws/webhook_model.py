"""A model of gateways that own a webhook one after the other, and of a receiver that drops the numbers it knows.

Course and log of deliveries are those of the product; the disk is that of the event log's model. A gateway is killed, or rests
while another one takes over, and is awake again, between any two calls to the disk, and before and behind each attempt. An
attempt is lost, or taken without an answer.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass

from flux.gateway.webhooks.deliveries import DeliveryCourse, WebhookDelivery
from flux.gateway.webhooks.delivery_log import DeliveryLog
from flux.vault.directory_store import TakenOver
from tests.laws.event_log_model import LawBroken, VirtualDisk, VirtualStore


@dataclass(eq=False)
class WebhookOwner:
    """A gateway that makes the deliveries, or believes so."""

    log: DeliveryLog
    under_way: Generator[None, None, None]


class WebhookRun:
    """One run of the model. Result k of the query is the number k."""

    def __init__(
        self,
        seed: int,
        store: type[VirtualStore] = VirtualStore,
        log: type[DeliveryLog] = DeliveryLog,
        course: type[DeliveryCourse] = DeliveryCourse,
        plans_first: bool = True,
        looks: bool = True,
    ) -> None:
        self.rng = random.Random(seed)
        self.happened: Counter[str] = Counter()
        self._store, self._log, self._course = store, log, course
        #: True: a delivery is on disk before it is sent.
        self._plans_first = plans_first
        self.disk = VirtualDisk(self.rng)
        self.results = 0
        self.now = 1000.0
        self.owners: list[WebhookOwner] = []
        #: The receiver: its newest number, the results that it has taken, and the rows of each number.
        self.newest = 0
        self.taken: list[int] = []
        self.contents: dict[int, tuple[int, int]] = {}

    def go(self, turns: int = 400) -> None:
        for _ in range(turns):
            self.now += self.rng.random()
            self._turn()
        self._end()

    def _turn(self) -> None:
        dice = self.rng.random()
        if not self.owners or dice < 0.02:
            self._start()
        elif dice < 0.04:
            self.owners.remove(self.rng.choice(self.owners))
            self.happened["kill"] += 1
        elif dice < 0.045:
            self.owners.clear()
            self.disk.lose_power()
            self.happened["power lost"] += 1
        elif dice < 0.2:
            self.results += self.rng.randint(1, 3)
        else:
            self._step(self.owners[-1] if self.rng.random() < 0.7 else self.rng.choice(self.owners))

    def _start(self) -> None:
        if len(self.owners) < 3:
            log = self._log(self._store(self.disk), "the webhook")
            self.owners.append(WebhookOwner(log, self._work(log)))
            self.happened["take-over"] += len(self.owners) > 1

    def _step(self, owner: WebhookOwner) -> None:
        try:
            next(owner.under_way)
        except TakenOver:
            self.owners.remove(owner)
            self.happened["fenced"] += 1

    def _work(self, log: DeliveryLog) -> Generator[None, None, None]:
        """Work as ``WebhookPusher`` does."""
        yield from log.open()
        course = self._course("the output", (0,), 1e9, log.newest)
        self.happened["sent again by the next owner"] += course.pending is not None
        while True:
            if course.pending is None:
                if course.place[0] >= self.results:
                    log.check()
                    if course.newest is not None and log.newest != course.newest:
                        yield from log.note(course.newest, int(self.now * 1e6))
                    yield
                    continue
                behind = min(self.results, course.place[0] + self.rng.randint(1, 4))
                delivery = course.plan(course.place, (behind,))
                if self._plans_first:
                    yield from log.note(delivery, int(self.now * 1e6))
                course.planned(delivery)
            yield from self._send(log, course)

    def _send(self, log: DeliveryLog, course: DeliveryCourse) -> Generator[None, None, None]:
        while (pending := course.pending) is not None:
            log.check()
            yield
            fate = self.rng.random()
            if fate > 0.2:
                self._receive(pending)
            yield
            if fate > 0.4:
                course.taken()
            else:
                self.happened["attempt failed"] += 1
                course.failed("no answer", self.now)
        if not self._plans_first and course.newest is not None:
            yield from log.note(course.newest, int(self.now * 1e6))

    def _receive(self, delivery: WebhookDelivery) -> None:
        content = delivery.first[0], delivery.next[0]
        if self.contents.setdefault(delivery.number, content) != content:
            raise LawBroken(
                f"delivery {delivery.number} had results {self.contents[delivery.number]}, and has {content}"
            )
        if delivery.number <= self.newest:
            self.happened["dropped by the receiver"] += 1
            return
        if delivery.number != self.newest + 1:
            raise LawBroken(f"delivery {delivery.number} follows {self.newest}")
        self.newest = delivery.number
        self.taken += range(*content)

    def _end(self) -> None:
        """Let a last owner deliver all results."""
        log = self._log(self._store(self.disk), "the webhook")
        steps = self._work(log)
        for _ in range(100_000):
            if len(self.taken) >= self.results:
                break
            next(steps)
        if self.taken != list(range(self.results)):
            raise LawBroken(f"of {self.results} results the receiver has {self.taken}")
        self.happened["results"] += len(self.taken)
