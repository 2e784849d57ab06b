"""``to_kafka(..., tentative=...)``: results that may still change, as records (design: tentative-topic).

Law: when a failure is over, the newest record of each key that was shown tentatively is its stable one again, or a tombstone. A
topic of its own ("topic") gets tombstones alone: the stable record is in the other topic, and was never gone. In the topic of the
stable records ("headers") the stable record is written again, if there is one.

Tentative records are written at least once, by a producer of their own without id and without transactions. They take no sequence
of the stable records, and a record that is lost or comes twice touches none of these.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flux.connectors.kafka.client.cluster import ATTEMPT_S, EARLIEST, LATEST, Address, Passing
from flux.connectors.kafka.client.producer import ProducerClient
from flux.connectors.kafka.client.security import Security
from flux.connectors.kafka.errors import KafkaError
from flux.connectors.kafka.formats.text_encode import Columns
from flux.connectors.kafka.records.decoder import Decoder
from flux.connectors.kafka.records.encoder import NOBODY, with_headers
from flux.connectors.kafka.write.partition_batches import PartitionBatches, by_partition
from flux.connectors.kafka.write.sequence_operator import PARTITION, SEQUENCE
from flux.connectors.kafka.write.sink import REQUEST_BYTES, KafkaSink, KafkaSinkAtLeastOnce
from flux.connectors.kafka.write.transactional_sink import KafkaSinkTransactional
from flux.dataflow.sink import Position, SinkContext
from flux.tentative_view import TentativeView

#: Header of each record of this module: ``ROW`` for a tentative row, ``UNDO`` for one that ends it.
FLUX_TENTATIVE, ROW, UNDO = "flux-tentative", b"row", b"undo"
#: Header that names the writer: the next primary of its partition takes back its records.
FLUX_WRITER = "flux-writer"
#: Ending of the name of a topic for tentative records.
ENDING = ".tentative"
#: Ways to write tentative records.
IN_TOPIC, IN_HEADERS = "topic", "headers"
#: Name of the column with the key of a record, in the view.
KEY = "_kafka_key"
#: Size of one answer when records of earlier primaries are read back, and of a record batch.
_FETCH_BYTES, _BATCH_BYTES = 8 << 20, 500_000


class Owed(NamedTuple):
    """Records that end tentative ones, and are not written yet."""

    #: Rows to write again, with their keys and partitions.
    rows: pa.RecordBatch
    #: Whether each of these is an earlier tentative row; otherwise it is the stable one.
    tentative: pa.BooleanArray
    #: Keys and partitions of the tombstones.
    removed: pa.RecordBatch


class TentativeWriter:
    """Writer of the tentative records of one partition of a stage, in one life of its sink. ``again`` says whether an undo writes
    stable records again; then ``stable`` must be called with all stable rows."""

    def __init__(
        self,
        topic: str,
        bootstrap: Sequence[Address],
        security: Security,
        columns: Columns,
        topic_partitions: int,
        codec: str | None,
        writer: str,
        again: bool,
    ) -> None:
        self.topic, self._columns, self._partitions, self._codec = topic, columns, topic_partitions, codec
        self._writer, self._again = writer.encode(), again
        self._client = ProducerClient(bootstrap, security)
        self._view = TentativeView([KEY, PARTITION])
        self._owed: list[Owed] = []
        #: Whether records of earlier primaries have been taken back.
        self._read_back = False

    def stable(self, batch: pa.RecordBatch) -> None:
        """Take stable rows that are written."""
        if self._again:
            self._view.write(self._rows(batch))

    def tentative(self, batch: pa.RecordBatch, through: int) -> None:
        self._settle()
        # If the call fails and comes again, the view has the rows twice. One undo ends both.
        self._write(self._view.tentative(self._rows(batch), through).rows, ROW)

    def undo(self, start: int | None, end: int | None) -> None:
        found = self._view.undo(start, end)
        # Kept until it is written: a repeated call finds nothing more in the view.
        self._owed.append(Owed(*found))
        if start is None and end is None and not self._again and not self._read_back:
            none = pa.array([], pa.bool_())
            self._owed += [Owed(each.slice(0, 0), none, each) for each in self._left_by_others()]
            self._read_back = True
        self._settle()

    def close(self) -> None:
        self._client.close()

    # ---- records

    def _rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows for the view. A row without a key cannot be taken back, so it is not shown."""
        keys = self._columns.keys(batch)
        keys = pa.nulls(batch.num_rows, pa.binary()) if keys is None else keys.cast(pa.binary())
        return batch.drop_columns([SEQUENCE]).append_column(KEY, keys).filter(keys.is_valid())

    def _settle(self) -> None:
        while self._owed:
            rows, tentative, removed = self._owed[0]
            self._write(rows.filter(tentative), ROW)
            self._write(rows.filter(pc.invert(tentative)), UNDO)
            self._bury(removed)
            self._owed.pop(0)

    def _write(self, rows: pa.RecordBatch, kind: bytes) -> None:
        if rows.num_rows:
            body = rows.drop_columns([KEY])
            columns = self._columns
            times = columns.timestamps(body, time.time_ns() // 1_000_000)
            given = columns.header_entries(body)
            self._send(rows.column(KEY), rows.column(PARTITION), columns.values(body), given, times, kind)

    def _bury(self, keys: pa.RecordBatch) -> None:
        """Write a tombstone for each key."""
        if keys.num_rows:
            times = np.full(keys.num_rows, time.time_ns() // 1_000_000, np.int64)
            nothing = pa.nulls(keys.num_rows, pa.binary())
            self._send(keys.column(KEY), keys.column(PARTITION), nothing, None, times, UNDO)

    def _send(
        self,
        keys: pa.Array,
        partitions: pa.Array,
        values: pa.Array,
        given: pa.Array | None,
        times: np.ndarray,
        kind: bytes,
    ) -> None:
        headers = with_headers(given, {FLUX_TENTATIVE: kind, FLUX_WRITER: self._writer}, len(keys))
        places = np.asarray(partitions)
        order = np.argsort(places, kind="stable")
        first = np.searchsorted(places[order], places[order], side="left")
        numbers = np.empty(len(places), np.int64)
        numbers[order] = np.arange(len(places)) - first
        lines = by_partition(places, numbers, self._partitions, keys, values, headers, times)
        for line in lines:
            line.begin(0, NOBODY, self._codec, _BATCH_BYTES)
        while lines := [line for line in lines if line.sent < line.rows]:
            self._round(lines)

    def _round(self, lines: list[PartitionBatches]) -> None:
        """Write one record batch of each partition, as far as they fit a request."""
        sending: dict[int, tuple[PartitionBatches, np.ndarray, int]] = {}
        size = 0
        for line in lines:
            if size > REQUEST_BYTES:
                break
            data, rows = line.take()
            sending[line.partition] = (line, data, rows)
            size += data.size
        sent = self._client.begin(self.topic, {partition: data for partition, (_, data, _) in sending.items()})
        for partition, answer in self._client.finish(sent).items():
            line, _, rows = sending[partition]
            if answer.error is not None:
                what = f"partition {partition} of topic {self.topic!r}: {answer.error.__name__}"
                if "Authorization" in answer.error.__name__:
                    raise self._client.refused(self.topic, answer.error.__name__)
                raise Passing(what) if answer.error.retriable else KafkaError(f"{what}. {answer.why}".rstrip())
            line.sent += rows

    # ---- records of earlier primaries

    def _left_by_others(self) -> list[pa.RecordBatch]:
        """Return keys and partitions of the tentative records that earlier primaries of this partition have not taken back."""
        places = [(self.topic, partition) for partition in range(self._partitions)]
        firsts = self._client.offsets(dict.fromkeys(places, EARLIEST), ATTEMPT_S, read_committed=False)
        ends = self._client.offsets(dict.fromkeys(places, LATEST), ATTEMPT_S, read_committed=False)
        return [
            left
            for place in places
            if (left := self._left_in(place[1], firsts[place], ends[place])) is not None and left.num_rows
        ]

    def _left_in(self, partition: int, first: int, end: int) -> pa.RecordBatch | None:
        decoder = Decoder(self.topic, partition, ("key", "value", "headers"))
        found: list[pa.RecordBatch] = []
        while first < end:
            got = self._client.fetch(self.topic, partition, first, 0.1, _FETCH_BYTES, read_committed=False).records
            if not got.size:
                raise Passing(
                    f"partition {partition} of topic {self.topic!r}: the broker sent no records from {first} on"
                )
            while got.size:
                decoded = decoder.decode(got, first)
                if not decoded.used:
                    break
                first, got = decoded.next, got.slice(decoded.used)
                if decoded.rows is not None:
                    found.append(self._of_writer(decoded.rows))
        if not found:
            return None
        newest = _newest(pa.Table.from_batches(found).combine_chunks())
        keys = newest.filter(newest.column("value").is_valid()).column("key").combine_chunks()
        places = pa.array(np.full(len(keys), partition, np.int32))
        return pa.RecordBatch.from_arrays([keys, places], [KEY, PARTITION])

    def _of_writer(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return key and value of the records that this writer has written."""
        headers = rows.column("headers")
        entries = headers.flatten()
        mine = pc.and_(
            pc.equal(entries.field("key"), FLUX_WRITER),
            pc.equal(entries.field("value"), pa.scalar(self._writer, pa.binary())),
        ).fill_null(False)
        return rows.select(["key", "value"]).take(pc.list_parent_indices(headers).filter(mine))


def _newest(rows: pa.Table) -> pa.Table:
    """Return the last record of each key."""
    codes = np.asarray(rows.column("key").combine_chunks().dictionary_encode().indices)
    _, behind = np.unique(codes[::-1], return_index=True)
    return rows.take(pa.array(np.sort(len(codes) - 1 - behind)))


class ShowsTentativeRecords(KafkaSink):
    """Part of the sinks of a topic that write tentative records, too."""

    #: The topic of tentative records.
    tentative_topic = ""
    _showing: TentativeWriter | None = None

    def __repr__(self) -> str:
        where = "beside them" if self.tentative_topic == self.topic else f"in topic {self.tentative_topic}"
        return f"{super().__repr__()} (tentative rows {where})"

    def open(self, context: SinkContext) -> None:
        super().open(context)
        self._showing = TentativeWriter(
            self.tentative_topic, self._bootstrap, self._security, self._columns, self._topic_partitions, self._codec,
            f"{context.query}/{context.number}/{context.partition}", again=self.tentative_topic == self.topic,
        )  # fmt: skip

    def write(self, batch: pa.RecordBatch, position: Position) -> None:
        super().write(batch, position)
        self._shown.stable(batch)

    def tentative(self, batch: pa.RecordBatch, through: int) -> None:
        self._shown.tentative(batch, through)

    def undo(self, start: int | None, end: int | None) -> None:
        self._shown.undo(start, end)

    def corrected(self, through: int) -> None:
        self._shown.undo(None, through)

    def close(self) -> None:
        super().close()
        if self._showing is not None:
            self._showing.close()

    @property
    def _shown(self) -> TentativeWriter:
        assert self._showing is not None, "open comes first"
        return self._showing


class TentativeKafkaSink(ShowsTentativeRecords, KafkaSink):
    """``KafkaSink`` that writes tentative records, too."""


class TentativeKafkaSinkAtLeastOnce(ShowsTentativeRecords, KafkaSinkAtLeastOnce):
    """``KafkaSinkAtLeastOnce`` that writes tentative records, too."""


class TentativeKafkaSinkTransactional(ShowsTentativeRecords, KafkaSinkTransactional):
    """``KafkaSinkTransactional`` that writes tentative records, too: outside of its transactions."""


#: The sink with tentative records, by the sink without.
WITH_TENTATIVE: dict[type[KafkaSink], type[ShowsTentativeRecords]] = {
    KafkaSink: TentativeKafkaSink,
    KafkaSinkAtLeastOnce: TentativeKafkaSinkAtLeastOnce,
    KafkaSinkTransactional: TentativeKafkaSinkTransactional,
}
