"""Conditions and columns of a flow or a source, under the names that a DataFrame has for them (design: steps-of-edges)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import flux
from flux.arguments import checked
from flux.errors import SchemaError, UsageError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType

    from flux.dataflow.flow import Flow
    from flux.dataflow.grouping import GroupedData
    from flux.dataflow.relations.ranking import RankFlow
    from flux.dataflow.row_flow import RowFlow, UnionFlow
    from flux.dataflow.source import Source
    from flux.operators.row_function import ArrowFunction


#: Rows of a flow: changes of rows that were given before; rows that are given when they are final; any others.
CHANGES, ONCE, AS_THEY_COME = "changes", "once", "as they come"


class Unsaid:
    """The value of an argument that was left out, where None has a meaning of its own."""

    def __repr__(self) -> str:
        return "unsaid"


UNSAID = Unsaid()


@dataclass(frozen=True)
class RowOperator:
    """A method of DataFrame, with its arguments."""

    name: str
    arguments: tuple[Any, ...]

    def of(self, dataframe: DataFrame) -> DataFrame:
        """Return a DataFrame with the operator behind it."""
        found: DataFrame = getattr(dataframe, self.name)(*self.arguments)
        return found

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(repr(each) for each in self.arguments)})"


class FlowSchema:
    """Properties of flows and sources that tell the columns of their rows. Each asks Spark, so they need a session."""

    @property
    def schema(self) -> StructType:
        """The columns of the rows, with their types in Spark."""
        return flux._schema(self)  # type: ignore[arg-type]

    @property
    def columns(self) -> list[str]:
        """The names of the columns, in their order."""
        return list(self.schema.names)

    @property
    def dtypes(self) -> list[tuple[str, str]]:
        """The names of the columns, each with its type in words."""
        return [(field.name, field.dataType.simpleString()) for field in self.schema.fields]

    def printSchema(self, level: int | None = None) -> None:  # noqa: N802
        """Print the columns as a tree, down to ``level``; None: to the leaves."""
        schema = self.schema
        print(schema.treeString() if level is None else schema.treeString(level))

    @property
    def isStreaming(self) -> bool:  # noqa: N802
        """Whether rows come from a source that never ends."""
        return flux._is_streaming(self)  # type: ignore[arg-type]


class RowOperators(FlowSchema):
    """Methods of flows and sources that give at most one row for each row.

    Names, types and casts are resolved by Spark: where a session is active, at the call, and again when the query starts, by the
    settings that the session has then. Values are Spark's, computed on Arrow in the workers. They cost no exchange."""

    @property
    def _gives(self) -> str:
        """The meaning of the rows: one of ``CHANGES``, ``ONCE`` and ``AS_THEY_COME``."""
        return AS_THEY_COME

    @checked("where")
    def where(self, condition: Column | str) -> RowFlow:
        """Keep the rows for which a condition is true: text of SQL, or a Column."""
        return self._then("where", condition)

    @checked("filter")
    def filter(self, condition: Column | str) -> RowFlow:
        """Keep the rows for which a condition is true: another name of ``where``."""
        return self._then("where", condition)

    @checked("select")
    def select(self, *cols: Any) -> RowFlow:
        """Give these columns: names, or Columns."""
        return self._then("select", *cols)

    @checked("selectExpr")
    def selectExpr(self, *expr: Any) -> RowFlow:  # noqa: N802
        """Give these columns, as texts of SQL."""
        return self._then("selectExpr", *expr)

    @checked("withColumn")
    def withColumn(self, colName: str, col: Column) -> RowFlow:  # noqa: N802, N803
        """Add a column, or replace the one of that name."""
        return self._then("withColumn", colName, col)

    @checked("withColumns")
    def withColumns(self, colsMap: Mapping[str, Column]) -> RowFlow:  # noqa: N802, N803
        """Add several columns, or replace those of these names."""
        return self._then("withColumns", dict(colsMap))

    @checked("withColumnRenamed")
    def withColumnRenamed(self, existing: str, new: str) -> RowFlow:  # noqa: N802
        """Give a column another name. Nothing changes if there is no such column, as in Spark."""
        return self._then("withColumnRenamed", existing, new)

    @checked("drop")
    def drop(self, *cols: Any) -> RowFlow:
        """Leave out columns. Names that are not there change nothing, as in Spark."""
        return self._then("drop", *cols)

    @checked("mapInArrow")
    def mapInArrow(self, func: ArrowFunction, schema: Any) -> RowFlow:  # noqa: N802
        """Give the rows that a function makes of batches: one for each row, in the same order, as for parsing in front of
        ``withWatermark``. More rows or fewer end the query; ``where`` leaves rows out, and a stage makes several of one.

        func    takes an iterator of batches and gives batches, as for DataFrames. Rows are cut into other batches when they are
                read again, so a row must be made of its own row alone, and the same each time
        schema  of the rows that it gives: DDL, StructType or pyarrow schema"""
        from flux.operators.row_function import check_row_function  # it loads Arrow, which the command does without

        check_row_function(func, schema)
        return self._then("mapInArrow", func, schema)

    @checked("union")
    def union(self, other: Flow | Source | DataFrame) -> UnionFlow:
        """Give the rows of this and another flow, source or DataFrame, also those that are equal. Columns are those of this one,
        by position, with the types that Spark gives a union. An aggregate behind it reads both; anything else gets a stage
        that passes their rows on. It has a watermark if both have."""
        from flux.dataflow.flow import node
        from flux.dataflow.row_flow import UnionFlow

        made = UnionFlow([self, node(other)])  # type: ignore[list-item]
        flux._check_columns(made)
        return made

    @checked("unionAll")
    def unionAll(self, other: Flow | Source | DataFrame) -> UnionFlow:  # noqa: N802
        """Give the rows of two flows: another name of ``union``."""
        return self.union(other)

    @checked("join")
    def join(
        self, other: Flow | Source | DataFrame, on: Any = None, how: str | None = None, ttl: Any = UNSAID
    ) -> RowFlow:
        """Join the rows of this flow, the left side, with those of another flow, source or DataFrame, the right side. Names,
        types and columns are those that Spark gives the join; rows of equal keys meet in one partition and wait there for each
        other.

        on   name of a column that both sides have, or a list of names: each is there once in the result. Or a condition: a
             Column, as in ``F.expr("c.ad = v.ad AND c.ts BETWEEN v.ts AND v.ts + INTERVAL 1 HOUR")``, with ``alias`` for both
             sides. Equalities are keys, and there is one at least. Comparisons of event times are bounds: a row is forgotten
             when the watermark of the other side has passed all that could match it
        how  "inner", "left", "right", "full", "left_semi" or "left_anti", in any spelling of PySpark. A row without a match comes
             once, when it is final
        ttl  where there are no bounds, to be said: such as "1 day". With event time on both sides, rows match if their times are
             at most a day apart, whichever side is faster; otherwise a row waits for a day, by the event time of its side or by
             the clock, and the rows that it meets depend on when they come. None: rows wait for ever"""
        from flux.dataflow.relations.join_flow import joined

        made = joined(self, other, on, how, ttl)  # type: ignore[arg-type]
        flux._check_columns(made)
        return made

    @checked("alias")
    def alias(self, alias: str) -> RowFlow:
        """Give the rows a name, by which expressions may call their columns, as in ``clicks.alias("c").where("c.ad = 3")``."""
        if not isinstance(alias, str) or not alias:
            raise UsageError(f"alias: expected a name, got {alias!r:.100}")
        return self._then("alias", alias)

    @checked("withWatermark")
    def withWatermark(  # noqa: N802
        self,
        eventTime: str,  # noqa: N803
        delayThreshold: str,  # noqa: N803
        idle: str | None = None,
        advance: bool = False,
        maxAhead: str | None = None,  # noqa: N803
        aheadOf: str | None = None,  # noqa: N803
    ) -> RowFlow:
        """Say which column has the times of rows, and how late a row may come. It stands where rows are read, behind conditions
        and columns at most: a source has one watermark in a query.

        A row is late if its time is below the greatest time of the rows before it in the same partition, less the delay: so the
        same rows are late in every run. Late rows are left out, and are the rows of ``late`` of the result. In a batch DataFrame
        no row is late, as in Spark; rows of a streaming DataFrame are judged by batches, as in Spark.

        eventTime       name of a column of times
        delayThreshold  such as "10 seconds"; "0 seconds" is allowed
        idle            a partition that has given nothing for this long, and has nothing to give, holds the watermark back no
                        longer. Default: it always does
        advance         the watermark of an idle partition goes on with the clock
        maxAhead        a time further than this above the newest one before it in its partition moves the watermark only when 100
                        rows in succession have such times. Default: each time moves it, and one from the future makes all rows
                        behind it late
        aheadOf         name of a column of times that are always right, such as "timestamp" of a Kafka record: maxAhead is
                        measured from it instead, row by row"""
        made = self._with_watermark(eventTime, delayThreshold, idle, advance, maxAhead, aheadOf)
        flux._check_columns(made)
        return made

    def _with_watermark(self, *arguments: Any) -> RowFlow:
        raise NotImplementedError

    def __getitem__(self, item: str) -> Column:
        """Return a column by its name, as of a DataFrame: ``flow["user"]``. An attribute of that name is the same where no method
        has it and a session knows the columns."""
        if not isinstance(item, str):
            raise UsageError(
                f"{self!r}[...] takes the name of a column, as in flow['user']; got {item!r:.100}. Rows come while a query runs: "
                "flow.collect() gives them where the input ends"
            )
        found = flux._column(self, item)  # type: ignore[arg-type]
        if found is None:
            raise SchemaError(f"{self!r} has no column {item!r}, or there is no session that knows its columns")
        return found

    #: Without it, Python would take rows by number.
    __iter__ = None

    def _column_or_error(self, name: str) -> Any:
        found = flux._column(self, name)  # type: ignore[arg-type]
        if found is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return found

    @checked("groupBy")
    def groupBy(self, *cols: Any) -> GroupedData:  # noqa: N802
        """Group rows by these columns: names, Columns, and at most one window, ``F.window`` or ``F.session_window``; without any,
        all rows are one group. ``agg`` gives one row for each group."""
        from flux.dataflow.grouping import GroupedData

        return GroupedData(self, cols)  # type: ignore[arg-type]

    @checked("groupby")
    def groupby(self, *cols: Any) -> GroupedData:
        """Group rows: another name of ``groupBy``."""
        return self.groupBy(*cols)

    @checked("agg")
    def agg(self, *exprs: Any) -> RowFlow:
        """Give one row for all rows, with these aggregates: ``groupBy().agg(...)``."""
        return self.groupBy().agg(*exprs)

    @checked("dropDuplicatesWithinWatermark")
    def dropDuplicatesWithinWatermark(self, subset: Any = None) -> RankFlow:  # noqa: N802
        """Leave out rows that repeat an earlier one: those with equal values in these columns, by default in all, and a time at
        most the delay of the watermark behind that of the row that was given. The row that comes first is given at once, with its
        event time: the same one in every run if rows of equal values come in one source partition. ``flux.dedup`` has a time of
        its own."""
        from flux.dataflow.relations.ranking import without_duplicates

        return without_duplicates(self, subset)  # type: ignore[arg-type]

    def _then(self, name: str, *arguments: Any) -> RowFlow:
        made = self._with_operator(RowOperator(name, arguments))
        flux._check_columns(made)
        return made

    def _with_operator(self, operator: RowOperator) -> RowFlow:
        from flux.dataflow.row_flow import RowFlow

        return RowFlow(self, (operator,))  # type: ignore[arg-type]


