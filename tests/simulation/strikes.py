"""The times and victims of faults: at the rates of a run, and at moments that matter (``faults.Faults``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flux.wire.control import EdgeComplete
from flux.wire.frames import encode
from tests.simulation.network import garble
from tests.simulation.process import Process
from tests.simulation.worker_process import WorkerProcess

if TYPE_CHECKING:
    from tests.simulation.run import Simulation

#: A worker that was heard within this time will not be given up soon.
FRESH_S = 0.15


class Strikes:
    """The faults of a run, until ``calm_at``. Crashes spare the last safe replica of a partition, unless the run is
    reckless."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.world, self.network, self.controller = sim.world, sim.network, sim.controller
        self.counts, self.plan = sim.counts, sim.plan
        self.calm_at = sim.world.now + sim.faults.calm_after_s
        self._struck: set[str] = set()  # crashes at a certain moment that have happened

    def start(self) -> None:
        sim, faults = self.sim, self.sim.faults
        for rate, strike in [
            (faults.breaks_per_s, self.network.break_one),
            (faults.control_breaks_per_s, self.network.break_control),
            (faults.cuts_per_s, self.network.cut_one),
            (faults.control_cuts_per_s, self._cut_off),
            (faults.whims_per_s, self._whim),
            (faults.pauses_per_s, self._pause_one),
            (faults.deaths_per_s, self._kill_one),
            (faults.zombies_per_s, self._speculate),
            (faults.epochs_per_s, sim.server.new_epoch),
            (faults.crashes_per_s, self._crash_one),
            (faults.all_workers_per_s, self._crash_all),
            (faults.controller_pauses_per_s, sim.server.pause),
            (faults.closings_per_s, self._close_for_nothing),
            (faults.clock_steps_per_s, self._set_a_clock),
            (faults.garbage_per_s, self._send_garbage),
            (faults.divergences_per_s, sim.divergences.strike),
            (faults.rivals_per_s, sim.rivals.strike),
            (faults.stands_per_s, sim.standing.strike),
            (faults.protects_per_s, sim.protects.strike),
            (faults.pair_cuts_per_s, self._cut_a_pair),
        ]:
            if rate:
                self._strike_later(rate, strike)

    # ---- at a rate

    def _strike_later(self, rate: float, strike: Callable[[], Any]) -> None:
        self.world.after(self.world.random.expovariate(rate), self._strike, rate, strike)

    def _strike(self, rate: float, strike: Callable[[], Any]) -> None:
        if self.world.now < self.calm_at:
            self.network.disturbed()
            strike()
            self._strike_later(rate, strike)

    def _pause_one(self) -> None:
        alive = [*(worker for worker in self.sim.workers if not worker.dead), *self.sim.spark.alive()]
        if not alive:
            return
        process: Process = self.world.random.choice(alive)
        seconds = self.world.random.random() * self.sim.faults.pause_s
        long = seconds > self.plan.settings.heartbeat_timeout / 2
        if long and isinstance(process, WorkerProcess) and not self.spares(process):
            return
        self.counts["pauses"] += 1
        process.pause(seconds)

    def _close_for_nothing(self) -> None:
        victim = self.world.random.choice(self.sim.workers)
        if not victim.dead and victim.node >= 0 and self.controller.phase == "running" and self.spares(victim):
            self.counts["lifelines that closed for nothing"] += 1
            self.sim.server.closed(victim.node)

    def _set_a_clock(self) -> None:
        alive = [*(worker for worker in self.sim.workers if not worker.dead), *self.sim.spark.alive()]
        if alive:
            self.counts["clocks that were set"] += 1
            process: Process = self.world.random.choice(alive)
            process.wall_ahead = (2 * self.world.random.random() - 1) * self.sim.faults.clock_step_s

    def _send_garbage(self) -> None:
        """Send garbage in place of a message that is allowed there, so that only its reader can refuse it."""
        worker = self.world.random.choice(self.sim.workers)
        if not worker.dead:
            self.counts["garbage"] += 1
            frame = garble(encode(EdgeComplete(edge=0, producers=[0])), self.world.random)
            if self.world.chance(0.5):
                worker.control.send(frame)
            else:
                worker.control.reply(worker.control.identity, frame)

    def _cut_off(self) -> None:
        victim = self.world.random.choice(self.sim.workers)
        if not victim.dead and self.spares(victim):
            self.counts["workers cut off from the controller"] += 1
            seconds = self.world.random.random() * self.sim.faults.cut_s
            if self.world.chance(0.5):
                victim.control.cut(seconds)
            else:
                victim.control.cut_up(seconds)
                victim.control.cut_down(seconds)

    def _cut_a_pair(self) -> None:
        here = [worker.node for worker in self.sim.workers if not worker.dead and worker.node >= 0]
        if len(here) < 2:
            return
        sender, receiver = self.world.random.sample(here, 2)
        if self.sim.faults.pair_cuts_alone:
            if all(until <= self.world.now for until in self.network.severed.values()):
                self.counts["links cut between two workers"] += 1
                self.network.sever(sender, receiver, self.sim.faults.pair_cut_s)
                if self.sim.faults.pair_cuts_both:
                    self.network.sever(receiver, sender, self.sim.faults.pair_cut_s)
            return
        seconds = self.world.random.random() * self.sim.faults.pair_cut_s
        self.counts["links cut between two workers"] += 1
        self.network.sever(sender, receiver, seconds)
        if self.world.chance(0.4):
            self.counts["links cut in both directions"] += 1
            self.network.sever(receiver, sender, seconds)

    def _whim(self) -> None:
        cores = [
            core for core in map(self.sim.core_of, self.sim.by_node) if core is not None and core.subscriptions.streams
        ]
        if cores:
            core = self.world.random.choice(cores)
            before = core.counters.switched
            core.subscriptions.read_from_next(self.world.random.choice(list(core.subscriptions.streams.values())))
            self.counts["changes of source on a whim"] += core.counters.switched - before

    def _kill_one(self) -> None:
        alive = self.sim.spark.alive()
        if alive:
            attempt = self.world.random.choice(alive)
            self.counts["ingress tasks that died"] += 1
            self.counts["ingress tasks that died midway"] += attempt.midway
            self.counts["ingress tasks that died during a repair"] += bool(self.controller.repairs.under_way)
            self.sim.spark.failed(attempt)

    def _speculate(self) -> None:
        alive = self.sim.spark.alive()
        if alive and self.controller.phase == "running":
            attempt = self.world.random.choice(alive)
            self.counts["speculative attempts"] += 1
            self.sim.spark.attempt(self.sim.spark.job_of(attempt), attempt.index)

    # ---- crashes

    def spares(self, victim: WorkerProcess) -> bool:
        """Tell whether every partition has a safe replica on another worker that is well."""
        if self.sim.faults.reckless:
            return True
        table, members = self.controller.table, self.controller.members.workers
        if table is None:
            return True
        well = {
            node
            for node, member in members.items()
            if self.sim.core_of(node) is not None
            and node != victim.node
            and self.sim.by_node[node].paused_until <= self.world.now
            and self.world.now - member.heard < FRESH_S
        }
        if self.plan.durable:
            return bool(well)
        return all(
            any(r.worker in well and self.controller.repairs.safety.is_safe(stage, partition, r) for r in replicas)
            for stage, partitions in enumerate(table.stages)
            if partitions and (self.controller.phase != "finished" or self.plan.stages[stage].collects)
            for partition, replicas in enumerate(partitions)
        )

    def _crash_one(self) -> bool:
        victim = self.world.random.choice(self.sim.workers)
        if victim.dead or self.controller.phase == "ended" or not self.spares(victim):
            return False
        if self.world.now < self.calm_at and self.world.chance(self.sim.faults.uneven_crash_probability):
            self.network.cut_some(list(victim.links.values()), 1.0)
            self.world.after(0.005 + self.world.random.random() * 0.05, self._die, victim)
        else:
            self._die(victim)
        return True

    def _crash_all(self) -> None:
        """Crash all workers within some hundredths of a second. A table that lists one as lost may be under way."""
        for victim in self.sim.workers:
            if not victim.dead:
                self.world.after(self.world.random.random() * 0.05, self._die_unspared, victim)

    def _die_unspared(self, victim: WorkerProcess) -> None:
        if not victim.dead and self.controller.phase != "ended":
            self.sim.crash(victim)

    def _die(self, victim: WorkerProcess) -> None:
        if not victim.dead and self.controller.phase != "ended" and self.spares(victim):
            never_back = self.controller.phase == "running" and self.world.chance(
                self.sim.faults.never_back_probability
            )
            self.sim.crash(
                victim, seen=not self.world.chance(self.sim.faults.silent_crash_probability), back=not never_back
            )
            if self.world.now < self.calm_at and self.world.chance(self.sim.faults.second_crash_probability):
                self.world.after(self.world.random.random() * 0.05, self._crash_one)

    # ---- at a moment

    def twice(self) -> bool:
        """Tell whether this message comes twice."""
        return not self.network.calm and self.world.chance(self.sim.faults.twice_probability)

    def first_step(self) -> None:
        """Crash a worker, if the run wants it, when the first step was applied and no row can be acked yet."""
        self.once(self.sim.faults.crash_at_the_start, "crashes before the first ack")

    def last_batch(self) -> None:
        """Crash a worker, if the run wants it, when a source has come to its end."""
        self.once(self.sim.faults.crash_at_the_last_batch, "crashes at the last batch of a source")

    def once(self, wanted: bool, when: str) -> None:
        if wanted and when not in self._struck:
            self._struck.add(when)
            self.counts[when] += self._crash_one()
