"""The data source ``flux`` of PySpark: Structured Streaming's side of a running query (design: micro-batches).

Spark makes it in Python processes of its own, on the host of the driver, again for every micro-batch.
"""

from __future__ import annotations

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
    """Register ``format("flux")`` in the session."""
    spark.dataSource.register(FluxDataSource)
