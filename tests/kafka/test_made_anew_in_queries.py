"""A topic that is deleted and made anew under a query in Spark executors: all of the new one is read, or the query ends."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from striking import strike

import flux
from tests.kafka.broker import Broker
from tests.kafka.losing import query_of, written
from tests.kafka.test_losses import reads, running, values
from tests.kafka.topics import remake, send

#: Values of the records: of the first topic, of the second one before and after a worker is lost, of the third one.
FIRST, SECOND, LATER, THIRD = range(100), range(1000, 1150), range(2000, 2050), range(3000, 3040)


@pytest.mark.spark
def test_all_of_each_new_topic_comes_once_though_a_worker_is_killed_and_the_query_starts_again(
    slots: Any, broker: Broker, topic: str, tmp_path: Path
) -> None:
    rows, location = tmp_path / "rows", tmp_path / "location"

    def flow(fails: bool) -> Any:
        return query_of(topic, broker.address, rows, replicas=2, stages=2, key="key", fail_on_data_loss=fails)

    send(broker.address, topic, values(FIRST))
    with running(flow(False), slots, location, workers=3) as query:
        reads(query, rows, FIRST)
        remake(broker.address, topic)
        send(broker.address, topic, values(SECOND))
        reads(query, rows, SECOND)
        strike(query, signal.SIGKILL, worker=query._server.core.table.sources[0][0])  # type: ignore[union-attr]
        send(broker.address, topic, values(LATER))
        reads(query, rows, LATER)
    remake(broker.address, topic)
    send(broker.address, topic, values(THIRD))
    with (
        running(flow(True), slots, location) as query,
        pytest.raises(flux.FluxError, match="was deleted and made anew"),
    ):
        query.awaitTermination(120)
    with running(flow(False), slots, location) as query:
        reads(query, rows, THIRD)
    assert written(rows) == Counter([*FIRST, *SECOND, *LATER, *THIRD])
