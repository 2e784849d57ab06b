"""The streams of one partition of a source, the same for both kinds of readers: ingress tasks and workers (design:
stream, seek).

A ``ReaderPosition`` is the place at which the reader of a source goes on.

Left to others: sources whose rows come in micro-batches (``flux.tasks.micro_batches``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NewType

import msgspec
import numpy as np
import pyarrow as pa

from flux.dataflow.plan import NUMBER, EdgePlan, EventTime
from flux.dataflow.source import RowStart
from flux.errors import UsageError
from flux.exchange.log import LogRoom
from flux.exchange.producer import Producer, state_watermark
from flux.exchange.replay_check import START, Beginning, Birth
from flux.exchange.slices import ROTATION_ROWS, with_numbers
from flux.exchange.timed_rows import EdgeRows, TimedRows, columns_read
from flux.operators.schema import picked
from flux.operators.user_code import text_of
from flux.windows.lateness import Judgement, Lateness
from flux.windows.window import NEVER
from flux.wire.checksum import extend, extend_each
from flux.wire.messages import Mark
from partitioning.clustering import Clustered, Clustering, pieces

#: All edges came with their source.
NO_BIRTHS: Mapping[int, Birth | None] = {}
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
        births: Mapping[int, Birth | None] = NO_BIRTHS,
    ) -> None:
        """Begin a life of the partition.

        ``seeks``: the source can begin elsewhere than at its start, and this is not the first life of its partition;
        ``positions``: its reader has positions of its own, and its rows are numbered; ``batch_bytes``: most bytes of one batch;
        ``own_numbers``: rows bring their numbers, as offsets of a log are; else they are counted; ``event_time`` of the rows;
        None: none of them is late; ``judge`` of late rows, if not each is judged by the rows before it; ``read_by``: the edges
        whose columns are compared when rows are read again, if not all of them are; ``births`` of edges that have come to the
        source while it ran; None: the edge is unborn."""
        self.edges, self.producers = list(edges), list(producers)
        #: The logs of all producers tell it when they fill and drain.
        self.room = LogRoom()
        self.name = name
        self.rows = 0
        self.batches = 0
        self.pauses = 0  # times at which the source had no new row
        self.ended = False
        self._ended_at = 0.0  # by the wall clock
        #: The first element; None: not known until workers have answered.
        self.first: int | None = None if seeks or births else 0
        #: The least number of the next row, or the number of the next batch. All streams have the same numbers.
        self.next_number = 0
        #: The edges whose births are not stored yet, each with the one that is reported; None: it is not known yet. Their streams
        #: take rows from there on, and no other process hears of them (design: edge-of-a-source).
        self.unborn: dict[int, Birth | None] = {}
        #: Its reader has failed. The partition is read no more.
        self.failed = False
        #: The numbers at which streams are born: rows before and behind one are in different batches.
        self._cuts: set[int] = set()
        #: The source is read from its start in each life.
        self._from_start = not seeks
        self._positions = positions
        self._own_numbers = own_numbers
        #: By edge: the clustering of its rows.
        self._clusterings: list[Clustering] = []
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
        for edge, producer in zip(self.edges, self.producers, strict=True):
            self._prepare(edge, producer)
        self._again_bytes = AGAIN * (batch_bytes + max((producer.log.bytes_max for producer in producers), default=0))
        self._start = START  # the beginning of the reader
        #: The newest point from which rows that are numbered can be read again.
        self._behind = Birth.at(START).mark
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
        for late, birth in births.items():
            self._note_birth(late, birth)

    def close(self, edge: int) -> Producer | None:
        """End the stream of an edge that is removed, without another word, and return its producer. None: it is the last one,
        and the source is removed with it."""
        if len(self.edges) == 1:
            return None
        producer = self.of_edge(edge)
        place = self.producers.index(producer)
        self.unborn.pop(edge, None)
        for parallel in (self.edges, self.producers, self._clusterings):
            del parallel[place]
        producer.log.clear()
        producer.log.tell(LogRoom())
        return producer

    def of_edge(self, edge: int) -> Producer:
        """Return the producer of the stream of an edge."""
        return next(producer for each, producer in zip(self.edges, self.producers, strict=True) if each.id == edge)

    @property
    def born(self) -> list[Producer]:
        """The producers whose streams others may hear of."""
        pairs = zip(self.edges, self.producers, strict=True)
        return [producer for edge, producer in pairs if edge.id not in self.unborn]

    # ---- births

    def open(self, edge: EdgePlan, producer: Producer, birth: Birth | None) -> bool:
        """Begin the stream of an edge that has come to the running source: with its ``birth``, if this is stored, else with the
        next row, which is to be reported. Return False if rows behind the birth have passed, so that the partition is to be read
        anew."""
        if self.first is not None and birth is not None and birth.number < self.next_number:
            return False
        self.edges.append(edge)
        self.producers.append(producer)
        self._prepare(edge, producer)
        self._note_birth(edge.id, birth)
        if self.first is None:
            return True
        if birth is None:
            self.unborn[edge.id] = producer.earlier.birth = self._next_birth()
        self._begin_one(producer, self.next_number)
        if self.timed is not None:
            self._tell_watermark()
            state_watermark(producer, producer.next_sequence, max(self.timed.watermark, self._by_clock), self.idle)
        if self.ended:
            producer.finish(self._ended_at)
        return True

    def _prepare(self, edge: EdgePlan, producer: Producer) -> None:
        """Prepare the stream of an edge. Its clustering is made before the first rows come, because that takes longer than
        clustering a small batch."""
        schema = edge.schema.append(NUMBER) if self._positions else edge.schema
        self._clusterings.append(Clustering(schema, edge.key, edge.partitions))
        producer.log.tell(self.room)
        producer.earlier.numbered = self._positions
        producer.earlier.own_numbers = self._own_numbers
        producer.earlier.timed = self.timed is not None

    def _note_birth(self, edge: int, birth: Birth | None) -> None:
        if birth is None:
            self.unborn[edge] = None
        else:
            self.unborn.pop(edge, None)
            self.of_edge(edge).earlier.birth = birth
            self._cuts.add(birth.number)

    def _next_birth(self) -> Birth:
        """Return the birth of a stream that begins with the next row."""
        if self._positions:
            return Birth(self.next_number, self._behind)
        known = () if self.timed is None else (self.timed.watermark, *self.timed.judged_until_now)
        return Birth(self.next_number, Mark(self.next_number - 1, self._checksum, -1, b"", -1, *known))

    def store(self, edge: int, birth: Birth) -> bool:
        """Take the birth of an edge that is stored: from now on others may hear of its stream. Return False if this life began it
        elsewhere, so that the partition is to be read anew."""
        reported = self.unborn.get(edge)
        if edge not in self.unborn:
            return True
        if self.first is not None and reported is not None and reported.number != birth.number:
            return False
        self._note_birth(edge, birth)
        return True

    # ---- the beginning

    def find_start(self) -> bool:
        """Find the first element, and tell whether it is known.

        A source that seeks skips the batches that all consumers have applied. It does not begin before a worker waits for rows:
        reading takes long, and would hold up the handshakes of this very worker. Nor does it begin while an edge is unborn: its
        birth may be before the other streams' beginning."""
        if not self._awaited:
            self._awaited = any(producer.awaited for producer in self.producers) or not self.born
            if not self._awaited:
                return False
        if self.first is None:
            floors = [producer.floor() for producer in self.born]
            known = [floor for floor in floors if floor is not None]
            if len(known) == len(floors):
                # Edges that have applied as much know the same rows, but not all of them need to know a position.
                least = min(known, key=lambda each: (each.sequence, not each.position), default=START)
                if self.unborn:
                    self.unborn = dict.fromkeys(self.unborn, Birth.at(least))
                else:
                    self._begin(START if self._from_start else least)
        self.start_known = self.first is not None
        return self.start_known

    def _begin(self, beginning: Beginning) -> None:
        self._start, self.first, self._checksum = beginning, beginning.sequence, beginning.checksum
        self.next_number, self._behind = beginning.sequence, Birth.at(beginning).mark
        if self._own_numbers:
            shown = [mark for producer in self.producers if (mark := producer.earlier.newest()) is not None]
            self._newest_shown = max(shown, key=lambda mark: mark.sequence).position if shown else b""
        for producer in self.producers:
            self._begin_one(producer, self.first)
        self._begin_judging(beginning)

    def _begin_one(self, producer: Producer, first: int) -> None:
        """Begin a stream where the source is read from element ``first`` on, perhaps before the birth of the stream."""
        birth = producer.earlier.birth
        if birth is None or birth.number < first:
            producer.begin_at(first, self._checksum)
        else:
            producer.begin_at(birth.number, birth.mark.checksum)

    def _begin_judging(self, beginning: Beginning) -> None:
        if self.timed is not None:
            self.timed.begin(beginning.watermark, beginning.late, beginning.doubted, beginning.doubted_from)
            self._tell_watermark()
            for producer in self.producers:
                state_watermark(producer, producer.next_sequence, self.timed.watermark)

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
    def elements(self) -> int:
        """The count of numbers given in this life: of rows if rows are numbered, else of batches. Gaps between numbers that
        rows bring count, too."""
        if not self._own_numbers:
            return self.rows if self._positions else self.batches
        return max(self.next_number - (self.first or 0), 0)

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
            if self.next_number >= producer.next_sequence:  # else the stream is born later
                turn = producer.stream.producer + self.next_number
                producer.append(self._clustered(rows, at, turn), created, self._checksum)
        self.next_number += 1

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
                if self.next_number >= producer.next_sequence:  # else the stream is born later
                    producer.append(each[appended], batches[appended][1], self._checksum)
            self.next_number += 1
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
        number = self.next_number
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
        first = producer.stream.producer + self.next_number
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
            first = self.next_number
            end = first + rows
        else:
            first, end = int(numbers[0]), int(numbers[-1]) + 1
        ends = {end, *(cut for cut in self._cuts if first < cut < end)}
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
            numbers = np.arange(self.next_number, self.next_number + count)
        first, last = int(numbers[0]), int(numbers[-1])
        checksum = extend(0, picked(batch, self._read))
        of_edges = self._for_edges(batch)
        if position:
            known = () if self.timed is None else (self.timed.watermark, *self.timed.judged_until_now)
            self._newest = self._behind = Mark(last, checksum, first, position, count, *known)
        for at, (rows, kept) in enumerate(of_edges):
            producer = self.producers[at]
            if last < producer.next_sequence:
                continue  # the stream is born later
            turn = producer.stream.producer + first // ROTATION_ROWS
            numbered = with_numbers(rows, numbers if kept is None else numbers[kept])
            producer.append(self._clustered(numbered, at, turn), created, checksum, position, (first, last), count)
        self.next_number = last + 1

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
        self.ended, self._ended_at = True, created
        for producer in self.producers:
            producer.finish(created)
