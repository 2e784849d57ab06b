"""Registered streams and queries as flows of the one plan of a service (design: service-plan).

A stream is a source and a stage of the stream's name, which passes events on: a running stage can be read from the middle, and
however many queries read a stream, its log is read once. A query is its stages, named ``QUERY/1``, ``QUERY/2`` and so on, then a
stage of the query's name, behind which others may begin, and ``QUERY/output`` with the sink.

Law: the same definitions give stages of the same names and forms, in whichever order they are registered, one by one or all at
once. So names are given here, and never left to the plan, which numbers equal ones by what runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from typing import Any

import flux
from flux.dataflow.availability import bound_of_stage
from flux.dataflow.flow import ChangedStage, Flow, Stage
from flux.dataflow.relations.running_flow import RunningStage
from flux.dataflow.row_flow import RowFlow
from flux.dataflow.sink import FlowTo, Sink
from flux.dataflow.source import Source, source
from flux.errors import FluxError, UsageError
from flux.eventlog.source import service_events
from flux.eventlog.streams import LATE, StreamDefinition
from flux.operators.user_code import described
from flux.registry.definitions import QueryDefinition
from spark_integration.query.start import unchecked
from spark_integration.service.shipped import IDLE_COLUMN, IdleReader, nothing, pass_on

#: Ends of names of a query's or stream's own parts, which no registered name can have.
OUTPUT, EVENTS = "/output", "/events"
#: The end of the name of the stage that keeps the result of a query with availability, beside its output.
KEPT = "/kept"
#: Between the names of a query and of a stream that the query reads by a source of its own.
OWN = "/from/"
#: The stage and the source that are always there: a query needs one, and a service may begin without registrations.
IDLE = "/idle"
#: A query of that stage, as a registration would have it.
ABOUT_NOTHING = QueryDefinition(
    name="about_nothing",
    sql=f"SELECT {IDLE_COLUMN}, count(*) AS n FROM idle WHERE {IDLE_COLUMN} > 1 GROUP BY {IDLE_COLUMN}",
    mode="update",
)
#: The time after which the watermark of a stream without a time column goes on with the clock while nothing is pushed.
_ARRIVAL_IDLE = "1 second"


def owner_of(part: str) -> str:
    """Return the name of the stream or query that a stage belongs to."""
    return part.partition("/")[0]


def stream_events(location: str, of: StreamDefinition, query: str = "") -> RowFlow:
    """Return the events of a stream from now on, with their event time. The flows of one addition that read a stream share it.
    ``query``: the only query that reads it; "": several may."""
    pushed = service_events(location, of.name, own_name(query, of.name + EVENTS), query)
    with unchecked():
        if of.time is not None:
            return pushed.withWatermark(of.time, of.delay or "0 seconds", idle=of.idle)
        return pushed.withWatermark("arrived_at", "0 seconds", idle=_ARRIVAL_IDLE, advance=True)


def stream_flow(of: StreamDefinition, events: RowFlow | Source) -> Flow:
    """Return the stage that passes the events of a stream on."""
    return Flow(_passing(of.name, of.partitions, 0), [events])


def own_name(query: str, part: str) -> str:
    """Return the name of a part of a stream, which a query may have for itself."""
    return f"{query}{OWN}{part}" if query else part


def late_flow(of: StreamDefinition, events: RowFlow | Source, query: str = "") -> Flow:
    """Return the stage that passes the late events of a stream on, to one query or to several. UsageError: it has no time column,
    so none can be late."""
    if of.time is None:
        raise UsageError(
            f"{of.name + LATE}: stream {of.name!r} has the time of arrival, by which no event is late. Register a stream with "
            "'time' and 'delay'"
        )
    return Flow(_passing(own_name(query, of.name + LATE), of.partitions, 0), [events.late])


def query_flow(definition: QueryDefinition, inputs: Mapping[str, Flow], allowed: Collection[str]) -> Flow:
    """Return the stage that has the result of a query. ``inputs``: the flows that it reads, by name; ``allowed``: the operators
    that it may name. UsageError: the text or the operator does not fit."""
    made = flux.sql(definition.sql, dict(inputs)) if definition.sql else _of_operator(definition, inputs, allowed)
    if definition.mode == "update":
        made = made._in_mode("update")
    named = _Names(definition, inputs.values()).of(made)
    return Flow(_passing(definition.name, definition.partitions, definition.replicas), [named])


def with_output(result: Flow, name: str, partitions: int, replicas: int, sink: Sink) -> FlowTo:
    """Return the flow that brings the result of a query into its output. It has a stage of its own: a sink at the stage of the
    result would be at another one as soon as a further query reads that."""
    return Flow(_passing(name + OUTPUT, partitions, replicas), [result]).to(sink)


def with_tentative_output(result: Flow, of: QueryDefinition, sink: Sink) -> list[FlowTo]:
    """Return the flow that brings stable and tentative results of a query into its output, and the flow that keeps the stage of
    the result, for queries that come later. The output is beside that stage: the columns of a result may lack its event time,
    and then no watermark, which tells the end of tentative rows, goes on behind that stage (design: service-availability)."""
    last = _passing(of.name + OUTPUT, of.partitions, of.replicas)
    last.availability = bound_of_stage(of.availability)
    kept = Flow(_passing(of.name + KEPT, of.partitions, of.replicas), [result])
    return [Flow(last, result.inputs).to(sink), kept.foreach_batch(nothing)]


def _passing(name: str, partitions: int, replicas: int) -> Stage:
    made = Stage(pass_on, (), partitions, replicas or None, None, "complete", name)
    made.passes = True
    return made


def _of_operator(definition: QueryDefinition, inputs: Mapping[str, Flow], allowed: Collection[str]) -> Flow:
    if definition.operator not in allowed:
        known = ", ".join(sorted(allowed)) or "none"
        raise UsageError(
            f"operator: {definition.operator!r:.200} is not allowed here; allowed are {known}. The service allows one "
            "that is started with flux serve --allow MODULE:NAME"
        )
    module, _, name = definition.operator.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
        stage: Any = found if isinstance(found, Stage) else flux.stage(found)
        if definition.arguments:
            stage = stage(**definition.arguments)
        made = stage(*[inputs[each] for each in definition.inputs])
    except FluxError as error:
        raise UsageError(f"operator {definition.operator}: {error}") from error
    except Exception as error:
        raise UsageError(f"operator {definition.operator} cannot be made: {described(error)}") from error
    if not isinstance(made, Flow):
        raise UsageError(f"operator {definition.operator} is no stage and no class of operators")
    return made


class _Names:
    """Names for the stages of one query, in the order in which its text or operator has them."""

    def __init__(self, definition: QueryDefinition, inputs: Collection[Flow]) -> None:
        self._definition = definition
        self._given: dict[int, Flow] = {id(each): each for each in inputs}
        self._number = 0

    def of(self, flow: Flow) -> Flow:
        """Return the same flow with named stages. The streams and results that it reads keep theirs."""
        known = self._given.get(id(flow))
        if known is not None:
            return known
        inputs: list[Flow | Source] = [self.of(each) if isinstance(each, Flow) else each for each in flow.inputs]
        made = flow if isinstance(flow, RunningStage) else flow.copied(inputs)
        if not isinstance(made, RowFlow | RunningStage):  # conditions and columns are no stage
            self._number += 1
            changes: dict[str, Any] = {"name": f"{self._definition.name}/{self._number}"}
            if self._definition.partitions > 1:
                changes["partitions"] = self._definition.partitions
            if self._definition.replicas:
                changes["replicas"] = self._definition.replicas
            made.stage = ChangedStage(made.stage, changes)
        self._given[id(flow)] = made
        return made


def idle_stage() -> Flow:
    """Return a stage that never has a row."""
    return Flow(_passing(IDLE, 1, 0), [source(IdleReader(), name=IDLE + EVENTS)])


def idle_flow() -> FlowTo:
    """Return the flow that is always in the plan."""
    return idle_stage().foreach_batch(nothing)
