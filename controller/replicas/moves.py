"""The queue of moves: its order, and the fate of a move when a worker is lost half-way (design: move, move-keeps-copies)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from functools import cached_property
from typing import Any, NamedTuple

from controller.replicas.addition_tracker import AdditionTracker
from controller.replicas.additions import Addition, Moment, WantedAddition
from controller.replicas.kinds import may_lead, wanted
from controller.replicas.placement import Placement
from controller.replicas.replica_safety import ReplicaStanding
from controller.report.events import Event
from flux.dataflow.plan import Plan
from flux.wire.control import TableChanged
from partitioning.ids import PartitionKey
from partitioning.table import ReplicaAt, Table


class Holding(NamedTuple):
    """One replica of a partition, by its worker."""

    stage: int
    partition: int
    worker: int


@dataclass(frozen=True, slots=True)
class Move:
    """Suggestion to move the replica on ``from_worker`` to ``target``. It stands with the queue that takes it over; policies of
    users import it from ``controller.balance.load``, beside the loads by which they suggest moves."""

    stage: int
    partition: int
    #: The worker of the replica that moves, and the worker that gets it.
    from_worker: int
    target: int
    #: Fall of the higher of the two workers' loads.
    gain: float = 0.0
    #: Bytes of state to copy: ``ReplicaLoad.state_bytes``.
    cost: int = 0

    @property
    def key(self) -> PartitionKey:
        return PartitionKey(self.stage, self.partition)

    @property
    def moved(self) -> Holding:
        """The replica that moves."""
        return Holding(self.stage, self.partition, self.from_worker)


class MovePhase(StrEnum):
    """The phases of a move.

        WAITING --begun--> UNDER_WAY --source dropped--> DONE
        UNDER_WAY --interrupted--> WAITING
        WAITING, UNDER_WAY --given up--> GIVEN_UP

    Law: every move ends as DONE or GIVEN_UP, each with an event in the history. A move to a named worker begins at most
    ``BEGIN_MAX`` times."""

    #: In the queue, for the first time or again.
    WAITING = "waiting"
    #: An addition on its target is under way.
    UNDER_WAY = "under way"
    DONE = "done"
    GIVEN_UP = "given up"


class MoveEvent(Enum):
    """The events of a move."""

    BEGUN = "the target is in the table"
    SOURCE_DROPPED = "the target has taken the place of the source"
    INTERRUPTED = "its addition has failed, or its target has replaced another replica that was lost"
    GIVEN_UP = "it cannot be done any more, or has failed too often"


@dataclass(frozen=True, slots=True)
class MoveStep:
    """A step from one phase to the next: the phase that follows, and the message that goes out with it."""

    #: The next phase.
    to: MovePhase
    #: The message that goes out with it, if any.
    tells: type | None = None
    #: The kind of its event in the history; empty: it has none.
    event: str = ""


STEPS: dict[tuple[MovePhase, MoveEvent], MoveStep] = {
    (MovePhase.WAITING, MoveEvent.BEGUN): MoveStep(MovePhase.UNDER_WAY, TableChanged),
    (MovePhase.UNDER_WAY, MoveEvent.SOURCE_DROPPED): MoveStep(MovePhase.DONE, TableChanged, "move"),
    (MovePhase.UNDER_WAY, MoveEvent.INTERRUPTED): MoveStep(MovePhase.WAITING),
    (MovePhase.UNDER_WAY, MoveEvent.GIVEN_UP): MoveStep(MovePhase.GIVEN_UP, event="move given up"),
    (MovePhase.WAITING, MoveEvent.GIVEN_UP): MoveStep(MovePhase.GIVEN_UP, event="move given up"),
}


def after(phase: MovePhase, event: MoveEvent) -> MoveStep:
    """Return the step that follows."""
    assert (phase, event) in STEPS, f"{event.name} of a move in phase {phase}"
    return STEPS[phase, event]


#: The target of a move that may go to any worker. The worker is chosen when the move begins.
ANYWHERE = -1
#: Reason why a move to any worker cannot begin. If its source is a worker that leaves, it waits until another worker has joined.
NO_PLACE = "no other worker may hold a replica of it"
#: A move to a named worker is given up when it has begun this number of times.
BEGIN_MAX = 3


@dataclass
class MoveJob:
    """A move in the queue or under way."""

    move: Move
    why: str
    #: The target is chosen when the move begins.
    anywhere: bool = False
    #: The target then, if possible.
    prefer: int = ANYWHERE
    #: Number of times that it has begun.
    begun: int = 0
    #: Replicas of its kind that had arrived when it last began.
    whole: int = 0
    #: Replicas that could take over at once at that time.
    keeping_up: int = 0
    #: Reason why it cannot begin.
    waits: str = ""
    phase: MovePhase = MovePhase.WAITING
    #: The number of the first request that it belongs to.
    request: int = 0
    #: Its last event.
    ended: Event | None = None
    #: The move, the replicas and the placement for which it was found possible. It is as long as these are the same objects.
    found: tuple[Move, tuple[ReplicaAt, ...], Placement] | None = None

    @property
    def key(self) -> PartitionKey:
        return self.move.key

    def on(self, event: MoveEvent) -> MoveStep:
        step = after(self.phase, event)
        self.phase = step.to
        return step

    def is_found(self, table: Table, placement: Placement) -> bool:
        """Tell whether the move was found possible by all that is as it was then."""
        if self.found is None:
            return False
        move, replicas, where = self.found
        same = replicas is table.stages[move.stage][move.partition] and where is placement
        return same and move is self.move

    def begin(self, standing: ReplicaStanding, kind: str) -> None:
        """Note that the move begins, of a replica of this kind. ``standing`` is that of its partition without the target."""
        self.on(MoveEvent.BEGUN)
        self.begun += 1
        self.waits = ""
        self.whole = sum(replica.kind == kind for replica in standing.arrived)
        self.keeping_up = len(standing.keeping_up)


class MovesAsked(NamedTuple):
    """The answer to moves that were asked for: their jobs, or the reason why one of them is impossible."""

    jobs: list[MoveJob]
    problem: str | None = None


class MoveQueue:
    """All moves of a query, in the queue and under way. It is false while there are none.

    A move is AddReplica on the target and, once the new replica is safe, DropReplica of the source, whose place the target
    takes. The sweep carries out both halves; the queue knows which move they belong to. Law: a move never leaves a
    partition with fewer safe replicas than before (or than its stage wants). If a worker is lost half-way:

        target       the attempt is over; a move to any worker begins again, a move to a named worker is given up
        source       the addition on the target goes on, as the repair of the lost replica
        primary      (when a secondary moves) the unfinished target is dropped, because its copy may hold steps that the
                     survivors order differently; the partition is repaired first, and then the move begins again
        secondary    (another one) the target takes the place of the lost replica, and the source stays; but if source and
                     target share an executor, the target is dropped, the partition is repaired elsewhere, and the move
                     begins again"""

    def __init__(self, repairs: AdditionTracker) -> None:
        self.pending: list[MoveJob] = []  # by stage, then in the order of the requests
        self.under_way: dict[PartitionKey, MoveJob] = {}
        self.done = 0
        self._repairs = repairs
        self._rests_until = 0.0  # until then the last copies have used up the bytes per second

    def __bool__(self) -> bool:
        return bool(self.pending or self.under_way)

    @property
    def plan(self) -> Plan:
        """The newest plan, with the numbers and kinds of replicas that are wished now."""
        return self._repairs.wishes.plan

    def jobs(self) -> list[MoveJob]:
        return [*self.under_way.values(), *self.pending]

    # ---- asking

    def problem(self, move: Move, table: Table, placement: Placement) -> str | None:
        """Return the reason why this move is impossible with this table; None: it is possible."""
        stages = self.plan.stages
        if move.stage not in stages:
            names = ", ".join(f"{stage.id} ({stage.name})" for stage in stages)
            return f"there is no stage {move.stage}; there are {names}"
        stage = stages[move.stage]
        if not 0 <= move.partition < stage.partitions:
            return f"stage {stage.name} has no partition {move.partition}; it has 0 to {stage.partitions - 1}"
        name = f"{stage.name}/{move.partition}"
        if not self.plan.settings.ordered:
            return f"{name}: replicas that do not keep one order (spark.flux.replicas.ordered=false) cannot be moved"
        holders = [replica.worker for replica in table.stages[move.stage][move.partition]]
        if move.from_worker not in holders:
            held = ", ".join(map(str, holders))
            return f"{name} is not on worker {move.from_worker}; it is on {held}"
        if move.target in (ANYWHERE, move.from_worker):
            return f"{name} would stay where it is" if move.target == move.from_worker else None
        others = [worker for worker in holders if worker != move.from_worker]
        obstacle = placement.obstacle(move.target, others)
        if obstacle is None:
            obstacle = placement.too_close(move.key, move.from_worker, move.target, others)
        return None if obstacle is None else f"{name}: {obstacle}"

    def ask(self, moves: Sequence[Move], why: str, table: Table, placement: Placement, request: int = 0) -> MovesAsked:
        """Put moves into the queue, all or none: none if one of them is impossible, given the table and the moves in the queue. A
        move that is in the queue already is not added again."""
        known = {job.move.moved: job for job in self.jobs()}
        for move in moves:
            job = known.get(move.moved)
            if job is None or job.move.target == ANYWHERE:
                problem = self.problem(move, table, placement)
                if problem is not None:
                    return MovesAsked([], problem)
            elif job.move.target != move.target:
                name = f"{self.plan.stages[move.stage].name}/{move.partition}"
                problem = (
                    f"{name} is moving from worker {move.from_worker} to worker {job.move.target} already: {job.why}"
                )
                return MovesAsked([], problem)
        return MovesAsked(self._add(moves, known, why, request, (table, placement)))

    def empty(
        self,
        worker: int,
        held: Iterable[PartitionKey],
        prefer: Callable[[], Iterable[Move]],
        why: str,
        request: int = 0,
    ) -> None:
        """Move all replicas of a worker to any other workers. ``prefer`` gives the preferred moves, and is called only if
        there is something new to move."""
        known = {job.move.moved for job in self.jobs()}
        new = [key for key in held if (*key, worker) not in known]
        if not new:
            return
        targets = {move.moved: move.target for move in prefer()}
        for key in new:
            prefer_to = targets.get(Holding(*key, worker), ANYWHERE)
            self.pending.append(MoveJob(Move(*key, worker, ANYWHERE), why, True, prefer_to, request=request))
        self.pending.sort(key=lambda job: job.move.stage)

    def _add(
        self,
        moves: Iterable[Move],
        known: dict[Holding, MoveJob],
        why: str,
        request: int = 0,
        found: tuple[Table, Placement] | None = None,
    ) -> list[MoveJob]:
        """Put moves into the queue and return their jobs. ``known`` are those in the queue and under way; ``found`` has the table
        and the placement by which all others were found possible."""
        jobs = []
        for move in moves:
            holding = move.moved
            job = known.get(holding)
            if job is None:
                job = known[holding] = MoveJob(move, why, anywhere=move.target == ANYWHERE, request=request)
                self.pending.append(job)
                if found is not None:
                    table, placement = found
                    job.found = move, table.stages[move.stage][move.partition], placement
            elif job.anywhere and move.target != ANYWHERE and job in self.pending:
                job.move, job.why, job.anywhere = move, why, False  # its target is named now
            job.request = job.request or request
            jobs.append(job)
        self.pending.sort(key=lambda job: job.move.stage)
        return jobs

    def clear(self, why: str, now: float) -> None:
        """Give up all moves."""
        for job in self.jobs():
            self._given_up(job, why, now)
        self.pending.clear()
        self.under_way.clear()

    def forget(self, stages: Collection[int], now: float) -> None:
        """Give up the moves of stages that are about to go."""
        for job in [job for job in self.jobs() if job.move.stage in stages]:
            if job.phase == MovePhase.UNDER_WAY:
                del self.under_way[job.key]
            else:
                self.pending.remove(job)
            self._given_up(job, "the stage was removed", now)

    def spread_out(self, table: Table, moment: Moment) -> bool:
        """Queue moves of replicas that share more than necessary, because workers have joined since they were placed.

        Return False if there are none."""
        placement = moment.placement
        loads: dict[int, int] = {}  # counted only if needed
        moves = []

        def fewest_first(worker: int) -> tuple[int, int]:
            return loads.get(worker, 0), worker

        for stage in self.plan.stages:
            all_of_them = len(wanted(stage))
            for partition, replicas in enumerate(table.stages[stage.id] if all_of_them > 1 else ()):
                key = PartitionKey(stage.id, partition)
                holders = [replica.worker for replica in replicas]
                source = placement.misplaced(key, holders) if len(holders) == all_of_them else None
                if source is None or key in moment.resting or self._arrived(key, replicas) < len(replicas):
                    continue
                if not loads:
                    loads |= replicas_by_worker(table)
                others = [worker for worker in holders if worker != source]
                target = placement.candidates(key, others, then=fewest_first, without={source})[0]
                loads[target] = loads.get(target, 0) + 1
                moves.append(Move(*key, source, target))
        self._add(moves, {}, "its replicas were closer to each other than they need to be")
        return bool(moves)

    # ---- the next to begin

    def begin(self, moment: Moment, epoch: int, batch: int = 0) -> list[Addition]:
        """Begin the moves that may begin now, and return their additions, whose replicas the caller lists in the table of
        ``epoch``. The caller has made sure that no repair is due.

        A worker that leaves is emptied in batches, like repairs: ``batch`` additions may be under way for that."""
        begun: list[Addition] = []
        loads = ReplicaLoads(moment.table)
        while (job := self.next(moment, loads, batch)) is not None:
            replicas = moment.table.replicas(*job.key)
            kind = next(replica.kind for replica in replicas if replica.worker == job.move.from_worker)
            self.pending.remove(job)
            self.under_way[job.key] = job
            job.begin(self._repairs.safety.standing(job.key, replicas), kind)
            wanted = WantedAddition(*job.key, job.move.target, job.move.from_worker, job.why, kind)
            begun.append(self._repairs.begin(wanted, epoch, moment.now))
            loads.more(job.move.target)
        return begun

    def next(self, moment: Moment, loads: ReplicaLoads, batch: int = 0) -> MoveJob | None:
        """Return the next move to begin, with its target; None: none may begin now."""
        table, placement = moment.table, moment.placement
        busy, at_once = self._repairs.under_way, self.plan.settings.repairs_at_once
        if len(busy) >= at_once and not placement.leaving:
            return None
        for job in list(self.pending):
            if any(stage != job.move.stage for stage, _ in busy):
                return None  # additions go in topological order
            if job.key in busy or job.key in moment.resting:
                continue
            leaves = job.move.from_worker in placement.leaving
            if len(busy) >= max(at_once, batch if leaves else 0):
                continue
            if moment.now < self._rests_until and not leaves:
                rate = self.plan.settings.balance_max_bytes_per_second
                job.waits = f"moves may copy {rate:,} bytes per second (spark.flux.balance.maxBytesPerSecond)"
                continue
            problem = None if job.is_found(table, placement) else self.problem(job.move, table, placement)
            if problem is not None and self._leaves(job, table, placement):
                job.move, job.anywhere = replace(job.move, target=ANYWHERE), True
            elif problem is not None:
                self.pending.remove(job)
                self._given_up(job, problem, moment.now)
                continue
            if job.anywhere:
                target = self._choose(job, table, placement, loads.of_workers)
                if target is None and leaves:
                    job.waits = NO_PLACE
                    continue
                if target is None:
                    self.pending.remove(job)
                    self._given_up(job, NO_PLACE, moment.now)
                    continue
                job.move = replace(job.move, target=target)
            return job
        return None

    def _leaves(self, job: MoveJob, table: Table, placement: Placement) -> bool:
        """Tell whether the source is being emptied, and the move is possible with another target.

        If such a move were given up, it would be asked for again at once, and stand behind the moves that have begun
        meanwhile."""
        anywhere = replace(job.move, target=ANYWHERE)
        return job.move.from_worker in placement.leaving and self.problem(anywhere, table, placement) is None

    def _choose(self, job: MoveJob, table: Table, placement: Placement, loads: Mapping[int, int]) -> int | None:
        """Choose the target of a move to any worker; None: no other worker may hold the replica.

        The best target is the one where additions have failed least often, then the farthest from the other replicas, then the
        preferred worker, then the one with the fewest replicas."""
        holders = [replica.worker for replica in table.replicas(*job.key)]
        others = [worker for worker in holders if worker != job.move.from_worker]
        fit = placement.candidates(
            job.key,
            others,
            first=lambda worker: self._repairs.attempts.with_worker(job.key, worker),
            then=lambda worker: (worker != job.prefer, loads.get(worker, 0), worker),
            without={job.move.from_worker},
        )
        return fit[0] if fit else None

    def _arrived(self, key: PartitionKey, replicas: Iterable[ReplicaAt]) -> int:
        return len(self._repairs.safety.standing(key, replicas).arrived)

    def _enough(self, addition: Addition) -> int:
        """Return the number of replicas of its kind that the partition must have at the end of the move: as many as when it
        began, but no more than wanted."""
        asked_for = wanted(self.plan.stages[addition.stage]).count(addition.kind)
        return min(self.under_way[addition.key].whole, asked_for)

    # ---- the second half

    def may_drop_source(self, addition: Addition, table: Table) -> bool:
        """Tell whether enough replicas are left without the source. The target has to be safe already."""
        job = self.under_way[addition.key]
        left = [r for r in table.replicas(*addition.key) if r.worker != job.move.from_worker]
        alike = [replica for replica in left if replica.kind == addition.kind]
        return self._arrived(addition.key, left) == len(left) and len(alike) >= self._enough(addition)

    def waits_for_steps(self, addition: Addition, table: Table) -> bool:
        """Tell whether the source stays for now, because the target is far behind its primary, or because more of the other
        replicas are far behind than when the move began."""
        job = self.under_way.get(addition.key)
        if job is None:
            return False
        left = [r for r in table.replicas(*addition.key) if r.worker != job.move.from_worker]
        heirs = [r for r in left if may_lead(r)]
        behind = [r.worker for r in heirs if self._repairs.safety.is_behind(*addition.key, r)]
        needed = min(job.keeping_up, len(heirs), self.plan.stages[addition.stage].replicas)
        return addition.worker in behind or len(heirs) - len(behind) < needed

    def replaces_another(self, addition: Addition, replicas: Iterable[ReplicaAt]) -> bool:
        """Tell whether a replica beside the source was lost since the move began. The target then replaces that replica."""
        others = sum(replica.worker != addition.worker and replica.kind == addition.kind for replica in replicas)
        return others < self._enough(addition)

    def finish(self, addition: Addition, now: float) -> None:
        """Complete a move whose source is dropped."""
        job = self.under_way.pop(addition.key)
        step = job.on(MoveEvent.SOURCE_DROPPED)
        self.done += 1
        rate = self.plan.settings.balance_max_bytes_per_second
        self._rests_until = max(self._rests_until, addition.started) + addition.bytes / rate
        job.ended = self._repairs.note(
            step.event, now, *addition.key, addition.worker, job.why, seconds=now - addition.started,
            stall_ms=addition.stall_ms, source=job.move.from_worker, nbytes=addition.bytes, request=job.request,
        )  # fmt: skip

    def finish_as_repair(self, addition: Addition, now: float) -> None:
        """Complete an addition whose target replaces another replica that was lost meanwhile. The source stays, and the move
        begins again."""
        job = self.under_way.pop(addition.key)
        addition.why = "a replica was lost while another one moved"
        self._repairs.note_repair(addition, now)
        self._again(job, "another replica was lost meanwhile, and the new one takes its place", now)

    # ---- losses

    def reconcile(self, table: Table, now: float) -> None:
        """Follow a table that a loss or a drop has changed."""
        for key, job in list(self.under_way.items()):
            addition = self._repairs.under_way.get(key)
            listed = any(replica.worker == job.move.from_worker for replica in table.replicas(*key))
            if addition is None:
                del self.under_way[key]
                if listed:
                    self._again(job, "its addition was lost", now)
                else:
                    self._given_up(job, f"worker {job.move.from_worker} has lost its replica, which is repaired", now)
            elif not listed:
                del self.under_way[key]
                addition.from_worker, addition.why = (
                    None,
                    f"worker {job.move.from_worker} lost the replica that was moving",
                )
                text = f"worker {job.move.from_worker} has lost its replica; the one on worker {addition.worker} replaces it"
                self._given_up(job, text, now)

    def put_back(self, addition: Addition) -> None:
        """Take back an addition of a move that has not failed, so that the move does not count as begun."""
        if addition.key in self.under_way:
            self.under_way[addition.key].begun -= 1

    def failed(self, addition: Addition, why: str, now: float) -> None:
        """Put the move of an addition that has failed, and whose replica is dropped, into the queue again."""
        self._again(self.under_way.pop(addition.key), why, now)

    def _again(self, job: MoveJob, why: str, now: float) -> None:
        """Put the move into the queue again, unless it has begun too often. Whether it is still possible is checked
        when it begins."""
        if job.begun >= BEGIN_MAX and not job.anywhere:
            self._given_up(job, f"{why}; that was attempt {job.begun}", now)
            return
        job.on(MoveEvent.INTERRUPTED)
        if job.anywhere:
            job.move = replace(job.move, target=ANYWHERE)
        self.pending.append(job)
        self.pending.sort(key=lambda each: each.move.stage)

    def _given_up(self, job: MoveJob, why: str, now: float) -> None:
        text = f"{why} ({job.why})"
        job.ended = self._repairs.note(
            job.on(MoveEvent.GIVEN_UP).event, now, *job.key, job.move.target, text, source=job.move.from_worker,
            request=job.request,
        )  # fmt: skip

    def validate(self) -> None:
        """Check that every move under way has an addition under way, and that no move is in the queue twice."""
        moved = {key for key, addition in self._repairs.under_way.items() if addition.from_worker is not None}
        assert moved == set(self.under_way), "a move under way is an addition under way"
        assert all(job.phase == MovePhase.UNDER_WAY for job in self.under_way.values())
        assert all(job.phase == MovePhase.WAITING for job in self.pending)
        assert [job.move.stage for job in self.pending] == sorted(job.move.stage for job in self.pending), (
            "stage by stage"
        )
        asked_for = [job.move.moved for job in self.jobs()]
        assert len(set(asked_for)) == len(asked_for), "asked for twice"

    # ---- reports

    def report(self) -> dict[str, Any]:
        phases = {key: str(addition.phase) for key, addition in self._repairs.under_way.items()}
        return {
            "movesDone": self.done,
            "movesUnderWay": [
                {
                    "stage": self.plan.stages[job.move.stage].name,
                    "partition": job.move.partition,
                    "source": job.move.from_worker,
                    "target": job.move.target,
                    "phase": phases.get(job.key, ""),
                    "why": job.why,
                }
                for job in self.under_way.values()
            ],
            "movesPending": len(self.pending),
            "movesWaiting": sorted({job.waits for job in self.pending if job.waits}),
        }


def replicas_by_worker(table: Table) -> dict[int, int]:
    counts = dict.fromkeys(table.endpoints, 0)
    for partitions in table.stages:
        for replicas in partitions:
            for replica in replicas:
                counts[replica.worker] = counts.get(replica.worker, 0) + 1
    return counts


class ReplicaLoads:
    """The replicas on each worker while moves begin. They are counted only if needed: there are many."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._begun: list[int] = []

    @cached_property
    def of_workers(self) -> dict[int, int]:
        loads = replicas_by_worker(self._table)
        for worker in self._begun:
            loads[worker] = loads.get(worker, 0) + 1
        return loads

    def more(self, worker: int) -> None:
        """Count one more replica, which is about to be added."""
        self._begun.append(worker)
        if "of_workers" in self.__dict__:
            self.of_workers[worker] = self.of_workers.get(worker, 0) + 1
