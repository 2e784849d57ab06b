"""Columns to values in Avro: fastavro reads the written values, and values that do not fit are named. Hardly a broker."""

from __future__ import annotations

import datetime
import io
import json
import threading
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import cloudpickle
import fastavro
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flux.connectors.kafka.errors import UnfitValue
from flux.connectors.kafka.formats.avro_encode import AvroValues
from flux.connectors.kafka.formats.base import format_of
from flux.errors import UsageError
from tests.kafka.broker import Broker
from tests.kafka.test_avro import CLICK, MOMENT, ROW, WIDE
from tests.kafka.topics import read_all, reader, received
from tests.kafka.written import ended, numbered, opened, operator_of, sink_of, values, write

UTC = datetime.UTC


def settled(schema: Any, columns: pa.Schema, schemas: Any = None) -> AvroValues:
    return AvroValues("clicks", schema, schemas).settled(columns, 1.0)


def written(batch: pa.RecordBatch, schema: Any = None, schemas: Any = None) -> list[bytes]:
    made = settled(schema, batch.schema, schemas).encode(batch.columns, batch.schema.names, batch.num_rows, None)
    made.validate(full=True)
    got: list[bytes] = made.to_pylist()
    return got


def by_library(values: list[bytes], schema: Any) -> list[Any]:
    parsed, got = fastavro.parse_schema(json.loads(json.dumps(schema))), []
    for value in values:
        stream = io.BytesIO(value)
        got.append(fastavro.schemaless_reader(stream, parsed))
        assert not stream.read(), "it is exactly one record"
    return got


def test_parts_of_large_lists_are_written_though_a_column_in_them_is_null_for_ever() -> None:
    """Before, such a column aborted the process."""
    entry = pa.struct([("a", pa.int32()), ("x", pa.null())])
    rows = [[{"a": 1, "x": None}] * 3, [{"a": 2, "x": None}], None, [{"a": 3, "x": None}]]
    batch = pa.record_batch({"c": pa.array(rows, pa.large_list(entry))[1:]})
    plain = pa.record_batch({"c": pa.array(rows[1:], pa.list_(entry))})
    assert written(batch) == written(plain)


# ---- every type, both ways

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SCALARS: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.bool_(), st.booleans()),
    (pa.int8(), st.integers(-128, 127)),
    (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    (pa.uint32(), st.integers(0, 2**32 - 1)),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.float32(), st.floats(width=32, allow_nan=False)),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.string(), TEXT),
    (pa.large_string(), TEXT),
    (pa.binary(), st.binary(max_size=8)),
    (pa.binary(3), st.binary(min_size=3, max_size=3)),
    (pa.date32(), st.dates()),
    (pa.timestamp("us", "UTC"), st.datetimes(datetime.datetime(1, 1, 2), timezones=st.just(UTC))),
    (pa.timestamp("us"), st.datetimes(datetime.datetime(1, 1, 2))),
    (pa.decimal128(38, 0), st.integers(-(10**38) + 1, 10**38 - 1).map(Decimal)),
    (pa.decimal128(9, 4), st.integers(-(10**9) + 1, 10**9 - 1).map(lambda number: Decimal(number) / 10000)),
]  # fmt: skip


def columns_of(depth: int) -> st.SearchStrategy[tuple[pa.DataType, st.SearchStrategy[Any]]]:
    """Draw a type and its values, nulls among them."""
    plain = st.sampled_from(SCALARS)
    if not depth:
        return plain.map(_with_nulls)
    inside = columns_of(depth - 1)
    listed = inside.map(lambda of: (pa.list_(of[0]), st.lists(of[1], max_size=3)))
    mapped = inside.map(
        lambda of: (
            pa.map_(pa.string(), of[0]),
            st.dictionaries(TEXT, of[1], max_size=3).map(lambda d: list(d.items())),
        )
    )
    struct = st.lists(inside, min_size=1, max_size=3).map(
        lambda parts: (
            pa.struct([(f"p{i}", part[0]) for i, part in enumerate(parts)]),
            st.fixed_dictionaries({f"p{i}": part[1] for i, part in enumerate(parts)}),
        )
    )
    return st.one_of(plain, listed, mapped, struct).map(_with_nulls)


