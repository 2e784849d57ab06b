"""Flux: a fault-tolerant, load-balancing exchange for PySpark. This is the public face; see README.md.

The one place that reaches upwards, lazily: importing flux does not import pyspark, running a flow does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from flux.aggregate import Aggregate, count, max, mean, min, sum
from flux.api import Flow, Source, Stage, source, stage
from flux.errors import (
    FluxError,
    MoveFailed,
    NonDeterministicInputError,
    ProtocolError,
    QueryFailed,
    QueryTimeout,
    SchemaError,
    SnapshotError,
    UsageError,
    UserCodeError,
)
from flux.operator import Context, Operator

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    import flux.testing as testing
    from spark_integration.query import Query

__version__ = "0.4.0"

__all__ = [
    "Aggregate",
    "Context",
    "Flow",
    "FluxError",
    "MoveFailed",
    "NonDeterministicInputError",
    "Operator",
    "ProtocolError",
    "QueryFailed",
    "QueryTimeout",
    "SchemaError",
    "SnapshotError",
    "Source",
    "Stage",
    "UsageError",
    "UserCodeError",
    "count",
    "explain",
    "follow",
    "max",
    "mean",
    "min",
    "source",
    "stage",
    "start",
    "sum",
    "testing",
    "to_df",
]


def __getattr__(name: str) -> Any:
    """``flux.testing`` is there after ``import flux``, and costs nothing until it is used."""
    if name == "testing":
        return importlib.import_module("flux.testing")
    raise AttributeError(f"module 'flux' has no attribute {name!r}")


def start(
    *flows: Flow,
    queryName: str | None = None,  # noqa: N803
    spark: SparkSession | None = None,
    keep_output: bool = False,
    **options: Any,
) -> Query:
    """Run one or more flows, with everything that feeds them, as one query in the background.

    keep_output: keep the output of the flow in the workers, for ``query.toDF()``. Other options are those of
    ``spark.flux.*`` with underscores, for example ``log_max_bytes="64m"``. UsageError and SchemaError are raised
    before anything runs."""
    from spark_integration.query import start_query

    return start_query(list(flows), queryName, spark, keep_output, **options)


def to_df(flow: Flow, spark: SparkSession | None = None, progress: bool = False, **options: Any) -> DataFrame:
    """Run a flow to the end of its input; its output as a DataFrame, held by Spark like a local checkpoint."""
    from spark_integration import egress

    return egress.to_df(flow, spark, progress, **options)


def explain(*flows: Flow, spark: SparkSession | None = None, **options: Any) -> str:
    """What would run, as text: sources, stages with keys, partitions and replicas, and policies. Nothing is started."""
    from spark_integration.explain import explain_flows

    return explain_flows(list(flows), spark, **options)


def _arrow_schema(declared: Any) -> Any:
    """The pyarrow schema of a StructType, with UTC as time zone; needs no session."""
    from spark_integration.schema import struct_to_arrow

    return struct_to_arrow(declared, "UTC")


def follow(query: Query) -> None:
    """Show the progress of a query on the screen until all its output is there or it has failed."""
    from spark_integration.follow import follow

    follow(query)
