"""Replicas by hand: operators that follow a script, rows that are fed, and orders that are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

import flux
from controller.planning.compiler import compile_plan
from flux.dataflow.plan import FromStage
from flux.dataflow.source import DataFrameSource
from flux.exchange.inbound import Packet, RowSlice, WordSlice
from flux.exchange.log import End
from flux.exchange.producer import Producer
from flux.replica.output import EdgeOutput
from flux.replica.replica import Replica
from flux.settings import Settings
from partitioning.ids import StreamId
from partitioning.table import ReplicaAt

SCHEMA = pa.schema([("x", pa.int64())])
STREAM = StreamId(0, 0)
#: Worker of the only other replica.
OTHER = 1
#: More rows than these are two steps, unless a test says otherwise.
STEP_ROWS = 4096


class Scripted(flux.Operator):
    """An operator that notes its calls, with their times and rows."""

    schema = SCHEMA
    #: Further steps of the operator in each kind of call.
    on_start: Callable[[flux.Context], None] | None = None
    on_rows: Callable[[flux.Context, list[int]], None] | None = None
    on_tick: Callable[[flux.Context, str], None] | None = None
    on_end: Callable[[flux.Context], None] | None = None

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.calls: list[tuple[float, Any]] = []
        if self.on_start is not None:
            self.on_start(context)

    def process(self, batch: pa.RecordBatch) -> None:
        values = batch.column("x").to_pylist()
        self.calls.append((self.context.now, values))
        if self.on_rows is not None:
            self.on_rows(self.context, values)

    def on_timer(self, name: str) -> Iterator[pa.RecordBatch]:
        self.calls.append((self.context.now, name))
        if self.on_tick is not None:
            self.on_tick(self.context, name)
        yield pa.record_batch({"x": pa.array([len(self.calls)], pa.int64())})

    def finish(self) -> None:
        self.calls.append((self.context.now, "the end"))
        if self.on_end is not None:
            self.on_end(self.context)


class Plain(flux.Operator):
    schema = SCHEMA

    def process(self, batch: pa.RecordBatch) -> None:
        if batch.column("x")[0].as_py() < 0:
            self.context.set_timer(0)

    def finish(self) -> list[pa.RecordBatch]:
        return []


def scripted(**script: Any) -> Any:
    return type("Scripted", (Scripted,), {name: staticmethod(do) for name, do in script.items()})


def made(operator: Any, replicas: int = 1, log_bytes: int = 1 << 20, key: str | None = None, **options: Any) -> Replica:
    flow = flux.stage(key=key, partitions=1, replicas=replicas)(operator)(DataFrameSource("rows", SCHEMA))
    settings = Settings.of(**({"step_max_rows": STEP_ROWS} | options))
    plan = compile_plan([flow], settings, lambda schema: schema, "q", b"")
    schema = plan.stages[0].output_schema
    outlet = EdgeOutput(Producer(StreamId(1, 0), 0, 1, log_bytes, 1.0), FromStage(1, 1, 0, (), schema, 1, 1, 0))
    return Replica(plan.stages[0], 0, 0, [outlet], plan.settings)


def alone(**script: Any) -> Replica:
    return made(scripted(**script))


def pair(operator: Any, **options: Any) -> tuple[Replica, Replica]:
    """Make a primary and its secondary."""
    primary, secondary = made(operator, 2, **options), made(operator, 2, **options)
    primary.lead(0, [ReplicaAt(OTHER, 0, True)])
    secondary.follow()
    return primary, secondary


def feed(replica: Replica, sequence: int, *values: int) -> None:
    """Give the replica one batch of these rows. Without rows the stream ends."""
    batch = pa.record_batch({"x": pa.array(values, pa.int64())}) if values else None
    if batch is None:
        replica.waits.expected[0] = [0]
    packet = Packet(STREAM, sequence, 8)
    about = STREAM, sequence, packet, 0, 0.0, True
    replica.add(WordSlice(*about, End()) if batch is None else RowSlice(*about, batch))


def work(replica: Replica, now: float, most: int = 100) -> int:
    """Apply the steps that are due at this time, and return their number."""
    steps = 0
    while steps < most and replica.ready(now):
        replica.apply(replica.next_step(now))
        steps += 1
    return steps


def told(primary: Replica, secondary: Replica) -> None:
    """Tell the secondary the order, and the primary that the secondary has it."""
    first = secondary.order.end
    secondary.order.on_orders(0, first, primary.order.since(first), primary.order.committed, secondary.applied)
    primary.order.on_seen(OTHER, 0, secondary.order.verified, secondary.applied)
    secondary.order.on_orders(0, secondary.order.end, [], primary.order.committed, secondary.applied)
    primary.release()


def calls(replica: Replica) -> list[tuple[float, Any]]:
    assert isinstance(replica.operator, Scripted)
    return replica.operator.calls
