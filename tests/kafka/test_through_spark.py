"""A topic through a keyed stage in Spark executors."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.dataset as datasets
import pytest
from striking import SEEN, Seen, rows_in, strike, until

import flux
from flux.connectors.kafka.errors import BadRecord, UnfitValue
from tests.kafka.broker import Broker
from tests.kafka.test_asking import answering, serving
from tests.kafka.topics import send
from tests.kafka.written import found

KEYS, ROUNDS, PARTITIONS = 50, 60, 3


def rounds(address: str, topic: str, first: int, stop: int) -> None:
    """Send rounds of rows. Each key is in one partition, so that its sequence numbers come in order."""
    for partition in range(PARTITIONS):
        keys = range(partition, KEYS, PARTITIONS)
        rows = [{"key": key, "sequence": number} for number in range(first, stop) for key in keys]
        send(address, topic, [*(json.dumps(row).encode() for row in rows), b"bad %d" % first], partition)


def written(folder: Path) -> list[dict[str, Any]]:
    """Read the rows of the files that are there now."""
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
    slots: Any, broker: Broker, new_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic, dead = new_topic(PARTITIONS), new_topic()
    clicks = flux.kafka(
        topic, broker.address, format="json", schema="key BIGINT, sequence BIGINT", fetch_bytes=2048,
        bad_records=f"dead_letter:{dead}",
    )  # fmt: skip
    seen = flux.stage(key="key", partitions=4, replicas=2, schema=SEEN)(Seen)
    query = seen(clicks).to_parquet(tmp_path, roll_every="200ms").start(spark=slots, workers=3)
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
    slots: Any, broker: Broker, topic: str, tmp_path: Path
) -> None:
    send(broker.address, topic, [b'{"key": 1, "sequence": 0}', b"nonsense"])
    clicks = flux.kafka(topic, broker.address, format="json", schema="key BIGINT, sequence BIGINT")
    query = (
        flux.stage(key="key", partitions=2, schema=SEEN)(Seen)(clicks)
        .to_parquet(tmp_path)
        .start(spark=slots, workers=2)
    )
    with pytest.raises(BadRecord, match=f"topic '{topic}', partition 0, offset 1 is no json.*b'nonsense'"):
        query.awaitTermination(120)


@pytest.mark.spark
def test_avro_out_is_registered_once_and_ends_with_the_row_that_does_not_fit(
    slots: Any, broker: Broker, new_topic: Callable[..., str]
) -> None:
    """Workers write by the schema id that the query settles where it starts."""
    topic, out = new_topic(), new_topic()
    send(broker.address, topic, [json.dumps({"key": each, "sequence": 0}).encode() for each in (1, 2)])
    rows = flux.kafka(topic, broker.address, format="json", schema="key BIGINT, sequence BIGINT")
    schema = {
        "type": "record",
        "name": "Seen",
        "fields": [{"name": each, "type": "long"} for each in ("key", "sequence", "seen")],
    }
    seen: list[tuple[str, bytes]] = []
    with serving(answering(200, b'{"id": 7}', seen=seen)) as url:
        avro = {"format": "avro", "schema": schema, "schemas": url, "register_schemas": True}
        flow = flux.stage(key="key", partitions=2, schema=SEEN)(Seen)(rows).to_kafka(
            out, broker.address, key="key", **avro
        )
        query = flow.start(spark=slots, workers=2)
    until(lambda: len(found(broker.address, out, 0)[0]) >= 2, "both records")
    (messages,) = found(broker.address, out, 2)
    send(broker.address, topic, [b'{"key": 3}'])
    with pytest.raises(
        UnfitValue, match="row 0 of 1 of a batch does not fit the Avro schema: column 'sequence' is null"
    ):
        query.awaitTermination(120)
    assert [line for line, _ in seen] == [f"POST /subjects/{out}-value/versions HTTP/1.1"]
    assert sorted(each.value() for each in messages) == [
        b"\x00\x00\x00\x00\x07\x02\x00\x00",
        b"\x00\x00\x00\x00\x07\x04\x00\x00",
    ]
    (messages,) = found(broker.address, out, 2)
    assert len(messages) == 2, "nothing of the batch is there"


def seen_in(broker: Broker, topic: str, count: int) -> list[tuple[int, int, int]]:
    """Wait for ``count`` records; list key, sequence and count of each."""
    records = [json.loads(each.value()) for messages in found(broker.address, topic, count, 2) for each in messages]
    return sorted((each["key"], each["sequence"], each["seen"]) for each in records)


@pytest.mark.spark
def test_topics_that_are_ahead_of_a_restored_location_are_refused_with_what_to_do(
    slots: Any, broker: Broker, new_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic, outs = new_topic(PARTITIONS), {kind: new_topic(2) for kind in ("exactly_once", "transactional")}
    location, older, newest = tmp_path / "location", tmp_path / "older", tmp_path / "newest"
    clicks = flux.kafka(topic, broker.address, format="json", schema="key BIGINT, sequence BIGINT", bad_records="drop")
    counts = flux.stage(key="key", partitions=2, schema=SEEN)(Seen)(clicks)

    def started() -> flux.Query:
        ends = [counts.to_kafka(to, broker.address, key="key", guarantee=kind) for kind, to in outs.items()]
        options = {"checkpointLocation": location, "checkpoint_interval": "200ms"}
        return flux.start(*ends, spark=slots, workers=2, **options)

    def check(stop: int) -> None:
        wanted = [(key, number, number) for key in range(KEYS) for number in range(stop)]
        for to in outs.values():
            until(lambda to=to: len(seen_in(broker, to, 0)) >= len(wanted), f"all records in {to}")
            assert seen_in(broker, to, len(wanted)) == wanted

    for first, stop, copy in ((0, 10, older), (10, 20, newest)):
        query = started()
        rounds(broker.address, topic, first, stop)
        check(stop)
        query.stop()
        shutil.copytree(location, copy)
    rounds(broker.address, topic, 20, 30)
    shutil.rmtree(location)
    shutil.copytree(older, location)
    why = rf"partition [01] of topic '({'|'.join(outs.values())})' has \d+ records .* knows of \d+.*--forget-output"
    query = started()
    with pytest.raises(flux.QueryFailed, match=why):
        query.awaitTermination(120)
    query.stop()
    shutil.rmtree(location)
    shutil.copytree(newest, location)
    query = started()
    check(30)
    query.stop()
    shutil.rmtree(location)
    shutil.copytree(older, location)
    forgotten = subprocess.run(
        [sys.executable, "-m", "flux", "checkpoints", str(location), "--forget-output"], capture_output=True, text=True
    )
    assert forgotten.returncode == 0, forgotten.stderr
    query = started()
    once, again = KEYS * 30, KEYS * 20
    for to in outs.values():
        until(lambda to=to: len(seen_in(broker, to, once + again)) >= once + again, "output since the copy, once more")
    query.stop()
    for to in outs.values():
        rows = seen_in(broker, to, once + again)
        wanted = [(key, number, number) for key in range(KEYS) for number in range(30)]
        assert sorted(set(rows)) == wanted
        assert len(rows) == once + again
