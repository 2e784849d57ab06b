"""GROUP BY, windows, aggregates and HAVING of a text, as groups of a flow.

Every column of SELECT, and the condition of HAVING, is one aggregate of the flow under a name of its own; steps behind the groups
keep the rows that HAVING wants, and give the columns the names that Spark gives them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql import Column, SparkSession

from flux.dataflow.flow import Flow
from flux.dataflow.grouping import WINDOW_NAMES, WindowKey
from flux.dataflow.source import Source
from flux.errors import UsageError
from spark_integration.expressions.aggregates import WINDOW
from spark_integration.expressions.windows import declared_window
from spark_integration.sql.accepted_nodes import NameScope
from spark_integration.sql.functions import AGGREGATES, CLOCKS, WINDOW_TIME, WINDOWS
from spark_integration.sql.refusals import of_window
from spark_integration.sql.text import QueryText
from spark_integration.sql.trees import (
    body_of,
    class_of,
    column_of,
    expression_of,
    fields_of,
    function_name,
    listed,
    plain_name,
    quoted,
    replaced,
    sequence_of,
)

#: The names of columns between groups and their last steps, with a number behind.
_ITEM = "_flux_sql_"


class TextGroups:
    """The groups of one SELECT."""

    def __init__(
        self, text: QueryText, spark: SparkSession, columns: Sequence[str], names: Sequence[str], compared: NameScope
    ) -> None:
        """``columns``: those of the rows. ``names``: those of the result, one for each item of SELECT. ``compared``: says how
        names are compared."""
        self._text, self._spark, self._names, self._key = text, spark, list(names), compared.key
        self._columns = {self._key(name) for name in columns}
        #: The call of the window among the keys, and the column that stands for it.
        self._window: tuple[Any, Any] | None = None

    def flow(self, rows: Flow | Source, keys: Sequence[Any], items: Sequence[Any], having: Any | None = None) -> Flow:
        """Return the groups of rows by ``keys``, with the columns ``items`` of SELECT."""
        bodies = [self._key_body(key, items) for key in keys]
        made = [self._key_of(body) for body in bodies]
        columns = [self._item(body_of(item)) for item in items]
        conditions = [] if having is None else [self._item(self._having(having, items))]
        aliases = [f"{_ITEM}{at}" for at in range(len(columns) + len(conditions))]
        named = [column.alias(alias) for column, alias in zip((*columns, *conditions), aliases, strict=True)]
        place = items[0] if not keys else keys[0]
        try:
            groups: Flow = rows.groupBy(*made).agg(*named)
        except UsageError:
            for item, column in zip(items, named[: len(items)], strict=True):
                with self._text.at(item):  # the one that is wrong by itself has the place
                    rows.groupBy(*made).agg(column)
            with self._text.at(place if having is None else having):
                raise
        with self._text.at(place):
            kept = groups.where(quoted(aliases[-1])) if conditions else groups
            return kept.select(*[quoted(alias).alias(name) for alias, name in zip(aliases, self._names, strict=False)])

    # ---- keys

    def _key_body(self, key: Any, items: Sequence[Any]) -> Any:
        """Return the expression of a key, which may be the number or the name of a column of SELECT."""
        if class_of(key) == "UnresolvedOrdinal":
            return body_of(items[key.ordinal() - 1])
        name = plain_name(key)
        if name is None or self._key(name) in self._columns:
            return key
        for item in items:
            if class_of(item) == "Alias" and self._key(str(item.name())) == self._key(name):
                return item.child()
        if name.lower() == "all":
            raise self._text.refused(key, "GROUP BY ALL: name the keys")
        return key

    def _key_of(self, body: Any) -> Column | WindowKey:
        calls = [function_name(fields) for fields in fields_of(body)]
        if calls[0] not in WINDOWS:
            self._refuse_windows(body)
            return column_of(self._spark, body)
        if self._window is not None:
            raise self._text.refused(
                body,
                "one window at most is a key: group by one of them in a subquery in FROM, and its result by the other",
            )
        with self._text.at(body):
            declared = declared_window(body)
        name = WINDOW_NAMES[type(declared)]
        stand_in = WINDOW if name in {each.lower() for each in self._columns} else name
        self._window = body, expression_of(self._spark, quoted(stand_in))
        return WindowKey(declared, self._times(body.arguments().apply(0)), name)

    def _times(self, times: Any) -> Column | str | None:
        """Return the times of a window; None: those at which rows are processed."""
        (call, *_) = fields_of(times)
        name = plain_name(times)
        if function_name(call) in CLOCKS or (name is not None and name.lower() in CLOCKS and name not in self._columns):
            return None
        if function_name(call) == WINDOW_TIME:  # the event time of a window, which the window itself means here, too
            return self._times(times.arguments().apply(0))
        self._refuse_windows(times)
        return column_of(self._spark, times) if name is None else name

    # ---- columns

    def _item(self, body: Any) -> Column:
        """Return an expression of SELECT or HAVING over groups: its windows are the one among the keys."""
        found = self._with_window(body)
        self._refuse_windows(found)
        return column_of(self._spark, found)

    def _with_window(self, body: Any) -> Any:
        if self._window is None or not self._has(body, WINDOWS):
            return body
        call, stand_in = self._window
        return replaced(self._spark, body, lambda node: stand_in if node.equals(call) else None)

    def _refuse_windows(self, body: Any) -> None:
        for at, fields in enumerate(fields_of(body)):
            if (name := function_name(fields)) in WINDOWS:
                raise self._text.refused(body.apply(at), of_window(name))

    def _has(self, body: Any, names: frozenset[str]) -> bool:
        return any(function_name(fields) in names for fields in fields_of(body))

    def _having(self, condition: Any, items: Sequence[Any]) -> Any:
        """Return the condition of HAVING over rows and groups: names of SELECT are replaced by their expressions, but not
        inside of an aggregate of a column that the rows have."""
        known = {self._key(name): body_of(item) for name, item in zip(self._names, items, strict=True)}

        def outside(node: Any) -> Any | None:
            name = plain_name(node)
            if name is not None:
                return known.get(self._key(name))
            if class_of(node) == "UnresolvedFunction" and str(node.nameParts().last()).lower() in AGGREGATES:
                children = [replaced(self._spark, child, inside) for child in listed(node.children())]
                return node.withNewChildren(sequence_of(self._spark, children))
            return None

        def inside(node: Any) -> Any | None:
            name = plain_name(node)
            return None if name is None or self._key(name) in self._columns else known.get(self._key(name))

        return replaced(self._spark, condition, outside)
