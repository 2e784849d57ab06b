"""Rows a second into a topic, and how long one small write takes, beside confluent-kafka's idempotent producer in the same run.

    python -m benchmarks.kafka_write ADDRESS [--rows N] [--bytes B] [--codec zstd] [--partitions P] [--runs R] [--json]
        [--secure HOST:PORT --cafile FILE]

Needs a broker (``make kafka``) and confluent-kafka. Each side writes to a topic of its own, in turn, ``--runs`` times, and the
best of each is compared. Ours begins with Arrow columns that are numbered already, as the sink gets them; theirs with Python
bytes. A small write is one record, sent and acknowledged by all replicas (linger 0). With ``--secure``
also with TLS and a password. Writer and broker share the machine.
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

import flux
from benchmarks.kafka.doors import Door, add_arguments, doors_of
from benchmarks.kafka_read import remove
from flux.connectors.kafka.warm_up import warm_up
from flux.dataflow.sink import Position, SinkContext
from flux.operators.operator import Context

#: Rows of an output batch.
_BATCH_ROWS = 100_000
_WAIT_S = 120.0
_SMALL = 2000


@dataclass(frozen=True)
class Run:
    """One run. ``cpu_us`` is the time of all threads of this process for each row; ``p50_ms`` and ``p99_ms`` are times of a
    small write."""

    who: str
    door: str
    rows_per_s: float
    cpu_us: float
    p50_ms: float
    p99_ms: float


@flux.stage(partitions=1)
def _passed(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def with_flux(door: Door, topic: str, values: list[bytes], codec: str, small: int) -> Run:
    source = flux.source(lambda partition, start: iter(()), "value binary", partitions=1)
    codec_or_none = None if codec == "none" else codec
    flow = flux.to_kafka(_passed(source), topic, door.address, format="raw", compression=codec_or_none, **door.options)
    sink: Any = flow.sink
    sink.prepare(1, None)
    stage = flow.flow.stage.make()
    stage.open(Context("records"))
    column = pa.array(values, pa.binary())
    # They are numbered in the order in which they are written.
    ones: list[Any] = [stage.process(pa.record_batch({"value": column.slice(0, 1)})) for _ in range(small)]
    batches: list[Any] = [
        stage.process(pa.record_batch({"value": column.slice(at, _BATCH_ROWS)}))
        for at in range(0, len(column), _BATCH_ROWS)
    ]
    sink.open(SinkContext("benchmark", 0, "records", 0, 1))

    def write_all(given: list[Any]) -> None:
        for batch in given:
            sink.write(batch, Position(0, 0))

    try:
        return _timed("flux", door, len(values), lambda: write_all(batches), lambda i: write_all([ones[i]]), small)
    finally:
        sink.close()


def with_confluent(door: Door, topic: str, values: list[bytes], codec: str, small: int) -> Run:
    from confluent_kafka import Producer

    many = Producer(
        {"bootstrap.servers": door.address, **door.config, "enable.idempotence": True, "linger.ms": 5,
         "batch.num.messages": 100_000, "batch.size": 1_000_000, "queue.buffering.max.messages": 1_000_000,
         "compression.type": codec}
    )  # fmt: skip
    one = Producer(
        {
            "bootstrap.servers": door.address,
            **door.config,
            "enable.idempotence": True,
            "linger.ms": 0,
            "compression.type": codec,
        }
    )

    def all_rows() -> None:
        for row, value in enumerate(values):
            while True:
                try:
                    many.produce(topic, value)
                    break
                except BufferError:
                    many.poll(0.01)
            if not row % 10_000:
                many.poll(0)
        if many.flush(_WAIT_S):
            raise TimeoutError("the topic could not be written")

    def small_write(i: int) -> None:
        one.produce(topic, values[0])
        one.flush(_WAIT_S)

    return _timed("confluent idempotent", door, len(values), all_rows, small_write, small)


def _timed(who: str, door: Door, rows: int, write: Callable[[], Any], one: Callable[[int], None], small: int) -> Run:
    times = []
    for i in range(small):
        began = time.perf_counter()
        one(i)
        times.append(1000 * (time.perf_counter() - began))
    cpu, began = sum(os.times()[:2]), time.perf_counter()
    write()
    took, cpu = time.perf_counter() - began, sum(os.times()[:2]) - cpu
    times = sorted(times[small // 10 :])  # without the first ones, during which connections are made and leaders found
    return Run(who, door.name, rows / took, cpu / rows * 1e6, times[len(times) // 2], times[len(times) * 99 // 100])


def _counted(address: str, topic: str, partitions: int) -> int:
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer({"bootstrap.servers": address, "group.id": "benchmark"})
    ends = [consumer.get_watermark_offsets(TopicPartition(topic, each), 30)[1] for each in range(partitions)]
    consumer.close()
    return sum(ends)


SIDES = {"flux": with_flux, "confluent idempotent": with_confluent}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kafka_write", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--bytes", type=int, default=32, help="of a value")
    parser.add_argument("--codec", default="none")
    parser.add_argument("--partitions", type=int, default=1)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--small", type=int, default=_SMALL, help="writes of one row")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    warm_up()
    values = [b"%0*d" % (given.bytes, row) for row in range(given.rows)]
    doors = doors_of(parser, given)
    runs = [_run(given, values, number, who, door) for number in range(given.runs) for door in doors for who in SIDES]
    found = {
        (door.name, who): [run for run in runs if (run.door, run.who) == (door.name, who)]
        for door in doors
        for who in SIDES
    }
    best = {side: max(some, key=lambda run: run.rows_per_s) for side, some in found.items()}
    ratios = {
        door.name: best[door.name, "flux"].rows_per_s / best[door.name, "confluent idempotent"].rows_per_s
        for door in doors
    }
    if given.json:
        told: dict[str, Any] = {
            "rows": given.rows,
            "bytes": given.bytes,
            "codec": given.codec,
            "ratio": ratios["plain"],
        }
        print(json.dumps({**told, "runs": [asdict(run) for run in runs]}))
        return 0
    for (name, who), some in found.items():
        run = best[name, who]
        p50, p99 = (statistics.median(getattr(each, figure) for each in some) for figure in ("p50_ms", "p99_ms"))
        of_all = statistics.median(each.rows_per_s for each in some) / 1e6
        print(
            f"{name:6} {who:20} {run.rows_per_s / 1e6:6.2f} M rows/s (median {of_all:.2f}), {run.cpu_us:.3f} us of CPU a row; "
            f"a small write p50 {p50:.2f} ms, p99 {p99:.2f} ms"
        )
    for name, ratio in ratios.items():
        print(f"{name:6} flux to confluent: {ratio:.1f}")
    return 0


def _run(given: Any, values: list[bytes], number: int, who: str, door: Door) -> Run:
    from confluent_kafka.admin import AdminClient, NewTopic

    topic = f"write-{os.getpid()}-{number}-{who.split()[0]}-{door.name}"
    admin = AdminClient({"bootstrap.servers": given.address})
    admin.create_topics([NewTopic(topic, given.partitions, 1)])[topic].result(30)
    try:
        run = SIDES[who](door, topic, values, given.codec, given.small)
        found = _counted(given.address, topic, given.partitions)
        if found != given.rows + given.small:
            raise RuntimeError(f"{who} wrote {found} rows, not {given.rows + given.small}")
    finally:
        remove(given.address, topic)
    return run


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
