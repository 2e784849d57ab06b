"""Avro to columns: every type, writers' schemas that differ, and bytes that make no sense. No broker."""

from __future__ import annotations

import datetime
import io
import json
import random
import sys
from decimal import Decimal
from typing import Any

import cloudpickle
import fastavro
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flux
from flux.connectors.kafka.formats import avro_decode as avro
from flux.connectors.kafka.formats.avro_decode import program
from flux.connectors.kafka.formats.base import Format, format_of
from flux.errors import UsageError

UTC = datetime.UTC
CLICK = {
    "type": "record", "name": "Click", "namespace": "shop", "fields": [
        {"name": "user", "type": "long"},
        {"name": "page", "type": ["null", "string"], "default": None},
    ],
}  # fmt: skip
WIDE = {
    "type": "record", "name": "Wide", "fields": [
        {"name": "flag", "type": "boolean"}, {"name": "small", "type": "int"}, {"name": "half", "type": "float"},
        {"name": "whole", "type": "double"}, {"name": "raw", "type": "bytes"},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["new", "old"]}},
        {"name": "hash", "type": {"type": "fixed", "name": "Hash", "size": 4}},
        {"name": "again", "type": ["Kind", "null"]},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "times", "type": {"type": "array", "items": {"type": "long", "logicalType": "timestamp-micros"}}},
        {"name": "local", "type": ["null", {"type": "long", "logicalType": "local-timestamp-millis"}]},
        {"name": "money", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
        {"name": "tags", "type": {"type": "map", "values": ["null", "int"]}},
        {"name": "place", "type": ["null", {"type": "record", "name": "Place", "fields": [
            {"name": "city", "type": "string"}, {"name": "seen", "type": {"type": "array", "items": "Kind"}}]}]},
        {"name": "number", "type": ["int", "long", "null"]}, {"name": "nothing", "type": "null"},
        {"name": "id", "type": {"type": "string", "logicalType": "uuid"}},
        {"name": "clock", "type": {"type": "int", "logicalType": "time-millis"}},
    ],
}  # fmt: skip
MOMENT = datetime.datetime(2026, 5, 1, 12, 30, 15, 250_000, tzinfo=UTC)
ROW = {
    "flag": True, "small": -7, "half": 0.5, "whole": 2.25, "raw": b"\x00\xff", "kind": "old", "hash": b"abcd", "again": "new",
    "day": datetime.date(2026, 5, 1), "at": MOMENT, "times": [MOMENT, MOMENT], "local": MOMENT.replace(tzinfo=None),
    "money": Decimal("-12.30"), "tags": {"a": 1, "b": None}, "place": {"city": "Zürich", "seen": ["new", "old"]},
    "number": 1 << 40, "nothing": None, "id": "7f2c1f60-4f1c-4d3e-9d53-3f1f6c4c7c0e", "clock": datetime.time(1, 2, 3),
}  # fmt: skip


def written(schema: Any, *rows: Any) -> list[bytes]:
    parsed = fastavro.parse_schema(json.loads(json.dumps(schema)))
    made = []
    for row in rows:
        out = io.BytesIO()
        fastavro.schemaless_writer(out, parsed, row)
        made.append(out.getvalue())
    return made


def framed(number: int, values: list[bytes]) -> list[bytes]:
    return [b"\x00" + number.to_bytes(4, "big") + value for value in values]


def of(schema: Any, schemas: Any = None) -> Format:
    made = format_of("avro", schema, schemas)
    assert made is not None
    return made


def column(values: list[bytes | None]) -> pa.Array:
    return pa.array(values, pa.binary())


def test_every_type_becomes_a_column() -> None:
    parsed = of(json.dumps(WIDE)).parse(column(written(WIDE, ROW, ROW)), find_all=False)
    assert parsed.bad == []
    parsed.rows.validate(full=True)
    expected = {**ROW, "tags": [("a", 1), ("b", None)], "clock": 3_723_000}
    assert parsed.rows.to_pylist() == [expected, expected]
    types = {field.name: field.type for field in parsed.rows.schema}
    assert (types["at"], types["local"]) == (pa.timestamp("us", "UTC"), pa.timestamp("us"))
    assert (types["money"], types["number"], types["kind"]) == (pa.decimal128(9, 2), pa.int64(), pa.string())


