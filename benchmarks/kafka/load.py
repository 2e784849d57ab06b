"""Rows into a topic: paced ones, each with the time at which it was due, or a backlog as fast as possible.

    python -m benchmarks.kafka.load ADDRESS TOPIC PARTITIONS RATE SECONDS

prints the time at which the first row is due, and at the end the number of rows sent. The key is ``k`` and six digits; keys are
drawn at random, and each stands in one partition, as a producer by key would have it. The value is the time at which the row
was due, in microseconds since 1970, whether or not the load was late with it: a stall counts in full.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from flux.connectors.kafka.client.cluster import Address, Passing, addresses
from flux.connectors.kafka.client.producer import ProducerClient
from flux.connectors.kafka.client.security import Security
from flux.connectors.kafka.records.encoder import encode
from flux.connectors.kafka.warm_up import warm_up

KEYS = 1000
#: Rows that became due within this time travel together.
TICK_S = 0.001
#: Time from the beginning of the load to its first row.
HEAD_START_S = 0.3
#: Most rows of one request, of a backlog or of a late load.
_ROWS = 50_000
_DIGITS, _TIME_DIGITS = 6, 16
_SEED = 7
_PATIENCE_S, _PAUSE_S = 20.0, 0.02


def main(arguments: list[str]) -> None:
    address, topic, partitions, rate, seconds = arguments
    paced(addresses(address), topic, int(partitions), float(rate), float(seconds))


def paced(bootstrap: list[Address], topic: str, partitions: int, rate: float, seconds: float) -> None:
    warm_up()
    client = ProducerClient(bootstrap, Security({}))
    random = np.random.default_rng(_SEED)
    start, total, sent = time.time() + HEAD_START_S, round(rate * seconds), 0
    print(json.dumps({"start": start, "rows": total}), flush=True)
    while sent < total:
        now = time.time()
        due = min(int((now - start) * rate) + 1, total, sent + _ROWS) if now >= start else 0
        if due <= sent:
            time.sleep(max(start + sent / rate - now, TICK_S))
            continue
        due_us = ((start + np.arange(sent, due) / rate) * 1e6).astype(np.int64)
        _send(client, topic, _batches(random.integers(0, KEYS, due - sent), due_us, partitions))
        sent = due
        time.sleep(max(TICK_S - (time.time() - now), 0))
    client.close()
    print(json.dumps({"sent": sent}), flush=True)


def backlog(bootstrap: list[Address], topic: str, partitions: int, rows: int) -> None:
    """Send all rows at once, due now."""
    warm_up()
    client = ProducerClient(bootstrap, Security({}))
    random = np.random.default_rng(_SEED)
    try:
        for size in _sizes(rows):
            due_us = np.full(size, round(time.time() * 1e6))
            _send(client, topic, _batches(random.integers(0, KEYS, size), due_us, partitions))
    finally:
        client.close()


def _sizes(rows: int) -> Iterator[int]:
    for at in range(0, rows, _ROWS):
        yield min(_ROWS, rows - at)


def _batches(keys: np.ndarray, due_us: np.ndarray, partitions: int) -> dict[int, np.ndarray]:
    """Make one record batch for each partition that has rows."""
    made = {}
    now_ms = time.time_ns() // 1_000_000
    for partition in np.unique(keys % partitions):
        mine = keys % partitions == partition
        times = np.full(int(mine.sum()), now_ms, np.int64)
        data = encode(digits(keys[mine], _DIGITS, b"k"), digits(due_us[mine], _TIME_DIGITS), times, batch_bytes=1 << 24)
        made[int(partition)] = np.frombuffer(data.data, np.uint8)
    return made


def _send(client: ProducerClient, topic: str, batches: dict[int, np.ndarray]) -> None:
    """Send batches, and repeat those that are refused: partitions of a new topic have no leader at first. The input is the
    content of the topic at the end, so a batch that is there twice does no harm."""
    end = time.monotonic() + _PATIENCE_S
    while batches:
        try:
            answers = client.finish(client.begin(topic, batches))
            refused = {each: answer.error for each, answer in answers.items() if answer.error is not None}
            why = next((error.__name__ for error in refused.values() if not error.retriable), "")
            batches = {each: batches[each] for each in refused}
        except (Passing, OSError) as error:
            refused, why = {0: error}, ""
        if why or (batches and time.monotonic() > end):
            raise RuntimeError(f"the broker refuses the load: {why or next(iter(refused.values()))}")
        if batches:
            client.forget()
            time.sleep(_PAUSE_S)


def digits(numbers: np.ndarray, width: int, before: bytes = b"") -> pa.Array:
    """Format decimal numbers of ``width`` digits behind ``before``, as binary."""
    made = np.empty((len(numbers), len(before) + width), np.uint8)
    made[:, : len(before)] = np.frombuffer(before, np.uint8)
    left = numbers.copy()
    for column in reversed(range(len(before), made.shape[1])):
        left, digit = np.divmod(left, 10)
        made[:, column] = digit + ord("0")
    ends = np.arange(len(numbers) + 1, dtype=np.int32) * made.shape[1]
    return pa.Array.from_buffers(pa.binary(), len(numbers), [None, pa.py_buffer(ends), pa.py_buffer(made.reshape(-1))])


if __name__ == "__main__":
    main(sys.argv[1:])
