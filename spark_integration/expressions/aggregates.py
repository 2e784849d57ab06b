"""Keys and aggregates, resolved by Spark's analyser, as an aggregate with steps around it (design: grouping).

Spark groups an empty DataFrame with the columns of the flow. Its plan is an aggregate above projections: keys and the values
that are aggregated become columns of the steps in front, each different one once; each different aggregate becomes a measure;
the columns of the result are computed from keys and measures by the steps behind.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructField, StructType, TimestampNTZType, TimestampType

from flux.dataflow.grouping import APPLY, Grouping, ResolvedGrouping, WindowKey
from flux.errors import UsageError
from flux.expressions.steps import RowSteps, Select
from flux.expressions.tree import And, Case, Column, Expression, FunctionCall, Literal
from flux.operators.aggregate import Measure, grouped_rows
from flux.operators.windowed_groups import CLOCK_TYPE, WINDOW_COLUMNS
from flux.operators.windowed_rows import EachGroupFunction, GroupKey
from flux.windows.window import Closing, SessionWindow, Window
from partitioning.accumulators import accumulator
from partitioning.clustering import check_key_type
from partitioning.errors import ColumnTypeError, KeyTypeError
from spark_integration.expressions.analysed_operators import (
    AnalysedPlan,
    chain_below,
    check_policy,
    empty,
    session_zone,
    sparks_errors,
)
from spark_integration.expressions.classes import BOOLEAN, Translator
from spark_integration.expressions.nodes import Node, tree_of
from spark_integration.schema import struct_to_arrow, to_arrow

#: The column with the times of rows, in the DataFrame that Spark groups.
TIME = "_flux_time"
#: The column that stands for windows there if the input has a column of their name.
WINDOW = "_flux_window"
#: Spark's classes of aggregates, and the kinds of measures that they are.
KINDS = {"Count": "count", "Sum": "sum", "Min": "min", "Max": "max", "Average": "mean"}
#: Classes of aggregates that Spark replaces by another one later.
REPLACED = ("CountIf", "BoolAnd", "BoolOr")
REMEDY = (
    "Aggregates are count, sum, min, max, avg and count(DISTINCT column), each with FILTER (WHERE ...) and expressions in and "
    "around it. For others write a stage: a class derived from flux.KeyedOperator gets the rows of a key"
)


def groups_of(
    spark: SparkSession, schema: pa.Schema, grouping: Grouping, rows: DataFrame | None = None
) -> ResolvedGrouping:
    """Return a grouping of rows of a schema as workers compute it. ``rows``: a DataFrame without rows, with the same
    columns and the aliases by which they may be called; None: there are none. UsageError has the words of Spark for a name or
    type that is wrong, and names an aggregate or an expression that is not there."""
    applies = grouping.method == APPLY
    with sparks_errors(schema):
        df, windows = _with_window(empty(spark, schema) if rows is None else rows, grouping.window)
        stand_in = F.col(_quoted(windows.stand_in or TIME))
        groups = df.groupBy(*(stand_in if isinstance(key, WindowKey) else key for key in grouping.keys))
        arguments = map(_aggregate, grouping.arguments) if grouping.method == "agg" else grouping.arguments
        # A function of the user's needs keys alone, which are those of any aggregate.
        result: DataFrame = groups.count() if applies else getattr(groups, grouping.method)(*arguments)
        plan = AnalysedPlan(result._jdf.queryExecution().analyzed())
    if plan.names[0] != "Aggregate":
        raise UsageError(f"{plan.names[0]} cannot be computed of groups. {REMEDY}")
    made = _Resolution(spark, schema, grouping.window, windows, plan)
    if not applies:
        return made.resolved(result.schema)
    function, declared = grouping.arguments
    return made.applied(function, to_arrow(spark, declared))


def _aggregate(given: Any) -> Any:
    """Return an argument of ``agg``: a text of SQL as a Column."""
    if isinstance(given, SparkColumn | dict):
        return given
    if not isinstance(given, str):
        raise UsageError(
            f"groupBy.agg: expected a Column, as in F.sum('price'), or a text of SQL, got {type(given).__name__} {given!r:.100}"
        )
    return F.expr(given)


class _Windows(NamedTuple):
    """Columns of the DataFrame that Spark groups; "" without a window."""

    #: The times of rows; "": those of steps.
    time: str = ""
    #: A struct that stands for the window, a key as any other.
    stand_in: str = ""


def _with_window(df: DataFrame, key: WindowKey | None) -> tuple[DataFrame, _Windows]:
    """Add the times of rows, if they are no column, and a column that stands for their window."""
    if key is None:
        return df, _Windows()
    names = {name.lower(): name for name in df.columns}
    stand_in = WINDOW if key.name.lower() in names else key.name
    if key.time is None:
        return df.withColumn(stand_in, F.expr("CAST(NULL AS STRUCT<start: TIMESTAMP, end: TIMESTAMP>)")), _Windows(
            "", stand_in
        )
    time = TIME
    if isinstance(key.time, str):
        time = key.time if key.time in df.columns else names.get(key.time.lower(), TIME)
    if time == TIME:
        df = df.withColumn(TIME, F.col(key.time) if isinstance(key.time, str) else key.time)
    kind = df.schema[time].dataType
    if isinstance(kind, StructType) and kind.names == ["start", "end"]:  # a window of an earlier aggregate
        df = df.withColumn(TIME, F.expr(f"{_quoted(time)}.end - INTERVAL '0.000001' SECOND"))
        time, kind = TIME, df.schema[TIME].dataType
    if not isinstance(kind, TimestampType | TimestampNTZType):
        raise UsageError(
            f"{key.name}: expected times of type TIMESTAMP, got {kind.simpleString().upper()}; convert them first, as in "
            "F.to_timestamp(...) or F.timestamp_millis(...)"
        )
    if isinstance(key.window, Closing):
        return df, _Windows(time, time)
    parts = [F.col(_quoted(time)).alias(part) for part in ("start", "end")]
    return df.withColumn(stand_in, F.struct(*parts)), _Windows(time, stand_in)


def _quoted(name: str) -> str:
    escaped = name.replace("`", "``")
    return f"`{escaped}`"


class _Resolution:
    """A resolution of one grouping."""

    def __init__(
        self, spark: SparkSession, schema: pa.Schema, window: WindowKey | None, windows: _Windows, plan: AnalysedPlan
    ) -> None:
        self._spark, self._schema, self._window, self._windows, self._plan = spark, schema, window, windows, plan
        self._chain, self._attributes = chain_below(plan, schema, 1)
        #: Columns that the aggregate reads, by the text forms of the expressions that compute them.
        self._read: dict[str, tuple[str, Expression]] = {}
        self._key: list[str] = []
        #: The keys of the result, by the text forms of the expressions that Spark has for them.
        self._keys: dict[str, Expression] = {}
        self._measures: dict[str, Measure] = {}
        self._names: set[str] = set(WINDOW_COLUMNS) if window is not None else set()

    def resolved(self, struct: StructType) -> ResolvedGrouping:
        """Return the grouping; ``struct`` is Spark's schema of the result."""
        outputs = self._plan.expressions(0, "aggregateExpressions")
        window = self._take_keys(outputs)
        around = _Around(self)
        columns = tuple((self._renamed(str(node.fields["name"])), around.translate(node)) for node in outputs)
        if not self._measures:  # as in agg(F.lit(1)), which gives the keys that there are
            self._measures["count"] = Measure("count")
        chain = [*self._chain, Select(tuple(self._read.values()))] if self._read else self._chain
        check_policy(self._spark, [*chain, Select(columns)])
        before: RowSteps | None = RowSteps.of(self._schema, chain)
        assert before is not None
        read = before.output
        if _changes_nothing(before):
            read, before = pa.schema([self._schema.field(name) for name in read.names]), None
        make = partial(grouped_rows, self._measures, window)
        given = make().output_schema((read,), tuple(self._key))
        fields = [StructField(self._renamed(each.name), each.dataType, each.nullable) for each in struct]
        after = RowSteps.of(given, [Select(columns)], struct_to_arrow(StructType(fields), session_zone(self._spark)))
        return ResolvedGrouping(
            before,
            tuple(self._key),
            make,
            None if _changes_nothing(after) and _same_columns(after.output, given) else after,
        )

    def applied(self, function: Any, output: pa.Schema) -> ResolvedGrouping:
        """Return the grouping whose rows a function gets: all columns of the flow, and behind them the keys that are computed."""
        for field in self._schema:
            column = Column(field.name, _in_utc(field.type))
            self._read[str(column)] = field.name, column
        window = self._take_keys([])
        assert window is not None
        chain = [*self._chain, Select(tuple(self._read.values()))]
        check_policy(self._spark, chain)
        computed = list(RowSteps.of(self._schema, chain).output)[len(self._schema) :]
        zone = session_zone(self._spark)  # a function of Spark's gets times in it, too
        before = RowSteps.of(
            self._schema, chain, pa.schema([_in_zone(each, zone) for each in (*self._schema, *computed)])
        )
        names = before.output.names
        stand_in = str(Column(self._windows.stand_in, BOOLEAN))
        texts = [self._text_of(node) for node in self._plan.expressions(0, "groupingExpressions")]
        places = tuple(
            None if text == stand_in else names.index(str(getattr(self._keys[str(text)], "name", None)))
            for text in texts
        )
        key = GroupKey(places, len(self._schema))
        return ResolvedGrouping(
            None if _changes_nothing(before) and _same_columns(before.output, self._schema) else before,
            tuple(self._key),
            partial(EachGroupFunction, function, output, window, key),
            None,
        )

    def _renamed(self, name: str) -> str:
        return self._window.name if self._window is not None and name == self._windows.stand_in else name

    # ---- keys

    def _take_keys(self, outputs: list[Node]) -> Window | SessionWindow | None:
        """Take the keys, under the names that they have in the result. Return the window, with the column of its times."""
        names = {self._text_of(_body(node)): str(node.fields["name"]) for node in reversed(outputs)}
        stand_in = str(Column(self._windows.stand_in, BOOLEAN))
        for node in self._plan.expressions(0, "groupingExpressions"):
            expression = Translator(self._attributes).translate(node)
            text = str(expression)
            if text == stand_in or text in self._keys:
                continue
            column = self._column(expression, names.get(text, node.sql()))
            try:
                check_key_type(column.name, column.type)
            except KeyTypeError as error:
                if pa.types.is_struct(column.type) and [each.name for each in column.type] == ["start", "end"]:
                    raise UsageError(
                        f"groupBy: {column.name} is a window of an earlier aggregate; group by windows of it, as in "
                        f"groupBy(F.window({column.name!r}, '10 minutes')), which may be as long as these"
                    ) from error
                raise UsageError(f"groupBy: {error}") from error
            self._key.append(column.name)
            self._keys[text] = column
        self._names |= {name.lower() for name in self._key}
        if self._window is None:
            return None
        times = self._times()
        if isinstance(self._window.window, Closing):
            assert times is not None
            self._names.add(times.name.lower())
            self._keys[stand_in] = times
        else:
            type_ = CLOCK_TYPE if times is None else times.type
            parts = tuple(Column(name, type_) for name in WINDOW_COLUMNS)
            kind = pa.struct([pa.field(name, type_) for name in ("start", "end")])
            self._keys[stand_in] = FunctionCall("struct", parts, kind)
        return replace(self._window.window, column=None if times is None else times.name)

    def _times(self) -> Column | None:
        """Return the column of the times of rows; None: they are those of steps."""
        if not self._windows.time:
            return None
        name = str(Column(self._windows.time, BOOLEAN))
        (time,) = (each for each in self._attributes.values() if str(each) == name)
        return self._column(time, TIME)

    def key_of(self, node: Node) -> Expression | None:
        """Return the key that a node computes, as a part of the result; None: it is another expression."""
        text = self._text_of(node)
        return None if text is None else self._keys.get(text)

    def _text_of(self, node: Node) -> str | None:
        """Return the text form of the expression of a node over rows; None: it has none."""
        if any(each.name == "AggregateExpression" for each in _walk(node)):
            return None
        try:
            return str(Translator(self._attributes).translate(node))
        except (UsageError, KeyError):  # a part without a kernel, or of a common expression
            return None

    def _column(self, expression: Expression, wanted: str) -> Column:
        """Return the column that the steps in front compute, under the wanted name if it is free."""
        text = str(expression)
        if text not in self._read:
            names = [name for name, _ in self._read.values()]
            name = expression.name if isinstance(expression, Column) and expression.name not in names else wanted
            self._read[text] = (_free(name, {each.lower() for each in names}), expression)
        return Column(self._read[text][0], expression.type)

    # ---- aggregates

    def measure(self, node: Node, wanted: str) -> Column:
        """Return the measure of an aggregate, under the wanted name if it is free and the aggregate is new."""
        function, *conditions = node.children
        if function.name in REPLACED:
            function = _replacement(function)
        if function.name not in KINDS:
            raise _refused(node, f"there is no {function.name} there")
        kind, value = KINDS[function.name], self._value(node, function)
        if node.fields["isDistinct"] and kind not in ("min", "max"):
            if kind != "count" or value is None or len(function.children) > 1:
                raise _refused(node, "DISTINCT is for the count of one column")
            kind = "count_distinct"
        if (kind == "sum" and function.mode() == "try") or (kind == "mean" and function.mode() == "try"):
            raise _refused(node, "a sum that does not fit is an error there; cast the column to a wider type first")
        name = "*" if value is None else ", ".join(_shown(each) for each in function.children)
        for each in conditions:
            condition = Translator(self._attributes).translate(each)
            value = Literal(True, BOOLEAN) if value is None else value
            value = Case(((condition, value),), Literal(None, value.type), value.type)
            name += f" where {_shown(each)}"
        column = None if value is None else self._column(value, name)
        measure = Measure(kind, None if column is None else column.name)
        type_ = self._result_type(node, measure, column)
        for name, known in self._measures.items():
            if known == measure:
                return Column(name, type_)
        name = _free(wanted, self._names)
        self._names.add(name.lower())
        self._measures[name] = measure
        return Column(name, type_)

    def _value(self, node: Node, function: Node) -> Expression | None:
        """Return the expression that is aggregated; None: rows are counted."""
        values = Translator(self._attributes).all(function)
        if function.name != "Count":
            return values[0]
        values = [each for each in values if not isinstance(each, Literal) or each.value is None]
        if len(values) < 2:
            return values[0] if values else None
        there = [FunctionCall("is_not_null", (each,), BOOLEAN) for each in values]
        condition: Expression = there[0]
        for each in there[1:]:
            condition = And(condition, each)
        return Case(((condition, Literal(True, BOOLEAN)),), Literal(None, BOOLEAN), BOOLEAN)

    def _result_type(self, node: Node, measure: Measure, column: Column | None) -> pa.DataType:
        try:
            return accumulator(measure.kind, measure.column, None if column is None else column.type).result_type
        except ColumnTypeError as error:
            raise _refused(node, str(error)) from error