def gives_of_all(inputs: Sequence[Flow | Source]) -> str:
    """Return the meaning of rows that are passed on."""
    found = {given._gives for given in inputs}
    return CHANGES if CHANGES in found else ONCE if found == {ONCE} else AS_THEY_COME


_STEP = (
    "a stage does that, as in @flux.stage over def step(batch): return batch.{}, or do it in the DataFrame before it"
)
_WRITES = "flow.to_parquet(path) and flow.writeStream write its output"
_PARTS = "@flux.stage(partitions=...) says how many partitions a stage has, and key=... which rows go where"
#: Names of methods of DataFrames that a flow does not have, each with its replacement in Flux.
OF_DATAFRAMES: dict[str, str] = {
    **dict.fromkeys(
        ("dropDuplicates", "distinct"),
        "flow.dropDuplicatesWithinWatermark([...]) and flux.dedup(flow, key=..., ttl=...) leave out rows that have come before",
    ),
    **dict.fromkeys(("limit", "withColumnsRenamed"), _STEP.format("...")),
    **dict.fromkeys(("mapInPandas", "transform", "map"), _STEP.format("...")),
    **dict.fromkeys(
        ("rollup", "cube"), "flow.groupBy(...).agg(...) gives one row for each group; each grouping is a flow"
    ),
    "count": "flow.groupBy().count() gives the number of its rows as a flow, where the input ends",
    "crossJoin": "rows of flows have no end, and each would meet all others; flow.join(other, 'key') joins rows of equal keys",
    **dict.fromkeys(("unionByName",), "union() takes columns by position: choose them in the same order with select()"),
    **dict.fromkeys(
        ("orderBy", "sort"), "rows of a flow have no end to be sorted by; a stage may sort what it gives in finish()"
    ),
    **dict.fromkeys(("write", "writeTo"), _WRITES),
    **dict.fromkeys(
        ("foreach", "foreachPartition", "foreachBatch"), "flow.foreach_batch(function) calls a function for each batch"
    ),
    **dict.fromkeys(("repartition", "coalesce", "rdd"), _PARTS),
    **dict.fromkeys(
        ("toPandas", "toArrow", "take", "head", "first", "tail", "toLocalIterator"),
        "flow.collect() and flow.show() run it",
    ),
    **dict.fromkeys(("cache", "persist", "checkpoint"), "keep what toDF() returns to look at it twice"),
    **dict.fromkeys(("createTempView", "createOrReplaceTempView"), "only its output as a DataFrame has a name in SQL"),
    "late": "a source with a watermark has late rows, as in source.withWatermark('ts', '10 seconds').late",
}
