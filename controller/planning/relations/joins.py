"""Joins in a plan: both sides as Spark resolves them, and the steps in front of and behind the operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from controller.planning.event_time_edges import InputTime
from controller.planning.inputs import Operation, PlanInput
from controller.planning.names import check_names, place_of_errors
from controller.planning.parts import Nodes
from controller.planning.relations.lookups import lookup_steps, refreshed_lookup, with_version
from flux.dataflow.flow import Flow
from flux.dataflow.plan import StagePlan
from flux.dataflow.relations.join_flow import (
    FlowFrame,
    Frame,
    JoinFlow,
    Joining,
    JoinInput,
    LookupFlow,
    ResolvedJoin,
    name_of,
)
from flux.dataflow.relations.lookups import LookupSource, RefreshedFlow
from flux.dataflow.row_flow import Applied, RowFlow
from flux.dataflow.row_operators import RowOperator
from flux.dataflow.source import DataFrameSource, Source
from flux.errors import SchemaError, UsageError
from flux.expressions.steps import RowSteps
from flux.joins.join_spec import LEFT, RIGHT

#: A function from both sides of a join, its call, and operators behind it, to the join as workers compute it.
ToJoin = Callable[[JoinInput, JoinInput, Joining, Callable[[Any], Any]], ResolvedJoin]
#: A function from a join with a table to the rows of its DataFrame.
ToTable = Callable[[LookupFlow | RefreshedFlow], pa.Table]
#: A function from a declared schema (DDL, StructType, pyarrow) to a pyarrow schema.
ToArrow = Callable[[Any], pa.Schema]


class PlanTable(NamedTuple):
    """A table in every worker: the columns of its DataFrame, and the steps behind them; None: there are none."""

    schema: pa.Schema
    steps: RowSteps | None

    @property
    def output(self) -> pa.Schema:
        return self.schema if self.steps is None else self.steps.output


class PlanJoins:
    """The joins of a plan that is being compiled."""

    def __init__(
        self,
        to_join: ToJoin | None,
        to_table: ToTable | None,
        to_arrow: ToArrow,
        schema_of: Callable[[Flow | Source], pa.Schema],
        nodes: Nodes,
    ) -> None:
        """``schema_of``: the columns of a flow or a source that has no names of its own."""
        self._to_table = to_table
        self._to_join, self._to_arrow, self._schema_of, self._nodes = to_join, to_arrow, schema_of, nodes
        #: By join, its sides.
        self._sides: dict[int, tuple[JoinInput, JoinInput]] = {}

    def resolved(
        self, flow: JoinFlow, inputs: Sequence[PlanInput], times: Sequence[InputTime]
    ) -> tuple[Operation, RowSteps | None]:
        """Return the work of a join, and the steps behind it. ``times``: by side, the event time of its
        rows. UsageError has the words of Spark, or names a missing part."""
        if isinstance(flow, RefreshedFlow):
            return self._refreshed(flow, *inputs)
        sides = zip(flow.inputs, inputs, times, strict=True)
        left, right = (self._side(given, rows, time.columns) for given, rows, time in sides)
        self._sides[id(flow)] = left, right
        found = self.behind(flow, ())
        behind = [rows.behind(steps) for rows, steps in zip(inputs, found.before, strict=True)]
        return Operation(found.make, list(found.keys), behind), found.after

    def _refreshed(self, flow: RefreshedFlow, rows: PlanInput, table: PlanInput) -> tuple[Operation, RowSteps | None]:
        """Return the work of a lookup in a table that is read anew, and the steps behind it."""
        check_names(table.schema, f"stage {flow.stage.name}, table")
        columns = pa.schema(list(table.schema)[:-1])
        left = self._side(flow.inputs[0], rows, ())._replace(ends=True, delay=0)
        right = JoinInput(name_of(flow.table), columns, self.frame(flow.table), None, (), 0, True, flow.table)
        self._sides[id(flow)] = left, right
        found = self.behind(flow, ())
        first = _behind(None if self._to_table is None else self._to_table(flow), PlanTable(columns, None))
        with place_of_errors(f"stage {flow.stage.name}"):
            make = refreshed_lookup(found, rows.schema, first, right.name, flow.source.refresh_us)
        before = found.before[LEFT], with_version(found.before[RIGHT], table.schema)
        behind = [each.behind(steps) for each, steps in zip((rows, table), before, strict=True)]
        return Operation(make, list(found.keys), behind), found.after

    def _side(self, flow: Flow | Source, rows: PlanInput, times: tuple[str, ...]) -> JoinInput:
        origin = rows.origin
        check_names(rows.schema, f"{'stage' if isinstance(origin, StagePlan) else 'source'} {origin.name}")
        delay, ends = self._nodes.delay_of(origin), self._nodes.all_end(origin)
        return JoinInput(origin.name, rows.schema, self.frame(flow), rows.steps, times, delay, ends, flow)

    def behind(self, flow: JoinFlow, operators: Sequence[RowOperator]) -> ResolvedJoin:
        """Return a join with other operators behind it: they may call its columns by the names and aliases of both sides."""
        return self._resolved(flow, self._sides[id(flow)], operators)

    def _resolved(
        self, flow: JoinFlow | LookupFlow, sides: tuple[JoinInput, JoinInput], operators: Sequence[RowOperator]
    ) -> ResolvedJoin:
        where = f"stage {flow.stage.name}"
        if self._to_join is None:
            raise UsageError(f"{where}: the condition is resolved by Spark, and there is no session")
        with place_of_errors(where):
            return self._to_join(*sides, flow.joining, Applied(tuple(operators)))

    def looked_up(
        self, flow: LookupFlow, rows: PlanInput, table: PlanTable, operators: Sequence[RowOperator]
    ) -> tuple[PlanInput, ResolvedJoin]:
        """Return rows behind steps that look them up in a table, with operators behind them, and the join that they compute.
        Times are compared like other values, because a table has all its rows from the start. UsageError: a key is there
        twice."""
        check_names(table.output, f"stage {flow.stage.name}, table")
        left = self._side(flow.inputs[0], rows, ())._replace(ends=True, delay=0)
        right = JoinInput(name_of(flow.table), table.output, self.frame(flow.table), None, (), 0, True, flow.table)
        resolved = self._resolved(flow, (left, right), operators)
        found = None if self._to_table is None else self._to_table(flow)
        with place_of_errors(f"stage {flow.stage.name}"):
            steps = lookup_steps(resolved, rows.schema, _behind(found, table), right.name)
        return rows.behind(steps), resolved

    def aliases(self, given: Flow | Source, schema: pa.Schema) -> Frame | None:
        """Return a function that makes an empty DataFrame whose columns, those of ``schema``, may be called by the aliases of a
        flow; None: their names say all."""
        if not isinstance(given, RowFlow):
            return None
        operators, others = split(_operators(given))
        if not others and isinstance(given.inputs[0], JoinFlow | LookupFlow):
            return FlowFrame(given, self.frame(given))
        names = [each.arguments[0] for each in others or operators if each.name == "alias"]
        return FlowFrame(given, lambda empty: empty(schema).alias(names[-1])) if names else None

    def frame(self, given: Flow | Source) -> Frame:
        """Return the function that makes an empty DataFrame with the columns, names and aliases of a flow."""
        if isinstance(given, JoinFlow | LookupFlow):
            sides = given.inputs if isinstance(given, JoinFlow) else [given.inputs[0], given.table]
            left, right = map(self.frame, sides)
            return lambda empty: given.joining.of(left(empty), right(empty))
        if not isinstance(given, RowFlow):
            if isinstance(given, DataFrameSource | LookupSource):
                return lambda empty: empty(given.dataframe)  # which may have an alias
            schema = self._schema_of(given)
            return lambda empty: empty(schema)
        operators = _operators(given)
        for at in reversed(range(len(operators))):
            if operators[at].name == "mapInArrow":
                declared = self._to_arrow(operators[at].arguments[1])
                return lambda empty: Applied(operators[at + 1 :])(empty(declared))
        below = self.frame(given.inputs[0])
        return lambda empty: Applied(operators)(below(empty))


def _operators(flow: RowFlow) -> tuple[RowOperator, ...]:
    """Return all operators of a flow, also those in front of its watermark."""
    return (*(() if flow.watermark is None else flow.watermark.before), *flow.operators)


def _behind(rows: pa.Table | None, table: PlanTable) -> pa.Table:
    """Return the rows of a table behind its steps; none for None."""
    if rows is None:
        return table.output.empty_table()
    if table.steps is None:
        return rows
    batches = [table.steps.apply(batch) for batch in rows.to_batches()]
    return pa.Table.from_batches(batches, table.output)


def split(operators: tuple[RowOperator, ...]) -> tuple[tuple[RowOperator, ...], tuple[RowOperator, ...]]:
    """Return the operators in front of the first function of the user's, and the others."""
    for at, each in enumerate(operators):
        if each.name == "mapInArrow":
            return operators[:at], operators[at:]
    return operators, ()


def check_once(resolved: ResolvedJoin, where: str) -> None:
    """Raise SchemaError if several columns of a result have the same name: those behind find columns by their names."""
    if resolved.twice is not None:
        raise SchemaError(
            f"{where}: several columns are called {resolved.twice!r}; choose columns behind the join, as in select('c.ad', "
            "'v.ts') for clicks.alias('c') and views.alias('v'), or drop one of them, or join on='name', which gives it once"
        )
