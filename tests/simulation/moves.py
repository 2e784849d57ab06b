"""Laws of moves and drains, checked after each decision of the controller with bookkeeping of their own.

no worker owns a partition twice          no worker is listed twice for a partition, no two workers lead it by one table
moves keep the topological order          no move begins while a move of an earlier stage could begin
no move costs a safe replica              only the loss of a worker, a divergence, or a primary out of reach leaves a
                                          partition with fewer
every move ends                           as done, or given up with an event that says why
a leaving worker gets nothing new         and is let go with nothing left on it
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from controller.decide.slots import held_by, reads
from controller.replicas.moves import MoveJob
from controller.report.events import Event
from tests.simulation.violation import Key, Violation

if TYPE_CHECKING:
    from controller.decide.controller import Controller
    from flux.worker.core import WorkerCore
    from partitioning.table import Table
    from tests.simulation.run import Simulation

#: A target that has had all committed steps for this time waits for other replicas that do not keep up.
HELD_UP_S = 5.0


class MoveWatch:
    """The decisions of the controller until now, with which ``look`` compares the next one."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.counts = sim.counts
        self.controller: Controller = sim.controller
        self._jobs: dict[int, MoveJob] = {}  # by identity: a job is the same from asking to its end
        self._under_way: dict[Key, tuple[int, int]] = {}  # the source worker and the target worker of the move
        self._workers: set[int] = set()
        self._leaving: set[int] = set()
        self._table: Table | None = None
        self._safe: dict[Key, int] = {}
        self._take_overs = 0
        self._seen: tuple[int, int] = (-1, -1)

    # ---- owners

    def roles(self, core: WorkerCore) -> None:
        """Check a worker that goes by a new table: no other worker leads the same partition by that table."""
        for key, replica in core.replicas.items():
            if replica.leads:
                for other in self.sim.hosts():
                    rival = other.replicas.get(key)
                    if other is not core and other.epoch == core.epoch and rival is not None and rival.leads:
                        raise Violation(
                            "no worker owns a partition twice",
                            f"{replica.where}, epoch {core.epoch}: workers {core.worker} and {other.worker}",
                        )

    # ---- decisions

    def look(self) -> None:
        """Check a decision. The checks follow the order of causes: losses come first."""
        controller, table = self.controller, self.controller.table
        if table is None:
            return
        events = controller.repairs.news()
        for law in (self.sim.divergences, self.sim.hearts, self.sim.rivals, self.sim.protects, self.sim.reach):
            law.look(events)
        lost = self._workers - controller.members.workers.keys() - controller.departures.dismissed
        if lost:
            self._note_losses(lost)
        self._follow_jobs(events)
        self.sim.outcomes.look()
        self._check_leaving(table)
        dropped = any(event.kind in ("divergence", "drop") for event in events)
        self._check_safe(table, bool(lost or self.sim.reach.left) or dropped)
        self._note_events(events)
        self._workers = set(controller.members.workers)
        self._leaving = set(controller.drains)
        self._table = table
        self._take_overs = controller.repairs.take_overs

    def _note_losses(self, lost: set[int]) -> None:
        assert self._table is not None
        self.counts["moves that lost their target"] += any(to in lost for _, to in self._under_way.values())
        self.counts["moves that lost their source"] += any(source in lost for source, _ in self._under_way.values())
        for (stage, partition), (source, to) in self._under_way.items():
            others = {replica.worker for replica in self._table.stages[stage][partition]} - {source, to}
            self.counts["moves that lost a bystander"] += bool(others & lost)
        if self._under_way and self.controller.repairs.take_overs > self._take_overs:
            self.counts["take-overs while a move was under way"] += 1

    def _follow_jobs(self, events: list[Event]) -> None:
        moving = self.controller.moving
        if not moving and not self._jobs:
            return  # nothing is moved, as nearly always
        jobs = {id(job): job for job in moving.jobs()}
        ends = Counter(
            [
                (event.stage, event.partition, event.source)
                for event in events
                if event.kind in ("move", "move given up")
            ]
        )
        for number, job in self._jobs.items():
            if number not in jobs and self.controller.phase == "running":
                key = self.sim.stage_names[job.move.stage], job.move.partition, job.move.from_worker
                if not ends[key]:
                    raise Violation("every move ends", f"{job} is gone without a word")
                ends[key] -= 1
        self._jobs = jobs
        under_way = {key: (job.move.from_worker, job.move.target) for key, job in moving.under_way.items()}
        for key in under_way.keys() - self._under_way.keys():
            self.counts["moves begun"] += 1
            self.counts["moves begun again"] += moving.under_way[key].begun > 1
            self._check_order(key)
        self._under_way = under_way

    def _check_order(self, begun: Key) -> None:
        resting = self.controller.repairs.attempts.resting(self.sim.world.now)
        for job in self.controller.moving.pending:
            if job.move.stage < begun[0] and not job.waits and job.key not in resting:
                raise Violation("moves keep the topological order", f"{begun} has begun before {job}")

    def _check_leaving(self, table: Table) -> None:
        controller = self.controller
        for worker in controller.drains.keys() & self._leaving:
            assert self._table is not None
            new = set(held_by(table, worker)) - set(held_by(self._table, worker))
            # Partitions that only the directory has go to the workers that are left then.
            # Workers that have joined since were not known when the table was made.
            others = (controller.members.workers.keys() & self._workers) - controller.drains.keys()
            if new and (others or not self.sim.plan.durable):
                raise Violation(
                    "a leaving worker gets nothing new", f"worker {worker} leaves, and now has {sorted(new)}"
                )
        for worker in controller.departures.dismissed & self._workers:
            left = held_by(table, worker)
            if left or reads(table, worker) or worker in table.endpoints:
                raise Violation("a leaving worker gets nothing new", f"worker {worker} was let go with {left}")

    def _check_safe(self, table: Table, lost: bool) -> None:
        repairs = self.controller.repairs
        seen = table.epoch, len(repairs.safety.unsafe)
        if seen == self._seen:
            return
        self._seen = seen
        safe = {
            (stage, partition): sum(repairs.safety.is_safe(stage, partition, replica) for replica in replicas)
            for stage, partitions in enumerate(table.stages)
            for partition, replicas in enumerate(partitions)
        }
        if not lost and self.controller.phase == "running":
            for (stage, partition), now in safe.items():
                before = self._safe.get((stage, partition), 0)
                change = self.controller.board.wishes.open.get(stage)
                if stage not in self.controller.wished.stages:
                    continue
                wished = self.controller.wished.stages[stage].replicas
                if now < min(before, wished if change is None else change.least):
                    raise Violation("no move costs a safe replica", f"{stage}/{partition}: {before} before, {now} now")
        self._safe = safe

    def _note_events(self, events: list[Event]) -> None:
        names = {name: stage for stage, name in self.sim.stage_names.items()}
        for event in events:
            if event.kind == "move":
                self.counts["moves done"] += 1
                assert self._table is not None
                row = self._table.row(names[event.stage], event.partition)
                self.counts["primaries moved"] += bool(row) and row[0].worker == event.source
            elif event.kind == "move given up":
                self.counts["moves given up"] += 1
            elif event.kind == "drain":
                interrupted = event.worker not in self.controller.departures.dismissed
                self.counts["drains interrupted by a loss" if interrupted else "drains completed"] += 1

    # ---- at rest

    @property
    def at_rest(self) -> bool:
        """Whether every possible move is made, and every worker that could leave has left."""
        if self.held_up:
            return True
        controller = self.controller
        waiting = {job.move.from_worker for job in controller.moving.pending if job.waits}
        moves = controller.moving
        return not moves.under_way and all(job.waits for job in moves.pending) and waiting >= controller.drains.keys()

    @property
    def held_up(self) -> bool:
        """Whether a move waits for replicas that are always behind, as they may be if the bound is a step or two and timers
        never rest. Such a move is given up after half a minute, and so is the next one: no run waits for the end of that."""
        additions = self.controller.repairs.under_way.values()
        return any(addition.arrived and self.sim.world.now > addition.since + HELD_UP_S for addition in additions)
