"""Tables in every worker: the steps of an edge that look up rows in them (design: lookup)."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from controller.planning.names import free_names
from flux.dataflow.relations.joining import ResolvedJoin
from flux.errors import UsageError
from flux.expressions.steps import MapRows, RowStep, RowSteps, Select, Where
from flux.expressions.tree import And, Case, Column, Expression, Literal
from flux.joins.join_spec import LEFT, RIGHT
from flux.joins.lookup import LookupTable

_BOOLEAN = pa.bool_()


def lookup_steps(resolved: ResolvedJoin, left: pa.Schema, rows: pa.Table, name: str) -> RowSteps:
    """Return the steps that look up rows in a table, with those behind the join. ``left``: the columns of the rows that come.
    UsageError: rows of the table have the same key, and which of them is meant makes a difference."""
    before = resolved.before[LEFT]
    given = left if before is None else before.output
    rows = _through(resolved.before[RIGHT], rows)
    table = _table(resolved, rows, name, given.names)
    behind = _behind(resolved, given, table)
    table = table.only(behind.needs())
    looked_up = MapRows(table, given, pa.schema([*given, *table.added]), table.read_by)
    return RowSteps.of(left, [*(() if before is None else before.chain), looked_up, *behind.chain], behind.output)


def _behind(resolved: ResolvedJoin, given: pa.Schema, table: LookupTable) -> RowSteps:
    """Return the steps behind a lookup. ``given``: the columns of the rows that look up."""
    spec = resolved.spec
    columns = [Column(field.name, field.type) for field in (*given, *table.added)]
    found: Expression = columns[-1]
    if spec.rest is not None:
        found = And(found, spec.rest.replaced({str(at): column for at, column in enumerate(columns[:-1])}))
    chain: list[RowStep] = []
    outputs: list[tuple[str, Expression]] = [(output, columns[at]) for output, at in spec.outputs]
    if spec.how in ("inner", "left_semi"):
        chain.append(Where(found))
    elif spec.how == "left_anti":
        chain.append(Where(Case(((found, Literal(False, _BOOLEAN)),), Literal(True, _BOOLEAN), _BOOLEAN)))
    elif spec.rest is not None:
        own = len(given)
        outputs = [(output, columns[at] if at < own else _if(found, columns[at])) for output, at in spec.outputs]
    steps = RowSteps.of(pa.schema([*given, *table.added]), [*chain, Select(tuple(outputs))])
    return steps if resolved.after is None else steps.then(resolved.after)


def _through(steps: RowSteps | None, rows: pa.Table) -> pa.Table:
    if steps is None:
        return rows
    return pa.Table.from_batches([steps.apply(batch) for batch in rows.to_batches()], steps.output)


def _table(resolved: ResolvedJoin, rows: pa.Table, name: str, taken: Sequence[str]) -> LookupTable:
    """Return the table. ``taken``: names of the columns that come."""
    spec = resolved.spec
    key = ", ".join(resolved.keys[RIGHT])
    names = free_names([*rows.column_names, "found"], taken)
    table = LookupTable(rows, spec.keys[RIGHT], names, resolved.keys[LEFT], f"{key} in table {name}")
    twice = table.first_twice()
    if twice is None:
        return table
    if spec.once and spec.rest is None:
        return table.unique()
    raise UsageError(
        f"join: several rows of the table {name} have {key} = {', '.join(map(repr, twice))}, and a row that looks it up would "
        "become several. Make the keys unique, as dropDuplicates() of the DataFrame does; or say ttl=None for a join that keeps "
        "rows of both sides, in a stage of its own"
    )


def _if(found: Expression, column: Column) -> Expression:
    return Case(((found, column),), Literal(None, column.type), column.type)
