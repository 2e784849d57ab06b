"""The common part of all processes of the simulation: turns, the connection to the controller, and messages to workers.

A process acts in virtual time as the loops of ``flux.shell`` do with sockets and clocks: messages in, some work, effects out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from flux.errors import ProtocolError
from flux.exchange.producer import Producer, ToWorker
from flux.shell.process import REGISTER_EVERY_S
from flux.tasks.ingress import IngressTask
from flux.wire.codec import decode_command, decode_data, encode_batches
from flux.wire.control import (
    CopyState,
    EdgeComplete,
    EdgeStored,
    GoodbyeSeen,
    Heartbeat,
    HeartbeatSeen,
    LastCheckpoints,
    NewTable,
    PlanChanged,
    Register,
    RegisterAgain,
    Rejected,
    Stop,
    TableChanged,
    TableMissed,
    Welcome,
)
from flux.wire.frames import encode
from flux.wire.messages import Install
from flux.worker.core import WorkerCore
from flux.worker.table_follower import TableFollower
from partitioning.table import Table
from tests.simulation.network import Link, garble

if TYPE_CHECKING:
    from tests.simulation.run import Simulation

#: Virtual time of one turn of a loop.
TURN_S = 0.0002
#: Number of steps that took long whose times a process remembers.
STEPS_KEPT = 8
#: How often a source that is patient looks whether it may end.
HELD_BACK_S = 0.02


class Process:
    """A process that takes turns: messages in, some work, effects out."""

    def __init__(self, sim: Simulation, role: str, index: int, attempt: int) -> None:
        self.sim = sim
        self.world = sim.world
        self.role, self.index, self.attempt = role, index, attempt
        self.edges: list[int] = []
        self.inbox: deque[Any] = deque()
        self.links: dict[int, Link] = {}
        self.core: WorkerCore | IngressTask | None = None
        self.node = -1
        self.newest = TableFollower(sim.plan.settings.resend_timeout)
        #: A dead process takes no more turns.
        self.dead = False
        #: The process takes no turn before this time.
        self.paused_until = 0.0
        self.stopped_since = self.stopped_until = 0.0  # a stop of the whole process, and not only of its loop
        self.busy_since = 0.0
        self.busy_before = deque([(0.0, 0.0)], STEPS_KEPT)  # begin and end of the steps before
        self.wall_ahead = 0.0  # difference of the wall clock to the monotonic one
        self.slowness = 1.0
        self.endpoints: dict[int, str] = {}
        self.control = sim.network.link(sim.server.hears, self._hear_control, data=False)
        self.executor = ""
        self.first_epoch = 0
        self._registered_at = -1.0
        self._beat_at = 0.0
        self._turn_at = float("inf")
        self.wake()

    # ---- turns

    def wake(self, delay_s: float = 0.0) -> None:
        at = max(self.world.now + delay_s, self.paused_until)
        if not self.dead and at < self._turn_at:
            self._turn_at = at
            self.world.at(at, self._turn, at)

    def _turn(self, at: float) -> None:
        if self.dead or at != self._turn_at:
            return  # the process was woken earlier, and this turn is void
        self._turn_at = float("inf")
        if self.world.now < self.paused_until:
            self.wake()
            return
        for _ in range(min(len(self.inbox), self.world.throw(16))):
            handle, given = self.inbox.popleft()
            handle(*given)
            if self.dead:
                return
        if self.node < 0:
            self._register()
        else:
            assert self.core is not None
            self.core.wall_ahead = self.wall_ahead
            self.turn()
        if self.inbox:
            self.wake(TURN_S * self.slowness)

    def note_credit(self) -> None:
        for producer in self.producers():
            if not producer.log:
                continue
            end = producer.log.end
            for cursor in producer._cursors.values():
                if cursor.nonce is not None and cursor.next < end and cursor.sent_bytes >= cursor.granted:
                    self.sim.counts["turns without credit"] += 1
                    break

    def producers(self) -> Iterable[Producer]:
        return [] if self.core is None else self.core.producers.values()

    def turn(self) -> None:
        raise NotImplementedError

    def pause(self, seconds: float, busy: bool = False) -> None:
        """Take no turn for a while. ``busy``: because of a long step; else the whole process is stopped."""
        now = self.world.now
        if busy:
            self.busy_before.append((self.busy_since, self.paused_until))
            self.busy_since = now
        else:
            self.stopped_since = self.stopped_since if now < self.stopped_until else now
            self.stopped_until = max(self.stopped_until, now + seconds)
        self.paused_until = max(self.paused_until, now + seconds)
        self.sim.network.disturbed(self.paused_until)

    def die(self) -> None:
        self.dead = True
        self.sim.network.disturbed()
        self.control.closed = True
        for link in self.links.values():
            link.abandon()

    # ---- the controller

    def _register(self) -> None:
        if self.world.now >= self._registered_at + REGISTER_EVERY_S:
            self._registered_at = self.world.now
            self.report(
                Register(
                    role=self.role, index=self.index, attempt=self.attempt, host=self.sim.host_of(self.executor),
                    pid=self.index, executor=self.executor, endpoint=str(self.attempt), edges=self.edges,
                    node=self.node, first_epoch=self.first_epoch,
                )
            )  # fmt: skip
        self.wake(REGISTER_EVERY_S)

    def report(self, message: Any) -> None:
        self.control.send(encode(message))

    def _hear_control(self, frame: bytes) -> None:
        try:
            order = decode_command(frame)
        except ProtocolError:
            self.sim.counts["orders that were none"] += 1
            return
        self.inbox.append((self._on_command, (order,)))
        self.wake()

    def _on_command(self, order: Any) -> None:
        if isinstance(order, Welcome):
            again, self.node = self.node >= 0, order.node
            self.welcomed(order.incarnation, order.workers)
            if again:
                self.report_again()
        elif isinstance(order, RegisterAgain):
            if self.node >= 0:
                self.sim.counts["registrations on a new connection"] += 1
                self._registered_at = -1.0
                self._register()
        elif isinstance(order, GoodbyeSeen):
            self.on_goodbye_seen()
        elif isinstance(order, NewTable | TableChanged):
            self._on_table(order)
        elif isinstance(order, HeartbeatSeen):
            self.newest.heard_of(order.epoch)
            self.on_heartbeat_seen(order)
            self._ask_for_table()
        elif isinstance(order, CopyState):
            self.on_copy_state(order)
        elif isinstance(order, PlanChanged):
            self.on_plan_changed(order)
        elif isinstance(order, LastCheckpoints):
            self.on_last_checkpoints(order.epoch)
        elif isinstance(order, EdgeComplete):
            self.on_edge_complete(order)
        elif isinstance(order, EdgeStored):
            self.on_edge_stored(order)
        elif isinstance(order, Rejected):
            self.on_rejected()
        elif isinstance(order, Stop):
            self.on_stop()

    def welcomed(self, incarnation: int, workers: int) -> None:
        raise NotImplementedError

    def _on_table(self, order: NewTable | TableChanged) -> None:
        table = self.newest.take(order)
        if table is not None:
            self.sim.server.check_table(table)
            self.endpoints = dict(table.endpoints)
            for worker in [worker for worker in self.links if worker not in self.endpoints]:
                self.links.pop(worker).closed = True
            self.on_new_table(table)
        if isinstance(order, NewTable) and not self.dead:
            self.on_whole_table(order, table is not None)
        self._ask_for_table()

    def _ask_for_table(self) -> None:
        if not self.dead and self.newest.ask(self.world.now):
            self.sim.counts["tables asked for"] += 1
            self.report(TableMissed(node=self.node, epoch=self.newest.epoch))

    def on_new_table(self, table: Table) -> None:
        raise NotImplementedError

    def on_whole_table(self, order: NewTable, newer: bool) -> None:
        raise NotImplementedError

    def on_edge_complete(self, order: EdgeComplete) -> None:
        pass

    def on_edge_stored(self, order: EdgeStored) -> None:
        pass

    def on_plan_changed(self, order: PlanChanged) -> None:
        raise NotImplementedError

    def on_copy_state(self, order: CopyState) -> None:
        raise AssertionError("only workers have state")

    def on_last_checkpoints(self, epoch: int) -> None:
        raise AssertionError("only workers have state")

    def beat(self, now: float) -> None:
        if now >= self._beat_at:
            self._beat_at = now + self.sim.plan.settings.heartbeat_interval
            self._ask_for_table()
            self.report(Heartbeat(node=self.node, progress=0, stats=self.stats(now)))

    def on_heartbeat_seen(self, order: HeartbeatSeen) -> None:
        pass

    def stats(self, now: float) -> dict[str, Any]:
        return {}

    def report_again(self) -> None:
        pass

    def on_stop(self) -> None:
        """Ignore the order to stop at the end of the query, so that the run shows whether everything comes to rest."""

    def on_goodbye_seen(self) -> None:
        raise AssertionError("only ingress tasks say goodbye")

    def on_rejected(self) -> None:
        raise NotImplementedError

    # ---- the data plane

    def send(self, effect: ToWorker) -> None:
        link = self.links.get(effect.worker)
        if link is None:
            if effect.worker not in self.endpoints:
                return  # as the shell does: a newer table is known here, and its version of the plan has still to come
            server = self.sim.listening[self.endpoints[effect.worker]]
            worker = effect.worker
            ends = self.node, worker
            link = self.sim.network.link(server.hear_data, lambda c: self._hear_answer(worker, c), True, ends)
            self.links[worker] = link
        given = effect.batches if effect.payload is None else effect.payload
        if not self.sim.faults.encoded:
            link.send((effect.message, given))
        elif effect.payload is None:
            link.send((self.encoded(effect.message), encode_batches(effect.batches)))
        else:
            link.send((self.encoded(effect.message), given))
        if isinstance(effect.message, Install) and self.sim.strikes.twice():
            self.sim.world.after(
                self.sim.world.random.random() * self.sim.faults.late_order_s, self._again, link, effect
            )

    def _again(self, link: Link, effect: ToWorker) -> None:
        if not link.closed:
            self.sim.counts["copies of state that came twice"] += 1
            link.send((effect.message, effect.payload))

    def encoded(self, message: Any) -> bytes:
        """Encode a message as it arrives, sometimes garbled."""
        frame = encode(message)
        if not self.sim.network.calm and self.world.chance(self.sim.faults.garbled_probability):
            self.sim.counts["messages that came as something else"] += 1
            self.sim.network.disturbed()
            return garble(frame, self.world.random)
        return frame

    def careless(self) -> bool:
        careless = self.world.chance(self.sim.faults.repeats_probability)
        if careless:  # a reader with little credit gets the whole log again, one message at a time
            self.sim.network.disturbed()
        return careless

    def _hear_answer(self, worker: int, content: Any) -> None:
        message = self.decoded(content) if isinstance(content, bytes) else content
        if message is not None:
            self.inbox.append((self.on_answer, (worker, message)))
            self.wake()

    def decoded(self, frame: bytes) -> Any:
        """Decode a frame. Return None for a frame that is no message: a shell counts and drops such frames."""
        try:
            return decode_data(frame)
        except ProtocolError:
            self.sim.counts["messages that were none"] += 1
            return None

    def on_answer(self, worker: int, message: Any) -> None:
        raise NotImplementedError