def _with_nulls(of: tuple[pa.DataType, st.SearchStrategy[Any]]) -> tuple[pa.DataType, st.SearchStrategy[Any]]:
    return of[0], st.one_of(st.none(), of[1])


def as_read(value: Any, type_: pa.DataType) -> Any:
    """Convert a value to the form in which the library gives it."""
    if value is None:
        return None
    if pa.types.is_struct(type_):
        return {field.name: as_read(value[field.name], field.type) for field in type_}
    if pa.types.is_map(type_):
        return {key: as_read(item, type_.item_type) for key, item in value}
    if pa.types.is_list(type_):
        return [as_read(item, type_.value_type) for item in value]
    return value


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_the_library_and_our_reader_read_what_is_written(data: st.DataObject) -> None:
    types = data.draw(st.lists(columns_of(2), min_size=1, max_size=4))
    rows = data.draw(st.integers(0, 5))
    columns = [pa.array([data.draw(of) for _ in range(rows)], type_) for type_, of in types]
    whole = pa.record_batch(columns, names=[f"c{i}" for i in range(len(columns))])
    batch = whole.slice(data.draw(st.integers(0, rows)), data.draw(st.integers(0, rows)))
    made = settled(None, batch.schema)
    got = written(batch)
    expected = [as_read(row, pa.struct(list(batch.schema))) for row in batch.to_pylist()]
    assert by_library(got, json.loads(made.schema)) == expected
    known = format_of("avro", made.schema)
    assert known is not None
    parsed = known.parse(pa.array(got, pa.binary()), find_all=True)
    assert not parsed.bad
    assert [as_read(row, pa.struct(list(parsed.rows.schema))) for row in parsed.rows.to_pylist()] == expected


def test_every_type_of_avro_can_be_written_by_a_schema_that_is_given() -> None:
    """Values are those of the reader's own test; the columns have the types that reading gives."""
    row = {**ROW, "tags": [("a", 1), ("b", None)], "clock": 3_723_000}
    known = format_of("avro", WIDE)
    assert known is not None
    batch = pa.RecordBatch.from_pylist([row, row], schema=known.schema)
    got = by_library(written(batch, WIDE), WIDE)
    assert got == [{**ROW, "id": got[0]["id"]}] * 2
    assert str(got[0]["id"]) == ROW["id"]
    parsed = known.parse(pa.array(written(batch.slice(1), json.dumps(WIDE)), pa.binary()), find_all=True)
    assert parsed.rows.to_pylist() == [row]


def test_fixed_decimals_and_unions_in_any_order() -> None:
    schema = record(
        ("d", {"type": "fixed", "name": "d", "size": 20, "logicalType": "decimal", "precision": 38, "scale": 2}),
        ("e", ["null", {"type": "fixed", "name": "e", "size": 2, "logicalType": "decimal", "precision": 4, "scale": 0}]),
        ("i", ["long", "null", "int"]), ("f", ["float", "null", "double"]), ("t", ["string", "null"]),
    )  # fmt: skip
    batch = pa.record_batch(
        {
            "t": pa.array([None, "a"]),
            "i": pa.array([1 << 40, None]),
            "f": pa.array([0.1, None]),
            "e": pa.array([Decimal(-9999), None], pa.decimal128(9, 0)),
            "d": pa.array([Decimal("-1.5"), Decimal("9" * 35)], pa.decimal128(36, 1)),
        }
    )
    assert by_library(written(batch, schema), schema) == [
        {"t": None, "i": 1 << 40, "f": 0.1, "e": Decimal(-9999), "d": Decimal("-1.50")},
        {"t": "a", "i": None, "f": None, "e": None, "d": Decimal("9" * 35)},
    ]


def test_digits_of_times_that_the_schema_lacks_are_left_out() -> None:
    schema = record(("at", {"type": "long", "logicalType": "timestamp-millis"}))
    for unit, factor in (("us", 1), ("ns", 1000)):
        batch = pa.record_batch({"at": pa.array([-1 * factor, 1_999 * factor], pa.timestamp(unit, "UTC"))})
        plain = [round(row["at"].timestamp() * 1000) for row in by_library(written(batch, schema), schema)]
        assert plain == [-1, 1]


