"""Rows of an output batch, by partition of the topic, and the record batches that carry them (design: kafka-sink)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from flux.connectors.kafka.records import kernels
from flux.connectors.kafka.records.encoder import NOBODY, ProducerIdentity, attributes_of, record_batches, views

#: A record batch, and its number of rows.
Made = tuple[np.ndarray, int]


class Records:
    """Records of one output batch. ``order`` has the rows by partition of the topic, those of each partition in the order of
    the batch; it is None if all rows are of one partition."""

    def __init__(
        self,
        keys: pa.Array | None,
        values: pa.Array,
        headers: pa.Array | None,
        times: np.ndarray,
        order: np.ndarray | None,
    ) -> None:
        self.keys, self.values, self.headers, self.times, self.order = keys, values, headers, times, order

    def some(self, start: int, end: int) -> tuple[pa.Array | None, pa.Array, np.ndarray, pa.Array | None]:
        """Return keys, values, times and headers of the rows from ``start`` to ``end``, in the order of partitions."""
        if self.order is not None:
            chosen = pa.array(self.order)
            self.keys = None if self.keys is None else self.keys.take(chosen)
            self.headers = None if self.headers is None else self.headers.take(chosen)
            self.values, self.times, self.order = self.values.take(chosen), self.times[self.order], None
        keys = None if self.keys is None else self.keys[start:end]
        headers = None if self.headers is None else self.headers[start:end]
        return keys, self.values[start:end], self.times[start:end], headers


class PartitionBatches:
    """Rows of one output batch for one partition of the topic: those of ``records`` from ``start`` to ``end``."""

    def __init__(self, partition: int, first: int, records: Records, start: int, end: int) -> None:
        #: Sequence of the first row, not modulo 2^31.
        self.partition, self.first = partition, first
        self.records, self.start, self.rows = records, start, end - start
        #: Number of the rows that the broker has.
        self.sent = 0
        #: Record batch that is made already.
        self.ahead: Made | None = None
        self.who = NOBODY
        self._batches: Iterator[Made] | None = None

    def begin(
        self, sent: int, who: ProducerIdentity, codec: str | None, batch_bytes: int, transactional: bool = False
    ) -> None:
        """Go on behind the first ``sent`` rows."""
        self.sent, self.who = sent, who
        self._how = codec, who, batch_bytes, transactional
        self._batches = self.ahead = None

    def take(self) -> Made:
        self.make()
        assert self.ahead is not None, "a partition with rows left has a batch"
        taken, self.ahead = self.ahead, None
        return taken

    def make(self) -> None:
        """Make the next record batch, if rows are left."""
        if self.ahead is None:
            if self._batches is None:
                keys, values, times, headers = self.records.some(self.start + self.sent, self.start + self.rows)
                self._batches = record_batches(keys, values, times, headers, *self._how)
            self.ahead = next(self._batches, None)

    def made_whole(self, data: np.ndarray) -> None:
        """Take over a record batch that has all of the rows."""
        self.ahead, self._batches = (data, self.rows), iter(())


def by_partition(
    partitions: np.ndarray,
    sequences: np.ndarray,
    topic_partitions: int,
    keys: pa.Array | None,
    values: pa.Array,
    headers: pa.Array | None,
    times: np.ndarray,
) -> list[PartitionBatches]:
    """Split a batch into lines. ``partitions`` (int32) and ``sequences`` (int64) have an entry for each row."""
    order, present, starts, firsts, whole = kernels.grouped(partitions, sequences, topic_partitions)
    assert whole, "partitions are those of the topic, and their numbers have no gaps"
    records = Records(keys, values, headers, times, order if len(present) > 1 else None)
    ends = starts.tolist()
    return [
        PartitionBatches(partition, first, records, start, end)
        for partition, first, start, end in zip(present.tolist(), firsts.tolist(), ends[:-1], ends[1:], strict=True)
    ]


def make_together(lines: Sequence[PartitionBatches], batch_bytes: int, transactional: bool) -> None:
    """Make the record batches of lines that have begun, all at once, if each line fits a record batch of at most
    ``batch_bytes`` and begins with its first row. Otherwise each line makes its own when it is wanted."""
    if any(line.sent for line in lines):
        return
    records, who = lines[0].records, lines[0].who
    columns, kept = views(records.keys, records.values, records.headers, len(records.times))
    order = np.arange(len(records.times)) if records.order is None else records.order
    # Each line has its own start, not the end of the line before: lines that the broker has already are missing here.
    starts = np.array([line.start for line in lines])
    stops = np.array([line.start + line.rows for line in lines])
    sequences = np.array([line.who.sequence for line in lines])
    ends = np.empty(len(lines), np.int64)
    out = kernels.encode_each(
        *columns, records.times, order, starts, stops, attributes_of(None, transactional), who.id, who.epoch, sequences,
        batch_bytes, ends,
    )  # fmt: skip
    del kept  # the kernel used its addresses until here
    begin = 0
    for line, end in zip(lines, ends.tolist() if len(out) else (), strict=bool(len(out))):
        line.made_whole(out[begin:end])
        begin = end
