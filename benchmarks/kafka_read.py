"""Rows a second from a topic into Arrow columns in one process, beside confluent-kafka's ``consume`` in the same run.

    python -m benchmarks.kafka_read ADDRESS [--rows N] [--bytes B] [--codec zstd] [--runs R] [--json]
        [--secure HOST:PORT --cafile FILE]

Needs a broker (``make kafka``) and confluent-kafka. It makes a topic of its own with one partition, fills it through
librdkafka, and reads it to the end: each side in turn, ``--runs`` times, and the best of each is compared; with ``--secure``,
also with TLS and a password. Broker and reader share the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from benchmarks.kafka.doors import Door, add_arguments, doors_of
from flux.connectors.kafka.client.cluster import addresses
from flux.connectors.kafka.client.security import Security
from flux.connectors.kafka.client.topic_ids import LogPosition
from flux.connectors.kafka.read.partition_reader import ReadOptions, TopicPartitionReader, kafka_schema
from flux.connectors.kafka.warm_up import warm_up
from flux.dataflow.source import Positioned

#: Time limit to write and read a topic once.
_WAIT_S = 120.0


@dataclass(frozen=True)
class Run:
    """One run. ``cpu_us`` is the time of all threads of this process for each row."""

    who: str
    door: str
    rows_per_s: float
    cpu_us: float


def fill(address: str, topic: str, rows: int, size: int, codec: str) -> None:
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": address})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(30)
    producer = Producer(
        {"bootstrap.servers": address, "linger.ms": 50, "batch.num.messages": 100_000, "batch.size": 1_000_000,
         "queue.buffering.max.messages": 1_000_000, "compression.type": codec}
    )  # fmt: skip
    for row in range(rows):
        value = b"%0*d" % (size, row)
        while True:
            try:
                producer.produce(topic, value, partition=0)
                break
            except BufferError:
                producer.poll(0.05)
        if not row % 10_000:
            producer.poll(0)
    if producer.flush(_WAIT_S):
        raise TimeoutError("the topic could not be filled")


def remove(address: str, topic: str) -> None:
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": address})
    admin.delete_topics([topic])[topic].result(30)


def with_flux(door: Door, topic: str, rows: int) -> int:
    """Read as a worker does: every column but the headers. Return the rows."""
    reader = TopicPartitionReader(
        ReadOptions(addresses(door.address), Security(door.options), kafka_schema(False)), topic, 0, LogPosition(0)
    )
    got, end = 0, time.monotonic() + _WAIT_S
    try:
        while got < rows and time.monotonic() < end:
            taken = reader.next()
            if isinstance(taken, Positioned):
                got += taken.batch.num_rows
            else:
                time.sleep(0.0002)
    finally:
        reader.close()
    return got


def consumer_of(door: Door, topic: str) -> Any:
    """Make a consumer that fetches ahead as fast as it can. By default it would pause for a second whenever 100,000 messages
    wait."""
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer(
        {"bootstrap.servers": door.address, **door.config, "group.id": "benchmark", "enable.auto.commit": False,
         "fetch.queue.backoff.ms": 1, "queued.min.messages": 1_000_000, "queued.max.messages.kbytes": 1 << 20,
         "max.partition.fetch.bytes": 8 << 20}
    )  # fmt: skip
    consumer.assign([TopicPartition(topic, 0, 0)])
    return consumer


def with_confluent(door: Door, topic: str, rows: int) -> int:
    """Read the keys, values, offsets and times of 10,000 messages at a time."""
    consumer, got, end = consumer_of(door, topic), 0, time.monotonic() + _WAIT_S
    while got < rows and time.monotonic() < end:
        messages = consumer.consume(10_000, 0.1)
        pa.record_batch(
            {
                "key": pa.array([message.key() for message in messages], pa.binary()),
                "value": pa.array([message.value() for message in messages], pa.binary()),
                "offset": pa.array([message.offset() for message in messages], pa.int64()),
                "timestamp": pa.array([message.timestamp()[1] for message in messages], pa.int64()),
            }
        )
        got += len(messages)
    consumer.close()
    return got


def with_consume_alone(door: Door, topic: str, rows: int) -> int:
    """Read the messages and their values, without making anything of them."""
    consumer, got, end = consumer_of(door, topic), 0, time.monotonic() + _WAIT_S
    while got < rows and time.monotonic() < end:
        got += len([message.value() for message in consumer.consume(10_000, 0.1)])
    consumer.close()
    return got


def timed(who: str, read: Callable[[Door, str, int], int], door: Door, topic: str, rows: int) -> Run:
    cpu, began = sum(os.times()[:2]), time.perf_counter()
    got = read(door, topic, rows)
    took, cpu = time.perf_counter() - began, sum(os.times()[:2]) - cpu
    if got != rows:
        raise RuntimeError(f"{who} read {got} rows of {rows}")
    return Run(who, door.name, rows / took, cpu / rows * 1e6)


SIDES = {"flux": with_flux, "confluent to Arrow": with_confluent, "confluent consume": with_consume_alone}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kafka_read", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--rows", type=int, default=3_000_000)
    parser.add_argument("--bytes", type=int, default=32, help="of a value")
    parser.add_argument("--codec", default="none")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    doors, topic = doors_of(parser, given), f"read-{os.getpid()}"
    warm_up()
    fill(given.address, topic, given.rows, given.bytes, given.codec)
    try:
        runs = [
            timed(who, read, door, topic, given.rows)
            for _ in range(given.runs)
            for door in doors
            for who, read in SIDES.items()
        ]
    finally:
        remove(given.address, topic)
    best = {
        (door.name, who): max((run for run in runs if (run.door, run.who) == (door.name, who)), key=lambda run: run.rows_per_s)
        for door in doors for who in SIDES
    }  # fmt: skip
    ratio = best["plain", "flux"].rows_per_s / best["plain", "confluent consume"].rows_per_s
    if given.json:
        told: dict[str, Any] = {"rows": given.rows, "bytes": given.bytes, "codec": given.codec, "ratio": ratio}
        print(json.dumps({**told, "runs": [asdict(run) for run in runs]}))
        return 0
    for (door, who), run in best.items():
        of_all = [each.rows_per_s / 1e6 for each in runs if (each.door, each.who) == (door, who)]
        print(
            f"{door:6} {who:20} {run.rows_per_s / 1e6:6.2f} M rows/s (median {statistics.median(of_all):.2f}), "
            f"{run.cpu_us:.3f} us of CPU a row"
        )
    for each in doors:
        faster = best[each.name, "flux"].rows_per_s / best[each.name, "confluent consume"].rows_per_s
        print(f"{each.name:6} flux to consume: {faster:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
