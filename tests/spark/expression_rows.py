"""Rows with nulls, extremes and odd text, and the comparison of expressions between Spark's batch engine and ours."""

from __future__ import annotations

import random
from collections.abc import Sequence
from decimal import Context, Decimal
from typing import Any

import pyarrow as pa
import pytest

from spark_integration.expressions.analysed_operators import steps_of
from spark_integration.schema import for_spark

functions = pytest.importorskip("pyspark.sql.functions")
EXACT = Context(prec=60)
TEXTS = [
    "",
    " ",
    "a",
    "abc",
    "  ab c ",
    "Ab%c_d",
    "äöüß",
    "日本語",
    "e\u0301",
    "👍🏽x",
    "a\nb",
    "line\r\n",
    "x\u2028y",
    "a/b//c/",
    "/",
    "%",
    "_",
    "\\",
    "a.b.c",
    "key=val&k2=v2",
    "ab" * 20,
    "ÀÉ",
    "\t1\n",
    "0012",
    "aXbXc",
    "foo123bar45",
    "İ",
    "ΑΣ",
    "http://x.org/a/b?q=1",
]
NUMBER_TEXTS = [
    "1",
    " 1 ",
    "+1",
    "-1",
    "1.5",
    "1.",
    ".",
    ".5",
    "1e2",
    "1E-2",
    "",
    "9223372036854775807",
    "9223372036854775808",
    "128",
    "-128",
    "00000000000000000000001",
    "NaN",
    "inf",
    "-Infinity",
    "1e400",
    "-0",
    "1 2",
    "t",
    "TRUE",
    "yes",
    "n",
    "1.000",
    "-",
    "1234567.895",
    "12345678901234567890123456789012345678",
    "99999999.995",
    "1e39",
    "1e-50",
    "0.005",
    "-0.005",
    "1.0d",
    "x",
]
TIME_TEXTS = [
    "2020",
    "2020-1",
    "2020-1-2",
    "2020-01-02 xyz",
    "2020-01-02T",
    "2020-01-02 10",
    "2020-01-02 10:",
    "2020-01-02 10:5",
    "2020-01-02 1:2:3",
    "2020-01-02 10:05:06.",
    "2020-01-02 10:05:06.1234567",
    "2020-01-02 10:05:06.1Z",
    "2020-01-02 10:05:06 Europe/Berlin",
    "2020-01-02 10:05:06+01:00",
    "2020-01-02T10:05:06+1",
    "2020-02-30",
    " 2020-01-02 ",
    "-0001-01-02",
    "12020-01-02",
    "020-01-02",
    "2020-01-02 24:00:00",
    "2020-01-02 10:05:60",
    "2020-01-02 10:05:06.123 +0100",
    "2020-03-29 02:30:00",
    "2020-10-25 02:30:00",
    "1891-03-15 00:00:00",
    "2020-01-02 10:05:06.1.2",
    "",
    "x",
    "2024-02-29",
    "1969-12-31 23:59:59.999999",
    "02/01/2020 7:08 PM",
]
DOUBLES = [
    0.0,
    -0.0,
    1.0,
    -1.5,
    2.5,
    0.1,
    2.675,
    1e-5,
    123456.789,
    1e7,
    1e15,
    -1e20,
    1e300,
    5e-324,
    float("inf"),
    float("-inf"),
    float("nan"),
]
TIMES = [
    0,
    -1,
    1,
    86_399_999_999,
    1_585_443_600_000_000 - 1,
    1_585_443_600_000_000,
    1_603_584_000_000_000 + 1_800_000_000,
    1_603_587_600_000_000 + 1_800_000_000,
    -2_208_988_800_000_000,
    -5_000_000_000_000_000,
    253_402_300_799_999_999,
    1_582_979_696_789_012,
    4_102_444_800_000_000,
]
DATES = [0, -1, 18262, 18321, 18322, 11016, -25567, -135140, 2932896, 19782]
INTS = [0, 1, -1, 2, -7, 3, 127, -128, 2**31 - 1, -(2**31), 32767]
LONGS = [0, 1, -1, 2, -7, 10**10, 2**53 + 1, 2**63 - 1, -(2**63)]


