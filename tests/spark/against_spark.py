"""Flows and the same in Spark's own batch operators, and the comparison of their rows."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import flux

F = pytest.importorskip("pyspark.sql.functions")


#: Settings of a session in which Spark interprets its operators. Their few rows take less time than the compilation of a query.
INTERPRETED = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}


def rows(df: Any) -> list[Any]:
    conf = df.sparkSession.conf
    try:
        for key, value in INTERPRETED.items():
            conf.set(key, value)
        return sorted(df.collect(), key=repr)
    finally:
        for key in INTERPRETED:
            conf.unset(key)


def assert_same(ours: Any, theirs: Any) -> None:
    """Check that both have the same column names and types, the same rows in any order, and at least one row."""
    assert [(f.name, f.dataType) for f in ours.schema] == [(f.name, f.dataType) for f in theirs.schema]
    expected = [repr(row) for row in rows(theirs)]  # NaN is equal to nothing, its name is
    assert expected
    assert [repr(row) for row in rows(ours)] == expected


def numbers(spark: Any, n: int = 20_000, partitions: int = 4) -> Any:
    """Make rows: k is 0..96, v exact as double, w 0..3."""
    return spark.range(0, n, 1, partitions).selectExpr("id % 97 as k", "id * 7 % 1001 / 2 as v", "id % 4 as w", "id")


@flux.stage(key="k", partitions=5)
class ByK(flux.Aggregate):
    n = flux.count()
    total = flux.sum("v")


@flux.stage(key="group", partitions=3)
class ByGroup(flux.Aggregate):
    keys = flux.count()
    n = flux.sum("n")
    largest = flux.max("total")


@flux.stage(schema="group BIGINT, n BIGINT, total DOUBLE")
def grouped(batch: pa.RecordBatch) -> pa.RecordBatch:
    group = pc.bit_wise_and(batch.column("k"), 7)
    return pa.RecordBatch.from_arrays([group, batch.column("n"), batch.column("total")], ["group", "n", "total"])


def by_k(df: Any) -> Any:
    return df.groupBy("k").agg(F.count("*").alias("n"), F.sum("v").alias("total"))


def by_group(df: Any) -> Any:
    inner = by_k(df).selectExpr("k & 7 as group", "n", "total")
    return inner.groupBy("group").agg(
        F.count("*").alias("keys"), F.sum("n").alias("n"), F.max("total").alias("largest")
    )
