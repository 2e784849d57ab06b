"""Rows of a topic as a reader meets them that reads committed records only, while they are written.

    python -m benchmarks.kafka.watch ADDRESS TOPIC PARTITIONS

prints one line of JSON as soon as it reads, and another one when its standard input has ended: the time at which each row was
due, and that at which it came, in microseconds since 1970. The time at which a broker appends a record says less: a record of a
transaction is there for such readers only when the transaction has been committed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.arrivals import percentile
from benchmarks.kafka import peers, written

#: Time until the reader has all partitions, and until it has ended; most rows of one call; longest wait of one call.
START_S, END_S = 60.0, 30.0
_AT_ONCE, _WAIT_S = 10_000, 0.05


@dataclass
class Visible:
    """Rows that a reader has met: the time at which each was due, and at which it came, since 1970."""

    due_us: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    seen_us: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def statistics(self, start: float, end: float) -> dict[str, float | None]:
        """Return percentiles of the time from due to visible, in milliseconds, of rows that were due between two moments."""
        inside = (self.due_us >= start * 1e6) & (self.due_us < end * 1e6)
        ages = (self.seen_us - self.due_us)[inside] / 1e3
        return {f"visible_p{rank}_ms": percentile(ages, rank) for rank in (50, 99)} if len(ages) else {}


def main(arguments: list[str]) -> None:
    address, topic, partitions = arguments
    ended = threading.Event()
    threading.Thread(target=_await_end, args=(ended,), daemon=True).start()
    due, seen = _read(address, topic, int(partitions), ended)
    print(json.dumps({"due_us": due.tolist(), "seen_us": seen.tolist()}), flush=True)


def _await_end(ended: threading.Event) -> None:
    sys.stdin.read()
    ended.set()


def _read(address: str, topic: str, partitions: int, ended: threading.Event) -> tuple[np.ndarray, np.ndarray]:
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer(
        {"bootstrap.servers": address, "group.id": "benchmark-watch", "enable.auto.commit": False, "fetch.queue.backoff.ms": 1,
         "isolation.level": "read_committed", "log_level": 3}
    )  # fmt: skip
    consumer.assign([TopicPartition(topic, each, 0) for each in range(partitions)])
    print(json.dumps({"reads": partitions}), flush=True)
    parts: list[Any] = []
    times: list[np.ndarray] = []
    try:
        while not ended.is_set():
            # One message wakes the reader; those behind it are taken without a wait.
            messages = consumer.consume(1, _WAIT_S)
            messages += consumer.consume(_AT_ONCE, 0) if messages else []
            now_us = time.time_ns() // 1000
            messages = [message for message in messages if message.error() is None]
            if messages:
                parts.append(messages)
                times.append(np.full(len(messages), now_us))
    finally:
        consumer.close()
    rows = written.joined([written.parsed(messages) for messages in parts])
    return rows.due_us, np.concatenate([np.zeros(0, np.int64), *times])


@contextmanager
def watching(address: str, topic: str, partitions: int) -> Iterator[Visible]:
    """Read a topic during the block, from a process of its own. The rows are there behind the block."""
    command = [sys.executable, "-m", "benchmarks.kafka.watch", address, topic, str(partitions)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=peers.environment()
    )
    found = Visible()
    limit = threading.Timer(START_S, process.kill)
    limit.start()
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise TimeoutError(f"the reader of {topic} does not read after {START_S:g} s")
        limit.cancel()
        yield found
        text, _ = process.communicate("", END_S)
        answer = json.loads(text)
        found.due_us, found.seen_us = np.array(answer["due_us"], np.int64), np.array(answer["seen_us"], np.int64)
    finally:
        limit.cancel()
        process.kill()
        process.wait()


if __name__ == "__main__":
    main(sys.argv[1:])
