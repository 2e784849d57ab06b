"""How Spark cuts a DataFrame into partitions: settled when a query with a checkpoint location starts for the first time, and the
same from then on (design: cuts).

Such a query reads its DataFrames again from the start, and leaves out what it has had, partition by partition. Spark cuts files
by the number of cores that it has, and rows behind a shuffle by how many there are (adaptive execution). So it is told to go by
what was there at the first start. What it cuts before it can be told, ``spark.range`` and rows of the program, may have another
number of partitions nevertheless: that is found out before anything is read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from py4j.protocol import Py4JError
from pyspark.sql import DataFrame, SparkSession

from flux.dataflow.plan import DataFrameSourcePlan, Plan, SourcePlan
from flux.dataflow.sources import DataFrameSource, Source
from flux.errors import UsageError
from spark_integration.jobs import reason_of
from spark_integration.prepare import Kept
from spark_integration.session import for_bulk_transfer

ADAPTIVE = "spark.sql.adaptive.enabled"
LEAVES, FILES_LEAST = "spark.sql.leafNodeDefaultParallelism", "spark.sql.files.minPartitionNum"
#: What else Spark goes by, where it is set or has a default.
_OTHERS = (
    "spark.sql.files.maxPartitionBytes",
    "spark.sql.files.openCostInBytes",
    "spark.sql.files.maxPartitionNum",
    "spark.sql.shuffle.partitions",
)
_planning = threading.Lock()


def with_cuts(plan: Plan, sources: Sequence[Source], kept: Kept, known: Kept | None) -> tuple[Plan, Kept]:
    """The plan with DataFrames that are cut as at the first start, and what is to be kept of that. ``known``: what was kept
    then; None: this is the first start. UsageError: a DataFrame has another number of partitions now."""
    before = (known or {}).get("sources", {})
    said: dict[str, Any] = {}

    def cut(about: SourcePlan, source: Source) -> SourcePlan:
        if not (isinstance(about, DataFrameSourcePlan) and isinstance(source, DataFrameSource)):
            return about
        was = before.get(about.name)
        settings = was["settings"] if was else settings_of(source.dataframe.sparkSession)
        partitions = _partitions_when_cut(source.dataframe, settings, plan.settings.batch_max_rows, about.name)
        if was and was["partitions"] != partitions:
            raise UsageError(_other_number(about.name, was, partitions))
        said[about.name] = {"settings": settings, "partitions": partitions}
        return replace(about, cut_by=settings)

    made = tuple(map(cut, plan.sources, sources))
    return replace(plan, sources=made), {**kept, "sources": {**kept["sources"], **said}}


def settings_of(spark: SparkSession) -> dict[str, str]:
    """By which this session would cut a DataFrame now, without adaptive execution."""
    leaves = spark.conf.get(LEAVES, None) or str(spark.sparkContext.defaultParallelism)
    found = {ADAPTIVE: "false", LEAVES: leaves, FILES_LEAST: spark.conf.get(FILES_LEAST, None) or leaves}
    others = {key: _get(spark, key) for key in _OTHERS}
    return found | {key: value for key, value in others.items() if value is not None}


def _get(spark: SparkSession, key: str) -> str | None:
    """With Spark's default; None: it has none."""
    value = spark.conf.get(key, None)
    try:
        return str(spark.conf.get(key)) if value is None else value
    except Exception:  # whatever this release of Spark raises where nothing is set
        return None


@contextmanager
def cutting_by(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Whatever is planned meanwhile is cut by these settings. Files are cut by the session that found them, whichever plans."""
    with _planning:
        before = {key: spark.conf.get(key, None) for key in settings}
        try:
            for key, value in settings.items():
                spark.conf.set(key, value)
            yield
        finally:
            for key, was in before.items():
                if was is None:
                    spark.conf.unset(key)
                else:
                    spark.conf.set(key, was)


def partitions_of(df: DataFrame) -> int:
    """The DataFrame is planned and cut for good by this call; nothing of it is read, unless a part of it is broadcast."""
    return int(df._jdf.queryExecution().toRdd().getNumPartitions())


def _partitions_when_cut(df: DataFrame, settings: Mapping[str, str], batch_max_rows: int, name: str) -> int:
    try:
        with cutting_by(df.sparkSession, settings):
            return partitions_of(for_bulk_transfer(df, batch_max_rows, settings))
    except Py4JError as error:
        raise UsageError(f"source {name}: Spark cannot plan the DataFrame: {reason_of(error)}") from error


def _other_number(name: str, was: Mapping[str, Any], partitions: int) -> str:
    leaves = was["settings"][LEAVES]
    return (
        f"source {name}: the DataFrame has {partitions} partitions, and had {was['partitions']} when the query was started for "
        "the first time. Its rows would come in other batches, and what the query has had could not be left out. If its files "
        f"are the same, make the session with spark.default.parallelism={leaves}, as it was then"
    )
