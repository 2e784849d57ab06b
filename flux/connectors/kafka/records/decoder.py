"""Record batches of Kafka (format 2), as a broker sends them, to Arrow columns.

Left to the reader: where records come from, and where reading goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from flux.connectors.kafka.errors import CorruptRecords
from flux.connectors.kafka.records import kernels
from flux.connectors.kafka.records.compression import CODECS, decompress

_ABORT = 0


class Aborted(NamedTuple):
    """Aborted transaction, as an answer to a fetch lists it."""

    #: Id of the producer.
    producer: int
    #: Offset of the transaction's first record.
    first_offset: int


class Transactions:
    """Record batches of aborted transactions in one answer, for readers with read_committed. False if there are none.

    An answer of a broker lists such transactions: producer, and offset of the first record. A transaction ends with a
    control batch of its producer, which commits or aborts it. A reader that takes an answer piece by piece follows it from
    its first batch to its last."""

    def __init__(self, aborted: Iterable[Aborted] = ()) -> None:
        #: Transactions that begin behind the batches that were followed, the next one last.
        self._waiting = sorted(aborted, key=lambda each: each.first_offset, reverse=True)
        self._under_way: set[int] = set()  # producers with an aborted transaction that has begun and not ended

    def __bool__(self) -> bool:
        return bool(self._waiting or self._under_way)

    def copy(self) -> Transactions:
        made = Transactions()
        made._waiting, made._under_way = list(self._waiting), set(self._under_way)
        return made

    def follow(self, batches: np.ndarray, control: Callable[[int], int]) -> np.ndarray:
        """Tell for each of the next batches whether it belongs to an aborted transaction. ``control`` returns the kind of
        control batch i.

        This is a loop over batches, not rows, and runs only for answers with such transactions."""
        found = np.zeros(len(batches), np.bool_)
        columns = [kernels.BASE, kernels.LAST_DELTA, kernels.ATTRIBUTES, kernels.PRODUCER]
        for i, (base, delta, attributes, producer) in enumerate(batches[:, columns].tolist()):
            while self._waiting and self._waiting[-1].first_offset <= base + delta:
                self._under_way.add(self._waiting.pop().producer)
            if attributes & kernels.CONTROL:
                if producer in self._under_way and control(i) == _ABORT:
                    self._under_way.discard(producer)
            elif attributes & kernels.TRANSACTIONAL:
                found[i] = producer in self._under_way
        return found


HEADER = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
#: Columns with Spark's names and types.
SCHEMA = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", pa.timestamp("us", "UTC")),
        pa.field("timestampType", pa.int32()),
        pa.field("headers", pa.list_(HEADER)),
    ]
)
COLUMNS = tuple(SCHEMA.names)

#: Largest record batch when decompressed: brokers take 1 MiB compressed unless told otherwise, and records of 100 MB are
#: known. As columns it may take four times as much, if its records are as short as can be.
BATCH_BYTES_MAX = 128 << 20
#: Size at which a chunk ends, behind the record batch that reaches it: data that fits the caches of a processor is decoded
#: fastest.
CHUNK_BYTES = 4 << 20
#: Heads that are looked at in one go. Compaction and slow producers make batches of one record.
_BATCHES = 4096


class Decoded(NamedTuple):
    """Rows of one chunk."""

    #: None if none of the records is a wanted row.
    rows: pa.RecordBatch | None
    #: Offset behind the records.
    next: int
    #: Bytes up to there.
    used: int


class Decoder:
    """Decoder of the answers for one partition of a topic. Not for several threads at once.

    ``columns`` names the columns that are made; they come in the order of Spark's. ``bytes_max`` is the largest record
    batch when decompressed, at most 1 GiB.

    Law: the rows are the records of the bytes from the wanted offset on, in order, without those of control batches and,
    for ``read_committed``, of aborted transactions. Nothing is taken from a batch whose checksum does not match. Malformed
    bytes are CorruptRecords with the offset, and no column is made of them."""

    def __init__(
        self,
        topic: str,
        partition: int,
        columns: Sequence[str] = COLUMNS,
        bytes_max: int = BATCH_BYTES_MAX,
    ) -> None:
        self.topic, self.partition = topic, partition
        self.schema = pa.schema([field for field in SCHEMA if field.name in columns])
        self._wanted = (
            kernels.KEYS * ("key" in columns)
            | kernels.VALUES * ("value" in columns)
            | kernels.HEADERS * ("headers" in columns)
        )
        # A chunk may have as much before its last batch; columns count to 2^31.
        self._bytes_max = min(bytes_max, 1 << 30)
        self._batches = np.empty((_BATCHES, kernels.FIELDS), np.int64)
        self._had_headers = False
        self._same = _Same(topic, partition)

    def decode(
        self, data: pa.Buffer, start: int, transactions: Transactions | None = None, chunk_bytes: int = CHUNK_BYTES
    ) -> Decoded:
        """Decode the first record batches in ``data``: as many as make about ``chunk_bytes``, at least one whole one.

        Records before offset ``start`` are left out. A batch that is cut off at the end is not looked at: ``used`` is the
        place to go on from, and 0 means that there is no whole batch. ``transactions`` belongs to the whole answer: it is
        the same object for each part."""
        code, found, _ = kernels.scan(data.address, data.size, chunk_bytes, self._batches)
        if code != kernels.OK and not found:
            raise self._corrupt(kernels.REASONS[code], int(self._batches[0, kernels.BASE]))
        # An error behind good batches is found again when these are through.
        if not found:
            return Decoded(None, start, 0)
        batches = self._batches[:found]
        wanted = (batches[:, kernels.ATTRIBUTES] & kernels.CONTROL) == 0
        wanted &= batches[:, kernels.BASE] + batches[:, kernels.LAST_DELTA] >= start

        def control(i: int) -> int:
            return self._control(data, batches[i])

        if transactions:
            wanted &= ~transactions.copy().follow(batches, control)
        taken, chosen, bodies, sizes, kept = self._bodies(data, batches, wanted, chunk_bytes)
        if transactions:
            transactions.follow(batches[:taken], control)
        last = batches[taken - 1]
        rows = self._rows(batches[chosen], bodies, sizes, start) if len(chosen) else None
        del kept
        following = int(last[kernels.BASE] + last[kernels.LAST_DELTA]) + 1
        return Decoded(rows, max(following, start), int(last[kernels.AT] + last[kernels.LENGTH]))

    def _bodies(self, data: pa.Buffer, batches: np.ndarray, wanted: np.ndarray, chunk_bytes: int) -> Any:
        """Return the number of batches in the chunk, the wanted ones of them, addresses and sizes of their records, and
        buffers that must live meanwhile."""
        starts = data.address + batches[:, kernels.AT] + kernels.HEAD
        sizes = batches[:, kernels.LENGTH] - kernels.HEAD
        codecs = batches[:, kernels.ATTRIBUTES] & kernels.CODEC
        kept: list[pa.Buffer] = []  # decompressed records: ``starts`` has only their addresses
        if not np.any(codecs[wanted]):
            ends = np.cumsum(np.where(wanted, sizes, 0))
            taken = min(int(np.searchsorted(ends, chunk_bytes)) + 1, len(batches))
            chosen = np.flatnonzero(wanted[:taken])
            return taken, chosen, starts[chosen], sizes[chosen], kept
        total = taken = 0
        for i in range(len(batches)):
            if wanted[i]:
                if codecs[i] and sizes[i]:
                    body = self._decompressed(data, batches[i])
                    if total and total + body.size > self._bytes_max:
                        break
                    kept.append(body)
                    starts[i], sizes[i] = body.address, body.size
                total += int(sizes[i])
            taken = i + 1
            if total >= chunk_bytes:
                break
        chosen = np.flatnonzero(wanted[:taken])
        return taken, chosen, starts[chosen], sizes[chosen], kept

    def _decompressed(self, data: pa.Buffer, batch: np.ndarray) -> pa.Buffer:
        number = int(batch[kernels.ATTRIBUTES]) & kernels.CODEC
        codec = CODECS.get(number)
        if codec is None:
            raise self._corrupt(f"there is no codec {number}", int(batch[kernels.BASE]))
        compressed = data.slice(int(batch[kernels.AT]) + kernels.HEAD, int(batch[kernels.LENGTH]) - kernels.HEAD)
        try:
            return decompress(codec, compressed, self._bytes_max)
        except ValueError as error:
            raise self._corrupt(str(error), int(batch[kernels.BASE])) from None

    def _control(self, data: pa.Buffer, batch: np.ndarray) -> int:
        body = data if not int(batch[kernels.ATTRIBUTES]) & kernels.CODEC else self._decompressed(data, batch)
        at = int(batch[kernels.AT]) + kernels.HEAD if body is data else 0
        size = int(batch[kernels.LENGTH]) - kernels.HEAD if body is data else body.size
        kind = int(kernels.control_kind(body.address + at, size))
        if kind < 0:
            raise self._corrupt("a control record is malformed", int(batch[kernels.BASE]))
        return kind

    def _rows(self, batches: np.ndarray, bodies: np.ndarray, sizes: np.ndarray, start: int) -> pa.RecordBatch | None:
        """Decode the records of these batches from their uncompressed bodies. Sizes and counts are checked before memory is asked
        for, because they are a broker's word. The first record with headers, if they are wanted, ends a run of the kernel: from
        then on every run has memory for them."""
        counts = batches[:, kernels.RECORDS]
        if np.any(sizes > self._bytes_max):
            why = f"it has more than {self._bytes_max >> 20} MiB, the most that is allowed"
            raise self._corrupt(why, int(batches[np.argmax(sizes), kernels.BASE]))
        if np.any(counts > sizes // kernels.RECORD_MIN):  # checked before memory is asked for
            worst = int(np.argmax(counts > sizes // kernels.RECORD_MIN))
            raise self._corrupt(kernels.REASONS[kernels.BAD_COUNT], int(batches[worst, kernels.BASE]))
        room, room_bytes = int(counts.sum()), int(sizes.sum())
        if not room:
            if np.any(sizes):
                raise self._corrupt(kernels.REASONS[kernels.BAD_REST], int(batches[np.argmax(sizes > 0), kernels.BASE]))
            return None
        offsets, times = np.empty(room, np.int64), np.empty(room, np.int64)
        keys = _Bytes(room, room_bytes if self._wanted & kernels.KEYS else 0)
        values = _Bytes(room, room_bytes if self._wanted & kernels.VALUES else 0)
        rows = np.zeros(len(batches), np.int64)
        headers = _Headers(room, room_bytes if self._had_headers else 0)
        while True:
            ended = kernels.decode(
                batches,
                bodies,
                sizes,
                start,
                self._wanted,
                offsets,
                times,
                keys.arrays,
                values.arrays,
                headers.arrays,
                rows,
            )
            code, count, batch, record, null_keys, null_values, many = map(int, ended)
            if code != kernels.HAS_HEADERS:
                break
            self._had_headers = True
            headers = _Headers(room, room_bytes)
        if code != kernels.OK:
            raise self._corrupt(kernels.REASONS[code], int(batches[batch, kernels.BASE]), record)
        if not count:
            return None
        made = {
            "key": lambda: keys.column(count, null_keys),
            "value": lambda: values.column(count, null_values),
            "topic": lambda: self._same.topics(count),
            "partition": lambda: self._same.partitions(count),
            "offset": lambda: _plain(pa.int64(), offsets, count),
            "timestamp": lambda: _plain(pa.timestamp("us", "UTC"), times, count),
            "timestampType": lambda: self._same.time_types(batches[:, kernels.ATTRIBUTES], rows, count),
            "headers": lambda: headers.column(count, many),
        }
        return pa.RecordBatch.from_arrays([made[name]() for name in self.schema.names], schema=self.schema)

    def _corrupt(self, why: str, base: int, record: int | None = None) -> CorruptRecords:
        which = "" if record is None else f", record {record} of it"
        return CorruptRecords(
            f"cannot read topic {self.topic!r}, partition {self.partition}, record batch at offset {base}{which}: {why}. The "
            "broker or the way to it damages records; starting behind this offset leaves the batch out"
        )


def _plain(type_: pa.DataType, numbers: np.ndarray, count: int) -> pa.Array:
    return pa.Array.from_buffers(type_, count, [None, pa.py_buffer(numbers[:count])])


def _validity(valid: np.ndarray, count: int, nulls: int) -> pa.Buffer | None:
    return pa.py_buffer(np.packbits(valid[:count], bitorder="little")) if nulls else None


class _Bytes:
    """Binary column that a kernel fills."""

    def __init__(self, rows: int, size: int) -> None:
        ends = np.empty(rows + 1, np.int32)
        ends[0] = 0
        self.arrays = ends, np.empty(rows, np.bool_), np.empty(size, np.uint8)

    def column(self, count: int, nulls: int) -> pa.Array:
        ends, valid, data = self.arrays
        used = data[: ends[count]]
        if 2 * used.size < data.size:
            used = used.copy()  # otherwise the rest would live as long as the column
        buffers = [_validity(valid, count, nulls), pa.py_buffer(ends[: count + 1]), pa.py_buffer(used)]
        return pa.Array.from_buffers(pa.binary(), count, buffers, nulls)


class _Headers:
    """Column of headers that a kernel fills. ``size`` is the number of bytes of the bodies; 0 until a row has shown headers."""

    def __init__(self, rows: int, size: int) -> None:
        most = size // 2 if size else -1  # a header has at least two lengths
        self.arrays = (
            np.zeros(rows + 1 if size else 0, np.int32),
            np.zeros(most + 1, np.int32),
            np.empty(size, np.uint8),
            np.zeros(most + 1, np.int32),
            np.empty(max(most, 0), np.bool_),
            np.empty(size, np.uint8),
        )

    def column(self, count: int, many: int) -> pa.Array:
        """Make the column, with null in rows without headers, as in Spark."""
        if not many:
            return pa.nulls(count, pa.list_(HEADER))
        ends, name_ends, names, item_ends, valid, items = self.arrays
        nulls = many - int(np.count_nonzero(valid[:many]))
        name = _names(name_ends[: many + 1], names[: name_ends[many]].copy(), many)
        item = pa.Array.from_buffers(
            pa.binary(),
            many,
            [_validity(valid, many, nulls), pa.py_buffer(item_ends[: many + 1].copy()),
             pa.py_buffer(items[: item_ends[many]].copy())],
            nulls,
        )  # fmt: skip
        structs = pa.StructArray.from_arrays([name, item], fields=list(HEADER))
        empty = np.diff(ends[: count + 1]) == 0
        validity = _validity(~empty, count, int(np.count_nonzero(empty)))
        return pa.Array.from_buffers(
            pa.list_(HEADER), count, [validity, pa.py_buffer(ends[: count + 1].copy())], children=[structs]
        )


def _names(ends: np.ndarray, data: np.ndarray, many: int) -> pa.Array:
    column = pa.Array.from_buffers(pa.string(), many, [None, pa.py_buffer(ends.copy()), pa.py_buffer(data)])
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        # Clients check nothing, and a name that is not UTF-8 must not hold up the records behind it.
        return pa.array([name.decode("utf-8", "replace") for name in column.view(pa.binary()).to_pylist()], pa.string())
    return column


class _Same:
    """Columns with the same value in each row, made once and handed out as slices."""

    def __init__(self, topic: str, partition: int) -> None:
        # 0 and 1 are the two types of a time, at the places 2 and 3: the producer's time, and the broker's.
        numbers = [pa.scalar(number, pa.int32()) for number in (partition, 0, 1)]
        self._values = [pa.scalar(topic, pa.string()), *numbers]
        self._columns = [pa.repeat(value, 0) for value in self._values]

    def topics(self, count: int) -> pa.Array:
        return self._slice(0, count)

    def partitions(self, count: int) -> pa.Array:
        return self._slice(1, count)

    def time_types(self, attributes: np.ndarray, rows: np.ndarray, count: int) -> pa.Array:
        """Return 0 for the producer's time, 1 for the broker's. ``rows`` has the number of rows after each batch."""
        types = ((attributes & kernels.APPEND_TIME) != 0).astype(np.int32)
        if types.min() == types.max():
            return self._slice(2 + int(types[0]), count)
        return pa.array(np.repeat(types, np.diff(rows, prepend=0)))

    def _slice(self, which: int, count: int) -> pa.Array:
        if len(self._columns[which]) < count:
            self._columns[which] = pa.repeat(self._values[which], 2 * count)
        return self._columns[which].slice(0, count)
