"""What the controller knows of replicas beyond the table: which are safe, which are being added, what happened.

A replica is safe when its primary has reported so (DESIGN 5, step 4): only a safe one may take over or allow another to
be dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from controller.membership import Member, Membership
from controller.sweep import Addition, Census, Wanted, next_additions, under_replicated
from flux.control import ReplicaCaughtUp, ReplicaDiverged
from flux.plan import Plan
from partitioning.table import ReplicaAt, Table

#: After how long a copy is ordered again; doubled each time until the new replica follows, because a large state
#: takes its time and every copy holds up the primary.
ASK_EVERY_S = 1.0
ASK_EVERY_MAX_S = 30.0
#: Events kept for ``lastProgress`` and the history.
HISTORY_KEPT = 1000
#: Times that one partition's replica is built anew after a divergence; an operator that is not deterministic would go on.
DIVERGENCES_MAX = 3


@dataclass(frozen=True)
class Event:
    """Something that happened to replicas: a "take-over", a "repair" or a "divergence"."""

    kind: str
    at: float
    stage: str
    partition: int
    worker: int
    why: str
    seconds: float = 0.0
    stall_ms: float = 0.0

    def __str__(self) -> str:
        text = f"{self.kind} of {self.stage}/{self.partition} on worker {self.worker}: {self.why}"
        return f"{text}; took {self.seconds:.3f} s, stall {self.stall_ms:.1f} ms" if self.seconds else text


class Repairs:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.under_way: dict[tuple[int, int], Addition] = {}
        self.history: deque[Event] = deque(maxlen=HISTORY_KEPT)
        self.done = 0
        self.take_overs = 0
        self._unsafe: set[tuple[int, int, int, int]] = set()  # stage, partition, worker, incarnation
        self._divergences: dict[tuple[int, int], int] = {}
        self._news: list[Event] = []
        self._census = Census(plan)

    # ---- safety

    def is_safe(self, stage: int, partition: int, replica: ReplicaAt) -> bool:
        return replica.live and (stage, partition, replica.worker, replica.incarnation) not in self._unsafe

    # ---- additions

    def next(self, table: Table, members: Membership) -> Wanted | None:
        def may_hold(worker: int, replicas: tuple[ReplicaAt, ...]) -> bool:
            if worker not in members.workers or any(replica.worker == worker for replica in replicas):
                return False
            executors = {members.workers[r.worker].about.executor for r in replicas if r.worker in members.workers}
            return self.plan.settings.same_executor or members.workers[worker].about.executor not in executors

        at_once = self.plan.settings.repairs_at_once
        wanted = next_additions(self.plan, table, self.under_way.values(), at_once, may_hold, self._census)
        return wanted[0] if wanted else None

    def begin(self, wanted: Wanted, epoch: int, now: float) -> None:
        addition = Addition(wanted.stage, wanted.partition, wanted.worker, epoch, now, ASK_EVERY_S)
        self.under_way[wanted.stage, wanted.partition] = addition
        self._unsafe.add((wanted.stage, wanted.partition, wanted.worker, epoch))

    def confirmed(self, epoch_of_all: int) -> Iterable[Addition]:
        return [a for a in self.under_way.values() if a.phase == "retain" and epoch_of_all >= a.incarnation]

    def to_ask(self, now: float) -> list[Addition]:
        due = [a for a in self.under_way.values() if a.phase == "copy" and now >= a.ask_at]
        for addition in due:
            addition.ask_at = now + addition.patience_s
            addition.patience_s = min(2 * addition.patience_s, ASK_EVERY_MAX_S)
        return due

    def caught_up(self, message: ReplicaCaughtUp) -> bool:
        """Whether the replica is to be made live now."""
        addition = self._meant(message)
        if addition is None or addition.phase != "copy":
            return False
        addition.phase = "live"
        addition.stall_ms = message.stall_ms
        return True

    def safe(self, message: ReplicaCaughtUp, now: float) -> None:
        addition = self._meant(message)
        if addition is None or addition.phase != "live":
            return
        del self.under_way[addition.stage, addition.partition]
        self._unsafe.discard((addition.stage, addition.partition, addition.worker, addition.incarnation))
        self.done += 1
        self._note(
            "repair", now, addition.stage, addition.partition, addition.worker, addition.why,
            seconds=now - addition.started, stall_ms=addition.stall_ms,
        )  # fmt: skip

    def _meant(self, message: ReplicaCaughtUp) -> Addition | None:
        addition = self.under_way.get((message.stage, message.partition))
        same = addition is not None and (addition.worker, addition.incarnation) == (message.worker, message.incarnation)
        return addition if same else None

    # ---- losses

    def note_loss(self, member: Member, why: str, before: Table, after: Table, now: float) -> None:
        """A worker is out of the table: additions that need it are over, and survivors have taken over."""
        for stage, partitions in enumerate(after.stages):
            for partition, replicas in enumerate(partitions):
                addition = self.under_way.get((stage, partition))
                if addition is not None and all(
                    (r.worker, r.incarnation) != (addition.worker, addition.incarnation) for r in replicas
                ):
                    del self.under_way[stage, partition]
                old = before.stages[stage][partition]
                if old and replicas and old[0].worker == member.node:
                    self.take_overs += 1
                    self._note("take-over", now, stage, partition, replicas[0].worker, why)
        listed = {
            (stage, partition, r.worker, r.incarnation)
            for stage, partitions in enumerate(after.stages)
            for partition, replicas in enumerate(partitions)
            for r in replicas
        }
        self._unsafe &= listed

    def note_divergence(self, message: ReplicaDiverged, table: Table, now: float) -> bool:
        """Whether the secondary is to be dropped."""
        key = message.stage, message.partition
        replicas = table.stages[message.stage][message.partition]
        meant = any((r.worker, r.incarnation) == (message.worker, message.incarnation) for r in replicas[1:])
        if not meant:
            return False
        self._divergences[key] = self._divergences.get(key, 0) + 1
        addition = self.under_way.get(key)
        if addition is not None and addition.worker == message.worker:
            del self.under_way[key]
        self._unsafe.discard((*key, message.worker, message.incarnation))
        self._note("divergence", now, *key, message.worker, f"other output for the steps before {message.step}")
        return True

    def too_divergent(self) -> tuple[int, int] | None:
        return next((key for key, times in self._divergences.items() if times > DIVERGENCES_MAX), None)

    # ---- reports

    def _note(
        self, kind: str, now: float, stage: int, partition: int, worker: int, why: str,
        seconds: float = 0.0, stall_ms: float = 0.0,
    ) -> None:  # fmt: skip
        name = self.plan.stages[stage].name
        event = Event(kind, now, name, partition, worker, why, round(seconds, 6), round(stall_ms, 3))
        self.history.append(event)
        self._news.append(event)

    def news(self) -> list[Event]:
        """Events since the last call."""
        news, self._news = self._news, []
        return news

    def report(self, table: Table | None) -> dict[str, Any]:
        """What ``lastProgress`` says about replicas."""
        if table is None:
            return {}
        low = under_replicated(self.plan, table)
        stalls = [event.stall_ms for event in self.history if event.kind == "repair"]
        return {
            "underReplicated": [f"{self.plan.stages[stage].name}/{partition}" for stage, partition in low],
            "takeOvers": self.take_overs,
            "repairsDone": self.done,
            "repairsUnderWay": [
                {
                    "stage": self.plan.stages[a.stage].name,
                    "partition": a.partition,
                    "worker": a.worker,
                    "phase": a.phase,
                }
                for a in self.under_way.values()
            ],
            "stallMsMax": max(stalls, default=0.0),
            "recent": [asdict(event) for event in list(self.history)[-20:]],
        }
