"""Moves that were asked for: which comes next, and what a loss half-way makes of them (DESIGN 5).

A move is AddReplica on the target and, once that is safe, DropReplica of the source, whose place the target takes. The
two halves are carried out by the sweep; here is only what they are for. Law: a move never leaves a partition with fewer
safe copies than it had (or than its stage asks for). Where a worker is lost half-way:

    target       the attempt is over; a move to "wherever there is room" begins again, one to a named worker is given up
    source       what was begun on the target goes on as the repair of the copy that is gone
    another      if it was the primary, the unfinished target is dropped (its copy may hold what the survivors order
                 otherwise), the partition is repaired first, and the move begins again; if it was a secondary, the target
                 takes the place of the lost copy instead of the source's; if it shares an executor with the source, it is
                 dropped, the partition is repaired elsewhere first, and the move begins again
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from controller.attempts import Key
from controller.load import Move
from controller.membership import Membership
from controller.repairs import Repairs
from controller.sweep import Addition, Wanted
from flux.plan import Plan
from partitioning.table import ReplicaAt, Table

#: Target of a move that may go to any worker: chosen when it begins.
ANYWHERE = -1
#: Times that a move begins before it is given up.
BEGIN_MAX = 3


@dataclass
class Job:
    """A move that was asked for. ``anywhere``: its target is chosen when it begins, ``prefer`` if that is possible then;
    ``begun``: how often it has; ``safe``: copies that the partition had when it last began; ``waits``: why it cannot
    begin."""

    move: Move
    why: str
    anywhere: bool = False
    prefer: int = ANYWHERE
    begun: int = 0
    safe: int = 0
    waits: str = ""

    @property
    def key(self) -> Key:
        return self.move.stage, self.move.partition


class Moving:
    def __init__(self, plan: Plan, repairs: Repairs) -> None:
        self.plan = plan
        self.pending: list[Job] = []  # by stage, then as they were asked for
        self.under_way: dict[Key, Job] = {}
        self.done = 0
        self._repairs = repairs
        self._rests_until = 0.0  # what was copied last has used up the bytes per second

    def __bool__(self) -> bool:
        return bool(self.pending or self.under_way)

    def jobs(self) -> list[Job]:
        return [*self.under_way.values(), *self.pending]

    # ---- asking

    def problem(self, move: Move, table: Table, members: Membership) -> str | None:
        """Why this move cannot be made as the table is; None: it can."""
        stages = self.plan.stages
        if not 0 <= move.stage < len(stages):
            names = ", ".join(f"{stage.id} ({stage.name})" for stage in stages)
            return f"there is no stage {move.stage}; there are {names}"
        stage = stages[move.stage]
        if not 0 <= move.partition < stage.partitions:
            return f"stage {stage.name} has no partition {move.partition}; it has 0 to {stage.partitions - 1}"
        name = f"{stage.name}/{move.partition}"
        if not self.plan.settings.ordered:
            return f"{name}: copies that do not keep one order (spark.flux.replicas.ordered=false) cannot be moved"
        holders = [replica.worker for replica in table.stages[move.stage][move.partition]]
        if move.source not in holders:
            held = ", ".join(map(str, holders))
            return f"{name} is not on worker {move.source}; it is on {held}"
        if move.target in (ANYWHERE, move.source):
            return f"{name} would stay where it is" if move.target == move.source else None
        others = [worker for worker in holders if worker != move.source]
        obstacle = members.obstacle(move.target, others, self.plan.settings.same_executor)
        return None if obstacle is None else f"{name}: {obstacle}"

    def check(self, moves: Iterable[Move], table: Table, members: Membership) -> str | None:
        """What is wrong with moves that somebody asks for; None: nothing."""
        known = {_from(job.move): job for job in self.jobs()}
        for move in moves:
            job = known.get(_from(move))
            if job is None or job.move.target == ANYWHERE:
                problem = self.problem(move, table, members)
                if problem is not None:
                    return problem
            elif job.move.target != move.target:
                name = f"{self.plan.stages[move.stage].name}/{move.partition}"
                return f"{name} is moving from worker {move.source} to worker {job.move.target} already: {job.why}"
        return None

    def empty(self, worker: int, held: Iterable[Key], prefer: Callable[[], Iterable[Move]], why: str) -> None:
        """Everything that a worker holds goes wherever there is room. ``prefer``: rather like this, if anything is new."""
        known = {_from(job.move) for job in self.jobs()}
        new = [key for key in held if (*key, worker) not in known]
        if not new:
            return
        targets = {_from(move): move.target for move in prefer()}
        for key in new:
            self.pending.append(Job(Move(*key, worker, ANYWHERE), why, True, targets.get((*key, worker), ANYWHERE)))
        self.pending.sort(key=lambda job: job.move.stage)

    def add(self, moves: Iterable[Move], why: str) -> None:
        """Moves that were asked for already are not asked for twice."""
        known = {_from(job.move): job for job in self.jobs()}
        for move in moves:
            job = known.get(_from(move))
            if job is None:
                job = known[_from(move)] = Job(move, why, anywhere=move.target == ANYWHERE)
                self.pending.append(job)
            elif job.anywhere and move.target != ANYWHERE and job in self.pending:
                job.move, job.why, job.anywhere = move, why, False  # somebody knows where to
        self.pending.sort(key=lambda job: job.move.stage)

    def clear(self, why: str, now: float) -> None:
        """Nothing is moved any more."""
        for job in self.jobs():
            self._given_up(job, why, now)
        self.pending.clear()
        self.under_way.clear()

    def spread_out(self, table: Table, members: Membership, now: float) -> bool:
        """Copies that share more than they need to, as workers have joined since they were placed, are to move apart.
        False: there are none."""
        spread, loads, moves = members.spread(), copies_by_worker(table), []
        resting = self._repairs.attempts.resting(now)
        for stage in self.plan.stages:
            for partition, replicas in enumerate(table.stages[stage.id]):
                key = stage.id, partition
                too_close = spread.too_close(replicas) if len(replicas) == stage.replicas > 1 else None
                if too_close is None or key in resting or self._safe(key, replicas) < len(replicas):
                    continue
                source, least = too_close
                others = [replica.worker for replica in replicas if replica.worker != source]
                fit = [worker for worker in spread.open_to if spread.shared(worker, others) == least]
                target = min(fit, key=lambda worker: (loads.get(worker, 0), worker))
                loads[target] = loads.get(target, 0) + 1
                moves.append(Move(*key, source, target))
        self.add(moves, "its copies were closer to each other than they need to be")
        return bool(moves)

    # ---- the next to begin

    def next(self, table: Table, members: Membership, now: float) -> Wanted | None:
        """The caller has seen to it that no repair is due."""
        busy = self._repairs.under_way
        if len(busy) >= self.plan.settings.repairs_at_once:
            return None
        resting = self._repairs.attempts.resting(now)
        loads: dict[int, int] | None = None
        for job in list(self.pending):
            if any(stage != job.move.stage for stage, _ in busy):
                return None  # in topological order
            if job.key in busy or job.key in resting:
                continue
            if now < self._rests_until and job.move.source not in members.leaving:
                rate = self.plan.settings.balance_max_bytes_per_second
                job.waits = f"moves may copy {rate:,} bytes per second (spark.flux.balance.maxBytesPerSecond)"
                continue
            problem = self.problem(job.move, table, members)
            if problem is not None and self._leaves(job, table, members):
                job.move, job.anywhere = replace(job.move, target=ANYWHERE), True
            elif problem is not None:
                self.pending.remove(job)
                self._given_up(job, problem, now)
                continue
            if job.anywhere:
                loads = loads or copies_by_worker(table)
                target = self._choose(job, table, members, loads)
                if target is None:
                    job.waits = "no other worker may hold a copy of it"
                    continue
                job.move = replace(job.move, target=target)
            return Wanted(*job.key, job.move.target, job.move.source, job.why)
        return None

    def _leaves(self, job: Job, table: Table, members: Membership) -> bool:
        """Whether its source is to be emptied in any case. Given up, the move would be asked for again at once, behind what
        has begun in its place meanwhile."""
        anywhere = replace(job.move, target=ANYWHERE)
        return job.move.source in members.leaving and self.problem(anywhere, table, members) is None

    def _choose(self, job: Job, table: Table, members: Membership, loads: Mapping[int, int]) -> int | None:
        """Of the workers where it has failed least often, and of these that are farthest from the other copies: the one
        that is preferred, or has the fewest copies."""
        same_executor = self.plan.settings.same_executor
        holders = [replica.worker for replica in table.stages[job.key[0]][job.key[1]]]
        others = [worker for worker in holders if worker != job.move.source]
        fit = [
            worker
            for worker in members.workers
            if worker not in holders and members.obstacle(worker, others, same_executor) is None
        ]
        failed, spread = self._repairs.attempts.with_worker, members.spread()

        def order(worker: int) -> tuple[int, int, bool, int, int]:
            shares = spread.shared(worker, others)
            return failed(job.key, worker), shares, worker != job.prefer, loads.get(worker, 0), worker

        return min(fit, key=order, default=None)

    def begin(self, wanted: Wanted, table: Table) -> None:
        """``table`` before the target is listed."""
        key = wanted.stage, wanted.partition
        job = next(job for job in self.pending if job.key == key and job.move.source == wanted.source)
        self.pending.remove(job)
        self.under_way[key] = job
        job.begun += 1
        job.waits = ""
        job.safe = self._safe(key, table.stages[key[0]][key[1]])

    def _safe(self, key: Key, replicas: Iterable[ReplicaAt]) -> int:
        return sum(self._repairs.is_safe(*key, replica) for replica in replicas)

    # ---- the second half

    def may_drop_source(self, addition: Addition, table: Table) -> bool:
        """The target is safe: whether enough is left without the source."""
        job = self.under_way[addition.key]
        left = [r for r in table.stages[addition.stage][addition.partition] if r.worker != job.move.source]
        safe = self._safe(addition.key, left)
        return safe == len(left) and safe >= min(job.safe, self.plan.stages[addition.stage].replicas)

    def replaces_another(self, addition: Addition, replicas: Iterable[ReplicaAt]) -> bool:
        """Whether a copy beside the source was lost since the move began: the target is to take the place of that one."""
        others = sum(replica.worker != addition.worker for replica in replicas)
        return others < min(self.under_way[addition.key].safe, self.plan.stages[addition.stage].replicas)

    def finish(self, addition: Addition, now: float) -> None:
        """The source is dropped."""
        job = self.under_way.pop(addition.key)
        self.done += 1
        rate = self.plan.settings.balance_max_bytes_per_second
        self._rests_until = max(self._rests_until, addition.started) + addition.bytes / rate
        self._repairs.note(
            "move", now, *addition.key, addition.worker, job.why, seconds=now - addition.started,
            stall_ms=addition.stall_ms, source=job.move.source, nbytes=addition.bytes,
        )  # fmt: skip

    def finish_as_repair(self, addition: Addition, now: float) -> None:
        """Another copy was lost meanwhile: the target replaces that one, and the source stays."""
        job = self.under_way.pop(addition.key)
        addition.why = "a copy was lost while another one moved"
        self._repairs.note_repair(addition, now)
        self._again(job, "another copy was lost meanwhile, and the new one takes its place", now)

    # ---- what losses make of it

    def reconcile(self, table: Table, now: float) -> None:
        """After every change of the table that was not one of ours."""
        for key, job in list(self.under_way.items()):
            addition = self._repairs.under_way.get(key)
            listed = any(replica.worker == job.move.source for replica in table.stages[key[0]][key[1]])
            if addition is None:
                del self.under_way[key]
                if listed:
                    self._again(job, "what was begun was lost", now)
                else:
                    self._given_up(job, f"worker {job.move.source} has lost its copy, which is repaired", now)
            elif not listed:
                del self.under_way[key]
                addition.source, addition.why = None, f"worker {job.move.source} lost the copy that was moving"
                text = f"worker {job.move.source} has lost its copy; the one on worker {addition.worker} replaces it"
                self._given_up(job, text, now)

    def failed(self, addition: Addition, why: str, now: float) -> None:
        """The attempt is over, and its replica dropped."""
        self._again(self.under_way.pop(addition.key), why, now)

    def _again(self, job: Job, why: str, now: float) -> None:
        """Asked for once more, unless that has been often enough. Whether it is still possible shows when it begins."""
        if job.begun >= BEGIN_MAX and not job.anywhere:
            self._given_up(job, f"{why}; that was attempt {job.begun}", now)
            return
        if job.anywhere:
            job.move = replace(job.move, target=ANYWHERE)
        self.pending.append(job)
        self.pending.sort(key=lambda each: each.move.stage)

    def _given_up(self, job: Job, why: str, now: float) -> None:
        text = f"{why} ({job.why})"
        self._repairs.note("move given up", now, *job.key, job.move.target, text, source=job.move.source)

    # ---- reports

    def report(self) -> dict[str, Any]:
        phases = {key: addition.phase for key, addition in self._repairs.under_way.items()}
        return {
            "movesDone": self.done,
            "movesUnderWay": [
                {
                    "stage": self.plan.stages[job.move.stage].name,
                    "partition": job.move.partition,
                    "source": job.move.source,
                    "target": job.move.target,
                    "phase": phases.get(job.key, ""),
                    "why": job.why,
                }
                for job in self.under_way.values()
            ],
            "movesPending": len(self.pending),
            "movesWaiting": sorted({job.waits for job in self.pending if job.waits}),
        }


def copies_by_worker(table: Table) -> dict[int, int]:
    copies = dict.fromkeys(table.endpoints, 0)
    for partitions in table.stages:
        for replicas in partitions:
            for replica in replicas:
                copies[replica.worker] = copies.get(replica.worker, 0) + 1
    return copies


def _from(move: Move) -> tuple[int, int, int]:
    return move.stage, move.partition, move.source
