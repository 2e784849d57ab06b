"""Writer of dead letters: records that do not fit their format go to a topic of their own, unchanged, with headers that name
their origin.

Law: at least once. ``write`` returns when the brokers have all of the records, and only then does a position behind them
exist. So a reader that is lost before leaves nothing out: the next reader begins before the records, and writes them again.
The headers show duplicates.

Dead letters get the time at which they are written: with the time of the record, a topic with a limit of age could drop
them at once.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from flux.connectors.kafka.client.cluster import Address, Passing
from flux.connectors.kafka.client.producer import TOO_LARGE, ProducerClient
from flux.connectors.kafka.client.security import Security
from flux.connectors.kafka.errors import KafkaError
from flux.connectors.kafka.formats.base import Bad
from flux.connectors.kafka.records.decoder import HEADER
from flux.connectors.kafka.records.encoder import BATCH_BYTES, record_batches

#: Headers of each dead letter: topic, partition, offset and time of the record (milliseconds), and the reason why it does
#: not fit.
TOPIC, PARTITION, OFFSET, TIMESTAMP, ERROR = (
    "flux-topic", "flux-partition", "flux-offset", "flux-timestamp", "flux-error",
)  # fmt: skip
#: Columns of a record that dead letters are made of.
WANTED = ("key", "value", "offset", "timestamp", "headers")
#: Longest reason in characters: a parser's message may show the record.
_ERROR_MAX = 300


class DeadLetters:
    """Dead letters of one partition of a topic (``source``), for the thread that reads it. Only ``abort`` may be called from
    another thread. ``to`` is the topic for the dead letters and the partition of it. ``retry_s`` is the longest time, in
    seconds, that brokers may take."""

    def __init__(
        self,
        bootstrap: Sequence[Address],
        security: Security,
        to: tuple[str, int],
        source: tuple[str, int],
        retry_s: float,
    ) -> None:
        self._topic, self._partition = to
        self._source, self._retry_s = source, retry_s
        self._batch_bytes = BATCH_BYTES
        self._client = ProducerClient(bootstrap, security)

    def write(self, raw: pa.RecordBatch, bad: Sequence[Bad]) -> None:
        """Write the bad rows of ``raw``, which has the columns ``WANTED``. Raises errors that end the reading."""
        rows = raw.select(WANTED).take(pa.array([each.row for each in bad], pa.int64()))
        headers = self._headers(rows, [each.why for each in bad])
        at = 0
        while at < len(bad):
            now = np.full(len(bad) - at, time.time_ns() // 1_000_000, np.int64)
            batch, count = next(
                record_batches(
                    rows.column("key")[at:], rows.column("value")[at:], now, headers[at:], batch_bytes=self._batch_bytes
                )
            )
            doing = f"writing bad records of {self._where()} to topic {self._topic!r}"
            send = functools.partial(self._send, batch, count)
            if self._client.keep_trying(send, doing, self._retry_s):
                at += count
            else:
                self._batch_bytes = max(1, min(self._batch_bytes, batch.size) // 2)

    def abort(self) -> None:
        self._client.abort()

    def close(self) -> None:
        self._client.close()

    def _send(self, batch: np.ndarray, count: int) -> bool:
        """Send one record batch. Returns False if the broker takes no record batch of this size; its records then go in
        smaller ones."""
        answer = self._client.finish(self._client.begin(self._topic, {self._partition: batch}))[self._partition]
        name = "" if answer.error is None else answer.error.__name__
        if not name:
            return True
        if name in TOO_LARGE:
            if count > 1:
                return False
            raise KafkaError(
                f"a bad record of {self._where()} does not fit into topic {self._topic!r}: it takes {batch.size:,} bytes with "
                f"its headers, and {self._client.limit(self._topic, name)}. Raise that limit"
            )
        if "Authorization" in name:
            raise self._client.refused(self._topic, name)
        if answer.error.retriable or answer.error.invalid_metadata:
            raise Passing(f"topic {self._topic!r}: {name}")
        raise KafkaError(f"topic {self._topic!r} refuses bad records of {self._where()}: {name}. {answer.why}".rstrip())

    def _headers(self, rows: pa.RecordBatch, errors: Sequence[str]) -> pa.Array:
        """Make the headers of dead letters: those of the record, and behind them those of Flux."""
        topic, partition = (str(each).encode() for each in self._source)
        times = rows.column("timestamp").cast(pa.timestamp("ms", "UTC"), safe=False).cast(pa.int64()).to_pylist()
        made = []
        for given, offset, at, why in zip(
            rows.column("headers").to_pylist(), rows.column("offset").to_pylist(), times, errors, strict=True
        ):
            ours = {
                TOPIC: topic, PARTITION: partition, OFFSET: b"%d" % offset, TIMESTAMP: b"%d" % at,
                ERROR: why[:_ERROR_MAX].encode("utf-8", "replace"),
            }  # fmt: skip
            made.append([*(given or ()), *({"key": name, "value": value} for name, value in ours.items())])
        return pa.array(made, pa.list_(HEADER))

    def _where(self) -> str:
        return f"topic {self._source[0]!r}, partition {self._source[1]}"
