"""Sessions of our own beside the user's: with settings that suit bulk transfer, while the user's session stays as it is.

By default Spark bounds the batches that it passes to Python by bytes, and to do so adds up the size of the whole batch at
every row, which costs three quarters of the throughput. Bounding them by rows, computed from the schema's width, keeps
memory bounded at full speed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from py4j.protocol import Py4JError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import DataType, StructType

#: Settings of a session by name; None: it is not set there.
Settings = Mapping[str, str | None]
#: Wanted size of one batch from Spark to Python.
BATCH_BYTES = 4 << 20
ROWS_MIN, ROWS_MAX = 1_024, 65_536


def row_bytes(schema: StructType) -> int:
    """Estimate the width of a row, with 64 bytes for types without a fixed width."""
    return sum(_width(field.dataType) for field in schema.fields) or 1


def _width(kind: DataType) -> int:
    widths = {"boolean": 1, "byte": 1, "short": 2, "integer": 4, "float": 4, "date": 4, "decimal": 16}
    widths |= {"long": 8, "double": 8, "timestamp": 8, "timestamp_ntz": 8}
    if isinstance(kind, StructType):
        return row_bytes(kind)
    return widths.get(kind.typeName(), 64)


def for_reading(
    df: DataFrame, columns: Sequence[int] | None, batch_max_rows: int, cut_by: Settings | None = None
) -> DataFrame:
    """Return the DataFrame as an ingress job reads it: with the given columns (None: all), in a session for mapInArrow, with
    settings that determine its cuts. mapInArrow looks columns up by name, and finds none whose name has a dot or is there
    twice."""
    names = [f"c{position}" for position in range(len(df.columns))]
    df = df.toDF(*names)
    if columns is not None:
        df = df.select([names[position] for position in columns])
    return for_bulk_transfer(df, batch_max_rows, cut_by)


def for_bulk_transfer(df: DataFrame, batch_max_rows: int, more: Settings | None = None) -> DataFrame:
    """Return the same DataFrame in a cloned session with settings for mapInArrow, and ``more``. If Spark cannot clone it
    (Spark Connect, another release), return the DataFrame itself, which is slower and gives the same rows."""
    spark = df.sparkSession
    rows = min(max(BATCH_BYTES // row_bytes(df.schema), ROWS_MIN), ROWS_MAX, batch_max_rows)
    try:
        clone = spark._jsparkSession.cloneSession()
        conf = clone.sessionState().conf()
        for key, value in {**_transfer_settings(rows), **(more or {})}.items():
            if value is None:
                conf.unsetConf(key)
            else:
                conf.setConfString(key, value)
        plan = df._jdf.queryExecution().logical()
        rebound = spark._jvm.org.apache.spark.sql.classic.Dataset.ofRows(clone, plan)
        return DataFrame(rebound, SparkSession(spark.sparkContext, clone))
    except (Py4JError, AttributeError, TypeError):
        return df


def set_for_bulk_transfer(batch: DataFrame, batch_max_rows: int) -> None:
    """Set the same for a micro-batch, whose session is a copy that Spark has made for the streaming query alone."""
    rows = min(max(BATCH_BYTES // row_bytes(batch.schema), ROWS_MIN), ROWS_MAX, batch_max_rows)
    for key, value in _transfer_settings(rows).items():
        batch.sparkSession.conf.set(key, value)


def _transfer_settings(rows: int) -> dict[str, Any]:
    return {
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(rows),
        "spark.sql.execution.arrow.maxBytesPerBatch": str((1 << 31) - 1),
        # A worker that waits for rows is not idle in the sense of this limit.
        "spark.sql.execution.pyspark.udf.idleTimeoutSeconds": "0",
    }


def session_stopped(spark: SparkSession, ask_jvm: bool = False) -> bool:
    """Tell whether the session's context was stopped, as far as this process knows. ``ask_jvm``: also whether it is being
    stopped, or its JVM is gone."""
    jsc = spark.sparkContext._jsc
    if jsc is None or not ask_jvm:
        return jsc is None
    try:
        return bool(jsc.sc().isStopped())
    except (Py4JError, OSError, AttributeError):
        return True
