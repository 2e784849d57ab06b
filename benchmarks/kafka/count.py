"""The query: for each row the number of rows of its key until then, from a topic to a topic, exactly once, in the executors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession

import flux
from spark_integration.query import Query
from spark_integration.start import start_query

#: One for each partition of the topic: as many as Spark and Kafka Streams have.
SCHEMA = pa.schema([("key", pa.binary()), ("due_us", pa.int64()), ("count", pa.int64())])


class RunningCount(flux.Operator):
    """Each row with the number of rows of its key until then, itself included."""

    schema = SCHEMA
    snapshot_classes = ()

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.places: dict[bytes, int] = {}
        self.counts = np.zeros(0, np.int64)

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        keys = batch.column("key").dictionary_encode()
        places = np.array([self._place(key) for key in keys.dictionary.to_pylist()])[keys.indices.to_numpy()]
        order = np.argsort(places, kind="stable")
        grouped, first = places[order], np.ones(len(order), bool)
        np.not_equal(grouped[1:], grouped[:-1], out=first[1:])
        starts = np.flatnonzero(first)
        # How many of its key come before each row in the batch.
        before = np.arange(len(order)) - starts[np.cumsum(first) - 1]
        until = np.empty(len(order), np.int64)
        until[order] = self.counts[grouped] + before + 1
        np.add.at(self.counts, places, 1)
        return pa.record_batch([batch.column("key"), batch.column("due_us"), pa.array(until)], schema=SCHEMA)

    def _place(self, key: bytes) -> int:
        place = self.places.setdefault(key, len(self.places))
        if place == len(self.counts):
            self.counts = np.append(self.counts, np.zeros(max(place, 16), np.int64))
        return place

    def snapshot(self) -> Any:
        return self.places, self.counts

    def restore(self, snapshot: Any) -> None:
        places, counts = snapshot
        self.places, self.counts = dict(places), counts.copy()


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
    """From topic ``given`` to topic ``out``; the keyed stage has so many partitions."""
    count = flux.stage(key="key", partitions=partitions, replicas=replicas, name="count")(RunningCount)
    flow = count(_rows(address, given)).to_kafka(out, address, key="key", value=["due_us", "count"], format="csv")
    return start_query([flow], "bench-kafka", spark, workers=workers, **options)


def start_totals(spark: SparkSession, address: str, given: str, partitions: int, workers: int, **options: Any) -> Query:
    """From topic ``given`` to state, one count for each key."""
    totals = flux.stage(key="key", partitions=partitions, name="totals")(Totals)
    return start_query([totals(_rows(address, given))], "bench-kafka", spark, workers=workers, **options)


def _rows(address: str, topic: str) -> Any:
    return flux.kafka(topic, address, format="csv", schema="due_us BIGINT", include=["key"])
