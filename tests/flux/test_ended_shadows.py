"""A shadow that an error has ended is told to the controller, and its partition goes on (design: shadow-host)."""

from __future__ import annotations

from math import inf
from typing import Any

import pyarrow as pa
from one_worker import table

import flux
from controller.planning.compiler import compile_plan
from flux.settings import Settings
from flux.worker.core import WorkerCore
from flux.worker.report import stats
from partitioning.ids import PartitionKey

SCHEMA = pa.schema([("key", pa.int64()), ("ts", pa.timestamp("us"))])


@flux.stage(key="key", partitions=2, window=flux.window("ts", "10 seconds"))
class Counted(flux.Aggregate):
    n = flux.count()


def made() -> WorkerCore:
    source = flux.source(lambda partition: iter(()), SCHEMA, 1, name="events").withWatermark("ts", "5 seconds")
    plan = compile_plan([Counted(source)], Settings.of(availability="1h"), lambda schema: schema, "q", b"s")
    core = WorkerCore(plan, 0)
    core.on_table(table(plan), 0.0)
    return core


def fail(core: WorkerCore, partition: int, text: str) -> None:
    """Have the next look of a shadow raise an error at 12.3 s by the wall clock."""
    hosted: Any = core.shadows._shadows[PartitionKey(0, partition)]

    def fails(*given: Any) -> None:
        raise ValueError(text)

    hosted.shadow.look, hosted.news, hosted.looked_at = fails, True, -inf
    core.shadows.work(2.3, 12.3)


def test_the_partition_and_the_first_line_of_the_error_are_reported_as_long_as_its_replica_is_there() -> None:
    core = made()
    assert stats(core)["ended_shadows"] == []
    fail(core, 1, "no such key\n  File x, line 3")
    assert stats(core)["ended_shadows"] == [(0, 1, 12.3, "no such key")]
    core.on_table(table(core.plan, epoch=1), 3.0)
    assert len(stats(core)["ended_shadows"]) == 1, "it has no other shadow"
    core.on_table(table(core.plan, epoch=2, others={(0, 1): 1}), 4.0)
    assert stats(core)["ended_shadows"] == []


def test_a_long_error_is_cut_and_one_without_text_has_its_name() -> None:
    core = made()
    fail(core, 0, "x" * 1000)
    fail(core, 1, "")
    assert [each.reason for each in stats(core)["ended_shadows"]] == ["x" * 300, "ValueError"]


def test_without_availability_nothing_is_reported() -> None:
    plan = compile_plan(
        [Counted(flux.source(lambda partition: iter(()), SCHEMA, 1).withWatermark("ts", "5 seconds"))],
        Settings.of(), lambda schema: schema, "q", b"s",
    )  # fmt: skip
    assert "ended_shadows" not in stats(WorkerCore(plan, 0))
