"""Steps of the user's code that take longer than a worker may be silent: workers are processes here, as under Spark.

A sleep leaves other threads the interpreter, one call of C code that keeps its lock does not: both are tried.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest
from harness import LIMIT_S, SECRET

import flux
from controller.planning.compiler import compile_plan
from controller.server import Server
from flux.errors import QueryFailed
from flux.settings import Settings
from flux.shell.worker_loop import WorkerLoop
from flux.wire.pulse import LoopActivity

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int64())])
#: A server from which workers are forked with everything loaded: to begin anew would take each of them seconds.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["controller.server", "flux.shell.worker_loop"])
#: Silence for which a worker is given up. Shorter ones are common where many processes share a core.
SILENCE = {"heartbeat_timeout": "1500ms", "heartbeat_last_replica_timeout": "5s"}
#: Time of a step, longer than ``SILENCE``, and the number of steps.
STEP_S, STEPS = 2.0, 2


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def keep_the_interpreter(seconds: float) -> None:
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def few(partition: int) -> Iterator[pa.RecordBatch]:
    for number in range(STEPS):
        yield pa.RecordBatch.from_arrays([pa.array([7]), pa.array([number])], schema=SCHEMA)


class Processes:
    """A query whose workers are processes of their own."""

    def __init__(self, flow: Any, workers: int = 2, **options: Any) -> None:
        fixed = {"replicas_allow_same_executor": True, "operate": False, "balance_enabled": False, "step_max_rows": 1}
        options = {**fixed, **options}
        self.plan = compile_plan([flow], Settings.of(None, **options), lambda schema: schema, "q", SECRET)
        self.server = Server(self.plan, workers, "127.0.0.1", None, "q", None)
        rendezvous = self.server.start()
        given = cloudpickle.dumps((self.plan, rendezvous))
        self.processes = [CONTEXT.Process(target=work, args=(given, slot), daemon=True) for slot in range(workers)]

    def __enter__(self) -> Processes:
        for process in self.processes:
            process.start()
        assert self.server.started.wait(LIMIT_S * 2)
        assert self.server.core.phase != "ended", self.server.error
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop()
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(process.pid, signal.SIGCONT)  # type: ignore[arg-type]
            process.join(0.1 if self.server.error else LIMIT_S)
            process.kill()
            process.join()
        assert self.server.close(LIMIT_S)

    def losses(self) -> list[Any]:
        return [event for event in self.server.core.repairs.history if event.kind == "loss"]

    def until(self, look: Callable[[], object], what: str) -> None:
        end = time.monotonic() + LIMIT_S
        while not look():
            assert time.monotonic() < end, what
            time.sleep(0.01)


def work(given: bytes, slot: int) -> None:
    plan, rendezvous = cloudpickle.loads(given)
    WorkerLoop(plan, rendezvous).run(slot, slot, f"executor {slot}")


def slow_stage(how: Any, seconds: float, **options: Any) -> Any:
    class Slow(flux.Operator):
        schema = None

        def process(self, batch: pa.RecordBatch) -> None:
            how(seconds)

    return flux.stage(key="k", partitions=2, replicas=2, name="Slow", **options)(Slow)


@pytest.mark.parametrize("how", [pytest.param(sleep, marks=pytest.mark.long), keep_the_interpreter])
def test_a_step_that_takes_longer_than_silence_may_costs_no_worker(how: Any) -> None:
    """Keep the worker: each such step lost one, as long as another had a safe copy, and after a few steps the query."""
    flow = slow_stage(how, STEP_S)(flux.source(few, schema=SCHEMA, partitions=1))
    with Processes(flow, workers=3, **SILENCE) as query:
        assert query.server.ended.wait(LIMIT_S)
        assert query.server.error is None
        assert not query.losses()


@pytest.mark.parametrize("how", [sleep, keep_the_interpreter])
def test_a_step_that_takes_too_long_ends_the_query_and_is_named(how: Any) -> None:
    flow = slow_stage(how, 600.0)(flux.source(few, schema=SCHEMA, partitions=1))
    with Processes(flow, heartbeat_timeout="5s", step_timeout="2s") as query:
        assert query.server.ended.wait(LIMIT_S)
        error = query.server.error
        assert isinstance(error, QueryFailed)
        loss = query.losses()[0].why
        for text in (loss, str(error)):
            assert "stage Slow, partition " in text
            assert "longer than spark.flux.step.timeout" in text
            row = "process() has run" in text and "first row of the step: {'k': 7, 'v': 0}" in text
            assert row if how is sleep else "holds the interpreter lock" in text


@pytest.mark.parametrize("busy", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_process_that_is_stopped_is_given_up_after_its_silence_also_in_a_long_step(busy: bool) -> None:
    def slow(seconds: float) -> None:
        if busy:
            keep_the_interpreter(seconds)

    flow = slow_stage(slow, 3.0)(flux.source(endless, schema=SCHEMA, partitions=1))
    with Processes(flow, workers=3, step_timeout="600s", **SILENCE) as query:
        table = query.server.core.table
        assert table is not None
        victim = query.server.core.members.workers[table.stages[0][0][0].worker]
        query.until(lambda: victim.pulse and (victim.pulse.kind == LoopActivity.STEP or not busy), "it is at work")
        assert not query.losses()
        os.kill(victim.about.pid, signal.SIGSTOP)
        query.until(query.losses, "nobody is given up")
        (loss,) = query.losses()
        assert (loss.worker, loss.why[:16]) == (victim.node, "no heartbeat for")


def endless(partition: int) -> Iterator[pa.RecordBatch | None]:
    number = 0
    while True:
        number += 1
        yield pa.RecordBatch.from_arrays([pa.array([number]), pa.array([number])], schema=SCHEMA)
        for _ in range(200):
            yield None
