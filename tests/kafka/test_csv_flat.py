"""Rows of CSV that are read without pyarrow's reader, and that reader: the same columns, or it is left to that reader."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flux.connectors.kafka.formats.base import Csv, Fields, format_of

TYPES = [
    pa.int64(), pa.int32(), pa.int8(), pa.uint64(), pa.uint16(), pa.float64(), pa.float32(), pa.string(), pa.binary(), pa.bool_(),
]  # fmt: skip
FIELDS = st.one_of(
    st.sampled_from(["", "1", "-1", "007", "-0", "+5", "0x1F", "1.5", "nan", "NaN", "-inf", "true", "TRUE", "tRUE", "False"]),
    st.sampled_from(['""', '"1"', '"a,b"', '"a""b"', '"a\nb"', 'a"b', '"x"y', '""""', " 1", "1 ", "é", "\ufeff", "\0", "-"]),
    st.sampled_from(["2147483648", "-2147483648", "9223372036854775808", "1" * 18, "1" * 19, "0" * 25 + "7"]),
    st.text('019-+.eE",x \t', max_size=6),
    st.integers(-(1 << 65), 1 << 65).map(str),
    st.floats().map(repr),
)  # fmt: skip


def row_of(types: list[pa.DataType]) -> st.SearchStrategy[list[str]]:
    return st.lists(FIELDS, min_size=len(types), max_size=len(types))


def text_of(rows: list[list[str]]) -> pa.Buffer:
    return pa.py_buffer("".join(",".join(row) + "\n" for row in rows).encode())


@given(
    st.lists(st.sampled_from(TYPES), min_size=1, max_size=4).flatmap(
        lambda types: st.tuples(st.just(types), st.lists(row_of(types), min_size=1, max_size=3))
    )
)
@example(([pa.string()], [["\ufeff"], ["\ufeffa"]]))
@settings(max_examples=400, deadline=None)
def test_what_is_read_is_what_the_reader_of_pyarrow_reads(given: tuple[list[pa.DataType], list[list[str]]]) -> None:
    types, rows = given
    schema = pa.schema([(f"column {i}", type_) for i, type_ in enumerate(types)])
    text = text_of(rows)
    flat = Fields(schema, ",").read(text, len(rows))
    if flat is None:
        return
    flat.validate(full=True)
    whole = Csv(schema)._read(text)
    assert flat.schema == whole.schema
    assert [repr(column.to_pylist()) for column in flat.columns] == [
        repr(column.to_pylist()) for column in whole.columns
    ]


@pytest.mark.parametrize(
    ("type_", "fields"),
    [
        (pa.int64(), ["1", "-20", "", "0", "9223372036854775807"]),
        (pa.int32(), ["1", "-2147483648"]),
        (pa.float64(), ["1.5", "", "1e300"]),
        (pa.string(), ['"a""b"', "", '""', 'a"b', '"a,\nb"', "é"]),
        (pa.binary(), ["x", ""]),
        (pa.bool_(), ["true", "0", "", "FALSE"]),
    ],
)
def test_common_fields_do_not_need_the_reader_of_pyarrow(type_: pa.DataType, fields: list[str]) -> None:
    schema = pa.schema([("a", type_), ("b", type_)])
    flat = Fields(schema, ",").read(text_of([[each, each] for each in fields]), len(fields))
    assert flat is not None
    assert flat.column("a").equals(flat.column("b"))
    assert flat.column("a").null_count == fields.count("")


@pytest.mark.parametrize(
    "text", [b"1,2,3\n", b"1\n", b"1,2", b'1,"2', b'1,"2"x\n', b"1,2\n3,4\n", b"", b"1,\r2\n", b'"', b'1,"2"']
)
def test_what_is_not_one_row_is_left_to_the_reader(text: bytes) -> None:
    assert Fields(pa.schema([("a", pa.string()), ("b", pa.string())]), ",").read(pa.py_buffer(text), 1) is None


def test_a_mark_of_byte_order_belongs_to_its_value() -> None:
    """pyarrow's reader drops it, and only from the first of many."""
    values = pa.array(["\ufeffx".encode(), b"y", "\ufeffx".encode()], pa.binary())
    for schema in ("a STRING", "a STRING, t TIMESTAMP"):
        made = format_of("csv", schema)
        assert made is not None
        given = values if "," not in schema else pa.array([each + b"," for each in values.to_pylist()], pa.binary())
        assert made.parse(given, find_all=False).rows.column("a").to_pylist() == ["\ufeffx", "y", "\ufeffx"]


def test_columns_that_are_not_null_keep_saying_so() -> None:
    made = format_of("csv", "a INT NOT NULL, b STRING")
    assert made is not None
    parsed = made.parse(pa.array([b"1,x", b",y", b"2,"], pa.binary()), find_all=True)
    assert parsed.rows.schema == made.schema
    assert (parsed.rows.to_pydict(), [each.row for each in parsed.bad]) == ({"a": [1, 2], "b": ["x", None]}, [1])
