"""Keys to slots and back."""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from partitioning import key_index, slot_tables
from partitioning.errors import KeyTypeError
from partitioning.key_index import KeyIndex

NAN = float("nan")
DAY = datetime.date(2013, 1, 1)
MOMENT = datetime.datetime(2013, 1, 1, 12, tzinfo=datetime.UTC)


def index_of(*columns: pa.Array) -> KeyIndex:
    return KeyIndex([pa.field(f"k{i}", column.type) for i, column in enumerate(columns)])


KEYS = [
    pa.array([True, None, False, True]),
    pa.array([-1, None, 127, -128], pa.int8()),
    pa.array([255, 0, None, 255], pa.uint8()),
    pa.array([-1, None, 7, -1], pa.int32()),
    pa.array([(1 << 64) - 1, None, 0, 5], pa.uint64()),
    pa.array([0, None, -1, 1 << 62]),
    pa.array([1.5, None, float("inf"), 1.5], pa.float32()),
    pa.array([1.5, None, -float("inf"), 1e300]),
    pa.array([DAY, None, DAY, DAY], pa.date32()),
    pa.array([DAY, None, DAY, DAY], pa.date64()),
    pa.array([MOMENT, None, MOMENT, MOMENT], pa.timestamp("us", "Europe/Berlin")),
    pa.array([MOMENT, None, MOMENT, MOMENT], pa.timestamp("s", "UTC")),
    pa.array(
        [decimal.Decimal("-1.50"), None, decimal.Decimal(10) ** 35, decimal.Decimal("0")],
        pa.decimal128(38, 2),
    ),
    pa.array(["", None, "a", "longer than eight bytes"]),
    pa.array(["", None, "a", ""], pa.large_string()),
    pa.array([b"", None, b"\0", b"\0\0"], pa.binary()),
    pa.array([b"", None, b"\0", b"\0\0"], pa.large_binary()),
]


@pytest.mark.parametrize("column", KEYS, ids=lambda column: str(column.type))
def test_keys_of_every_type_come_back_as_they_were(column: pa.Array) -> None:
    index = index_of(column)
    slots = index.slots([column])
    distinct = list(dict.fromkeys(column.to_pylist()))
    assert slots.dtype == np.int32
    assert slots.tolist() == [distinct.index(value) for value in column.to_pylist()]
    (keys,) = index.keys()
    keys.validate(full=True)
    assert keys.type == column.type
    assert keys.to_pylist() == distinct
    assert index.keys(slots)[0].equals(column)
    assert len(index) == len(distinct)


def test_keys_of_all_types_together_come_back_as_they_were() -> None:
    index = index_of(*KEYS)
    assert index.slots(KEYS).tolist() == [0, 1, 2, 3]
    assert index.slots([column.slice(2, 2) for column in KEYS]).tolist() == [2, 3]
    turned = index.keys(np.array([3, 0, 1]))
    for keys, column in zip(turned, KEYS, strict=True):
        keys.validate(full=True)
        assert keys.equals(column.take(pa.array([3, 0, 1])))


@pytest.mark.parametrize("columns", [*([column] for column in KEYS), KEYS], ids=lambda columns: str(len(columns)))
def test_keys_are_found_without_being_entered(columns: list[pa.Array]) -> None:
    index = index_of(*columns)
    asked = [column.take(pa.array([0, 2, 1, 3, 2])) for column in columns]
    assert index.find(asked).tolist() == [-1] * 5
    given = [column.slice(2) for column in columns]
    index.slots(given)
    before = index.to_arrow()
    keys = list(zip(*(column.to_pylist() for column in given), strict=True))
    slots = {key: list(dict.fromkeys(keys)).index(key) for key in keys}
    wanted = [slots.get(key, -1) for key in zip(*(column.to_pylist() for column in asked), strict=True)]
    assert index.find(asked).tolist() == wanted
    assert index.to_arrow() == before
    index.slots([column.slice(0, 2) for column in columns])
    assert index.find(asked).tolist() == index.slots(asked).tolist()


