"""``order="marks"`` in a plan: its replicas, and plain refusals of stages that cannot have it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

import flux
from controller.planning.checks import check_durable
from controller.planning.compiler import compile_plan
from controller.replicas.kinds import missing, wanted
from flux.arguments import MARKS, STEPS
from flux.dataflow.plan import Plan
from flux.dataflow.source import DataFrameSource, StreamSource
from flux.errors import UsageError
from flux.settings import Settings
from partitioning.ids import ACTIVE, INDEPENDENT
from partitioning.table import ReplicaAt

ROWS = pa.schema([("ts", pa.timestamp("us", "UTC")), ("site", pa.string()), ("n", pa.int64()), ("x", pa.float64())])


def rows(**given: Any) -> Any:
    read = flux.source(lambda partition, start: [], schema=ROWS, partitions=3, name="rows")
    return read.withWatermark("ts", "0 seconds", **given)


def marked(**given: Any) -> Any:
    @flux.stage(**{"key": "site", "window": flux.window("ts", "1 second"), "order": MARKS, "replicas": 2} | given)
    class PerSite(flux.Aggregate):
        n = flux.sum("n")

    return PerSite


class Shown(flux.Sink):
    def write(self, batch: pa.RecordBatch, position: Any) -> None: ...


def planned(*flows: Any, **settings: Any) -> Plan:
    return compile_plan(flows, replace(Settings.of(), **settings), lambda schema: schema, "q", b"")


def test_a_stage_has_independent_replicas_and_a_sink_stands_behind_it_with_an_order() -> None:
    plan = planned(marked()(rows()).to(Shown()))
    stage, sink = plan.stages
    assert (stage.order, stage.sink, sink.order, sink.replicas) == (MARKS, None, STEPS, 2)
    assert wanted(stage) == [INDEPENDENT, INDEPENDENT]
    assert wanted(sink) == [ACTIVE, ACTIVE]
    assert missing(stage, (ReplicaAt(0, 0, True, INDEPENDENT),)) == INDEPENDENT


def test_with_stage_gives_the_order_to_groups_of_a_flow() -> None:
    flow = marked(order=STEPS)(rows()).withStage(order=MARKS)
    (stage,) = planned(flow).stages
    assert stage.order == MARKS


def test_the_end_of_a_dataframe_is_a_mark() -> None:
    (stage,) = planned(marked(window=None)(DataFrameSource("frame", ROWS))).stages
    assert stage.order == MARKS


@flux.stage(schema=ROWS, event_time="ts")
def cleaned(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


@flux.stage(schema=ROWS, order=MARKS, replicas=2)
def passed(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


@flux.stage(key="site", window=flux.window("ts", "1 second"), order=MARKS)
class Rounded(flux.Aggregate):
    x = flux.sum("x")


BATCHES: Any = StreamSource("batches", ROWS, object()).withWatermark("ts", "0 seconds")
CLOCK = flux.window(flux.NOW, "1 second")


@pytest.mark.parametrize(
    ("flow", "settings", "why"),
    [
        (lambda: Rounded(rows()), {}, r"stage Rounded has order='marks'.*flux.sum\('x', exact=True\)"),
        (lambda: passed(rows()), {}, "its state may depend on the order of rows"),
        (lambda: marked(output_mode="update")(rows()), {}, "output_mode=\"update\" gives groups as often as they change"),
        (lambda: marked(window=CLOCK)(rows()), {}, "windows of processing time"),
        (lambda: marked()(rows(idle="1 minute")), {}, "source rows has idle= in its withWatermark"),
        (lambda: marked()(cleaned(rows())), {}, "rows of stage cleaned keep to the watermark by its own word"),
        (lambda: marked()(BATCHES), {}, "source batches comes in micro-batches"),
        (lambda: marked(availability="3s")(rows()), {}, "order='marks' and availability"),
        (lambda: marked()(rows()), {"ordered": False}, "needs spark.flux.replicas.ordered=true"),
    ],
)  # fmt: skip
def test_a_stage_that_could_give_other_output_is_refused(flow: Any, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        planned(flow(), **settings)


@pytest.mark.parametrize("recovery", ["standby", "upstream"])
def test_other_replicas_beside_independent_ones_are_refused(recovery: str) -> None:
    with pytest.raises(UsageError, match=f"recovery='{recovery}' repeats the order of steps"):
        marked(recovery=recovery)
    with pytest.raises(UsageError, match="repeats the order of steps"):
        marked()(rows()).withStage(recovery=recovery)


def test_an_unknown_order_and_a_checkpoint_location_are_refused() -> None:
    with pytest.raises(UsageError, match="order must be one of steps, marks; got 'none'"):
        marked(order="none")
    with pytest.raises(UsageError, match="stage PerSite: order='marks', and the query has a checkpointLocation"):
        check_durable([marked()(rows())])
