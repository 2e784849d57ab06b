"""Conditions and columns of flows and sources: the rows of the same program in Spark's batch engine, also under a kill."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from against_spark import assert_same
from striking import KEYS, LAST_ROUNDS, PARTITIONS, ROUNDS, ROWS, SEEN, WAIT_S, Seen, paced, rows_in, until
from test_positions import topic

import flux

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

F = pytest.importorskip("pyspark.sql.functions")

SCHEMA = "k BIGINT, v DOUBLE, name STRING"


def batches(partition: int) -> Iterator[pa.RecordBatch]:
    """Yield batches of 250 rows, some of which have no row with k above 40."""
    for number in range(20):
        ids = np.arange(250 * number, 250 * number + 250)
        k = ids * 31 % (97 if number % 3 else 30)
        names = [f"Name {at % 11}" if at % 13 else None for at in ids.tolist()]
        yield pa.record_batch({"k": k, "v": ids % 1001 / 2 + partition, "name": names})


def counted(partition: int, start: int) -> Iterator[pa.RecordBatch]:
    yield from list(batches(partition))[start:]


def numbered(partition: int, start: int | None) -> Iterator[flux.Positioned]:
    for number, batch in enumerate(batches(partition)):
        if number >= (start or 0):
            yield flux.Positioned(batch, number + 1)


@flux.stage(key="short", partitions=3)
class Totals(flux.Aggregate):
    n = flux.count()
    total = flux.sum("twice")


@flux.stage(partitions=2)
def same(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def stepped(given: Any) -> Any:
    """Put the same operators behind a DataFrame, a source or a flow."""
    return (
        given.where("k > 40")
        .withColumn("twice", F.col("v") * 2)
        .filter(F.col("name").isNotNull())
        .withColumnRenamed("name", "long_name")
        .withColumns({"short": F.lower("long_name").substr(1, 6)})
        .drop("v", "no_such_column")
        .selectExpr("short", "twice", "k % 5 as fifth")
        .select("fifth", F.col("short"), "twice")
    )


def theirs(df: Any) -> Any:
    totals = stepped(df).groupBy("short").agg(F.count("*").alias("n"), F.sum("twice").alias("total"))
    return totals.where("n % 2 = 0").select("short", (F.col("total") + F.col("n")).alias("sum"))


def ours(given: Any) -> Any:
    return Totals(stepped(given)).where("n % 2 = 0").select("short", (F.col("total") + F.col("n")).alias("sum"))


@pytest.fixture(scope="module")
def data(spark: Any) -> Any:
    made = spark.createDataFrame(pa.Table.from_batches([batch for partition in (0, 1) for batch in batches(partition)]))
    return made.cache()


@pytest.mark.parametrize("kind", [pytest.param("counted", marks=pytest.mark.long), "numbered", "stage"])
def test_conditions_and_columns_are_those_of_spark(spark: Any, data: Any, kind: str) -> None:
    if kind == "stage":
        given: Any = same(data)
    else:
        read = counted if kind == "counted" else numbered
        given = flux.source(read, SCHEMA, 2, "rows", positions=kind == "numbered")
    assert_same(ours(given).toDF(), theirs(data))


def test_a_source_with_conditions_is_a_flow_of_its_own(spark: Any, data: Any) -> None:
    given = flux.source(counted, SCHEMA, 2, "rows").where("k > 90").select("k", F.col("v") + 1)
    assert_same(given.toDF(), data.where("k > 90").select("k", F.col("v") + 1))


def test_what_spark_cannot_resolve_is_refused_at_the_call(spark: Any) -> None:
    given = flux.source(counted, SCHEMA, 2, "rows")
    with pytest.raises(
        flux.UsageError, match=r"(?s)source rows: .*UNRESOLVED_COLUMN.*`amount`.*There are k BIGINT, v DOUBLE"
    ):
        given.where("amount > 3")
    with pytest.raises(flux.UsageError, match=r"stage Totals: .*UNRESOLVED_COLUMN"):
        Totals(stepped(given)).where("v > 3")
    with pytest.raises(flux.UsageError, match="PARSE_SYNTAX_ERROR"):
        given.selectExpr("k +")
    with pytest.raises(flux.UsageError, match="several columns are called 'k'"):
        given.select("k", "k")
    with pytest.raises(flux.UsageError, match="Column or str, got int"):
        given.where(5)
    with pytest.raises(flux.UsageError, match="where: missing a required argument"):
        given.where()


def test_a_watermark_is_declared_on_a_column_that_spark_has_made(spark: Any) -> None:
    read = flux.source(counted, SCHEMA, 2, "rows")
    with pytest.raises(flux.SchemaError, match=r"column 'k' is int64.*F\.expr\('timestamp_millis\(`k`\)'\)"):
        read.withWatermark("k", "1 second")
    timed = read.withColumn("ts", F.expr("timestamp_millis(`k`)")).withWatermark("TS", "1 second")
    with pytest.raises(flux.UsageError, match=r"UNRESOLVED_COLUMN.*There are .*ts TIMESTAMP"):
        timed.where("time > '2020-01-01'")
    assert "event time: ts less 1 second, behind select" in flux.explain(same(timed.where("ts > '2020-01-01'")))


def trimmed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield batch.set_column(2, "name", pc.utf8_lower(batch["name"]))


def test_aliases_functions_and_unions_of_other_types_give_the_rows_of_spark(spark: Any, data: Any) -> None:
    others = spark.range(50).selectExpr("cast(id as int) a", "cast(id as decimal(9,2)) b", "cast(id as string) c")

    def both(given: Any, other: Any) -> Any:
        some = given.alias("r").where("r.k > 80").mapInArrow(trimmed, SCHEMA).where(F.col("name").isNotNull())
        return some.union(other).selectExpr("k % 5 AS fifth", "v", "name")

    read = flux.source(counted, SCHEMA, 2, "rows")
    ours, wanted = both(read, flux.batch(others)), both(data, others)
    groups = [
        each.groupBy("fifth").agg(F.count("*").alias("n"), F.max("name").alias("last")) for each in (ours, wanted)
    ]
    assert_same(ours.toDF(), wanted)
    assert_same(groups[0].toDF(), groups[1])
    with pytest.raises(flux.UsageError, match=r"union: .*INCOMPATIBLE_COLUMN_TYPE"):
        read.union(spark.range(5).selectExpr("array(id) a", "id b", "id c"))
    with pytest.raises(flux.SchemaError, match=r"got 3 \(k, v, name\) and 1 \(id\)"):
        read.union(spark.range(5))


@pytest.mark.parametrize("kind", ["source", "dataframe"])
def test_a_row_without_an_answer_ends_the_query_with_its_place(spark: Any, data: Any, kind: str) -> None:
    """Columns of a DataFrame are its own; here those of a stage behind it are computed."""
    read = flux.source(counted, SCHEMA, 2, "rows") if kind == "source" else same(data)
    flow = Totals(read.selectExpr("name as short", "cast(name as int) * 2.0d as twice"))
    with pytest.raises(flux.FluxError, match="CAST_INVALID_INPUT") as raised:
        flow.toDF()
    place = r"source rows, partition" if kind == "source" else "stage same, partition"
    assert place in str(raised.value)


@pytest.mark.usefixtures("nothing_left_behind")
@pytest.mark.parametrize("kind", ["numbered", pytest.param("counted", marks=pytest.mark.long)])
def test_rows_that_pass_are_counted_once_and_in_order_when_a_worker_is_killed(
    slots: Any, tmp_path: Path, kind: str
) -> None:
    folder, gate = tmp_path / "rows", tmp_path / "gate"
    read = (
        flux.source(paced(gate), ROWS, partitions=PARTITIONS)
        if kind == "counted"
        else flux.source(topic(gate), ROWS, partitions=PARTITIONS, positions=True)
    )
    count = flux.stage(key="key", partitions=4, replicas=2, schema=SEEN)(Seen)
    flow = count(read.where("key % 30 = 7").selectExpr("key", "sequence")).where("sequence % 2 = 0")
    query = flow.to_parquet(str(folder), roll_every="200ms").start(
        spark=slots, workers=3, progress_interval="100ms", checkpoint_interval="200ms"
    )
    try:
        until(lambda: rows_in(query) > KEYS * PARTITIONS * (ROUNDS - LAST_ROUNDS) // 4, "some of the rows")
        table = query._server.core.table
        assert table is not None
        os.kill(query.members()[table.sources[0][0]].about.pid, signal.SIGKILL)
        until(lambda: not query.is_whole(), "the loss is noticed")
        until(query.is_whole, "full replication")
        gate.touch()
        assert query.awaitTermination(WAIT_S)
    finally:
        query.stop()
    found = slots.read.parquet(str(folder)).toPandas()
    keys = len([key for key in range(KEYS * PARTITIONS) if key % 30 == 7])
    assert len(found) == keys * ROUNDS // 2
    assert found.groupby(["key", "sequence"]).size().max() == 1
    assert (found["sequence"] == found["seen"]).all(), "each row has met the state of all before it"


@pytest.mark.parametrize("kind", ["numbered", pytest.param("counted", marks=pytest.mark.long)])
def test_a_start_goes_on_from_the_checkpoint_location_with_the_same_steps_alone(
    spark: Any, tmp_path: Path, kind: str
) -> None:
    folder, gate, location = tmp_path / "rows", tmp_path / "gate", str(tmp_path / "location")

    def started(condition: str) -> Any:
        read = (
            flux.source(paced(gate), ROWS, partitions=PARTITIONS, name="read")
            if kind == "counted"
            else flux.source(topic(gate), ROWS, partitions=PARTITIONS, positions=True, name="read")
        )
        count = flux.stage(key="key", partitions=2, schema=SEEN)(Seen)
        flow = count(read.where(condition))
        sink = flow.to_parquet(str(folder), roll_every="200ms")
        return sink.start(spark=spark, checkpointLocation=location, workers=2, checkpoint_interval="200ms")

    query = started("key % 30 = 7")
    try:
        until(lambda: rows_in(query) > KEYS * PARTITIONS * ROUNDS // 8, "some of the rows")
    finally:
        query.stop()
    with pytest.raises(flux.UsageError, match=r"(?s)it read read through where .* and reads it through where"):
        started("key % 30 = 8")
    gate.touch()
    again = started("key % 30 = 7")
    try:
        assert again.awaitTermination(WAIT_S)
    finally:
        again.stop()
    found = spark.read.parquet(str(folder)).toPandas()
    assert len(found) == len([key for key in range(KEYS * PARTITIONS) if key % 30 == 7]) * ROUNDS
    assert found.groupby(["key", "sequence"]).size().max() == 1
    assert (found["sequence"] == found["seen"]).all(), "each row has met the state of all before it"


def test_a_flow_tells_its_columns_as_a_dataframe_does(spark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    df = spark.createDataFrame([(1, 2.0, "a")], SCHEMA)
    for given in (df, flux.source(batches, SCHEMA, 1)):
        for ask in (lambda rows: rows.schema.names, lambda rows: rows.columns, lambda rows: rows.dtypes):
            assert ask(stepped(flux.batch(given) if given is df else given)) == ask(stepped(df))
    stepped(flux.source(batches, SCHEMA, 1)).printSchema()
    ours_printed = capsys.readouterr().out
    stepped(df).printSchema()
    assert ours_printed == capsys.readouterr().out
    totals = Totals(stepped(flux.source(batches, SCHEMA, 1)))
    assert totals.dtypes == [("short", "string"), ("n", "bigint"), ("total", "double")]
    assert not totals.isStreaming
    rate = spark.readStream.format("rate").load()
    assert flux.stream(rate).where("value > 0").isStreaming
    assert flux.stream(rate).columns == rate.columns
    with pytest.raises(flux.SchemaError, match="no_such"):
        same(flux.source(batches, SCHEMA, 1).select("no_such")).schema  # noqa: B018
