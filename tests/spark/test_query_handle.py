"""The handle of a running query behaves like that of a StreamingQuery, and its end is the end of everything."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from endless import WAIT_S, endless, ticks, until

import flux

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("nothing_left_behind")]

pytest.importorskip("pyspark")


def test_a_running_query_tells_who_it_is_and_what_it_does(spark: Any) -> None:
    from spark_integration.query.running_queries import active_queries

    query = endless().start(queryName="clicks", spark=spark, progress_interval="100ms", workers=2)
    try:
        assert str(uuid.UUID(query.id)) == query.id
        assert query.name == "clicks"
        assert query.isActive
        assert query.status["message"] in ("Waiting for 2 workers", "Processing rows")
        assert [active.id for active in active_queries()] == [query.id]
        until(lambda: query.lastProgress and query.lastProgress["totalInputRows"] > 0, "no rows")
        assert query.status["message"] == "Processing rows"
        assert query.status["isTriggerActive"] is True
        assert query.status["isDataAvailable"] in (True, False)
        assert "clicks" in repr(query)
        assert query.exception() is None
        assert query.awaitTermination(0.2) is False
        assert query.processAllAvailable() is None
        assert query.isActive
        until(lambda: len(query.recentProgress) >= 4, "progress is not renewed")
    finally:
        query.stop()
    assert not query.isActive
    assert query.status["message"] == "Stopped"
    assert query.status["isTriggerActive"] is False
    assert query.awaitTermination() is None
    assert query.awaitTermination(1) is True
    assert query.processAllAvailable() is None
    assert query.exception() is None
    query.stop()  # a second time is no harm
    query.stop(timeout=1)


def test_progress_reports_have_what_a_streaming_query_has_and_they_add_up(spark: Any) -> None:
    query = endless().start(spark=spark, progress_interval="50ms", workers=2)
    try:
        until(lambda: len(query.recentProgress) >= 5 and query.lastProgress["totalInputRows"], "no progress")
    finally:
        query.stop()
    reports = query.recentProgress
    assert query.lastProgress == reports[-1]
    for report in reports:
        assert {
            "id", "runId", "name", "timestamp", "numInputRows", "inputRowsPerSecond", "processedRowsPerSecond", "totalInputRows",
            "epoch", "backlog", "peakLogBytes", "stages", "workers",
        } <= report.keys()  # fmt: skip
        assert (report["id"], report["runId"]) == (query.id, query.runId)
        assert report["name"] is None
        assert [stage["name"] for stage in report["stages"]] == ["Nothing"]
        assert report["stages"][0]["partitions"] == 4
        assert [worker["slot"] for worker in report["workers"]] == [0, 1]
        for worker in report["workers"]:
            assert {"id", "host", "rowsIn", "queued", "logBytes", "heldBytes", "rssBytes", "counters"} <= worker.keys()
        assert report["stages"][0]["rowsIn"] == sum(worker["rowsIn"] for worker in report["workers"])
    assert [report["timestamp"] for report in reports] == sorted(report["timestamp"] for report in reports)
    assert sum(report["numInputRows"] for report in reports) == reports[-1]["totalInputRows"] > 0


@pytest.mark.parametrize("timeout", [0, -1.5])
def test_a_timeout_must_be_positive(spark: Any, timeout: float) -> None:
    query = endless().start(spark=spark, workers=1)
    try:
        with pytest.raises(flux.UsageError, match=str(timeout)):
            query.awaitTermination(timeout)
    finally:
        query.stop()


def test_await_termination_raises_what_ended_the_query(spark: Any) -> None:
    @flux.stage(partitions=1)
    class Fussy(flux.Operator):
        def process(self, batch: pa.RecordBatch) -> None:
            if 40 in batch.column("k").to_pylist():
                raise ValueError("40 is too much")

    query = Fussy(flux.source(ticks, schema="k BIGINT", partitions=1, name="ticks")).start(spark=spark, workers=1)
    with pytest.raises(flux.UserCodeError, match="40 is too much"):
        query.awaitTermination(WAIT_S)
    with pytest.raises(flux.UserCodeError):
        query.awaitTermination()
    with pytest.raises(flux.UserCodeError):
        query.processAllAvailable()
    assert isinstance(query.exception(), flux.UserCodeError)
    assert not query.isActive
    assert query.status["message"].startswith("Failed: stage Fussy")
    query.stop()  # of a query that has failed: nothing to do, and no error
    assert isinstance(query.exception(), flux.UserCodeError)


def test_stop_with_too_short_a_timeout_says_so_and_the_query_still_ends(spark: Any) -> None:
    query = endless().start(spark=spark, workers=1)
    with pytest.raises(flux.QueryTimeout, match=query.id):
        query.stop(timeout=0.0001)
    assert query.awaitTermination(WAIT_S) is True
    assert not query.isActive


def test_a_query_can_be_stopped_while_its_workers_are_still_coming(spark: Any) -> None:
    query = endless().start(spark=spark, workers=2)
    query.stop(timeout=WAIT_S)
    assert not query.isActive
    assert query.exception() is None


def test_stop_ends_an_ingress_that_is_held_up_by_back_pressure(spark: Any, monkeypatch: Any) -> None:
    from spark_integration.tasks.jobs import Jobs

    cancelled: list[Any] = []
    cancel = Jobs.cancel
    monkeypatch.setattr(Jobs, "cancel", lambda jobs: cancelled.append(jobs) or cancel(jobs))

    @flux.stage(key="k", partitions=2)
    class Stuck(flux.Operator):
        def process(self, batch: pa.RecordBatch) -> None:
            time.sleep(0.05)

    df = spark.range(0, 400_000, 1, 2).selectExpr("id as k", "repeat('x', 100) as wide")
    query = Stuck(df).start(
        workers=2, log_max_bytes="1m", credit_max_bytes="64k", batch_max_rows=1000, step_max_rows=1,
        progress_interval="50ms", stop_timeout=WAIT_S,
    )  # fmt: skip
    try:
        full = until(
            lambda: query.lastProgress and query.lastProgress["backlog"]["bytes"] > 1 << 20, "no back-pressure"
        )
        assert full
        assert query.lastProgress["totalInputRows"] < 400_000
    finally:
        query.stop(timeout=WAIT_S)
    assert query._run._jobs not in cancelled, "the workers' tasks end by themselves"
    assert not query.isActive
    assert query.exception() is None


def test_slots_held_by_another_query_are_counted_and_named(spark: Any) -> None:
    first = endless().start(queryName="first", spark=spark, workers=2)
    try:
        with pytest.raises(flux.UsageError) as raised:
            endless().start(spark=spark, workers=3)
        for part in ("too few task slots", "3 workers", "existing: 4", "2 held by query first", "free: 2", "local[5]"):
            assert part in str(raised.value)
        second = endless().start(queryName="second", spark=spark, workers=2)
        try:
            until(lambda: second.status["message"] == "Processing rows", "the second query does not start")
            assert first.isActive
        finally:
            second.stop()
        assert first.isActive
        third = endless().start(spark=spark, workers=2)  # the slots of the second query are free again
        third.stop()
    finally:
        first.stop()


def test_a_cancelled_spark_job_ends_the_query_with_a_reason(spark: Any) -> None:
    query = endless().start(spark=spark, workers=1)
    try:
        until(lambda: query.status["message"] == "Processing rows", "the query does not start")
        spark.sparkContext.cancelAllJobs()
        with pytest.raises(flux.QueryFailed, match=r"(?i)workers.*cancel"):
            query.awaitTermination(WAIT_S)
    finally:
        query.stop()


def test_a_query_that_cannot_be_started_leaves_nothing_running(spark: Any, monkeypatch: Any) -> None:
    from spark_integration.query.run import QueryRun
    from spark_integration.tasks.worker_tasks import WorkerTasks

    def wrong(*_: Any) -> None:
        raise RuntimeError("Spark does not take the job")

    for owner, method in ((WorkerTasks, "start"), (QueryRun, "_ask_for_executors")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, wrong)
            with pytest.raises(RuntimeError, match="Spark does not take the job"):
                endless().start(spark=spark, workers=1)


def test_ctrl_c_stops_the_call_that_it_interrupts_and_no_other_query(spark: Any) -> None:
    context = spark.sparkContext
    query = endless().start(spark=spark, workers=1)
    same = flux.stage(lambda batch: batch, partitions=1)
    try:
        until(lambda: query.status["message"] == "Processing rows", "the query does not start")

        # A wait for the query itself, which pyspark's handler used to end.
        interrupted(lambda: True, query.awaitTermination)

        # Another query, which the call has started.
        endless_too = same(flux.source(ticks, schema="k BIGINT", partitions=1))
        interrupted(lambda: len(flux.queries()) == 2, lambda: endless_too.collect(spark=spark, workers=1))
        assert flux.queries() == [query]

        # A job that has nothing to do with queries, which ends as it does without them.
        before = set(context.statusTracker().getActiveJobsIds())
        sleeping = context.parallelize(range(1), 1).map(lambda _: time.sleep(WAIT_S))
        interrupted(lambda: set(context.statusTracker().getActiveJobsIds()) - before, sleeping.collect)
        until(lambda: set(context.statusTracker().getActiveJobsIds()) == before, "the job that was interrupted runs on")

        rows = query.lastProgress["totalInputRows"]
        until(lambda: query.lastProgress["totalInputRows"] > rows, "the query does not go on")
        assert query.exception() is None
    finally:
        query.stop()
    assert Counts(spark.range(0, 1_000, 1, 3).selectExpr("id % 10 as k")).toDF(workers=2).count() == 10


def interrupted(there: Callable[[], Any], wait: Callable[[], Any]) -> None:
    """Call ``wait``, and press Ctrl-C in it."""

    def press() -> None:
        until(there, "there is nothing to interrupt")
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            wait()
    finally:
        presser.join()


@flux.stage(key="k", partitions=4, replicas=2)
class Counts(flux.Aggregate):
    n = flux.count()


def test_output_that_is_kept_waits_for_one_who_fetches_it_and_is_given_again(
    spark: Any, caplog: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(
        "spark_integration.query.start._told", set()
    )  # an earlier test of the session may have been told
    df = spark.range(0, 1_000, 1, 3).selectExpr("id % 10 as k")
    query = Counts(df).start(queryName="kept", keep_output=True)
    with pytest.raises(flux.QueryTimeout, match=r"after 0\.001 s this is still to come: "):
        query.processAllAvailable(0.001)
    query.processAllAvailable(WAIT_S)
    assert query.phase == "finished", "a DataFrame is waited for to its end"
    assert query.awaitTermination(WAIT_S) is True
    assert query.awaitTermination() is None
    assert query.status["message"] == "All output is there"
    found = query.toDF()
    assert query.toDF() is found
    assert sorted((row.k, row.n) for row in found.collect()) == [(k, 100) for k in range(10)]
    assert not query.isActive
    assert query.awaitTermination(1) is True
    assert str(uuid.UUID(query.runId)) == query.runId != query.id
    # On one executor, copies go with it and help only if a Python worker dies; one line says so.
    told = [record.getMessage() for record in caplog.records if "has one executor" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("master local[4] has one executor, and all replicas of Counts are in it")

    both = flux.start(Counts(df), Counts(df.where("k < 3")), keep_output=True)
    with pytest.raises(flux.UsageError, match=r"say which: toDF\('Counts'\) or toDF\('Counts#2'\)"):
        both.toDF()
    assert both.toDF("Counts#2").count() == 3
    assert both.isActive, "the other output is still in the workers"
    assert both.toDF("Counts").count() == 10
    assert not both.isActive
    assert both.status["message"].startswith("Finished")

    stopped = Counts(df).start(keep_output=True)
    stopped.stop()
    with pytest.raises(flux.UsageError, match="was stopped before its output was fetched"):
        stopped.toDF()
    for options, problem in (
        ({"replicas_allow_same_executor": "false"}, "stage Counts wants replicas=2 on different executors"),
        ({"workers": 1}, "stage Counts wants replicas=2, each in a worker of its own"),
    ):
        with pytest.raises(flux.UsageError, match=problem):
            Counts(df).start(**options)