@pytest.mark.parametrize("make", [str, int, lambda n: f"{n:070000}"], ids=["text", "numbers", "long text"])
def test_many_keys_are_found_without_being_entered(make: Any) -> None:
    known, other = ([make(n) for n in range(first, 600, 3)] for first in (0, 1))
    index = index_of(pa.array(known))
    index.slots([pa.array(known)])
    asked = pa.array([key for pair in zip(known, other, strict=True) for key in pair])
    assert index.find([asked]).tolist() == [slot for at in range(200) for slot in (at, -1)]
    assert len(index) == 200


def test_more_than_64_key_columns_still_tell_their_nulls_apart() -> None:
    columns = [pa.array([0, None] if i in (0, 69) else [0, 0]) for i in range(70)]
    other = [pa.array([0, None] if i == 5 else [0, 0]) for i in range(70)]
    index = index_of(*columns)
    assert index.slots(columns).tolist() == [0, 1]
    assert index.slots(other).tolist() == [0, 2]
    assert index.keys()[69].to_pylist() == [0, None, 0]


def test_floats_are_equal_as_in_spark() -> None:
    for type_ in (pa.float32(), pa.float64()):
        column = pa.array([NAN, 0.0, -0.0, NAN, 1.0, None], type_)
        assert index_of(column).slots([column]).tolist() == [0, 1, 1, 0, 2, 3]


def test_null_empty_and_zero_bytes_are_different_strings() -> None:
    column = pa.array(["", None, "\0", "\0\0", "\0" * 8, "\0" * 9, "", None])
    assert index_of(column).slots([column]).tolist() == [0, 1, 2, 3, 4, 5, 0, 1]


def test_null_is_no_zero_and_takes_its_place_in_the_order() -> None:
    index = index_of(pa.array([1]))
    assert index.slots([pa.array([5, None, 0])]).tolist() == [0, 1, 2]
    assert index.slots([pa.array([0, None, 6])]).tolist() == [2, 1, 3]
    assert index.keys()[0].to_pylist() == [5, None, 0, 6]


def test_words_that_could_be_mistaken_for_each_other_across_columns_are_not() -> None:
    a, b = pa.array([1, 2, None, 0, None]), pa.array([2, 1, 0, None, None])
    assert index_of(a, b).slots([a, b]).tolist() == [0, 1, 2, 3, 4]


def test_strings_split_differently_over_two_columns_are_different_keys() -> None:
    a, b = pa.array(["ab", "a", "", None]), pa.array(["c", "bc", "abc", "abc"])
    assert index_of(a, b).slots([a, b]).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("make", [str, lambda i: i, lambda i: decimal.Decimal(i)], ids=["text", "int", "decimal"])
def test_the_index_grows_with_its_keys(make: object) -> None:
    keys = 10 * slot_tables.KEYS_MIN + 3
    column = pa.array([make(i) for i in range(keys)])  # type: ignore[operator]
    index = index_of(column)
    before = index.nbytes
    assert index.slots([column]).tolist() == list(range(keys))
    assert index.slots([column.take(pa.array(range(keys - 1, -1, -1)))]).tolist() == list(range(keys - 1, -1, -1))
    assert index.nbytes > before


def test_one_string_may_be_larger_than_all_memory_held_so_far() -> None:
    column = pa.array(["x" * (20 * slot_tables.ARENA_BYTES_MIN), "y", "x" * 5])
    index = index_of(column)
    assert index.slots([column]).tolist() == [0, 1, 2]
    assert index.keys()[0].equals(column)


@pytest.mark.parametrize("type_", [pa.string(), pa.large_string()])
def test_strings_too_long_for_their_place_in_the_table_are_told_apart(type_: pa.DataType) -> None:
    """Look strings up around 65,534 bytes: up to this, a place holds the number of bytes of its string."""
    sizes = [65_533, 65_534, 65_535, 65_536, 65_537, 131_071, 131_072]
    strings = ["a" * size for size in sizes] + ["a" * (size - 1) + "b" for size in sizes] + ["", "a"]
    index = KeyIndex([pa.field("key", type_)])
    assert index.slots([pa.array(strings, type_)]).tolist() == list(range(len(strings)))
    again = [(7 * place) % len(strings) for place in range(50)]
    assert index.slots([pa.array([strings[place] for place in again], type_)]).tolist() == again
    assert index.keys()[0].to_pylist() == strings


