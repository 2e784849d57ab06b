"""Rows to bytes and back: the parsers of Python, and our own, read the values that were written."""

from __future__ import annotations

import csv
import datetime
import decimal
import json
import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flux.connectors.kafka.formats import text_encode as values
from flux.connectors.kafka.formats.base import format_of
from flux.connectors.kafka.formats.text_encode import Columns, json_text, lines, objects
from flux.errors import SchemaError

NONE: frozenset[str] = frozenset()
TEXT = st.one_of(st.none(), st.text(st.characters(exclude_categories=["Cs"]), max_size=12))


def columns(format: str = "json", **given: Any) -> Columns:
    return Columns(format, given.get("key", ()), given.get("value"), given.get("headers"), given.get("timestamp"), NONE)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(TEXT, st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)), st.one_of(st.none(), st.floats())),
        max_size=20,
    )
)
def test_json_is_what_python_reads(rows: list[tuple[Any, Any, Any]]) -> None:
    arrays = [
        pa.array([row[i] for row in rows], kind) for i, kind in enumerate((pa.string(), pa.int64(), pa.float64()))
    ]
    written = objects(arrays, ["t", 'a "name"', "f"]).to_pylist()
    for row, text in zip(rows, written, strict=True):
        number = None if row[2] is None or not math.isfinite(row[2]) else row[2]
        assert json.loads(text) == {"t": row[0], 'a "name"': row[1], "f": number}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=20))
def test_csv_is_what_we_read(rows: list[tuple[Any, Any]]) -> None:
    arrays = [pa.array([row[i] for row in rows], pa.string()) for i in (0, 1)]
    written = lines(arrays, ["a", "b"])
    known = format_of("csv", "a STRING, b STRING")
    assert known is not None
    parsed = known.parse(written.cast(pa.binary()), find_all=False)
    assert not parsed.bad
    assert parsed.rows.to_pydict() == {"a": arrays[0].to_pylist(), "b": arrays[1].to_pylist()}
    first = ["" if value is None else value for value in rows[0]]
    assert next(csv.reader([written[0].as_py()])) == first or "\n" in str(rows[0]) or "\r" in str(rows[0])


NESTED = pa.array(
    [
        {"a": [1, None], "m": [("x", 1.5)], "s": {"t": 'quote " and \n'}},
        {"a": [], "m": None, "s": None},
        None,
        {"a": None, "m": [], "s": {"t": None}},
    ],
    pa.struct(
        [("a", pa.list_(pa.int32())), ("m", pa.map_(pa.string(), pa.float64())), ("s", pa.struct([("t", pa.string())]))]
    ),
)


@pytest.mark.parametrize("rows", [slice(0, 4), slice(1, 4), slice(2, 3)])
def test_nested_columns_are_nested_json(rows: slice) -> None:
    expected = [
        None if row is None else {**row, "m": None if row["m"] is None else dict(row["m"])}
        for row in NESTED.to_pylist()
    ]
    got = json_text(NESTED[rows])
    assert [None if text is None else json.loads(text) for text in got.to_pylist()] == expected[rows]


def test_times_numbers_and_bytes_have_the_text_that_the_reader_takes() -> None:
    stamp = datetime.datetime(2026, 5, 1, 12, 30, 0, 250_000, datetime.UTC)
    arrays = {
        "at": pa.array([stamp], pa.timestamp("us", "Europe/Berlin")),
        "local": pa.array([stamp.replace(tzinfo=None)], pa.timestamp("ms")),
        "day": pa.array([stamp.date()], pa.date32()),
        "price": pa.array([decimal.Decimal("1.50")], pa.decimal128(10, 2)),
        "on": pa.array([True]),
        "bytes": pa.array([b"\x00\xff"], pa.binary()),
    }
    written = objects(list(arrays.values()), list(arrays))
    assert json.loads(written[0].as_py()) == {
        "at": "2026-05-01T12:30:00.250000Z", "local": "2026-05-01T12:30:00.250", "day": "2026-05-01", "price": 1.5, "on": True,
        "bytes": "AP8=",
    }  # fmt: skip
    known = format_of("json", "at TIMESTAMP, day DATE, price DECIMAL(10,2), on BOOLEAN")
    assert known is not None
    row = known.parse(written.cast(pa.binary()), find_all=False).rows.to_pylist()[0]
    assert row == {"at": stamp, "day": stamp.date(), "price": decimal.Decimal("1.50"), "on": True}


