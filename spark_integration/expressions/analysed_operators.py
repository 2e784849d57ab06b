"""Operators of a DataFrame, analysed by Spark, as steps.

An empty DataFrame with the columns of a flow takes the operators that a user has written, and Spark's analyser
resolves names, types, casts, ANSI mode and time zone. The result is a chain of projections and filters, which
becomes a chain of steps. Nothing runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.errors import AnalysisException, ParseException, PySparkTypeError, PySparkValueError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructField, StructType

from controller.planning.names import free_names
from flux.dataflow.relations.join_flow import Frame
from flux.errors import SchemaError, UsageError
from flux.expressions.steps import RowStep, RowSteps, Select, Where
from flux.expressions.tree import Column, Expression, FunctionCall
from spark_integration.expressions.classes import Translator
from spark_integration.expressions.nodes import REMEDY, Node, arrow_type, tree_of
from spark_integration.jvm import frame_of, of_jvm, without_rows
from spark_integration.schema import for_spark, struct_to_arrow, to_arrow
from spark_integration.settings import is_case_sensitive

#: Operators that change neither rows nor columns.
_NAMES_ONLY = ("SubqueryAlias", "ResolvedHint", "UnresolvedHint")
_OTHERS = {
    "Generate": "explode and the like give several rows for a row",
    "Window": "window functions look at several rows",
    "Aggregate": "aggregates look at several rows, as flow.groupBy(...).agg(...) does",
    "Sort": "rows are not sorted there",
    "Deduplicate": "that takes several rows into account",
}


def empty(spark: SparkSession, schema: pa.Schema, name: str | None = None) -> DataFrame:
    """Return a DataFrame with the columns of a flow, and no rows."""
    found = without_rows(spark, for_spark(schema, "the flow")[0])
    return found if name is None else found.alias(name)


def empty_like(spark: SparkSession, given: pa.Schema | DataFrame) -> DataFrame:
    """Return a DataFrame without rows, with the columns of a flow, or those and the alias of a DataFrame."""
    if isinstance(given, pa.Schema):
        return empty(spark, given)
    output = given._jdf.queryExecution().analyzed().output()
    qualified = {str(output.apply(at).qualifier().mkString("\0")) for at in range(output.size())}
    alias = qualified.pop().rsplit("\0", 1)[-1] if len(qualified) == 1 else ""
    return empty(spark, to_arrow(spark, given), alias or None)


def with_aliases(spark: SparkSession, frame: Frame) -> DataFrame:
    """Return a DataFrame without rows, with the columns of a flow and the aliases by which they may be called: a relation of its
    own, whatever joins and operators made them."""
    output: Any = frame(partial(empty_like, spark))._jdf.queryExecution().analyzed().output()
    relations = of_jvm(spark, "org.apache.spark.sql.catalyst.plans.logical.LocalRelation$.MODULE$")
    return frame_of(spark, relations.apply(output))


def steps_of(
    spark: SparkSession, schema: pa.Schema, operators: Callable[[DataFrame], DataFrame], name: str | None = None
) -> RowSteps:
    """Return the steps that ``operators`` - select, where, withColumn and the like of a DataFrame - make of rows of a
    schema.

    ``name`` is an alias of the flow. UsageError has the words of Spark for a name or type that is wrong, and
    names an expression without a kernel.
    """
    with sparks_errors(schema):
        df = operators(empty(spark, schema, name))
        plan = df._jdf.queryExecution().analyzed()
    chain, _ = chain_below(AnalysedPlan(plan), schema)
    check_policy(spark, chain)
    output = (
        struct_to_arrow(df.schema, session_zone(spark)) if any(isinstance(each, Select) for each in chain) else schema
    )
    return RowSteps.of(schema, chain, output)


@contextmanager
def sparks_errors(schema: pa.Schema) -> Iterator[None]:
    """Make UsageErrors of the errors of Spark's analyser."""
    try:
        yield
    except (AnalysisException, ParseException, PySparkTypeError, PySparkValueError) as error:
        raise as_usage_error(error, schema) from error


