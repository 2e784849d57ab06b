"""Origins of the events of a run: the generator inside the workers, files, or a topic of Kafka. All have the same events.

Files and topics are made before the run, and its time does not count.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import flux
from benchmarks.nexmark import checkout

#: Records that wait to be sent while a topic is filled.
QUEUED_MAX = 200_000
#: The last row of a source that has no end, after which all windows and auctions are over. It is of no kind.
END_KIND, END = 3, datetime(2100, 1, 1, tzinfo=UTC)

#: A function that makes the events of a run, by its name, with the options of ``checkout.events``. It returns a function that
#: makes fresh flows of them.
Offer = Callable[..., Callable[[], Any]]


@contextmanager
def origin(source: str, folder: Path) -> Iterator[Offer]:
    """Yield the function that makes the events of each run."""
    flows = checkout.module("examples.nexmark.flows").Nexmark
    if source == "generator":
        yield lambda _, events, partitions, **options: lambda: flows.generated(events, partitions, **options)
    elif source == "parquet":

        def of_files(name: str, events: int, partitions: int, **options: Any) -> Callable[[], Any]:
            paths = write(folder / f"events-{name}", checkout.events(events, partitions, **options))
            return lambda: _of_files(flows, paths)

        yield of_files
    else:
        from benchmarks.kafka.peers import broker

        found = broker()
        with found.Broker() as running:

            def of_topic(name: str, events: int, partitions: int, **options: Any) -> Callable[[], Any]:
                topic = f"nexmark-{name}"
                found.create_topic(running.address, topic, partitions)
                ddl = _fill(running.address, topic, checkout.events(events, partitions, **options))
                return lambda: flows(flux.kafka(topic, running.address, format="json", schema=ddl, name="nexmark"))

            yield of_topic


# ---- files


def write(folder: Path, generated: Any) -> list[str]:
    """Write the events of each partition into a file, a group of rows for each batch. Return the paths."""
    folder.mkdir(exist_ok=True)
    paths = []
    for partition in range(generated.partitions):
        paths.append(str(folder / f"events-{partition}.parquet"))
        if not Path(paths[-1]).exists():
            write_file(paths[-1], generated.batches(partition))
    return paths


def write_file(path: str | Path, batches: Iterator[pa.RecordBatch]) -> None:
    """Write a file, with a group of rows for each batch."""
    schema = checkout.module("examples.nexmark.generator").SCHEMA
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as file:
        for batch in batches:
            file.write_batch(batch)


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


# ---- topics


def _fill(address: str, topic: str, generated: Any) -> str:
    """Write all events into a topic, as JSON without nulls, and a last record of no kind into each partition. Return the schema
    of the records."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": address, "linger.ms": 20, "queue.buffering.max.messages": QUEUED_MAX + 1})
    for partition in range(generated.partitions):
        for batch in generated.batches(partition):
            for text in records(batch):
                while len(producer) >= QUEUED_MAX:
                    producer.poll(0.05)
                producer.produce(topic, text, partition=partition)
        last = {"kind": END_KIND, "dateTime": f"{END:%Y-%m-%dT%H:%M:%SZ}"}
        producer.produce(topic, json.dumps(last), partition=partition)
    producer.flush()
    names = {pa.int64(): "BIGINT", pa.int8(): "TINYINT", pa.string(): "STRING"}
    return ", ".join(
        f"{field.name} {names.get(field.type, 'TIMESTAMP')}"
        for field in checkout.module("examples.nexmark.generator").SCHEMA
    )


def records(batch: pa.RecordBatch) -> Iterator[str]:
    """Yield the rows of a batch as JSON: times as text, and without columns that are null in all rows."""
    there = [name for name in batch.schema.names if batch[name].null_count < batch.num_rows]
    columns = [
        pc.strftime(batch[name], "%Y-%m-%dT%H:%M:%SZ") if pa.types.is_timestamp(batch[name].type) else batch[name]
        for name in there
    ]
    yield from map(json.dumps, pa.RecordBatch.from_arrays(columns, names=there).to_pylist())
