"""Columns of a plan that something looks at: others are neither read, nor sent, nor kept by joins (design: columns-read).

A stage has said which columns of its inputs it reads when its edges were added. The columns that a join gives, and with them
those that travel to it and wait in it, are known when everything behind it is there: the walk goes from the last stage to the
sources. Operators that give columns on without a look at them are asked in the same walk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from controller.planning.event_time_edges import narrowed
from controller.planning.inputs import in_part, places_among, some_of
from controller.planning.parts import Parts
from flux.dataflow.flow import StepsOperator
from flux.dataflow.plan import (
    DataFrameSourcePlan,
    EdgePlan,
    EventTime,
    FromSource,
    FromStage,
    SourcePlan,
    StagePlan,
    StreamSourcePlan,
    Timed,
    WorkerSourcePlan,
)
from flux.joins.join import Join
from flux.operators.operator import Chain


def leave_out_columns(sources: Parts[SourcePlan], stages: Parts[StagePlan], edges: Parts[EdgePlan]) -> None:
    """Leave out columns of new parts of a plan at which nothing looks."""
    columns = _Columns(sources, stages, edges)
    for stage in reversed(stages.new):
        columns.narrow_join(stage)
        columns.narrow_given_on(stage)
    for source in sources.new:
        if source.event_time is not None and not _is_read_whole(source):
            columns.narrow_event_time(source, source.event_time)
    for source in sources.new:
        if isinstance(source, DataFrameSourcePlan) or (isinstance(source, StreamSourcePlan) and not source.written):
            columns.read_in_part(source)


def _is_read_whole(source: SourcePlan) -> bool:
    """Tell whether a reader in the workers gives whole rows, and nothing is computed before they are judged: then edges that are
    added later may look at any column, and one at which nothing looks costs nothing."""
    time = source.event_time
    return isinstance(source, WorkerSourcePlan) and time is not None and time.steps is None


class _Columns:
    """The columns of sources, stages and edges, which it replaces."""

    def __init__(self, sources: Parts[SourcePlan], stages: Parts[StagePlan], edges: Parts[EdgePlan]) -> None:
        self._sources, self._stages, self._edges = sources, stages, edges

    # ---- joins

    def narrow_join(self, stage: StagePlan) -> None:
        """Leave out columns of a join, and of the edges to it. A stage without a join stays as it is."""
        chain = stage.make if isinstance(stage.make, Chain) else None
        join = (stage.make if chain is None else chain.first)()
        if not isinstance(join, Join):
            return
        given = stage.output_schema if chain is None else chain.schema
        assert given is not None, "a join gives rows"
        wanted = self._given_on(stage) if chain is None else _read_by(chain)
        wanted = range(len(given)) if wanted is None else wanted
        spec, reads = join.spec.only(wanted, len(stage.schemas[0]))
        for number, edge, read in zip(stage.edges_in, map(self._edges.__getitem__, stage.edges_in), reads, strict=True):
            schema, columns, steps = in_part(edge.schema, edge.steps, read)
            key = tuple(read.index(at) for at in edge.key)
            self._edges[number] = replace(edge, schema=schema, columns=columns, steps=steps, key=key)
        schemas = tuple(self._edges[number].schema for number in stage.edges_in)
        narrow, _ = some_of(given, tuple(wanted))
        make = partial(Join, spec, *schemas)
        if chain is not None:
            stage = replace(stage, make=replace(chain, first=make, schema=narrow), schemas=schemas)
        else:
            stage = replace(stage, make=make, schemas=schemas, output_schema=narrow)
            for edge in self._behind(stage):
                self._edges[edge.id] = replace(edge, columns=places_among(wanted, edge.columns))
        self._stages[stage.id] = stage

    def narrow_given_on(self, stage: StagePlan) -> None:
        """Leave out columns that a stage gives on as they come, and at which nothing behind it looks. An operator that looks at
        all of its columns stays as it is."""
        chain = stage.make if isinstance(stage.make, Chain) else None
        make = stage.make if chain is None else chain.first
        operator = make()
        looks_at = operator._flux_looks_at(stage.schemas, stage.key)
        wanted = self._given_on(stage) if chain is None else _read_by(chain)
        if looks_at is None or wanted is None:
            return
        given = stage.output_schema if chain is None else chain.schema
        assert given is not None, "it gives rows"
        edge = self._edges[stage.edges_in[0]]
        read = sorted({*looks_at, *(at for at in wanted if at < len(edge.schema))})
        if len(read) == len(edge.schema):
            return
        names = [edge.schema.names[at] for at in read]
        schema, columns, steps = in_part(edge.schema, edge.steps, read)
        key = tuple(read.index(at) for at in edge.key)
        self._edges[edge.id] = replace(edge, schema=schema, columns=columns, steps=steps, key=key)
        gone = {name for name in edge.schema.names if name not in names}
        stay = [at for at, name in enumerate(given.names) if name not in gone]
        narrow, _ = some_of(given, tuple(stay))
        make, schemas = operator._flux_narrowed(make, names), (schema, *stage.schemas[1:])
        if chain is not None:
            stage = replace(stage, make=replace(chain, first=make, schema=narrow), schemas=schemas)
        else:
            stage = replace(stage, make=make, schemas=schemas, output_schema=narrow)
            for behind in self._behind(stage):
                self._edges[behind.id] = replace(behind, columns=places_among(stay, behind.columns))
        self._stages[stage.id] = stage

    def _given_on(self, stage: StagePlan) -> Sequence[int] | None:
        """Return the columns of a stage that those behind it read, at least one; None: all."""
        wanted = [edge.columns for edge in self._behind(stage)]
        if stage.sink is not None or not wanted or None in wanted:
            return None
        return sorted({column for columns in wanted for column in columns or ()}) or [0]

    def _behind(self, stage: StagePlan) -> list[EdgePlan]:
        return [edge for edge in self._edges if isinstance(edge, FromStage) and edge.stage == stage.id]

    # ---- sources

    def narrow_event_time(self, source: SourcePlan, time: EventTime) -> None:
        """Leave out columns that no edge of on-time or late rows looks at."""
        edges = [edge for edge in self._of(source) if edge.timed is not Timed.ALL]
        narrow, edges = narrowed(source.schema, time, edges)
        self._sources[source.id] = replace(source, event_time=narrow)
        for edge in edges:
            self._edges[edge.id] = edge

    def read_in_part(self, source: DataFrameSourcePlan | StreamSourcePlan) -> None:
        """Leave out columns of a DataFrame that no stage reads, so that Spark neither reads them nor brings them to Python."""
        edges = [edge for edge in self._of(source) if edge.timed is Timed.ALL]
        wanted = [edge.columns for edge in edges]
        time = self._sources[source.id].event_time
        if time is not None:
            wanted.append(time.columns)
        if not wanted or None in wanted:
            return
        read = tuple(sorted({column for columns in wanted for column in columns or ()}))
        schema, columns = some_of(source.schema, read)
        if time is not None:
            time = replace(time, columns=places_among(read, time.columns))
        self._sources[source.id] = replace(source, schema=schema, columns=columns, event_time=time)
        for edge in edges:
            self._edges[edge.id] = replace(edge, columns=places_among(read, edge.columns))

    def _of(self, source: SourcePlan) -> list[FromSource]:
        return [edge for edge in self._edges if isinstance(edge, FromSource) and edge.source == source.id]


def _read_by(chain: Chain) -> Sequence[int] | None:
    """Return the columns that the second operator of a chain looks at; None: all."""
    then = chain.then()
    if not isinstance(then, StepsOperator):
        return None
    return list(map(chain.schema.names.index, then.steps.needs()))