def session_zone(spark: SparkSession) -> str:
    """Return the time zone of a session."""
    return spark.conf.get("spark.sql.session.timeZone") or "UTC"


def check_policy(spark: SparkSession, chain: Sequence[RowStep]) -> None:
    """Raise UsageError if patterns of times are those of Java before version 8."""
    used = {each.function for step in chain for each in calls(step)}
    policy = "spark.sql.legacy.timeParserPolicy"
    if used & {"format_time", "format_seconds", "parse_time"} and str(spark.conf.get(policy)).upper() == "LEGACY":
        raise UsageError(
            f"patterns of times cannot be computed where rows are read with {policy}=LEGACY, which has those of an older "
            f"Java. Set it to CORRECTED, or: {REMEDY[0].lower()}{REMEDY[1:]}"
        )


def calls(step: RowStep) -> Iterator[FunctionCall]:
    """Yield the functions that a row step calls."""
    roots = [step.condition] if isinstance(step, Where) else [each for _, each in getattr(step, "outputs", ())]
    for root in roots:
        yield from (each for each in root.walk() if isinstance(each, FunctionCall))


def as_usage_error(error: Exception, schema: pa.Schema) -> UsageError:
    """Return Spark's message without its plan, with the columns there are where a name is unknown."""
    text = str(error).split(";\n")[0].split("\n\nJVM stacktrace")[0].strip()
    if "AMBIGUOUS_REFERENCE" in text:
        text = (
            f"{text.rstrip('.')}. Tell both sides of a join apart by alias, as in "
            "clicks.alias('c').join(views.alias('v'), F.expr('c.ad = v.ad')).select('c.ad'). Attributes of flows behind alias do "
            "so, too: c, v = clicks.alias('c'), views.alias('v'), and c.ad == v.ad"
        )
    if "UNRESOLVED_USING_COLUMN_FOR_JOIN" in text:
        text = (
            f"{text.rstrip('.')}. A text in join() is the name of a column that both sides have. A condition is a Column: "
            "F.expr('c.ad = v.ad')"
        )
    if "UNRESOLVED_COLUMN" in text or "FIELD_NOT_FOUND" in text or "AMBIGUOUS" in text:
        struct, _ = for_spark(schema, "the flow")
        columns = (f"{each.name} {each.dataType.simpleString().upper()}" for each in struct)
        return SchemaError(f"{text.rstrip('.')}. There are {', '.join(columns)}")
    return UsageError(text)


class AnalysedPlan:
    """The operators of an analysed plan from the last one down, each with one below it, read in one call."""

    def __init__(self, plan: Any) -> None:
        self._plan = plan
        #: The fields of each operator. Plans of subqueries are listed behind.
        self.levels = _down_to_leaf(json.loads(plan.toJSON()))
        self.names = [str(each["class"]).rsplit(".", 1)[-1] for each in self.levels]

    def expressions(self, level: int, name: str) -> list[Node]:
        """Return the roots of the trees that a field of an operator lists."""
        listed = self.levels[level][name]
        return [tree_of(each, self._part(level, name, number)) for number, each in enumerate(listed)]

    def condition(self, level: int) -> Node:
        """Return the root of the condition of a filter."""
        return tree_of(self.levels[level]["condition"], self._part(level, "condition"))

    def attribute_ids(self) -> list[int]:
        """Return Spark's ids of the columns of the lowest operator. That of an empty DataFrame lists them."""
        listed = self.levels[-1].get("output")
        if listed is None:
            return ids_of(self.leaf().output())
        return [int(each[0]["exprId"]["id"]) for each in listed]

    def leaf(self) -> Any:
        """Return Spark's lowest operator: that of a join has two below it."""
        return self._below(len(self.levels) - 1)

    def _part(self, level: int, name: str, number: int | None = None) -> Callable[[], Any]:
        def fetch() -> Any:
            part = getattr(self._below(level), name)()
            return part if number is None else part.apply(number)

        return fetch

    def _below(self, level: int) -> Any:
        """Return Spark's operator at a level, the topmost being 0. ``apply`` would count plans of subqueries, too."""
        plan = self._plan
        for _ in range(level):
            plan = plan.child()
        return plan


