"""A topic through a keyed stage in Spark executors."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.dataset as datasets
import pytest
from striking import SEEN, Seen, rows_in, strike, until

import flux
from flux.errors import UserCodeError
from tests.kafka.broker import Broker
from tests.kafka.topics import send
from tests.kafka.written import found

KEYS, ROUNDS, PARTITIONS = 50, 60, 3


def rounds(address: str, topic: str, first: int, stop: int) -> None:
    """Each key is in one partition, so that its sequence numbers come in order."""
    for partition in range(PARTITIONS):
        keys = range(partition, KEYS, PARTITIONS)
        rows = [{"key": key, "sequence": number} for number in range(first, stop) for key in keys]
        send(address, topic, [*(json.dumps(row).encode() for row in rows), b"bad %d" % first], partition)


def written(folder: Path) -> list[dict[str, Any]]:
    """Rows of the files that are there now."""
    files = [str(path) for path in folder.glob("part-*.parquet")]
    return datasets.dataset(files).to_table().to_pylist() if files else []


def lag_of(query: flux.Query) -> Any:
    (source,) = (query.lastProgress or {"sources": [{}]})["sources"]
    return source.get("lag")


def bad_records_of(query: flux.Query) -> int:
    (source,) = (query.lastProgress or {"sources": [{}]})["sources"]
    return int(source.get("badRecords", 0))


@pytest.mark.spark
def test_each_record_counts_once_though_a_worker_is_killed(
    cluster: Any, broker: Broker, new_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic, dead = new_topic(PARTITIONS), new_topic()
    clicks = flux.kafka(
        topic, broker.address, format="json", schema="key BIGINT, sequence BIGINT", fetch_bytes=2048,
        bad_records=f"dead_letter:{dead}",
    )  # fmt: skip
    seen = flux.stage(key="key", partitions=4, replicas=2, schema=SEEN)(Seen)
    query = seen(clicks).to_parquet(tmp_path, roll_every="200ms").start(spark=cluster, workers=3)
    try:
        rounds(broker.address, topic, 0, ROUNDS // 2)
        until(lambda: rows_in(query) >= KEYS * ROUNDS // 2, "the first half")
        rounds(broker.address, topic, ROUNDS // 2, 2 * ROUNDS // 3)
        strike(query, signal.SIGKILL, stage=0)
        rounds(broker.address, topic, 2 * ROUNDS // 3, ROUNDS)
        until(lambda: len(written(tmp_path)) >= KEYS * ROUNDS, "all rows")
        read = {f"{topic}-{partition}": 0 for partition in range(PARTITIONS)}
        until(lambda: lag_of(query) == {"records": 0, "partitions": read}, "no lag is left")
        until(lambda: bad_records_of(query) >= PARTITIONS, "at least those behind the loss are counted")
    finally:
        query.stop()
    rows = written(tmp_path)
    assert len(rows) == KEYS * ROUNDS
    assert {(row["key"], row["sequence"]) for row in rows} == {
        (key, number) for key in range(KEYS) for number in range(ROUNDS)
    }
    assert all(row["seen"] == row["sequence"] for row in rows), "none lost, doubled or out of order"
    (letters,) = found(broker.address, dead, 3 * PARTITIONS)
    kept = {(dict(each.headers())["flux-partition"], each.value()) for each in letters}
    beginnings = (0, ROUNDS // 2, 2 * ROUNDS // 3)
    assert kept == {(b"%d" % partition, b"bad %d" % first) for partition in range(PARTITIONS) for first in beginnings}


@pytest.mark.spark
def test_a_query_that_meets_a_bad_record_ends_and_names_it(
    cluster: Any, broker: Broker, topic: str, tmp_path: Path
) -> None:
    send(broker.address, topic, [b'{"key": 1, "sequence": 0}', b"nonsense"])
    clicks = flux.kafka(topic, broker.address, format="json", schema="key BIGINT, sequence BIGINT")
    query = (
        flux.stage(key="key", partitions=2, schema=SEEN)(Seen)(clicks)
        .to_parquet(tmp_path)
        .start(spark=cluster, workers=2)
    )
    with pytest.raises(UserCodeError, match=f"topic '{topic}', partition 0, offset 1 is no json.*b'nonsense'"):
        query.awaitTermination(120)
