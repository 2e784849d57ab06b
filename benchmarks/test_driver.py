"""Cost of a large query for the controller's thread: 25 stages of 4,096 partitions, two replicas of each, a hundred workers.
``pytest benchmarks/test_driver.py``.

While it answers a person, or makes a progress report, this thread hears no heartbeat and decides nothing. A report of progress
and a look at the metrics come every second, and so does a round of balance; heartbeats come ten times a second from every
worker. Times are CPU times of the thread.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import flux
from controller.decide.controller import Controller, Tell
from controller.operate.request_handler import About, RequestHandler
from controller.operate.requests import GetHistory, GetMetrics, GetPartitions, GetStatus, encode_request
from controller.planning.compiler import compile_plan
from controller.report.events import HISTORY_KEPT, Event
from controller.report.metrics import Metrics
from controller.report.progress import Progress
from flux.dataflow.source import DataFrameSource
from flux.settings import Settings
from flux.wire.codec import decode_report
from flux.wire.control import Heartbeat, NewTable, Register, TableSeen
from flux.wire.frames import encode
from flux.wire.statistics import PrimaryRows, ReplicaWork, Statistics
from partitioning.ids import PartitionKey
from partitioning.table import Table

WORKERS, STAGES, PARTITIONS = 100, 25, 4096
#: No worker is given up while time is made to pass.
PATIENT = Settings.of({f"spark.flux.heartbeat.{limit}": "1h" for limit in ("timeout", "lastReplicaTimeout")})


class LargeQuery:
    """A controller with its reports, and workers that only send heartbeats."""

    def __init__(self, workers: int = WORKERS, stages: int = STAGES, partitions: int = PARTITIONS) -> None:
        flow: Any = DataFrameSource("rows", pa.schema([("x", pa.int64())]))
        for number in range(stages):
            flow = flux.stage(partitions=partitions, replicas=2, name=f"s{number}")(lambda batch: batch)(flow)
        self.plan = compile_plan([flow], PATIENT, lambda schema: schema, "q", b"", 0)
        self.core = Controller(self.plan, workers, 0.0)
        self.now, self.beats = 1.0, 0
        for slot in range(workers):
            about = Register(
                role="worker", index=slot, attempt=0, host=f"h{slot}", pid=1, executor=f"e{slot}", endpoint=f"at {slot}", edges=[]
            )  # fmt: skip
            self.confirm(self.core.on_report(slot, about, self.now))
        for number in range(HISTORY_KEPT):
            self.core.board.events.note(Event("move", self.now, "s1", number, 2, "asked for", source=1, bytes=1 << 20))
        self.reported: dict[str, Any] | None = None
        self.metrics = Metrics(self.plan, "q", None)
        self.progress = Progress(self.plan, "q", None)
        self.desk = RequestHandler(
            self.core, About("q", None, "", 1, 0.0), lambda: self.reported, self.metrics, self.observe
        )
        self.hosted = self._hosted()
        for _ in range(2):
            self.now += 1.0
            for worker in range(workers):
                self.hear(worker, self.heartbeat(worker, load=True))

    @property
    def table(self) -> Table:
        assert self.core.table is not None
        return self.core.table

    def confirm(self, effects: list[Tell]) -> None:
        for effect in effects:
            if isinstance(effect.command, NewTable):
                seen = TableSeen(node=effect.connection, epoch=effect.command.table.epoch)  # type: ignore[arg-type]
                self.confirm(self.core.on_report(effect.connection, seen, self.now))

    def _hosted(self) -> dict[int, list[tuple[PartitionKey, int, bool]]]:
        """List the replicas of each worker, with incarnation and whether they are primaries."""
        hosted: dict[int, list[tuple[PartitionKey, int, bool]]] = {worker: [] for worker in self.table.endpoints}
        for stage, rows in enumerate(self.table.stages):
            for partition, replicas in enumerate(rows):
                for place, replica in enumerate(replicas):
                    hosted[replica.worker].append((PartitionKey(stage, partition), replica.incarnation, place == 0))
        return hosted

    # ---- heartbeats

    def heartbeat(self, worker: int, load: bool) -> bytes:
        """Make a heartbeat with all statistics of a busy worker."""
        self.beats += 1
        rows, mine = self.beats * 1000, self.hosted[worker]
        of_stages: list[list[PrimaryRows]] = [[] for _ in self.plan.stages]
        for (stage, partition), _, primary in mine:
            if primary:
                of_stages[stage].append(PrimaryRows(partition, rows, rows, 0))
        stats: Statistics = {
            "rows_in": rows, "queued": 3, "log_bytes": 1 << 20, "rss_bytes": 1 << 30, "cpu_s": self.now,
            "counters": {"duplicate": 3},
            "stages": [
                {"stage": stage, "primaries": each, "queued": 2, "busy_s": 1.0, "latency_ms": [1.0, 2.0]}
                for stage, each in enumerate(of_stages)
            ],
        }  # fmt: skip
        if load:
            works = [ReplicaWork(*key, incarnation, self.now / 1e3, rows, 10, 1, 1000) for key, incarnation, _ in mine]
            stats["load"] = {"at": self.now, "rested_s": self.now / 2, "replicas": works}
        return encode(Heartbeat(node=worker, progress=self.beats, stats=stats))

    def hear(self, worker: int, frame: bytes) -> None:
        for effect in self.core.on_report(worker, decode_report(frame), self.now):
            encode(effect.command)

    # ---- reports

    def report(self) -> None:
        """Make a report as ``Server`` does every second."""
        core = self.core
        made = self.progress.make(core.members, core.inputs.total, self.table.epoch, self.now, self.now)
        self.reported = made | core.report()
        self.observe()

    def observe(self) -> None:
        core = self.core
        table = core.load_table()
        assert table is not None
        self.metrics.observe(core.phase, self.reported, core.levels(), table.of_workers(), len(core.moves_pending()), 0)

    def ask(self, request: Any) -> bytes:
        answer, _ = self.desk.handle(encode_request(request), self.now)
        return answer


@pytest.fixture(scope="module")
def query(pytestconfig: pytest.Config) -> LargeQuery:
    """Make a query, a small one where nothing is measured."""
    large = LargeQuery(stages=1) if pytestconfig.getoption("benchmark_disable") else LargeQuery()
    large.report()
    gc.collect()
    return large


def measure(benchmark: Any, query: LargeQuery, act: Callable[..., Any], setup: Any = None, rounds: int = 5) -> None:
    def passes() -> Any:
        query.now += 1.0
        return setup() if setup is not None else None

    benchmark.pedantic(act, setup=passes, rounds=rounds, warmup_rounds=1)


@pytest.mark.benchmark(group="heartbeat", timer=time.thread_time)
@pytest.mark.parametrize("load", [False, True])
def test_heartbeat(benchmark: Any, query: LargeQuery, load: bool) -> None:
    frame = query.heartbeat(5, load)
    benchmark.extra_info["bytes"] = len(frame)
    measure(benchmark, query, query.hear, lambda: ((5, query.heartbeat(5, load)), {}), 100)


@pytest.mark.benchmark(group="every second", timer=time.thread_time)
def test_progress_and_metrics(benchmark: Any, query: LargeQuery) -> None:
    measure(benchmark, query, query.report)


@pytest.mark.benchmark(group="every second", timer=time.thread_time)
def test_tick_with_round_of_balance(benchmark: Any, query: LargeQuery) -> None:
    def passes() -> None:
        query.now += 60.0  # a round is due, however far apart they are

    benchmark.pedantic(lambda: query.core.on_tick(query.now), setup=passes, rounds=5, warmup_rounds=1)


@pytest.mark.benchmark(group="tick", timer=time.thread_time)
def test_tick(benchmark: Any, query: LargeQuery) -> None:
    query.core.on_tick(query.now)
    benchmark.pedantic(lambda: query.core.on_tick(query.now), rounds=20)


@pytest.mark.benchmark(group="request", timer=time.thread_time)
@pytest.mark.parametrize(
    "request_", [GetStatus(), GetHistory(), GetMetrics(), GetPartitions()], ids=lambda r: type(r).__name__
)
def test_request(benchmark: Any, query: LargeQuery, request_: Any) -> None:
    benchmark.extra_info["bytes"] = len(query.ask(request_))
    measure(benchmark, query, lambda: query.ask(request_))
