"""Lags of sources in a progress report, computed from the reports of their readers."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from controller.report.progress import SourceLags
from flux.dataflow.plan import DataFrameSourcePlan, WorkerSourcePlan
from flux.dataflow.source_reader import FunctionReader
from flux.wire.statistics import SourceLag

SCHEMA = pa.schema([("x", pa.int64())])


class Topic:
    def __call__(self, partition: int, start: Any) -> Any:
        raise AssertionError("nobody reads here")

    def partition_name(self, partition: int) -> str:
        return f"clicks-{partition}"


def lags() -> SourceLags:
    return SourceLags(
        [
            DataFrameSourcePlan(0, "flights", SCHEMA),
            WorkerSourcePlan(1, "clicks", SCHEMA, 3, FunctionReader(Topic(), True, True)),
            WorkerSourcePlan(2, "files", SCHEMA, 2, FunctionReader(lambda partition, start: iter(()), True, True)),
        ]
    )


def said(*lags: tuple[int, int, int, int]) -> dict[str, Any]:
    return {"lags": [SourceLag(*lag) for lag in lags]}


def test_lags_of_all_workers_come_together_under_the_names_of_the_reader() -> None:
    flights, clicks, files = lags().report([said((1, 2, 5, 10)), {}, said((1, 0, 7, 7), (2, 1, 0, 3))])
    assert flights == {"name": "flights"}
    assert clicks == {"name": "clicks", "lag": {"records": 5, "partitions": {"clicks-0": 0, "clicks-2": 5}}}
    assert files == {"name": "files", "lag": {"records": 3, "partitions": {"1": 3}}}


def test_files_are_counted_as_files() -> None:
    class Files(Topic):
        lag_unit = "file"

    kept = SourceLags([WorkerSourcePlan(0, "files", SCHEMA, 2, FunctionReader(Files(), True, True))])
    (files,) = kept.report([said((0, 1, 0, 1))])
    assert files["lag"] == {"records": 1, "partitions": {"clicks-1": 1}, "unit": "file"}


def test_what_waits_has_not_gone_with_the_worker_that_would_have_read_it() -> None:
    kept = lags()
    kept.report([said((1, 0, 10, 100)), said((1, 1, 0, 50))])
    assert kept.report([said((1, 1, 20, 50))])[1]["lag"]["partitions"] == {"clicks-0": 90, "clicks-1": 30}


def test_a_partition_of_which_two_workers_speak_counts_once() -> None:
    kept = lags()
    assert kept.report([said((1, 0, 60, 100)), said((1, 0, 40, 90))])[1]["lag"]["records"] == 40
    assert kept.report([said((1, 0, 45, 100))])[1]["lag"]["records"] == 55, "its new reader has begun before"


def test_a_position_beyond_the_end_is_no_lag() -> None:
    """Known ends are as old as the last answer of a broker."""
    assert lags().report([said((1, 0, 12, 10))])[1]["lag"]["records"] == 0


def test_what_no_source_has_is_left_out() -> None:
    assert "lag" not in lags().report([said((7, 0, 0, 1), (1, 9, 0, 1), (-1, 0, 0, 1), (1, -1, 0, 1))])[1]
