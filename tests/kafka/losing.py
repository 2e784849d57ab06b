"""Topics that lose records, and the output of queries over them: shared by the tests and by ``python -m tests.kafka.losses``."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as datasets
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

import flux
from tests.kafka.topics import WAIT_S, received, send

SCHEMA = "offset BIGINT, key BINARY, value BINARY"
#: Partitions of each stage: more than have rows where there is no key.
PARTITIONS = 8
#: Settings of a topic whose records are compacted soon. The newest segment never is.
COMPACTED = {
    "cleanup_policy": "compact", "min_cleanable_dirty_ratio": 0.01, "segment_ms": 100, "max_compaction_lag_ms": 100,
    "delete_retention_ms": 100,
}  # fmt: skip


def passed(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.select(["offset", "key", "value"])


def query_of(
    topic: str, address: str, folder: Path, stages: int = 1, key: str | None = None, replicas: int = 1, **options: Any
) -> Any:
    """Make a flow of this number of stages without state, to parquet files."""
    flow: Any = flux.kafka(topic, address, **options)
    for number in range(stages):
        flow = flux.stage(key=key, partitions=PARTITIONS, replicas=replicas, schema=SCHEMA, name=f"passed{number}")(
            passed
        )(flow)
    return flow.to_parquet(folder, roll_every="100ms")


def written(folder: Path) -> Counter[int]:
    """Count each value, a number, in the files that are there now."""
    files = [str(path) for path in folder.glob("part-*.parquet")]
    rows = datasets.dataset(files).to_table().column("value").to_pylist() if files else []
    return Counter(int(value) for value in rows)


def delete_before(address: str, topic: str, offset: int, partition: int = 0) -> None:
    """Delete the records before an offset, as retention does."""
    place = TopicPartition(topic, partition, offset)
    admin = AdminClient({"bootstrap.servers": address})
    admin.delete_records([place], request_timeout=WAIT_S)[place].result(2 * WAIT_S)


def compact(address: str, topic: str, most: int, marker: tuple[bytes, bytes]) -> int:
    """Wait until the topic has at most ``most`` records before the newest ones, which are ``marker``; return the number of
    markers."""
    end, markers = time.monotonic() + 3 * WAIT_S, 0
    while True:
        time.sleep(0.15)
        send(address, topic, [(*marker, None, 0)])  # the segment before is not the newest any more
        markers += 1
        there = received(address, topic, 1 << 30, limit_s=1.0)
        if sum(message.value() != marker[1] for message in there) <= most:
            return markers
        assert time.monotonic() < end, f"{len(there)} records are left"