def test_columns_that_may_not_be_null_are_in_no_union() -> None:
    columns = pa.schema(
        [pa.field("a", pa.int64(), False), pa.field("b", pa.list_(pa.field("item", pa.int32(), False)))]
    )
    assert json.loads(settled(None, columns).schema)["fields"] == [
        {"name": "a", "type": "long"},
        {"name": "b", "type": ["null", {"type": "array", "items": "int"}], "default": None},
    ]


def test_a_field_without_a_column_is_null_where_that_is_its_default() -> None:
    schema = record(("a", "long"), ("b", ["null", "string"], None))
    inside = record(("s", {**record(("x", "int"), ("y", ["null", "int"], None)), "name": "s"}))
    assert by_library(written(pa.record_batch({"a": pa.array([1, 2])}), schema), schema) == [
        {"a": 1, "b": None},
        {"a": 2, "b": None},
    ]
    assert by_library(written(pa.record_batch({"s": pa.array([{"x": 1}])}), inside), inside) == [
        {"s": {"x": 1, "y": None}}
    ]


def test_the_id_of_the_schema_stands_in_front() -> None:
    asked = []

    def schemas(subject: str, schema: str) -> int:
        asked.append((subject, json.loads(schema)))
        return 0x01020304

    batch = pa.record_batch({"user": pa.array([1]), "page": pa.array(["a"])})
    assert written(batch, CLICK, schemas) == [b"\x00\x01\x02\x03\x04" + b"\x02\x02\x02a"]
    assert asked == [("clicks-value", CLICK)], "once, and as the user gave it"


def test_it_travels_to_workers_which_need_not_parse_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = pa.record_batch({"user": pa.array([1]), "page": pa.array(["a"])})
    made = cloudpickle.loads(cloudpickle.dumps(settled(CLICK, batch.schema, lambda subject, schema: 7)))
    monkeypatch.setattr("flux.connectors.kafka.formats.avro_encode.Avro", None)
    assert made.encode(batch.columns, ["user", "page"], 1, None).to_pylist() == [b"\x00\x00\x00\x00\x07\x02\x02\x02a"]


# ---- values that do not fit


def record(*fields: Any) -> dict[str, Any]:
    made = [{"name": name, "type": type_, **({"default": rest[0]} if rest else {})} for name, type_, *rest in fields]
    return {"type": "record", "name": "r", "fields": made}


MAP = pa.map_(pa.string(), pa.int32())
LISTS = {"type": "array", "items": "int"}
MICROS = {"type": "long", "logicalType": "timestamp-micros"}
HASH = {"type": "fixed", "name": "h", "size": 2}
MONEY = {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2}


@pytest.mark.parametrize(
    ("type_", "column", "row", "why"),
    [
        ("long", pa.array([1, 2, None]), 2, "column 'a' is null, and its type, long, is in no union with null"),
        ("string", pa.array([None, "x"]), 0, "column 'a' is null"),
        ("boolean", pa.array([True, None]), 1, "column 'a' is null"),
        ("int", pa.array([1, 1 << 31]), 1, "column 'a' is 2147483648, which int"),
        ("long", pa.array([1, 1 << 63], pa.uint64()), 1, "column 'a' is 9223372036854775808, which long"),
        (MONEY, pa.array([Decimal("1.5"), Decimal("100.00")], pa.decimal128(9, 2)), 1, r"'a' is Decimal\('100.00'\)"),
        (HASH, pa.array([b"ab", b"abc"]), 1, "column 'a' has 3 bytes, and its type takes 2"),
        ({"type": "enum", "name": "e", "symbols": ["x"]}, pa.array(["x", "y"]), 1, "'a' is 'y', which is no symbol"),
        (LISTS, pa.array([[1], None]), 1, "column 'a' is null, and its type, array"),
        (LISTS, pa.array([[1], [], [2, 3, None]]), 2, "column 'a.item' is null"),
        (["null", LISTS], pa.array([None, [1], [1 << 40]]), 2, "column 'a.item' is 1099511627776"),
        ({"type": "map", "values": "int"}, pa.array([[("k", 1)], [("l", None)]], MAP), 1, "'a.value' is"),
        (["null", record(("x", "int"))], pa.array([None, {"x": 1}, {"x": None}]), 2, "column 'a.x' is null"),
        ({"type": "array", "items": record(("x", "int"))}, pa.array([[{"x": 1}], [], [{"x": 1}, {"x": None}]]), 2, "a.item.x"),
        (MICROS, pa.array([0, 1 << 60], pa.timestamp("s", "UTC")), 1, "'a' is 11529"),
    ],
)  # fmt: skip
def test_a_value_that_does_not_fit_is_named_with_its_row(type_: Any, column: pa.Array, row: int, why: str) -> None:
    batch = pa.record_batch({"a": column})
    with pytest.raises(
        UnfitValue, match=rf"row {row} of {len(column)} of a batch.*{why}.*Nothing of the batch was written"
    ):
        written(batch, {**record(("a", type_)), "name": "top"})
    if row:
        assert len(written(batch.slice(0, row), {**record(("a", type_)), "name": "top"})) == row, "those before it fit"


