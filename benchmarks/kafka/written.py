"""Contents of the topics after a run, read by another client (librdkafka), and the figures that follow from them.

Latency is the time at which the broker appended a record to the output topic, in whole milliseconds, minus the time at which its
row was due. Lost and doubled come from the input topic alone: row number n of a key, in the order of its partition, gives
the record (key, n, due) once, and nothing else gives one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from benchmarks.arrivals import percentile

#: Time limit of reading, with some 100,000 rows a second, which any machine can read.
READ_S, ROWS_PER_S = 60.0, 100_000
_AT_ONCE = 50_000


@dataclass(frozen=True)
class Written:
    """Records of a topic, in order within each partition."""

    key: np.ndarray
    due_us: np.ndarray
    #: 0 in the input.
    count: np.ndarray
    #: Since 1970.
    append_ms: np.ndarray

    @property
    def age_ms(self) -> np.ndarray:
        ages: np.ndarray = self.append_ms - self.due_us / 1e3
        return ages


def read(address: str, topic: str, partitions: int) -> Written:
    """Read all committed records of the topic."""
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer(
        {"bootstrap.servers": address, "group.id": "benchmark", "enable.auto.commit": False, "fetch.queue.backoff.ms": 1,
         "isolation.level": "read_committed", "enable.partition.eof": True, "queued.min.messages": 1_000_000}
    )  # fmt: skip
    try:
        ends = {each: consumer.get_watermark_offsets(TopicPartition(topic, each), 30)[1] for each in range(partitions)}
        consumer.assign([TopicPartition(topic, each, 0) for each in range(partitions)])
        left = {each for each, end in ends.items() if end}
        limit = time.monotonic() + READ_S + sum(ends.values()) / ROWS_PER_S
        parts: list[Written] = []
        while left:
            if time.monotonic() > limit:
                raise TimeoutError(f"topic {topic} was not read to its end in time: partitions {sorted(left)} are left")
            messages = consumer.consume(_AT_ONCE, 0.1)
            left -= {message.partition() for message in messages if message.error() is not None}
            messages = [message for message in messages if message.error() is None]
            if messages:
                parts.append(parsed(messages))
    finally:
        consumer.close()
    return joined(parts)


def joined(parts: list[Written]) -> Written:
    empty = np.zeros(0, np.int64)
    parts = [Written(empty, empty, empty, empty), *parts]
    return Written(*(np.concatenate([getattr(each, name) for each in parts]) for name in Written.__dataclass_fields__))


def parsed(messages: list[Any]) -> Written:
    """Parse values, which are ``due`` in the input, and ``due,count`` in the output."""
    # Each line gets an end, because the parser ignores a single line without one.
    lines = b"".join([message.key()[1:] + b"," + message.value() + b"\n" for message in messages])
    given = pa.csv.read_csv(
        pa.BufferReader(lines),
        pa.csv.ReadOptions(autogenerate_column_names=True, block_size=1 << 26),
        convert_options=pa.csv.ConvertOptions(column_types={f"f{column}": pa.int64() for column in range(3)}),
    )
    columns = [column.to_numpy() for column in given.columns]
    count = columns[2] if len(columns) > 2 else np.zeros(len(columns[0]), np.int64)
    return Written(columns[0], columns[1], count, np.array([message.timestamp()[1] for message in messages]))


def expected(given: Written) -> Written:
    """Compute the independent answer: the records that the rows of the input topic give."""
    order = np.argsort(given.key, kind="stable")  # a key is in one partition, so its rows stay in order
    keys = given.key[order]
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    counts = np.arange(len(keys)) - np.repeat(starts, np.diff([*starts, len(keys)])) + 1
    return Written(keys, given.due_us[order], counts, given.append_ms[order])


def exactness(given: Written, got: Written, each_row: bool = True) -> dict[str, int]:
    """Count records that are missing, and records that come again or should not be there.

    With ``each_row``, each row gives a record. Otherwise several rows may share one, which has the newest count of its key. Then
    rows that the last count of a key lacks are lost, and counts that come again or are too high are duplicated."""
    wanted = expected(given)
    if each_row:
        if not len(wanted.key):
            return {"lost": 0, "duplicated": len(got.key)}
        ids, wanted_ids = _ids(got), _ids(wanted)
        places = np.minimum(np.searchsorted(wanted_ids, ids), len(wanted_ids) - 1)
        right = (wanted_ids[places] == ids) & (wanted.due_us[places] == got.due_us)
        there = len(np.unique(places[right]))
        return {"lost": len(wanted.key) - there, "duplicated": len(got.key) - there}
    keys = int(max(wanted.key.max(initial=0), got.key.max(initial=0))) + 1
    last = np.zeros(keys, np.int64)
    np.maximum.at(last, got.key, got.count)
    rows_of = np.bincount(wanted.key, minlength=keys)
    again = len(got.key) - len(np.unique(_ids(got)))
    return {
        "lost": int(np.maximum(rows_of - last, 0).sum()),
        "duplicated": again + int(np.maximum(last - rows_of, 0).sum()),
    }


def _ids(of: Written) -> np.ndarray:
    """Join key and count in one number. The numbers of ``expected`` are in order."""
    ids: np.ndarray = (of.key << 40) | of.count
    return ids


def statistics(got: Written, start: float, end: float) -> dict[str, float | None]:
    """Compute the figures of rows that were due from ``start`` to ``end``, in seconds since 1970.

    ``worst_second_ms`` is the 99th percentile of the second in which it was highest; ``gap_ms_max`` the longest time without a
    record in the output topic, all partitions together."""
    mine = (got.due_us >= start * 1e6) & (got.due_us < end * 1e6)
    ages, second = got.age_ms[mine], ((got.due_us[mine] - start * 1e6) // 1_000_000).astype(int)
    seconds = [np.percentile(ages[second == each], 99) for each in np.unique(second)]
    appended = np.sort(got.append_ms[(got.append_ms >= start * 1e3) & (got.append_ms < end * 1e3)])
    return {
        "p50_ms": percentile(ages, 50),
        "p99_ms": percentile(ages, 99),
        "worst_second_ms": percentile(seconds, 100),
        "max_ms": percentile(ages, 100),
        "gap_ms_max": float(np.diff(appended).max()) if len(appended) > 1 else None,
    }
