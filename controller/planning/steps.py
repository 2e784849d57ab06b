"""Conditions and columns in a plan: the steps that Spark makes of them, and those of functions of the user's. ``Resolvers`` are
all functions that make plans of declarations."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any, NamedTuple

import pyarrow as pa

from controller.planning.names import check_cases, check_names, place_of_errors
from controller.planning.relations.joins import ToJoin, ToTable
from flux.dataflow.grouping import Grouping, ResolvedGrouping
from flux.dataflow.relations.join_flow import Frame
from flux.dataflow.relations.ranking import ToOrder
from flux.dataflow.row_flow import Applied
from flux.dataflow.row_operators import RowOperator
from flux.errors import UsageError
from flux.expressions.steps import MapRows, RowSteps
from flux.operators.plain_columns import plain_schema
from flux.operators.row_function import RowFunction

#: A function from a declared schema (DDL, StructType, pyarrow) to a pyarrow schema.
ToArrow = Callable[[Any], pa.Schema]
#: A function from the schema of rows, and the operators that a user has put behind them, to the steps that these are.
ToSteps = Callable[[pa.Schema, Callable[[Any], Any]], RowSteps]


#: A function from the schema of rows, a grouping of them, and their aliases, to the grouping as workers compute it.
ToGroups = Callable[[pa.Schema, Grouping, Frame | None], ResolvedGrouping]


class Resolvers(NamedTuple):
    """Functions that make plans of declarations. None: there is no session, which resolves them."""

    to_arrow: ToArrow
    to_steps: ToSteps | None = None
    to_groups: ToGroups | None = None
    to_order: ToOrder | None = None
    to_join: ToJoin | None = None
    to_table: ToTable | None = None
    #: Whether columns are found by their exact name only.
    case_sensitive: bool = False


class PlanSteps:
    """The resolver of conditions and columns of a plan that is being compiled."""

    def __init__(self, resolvers: Resolvers) -> None:
        self._to_arrow, self._to_steps = resolvers.to_arrow, resolvers.to_steps
        self._case_sensitive = resolvers.case_sensitive

    def behind(self, schema: pa.Schema, operators: tuple[RowOperator, ...], where: str) -> RowSteps | None:
        """Return the steps of conditions and columns behind rows of a schema; None: there are none, or they change nothing."""
        steps: RowSteps | None = None
        for of_users, some in groupby(operators, lambda each: each.name == "mapInArrow"):
            for part in [(each,) for each in some] if of_users else [tuple(some)]:
                before = schema if steps is None else steps.output
                made = (self._row_function if of_users else self._resolved)(before, part, where)
                steps = made if steps is None else steps.then(made)
        return steps if steps is not None and steps.chain else None

    def _resolved(self, schema: pa.Schema, operators: tuple[RowOperator, ...], where: str) -> RowSteps:
        """Let Spark resolve conditions and columns."""
        check_names(schema, where)
        if self._to_steps is None:
            raise UsageError(f"conditions and columns behind {where} are resolved by Spark, and there is no session")
        with place_of_errors(where):
            steps = self._to_steps(schema, Applied(operators))
        self.check_output(steps.output, f"{where}, {operators[-1].name}()")
        return steps

    def _row_function(self, schema: pa.Schema, operators: tuple[RowOperator, ...], where: str) -> RowSteps:
        """Return the step of a function of the user's."""
        ((function, declared),) = (each.arguments for each in operators)
        check_names(schema, where)
        output = plain_schema(self._to_arrow(declared), f"{where}, mapInArrow()")
        self.check_output(output, f"{where}, mapInArrow()")
        return RowSteps.of(schema, (MapRows(RowFunction(function, output), schema, output),), output)

    def check_output(self, output: pa.Schema, what: str) -> None:
        """Raise SchemaError if columns have names that Spark does not tell apart."""
        check_names(output, what)
        if not self._case_sensitive:
            check_cases(output, what)
