"""Schemas in DDL, read without Spark."""

from __future__ import annotations

import pyarrow as pa
import pytest

from flux.errors import SchemaError
from flux.operators.schema import parse_ddl


def test_names_types_and_nullability() -> None:
    text = (
        "user STRING NOT NULL COMMENT 'who', `odd ``name` bigint, a: array<int>, d DECIMAL(10,2), e dec, at TIMESTAMP"
    )
    schema = parse_ddl(text)
    assert schema.names == ["user", "odd `name", "a", "d", "e", "at"]
    assert list(map(str, schema.types)) == [
        "string", "int64", "list<element: int32>", "decimal128(10, 2)", "decimal128(10, 0)", "timestamp[us, tz=UTC]",
    ]  # fmt: skip
    assert [field.nullable for field in schema] == [False, True, True, True, True, True]


def test_types_in_types() -> None:
    schema = parse_ddl("m MAP<STRING, STRUCT<x: INT NOT NULL, y ARRAY<DATE>>>, s struct<>")
    inner = pa.struct([pa.field("x", pa.int32(), nullable=False), ("y", pa.list_(pa.field("element", pa.date32())))])
    assert schema.types == [pa.map_(pa.string(), inner), pa.struct([])]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "expected the name of a column at 'its end'"),
        ("user", "expected a type at 'its end'"),
        ("user TEXT", "expected a type such as STRING, .*, not TEXT at 'TEXT'"),
        ("user VARCHAR(3)", "expected a type such as STRING, .*, not VARCHAR"),
        ("a INT b INT", "expected a comma or the end at 'b INT'"),
        ("a INT,", "expected the name of a column"),
        ("a ARRAY INT", "expected < at 'INT'"),
        ("a DECIMAL(1,2,3)", r"expected \) at '3\)'"),
        ("a DECIMAL(x)", r"expected a number at 'x\)'"),
        ("a DECIMAL(39)", r"expected DECIMAL\(p,s\) with p of 1 to 38 and s of 0 to p at 'DECIMAL\(39\)'"),
        ("a DECIMAL(0)", r"expected DECIMAL\(p,s\) with p of 1 to 38"),
        ("a INT, b DEC(10,11)", r"expected DECIMAL\(p,s\) with p of 1 to 38 and s of 0 to p at 'DEC\(10,11\)'"),
        ("a INT ; b", "expected a name, a type or punctuation at '; b'"),
        ("a INT NOT b", "expected NULL at 'b'"),
    ],
)
def test_what_cannot_be_read_is_shown_with_its_place(text: str, expected: str) -> None:
    with pytest.raises(SchemaError, match=f"cannot read the schema .*: {expected}"):
        parse_ddl(text)
