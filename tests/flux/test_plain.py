"""Columns are decoded where they enter, in any nesting, and columns that cannot be decoded are refused by name."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from flux.errors import SchemaError
from flux.operators.batches import conform
from flux.operators.plain_columns import plain_batch, plain_schema, plain_type

WORDS = pa.dictionary(pa.int8(), pa.string())
VALUES = ["a", "b", None, "a"]
OFFSETS = pa.array([0, 1, None, 2, 4], pa.int32())


def words(values: list = VALUES) -> pa.Array:
    return pa.array(values, pa.string()).dictionary_encode().cast(WORDS)


def listed(items: pa.Array | None = None) -> pa.Array:
    return pa.ListArray.from_arrays(OFFSETS, words() if items is None else items)


NESTED = {
    "dictionary": words(),
    "dictionary with a null": pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 0]), pa.array(["a", None])),
    "dictionary of lists": pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 0]), pa.array([[1], [2, 3]])),
    "dictionary of structs": pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 0]), pa.array([{"a": 1}, None])),
    "dictionary of views": pa.DictionaryArray.from_arrays(
        pa.array([0, 1, None, 0]), pa.array(["a", "b" * 20], pa.string_view())
    ),
    "list": listed(),
    "large list": pa.LargeListArray.from_arrays(OFFSETS.cast(pa.int64()), words()),
    "list of lists": listed(listed()),
    "fixed-size list": pa.FixedSizeListArray.from_arrays(words(["a", None, "b", "c", "a", "b", "d", "e"]), 2),
    "struct": pa.StructArray.from_arrays(
        [words(), listed()], ["word", "list"], mask=pa.array([False, True, False, False])
    ),
    "struct without nulls": pa.StructArray.from_arrays(
        [words(["a", "b", "c", "a"])], fields=[pa.field("word", WORDS, nullable=False)]
    ),
    "map": pa.MapArray.from_arrays(OFFSETS, words(["k", "l", "m", "n"]), words()),
    "string view": pa.array(["a", None, "b" * 20, ""], pa.string_view()),
    "binary view": pa.array([b"a", None, b"b" * 20, b""], pa.binary_view()),
    "list of views": pa.array([["a"], None, ["b" * 20, None], []], pa.list_(pa.string_view())),
    "list view": pa.ListViewArray.from_arrays(
        pa.array([2, 0, 1, 0], pa.int32()),
        pa.array([1, 2, 0, 3], pa.int32()),
        words(),
        mask=pa.array([False] * 3 + [True]),
    ),
    "large list view": pa.array([["a"], None, [], ["b", None]], pa.large_list_view(pa.string())),
    "list of list views": pa.array([[["a"]], None, [], [None, ["b"]]], pa.list_(pa.list_view(pa.string()))),
}
PLAIN = {
    "dictionary": "string",
    "list": "list<item: string>",
    "map": "map<string, string>",
    "struct without nulls": "struct<word: string not null>",
    "string view": "string",
    "list view": "list<item: string>",
    "large list view": "large_list<item: string>",
}  # fmt: skip


@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize("cut", [(0, 4), (1, 2), (3, 1), (2, 0)], ids=str)
def test_the_rows_stay_the_same_when_their_type_becomes_plain(name: str, cut: tuple[int, int]) -> None:
    batch = pa.record_batch({"v": NESTED[name], "n": [1, 2, 3, 4]}).slice(*cut)
    schema = plain_schema(batch.schema, "source s")
    made = plain_batch(batch, schema)
    made.validate(full=True)
    assert made.schema == schema
    assert made.to_pylist() == batch.to_pylist()
    assert plain_schema(schema, "source s") == schema
    # Without the schema, as on the wire.
    assert pa.ipc.read_record_batch(made.serialize(), schema).to_pylist() == batch.to_pylist()


@pytest.mark.parametrize("name", PLAIN)
def test_the_plain_type(name: str) -> None:
    assert str(plain_type(NESTED[name].type)) == PLAIN[name]


def test_a_batch_that_has_other_columns_or_is_plain_already_is_left_alone() -> None:
    batch = pa.record_batch({"v": words()})
    for other in (pa.schema([("w", pa.string())]), pa.schema([("v", pa.int64())])):
        assert plain_batch(batch, other) is batch
    made = plain_batch(batch, pa.schema([("v", pa.string())]))
    assert plain_batch(made, made.schema) is made


@pytest.mark.parametrize(
    ("column", "named"),
    [
        (pc.run_end_encode(pa.array([1, 1, 2])), "run_end_decode"),
        (pa.StructArray.from_arrays([pc.run_end_encode(pa.array([1, 1, 2]))], ["r"]), "run_end_decode"),
        (
            pa.UnionArray.from_sparse(pa.array([0, 0, 0], pa.int8()), [words(["a", "b", "a"])]),
            "dictionary<.*> inside of it, which cannot be decoded there; cast it to string",
        ),
        (
            pa.ExtensionArray.from_storage(pa.opaque(WORDS, "word", "me"), words(["a", "b", "a"])),
            "dictionary<.*> inside of it",
        ),
    ],
    ids=["run ends", "run ends in a struct", "union", "extension"],
)
def test_what_cannot_be_decoded_is_refused_with_column_and_type(column: Any, named: str) -> None:
    schema = pa.schema([("k", pa.int64()), ("odd", column.type)])
    with pytest.raises(SchemaError, match=rf"source s: column 'odd' of type .* cannot be taken: .*{named}"):
        plain_schema(schema, "source s")


DECLARED = pa.schema([("s", pa.string()), ("n", pa.list_(pa.int64())), pa.field("x", pa.float64(), nullable=False)])


@pytest.mark.parametrize(
    "rows", [[{"s": None, "n": None, "x": 1.0}], [{"s": "a", "n": None, "x": 1.0}, {"s": None, "n": None, "x": 2.0}]]
)
def test_values_that_all_are_null_have_the_declared_type(rows: list[dict[str, Any]]) -> None:
    """Convert columns of nulls as ``from_pylist`` makes them, which cannot know the declared type."""
    taken = conform(pa.RecordBatch.from_pylist(rows), DECLARED, "output")
    assert taken.schema.equals(DECLARED)
    assert taken.to_pylist() == rows
    taken.validate(full=True)


@pytest.mark.parametrize(
    ("given", "got"),
    [
        ({"s": [None], "n": [None], "x": [None]}, "x null"),
        ({"s": [None], "n": ["a"], "x": [1.0]}, "n string"),
        ({"s": [None], "x": [1.0]}, "s null, x double"),
    ],
)
def test_no_null_where_none_is_declared_and_no_other_type(given: dict[str, list[Any]], got: str) -> None:
    with pytest.raises(SchemaError, match=f"got .*{got}"):
        conform(pa.RecordBatch.from_pydict(given), DECLARED, "output")
