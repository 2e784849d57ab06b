"""The streams of one partition of a source, the same for both kinds of readers: ingress tasks and workers (design:
stream, seek).

``SourceStreams`` are those of most sources, ``MicroBatchStreams`` those of a source whose rows come in micro-batches. A
``ReaderPosition`` is the place at which the reader of a source goes on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NewType

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flux.dataflow.plan import NUMBER, EdgePlan, EventTime
from flux.dataflow.source import RowStart
from flux.errors import QueryFailed, RefusedError, UsageError
from flux.exchange.log import LogRoom, Rows
from flux.exchange.producer import Producer, state_watermark
from flux.exchange.replay_check import START, Beginning
from flux.exchange.slices import ROTATION_ROWS, with_numbers
from flux.exchange.timed_rows import EdgeRows, TimedRows, columns_read
from flux.operators.schema import picked
from flux.operators.user_code import text_of
from flux.windows.lateness import BatchLateness, Judgement, Lateness
from flux.windows.window import NEVER
from flux.wire.checksum import extend, extend_each
from flux.wire.messages import Mark
from partitioning.clustering import Clustered, Clustering, pieces

#: The place at which a reader goes on (design: position): the second argument of ``read(partition, start)``. It belongs to the
#: reader: code that keeps it, or gives it to a reader, knows nothing about its meaning. A reader without positions of its own is
#: given the number of batches that it has to leave out, because its batches are numbered.
ReaderPosition = NewType("ReaderPosition", object)

#: Most bytes of a position in messages and checkpoints.
POSITION_BYTES = 1024


def packed(position: Any) -> bytes:
    """Encode a position. UsageError: it cannot travel."""
    try:
        data = msgspec.msgpack.encode(position)
        same = _plain(position) == msgspec.msgpack.decode(data)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise UsageError(f"{_expected(position)}: {error}") from None
    if not same:
        raise UsageError(f"{_expected(position)}, which would come back as something else")
    if len(data) > POSITION_BYTES:
        raise UsageError(
            f"the position of a source may take {POSITION_BYTES} bytes, got one of {len(data)}: keep what is long elsewhere, "
            "and give its name"
        )
    return data


def _expected(position: Any) -> str:
    return (
        "the position of a source must be a number, text, bytes, or lists and dicts of these, got "
        f"{text_of(position, repr):.100}"
    )


def _plain(position: Any) -> Any:
    """Replace tuples by lists, as a decoded position has them."""
    if isinstance(position, list | tuple):
        return [_plain(each) for each in position]
    return {key: _plain(each) for key, each in position.items()} if isinstance(position, dict) else position


def unpacked(data: bytes) -> ReaderPosition:
    return ReaderPosition(msgspec.msgpack.decode(data))


def position_before(sequence: int) -> ReaderPosition:
    """Make the position of a reader whose batches are counted, so that element ``sequence`` of its streams comes first."""
    return ReaderPosition(sequence)


#: Times the bound of a log and a batch: the most that the same rows take when they are cut into smaller batches.
AGAIN = 8
#: Positions that wait to be applied, at most; an even number. With one request per second they cover a good minute, and beyond
#: that every second position will do.
WAITING_MAX = 128


class SourceStreams:
    """The streams of one partition of a source: one per edge that leaves the source, fed with the same batches."""

    def __init__(
        self,
        edges: Sequence[EdgePlan],
        producers: Sequence[Producer],
        name: str,
        seeks: bool = False,
        positions: bool = False,
        batch_bytes: int = 0,
        own_numbers: bool = False,
        event_time: EventTime | None = None,
        judge: Lateness | None = None,
        read_by: Sequence[EdgePlan] = (),
    ) -> None:
        """Begin a life of the partition.

        ``seeks``: the source can begin elsewhere than at its start, and this is not the first life of its partition;
        ``positions``: its reader has positions of its own, and its rows are numbered; ``batch_bytes``: most bytes of one batch;
        ``own_numbers``: rows bring their numbers, as offsets of a log are; else they are counted; ``event_time`` of the rows;
        None: none of them is late; ``judge`` of late rows, if not each is judged by the rows before it; ``read_by``: the edges
        whose columns are compared when rows are read again, if not all of them are."""
        self.edges, self.producers = list(edges), list(producers)
        #: The logs of all producers tell it when they fill and drain.
        self.room = LogRoom()
        for producer in producers:
            producer.log.tell(self.room)
        self.name = name
        self.rows = 0
        self.batches = 0
        self.pauses = 0  # times at which the source had no new row
        self.ended = False
        self.first: int | None = None if seeks else 0  # the first element; None: not known until workers have answered
        self._positions = positions
        self._own_numbers = own_numbers
        #: By edge: the clustering of its rows. It is made before the first rows come, because that takes longer than clustering
        #: a small batch.
        self._clusterings = [
            Clustering(edge.schema.append(NUMBER) if positions else edge.schema, edge.key, edge.partitions)
            for edge in edges
        ]
        # Columns that no stage reads may differ when the source is read again.
        self._read = columns_read(event_time, read_by or edges)
        #: The judge of its rows; None: they have no event time.
        self.timed = None if event_time is None else TimedRows(event_time, self.edges, judge)
        #: It has told that it has nothing now, and that others need not wait for it.
        self.idle = False
        #: Its reader gets no answer from outside.
        self.silent = False
        #: The watermark that the clock has given while it was idle.
        self._by_clock = NEVER
        for producer in producers:
            producer.earlier.numbered = positions
            producer.earlier.own_numbers = own_numbers
            producer.earlier.timed = event_time is not None
        self._again_bytes = AGAIN * (batch_bytes + max((producer.log.bytes_max for producer in producers), default=0))
        self._start = START  # the beginning of the reader
        #: The newest position that consumers of any edge have shown, packed, if rows bring their numbers. It may lie behind
        #: rows that are to come again.
        self._newest_shown = b""
        self._checksum = 0
        self._newest: Mark | None = None  # the newest mark with a position since ``applied`` was called
        self._waiting: list[Mark] = []  # earlier ones, which were not applied when ``applied`` was called
        self._settled: Mark | None = None  # the last applied one of these
        self._awaited = False  # a worker has answered
        #: The first element is known, and a worker waits for rows: ``find_start`` has said so.
        self.start_known = False

    def close(self, edge: int) -> Producer | None:
        """End the stream of an edge that is removed, without another word, and return its producer. None: it is the last one,
        and the source is removed with it."""
        place = next(at for at, each in enumerate(self.edges) if each.id == edge)
        if len(self.edges) == 1:
            return None
        producer = self.producers[place]
        for parallel in (self.edges, self.producers, self._clusterings):
            del parallel[place]
        producer.log.clear()
        producer.log.tell(LogRoom())
        return producer

    def find_start(self) -> bool:
        """Find the first element, and tell whether it is known.

        A source that seeks skips the batches that all consumers have applied. It does not begin before a worker waits for rows:
        reading takes long, and would hold up the handshakes of this very worker."""
        if not self._awaited:
            self._awaited = any(producer.awaited for producer in self.producers)
            if not self._awaited:
                return False
        if self.first is None:
            floors = [producer.floor() for producer in self.producers]
            known = [floor for floor in floors if floor is not None]
            if len(known) == len(floors):
                # Edges that have applied as much know the same rows, but not all of them need to know a position.
                self._begin(min(known, key=lambda each: (each.sequence, not each.position)))
        self.start_known = self.first is not None
        return self.start_known

    def _begin(self, beginning: Beginning) -> None:
        self._start, self.first, self._checksum = beginning, beginning.sequence, beginning.checksum
        if self._own_numbers:
            shown = [mark for producer in self.producers if (mark := producer.earlier.newest()) is not None]
            self._newest_shown = max(shown, key=lambda mark: mark.sequence).position if shown else b""
        for producer in self.producers:
            producer.begin_at(self.first, self._checksum)
        self._begin_judging(beginning)

    def _begin_judging(self, beginning: Beginning) -> None:
        if self.timed is not None:
            self.timed.begin(beginning.watermark, beginning.late, beginning.doubted, beginning.doubted_from)
            self._tell_watermark()
            for producer in self.producers:
                state_watermark(producer, beginning.sequence, self.timed.watermark)

    def _tell_watermark(self) -> None:
        """Tell the producers the watermark behind their next entries."""
        assert self.timed is not None
        for producer in self.producers:
            producer.watermark, producer.judged = self.timed.watermark, self.timed.judged_until_now

    def fall_idle(self, watermark: int = NEVER) -> None:
        """Note that the reader has had nothing for a long time, and that no stage is to wait for it. ``watermark``: the one that
        the clock gives in place of rows."""
        if not self.idle or watermark > self._by_clock:
            self._by_clock = max(watermark, self._by_clock)
            self._state_idle(True)

    def fall_silent(self) -> None:
        """Note that the reader gets no answer from outside: there may be rows, so it is not idle."""
        self.silent = True
        self.wake_up()

    def wake_up(self) -> None:
        """Note that the reader may have rows for which it is not asked: it is not idle any more."""
        if self.idle:
            self._state_idle(False)

    def _state_idle(self, idle: bool) -> None:
        if self.timed is not None:
            self.idle = idle
            for producer in self.producers:
                state_watermark(producer, producer.next_sequence, max(self.timed.watermark, self._by_clock), idle)

    @property
    def position(self) -> ReaderPosition:
        """The position at which its reader begins, once that is known.

        A reader whose rows bring their numbers is told the newest known position also if it begins with row 0: its log may have
        begun again since, and the numbers of the new rows have to lie behind those that some consumers have."""
        assert self.first is not None
        if not self._positions:
            return position_before(self.first)
        position, newest = (unpacked(each) if each else None for each in (self._start.position, self._newest_shown))
        if self._own_numbers and (self.first or self._newest_shown):
            return ReaderPosition(RowStart(self.first, position, newest))
        return ReaderPosition(position)

    @property
    def has_room(self) -> bool:
        """The reader may go on.

        If one of its streams makes rows that were there before, all streams have room beyond the bounds of their logs: an
        ordered step may need rows that were in the log together when batches were cut elsewhere, and rows go to all streams
        alike (design: numbered-rows). The number of a row is known when the row has been read. So one batch behind such rows goes
        beyond the bounds as well if the last of them are gone."""
        if not self.room.full:
            return True
        full = [producer for producer in self.producers if not producer.has_room]
        return self.makes_again and all(map(self._has_more_room, full))

    @property
    def room_bytes(self) -> int:
        """Bytes for which all logs have room. One batch may go beyond."""
        return min([producer.log.bytes_max - producer.log.bytes for producer in self.producers])

    @property
    def makes_again(self) -> bool:
        """One of its streams has not come yet to rows that were there before."""
        return any(each.next_sequence < each.earlier.front for each in self.producers)

    def comes_again(self, pending: int = 0) -> bool:
        """Tell whether one of its streams has not come yet to an element that a consumer has had from an earlier life.
        ``pending``: batches that were read and are still to be appended."""
        return any(
            each.next_sequence + pending < max(each.earlier.front, each.earlier.shown_end) for each in self.producers
        )

    def _has_more_room(self, producer: Producer) -> bool:
        return not producer.log.closed and producer.log.bytes < self._again_bytes

    @property
    def drained(self) -> bool:
        return all(producer.drained for producer in self.producers)

    @property
    def next_number(self) -> int:
        """The least number of the next row."""
        return self.producers[0].next_sequence

    @property
    def elements(self) -> int:
        """The count of numbers given in this life: of rows if rows are numbered, else of batches. Gaps between numbers that
        rows bring count, too."""
        if not self._own_numbers:
            return self.rows if self._positions else self.batches
        return max(self.producers[0].next_sequence - (self.first or 0), 0)

    def append(
        self, batch: pa.RecordBatch, created: float, position: bytes = b"", numbers: np.ndarray | None = None
    ) -> None:
        """Append a batch to all streams. It is copied while it is clustered, so the caller may reuse its memory. ``position``
        is the packed position behind it; ``numbers`` are those of its rows, if they bring them."""
        self.rows += batch.num_rows
        self.batches += 1
        if self._positions:
            self._append_numbered(batch, created, position, numbers)
            return
        # The checksum is of the rows as read, because their clustering depends on the table of the moment.
        self._checksum = extend(self._checksum, picked(batch, self._read))
        # Computed for all edges before any stream takes the batch: a row without an answer ends the query.
        for at, (rows, _) in enumerate(self._for_edges(batch)):
            producer = self.producers[at]
            turn = producer.stream.producer + producer.next_sequence
            producer.append(self._clustered(rows, at, turn), created, self._checksum)

    def append_each(self, batches: Sequence[tuple[pa.RecordBatch, float]]) -> int:
        """Append small batches of the same schema, each with its time, as many as there is room for, and return their number.
        Rows must not be numbered."""
        assert not self._positions
        together, sizes = pa.concat_batches([batch for batch, _ in batches]), [batch.num_rows for batch, _ in batches]
        read = together if self._read is None else picked(together, self._read)
        checksums = extend_each(self._checksum, read, sizes)
        judged = None if self.timed is None else self.timed.judged(together, sizes, self._place)
        of_edges = self._for_edges(together) if judged is None else judged.of_edges()
        clustered = [self._each_clustered(*rows, sizes, at) for at, rows in enumerate(of_edges)]
        appended = 0
        while appended < len(batches) and (not self.room.full or self.has_room):
            if judged is not None:
                self._accept(judged.behind[appended])
            self.rows += sizes[appended]
            self.batches += 1
            self._checksum = checksums[appended]
            for producer, each in zip(self.producers, clustered, strict=True):
                producer.append(each[appended], batches[appended][1], self._checksum)
            appended += 1
        return appended

    def _for_edges(self, batch: pa.RecordBatch) -> list[EdgeRows]:
        """Return what travels of a batch on each edge, with the index of each row there; None: all rows travel. Rows
        with event time are judged, and the watermark of the next entries is that behind this batch."""
        if self.timed is None:
            found = [edge.rows_of(batch, self._place) for edge in self.edges]
            return [(rows, None if kept is None else kept.to_numpy()) for rows, kept in found]
        judged = self.timed.judged(batch, [batch.num_rows], self._place)
        of_edges = judged.of_edges()
        self._accept(judged.behind[0])
        return of_edges

    def _accept(self, judgement: Judgement) -> None:
        """Go on behind rows that were judged."""
        assert self.timed is not None
        self.timed.accept(judgement)
        self._tell_watermark()
        self.idle = self.silent = False

    def _place(self) -> str:
        """Tell the place of the next rows."""
        number = self.producers[0].next_sequence
        element = f"from row {number} on" if self._positions else f"from batch {number} on"
        return f"source {self.name}, partition {self.producers[0].stream.producer}, {element}"

    def _each_clustered(
        self, together: pa.RecordBatch, kept: np.ndarray | None, sizes: Sequence[int], at: int
    ) -> list[Clustered]:
        """Cluster what travels of several batches on an edge. ``kept``: the index of each row among those of the batches."""
        edge, producer = self.edges[at], self.producers[at]
        if kept is not None:
            ends = np.searchsorted(kept, np.cumsum(sizes))
            sizes = np.diff(ends, prepend=0).tolist()
        if edge.key:
            return self._clusterings[at].each_by_key(together, sizes, producer.by_rank)
        first = producer.stream.producer + producer.next_sequence
        return [self._clustered(batch, at, turn) for turn, batch in enumerate(pieces(together, sizes), first)]

    def _clustered(self, batch: pa.RecordBatch, at: int, turn: int) -> Clustered:
        """Cluster a batch for the edge with index ``at``. ``turn`` chooses the partition if there is no key."""
        edge, clustering = self.edges[at], self._clusterings[at]
        if edge.key:
            return clustering.by_key(batch, self.producers[at].by_rank)
        return clustering.whole(batch, turn % edge.partitions)

    def until_cut(self, rows: int, numbers: np.ndarray | None = None) -> int:
        """Return the number of the next ``rows``, which may bring their ``numbers``, that may be one batch. Batches that are
        counted are never cut."""
        if not self._positions:
            return rows
        if numbers is None:
            first = self.producers[0].next_sequence
            end = first + rows
        else:
            first, end = int(numbers[0]), int(numbers[-1]) + 1
        ends = {end}
        for edge, producer in zip(self.edges, self.producers, strict=True):
            ends.update(producer.earlier.cuts(first, end)[:1])
            if not edge.key:
                ends.add(first - first % ROTATION_ROWS + ROTATION_ROWS)
        if min(ends) == end:
            return rows
        if numbers is None:
            return min(ends) - first
        return int(np.searchsorted(numbers, min(ends)))

    def _append_numbered(
        self, batch: pa.RecordBatch, created: float, position: bytes, numbers: np.ndarray | None
    ) -> None:
        """Append a batch whose rows are numbered: by ``numbers``, or from the next number on. The sequence of a batch is the
        number of its last row. So all producers of the partition, which get the same rows, have the same next sequence."""
        count = batch.num_rows
        if numbers is None:
            first = self.producers[0].next_sequence
            numbers = np.arange(first, first + count)
        first, last = int(numbers[0]), int(numbers[-1])
        checksum = extend(0, picked(batch, self._read))
        of_edges = self._for_edges(batch)
        if position:
            known = () if self.timed is None else (self.timed.watermark, *self.timed.judged_until_now)
            self._newest = Mark(last, checksum, first, position, count, *known)
        for at, (rows, kept) in enumerate(of_edges):
            producer = self.producers[at]
            turn = producer.stream.producer + first // ROTATION_ROWS
            numbered = with_numbers(rows, numbers if kept is None else numbers[kept])
            producer.append(self._clustered(numbered, at, turn), created, checksum, position, (first, last), count)

    def applied(self) -> bytes:
        """Return the newest position, packed, whose preceding rows all replicas of all consumers have applied (design:
        applied-positions); empty if there is none since the last call.

        Only positions that were the newest at some call are known, so call it now and then. Consumers are told, too (design:
        needed-no-more)."""
        if self._newest is not None:
            self._waiting.append(self._newest)
            self._newest = None
        if len(self._waiting) == WAITING_MAX:
            del self._waiting[::2]  # the newest stays, because the number is even
        self._settle_kept()
        count = self._waiting_through(self._applied_through)
        if not count:
            if any(producer.owes_settled for producer in self.producers):
                self._settle_again()
            return b""
        mark = self._settled = self._waiting[count - 1]
        del self._waiting[:count]
        for producer in self.producers:
            producer.settle(mark)
        return mark.position

    @property
    def unsettled(self) -> bool:
        """Some position is known, and ``applied`` has not said yet that the rows before it are."""
        return self._newest is not None or bool(self._waiting)

    def _waiting_through(self, has: Callable[[int], bool]) -> int:
        """Count the first positions that wait and of whose rows ``has`` is true."""
        return bisect_left(self._waiting, True, key=lambda mark: not has(mark.sequence))

    def _settle_kept(self) -> None:
        """Tell checkpoints how far all of them are, though replicas that read lack some rows, as while they are repaired."""
        for producer in self.producers:
            count = self._waiting_through(producer.kept_through)
            if count:
                producer.settle_kept(self._waiting[count - 1])

    def _settle_again(self) -> None:
        """Tell the consumers of a newer table, which has other replicas."""
        mark = self._settled
        if mark is not None and self._applied_through(mark.sequence):
            for producer in self.producers:
                producer.settle(mark)

    @property
    def settled(self) -> bool:
        """All checkpoints have said that they lack none of the rows that were read in any life. Without checkpoints, all
        consumers have."""
        if self.first is None or self.comes_again():
            return False
        return all(producer.all_settled for producer in self.producers)

    def _applied_through(self, sequence: int) -> bool:
        return all(producer.applied_through(sequence) for producer in self.producers)

    def come_to_end(self) -> None:
        """Note that the source has given all that its log has by now."""
        for producer in self.producers:
            producer.come_to_end()

    def finish(self, created: float) -> None:
        self.ended = True
        for producer in self.producers:
            producer.finish(created)


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of one partition. ``query`` is Spark's id of the streaming query, the same after a restart from its
    checkpoint."""

    query: str
    number: int
    #: The rows that the partition had in the batches before, if that is known.
    least: int = 0
    #: By edge that leaves the source: the number behind the last of these rows that travelled. Empty: all did.
    sent: tuple[int, ...] = ()
    #: Rows with a time below it are late: the greatest time of the rows in the batches before, less the delay.
    watermark: int = NEVER

    def position(self, base: int) -> bytes:
        """Make the position of any of its rows in a stream in which it began with row ``base``."""
        return packed([self.query, self.number, base])


