"""Conditions and columns of a flow or a source, under the names that a DataFrame has for them (design: steps-of-edges)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import flux
from flux.arguments import checked

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from flux.dataflow.flow import RowFlow


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


class RowOperators:
    """Methods of flows and sources that give at most one row for each row.

    Names, types and casts are resolved by Spark: where a session is active, at the call, and again when the query starts, by the
    settings that the session has then. Values are Spark's, computed on Arrow in the workers. They cost no exchange."""

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

    def _then(self, name: str, *arguments: Any) -> RowFlow:
        made = self._with_operator(RowOperator(name, arguments))
        flux._check_columns(made)
        return made

    def _with_operator(self, operator: RowOperator) -> RowFlow:
        from flux.dataflow.flow import RowFlow

        return RowFlow(self, (operator,))  # type: ignore[arg-type]
