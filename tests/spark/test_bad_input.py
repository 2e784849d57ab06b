"""Mistakes that only show in Spark: the error reaches the user by name, and nothing is left running."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from endless import endless, until

import flux
from spark_integration.tasks.jobs import Jobs

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("nothing_left_behind")]

pytest.importorskip("pyspark")


@flux.stage(key="k", partitions=3)
class Sums(flux.Aggregate):
    total = flux.sum("v")


def numbers(spark: Any, n: int = 2_000) -> Any:
    return spark.range(0, n, 1, 2).selectExpr("id % 10 as k", "id as v")


def test_a_row_that_the_users_code_cannot_take_is_named_with_its_place(spark: Any) -> None:
    @flux.stage(key="k", partitions=3)
    class Picky(flux.Operator):
        schema = "k BIGINT"

        def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
            for row in batch.to_pylist():
                if row["v"] == 1234:
                    raise KeyError("no such thing")
            return batch.select(["k"])

    with pytest.raises(flux.UserCodeError) as raised:
        Picky(numbers(spark)).toDF()
    for part in ("stage Picky, partition ", "process() raised KeyError", "no such thing", "stream 0.", "sequence "):
        assert part in str(raised.value)
    assert "{'k': 4, 'v': 1234}" in str(raised.value)
    assert f'  File "{__file__}", line ' in raised.value.traceback
    assert ', in process\n    raise KeyError("no such thing")\n' in raised.value.traceback
    assert "/flux/replica.py" not in raised.value.traceback


def test_an_overflow_of_integers_names_the_column(spark: Any) -> None:
    df = spark.range(0, 20, 1, 2).selectExpr("0 as k", f"cast({(1 << 62) + 1} as bigint) as v")
    with pytest.raises(flux.UserCodeError, match=r"stage Sums.*'v'"):
        Sums(df).toDF()


def test_an_input_that_fails_is_reported_with_the_users_own_error(spark: Any) -> None:
    def broken(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch
            raise ZeroDivisionError("the input is broken")

    with pytest.raises(flux.QueryFailed, match=r"ingress of DataFrame.*ZeroDivisionError: the input is broken"):
        Sums(numbers(spark).mapInArrow(broken, "k long, v long")).toDF()


def test_a_stage_whose_input_spark_cannot_compute_ends_alone(spark: Any) -> None:
    df = numbers(spark).selectExpr("k", "v div (v - 100) as v")
    options: dict[str, Any] = {"workers": 1, "on_failure": "stage", "progress_interval": "100ms", "keep_output": False}
    spark.conf.set("spark.sql.ansi.enabled", "true")
    try:
        query = flux.start(endless(), Sums(df), spark=spark, **options)
        try:
            until(
                lambda: "failed" in query.status["message"] and "Sums" in query.status["message"], "no stage has failed"
            )
            assert "DIVIDE_BY_ZERO" in query.status["message"]
            before = applied(query)
            until(lambda: applied(query) > before, "the other stage gets no rows")
        finally:
            query.stop()
        assert query.exception() is None
    finally:
        spark.conf.unset("spark.sql.ansi.enabled")


def test_a_cancelled_task_is_not_interrupted(spark: Any) -> None:
    """Keep Spark from interrupting tasks that wait for their Python processes, which would end all those of the executor
    (design: no-interrupts)."""
    asked: list[str] = []
    jobs = Jobs(spark, "flux-interrupts")
    asks = spark.sparkContext.getLocalProperty
    jobs.run("input", lambda: asks("spark.job.interruptOnCancel"), asked.append, lambda what, why: asked.append(why))
    assert jobs.join(20) == []
    assert asked == ["false"]


def applied(query: Any) -> int:
    """Return the rows that the stage without a failure has applied."""
    return next(int(stage["rowsIn"]) for stage in query.lastProgress["stages"] if stage["name"] == "Nothing")


def test_a_view_that_has_gone_since_fails_the_query_and_does_not_hang(spark: Any, tmp_path: Any) -> None:
    path = str(tmp_path / "rows")
    numbers(spark).write.parquet(path)
    df = spark.read.parquet(path)
    for part in (tmp_path / "rows").glob("*.parquet"):
        part.unlink()
    with pytest.raises(flux.QueryFailed, match="ingress of DataFrame"):
        Sums(df).toDF()


def test_workers_that_find_no_slot_are_missed_in_time_and_by_number(spark: Any) -> None:
    def sleeping(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        time.sleep(600)
        yield from batches

    def occupy() -> None:
        with pytest.raises(Exception, match=r"(?i)cancel"):
            spark.range(0, 3, 1, 3).mapInArrow(sleeping, "id long").collect()

    busy = threading.Thread(target=occupy)
    busy.start()
    tracker = spark.sparkContext.statusTracker()
    try:
        end = time.monotonic() + 120
        while sum(info.numActiveTasks for s in tracker.getActiveStageIds() if (info := tracker.getStageInfo(s))) < 3:
            assert time.monotonic() < end
            time.sleep(0.02)
        # One slot is free, two workers are wanted.
        with pytest.raises(flux.QueryTimeout, match=r"1 of 2 workers.* 8 s .*missing: slot 1\."):
            Sums(numbers(spark)).toDF(workers=2, workers_timeout="8s")
    finally:
        spark.sparkContext.cancelAllJobs()
        busy.join(120)
    assert not busy.is_alive()


def test_settings_of_the_session_are_checked_before_anything_starts(spark: Any) -> None:
    for key, value, message in (
        (
            "spark.flux.log.maxByte",
            "1m",
            r"unknown setting spark\.flux\.log\.maxByte, did you mean 'spark\.flux\.log\.maxBytes'.; known are, .*log\.maxBytes",
        ),
        ("spark.flux.log.maxBytes", "much", r"spark\.flux\.log\.maxBytes: cannot read 'much' as bytes, for example "),
        ("spark.flux.encrypt", "perhaps", r"spark\.flux\.encrypt must be true, false or auto, got 'perhaps'"),
    ):
        spark.conf.set(key, value)
        try:
            with pytest.raises(flux.UsageError, match=message):
                Sums(numbers(spark)).toDF()
        finally:
            spark.conf.unset(key)


def test_a_setting_of_the_session_counts_and_a_keyword_counts_more(spark: Any) -> None:
    spark.conf.set("spark.flux.workers", "4")
    try:
        with pytest.raises(
            flux.UsageError, match=r"4 workers \+ 1 for the Spark tasks .* = 5 slots needed; existing: 4"
        ):
            Sums(numbers(spark)).toDF()
        assert Sums(numbers(spark)).toDF(workers=1).count() == 10
    finally:
        spark.conf.unset("spark.flux.workers")


def test_a_sink_has_no_dataframe(spark: Any) -> None:
    @flux.stage
    class Sink(flux.Operator):
        def process(self, batch: pa.RecordBatch) -> None:
            pass

    with pytest.raises(flux.UsageError, match=r"stage Sink has no output.*call start\(\)"):
        Sink(numbers(spark)).toDF()


def test_key_columns_are_checked_against_the_dataframe(spark: Any) -> None:
    @flux.stage(key="user")
    class ByUser(flux.Aggregate):
        n = flux.count()

    with pytest.raises(
        flux.SchemaError, match=r"stage ByUser: key 'user' is not a column of its input; there are k, v"
    ):
        ByUser(numbers(spark)).toDF()
    nested = spark.range(3).selectExpr("array(id) as user")
    with pytest.raises(flux.SchemaError, match=r"stage ByUser.*user"):
        ByUser(nested).toDF()
