"""Windows among the keys of groups, recognised as calls: Spark's analyser would make arithmetic and further rows of them."""

from __future__ import annotations

import re
from typing import Any

from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from flux.dataflow.grouping import WINDOW_NAMES, WindowKey
from flux.errors import UsageError
from flux.windows.window import SessionWindow, Window, session_window, window

_CALL = re.compile(r"\b(?:session_)?window\s*\(", re.IGNORECASE)
#: Functions that give the time at which a row is processed. Here that is the time of its step, in all replicas.
_CLOCKS = ("current_timestamp", "now")
#: The name of the column of times in a window whose times are an expression.
_TIMES = "the times"


def window_key(column: Column) -> WindowKey | None:
    """Return the window that a Column is; None: it is none. UsageError: a window is a part of it, or has odd arguments."""
    node: Any = column._jc.node()
    if not _CALL.search(str(node.sql())):
        return None
    call, name = _without_alias(_parsed(node))
    if _name_of_function(call) not in WINDOW_NAMES.values():
        raise UsageError(
            f"groupBy: a window has to be a key of its own, got {node.sql()!s:.200}. Its parts are columns of the result, as in "
            "groupBy(F.window('ts', '10 minutes')).count().select('window.start', 'count')"
        )
    made = declared_window(call)
    times = call.arguments().apply(0)
    if _name_of_function(times) == "window_time":  # the time of a window, which the window itself means here, too
        times = times.arguments().apply(0)
    clock = _name_of_function(times) in _CLOCKS
    return WindowKey(made, None if clock else _as_column(times), name or WINDOW_NAMES[type(made)])


def _parsed(node: Any) -> Any:
    """Return a node of a Column; that of a text, parsed."""
    if node.getClass().getSimpleName() != "SqlExpression":
        return node
    spark: Any = SparkSession.active()
    return spark._jsparkSession.sessionState().sqlParser().parseExpression(node.expression())


def _without_alias(node: Any) -> tuple[Any, str | None]:
    """Return the node below an alias, and the alias; None: there is none."""
    if node.getClass().getSimpleName() != "Alias":
        return node, None
    name = node.name()
    return node.child(), name if isinstance(name, str) else str(name.apply(0))


def _name_of_function(node: Any) -> str | None:
    """Return the name of the function that a node calls; None: it is no call."""
    if node.getClass().getSimpleName() != "UnresolvedFunction":
        return None
    if node.getClass().getName().startswith("org.apache.spark.sql.catalyst."):
        return str(node.nameParts().last()).lower()
    return str(node.functionName()).lower()


def declared_window(call: Any) -> Window | SessionWindow:
    """Return the window of a call, by the arguments behind the times of rows."""
    name = _name_of_function(call)
    arguments = call.arguments()
    lengths = [_length(arguments.apply(at), f"{name}, argument {at + 1}") for at in range(1, arguments.size())]
    if not 1 <= len(lengths) <= (3 if name == "window" else 1):
        raise UsageError(f"groupBy: {call.sql()!s:.200}: {name} takes no {arguments.size()} arguments")
    return window(_TIMES, *lengths) if name == "window" else session_window(_TIMES, *lengths)


def _length(node: Any, what: str) -> str:
    """Return the length of time that a constant is, as text."""
    if node.getClass().getSimpleName() != "Literal":
        raise UsageError(f"groupBy: {what}: expected a constant, as in '10 minutes', got {node.sql()!s:.200}")
    value = node.value()
    # Constants of SQL with a type of interval are microseconds.
    return (
        f"{value} microseconds"
        if isinstance(value, int)
        else str(value.toString() if hasattr(value, "toString") else value)
    )


def _as_column(node: Any) -> Column | str:
    """Return a node as a Column, or as the name of a column."""
    if node.getClass().getSimpleName() == "UnresolvedAttribute" and node.nameParts().size() == 1:
        return str(node.nameParts().apply(0))
    if node.getClass().getName().startswith("org.apache.spark.sql.catalyst."):
        return F.expr(str(node.sql()))
    spark: Any = SparkSession.active()
    kind = type(F.lit(0))  # of a session in this process, which Column itself is not
    made: Column = kind(spark._jvm.org.apache.spark.sql.Column(node))
    return made
