"""``on_loss="converge"`` in a plan, plain refusals of stages that cannot have it, and the horizon of a partition that has begun
empty."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import flux
from controller.course.beginnings import EmptyBeginnings, incomplete
from controller.planning.compiler import compile_plan
from flux.arguments import CONVERGE
from flux.dataflow.plan import Plan
from flux.dataflow.source import DataFrameSource
from flux.errors import UsageError
from flux.settings import Settings
from flux.windows.window import NEVER
from flux.wire.statistics import ReaderState, SourceTime
from partitioning.ids import PartitionKey
from partitioning.table import ReplicaAt, Table

ROWS = pa.schema([("ts", pa.timestamp("us", "UTC")), ("site", pa.string()), ("n", pa.int64())])


def rows(read: Any = None) -> Any:
    source = flux.source(lambda partition, start: [], schema=ROWS, partitions=2, name="rows") if read is None else read
    return source.withWatermark("ts", "3 seconds")


def counted(**given: Any) -> Any:
    about = {"key": "site", "window": flux.window("ts", "1 second"), "on_loss": CONVERGE, "replicas": 1} | given

    @flux.stage(**about)
    class PerSite(flux.Aggregate):
        n = flux.sum("n")

    return PerSite


def again(flow: Any) -> Any:
    return counted(on_loss="fail", window=flux.window("window_end", "1 minute"))(flow)


class Shown(flux.Sink):
    def write(self, batch: pa.RecordBatch, position: Any) -> None: ...


def planned(*flows: Any, **settings: Any) -> Plan:
    return compile_plan(flows, Settings.of(**settings), lambda schema: schema, "q", b"")


def test_a_stage_says_that_it_begins_empty() -> None:
    (stage,) = planned(counted()(rows()).to(Shown())).stages
    assert stage.on_loss == CONVERGE
    (stage,) = planned(counted(on_loss="fail")(rows()).withStage(on_loss=CONVERGE).to(Shown())).stages
    assert stage.on_loss == CONVERGE


@pytest.mark.parametrize(
    ("flow", "says"),
    [
        (lambda: counted(on_loss="begin")(rows()), "on_loss must be one of fail, converge; got 'begin'"),
        (lambda: counted(replicas=2)(rows()), "is for a stage with replicas=1"),
        (lambda: counted(replicas=None)(rows()).to(Shown()), "is for a stage with replicas=1"),
        (lambda: counted(window=None, output_mode="update")(rows()).to(Shown()), "without a horizon"),
        (lambda: counted(window=flux.session_window("ts", "1 second"))(rows()).to(Shown()), "without a horizon"),
        (lambda: counted(window=flux.window(flux.NOW, "1 second"))(rows()).to(Shown()), "without a horizon"),
        (lambda: counted(output_mode="update")(rows()).to(Shown()), "without a horizon"),
        (lambda: counted()(rows()), "end the flow in a sink right behind it"),
        (lambda: counted()(rows()).to_readers(), "end the flow in a sink right behind it"),
        (lambda: again(counted()(rows())).to(Shown()), "end the flow in a sink right behind it"),
        (lambda: counted()(rows(DataFrameSource(None, ROWS))).to(Shown()), "read it from sources inside the workers"),
    ],
)
def test_refusals_name_what_to_write(flow: Any, says: str) -> None:
    with pytest.raises(UsageError) as refused:
        planned(flow(), replicas=2)
    assert says in str(refused.value)


def told(partition: int, watermark: int) -> list[Any]:
    return list(SourceTime(0, partition, watermark, 0, NEVER, 1, ReaderState.READING))


def test_results_are_whole_behind_the_newest_row_that_any_reader_had_given_and_a_window() -> None:
    plan, beginnings = planned(counted()(rows()).to(Shown())), EmptyBeginnings()
    before = Table(4, (((ReplicaAt(0, 0),), (ReplicaAt(1, 0),)),), ((0, 1),), {})
    after = Table(5, (((ReplicaAt(1, 5, empty=True),), (ReplicaAt(1, 0),)),), ((1, 1),), {})
    beginnings.begin([PartitionKey(0, 0)], before, 5, plan)
    assert beginnings.note(1, 4, [told(1, 9_000_000)], after, plan) == [], "the worker does not know of the loss yet"
    assert beginnings.note(1, 5, [told(1, 8_000_000), told(0, NEVER)], after, plan) == [], (
        "another reader has not begun"
    )
    assert beginnings.of_stage(0) == {"begunEmpty": 1, "incompleteThrough": None}
    (known,) = beginnings.note(1, 5, [told(1, 20_000_000), told(0, 7_000_000)], after, plan)
    assert known.through == 8_000_000 + 3_000_000 + 1_000_000
    assert beginnings.of_stage(0) == {"begunEmpty": 1, "incompleteThrough": "1970-01-01T00:00:12.000Z"}
    beginnings.forget([0])
    assert beginnings.of_stage(0) == {}


@pytest.mark.parametrize(
    ("stage", "lines"),
    [
        ({}, []),
        (
            {"begunEmpty": 1, "incompleteThrough": None, "eventTime": {"watermark": "1970-01-01T00:00:09.000Z"}},
            [
                "results of stage counts lack rows for a time that is not known yet: 1 partition of it has begun empty, because "
                "the last replica was lost"
            ],
        ),
        (
            {"begunEmpty": 2, "incompleteThrough": "1970-01-01T00:00:12.000Z", "eventTime": {"watermark": None}},
            [
                "results of stage counts lack rows up to 1970-01-01T00:00:12.000Z: 2 partitions of it have begun empty, because "
                "the last replica was lost"
            ],
        ),
        (
            {
                "begunEmpty": 2,
                "incompleteThrough": "1970-01-01T00:00:12.000Z",
                "eventTime": {"watermark": "1970-01-01T00:00:12.000Z"},
            },
            [],
        ),
    ],
    ids=["no partition", "not known", "until then", "past it"],
)
def test_the_status_says_which_results_lack_rows_until_the_watermark_has_passed_them(
    stage: dict[str, Any], lines: list[str]
) -> None:
    assert incomplete([{"name": "counts"} | stage]) == lines
