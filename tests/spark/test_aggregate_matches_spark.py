"""A table aggregated by Spark's own groupBy and by Aggregate: same values, same types, same errors."""

from __future__ import annotations

import datetime
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from flux.operators import aggregate as agg
from flux.operators.operator import Context
from partitioning.errors import SumOverflowError

pytestmark = pytest.mark.spark

pyspark = pytest.importorskip("pyspark")

NAN, INF = float("nan"), float("inf")
ROWS = 400


def table() -> pa.Table:
    """Numbers are such that their sums as double are exact in any order."""
    rng = np.random.default_rng(7)

    def some(values: list, type_: pa.DataType, nulls: float = 0.15) -> pa.Array:
        picked = [values[i] for i in rng.integers(0, len(values), ROWS)]
        return pa.array([None if rng.random() < nulls else v for v in picked], type_)

    moment = datetime.datetime(2013, 6, 30, 12, 0, 0, 1, tzinfo=datetime.UTC)
    steps = [datetime.timedelta(seconds=int(s)) for s in rng.integers(-(10**9), 10**9, 50)]
    return pa.table(
        {
            "word": some(["", "a", "ab", "a longer key than eight bytes", "été"], pa.string()),
            "number": some([0, -1, 1 << 40], pa.int64()),
            "float_key": some([0.0, -0.0, NAN, 1.5], pa.float64()),
            "decimal_key": some([Decimal("0.10"), Decimal("-99999999999999999999.99")], pa.decimal128(22, 2)),
            "day_key": some([moment.date(), datetime.date(1970, 1, 1)], pa.date32()),
            "moment_key": some([moment, moment - datetime.timedelta(days=20_000)], pa.timestamp("us", "UTC")),
            "flag_key": some([True, False], pa.bool_()),
            "byte": some(list(range(-128, 128)), pa.int8()),
            "short": some([-(1 << 15), 5, (1 << 15) - 1], pa.int16()),
            "int": some([-(1 << 31), 5, (1 << 31) - 1], pa.int32()),
            "long": some([-(1 << 44), 8, 1 << 44], pa.int64()),
            "double": some([v / 8 for v in range(-800, 800)] + [-0.0, 2.0**20], pa.float64()),
            "odd": some([NAN, 1.0, -0.0, INF], pa.float64()),
            "float": some([0.5, -1.25, 8.0], pa.float32()),
            "money": some([Decimal(v) / 100 for v in range(-999, 1000, 7)], pa.decimal128(7, 2)),
            "huge": some([Decimal(10**30 // 3), Decimal(-7), Decimal(1)], pa.decimal128(33, 2)),
            "fine": some([Decimal(1).scaleb(-36), Decimal(-5).scaleb(-37)], pa.decimal128(38, 37)),
            "day": some([moment.date() + step for step in steps], pa.date32()),
            "moment": some([moment + step for step in steps], pa.timestamp("us", "UTC")),
            "flag": some([True, False], pa.bool_()),
            "nothing": pa.nulls(ROWS, pa.int32()),
            "text": some(["", "a", "a\0", "b", "Z", "é", "\ue000", "\U00010000", "a longer word"], pa.string()),
            "bytes": some([b"", b"\0", b"\x7f", b"\x80", b"\xff\xff", b"12345678", b"123456789"], pa.binary()),
        }
    )


NUMBERS = ["byte", "short", "int", "long", "double", "odd", "float", "money", "huge", "fine", "nothing"]
KINDS = {"count": agg.count, "sum": agg.sum, "min": agg.min, "max": agg.max, "mean": agg.mean}
MEASURES = {"rows": agg.count()}
for _column in [*NUMBERS, "day", "moment", "flag", "text", "bytes"]:
    for _kind in KINDS if _column in NUMBERS else ("count", "min", "max"):
        MEASURES[f"{_kind}_{_column}"] = KINDS[_kind](_column)
Everything = type("Everything", (agg.Aggregate,), dict(MEASURES))


def ours(rows: pa.Table, key: tuple[str, ...]) -> pa.Table:
    operator = Everything()
    operator.open(Context("everything", key=key, schemas=(rows.schema,)))
    for batch in rows.to_batches(max_chunksize=37):
        operator.process(batch)
    return pa.Table.from_batches(operator.finish())


def theirs(spark: Any, rows: pa.Table, key: tuple[str, ...]) -> pa.Table:
    from pyspark.sql import functions as F  # noqa: N812

    measures = [
        (F.count(F.lit(1)) if m.column is None else getattr(F, m.kind)(m.column)).alias(name)
        for name, m in MEASURES.items()
    ]
    return spark.createDataFrame(rows).groupBy(*key).agg(*measures).toArrow()


def comparable(rows: pa.Table, key: tuple[str, ...]) -> dict[tuple, dict]:
    def plain(value: Any) -> Any:
        if isinstance(value, float):
            return "NaN" if math.isnan(value) else value + 0.0
        return value

    plains = [{name: plain(value) for name, value in row.items()} for row in rows.to_pylist()]
    return {tuple(row[k] for k in key): row for row in plains}


@pytest.mark.parametrize(
    "key",
    [
        ("word", "float_key", "number"),
        ("day_key", "flag_key"),
        ("decimal_key",),
        (),
        # test_keys.py has keys of one column, too.
        *(pytest.param((name,), marks=pytest.mark.long) for name in ("word", "number", "float_key", "moment_key")),
    ],
    ids=lambda key: "+".join(key) or "global",
)
def test_values_and_types_are_those_of_spark(spark: Any, key: tuple[str, ...]) -> None:
    rows = table()
    mine, its = ours(rows, key), theirs(spark, rows, key)
    assert [(f.name, f.type) for f in mine.schema] == [(f.name, f.type) for f in its.schema]
    expected = comparable(its, key)
    got = comparable(mine, key)
    assert len(got) == mine.num_rows == its.num_rows
    assert got.keys() == expected.keys()
    different = [
        (at, name, got[at][name], value)
        for at, row in expected.items()
        for name, value in row.items()
        if got[at][name] != value
    ]
    assert different == []


def test_no_rows_without_a_key_give_the_row_that_spark_gives(spark: Any) -> None:
    rows = table().slice(0, 0)
    assert ours(rows, ()).to_pylist() == theirs(spark, rows, ()).to_pylist()


@pytest.mark.parametrize(
    "values",
    [
        pa.array([(1 << 63) - 1, 1]),
        pa.array([Decimal(10**38 - 1)] * 2, pa.decimal128(38, 0)),
    ],
    ids=["long", "decimal"],
)
def test_a_sum_that_does_not_fit_is_an_error_in_both(spark: Any, values: pa.Array) -> None:
    from pyspark.sql import functions as F  # noqa: N812

    class Total(agg.Aggregate):
        total = agg.sum("v")

    rows = pa.table({"v": values})
    with pytest.raises(Exception, match=r"(?i)overflow|out_of_range|cannot be represented"):
        spark.createDataFrame(rows).coalesce(1).agg(F.sum("v")).collect()
    operator = Total()
    operator.open(Context("total", schemas=(rows.schema,)))
    (batch,) = rows.to_batches()

    def result() -> None:
        """Compute it to the end: a sum of decimals is checked there, because later rows may bring it back."""
        operator.process(batch)
        list(operator.finish())

    with pytest.raises(SumOverflowError, match="'v'"):
        result()
