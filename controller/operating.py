"""What people and policies ask of a running query: its load, moves, more workers and fewer (DESIGN 6).

Whatever is impossible is a UsageError that says why, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from controller.apart import APART, Shared, closest
from controller.elastic import Drain, reads, too_few
from controller.events import Event
from controller.inputs import InputRows
from controller.load import Loads, Move, Suggestion
from controller.losing import Losing
from controller.moves import read_elsewhere
from controller.publishing import Tell
from controller.rounds import Rounds
from controller.wording import count, listed
from flux.errors import UsageError
from flux.plan import Plan
from partitioning.table import Table

#: Workers that a query may have, as in ``spark.flux.workers``.
WORKERS_MAX = 4096


class Operating(Losing):
    def __init__(self, plan: Plan, slots: int) -> None:
        super().__init__(plan, slots)
        self.rounds = Rounds(plan.settings)
        self.inputs = InputRows()
        self._room: tuple[int | None, str] = None, ""

    def allow(self, workers: int, why: str) -> None:
        """There is room for so many workers, and ``why`` not for more; renewed by whoever knows the task slots."""
        self._room = workers, why

    # ---- moves and load

    def loads(self) -> Loads:
        """What policies look at, from the newest reports; rates are those of the last seconds."""
        if self.table is None:
            return Loads({}, [])
        asked_for = {job.key for job in self.moving.jobs()}
        return self._loads.make(self.table, self.members, self.repairs.is_safe, self.repairs.under_way, asked_for)

    def suggest(self, policy: str, now: float) -> Suggestion:
        """What a policy would do now, all at once. UsageError if there is none of that name."""
        self._require_running("suggest moves")
        return self.rounds.plan(policy, self.loads(), now)

    def move(self, moves: Sequence[Move], why: str, now: float) -> list[Tell]:
        """Have replicas moved, one after the other in topological order. UsageError, and nothing is moved, if one of the
        moves is impossible. Asking again for a move under way changes nothing."""
        table = self._require_running("move partitions")
        problem = self.moving.check(moves, table, self.members)
        if problem is not None:
            raise UsageError(f"cannot move: {problem}")
        self.moving.add(moves, why)
        self._changed = True
        self._sweep(now)
        return self._take()

    def moves_pending(self) -> list[Move]:
        """Moves that were asked for and are not done, those under way first. A target of -1 is not chosen yet."""
        return [job.move for job in self.moving.jobs()]

    def _rebalance(self, now: float) -> None:
        """Ask the policy whose turn it is, and accept what can be done."""
        if self.table is None or not self.rounds.due(now):
            return
        calm = not self.repairs.under_way and all(job.waits for job in self.moving.jobs())
        notes = self.rounds.notes
        try:
            policy, moves = self.rounds.ask(self.loads(), now, calm)
        except Exception as error:
            # Policies may be anybody's; the query does not depend on them.
            self.rounds.on = False
            self._note(f"policy {self.rounds.name} failed and is not asked again: {type(error).__name__}: {error}", now)
            return
        self.rounds.refused = []
        for move in moves:
            problem = self.moving.check([move], self.table, self.members)
            if problem is None:
                self.moving.add([move], f"balance: {policy}")
                self._changed = True
            else:
                self.rounds.refused.append(problem)
        if self.rounds.evening_out and moves and len(self.rounds.refused) == len(moves):
            self.rounds.evened_out()  # as far as it goes: it would suggest the same for ever
        for note in self.rounds.notes:
            if note not in notes:
                self._note(note, now, "balance")

    def _rather(self, now: float) -> list[Move]:
        if not self.rounds.on:
            return []
        try:
            return self.rounds.plan("drain", self.loads(), now).moves
        except Exception as error:
            self._note(f"policy drain failed, copies are counted instead: {type(error).__name__}: {error}", now)
            return []

    # ---- more workers and fewer

    def drain(self, worker: int, now: float) -> list[Tell]:
        """Empty a worker and let it go: its replicas move away, others read its partitions of sources, and its task ends
        well. UsageError, and nothing changes, if the others could not hold all replicas."""
        return self.leave([worker], "asked for", now)

    def leave(self, workers: Sequence[int], why: str, now: float) -> list[Tell]:
        """``drain`` for several at once: nothing moves from one to the other."""
        table = self._require_running("drain a worker")
        for worker in workers:
            if worker not in self.members.workers:
                raise UsageError(
                    f"cannot drain: there is no worker {worker}; there are {listed(sorted(self.members.workers))}"
                )
        self._leave(workers, table, why, now)
        return self._take()

    def scale(self, workers: int, now: float) -> list[Tell]:
        """Have so many workers. More: see ``missing_slots``. Fewer: those in the highest slots are drained."""
        table = self._require_running("change the number of workers")
        if not 1 <= workers <= WORKERS_MAX:
            raise UsageError(f"cannot scale to {count(workers, 'worker')}: 1 to {WORKERS_MAX} are accepted")
        before = len(self.places.open)
        room, arithmetic = self._room
        if room is not None and workers > max(before, room):
            raise UsageError(f"cannot scale to {count(workers, 'worker')}: {arithmetic}")
        if workers < before:
            surplus = sorted(self.places.open, reverse=True)[: before - workers]
            gone = [self.members.in_slot(slot) for slot in surplus]
            self._leave(
                [member.node for member in gone if member is not None],
                table,
                f"scale to {count(workers, 'worker')}",
                now,
            )
            for slot in surplus:
                self.places.close(slot)  # also those that nobody has come for
        self.places.grow(workers)
        self.places.settle()
        if workers != before:
            self._note(f"from {before} to {count(workers, 'worker')}", now, "scale")
        return self._take()

    def replace(self, workers: Sequence[int], room: int, now: float) -> list[Tell]:
        """The executors of these workers go: others come in their place, as far as there is ``room`` for so many on
        executors that stay. To be repeated, room may come; ``scale`` says anew how many there shall be."""
        for worker in workers:
            member = self.members.workers.get(worker)
            if member is not None:
                self.places.owe(member.about.index)
        if self.phase == "running":
            for slot in self.places.replace(room):
                self._note(f"another worker in place of the one in slot {slot}, whose executor goes", now, "scale")
        return self._take()

    def missing_slots(self) -> list[int]:
        """Slots that are open and have neither a worker nor a task that will bring one, as far as there is room: start tasks
        for them, and say so with ``tasks_started``."""
        filled = {member.about.index for member in self.members.workers.values()}
        room = max(self._room[0] or 0, len(self.places.open))  # as many as are wanted were granted
        return self.places.missing(filled, room) if self.phase == "running" else []

    def tasks_started(self, slots: Sequence[int]) -> None:
        """Tasks for these slots are on their way; Spark starts them again if they die."""
        self.places.tasked |= set(slots)

    def fail(self, worker: int, now: float) -> list[Tell]:
        """Declare a worker lost, as if its connection had closed: a rehearsal."""
        self._require_running("fail a worker")
        member = self.members.workers.get(worker)
        if member is None:
            raise UsageError(
                f"cannot fail: there is no worker {worker}; there are {listed(sorted(self.members.workers))}"
            )
        self._give_up(member, "declared lost for a rehearsal", now)
        return self._take()

    def _note(self, text: str, now: float, kind: str = "warning") -> None:
        self.repairs.events.note(Event(kind, now, "", -1, -1, text))

    def _require_running(self, what: str) -> Table:
        if self.phase != "running" or self.table is None:
            raise UsageError(f"cannot {what}: the query is {self.phase}, and that needs one that is running")
        return self.table

    def _leave(self, workers: Sequence[int], table: Table, why: str, now: float) -> None:
        new = [worker for worker in workers if worker not in self.drains]
        if not new:
            return
        if not self.plan.settings.ordered:
            raise UsageError(
                "cannot drain: copies that do not keep one order (spark.flux.replicas.ordered) do not move"
            )
        problem = too_few(self.plan, self.members, [*self.drains, *new])
        if problem is not None:
            raise UsageError(f"cannot drain: {problem}")
        for worker in new:
            member = self.members.workers[worker]
            member.leaving = True
            self.places.close(member.about.index)
            self.drains[worker] = Drain(worker, member.about.index, why, now)
        for addition in list(self.repairs.under_way.values()):
            if addition.worker in new:
                self._abandon(addition, f"worker {addition.worker} is leaving", now, failed=False)
        assert self.table is not None
        if any(reads(self.table, worker) for worker in new):
            self._publish(read_elsewhere(self.table, new, self._readers(*new)))
        self._changed = True
        self._sweep(now)

    # ---- reports

    def copies_on(self) -> str:
        """What the copies of each partition are on: "different hosts", say. Empty where nothing has two."""
        most = None if self.table is None else closest(self.plan, self.table, self.members.spread())
        labelled = any(member.about.domain for member in self.members.workers.values())
        return "" if most is None else APART[most if labelled else max(most, Shared.DOMAIN)]

    def report(self) -> dict[str, Any]:
        """What ``lastProgress`` says about replicas, moves and workers that leave."""
        if self.table is None:
            return {}
        return {
            **self.repairs.report(self.table),
            **self.moving.report(),
            "copiesOn": self.copies_on(),
            "leaving": sorted(self.drains),
            "balance": {
                "on": self.rounds.on,
                "policy": self.rounds.name,
                "notes": self.rounds.notes,
                "refused": self.rounds.refused,
            },
        }
