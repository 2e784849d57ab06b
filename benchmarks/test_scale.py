"""Cost of the size of a cluster for a worker, with two stages of two replicas on a hundred workers, and cost of the loss of one
worker for the controller. ``pytest benchmarks/test_scale.py``.

An epoch is counted from the frame of the controller to the greetings that follow from it; an ack is that of a neighbour that
has applied one more batch.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import flux
from benchmarks.one_loss import LargeCluster
from controller.planning.compiler import compile_plan
from controller.replicas.placement import FarApart
from controller.replicas.spread import WorkerPlace
from controller.replicas.table_changes import retain
from flux.dataflow.plan import Plan
from flux.dataflow.source import DataFrameSource
from flux.exchange.producer import Producer
from flux.settings import Settings
from flux.wire.codec import decode_command
from flux.wire.control import NewTable, TableChanged
from flux.wire.frames import encode
from flux.wire.messages import Ack, AppliedThrough, Needed, Resume
from flux.worker.core import WorkerCore
from flux.worker.table_follower import TableFollower
from partitioning.clustering import cluster_by_key
from partitioning.table import Table, change_between

SIZES = [(32, 512), *(pytest.param(100, partitions, marks=pytest.mark.long) for partitions in (1024, 4096))]
SCHEMA = pa.schema([("k", pa.int64())])
ROWS = 64


class Count(flux.Aggregate):
    n = flux.count()


class Passed(flux.Operator):
    schema = SCHEMA

    def process(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        yield batch


def plan_of(partitions: int, stages: int = 2) -> Plan:
    flow: Any = DataFrameSource("rows", SCHEMA)
    for number in range(stages):
        last = number == stages - 1
        mode: dict[str, Any] = {"output_mode": "update"} if last else {}
        stage: Any = flux.stage(key="k", partitions=partitions, replicas=2, name=f"s{number}", **mode)
        flow = stage(Count if last else Passed)(flow)
    return compile_plan([flow], Settings.of(), lambda schema: schema, "q", b"", 0)


def table_of(plan: Plan, workers: int) -> Table:
    placement = FarApart({worker: WorkerPlace.of("", "", f"e{worker}") for worker in range(workers)})
    return placement.first_table(plan, {worker: f"tcp://127.0.0.1:{worker}" for worker in range(workers)})


class OneWorker:
    """Worker 0, driven by the frames that come to it."""

    def __init__(self, workers: int, partitions: int) -> None:
        self.plan = plan_of(partitions)
        self.table = table_of(self.plan, workers)
        self.core = WorkerCore(self.plan, 0, workers=workers)
        self.newest = TableFollower(1.0)
        self.now = 0.0

    def hear(self, frame: bytes) -> int:
        """Receive a frame. Return the number of effects."""
        self.now += 0.001
        command = decode_command(frame)
        assert isinstance(command, NewTable | TableChanged)
        table = self.newest.take(command)
        assert table is not None
        self.core.on_table(table, self.now)
        return sum(1 for _ in self.core.poll(self.now))

    def first_table(self) -> bytes:
        return encode(NewTable(table=self.table, complete={}))

    def next_table(self, worker: int) -> bytes:
        """Make a table with another replica for a partition of the second stage, which every stream of this worker has to
        serve."""
        before = self.table
        self.table = retain(before, 1, before.epoch % len(before.stages[1]), worker)
        return encode(TableChanged(change=change_between(before, self.table)))


@pytest.mark.parametrize(("workers", "partitions"), SIZES)
@pytest.mark.benchmark(group="a worker follows an epoch that changes one partition")
def test_epoch(benchmark: Any, workers: int, partitions: int) -> None:
    one = OneWorker(workers, partitions)
    one.hear(one.first_table())
    others = count(2)

    def change() -> tuple[tuple[bytes], dict[str, Any]]:
        return (one.next_table(2 + next(others) % (workers - 2)),), {}

    effects = benchmark.pedantic(one.hear, setup=change, rounds=30, warmup_rounds=5)
    benchmark.extra_info["bytes"] = len(one.next_table(3))
    assert effects > 0


@pytest.mark.parametrize(("workers", "partitions"), SIZES)
@pytest.mark.benchmark(group="the first table")
def test_first_table_and_its_memory(benchmark: Any, workers: int, partitions: int) -> None:
    one = OneWorker(workers, partitions)
    frame = one.first_table()
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    benchmark.pedantic(one.hear, (frame,), rounds=1)
    benchmark.extra_info["MB"] = round((tracemalloc.get_traced_memory()[0] - before) / 1e6, 1)
    tracemalloc.stop()


@pytest.mark.parametrize(("workers", "partitions"), SIZES)
@pytest.mark.benchmark(group="one ack")
def test_ack(benchmark: Any, workers: int, partitions: int) -> None:
    """Measure acks of one neighbour at a time, each for one more batch; every eighth partition there has still to apply it."""
    one = OneWorker(workers, partitions)
    one.hear(one.first_table())
    producer = next(p for p in one.core.producers.values() if p.stream.edge == 1)
    hosted = {
        worker: [p for p, row in enumerate(one.table.stages[1]) if any(r.worker == worker for r in row)]
        for worker in range(workers)
    }
    for worker, mine in hosted.items():
        resume = Resume(*producer.stream, 1, 0, [Needed(p, 0) for p in mine], -1, [], 1 << 40, [])
        producer.on_answer(worker, resume, one.now)
    rng = np.random.default_rng(1)
    turns = ((sequence, worker) for sequence in count(0) for worker in range(workers))

    def next_ack() -> tuple[tuple[Producer, int, Ack], dict[str, Any]]:
        sequence, worker = next(turns)
        if worker == 0:
            batch = pa.record_batch({"k": rng.integers(0, 1 << 40, ROWS)})
            producer.append(cluster_by_key(batch, [0], partitions, producer.by_rank), 0.0)
            for _ in producer.poll(one.now):
                pass
        behind = [AppliedThrough(p, sequence - 1) for p in hosted[worker][::8]]
        return (producer, worker, Ack(*producer.stream, 1, 0, sequence, behind, 1 << 40)), {}

    def take(producer: Producer, worker: int, ack: Ack) -> None:
        producer.on_answer(worker, ack, one.now)

    benchmark.pedantic(take, setup=next_ack, rounds=3000, warmup_rounds=200)


@pytest.mark.parametrize(
    ("workers", "stages", "partitions"), [(100, 2, 1024), pytest.param(1000, 25, 4000, marks=pytest.mark.long)]
)
@pytest.mark.benchmark(group="the loss of one worker, until all is repaired")
def test_repair_of_one_lost_worker(benchmark: Any, workers: int, stages: int, partitions: int) -> None:
    cluster = LargeCluster(plan_of(partitions, stages), workers)
    held = sum(replica.worker == 3 for rows in cluster.table.stages for replicas in rows for replica in replicas)
    loss = benchmark.pedantic(cluster.lose, (3,), rounds=1)
    benchmark.extra_info |= {
        "epochs": loss.epochs,
        "messages": loss.messages,
        "bytes of a worker at most": loss.bytes_max,
        "controller CPU ms until the plan is out": round(1e3 * loss.plan_s, 1),
        "controller CPU ms in all": round(1e3 * loss.cpu_s, 1),
        "simulated s": round(loss.repair_s, 2),
    }
    assert loss.additions == held
    assert all(len(replicas) == 2 for rows in cluster.table.stages for replicas in rows)
    assert loss.epochs <= 10 * stages
    assert loss.plan_s < 1.0
    assert loss.bytes_max < 100_000
