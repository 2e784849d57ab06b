"""Structured Streaming into a query: each row once, as Spark's own batch answer has it (design: micro-batches)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import flux
from spark_integration.streaming.flux_format import register
from spark_integration.streaming.stream_source import is_stateless

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("callbacks", "nothing_left_behind")]

WAIT_S = 120.0
COLUMNS = "k BIGINT, v BIGINT, `a.t` TIMESTAMP"
ROWS, FILES = 500, 6


@flux.stage(key="k", partitions=4, replicas=2)
class PerKey(flux.Aggregate):
    n = flux.count()
    total = flux.sum("v")
    last = flux.max("a.t")


def until(look: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + WAIT_S
    while not (found := look()):
        assert time.monotonic() < end, what
        time.sleep(0.02)
    return found


def files(spark: Any, folder: Path, first: int = 0, count: int = FILES) -> None:
    """Write files of ``ROWS`` rows each: v is 0, 1, 2, ... over all of them."""
    for number in range(first, first + count):
        rows = spark.range(number * ROWS, (number + 1) * ROWS, 1, 1)
        rows = rows.selectExpr("id % 7 k", "id v", "timestamp_seconds(1700000000 + id) `a.t`")
        rows.write.mode("append").parquet(str(folder))


def streaming(spark: Any, folder: Path, at_once: int) -> Any:
    return spark.readStream.schema(COLUMNS).option("maxFilesPerTrigger", at_once).parquet(str(folder))


def expected(spark: Any, folder: Path) -> list[tuple[Any, ...]]:
    """Compute Spark's batch answer."""
    found = spark.read.parquet(str(folder)).groupBy("k").agg({"v": "sum", "*": "count", "`a.t`": "max"})
    return sorted(found.selectExpr("k", "`count(1)`", "`sum(v)`", "`max(a.t)`").collect())


def test_what_there_is_passes_in_batches_of_other_numbers_of_partitions(spark: Any, tmp_path: Path) -> None:
    files(spark, tmp_path / "in")
    df = streaming(spark, tmp_path / "in", 4).withWatermark("`a.t`", "1 minute")
    source = flux.stream(df, trigger={"availableNow": True}, name="clicks of the day")
    query = PerKey(source).start(spark=spark, workers=2, keep_output=True, queryName="clicks")
    try:
        got = sorted(map(tuple, query.toDF().collect()))
    finally:
        query.stop()
    assert got == expected(spark, tmp_path / "in")
    assert query.lastProgress["totalInputRows"] == ROWS * FILES
    assert query.status["message"].startswith("Finished"), "nobody has stopped it"


