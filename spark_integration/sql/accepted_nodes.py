"""The closed list of nodes of a parsed text, and the check of a text against it (design: sql-closed-list).

The whole tree is checked before anything is analysed. A class, a function, a table or a variant of a class that is not on the
list is refused without a look at its effect: so a construct that a later release of Spark brings is refused, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from spark_integration.sql.functions import AGGREGATES, CASTS, OF_ROWS, TIMES_OF_WINDOWS, WINDOWS
from spark_integration.sql.refusals import of_expression, of_function, of_relation
from spark_integration.sql.text import QueryText
from spark_integration.sql.trees import class_of, fields_of, function_name, listed

#: The most relations inside each other.
DEPTH_MAX = 100
#: The most relations, with those of WITH as often as they are named: each naming is a part of the plan of its own, so forty
#: relations that name the one before twice would be a million million.
RELATIONS_MAX = 1000
#: The most parts of expressions - columns, constants, functions, operators - counted as relations are. Spark's analyser
#: goes over all of them again and again, and other texts wait for it.
PARTS_MAX = 2000
#: Types of joins, by Spark's classes, as the fluent layer calls them.
JOINS = {
    "Inner": "inner",
    "Cross": "inner",
    "LeftOuter": "left",
    "RightOuter": "right",
    "FullOuter": "full",
    "LeftSemi": "left_semi",
    "LeftAnti": "left_anti",
}
_EXPRESSIONS = """
UnresolvedAttribute UnresolvedAlias Alias UnresolvedStar UnresolvedStarExceptOrReplace UnresolvedFunction
UnresolvedExtractValue UnresolvedOrdinal Literal Cast Add Subtract Multiply Divide IntegralDivide Remainder UnaryMinus
UnaryPositive EqualTo EqualNullSafe LessThan LessThanOrEqual GreaterThan GreaterThanOrEqual And Or Not IsNull IsNotNull In
Like ILike RLike CaseWhen BitwiseAnd BitwiseOr BitwiseXor BitwiseNot Concat StringTrim StringTrimLeft StringTrimRight
StringLocate Substring TimestampAdd TimestampDiff CreateNamedStruct
"""
#: The classes of expressions. Functions have one class, and a list of their own.
EXPRESSIONS = frozenset(_EXPRESSIONS.split())
_STARS = ("UnresolvedStar", "UnresolvedStarExceptOrReplace")


class TextSize(NamedTuple):
    """The size of a part of a text: relations, and parts of their expressions."""

    relations: int = 0
    parts: int = 0


class NameScope:
    """The names of relations that a part of a text may use."""

    def __init__(
        self, names: frozenset[str], is_case_sensitive: bool, sizes: Mapping[str, TextSize] | None = None
    ) -> None:
        self.is_case_sensitive = is_case_sensitive
        #: By name, the size of a relation of WITH.
        self.sizes = dict(sizes or {})
        self.names = frozenset(map(self.key, names))

    def key(self, name: str) -> str:
        """Return a name as names are compared."""
        return name if self.is_case_sensitive else name.lower()

    def __contains__(self, name: str) -> bool:
        return self.key(name) in self.names

    def with_name(self, name: str, size: TextSize) -> NameScope:
        """Return a scope with one name more, of a relation of this size."""
        sizes = {**self.sizes, self.key(name): size}
        return NameScope(self.names | {name}, self.is_case_sensitive, sizes)


def check(text: QueryText, relation: Any, scope: NameScope, depth: int = 0) -> TextSize:
    """Raise UsageError, with its place, for the first part of a relation that is not on the list, or with which the text is too
    large. Return its size."""
    kind = class_of(relation)
    if kind not in RELATIONS:
        raise text.refused(relation, of_relation(kind))
    if depth > DEPTH_MAX:
        raise text.refused(relation, f"more than {DEPTH_MAX} relations inside each other: give a flow to the next text")
    RELATIONS[kind](text, relation, scope)
    parts = 0
    for expression in listed(relation.expressions()):
        parts += _check_expression(text, expression, kind)
        _check_parts(text, expression, parts)
    if kind == "UnresolvedWith":
        for name, below in named_relations(relation):
            scope = scope.with_name(name, check(text, below, scope, depth + 1))
    size = TextSize(1, parts)
    if kind == "UnresolvedRelation":
        size = scope.sizes.get(scope.key(str(relation.multipartIdentifier().apply(0))), size)
    for below in listed(relation.children()):
        found = check(text, below, scope, depth + 1)
        size = TextSize(size.relations + found.relations, size.parts + found.parts)
    if size.relations > RELATIONS_MAX:
        raise text.refused(
            relation,
            f"more than {RELATIONS_MAX:,} relations, each as often as it is named: give a flow to the next text",
        )
    _check_parts(text, relation, size.parts)
    return size


def _check_parts(text: QueryText, node: Any, parts: int) -> None:
    if parts > PARTS_MAX:
        raise text.refused(
            node,
            f"expressions with more than {PARTS_MAX:,} parts (columns, constants, functions, operators), each as often as its "
            "relation is named. Join a DataFrame in place of a long list of values, or give a flow to the next text",
        )


def named_relations(relation: Any) -> Iterator[tuple[str, Any]]:
    """Yield the relations of WITH, each with its name."""
    for each in listed(relation.cteRelations()):
        yield str(each._1()), each._2().child()


def _check_expression(text: QueryText, expression: Any, of: str) -> int:
    """Raise UsageError for the first part of an expression that is not on the list. Return the number of its parts. ``of``: the
    class of its relation."""
    before, listed_parts = "", fields_of(expression)
    for at, fields in enumerate(listed_parts):
        reason = _wrong_with(fields, of, at == 0)
        name = function_name(fields)
        if reason is None and name in TIMES_OF_WINDOWS and before not in WINDOWS:
            reason = of_function(name)
        if reason is not None:
            raise text.refused(expression.apply(at), reason)
        before = name
    return len(listed_parts)


def _wrong_with(fields: dict[str, Any], of: str, is_root: bool) -> str | None:
    """Return the reason against a node; None: it is accepted."""
    kind = fields["class"]
    if kind not in EXPRESSIONS:
        return of_expression(kind)
    if kind in _STARS:
        if not is_root or of != "Project":
            return "a star stands for the columns of SELECT without GROUP BY: name the columns, or write count(*)"
        return "REPLACE: name the columns" if "replacements" in fields else None
    return _wrong_with_call(fields, of) if kind == "UnresolvedFunction" else None


def _wrong_with_call(fields: dict[str, Any], of: str) -> str | None:
    """Return the reason against the call of a function; None: it is accepted."""
    name = function_name(fields)
    aggregates = name in AGGREGATES
    if name in WINDOWS or name in TIMES_OF_WINDOWS:
        known = of == "Aggregate"  # a window is the one among the keys: checked with the groups
    else:
        known = aggregates or name in OF_ROWS or name in CASTS
    if not known or fields.get("isInternal"):
        return of_function(name)
    if not aggregates and (fields.get("isDistinct") or "filter" in fields):
        return f"DISTINCT and FILTER are for aggregates, and {name}() is none"
    if fields.get("orderingWithinGroup") or "ignoreNulls" in fields:
        return f"{name}() with an order of rows, or with nulls left out, is not accepted: aggregates leave nulls out"
    return None


# ---- relations, each with the check of its variants


def _any(text: QueryText, relation: Any, scope: NameScope) -> None:
    """Accept each variant of a class."""


def _table(text: QueryText, relation: Any, scope: NameScope) -> None:
    name = ".".join(map(str, listed(relation.multipartIdentifier())))
    if relation.multipartIdentifier().size() > 1 and name in scope:
        raise text.refused(relation, f"a name with a dot is written in quotes: `{name}`")
    if name not in scope:
        known = ", ".join(sorted(scope.names)) or "none"
        raise text.refused(
            relation,
            f"there is no flow {name!r}; there are {known}. A text reads the flows that are given to it, and neither tables nor "
            "files: flux.sql(text, name=flow)",
        )
    if relation.isStreaming() or not relation.options().isEmpty():
        raise text.refused(relation, "a flow is named as it is, without STREAM and options")


def _union(text: QueryText, relation: Any, scope: NameScope) -> None:
    if relation.byName() or relation.allowMissingCol():
        raise text.refused(relation, "BY NAME: UNION ALL takes columns by position; list them in the same order")


def _join(text: QueryText, relation: Any, scope: NameScope) -> None:
    kind = join_kind(relation)
    if kind is None:
        named = class_of(relation.joinType())
        reason = (
            "NATURAL JOIN: name the columns, as in JOIN b USING (k)" if named == "NaturalJoin" else of_relation(named)
        )
        raise text.refused(relation, reason)


def _with(text: QueryText, relation: Any, scope: NameScope) -> None:
    if relation.allowRecursion():
        raise text.refused(relation, "WITH RECURSIVE: a flow does not read its own result")


def join_kind(relation: Any) -> str | None:
    """Return the kind of a join as the fluent layer calls it; None: there is none."""
    type_ = relation.joinType()
    return JOINS.get(class_of(type_.tpe() if class_of(type_) == "UsingJoin" else type_))


Check = Callable[[QueryText, Any, NameScope], None]
#: The classes of relations.
RELATIONS: dict[str, Check] = {
    "Project": _any,
    "Filter": _any,
    "Aggregate": _any,
    "UnresolvedHaving": _any,
    "SubqueryAlias": _any,
    "UnresolvedSubqueryColumnAliases": _any,
    "Distinct": _any,
    "UnresolvedRelation": _table,
    "Union": _union,
    "Join": _join,
    "UnresolvedWith": _with,
}
