"""Cuts of a DataFrame into partitions by Spark: settled when a query with a checkpoint location starts for the first time, and
the same from then on (design: cuts).

Such a query reads its DataFrames again from the start, and leaves out the rows that it has had, partition by partition.
Spark cuts files by the number of its cores, and rows behind a shuffle by their number (adaptive execution). So it is given
the settings of the first start. Input that Spark cuts before it can be told, ``spark.range`` and rows of the program, may
have another number of partitions nevertheless: that is found out before anything is read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors.exceptions.captured import CapturedException
from pyspark.sql import DataFrame, SparkSession

from flux.dataflow.plan import ById, DataFrameSourcePlan, Plan, SourcePlan
from flux.dataflow.source import DataFrameSource, Source
from flux.errors import UsageError
from spark_integration.query.source_setup import Kept
from spark_integration.session import Settings, for_reading
from spark_integration.tasks.jobs import reason_of

ADAPTIVE, SHUFFLED = "spark.sql.adaptive.enabled", "spark.sql.shuffle.partitions"
LEAVES, FILES_LEAST = "spark.sql.leafNodeDefaultParallelism", "spark.sql.files.minPartitionNum"
#: Further settings by which files are cut.
_OF_FILES = (
    "spark.sql.files.maxPartitionBytes",
    "spark.sql.files.openCostInBytes",
    "spark.sql.files.maxPartitionNum",
)
#: Held while settings of a session are read or changed for a moment to plan: no other thread may take them for its own.
_planning = threading.Lock()


def with_cuts(plan: Plan, sources: Mapping[int, Source], kept: Kept, known: Kept | None) -> tuple[Plan, Kept]:
    """Return the plan with DataFrames that are cut as at the first start, and the kept data with these cuts. ``known`` was
    kept then; None: this is the first start. UsageError: a DataFrame has another number of partitions now."""
    before = (known or {}).get("sources", {})
    said: dict[str, Any] = {}

    def cut(about: SourcePlan) -> SourcePlan:
        source = sources[about.id]
        if not (isinstance(about, DataFrameSourcePlan) and isinstance(source, DataFrameSource)):
            return about
        was = before.get(about.name)
        settings = was["settings"] if was else settings_of(source.dataframe.sparkSession)
        made = replace(about, cut_by=settings)
        partitions = _partitions(made, source.dataframe, plan.settings.batch_max_rows)
        if was and was["partitions"] != partitions:
            raise UsageError(_other_number(about.name, was, partitions))
        said[about.name] = {"settings": settings, "partitions": partitions}
        return made

    made = ById(map(cut, plan.sources))
    return replace(plan, sources=made), {**kept, "sources": {**kept["sources"], **said}}


def settings_of(spark: SparkSession) -> dict[str, str | None]:
    """Return the settings by which this session would cut a DataFrame now, without adaptive execution. None: not set."""
    with _planning:
        return {ADAPTIVE: "false", SHUFFLED: _get(spark, SHUFFLED)} | _of_files(spark)


def _of_files(spark: SparkSession) -> dict[str, str | None]:
    leaves = spark.conf.get(LEAVES, None) or str(spark.sparkContext.defaultParallelism)
    found = {LEAVES: leaves, FILES_LEAST: spark.conf.get(FILES_LEAST, None) or leaves}
    return found | {key: _get(spark, key) for key in _OF_FILES}


def _get(spark: SparkSession, key: str) -> str | None:
    """Return a setting, or Spark's default; None: it has none."""
    try:
        value = spark.conf.get(key)
    except Exception:  # other releases of Spark raise other errors where nothing is set
        return None
    return None if value is None or value == "<undefined>" else str(value)


@contextmanager
def cutting_by(spark: SparkSession, settings: Settings) -> Iterator[None]:
    """Have files cut by these settings that are planned meanwhile. Spark takes the settings of the session that found the
    files, not of the session that plans. If that session would cut them in this way by itself, its settings are left alone."""
    with _planning:  # in any case: a value that another thread has set for a moment is not the session's own
        others = {key: settings.get(key) for key, now in _of_files(spark).items() if settings.get(key) != now}
        before = {key: spark.conf.get(key, None) for key in others}
        try:
            for key, value in others.items():
                _set(spark, key, value)
            yield
        finally:
            for key, value in others.items():
                if spark.conf.get(key, None) == value:  # otherwise another thread has set it meanwhile
                    _set(spark, key, before[key])


def _set(spark: SparkSession, key: str, value: str | None) -> None:
    if value is None:
        spark.conf.unset(key)
    else:
        spark.conf.set(key, value)


def partitions_of(df: DataFrame) -> int:
    """Return the number of partitions. This call plans and cuts the DataFrame for good. It reads only the data that Spark
    needs before: broadcast tables, subqueries, and a sample of rows that are sorted."""
    return int(df._jdf.queryExecution().toRdd().getNumPartitions())


def _partitions(about: DataFrameSourcePlan, df: DataFrame, batch_max_rows: int) -> int:
    assert about.cut_by is not None
    try:
        with cutting_by(df.sparkSession, about.cut_by):
            return partitions_of(for_reading(df, about.columns, batch_max_rows, about.cut_by))
    except (Py4JError, CapturedException) as error:
        raise UsageError(f"source {about.name}: Spark cannot plan the DataFrame: {reason_of(error)}") from error


def _other_number(name: str, was: Mapping[str, Any], partitions: int) -> str:
    leaves = was["settings"][LEAVES]
    return (
        f"source {name}: the DataFrame has {partitions} partitions, and had {was['partitions']} when the query was started for "
        "the first time. Its rows would come in other batches, and what the query has had could not be left out. If its files "
        f"are the same, make the session with spark.default.parallelism={leaves}, as it was then"
    )