def test_conditions_and_columns_are_those_of_spark_and_spark_reads_no_other_column(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Most batches end in rows that no stage gets, and some have nothing else."""
    files(spark, tmp_path / "in")
    df = streaming(spark, tmp_path / "in", 1).withWatermark("`a.t`", "1 minute")
    assert is_stateless(df)
    assert not is_stateless(df.groupBy("k").count())
    given = flux.stream(df, trigger={"availableNow": True}, name="clicks")

    @flux.stage(key="k", partitions=4)
    class Totals(flux.Aggregate):
        total = flux.sum("twice")

    def stepped(rows: Any) -> Any:
        return rows.where("v % 1000 BETWEEN 700 AND 890").selectExpr("k", "v * 2 AS twice")

    query = Totals(stepped(given)).start(spark=spark, workers=2, keep_output=True, queryName="few")
    try:
        got = sorted(map(tuple, query.toDF().collect()))
        query.explain()
        assert "its other columns are not read" in capsys.readouterr().out
    finally:
        query.stop()
    batch = stepped(spark.read.parquet(str(tmp_path / "in"))).groupBy("k").agg({"twice": "sum"})
    assert got == sorted(map(tuple, batch.collect()))
    assert query.lastProgress["totalInputRows"] == ROWS * FILES


def test_limits_of_time_hold_in_the_middle_of_a_batch(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate, may_stop = str(tmp_path / "gate"), threading.Event()

    @flux.stage(partitions=1)
    def held(batch: Any) -> Any:
        end = time.monotonic() + WAIT_S
        while not os.path.exists(gate) and time.monotonic() < end:
            time.sleep(0.02)
        return batch

    files(spark, tmp_path / "in", count=1)
    flow = held(flux.stream(streaming(spark, tmp_path / "in", 1)))
    query = flow.start(spark=spark, workers=1, stop_timeout=WAIT_S, step_timeout=WAIT_S, keep_output=False)
    try:
        running = query._run.streams._running
        until(lambda: running and running[0].status["isTriggerActive"], "Spark's query has not begun")
        with pytest.raises(flux.QueryTimeout, match="Spark has not given all rows"):
            query.processAllAvailable(0.2)
        names = lambda: [thread.name for thread in threading.enumerate()]  # noqa: E731
        until(lambda: "flux-streaming" not in names(), "the wait goes on in a thread")
        stop = running[0].stop
        running[0].stop = lambda: may_stop.wait(WAIT_S) and stop()
        began = time.monotonic()
        with pytest.raises(
            flux.QueryTimeout, match=r"still ending after 0\.5 s: Spark's streaming query for source stream"
        ):
            query.stop(timeout=0.5)
        assert time.monotonic() - began < WAIT_S / 2
    finally:
        may_stop.set()
        Path(gate).touch()
        query.stop()
    assert query.status["message"] == "Stopped"
    assert [record for record in caplog.records if record.name.startswith("py4j")] == []


@pytest.fixture
def active(spark: Any) -> Iterator[Callable[[Any], None]]:
    """Function that makes a session the active one of this thread; None: there is none, as after Ctrl-C in a call of the
    JVM."""
    sessions = spark._jvm.org.apache.spark.sql.classic.SparkSession
    yield lambda session: sessions.clearActiveSession() if session is None else sessions.setActiveSession(session)
    sessions.setActiveSession(spark._jsparkSession)


@pytest.mark.parametrize("which", ["none", "its own", "another"])
def test_the_format_is_found_whatever_session_is_active(spark: Any, active: Callable[[Any], None], which: str) -> None:
    session, another = spark.newSession(), spark.newSession()
    active({"none": None, "its own": session._jsparkSession, "another": another._jsparkSession}.get(which))
    register(session)
    lookup = spark._jvm.org.apache.spark.sql.execution.datasources.DataSource.lookupDataSource
    assert "Python" in lookup("flux", session._jsparkSession.sessionState().conf()).getName()


def test_a_streaming_query_writes_into_one_that_runs(spark: Any, tmp_path: Path, active: Callable[[Any], None]) -> None:
    def write(to: str, checkpoint: str, columns: tuple[str, ...] = ("k", "v", "`a.t`"), **options: str) -> Any:
        rows = streaming(spark, tmp_path / "in", 1).select(*columns)
        writer = rows.writeStream.format("flux").option("query", to).options(**options)
        return writer.option("checkpointLocation", str(tmp_path / checkpoint)).trigger(availableNow=True).start()

    @flux.stage
    def not_mixed_up(batch: Any) -> Any:
        assert (batch["v"].to_numpy() % 7 == batch["k"].to_numpy()).all()
        return batch

    files(spark, tmp_path / "in", count=2)
    active(None)
    flow = PerKey(not_mixed_up(flux.stream(COLUMNS, name="clicks")))
    query = flow.start(spark=spark, workers=2, queryName="running totals", keep_output=False)
    try:
        query.wait_until_running(WAIT_S)
        with pytest.raises(Exception, match="has no option 'inputs'; it has query, input"):
            write("running totals", "refused", inputs="clicks").processAllAvailable()
        write("running totals", "one").awaitTermination()
        files(spark, tmp_path / "in", 2, 1)
        write("running totals", "one", ("`a.t`", "v", "k"), input="clicks").awaitTermination()
        with pytest.raises(Exception, match="an input takes one streaming query"):
            write("running totals", "another").awaitTermination()
        query.processAllAvailable(WAIT_S)
        until(lambda: query.lastProgress["totalInputRows"] == 3 * ROWS, f"{query.lastProgress['totalInputRows']} rows")
        assert query.exception() is None
    finally:
        query.stop()