def schema(zone: str = "UTC") -> pa.Schema:
    names = {
        pa.int8(): "by",
        pa.int16(): "sh",
        pa.int32(): "i j k n",
        pa.int64(): "l m",
        pa.float64(): "f g",
        pa.float32(): "r",
        pa.bool_(): "b c",
        pa.decimal128(10, 2): "d",
        pa.decimal128(20, 5): "e",
        pa.decimal128(38, 10): "w",
        pa.string(): "s u num tim",
        pa.binary(): "bi",
        pa.timestamp("us", zone): "ts ts2",
        pa.timestamp("us"): "nt",
        pa.date32(): "dt dt2",
        pa.list_(pa.field("element", pa.int32())): "a",
        pa.struct([pa.field("x", pa.int32()), pa.field("y", pa.string())]): "st",
    }
    return pa.schema([(name, kind) for kind, listed in names.items() for name in listed.split()])


def rows(count: int, seed: int, zone: str = "UTC") -> pa.RecordBatch:
    """Return random rows: one value in six is null, and half of the others are from a list of odd ones."""
    rng = random.Random(seed)

    def column(odd: Sequence[Any], usual: Any, nulls: float = 1 / 6) -> list[Any]:
        return [
            None if rng.random() < nulls else rng.choice(odd) if rng.random() < 0.5 else usual() for _ in range(count)
        ]

    def texts() -> list[Any]:
        return column(TEXTS, lambda: "".join(rng.choice("abAB/ é%_1.日") for _ in range(rng.randint(0, 8))))

    def decimals(digits: int, scale: int) -> list[Any]:
        def number(value: int) -> Decimal:
            return Decimal(value).scaleb(-scale, EXACT)

        odd = [Decimal(0), Decimal(1), Decimal(-1), number(10**digits - 1), number(5), Decimal("-2.50")]
        return column(
            odd, lambda: number(rng.randint(-(10 ** rng.randint(1, digits)) + 1, 10 ** rng.randint(1, digits) - 1))
        )

    def ints(odd: Sequence[int], size: int) -> list[Any]:
        return column(
            [each for each in odd if -size <= each < size], lambda: rng.randint(-min(size, 1000), min(size, 1000) - 1)
        )

    def moments() -> pa.Array:
        found = column(TIMES, lambda: rng.randint(-3 * 10**15, 3 * 10**15))
        return pa.array(found, pa.int64())

    def days() -> pa.Array:
        return pa.array(column(DATES, lambda: rng.randint(-40_000, 40_000)), pa.int32()).cast(pa.date32())

    def ratios(odd: Sequence[float], limit: float) -> list[Any]:
        return column(odd, lambda: round(rng.uniform(-limit, limit), 2))

    def dates_as_text() -> list[Any]:
        return column(TIME_TEXTS, lambda: f"20{rng.randint(10, 30)}-0{rng.randint(1, 9)}-1{rng.randint(0, 9)}")

    kinds = schema(zone)
    made = {
        **{name: ints(INTS, 2**31) for name in "ij"},
        **{name: ints(LONGS, 2**63) for name in "lm"},
        "by": ints(INTS, 2**7),
        "sh": ints(INTS, 2**15),
        "f": column(DOUBLES, lambda: rng.uniform(-1000, 1000)),
        "g": ratios(DOUBLES, 100),
        "r": ratios([0.0, -0.0, 1.5, float("nan"), float("inf"), 0.1], 10),
        **{name: column([True, False], lambda: True) for name in "bc"},
        "d": decimals(10, 2),
        "e": decimals(20, 5),
        "w": decimals(38, 10),
        **{name: texts() for name in "su"},
        "num": column(NUMBER_TEXTS, lambda: str(rng.randint(-1000, 1000))),
        "tim": dates_as_text(),
        **{name: moments().cast(kinds.field(name).type) for name in ("ts", "ts2", "nt")},
        **{name: days() for name in ("dt", "dt2")},
        "bi": column([b"", b"\x00", b"\xff\xfe", b"abc"], lambda: rng.randbytes(3)),
        "a": column([[], [1], [1, None, 3], [5, 6]], lambda: [rng.randint(0, 9)] * rng.randint(0, 4)),
        "st": column([{"x": 1, "y": "a"}, {"x": None, "y": None}], lambda: {"x": rng.randint(0, 9), "y": "b"}),
        "k": column([1, 2, 0, -1, 3], lambda: rng.randint(-5, 5)),
        "n": [rng.randint(1, 5) for _ in range(count)],
    }
    columns = [
        each if isinstance(each := made[field.name], pa.Array) else pa.array(each, field.type) for field in kinds
    ]
    return pa.RecordBatch.from_arrays(columns, schema=kinds)


