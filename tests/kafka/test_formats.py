"""Values to columns, without a broker."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flux.connectors.kafka.formats.base import Format, format_of
from flux.errors import UsageError

SCHEMA = "a BIGINT, s STRING, d DATE"
GOOD = [b'{"a":1,"s":"x","d":"2024-02-03"}', None, b"", b" \n ", b'{\n"a":\n10}', b'{"s":"a{\\"}[", "more":[{}]}']
ROWS = [
    {"a": 1, "s": "x", "d": datetime.date(2024, 2, 3)},
    *[{"a": None, "s": None, "d": None}] * 3,
    {"a": 10, "s": None, "d": None},
    {"a": None, "s": 'a{"}[', "d": None},
]
BAD = {
    b'{"a":1': "one JSON object",
    b'}{"a":5}': "one JSON object",
    b'{"a":1}{"a":2}': "one JSON object",
    b"[1]": "one JSON object",
    b"7": "one JSON object",
    b"null": "one JSON object",
    b'"text"': "one JSON object",
    b'{"s":"a\nb"}': "one JSON object",
    b'{"z":' + b"[" * 300 + b"]" * 300 + b"}": "256 brackets",
    b'{"z":' + b"[" * 3_000_000: "one JSON object",
    b'{"a":"x"}': "from number to string",
    b'{"a":1.5}': "int64",
    b'{"a":99999999999999999999}': "int64",
    b'{"a":1,"a":2}': "twice",
    b'{"s":"\xff"}': "not UTF-8",
    b'{"d":"2024-99-01"}': "2024-99-01",
    b'{"a"}': "JSON parse error",
}


def of(name: str, schema: str) -> Format:
    made = format_of(name, schema)
    assert made is not None
    return made


def column(values: Any) -> pa.Array:
    return pa.array(values, pa.binary())


def test_json_is_read_as_it_is_written() -> None:
    parsed = of("json", SCHEMA).parse(column(GOOD), find_all=False)
    assert parsed.rows.to_pylist() == ROWS
    assert (parsed.kept, parsed.bad) == (None, [])


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_value_does_not_touch_those_around_it(bad: bytes) -> None:
    parsed = of("json", SCHEMA).parse(column([*GOOD, bad, *GOOD]), find_all=True)
    assert parsed.rows.to_pylist() == 2 * ROWS
    assert [each.row for each in parsed.bad] == [len(GOOD)]
    assert BAD[bad] in parsed.bad[0].why
    assert parsed.kept is not None
    assert parsed.kept.tolist() == [i for i in range(2 * len(GOOD) + 1) if i != len(GOOD)]


def test_all_bad_values_are_found_or_the_first() -> None:
    values = column([each for pair in zip(BAD, GOOD * 3, strict=False) for each in pair])
    parsed = of("json", SCHEMA).parse(values, find_all=True)
    assert [each.row for each in parsed.bad] == list(range(0, 2 * len(BAD), 2))
    assert len(parsed.rows) == len(BAD)
    assert [each.row for each in of("json", SCHEMA).parse(values[1:], find_all=False).bad] == [1]


def test_two_bad_values_make_no_good_row_together() -> None:
    """Read as lines, they would give one object, from the end of the first to the beginning of the second."""
    parsed = of("json", "a INT, b INT").parse(column([b'{"a":1,"b":', b'5} {"a":3}']), find_all=True)
    assert (len(parsed.rows), len(parsed.bad)) == (0, 2)
    parsed = of("csv", "a STRING, b STRING").parse(column([b'1,"x', b'y"', b"2,3\n4,5"]), find_all=True)
    assert (len(parsed.rows), len(parsed.bad)) == (0, 3)


def test_slices_are_read_as_they_look() -> None:
    values = column([b'{"a":%d}' % i for i in range(10)])[3:7]
    assert of("json", "a BIGINT").parse(values, find_all=False).rows.to_pydict() == {"a": [3, 4, 5, 6]}


def test_whole_numbers_of_json_are_digits_as_spark_wants_them() -> None:
    values = column(['{"a": 1}', '{"a": 1.0}', '{"a": 1e3}', '{"a": -0}', '{"a": 9223372036854775808}'])
    parsed = of("json", "a BIGINT").parse(values, find_all=True)
    assert parsed.rows.to_pydict() == {"a": [1, 0]}
    assert [bad.row for bad in parsed.bad] == [1, 2, 4]


def test_nested_columns_timestamps_and_decimals_are_read() -> None:
    schema = "s STRUCT<a: INT, b: ARRAY<STRING>>, t TIMESTAMP, n DECIMAL(5,2), b BOOLEAN"
    value = b'{"s":{"a":1,"b":["x"]},"t":"2024-01-01T02:00:00+02:00","n":"1.5","b":true}'
    assert of("json", schema).parse(column([value, b"{}"]), find_all=False).rows.to_pylist() == [
        {
            "s": {"a": 1, "b": ["x"]},
            "t": datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC),
            "n": Decimal("1.50"),
            "b": True,
        },
        {"s": None, "t": None, "n": None, "b": None},
    ]


def test_what_must_not_be_null_is_bad_if_it_is() -> None:
    parsed = of("json", "a INT NOT NULL").parse(column([b'{"a":1}', b"{}", None]), find_all=True)
    assert parsed.rows.to_pydict() == {"a": [1]}
    assert [(each.row, "NOT NULL" in each.why) for each in parsed.bad] == [(1, True), (2, True)]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 53), 1 << 53) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.lists(
        st.fixed_dictionaries({"n": st.integers(-(1 << 63), (1 << 63) - 1), "t": st.text(max_size=30), "x": JSON}),
        max_size=30,
    )
)
@settings(max_examples=150, deadline=None)
def test_objects_of_every_shape_are_read(rows: list[dict[str, Any]]) -> None:
    texts = [
        json.dumps(row, indent=2 * (i % 2) or None, ensure_ascii=bool(i % 3)).encode() for i, row in enumerate(rows)
    ]
    parsed = of("json", "n BIGINT, t STRING").parse(column(texts), find_all=False)
    assert parsed.bad == []
    assert parsed.rows.to_pylist() == [{"n": row["n"], "t": row["t"]} for row in rows]


@given(
    st.lists(
        st.binary(max_size=12) | st.sampled_from([b'{"a":1}', b"{", b"}", b'"', b"\\", b"1,x", b',"', b"\n"]),
        max_size=20,
    )
)
@settings(max_examples=300, deadline=None)
def test_each_value_is_read_as_if_it_were_alone(values: list[bytes]) -> None:
    for format_ in (of("json", "a BIGINT"), of("csv", "a STRING, b STRING")):
        together = format_.parse(column(values), find_all=True)
        together.rows.validate(full=True)
        alone = [format_.parse(column([value]), find_all=True) for value in values]
        assert [each.row for each in together.bad] == [i for i, each in enumerate(alone) if each.bad]
        assert together.rows.to_pylist() == [row for each in alone for row in each.rows.to_pylist()]


def test_csv_is_read_as_it_is_written() -> None:
    schema = "a BIGINT, s STRING, t TIMESTAMP, n DECIMAL(5,2)"
    good = [b"1,x,2024-01-01T00:00:00Z,1.5", None, b"", b'2,"a\n""b""",,', b'4,a"b,,', b',"",,']
    rows = of("csv", schema).parse(column(good), find_all=False).rows.to_pylist()
    assert [row["s"] for row in rows] == ["x", None, None, 'a\n"b"', 'a"b', ""]
    assert [row["a"] for row in rows] == [1, None, None, 2, 4, None]
    assert rows[0]["n"] == Decimal("1.50")
    bad = {
        b'3,"a': "quote",
        b"1,2": "Expected 4 columns",
        b"x,y,,": "int64",
        b"1,\xff,,": "UTF-8",
        b"1,x,,\n": "line break",
    }
    parsed = of("csv", schema).parse(column([*good, *bad]), find_all=True)
    assert len(parsed.rows) == len(good)
    assert all(why in each.why for why, each in zip(bad.values(), parsed.bad, strict=True))


def test_one_column_of_csv_can_be_empty() -> None:
    assert of("csv", "a INT").parse(column([b"1", b"", None, b"2"]), find_all=False).rows.to_pydict() == {
        "a": [1, None, None, 2]
    }


def test_formats_that_cannot_be_are_refused() -> None:
    for name, schema, why in (
        ("json", None, "needs a schema"),
        ("json", "s STRUCT<d: DATE>", "column 's': a date"),
        ("json", "s ARRAY<BINARY>", "column 's': JSON has no binary"),
        ("csv", "s STRUCT<a: INT>", "column 's'"),
        ("xml", "a INT", "raw, json, csv"),
    ):
        with pytest.raises(UsageError, match=why):
            format_of(name, schema)
    assert format_of(None, None) is format_of("raw", None) is None
