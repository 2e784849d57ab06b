"""Origins of the events of a measured run: the generator inside the workers, files, or a topic of Kafka. All have the same
events.

Files and topics are made before the run, and its time does not count.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import flux
from benchmarks.nexmark import checkout

SOURCES = ("generator", "parquet", "kafka")
TOPIC = "nexmark"
#: Records that wait to be sent while a topic is filled.
QUEUED_MAX = 200_000


@contextmanager
def origin(source: str, events: int, partitions: int, folder: Path) -> Iterator[Callable[[], Any]]:
    """Make the events of a run. Yield a function that returns fresh flows of them."""
    flows = checkout.module("examples.nexmark.flows").Nexmark
    if source == "generator":
        yield lambda: flows.generated(events, partitions)
    elif source == "parquet":
        paths = write(events, partitions, folder)
        yield lambda: _of_files(flows, paths)
    else:
        from benchmarks.kafka.peers import broker

        found = broker()
        with found.Broker() as running:
            ddl = _fill(found, running.address, events, partitions)
            yield lambda: flows(flux.kafka(TOPIC, running.address, format="json", schema=ddl, name="nexmark"))


def write(events: int, partitions: int, folder: Path) -> list[str]:
    """Write the events of each partition into a file, a group of rows for each batch. Return the paths."""
    generated, paths = checkout.events(events, partitions), []
    schema = checkout.module("examples.nexmark.generator").SCHEMA
    for partition in range(partitions):
        paths.append(str(folder / f"events-{partition}.parquet"))
        if Path(paths[-1]).exists():
            continue
        with pq.ParquetWriter(paths[-1], schema, compression="none", use_dictionary=False) as file:
            for batch in generated.batches(partition):
                file.write_batch(batch)
    return paths


def _of_files(flows: Any, paths: list[str]) -> Any:
    reader = EventFiles(paths)
    return flows(flux.source(reader, name="nexmark"), reader.asked)


class EventFiles(flux.SourceReader):
    """A source that reads a file for each partition. A position is the number of a group of rows; columns that are not in
    ``asked`` are not read, and are null."""

    def __init__(self, paths: list[str]) -> None:
        self.paths, self.partitions = paths, len(paths)
        self.schema = pq.read_schema(paths[0])
        self.asked: dict[str, set[str]] = {"person": set(), "auction": set(), "bid": set()}

    def read(self, partition: int, start: int | None) -> Iterator[flux.Positioned]:
        wanted = {"kind", "dateTime", *(name for names in self.asked.values() for name in names)}
        with pq.ParquetFile(self.paths[partition], memory_map=True) as file:
            for group in range(start or 0, file.num_row_groups):
                rows = file.read_row_group(group, columns=sorted(wanted), use_threads=False).combine_chunks()
                columns = [
                    rows[field.name].combine_chunks() if field.name in wanted else pa.nulls(rows.num_rows, field.type)
                    for field in self.schema
                ]
                yield flux.Positioned(pa.RecordBatch.from_arrays(columns, schema=self.schema), group + 1)


def _fill(broker: Any, address: str, events: int, partitions: int) -> str:
    """Write all events into a topic, as JSON without nulls. Return the schema of its records."""
    from confluent_kafka import Producer

    broker.create_topic(address, TOPIC, partitions)
    generated = checkout.events(events, partitions)
    producer = Producer({"bootstrap.servers": address, "linger.ms": 20, "queue.buffering.max.messages": QUEUED_MAX + 1})
    for partition in range(partitions):
        for batch in generated.batches(partition):
            for row in _texts(batch).to_pylist():
                while len(producer) >= QUEUED_MAX:
                    producer.poll(0.05)
                record = {name: value for name, value in row.items() if value is not None}
                producer.produce(TOPIC, json.dumps(record), partition=partition)
    producer.flush()
    names = {pa.int64(): "BIGINT", pa.int8(): "TINYINT", pa.string(): "STRING"}
    return ", ".join(
        f"{field.name} {names.get(field.type, 'TIMESTAMP')}"
        for field in checkout.module("examples.nexmark.generator").SCHEMA
    )


def _texts(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch with its times as text."""
    columns = [
        pc.strftime(column, "%Y-%m-%dT%H:%M:%SZ") if pa.types.is_timestamp(column.type) else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)
