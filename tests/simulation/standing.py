"""Replicas that stand still though their workers are well: they hear and answer as ever, but take no steps for a while.

The law of the design (design: standing-still), with its own bookkeeping:

who stands still is dropped   a live replica that counts, has the whole order, and applies none of its committed steps for
                              spark.flux.step.timeout, though its primary has applied more and has room in its logs, is out of
                              the table when the primary has reported that a few times more

A primary that goes on hides the still replica from all others until its order log is full, so no other law sees it in time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flux.replica.replica import Replica
from flux.worker.core import WorkerCore
from tests.simulation.violation import Key, Violation
from tests.simulation.world import TICK_S

if TYPE_CHECKING:
    from tests.simulation.run import Simulation
    from tests.simulation.worker_process import WorkerProcess

#: (stage, partition, worker, incarnation)
Life = tuple[int, int, int, int]
#: Heartbeats until the primary knows the progress of a replica: the primary asks after one, and looks twice in each.
ASKED = 1.5
#: Reports of the primary: the replica has moved; the controller counts from here; the time is over.
REPORTS = 3
#: Messages on their way, one after the other: the question, the answer, the first report and the last. Each may take several
#: times the mean delay, which is no disturbance.
DELAYS = 4 * 5


@dataclass
class Still:
    """A replica that stands still, as its primary has reported without a break."""

    #: Steps that the replica has applied.
    applied: int
    #: The worker of the primary.
    told_by: int
    since: float


class Standing:
    """The fault of replicas that stand still, and the law about them."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        #: Until this time some replica stands still on purpose.
        self.until = sim.world.now
        self._still: dict[Life, Still] = {}
        self._rng = random.Random(f"standing {sim.seed}")

    @property
    def limit_s(self) -> float:
        settings, delay_s = self.sim.plan.settings, self.sim.faults.delay_s
        return settings.step_timeout + (ASKED + REPORTS) * settings.heartbeat_interval + 2 * TICK_S + DELAYS * delay_s

    # ---- the fault

    def strike(self) -> None:
        """Let some secondary take no more steps for a while."""
        table = self.sim.controller.table
        if table is None or self.sim.controller.phase != "running":
            return
        copies = [
            (self.sim.by_node[core.worker], key, replica)
            for core in self.sim.hosts()
            for key, replica in core.replicas.items()
            if not replica.primary and not replica.finished and "ready" not in vars(replica)
        ]
        if copies:
            self._stop(*self._rng.choice(copies), self._rng.random() * self.sim.faults.stand_s)

    def _stop(self, process: WorkerProcess, key: Key, replica: Replica, seconds: float) -> None:
        self.sim.counts["replicas that stood still"] += 1
        replica.ready = lambda now: False  # type: ignore[method-assign]
        self.until = max(self.until, self.sim.world.now + seconds)
        self.sim.world.after(seconds, self._goes_on, process, key, replica)

    def _goes_on(self, process: WorkerProcess, key: Key, replica: Replica) -> None:
        del replica.ready  # type: ignore[method-assign]
        if not process.dead and process.core is not None and process.core.replicas.get(key) is replica:
            process.core.turns.wake(key)
            process.wake()

    # ---- the law

    def reports(self, core: WorkerCore) -> None:
        """Look at the secondaries of a worker's primaries when the worker reports to the controller."""
        sim, now = self.sim, self.sim.world.now
        if now < sim.network.disturbed_until or sim.controller.phase != "running":
            self._still.clear()
            return
        found = dict(self._owing(core))
        for life in [life for life, still in self._still.items() if still.told_by == core.worker and life not in found]:
            del self._still[life]
        undisturbed = sim.network.disturbed_until  # a lost message is sent again a moment later
        for life, applied in found.items():
            still = self._still.get(life)
            if still is None or (still.applied, still.told_by) != (applied, core.worker):
                self._still[life] = Still(applied, core.worker, now)
            elif now - max(still.since, undisturbed) > self.limit_s:
                raise Violation(
                    "who stands still is dropped",
                    f"stage {life[0]}, partition {life[1]}: worker {life[2]} has applied {applied} steps, and none "
                    f"for {now - still.since:.2f} s",
                )

    def _owing(self, core: WorkerCore) -> Iterator[tuple[Life, int]]:
        """Yield the replicas that lack a committed step which their primaries here have applied, with their own steps."""
        table, repairs = self.sim.controller.table, self.sim.controller.repairs
        assert table is not None
        for key, primary in core.replicas.items():
            if (
                not primary.primary
                or primary.orders_itself
                or self.sim.leader_of(*key) != core.worker
                or primary.output.room.full
            ):
                continue
            for listed in table.row(*key)[1:]:
                peer = primary.order.peers.get(listed.worker)
                at = self.sim.core_of(listed.worker)
                replica = None if at is None else at.replicas.get(key)
                if peer is None or replica is None or not repairs.safety.is_safe(*key, listed):
                    continue
                same_life = peer.incarnation == replica.incarnation == listed.incarnation
                whole_order = peer.acked is not None and peer.acked >= primary.order.end
                owes = replica.applied < min(primary.order.committed, primary.applied)
                if same_life and peer.greeted and whole_order and owes:
                    yield (*key, listed.worker, listed.incarnation), replica.applied
