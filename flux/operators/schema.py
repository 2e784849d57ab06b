"""Schemas: columns found by name as Spark finds them, schemas read from Spark's DDL without Spark, and checks of both."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from flux.errors import SchemaError
from partitioning.clustering import check_key_type


def positions(schema: pa.Schema, column: str, case_sensitive: bool = False) -> list[int]:
    """Return the positions of the columns of that name: the exact name first, else names that differ in case alone. Callers
    expect one position, and word the error for none or several."""
    exact: list[int] = schema.get_all_field_indices(column)
    if exact or case_sensitive:
        return exact
    folded = column.casefold()
    return [at for at, name in enumerate(schema.names) if name.casefold() == folded]


def position(schema: pa.Schema, column: str) -> int:
    """Return the position of a column that is known to be there once."""
    (at,) = positions(schema, column)
    return at


def picked(batch: pa.RecordBatch, columns: Sequence[int] | None) -> pa.RecordBatch:
    """Return a view of the batch with these of its columns alone; None: with all."""
    return batch if columns is None else batch.select(columns)


def check_key(key: Sequence[str], schema: pa.Schema, case_sensitive: bool = False) -> None:
    """Raise SchemaError or KeyTypeError unless each key column is there once and can be hashed."""
    for column in key:
        found = positions(schema, column, case_sensitive)
        if len(found) != 1:
            problem = "is the name of several columns" if found else "is not a column"
            raise SchemaError(f"key {column!r} {problem} of its input; there are {', '.join(schema.names)}")
        check_key_type(column, schema.field(found[0]).type)


_TOKEN = re.compile(r"\s*(?:`((?:[^`]|``)+)`|('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|(\w+)|([<>(),:]))")
_SIMPLE = {
    "BOOLEAN": pa.bool_(),
    "BYTE": pa.int8(),
    "TINYINT": pa.int8(),
    "SHORT": pa.int16(),
    "SMALLINT": pa.int16(),
    "INT": pa.int32(),
    "INTEGER": pa.int32(),
    "LONG": pa.int64(),
    "BIGINT": pa.int64(),
    "FLOAT": pa.float32(),
    "REAL": pa.float32(),
    "DOUBLE": pa.float64(),
    "STRING": pa.string(),
    "BINARY": pa.binary(),
    "DATE": pa.date32(),
    "TIMESTAMP": pa.timestamp("us", "UTC"),
    "TIMESTAMP_LTZ": pa.timestamp("us", "UTC"),
    "TIMESTAMP_NTZ": pa.timestamp("us"),
    "VOID": pa.null(),
}
_DECIMALS = ("DECIMAL", "DEC", "NUMERIC")


def parse_ddl(text: str) -> pa.Schema:
    """Return the pyarrow schema that Spark makes of a text in a session whose time zone is UTC. SchemaError shows the place.

    A stage can so be tried where there is no session.

        schema  = field {"," field}
        field   = name [":"] type ["NOT NULL"] ["COMMENT" string]
        type    = simple | "DECIMAL" ["(" p ["," s] ")"] | "ARRAY" "<" type ">" | "MAP" "<" type "," type ">"
                | "STRUCT" "<" [schema] ">"
    """
    parser = _Parser(text)
    fields = parser.fields()
    parser.end()
    return pa.schema(fields)


#: Names of types in DDL; of several, the one that Spark shows.
_NAMES = {
    pa.bool_(): "BOOLEAN", pa.int8(): "TINYINT", pa.int16(): "SMALLINT", pa.int32(): "INT", pa.int64(): "BIGINT",
    pa.float32(): "FLOAT", pa.float64(): "DOUBLE", pa.string(): "STRING", pa.large_string(): "STRING",
    pa.binary(): "BINARY", pa.large_binary(): "BINARY", pa.date32(): "DATE", pa.timestamp("us", "UTC"): "TIMESTAMP",
    pa.timestamp("us"): "TIMESTAMP_NTZ", pa.null(): "VOID",
}  # fmt: skip


def ddl_text(schema: pa.Schema) -> str:
    """Return columns in DDL, as people read them. A type that Spark has not is there under Arrow's name."""
    return ", ".join(_ddl_field(field, " ") for field in schema)


def _ddl_field(field: pa.Field, between: str) -> str:
    name = field.name.replace("`", "``")
    return f"`{name}`{between}{_ddl_type(field.type)}{'' if field.nullable else ' NOT NULL'}"


def _ddl_type(type_: pa.DataType) -> str:
    if pa.types.is_decimal(type_):
        return f"DECIMAL({type_.precision},{type_.scale})"
    if pa.types.is_map(type_):
        return f"MAP<{_ddl_type(type_.key_type)}, {_ddl_type(type_.item_type)}>"
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return f"ARRAY<{_ddl_type(type_.value_type)}>"
    if pa.types.is_struct(type_):
        return f"STRUCT<{', '.join(_ddl_field(field, ': ') for field in type_)}>"
    return _NAMES.get(type_, str(type_))


