"""Nodes of an analysed expression, read in one call, and the questions that need another.

TreeNode.toJSON of Spark has classes, literals and most arguments. It lacks the mode of evaluation, the ids of
common expressions, the escape character of LIKE, and literals that are no text. A node asks Spark for these, a
millisecond each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
from py4j.java_gateway import get_field
from pyspark.sql.types import (
    ArrayType,
    CharType,
    DataType,
    DayTimeIntervalType,
    MapType,
    StringType,
    StructType,
    VarcharType,
    YearMonthIntervalType,
    _parse_datatype_json_value,
)

from flux.errors import UsageError
from flux.expressions.tree import Expression, Literal
from flux.expressions.types import CALENDAR, DATE, DAY_TIME, STRING, TIMESTAMP, TIMESTAMP_NTZ

_SIMPLE = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "binary": pa.binary(),
    "date": DATE,
    "timestamp": TIMESTAMP,
    "timestamp_ntz": TIMESTAMP_NTZ,
    "void": pa.null(),
    "interval": CALENDAR,
}
REMEDY = "Compute it before the rows come to Flux, or in a function of your own (mapInArrow, or a stage)"


def arrow_type(kind: DataType) -> pa.DataType:
    """Return Spark's type as expressions have it. UsageError names a type that they do not have."""
    if isinstance(kind, StringType | CharType | VarcharType):
        collation = getattr(kind, "collation", "UTF8_BINARY")
        if collation != "UTF8_BINARY":
            raise UsageError(f"text with the collation {collation} cannot be computed where rows are read. {REMEDY}")
        return STRING
    if isinstance(kind, DayTimeIntervalType):
        return DAY_TIME
    if isinstance(kind, YearMonthIntervalType):
        return CALENDAR
    if isinstance(kind, ArrayType):
        return pa.list_(pa.field("element", arrow_type(kind.elementType), kind.containsNull))
    if isinstance(kind, MapType):
        return pa.map_(arrow_type(kind.keyType), pa.field("value", arrow_type(kind.valueType), kind.valueContainsNull))
    if isinstance(kind, StructType):
        return pa.struct([pa.field(field.name, arrow_type(field.dataType), field.nullable) for field in kind])
    name = kind.simpleString()
    if name.startswith("decimal("):
        return pa.decimal128(kind.precision, kind.scale)
    if name not in _SIMPLE:
        raise UsageError(f"values of type {name} cannot be computed where rows are read. {REMEDY}")
    return _SIMPLE[name]


class Node:
    """A node of a tree. ``java`` fetches Spark's own object."""

    def __init__(self, fields: dict[str, Any], children: Sequence[Node], java: Callable[[], Any]) -> None:
        self.fields, self.children, self._java = fields, children, java
        self.name = str(fields["class"]).rsplit(".", 1)[-1]
        self._found: Any = None

    @property
    def java(self) -> Any:
        if self._found is None:
            self._found = self._java()
        return self._found

    def kind(self) -> pa.DataType:
        """Return the type that the node has by its fields, or by Spark's answer."""
        given = self.fields.get("dataType")
        if given is None:
            return arrow_type(DataType.fromDDL(self.java.dataType().sql()))
        return arrow_type(_parse_datatype_json_value(given))

    def mode(self) -> str:
        """Return the mode of evaluation: "ansi", "try" or "legacy"."""
        for name in ("failOnError", "ansiEnabled"):
            if name in self.fields:
                return "ansi" if self.fields[name] else "legacy"
        owner = self.java.evalContext() if "evalContext" in self.fields else self.java
        return str(owner.evalMode().toString()).lower()

    def zone(self) -> str | None:
        return self.fields.get("timeZoneId")

    def common_id(self) -> int:
        """Return the id of a common expression, or of a reference to one."""
        return int(self.java.id().id())

    def expression_id(self) -> int:
        return int(self.fields["exprId"]["id"])

    def sql(self) -> str:
        return str(self.java.sql())

    def refused(self, reason: str) -> UsageError:
        return UsageError(f"{self.sql()} cannot be computed where rows are read: {reason}. {REMEDY}")


def tree_of(listed: Sequence[dict[str, Any]], java: Callable[[], Any]) -> Node:
    """Return the root of a tree that is listed in pre-order, as ``toJSON`` lists it. ``java`` fetches Spark's root."""
    found: list[Any] = []

    def root() -> Any:
        if not found:
            found.append(java())
        return found[0]

    def build(at: int) -> tuple[Node, int]:
        fields, end, children = listed[at], at + 1, []
        for _ in range(fields["num-children"]):
            child, end = build(end)
            children.append(child)
        return Node(fields, children, lambda: root().apply(at)), end

    return build(0)[0]


def literal(node: Node) -> Expression:
    """Return a constant with its Python value."""
    kind, text = node.kind(), node.fields["value"]
    if text is None:
        return Literal(None, kind)
    if pa.types.is_integer(kind) or kind == DAY_TIME:
        return Literal(int(text), kind)
    if pa.types.is_floating(kind):
        return Literal(float(text), kind)
    if pa.types.is_decimal(kind):
        return Literal(Decimal(text), kind)
    if pa.types.is_boolean(kind):
        return Literal(text == "true", kind)
    if kind == STRING:
        return Literal(text, kind)
    if kind in (DATE, TIMESTAMP, TIMESTAMP_NTZ):
        return Literal(int(node.java.value()), kind)
    if kind == pa.binary():
        return Literal(bytes(node.java.value()), kind)
    if kind == CALENDAR:
        if str(node.fields["dataType"]) != "interval":
            return Literal((int(text), 0, 0), kind)
        value = node.java.value()
        micros = int(get_field(value, "microseconds"))
        return Literal((int(get_field(value, "months")), int(get_field(value, "days")), micros * 1000), kind)
    raise node.refused(f"there are no constants of type {kind}")
