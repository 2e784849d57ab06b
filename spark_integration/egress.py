"""``toDF()``: the output of a flow as a DataFrame (DESIGN 2).

The last stage feeds a collecting stage inside the workers; when the input has ended, Spark tasks fetch from there
(``flux.egress_loop``). Fetching can be repeated, so a task may be retried. Spark then holds the rows like those of a
local checkpoint, and the workers give their task slots back.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame, SparkSession

from flux.api import Flow
from spark_integration.executor import egress_function
from spark_integration.follow import follow
from spark_integration.query import Query, start_query
from spark_integration.schema import for_spark


def to_df(flow: Flow, spark: SparkSession | None = None, progress: bool = False, **options: Any) -> DataFrame:
    """Runs the flow to its end. ``progress``: show it on the screen. Raises what the query raises."""
    query = start_query([flow], spark=spark, keep_output=True, **options)
    if progress:
        follow(query)
    return query.toDF()


def fetch_all(query: Query) -> DataFrame:
    """Of a query whose output is all there."""
    stage = next(stage for stage in query.plan.stages if stage.collects)
    struct, schema = for_spark(stage.schemas[0], f"stage {stage.name}")
    fetch = egress_function(query.plan, query.rendezvous, stage.id, schema)
    numbers = query.spark.range(0, stage.partitions, 1, stage.partitions)
    return numbers.mapInArrow(fetch, struct).localCheckpoint(eager=True)