def ids_of(output: Any) -> list[int]:
    """Return Spark's ids of the columns of an operator."""
    listed = [str(output.apply(at).toJSON()) for at in range(output.size())]
    return [int(json.loads(each)[0]["exprId"]["id"]) for each in listed]


def _down_to_leaf(levels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for at, level in enumerate(levels):
        if level["num-children"] != 1:
            return levels[: at + 1]
    return levels


def chain_below(
    plan: AnalysedPlan, schema: pa.Schema, top: int = 0, join: bool = False
) -> tuple[list[RowStep], dict[int, Expression]]:
    """Return the steps of the operators from level ``top`` down, the first step first, and the expressions of the columns
    that they give, by Spark's ids. ``join``: the lowest operator is a join, whose columns are those of ``schema``."""
    below = len(plan.levels) - join
    for name, level in zip(plan.names[top:below], plan.levels[top:below], strict=True):
        if name not in ("Project", "Filter", *_NAMES_ONLY) and level["num-children"]:
            reason = _OTHERS.get(name, "only columns and conditions of a row are")
            raise UsageError(
                f"{name} cannot be computed where rows are read: {reason}. "
                "Use a stage, or compute it before the rows come to Flux"
            )
    attributes: dict[int, Expression] = {
        id_: Column(field.name, arrow_type(struct.dataType))
        for id_, field, struct in zip(plan.attribute_ids(), schema, for_spark(schema, "the flow")[0], strict=True)
    }
    chain: list[RowStep] = []
    for at in range(len(plan.levels) - 2, top - 1, -1):
        translator = Translator(attributes)
        if plan.names[at] == "Filter":
            chain.append(Where(translator.translate(plan.condition(at))))
        elif plan.names[at] == "Project":
            columns: list[tuple[str, Expression]] = []
            then: dict[int, Expression] = {}
            for node in plan.expressions(at, "projectList"):
                expression = translator.translate(node)
                column, number = str(node.fields["name"]), 2
                while any(column == known for known, _ in columns):  # told apart by aliases, as columns of joins are
                    column, number = f"{node.fields['name']} {number}", number + 1
                columns.append((column, expression))
                then[node.expression_id()] = Column(column, expression.type)
            chain.append(Select(tuple(columns)))
            attributes = then
    return chain, attributes


def steps_behind(
    spark: SparkSession, plan: AnalysedPlan, given: pa.Schema, result: DataFrame
) -> tuple[RowSteps | None, str | None]:
    """Return the steps behind a join, and a name that several columns have in Spark. ``given``: the columns of the join."""
    chain, _ = chain_below(plan, given, join=True)
    check_policy(spark, chain)
    struct = result.schema
    plain = [name if is_case_sensitive(spark) else name.lower() for name in struct.names]
    twice = next((name for name, each in zip(struct.names, plain, strict=True) if plain.count(each) > 1), None)
    selects = [step for step in chain if isinstance(step, Select)]
    made = selects[-1].outputs if selects else tuple((each.name, Column(each.name, each.type)) for each in given)
    inner = [name for name, _ in made]
    names = list(struct.names) if twice is None else free_names(inner, [])
    if names == inner and not selects:
        return (RowSteps.of(given, chain, given) if chain else None), twice
    if names != inner:
        columns = [Column(name, expression.type) for name, expression in made]
        chain = [*chain, Select(tuple(zip(names, columns, strict=True)))]
    fields = [StructField(name, each.dataType, each.nullable) for name, each in zip(names, struct, strict=True)]
    return RowSteps.of(given, chain, struct_to_arrow(StructType(fields), session_zone(spark))), twice