class _Parser:
    """Parser of one text. ``word`` is the next token as it is written, in upper case but for strings and names in backquotes; ""
    at the end. ``name`` is the same token as the name of a column; "" if it cannot be one."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._start = text, 0, 0
        self.word = self.name = ""
        self._advance()

    def fields(self) -> list[pa.Field]:
        made = [self._field()]
        while self._took(","):
            made.append(self._field())
        return made

    def end(self) -> None:
        if self.word:
            raise self._wrong("a comma or the end")

    def _field(self) -> pa.Field:
        if not self.name:
            raise self._wrong("the name of a column")
        name = self.name
        self._advance()
        self._took(":")
        type_ = self._type()
        nullable = True
        if self._took("NOT"):
            self._expect("NULL")
            nullable = False
        if self._took("COMMENT"):
            if self.word[:1] not in ("'", '"'):
                raise self._wrong("a comment in quotes")
            self._advance()
        return pa.field(name, type_, nullable)

    def _type(self) -> pa.DataType:
        word, start = self.word, self._start
        if not self.name:
            raise self._wrong("a type")
        self._advance()
        if word in _SIMPLE:
            return _SIMPLE[word]
        if word in _DECIMALS:
            precision, scale = (*(self._numbers(2) or [10]), 0)[:2]
            if not (0 < precision <= 38 and scale <= precision):
                self._start = start
                raise self._wrong("DECIMAL(p,s) with p of 1 to 38 and s of 0 to p")
            return pa.decimal128(precision, scale)
        if word == "ARRAY":
            (element,) = self._arguments(1)
            return pa.list_(pa.field("element", element))
        if word == "MAP":
            key, value = self._arguments(2)
            return pa.map_(key, value)
        if word == "STRUCT":
            return self._struct()
        self._start = start
        raise self._wrong(f"a type such as STRING, BIGINT, DOUBLE, DECIMAL(10,2), TIMESTAMP or ARRAY<INT>, not {word}")

    def _struct(self) -> pa.DataType:
        self._expect("<")
        if self._took(">"):
            return pa.struct([])
        fields = self.fields()
        self._expect(">")
        return pa.struct(fields)

    def _arguments(self, count: int) -> list[pa.DataType]:
        self._expect("<")
        made = [self._type()]
        while len(made) < count:
            self._expect(",")
            made.append(self._type())
        self._expect(">")
        return made

    def _numbers(self, most: int) -> list[int]:
        numbers: list[int] = []
        if self._took("("):
            while not self._took(")"):
                if numbers:
                    self._expect(",")
                if not self.word.isdigit() or len(numbers) == most:
                    raise self._wrong("a number" if len(numbers) < most else ")")
                numbers.append(int(self.word))
                self._advance()
        return numbers

    def _took(self, word: str) -> bool:
        if self.word != word:
            return False
        self._advance()
        return True

    def _expect(self, word: str) -> None:
        if not self._took(word):
            raise self._wrong(word)

    def _advance(self) -> None:
        found = _TOKEN.match(self._text, self._at)
        rest = self._text[self._at :]
        self._start = self._at + len(rest) - len(rest.lstrip())
        if found is None:
            if rest.strip():
                raise self._wrong("a name, a type or punctuation")
            self.word = self.name = ""
            return
        self._at = found.end()
        quoted, string, plain, mark = found.groups()
        self.name = quoted.replace("``", "`") if quoted else plain or ""
        self.word = f"`{quoted}`" if quoted else string or mark or plain.upper()

    def _wrong(self, expected: str) -> SchemaError:
        shown = self._text[self._start : self._start + 20]
        return SchemaError(f"cannot read the schema {self._text!r}: expected {expected} at {shown or 'its end'!r}")


#: A text with any of these is left to Spark, which reads more than ``parse_ddl``, and is asked once there is a session.
_SPARKS_OWN = re.compile(
    r"^\s*STRUCT\s*<|--|/\*|\b(?:CHAR|CHARACTER|VARCHAR|COLLATE|DEFAULT|GENERATED|INTERVAL|TIME|VARIANT|GEOMETRY|GEOGRAPHY)\b",
    re.IGNORECASE,
)


def check_columns(what: str, declared: Any) -> None:
    """Raise SchemaError if a schema cannot be read, or has a column name twice, as far as that can be told without a session."""
    if isinstance(declared, str):
        try:
            declared = parse_ddl(declared)
        except SchemaError as error:
            if _SPARKS_OWN.search(declared):
                return
            raise SchemaError(f"{what}: {error}") from None
    given: Any = getattr(declared, "names", ())
    names = given if isinstance(given, list) else []
    for name in names:
        if names.count(name) > 1:
            raise SchemaError(f"{what}: its schema has column {name!r} twice; give each column a name of its own")
