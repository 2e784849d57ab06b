"""The data source ``flux`` of PySpark: Structured Streaming's side of a running query (design: micro-batches).

Spark makes it in Python processes of its own, on the host of the driver, again for every micro-batch.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from spark_integration.streaming.stream_reader import FluxStreamReader, spark_schema
from spark_integration.streaming.stream_writer import StreamWriter, writer_of


class FluxDataSource(DataSource):  # type: ignore[misc]
    """Data source of ``df.writeStream.format("flux").option("query", name)``, options as in ``writer_of``, and of
    ``spark.readStream.format("flux")``, options as in ``stream_reader.options_of``."""

    @classmethod
    def name(cls) -> str:
        return "flux"

    def schema(self) -> StructType:
        """Return the schema of rows that are read, output of a running query."""
        return spark_schema(self.options)

    def streamReader(self, schema: StructType) -> FluxStreamReader:  # noqa: N802
        return FluxStreamReader(self.options, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802
        return writer_of(dict(self.options), schema)


def register(spark: SparkSession) -> None:
    """Register ``format("flux")`` in the session, and in the active session of the calling thread.

    Spark looks for formats written in Python in the active session of the calling thread, and not in the session of the
    DataFrame. Each thread of Python has a thread of its own in the JVM, at first without an active session, and has a new
    one after Ctrl-C in a call of the JVM. There the given session becomes active, as with ``createDataFrame``."""
    spark.dataSource.register(FluxDataSource)
    jvm: Any = spark._jvm
    sessions = jvm.org.apache.spark.sql.classic.SparkSession
    found = sessions.getActiveSession()
    active = found.get() if found.isDefined() else None
    if active is None or active.sparkContext().isStopped():
        sessions.setActiveSession(spark._jsparkSession)
    elif active != spark._jsparkSession:
        SparkSession(spark.sparkContext, active).dataSource.register(FluxDataSource)
