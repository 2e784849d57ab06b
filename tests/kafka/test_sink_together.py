"""Partitions of a worker are written together: the threads of sinks over a real broker."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa

from flux.connectors.kafka.write.sink import KafkaSink
from flux.settings import Settings
from flux.shell.sink_threads import SinkThreads
from partitioning.ids import PartitionKey
from tests.kafka.broker import Broker
from tests.kafka.written import ended, found, numbered, operator_of, values

NewTopic = Callable[..., str]


def test_partitions_that_are_written_together_lose_and_double_nothing(broker: Broker, new_topic: NewTopic) -> None:
    """Rounds are written with rows between them that are too large for one round, while connections are closed in the middle, and
    while writers begin anew, as a new primary does: the broker then has more of some partitions of the topic than of others."""
    topic, writers, batches, parts = new_topic(3), 3, 150, 3
    flow = ended(topic, broker.address, format="raw")
    assert isinstance(flow.sink, KafkaSink)
    flow.sink.prepare(writers, None)
    stage = SimpleNamespace(id=0, name="last", partitions=writers, sink=flow.sink)
    sinks = SinkThreads(SimpleNamespace(query="q", stages=[stage], settings=Settings.of(), forgotten={}), lambda: None)  # type: ignore[arg-type]
    given: list[list[bytes]] = [[] for _ in range(writers)]
    kept: list[list[pa.RecordBatch]] = [[] for _ in range(writers)]
    rounds: list[int] = []
    together = sinks._do_together

    def noted(taken: list[Any]) -> None:
        rounds.append(len(taken))
        together(taken)

    sinks._do_together = noted  # type: ignore[method-assign]
    random = np.random.default_rng(5)
    operators = [operator_of(flow, partition) for partition in range(writers)]
    for partition in range(writers):
        sinks.begins(0, partition, 0, True)
    for number in range(batches):
        for partition in range(writers):
            size = 200_000 if random.random() < 0.03 else 12
            made = [b"%d-%0*d" % (partition, size, number * 3 + row) for row in range(int(random.integers(1, 4)))]
            given[partition] += made
            rows = pa.record_batch({"value": pa.array(made, pa.binary())})
            kept[partition].append(numbered(flow, rows, operators[partition]))
            sinks.write(0, partition, number, kept[partition][-1])
        if random.random() < 0.1:
            line = sinks._queues[PartitionKey(0, int(random.integers(writers)))]
            if line.sink is not None and line.sink._connected is not None:  # type: ignore[attr-defined]
                for connection in list(line.sink._client._connections.values()):  # type: ignore[attr-defined]
                    connection.abort()
        if random.random() < 0.1:
            anew = int(random.integers(writers))
            left = max(sinks.has(0, anew), 0)
            sinks.ends(0, anew)
            sinks.begins(0, anew, left, False)
            for again in range(left, number + 1):
                sinks.write(0, anew, again, kept[anew][again])
        sinks.check()
        time.sleep(0.002)
    end = time.monotonic() + 60
    while any(sinks.has(0, partition) < batches for partition in range(writers)):
        sinks.check()
        assert time.monotonic() < end, "everything is written"
        time.sleep(0.005)
    sinks.close()
    assert max(rounds, default=0) > 1, "some were written together"
    got = found(broker.address, topic, sum(map(len, given)), parts)
    for partition, wanted in enumerate(given):
        mine = [[value for value in values(each) if value.startswith(b"%d-" % partition)] for each in got]
        assert sorted(value for each in mine for value in each) == sorted(wanted)
        assert all(each == [value for value in wanted if value in set(each)] for each in mine)
