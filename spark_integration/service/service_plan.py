"""The one growing query of a service: registered queries come and go while it runs (design: service-plan)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

from pyspark.sql import SparkSession

import flux
from controller.planning.checks import GroupsNeverGiven, NothingWaits
from flux.dataflow.plan import FromStage, Plan, WorkerSourcePlan
from flux.dataflow.sink import Sink
from flux.dataflow.source_reader import SourceReader
from flux.errors import FluxError, UsageError
from flux.eventlog.streams import SERVICE_READER, ReaderPositions, StreamCatalogue, query_of, stream_read
from flux.registry.convergence import PlanParts
from flux.registry.definitions import PLAN, QueryDefinition, RegisteredQuery
from spark_integration.expressions.analyser_answers import AnswerRecord, recorded
from spark_integration.query.checkpoint_location import CheckpointLocation
from spark_integration.query.query import Query
from spark_integration.query.start import schema_of, unchecked
from spark_integration.service.declared_flows import DeclaredFlows, FlowContext
from spark_integration.service.flows import ABOUT_NOTHING, OUTPUT, idle_flow, idle_stage, owner_of, query_flow
from spark_integration.service.kept_flows import KeptFlows, NotKept

log = logging.getLogger("flux")

#: Seconds that a change of the plan may take.
CHANGE_S = 60.0


class ServicePlan:
    """The stages of all registered queries. Its methods are called in one thread.

    ``sink_of`` makes the sink of a query's output."""

    def __init__(
        self,
        spark: SparkSession,
        location: str,
        streams: StreamCatalogue,
        allowed: Collection[str],
        sink_of: Callable[[RegisteredQuery], Sink],
    ) -> None:
        self._spark, self._location = spark, location
        self._streams = streams
        self._context = FlowContext(spark, location, streams, frozenset(allowed), sink_of)
        self._query: Query | None = None

    @property
    def query(self) -> Query:
        assert self._query is not None, "the plan has been started"
        return self._query

    def read_by(self, definition: QueryDefinition) -> list[str]:
        """Return the names of the streams and queries that a definition reads. UsageError: the text does not parse."""
        return self._context.read_by(definition)

    def schema_of(self, definition: QueryDefinition) -> str:
        """Return the columns of the result of a query, in DDL. UsageError: it does not fit; NoSuchInput: an input is not
        there."""
        return ddl(schema_of(DeclaredFlows(self._context, self._query).result(definition)))

    def warm_up(self) -> None:
        """Read and compile a text about no stream, as a registration does: cold code of Spark's analyser takes a second. An error
        is that of the next registration."""
        try:
            self._context.names_in(ABOUT_NOTHING)
            ddl(schema_of(query_flow(ABOUT_NOTHING, {"idle": idle_stage()}, ())))
        except Exception as error:
            log.info("the analyser of Spark is not warmed up: %s", error)

    def start(
        self, registered: Iterable[RegisteredQuery], ended: Callable[[str], None], **options: Any
    ) -> dict[str, str]:
        """Start with the queries that are in the plan of the location; others are added afterwards. Return the errors of those
        that cannot be made any more, by name: they, and what else is in that plan, are given up. ``ended`` is told each part of
        the start that has ended."""
        path, mark, query = self._location.partition("?")  # a URI may have options
        checkpoint = f"{path.rstrip('/')}/{PLAN}{mark}{query}"
        kept = stages_kept(checkpoint)
        known = [each for each in registered if each.name + OUTPUT in kept]
        self._kept = KeptFlows.open(self._spark, self._streams)
        try:
            failed = self._start_with(known, kept, checkpoint, self._kept, ended, options)
        except (UsageError, NotKept) as error:  # read anew and checked one by one, an error is that of its query
            log.info("the texts of all queries are read anew: %s", error)
            failed = self._start_with(known, kept, checkpoint, None, ended, options)
        self._kept.forget_others(each.name for each in known)
        return failed

    def _start_with(
        self, known: Sequence[RegisteredQuery], in_plan: Sequence[str], checkpoint: str, kept: KeptFlows | None,
        ended: Callable[[str], None], options: dict[str, Any],
    ) -> dict[str, str]:  # fmt: skip
        """Start with queries of the plan. ``kept``: flows of an earlier life; None: each text is read anew, and checked."""
        flows, declared, failed = [idle_flow()], DeclaredFlows(self._context, None, kept), dict[str, str]()
        with nullcontext() if kept is None else unchecked():  # the start compiles all of them in any case
            for each in known:
                try:
                    flows += declared.output(each)
                except FluxError as error:
                    failed[each.name] = str(error)
                    log.warning("query %s cannot be made again: %s", each.name, error)
        ended("queries analysed")
        gone = [name for name in in_plan if owner_of(name) not in declared.names and owner_of(name)]
        record = AnswerRecord() if kept is None else kept.answers
        with recorded(record):
            self._query = flux.start(
                *flows, queryName="serve", spark=self._spark, checkpointLocation=checkpoint, removed=gone, **options
            )
        ended("plan")
        for text in declared.read_anew:
            self._kept.keep(text, record.asked)
        return failed

    def parts(self) -> PlanParts:
        """Return the registered names in the plan, as it is now."""
        query = self.query
        failed = query._server.look(lambda: list(query._server.core.plans.failed.values()))
        errors: dict[str, str] = {}
        for each in sorted(failed, key=lambda each: each.name != each.because_of):
            cause = (
                each.error if each.name == each.because_of else f"{owner_of(each.because_of)} has failed: {each.error}"
            )
            errors.setdefault(owner_of(each.name), cause)
        queries, streams = parts_of(query.plan)
        return PlanParts(queries, streams, errors)

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes of state of each query, as the newest report has them: they may be a second old."""
        found: dict[str, int] = {}
        newest = self.query.lastProgress
        for stage in newest["stages"] if newest else ():
            owner = owner_of(stage["name"])
            found[owner] = found.get(owner, 0) + stage.get("stateBytes", 0)
        return found

    def add(self, query: RegisteredQuery) -> None:
        """Add a query: all of its stages, or nothing. FluxError: nothing has changed."""
        try:
            declared, record = DeclaredFlows(self._context, self._query), AnswerRecord()
            flows = declared.output(query)
            with recorded(record):
                self.query.add(*flows, timeout=CHANGE_S)
            for text in declared.read_anew:
                self._kept.keep(text, record.asked)
        except GroupsNeverGiven as error:  # whose remedies are those of a program
            self.forget_unread(query.reads)
            raise UsageError(
                f"query {query.name}: groups without a window are final when all events are there, and a stream has no end. "
                'Register the query with "mode": "update", which gives each group again when it has changed, or group by '
                "window(TIME, DURATION), whose groups are final when the watermark has passed them"
            ) from error
        except NothingWaits as error:
            self.forget_unread(query.reads)
            raise UsageError(
                f"query {query.name}: availability bounds the time to results that wait for a watermark, and its result waits "
                "for none. Group by window(TIME, DURATION) or session_window(TIME, GAP), join with bounds, or leave "
                "'availability' out"
            ) from error
        except FluxError:
            self.forget_unread(query.reads)
            raise

    def forget_unread(self, names: Iterable[str]) -> None:
        """Forget this service as a reader of the streams among these names that its plan does not read: an addition that was
        refused, or a service that was lost in one, has registered as a reader before."""
        streams, (queries, parts) = self._streams.all(), parts_of(self.query.plan)
        read = {stream_read(name, streams) for name in parts}
        for name in names:
            if name not in streams:
                continue
            positions = ReaderPositions(self._streams.readers_place(streams[name]))
            if name not in read:
                positions.forget(SERVICE_READER)
            for reader in positions.names():
                if (query := query_of(reader)) and query not in queries:
                    positions.forget(reader)

    def take(self, name: str) -> None:
        """Remove all stages of a query or stream, which no other part reads, and their notes of failure."""
        while (root := _root(self.query.plan, name)) is not None:
            stream = stream_read(name, self._streams.all())
            before = self._readers_of(stream)
            self.query.remove(root, cascade=True, timeout=CHANGE_S)
            after = self._readers_of(stream)
            for id_, reader in before.items():
                if id_ not in after:
                    reader.forget()
        while failed := self._failed_of(name):  # those that went with one are off the list with it
            self.query.remove(failed[0], timeout=CHANGE_S)

    def _readers_of(self, name: str) -> dict[int, SourceReader]:
        """Return the readers of the sources of a query or stream, by the id of their source."""
        of = [each for each in self.query.plan.sources if owner_of(each.name) == name]
        return {each.id: each.reader for each in of if isinstance(each, WorkerSourcePlan)}

    def _failed_of(self, name: str) -> list[str]:
        server = self.query._server
        failed = server.look(lambda: list(server.core.plans.failed))
        return [each for each in failed if owner_of(each) == name]


def stages_kept(checkpoint: str) -> list[str]:
    """Return the names of the stages in a checkpoint location."""
    about = CheckpointLocation.open(checkpoint).about
    return [] if about is None else list(about["plan"]["stages"])


def parts_of(plan: Plan) -> tuple[dict[str, set[str]], set[str]]:
    """Return the queries in a plan, each with the names that it reads, and the streams."""
    owners = {owner_of(stage.name) for stage in plan.stages} - {""}
    queries = {owner_of(stage.name) for stage in plan.stages if "/" in stage.name} - {""}
    reads: dict[str, set[str]] = {name: set() for name in queries}
    for edge in plan.edges:
        if isinstance(edge, FromStage):
            reader, read = owner_of(plan.stages[edge.consumer].name), owner_of(plan.stages[edge.stage].name)
            if reader != read and reader in reads:
                reads[reader].add(read)
    return reads, owners - queries


def _root(plan: Plan, name: str) -> str | None:
    """Return a stage of a query or stream that reads none of its others; None: none of it is left."""
    for stage in plan.stages:
        if owner_of(stage.name) != name:
            continue
        edges = [plan.edges[edge] for edge in stage.edges_in]
        read = {plan.stages[each.stage].name for each in edges if isinstance(each, FromStage)}
        if name not in map(owner_of, read):
            return stage.name
    return None


def ddl(schema: Any) -> str:
    """Return columns as DDL."""
    names = (f"`{each.name.replace('`', '``')}` {_upper(each.dataType.simpleString())}" for each in schema)
    return ", ".join(names)


def _upper(kind: str) -> str:
    return kind if "<" in kind else kind.upper()