@pytest.mark.parametrize(
    ("schema", "column", "why"),
    [
        (record(("a", "string")), pa.int64(), "column 'a' has type int64, and its field of the Avro schema is string"),
        (record(("a", "int")), pa.float64(), "column 'a' has type double.* is int"),
        (record(("a", "float")), pa.float64(), "column 'a' has type double.* is float"),
        (record(("a", "bytes")), pa.string(), "column 'a' has type string"),
        (record(("a", MONEY)), pa.decimal128(9, 3), r"column 'a' has type decimal128\(9, 3\)"),
        (
            record(("a", {"type": "long", "logicalType": "timestamp-micros"})),
            pa.timestamp("us"),
            "column 'a' has type timestamp",
        ),
        (
            record(("a", "string"), ("b", "string")),
            pa.string(),
            "field 'b' of the Avro schema has no column; there are a",
        ),
        (record(("b", ["null", "string"], None)), pa.string(), "no field for column 'a'; it has b"),
        (record(("a", LISTS)), pa.list_(pa.string()), "column 'a.item' has type string"),
        (record(("a", LISTS)), pa.int32(), "column 'a' has type int32.* is array"),
        (record(("a", "int")), pa.list_(pa.int32()), "column 'a' has type list"),
        (
            record(("a", {**record(("x", "int")), "name": "s"})),
            pa.struct([("x", pa.int32()), ("y", pa.int32())]),
            "column 'a.y'",
        ),
        (
            record(("a", {**HASH, "logicalType": "decimal", "precision": 38})),
            pa.decimal128(38),
            "|38 digits in 2 bytes",
        ),
        (None, pa.duration("us"), "no type for 'a', of type duration"),
        (None, pa.map_(pa.int32(), pa.int32()), "'a' is a map from int32"),
        (None, pa.struct([("größe", pa.int32())]), "'a.größe' is no name in Avro"),
    ],
)
def test_columns_that_can_never_fit_are_refused_before_the_query_starts(
    schema: Any, column: pa.DataType, why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        AvroValues("clicks", schema).check(pa.schema([("a", column)]))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"format": "json", "schema": CLICK}, "schema says how values in Avro are written"),
        ({"format": "raw", "register_schemas": True}, "register_schemas says"),
        ({"schemas": "http://registry", "format": "csv"}, "schemas says"),
        ({"register_schemas": True}, "needs the URL of a registry"),
        ({"register_schemas": "yes", "schemas": "http://registry"}, "must be True or False"),
        ({"schemas": "file:///etc/passwd"}, "must be the URL"),
        ({"schemas": "http://registry:port"}, "must be the URL"),
        ({"schemas": "http://u:secret@registry"}, "without a user"),
        ({"schemas": 7}, "function from subject and schema to an id"),
        ({"schema": "user BIGINT"}, "must be a schema in Avro's JSON"),
        ({"schema": {"type": "string"}}, "reads records"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why) as error:
        ended("clicks", "127.0.0.1:1", **{"format": "avro", **options})
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("number", [-1, 1 << 32, True, None, "7"])
def test_an_id_that_is_none_is_refused(number: Any) -> None:
    with pytest.raises(UsageError, match="for the id of a schema"):
        settled(CLICK, pa.schema([("user", pa.int64()), ("page", pa.string())]), lambda subject, schema: number)