def test_many_strings_are_looked_up_as_a_dictionary_does() -> None:
    """Look up known and new strings, nulls and slices, while the table and its kept bytes grow."""
    random, index, expected = np.random.default_rng(5), KeyIndex([pa.field("key", pa.string())]), {}
    for rows in (1, 31, 32, 33, 64, 1000, 5000, 20_000):
        numbers = random.integers(0, 4 * rows, rows + 3)
        column = pa.array([None if number % 13 == 0 else f"key {number}" * (number % 5) for number in numbers])[3:]
        places = [expected.setdefault(key, len(expected)) for key in column.to_pylist()]
        assert index.slots([column]).tolist() == places
    assert index.keys()[0].to_pylist() == list(expected)


def test_no_rows_give_no_slots() -> None:
    index = index_of(pa.array(["a"]))
    assert index.slots([pa.array([], pa.string())]).tolist() == []
    assert index.keys()[0].to_pylist() == []
    assert KeyIndex.from_arrow(index.to_arrow()).to_arrow().num_rows == 0


def test_a_snapshot_gives_every_key_its_old_slot() -> None:
    columns = [pa.array([i % 700 for i in range(5000)]), pa.array([None, "a", "b", "", "c"] * 1000)]
    index = index_of(*columns)
    slots = index.slots(columns)
    copy = KeyIndex.from_arrow(index.to_arrow())
    assert copy.slots(columns).tolist() == slots.tolist()
    assert len(copy) == len(index)
    assert copy.slots([pa.array([-1]), pa.array(["new"])]).tolist() == [len(index)]


def test_keys_that_stay_are_copied_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy keys in chunks, because all keys of a partition may have more text than a column can hold."""
    monkeypatch.setattr(key_index, "CHUNK_ROWS", 3)
    words, numbers = pa.array([None, *map(str, range(9))]), pa.array(range(10))
    for columns in ([words], [numbers], [numbers, words]):
        index = KeyIndex([pa.field(f"c{at}", column.type) for at, column in enumerate(columns)])
        index.slots(columns)
        stay = np.array([0, 9, 4, 2, 5, 7, 8], np.int32)
        table, made = index.table(stay), index.only(stay)
        assert [batch.num_rows for batch in table.to_batches()] == [3, 3, 1]
        expected = [column.take(pa.array(stay)) for column in columns]
        assert [column.combine_chunks() for column in table.columns] == made.keys() == expected
        assert made.slots(columns).tolist()[:3] == [0, 7, 3]
        assert len(index.only(stay[:0])) == index.table(stay[:0]).num_rows == 0


def test_a_snapshot_with_a_key_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="3 keys were given, of which only 2"):
        KeyIndex.from_arrow(pa.table({"k": [1, 2, 1]}))


def test_columns_of_another_type_or_length_are_refused() -> None:
    index = index_of(pa.array([1]), pa.array([1]))
    with pytest.raises(TypeError, match="expected 1 rows of int64, not 1 rows of int32"):
        index.slots([pa.array([1]), pa.array([1], pa.int32())])
    with pytest.raises(TypeError, match="not 2 rows"):
        index.slots([pa.array([1]), pa.array([1, 2])])


def test_slots_that_were_never_given_have_no_key() -> None:
    index = index_of(pa.array([1]))
    index.slots([pa.array([1])])
    for slot in (-1, 1):
        with pytest.raises(IndexError):
            index.keys(np.array([slot], np.int32))


def test_a_key_column_of_another_type_is_refused() -> None:
    with pytest.raises(KeyTypeError, match="'tags'"):
        KeyIndex([pa.field("tags", pa.list_(pa.int64()))])
