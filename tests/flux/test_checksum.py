"""Checksums tell whether a retried task reads the same rows again: equal rows have equal checksums however they lie in
memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

from flux.wire.checksum import extend, extend_apart, extend_each

VALUES = {
    "int64": pa.array([1, None, 3, 4, None, 6], pa.int64()),
    "bool": pa.array([True, None, False, True, None, True]),
    "string": pa.array(["a", None, "ccc", "", None, "f"]),
    "large_string": pa.array(["a", None, "ccc", "", None, "f"], pa.large_string()),
    "string_view": pa.array(["a" * 30, None, "ccc", "", None, "f"], pa.string_view()),
    "binary_view": pa.array([b"a" * 30, None, b"ccc", b"", None, b"f"], pa.binary_view()),
    "fixed_binary": pa.array([b"abc", None, b"def", b"ghi", None, b"jkl"], pa.binary(3)),
    "decimal": pa.array([1, None, 3, 4, None, 6], pa.int64()).cast(pa.decimal128(30, 2)),
    "timestamp": pa.array([1, None, 3, 4, None, 6], pa.timestamp("us")),
    "list": pa.array([[1], None, [2, None], [], None, [3, 4]], pa.list_(pa.int64())),
    "struct": pa.array([{"x": 1}, None, {"x": None}, {"x": 4}, None, {"x": 6}]),
    "map": pa.array([[("a", 1)], None, [], [("b", 2), ("c", 3)], None, []], pa.map_(pa.string(), pa.int64())),
    "dictionary": pa.array(["a", None, "b", "a", None, "c"]).dictionary_encode(),
    "null": pa.nulls(6),
}


def checksum(column: pa.Array, before: int = 0) -> int:
    return extend(before, pa.RecordBatch.from_arrays([column], ["c"]))


@pytest.mark.parametrize("kind", VALUES)
def test_a_slice_counts_as_the_rows_that_it_shows(kind: str) -> None:
    column = VALUES[kind]
    for start, rows in [(0, 6), (1, 4), (2, 3), (5, 1), (3, 0)]:
        shown = column.slice(start, rows)
        assert checksum(shown) == checksum(pa.array(shown.to_pylist(), column.type)), (start, rows)


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("nulls", [True, False])
def test_streams_side_by_side_have_the_checksums_that_they_have_alone(kind: str, nulls: bool) -> None:
    values = [value for value in VALUES[kind].to_pylist() if nulls or value is not None]
    column = pa.array(values, VALUES[kind].type)
    batch = pa.RecordBatch.from_arrays([pa.concat_arrays([column] * 3)], ["c"]).slice(1)
    sizes, before = [2, 1, 0, 3] if len(batch) >= 6 else [0, 0], [7, 1 << 63, 0, 9]
    parts = [batch.slice(sum(sizes[:at]), rows) for at, rows in enumerate(sizes)]
    expected = [extend(checksum, part) for checksum, part in zip(before, parts, strict=False)]
    assert extend_apart(before[: len(sizes)], batch, sizes) == expected


@pytest.mark.parametrize("kind", [kind for kind in VALUES if kind != "null"])
def test_other_rows_have_another_checksum(kind: str) -> None:
    column = VALUES[kind]
    swapped = pa.array([column[i].as_py() for i in (2, 1, 0, 3, 4, 5)], column.type)
    seen = [checksum(column), checksum(column.slice(1)), checksum(swapped), checksum(column, 1)]
    assert len(set(seen)) == len(seen)


def _numbers(under_null: int) -> pa.Array:
    values = pa.py_buffer(np.array([1, under_null, 3], np.int64))
    return pa.Array.from_buffers(pa.int64(), 3, [pa.py_buffer(bytes([0b101])), values])


def _list_of_numbers(under_null: int) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array([0, 2, 3], pa.int32()), _numbers(under_null))


def _masked_struct(under_null: int) -> pa.Array:
    return pa.StructArray.from_arrays([pa.array([1, under_null, 3])], ["x"], mask=pa.array([False, True, False]))


@pytest.mark.parametrize("make", [_numbers, _list_of_numbers, _masked_struct])
def test_what_lies_under_a_null_does_not_count(make: Callable[[int], pa.Array]) -> None:
    assert make(7).equals(make(8))
    assert checksum(make(7)) == checksum(make(8))


def test_the_order_of_a_dictionary_does_not_count() -> None:
    one = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0], pa.int32()), pa.array(["a", "b"]))
    other = pa.DictionaryArray.from_arrays(pa.array([1, 0, 1], pa.int32()), pa.array(["b", "a"]))
    strange = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0], pa.int32()), pa.array(["x", "y"]))
    assert checksum(one) == checksum(other) != checksum(strange)


def test_the_same_rows_cut_elsewhere_are_another_stream() -> None:
    column = VALUES["int64"]
    whole = checksum(column.slice(2), checksum(column.slice(0, 2)))
    cut = checksum(column.slice(3), checksum(column.slice(0, 3)))
    assert whole != cut
    assert checksum(column.slice(0, 0), whole) != whole  # even by an empty batch


NO_NULLS = {kind: pa.array([1, 2, 3, 4, 5, 6], pa.int64()).cast(VALUES[kind].type) for kind in ("decimal", "timestamp")}


@pytest.mark.parametrize("column", [*VALUES.values(), *NO_NULLS.values()], ids=lambda column: str(column.type))
@pytest.mark.parametrize("start", [0, 1])
def test_of_batches_that_lie_one_behind_the_other_each_has_its_own(column: pa.Array, start: int) -> None:
    column = column.slice(start)
    batch = pa.RecordBatch.from_arrays([pa.array(range(len(column))), column], ["n", "c"])
    sizes = [2, 1, batch.num_rows - 3]
    expected, checksum, at = [], 7, 0
    for rows in sizes:
        checksum = extend(checksum, batch.slice(at, rows))
        expected.append(checksum)
        at += rows
    assert extend_each(7, batch, sizes) == expected
