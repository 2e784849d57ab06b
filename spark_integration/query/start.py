"""Start of a query from flows: everything that can be checked is checked before anything runs (design: public-api). A flow
that has not started can be explained."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructType

from controller.planning.availability import told_unused
from controller.planning.checks import check_durable, check_ends, check_failures_of_stages, check_folders, check_taken
from controller.planning.compiled_plan import CompiledPlan
from controller.planning.explain import explain
from controller.planning.inputs import topological
from flux.dataflow.event_time import told_idleness
from flux.dataflow.flow import Flow
from flux.dataflow.plan import Plan, StagePlan
from flux.dataflow.relations.running_flow import RunningStage
from flux.dataflow.row_flow import RowFlow
from flux.dataflow.sink import FlowTo, QueryReaders, flow_of
from flux.dataflow.source import DataFrameSource, Source, StreamSource
from flux.errors import FluxError, UsageError
from flux.expressions.steps import RowSteps
from flux.operators.schema import positions
from flux.settings import Settings
from flux.shell import liveness_thread
from partitioning.warm_up import is_warm, warm_up
from spark_integration.expressions.analysed_operators import steps_of
from spark_integration.growing.regrown import compiled_again
from spark_integration.query import running_queries
from spark_integration.query.checkpoint_location import CheckpointLocation
from spark_integration.query.declarations import (
    check_flows,
    compiled,
    resolvers,
    running_session,
    session_of,
    sources_of,
)
from spark_integration.query.follow import follow
from spark_integration.query.lookup_tables import LookupTables
from spark_integration.query.query import Query
from spark_integration.query.source_setup import prepared
from spark_integration.schema import for_spark
from spark_integration.settings import (
    Need,
    check_replicas,
    count_slots,
    decides_on_shared_executors,
    executors_at_most,
    failures_at_most,
    given_settings,
    grows_on_demand,
    has_one_executor,
    ignored_files,
    is_case_sensitive,
    is_local,
    one_executor_warning,
    slots_at_first,
    task_slots,
    with_flushes_for,
)
from spark_integration.streaming.flux_format import register
from spark_integration.streaming.stream_source import check_checkpoints
from spark_integration.tasks.dataframe_partitions import with_cuts
from spark_integration.tasks.shipping_checks import check_outputs, check_shipping

log = logging.getLogger("flux")


def compile_once() -> None:
    """Compile the kernels, once after an installation, if the driver shares its files with the workers. Returns at once if the
    disk cache has them.

    Otherwise all workers compile the same at once, and on a small machine that takes longer than they may take to join."""
    if not is_warm():
        log.warning("first start after an installation: compiling the kernels, which takes up to a minute")
        warm_up()
        liveness_thread.warm_up()


_told: set[str] = set()  # applications that were told about replicas in one executor


def start_query(
    flows: list[Flow | FlowTo],
    name: str | None = None,
    spark: SparkSession | None = None,
    keep_output: bool | None = None,
    checkpoint_location: str | os.PathLike[str] | None = None,
    removed: Sequence[str] = (),
    **options: Any,
) -> Query:
    """Check everything that can be checked, then start. Nothing is running if this raises."""
    check_flows(flows)
    _check_removed(removed, checkpoint_location)
    with running_queries.starting(name):
        return _started(flows, name, spark, keep_output, checkpoint_location, removed, options)


def _check_removed(removed: Sequence[str], location: str | os.PathLike[str] | None) -> None:
    if isinstance(removed, str) or not all(isinstance(name, str) for name in removed):
        raise UsageError(f"removed takes a list of names of stages, as in removed=['Alarm'], got {removed!r:.100}")
    if removed and location is None:
        raise UsageError(
            "removed gives up stages of a checkpointLocation, and there is none: leave it out, or give the location"
        )


def _opened(
    location: str | os.PathLike[str] | None, flows: list[Flow | FlowTo], removed: Sequence[str]
) -> CheckpointLocation | None:
    """Open the location of a query that starts, without the stages that it gives up; None if no location is given."""
    if location is None:
        return None
    return CheckpointLocation.open(location).given_up(removed, _stage_names(flows) if removed else ())


def _started(
    flows: list[Flow | FlowTo],
    name: str | None,
    spark: SparkSession | None,
    keep_output: bool | None,
    checkpoint_location: str | os.PathLike[str] | None,
    removed: Sequence[str],
    options: dict[str, Any],
) -> Query:
    """Start a query in this order: settings and location are read, task slots are claimed, the plan is compiled and checked, the
    location is taken, the query starts. Checks of the arguments alone come before the claim. The location is taken last, so
    that a query that is refused does not take it. The claim ends when the query has its handle, or with any error."""
    if checkpoint_location is not None:
        check_durable(flows)
    if keep_output and all(isinstance(flow, FlowTo) for flow in flows):
        raise UsageError("keep_output=True keeps the output for toDF(), but all output goes into sinks: leave it out")
    sources = sources_of(flows)
    spark = _session(spark, sources)
    given = given_settings(spark)
    settings = Settings.of(given, **options)
    read = any(isinstance(flow, FlowTo) and isinstance(flow.sink, QueryReaders) for flow in flows)  # perhaps by Spark
    shared = has_one_executor(spark) and not decides_on_shared_executors(given, options)
    if shared:
        settings = replace(settings, same_executor=True)
    location = _opened(checkpoint_location, flows, removed)
    if location is not None:
        settings = with_flushes_for(location.place, settings, given, options)
    query_id = (location and location.query) or str(uuid.uuid4())
    if location is not None:
        _check_inactive(query_id, location.place)
    with _claim_slots(
        spark, settings, query_id, name, bool(keep_output) or read or _fed(sources), _most_replicas(flows, settings)
    ) as need:
        tables = LookupTables(settings.lookup_max_bytes, location)
        began_with = need.workers if location is None else location.began_with(need.workers)
        collect = began_with if keep_output else 0
        declared, location = _compiled_on(location, spark, flows, settings, query_id, collect, began_with, tables)
        plan = declared.plan
        check_ends(plan, goes_on=location is not None)
        check_folders(plan)
        if location is not None:
            check_failures_of_stages(plan)
            location = location.for_sinks_of(plan)
            plan = _kept_in(plan, location, began_with)
        check_outputs(plan.stages)
        place = None if location is None else location.place
        check_checkpoints(spark, plan, declared.sources, place, location is None or location.about is None)
        check_shipping(plan)
        check_replicas(plan, need.workers, executors_at_most(spark))
        if keep_output is None:
            check_taken(plan)
        if read or any(isinstance(source, StreamSource) and source.dataframe is None for source in sources):
            register(spark)
        if is_local(spark):
            compile_once()
        known = None if location is None else location.kept
        plan, kept = prepared(plan, known, is_case_sensitive(spark), ignored_files(spark))
        if location is not None:
            location.check(plan)
            plan, kept = with_cuts(plan, declared.sources, kept, location.kept)
            tables.keep()
            location = location.take(plan, kept)
        query = Query(spark, declared.with_plan(plan), need, name, location)
        query._ends.take(flows, declared)
        _tell_of_idleness(plan)
        if note := told_unused(plan, options):
            log.warning("%s", note)
        if shared:
            _tell_of_one_executor(spark, plan)
        query._start()
        return query


def _compiled_on(
    location: CheckpointLocation | None, spark: SparkSession, flows: list[Flow | FlowTo], settings: Settings, query: str,
    collect: int, began_with: int, tables: LookupTables,
) -> tuple[CompiledPlan, CheckpointLocation | None]:  # fmt: skip
    """Compile flows for a start on a location, or without one. Return the location as the start goes by it, too."""
    secret = secrets.token_bytes(32)
    if location is not None and location.has_grown:
        return compiled_again(flows, location, settings, secret, resolvers(spark, tables), collect, began_with)
    partitions = None if location is None else location.partitions
    return compiled(spark, flows, settings, query, secret, collect, partitions, tables), location


def _fed(sources: Sequence[Source]) -> bool:
    """Tell whether rows come from tasks of Spark's own."""
    return any(isinstance(source, DataFrameSource | StreamSource) for source in sources)


