"""What the controller knows of replicas beyond the table: which are safe, which are being added, what came of it.

A replica is safe when its primary has reported so (DESIGN 5, step 4): only a safe one may take over or allow another to
be dropped. Additions of moves are kept here too; what they are for is known in ``moving``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from controller.attempts import ASK_EVERY_MAX_S, ASK_EVERY_S, CONFIRM_MAX_S, COPIES_MAX, SAFE_MAX_S, Attempts
from controller.events import Event, History
from controller.membership import Member, Membership
from controller.sweep import Addition, Census, MayHold, Wanted, next_additions, under_replicated
from flux.control import ReplicaCaughtUp, ReplicaDiverged
from flux.plan import Plan
from flux.replica import BEHIND_MAX
from partitioning.table import ReplicaAt, Table

__all__ = ["ASK_EVERY_S", "DIVERGENCES_MAX", "Event", "Repairs"]

#: Times that one partition's replica is built anew after a divergence; an operator that is not deterministic would go on.
DIVERGENCES_MAX = 3
#: Copies that have agreed for so long, since there were enough of them again, are counted from nothing: what happens that
#: rarely is a fault of a machine rather than a habit of the operator, and must not end a query of months.
DIVERGENCE_CALM_S = 600.0


class Repairs:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.under_way: dict[tuple[int, int], Addition] = {}
        self.events = History()
        self.attempts = Attempts()
        self.done = 0
        self.take_overs = 0
        self._unsafe: set[tuple[int, int, int, int]] = set()  # stage, partition, worker, incarnation
        self._divergences: dict[tuple[int, int], tuple[int, float]] = {}  # how often, and when calm began
        self._behind: dict[tuple[int, int, int, int], tuple[int, int]] = {}  # life -> who says so, steps
        self._census = Census(plan)

    # ---- safety

    def is_safe(self, stage: int, partition: int, replica: ReplicaAt) -> bool:
        return replica.live and (stage, partition, replica.worker, replica.incarnation) not in self._unsafe

    # ---- additions

    def next(self, table: Table, members: Membership, now: float = math.inf) -> Wanted | None:
        """The next repair to begin. Partitions that rest after many attempts are passed over; with ``now`` left out,
        none is."""
        wanted = self._next(table, self.under_way.values(), members, now)
        return self._elsewhere(wanted[0], table, members) if wanted else None

    def waits(self, table: Table, members: Membership, now: float) -> bool:
        """Whether a repair is due that cannot begin only because of what is under way: in a stage before or after its
        own. What is due less must not keep it waiting by beginning, one after the other, without end."""
        return bool(self.under_way) and bool(self._next(table, (), members, now))

    def _next(self, table: Table, under_way: Iterable[Addition], members: Membership, now: float) -> list[Wanted]:
        at_once = self.plan.settings.repairs_at_once
        return next_additions(
            self.plan, table, under_way, at_once, self._may_hold(members), self._census, self.attempts.resting(now),
            members.spread(),
        )  # fmt: skip

    def _may_hold(self, members: Membership) -> MayHold:
        same_executor = self.plan.settings.same_executor

        def may_hold(worker: int, replicas: tuple[ReplicaAt, ...]) -> bool:
            return members.obstacle(worker, [replica.worker for replica in replicas], same_executor) is None

        return may_hold

    def _elsewhere(self, wanted: Wanted, table: Table, members: Membership) -> Wanted:
        """Where adding it there has failed before, the worker where that happened least often."""
        key = wanted.stage, wanted.partition
        failures = self.attempts.with_worker(key, wanted.worker)
        if not failures:
            return wanted
        may_hold, spread, replicas = self._may_hold(members), members.spread(), table.stages[key[0]][key[1]]
        others = [replica.worker for replica in replicas]

        def order(worker: int) -> tuple[int, int, bool, int]:
            failed = self.attempts.with_worker(key, worker)
            return failed, spread.shared(worker, others), worker != wanted.worker, worker

        fit = [worker for worker in table.endpoints if may_hold(worker, replicas)]
        return replace(wanted, worker=min(fit, key=order))

    def begin(self, wanted: Wanted, epoch: int, now: float) -> None:
        key = wanted.stage, wanted.partition
        self.under_way[key] = Addition(
            *key, wanted.worker, epoch, now, self.attempts.patience_s(key), why=wanted.why, source=wanted.source,
            since=now,
        )  # fmt: skip
        self._unsafe.add((*key, wanted.worker, epoch))

    def confirmed(self, epoch_of_all: int) -> Iterable[Addition]:
        return [a for a in self.under_way.values() if a.phase == "retain" and epoch_of_all >= a.incarnation]

    def to_ask(self, now: float) -> list[Addition]:
        due = [a for a in self.under_way.values() if a.phase == "copy" and now >= a.ask_at]
        for addition in due:
            addition.ask_at = now + addition.patience_s
            addition.patience_s = min(2 * addition.patience_s, ASK_EVERY_MAX_S)
            addition.asked += 1
        return due

    def overdue(self, now: float, behind: Callable[[int], str]) -> list[tuple[Addition, str]]:
        """Additions that have had the time of one attempt, and what they wait for. ``behind(epoch)``: names of the
        processes that do not go by that table yet."""
        late = []
        for addition in self.under_way.values():
            waited = now - addition.since
            if addition.phase == "retain" and waited > CONFIRM_MAX_S:
                why = f"{behind(addition.incarnation)} did not confirm its table within {waited:.0f} s"
                late.append((addition, why))
            elif addition.phase == "copy" and addition.asked >= COPIES_MAX and now >= addition.ask_at:
                late.append((addition, f"it does not follow after {addition.asked} copies of state in {waited:.0f} s"))
            elif addition.phase == "live" and waited > SAFE_MAX_S:
                late.append((addition, f"it is live, and still not safe after {waited:.0f} s"))
        return late

    def give_up(self, addition: Addition, why: str, now: float, failed: bool = True) -> None:
        """An attempt is over; the caller drops the replica. ``failed``: it counts, and is reported."""
        self.forget(addition)
        if not failed:
            return
        rest = self.attempts.failed(addition.key, addition.worker, now)
        self.note(
            "failed attempt", now, *addition.key, addition.worker, why, seconds=now - addition.started,
            stall_ms=addition.stall_ms, source=-1 if addition.source is None else addition.source,
        )  # fmt: skip
        if rest:
            text = f"no replica could be added, attempt after attempt; it is tried again in {rest:.0f} s"
            self.note("warning", now, *addition.key, -1, text)

    def forget(self, addition: Addition) -> None:
        self.under_way.pop(addition.key, None)
        self._unsafe.discard((*addition.key, addition.worker, addition.incarnation))

    def caught_up(self, message: ReplicaCaughtUp, now: float = 0.0) -> bool:
        """Whether the replica is to be made live now."""
        addition = self._meant(message)
        if addition is None or addition.phase != "copy":
            return False
        addition.enter("live", now)
        addition.stall_ms, addition.bytes = message.stall_ms, message.bytes
        return True

    def safe(self, message: ReplicaCaughtUp, now: float) -> Addition | None:
        """The addition that is complete with this; None: nothing new."""
        addition = self._meant(message)
        if addition is None or addition.phase != "live":
            return None
        self.forget(addition)
        self.attempts.succeeded(addition.key)
        if addition.key in self._divergences:
            self._divergences[addition.key] = self._divergences[addition.key][0], now
        return addition

    def note_repair(self, addition: Addition, now: float) -> None:
        self.done += 1
        self.note(
            "repair", now, *addition.key, addition.worker, addition.why, seconds=now - addition.started,
            stall_ms=addition.stall_ms, nbytes=addition.bytes,
        )  # fmt: skip

    def _meant(self, message: ReplicaCaughtUp) -> Addition | None:
        addition = self.under_way.get((message.stage, message.partition))
        same = addition is not None and (addition.worker, addition.incarnation) == (message.worker, message.incarnation)
        return addition if same else None

    # ---- losses

    def note_loss(self, member: Member, why: str, before: Table, after: Table, now: float) -> None:
        """A worker is out of the table: additions that need it are over, and survivors have taken over."""
        self.events.note(Event("loss", now, "", -1, member.node, why))
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
                    self.note("take-over", now, stage, partition, replicas[0].worker, why, source=member.node)
        listed = {
            (stage, partition, r.worker, r.incarnation)
            for stage, partitions in enumerate(after.stages)
            for partition, replicas in enumerate(partitions)
            for r in replicas
        }
        self._unsafe &= listed
        # A new primary speaks for itself.
        self._behind = {key: said for key, said in self._behind.items() if key in listed and said[0] != member.node}

    def note_divergence(self, message: ReplicaDiverged, table: Table, now: float) -> bool:
        """Whether the secondary is to be dropped."""
        key = message.stage, message.partition
        replicas = table.stages[message.stage][message.partition]
        meant = any((r.worker, r.incarnation) == (message.worker, message.incarnation) for r in replicas[1:])
        if not meant:
            return False
        times, calm_since = self._divergences.get(key, (0, now))
        self._divergences[key] = (1 if now - calm_since > DIVERGENCE_CALM_S else times + 1), now
        addition = self.under_way.get(key)
        if addition is not None and addition.worker == message.worker:
            del self.under_way[key]
        self._unsafe.discard((*key, message.worker, message.incarnation))
        self.note("divergence", now, *key, message.worker, f"other output for the steps before {message.step}")
        return True

    def note_behind(self, primary: int, reported: Iterable[Sequence[int]], table: Table, now: float) -> None:
        """What a worker's newest report says of the secondaries of its primaries. One that is far behind keeps its part, as it
        has the order, but a take-over would have to wait for it: it counts as no safe copy in reports."""
        found = {(stage, partition, worker, life): steps for stage, partition, worker, life, steps in reported}
        for key in [key for key, (said_by, _) in self._behind.items() if said_by == primary and key not in found]:
            del self._behind[key]
            if any((r.worker, r.incarnation) == key[2:] for r in table.stages[key[0]][key[1]]):
                self.note("caught up", now, *key[:3], "it had been far behind its primary")
        for key, steps in found.items():
            if key not in self._behind and steps <= BEHIND_MAX // 2:
                continue  # on its way there, perhaps
            if key not in self._behind:
                self.note(
                    "behind", now, *key[:3], f"{steps:,} steps behind its primary: a take-over would wait for them"
                )
            self._behind[key] = primary, steps

    def keeps_up(self, stage: int, partition: int, replica: ReplicaAt) -> bool:
        """Whether it is safe and could take over at once."""
        life = stage, partition, replica.worker, replica.incarnation
        return self.is_safe(stage, partition, replica) and life not in self._behind

    def too_divergent(self) -> tuple[int, int] | None:
        return next((key for key, (times, _) in self._divergences.items() if times > DIVERGENCES_MAX), None)

    # ---- reports

    def note(
        self, kind: str, now: float, stage: int, partition: int, worker: int, why: str,
        seconds: float = 0.0, stall_ms: float = 0.0, source: int = -1, nbytes: int = 0,
    ) -> None:  # fmt: skip
        name = self.plan.stages[stage].name
        self.events.note(
            Event(kind, now, name, partition, worker, why, round(seconds, 6), round(stall_ms, 3), source, nbytes)
        )

    @property
    def history(self) -> deque[Event]:
        return self.events.kept

    def news(self) -> list[Event]:
        """Events since the last call."""
        return self.events.news()

    def report(self, table: Table | None) -> dict[str, Any]:
        """What ``lastProgress`` says about replicas."""
        if table is None:
            return {}
        low = under_replicated(self.plan, table)
        stalls = [event.stall_ms for event in self.history if event.kind == "repair"]
        return {
            "underReplicated": [f"{self.plan.stages[stage].name}/{partition}" for stage, partition in low],
            "behind": [
                {"stage": self.plan.stages[key[0]].name, "partition": key[1], "worker": key[2], "steps": steps}
                for key, (_, steps) in self._behind.items()
            ],
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
                if a.source is None
            ],
            "stallMsMax": max(stalls, default=0.0),
            "recent": self.events.recent(),
        }
