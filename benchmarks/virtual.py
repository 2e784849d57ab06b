"""A cluster of any size on one thread: the real controller, a few real workers, and simulated ones that only answer.

Every message to and from the controller is made and read by the real encoders and counted, for all workers. Simulated workers
confirm tables, report loads and report that their replicas have arrived, at once. A real worker follows every table and greets
all others, which answer; no rows flow, and states are empty, so that only the costs of the cluster itself remain. CPU time is
that of the state machines and encoders, measured here, and that of the sockets by a model (``SocketCost``).
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

import flux
from controller.decide.controller import Controller, Tell
from controller.planning.compiler import compile_plan
from flux.dataflow.plan import Plan
from flux.dataflow.source import DataFrameSource
from flux.exchange.producer import Producer, ToWorker
from flux.settings import Settings
from flux.shell.transport import Sockets
from flux.wire.codec import decode_command, decode_report
from flux.wire.control import (
    CopyState,
    FromController,
    Heartbeat,
    NewTable,
    Register,
    ReplicaCaughtUp,
    TableChanged,
    TableSeen,
)
from flux.wire.frames import encode
from flux.wire.messages import Hello, Needed, Resume
from flux.worker.core import WorkerCore
from flux.worker.effects import ToConnection, ToController
from flux.worker.report import load, stats
from flux.worker.table_follower import TableFollower
from partitioning.table import Table

SCHEMA = pa.schema([("k", pa.int64())])
#: No worker is given up while time is made to pass.
SETTINGS = Settings.of(
    {f"spark.flux.heartbeat.{limit}": "1h" for limit in ("timeout", "lastReplicaTimeout")}
    | {"spark.flux.balance.enabled": "false"}
)
#: Latency of the network, one way; and the longest time between two looks of the controller for work.
LATENCY_S, TICK_S = 0.0005, 0.01
#: Messages to which the model of sockets is fitted: many small ones, and fewer large ones.
SMALL, LARGE = (2000, 100), (200, 200_000)


class Counts(flux.Aggregate):
    n = flux.count()


class Passed(flux.Operator):
    schema = SCHEMA

    def process(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        yield batch


@dataclass
class Spent:
    """CPU seconds of a process, and its sent and received bytes."""

    cpu_s: float = 0.0
    messages: int = 0
    sent: int = 0
    received: int = 0

    @contextmanager
    def timed(self) -> Any:
        began = time.thread_time()
        try:
            yield
        finally:
            self.cpu_s += time.thread_time() - began

    def sends(self, nbytes: int) -> None:
        self.messages, self.sent = self.messages + 1, self.sent + nbytes

    def receives(self, nbytes: int) -> None:
        self.messages, self.received = self.messages + 1, self.received + nbytes

    @property
    def bytes(self) -> int:
        return self.sent + self.received


@dataclass(frozen=True)
class SocketCost:
    """CPU seconds of one end of a connection: for a message, and for each byte of it."""

    message_s: float
    byte_s: float

    @classmethod
    def calibrated(cls) -> SocketCost:
        """Measure the cost on this machine: messages over loopback, half of the CPU time of the process for each end."""
        (few, short), (many, long) = ((_message_s(*sizes), sizes[1]) for sizes in (SMALL, LARGE))
        byte_s = max(many - few, 0.0) / (long - short)
        return cls(few, byte_s)

    def of(self, spent: Spent) -> float:
        """Compute CPU seconds, including the sockets."""
        return spent.cpu_s + spent.messages * self.message_s + spent.bytes * self.byte_s


def _message_s(count: int, size: int) -> float:
    near, far = Sockets(None, b"calibration"), Sockets(None, b"calibration")
    try:
        port = far.port("127.0.0.1")
        link = near.link(port.endpoint)
        while not link.ready:
            for sockets in (near, far):
                for ready in sockets.wait(0.001):
                    list(ready.receive())
        message, heard = [bytes(size)], 0
        began = time.process_time()
        for _ in range(count):
            link.send(message)
            heard += len(list(port.receive())) if port in far.wait(0) else 0
        while heard < count:
            heard += len(list(port.receive())) if port in far.wait(0.01) else 0
        return (time.process_time() - began) / count / 2
    finally:
        near.close()
        far.close()


class RealWorker:
    """A real worker, driven by the frames of the controller."""

    def __init__(self, plan: Plan, worker: int, workers: int) -> None:
        self.worker = worker
        self.spent = Spent()
        self.core = WorkerCore(plan, worker, workers=workers)
        self._newest = TableFollower(1.0)
        self._now = 0.0

    def hear(self, frame: bytes, hosts: Callable[[int, int], list[int]]) -> None:
        """Receive a table. ``hosts`` gives the partitions of a stage on a worker."""
        self._now += 0.001
        with self.spent.timed():
            self.spent.receives(len(frame))
            command = decode_command(frame)
            assert isinstance(command, NewTable | TableChanged)
            table = self._newest.take(command)
            assert table is not None
            self.core.on_table(table, self._now)
        self._answered(self._turn(), hosts)

    def _turn(self) -> list[ToWorker]:
        """Return the greetings among the messages that it sends."""
        greetings = []
        with self.spent.timed():
            for effect in self.core.poll(self._now):
                if isinstance(effect, ToWorker | ToConnection | ToController):
                    self.spent.sends(len(encode(effect.message)))
                if isinstance(effect, ToWorker) and isinstance(effect.message, Hello):
                    greetings.append(effect)
        return greetings

    def _answered(self, greetings: list[ToWorker], hosts: Callable[[int, int], list[int]]) -> None:
        for effect in greetings:
            hello = effect.message
            assert isinstance(hello, Hello)
            mine = hosts(self.core.plan.edges[hello.edge].consumer, effect.worker)
            needed = [Needed(partition, 0) for partition in mine]
            resume = Resume(hello.edge, hello.producer, 1, 0, needed, -1, [], 1 << 40, [])
            self.spent.receives(len(encode(resume)))
            with self.spent.timed():
                self.core.on_answer(effect.worker, resume, self._now)
        if greetings:
            self._turn()

    def producer(self) -> Producer:
        """Return a producer whose stream the other stage reads."""
        return next(producer for producer in self.core.producers.values() if producer.stream.edge == 1)

    def heartbeat(self) -> bytes:
        with self.spent.timed():
            said = stats(self.core)
            said["load"] = load(self.core, self._now)
            frame = encode(Heartbeat(node=self.worker, progress=1, stats=said))
        self.spent.sends(len(frame))
        return frame


@dataclass
class VirtualCluster:
    """A cluster with two stages of two replicas.

    ``real`` are the workers with the highest numbers, as many as asked for; repairs are made on the others. ``out`` is the
    spending of the controller on the table after each loss."""

    workers: int
    partitions: int
    real_workers: int = 2
    driver: Spent = field(default_factory=Spent)
    to_worker: Counter[int] = field(default_factory=Counter)  # bytes between the controller and each worker
    now: float = 1.0
    out: list[Spent] = field(default_factory=list)

    def __post_init__(self) -> None:
        flow: Any = DataFrameSource("rows", SCHEMA)
        flow = flux.stage(key="k", partitions=self.partitions, replicas=2, name="s0")(Passed)(flow)
        flow = flux.stage(key="k", partitions=self.partitions, replicas=2, name="s1", output_mode="update")(Counts)(
            flow
        )
        self.plan = compile_plan([flow], SETTINGS, lambda schema: schema, "q", b"", 0)
        self.core = Controller(self.plan, self.workers, 0.0)
        first = self.workers - self.real_workers
        self.real = {w: RealWorker(self.plan, w, self.workers) for w in range(first, self.workers)}
        self._out: deque[tuple[int, FromController, bytes]] = deque()
        self._coming: list[CopyState] = []  # copies of state that have arrived, and whose replicas are to be made live
        self._hosted: dict[int, dict[int, list[int]]] = {}
        for worker in range(self.workers):
            about = Register(
                role="worker", index=worker, attempt=0, host=f"h{worker}", pid=1, executor=f"e{worker}",
                endpoint=f"tcp://10.0.{worker >> 8}.{worker & 255}:40000", edges=[],
            )  # fmt: skip
            self.report(worker, about)
        self.settle()
        for worker in self.real:
            self.core.members.empty(worker)  # so that it gets no replica that would need a real copy

    @property
    def table(self) -> Table:
        assert self.core.table is not None
        return self.core.table

    # ---- the network

    def report(self, worker: int, message: Any) -> None:
        """Bring a message from a worker to the controller."""
        frame = message if isinstance(message, bytes) else encode(message)
        self.to_worker[worker] += len(frame)
        with self.driver.timed():
            self.driver.receives(len(frame))
            effects = self.core.on_report(worker, decode_report(frame), self.now)
        self.tell(effects)

    def tell(self, effects: list[Tell]) -> None:
        """Send messages as ``Server`` does: a message to all is encoded once."""
        frames: dict[int, bytes] = {}
        with self.driver.timed():
            for effect in effects:
                frame = frames.get(id(effect.command))
                if frame is None:
                    frame = frames[id(effect.command)] = encode(effect.command)
                self.driver.sends(len(frame))
                assert isinstance(effect.connection, int)
                self._out.append((effect.connection, effect.command, frame))

    def settle(self) -> None:
        """Run until no message is under way."""
        while self._out:
            self.now += LATENCY_S
            arrived, self._out = self._out, deque()
            for worker, command, frame in arrived:
                self.to_worker[worker] += len(frame)
                if worker in self.core.members.workers:
                    self._hear(worker, command, frame)
            self.now += LATENCY_S
            self._make_live()

    def _hear(self, worker: int, command: FromController, frame: bytes) -> None:
        if isinstance(command, NewTable | TableChanged):
            real = self.real.get(worker)
            if real is not None:
                real.hear(frame, self.hosts)
            epoch = command.table.epoch if isinstance(command, NewTable) else command.change.epoch
            self.report(worker, TableSeen(node=worker, epoch=epoch))
        elif isinstance(command, CopyState):
            self._coming.append(command)
            self._caught_up(command, safe=False)

    def _make_live(self) -> None:
        """Make replicas live. A live replica has everything committed, because there are no rows."""
        coming, self._coming = self._coming, []
        for command in coming:
            replicas = self.table.replicas(command.stage, command.partition)
            mine = [r for r in replicas if (r.worker, r.incarnation) == (command.worker, command.incarnation)]
            if mine and mine[0].live:
                self._caught_up(command, safe=True)
            elif mine:
                self._coming.append(command)

    def _caught_up(self, command: CopyState, safe: bool) -> None:
        primary = self.table.replicas(command.stage, command.partition)[0].worker
        about = {name: getattr(command, name) for name in ("stage", "partition", "worker", "incarnation")}
        self.report(primary, ReplicaCaughtUp(node=primary, safe=safe, **about))

    def hosts(self, stage: int, worker: int) -> list[int]:
        """Return the partitions of a stage that a worker had in the first table."""
        if stage not in self._hosted:
            found: dict[int, list[int]] = {}
            for partition, replicas in enumerate(self.table.stages[stage]):
                for replica in replicas:
                    found.setdefault(replica.worker, []).append(partition)
            self._hosted[stage] = found
        return self._hosted[stage].get(worker, [])

    # ---- what happens

    def lose(self, workers: list[int]) -> None:
        """Lose workers, whose lifelines close."""
        for worker in workers:
            before = Spent(self.driver.cpu_s, self.driver.messages, self.driver.sent)
            with self.driver.timed():
                effects = self.core.on_closed(worker, self.now)
            self.tell(effects)
            now = self.driver
            self.out.append(Spent(now.cpu_s - before.cpu_s, now.messages - before.messages, now.sent - before.sent))
        self.settle()

    def repair(self, limit_s: float = 600.0) -> None:
        """Run until every partition has its replicas again."""
        end = self.now + limit_s
        while self.core.repairs.under_way or any(self.core.repairs.low(self.table).values()):
            assert self.now < end, "repairs do not come to an end"
            self.now += TICK_S
            with self.driver.timed():
                effects = self.core.on_tick(self.now)
            self.tell(effects)
            self.settle()
