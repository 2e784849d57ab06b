"""Tables in every worker: the steps of an edge that look up rows in them (design: lookup), and the operator of a table that is
read anew (design: refreshed-lookup)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pyarrow as pa

from controller.planning.inputs import PlanInput
from controller.planning.names import free_names
from flux.dataflow.plan import StreamSourcePlan
from flux.dataflow.relations.join_flow import ResolvedJoin
from flux.dataflow.relations.lookups import VERSION
from flux.errors import UsageError
from flux.expressions.steps import MapRows, RowStep, RowSteps, Select, Where
from flux.expressions.tree import And, Case, Column, Expression, Literal
from flux.joins.join_spec import LEFT, RIGHT
from flux.joins.lookup import LookupTable
from flux.joins.refreshed_lookup import RefreshedLookup, RefreshedSpec
from flux.operators.operator import Operator
from flux.windows.durations import words

_BOOLEAN = pa.bool_()
#: The answer to a table that is read anew and has another place.
TABLE_ALONE = (
    "flux.lookup(df, refresh=...) is the right side of a join: flow.join(flux.lookup(df, refresh='10 minutes'), 'key')"
)


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


def refreshed_lookup(
    resolved: ResolvedJoin, left: pa.Schema, rows: pa.Table, name: str, refresh_us: int
) -> Callable[[], RefreshedLookup]:
    """Return a factory of the operators of a lookup in a table that is read anew, whose first version has these rows, without
    the steps behind it. UsageError: as above."""
    before = resolved.before[LEFT]
    given = left if before is None else before.output
    table = _table(resolved, _through(resolved.before[RIGHT], rows), name, given.names)
    behind = _behind(replace(resolved, after=None), given, table)
    return partial(RefreshedLookup, RefreshedSpec(table, behind, words(refresh_us), not _takes_any(resolved)))


def check_tables(operator: Operator, inputs: Sequence[PlanInput]) -> None:
    """Check that each table that is read anew is the right side of a lookup. UsageError: it is another input of a stage."""
    for number, given in enumerate(inputs):
        is_table = isinstance(given.origin, StreamSourcePlan) and given.origin.refresh_us
        if is_table and not (isinstance(operator, RefreshedLookup) and number == RIGHT):
            raise UsageError(TABLE_ALONE)


def with_version(steps: RowSteps | None, schema: pa.Schema) -> RowSteps | None:
    """Return steps of a table that pass the number of the version on, the last column of ``schema``."""
    if steps is None:
        return None
    number = VERSION.name, Column(VERSION.name, VERSION.type)
    chain = [Select((*each.outputs, number)) if isinstance(each, Select) else each for each in steps.chain]
    return RowSteps.of(schema, chain, steps.output.append(VERSION))


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
    if _takes_any(resolved):
        return table.unique()
    raise UsageError(
        f"join: several rows of the table {name} have {key} = {', '.join(map(repr, twice))}, and a row that looks it up would "
        "become several. Make the keys unique, as dropDuplicates() of the DataFrame does; or say ttl=None for a join that keeps "
        "rows of both sides, in a stage of its own"
    )


def _takes_any(resolved: ResolvedJoin) -> bool:
    """Tell whether it makes no difference which of several rows with the same key is found."""
    return resolved.spec.once and resolved.spec.rest is None


def _if(found: Expression, column: Column) -> Expression:
    return Case(((found, column),), Literal(None, column.type), column.type)
