"""The query: for each row the number of rows of its key up to it, from a topic to a topic, exactly once, in the executors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession

import flux
from flux.connectors.kafka.records import kernels
from partitioning.key_index import KeyIndex
from spark_integration.query.query import Query
from spark_integration.query.start import start_query

#: The rows of the query: one for each record of the topic.
SCHEMA = pa.schema([("key", pa.binary()), ("due_us", pa.int64()), ("count", pa.int64())])


class RunningCount(flux.Operator):
    """Operator that gives each row with the number of rows of its key up to it, itself included."""

    schema = SCHEMA
    snapshot_classes = ()

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.keys = KeyIndex([SCHEMA.field("key")])
        self.counts = np.zeros(0, np.int64)

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        places = self.keys.slots([batch.column("key")])
        if len(self.keys) > len(self.counts):
            self.counts = np.append(self.counts, np.zeros(len(self.keys), np.int64))
        before = np.empty(batch.num_rows, np.int64)
        kernels.number(places, 0, self.counts, before)
        return pa.RecordBatch.from_arrays(
            [batch.column("key"), batch.column("due_us"), pa.array(before + 1)], schema=SCHEMA
        )

    def snapshot(self) -> Any:
        return self.keys.to_arrow(), self.counts

    def restore(self, snapshot: Any) -> None:
        keys, counts = snapshot
        self.keys, self.counts = KeyIndex.from_arrow(keys), counts.copy()


class Totals(flux.Aggregate):
    rows = flux.count()


def start(
    spark: SparkSession,
    address: str,
    given: str,
    out: str,
    partitions: int,
    workers: int,
    replicas: int,
    **options: Any,
) -> Query:
    """Start the query from topic ``given`` to topic ``out``, whose keyed stage has ``partitions`` partitions."""
    count = flux.stage(key="key", partitions=partitions, replicas=replicas, name="count")(RunningCount)
    flow = count(_rows(address, given)).to_kafka(out, address, key="key", value=["due_us", "count"], format="csv")
    return start_query([flow], "bench-kafka", spark, workers=workers, **options)


def start_totals(spark: SparkSession, address: str, given: str, partitions: int, workers: int, **options: Any) -> Query:
    """Start a query from topic ``given`` to state, with one count for each key."""
    totals = flux.stage(key="key", partitions=partitions, name="totals")(Totals)
    flow = totals(_rows(address, given))
    return start_query([flow], "bench-kafka", spark, keep_output=False, workers=workers, **options)


def _rows(address: str, topic: str) -> Any:
    return flux.kafka(topic, address, format="csv", schema="due_us BIGINT", include=["key"])
