"""Flows in the order of a plan, and the inputs of a stage that is being compiled: rows of a source or a stage behind steps."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

import pyarrow as pa

from flux.dataflow.flow import Flow
from flux.dataflow.plan import (
    DataFrameSourcePlan,
    SourcePlan,
    StagePlan,
    StreamSourcePlan,
    Timed,
    WorkerSourcePlan,
)
from flux.dataflow.relations.lookups import VERSION, LookupSource
from flux.dataflow.sink import Sink
from flux.dataflow.source import Source, StreamSource, WorkerSource
from flux.errors import SchemaError, UsageError
from flux.expressions.steps import RowSteps
from flux.operators.operator import Operator
from flux.operators.user_code import text_of
from flux.settings import Settings

SAY_SCHEMA = "@flux.stage(..., schema='user BIGINT, amount DOUBLE')"


def topological(flows: Sequence[Flow], running: Container[int] = ()) -> list[Flow]:
    """Return every stage that the flows need, each after all of its inputs; nothing is needed before ``running`` flows, which are
    left out. UsageError names the stages of a cycle."""
    order: list[Flow] = []
    done: set[int] = set()
    path: list[Flow] = []

    def visit(flow: Flow) -> None:
        if id(flow) in done or id(flow) in running:
            return
        if any(flow is above for above in path):
            names = [above.stage.name for above in path[[id(a) for a in path].index(id(flow)) :]]
            raise UsageError(
                f"the flow has a cycle: {' -> '.join([*reversed(names), names[-1]])}; a dataflow must be acyclic"
            )
        path.append(flow)
        for given in flow.inputs:
            if isinstance(given, Flow):
                visit(given)
        path.pop()
        done.add(id(flow))
        order.append(flow)

    for flow in flows:
        visit(flow)
    return order


class PlanInput(NamedTuple):
    """The rows of an input: those of an origin, through steps if there are any."""

    origin: SourcePlan | StagePlan
    schema: pa.Schema
    steps: RowSteps | None = None
    #: The rows of a source that these are.
    timed: Timed = Timed.ALL

    def through(self, columns: Sequence[int] | None) -> tuple[pa.Schema, tuple[int, ...] | None, RowSteps | None]:
        """Return the schema of these columns alone, the columns of the origin that they need (None: all of them), and the steps
        that make them. ``columns``: None for all."""
        return in_part(self.schema, self.steps, columns)

    def behind(self, steps: RowSteps | None) -> PlanInput:
        """Return the rows with steps behind them; None: there are none."""
        if steps is None or not steps.chain:
            return self
        return self._replace(schema=steps.output, steps=steps if self.steps is None else self.steps.then(steps))


class Operation(NamedTuple):
    """The work of a stage, and its inputs."""

    make: Callable[[], Operator]
    #: By input, the names of the key columns.
    keys: list[tuple[str, ...]]
    inputs: list[PlanInput]


def in_part(
    schema: pa.Schema, steps: RowSteps | None, columns: Sequence[int] | None
) -> tuple[pa.Schema, tuple[int, ...] | None, RowSteps | None]:
    """Return the schema of some columns of rows behind steps, the columns of the origin that they need, and the steps that make
    them alone. None stands for all columns, and for no steps."""
    if steps is None:
        return *some_of(schema, None if columns is None else tuple(columns)), None
    steps = steps if columns is None else steps.only([schema.names[at] for at in columns])
    needs = tuple(map(steps.schema.names.index, steps.needs()))
    return steps.output, None if len(needs) == len(steps.schema) else needs, steps


def places_among(read: Sequence[int], columns: Sequence[int] | None) -> tuple[int, ...] | None:
    """Return the places of columns among those that are read; None: all of these, in order."""
    if columns is None or list(columns) == list(read):
        return None
    return tuple(list(read).index(column) for column in columns)


def some_of(schema: pa.Schema, columns: tuple[int, ...] | None) -> tuple[pa.Schema, tuple[int, ...] | None]:
    """Return the schema of these columns, and the columns; None: all of them."""
    if columns is None or len(columns) == len(schema):
        return schema, None
    return pa.schema([schema.field(column) for column in columns]), columns


def source_plan(given: Source, number: int, name: str, schema: pa.Schema, began_with: int | None) -> SourcePlan:
    """Return the plan of a source. ``began_with``: its partitions when the query was started for the first time; None: it is
    new."""
    if isinstance(given, LookupSource):
        return StreamSourcePlan(number, name, schema.append(VERSION), endless=False, refresh_us=given.refresh_us)
    if isinstance(given, StreamSource):
        ends = given.dataframe is not None and ("availableNow", True) in given.how.trigger
        return StreamSourcePlan(number, name, schema, endless=not ends, written=given.dataframe is None)
    if not isinstance(given, WorkerSource):
        return DataFrameSourcePlan(number, name, schema)
    keeps = given.reader.keeps_partitions and began_with is not None
    return WorkerSourcePlan(
        number, name, schema, began_with if keeps and began_with else given.partitions, given.reader
    )


def check_sink(stage: StagePlan, sink: Sink, settings: Settings) -> pa.Schema:
    """Return the columns that a sink of a stage gets. SchemaError, UsageError: its output cannot go there."""
    schema, most = stage.output_schema, settings.sink_max_bytes
    if schema is None:
        raise UsageError(
            f"stage {stage.name} has no output for a sink: it declares no schema. If its operator gives rows, say "
            f"what they are: {SAY_SCHEMA}"
        )
    try:
        sink.check(schema)
    except (Exception, SystemExit) as error:
        kind = UsageError if type(error) is UsageError else SchemaError
        raise kind(f"stage {stage.name}: its output cannot go to {text_of(sink, repr)}: {text_of(error)}") from error
    holds = sink.traits.holds_bytes
    if holds and holds + 2 * settings.batch_max_bytes > most:
        raise UsageError(
            f"sink {text_of(sink, repr)} collects up to {holds:,} bytes before it writes; with two batches of "
            f"spark.flux.batch.maxBytes that is more than spark.flux.sink.maxBytes, {most:,}. Make one of them smaller, or "
            "the last one larger"
        )
    if not settings.ordered:
        raise UsageError("a sink needs spark.flux.replicas.ordered=true: replicas that drift apart give other output")
    return schema
