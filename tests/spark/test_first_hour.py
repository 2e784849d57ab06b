"""First tries of a user who knows PySpark, in the first hour."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

import flux

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("nothing_left_behind")]

pytest.importorskip("pyspark")


@flux.stage(key="k", partitions=2)
class Totals(flux.Aggregate):
    total = flux.sum("v")


def test_a_flow_is_shown_collected_and_explained_like_a_dataframe(spark: Any, capsys: Any) -> None:
    df = spark.range(0, 20, 1, 2).selectExpr("id % 2 as k", "id as v")
    flow = Totals(df)
    assert sorted(flow.collect(workers=1)) == [(0, 90), (1, 100)]
    flow.show(1, workers=1)
    assert "+---+-----+" in capsys.readouterr().out
    flow.explain(partitions=4)
    shown = capsys.readouterr().out
    assert "source DataFrame" in shown
    assert "    reads source DataFrame, rows by hash of k" in shown
    query = flow.start(workers=1, keep_output=False)
    query.explain()
    assert "    workers: 1" in capsys.readouterr().out
    query.awaitTermination()
    with pytest.raises(flux.SchemaError, match="key 'k' is not a column"):
        Totals(spark.range(3)).explain()


@pytest.mark.parametrize("case_sensitive", [False, True])
def test_columns_are_found_as_spark_finds_them(spark: Any, case_sensitive: bool) -> None:
    from pyspark.sql import functions as F  # noqa: N812

    @flux.stage(key="DEST", partitions=1)
    class Worst(flux.Aggregate):
        worst = flux.max("Delay")

    df = spark.createDataFrame([("a", 1), ("a", 3)], "dest STRING, delay BIGINT")
    spark.conf.set("spark.sql.caseSensitive", str(case_sensitive).lower())
    try:
        if case_sensitive:
            with pytest.raises(Exception, match="UNRESOLVED_COLUMN"):
                df.groupBy("DEST").agg(F.max("Delay").alias("worst"))
            with pytest.raises(flux.SchemaError, match="key 'DEST' is not a column"):
                Worst(df).explain()
            return
        theirs = df.groupBy("DEST").agg(F.max("Delay").alias("worst"))
        ours = Worst(df).toDF(workers=1)
        assert (ours.columns, ours.collect()) == (theirs.columns, theirs.collect())
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


DDL = [
    "user STRING NOT NULL COMMENT 'who', n: bigint, `odd ``name` DOUBLE",
    "a TINYINT, b SMALLINT, c INT, d BYTE, e SHORT, f INTEGER, g LONG, h FLOAT, i REAL, j BOOLEAN",
    "a DECIMAL, b DECIMAL(7), c DEC(7,2), d NUMERIC(38,37)",
    "a DATE, b TIMESTAMP, c TIMESTAMP_NTZ, d TIMESTAMP_LTZ, e BINARY, f VOID",
    "a ARRAY<INT>, b MAP<STRING,DOUBLE>, c STRUCT<x: INT NOT NULL, y: ARRAY<STRUCT<z: DATE>>>, d STRUCT<>",
]


def test_schemas_are_read_by_the_test_kit_as_by_spark_and_types_that_do_not_fit_are_refused_first(spark: Any) -> None:
    from flux.operators.schema import parse_ddl
    from spark_integration.schema import to_arrow

    for ddl in DDL:
        assert parse_ddl(ddl).equals(to_arrow(spark, ddl)), ddl
    with pytest.raises(flux.SchemaError, match=r"column 'v' of type varchar\(3\) cannot be taken"):
        to_arrow(spark, "v VARCHAR(3)")
    with pytest.raises(flux.SchemaError, match="column 'odd' of type interval cannot be taken"):
        to_arrow(spark, spark.sql("SELECT 1 AS k, make_interval(1) AS odd"))

    def read(partition: int) -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"k": [1], "odd": pa.array([1], pa.time32("s"))})

    odd = flux.source(read, schema=pa.schema([("k", pa.int64()), ("odd", pa.time32("s"))]), partitions=1)
    with pytest.raises(flux.SchemaError, match=r"Spark has no type for column 'odd' of type time32\[s\]; cast it"):
        flux.stage(lambda batch: batch)(odd).toDF(spark=spark)


def test_columns_that_spark_has_in_another_form_arrive_as_rows(spark: Any) -> None:
    batch = pa.record_batch(
        {
            "word": pa.array(["a", None, "a"]).dictionary_encode(),
            "words": pa.array([["x"], None, []], pa.large_list(pa.string_view())),
            "pair": pa.array([[1, 2], None, [3, None]], pa.list_(pa.int32(), 2)),
            "three": pa.array([b"abc", None, b"bcd"], pa.binary(3)),
            "cents": pa.array([1, None, 3], pa.decimal64(15, 2)),
            "at": pa.array([1_000_000_001, None, 2], pa.timestamp("ns")),
        }
    )
    source = flux.source(lambda partition: iter([batch]), schema=batch.schema, partitions=1)
    rows = flux.stage(lambda batch: batch)(source).collect(spark=spark, workers=1)
    wanted = batch.set_column(5, "at", pa.array([1_000_000_000, None, 0], pa.timestamp("ns"))).to_pylist()
    assert sorted(map(repr, (row.asDict() for row in rows))) == sorted(
        repr({**row, "at": row["at"] and row["at"].to_pydatetime()}) for row in wanted
    )


def test_what_cannot_be_sent_to_the_executors_is_named_before_anything_runs(spark: Any) -> None:
    lock = threading.Lock()

    @flux.stage
    def locked(batch: pa.RecordBatch) -> pa.RecordBatch:
        with lock:
            return batch

    def read(partition: int) -> Iterator[pa.RecordBatch]:
        with lock:
            yield pa.record_batch({"k": [1]})

    with pytest.raises(
        flux.UsageError, match=r"stage locked cannot be sent to the executors: .*lock.* make that in open"
    ):
        locked(spark.range(3)).start()
    source = flux.source(read, schema="k BIGINT", partitions=1, name="clicks")
    with pytest.raises(flux.UsageError, match="source clicks cannot be sent to the executors"):
        flux.stage(lambda batch: batch)(source).start(spark=spark)
    df = spark.range(3)
    with pytest.raises(flux.UsageError, match="stage joined cannot be sent to the executors"):
        flux.stage(lambda batch: df, name="joined")(df).start()


def test_inputs_of_pyspark_that_are_none_are_refused_in_a_sentence(spark: Any) -> None:
    for wrong, named in (
        (spark.range(3).groupBy("id"), "the result of groupBy"),
        (spark.readStream.format("rate").load(), "give flux.stream"),
        (spark.range(3).toPandas(), "a pandas DataFrame"),
        (spark.range(3).rdd, "an RDD"),
    ):
        with pytest.raises(flux.UsageError, match=named):
            Totals(wrong)
    from pyspark.sql import functions as F  # noqa: N812

    with pytest.raises(flux.UsageError, match="knows no Columns"):
        flux.stage(key=F.col("k"))
    with pytest.raises(flux.UsageError, match=r"flux\.sum takes the name of a column"):
        flux.sum(F.col("v"))
