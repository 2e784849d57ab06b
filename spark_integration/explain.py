"""The plan of a flow that has not started, as text."""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession

from controller.dag import compile_plan
from controller.explain import explain
from flux.api import Flow
from spark_integration.query import _session, _sources
from spark_integration.schema import to_arrow
from spark_integration.settings import is_case_sensitive, read_settings


def explain_flows(flows: list[Flow], spark: SparkSession | None, **options: Any) -> str:
    """Checks what ``start`` checks, but for task slots; runs nothing. Raises what it would raise."""
    session = spark or _session(_sources(flows))
    settings = read_settings(session, options)
    plan = compile_plan(
        flows,
        settings,
        lambda declared: to_arrow(session, declared),
        "",
        b"",
        case_sensitive=is_case_sensitive(session),
    )
    return explain(plan)
