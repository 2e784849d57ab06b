"""The output of a running query, read in its program and as a stream of Spark's: every row once, through all losses."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from endless import command
from striking import KEYS, PARTITIONS, ROUNDS, ROWS, WAIT_S, paced, strike, until

import flux
from flux.errors import UsageError

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

TOTAL = KEYS * PARTITIONS * ROUNDS


@flux.stage(key="key", partitions=4, replicas=2)
def echo(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


@flux.stage(partitions=2)
def plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def flow(gate: Path, **options: Any) -> Any:
    source = flux.source(paced(gate), schema=ROWS, partitions=PARTITIONS, name="rounds")
    return echo(source).to_readers(**options)


class Counted:
    """A check of received rows: each key's numbers have to follow each other, from 0 on. This is an answer of its own: only the
    number of rounds is taken from the query."""

    def __init__(self) -> None:
        self.rows = 0
        self._next: dict[int, int] = {}

    def add(self, keys: list[int], numbers: list[int]) -> None:
        for key, number in zip(keys, numbers, strict=True):
            assert self._next.get(key, 0) == number, f"key {key}: {number} comes where {self._next.get(key, 0)} is due"
            self._next[key] = number + 1
        self.rows += len(keys)

    def check(self) -> None:
        assert len(self._next) == KEYS * PARTITIONS
        assert set(self._next.values()) == {ROUNDS}


@pytest.fixture
def callbacks(slots: Any, callbacks: None) -> None:
    """Open the port for callbacks of the session of ``slots``, which begins first."""


def stream(session: Any, name: str, **options: str) -> Any:
    session.dataSource.register(flux.DataSource)
    return session.readStream.format("flux").option("query", name).options(**options).load()


def test_rows_in_the_program_survive_the_loss_of_a_worker(
    slots: Any, tmp_path: Path, nothing_left_behind: None
) -> None:
    gate = tmp_path / "gate"
    query = flow(gate).start("in the program, ü", spark=slots, workers=3, progress_interval="100ms")
    found = Counted()
    try:
        rows, lost = query.rows(), None
        with pytest.raises(UsageError, match="is open"):
            query.rows()
        for batch in rows:
            found.add(*(batch.column(name).to_pylist() for name in ("key", "sequence")))
            if lost is None and found.rows > TOTAL // 4:
                rows.close()  # rows that were handed out are read, the rest comes to the next reader
                assert list(rows) == []
                rows = query.rows()
                lost = strike(query, signal.SIGKILL, stage=0)
                break
        for batch in rows:
            found.add(*(batch.column(name).to_pylist() for name in ("key", "sequence")))
            if not gate.exists() and query.is_whole() and lost not in query.members():
                gate.touch()
        found.check()
        assert "take-over" in {event.kind for event in query.events()}
        assert query.awaitTermination(WAIT_S), "when all is read, the query has ended"
        assert list(query.rows()) == [], "everything was read"
        assert query.status["message"].startswith("Finished")
    finally:
        query.stop()


class Crash(Exception):
    pass


def test_a_stream_of_spark_goes_on_from_its_checkpoint_with_each_row_once(
    slots: Any, tmp_path: Path, callbacks: None, nothing_left_behind: None
) -> None:
    gate = tmp_path / "gate"
    query = flow(gate, max_bytes="1m").start("to spark", spark=slots, workers=3, progress_interval="100ms")
    batches: dict[int, list[tuple[int, int]]] = {}
    again: list[int] = []
    crashes = [2]

    def take(frame: Any, number: int) -> None:
        rows = sorted((row.key, row.sequence) for row in frame.collect())
        if number in batches:
            again.append(number)
            assert batches[number] == rows, "a batch that is run again has the same rows"
        batches[number] = rows
        if crashes and number >= crashes[0] and rows:
            raise Crash(crashes.pop(0))  # processed, and Spark has not heard of it

    def run() -> Any:
        writer = stream(slots, "to spark").writeStream.foreachBatch(take)
        writer = writer.trigger(processingTime="500 milliseconds")  # else it has a batch, with tasks, for a few rows
        return writer.option("checkpointLocation", str(tmp_path / "spark")).start()

    try:
        spark_query = run()
        until(lambda: not spark_query.isActive, "the crash")
        assert "Crash" in str(spark_query.exception())
        spark_query = run()
        lost = strike(query, signal.SIGKILL, stage=0)
        until(lambda: lost not in query.members() and query.is_whole(), "take-over and repair")
        gate.touch()
        until(lambda: sum(map(len, batches.values())) >= TOTAL, "all rows")
        spark_query.processAllAvailable()
        spark_query.stop()
        assert again == [2]
        every = sorted(row for rows in batches.values() for row in rows)
        assert every == [(key, number) for key in range(KEYS * PARTITIONS) for number in range(ROUNDS)]
    finally:
        query.stop()


# ---- without losses


@flux.stage(key="k", partitions=3)
class Sums(flux.Aggregate):
    n = flux.count()
    total = flux.sum("v")


#: Before the first progress report.
NONE: dict[str, Any] = {"stages": [], "totalInputRows": 0}


def test_what_spark_reads_is_its_own_batch_answer_and_a_finished_query_is_read_to_its_end(
    spark: Any, nothing_left_behind: None
) -> None:
    frame = spark.range(0, 20_000, 1, 2).selectExpr("CAST(id % 700 AS STRING) AS k", "id AS v", "current_date() AS day")
    query = Sums(frame).to_readers().start("sums", spark=spark, workers=2)
    try:
        until(lambda: sum(stage["sinkBytes"] for stage in (query.lastProgress or NONE)["stages"]), "output")
        read = stream(spark, query.id, stage="Sums")
        written = read.writeStream.format("memory").queryName("read").trigger(availableNow=True).start()
        assert written.awaitTermination(int(WAIT_S))
        expected = frame.groupBy("k").agg({"v": "sum", "*": "count"}).selectExpr("k", "`count(1)` n", "`sum(v)` total")
        found = spark.table("read")
        assert sorted(map(tuple, found.select("k", "n", "total").collect())) == sorted(map(tuple, expected.collect()))
        assert query.isActive, "Spark has not said that it has the last batch for good"
    finally:
        query.stop()


def endless(partition: int) -> Iterator[pa.RecordBatch]:
    number = 0
    while True:
        yield pa.record_batch(
            [pa.array(range(number, number + 100)), pa.array([partition] * 100, pa.int64())], schema=ROWS
        )
        number += 100


def test_output_that_nobody_reads_stops_the_query_at_its_bound_and_status_says_so(
    spark: Any, nothing_left_behind: None
) -> None:
    source = flux.source(endless, schema=ROWS, partitions=2)
    query = plain(source).to_readers(max_bytes="64k").start("unread", spark=spark, workers=2, progress_interval="50ms")
    try:
        said = "2 partitions of stage plain wait for its output to be read"
        until(lambda: said in query.status["message"], "the bound")
        assert query.status["sinks"] == ["plain to readers, exactly once"]
        shown = " ".join(command("status", "unread").output.split())
        assert "plain goes to readers, exactly once" in shown, shown
        assert "2 partitions of plain cannot go on before its output is read" in shown, shown
        before = until_it_stands_still(query)
        with query.rows("plain") as rows:
            read = sum(next(rows).num_rows for _ in range(200))
        assert read > 0
        until(lambda: query.lastProgress["totalInputRows"] > before, "it goes on when it is read")
        spark_rows = stream(spark, "unread").writeStream.format("noop").start()
        until(
            lambda: sum(p["numInputRows"] for p in spark_rows.recentProgress) > 20_000, "many times the bound, by Spark"
        )
        spark_rows.stop()
        refused(spark, query)
        rows = query.rows()
        next(rows)
    finally:
        query.stop()
    assert len(list(rows)) < 200, "what has come is still given, and then it ends"
    with pytest.raises(UsageError, match="was stopped, and with it went the output"):
        query.rows()
    with pytest.raises(Exception, match=r"no query is running|no running query is called 'unread'"):
        stream(spark, "unread")


@pytest.mark.long  # tests/flux/test_sink_threads.py shows the same without Spark
def test_a_function_that_does_not_take_its_output_stops_the_query_and_status_says_so(
    spark: Any, tmp_path: Path, nothing_left_behind: None
) -> None:
    gate = str(tmp_path / "gate")

    def held(batch: pa.RecordBatch, position: flux.Position) -> None:
        end = time.monotonic() + WAIT_S
        while not os.path.exists(gate) and time.monotonic() < end:
            time.sleep(0.02)

    flow = plain(flux.source(endless, schema=ROWS, partitions=2))
    few = {"sink_max_bytes": "64k", "batch_max_bytes": "8k", "progress_interval": "50ms"}
    query = flux.start(flow.foreach_batch(held), queryName="held", spark=spark, workers=2, **few)
    try:
        until(lambda: "2 partitions of stage plain wait for the sink" in query.status["message"], "it is said")
        shown = " ".join(command("status", "held").output.split())
        assert "2 partitions of plain cannot go on before the sink has taken more" in shown, shown
        before = until_it_stands_still(query)
        Path(gate).touch()
        until(lambda: query.lastProgress["totalInputRows"] > before, "it goes on")
    finally:
        Path(gate).touch()
        query.stop()


def until_it_stands_still(query: Any) -> int:
    """Wait until nothing more was read for a while, though the source always has more; return the number of rows read."""
    seen: list[int] = []

    def stands() -> bool:
        time.sleep(0.3)
        seen.append(query.lastProgress["totalInputRows"])
        return len(seen) > 1 and seen[-1] == seen[-2]

    until(stands, "the end of what fits into logs")
    return seen[-1]


def refused(spark: Any, query: Any) -> None:
    for options, why in (
        ({"query": "nowhere, ü"}, "no running query is called 'nowhere, ü'; running are unread"),
        ({"query": ""}, "needs .option"),
        ({"query": "unread", "querry": "x"}, "does not know the option querry; there are query .* and stage"),
        (
            {"query": "unread", "stage": "other"},
            "no output of a stage 'other' is kept for readers; there is that of plain",
        ),
    ):
        with pytest.raises(Exception, match=why):
            spark.readStream.format("flux").options(**options).load()
    with pytest.raises(UsageError, match="there is that of plain"):
        query.rows("other")
