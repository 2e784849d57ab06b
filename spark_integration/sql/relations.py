"""Relations of a checked text, as flows.

Each relation of the text is built twice, from below: as an empty DataFrame of Spark's, which has the last word about names, types
and mistakes, and as a call of the fluent layer, which has the last word about time, keys and state. Calls get the expressions of
the tree, never a text (design: sql-same-tree).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import Column, DataFrame

from flux.dataflow.flow import Flow
from flux.dataflow.row_operators import RowOperator
from flux.dataflow.source import Source
from flux.errors import UsageError
from spark_integration.sql.accepted_nodes import NameScope, join_kind, named_relations
from spark_integration.sql.analysis import TextSession
from spark_integration.sql.functions import AGGREGATES
from spark_integration.sql.groups import TextGroups
from spark_integration.sql.text import QueryText
from spark_integration.sql.trees import class_of, column_of, listed, names_in, quoted

_INNER = ("Inner", "Cross")


@dataclass(frozen=True)
class Relation:
    """A flow, and the empty DataFrame that Spark makes of the same part of the text."""

    flow: Flow | Source
    frame: DataFrame


class Relations:
    """The relations of one text, as flows."""

    def __init__(self, text: QueryText, session: TextSession, names: NameScope) -> None:
        self._text, self._session, self._names = text, session, names

    def of(self, node: Any, known: Mapping[str, Relation]) -> Relation:
        """Return a node of the text as a relation. ``known``: flows and named relations, by name as it is compared."""
        return _KINDS[class_of(node)](self, node, known)

    def _frame(self, node: Any, *below: DataFrame) -> DataFrame:
        return self._session.analysed(self._text, self._session.over(node, below))

    def _column(self, expression: Any) -> Column:
        return column_of(self._session.spark, expression)

    # ---- FROM and WITH

    def _table(self, node: Any, known: Mapping[str, Relation]) -> Relation:
        name = str(node.multipartIdentifier().apply(0))
        found = known[self._names.key(name)]
        return Relation(_with_alias(found.flow, name), found.frame.alias(name))

    def _named(self, node: Any, known: Mapping[str, Relation]) -> Relation:
        below = self.of(node.child(), known)
        flow = _with_alias(below.flow, str(node.identifier().name()))
        return Relation(flow, self._frame(node, below.frame))

    def _with_columns(self, node: Any, known: Mapping[str, Relation]) -> Relation:
        """Return a relation under new names of its columns, as in ``FROM (...) AS t(a, b)``."""
        below = self.of(node.child(), known)
        frame = self._frame(node, below.frame)
        with self._text.at(node):
            names = zip(below.frame.columns, frame.columns, strict=True)
            return Relation(below.flow.select(*[quoted(old).alias(new) for old, new in names]), frame)

    def _with(self, node: Any, known: Mapping[str, Relation]) -> Relation:
        known = dict(known)
        for name, below in named_relations(node):
            known[self._names.key(name)] = self.of(below, known)
        return self.of(node.child(), known)

    # ---- rows

    def _project(self, node: Any, known: Mapping[str, Relation]) -> Relation:
        items = listed(node.projectList())
        below = self.of(node.child(), known)
        frame = self._frame(node, below.frame)
        if any(names_in(item) & AGGREGATES for item in items):
            return Relation(self._groups(below, frame.columns).flow(below.flow, [], items), frame)
        if len(items) == 1 and class_of(items[0]) == "UnresolvedStar" and not items[0].target().isDefined():
            return Relation(below.flow, frame)
        return Relation(self._selected(below.flow, items), frame)

    def _selected(self, flow: Flow | Source, items: Sequence[Any]) -> Flow:
        try:
            return flow.select(*map(self._column, items))
        except UsageError:
            for item in items:  # the first one that is wrong by itself has the place
                with self._text.at(item):
                    flow.select(self._column(item))
            with self._text.at(items[0]):
                raise

    def _filter(self, node: Any, known: Mapping[str, Relation]) -> Relation:
        child = node.child()
        if class_of(child) == "Join" and class_of(child.joinType()) in _INNER:
            return self._joined(child, known, node)
        below = self.of(child, known)
        frame = self._frame(node, below.frame)
        with self._text.at(node.condition()):
            return Relation(below.flow.where(self._column(node.condition())), frame)

    def _union(self, node: Any, known: Mapping[str, Relation]) -> Relation:
        first, *others = (self.of(below, known) for below in listed(node.children()))
        frame = self._frame(node, first.frame, *(other.frame for other in others))
        flow = first.flow
        for other in others:
            with self._text.at(node):
                flow = flow.union(other.flow)
        return Relation(flow, frame)

    def _distinct(self, node: Any, known: Mapping[str, Relation]) -> Relation:
        below = self.of(node.child(), known)
        frame = self._frame(node, below.frame)
        try:
            return Relation(below.flow.dropDuplicatesWithinWatermark(), frame)
        except UsageError as error:
            reason = (
                "DISTINCT keeps the first of equal rows, and forgets it when the watermark has passed its time: so the column "
                "with the event time is one of its columns. GROUP BY window(...) and the columns gives each once for each window"
            )
            raise self._text.refused(node, f"{reason}. {error.summary}") from error

    # ---- joins

    def _join(self, node: Any, known: Mapping[str, Relation]) -> Relation:
        return self._joined(node, known, None)

    def _joined(self, node: Any, known: Mapping[str, Relation], above: Any | None) -> Relation:
        """Return a join. ``above``: the WHERE behind an inner join, whose conditions are conditions of the join as well."""
        left, right = (self.of(side, known) for side in (node.left(), node.right()))
        frame = self._frame(node, left.frame, right.frame)
        if above is not None:
            frame = self._frame(above, frame)
        conditions = [node.condition().get()] if node.condition().isDefined() else []
        conditions += [] if above is None else [above.condition()]
        columns = [self._column(each) for each in conditions]
        using = class_of(node.joinType()) == "UsingJoin"
        on = listed(node.joinType().usingColumns()) if using else columns
        with self._text.at(conditions[0] if conditions else node):
            if not on:
                raise UsageError(
                    "a join without a condition would meet each row with all others: JOIN ... ON a.k = b.k, with bounds between "
                    "the event times of both sides, as in AND b.ts BETWEEN a.ts AND a.ts + INTERVAL 10 MINUTES"
                )
            try:
                flow = left.flow.join(right.flow, on, join_kind(node))
            except UsageError as error:
                if "ttl=" not in error.summary:
                    raise
                raise UsageError(
                    f"{error.summary}. A text says bounds alone: a join with ttl is written in the program, and its result is "
                    "given to the text"
                ) from error
        return Relation(flow, frame)

    # ---- groups

    def _groups(self, below: Relation, names: Sequence[str]) -> TextGroups:
        return TextGroups(self._text, self._session.spark, below.frame.columns, names, self._names)

    def _aggregate(self, node: Any, known: Mapping[str, Relation]) -> Relation:
        return self._grouped(node, known, None)

    def _having(self, node: Any, known: Mapping[str, Relation]) -> Relation:
        child = node.child()
        if class_of(child) not in ("Aggregate", "Project"):
            raise self._text.refused(
                node.havingCondition(), "HAVING stands behind GROUP BY, or behind aggregates of all rows"
            )
        return self._grouped(child, known, node)

    def _grouped(self, node: Any, known: Mapping[str, Relation], having: Any | None) -> Relation:
        below = self.of(node.child(), known)
        groups = self._session.over(node, [below.frame])
        whole = groups if having is None else having.withNewChildren(self._session.sequence([groups]))
        frame = self._session.analysed(self._text, whole)
        plain = class_of(node) == "Project"
        items = listed(node.projectList() if plain else node.aggregateExpressions())
        keys = [] if plain else listed(node.groupingExpressions())
        condition = None if having is None else having.havingCondition()
        return Relation(self._groups(below, frame.columns).flow(below.flow, keys, items, condition), frame)


def _with_alias(flow: Flow | Source, name: str) -> Flow:
    """Return a flow under a name. Nothing can be wrong with it, so that Spark is not asked, as ``alias`` would."""
    return flow._with_operator(RowOperator("alias", (name,)))


Build = Callable[[Relations, Any, Mapping[str, Relation]], Relation]
_KINDS: dict[str, Build] = {
    "UnresolvedRelation": Relations._table,
    "SubqueryAlias": Relations._named,
    "UnresolvedSubqueryColumnAliases": Relations._with_columns,
    "UnresolvedWith": Relations._with,
    "Project": Relations._project,
    "Filter": Relations._filter,
    "Union": Relations._union,
    "Distinct": Relations._distinct,
    "Join": Relations._join,
    "Aggregate": Relations._aggregate,
    "UnresolvedHaving": Relations._having,
}
