"""Scaling again and again, with workers as threads in place of Spark tasks: these end within milliseconds."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from harness import LIMIT_S, SECRET

import flux
from controller.planning.compiler import compile_plan
from controller.server import Server
from flux.settings import Settings
from flux.shell.process import Rendezvous
from flux.shell.worker_loop import WorkerLoop
from tests.controller.cluster import Cluster

elastic = pytest.importorskip("spark_integration.tasks.worker_tasks")


def ticks(partition: int) -> Iterator[pa.RecordBatch | None]:
    for number in itertools.count():
        yield pa.RecordBatch.from_pydict({"k": [number]}) if number % 100 == 0 else None


@flux.stage(key="k", partitions=4)
class Nothing(flux.Operator):
    def process(self, batch: pa.RecordBatch) -> None:
        pass


class StubJobs:
    """A runner of a job's tasks as threads, which reports when all of them are over."""

    def __init__(self) -> None:
        self.attempts = itertools.count()
        self.threads: list[threading.Thread] = []

    def run(self, what: str, action: Callable[[], Any], done: Callable[[Any], None], failed: Any) -> None:
        thread = threading.Thread(target=lambda: done(action()), name=what, daemon=True)
        self.threads.append(thread)
        thread.start()

    def collect(self, spark: Any, run: Callable[[int, int], Any], count: int) -> None:
        tasks = [threading.Thread(target=run, args=(n, next(self.attempts)), daemon=True) for n in range(count)]
        for task in tasks:
            task.start()
        for task in tasks:
            task.join(LIMIT_S)


@pytest.fixture
def scaled(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, StubJobs]]:
    flow = Nothing(flux.source(ticks, schema=pa.schema([("k", pa.int64())]), partitions=1))
    options = {"operate": False, "balance_enabled": False, "heartbeat_timeout": LIMIT_S}
    plan = compile_plan([flow], Settings.of(None, **options), lambda schema: schema, "q", SECRET)
    server, jobs = Server(plan, 3, "127.0.0.1", None, "q", None), StubJobs()

    def function(plan: Any, rendezvous: Rendezvous, slots: list[int]) -> Callable[[int, int], Any]:
        return lambda n, attempt: WorkerLoop(plan, rendezvous).run(slots[n], attempt, f"executor {attempt}")

    monkeypatch.setattr(elastic, "worker_function", function)
    monkeypatch.setattr(elastic, "await_executors", lambda spark, plan, over: None)
    monkeypatch.setattr(elastic, "collect_in_tasks", jobs.collect)
    monkeypatch.setattr(elastic.WorkerTasks, "_ask_spark", lambda self: None)
    configuration = SimpleNamespace(get=lambda key, otherwise=None: otherwise)
    spark = SimpleNamespace(
        sparkContext=SimpleNamespace(_conf=configuration),
    )
    rendezvous = server.start()
    tasks = elastic.WorkerTasks(spark, lambda: plan, server, jobs, lambda slots: None)
    tasks.start(rendezvous, [0, 1, 2])
    over = threading.Event()

    def look() -> None:
        while not over.wait(elastic.LOOK_S):
            tasks.look(rendezvous)

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        assert server.started.wait(LIMIT_S)
        yield server, jobs
    finally:
        over.set()
        looking.join(LIMIT_S)
        server.stop()
        for thread in jobs.threads:
            thread.join(LIMIT_S)
        assert server.close(LIMIT_S)


def until(server: Server, reached: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not reached():
        assert server.error is None, server.error
        assert time.monotonic() < end, what
        time.sleep(0.01)


def test_a_query_shrinks_and_grows_again_at_once_however_often(scaled: tuple[Server, StubJobs]) -> None:
    """After a slot had been opened again for another task, the end of its first task ended the query."""
    server, _ = scaled
    for _ in range(4):
        for workers in (3, 2, 3):
            server.command(lambda now, workers=workers: server.core.scale(workers, now))
            until(server, lambda workers=workers: len(server.core.members.workers) == workers, f"{workers} workers")
    until(server, lambda: len(server.core.places.tasked) == 3, "the tasks of the others have ended")
    assert server.error is None
    assert not [event for event in server.core.repairs.history if event.kind == "loss"]


def test_tasks_that_were_started_are_not_started_again_though_the_controller_was_too_busy_to_hear_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    c = Cluster(slots=3, partitions=3)
    c.take(c.core.scale(4, c.now))
    started: list[str] = []
    busy = iter([False, True, False, False])

    def look(at: Callable[[], Any]) -> Any:
        if next(busy):
            raise flux.QueryTimeout("the controller's thread has not answered within 30 s")
        return at()

    ends: list[Callable[[Any], None]] = []

    def run(what: str, action: Any, done: Callable[[Any], None], failed: Any) -> None:
        started.append(what)
        ends.append(done)

    monkeypatch.setattr(elastic, "worker_function", lambda *_: None)
    monkeypatch.setattr(elastic.WorkerTasks, "_ask_spark", lambda self: None)
    configuration = SimpleNamespace(get=lambda key, otherwise=None: otherwise)
    spark = SimpleNamespace(sparkContext=SimpleNamespace(_conf=configuration))
    ended: list[Any] = []
    server = SimpleNamespace(core=c.core, look=look, tasks_ended=lambda slots, *_: ended.append(slots))
    tasks = elastic.WorkerTasks(spark, lambda: c.core.plan, server, SimpleNamespace(run=run), lambda slots: None)
    for _ in range(2):
        tasks.look(None)
    assert started == ["workers"]
    assert c.core.places.tasked == {0, 1, 2, 3}
    ends[0](None)
    assert ended == [[3]]
