"""Columns of every Arrow type as values: through the test kit, and through a query with real messages. Each comes out as
it went in, in the plain type of the column, or is refused by name before anything runs; none waits for ever."""

from __future__ import annotations

import decimal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from harness import Rows, ThreadQuery, dataframe

import flux
from flux.operators.plain_columns import plain_type

WORDS = pa.dictionary(pa.int8(), pa.string())
D = decimal.Decimal


def union(sparse: bool) -> pa.Array:
    kinds = pa.array([0, 1, 0, 1], pa.int8())
    if sparse:
        return pa.UnionArray.from_sparse(kinds, [pa.array([1, 2, 3, 4]), pa.array(["a", "b", "c", "d"])])
    return pa.UnionArray.from_dense(kinds, pa.array([0, 0, 1, 1], pa.int32()), [pa.array([1, 2]), pa.array(["a", "b"])])


def of(type_: pa.DataType, *values: Any) -> pa.Array:
    storage = type_.storage_type if isinstance(type_, pa.BaseExtensionType) else type_
    array = pa.array(values, storage)
    return array if storage == type_ else pa.ExtensionArray.from_storage(type_, array)


WORD_LISTS = pa.ListArray.from_arrays(
    pa.array([0, 1, None, 2, 4], pa.int32()), pa.array(["a", "b", None, "a"]).dictionary_encode()
)
COLUMNS = {
    "null": pa.nulls(4),
    "float16": of(pa.float16(), np.float16(1.5), None, np.float16(2), np.float16(3)),
    "decimal32": of(pa.decimal32(5, 2), D("1.25"), None, D(3), D(4)),
    "decimal64": of(pa.decimal64(15, 2), D("1.25"), None, D(3), D(4)),
    "decimal256": of(pa.decimal256(50, 2), D("1.25"), None, D(3), D(4)),
    "date64": of(pa.date64(), 0, None, 86_400_000, 0),
    "time32": of(pa.time32("ms"), 1, None, 2, 3),
    "time64": of(pa.time64("ns"), 1, None, 2, 3),
    "duration": of(pa.duration("us"), 1, None, 2, 3),
    "interval": of(pa.month_day_nano_interval(), (1, 2, 3), None, (3, 4, 5), (0, 0, 0)),
    "large_string": of(pa.large_string(), "a", None, "", "c"),
    "string_view": of(pa.string_view(), "a", None, "b" * 20, ""),
    "binary_view": of(pa.binary_view(), b"a", None, b"b" * 20, b""),
    "fixed_size_binary": of(pa.binary(3), b"abc", None, b"bcd", b"cde"),
    "list": of(pa.list_(pa.string()), ["a"], None, [], ["b", None]),
    "large_list": of(pa.large_list(pa.string()), ["a"], None, [], ["b", None]),
    "fixed_size_list": of(pa.list_(pa.int32(), 2), [1, 2], None, [3, 4], [5, None]),
    "list_view": of(pa.list_view(pa.string()), ["a"], None, [], ["b", None]),
    "list of views": of(pa.list_(pa.string_view()), ["a"], None, [], ["b" * 20, None]),
    "map": of(pa.map_(pa.string(), pa.int32()), [("a", 1)], None, [], [("b", None)]),
    "struct": of(pa.struct([("x", pa.int32()), ("y", pa.list_(pa.string()))]), {"x": 1, "y": ["a"]}, None, {}, {"x": 3}),
    "empty struct": of(pa.struct([]), {}, None, {}, {}),
    "dense union": union(sparse=False),
    "sparse union": union(sparse=True),
    "dictionary": of(WORDS, "a", None, "b", "a"),
    "dictionary in a list": WORD_LISTS,
    "dictionary in a struct": pa.StructArray.from_arrays([WORD_LISTS, of(WORDS, "a", None, "b", "a")], ["list", "word"]),
    "uuid": of(pa.uuid(), b"0" * 16, None, b"1" * 16, b"2" * 16),
    "json": of(pa.json_(), '{"a":1}', None, "1", "2"),
}  # fmt: skip
ROWS = pa.record_batch({"k": [1, 2, 3, 1], **COLUMNS})


@flux.stage(key="k", partitions=3)
class Through(flux.Operator):
    """A stage with state and a snapshot, whose output travels on: rows wait for the end of the input."""

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.kept = pa.Table.from_batches([], context.schemas[0])

    def process(self, batch: pa.RecordBatch) -> None:
        self.kept = pa.concat_tables([self.kept, pa.Table.from_batches([batch])])

    def finish(self) -> Iterator[pa.RecordBatch]:
        yield from self.kept.to_batches()

    def snapshot(self) -> pa.Table:
        return self.kept

    def restore(self, snapshot: pa.Table) -> None:
        self.kept = snapshot

    def output_schema(self, schemas: Any, key: Any) -> pa.Schema:
        return schemas[0]