def comparable(column: pa.Array) -> list[Any]:
    """Return values so that NaN is equal to itself, and 0.0 is not -0.0; times as integers, which have more years."""
    if pa.types.is_temporal(column.type) and not pa.types.is_interval(column.type):
        column = column.view(pa.int32() if pa.types.is_date32(column.type) else pa.int64())
    values = column.to_pylist()
    return [repr(each) for each in values] if _has_floats(column.type) else values


def _has_floats(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_floating(kind)
        or (pa.types.is_nested(kind) and any(_has_floats(kind.field(at).type) for at in range(kind.num_fields)))
    )


def as_dataframe(spark: Any, batch: pa.RecordBatch) -> Any:
    """Return the rows in one partition: a task costs more than its rows here."""
    return spark.createDataFrame(pa.Table.from_batches([batch]), for_spark(batch.schema, "rows")[0]).coalesce(1)


def differences(spark: Any, df: Any, batch: pa.RecordBatch, texts: Sequence[Any]) -> list[str]:
    """Compare our answers to expressions of these rows, none of which raises, with Spark's; describe the differences."""
    columns = [
        (functions.expr(each) if isinstance(each, str) else each).alias(f"c{at}") for at, each in enumerate(texts)
    ]
    theirs = df.select(*columns).toArrow().combine_chunks()
    try:
        steps = steps_of(spark, batch.schema, lambda empty: empty.select(*columns))
        ours = pa.Table.from_batches([steps.apply(batch)])
    except Exception as error:
        if len(texts) == 1:
            return [f"{texts[0]}: {type(error).__name__}: {str(error)[:300]}"]
        return [found for each in texts for found in differences(spark, df, batch, [each])]
    found = []
    for at, text in enumerate(texts):
        left, right = theirs.column(at), ours.column(at)
        left = left.combine_chunks() if left.num_chunks != 1 else left.chunk(0)
        right = right.chunk(0)
        if pa.types.is_timestamp(right.type) and right.type.tz:
            right = right.cast(pa.timestamp("us", "UTC"))  # as toArrow gives it in every session
        if left.type != right.type:
            found.append(f"{text}: Spark gives {left.type}, ours is {right.type}")
            continue
        other = [row for row, (x, y) in enumerate(zip(comparable(left), comparable(right), strict=True)) if x != y]
        if other:
            row = other[0]
            names = [name for name in batch.schema.names if name in str(text)]
            given = {name: batch.column(name)[row] for name in names}
            shown = [
                str(each.cast(pa.int64()) if pa.types.is_timestamp(each.type) else each) for each in given.values()
            ]
            there = list(zip(given, shown, strict=True))
            answers = f"Spark gives {_at(left, row)}, ours is {_at(right, row)}"
            found.append(f"{text}: {len(other)} rows; of {there} {answers}")
    return found


def _at(column: pa.Array, row: int) -> str:
    return repr(comparable(column.slice(row, 1))[0])