def test_a_null_and_an_empty_value_are_rows_of_nulls() -> None:
    parsed = of(CLICK).parse(column([None, *written(CLICK, {"user": 1, "page": "a"}), b""]), find_all=False)
    assert parsed.rows.to_pydict() == {"user": [None, 1, None], "page": [None, "a", None]}


def test_values_are_read_by_their_writers_schema_and_resolved_to_ours() -> None:
    older = {"type": "record", "name": "Click", "namespace": "shop", "fields": [{"name": "user", "type": "int"}]}
    newer = {**CLICK, "fields": [{"name": "more", "type": "string"}, *CLICK["fields"]]}
    known = {7: json.dumps(older), 8: newer, 9: {"type": "record", "name": "Other", "fields": []}}
    asked = []

    def schemas(number: int) -> Any:
        asked.append(number)
        return known[number]

    values = [
        *framed(7, written(older, {"user": 1})), *framed(8, written(newer, {"more": "x", "user": 2, "page": "b"})),
        *framed(7, written(older, {"user": 3})), *framed(10, written(older, {"user": 4})), b"\x00\x00",
        b"\x01\x00\x00\x00\x07\x02", *framed(9, [b""]),
    ]  # fmt: skip
    parsed = of(CLICK, schemas).parse(column(values), find_all=True)
    assert parsed.rows.to_pydict() == {"user": [1, 2, 3], "page": [None, "b", None]}
    assert parsed.kept is not None
    assert parsed.kept.tolist() == [0, 1, 2]
    assert [each.row for each in parsed.bad] == [3, 4, 5, 6]
    reasons = ("knows no such schema", "does not begin with", "does not begin with", "cannot be read by its schema")
    assert all(reason in each.why for reason, each in zip(reasons, parsed.bad, strict=True))
    assert asked == [7, 8, 10, 9], "each once, also those that nobody knows"


def test_bad_values_are_told_apart_from_the_good_ones_around() -> None:
    good = written(CLICK, {"user": 1, "page": "a"}, {"user": 2, "page": None})
    values = [
        b"\xff",
        good[0],
        good[0] + b"\x00",
        b"\x02\x02\x04a",
        b"\x02\x02\x04\xff\xfe",
        good[1],
        b"\x02\x08",
        b"\x02",
    ]
    parsed = of(CLICK).parse(column(values), find_all=True)
    assert parsed.rows.to_pydict() == {"user": [1, 2], "page": ["a", None]}
    assert [each.row for each in parsed.bad] == [0, 2, 3, 4, 6, 7]
    assert "1 bytes are left" in parsed.bad[1].why
    assert parsed.bad[2].why == "it ends before its schema does"
    assert [each.row for each in of(CLICK).parse(column(values[1:]), find_all=False).bad] == [1]


