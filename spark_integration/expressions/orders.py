"""Orders of rows in the language of ORDER BY, resolved by Spark's analyser (design: ranks).

An empty DataFrame with the columns of the flow gets a ROW_NUMBER over the order. Spark's plan has the order above projections,
which compute its expressions: these become columns of the steps in front.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import Window as SparkWindow
from pyspark.sql import functions as F  # noqa: N812

from flux.dataflow.relations.ranking import ResolvedOrder
from flux.errors import UsageError
from flux.expressions.steps import RowSteps, Select
from flux.expressions.tree import Column, Expression
from flux.ranks.top import OrderColumn
from spark_integration.expressions.analysed_operators import (
    AnalysedPlan,
    chain_below,
    check_policy,
    empty,
    sparks_errors,
)
from spark_integration.expressions.classes import Translator

#: The names of columns that only the order has, with a number behind.
COMPUTED = "_flux_by_"


def order_of(spark: SparkSession, schema: pa.Schema, by: Any, rows: DataFrame | None = None) -> ResolvedOrder:
    """Return an order of rows of a schema. UsageError has the words of Spark for a name or a text that is wrong. ``rows``: a
    DataFrame without rows, with the aliases by which columns may be called; None: their names say all."""
    with sparks_errors(schema):
        numbered = (empty(spark, schema) if rows is None else rows).select("*", _row_number(by).alias("_flux_row"))
        plan = AnalysedPlan(numbered._jdf.queryExecution().analyzed())
    if "Window" not in plan.names:
        raise UsageError(f"by={by!r:.200} is no order of rows")
    level = plan.names.index("Window")
    nodes = plan.expressions(level, "orderSpec")
    chain, attributes = chain_below(plan, schema, level + 1)
    check_policy(spark, chain)
    found: list[OrderColumn] = []
    computed: list[tuple[str, Expression]] = []
    columns = {field.name for field in schema}
    translator = Translator(attributes)
    for node in nodes:
        expression = translator.translate(node.children[0])
        name = expression.name if isinstance(expression, Column) else ""
        if name not in columns:
            name = f"{COMPUTED}{len(computed)}"
            computed.append((name, expression))
        descending, nulls_last = ("Desc" in str(node.fields["direction"]), "Last" in str(node.fields["nullOrdering"]))
        found.append(OrderColumn(name, descending, nulls_last))
    if not computed:
        return ResolvedOrder(None, tuple(found))
    own = tuple((field.name, Column(field.name, field.type)) for field in schema)
    added = pa.schema([*schema, *(pa.field(name, each.type) for name, each in computed)])
    return ResolvedOrder(RowSteps.of(schema, (*chain, Select((*own, *computed))), added), tuple(found))


def _row_number(by: Any) -> SparkColumn:
    listed = by if isinstance(by, list | tuple) else [by]
    if all(isinstance(each, str) for each in listed):
        return F.expr(f"ROW_NUMBER() OVER (ORDER BY {', '.join(listed)})")
    wrong = [each for each in listed if not isinstance(each, str | SparkColumn)]
    if wrong:
        raise UsageError(
            f"by: expected text, as in 'price DESC, ts', or Columns, as in F.desc('price'); got {type(wrong[0]).__name__} "
            f"{wrong[0]!r:.100}"
        )
    return F.row_number().over(SparkWindow.orderBy(*listed))
