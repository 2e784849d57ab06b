"""A query over topics that grow, from its first life to the one that reads all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from striking import SEEN, Seen, until

import flux
from spark_integration.query import source_setup as unread
from tests.kafka.broker import Broker, create_topic
from tests.kafka.test_through_spark import written
from tests.kafka.topics import grow, send


@pytest.mark.spark
def test_partitions_and_topics_that_come_later_are_told_and_then_read_from_their_beginning(
    slots: Any,
    broker: Broker,
    topic: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(unread, "EVERY_S", 0.1)

    def put(to: str, key: int, numbers: range, partition: int = 0) -> None:
        rows = [{"key": key, "sequence": number} for number in numbers]
        send(broker.address, to, [json.dumps(row).encode() for row in rows], partition)

    def started() -> flux.Query:
        clicks = flux.kafka(
            bootstrap=broker.address, pattern=f"{topic}.*", format="json", schema="key BIGINT, sequence BIGINT"
        )
        seen = flux.stage(key="key", partitions=2, schema=SEEN)(Seen)
        return seen(clicks).to_parquet(tmp_path / "rows", roll_every="200ms").start(
            spark=slots, workers=2, checkpointLocation=tmp_path / "location", progress_interval="100ms",
            checkpoint_interval="200ms",
        )  # fmt: skip

    later = [f"{topic}-1", f"{topic}.new-0"]
    put(topic, 0, range(20))
    query = started()
    try:
        create_topic(broker.address, f"{topic}.new")
        grow(broker.address, topic, 2)
        until(lambda: query.status.get("notRead") == {f"kafka {topic}.*": later}, "status says what is not read")
        put(topic, 1, range(10), 1)
        put(f"{topic}.new", 2, range(10))
        until(lambda: len(written(tmp_path / "rows")) == 20, "what is read")
        told = " ".join(each.getMessage() for each in caplog.records if "does not read" in each.getMessage())
        assert [name for name in later if name in told] == later
    finally:
        query.stop()
    assert {row["key"] for row in written(tmp_path / "rows")} == {0}
    for life in range(2):  # the numbers of the new partition's rows are kept, too
        put(topic, 0, range(20 + 10 * life, 30 + 10 * life))
        put(topic, 1, range(10 + 10 * life, 20 + 10 * life), 1)
        query = started()
        try:
            until(lambda life=life: len(written(tmp_path / "rows")) == 60 + 20 * life, "all rows")
            assert "notRead" not in query.status
        finally:
            query.stop()
    rows = written(tmp_path / "rows")
    assert sorted((row["key"], row["sequence"]) for row in rows) == [
        (key, number) for key, many in ((0, 40), (1, 30), (2, 10)) for number in range(many)
    ]
    assert all(row["seen"] == row["sequence"] for row in rows), "none lost, doubled or out of order"
