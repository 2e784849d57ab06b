"""The hash decides on the partition of a key for as long as a query runs, so it must never change."""

from __future__ import annotations

import datetime
import decimal
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from partitioning.clustering import PARTITIONS_MAX, check_key_type, hash_columns, partition_ids
from partitioning.errors import KeyTypeError

MOMENT = datetime.datetime(2013, 6, 30, 23, 59, 58, 999_999, datetime.UTC)

GOLDEN = [
    (pa.bool_(), True, 0x25B775FAECA8F520),
    (pa.int8(), -1, 0x3CD617BBBCC39640),
    (pa.int16(), -1, 0x3CD617BBBCC39640),
    (pa.int32(), 7, 0x2D540BE834875D2F),
    (pa.int64(), 7, 0x2D540BE834875D2F),
    (pa.int64(), -(1 << 63), 0x11C0B7745EB88D61),
    (pa.uint8(), 255, 0x88C5053D648DB280),
    (pa.uint16(), 65535, 0x582E1A7F82BC9E7D),
    (pa.uint32(), 4294967295, 0xE76FE70ACF549A33),
    (pa.uint64(), (1 << 64) - 1, 0x3CD617BBBCC39640),
    (pa.float32(), 1.5, 0x8CDC4B6B30390A39),
    (pa.float64(), 1.5, 0x35AFCF05F2013659),
    (pa.float64(), float("nan"), 0x7F9A866907B600AA),
    (pa.float64(), 0.0, 0x9CA066F1A4AB2EEA),
    (pa.decimal128(38, 2), decimal.Decimal("-12345678901234567890.12"), 0xB2BFFE77B75FF9B8),
    (pa.date32(), MOMENT.date(), 0x539D8CEEEC3F37AE),
    (pa.date64(), MOMENT.date(), 0xE4DACAF4BB0EFAAD),
    (pa.timestamp("us", "UTC"), MOMENT, 0x86DD6262F732873B),
    (pa.string(), "", 0x9CA066F1A4AB2EEA),
    (pa.string(), "a", 0xEA9A1E7AE8999175),
    (pa.string(), "abc", 0x4A5DDE5E7DAF1268),
    (pa.string(), "abcdefg", 0x6ECE5ED6321A0C1D),
    (pa.string(), "abcdefgh", 0x10657007BF5C1B4F),
    (pa.large_string(), "the quick brown fox", 0xB32311533ED96BD2),
    (pa.binary(), b"\x00\x00", 0xAC19FDF60B5768E7),
    (pa.large_binary(), b"\x00\x00\x00", 0x81E38BE15DCF5374),
    (pa.int64(), None, 0x2225BE8A98C8ED3B),
    (pa.string(), None, 0x2225BE8A98C8ED3B),
]


def hashes(*columns: pa.Array) -> list[int]:
    return hash_columns(columns).tolist()


@pytest.mark.parametrize(("type_", "value", "expected"), GOLDEN, ids=lambda x: str(x)[:24])
def test_the_hash_of_a_value_never_changes(type_: pa.DataType, value: object, expected: int) -> None:
    assert hashes(pa.array([value], type_)) == [expected]


def test_the_hash_of_several_columns_never_changes_and_depends_on_their_order() -> None:
    number, text = pa.array([1]), pa.array(["one"])
    assert hashes(number, text) == [0xE4D5C1F2B10E76ED]
    assert hashes(text, number) != hashes(number, text)


def test_another_process_computes_the_same_hash() -> None:
    code = (
        "import pyarrow as pa; from partitioning.clustering import hash_columns;"
        "print(hash_columns([pa.array([1, None, 3]), pa.array(['x', 'y', None])]).tolist())"
    )
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert there.stdout.strip() == str(hashes(pa.array([1, None, 3]), pa.array(["x", "y", None])))


def test_floats_that_spark_groups_together_hash_alike() -> None:
    for type_, bits in ((pa.float64(), np.uint64), (pa.float32(), np.uint32)):
        width = 8 * np.dtype(bits).itemsize
        quiet = np.array([-1, (1 << (width - 1)) - 1], np.int64).astype(bits)  # NaNs of either sign
        odd = pa.Array.from_buffers(type_, 2, [None, pa.py_buffer(quiet)])
        assert all(value != value for value in odd.to_pylist())
        usual = hashes(pa.array([float("nan"), 0.0, -0.0, 1.0], type_))
        assert set(hashes(odd)) == {usual[0]}
        assert usual[1] == usual[2]
        assert len(set(usual)) == 3


