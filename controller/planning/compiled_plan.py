"""A compiled plan together with facts about its declarations, which the compilation of an addition needs (design: additions)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa

from controller.text import some
from flux.dataflow.flow import Flow
from flux.dataflow.plan import (
    ById,
    DataFrameSourcePlan,
    EventTime,
    Plan,
    SourcePlan,
    StagePlan,
    StreamSourcePlan,
)
from flux.dataflow.relations.running_flow import Running, RunningSource, RunningStage
from flux.dataflow.sink import Sink
from flux.dataflow.source import Source
from flux.errors import UsageError
from flux.expressions.steps import RowSteps

#: Names in a message.
NAMED = 10

Part = TypeVar("Part", SourcePlan, StagePlan)


class StageRows(NamedTuple):
    """Rows that a stage gives, as its declaration has them."""

    #: The columns that have the event time of the rows; empty: they have none.
    times: tuple[str, ...] = ()
    #: Whether the stage keeps to the watermark by the user's word alone.
    promises: bool = False
    #: The remedy where each change of a row would be counted again; None: the rows are no changes.
    changing: str | None = None
    #: Steps of its declaration that the edges behind it compute; None: there are none.
    behind: RowSteps | None = None


@dataclass(frozen=True)
class CompiledPlan:
    """A plan, and by id the declarations of its parts."""

    plan: Plan
    #: The flow of which each stage gives the rows. A stage that was made for a sink has none.
    flows: Mapping[int, Flow] = field(default_factory=dict)
    sources: Mapping[int, Source] = field(default_factory=dict)
    rows: Mapping[int, StageRows] = field(default_factory=dict)
    #: By source, its event time before columns were left out.
    declared: Mapping[int, EventTime] = field(default_factory=dict)
    #: By stage, its sink as the program made it, before it was prepared.
    sinks: Mapping[int, Sink] = field(default_factory=dict)

    def with_plan(self, plan: Plan) -> CompiledPlan:
        """Return the same declarations with another form of the plan: one that is prepared, or that lacks parts."""
        return replace(
            self,
            plan=plan,
            flows={id_: each for id_, each in self.flows.items() if id_ in plan.stages},
            sources={id_: each for id_, each in self.sources.items() if id_ in plan.sources},
            rows={id_: each for id_, each in self.rows.items() if id_ in plan.stages},
            declared={id_: each for id_, each in self.declared.items() if id_ in plan.sources},
            sinks={id_: each for id_, each in self.sinks.items() if id_ in plan.stages},
        )

    def stage(self, name: str, newest: Callable[[], CompiledPlan]) -> RunningStage:
        """Return a handle on a stage. ``newest`` returns the newest compiled plan of its query. UsageError: there is no stage of
        that name, or it gives no rows."""
        found = _named(self.plan.stages, name, "stage")
        flow = self.flows.get(found.id)
        if flow is None or found.output_schema is None:
            raise UsageError(f"stage {name} gives no rows to others: it is where a flow ends")
        return RunningStage(flow, name, found.id, self.plan.query, newest)

    def source(self, name: str, newest: Callable[[], CompiledPlan]) -> RunningSource:
        """Return a handle on a source. ``newest`` as for ``stage``. UsageError: there is no source of that name, or its rows
        cannot be had from the middle."""
        found = _named(self.plan.sources, name, "source")
        check_joinable(found)
        schema, has_time = given_rows(found), found.event_time is not None
        return RunningSource(name, schema, found.id, self.plan.query, newest, has_time)

    def checked(self, handle: Running) -> int:
        """Return the id of the part of a handle. UsageError: it is not in this plan any more, or in that of another query."""
        name = handle.name if isinstance(handle, RunningSource) else handle.stage.name
        if handle.query != self.plan.query:
            raise UsageError(
                f"{handle!r} is of query {handle.query}, and the flow is added to query {self.plan.query}: a flow goes on from "
                "parts of one query. End the other one in a topic or in files, and read these here"
            )
        parts = self.plan.sources if isinstance(handle, RunningSource) else self.plan.stages
        if handle.number not in parts:
            raise UsageError(f"{handle!r}: {name} has been removed from the query; {_there(parts)}")
        return handle.number


def check_joinable(source: SourcePlan) -> None:
    """Raise UsageError if the rows of a running source cannot be had from the middle."""
    if isinstance(source, DataFrameSourcePlan):
        raise UsageError(
            f"source {source.name} is a DataFrame, which a Spark job reads once from its beginning: give the stage the "
            "DataFrame itself, and a Spark job of its own reads it for that stage"
        )
    if isinstance(source, StreamSourcePlan):
        raise UsageError(
            f"source {source.name} comes in micro-batches of Structured Streaming, whose rows are numbered for the stages that "
            "it was started with: read the input inside the workers, as with flux.kafka or flux.files"
        )


def is_joinable(source: SourcePlan) -> bool:
    """Tell whether the rows of a running source can be had from the middle."""
    return not isinstance(source, DataFrameSourcePlan | StreamSourcePlan)


def given_rows(source: SourcePlan) -> pa.Schema:
    """Return the columns of the rows of a source: all of them, or if it has a watermark those that are read of the rows on time
    and of late ones."""
    time = source.event_time
    if time is None:
        return source.schema
    if time.steps is not None:
        return time.steps.output
    return source.schema if time.columns is None else pa.schema([source.schema.field(at) for at in time.columns])


def _named(parts: ById[Part], name: object, kind: str) -> Part:
    """Return the part of this name. UsageError: there is none."""
    for each in parts:
        if each.name == name:
            return each
    raise UsageError(f"the query has no {kind} {name!r:.100}; {_there(parts)}")


def _there(parts: ById[Any]) -> str:
    names = [each.name for each in parts]
    return f"there {'is' if len(names) == 1 else 'are'} {some(names, NAMED)}" if names else "there is none"
