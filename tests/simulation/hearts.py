"""Pulses: signs of life that workers send without their loop, and long steps in which the loop sends nothing
(``flux.shell.liveness_thread``).

A busy worker takes no turn: no heartbeat, no answer. Its pulses go on, and say that the loop has not turned. A stopped process
sends neither. The laws keep books of their own of the messages that the controller has heard, and of their times:

a pulsing worker is not given up          for silence, as long as the step is within spark.flux.step.timeout
a step beyond step.timeout is given up    with that reason, and no other worker is
a stopped worker is given up              after heartbeat.timeout, if each of its partitions has an active replica that keeps
                                          up, a standby or the directory, and otherwise after heartbeat.lastReplicaTimeout

Each law allows the time that the rule of the controller takes (design: silence), and one look of the controller after that.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from controller.replicas.replica_safety import Life
from controller.report.events import Event
from flux.wire.control import Heartbeat, Register
from flux.wire.pulse import LoopActivity, Pulse
from partitioning.ids import STANDBY, UPSTREAM
from partitioning.table import ReplicaAt
from tests.simulation.network import Identity
from tests.simulation.violation import Violation
from tests.simulation.world import TICK_S

if TYPE_CHECKING:
    from tests.simulation.run import Simulation
    from tests.simulation.worker_process import WorkerProcess

#: The time that a pulse is on its way, on a connection of its own, which nothing holds up.
WAY_S = 0.001
#: The time from the moment when a worker is to be given up to the first look of the controller after that: one tick, or two if
#: sums of floats differ.
LOOKED_AT_S = 2 * TICK_S


@dataclass
class Heart:
    """The pulses of one worker, as the controller has heard them."""

    process: WorkerProcess
    #: Turns of the worker's loop.
    turns: int = 0
    #: The newest number of turns that a pulse has told.
    count: int = -1
    #: Pulses that have repeated that number.
    still: int = 0
    #: The time of the newest pulse.
    heard: float = 0.0
    #: The time of the last message that speaks against silence.
    said_at: float = inf
    #: The time of the last message that speaks against a loop that stands still.
    turned_at: float = inf
    #: The time since which pulses have said, without a break, that the loop stands still.
    known_busy_at: float = -inf
    #: The time at which other workers could first go on with all partitions of this one, while it is stopped.
    spared_since: float | None = None


class Hearts:
    """Pulses of all workers of a run, and the check of their laws."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        #: Whether workers pulse in this run at all.
        self.beats = sim.faults.pulses
        self._hearts: dict[WorkerProcess, Heart] = {}
        self._rng = random.Random(f"pulses {sim.seed}")

    @property
    def every_s(self) -> float:
        return self.sim.plan.settings.heartbeat_interval

    def start(self, process: WorkerProcess) -> None:
        if self.beats:
            heart = self._hearts[process] = Heart(process)
            self.sim.world.after(self._rng.random() * self.every_s, self._beat, heart)

    def turned(self, process: WorkerProcess) -> None:
        if self.beats:
            self._hearts[process].turns += 1

    def reported(self, connection: Identity, report: object) -> None:
        """Note a report that the controller reads. It believes no process that has not proved the secret on this connection."""
        if not self.beats or not isinstance(report, Heartbeat | Register):
            return
        if isinstance(report, Register) or self.sim.controller.members.by_connection(connection) is not None:
            heart = next((h for h in self._hearts.values() if h.process.control.number == connection[0]), None)
            if heart is not None:
                heart.said_at = heart.turned_at = self.sim.world.now

    def long_step(self, process: WorkerProcess) -> float | None:
        """Draw the seconds that the step takes which was just made; None: it is not long."""
        sim, faults = self.sim, self.sim.faults
        if not self.beats or sim.network.calm or self._rng.random() >= faults.busy_step_probability:
            return None
        seconds = self._rng.random() * faults.busy_step_s
        limit = sim.plan.settings.step_timeout
        if not sim.strikes.spares(process):
            seconds = min(seconds, limit / 2)  # a worker that takes longer is given up, also with the last copy
        sim.counts["steps longer than the time for heartbeats"] += seconds > sim.plan.settings.heartbeat_timeout
        sim.counts["steps beyond step.timeout"] += seconds > limit
        return seconds

    def _beat(self, heart: Heart) -> None:
        process, sim = heart.process, self.sim
        now = sim.world.now
        if process.dead or sim.controller.phase == "ended":
            return
        sim.world.after(self.every_s, self._beat, heart)
        self._check_overdue(heart, now)
        if process.node < 0 or now < process.stopped_until:
            return
        busy = now < process.paused_until
        kind = LoopActivity.STEP if busy else LoopActivity.WAITS
        stage, partition = next(iter(process.core.replicas), (0, 0)) if process.core is not None else (0, 0)
        pulse = Pulse(heart.turns, kind, stage, partition, 0)
        sim.world.after(WAY_S, self._arrives, heart, pulse)

    def _arrives(self, heart: Heart, pulse: Pulse) -> None:
        sim, process = self.sim, heart.process
        if process.dead or sim.server.sleeps(self._arrives, heart, pulse):
            return
        now = sim.world.now
        same = pulse.busy and pulse.turns == heart.count
        if not same:
            heart.turned_at = now
        else:
            if heart.known_busy_at <= heart.turned_at or now - heart.said_at > sim.plan.settings.heartbeat_timeout:
                heart.known_busy_at = now
            heart.said_at = now
        heart.count, heart.still, heart.heard = pulse.turns, heart.still + 1 if same else 0, now
        sim.counts["pulses of workers that were busy"] += same
        sim.server.perform(sim.controller.on_pulse(process.node, pulse, now))

    # ---- the laws

    def _check_overdue(self, heart: Heart, now: float) -> None:
        sim, process = self.sim, heart.process
        settings, faults = sim.plan.settings, sim.faults
        if process.node not in sim.controller.members.workers or sim.controller.phase != "running":
            return
        if faults.controller_pauses_per_s:  # a controller that stood still itself has patience
            return
        stopped = now < process.stopped_until
        heart.spared_since = (heart.spared_since or now) if stopped and self._others_go_on(heart) else None
        if stopped:
            due = heart.said_at + settings.heartbeat_last_timeout
            if heart.spared_since is not None:
                # Other workers may be able to go on only since then, by a repair, or by a replica that has caught up.
                due = min(due, max(heart.said_at + settings.heartbeat_timeout, heart.spared_since))
            if now > due + LOOKED_AT_S:
                raise Violation("a stopped worker is given up", f"worker {process.node}")
        elif now < process.paused_until and self._seems_busy(heart, now):
            due = max(heart.turned_at + settings.step_timeout, heart.known_busy_at)
            if now > due + LOOKED_AT_S:
                raise Violation("a step beyond step.timeout is given up", f"worker {process.node}")

    def _seems_busy(self, heart: Heart, now: float) -> bool:
        """Tell whether pulses have said that the loop stands still, since its last turn and lately."""
        lately = now - heart.said_at <= self.sim.plan.settings.heartbeat_timeout
        return lately and heart.still > 0 and heart.known_busy_at > heart.turned_at

    def _others_go_on(self, heart: Heart) -> bool:
        """Tell whether each partition that a worker leads can go on elsewhere, as far as the controller knows: with a standby
        that has arrived, with an active replica that keeps up, or from the directory. Partitions of which the worker has a
        secondary go on with their primary."""
        sim, node = self.sim, heart.process.node
        controller = sim.controller
        table, repairs = controller.table, controller.repairs
        if table is None:
            return False
        can_apply = repairs.safety.is_heir_of_silent(heart.said_at + sim.plan.settings.heartbeat_timeout / 2)
        restores = self._directory_answers(node)

        def is_heir(stage: int, partition: int, replica: ReplicaAt) -> bool:
            if replica.kind in (STANDBY, UPSTREAM):
                life = Life(stage, partition, replica.worker, replica.incarnation)
                return replica.live and life not in repairs.safety.unsafe
            return can_apply(stage, partition, replica)

        return all(
            restores or any(is_heir(stage, partition, heir) for heir in replicas[1:])
            for stage, partitions in enumerate(table.stages)
            for partition, replicas in enumerate(partitions)
            if replicas and replicas[0].worker == node
        )

    def _directory_answers(self, stopped: int) -> bool:
        """Tell whether the vault can give the partitions of a stopped worker to another one. The vault and that other worker were
        heard in the first half of the time that a silence may last, so the controller counts on both until the next beat."""
        sim, members = self.sim, self.sim.controller.members
        others = [member for node, member in members.workers.items() if node != stopped]
        lately = sim.world.now - sim.plan.settings.heartbeat_timeout / 2
        return (
            members.vault is not None
            and members.vault.heard >= lately
            and any(member.heard >= lately for member in others)
        )

    def look(self, events: list[Event]) -> None:
        """Check the events of a decision of the controller."""
        for event in events if self.beats else ():
            process = self.sim.by_node.get(event.worker) if event.kind == "loss" else None
            if process is None or process.dead:
                continue
            heart, now, settings = self._hearts[process], self.sim.world.now, self.sim.plan.settings
            at_it = process.busy_since <= now < process.paused_until and now >= process.stopped_until
            if event.why.startswith("no heartbeat"):
                if at_it and heart.still and now - heart.heard <= settings.heartbeat_timeout:
                    raise Violation("a pulsing worker is not given up", str(event))
                self.sim.counts["stopped workers that were given up"] += now < process.stopped_until
            elif "step.timeout" in event.why:
                # The controller may not have heard yet that the step is over.
                lately = any(
                    now - over <= settings.heartbeat_timeout and now - began > settings.step_timeout
                    for began, over in process.busy_before
                )
                if now - process.busy_since <= settings.step_timeout and not lately:
                    raise Violation(
                        "a pulsing worker is not given up",
                        f"{event}: it has been at it for {now - process.busy_since:.3f} s",
                    )
                self.sim.counts["workers given up in a step beyond step.timeout"] += 1