def _kept_in(plan: Plan, location: CheckpointLocation, began_with: int) -> Plan:
    """Return the plan of a query whose state is kept in a checkpoint location."""
    return replace(
        plan, durable=True, began_with=began_with, location=str(location.place), forgotten=location.forgotten(plan)
    )


def _claim_slots(
    spark: SparkSession, settings: Settings, query_id: str, name: str | None, tasks: bool, replicas: int
) -> AbstractContextManager[Need]:
    """Claim the task slots of a query that is being started, until its handle exists. ``tasks``: it needs slots for tasks of
    Spark's own beside its workers."""
    at_first, slots = slots_at_first(spark) if grows_on_demand(spark) else None, task_slots(spark)
    return running_queries.claimed(
        query_id, name, lambda others: count_slots(settings.workers, tasks, slots, others, replicas, at_first)
    )


def _check_inactive(query_id: str, place: Any) -> None:
    """Raise UsageError if a query of this program runs with this checkpoint location."""
    if running_queries.is_active(query_id):
        raise UsageError(
            f"query {query_id} is active, and checkpointLocation={str(place)!r} is its: stop it first "
            "(flux.queries() has its handle)"
        )


def to_df(flow: Flow, spark: SparkSession | None = None, progress: bool = False, **options: Any) -> DataFrame:
    """Run the flow to its end. ``progress`` shows it on the screen. Raises the query's errors."""
    query = start_query([flow], spark=spark, keep_output=True, **options)
    try:
        if progress:
            follow(query)
        return query.toDF()
    except BaseException:  # also Ctrl-C before the wait in toDF() has begun
        query.stop()
        raise


