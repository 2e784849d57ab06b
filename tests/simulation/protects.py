"""Changes of protection at random times: running stages get another number or another kind of replicas (design: protect).

The laws, with their own bookkeeping, beside the laws of moves (no change costs a safe replica) and of tables:

every change of protection ends   as done, or given up, with an event that says so, unless the query has ended before
every wish comes true             at rest, no partition lacks a replica that some worker could hold, or has one too many
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from controller.replicas.kinds import missing, surplus
from controller.report.events import Event
from flux.errors import UsageError
from partitioning.ids import ACTIVE, STANDBY, UPSTREAM, PartitionKey
from tests.simulation.replaying import Replaying
from tests.simulation.violation import Violation

if TYPE_CHECKING:
    from tests.simulation.run import Simulation

#: Largest number of replicas asked for.
REPLICAS_MAX = 3
ENDS = ("protected", "protect given up")


class Protects:
    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self._asked: dict[str, int] = {}  # by the name of the stage: the request of a change that is not over
        self._rng = random.Random(f"protects {sim.seed}")

    def strike(self) -> None:
        """Ask for a random change of a stage, sensible or not; impossible changes are refused."""
        sim, rng = self.sim, self._rng
        if sim.controller.phase != "running":
            return
        stage = list(sim.plan.stages)[rng.randrange(len(sim.plan.stages))].id
        replicas = rng.choice([None, *range(1, REPLICAS_MAX + 1)])
        recovery = rng.choice([None, ACTIVE, STANDBY, STANDBY])
        if recovery == STANDBY and isinstance(sim.plan.stages[stage].make(), Replaying) and rng.random() < 0.7:
            recovery = UPSTREAM
        before = sim.controller.wished
        now = sim.world.now
        try:
            sim.server.perform(
                sim.outcomes.ask(lambda number: sim.controller.protect(stage, replicas, recovery, now, number))
            )
        except UsageError:
            sim.counts["changes of protection refused"] += 1
            return
        sim.counts["changes of protection asked for"] += 1
        was, wish = before.stages[stage], sim.controller.wished.stages[stage]
        sim.counts["changes to standbys"] += was.recovery != wish.recovery == STANDBY
        sim.counts["changes from standbys"] += wish.recovery != was.recovery == STANDBY
        sim.counts["changes to upstream"] += was.recovery != wish.recovery == UPSTREAM
        sim.counts["changes to fewer replicas"] += wish.replicas < was.replicas

    # ---- laws

    def look(self, events: list[Event]) -> None:
        """Check the events of a decision of the controller."""
        for number, event in enumerate(events):
            if event.kind == "protect":
                self._asked[event.stage] = event.request
            elif event.kind in ENDS:
                if event.kind == "protected" and self._asked.get(event.stage) != event.request:
                    raise Violation("every change of protection ends", f"{event}: it was not under way")
                if self._asked.get(event.stage) == event.request:
                    del self._asked[event.stage]
                self.sim.counts[f"changes of protection: {event.kind}"] += 1
                # One decision may see that the change is done, and then that workers are lost.
                if event.kind == "protected" and not any(later.kind == "loss" for later in events[number:]):
                    self._check_done(event.stage)
        still = {self.sim.plan.stages[stage].name for stage in self.sim.controller.board.wishes.open}
        if self.sim.controller.phase == "running" and still != set(self._asked):
            raise Violation("every change of protection ends", f"asked for {sorted(self._asked)}, open {sorted(still)}")

    def _check_done(self, name: str) -> None:
        """Check that every partition of a stage has the replicas asked for, and that all of them are safe."""
        controller, table = self.sim.controller, self.sim.controller.table
        stage = next(stage for stage in controller.wished.stages if stage.name == name)
        assert table is not None
        for partition, row in enumerate(table.stages[stage.id]):
            safe = sum(controller.repairs.safety.is_safe(stage.id, partition, replica) for replica in row)
            if safe < stage.replicas:
                raise Violation("every wish comes true", f"{name}/{partition} is said to be done: {row}")

    @property
    def pending(self) -> bool:
        """Whether some replica is one too many and may be dropped."""
        controller, table = self.sim.controller, self.sim.controller.table
        return table is not None and any(
            controller.protecting.too_many(change, PartitionKey(change.stage, partition), row)
            for change in controller.board.wishes.open.values()
            for partition, row in enumerate(table.stages[change.stage])
        )

    def check_at_rest(self) -> None:
        """Check that no replica is one too many, and that no wish stays open. ``RunEnd.check_replicated`` looks at replicas
        that are missing for good, for lack of workers."""
        controller, table = self.sim.controller, self.sim.controller.table
        assert table is not None
        for stage in controller.wished.stages:
            rows = table.stages[stage.id]
            lacks = [partition for partition, row in enumerate(rows) if missing(stage, row) is not None]
            for partition, row in enumerate(rows):
                if partition not in lacks and surplus(stage, row) and not self._moves(stage.id, partition):
                    raise Violation("every wish comes true", f"{stage.name}/{partition}: {row}")
            if stage.id in controller.board.wishes.open and not lacks:
                raise Violation("every wish comes true", f"{stage.name} is as it shall be, and nobody says so")
        self.sim.counts["runs at rest after changes of protection"] += bool(
            self.sim.counts["changes of protection: protected"]
        )

    def _moves(self, stage: int, partition: int) -> bool:
        return (stage, partition) in self.sim.controller.repairs.under_way
