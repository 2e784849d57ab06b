"""Spark starts a second attempt of a worker's task while the first lives, and says when tasks are over.

If one attempt ends well, Spark kills the other; if one fails, the other stays. The laws:

a second attempt waits         while the first is a member and was heard lately: the second neither takes its place nor ends
one worker per slot            no two members have the same slot
a closed slot stays closed     and no worker joins in it
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from controller.report.events import Event
from tests.simulation.violation import Violation
from tests.simulation.worker_process import WorkerProcess

if TYPE_CHECKING:
    from tests.simulation.run import Simulation

#: A worker that was heard within this time counts as alive: ``controller.decide.registration.ALIVE_S``, less the time of a
#: report on its way.
ALIVE_S = 1.9
#: Longest time from the end of a task until Spark reports it.
TOLD_S = 0.3


class Rivals:
    """The second attempts of tasks, and their laws. ``strike`` starts one."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        #: By slot: the second attempt that waits.
        self.waiting: dict[int, WorkerProcess] = {}
        self._closed: set[int] = set()
        self._heard: dict[int, float] = {}
        self._rng = random.Random(f"rivals {sim.seed}")

    def strike(self) -> None:
        sim = self.sim
        fit = [w for w in sim.workers if not w.dead and w.node >= 0 and w.index not in self.waiting]
        if fit and sim.controller.phase == "running":
            slot = self._rng.choice(fit).index
            attempt = next(sim.worker_attempts)
            sim.counts["second attempts of workers"] += 1
            self.waiting[slot] = WorkerProcess(sim, slot, attempt, f"executor of attempt {attempt}")

    def heard(self, node: int) -> None:
        self._heard[node] = self.sim.world.now

    def takes_over(self, gone: WorkerProcess) -> bool:
        """Tell whether another attempt takes the place of a worker whose task has failed. Spark then starts none."""
        rival = self.waiting.pop(gone.index, None)
        if rival is None:
            return False
        self.sim.counts["second attempts whose first has failed"] += 1
        at = next((at for at, worker in enumerate(self.sim.workers) if worker is gone), None)
        if at is not None:
            self.sim.workers[at] = rival
            self.sim.executors[gone.index] = rival.executor
        return True

    def ended_well(self, process: WorkerProcess) -> None:
        """Note that the task of a worker has ended well: the worker was told to go, or was given up."""
        sim = self.sim
        rival = self.waiting.pop(process.index, None)
        if rival is process:
            first = next((w for w in sim.workers if w.index == process.index and not w.dead), None)
            if first is not None:
                if first.node in sim.controller.members.workers:
                    raise Violation("a second attempt waits", f"that of worker {first.node} was sent home")
                sim.counts["attempts that Spark killed because another ended well"] += 1
                first.die()
        elif rival is not None:
            sim.counts["attempts that Spark killed because another ended well"] += 1
            rival.die()
        if sim.faults.rivals_per_s:
            sim.world.after(self._rng.random() * TOLD_S, self._over, process.index)

    def _over(self, slot: int) -> None:
        sim = self.sim
        if sim.server.sleeps(self._over, slot) or sim.controller.phase not in ("starting", "running"):
            return
        sim.counts["tasks of closed slots that ended"] += 1
        sim.server.perform(
            sim.controller.driver.on_tasks_ended([slot], "the Spark job 'workers'", "its tasks ended before the query")
        )

    def look(self, events: list[Event]) -> None:
        """Check the laws after a decision of the controller."""
        controller = self.sim.controller
        slots = [member.about.index for member in controller.members.workers.values()]
        if len(set(slots)) < len(slots):
            raise Violation("one worker per slot", f"{sorted(slots)}")
        self._closed |= controller.places.closed
        opened = self._closed.intersection(controller.places.open)
        if opened:
            raise Violation("a closed slot stays closed", f"{sorted(opened)}")
        for event in events:
            if event.kind == "loss" and event.why.startswith("another attempt"):
                quiet = self.sim.world.now - self._heard.get(event.worker, 0.0)
                if quiet < ALIVE_S:
                    raise Violation("a second attempt waits", f"{event}, heard {quiet:.3f} s ago")
                self.sim.counts["second attempts that came for one that was silent"] += 1
            if event.kind == "join":
                self._joined(event)

    def _joined(self, event: Event) -> None:
        member = self.sim.controller.members.workers.get(event.worker)
        if member is not None and member.about.index in self._closed and not member.leaving:
            raise Violation("a closed slot stays closed", str(event))