def test_nulls_form_one_group_whatever_lies_below_them() -> None:
    below = pa.py_buffer(np.array([1, 2, 3, 4], np.int64))
    column = pa.Array.from_buffers(pa.int64(), 4, [pa.py_buffer(bytes([0b0010])), below])
    got = hashes(column)
    assert got[0] == got[2] == got[3] != got[1]
    assert got[1] == hashes(pa.array([2]))[0]


def test_an_empty_string_is_no_null() -> None:
    assert len(set(hashes(pa.array(["", None, "\0", "\0\0"])))) == 4


@pytest.mark.parametrize(
    "column",
    [
        pa.array([None if i % 3 == 0 else i for i in range(100)]),
        pa.array([None if i % 7 == 0 else i % 2 == 0 for i in range(100)]),
        pa.array([None if i % 5 == 0 else "x" * (i % 20) for i in range(100)]),
        pa.array([None if i % 5 == 0 else "x" * (i % 20) for i in range(100)], pa.large_string()),
        pa.array([None if i % 3 == 0 else decimal.Decimal(i) for i in range(100)], pa.decimal128(20, 2)),
        pa.array(range(100), pa.int16()),
    ],
    ids=lambda column: str(column.type),
)
def test_a_slice_hashes_like_the_rows_that_it_shows(column: pa.Array) -> None:
    everything = hashes(column)
    for start, length in ((0, 100), (1, 50), (13, 8), (99, 1), (50, 0)):
        assert hashes(column.slice(start, length)) == everything[start : start + length]


def test_buffers_may_start_at_any_address() -> None:
    wire = b"\x00" + np.arange(9, dtype=np.int64).tobytes()
    column = pa.Array.from_buffers(pa.int64(), 9, [None, pa.py_buffer(wire).slice(1)])
    assert hashes(column) == hashes(pa.array(range(9)))


def test_no_rows_and_arrays_without_buffers_are_fine() -> None:
    for type_ in (pa.int64(), pa.string(), pa.bool_()):
        assert hashes(pa.array([], type_)) == []
    assert hash_columns([pa.array([], pa.int64())]).dtype == np.uint64


def test_keys_spread_evenly_over_partitions_also_when_they_are_consecutive() -> None:
    for column in (pa.array(range(100_000)), pa.array([f"user-{i}" for i in range(100_000)])):
        ids = partition_ids(hash_columns([column]), 64)
        assert ids.dtype == np.uint16
        sizes = np.bincount(ids, minlength=64)
        assert sizes.min() > 0.85 * 100_000 / 64
        assert sizes.max() < 1.15 * 100_000 / 64


def test_low_bits_of_the_hash_stay_even_within_one_partition() -> None:
    all_hashes = hash_columns([pa.array(range(200_000))])
    within = all_hashes[partition_ids(all_hashes, 64) == 5]
    sizes = np.bincount((within & np.uint64(15)).astype(np.int64), minlength=16)
    assert sizes.min() > 0.7 * len(within) / 16


@pytest.mark.parametrize("partitions", [0, -1, PARTITIONS_MAX + 1])
def test_the_number_of_partitions_has_limits(partitions: int) -> None:
    with pytest.raises(ValueError, match=f"from 1 to {PARTITIONS_MAX}, not {partitions}"):
        partition_ids(np.zeros(1, np.uint64), partitions)


def test_the_greatest_hash_belongs_to_the_last_partition() -> None:
    extremes = np.array([0, (1 << 64) - 1], np.uint64)
    assert partition_ids(extremes, PARTITIONS_MAX).tolist() == [0, PARTITIONS_MAX - 1]


UNFIT = [
    pa.list_(pa.int64()),
    pa.struct([("a", pa.int64())]),
    pa.null(),
    pa.dictionary(pa.int8(), pa.string()),
]


@pytest.mark.parametrize("type_", UNFIT, ids=str)
def test_a_key_of_another_type_is_refused_by_name(type_: pa.DataType) -> None:
    with pytest.raises(KeyTypeError, match=r"column 'tags' of type .* supported are boolean, integers") as caught:
        check_key_type("tags", type_)
    assert caught.value.column == "tags"
    assert caught.value.type == type_


def test_errors_survive_the_way_to_another_process() -> None:
    import pickle

    from partitioning.errors import ColumnTypeError, SumOverflowError

    for error in (
        KeyTypeError("tags", pa.null(), ["x"]),
        ColumnTypeError("sum", "name", pa.string(), ["x"]),
        SumOverflowError("price", pa.int64()),
    ):
        copy = pickle.loads(pickle.dumps(error))
        assert str(copy) == str(error)
        assert copy.column == error.column


def test_key_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        hash_columns([pa.array([1, 2]), pa.array([1])])
