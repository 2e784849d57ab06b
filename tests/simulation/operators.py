"""People and policies at work: moves, drains, more workers and fewer, rehearsed losses, whole plans, at random times.

They ask through the same methods as the command line does. This module only chooses requests; the laws of their results
are in ``moves``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from controller.balance.load import Move
from controller.decide.board import Tell
from controller.replicas.moves import ANYWHERE
from flux.errors import UsageError
from tests.simulation.violation import Violation
from tests.simulation.worker_process import WorkerProcess

if TYPE_CHECKING:
    from tests.simulation.run import Simulation

#: A query is not scaled beyond this: each worker costs time to simulate.
WORKERS_MAX = 6
#: How long after its start a query may be asked for something, at the earliest.
FIRST_S = 0.005


@dataclass(frozen=True)
class Habits:
    """Frequency of requests, and the shares of each kind. All other requests are moves by hand."""

    asks_per_s: float = 0.0
    drains: float = 0.0
    scales: float = 0.0
    rehearsals: float = 0.0
    plans: float = 0.0


#: No requests at all.
QUIET = Habits()
#: Many requests of all kinds, which often contradict each other.
STORMY = Habits(asks_per_s=40.0, drains=0.2, scales=0.3, rehearsals=0.05, plans=0.05)
#: Share of the runs without requests.
QUIET_SHARE = 0.4


def draw(rng: random.Random, replicated: bool) -> Habits:
    """Draw the habits of a run. ``replicated``: a loss can be survived, so that losses may be rehearsed."""
    if rng.random() < QUIET_SHARE:
        return QUIET
    return Habits(
        asks_per_s=rng.choice([5.0, 20.0, 100.0]),
        drains=rng.choice([0.0, 0.05, 0.2]),
        scales=rng.choice([0.0, 0.05]),
        rehearsals=rng.choice([0.0, 0.02]) if replicated else 0.0,
        plans=rng.choice([0.0, 0.1]),
    )


class Operators:
    """People and policies that make requests until the faults end. The requests open then come to their end."""

    def __init__(self, sim: Simulation, habits: Habits) -> None:
        self.sim = sim
        self.habits = habits
        self.rng = random.Random(f"operators {sim.seed}")  # its own, so that a run without requests is as it was before
        if habits.asks_per_s:
            sim.world.after(FIRST_S, self._ask)

    def _ask(self) -> None:
        sim = self.sim
        if sim.network.calm or sim.controller.phase == "ended":
            return
        if sim.controller.phase == "running":
            try:
                sim.server.perform(self._choose())
            except UsageError:
                sim.counts["requests refused"] += 1
            self.start_missing()
        sim.world.after(self.rng.expovariate(self.habits.asks_per_s), self._ask)

    def _choose(self) -> list[Tell]:
        habits, chance = self.habits, self.rng.random()
        for share, ask in (
            (habits.drains, self._drain),
            (habits.scales, self._scale),
            (habits.rehearsals, self._rehearse),
            (habits.plans, self._plan),
        ):
            if chance < share:
                return ask()
            chance -= share
        return self._move()

    def _move(self) -> list[Tell]:
        """Ask to move some replicas somewhere else, sensibly or not; impossible moves are refused."""
        controller, rng = self.sim.controller, self.rng
        assert controller.table is not None
        moves = []
        for _ in range(rng.choice([1, 1, 1, 4])):
            chosen = list(controller.plan.stages)[rng.randrange(len(controller.plan.stages))]
            stage, partition = chosen.id, rng.randrange(chosen.partitions)
            source = rng.choice(controller.table.stages[stage][partition]).worker
            target = ANYWHERE if rng.random() < 0.2 else self._target(stage, partition, source)
            move = Move(stage, partition, source, target)
            if all((m.stage, m.partition, m.from_worker) != (stage, partition, source) for m in moves):
                moves.append(move)
        self.sim.counts["moves asked for"] += len(moves)
        return self._ask_for(lambda number: controller.move(moves, "by hand", self.sim.world.now, number))

    def _target(self, stage: int, partition: int, source: int) -> int:
        """Choose a worker to move a replica to, mostly a possible one."""
        controller = self.sim.controller
        assert controller.table is not None
        workers = list(controller.members.workers)
        others = [r.worker for r in controller.table.stages[stage][partition] if r.worker != source]
        placement = controller.board.placement()
        fit = [w for w in workers if w != source and placement.may_hold(w, others)]
        return self.rng.choice(fit if fit and self.rng.random() < 0.95 else workers)

    def _drain(self) -> list[Tell]:
        controller = self.sim.controller
        worker = self.rng.choice(list(controller.members.workers))
        effects = self._ask_for(lambda number: controller.drain(worker, self.sim.world.now, number))
        self.sim.counts["drains begun"] += 1
        return effects

    def _scale(self) -> list[Tell]:
        controller = self.sim.controller
        before = len(controller.places.open)
        wanted = self.rng.choice([before - 1, before + 1, before + 2])
        workers = min(wanted, WORKERS_MAX)
        effects = self._ask_for(lambda number: controller.scale(workers, self.sim.world.now, number))
        self.sim.counts["queries scaled up"] += len(controller.places.open) > before
        self.sim.counts["queries scaled down"] += len(controller.places.open) < before
        return effects

    def _rehearse(self) -> list[Tell]:
        victim = self.rng.choice(list(self.sim.controller.members.workers))
        process = self.sim.by_node.get(victim)  # None: the worker has not heard yet that it is a member
        if process is None or not self.sim.strikes.spares(process):
            return []
        self.sim.counts["losses rehearsed"] += 1
        return self._ask_for(lambda number: self.sim.controller.fail(victim, self.sim.world.now, number))

    def _plan(self) -> list[Tell]:
        """Ask for all moves of a policy at once, without a look at whether they are sensible by now."""
        controller, now = self.sim.controller, self.sim.world.now
        moves = controller.suggest(self.rng.choice(["even", "pairing"]), now).moves
        self.sim.counts["moves that a policy wanted"] += len(moves)
        return self._ask_for(lambda number: controller.move(moves, "by plan", now, number)) if moves else []

    def _ask_for(self, request: Callable[[int], list[Tell]]) -> list[Tell]:
        return self.sim.outcomes.ask(request)

    def start_missing(self) -> list[int]:
        """Start a task, as Spark does, for each slot that has none. Return these slots."""
        sim = self.sim
        slots = sim.controller.driver.missing_slots()
        sim.controller.driver.tasks_started(slots)
        for slot in slots:
            if slot in sim.executors:
                raise Violation("a closed slot stays closed", f"slot {slot} is to have another task")
            sim.executors[slot] = sim.executor_for(slot)
            sim.workers.append(self._worker(slot))
        return slots

    def _worker(self, slot: int) -> WorkerProcess:
        return WorkerProcess(self.sim, slot, next(self.sim.worker_attempts), self.sim.executors[slot])
