"""Warm-up of a broker: another client, which is not measured, copies the records of a topic to another topic.

Without it, the first measured system would share the machine with a broker that still compiles, and later ones would not.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: Small batches, as in an exactly-once query that commits often.
_LINGER_MS, _WAIT_S = 2, 10.0


@contextmanager
def echoing(address: str, given: str, out: str, partitions: int) -> Iterator[None]:
    """Copy records during the block, in a thread of its own, with an idempotent producer."""
    over = threading.Event()
    thread = threading.Thread(target=_echo, args=(address, given, out, partitions, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(2 * _WAIT_S)


def _echo(address: str, given: str, out: str, partitions: int, over: threading.Event) -> None:
    from confluent_kafka import Consumer, Producer, TopicPartition

    consumer = Consumer(
        {"bootstrap.servers": address, "group.id": "warm-up", "enable.auto.commit": False, "log_level": 3}
    )
    producer = Producer(
        {"bootstrap.servers": address, "enable.idempotence": True, "linger.ms": _LINGER_MS, "log_level": 3}
    )
    try:
        consumer.assign([TopicPartition(given, each, 0) for each in range(partitions)])
        while not over.is_set():
            for message in consumer.consume(1000, 0.01):
                if message.error() is None:
                    try:
                        producer.produce(out, message.value(), message.key(), message.partition())
                    except BufferError:  # these records do not count
                        break
            producer.poll(0)
        producer.flush(_WAIT_S)
    finally:
        consumer.close()