class _Around(Translator):
    """A translation of the columns of the result, over keys and measures."""

    def __init__(self, resolution: _Resolution) -> None:
        super().__init__({})
        self._resolution = resolution
        self._wanted: str | None = None

    def translate(self, node: Node) -> Expression:
        if node.name == "AggregateExpression":
            return self._resolution.measure(node, self._wanted or node.sql())
        key = self._resolution.key_of(node)
        if key is not None:
            return key
        own = node.name == "Alias" and node.children[0].name == "AggregateExpression"
        self._wanted = str(node.fields["name"]) if own else None
        return super().translate(node)


def _body(node: Node) -> Node:
    """Return the expression of a column of the result."""
    return node.children[0] if node.name == "Alias" else node


def _shown(node: Node) -> str:
    """Return the SQL of a node, without parentheses around it."""
    sql = node.sql()
    return sql[1:-1] if sql.startswith("(") and sql.find(")") == len(sql) - 1 else sql


def _replacement(function: Node) -> Node:
    java = function.java.replacement()
    return tree_of(json.loads(java.toJSON()), lambda: java)


def _walk(node: Node) -> Iterator[Node]:
    yield node
    for each in node.children:
        yield from _walk(each)


def _free(wanted: str, taken: set[str]) -> str:
    """Return the wanted name, with a number behind it if it is taken. ``taken`` has names in lower case."""
    name, number = wanted, 2
    while name.lower() in taken:
        name, number = f"{wanted} {number}", number + 1
    return name