def test_values_that_the_library_reads_and_no_column_holds_are_bad() -> None:
    """Such are an int of more than 32 bits, a decimal of more digits than it says, a time that Spark does not know."""
    schema = {
        "type": "record", "name": "r", "fields": [
            {"name": "i", "type": "int"},
            {"name": "d", "type": {"type": "bytes", "logicalType": "decimal", "precision": 2, "scale": 0}},
            {"name": "t", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        ],
    }  # fmt: skip
    as_written = {
        **schema,
        "fields": [
            {"name": "i", "type": "long"},
            {"name": "d", "type": "bytes"},
            {"name": "t", "type": "long"},
        ],
    }
    rows = [
        {"i": i, "d": d, "t": t}
        for i, d, t in ((1, b"\x05", 0), (1 << 40, b"\x05", 0), (1, b"\x7f", 0), (1, b"\x05", 10**18))
    ]
    parsed = of(schema).parse(column(written(as_written, *rows)), find_all=True)
    assert [each.row for each in parsed.bad] == [1, 2, 3]
    assert parsed.rows.to_pylist() == [{"i": 1, "d": Decimal(5), "t": datetime.datetime(1970, 1, 1, tzinfo=UTC)}]


TREE = {
    "type": "record", "name": "Tree", "fields": [
        {"name": "user", "type": "long"}, {"name": "child", "type": ["null", "Tree"], "default": None}
    ],
}  # fmt: skip
BACKWARDS = {
    "type": "record", "name": "Backwards", "fields": [
        {"name": "user", "type": "long"}, {"name": "f", "type": {"type": "fixed", "name": "f", "size": -(1 << 40)}},
        {"name": "more", "type": "long"},
    ],
}  # fmt: skip


def laughs(depth: int) -> Any:
    """Make a type in which each level has two of the level below."""
    if not depth:
        return {"type": "record", "name": "t0", "fields": [{"name": "a", "type": "null"}]}
    fields = [{"name": "a", "type": laughs(depth - 1)}, {"name": "b", "type": f"t{depth - 1}"}]
    return {"type": "record", "name": f"t{depth}", "fields": fields}


LAUGHS = laughs(24)
ENDLESS = {
    "type": "record", "name": "Endless", "fields": [
        {"name": "user", "type": "long"}, {"name": "many", "type": {"type": "array", "items": "null"}}
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (TREE, "contains itself"),
        (ENDLESS, "items take no bytes"),
        ({**ENDLESS, "fields": [{"name": "m", "type": {"type": "array", "items": {"type": "fixed", "name": "f", "size": 0}}}]},
         "items take no bytes"),
        (BACKWARDS, "fixed type of size -1099511627776, which must be 0 to 2,147,483,647"),
        ({**BACKWARDS, "fields": [{"name": "f", "type": {"type": "fixed", "name": "f", "size": 10**30}}]}, "fixed type of size"),
        (LAUGHS, "unfolds to"),
        ("{", "cannot be used"),
        ({"type": "nonsense"}, "cannot be used"),
        (5, "cannot be used"),
        ('"string"', "schema 3 is 'string', and no record"),
        ({"type": "int"}, "cannot be read by its schema: SchemaResolutionError"),
    ],
)  # fmt: skip
def test_a_writers_schema_that_is_dangerous_or_none_makes_a_bad_value(schema: Any, why: str) -> None:
    """Few bytes of such a value could be a tower of calls, or a list that does not end."""
    tower = b"\x02" + b"\x02\x02" * 200_000 + b"\x00"
    parsed = of(CLICK, {3: schema}.__getitem__).parse(column([b"\x00\x00\x00\x00\x03" + tower]), find_all=True)
    assert len(parsed.rows) == 0
    assert why in parsed.bad[0].why


@pytest.mark.parametrize(
    ("schema", "schemas", "why"),
    [
        (None, None, "needs a schema in Avro's JSON"),
        ("user BIGINT", None, "must be a schema in Avro's JSON, not 'user BIGINT'"),
        (pa.schema([("a", pa.int64())]), None, "as text or a dict; got Schema"),
        ('"string"', None, "as text or a dict; got|reads records"),
        ({"type": "string"}, None, "reads records"),
        ({"type": "record", "name": "r", "fields": []}, None, "names no column"),
        ({"type": "record", "name": "r", "fields": [{"name": "a", "type": "int"}] * 2}, None, "column 'a' twice"),
        (
            {"type": "record", "name": "r", "fields": [{"name": "a", "type": "number"}]},
            None,
            "no schema of Avro.*number",
        ),
        (
            {"type": "record", "name": "r", "fields": [{"name": "a", "type": ["int", "string"]}]},
            None,
            "'a' is a union of 2",
        ),
        (TREE, None, "'child' contains itself"),
        (ENDLESS, None, "items take no bytes"),
        (CLICK, 5, "schemas must be the URL"),
        (CLICK, "ftp://registry/", "must be the URL.*'registry'"),
        (CLICK, "file:///etc/passwd", "must be the URL"),
        (CLICK, "http://user:secret@registry", "without a user"),
    ],
)
def test_schemas_that_cannot_be_are_refused(schema: Any, schemas: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why) as error:
        format_of("avro", schema, schemas)
    assert "secret" not in str(error.value)


def test_schemas_of_another_format_are_refused() -> None:
    with pytest.raises(UsageError, match="needs format='avro'"):
        format_of("json", "a INT", "http://registry")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    avro.library.cache_clear()
    monkeypatch.setitem(sys.modules, "fastavro", None)
    try:
        with pytest.raises(UsageError, match=r"pip install 'flux-exchange\[avro\]'"):
            flux.kafka("clicks", "127.0.0.1:1", format="avro", schema=CLICK)
    finally:
        avro.library.cache_clear()


def test_it_travels_to_workers() -> None:
    made = cloudpickle.loads(cloudpickle.dumps(of(WIDE, {1: WIDE}.__getitem__)))
    assert len(made.parse(column(framed(1, written(WIDE, ROW))), find_all=False).rows) == 1


@given(
    st.lists(
        st.fixed_dictionaries(
            {"user": st.integers(-(1 << 63), (1 << 63) - 1), "page": st.none() | st.text(max_size=20)}
        ),
        max_size=20,
    )
)
@settings(max_examples=40, deadline=None)
def test_what_another_writer_has_written_is_read(rows: list[dict[str, Any]]) -> None:
    parsed = of(CLICK).parse(column(written(CLICK, *rows)), find_all=False)
    assert parsed.bad == []
    assert parsed.rows.to_pylist() == rows


FLAT = ["boolean", "int", "long", "float", "double", "bytes", "string", "null"]
NAMED = [
    {"type": "enum", "name": "Kind", "symbols": ["new", "old", "gone"]},
    {"type": "fixed", "name": "Hash", "size": 3},
    {"type": "long", "logicalType": "timestamp-millis"},
    {"type": "int", "logicalType": "date"},
]
_GIVEN = {
    "boolean": st.booleans(), "int": st.integers(-(1 << 31), (1 << 31) - 1), "long": st.integers(-(1 << 63), (1 << 63) - 1),
    "float": st.floats(width=32, allow_nan=False), "double": st.floats(allow_nan=False), "bytes": st.binary(max_size=9),
    "string": st.text(max_size=9), "null": st.none(), "enum": st.sampled_from(["new", "old", "gone"]),
    "fixed": st.binary(min_size=3, max_size=3),
}  # fmt: skip


@st.composite
def flat_values(draw: Any) -> tuple[Any, Any, list[bytes]]:
    """Draw schemas of a reader and a writer, whose fields differ in order, number and nulls; and values, some of them damaged."""
    kinds = [
        *draw(st.lists(st.sampled_from(FLAT), max_size=5)),
        *draw(st.lists(st.sampled_from(NAMED), unique_by=str, max_size=3)),
    ]
    fields = []
    for number, kind in enumerate(kinds or ["int"]):
        branches = draw(st.sampled_from([kind, [kind, "null"], ["null", kind]])) if kind != "null" else kind
        fields.append({"name": f"f{number}", "type": branches})
    extra = {"name": "extra", "type": ["null", "string"], "default": None}
    reader = {"type": "record", "name": "R", "fields": [*fields, *([extra] if draw(st.booleans()) else [])]}
    writer = {
        "type": "record",
        "name": "R",
        "fields": draw(st.permutations([*fields, {"name": "more", "type": "string"}])),
    }
    parsed, values = fastavro.parse_schema(json.loads(json.dumps(writer))), []
    for _ in range(draw(st.integers(0, 6))):
        row = {}
        for field in writer["fields"]:
            kind = field["type"]
            nullable = isinstance(kind, list)
            plain = next(each for each in kind if each != "null") if nullable else kind
            name = plain["type"] if isinstance(plain, dict) else plain
            given = draw(_GIVEN["int" if isinstance(plain, dict) and "logicalType" in plain else name])
            row[field["name"]] = None if nullable and draw(st.booleans()) else given
        out = io.BytesIO()
        fastavro.schemaless_writer(out, parsed, row)
        value = bytearray(out.getvalue())
        if value and draw(st.booleans()):
            value[draw(st.integers(0, len(value) - 1))] = draw(st.integers(0, 255))
        values.append(bytes(value))
    return reader, writer, values


@given(flat_values())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_is_read_without_objects_is_what_the_library_reads(made: Any) -> None:
    reader, writer, values = made
    format_ = of(reader, {1: writer}.__getitem__)
    assert isinstance(format_, avro.Avro)
    given = column([None, b"", b"\x00", *framed(1, values), *framed(2, values)])
    assert format_._flat is not None
    together, each = format_._parsed_flat(given, True, format_._flat), format_._parsed_each(given, True)
    if together is None:
        return  # text that is none, and times that Spark does not know
    together.rows.validate(full=True)
    bad, also_bad = ({one.row: one.why for one in parsed.bad} for parsed in (together, each))
    assert also_bad.keys() <= bad.keys()
    assert all("out of range" in bad[row] for row in bad.keys() - also_bad.keys()), "what the library does not mind"
    by_library = list(range(len(given)) if each.kept is None else each.kept)
    kept = range(len(given)) if together.kept is None else together.kept
    expected = each.rows.take(pa.array([by_library.index(row) for row in kept], pa.int64()))
    for one, other in zip(together.rows.columns, expected.columns, strict=True):
        if pa.types.is_floating(one.type):  # nan is nan here
            one, other = one.cast(pa.string()), other.cast(pa.string())
        assert one.equals(other)


def test_what_the_library_has_to_resolve_is_left_to_it() -> None:
    def flat(reader: Any, writer: Any) -> bool:
        return program(avro.parsed_schema(writer), avro.parsed_schema(reader)) is not None

    def record(*fields: Any, **more: Any) -> Any:
        return {"type": "record", "name": "r", "fields": list(fields), **more}

    whole, wide = {"name": "a", "type": "int"}, {"name": "a", "type": "long"}
    assert flat(record(whole), record({"name": "b", "type": "string"}, whole))
    assert not flat(record(wide), record(whole)), "a promotion"
    assert not flat(record(whole, {"name": "b", "type": "int", "default": 5}), record(whole)), "a default"
    assert not flat(record(whole), record({"name": "a", "type": ["null", "int"]})), "a null where none may be"
    assert not flat(record(whole), record(whole, name="s")), "another name"
    assert not flat(record({**whole, "aliases": ["b"]}), record({"name": "b", "type": "int"}))
    assert not flat(WIDE, WIDE)
    one, other = ({"type": "enum", "name": "e", "symbols": symbols} for symbols in (["a", "b"], ["b", "a"]))
    assert not flat(record({"name": "e", "type": one}), record({"name": "e", "type": other}))


def test_slices_are_read_as_they_look() -> None:
    values = written(CLICK, *({"user": i, "page": f"p{i}"} for i in range(10)))
    assert of(CLICK).parse(column(values)[3:6], find_all=False).rows.to_pydict() == {
        "user": [3, 4, 5],
        "page": ["p3", "p4", "p5"],
    }


@pytest.mark.parametrize("schema", [WIDE, CLICK])
def test_mutated_values_make_rows_or_are_told_apart(schema: Any) -> None:
    """Mutated bytes cause no crash and no endless loop, and each value is read as if it were alone."""
    chance = random.Random(15)
    format_ = of(schema)
    (good,) = written(schema, {**ROW, "user": 1 << 50, "page": "a page with a name"})
    mutated = []
    for _ in range(2000):
        data = bytearray(good)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(data))
            match chance.randrange(4):
                case 0:
                    data[at] = chance.randrange(256)
                case 1:
                    del data[at:]
                case 2:
                    data[at:at] = chance.randbytes(chance.randint(1, 9))
                case 3:
                    data[at : at + 10] = b"\xff" * 9 + b"\x01"
            data = data or bytearray(b"\x00")
        mutated.append(bytes(data))
    parsed = format_.parse(column(mutated), find_all=True)
    parsed.rows.validate(full=True)
    assert len(parsed.rows) + len(parsed.bad) == len(mutated)
    assert len(parsed.bad) > 500
    alone = [format_.parse(column([value]), find_all=True) for value in mutated[:200]]
    assert [i for i, each in enumerate(alone) if each.bad] == [each.row for each in parsed.bad if each.row < 200]