def _session(given: SparkSession | None, sources: list[Source]) -> SparkSession:
    """Return the session of a query: the given one, or else that of its sources."""
    return session_of(sources) if given is None else running_session(given, "the one given as spark=...")


def _stage_names(flows: Sequence[Flow | FlowTo]) -> list[str]:
    return [flow.stage.name for flow in topological([flow_of(given) for given in flows])]


def _most_replicas(flows: Sequence[Flow | FlowTo], settings: Settings) -> int:
    """Return the most replicas of any stage. Wrong types are found with the check of the flow."""
    given = [flow.stage.replicas for flow in topological([flow_of(given) for given in flows])]
    wanted = [settings.replicas if replicas is None else replicas for replicas in given]
    return max((replicas for replicas in wanted if isinstance(replicas, int)), default=1)


def _tell_of_one_executor(spark: SparkSession, plan: Plan) -> None:
    """Tell about replicas in one executor, once per application: the text holds for all of its queries."""
    application = str(spark.sparkContext.applicationId)
    told = one_executor_warning(plan, str(spark.sparkContext.master), failures_at_most(spark))
    if told and application not in _told:
        _told.add(application)
        log.warning("%s", told)


def _tell_of_idleness(plan: Plan) -> None:
    for source in plan.sources:
        if (note := told_idleness(source)) is not None:
            log.warning("source %s: %s", source.name, note)


def explain_flows(flows: list[Flow | FlowTo], spark: SparkSession | None, **options: Any) -> str:
    """Explain flows. Checks the same as ``start``, but for task slots, and raises its errors; runs nothing."""
    session = _session(spark, sources_of(flows))
    given = given_settings(session)
    settings = Settings.of(given, **options)
    if has_one_executor(session) and not decides_on_shared_executors(given, options):
        settings = replace(settings, same_executor=True)
    plan = compiled(session, flows, settings, tables=LookupTables(settings.lookup_max_bytes)).plan
    check_ends(plan)
    check_folders(plan)
    return explain(plan)