def by_key(rows: list[dict[str, Any]]) -> list[str]:
    return sorted(map(repr, rows))


def test_all_types_pass_a_query_in_their_plain_form() -> None:
    def read(partition: int) -> Iterator[pa.RecordBatch]:
        yield from (ROWS.slice(1, 2), ROWS)

    rows = Rows(key="k", partitions=3)
    flow = rows.stage(Through(flux.source(read, schema=ROWS.schema, partitions=2)))
    with ThreadQuery(flow, workers=2) as query:
        assert query.plan.sources[0].schema.types == [plain_type(type_) for type_ in ROWS.schema.types]
        query.wait()
    assert by_key(rows) == by_key(2 * (ROWS.slice(1, 2).to_pylist() + ROWS.to_pylist()))


@pytest.mark.parametrize("name", COLUMNS)
def test_each_type_passes_the_test_kit(name: str) -> None:
    batch = pa.record_batch({"k": [1, 2, 3, 1], "v": COLUMNS[name]})
    made = flux.testing.apply(Through, batch, batch.slice(2), restart_after=1)
    assert made.schema.field("v").type == plain_type(COLUMNS[name].type)
    assert made.to_pylist() == batch.to_pylist() + batch.slice(2).to_pylist()


def test_a_dictionary_may_be_a_key_and_the_output_of_a_stage() -> None:
    @flux.stage(key="word", partitions=2)
    class Counts(flux.Aggregate):
        n = flux.count()
        least = flux.min("k")

    @flux.stage(schema=pa.schema([("k", pa.int64()), ("word", WORDS)]))
    def worded(batch: pa.RecordBatch) -> pa.RecordBatch:
        words = pc.if_else(pc.greater(batch.column("k"), 1), "more", "one").dictionary_encode()
        return pa.record_batch([batch.column("k"), words.cast(WORDS)], names=["k", "word"])

    rows = Rows()
    with ThreadQuery(rows.stage(Counts(worded(dataframe(pa.schema([("k", pa.int64())]))))), workers=2) as query:
        query.started().feed([[pa.record_batch({"k": [1, 2, 3]})], [pa.record_batch({"k": [1]})]])
        query.wait()
    assert rows.sorted() == [{"word": "more", "n": 2, "least": 2}, {"word": "one", "n": 2, "least": 1}]


def test_run_ends_are_refused_with_column_and_type_before_anything_runs() -> None:
    ends = pc.run_end_encode(pa.array([1, 1, 2]))
    schema = pa.schema([("k", pa.int64()), ("odd", ends.type)])
    refused = r"column 'odd' of type run_end_encoded<.*> cannot be taken: .*decode it with pyarrow\.compute\.run_end"
    with pytest.raises(flux.SchemaError, match="source DataFrame: " + refused):
        ThreadQuery(Through(dataframe(schema, "DataFrame")))
    declared = flux.stage(schema=schema, name="Ends")(lambda batch: batch)
    with pytest.raises(flux.SchemaError, match="stage Ends, output: " + refused):
        ThreadQuery(declared(dataframe(pa.schema([("k", pa.int64())]))))
    with pytest.raises(flux.SchemaError, match=refused):
        flux.testing.apply(Through, pa.record_batch([pa.array([1, 2, 3]), ends], schema=schema))


def test_a_batch_that_workers_cannot_decode_ends_the_query_and_is_not_repeated_for_ever(monkeypatch: Any) -> None:
    """Let a type slip through: planning and sources take a dictionary as it is, which travels without its words."""
    monkeypatch.setattr("controller.planning.compiler.plain_schema", lambda schema, what: schema)
    monkeypatch.setattr("flux.worker.source_scheduler.plain_batch", lambda batch, schema: batch)
    schema = pa.schema([("k", pa.int64()), ("word", WORDS)])

    def read(partition: int) -> Iterator[pa.RecordBatch]:
        yield pa.record_batch([pa.array([1, 2, 3, 4]), of(WORDS, "a", "b", "a", None)], schema=schema)

    source = flux.source(read, schema=schema, partitions=1, name="words")
    with ThreadQuery(Rows(key="k", partitions=4).stage(source), workers=2) as query:
        error = query.error()
    assert isinstance(error, flux.QueryFailed)
    assert "(from partition 0 of words): batch 0 cannot be decoded by worker" in str(error)
    assert "word dictionary<values=string" in str(error)
