"""Streams that bring some of the columns of their origin: their messages, checksums and copies."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import flux
from controller.planning.compiler import compile_plan
from flux.dataflow.plan import NUMBER, Plan
from flux.exchange.log import Rows
from flux.exchange.producer import Producer
from flux.exchange.source_streams import SourceStreams
from flux.replica.output import EdgeOutput
from flux.replica.replica import Replica
from flux.settings import Settings
from flux.state.state_copy import decode, photograph, restore, restored
from partitioning.ids import StreamId

SCHEMA = pa.schema([("note", pa.string()), ("key", pa.int64()), ("x", pa.int64())])


class Xs(flux.Aggregate):
    total = flux.sum("x")


class Keep(flux.Operator):
    def process(self, batch: pa.RecordBatch) -> None: ...


def rows(*xs: int, note: str = "") -> pa.RecordBatch:
    columns = [pa.array([note] * len(xs)), pa.array(range(len(xs)), pa.int64()), pa.array(xs, pa.int64())]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def source_of(*operators: Any) -> Plan:
    source = flux.source(lambda partition, start: iter(()), SCHEMA, 1, "rows")
    flows = [flux.stage(key="key", partitions=2)(operator)(source) for operator in operators]
    return compile_plan(flows, Settings.of(), lambda schema: schema, "q", b"")


def streams(plan: Plan, **options: Any) -> SourceStreams:
    producers = [Producer(StreamId(edge.id, 0), 0, edge.partitions, 1 << 20, 1.0) for edge in plan.edges]
    return SourceStreams(plan.edges, producers, "rows", **options)


def sent(producer: Producer) -> list[pa.RecordBatch]:
    elements = [entry.element for entry in producer.log.entries()]
    return [element.data.batch for element in elements if isinstance(element, Rows)]


@pytest.mark.parametrize("numbered", [False, True])
def test_each_stream_of_a_source_has_the_columns_of_its_edge(numbered: bool) -> None:
    plan = source_of(Xs, Keep)
    made = streams(plan, positions=numbered)
    made.append(rows(7, 8, note="n"), 0.0)
    more = [NUMBER.name] if numbered else []
    assert [batch.schema.names for producer in made.producers for batch in sent(producer)] == [
        ["key", "x", *more],
        ["note", "key", "x", *more],
    ]
    (some,) = sent(made.producers[0])
    assert sorted(some.column("x").to_pylist()) == [7, 8]


def test_rows_that_differ_where_nobody_looks_are_the_same_rows() -> None:
    def checksum(*operators: Any, note: str = "", x: int = 1) -> int:
        made = streams(source_of(*operators))
        made.append(rows(x, note=note), 0.0)
        return made.producers[0].log[0].checksum

    assert checksum(Xs, note="another") == checksum(Xs)
    assert checksum(Xs, x=2) != checksum(Xs)
    assert checksum(Xs, Keep, note="another") != checksum(Xs, Keep), "another stage looks at it"


def test_times_are_compared_though_they_do_not_travel() -> None:
    schema = SCHEMA.append(pa.field("ts", pa.timestamp("us")))

    def checksum(note: str = "", time: int = 1) -> int:
        source = flux.source(lambda partition, start: iter(()), schema, 1, "rows").withWatermark("ts", "1 second")
        plan = compile_plan(
            [flux.stage(key="key", partitions=2)(Xs)(source)], Settings.of(), lambda given: given, "q", b""
        )
        assert plan.edges[0].schema.names == ["key", "x"]
        made = streams(plan, event_time=plan.sources[0].event_time)
        made.append(rows(1, note=note).append_column(schema.field("ts"), pa.array([time], pa.timestamp("us"))), 0.0)
        return made.producers[0].log[0].checksum

    assert checksum(note="another") == checksum()
    assert checksum(time=2) != checksum(), "another row may be late"


def test_a_copy_of_state_takes_along_output_that_travels_in_part() -> None:
    passed = flux.stage(name="passed", partitions=1)(lambda batch: batch)(
        flux.source(lambda partition: iter(()), SCHEMA, 1, "rows")
    )
    flow = flux.stage(key="key", partitions=2)(Xs)(passed)
    plan = compile_plan([flow], Settings.of(), lambda schema: schema, "q", b"")
    (edge,) = [edge for edge in plan.edges if edge.from_stage]

    def replica() -> Replica:
        producer = Producer(StreamId(edge.id, 0), 0, 2, 1 << 20, 1.0)
        return Replica(plan.stages[0], 0, 0, [EdgeOutput(producer, edge)], plan.settings)

    first, second = replica(), replica()
    first.outlets[0].send(rows(7, 8, note="n"), 0.0, lambda: "here")
    restore(restored(decode(photograph(first, []).encode()), second), second)
    (there,), (here,) = sent(second.outlets[0].producer), sent(first.outlets[0].producer)
    assert there.equals(here)
    assert there.schema.names == ["key", "x"]
