"""Losses: who is given up, who takes over, and when nothing is left that could (DESIGN 4)."""

from __future__ import annotations

from controller.membership import Member
from controller.moves import without_worker
from controller.publishing import Tell
from controller.sweeping import Sweeping
from flux.control import InStep, NewTable
from flux.errors import QueryFailed
from flux.plan import Plan
from flux.pulse import Kind, Pulse


class Losing(Sweeping):
    def __init__(self, plan: Plan, slots: int) -> None:
        super().__init__(plan, slots)
        self._looked_at: float | None = None  # when silence was last looked for

    def on_closed(self, worker: int, now: float) -> list[Tell]:
        """The lifeline of a worker is closed: it is gone for certain."""
        member = self.members.workers.get(worker)
        if member is not None:
            self._lost(member, "its connection closed", now)
        return self._take()

    def on_reset(self, worker: int) -> list[Tell]:
        """The lifeline of a worker was reset, by its host or by something between: it is gone if it is silent as well."""
        member = self.members.workers.get(worker)
        if member is not None:
            member.cut = True
        return self._take()

    def on_pulse(self, worker: int, pulse: Pulse, now: float) -> list[Tell]:
        """The process of a worker is not stopped. Its loop, if it has not turned since the last pulse, is at something
        long and cannot send heartbeats. One that turns has to send them: the controller may be out of its reach."""
        member = self.members.workers.get(worker)
        if member is not None and self._exists(pulse.kind, pulse.what, pulse.partition):
            before, member.pulse, member.cut = member.pulse, pulse, False
            if pulse.busy and before is not None and before.turns == pulse.turns:
                member.heard = now
            else:
                member.turned = now
        return self._take()

    def _on_in_step(self, member: Member, message: InStep, now: float) -> None:
        """A sign of life like a pulse, also where there is no lifeline for pulses; the loop has not turned."""
        if self._exists(Kind.STEP, message.stage, message.partition):
            member.heard, member.in_step = now, message
            turns = -1 if member.pulse is None else member.pulse.turns
            member.pulse = Pulse(turns, Kind.STEP, message.stage, message.partition, message.step)

    def _exists(self, kind: int, what: int, partition: int) -> bool:
        """Whether a worker can be at this. What is heard may be forged, and a note may have been read half written."""
        if kind == Kind.STEP:
            return 0 <= what < len(self.plan.stages) and 0 <= partition < self.plan.stages[what].partitions
        if kind == Kind.READ:
            return 0 <= what < len(self.plan.sources) and 0 <= partition < (self.plan.sources[what].partitions or 0)
        return kind in (Kind.WAITS, Kind.TURNS)

    def _give_up(self, member: Member, why: str, now: float) -> None:
        """A worker that may live: should it, its task ends well, and another slot is open in its place. Spark bears only
        a few tasks that fail, and would count each false suspicion."""
        self._lost(member, why, now)
        if self.phase in ("running", "finished"):
            self._fence(member)

    def _fence(self, member: Member) -> None:
        """The table without it tells a worker that it was given up. Until it says that it ends, its task is there."""
        assert self.table is not None
        self.places.renew(member.about.index)
        self._sent_home[member.node] = member
        self._tell(member, NewTable(table=self.table, complete=self.complete))

    def _lost(self, member: Member, why: str, now: float) -> None:
        """Take a worker out of the table; survivors take over what it had."""
        del self.members.workers[member.node]
        self._loads.forget(member.node)
        drain = self.drains.pop(member.node, None)
        if self.table is None or self.phase == "ended":
            return
        readers = self._readers(member.node)
        table, orphans = without_worker(self.table, member.node, self.repairs.is_safe, readers)
        orphans = self._missed(orphans)
        if orphans:
            self._end(self._all_gone(member, orphans, why))
            return
        self.repairs.note_loss(member, why, self.table, table, now)
        if drain is not None:
            self._note_worker("drain", member, f"{drain.why}: it was lost before it was empty", now, now - drain.since)
        self.moving.reconcile(table, now)
        self._publish(table)
        self._sweep(now)

    def _missed(self, orphans: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Partitions without a safe copy that the query cannot do without: what has been handed on is no loss."""
        if self.phase != "finished":
            return orphans
        return [(stage, partition) for stage, partition in orphans if self.plan.stages[stage].collects]

    def _all_gone(self, member: Member, orphans: list[tuple[int, int]], why: str) -> QueryFailed:
        lost = [f"{self.plan.stages[stage].name}/{partition}" for stage, partition in orphans]
        named = ", ".join(lost[:8]) + (f" and {len(lost) - 8} more" if len(lost) > 8 else "")
        copies = sorted({self.plan.stages[stage].replicas for stage, _ in orphans})
        advice = (
            "Stages with replicas=1 do not survive the loss of a worker; replicas=2 does"
            if copies[0] == 1
            else f"More losses at once than replicas={copies[0]} survives; a higher number, or more executors, would have helped"
        )
        return QueryFailed(
            f"worker {member.node} (slot {member.about.index}, {member.about.host} pid {member.about.pid}) was lost "
            f"({why}), and with it the only safe copy of {named}. {advice}"
        )

    def _silent(self, now: float) -> None:
        """Give up workers that say nothing, unless one holds the last safe copy of something: it may only be slow."""
        settings = self.plan.settings
        asleep = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        if asleep > settings.heartbeat_timeout:
            # It was this process that stood still: what workers said meanwhile has not been read yet.
            for member in self.members.workers.values():
                member.heard = min(now, member.heard + asleep)  # a few reports may have been read first
                member.turned = min(now, member.turned + asleep)
        for member in list(self.members.workers.values()):
            if self.phase == "ended" or self.table is None:
                return
            quiet = now - member.heard
            busy = member.heard > member.turned and quiet <= settings.heartbeat_timeout
            if busy and now - member.turned > settings.step_timeout:
                self._give_up(member, self._too_long(member, now - member.turned), now)
            elif quiet > settings.heartbeat_timeout:
                _, orphans = without_worker(self.table, member.node, self.repairs.is_safe, [])
                if not self._missed(orphans) or member.cut or quiet > settings.heartbeat_last_timeout:
                    self._give_up(member, f"no heartbeat for {quiet * 1e3:.0f} ms", now)

    def _too_long(self, member: Member, seconds: float) -> str:
        """What a worker is at, whose loop has not turned for so long."""
        pulse, limit = member.pulse, f"for {seconds:.1f} s, longer than spark.flux.step.timeout"
        if pulse is not None and pulse.kind == Kind.READ:
            return f"source {self.plan.sources[pulse.what].name}, partition {pulse.partition} has given nothing {limit}"
        if pulse is None or pulse.kind != Kind.STEP:
            return f"its loop has stood still {limit}"
        where = f"stage {self.plan.stages[pulse.what].name}, partition {pulse.partition}, step {pulse.step}"
        known = member.in_step
        if known is None or (known.stage, known.partition, known.step) != (pulse.what, pulse.partition, pulse.step):
            return f"{where}: a call has run {limit}, and holds the interpreter lock, so its first row is not known"
        row = f"; first row of the step: {known.row}" if known.row else ""
        return f"{where}: {known.method}() has run {limit}{row}"

    def _readers(self, *without: int) -> list[int]:
        """Workers that may be given partitions of sources: rather those that stay."""
        assert self.table is not None
        others = [node for node in self.table.endpoints if node not in without]
        return [node for node in others if node not in self.drains] or others
