"""Inputs that do not answer, as the controller tells them: by reports of workers, by pulses, and by tasks of Spark."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

import flux
from controller.planning.compiler import compile_plan
from controller.replicas.membership import Membership
from controller.report.silence import NOT_BACK, TRIED_AGAIN, silent_streams, stream_name
from flux.dataflow.plan import ById, Plan
from flux.dataflow.source import DataFrameSource
from flux.settings import Settings
from flux.wire.pulse import IN_STEP, READS, WAITS, Pulse
from flux.wire.statistics import SilentStream
from tests.controller.cluster import register

SCHEMA = pa.schema([("ts", pa.timestamp("us"))])
NOW, WALL = 100.0, 1_000_000.0


@pytest.fixture
def plan() -> Plan:
    """Plan windows over a source that workers read, and a DataFrame beside it."""

    class Reads(flux.SourceReader):
        schema, partitions = SCHEMA, 3

        def read(self, partition: int, start: Any) -> Any: ...

        def partition_name(self, partition: int) -> str:
            return f"events-{partition}"

    windows = flux.stage(window=flux.window("ts", "1 second"), name="windows")(Counted)
    events = flux.source(Reads(), name="events").withWatermark("ts", "0 seconds")
    plain = flux.source(lambda partition: [], SCHEMA, 2, name="plain")
    frame = DataFrameSource("frame", SCHEMA).withWatermark("ts", "0 seconds")
    flow = windows(events.union(frame).union(plain.withWatermark("ts", "0 seconds")))
    return compile_plan([flow], Settings.of(None, availability="3s"), lambda schema: schema, "q", b"")


class Counted(flux.Aggregate):
    n = flux.count()


def source_id(plan: Plan, name: str) -> int:
    return next(source.id for source in plan.sources if source.name == name)


def told(plan: Plan, members: Membership) -> list[tuple[str, float, str]]:
    return [(stream_name(plan, said), said.since, said.reason) for said in silent_streams(plan, members, NOW, WALL)]


def test_a_worker_tells_the_partitions_that_it_reads(plan: Plan) -> None:
    members, events = Membership(), source_id(plan, "events")
    for number, since in enumerate((WALL - 5, WALL - 7)):
        member = members.admit(number, register(number), NOW)
        member.stats = {"silent": [list(SilentStream(events, 1, since, "its broker does not answer"))]}
    assert told(plan, members) == [("events-1", WALL - 7, "its broker does not answer")], "once, while it moves"
    plain = source_id(plan, "plain")
    member.stats = {"silent": [[plain, 1, WALL - 1, "why"], [99, 0, 0.0, "a source that is not there"]]}
    assert told(plan, members)[1] == ("plain/1", WALL - 1, "why")


def test_a_reader_that_holds_up_its_worker_is_named_by_the_pulse(plan: Plan) -> None:
    members, events = Membership(), source_id(plan, "events")
    member = members.admit("w", register(0), NOW)
    member.turned = NOW - 2.5
    member.pulse = Pulse(1, READS, events, 2, 0)
    assert told(plan, members) == [("events-2", WALL - 2.5, NOT_BACK)]
    member.turned = NOW - 0.2
    assert told(plan, members) == []
    member.turned = NOW - 2.5
    for kind in (WAITS, IN_STEP):
        member.pulse = Pulse(1, kind, events, 2, 0)
        assert told(plan, members) == []
    others = replace(plan, sources=ById(replace(source, may_be_silent=False) for source in plan.sources))
    member.pulse = Pulse(1, READS, events, 2, 0)
    assert told(others, members) == []


def test_a_task_of_spark_is_silent_until_its_next_attempt_registers(plan: Plan) -> None:
    members, frame = Membership(), source_id(plan, "frame")
    (edge,) = plan.edges_of_source(frame)
    member = members.admit("t", register(4, "ingress", edges=[edge.id]), NOW - 9)
    assert told(plan, members) == [("frame/4", WALL - 9, TRIED_AGAIN)]
    members.admit("t2", register(4, "ingress", attempt=1, edges=[edge.id]), NOW - 0.1)
    assert told(plan, members) == []
    member = members.admit("t3", register(5, "ingress", edges=[edge.id]), NOW - 9)
    member.left = True
    assert told(plan, members) == [], "it has done its work"