class MicroBatchStreams(SourceStreams):
    """The streams of one task, with the rows of one partition of a batch, of a source whose rows come in micro-batches, each from
    a task of its own (design: micro-batches).

    Spark runs the batches of a streaming query one after the other: batch N + 1 begins when every task of batch N has ended, and
    a task ends when every consumer has applied its rows. So the rows that a task finds in the streams belong either to its own
    batch, of which an earlier attempt has sent a part, or to completed batches. Each position says which batch it is in, and at
    which row that batch began. The beginning of the task follows:

        newest position of this batch      behind one of its rows that every consumer has applied, or at its first row
        newest position of a later batch   nowhere: the task is left over from long ago
        neither                            behind all rows of earlier batches, by the count of the driver, or of the edge that
                                           knows most: the last rows of a batch may have been left out on their way

    A partition that a batch does not have, or of which no row travels, leaves no trace, and needs none."""

    def __init__(
        self,
        edges: Sequence[EdgePlan],
        producers: Sequence[Producer],
        name: str,
        batch: MicroBatch,
        batch_bytes: int,
        event_time: EventTime | None = None,
    ) -> None:
        super().__init__(
            edges, producers, name, seeks=True, positions=True, batch_bytes=batch_bytes,
            event_time=event_time, judge=BatchLateness(batch.watermark),
        )  # fmt: skip
        self.batch = batch
        self._base = 0  # number of the first row of the batch
        self._position = b""
        #: By edge: the number behind the last row that has travelled, in any batch.
        self._sent = list(batch.sent or [batch.least] * len(edges))

    def find_start(self) -> bool:
        """Find the beginning, and tell whether it is known. UsageError: another streaming query has written here."""
        if self.first is None:
            applied = [producer.applied_by_all() for producer in self.producers]
            known = [at for at in applied if at is not None]
            if len(known) == len(applied):
                begun = [self._begun_at(producer) for producer in self.producers]
                self._base = self._base_of(begun)
                self._position = self.batch.position(self._base)
                starts = []
                for producer, at, own in zip(self.producers, known, begun, strict=True):
                    # Spark has all rows of its batch: the last ones that are applied are made once more, and compared.
                    made = None if own is None else producer.earlier.before(at - 1)
                    starts.append(made if made and made.sequence > self._base else Beginning(self._base, 0))
                self._begin(min(starts))
        return self.first is not None

    def _begin(self, beginning: Beginning) -> None:
        self._start, self.first, self._checksum = beginning, beginning.sequence, beginning.checksum
        for producer in self.producers:
            producer.begin_at(self.first, self._checksum, settled=self.first == self._base)

    def _begun_at(self, producer: Producer) -> int | None:
        """Return the row at which this batch began in a stream, if a consumer has any of its rows."""
        newest = producer.earlier.newest()
        if newest is None:
            return None
        said: Any = unpacked(newest.position)
        query, number, base = said
        if query != self.batch.query:
            raise UsageError(
                f"source {self.name} has rows of streaming query {query}, and those of another, {self.batch.query}, come: an "
                "input takes one streaming query. Start that again with its own checkpoint, or give each an input of its own"
            )
        if number > self.batch.number:
            raise RefusedError("stale", f"batch {self.batch.number} of source {self.name} is over: {number} has come")
        return int(base) if number == self.batch.number else None

    def _base_of(self, begun: Sequence[int | None]) -> int:
        """Return the number of the first row of the batch. QueryFailed: rows of earlier batches are missing."""
        ends = []  # by edge: the number behind the last row of earlier batches that consumers have shown
        for edge, producer, sent, own in zip(self.edges, self.producers, self._sent, begun, strict=True):
            newest = producer.earlier.newest()
            end = own if own is not None else 0 if newest is None else newest.sequence + 1
            if end < sent:
                raise QueryFailed(
                    f"source {self.name}: the state of this query has {end} rows of partition "
                    f"{producer.stream.producer}, and Spark has committed {sent}: it goes on from an older checkpoint than "
                    "Spark's streaming query, which does not give its rows again"
                )
            ends.append((end, own is not None or not edge.drops))
        base = max([self.batch.least, *(end for end, _ in ends)])
        if any(exact and end != base for end, exact in ends):
            raise QueryFailed(f"source {self.name}: the stages that it feeds have different rows of earlier batches")
        return base

    @property
    def left_out(self) -> int:
        """The rows at the beginning of the partition that every consumer has applied."""
        assert self.first is not None
        return self.first - self._base

    def give(self, batch: pa.RecordBatch, created: float) -> pa.RecordBatch:
        """Append the first rows, as many as may be one batch, and return the others."""
        rows = self.until_cut(batch.num_rows)
        self.append(batch.slice(0, rows), created, self._position)
        for at, (edge, producer) in enumerate(zip(self.edges, self.producers, strict=True)):
            if not edge.drops:
                self._sent[at] = producer.next_sequence
            elif len(numbers := self._numbers_of_last(producer)):
                self._sent[at] = int(pc.max(numbers).as_py()) + 1
        return batch.slice(rows)

    @staticmethod
    def _numbers_of_last(producer: Producer) -> pa.Array:
        """Return the numbers of the rows that travel of the last element. An element without any leaves the log at once."""
        log = producer.log
        last = log[log.end - 1].element if len(log) else None
        return last.data.batch.column(NUMBER.name) if isinstance(last, Rows) else pa.array([], NUMBER.type)

    @property
    def sent(self) -> list[int]:
        """The numbers behind the last row that has travelled, by edge. It is the row and not its batch, because other attempts
        may cut batches elsewhere."""
        return list(self._sent)

    def finish_batch(self, left_out: int) -> None:
        """Finish the batch, which had ``left_out`` rows before the rows that were given. NonDeterministicInputError: an earlier
        attempt had more."""
        assert self.first is not None
        if left_out < self.left_out:
            raise self.producers[0].earlier.not_deterministic(self.first - 1, -1)
        for producer in self.producers:
            producer.rest()
