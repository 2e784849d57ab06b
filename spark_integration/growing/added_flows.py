"""Flows that are to be added to a running query: everything that can be checked is checked in the program, before any process
hears of the change (design: additions)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pyspark.sql import SparkSession

from controller.planning.additions import PlanAddition, check_addition, compiled_addition
from controller.planning.compiled_plan import CompiledPlan
from flux.dataflow.flow import Flow
from flux.dataflow.plan import ById, StreamSourcePlan
from flux.dataflow.sink import FlowTo, QueryReaders
from flux.dataflow.source import DataFrameSource, Source
from flux.errors import UsageError
from spark_integration.query import running_queries
from spark_integration.query.declarations import resolvers
from spark_integration.query.lookup_tables import LookupTables
from spark_integration.query.source_setup import prepared
from spark_integration.settings import (
    check_replicas,
    executors_at_most,
    grows_on_demand,
    ignored_files,
    is_case_sensitive,
    live_slots,
)
from spark_integration.streaming.flux_format import register
from spark_integration.tasks.dataframe_partitions import with_cuts
from spark_integration.tasks.shipping_checks import check_outputs, check_shipping


def checked_addition(
    spark: SparkSession, flows: Sequence[Flow | FlowTo], running: CompiledPlan, workers: int, began_with: int
) -> PlanAddition:
    """Return the addition of flows to a running plan, with prepared sources and sinks. ``workers``: the number that
    the query is to have now; ``began_with``: that of the start. UsageError, SchemaError: the flows do not fit."""
    plan = running.plan
    addition = compiled_addition(flows, running, resolvers(spark, LookupTables(plan.settings.lookup_max_bytes)))
    check_addition(addition)
    check_outputs(addition.change.stages)
    _check_sources(addition)
    made = addition.made.plan
    check_shipping(made, since=made.version)
    check_replicas(replace(made, stages=ById(addition.change.stages)), workers, executors_at_most(spark))
    if any(isinstance(each, DataFrameSource) for each in added_sources(addition).values()):
        _check_slot(spark)
    if any(isinstance(stage.sink, QueryReaders) for stage in addition.change.stages):
        register(spark)
    parts = replace(plan, sources=ById(addition.change.sources), stages=ById(addition.change.stages))
    settled, facts = prepared(parts, None, is_case_sensitive(spark), ignored_files(spark))
    if plan.durable:
        settled, facts = with_cuts(settled, addition.made.sources, facts, None)
    addition = addition.with_parts(settled.sources, settled.stages, facts)
    return addition.with_log_shares(plan.began_with or began_with)


def added_sources(addition: PlanAddition) -> Mapping[int, Source]:
    """Return the sources that an addition brings, by id."""
    return {each.id: addition.made.sources[each.id] for each in addition.change.sources}


def _check_slot(spark: SparkSession) -> None:
    """Raise UsageError if no task slot is left for the Spark job that reads a new DataFrame."""
    if grows_on_demand(spark):
        return
    slots, held = live_slots(spark), running_queries.others().slots
    if slots - held < 1:
        raise UsageError(
            f"a Spark job is to read the DataFrame, and no task slot is free for it: {slots} exist, and workers hold {held}. "
            "Give the cluster more executor cores, or query.scale() the query down first"
        )


def _check_sources(addition: PlanAddition) -> None:
    """Raise UsageError for sources that a running query cannot get."""
    for source in addition.change.sources:
        if isinstance(source, StreamSourcePlan):
            what = "a table that is read anew" if source.refresh_us else "micro-batches of Structured Streaming"
            raise UsageError(
                f"source {source.name} is {what}, which can only be there from the start of a query: start a query of its own "
                "with it, or read the input inside the workers, as with flux.kafka, flux.files or flux.datasource"
            )
