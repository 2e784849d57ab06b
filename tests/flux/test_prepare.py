"""Facts that sources and sinks settle once for all lives of a query (design: prepare)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from one_worker import SCHEMA, planned

import flux
from flux.dataflow.plan import Plan, WorkerSourcePlan
from flux.errors import UsageError
from spark_integration.query.checkpoint_location import CheckpointLocation
from spark_integration.query.source_setup import prepared


class Topic:
    """A source like a topic, whose newest offset grows with each look."""

    newest = 6

    def __init__(self) -> None:
        self.begin: int | None = None

    def prepare(self, kept: int | None) -> int:
        Topic.newest += 1
        self.begin = Topic.newest if kept is None else kept
        return self.begin

    def __call__(self, partition: int, start: Any) -> Iterator[Any]:
        yield from ()


class Numbered(flux.Sink):
    def __init__(self, answer: Any = None) -> None:
        self.answer = answer
        self.ids: list[int] = []

    def prepare(self, partitions: int, kept: Any) -> Any:
        self.ids = kept or [100 + partition for partition in range(partitions)]
        return self.answer or self.ids

    def write(self, batch: pa.RecordBatch, position: flux.Position) -> None:
        pass


def plan_of(topic: Any, sink: flux.Sink) -> Plan:
    from controller.planning.compiler import compile_plan
    from flux.settings import Settings

    source = flux.source(topic, SCHEMA, 2, "topic", positions=True)
    flow = flux.stage(partitions=3, name="passed")(lambda batch: batch)(source).to(sink)
    return compile_plan([flow], Settings.of(), lambda schema: schema, "q", b"")


def begin_of(plan: Plan) -> Any:
    (source,) = plan.sources
    assert isinstance(source, WorkerSourcePlan)
    return source.reader.function.begin  # type: ignore[attr-defined]


def ids_of(plan: Plan) -> list[int]:
    (stage,) = plan.stages
    assert isinstance(stage.sink, Numbered)
    return stage.sink.ids


def test_a_later_life_finds_what_the_first_one_has_settled_in_the_location(tmp_path: Path) -> None:
    topic, sink = Topic(), Numbered()
    first, kept = prepared(plan_of(topic, sink), None)
    CheckpointLocation.open(tmp_path).take(first, kept)
    location = CheckpointLocation.open(tmp_path)
    again, _ = prepared(plan_of(topic, sink), location.kept)
    location.take(again)
    assert (begin_of(again), ids_of(again)) == (begin_of(first), ids_of(first))
    assert ids_of(first) == [100, 101, 102]


def test_a_flow_that_is_started_twice_settles_each_time_anew() -> None:
    topic, sink = Topic(), Numbered()
    one, _ = prepared(plan_of(topic, sink), None)
    other, _ = prepared(plan_of(topic, sink), None)
    assert begin_of(other) == begin_of(one) + 1
    assert (topic.begin, sink.ids) == (None, []), "what the user holds stays as it was"


def test_what_json_cannot_hold_is_refused_and_says_whose_it_is() -> None:
    with pytest.raises(UsageError, match=r"sink Numbered of stage passed: prepare\(\) must return"):
        prepared(plan_of(Topic(), Numbered({1j})), None)


def test_a_source_or_sink_that_cannot_travel_is_refused_with_the_place_to_connect() -> None:
    topic, sink = Topic(), Numbered()
    topic.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"source topic cannot be sent to the executors: .*lock.* in read\(\)"):
        prepared(plan_of(topic, sink), None)
    sink.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(
        UsageError, match=r"the sink of stage passed cannot be sent to the executors: .*lock.* in open\(\)"
    ):
        prepared(plan_of(Topic(), sink), None)


class Growing(Topic):
    """A topic that notes the number of partitions that it had, and has one more at each start."""

    may_grow = True

    def prepare(self, kept: Any) -> Any:
        self.begin = len(kept or ())
        return [*(kept or ()), "another"]


def grown(partitions: int, read: Any = Growing) -> Plan:
    from controller.planning.compiler import compile_plan
    from flux.settings import Settings

    source = flux.source(read(), SCHEMA, partitions, "topic", positions=True)
    return compile_plan(
        [flux.stage(partitions=3, name="passed")(lambda batch: batch)(source)],
        Settings.of(),
        lambda schema: schema,
        "q",
        b"",
    )


def started(location: CheckpointLocation, plan: Plan) -> Plan:
    made, kept = prepared(plan, location.kept)
    location.take(made, kept)
    return made


def test_a_source_that_may_grow_has_more_partitions_in_a_later_life_and_keeps_what_it_has_settled(
    tmp_path: Path,
) -> None:
    started(CheckpointLocation.open(tmp_path), grown(2))
    for partitions, lives in ((2, 1), (4, 2), (5, 3)):
        assert begin_of(started(CheckpointLocation.open(tmp_path), grown(partitions))) == lives
    assert CheckpointLocation.open(tmp_path).kept == {"sources": {"topic": ["another"] * 4}, "sinks": {}}
    with pytest.raises(UsageError, match="its partitions were 5 and are 4"):
        started(CheckpointLocation.open(tmp_path), grown(4))


def test_a_source_that_may_not_grow_does_not(tmp_path: Path) -> None:
    started(CheckpointLocation.open(tmp_path), grown(2, Topic))
    with pytest.raises(UsageError, match="its partitions were 2 and are 3"):
        started(CheckpointLocation.open(tmp_path), grown(3, Topic))


def test_two_that_settle_something_at_once_do_not_give_a_number_twice(tmp_path: Path) -> None:
    started(CheckpointLocation.open(tmp_path), grown(2))
    one, other = CheckpointLocation.open(tmp_path), CheckpointLocation.open(tmp_path)
    started(one, grown(3))
    with pytest.raises(UsageError, match="another program has just started"):
        started(other, grown(4))
    assert CheckpointLocation.open(tmp_path).kept == {"sources": {"topic": ["another"] * 2}, "sinks": {}}


def test_sources_and_sinks_that_settle_nothing_are_left_alone() -> None:
    plan = planned(flux.stage(partitions=1)(lambda batch: batch))
    assert prepared(plan, None) == (plan, {"sources": {}, "sinks": {}})