def test_a_struct_column_alone_is_the_object_and_its_null_a_tombstone() -> None:
    batch = pa.record_batch({"v": pa.array([{"a": 1}, None], pa.struct([("a", pa.int64())])), "k": pa.array([7, None])})
    assert columns(value=("v",)).values(batch).to_pylist() == ['{"a":1}', None]
    assert columns(key=("k",)).keys(batch).to_pylist() == ["7", None]  # type: ignore[union-attr]
    assert columns(key=("k", "v")).keys(batch).to_pylist() == ['{"k":7,"v":{"a":1}}', '{"k":null,"v":null}']  # type: ignore[union-attr]


def test_maps_and_lists_become_headers() -> None:
    maps = pa.array([[("a", "x"), ("b", None)], None, []], pa.map_(pa.string(), pa.string()))
    batch = pa.record_batch({"h": maps, "value": pa.array([b"1", None, b"3"])})
    got = columns("raw", headers="h").header_entries(batch.slice(0, 3))
    assert got is not None
    assert got.to_pylist() == [[{"key": "a", "value": b"x"}, {"key": "b", "value": None}], None, []]
    sliced = columns("raw", headers="h").header_entries(batch.slice(1, 2))
    assert sliced is not None
    assert sliced.to_pylist() == [None, []]


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (columns("raw"), "no single column 'value'"),
        (columns("raw", value=("l",)), "value column 'l' has type list"),
        (columns("csv"), "csv' cannot write column 'l'"),
        (columns(headers="a"), "cast"),
        (columns(timestamp="l"), "timestamp column 'l'"),
        (columns(value=("nope",)), "no single column 'nope'"),
    ],
)
def test_columns_that_do_not_fit_are_named(made: Columns, why: str) -> None:
    with pytest.raises(SchemaError, match=why):
        made.check(pa.schema([("a", pa.string()), ("l", pa.list_(pa.int64()))]))


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["s", "ms", "us", "ns"]), st.sampled_from([None, "UTC", "Asia/Tokyo"]),
    st.lists(st.one_of(st.none(), st.datetimes()), max_size=10), st.booleans(),
)  # fmt: skip
def test_times_are_written_as_arrow_writes_them(
    unit: str, zone: str | None, times: list[datetime.datetime | None], close: bool
) -> None:
    """Times are of all years, and of a few days, for which there is a fast way."""
    if close or unit == "ns":
        times = [None if time is None else time.replace(year=2026, month=5) for time in times]
    stamps = pa.array(times, pa.timestamp("us")).cast(pa.timestamp(unit), safe=False)
    stamps = stamps.cast(pa.int64()).cast(pa.timestamp(unit, zone))
    plain = stamps.cast(pa.timestamp(unit, zone and "UTC")).cast(pa.string()).to_pylist()
    expected = [None if text is None else text.replace(" ", "T") for text in plain]
    assert lines([stamps, pa.nulls(len(stamps), pa.string())], ["t", "n"]).to_pylist() == [
        f"{text or ''}," for text in expected
    ]


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())], ids=str
)
def test_text_of_every_type_is_quoted_where_csv_needs_it(kind: pa.DataType) -> None:
    values = ["a,b", 'q"x', "", None, "plain"]
    text = pa.array(values, pa.string())
    column = text.dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else text.cast(kind)
    for at, expected in enumerate(['1,"a,b"', '1,"q""x"', '1,""', "1,", "1,plain"]):
        assert lines([pa.array([1]), column[at : at + 1]], ["i", "s"]).to_pylist() == [expected]
    assert lines([pa.array([1] * 5), column], ["i", "s"]).to_pylist() == [
        '1,"a,b"',
        '1,"q""x"',
        '1,""',
        "1,",
        "1,plain",
    ]


def test_nested_text_is_made_once_however_deep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Characters to escape at every level must not cause the levels below to be made again for each."""
    made: list[pa.DataType] = []
    monkeypatch.setattr(
        values, "json_text", lambda column, make=values.json_text: made.append(column.type) or make(column)
    )
    nested: dict[str, Any] = {"s": 'say "x"'}
    for _ in range(8):
        nested = {"s": 'say "x"', "c": nested}
    (text,) = objects([pa.array([nested])], ["top"]).to_pylist()
    assert json.loads(text) == {"top": nested}
    assert len(made) <= 2 * 9, "one for each text and struct"