def computed(schema: pa.Schema, texts: Sequence[str]) -> RowSteps | None:
    """Return the steps that add columns, which are texts of SQL, to rows. None: there is no session."""
    try:
        spark = session_of([])
    except UsageError:
        return None
    return steps_of(spark, schema, lambda df: df.selectExpr("*", *texts))


def _looked_at(given: Flow | Source) -> Plan:
    """Compile a flow, or a source by itself, for its columns. Nothing is read."""
    flow = RowFlow(given, ()) if isinstance(given, Source | RunningStage) else given
    before, _looks_up.now = getattr(_looks_up, "now", False), True
    try:
        spark = session_of(sources_of([flow]))
        return compiled(spark, [flow], Settings.of(given_settings(spark))).plan
    finally:
        _looks_up.now = before


def _stage_of(given: Flow | Source) -> StagePlan:
    """Return a stage that gives the rows of a flow or a source. It is the last one of the plan, but for a running stage with no
    step behind it, which no new stage is needed for."""
    plan = _looked_at(given)
    *_, last = plan.stages
    origin = given.inputs[0] if isinstance(given, RowFlow) else given
    if isinstance(origin, RunningStage) and last.id in origin.compiled().plan.stages:
        return plan.stages[origin.number]
    return last


def schema_of(given: Flow | Source) -> StructType:
    """Return the columns of a flow or a source, as a DataFrame of its rows has them."""
    stage = _stage_of(given)
    if stage.output_schema is None:
        raise UsageError(f"stage {stage.name} gives no rows, so it has no columns")
    return for_spark(stage.output_schema, f"stage {stage.name}")[0]


def is_streaming(given: Flow | Source) -> bool:
    return any(source.endless for source in _looked_at(given).sources)


#: Whether this thread compiles a flow to find its columns: attributes that the compiler looks up are none.
_looks_up = threading.local()


def column(given: Flow | Source, name: str) -> Column | None:
    """Return the column of this name of a flow or a source. None: there is none, there is no session yet, or the flow has a
    mistake, which is told where it is started."""
    if getattr(_looks_up, "now", False):
        return None
    try:
        spark = session_of(sources_of([given] if isinstance(given, Flow) else [RowFlow(given, ())]))
        schema = _stage_of(given).output_schema
        found = [] if schema is None else positions(schema, name, is_case_sensitive(spark))
        if not found or schema is None:
            return None
        parts = [*_alias_of(given), schema.names[found[0]]]
        return F.col(".".join("`" + part.replace("`", "``") + "`" for part in parts))
    except FluxError:
        return None


def _alias_of(given: Flow | Source) -> list[str]:
    """Return the alias behind a flow, if there is one: its columns are told by it from those of another flow in a join."""
    for each in reversed(given.operators if isinstance(given, RowFlow) else ()):
        if each.name == "alias":
            return [str(each.arguments[0])]
        if each.name not in ("where", "filter"):
            break
    return []


#: Whether this thread writes flows whose writer checks the last one.
_unchecked = threading.local()


@contextmanager
def unchecked() -> Iterator[None]:
    """Leave the flows that are written inside unchecked. The writer checks the last one, which checks all that it is made of."""
    before, _unchecked.now = getattr(_unchecked, "now", False), True
    try:
        yield
    finally:
        _unchecked.now = before


def check_columns(flow: Flow) -> None:
    """Raise the errors of Spark for conditions and columns of a flow that is being written, if there is a session by now.

    Compiled whole, because the schema before its steps depends on all stages there; Spark is asked about the last declaration
    alone. The result is thrown away: settings of the session may change before the query starts, as they may for a temporary
    view."""
    if getattr(_unchecked, "now", False):
        return
    sources = sources_of([flow])
    try:
        spark = session_of(sources)
        settings = Settings.of(given_settings(spark))
    except UsageError:
        return  # no session yet, or a wrong setting, which start() refuses
    compiled(spark, [flow], settings)
