"""Declared flows on their way to a plan: their sources, their session, and their compilation with the answers of Spark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from controller.planning.additions import compiled_addition
from controller.planning.compiled_plan import CompiledPlan
from controller.planning.compiler import compiled_plan
from controller.planning.inputs import topological
from controller.planning.steps import Resolvers
from flux.dataflow.flow import Flow
from flux.dataflow.relations.running_flow import Running, RunningSource, RunningStage
from flux.dataflow.sink import FlowTo, flow_of
from flux.dataflow.source import DataFrameSource, Source, StreamSource
from flux.errors import UsageError
from flux.settings import Settings
from spark_integration.expressions.analyser_answers import KNOWN, Analyses
from spark_integration.query.lookup_tables import LookupTables
from spark_integration.session import session_stopped
from spark_integration.settings import is_case_sensitive


def check_flows(flows: Sequence[Any]) -> None:
    for flow in flows:
        if not isinstance(flow, Flow | FlowTo):
            raise UsageError(f"expected a flow, the result of calling a decorated stage; got {type(flow).__name__}")


def sources_of(flows: Sequence[Flow | FlowTo]) -> list[Source]:
    """Return the sources, in the order in which the compiler numbers them."""
    found: list[Source] = []
    for flow in topological([flow_of(given) for given in flows]):
        for given in flow.inputs:
            if isinstance(given, Source) and not any(given is known for known in found):
                found.append(given)
    return found


def session_of(sources: list[Source]) -> SparkSession:
    """Return the session of a DataFrame among the sources, or else that of the program."""
    for source in sources:
        dataframe = source.dataframe if isinstance(source, DataFrameSource | StreamSource) else None
        if isinstance(dataframe, DataFrame):  # tests give a schema in its place
            return running_session(dataframe.sparkSession, f"that of the DataFrame of source {source.name}")
    # A session is active in the thread that made it; the default session is that of the whole program.
    session = SparkSession.getActiveSession() or SparkSession._instantiatedSession
    if session is None or session_stopped(session):
        raise UsageError("there is no SparkSession: make one with SparkSession.builder, or give spark=...")
    return session


def running_session(session: SparkSession, which: str) -> SparkSession:
    """Return a session. UsageError: it is stopped, and every question to it would fail with an error of another kind."""
    if session_stopped(session):
        raise UsageError(
            f"the SparkSession is stopped, {which}: make a new one with SparkSession.builder.getOrCreate(), and DataFrames of it"
        )
    return session


def running_part(flows: Sequence[Flow | FlowTo]) -> Running | None:
    """Return a handle on a running part among flows; None: there is none."""
    for flow in topological([flow_of(given) for given in flows]):
        for given in (flow, *flow.inputs):
            if isinstance(given, RunningStage | RunningSource):
                return given
    return None


def resolvers(spark: SparkSession, tables: LookupTables | None = None) -> Resolvers:
    """Return the answers of a session to what flows declare. ``tables`` reads those of lookups; None: the flow is only being
    written, and nothing is read."""
    asked = Analyses(spark, KNOWN if tables is None else None)
    rows = None if tables is None else tables.rows
    return Resolvers(asked.to_arrow, asked.steps, asked.groups, asked.order, asked.join, rows, is_case_sensitive(spark))


def compiled(
    spark: SparkSession, flows: Sequence[Flow | FlowTo], settings: Settings, query: str = "", secret: bytes = b"",
    collect: int = 0, began_with: Mapping[str, int] | None = None, tables: LookupTables | None = None,
) -> CompiledPlan:  # fmt: skip
    """Compile flows with the types, names and expressions of a session. ``tables`` as for ``resolvers``. A flow that is being
    written may go on from parts of a running query."""
    found = resolvers(spark, tables)
    part = running_part(flows) if tables is None else None
    if part is not None:
        return compiled_addition(flows, part.compiled(), found, trial=True).made
    return compiled_plan(flows, settings, found, query, secret, collect, began_with, tables is None)