# ---- a broker


def test_a_topic_in_avro_is_what_other_clients_read_and_we_read_again(
    broker: Broker, new_topic: Callable[..., str]
) -> None:
    topic = new_topic(1)
    known = {7: CLICK}
    flow = ended(
        topic,
        broker.address,
        format="avro",
        schema=CLICK,
        schemas=lambda subject, schema: 7,
        key="user",
        compression="zstd",
    )
    rows = pa.record_batch({"user": pa.array([1, 2], pa.int32()), "page": pa.array(["Zürich", None])})
    sent = numbered(flow, rows)
    flow.sink.check(sent.schema)
    write(opened(sink_of(flow)), sent)
    messages = received(broker.address, topic, 2)
    assert [message.key() for message in messages] == [b"1", b"2"]
    assert all(value[:5] == b"\x00\x00\x00\x00\x07" for value in values(messages))
    assert by_library([value[5:] for value in values(messages)], CLICK) == rows.to_pylist()
    read = reader(topic, broker.address, format="avro", schema=CLICK, schemas=known.__getitem__)
    assert read_all(read, 2).to_pylist() == rows.to_pylist()


def test_a_function_for_schemas_stays_where_the_query_starts(broker: Broker, topic: str) -> None:
    """Such a function may hold objects that cannot travel: a connection, a lock."""
    lock = threading.Lock()

    def schemas(subject: str, schema: str) -> int:
        with lock:
            return 7

    flow = ended(topic, broker.address, format="avro", schemas=schemas)
    sent = numbered(flow, pa.record_batch({"user": [1]}))
    flow.sink.check(sent.schema)
    assert cloudpickle.loads(cloudpickle.dumps(operator_of(flow).__dict__["_columns"])).key == ()
    write(opened(cloudpickle.loads(cloudpickle.dumps(sink_of(flow)))), sent)
    assert values(received(broker.address, topic, 1)) == [b"\x00\x00\x00\x00\x07\x02\x02"]


@pytest.mark.parametrize("guarantee", ["exactly_once", "transactional", "at_least_once"])
def test_nothing_of_a_batch_is_written_that_has_a_value_that_does_not_fit(
    broker: Broker, new_topic: Callable[..., str], guarantee: str
) -> None:
    topic = new_topic(1)
    schema = record(("value", "int"))
    flow = ended(topic, broker.address, format="avro", schema=schema, value="value", guarantee=guarantee)
    operator = operator_of(flow)
    batches = [
        numbered(flow, pa.record_batch({"value": pa.array(each)}), operator) for each in ([1, 2], [3, None], [5])
    ]
    flow.sink.check(batches[0].schema)
    sink = opened(sink_of(flow))
    write(sink, batches[0])
    with pytest.raises(UnfitValue, match=r"row 1 of 2 .* column 'value' is null"):
        write(sink, batches[1])
    sink.close()
    assert values(received(broker.address, topic, 2)) == [b"\x02", b"\x04"]


def test_a_struct_alone_is_the_record_and_its_null_a_tombstone(broker: Broker, new_topic: Callable[..., str]) -> None:
    topic = new_topic(1)
    flow = ended(topic, broker.address, format="avro", value="v", key="k", schema=CLICK)
    column = pa.array([{"user": 1, "page": None}, None], pa.struct([("user", pa.int64()), ("page", pa.string())]))
    sent = numbered(flow, pa.record_batch({"v": column, "k": pa.array(["a", "b"])}))
    flow.sink.check(sent.schema)
    write(opened(sink_of(flow)), sent)
    assert values(received(broker.address, topic, 2)) == [b"\x02\x00", None]


def test_the_moment_is_the_same_in_both_directions() -> None:
    batch = pa.record_batch({"at": pa.array([MOMENT], pa.timestamp("us", "Europe/Berlin"))})
    schema = settled(None, batch.schema).schema
    assert by_library(written(batch), json.loads(schema)) == [{"at": MOMENT}]
