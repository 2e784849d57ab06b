"""Flux: a fault-tolerant, load-balancing exchange for PySpark. This module is the public face; see README.md.

settings        The settings of a query: their names, defaults, bounds and meanings
arguments       Calls of the public functions: arguments that do not fit are a UsageError
errors          Errors that users see
tracebacks      Tracebacks of wrong calls, without the frames of Flux
failure_domain  The rack, zone or host of a worker, by which replicas are spread
testing         A stage in a unit test, without workers and without Spark
source_check    A trial of a source: the same rows under the same numbers, however often it is read
sink_check      A trial of a sink, as queries use it among faults
sink_lines      The lines of a sink's code that such a trial reaches, at which it breaks calls off
json_rows       A look at text of JSON for rows that are null, before a reader of Arrow dies of them
tentative_view  A table by key of stable and tentative rows, which tells the rows that an undo changes

Its functions reach upwards to ``spark_integration`` when they are called: importing flux imports neither pyspark nor numba nor
Arrow, but running a flow does.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flux.arguments import checked

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.datasource import DataSource
    from pyspark.sql.types import StructType

    import flux.testing as testing
    from flux.connectors.files.errors import BadFile, FileChanged, FileGone
    from flux.connectors.files.parquet_sink import to_parquet
    from flux.connectors.files.source import files
    from flux.connectors.kafka.errors import (
        BadRecord,
        BrokerBroken,
        BrokerUnreachable,
        CorruptRecords,
        DataLost,
        KafkaError,
        NotPermitted,
        UnfitValue,
    )
    from flux.connectors.kafka.sink_options import to_kafka
    from flux.connectors.kafka.source import kafka
    from flux.dataflow.flow import Flow, Stage, batch, stage
    from flux.dataflow.grouping import WindowKey
    from flux.dataflow.relations.as_of import asof_join
    from flux.dataflow.relations.lookups import lookup
    from flux.dataflow.relations.ranking import dedup
    from flux.dataflow.relations.tops import last, top
    from flux.dataflow.sink import FlowTo, Position, Sink, SinkContext, SinkTraits
    from flux.dataflow.source import Positioned, RowStart, Source, source, stream
    from flux.dataflow.source_reader import SILENT, PartitionReader, SourceReader
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
    from flux.eventlog.source import events
    from flux.expressions.steps import RowSteps
    from flux.operators.aggregate import Aggregate, count, count_distinct, max, mean, min, sum
    from flux.operators.keyed_operator import KeyedOperator, KeyState
    from flux.operators.operator import Context, Operator
    from flux.tentative_view import TentativeView, ViewChanges
    from flux.windows.window import END_OF_TIME, NEVER, NOW, session_window, window
    from spark_integration.query.query import Query
    from spark_integration.service.stream_service import StreamService

__version__ = "0.4.0"

__all__ = [
    "END_OF_TIME",
    "NEVER",
    "NOW",
    "SILENT",
    "Aggregate",
    "BadFile",
    "BadRecord",
    "BrokerBroken",
    "BrokerUnreachable",
    "Context",
    "CorruptRecords",
    "DataLost",
    "DataSource",
    "FileChanged",
    "FileGone",
    "Flow",
    "FlowTo",
    "FluxError",
    "KafkaError",
    "KeyState",
    "KeyedOperator",
    "MoveFailed",
    "NonDeterministicInputError",
    "NotPermitted",
    "Operator",
    "PartitionReader",
    "Position",
    "Positioned",
    "ProtocolError",
    "QueryFailed",
    "QueryTimeout",
    "RowStart",
    "SchemaError",
    "Sink",
    "SinkContext",
    "SinkTraits",
    "SnapshotError",
    "Source",
    "SourceReader",
    "Stage",
    "TentativeView",
    "UnfitValue",
    "UsageError",
    "UserCodeError",
    "ViewChanges",
    "asof_join",
    "batch",
    "count",
    "count_distinct",
    "datasource",
    "dedup",
    "events",
    "explain",
    "files",
    "follow",
    "kafka",
    "last",
    "lookup",
    "max",
    "mean",
    "min",
    "queries",
    "serve",
    "session_window",
    "source",
    "sql",
    "stage",
    "start",
    "stream",
    "sum",
    "testing",
    "to_df",
    "to_kafka",
    "to_parquet",
    "top",
    "window",
]


#: Modules of the names above that are not defined below.
_HOMES = {
    "flux.operators.aggregate": ("Aggregate", "count", "count_distinct", "max", "mean", "min", "sum"),
    "flux.dataflow.relations.as_of": ("asof_join",),
    "flux.dataflow.relations.lookups": ("lookup",),
    "flux.dataflow.relations.ranking": ("dedup",),
    "flux.dataflow.relations.tops": ("last", "top"),
    "flux.dataflow.flow": ("Flow", "Stage", "batch", "stage"),
    "flux.connectors.files.parquet_sink": ("to_parquet",),
    "flux.connectors.files.errors": ("BadFile", "FileChanged", "FileGone"),
    "flux.connectors.files.source": ("files",),
    "flux.connectors.kafka.errors": (
        "BadRecord", "BrokerBroken", "BrokerUnreachable", "CorruptRecords", "DataLost", "KafkaError", "NotPermitted",
        "UnfitValue",
    ),
    "flux.connectors.kafka.sink_options": ("to_kafka",),
    "flux.connectors.kafka.source": ("kafka",),
    "flux.operators.keyed_operator": ("KeyState", "KeyedOperator"),
    "flux.operators.operator": ("Context", "Operator"),
    "flux.dataflow.sink": ("FlowTo", "Position", "Sink", "SinkContext", "SinkTraits"),
    "flux.dataflow.source_reader": ("SILENT", "PartitionReader", "SourceReader"),
    "flux.dataflow.source": ("Positioned", "RowStart", "Source", "source", "stream"),
    "flux.eventlog.source": ("events",),
    "flux.errors": (
        "FluxError", "MoveFailed", "NonDeterministicInputError", "ProtocolError", "QueryFailed", "QueryTimeout", "SchemaError",
        "SnapshotError", "UsageError", "UserCodeError",
    ),
    "flux.tentative_view": ("TentativeView", "ViewChanges"),
    "flux.windows.window": ("END_OF_TIME", "NEVER", "NOW", "session_window", "window"),
}  # fmt: skip
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Load a public name when it is used: the ``flux`` command begins without Arrow and numba, which take longer to load than the
    command to run. ``flux.testing`` is there after ``import flux``, too."""
    if name == "testing":
        return importlib.import_module("flux.testing")
    if name == "DataSource":
        return importlib.import_module("spark_integration.streaming.flux_format").FluxDataSource
    if name not in _HOME:
        raise AttributeError(f"module 'flux' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _settings() -> list[str]:
    from flux.settings import TABLE

    return [setting.keyword for setting in TABLE]


@checked("flux.start", _settings)
def start(
    *flows: Flow | FlowTo,
    queryName: str | None = None,  # noqa: N803
    spark: SparkSession | None = None,
    keep_output: bool | None = None,
    checkpointLocation: str | os.PathLike[str] | None = None,  # noqa: N803
    removed: Sequence[str] = (),
    **options: Any,
) -> Query:
    """Run one or more flows, with everything that feeds them, as one query in the background.

    checkpointLocation: a directory on a file system of the driver, which must be yours alone (mode 0700), or a URI of an object
    store that ``pyarrow.fs`` opens, such as ``s3://bucket/query``. A query that is started again with the same location goes on
    where it was, exactly once, after any loss: of workers, executors, the driver.
    The flows are all that the query has by then, those that were added while it ran included.
    removed: names of stages in the location that the flows lack: they are given up, with all stages that depend on them.
    keep_output: True keeps the output of the flow in the workers, for ``query.toDF()``; False throws away rows that no sink
    takes. A flow with such rows is refused if neither is given. Other options are those of ``spark.flux.*`` with underscores, for
    example ``log_max_bytes="64m"``. UsageError and SchemaError are raised before anything runs."""
    from spark_integration.query.start import start_query

    return start_query(list(flows), queryName, spark, keep_output, checkpointLocation, removed, **options)


@checked("flux.to_df", _settings)
def to_df(flow: Flow, spark: SparkSession | None = None, progress: bool = False, **options: Any) -> DataFrame:
    """Run a flow to the end of its input; return its output as a DataFrame, held by Spark like a local checkpoint."""
    from spark_integration.query.start import to_df

    return to_df(flow, spark, progress, **options)


@checked("flux.sql")
def sql(sqlQuery: str, args: Mapping[str, Flow | Source | DataFrame] | None = None, **kwargs: Any) -> Flow:  # noqa: N803
    """Make a flow of a SELECT in Spark's SQL over flows, sources and DataFrames, as ``spark.sql`` does over DataFrames::

        flux.sql("SELECT window.start, count(*) AS n FROM bids GROUP BY window(ts, '10 minutes')", bids=bids)

    sqlQuery  the text, as Spark parses it
    args      flows by the names that the text has for them, where these are no names of Python
    kwargs    the same as keywords

    Each part of the text becomes the method of flows that does the same, so results, event time and state are as those of flows.
    A text reads the given flows alone. Any part that docs/sql.md does not list is refused before it is analysed. UsageError says
    line and position of the part, and the nearest accepted form; it is raised for mistakes in the text, too."""
    from spark_integration.sql.query import sql_flow

    return sql_flow(sqlQuery, args, kwargs)


@checked("flux.serve", _settings)
def serve(
    location: str | os.PathLike[str] | None = None,
    http: str = "127.0.0.1:8080",
    *,
    gateways: int = 1,
    allow: Sequence[str] = (),
    state_bytes: int = 0,
    spark: SparkSession | None = None,
    **options: Any,
) -> StreamService:
    """Start a service: streams, queries in SQL and their results over HTTP, on one plan that grows (docs/service.md)::

        with flux.serve("/data/service", "127.0.0.1:8080", gateways=2) as service:
            service.wait()

    location  directory or URI of streams, registrations, state and results, which workers and gateways reach. A service that is
              started again there goes on where it was. None: a folder that is removed when the service stops
    http      HOST:PORT of the first gateway; further ones have the ports behind it
    gateways  number of processes that speak HTTP; each is started again when it ends
    allow     operators that a registration may name beside SQL, each MODULE:NAME of an installed module
    state_bytes  bytes of state of all queries beyond which no other one is registered; at twice this number the query with the
              largest state fails. 0: there is no bound
    options   those of ``spark.flux.*`` with underscores. Stages have one partition unless a registration says more

    UsageError: a service runs on the location, a port is taken, or something else does not fit; nothing runs then."""
    from spark_integration.query.declarations import session_of
    from spark_integration.service.stream_service import serve

    given, session = None if location is None else os.fspath(location), session_of([]) if spark is None else spark
    return serve(given, http, gateways, lambda: session, allow, state_bytes=state_bytes, **options)


def _run_service(*arguments: Any) -> None:
    """Run the program of ``flux serve``."""
    from spark_integration.service.command import run

    run(*arguments)


@checked("flux.explain", _settings)
def explain(*flows: Flow | FlowTo, spark: SparkSession | None = None, **options: Any) -> str:
    """Return a description of the query: sources, stages with keys, partitions and replicas, and policies. Nothing is started,
    but the DataFrames of tables in joins are read."""
    from spark_integration.query.start import explain_flows

    return explain_flows(list(flows), spark, **options)


def _check_columns(flow: Flow) -> None:
    """Let Spark resolve the columns of a flow that is being written, if there is a session."""
    if "pyspark" in sys.modules:
        from spark_integration.query.start import check_columns

        check_columns(flow)


def _column(given: Flow | Source, name: str) -> Column | None:
    """Return the column of this name of a flow or a source; None: there is none, or no session that would know."""
    if "pyspark" in sys.modules and not name.startswith("_"):
        from spark_integration.query.start import column

        return column(given, name)
    return None


def _schema(given: Flow | Source) -> StructType:
    """Return the columns of a flow or a source. UsageError, SchemaError: there is no session, or the flow has a mistake."""
    from spark_integration.query.start import schema_of

    return schema_of(given)


def _is_streaming(given: Flow | Source) -> bool:
    """Return whether rows of a flow come from a source that never ends."""
    from spark_integration.query.start import is_streaming

    return is_streaming(given)


def _computed(schema: pa.Schema, texts: list[str]) -> RowSteps:
    """Return the steps that add columns, which are texts of SQL, to rows. UsageError: there is no session."""
    if "pyspark" in sys.modules:
        from spark_integration.query.start import computed

        if (steps := computed(schema, texts)) is not None:
            return steps
    from flux.errors import UsageError

    raise UsageError(
        "where=... of a measure is resolved by Spark, and there is no session: SparkSession.builder.getOrCreate() makes one"
    )


def _window_key(given: Any) -> WindowKey | None:
    """Return the window that a Column of Spark calls; None: it is another column."""
    if type(given).__module__.startswith("pyspark."):
        from spark_integration.expressions.windows import window_key

        return window_key(given)
    return None


@checked("flux.datasource")
def datasource(
    source: type[DataSource],
    options: Mapping[str, Any] | None = None,
    schema: Any = None,
    *,
    stream: bool = False,
    partitions: int | None = None,
    ledger: str | os.PathLike[str] | None = None,
    commit: bool = False,
    poll: float | str = "200ms",
    name: str | None = None,
) -> Source:
    """Make a source of a Python data source of PySpark, read inside the workers and not through the JVM: any class derived
    from ``pyspark.sql.datasource.DataSource``, as ``spark.dataSource.register`` takes it.

    options     as for ``spark.read.format(...).options(...)``; the path of ``load(path)`` is the option "path"
    schema      DDL or a StructType, in place of the data source's own
    partitions  number of its partitions that are read at the same time; default: up to 8

    The data source must give the same rows in the same order when a partition is read again.

    stream      reads the source's ``streamReader`` or ``simpleStreamReader``, in one worker, and never ends
    ledger      for streams: a folder on a disk or network mount that all workers reach, where the ends of batches are written
    commit      for streams: whether ``commit`` of the data source is called with the offset that every replica has applied. A
                later reader may ask again for some batches before it: only for data sources that give these nevertheless
    poll        time after which a stream that has nothing is asked again"""
    from spark_integration.datasource.batch import datasource

    return datasource(
        source,
        options,
        schema,
        stream=stream,
        partitions=partitions,
        ledger=ledger,
        commit=commit,
        poll=poll,
        name=name,
    )


def _arrow_schema(declared: Any) -> Any:
    """Return the pyarrow schema of a StructType, with UTC as time zone; needs no session."""
    from spark_integration.schema import struct_to_arrow

    return struct_to_arrow(declared, "UTC")


@checked("flux.follow")
def follow(query: Query) -> None:
    """Show the progress of a query on the screen until all its output is there or it has failed."""
    from spark_integration.query.follow import follow

    follow(query)


@checked("flux.queries")
def queries() -> list[Query]:
    """Return the queries of this program that hold something of Spark's, the oldest first. It serves users without a handle, as
    after a cell of a notebook was interrupted."""
    from spark_integration.query.running_queries import active_queries

    return active_queries()
