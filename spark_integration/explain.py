"""The plan of a flow that has not started, as text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pyspark.sql import SparkSession

from controller.dag import compile_plan
from controller.ends import check_ends
from controller.explain import explain
from flux.dataflow.api import Flow
from flux.dataflow.sink import FlowTo
from spark_integration.schema import to_arrow
from spark_integration.settings import (
    has_one_executor,
    is_case_sensitive,
    read_settings,
    says_where_copies_go,
)
from spark_integration.start import session_of, sources_of


def explain_flows(flows: list[Flow | FlowTo], spark: SparkSession | None, **options: Any) -> str:
    """Explain flows. Checks the same as ``start``, but for task slots, and raises its errors; runs nothing."""
    session = spark or session_of(sources_of(flows))
    settings = read_settings(session, options)
    if has_one_executor(session) and not says_where_copies_go(session, options):
        settings = replace(settings, same_executor=True)
    plan = compile_plan(
        flows,
        settings,
        lambda declared: to_arrow(session, declared),
        "",
        b"",
        case_sensitive=is_case_sensitive(session),
    )
    check_ends(plan)
    return explain(plan)
