"""Output by the declared schema: found by name, cast where no value changes, and else refused with the remedy."""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import pyarrow as pa
import pytest
from harness import Rows, ThreadQuery, dataframe

import flux
from flux.errors import SchemaError
from flux.operators.batches import conform

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int32())])
TURNED = pa.struct([("a", pa.int64()), ("b", pa.int64())])
DAY = datetime.datetime(2026, 11, 27)


def fitted(column: Any, declared: pa.DataType) -> Any:
    batch = pa.record_batch({"v": column})
    made = conform(batch, pa.schema([("v", declared)]), "output")
    made.validate(full=True)
    assert made.schema.types == [declared]
    return made.column("v").to_pylist()


def test_columns_are_found_by_name_whatever_their_order() -> None:
    made = conform(pa.record_batch({"v": pa.array([2], pa.int32()), "k": [1]}), SCHEMA, "output")
    assert made.schema.equals(SCHEMA)
    assert made.to_pylist() == [{"k": 1, "v": 2}]


@pytest.mark.parametrize(
    ("values", "given", "declared"),
    [
        ([1, None, -5], pa.int64(), pa.int32()),
        ([1, None, -5], pa.int32(), pa.int64()),
        ([1, 2**53], pa.int64(), pa.float64()),
        ([1, None], pa.int32(), pa.decimal128(12, 2)),
        ([0.1, None], pa.float32(), pa.float64()),
        ([decimal.Decimal("1.50")], pa.decimal128(10, 2), pa.decimal128(12, 4)),
        ([DAY], pa.timestamp("ms"), pa.timestamp("us")),
        ([DAY], pa.timestamp("ns"), pa.timestamp("us")),
        (["a", None], pa.large_string(), pa.string()),
        ([[1, None], None], pa.list_(pa.int32()), pa.list_(pa.int64())),
        ([{"b": 1, "a": 2}], pa.struct([("b", pa.int32()), ("a", pa.int64())]), TURNED),
        ([None, None], pa.null(), pa.int64()),
        (["x"], pa.dictionary(pa.int8(), pa.string()), pa.string()),
    ],
)  # fmt: skip
def test_what_changes_no_value_is_cast(values: list[Any], given: pa.DataType, declared: pa.DataType) -> None:
    column = pa.array(values, given) if not pa.types.is_dictionary(given) else pa.array(values).dictionary_encode()
    assert fitted(column, declared) == column.to_pylist()


@pytest.mark.parametrize(
    ("values", "given", "declared", "said"),
    [
        ([3_000_000_000], pa.int64(), pa.int32(), "column 'v' is int64 and has a value that int32 does not hold: .*3000000000"),
        ([2**53 + 1], pa.int64(), pa.float64(), "does not hold: .*9007199254740993"),
        ([decimal.Decimal("1.234")], pa.decimal128(10, 3), pa.decimal128(10, 2), "does not hold"),
        ([1.0], pa.float64(), pa.int64(), r"column 'v' is double and not int64\. Cast it, as in batch\.column\('v'\)\.cast"),
        ([1.0], pa.float64(), pa.float32(), "is double and not float"),
        (["1"], pa.string(), pa.int64(), "is string and not int64"),
        ([1], pa.int64(), pa.string(), "is int64 and not string"),
        ([1], pa.int64(), pa.bool_(), "is int64 and not bool"),
        ([1], pa.int64(), pa.timestamp("us"), "and not timestamp"),
        ([DAY], pa.timestamp("us"), pa.timestamp("us", "UTC"), "and not timestamp"),
        ([{"a": 1}], pa.struct([("a", pa.int64())]), pa.struct([("a", pa.int64()), ("b", pa.int64())]), "is struct<a"),
    ],
)  # fmt: skip
def test_what_may_change_a_value_is_refused_with_a_cast(
    values: list[Any], given: pa.DataType, declared: pa.DataType, said: str
) -> None:
    with pytest.raises(SchemaError, match=said):
        fitted(pa.array(values, given), declared)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"k": [1], "v": [1], "w": [2]}, r"w int64\): column 'w' is not declared.*batch.select\(\['k', 'v'\]\)"),
        ({"k": [1]}, "column 'v' is missing"),
        ({"k": [1], "V": [1], "w": [1]}, "column 'v' is missing"),
    ],
)  # fmt: skip
def test_other_columns_are_named(columns: dict[str, Any], said: str) -> None:
    with pytest.raises(SchemaError, match=said):
        conform(pa.record_batch(columns), SCHEMA, "output of stage s")


def test_a_column_that_is_there_twice_is_named() -> None:
    twice = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([1]), pa.array([2])], names=["k", "v", "v"])
    with pytest.raises(SchemaError, match="column 'v' is there twice"):
        conform(twice, SCHEMA, "output")


def test_a_query_gives_what_was_declared() -> None:
    @flux.stage(schema=SCHEMA, partitions=1)
    def turned(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch({"v": batch.column("k"), "k": batch.column("k")})

    given = pa.record_batch({"k": pa.array([1, 2], pa.int64())})
    rows = Rows()
    with ThreadQuery(rows.stage(turned(dataframe(given.schema))), workers=1) as query:
        query.started().feed([[given]])
        query.wait()
    assert rows == [{"k": 1, "v": 1}, {"k": 2, "v": 2}]
    assert flux.testing.apply(turned, given).schema.equals(SCHEMA)