def _changes_nothing(steps: RowSteps) -> bool:
    """Tell whether rows pass with the same columns, some of which may be left out. Times are the same in whatever zone they are
    shown."""
    types = {field.name: _in_utc(field.type) for field in steps.schema}
    return all(
        isinstance(step, Select)
        and all(column == Column(name, types[name]) for name, column in step.outputs if name in types)
        and all(name in types for name, _ in step.outputs)
        for step in steps.chain
    ) and all(types.get(field.name) == _in_utc(field.type) for field in steps.output)


def _in_utc(type_: pa.DataType) -> pa.DataType:
    """Return the type that an expression has for a column of this type."""
    return CLOCK_TYPE if pa.types.is_timestamp(type_) and type_.unit == "us" and type_.tz is not None else type_


def _in_zone(field: pa.Field, zone: str) -> pa.Field:
    """Return a field whose times are in a zone, as those of a session are."""
    return field.with_type(pa.timestamp("us", zone)) if field.type == CLOCK_TYPE else field


def _same_columns(one: pa.Schema, other: pa.Schema) -> bool:
    return bool(one.names == other.names and one.types == other.types)


def _refused(node: Node, reason: str) -> UsageError:
    return UsageError(f"{node.sql()} cannot be computed of groups: {reason}. {REMEDY}")
