"""Spark's trees, as Python reads and changes them. Each question to the JVM takes some tenths of a millisecond, so an expression
is read with one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from spark_integration.jvm import of_jvm


def class_of(node: Any) -> str:
    """Return the class of a node, without its package; that of a Scala object without its dollar sign."""
    return str(node.getClass().getSimpleName()).rstrip("$")


def listed(sequence: Any) -> list[Any]:
    """Return the elements of a sequence of Scala's."""
    return [sequence.apply(at) for at in range(sequence.size())]


def sequence_of(spark: SparkSession, elements: Iterable[Any]) -> Any:
    """Return a sequence of Scala's."""
    return of_jvm(spark, "PythonUtils.toSeq")(list(elements))


def fields_of(expression: Any) -> list[dict[str, Any]]:
    """Return the fields of all nodes of an expression in pre-order, each with its class. Node number n is
    ``expression.apply(n)``."""
    found: list[dict[str, Any]] = json.loads(expression.toJSON())
    for each in found:
        each["class"] = str(each["class"]).rsplit(".", 1)[-1].rstrip("$")
    return found


def function_name(fields: dict[str, Any]) -> str:
    """Return the name of the function that a node calls, in lower case; "" if it calls none. That of several parts has commas,
    and is the name of no function."""
    if fields["class"] != "UnresolvedFunction":
        return ""
    return str(fields["nameParts"])[1:-1].lower()


def names_in(expression: Any) -> set[str]:
    """Return the names of all functions that an expression calls."""
    return {name for each in fields_of(expression) if (name := function_name(each))}


def plain_name(expression: Any) -> str | None:
    """Return the name of the column that an expression is; None: it is another expression, or has a qualifier."""
    if class_of(expression) != "UnresolvedAttribute":
        return None
    parts = expression.nameParts()
    return str(parts.apply(0)) if parts.size() == 1 else None


def body_of(expression: Any) -> Any:
    """Return an expression without the alias around it."""
    return expression.child() if class_of(expression) in ("Alias", "UnresolvedAlias") else expression


def replaced(spark: SparkSession, node: Any, replacement: Callable[[Any], Any | None]) -> Any:
    """Return a tree in which ``replacement`` has taken the place of each node for which it gives one. The search goes no deeper
    there."""
    found = replacement(node)
    if found is not None:
        return found
    children = listed(node.children())
    made = [replaced(spark, child, replacement) for child in children]
    if all(old is new for old, new in zip(children, made, strict=True)):
        return node
    return node.withNewChildren(sequence_of(spark, made))


def column_of(spark: SparkSession, expression: Any) -> Column:
    """Return an expression of Spark's as a Column. The tree itself is used: no text is read a second time."""
    kind = type(F.lit(0))  # of a session in this process, which Column itself is not
    made: Column = kind(of_jvm(spark, "org.apache.spark.sql.classic.ExpressionUtils.column")(expression))
    return made


def expression_of(spark: SparkSession, column: Column) -> Any:
    """Return the tree of a Column."""
    return of_jvm(spark, "org.apache.spark.sql.classic.ExpressionUtils.expression")(column._jc)


def quoted(name: str) -> Column:
    """Return the column of exactly this name."""
    escaped = name.replace("`", "``")
    return F.col(f"`{escaped}`")
