"""Operators of a DataFrame, analysed by Spark, as steps.

An empty DataFrame with the columns of a flow takes the operators that a user has written, and Spark's analyser
resolves names, types, casts, ANSI mode and time zone. The result is a chain of projections and filters, which
becomes a chain of steps. Nothing runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.errors import AnalysisException, ParseException, PySparkTypeError, PySparkValueError
from pyspark.sql import DataFrame, SparkSession

from flux.errors import SchemaError, UsageError
from flux.expressions.steps import RowStep, RowSteps, Select, Where
from flux.expressions.tree import Column, Expression, FunctionCall
from spark_integration.expressions.classes import Translator
from spark_integration.expressions.nodes import REMEDY, arrow_type, tree_of
from spark_integration.schema import for_spark, struct_to_arrow

#: Operators that change neither rows nor columns.
_NAMES_ONLY = ("SubqueryAlias", "ResolvedHint", "UnresolvedHint")
_OTHERS = {
    "Generate": "explode and the like give several rows for a row",
    "Window": "window functions look at several rows",
    "Aggregate": "aggregates look at several rows",
    "Sort": "rows are not sorted there",
    "Deduplicate": "that takes several rows into account",
}


def empty(spark: SparkSession, schema: pa.Schema, name: str | None = None) -> DataFrame:
    """Return a DataFrame with the columns of a flow, and no rows."""
    struct, _ = for_spark(schema, "the flow")
    jvm: Any = spark._jvm
    kind = jvm.org.apache.spark.sql.types.DataType.fromJson(struct.json())
    found = DataFrame(spark._jsparkSession.createDataFrame(jvm.java.util.ArrayList(), kind), spark)
    return found if name is None else found.alias(name)


def steps_of(
    spark: SparkSession, schema: pa.Schema, operators: Callable[[DataFrame], DataFrame], name: str | None = None
) -> RowSteps:
    """Return the steps that ``operators`` - select, where, withColumn and the like of a DataFrame - make of rows of a
    schema.

    ``name`` is an alias of the flow. UsageError has the words of Spark for a name or type that is wrong, and
    names an expression without a kernel.
    """
    try:
        df = operators(empty(spark, schema, name))
        plan = df._jdf.queryExecution().analyzed()
    except (AnalysisException, ParseException, PySparkTypeError, PySparkValueError) as error:
        raise as_usage_error(error, schema) from error
    zone = spark.conf.get("spark.sql.session.timeZone") or "UTC"
    chain = _chain(plan, schema)
    _check_policy(spark, chain)
    output = struct_to_arrow(df.schema, zone) if any(isinstance(each, Select) for each in chain) else schema
    return RowSteps.of(schema, chain, output)


def _check_policy(spark: SparkSession, chain: Sequence[RowStep]) -> None:
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
    roots = [step.condition] if isinstance(step, Where) else [each for _, each in step.outputs]
    for root in roots:
        yield from (each for each in root.walk() if isinstance(each, FunctionCall))


def as_usage_error(error: Exception, schema: pa.Schema) -> UsageError:
    """Return Spark's message without its plan, with the columns there are where a name is unknown."""
    text = str(error).split(";\n")[0].split("\n\nJVM stacktrace")[0].strip()
    if "UNRESOLVED_COLUMN" in text or "FIELD_NOT_FOUND" in text or "AMBIGUOUS" in text:
        struct, _ = for_spark(schema, "the flow")
        columns = (f"{each.name} {each.dataType.simpleString().upper()}" for each in struct)
        return SchemaError(f"{text.rstrip('.')}. There are {', '.join(columns)}")
    return UsageError(text)


def _chain(plan: Any, schema: pa.Schema) -> list[RowStep]:
    """Return the steps of a plan, the first one first."""
    levels = _down_to_leaf(json.loads(plan.toJSON()))
    names = [str(each["class"]).rsplit(".", 1)[-1] for each in levels]
    for each, level in zip(names, levels, strict=True):
        if each not in ("Project", "Filter", *_NAMES_ONLY) and level["num-children"]:
            reason = _OTHERS.get(each, "only columns and conditions of a row are")
            raise UsageError(
                f"{each} cannot be computed where rows are read: {reason}. "
                "Use a stage, or compute it before the rows come to Flux"
            )
    leaf = _below(plan, len(levels) - 1)
    ids = [int(json.loads(each)[0]["exprId"]["id"]) for each in _outputs(leaf)]
    attributes: dict[int, Expression] = {
        id_: Column(field.name, arrow_type(struct.dataType))
        for id_, field, struct in zip(ids, schema, for_spark(schema, "the flow")[0], strict=True)
    }
    chain: list[RowStep] = []
    for at in range(len(levels) - 2, -1, -1):
        translator = Translator(attributes)
        if names[at] == "Filter":
            chain.append(Where(translator.translate(tree_of(levels[at]["condition"], _part(plan, at, "condition")))))
        elif names[at] == "Project":
            columns = []
            then: dict[int, Expression] = {}
            for number, listed in enumerate(levels[at]["projectList"]):
                node = tree_of(listed, _part(plan, at, "projectList", number))
                expression = translator.translate(node)
                column = str(node.fields["name"])
                columns.append((column, expression))
                then[node.expression_id()] = Column(column, expression.type)
            chain.append(Select(tuple(columns)))
            attributes = then
    return chain


def _down_to_leaf(levels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the operators from the last one down, each with one below it. Plans of subqueries are listed behind."""
    for at, level in enumerate(levels):
        if level["num-children"] != 1:
            return levels[: at + 1]
    return levels


def _below(plan: Any, level: int) -> Any:
    """Return Spark's operator at a level, the topmost being 0. ``apply`` would count plans of subqueries, too."""
    for _ in range(level):
        plan = plan.child()
    return plan


def _outputs(leaf: Any) -> list[str]:
    output = leaf.output()
    return [str(output.apply(at).toJSON()) for at in range(output.size())]


def _part(plan: Any, level: int, name: str, number: int | None = None) -> Callable[[], Any]:
    def fetch() -> Any:
        part = getattr(_below(plan, level), name)()
        return part if number is None else part.apply(number)

    return fetch
