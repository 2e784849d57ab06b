"""The shells of the simulation: what performs the effects of the state machines and feeds them events.

They do what ``flux.worker``, ``flux.ingress_loop`` and ``controller.server`` do with sockets and clocks.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from flux.background import attempt
from flux.codec import decode_batches, decode_data, decode_order, encode, encode_batches
from flux.control import (
    CopyState,
    EdgeComplete,
    Failure,
    Goodbye,
    GoodbyeSeen,
    Heartbeat,
    NewTable,
    PartitionFinished,
    Register,
    RegisterAgain,
    Rejected,
    Stop,
    TableSeen,
    Welcome,
)
from flux.errors import Fenced, FluxError, NonDeterministicInputError, ProtocolError, RefusedError
from flux.ingress_task import IngressTask
from flux.messages import Data, Hello, Install
from flux.producer import Producer, ToWorker
from flux.shell import REGISTER_EVERY_S
from flux.stage_worker import StageWorker, ToConnection
from flux.transfers import Aside, Limits
from tests.simulation.busy import Busy
from tests.simulation.network import Identity, Link, garble

if TYPE_CHECKING:
    from tests.simulation.run import Simulation

#: Virtual time of one turn of a loop.
TURN_S = 0.0002
#: Virtual time that a worker stands still while it copies the state of a partition, at most.
COPY_S = 0.004
#: How far the clock of a worker may be ahead or behind, where there are timers.
SKEW_S = 0.1
#: How often a source that is patient looks whether it may end.
HELD_BACK_S = 0.02


def draw_limits(rng: random.Random) -> Limits:
    """States in small parts and in one, made at once and in the background."""
    return Limits(rng.choice([50, 1000, 1 << 20]), rng.choice([1, 4]), rng.choice([0, 1 << 20]))


class Process:
    """Takes turns: messages in, some work, effects out. ``paused_until``: stands still; ``dead``: takes no more."""

    def __init__(self, sim: Simulation, role: str, index: int, attempt: int) -> None:
        self.sim = sim
        self.world = sim.world
        self.role, self.index, self.attempt = role, index, attempt
        self.edges: list[int] = []
        self.inbox: deque[Any] = deque()
        self.links: dict[int, Link] = {}
        self.core: StageWorker | IngressTask | None = None
        self.node = -1
        self.dead = False
        self.paused_until = 0.0
        self.wall_ahead = 0.0  # of its wall clock to its monotonic one
        self.slowness = 1.0
        self.endpoints: dict[int, str] = {}
        self.control = sim.network.link(sim.controller_hears, self._hear_control, data=False)
        self.executor = ""
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
            return  # woken earlier
        self._turn_at = float("inf")
        if self.world.now < self.paused_until:
            self.wake()
            return
        for _ in range(min(len(self.inbox), self.world.random.randint(1, 16))):
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
            if producer.log and any(
                cursor.nonce is not None and cursor.next < producer.log.end and cursor.sent_bytes >= cursor.granted
                for cursor in producer._cursors.values()
            ):
                self.sim.counts["turns without credit"] += 1

    def producers(self) -> Iterable[Producer]:
        return [] if self.core is None else self.core.producers.values()

    def turn(self) -> None:
        raise NotImplementedError

    def pause(self, seconds: float) -> None:
        self.paused_until = max(self.paused_until, self.world.now + seconds)
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
                    node=self.node,
                )
            )  # fmt: skip
        self.wake(REGISTER_EVERY_S)

    def report(self, message: Any) -> None:
        self.control.send(encode(message))

    def _hear_control(self, frame: bytes) -> None:
        try:
            order = decode_order(frame)
        except ProtocolError:
            self.sim.counts["orders that were none"] += 1
            return
        self.inbox.append((self._on_order, (order,)))
        self.wake()

    def _on_order(self, order: Any) -> None:
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
        elif isinstance(order, NewTable):
            self.endpoints = dict(order.table.endpoints)
            for worker in [worker for worker in self.links if worker not in self.endpoints]:
                self.links.pop(worker).closed = True
            self.on_new_table(order)
        elif isinstance(order, CopyState):
            self.on_copy_state(order)
        elif isinstance(order, EdgeComplete):
            self.on_edge_complete(order)
        elif isinstance(order, Rejected):
            self.on_rejected()
        elif isinstance(order, Stop):
            self.on_stop()

    def welcomed(self, incarnation: int, workers: int) -> None:
        raise NotImplementedError

    def on_new_table(self, order: NewTable) -> None:
        raise NotImplementedError

    def on_edge_complete(self, order: EdgeComplete) -> None:
        pass

    def on_copy_state(self, order: CopyState) -> None:
        raise AssertionError("only workers have state")

    def beat(self, now: float) -> None:
        if now >= self._beat_at:
            self._beat_at = now + self.sim.plan.settings.heartbeat_interval
            self.report(Heartbeat(node=self.node, progress=0, stats=self.stats(now)))

    def stats(self, now: float) -> dict[str, Any]:
        return {}

    def report_again(self) -> None:
        pass

    def on_stop(self) -> None:
        """At the end of the query it is not heeded, so that it shows whether everything comes to rest."""

    def on_goodbye_seen(self) -> None:
        raise AssertionError("only ingress tasks say goodbye")

    def on_rejected(self) -> None:
        raise NotImplementedError

    # ---- the data plane

    def send(self, effect: ToWorker) -> None:
        link = self.links.get(effect.worker)
        if link is None:
            server = self.sim.listening[self.endpoints[effect.worker]]
            worker = effect.worker
            link = self.sim.network.link(server.hear_data, lambda c: self._hear_answer(worker, c), data=True)
            self.links[worker] = link
        given = effect.batches if effect.payload is None else effect.payload
        if not self.sim.faults.encoded:
            link.send((effect.message, given))
        elif effect.payload is None:
            link.send((self.encoded(effect.message), encode_batches(effect.batches)))
        else:
            link.send((self.encoded(effect.message), given))
        if isinstance(effect.message, Install) and self.sim.strikes_twice():
            self.sim.world.after(
                self.sim.world.random.random() * self.sim.faults.late_order_s, self._again, link, effect
            )

    def _again(self, link: Link, effect: ToWorker) -> None:
        if not link.closed:
            self.sim.counts["copies of state that came twice"] += 1
            link.send((effect.message, effect.payload))

    def encoded(self, message: Any) -> bytes:
        """As it arrives: sometimes as something else."""
        frame = encode(message)
        if not self.sim.network.calm and self.world.chance(self.sim.faults.garbled_probability):
            self.sim.counts["messages that came as something else"] += 1
            self.sim.network.disturbed()
            return garble(frame, self.world.random)
        return frame

    def careless(self) -> bool:
        return self.world.chance(self.sim.faults.repeats_probability)

    def _hear_answer(self, worker: int, content: Any) -> None:
        message = self.decoded(content) if isinstance(content, bytes) else content
        if message is not None:
            self.inbox.append((self.on_answer, (worker, message)))
            self.wake()

    def decoded(self, frame: bytes) -> Any:
        """None: it is no message, which a shell counts and leaves out."""
        try:
            return decode_data(frame)
        except ProtocolError:
            self.sim.counts["messages that were none"] += 1
            return None

    def on_answer(self, worker: int, message: Any) -> None:
        raise NotImplementedError


class WorkerProcess(Process):
    def __init__(self, sim: Simulation, slot: int, attempt: int, executor: str) -> None:
        super().__init__(sim, "worker", slot, attempt)
        self.executor = executor
        self.core: StageWorker | None = None  # type: ignore[assignment]
        self._readers: dict[tuple[int, int], Iterator[pa.RecordBatch | None] | None] = {}
        self._opened: set[tuple[int, int]] = set()
        self._held_back: set[tuple[int, int]] = set()  # sources that wait with their end
        self._watched: set[int] = set()
        self.load = None if sim.demand is None else Busy(sim.demand)
        self._copying: set[tuple[int, int]] = set()  # partitions whose state was copied from here
        self._copied_aside: set[tuple[int, int]] = set()
        self._skew = (
            random.Random(f"clock {sim.seed} {attempt}").uniform(-SKEW_S, SKEW_S) if sim.dataflow.timed else 0.0
        )
        sim.listening[str(attempt)] = self
        self._unheard: list[Any] = []  # waits in the socket until the loop begins

    @property
    def clock(self) -> float:
        return self.world.now + self._skew

    def welcomed(self, incarnation: int, workers: int) -> None:
        if self.core is None:
            self.core = StageWorker(self.sim.plan, self.node, workers=workers, limits=self.sim.copies)
            self.core._credit.floor = self.sim.dataflow.credit_floor
            self.sim.by_node[self.node] = self
            self.sim.welcomed(self)
            self.sim.ledger.watch_worker(self.core)
            self.inbox.extend(self._unheard)

    def report_again(self) -> None:
        assert self.core is not None
        self.core.report_again()

    def stats(self, now: float) -> dict[str, Any]:
        return {} if self.core is None or self.load is None else {"load": self.load.report(self.core, now)}

    def on_rejected(self) -> None:
        self.sim.replaced(self)

    def on_stop(self) -> None:
        """A worker that has been emptied, or that nobody needs any more, goes for good."""
        if self.sim.controller.phase in ("starting", "running"):
            self.sim.counts["workers told to go while the query runs"] += 1
            self.report(Goodbye(node=self.node))
            self.die()

    def on_new_table(self, order: NewTable) -> None:
        core = self.core
        assert core is not None
        newer = order.table.epoch > core.epoch
        try:
            core.on_table(order.table, self.clock)
        except Fenced:
            self.sim.fenced(self)
            return
        for edge, producers in order.complete.items():
            core.on_edge_complete(edge, producers)
        self._watch(core)
        if newer:
            self.sim.ledger.watch_roles(core)
            self.sim.moves.roles(core)
        for key in self._opened - core.sources.keys():  # read by another worker from now on
            self.sim.counts["sources given to another worker"] += 1
            self._opened.discard(key)
            self._held_back.discard(key)
            self._readers.pop(key, None)
        for key in core.sources:
            if key not in self._opened:
                self._opened.add(key)
                self._readers[key] = None  # opened when it is wanted: then it is known where to begin

    def _watch(self, core: StageWorker) -> None:
        for replica in core.replicas.values():
            if id(replica) not in self._watched:
                self._watched.add(id(replica))
                self.sim.ledger.watch_replica(core, replica)
        for producer in core.producers.values():
            if id(producer) not in self._watched:
                self._watched.add(id(producer))
                self.sim.ledger.watch_producer(producer, self._current, self.careless)

    def _current(self) -> bool:
        table = self.sim.controller.table
        return table is not None and self.node in table.endpoints

    def on_edge_complete(self, order: EdgeComplete) -> None:
        assert self.core is not None
        self.core.on_edge_complete(order.edge, order.producers)

    def on_copy_state(self, order: CopyState) -> None:
        assert self.core is not None
        self.core.on_copy_state(order)

    def hear_data(self, identity: Identity, content: Any) -> None:
        self.inbox.append((self._on_data_plane, (identity, *content)))
        self.wake()

    def _on_data_plane(self, identity: Identity, message: Any, batches: Any) -> None:
        core = self.core
        if core is None:
            self._unheard.append((self._on_data_plane, (identity, message, batches)))
            return
        if isinstance(message, bytes):
            message = self.decoded(message)
            if message is None:
                return
            if isinstance(message, Data):
                known = core.knows(identity, message)
                batches = decode_batches(message, batches, self.sim.plan.edges[message.edge].schema) if known else []
        if isinstance(message, Install):
            self.sim.counts["copies of state in several parts"] += message.offset > 0
            self._installing(core, core.on_install, identity, message, batches)
            return
        if isinstance(message, Hello) and message.epoch > core.epoch:
            self.sim.counts["greetings of a newer epoch"] += 1
        core.on_data_plane(identity, message, batches, self.clock)

    def _installing(self, core: StageWorker, event: Callable[..., None], *given: Any) -> None:
        """Perhaps a replica comes to life."""
        known = set(core.replicas.values())
        event(*given, self.clock)
        self.sim.counts["copies of state installed"] += set(core.replicas.values()) != known
        self._watch(core)

    def on_answer(self, worker: int, message: Any) -> None:
        assert self.core is not None
        self.core.on_answer(worker, message, self.clock)

    def turn(self) -> None:
        core, now = self.core, self.clock
        assert core is not None
        steps = self.world.random.randint(1, 4)
        worked = 0
        while worked < steps and core.work(now):
            worked += 1
        if worked < steps:
            self.sim.ledger.check_idle(core, now)
        if worked:
            self.sim.first_step()
            if self.dead or self._in_a_long_step():
                return
        busy = bool(worked)
        if not busy or core.ticked:
            busy = self._read(core) or busy
        if self.dead:
            return
        for producer in core.producers.values():
            if producer.dirty:
                self.sim.ledger.publish(producer)
        sent = False
        for effect in core.poll(now):
            sent = True
            if isinstance(effect, ToWorker):
                self.send(effect)
                if isinstance(effect.message, Install) and effect.message.offset == 0:
                    self._stall(effect.message)
            elif isinstance(effect, Aside):
                self._aside(effect)
            elif isinstance(effect, ToConnection):
                content = self.encoded(effect.message) if self.sim.faults.encoded else effect.message
                assert isinstance(effect.connection, tuple)
                self.sim.network.of(effect.connection).reply(effect.connection, content)
            else:
                if isinstance(effect.message, PartitionFinished):
                    self.sim.ledger.check_finished(core, effect.message)
                self.report(effect.message)
        self.beat(now)
        if busy or sent:
            self.sim.ledger.check_worker(core)
            self.note_credit()
        if busy:
            self.wake(TURN_S * self.slowness)
        else:
            waiting = any(core.wants(*key) for key in self._readers if key not in self._held_back)
            rest = min(core.due(), self._beat_at, now + self.sim.idle_source_s if waiting else self._beat_at) - now
            if self._held_back:
                rest = min(rest, HELD_BACK_S)
            self.wake(max(rest, TURN_S * self.slowness))

    def _in_a_long_step(self) -> bool:
        """What it gives goes out when it is over, and what has come meanwhile is read then."""
        faults = self.sim.faults
        if self.sim.network.calm or not self.world.chance(faults.slow_step_probability):
            return False
        seconds = self.world.random.random() * faults.slow_step_s
        if seconds > self.sim.plan.settings.heartbeat_timeout / 2 and not self.sim._spares(self):
            return False
        self.sim.counts["long steps"] += 1
        self.pause(seconds)
        self.wake()
        return True

    def _stall(self, install: Install) -> None:
        """It took time to copy the state, and the whole worker stood still."""
        if (install.stage, install.partition) in self._copied_aside:
            self._copied_aside.discard((install.stage, install.partition))
            return
        seconds = self.world.random.random() * COPY_S
        self._note_stall((install.stage, install.partition), seconds)
        self.pause(seconds)

    def _aside(self, effect: Aside) -> None:
        """Another thread does it; what it reads must not change meanwhile, so it is read at the end."""
        seconds = self.world.random.random() * COPY_S
        if effect.what == "copy":
            self._copied_aside.add(effect.key)
            self._note_stall(effect.key, seconds)
        self.sim.counts[f"states in the background: {effect.what}"] += 1
        self.world.after(seconds, self._aside_done, effect)

    def _aside_done(self, effect: Aside) -> None:
        if not self.dead:
            assert self.core is not None
            done = (self._installing, (self.core, self.core.on_done, effect.token, attempt(effect.job)))
            self.inbox.append(done)
            self.wake()

    def _note_stall(self, key: tuple[int, int], seconds: float) -> None:
        """A deposed primary that does not know yet holds up nobody: another one leads its partition."""
        if self.sim.leader_of(*key) == self.node:
            self._copying.add(key)
            self.sim.ledger.stall(*key, self.world.now, seconds)

    def die(self) -> None:
        super().die()
        self.sim.ledger.resume_all(self._copying)

    def _open(self, core: StageWorker, source: int, partition: int) -> Iterator[pa.RecordBatch | None]:
        plan = self.sim.plan.sources[source]
        assert plan.read is not None
        start = core.source_start(source, partition)
        self.sim.counts["sources read again from the middle"] += start > 0
        self.sim.counts["sources read by another worker"] += (
            core.sources[source, partition].producers[0].incarnation > 0
        )
        return iter(plan.read(partition, start) if plan.seeks else plan.read(partition))

    def _read(self, core: StageWorker) -> bool:
        for key, reader in self._readers.items():
            if not core.wants(*key):
                self.sim.counts["turns with a full log"] += not core.sources[key].has_room
                continue
            if reader is None:
                reader = self._readers[key] = self._open(core, *key)
            batch = next(reader, "end")
            if batch is None:
                continue
            if batch == "end" and not self.sim.may_end(*key):
                self._readers[key] = iter(())
                self._held_back.add(key)
                continue
            core.on_source(*key, None if batch == "end" else batch, self.clock)
            if batch == "end":
                del self._readers[key]
                self.sim.last_batch()
            return True
        return False


class IngressProcess(Process):
    """One attempt of one task of the Spark job that reads a source."""

    def __init__(
        self, sim: Simulation, source: int, partition: int, attempt: int, batches: Iterator[pa.RecordBatch]
    ) -> None:
        super().__init__(sim, "ingress", partition, attempt)
        self.edges = [edge.id for edge in sim.plan.edges_of_source(source)]
        self.source = source
        self.core: IngressTask | None = None  # type: ignore[assignment]
        self.drained = False
        self._batches: Iterator[pa.RecordBatch] | None = batches
        self._ready = False
        self._read_at = 0.0

    @property
    def midway(self) -> bool:
        """Has sent something and not everything."""
        return self.core is not None and self._batches is not None and self.core.streams.rows > 0

    def welcomed(self, incarnation: int, workers: int) -> None:
        if self.core is None:
            self.core = IngressTask(self.sim.plan, self.source, self.index, self.attempt)
            for producer in self.core.producers.values():
                self.sim.ledger.watch_producer(producer, self._current, self.careless)

    def _current(self) -> bool:
        member = self.sim.controller.members.ingress.get((tuple(self.edges), self.index))
        return member is not None and member.about.attempt == self.attempt

    def on_new_table(self, order: NewTable) -> None:
        assert self.core is not None
        self.core.on_table(order.table, self.world.now)
        self._ready = True
        self.report(TableSeen(node=self.node, epoch=order.table.epoch))

    def on_goodbye_seen(self) -> None:
        if not self.dead:
            self.sim.attempt_finished(self)

    def beat(self, now: float) -> None:
        if now >= self._beat_at and self.drained:
            self.report(Goodbye(node=self.node))
        super().beat(now)

    def on_rejected(self) -> None:
        self.sim.counts["attempts that came after a newer one"] += 1
        self.sim.attempt_failed(self)

    def on_answer(self, worker: int, message: Any) -> None:
        assert self.core is not None
        self._guarded(lambda: self.core.on_answer(worker, message, self.world.now))

    def _guarded(self, call: Any) -> None:
        try:
            call()
        except RefusedError as error:
            if error.code != "stale":
                raise
            self.sim.counts["attempts that gave way to a newer one"] += 1
            self.sim.attempt_failed(self)
        except NonDeterministicInputError as error:
            self.fail(error)

    def fail(self, error: FluxError) -> None:
        """The controller ends the query, unless it has heard of a newer attempt; Spark tries again in any case."""
        self.report(Failure(node=-1, kind=type(error).__name__, message=str(error)))
        self.sim.counts["attempts that read other rows"] += 1
        self.sim.attempt_failed(self)

    def turn(self) -> None:
        self._guarded(self._turn_guarded)

    def _turn_guarded(self) -> None:
        core, now = self.core, self.world.now
        assert core is not None
        if self._ready and self._batches is not None:
            if not core.has_room:
                self.sim.counts["turns with a full log"] += 1
            elif now >= self._read_at:
                self._read_at = now + self.world.random.random() * self.sim.faults.read_s
                self._append(core, now)
        for producer in core.producers.values():
            self.sim.ledger.publish(producer)
        for effect in core.poll(now):
            self.send(effect)
        self.beat(now)
        self.note_credit()
        for stream, producer in core.producers.items():
            self.sim.ledger.check_log(producer.log, stream, "an ingress task")
        if core.drained and not self.drained:
            self.drained = True
            self.report(Goodbye(node=self.node))
        reads = self._ready and self._batches is not None and core.has_room
        rest = min(self.sim.plan.settings.resend_timeout / 4, self._beat_at - now)
        self.wake(max(min(rest, self._read_at - now) if reads else rest, TURN_S * self.slowness))

    def _append(self, core: IngressTask, now: float) -> None:
        assert self._batches is not None
        batch = next(self._batches, None)
        if batch is None and not self.sim.may_end(self.source, self.index):
            self._batches = iter(())
            self._read_at = now + HELD_BACK_S
        elif batch is None:
            self._batches = None
            core.finish(now)
            self.sim.last_batch()
        else:
            core.append(batch, now)
