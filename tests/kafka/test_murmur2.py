"""Keys find the partitions that other clients send them to."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from flux.connectors.kafka.records.encoder import partitions_of
from tests.kafka.broker import Broker


def test_hashes_are_those_of_java() -> None:
    """Known hashes are from the tests of Kafka's own client, here made positive and taken modulo a large prime."""
    known = {b"21": -973932308, b"foobar": -790332482, b"a-little-bit-long-string": -985981536, b"abc": 479470107}
    prime = 2_147_483_647
    keys = pa.array(list(known), pa.binary())
    assert partitions_of(keys, prime).tolist() == [(number & 0x7FFFFFFF) % prime for number in known.values()]


def test_a_null_key_has_no_partition() -> None:
    assert partitions_of(pa.array([None, b"", None, b"x"], pa.binary()), 1).tolist() == [-1, 0, -1, 0]


def test_slices_and_strings_are_taken_as_they_look() -> None:
    keys = pa.array(["a", "bc", None, "def", "ghij"])
    whole = partitions_of(keys, 1000)
    assert partitions_of(keys[1:4], 1000).tolist() == whole[1:4].tolist()
    assert partitions_of(keys.cast(pa.large_string()), 1000).tolist() == whole.tolist()


def test_keys_go_where_librdkafka_sends_them(broker: Broker, new_topic: Callable[..., str]) -> None:
    from confluent_kafka import Producer

    topic, chosen = new_topic(7), {}
    random = np.random.default_rng(5)
    keys = [random.integers(0, 256, int(size), np.uint8).tobytes() for size in random.integers(1, 50, 2000)]
    producer = Producer({"bootstrap.servers": broker.address, "partitioner": "murmur2_random"})
    for key in keys:
        producer.produce(
            topic, b"", key, on_delivery=lambda _, message: chosen.update({message.key(): message.partition()})
        )
        producer.poll(0)
    producer.flush(30)
    assert len(set(chosen.values())) == 7
    assert partitions_of(pa.array(keys, pa.binary()), 7).tolist() == [chosen[key] for key in keys]
