"""The sweep of a running query: repairs before moves, stage by stage, and workers that leave are emptied (DESIGN 5).

What is to be added next is decided by ``repairs`` and ``moving``; here it is entered into the table, step by step.
"""

from __future__ import annotations

from controller.elastic import Drain, Slots, held_by, reads
from controller.events import Event
from controller.load import Move
from controller.loads import LoadBook
from controller.membership import Member
from controller.moves import drop, make_live, read_elsewhere, retain, take_place, without_worker
from controller.moving import Moving
from controller.publishing import Publishing
from controller.repairs import Repairs
from controller.sweep import Addition, Wanted
from flux.control import CopyState, ReplicaCaughtUp, ReplicaDiverged, Stop
from flux.errors import QueryFailed
from flux.plan import Plan

#: How often the sweep looks for something to begin though nothing has changed: partitions rest for a time.
LOOK_EVERY_S = 0.25
#: A worker that takes so long to be emptied is worth a word.
DRAIN_TOLD_S = 30.0


class Sweeping(Publishing):
    def __init__(self, plan: Plan, slots: int) -> None:
        super().__init__(plan)
        self.places = Slots(slots)
        self.repairs = Repairs(plan)
        self.moving = Moving(plan, self.repairs)
        self.drains: dict[int, Drain] = {}
        self._loads = LoadBook(plan)
        self._dismissed: set[int] = set()  # workers that were emptied and told to go
        self._sent_home: dict[int, Member] = {}  # these, and those that were given up and may live
        self._look_at = 0.0
        self._apart_as_of = -1  # epoch of a table whose copies are as far apart as they can be

    def _sweep(self, now: float) -> None:
        if self.table is None or self.phase != "running":
            return
        self._confirm(now)
        for addition, why in self.repairs.overdue(now, self._behind):
            self._abandon(addition, why, now)
        if self._changed or now >= self._look_at:
            self._changed, self._look_at = False, now + LOOK_EVERY_S
            self._keep_apart(now)
            self._empty_leaving(now)
            self._spread_out(now)
            while (wanted := self._next(now)) is not None:
                self._begin(wanted, now)
        for addition in self.repairs.to_ask(now):
            primary = self.table.stages[addition.stage][addition.partition][0].worker
            order = CopyState(
                stage=addition.stage,
                partition=addition.partition,
                worker=addition.worker,
                incarnation=addition.incarnation,
            )
            self._tell(self.members.workers[primary], order)

    def _confirm(self, now: float) -> None:
        if not any(addition.phase == "retain" for addition in self.repairs.under_way.values()):
            return
        epoch_of_all = min((member.epoch for member in self.members.processes() if not member.left), default=-1)
        for addition in self.repairs.confirmed(epoch_of_all):
            addition.enter("copy", now)

    def _behind(self, epoch: int) -> str:
        late = [member for member in self.members.processes() if not member.left and member.epoch < epoch]
        names = [
            f"worker {m.node}" if m.about.role == "worker" else f"ingress task {m.about.index} of edges {m.about.edges}"
            for m in late
        ]
        return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")

    def _next(self, now: float) -> Wanted | None:
        assert self.table is not None
        repair = self.repairs.next(self.table, self.members, now)
        if repair is not None or any(addition.source is None for addition in self.repairs.under_way.values()):
            return repair
        if not self.moving.pending or self.repairs.waits(self.table, self.members, now):
            return None
        return self.moving.next(self.table, self.members, now)

    def _keep_apart(self, now: float) -> None:
        """A target replaces its source, and may share an executor or a host with it. Where another copy was lost meanwhile,
        it would stand beside the source instead, and the next loss of that executor take both: the repair goes elsewhere,
        first."""
        assert self.table is not None
        for key in list(self.moving.under_way):
            addition, replicas = self.repairs.under_way[key], self.table.stages[key[0]][key[1]]
            if self.moving.replaces_another(addition, replicas):
                others = [replica.worker for replica in replicas if replica.worker != addition.worker]
                obstacle = self.members.obstacle(addition.worker, others, self.plan.settings.same_executor)
                spread = self.members.spread()
                if obstacle is None and spread.shared(addition.worker, others) > spread.least(others):
                    obstacle = f"worker {addition.worker} is closer to its other copies than it need be"
                if obstacle is not None:
                    self._abandon(addition, f"another copy was lost meanwhile, and {obstacle}", now, failed=False)

    def _spread_out(self, now: float) -> None:
        """When nothing else is to be done: for safety, whether or not partitions move for balance."""
        assert self.table is not None
        busy = bool(self.moving) or bool(self.repairs.under_way) or not self.plan.settings.ordered
        if (
            not busy
            and self.table.epoch != self._apart_as_of
            and not self.moving.spread_out(self.table, self.members, now)
        ):
            self._apart_as_of = self.table.epoch

    def _begin(self, wanted: Wanted, now: float) -> None:
        assert self.table is not None
        if wanted.source is not None:
            self.moving.begin(wanted, self.table)
        self._publish(retain(self.table, wanted.stage, wanted.partition, wanted.worker))
        self.repairs.begin(wanted, self.table.epoch, now)

    def _abandon(self, addition: Addition, why: str, now: float, failed: bool = True) -> None:
        """An addition that does not come to its end: without its replica nobody waits for it, nor keeps rows for it."""
        assert self.table is not None
        self.repairs.give_up(addition, why, now, failed)
        if addition.source is not None:
            self.moving.failed(addition, why, now)
        self._publish(drop(self.table, addition.stage, addition.partition, addition.worker))

    # ---- what primaries report

    def _caught_up(self, message: ReplicaCaughtUp, now: float) -> None:
        if self.table is None:
            return
        if not message.safe:
            if self.repairs.caught_up(message, now):
                self._publish(make_live(self.table, message.stage, message.partition, message.worker))
            return
        addition = self.repairs.safe(message, now)
        if addition is not None:
            self._changed = True
            self._safe(addition, now)
        self._sweep(now)

    def _safe(self, addition: Addition, now: float) -> None:
        """A replica is complete: a move drops the one that it is to replace, if enough is left without that."""
        assert self.table is not None
        if addition.source is None or addition.key not in self.moving.under_way:
            self.repairs.note_repair(addition, now)
        elif self.moving.may_drop_source(addition, self.table):
            source = addition.source
            self.moving.finish(addition, now)
            self._publish(take_place(self.table, addition.stage, addition.partition, source, addition.worker))
        else:
            self.moving.finish_as_repair(addition, now)

    def _diverged(self, message: ReplicaDiverged, now: float) -> None:
        """The secondary is dropped; the sweep builds it anew from the primary."""
        if self.table is None or not self.repairs.note_divergence(message, self.table, now):
            return
        if (hopeless := self.repairs.too_divergent()) is not None:
            name = f"{self.plan.stages[hopeless[0]].name}/{hopeless[1]}"
            self._end(
                QueryFailed(f"the replicas of {name} keep giving different output: its operator is not deterministic")
            )
            return
        table = drop(self.table, message.stage, message.partition, message.worker)
        self.moving.reconcile(table, now)
        self._publish(table)
        self._sweep(now)

    # ---- workers that leave

    def _empty_leaving(self, now: float) -> None:
        """What is still on workers that leave is to move; who is empty is let go."""
        for drain in list(self.drains.values()):
            assert self.table is not None
            stay = [node for node in self.table.endpoints if node not in self.drains]
            if stay and reads(self.table, drain.worker):
                # Given back to it when all who stayed were lost; others have come since.
                self._publish(read_elsewhere(self.table, [drain.worker], stay))
            held = held_by(self.table, drain.worker)
            if held or reads(self.table, drain.worker):
                why = f"worker {drain.worker} leaves: {drain.why}"
                self.moving.empty(drain.worker, held, lambda: self._rather(now), why)
                if not drain.told and now > drain.since + DRAIN_TOLD_S:
                    drain.told = True
                    text = f"still holds {len(held)} replicas after {now - drain.since:.0f} s"
                    self._note_worker("warning", self.members.workers[drain.worker], text, now)
            else:
                self._dismiss(drain, now)

    def _rather(self, now: float) -> list[Move]:
        """Where a policy would have what is on workers that leave."""
        return []

    def _dismiss(self, drain: Drain, now: float) -> None:
        assert self.table is not None
        member = self.members.workers.pop(drain.worker)
        del self.drains[drain.worker]
        self._loads.forget(drain.worker)
        self._dismissed.add(drain.worker)
        table, orphans = without_worker(self.table, drain.worker, self.repairs.is_safe, [])
        assert not orphans, orphans
        self._note_worker("drain", member, drain.why, now, now - drain.since)
        self._publish(table)
        self._sent_home[member.node] = member
        self._tell(member, Stop(reason=f"worker {drain.worker} has left the query: {drain.why}"))

    def _note_worker(self, kind: str, member: Member, why: str, now: float, seconds: float = 0.0) -> None:
        self.repairs.events.note(Event(kind, now, "", -1, member.node, why, round(seconds, 6)))
