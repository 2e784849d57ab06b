"""Flows of registered queries over a plan that runs: the ones of one start, or of one addition (design: service-plan)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from pyspark.sql import SparkSession

from flux.dataflow.flow import Flow
from flux.dataflow.row_flow import RowFlow
from flux.dataflow.sink import FlowTo, Sink
from flux.dataflow.source import Source
from flux.errors import UsageError
from flux.eventlog.streams import StreamCatalogue, StreamDefinition, stream_read
from flux.registry.definitions import NoSuchInput, QueryDefinition, RegisteredQuery
from spark_integration.query.query import Query
from spark_integration.service.flows import (
    EVENTS,
    late_flow,
    query_flow,
    stream_events,
    stream_flow,
    with_output,
    with_tentative_output,
)
from spark_integration.service.kept_flows import KeptFlows, ReadText
from spark_integration.sql.query import names_read


class FlowContext(NamedTuple):
    """The surroundings of registered queries."""

    spark: SparkSession
    location: str
    streams: StreamCatalogue
    #: The operators that a query may name.
    allowed: frozenset[str]
    #: Makes the sink of a query's output.
    sink_of: Callable[[RegisteredQuery], Sink]

    def names_in(self, definition: QueryDefinition) -> list[str]:
        """Return the names in a definition, among them those of late events. UsageError: the text does not parse."""
        found = definition.inputs if definition.operator else names_read(definition.sql, self.spark)
        if not found:
            raise UsageError("the query reads no stream: name one in FROM")
        return list(dict.fromkeys(found))

    def read_by(self, definition: QueryDefinition) -> list[str]:
        """Return the names of the streams and queries that a definition reads. UsageError: the text does not parse."""
        streams = self.streams.all()
        return list(dict.fromkeys(stream_read(name, streams) for name in self.names_in(definition)))


class DeclaredFlows:
    """The flows of one change of the plan. ``running``: the query that it changes; None: it is the start. ``kept``: flows of
    equal definitions, as an earlier life of the service made them; None: each text is read anew."""

    def __init__(self, context: FlowContext, running: Query | None, kept: KeptFlows | None = None) -> None:
        self._context, self._running, self._kept = context, running, kept
        #: The flows of texts that were read anew.
        self.read_anew: list[ReadText] = []
        #: The results of queries, and the stages of streams and of their late events.
        self._flows: dict[str, Flow] = {}
        #: The events of each stream, in front of its stages.
        self._events: dict[str, RowFlow | Source] = {}

    @property
    def names(self) -> Collection[str]:
        """Return the names of all flows."""
        return self._flows.keys()

    def output(self, query: RegisteredQuery) -> list[FlowTo]:
        """Return the flow of a query into its output, and with availability another one. Errors are those of ``result``: none
        of its flows is there then."""
        made, before = query.definition, dict(self._flows)
        try:
            result = self._flows[query.name] = self.result(made)
        except BaseException:
            self._flows = before
            raise
        sink = self._context.sink_of(query)
        if made.availability:
            return with_tentative_output(result, made, sink)
        return [with_output(result, query.name, made.partitions, made.replicas, sink)]

    def result(self, definition: QueryDefinition) -> Flow:
        """Return the flow of the result of a query. UsageError: it does not fit; NoSuchInput: an input is not there."""
        if definition.availability:  # its flow is not kept: it begins with sources, which belong to one life
            names = self._context.names_in(definition)
            return query_flow(definition, self._own_inputs(definition, names), self._context.allowed)
        kept = None if self._kept is None else self._kept.of(definition)
        names = self._context.names_in(definition) if kept is None else kept.names
        for name in names:
            if name not in self._flows:
                self._flows[name] = self._input(name)
        inputs = {name: self._flows[name] for name in names}
        if kept is not None:
            return kept.flow(inputs)
        made = query_flow(definition, inputs, self._context.allowed)
        if definition.sql:
            self.read_anew.append(ReadText(definition, inputs, made))
        return made

    def _own_inputs(self, definition: QueryDefinition, names: Iterable[str]) -> dict[str, Flow]:
        """Return the inputs of a query with availability, by sources of its own: the bound reaches back to these, and running
        stages keep the bounds of their start (design: service-availability)."""
        streams, query = self._context.streams.all(), definition.name
        events: dict[str, RowFlow] = {}
        found: dict[str, Flow] = {}
        for name in names:
            of = streams.get(stream_read(name, streams))
            if of is None:
                raise NoSuchInput(
                    f"there is no stream {name!r:.100}. A query with availability reads streams alone, because its bound "
                    "reaches back to the events: write the text of another query into its own, as WITH name AS (SELECT ...)"
                )
            if of.time is None:
                raise UsageError(
                    f"availability: stream {of.name!r} has the time of arrival, which goes on with the clock, so no result "
                    "waits for it. Register a stream with 'time' and 'delay', or leave 'availability' out"
                )
            if of.name not in events:
                events[of.name] = stream_events(self._context.location, of, query)
            found[name] = events[of.name] if name == of.name else late_flow(of, events[of.name], query)
        return found

    def _input(self, name: str) -> Flow:
        """Return a running stage as a flow, or make the stage of a stream or of its late events."""
        if self._running is not None and any(stage.name == name for stage in self._running.plan.stages):
            return self._running[name]
        streams = self._context.streams.all()
        of = streams.get(stream_read(name, streams))
        if of is None:
            raise NoSuchInput(f"there is no stream and no running query {name!r:.100}")
        if of.name not in self._events:
            self._events[of.name] = self._events_of(of)
        return (stream_flow if name == of.name else late_flow)(of, self._events[of.name])

    def _events_of(self, of: StreamDefinition) -> RowFlow | Source:
        """Return the events of a stream: from its running source, which another stage of the stream reads, or from a new one."""
        source = of.name + EVENTS
        if self._running is not None and any(each.name == source for each in self._running.plan.sources):
            return self._running.source(source)
        return stream_events(self._context.location, of)
