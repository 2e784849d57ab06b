"""A worker as a state machine, with the operators it runs and a producer that feeds it: no socket and no sleep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa

import flux
from controller.planning.compiler import compile_plan
from flux.dataflow.flow import Flow
from flux.dataflow.plan import Plan
from flux.dataflow.source import DataFrameSource, Source
from flux.settings import Settings
from flux.wire.messages import Data, ElementKind, Hello, Resume
from flux.worker.core import WorkerCore
from flux.worker.effects import ToConnection
from partitioning.table import ReplicaAt, Table

SCHEMA = pa.schema([("x", pa.int64())])
SECRET = b"s"


class Kept(flux.Operator):
    """A sink that keeps its batches."""

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.batches: list[list[int]] = []

    def process(self, batch: pa.RecordBatch) -> None:
        self.batches.append(batch.column("x").to_pylist())


class Split(flux.Operator):
    """An operator that gives a batch of output for each row."""

    schema = SCHEMA

    def process(self, batch: pa.RecordBatch) -> Any:
        for row in range(batch.num_rows):
            yield batch.slice(row, 1)


def planned(*stages: Any, source: Source | None = None, **options: Any) -> Plan:
    """Compile a chain of stages behind the source given, or else behind one that Spark reads."""
    flow: Any = source or DataFrameSource("rows", SCHEMA)
    for each in stages:
        flow = each(flow)
    assert isinstance(flow, Flow)
    settings = replace(Settings.of(), **options)
    return compile_plan([flow], settings, lambda schema: schema, "q", SECRET)


def table(plan: Plan, epoch: int = 0, worker: int = 0, others: dict[tuple[int, int], int] | None = None) -> Table:
    """Make a table with everything on one worker except ``others``: (stage, partition) -> worker."""
    stages = tuple(
        tuple((ReplicaAt((others or {}).get((stage.id, p), worker), 0),) for p in range(stage.partitions))
        for stage in plan.stages
    )
    sources = tuple((worker,) * (source.worker_partitions) for source in plan.sources)
    return Table(epoch, stages, sources, {worker: "", **dict.fromkeys((others or {}).values(), "")})


def worker(plan: Plan, **more: Any) -> WorkerCore:
    core = WorkerCore(plan, 0)
    core.on_table(table(plan, **more), 0.0)
    return core


def rows(*values: int) -> pa.RecordBatch:
    return pa.record_batch({"x": pa.array(values, pa.int64())})


class Feeder:
    """The producer of stream 0.0, seen from the worker that consumes it with one partition."""

    def __init__(self, core: WorkerCore, connection: str = "feeder", incarnation: int = 0, producer: int = 0) -> None:
        self.core, self.connection, self.incarnation, self.producer = core, connection, incarnation, producer
        self.nonce, self.number, self.first = -1, 0, 0

    def hello(self, epoch: int = 0) -> list[Any]:
        self.core.on_data_plane(self.connection, Hello(0, self.producer, self.incarnation, epoch), [], 0.0)
        answers = self.answers()
        if answers and isinstance(answers[-1], Resume):
            self.nonce, self.number, self.first = answers[-1].nonce, 0, answers[-1].next[0][1]
        return answers

    def send(self, sequence: int, *values: int, last: bool = False, now: float = 0.0) -> list[Any]:
        n = len(values)
        some = [[0], [n], [1]] if n else [[], [], []]
        message = Data(0, self.producer, self.nonce, self.number, self.first, sequence, *some, 100, ElementKind(last))
        self.number, self.first = self.number + 1, sequence + 1
        self.core.on_data_plane(self.connection, message, [rows(*values)] if n else [], now)
        return self.answers(now)

    def answers(self, now: float = 0.0) -> list[Any]:
        effects = list(self.core.poll(now))
        return [e.message for e in effects if isinstance(e, ToConnection) and e.connection == self.connection]


def kept(core: WorkerCore, stage: int = 0, partition: int = 0) -> list[list[int]]:
    operator = core.replicas[stage, partition].operator
    assert isinstance(operator, Kept)
    return operator.batches


def work(core: WorkerCore, now: float = 0.0) -> int:
    steps = 0
    while core.work(now):
        steps += 1
    return steps


SINK = flux.stage(partitions=1)(Kept)
