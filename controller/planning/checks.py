"""Checks of whole plans: output that would never come, output that nothing takes, folders with files of several kinds, and stages
that cannot be kept."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from controller.course.removals import looks_up
from controller.planning.event_time_edges import check_rows_come, check_timers_fire, check_windows_close
from controller.planning.inputs import topological
from flux.arguments import MARKS
from flux.connectors.files.parquet_sink import ParquetFiles
from flux.dataflow.flow import Flow
from flux.dataflow.plan import FromStage, Plan, SourcePlan, StagePlan, StreamSourcePlan
from flux.dataflow.sink import FlowTo, flow_of
from flux.errors import UsageError
from flux.operators.aggregate import Aggregate
from flux.operators.operator import chain_of
from flux.operators.windowed_rows import WindowFunction


class NothingWaits(UsageError):
    """Refusal of availability for a stage that waits for no watermark before its end."""


class GroupsNeverGiven(UsageError):
    """Refusal of groups that are given when all input has ended, of an input that never ends."""


def check_ends(plan: Plan, goes_on: bool = False) -> None:
    """Refuse output that comes only when all input has ended, from an input that never ends (design: public-api): the user would
    wait for it without a word. UsageError names the source, and tells which settings give output meanwhile.

    ``goes_on``: a stream that has given all available rows has not ended, because the next start of the query goes on with it."""
    endless: dict[int, SourcePlan] = {}  # by stage: a source that never ends, and for whose rows the stage waits
    never: dict[int, SourcePlan] = {}  # the same by edge
    for stage in plan.stages:  # each after its inputs
        for edge in (plan.edges[number] for number in stage.edges_in):
            origin = plan.origin(edge)
            found = endless.get(edge.stage) if isinstance(edge, FromStage) else origin
            if isinstance(found, SourcePlan) and _never_ends(found, goes_on):
                endless.setdefault(stage.id, found)
                never.setdefault(edge.id, found)
    for stage in plan.stages:
        if stage.id in endless:
            check_timers_fire(plan, stage, never)
        if stage.id in endless and stage.collects:
            raise UsageError(
                "toDF() and keep_output=True give the output when all input has ended, and that of source "
                f"{_named(endless[stage.id])}. End the flow with to_readers(), and query.rows() gives the output while the "
                "query runs; or end it in a sink, such as to_parquet(), to_kafka() or foreach_batch()"
            )
    for stage in plan.stages:
        if stage.id in endless and chain_of(stage.make())[0]._flux_waits:
            check_rows_come(plan, stage, never)
        if stage.id in endless and _gives_at_the_end(stage):
            if stage.output_mode == "append":
                check_windows_close(plan, stage, never)
                continue
            raise GroupsNeverGiven(
                f'stage {stage.name} has output_mode="complete": it gives its groups once, when all input has ended, and that of '
                f"source {_named(endless[stage.id])}, so nothing would ever come. Say @flux.stage(..., "
                'output_mode="update") or flow.writeStream.outputMode("update") for the changed groups after every step'
            )


def _never_ends(source: SourcePlan, goes_on: bool) -> bool:
    """Tell whether the rows of a source do not end. A table that is read anew ends with the rows that look it up."""
    return source.endless or (goes_on and isinstance(source, StreamSourcePlan) and not source.refresh_us)


def _named(source: SourcePlan) -> str:
    if source.endless:
        return f"{source.name} never ends"
    return f"{source.name} goes on with the next start (checkpointLocation)"


def _gives_at_the_end(stage: StagePlan) -> bool:
    """Tell whether an aggregate gives nothing before the end, to any reader. An aggregate with timers, or with a ``process`` of
    its own, may give earlier output."""
    if stage.output_mode == "update" or not (stage.edges_out or stage.sink is not None):
        return False
    operator, *_ = chain_of(stage.make())
    if isinstance(operator, WindowFunction):
        return not operator._flux_timed
    if not isinstance(operator, Aggregate):
        return False
    if operator._flux_window is not None and operator._flux_window.by_clock:
        return stage.output_mode == "complete"
    return not operator._flux_timed and type(operator).process is Aggregate.process


def check_taken(plan: Plan, of: Container[int] | None = None) -> None:
    """Check that output is taken. UsageError: a stage gives rows at the end of the flow, and no sink takes them. ``of``: the
    stages of an addition; None: all stages, before the start."""
    for stage in plan.terminal:
        if stage.output_schema is not None and stage.sink is None and (of is None or stage.id in of):
            kept = (
                " before start(), or start it with keep_output=True for query.toDF(), where the input ends. keep_output=False "
                "throws the rows away"
                if of is None
                else ". toDF() and keep_output are for flows that are there from the start"
            )
            raise UsageError(
                f"stage {stage.name} gives rows ({', '.join(stage.output_schema.names)}) that nothing takes: end the flow in "
                f"to_parquet(path), to_kafka(topic, servers), foreach_batch(function), to(sink) or to_readers(){kept}"
            )


def check_folders(plan: Plan) -> None:
    """Check that the files of a folder have the same columns. UsageError: stages write rows of other columns into one folder, and
    a reader of it would find either some of the files, or columns that others lack."""
    found: dict[str, StagePlan] = {}
    for stage in plan.stages:
        if not isinstance(stage.sink, ParquetFiles):
            continue
        other = found.setdefault(stage.sink.path, stage)
        if _layout(other) != _layout(stage):
            raise UsageError(
                f"stages {other.name} and {stage.name} write different rows into one folder, {stage.sink.path}: "
                f"({_columns(other)}) and ({_columns(stage)}). Give each a folder of its own, or make their columns the same"
            )


def _layout(stage: StagePlan) -> tuple[Any, ...]:
    assert isinstance(stage.sink, ParquetFiles)
    return stage.output_schema, stage.sink.partition_by


def _columns(stage: StagePlan) -> str:
    assert isinstance(stage.sink, ParquetFiles)
    by = f" by {', '.join(stage.sink.partition_by)}" if stage.sink.partition_by else ""
    return f"{', '.join(f'{field.name} {field.type}' for field in stage.output_schema or ())}{by}"


def check_durable(flows: Sequence[Flow | FlowTo]) -> None:
    """Check the stages of a query with a checkpoint location (design: all-or-none). UsageError: a stage cannot be kept there."""
    for flow in topological([flow_of(given) for given in flows]):
        if not flow.stage.durable:
            raise UsageError(
                f"stage {flow.stage.name}: durable=False, and the query has a checkpointLocation. After the loss of everything "
                "the stage would begin empty, those before it would have dropped its rows, and its output would have other "
                "numbers than those behind it have kept. Leave durable out, or give the stage a query of its own without a "
                "checkpointLocation"
            )
        if flow.stage.order == MARKS:
            raise UsageError(
                f"stage {flow.stage.name}: order={MARKS!r}, and the query has a checkpointLocation, which keeps the order of "
                "steps: its replicas have none. Leave order out, or start the query without a checkpointLocation"
            )


def check_failures_of_stages(plan: Plan) -> None:
    """Check a plan with a checkpoint location. UsageError: its stages may not fail alone, because rows look up tables, which the
    location keeps in the order of the program's start: that would be another one without a stage that has failed."""
    tables = [edge for edge in plan.edges if looks_up(plan, edge)]
    if plan.settings.on_failure == "stage" and tables:
        raise UsageError(
            f"spark.flux.onFailure=stage, and rows look up a table on their way to {plan.stages[tables[0].consumer].name} in a "
            "query with a checkpointLocation, which keeps tables in the order of the program's start. Set it to query, join with "
            "ttl=None in a stage of its own, or start without a checkpointLocation"
        )


def check_added_tables(plan: Plan) -> None:
    """Check an addition to a query with a checkpoint location; ``plan`` has it as its newest version. UsageError: its rows look
    up a table, and the location keeps those of the start."""
    for edge in plan.edges:
        if edge.since == plan.version and looks_up(plan, edge):
            raise UsageError(
                f"rows look up a table on their way to {plan.stages[edge.consumer].name}, and the checkpointLocation keeps the "
                "tables of the start of a query: join with ttl=None in a stage of its own, or start the query anew with the "
                "lookup in it"
            )
