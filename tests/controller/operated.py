"""A query to be operated, without workers: a fake of the controller's state, and a thread that serves it at a real port.

Two stages, "Delays" with four partitions in two copies and "Worst" with two in one, on workers 0, 1 and 2. Moves wait
until ``finish_move``; served, one is finished at every look at the port.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
from harness import LIMIT_S

import flux
from controller.balance.load import Loads, LoadTable, Move, Suggestion, WorkerLoad
from controller.balance.rounds import Rounds
from controller.course.plan_requests import FailedStage
from controller.decide.board import Tell
from controller.decide.request_book import AT_THE_END, Asked, Standing, State, of_change, of_drain, of_moves, of_scale
from controller.operate.connection_file import find_all
from controller.operate.request_handler import About, RequestHandler
from controller.operate.service import Service
from controller.planning.compiler import compile_plan
from controller.replicas.addition_tracker import AdditionTracker
from controller.replicas.membership import Member, Membership
from controller.replicas.moves import MoveJob, MovePhase
from controller.replicas.placement import FarApart
from controller.replicas.protection_wishes import wished
from controller.replicas.spread import WorkerPlace
from controller.replicas.table_index import TableIndex
from controller.report.events import Event, EventLog
from controller.report.metrics import Metrics
from controller.report.progress import Level, levels
from flux.dataflow.source import DataFrameSource
from flux.errors import UsageError
from flux.settings import Settings
from flux.shell.transport import Keys, Sockets
from flux.wire.control import Register, Stop
from partitioning.table import ReplicaAt, Table

ID = "5c2f0a4e-0000-4000-8000-000000000001"
SECRET = b"the operators' secret, 32 bytes."
STARTED = 1_000_000.0
NOW = STARTED + 90.0


FAILED = {
    name: FailedStage(name, number, STARTED, "Late", "boom in row 3", "Traceback ...")
    for number, name in enumerate(("Late", "LateAlarm"), 7)
}


@flux.stage(key="k", partitions=4, replicas=2)
class Delays(flux.Aggregate):
    n = flux.count()


@flux.stage(key="k", partitions=2)
class Worst(flux.Operator):
    def process(self, batch: pa.RecordBatch) -> None:
        pass


def plan_of(**options: Any) -> Any:
    source = DataFrameSource("input", pa.schema([("k", pa.int64())]))
    return compile_plan([Worst(Delays(source))], Settings.of(None, **options), lambda schema: schema, ID, b"rows")


class FakeCore:
    """A controller as the desk needs it. The orders that it got are in ``told``."""

    def __init__(self, **options: Any) -> None:
        self.plan = plan_of(**options)
        self.phase = "running"
        self.error = None
        self.members = Membership()
        self.repairs = AdditionTracker(self.plan, EventLog())
        self.rounds = Rounds(self.plan.settings)
        self.told: list[Any] = []
        self.pending: list[Move] = []
        self.jobs: list[MoveJob] = []
        self.asked: dict[int, Asked] = {}
        self.numbers = 0
        self.missing: list[int] = []
        self.driver = SimpleNamespace(missing_slots=lambda: list(self.missing))
        self.plans = SimpleNamespace(in_words=lambda: ["addition of Alarm: being confirmed"], failed=FAILED)
        self.leaving: set[int] = set()
        self.joins: list[Member] = []
        self.notes = ["Delays/3 alone is heavier than a worker: no move helps"]
        self.suggested = [Move(0, 0, 0, 2, gain=0.25, cost=1 << 20), Move(0, 3, 0, 1, gain=0.125, cost=1 << 10)]
        for slot in range(3):
            about = Register(
                role="worker", index=slot, attempt=slot, host="host", pid=100 + slot, executor=f"e{slot}",
                endpoint=f"tcp://127.0.0.1:{slot}",
            )  # fmt: skip
            member = self.members.admit(f"connection {slot}".encode(), about, STARTED)
            member.stats = {"rows_in": 1000 * (slot + 1), "queued": slot, "rss_bytes": 200 << 20, "log_bytes": 1 << 20}
        self.table: Table | None = FarApart({n: WorkerPlace.of("", "", f"e{n}") for n in range(3)}).first_table(
            self.plan, {n: f"tcp://127.0.0.1:{n}" for n in range(3)}
        )

    def load_table(self) -> LoadTable | None:
        """Make a table in which each replica is as busy as the others; the state of partition n is n kilobytes."""
        if self.table is None:
            return None
        workers = {
            node: WorkerLoad(node, member.about.executor, cpu=0.5, rss_bytes=200 << 20, leaving=node in self.leaving)
            for node, member in self.members.workers.items()
        }
        columns = TableIndex(self.plan).look(self.table)
        shape = columns.workers.shape
        numbers = np.concatenate([np.arange(stage.partitions) for stage in self.plan.stages])
        return LoadTable(
            columns, workers, 5.0, np.full(shape, 0.1), np.full(shape, 50.0), np.zeros(shape), np.ones(shape, int),
            1000 * np.repeat(numbers, shape[1]).reshape(shape), np.ones(shape[0], bool),
        )  # fmt: skip

    def loads(self) -> Loads:
        table = self.load_table()
        return Loads({}, []) if table is None else table.loads()

    def levels(self) -> list[Level]:
        columns = None if self.table is None else TableIndex(self.plan).look(self.table)
        low = {} if self.table is None else self.repairs.low(self.table)
        return levels(self.wished, columns, self.repairs.safety.doubtful(), low)

    def suggest(self, policy: str, now: float) -> Suggestion:
        if policy not in ("pairing", "even", "nothing"):
            raise UsageError(f"there is no policy {policy}; there are pairing")
        return Suggestion(self.suggested if policy == "pairing" else [], self.notes)

    def next_request(self) -> int:
        self.numbers += 1
        return self.numbers

    def request(self, number: int) -> Asked:
        asked = self.asked[number]
        asked.standing = asked.look()
        if self.phase == "ended" and not asked.over:
            asked.standing = replace(asked.standing, state=State.GIVEN_UP, left="", why=str(self.error or AT_THE_END))
        return asked

    def open_requests(self) -> list[Asked]:
        return [asked for asked in map(self.request, self.asked) if not asked.over]

    def move(self, moves: list[Move], why: str, now: float, request: int) -> list[Tell]:
        for move in moves:
            self._check(move.target)
        self.told.append(("move", tuple(moves), why, now))
        jobs = [MoveJob(move, why, request=request) for move in moves]
        self.pending += moves
        self.jobs += jobs
        self.asked[request] = Asked(request, "moves", lambda: of_moves(jobs, self._name, {}), jobs)
        return [Tell("somebody", Stop(reason="not really"))]

    def _name(self, move: Move) -> str:
        return f"{self.plan.stages[move.stage].name}/{move.partition}"

    def _held(self, worker: int) -> int:
        return sum(load.worker == worker for load in self.loads().replicas)

    def drain(self, worker: int, now: float, request: int) -> list[Tell]:
        self._check(worker)
        most = self._held(worker)

        def look() -> Standing:
            return of_drain({worker: self._held(worker)} if worker in self.members.workers else {}, [], most)

        self.asked[request] = Asked(request, f"drain of worker {worker}", look)
        self.told.append(("drain", worker, now))
        self.leaving.add(worker)
        free = next(node for node in self.members.workers if node != worker)
        self.pending += [
            Move(load.stage, load.partition, worker, free) for load in self.loads().replicas if load.worker == worker
        ]
        return []

    def fail(self, worker: int, now: float, request: int) -> list[Tell]:
        self._check(worker)
        self.asked[request] = Asked(request, f"loss of worker {worker}", lambda: Standing(State.DONE))
        self.told.append(("fail", worker, now))
        del self.members.workers[worker]
        return []

    def scale(self, workers: int, now: float, request: int) -> list[Tell]:
        def look() -> Standing:
            held = [self._held(worker) for worker in self.members.workers] if self.rounds.evening_out else []
            return of_scale(workers, len(self.members.workers), self.leaving, self.missing, held)

        self.asked[request] = Asked(request, f"scale to {workers}", look)
        self.told.append(("scale", workers, now))
        self.missing = list(range(3, workers))
        for member in self.joins:
            self.members.workers[member.node] = member
        return []

    @property
    def wished(self) -> Any:
        return self.repairs.wishes.plan

    def protect(self, stage: int, replicas: int | None, recovery: str | None, now: float, request: int) -> list[Tell]:
        """Done when ``finish_move`` is called."""
        before = self.wished.stages[stage]
        wish = wished(before, replicas, recovery)
        if wish.replicas > 3:
            raise UsageError(f"cannot protect {wish.name}: replicas must be 1 to 3; got {wish.replicas}")
        assert self.table is not None
        self.told.append(("protect", stage, replicas, recovery, now))
        change = self.repairs.wishes.ask(wish, self.table.stages[stage], now, request)
        change.left = wish.partitions
        self.asked[request] = Asked(request, f"protection of {wish.name}", lambda: of_change(change, wish))
        return []

    def moves_pending(self) -> list[Move]:
        return list(self.pending)

    def _check(self, worker: int) -> None:
        if worker not in self.members.workers:
            raise UsageError(f"there is no worker {worker}; there are {', '.join(map(str, self.members.workers))}")

    # ---- events

    def finish_move(self) -> None:
        for stage in list(self.repairs.wishes.open):
            self.repairs.wishes.done(stage)
        if not self.pending:
            return
        move = self.pending.pop(0)
        assert self.table is not None
        stages = [list(partitions) for partitions in self.table.stages]
        rows = [r for r in stages[move.stage][move.partition] if r.worker not in (move.from_worker, move.target)]
        epoch = self.table.epoch + 1
        stages[move.stage][move.partition] = (*rows, ReplicaAt(move.target, epoch))
        self.table = Table(epoch, tuple(map(tuple, stages)), self.table.sources, self.table.endpoints)
        event = self.happened("move", self.plan.stages[move.stage].name, move.partition, move.target, stall_ms=12.5)
        self.end(move, MovePhase.DONE, event)
        for worker in self.leaving & set(self.members.workers):
            if not any(waiting.from_worker == worker for waiting in self.pending):
                del self.members.workers[worker]

    def end(self, move: Move, phase: MovePhase, event: Event) -> None:
        for job in self.jobs:
            if job.move == move and job.phase == MovePhase.WAITING:
                job.phase, job.ended = phase, event

    def happened(self, kind: str, stage: str, partition: int, worker: int, stall_ms: float = 0.0) -> Event:
        event = Event(kind, NOW, stage, partition, worker, "by hand", 0.5, stall_ms)
        self.repairs.history.append(event)
        return event


REPORT: dict[str, Any] = {
    "totalInputRows": 6000,
    "inputRowsPerSecond": 100.0,
    "processedRowsPerSecond": 200.0,
    "epoch": 4,
    "backlog": {"slices": 3, "bytes": 3 << 20},
    "sources": [
        {"name": "flights", "unreadFiles": {"corrupt": {"count": 2, "files": {"a.parquet": "no footer"}}}},
        {"name": "days", "lag": {"records": 1, "partitions": {"0": 1}, "unit": "file"}},
        {"name": "clicks", "lag": {"records": 12345, "partitions": {"clicks-0": 12000, "clicks-1": 345}}, "badRecords": 7},
    ],
    "stages": [
        {"name": "Delays", "finished": 1, "rowsIn": 4000, "rowsOut": 40, "rowsPerSecond": 150.0, "queued": 2,
         "latencyMs": [1.5, 20.0], "lossSeconds": 0.5, "keptBytes": 2 << 20},
        {"name": "Worst", "finished": 0, "rowsIn": 40, "rowsOut": 0, "rowsPerSecond": 50.0, "queued": 1, "latencyMs": None,
         "lossSeconds": None},
    ],
    "workers": [
        {
            "id": node, "rowsPerSecond": 10.0 * node, "queued": node, "logBytes": 1 << 20, "rssBytes": 200 << 20,
            "cpuSeconds": 7.5,
            "counters": {"duplicate": 2, "stale": 1, "refused": 0, "malformed": 0, "gap": 0},
        }
        for node in range(3)
    ],
}  # fmt: skip


@dataclass
class Counter:
    """A desk without a port: tests call ``desk.handle``."""

    core: FakeCore
    desk: RequestHandler
    metrics: Metrics


def counter(report: dict[str, Any] | None = REPORT) -> Counter:
    core = FakeCore()
    metrics = Metrics(core.plan, ID, "clicks")
    about = About(ID, "clicks", "flights (local-1)", 4321, STARTED, "http://127.0.0.1:9/metrics")

    def observe() -> None:
        metrics.observe(
            core.phase,
            report,
            core.levels(),
            core.loads().of_workers(),
            len(core.pending),
            desk.refused,
        )

    desk = RequestHandler(core, about, lambda: report, metrics, observe)
    return Counter(core, desk, metrics)


@contextmanager
def served(
    name: str | None = "clicks",
    id: str = ID,
    encrypted: bool = False,
    tick: Callable[[FakeCore], Any] = FakeCore.finish_move,
    **options: Any,
) -> Any:
    """Run a fake query that can be found by its connection file and answers at a real port; yield its core."""
    core = FakeCore(**options)
    keys = Keys.make() if encrypted else None
    service = Service(core, About(id, name, "flights (local-1)", os.getpid(), STARTED), lambda: REPORT)  # type: ignore[arg-type]
    ready, stop = threading.Event(), threading.Event()

    def run() -> None:
        sockets = Sockets(keys, b"rows")
        try:
            service.open(sockets, keys)
            ready.set()
            told = 0
            while not stop.is_set():
                if service.port in sockets.wait(0.01):
                    service.answer(NOW)
                    tick(core)
                    news = list(core.repairs.history)[told:]
                    told += len(news)
                    service.note(news)
        finally:
            service.close()
            sockets.close()

    thread = threading.Thread(target=run, name=f"served {id}", daemon=True)
    thread.start()
    assert ready.wait(LIMIT_S)
    try:
        yield core
    finally:
        stop.set()
        thread.join(LIMIT_S)
        assert not thread.is_alive()
        assert not [found for found in find_all() if found.connection and found.connection.id == id]
