"""The partitions of sources that a worker reads: the next one, and the way of its batches (design: read-turn, seek).

Readers are iterators that do not block: they give a batch, or None for "nothing just now". After None they are asked again a
little later, except that readers with a bell are asked once they have rung it. Sources take turns, and are not read while a log
that they feed is full. A reader is opened when its first batch is wanted: its beginning is not known earlier.

    on the table -> wanted (a consumer waits for rows, and the beginning is known) -> open -> ended, or read elsewhere

Left to others: the streams (``source_streams``), the clock (the shell), the table (``table_follower``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from math import inf
from operator import index
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from flux.dataflow.plan import EdgePlan, EventTime, Plan, WorkerSourcePlan
from flux.dataflow.source import Positioned
from flux.dataflow.source_reader import SILENCE_S, SILENT, PartitionReader, opened
from flux.errors import FluxError, UsageError, UserCodeError
from flux.exchange.producer import Producer
from flux.exchange.replay_check import Birth
from flux.exchange.slices import SMALL_BYTES, SMALL_ROWS
from flux.exchange.source_streams import ReaderPosition, SourceStreams, packed, unpacked
from flux.operators.batches import conform, split
from flux.operators.plain_columns import plain_batch
from flux.operators.user_code import closed, described, raised_by_user, text_of, user_traceback
from flux.windows.window import END_OF_TIME, NEVER
from flux.wire.pulse import KIND, PARTITION, READS, TURN, WHAT, Note
from flux.wire.statistics import BadRecords, NotCompared, ReaderState, SourceLag, SourceTime, holds_back
from flux.worker.pacing import SMALL_ROWS as SMALL_STEP_ROWS
from flux.worker.pacing import ReadTurn, next_multiple
from partitioning.clustering import copier
from partitioning.columns import row_bytes
from partitioning.ids import SourcePartition, StreamId

#: Seconds after which sources that had nothing are asked again: at first, and doubled each time up to the longest.
IDLE_SOURCE_S, IDLE_SOURCE_MAX_S = 0.001, 0.004
#: Seconds after which a reader with a bell is asked although it has not rung, in case it forgets to.
QUIET_S = 0.1
#: Seconds between two reports to readers about rows that all consumers have applied.
DONE_EVERY_S = 1.0
#: Seconds between such reports to an idle source, whose log may lose the rows soon; there is nothing else to do.
IDLE_DONE_S = 0.1
#: In resend timeouts: the time for which a log has nothing more before its end is believed. A broker that has just become the
#: leader of a partition may know of fewer records than the one before it, for as long as its replicas take to ask it for more.
END_PATIENCE = 30
#: Small batches of a source that are appended together: each of them then costs a quarter.
TOGETHER = 16
#: Limit of a record number that can travel, and of a row number, behind which there must be room for others.
_RECORDS_MAX, _NUMBER_MAX = 1 << 62, (1 << 62) - 2


def open_reader(plan: WorkerSourcePlan, partition: int, position: ReaderPosition) -> PartitionReader:
    return opened(plan.reader, partition, position)


def _named(source: str, partition: int) -> str:
    return f"source {source}, partition {partition}"


class ReadPart(NamedTuple):
    """Rows that may be one batch of a stream, unless they have to be cut."""

    #: A batch; or any object that a reader has given instead.
    batch: Any
    #: The packed position behind the rows.
    position: bytes
    #: The rows' own numbers, if they have any.
    numbers: np.ndarray | None = None


@dataclass
class OpenReader:
    """An open reader, with batches of it that are in no log yet: first the ``small`` ones, then the ``unread`` rest."""

    reader: PartitionReader
    #: The reader's ``next``, called for each batch.
    next: Callable[[], Any]
    #: Copies a batch of it, with its memory.
    copy: Callable[[pa.RecordBatch], pa.RecordBatch]
    #: Bytes of a row, if all rows have the same size.
    row_bytes: int | None = None
    #: Rest of a batch that was too large for one, with the position behind each part.
    unread: deque[ReadPart] = field(default_factory=deque)
    #: Small batches that were read in this turn, or for which the log had no room, with the time of reading each.
    small: list[tuple[pa.RecordBatch, float]] = field(default_factory=list)
    small_bytes: int = 0
    #: Bytes for which all logs had room when the first of these batches was read, or when this turn began. Logs fill only when
    #: these batches are appended.
    room_bytes: int = 0
    #: It has no more batches.
    over: bool = False
    #: It rings a bell when it has something.
    rings: bool = False
    #: It has rung since it was last asked.
    rung: bool = False
    #: Time at which it is asked although it has not rung.
    quiet_until: float = -inf
    #: Its last count of the times at which it had nothing.
    pauses: int = 0
    #: Time at which it was asked last.
    asked_at: float = -inf
    #: Time since which it has given ``flux.SILENT``; None: it has not.
    silent_at: float | None = None
    #: Time at which it had nothing for the first time since it gave rows, and the pauses of its source by then.
    quiet: tuple[float, int] | None = None
    #: Time at which its pauses last rose: it is known to have had nothing then.
    paused_at: float = -inf
    #: Time at which the rows that all have applied are reported while the source has nothing.
    done_at: float = -inf


class SourceScheduler:
    """The sources that one worker reads. ``producer`` makes the producer of a stream that begins here in an epoch."""

    def __init__(self, plan: Plan, producer: Callable[[StreamId, EdgePlan, int], Producer]) -> None:
        self.sources: dict[SourcePartition, SourceStreams] = {}
        self.first_row_at: float | None = None
        #: Partitions of sources that have ended here.
        self.ends = 0
        #: A field, so that tests and the simulation can open readers of their own.
        self.open_reader: Callable[[WorkerSourcePlan, int, ReaderPosition], PartitionReader] = open_reader
        #: See the constants.
        self.idle_s, self.idle_max_s = IDLE_SOURCE_S, IDLE_SOURCE_MAX_S
        self.done_every_s, self.idle_done_s = DONE_EVERY_S, IDLE_DONE_S
        #: Nothing more is read, except rows that consumers have had from an earlier life: ordered steps may wait for them, or
        #: other replicas have applied them.
        self.stopped = False
        #: The source whose reader has just failed; -1: none has.
        self.failing = -1
        #: Sources are read at multiples of this interval of the wall clock, in seconds; 0: at any time.
        self.interval_s = 0.0
        #: Microseconds by which a reader may be ahead of others; 0: none waits.
        self._drift = round(plan.settings.watermark_drift * 1e6)
        #: The least watermark of the partitions that other workers read; NEVER: there is none to wait for.
        self._others_at = NEVER
        #: Readers that results go on without stand still above this watermark.
        self._stands_at = END_OF_TIME
        #: Readers with a watermark above this wait for others (design: alignment); None: none does.
        self.aligned_to: int | None = None
        #: Wakes the thread that waits until ``due``; may be called by any thread. None: there is no such thread.
        self.bell: Callable[[], None] | None = None
        self._plan = plan
        self._producer = producer
        #: Open readers.
        self.open: dict[SourcePartition, OpenReader] = {}
        #: The time of the last look at the sources, and the same by the wall clock.
        self.looked_at = self.looked_at_wall = 0.0
        #: Partitions that have not ended, the next one first.
        self._rotation: deque[SourcePartition] = deque()
        self._turn = ReadTurn()
        #: Batches read in the turn under way; None: no turn is under way.
        self._in_turn: int | None = None
        #: Rows read by now, and by the beginning of this turn.
        self._rows = self._rows_before = 0
        #: Sources that had nothing are asked again at this time; the pause before it, which grows while none has anything.
        self._idle_until = 0.0
        self._idle_s = 0.0
        #: No turn begins before this time: the interval since the last one is not over.
        self._paused_until = 0.0
        #: Time of the next report to readers of the rows that all consumers have applied.
        self._done_at = 0.0
        #: Seconds for which a log has nothing more before its end is believed.
        self._end_s = END_PATIENCE * plan.settings.resend_timeout

    # ---- the table

    def go_by(self, plan: Plan) -> None:
        """Go by this version of the plan, whose table comes next."""
        self._plan = plan

    def keep_only(self, mine: set[SourcePartition]) -> Iterator[Producer]:
        """Close sources that another worker reads from now on; it makes rows again that are not acked. Or the plan has lost the
        source. Yield the producers that end here."""
        for key in [key for key in self.sources if key not in mine]:
            if key in self._rotation:
                self._rotation.remove(key)
            streams = self.sources.pop(key)
            self._close(key, streams.name)
            yield from streams.producers

    def begin(self, mine: set[SourcePartition], epoch: int, births: Mapping[StreamId, Birth]) -> Iterator[Producer]:
        """Begin with new sources, and yield the producers of which others may hear. ``births`` that are stored."""
        for source in self._plan.sources:
            for partition in range(source.worker_partitions):
                key = SourcePartition(source.id, partition)
                if key in mine and key not in self.sources:
                    edges = self._plan.edges_of_source(source.id)
                    producers = [self._producer(StreamId(edge.id, partition), edge, epoch) for edge in edges]
                    seeks = self.about(key).seeks and epoch > 0
                    late = [edge.id for edge in edges if edge.since > source.since]
                    self.sources[key] = SourceStreams(
                        edges, producers, source.name, seeks, source.positions, self._plan.settings.batch_max_bytes,
                        self.about(key).own_numbers, source.event_time, read_by=source.first_edges,
                        births={edge: births.get(StreamId(edge, partition)) for edge in late},
                    )  # fmt: skip
                    yield from self.sources[key].born
                    self._rotation.append(key)

    def open_edge(self, key: SourcePartition, edge: EdgePlan, birth: Birth | None) -> bool:
        """Begin the stream of a new edge of a source that is read here. See ``SourceStreams.open``."""
        streams = self.sources[key]
        producer = self._producer(StreamId(edge.id, key.partition), edge, streams.producers[0].incarnation)
        return streams.open(edge, producer, birth)

    # ---- turns

    def wants(self, key: SourcePartition) -> bool:
        """Tell whether a source may be read: its logs have room, and its beginning is known."""
        streams = self.sources.get(key)
        if streams is None or streams.failed or (streams.room.full and not streams.has_room):
            return False
        if not streams.start_known and not streams.find_start():
            return False
        if self.stopped or self._is_ahead(key, streams):
            return streams.comes_again(len(self.open[key].small) if key in self.open else 0)
        return True

    def align(self, others_at: int) -> None:
        """Take the least watermark of the partitions that other workers read, as the controller knows it (design: alignment);
        NEVER: there is none to wait for."""
        if self._drift:
            self._others_at = others_at
            self._align()

    def _align(self) -> None:
        """Find the watermark above which readers wait. The partitions that are read here count as they are now: by its own last
        report, the reader that is farthest behind would wait for itself.

        A reader that waits may have rows, so it is not idle, and the time of its being idle begins again."""
        least = [] if self._others_at == NEVER else [self._others_at]
        least += [time.watermark for time in self.times() if holds_back(time)]
        self.aligned_to = min(least) + self._drift if least else None
        for key, streams in self.sources.items():
            if self._is_ahead(key, streams):
                if key in self.open:
                    self.open[key].quiet = None
                streams.wake_up()

    def _is_ahead(self, key: SourcePartition, streams: SourceStreams) -> bool:
        """Tell whether a source is too far ahead of others."""
        to, timed = self.aligned_to, streams.timed
        if timed is None:
            return False
        if timed.watermark > self._stands_at and self.about(key).may_be_silent:
            return True
        return to is not None and timed.watermark > to

    def stand(self, at: int) -> None:
        """Let readers that results go on without stand still while their watermark is above ``at`` (design: state-stop). They may
        have rows, so they are not idle."""
        if at == self._stands_at:
            return
        self._stands_at = at
        for key, streams in self.sources.items():
            if self._is_ahead(key, streams):
                if key in self.open:
                    self.open[key].quiet = None
                streams.wake_up()

    def due(self, now: float) -> float:
        """Return the time at which to read again; infinite while nothing may be read, because only a message makes room."""
        if self._drift:
            self._align()
        wanted = [self._asked_at(key) for key in self._rotation if self.wants(key)]
        return max(now, min(wanted), self._paused_until) if wanted else inf

    def _asked_at(self, key: SourcePartition) -> float:
        """Return the time at which a source that may be read is asked for its next batch; -inf: at once."""
        source = self.open.get(key)
        if source is not None and (source.over or (source.small and self._in_turn is None)):
            return -inf  # batches for which the log had no room wait for no reader
        if source is None or not source.rings:
            return self._idle_until
        return -inf if source.rung else source.quiet_until

    def read(self, idle: bool, now: float, created: float, note: Note) -> bool:
        """Read one batch, if it is time for one. It is called until it returns False. ``idle``: there is nothing to apply;
        ``created``: the time by the wall clock; ``note``: the worker's note of its activity."""
        self.looked_at, self.looked_at_wall = now, created
        if now >= self._done_at:
            self._done_at = now + self.done_every_s
            self.tell_done()
        if self._in_turn is None:
            if now < self._paused_until or not self._turn.begins(idle, now, self.interval_s):
                return False
            self._in_turn, self._rows_before = 0, self._rows
            if self._drift:
                self._align()
            for key, source in self.open.items():
                if source.small:
                    source.room_bytes = self.sources[key].room_bytes
        goes_on = self._turn.goes_on(self._in_turn, now)
        if goes_on and self._read_next(now, created, note):
            self._in_turn += 1
            return True
        for key, source in self.open.items():
            self._hand_on(key, source)
        self._turn.ended(not goes_on and self._rows - self._rows_before <= SMALL_STEP_ROWS * self._in_turn)
        self._in_turn = None
        return False

    def _read_next(self, now: float, created: float, note: Note) -> bool:
        """Read from the next source whose log has room and that has something."""
        polled = False
        for _ in range(len(self._rotation)):
            key = self._rotation[0]
            self._rotation.rotate(-1)
            if self._asked_at(key) <= now and self.wants(key):
                note[WHAT], note[PARTITION], note[KIND] = *key, READS
                read = self._read_one(key, now, created)
                note[KIND] = TURN
                if read:
                    self._idle_s = 0.0
                    return True
                polled |= not self.open[key].rings
        if self.interval_s and all(self.sources[key].has_room for key in self._rotation):
            self._idle_until = self._paused_until = next_multiple(self.interval_s, created) - (created - now)
            return False
        if not polled:
            return False
        self._idle_s = min(2 * self._idle_s or self.idle_s, self.idle_max_s)
        self._idle_until = now + self._idle_s
        return False

    def _read_one(self, key: SourcePartition, now: float, created: float) -> bool:
        """Read one batch of a source, or append one. Return False if it has nothing just now."""
        source = self._opened(key)
        if not (source.unread or source.over or self._enough(key, source)):
            source.rung, source.quiet_until = False, -inf  # before it is asked: rows that come from now on ring again
            source.asked_at = now
            try:
                batch = source.next()
            except StopIteration:
                source.over = True
            except BaseException as error:  # the user's, also sys.exit()
                raise self._failed(key, error) from error
            else:
                if batch is SILENT:
                    source.silent_at = now if source.silent_at is None else source.silent_at
                    self._note_silence(key, source, now)
                    return False
                if batch is None:
                    seen = self.sources[key].pauses
                    self.sources[key].pauses += self._pauses(key, source)
                    self._note_quiet(key, source, seen, now, created)
                    source.quiet_until = now + QUIET_S
                    return False
                source.quiet = source.silent_at = None
                nbytes = self._if_small(key, source, batch)
                if nbytes:
                    # Copied, because the reader may use its memory again when it is asked next.
                    if not source.small:
                        source.room_bytes = self.sources[key].room_bytes
                    source.small.append((source.copy(batch), created))
                    source.small_bytes += nbytes
                    if self._enough(key, source):
                        self._hand_on(key, source)
                    return True
                position, numbers = b"", None
                if self.about(key).positions and isinstance(batch, Positioned):
                    position = b"" if batch.position is None else self._packed(key, batch.position)
                    batch, numbers = batch.batch, batch.numbers
                self._cut(key, ReadPart(batch, position, numbers), source.unread)
        self._hand_on(key, source)
        if source.small:
            return True  # the log is full
        if source.unread:
            part = self._take_part(key, source.unread)
            self.take(key, part.batch, part.position, created, part.numbers)
        elif source.over:
            del self.open[key]
            self.finish(key, created)
        return True

    def _note_quiet(self, key: SourcePartition, source: OpenReader, seen: int, now: float, wall: float) -> None:
        """Note that a source has nothing just now. After a long time, its log has nothing more. ``seen`` is the number of its
        pauses before it was asked; ``wall`` the time by the wall clock.

        A reader that works ahead may have paused before rows that it has put out since. So a pause counts only if the
        reader had nothing when it was asked after that pause."""
        streams = self.sources[key]
        if streams.pauses > seen:
            source.paused_at, source.silent_at, streams.silent = now, None, False
        if source.quiet is None:
            source.quiet, source.done_at = (now, streams.pauses), now + self.idle_done_s
            return
        if not source.reader._tells_silence and now >= max(source.paused_at, source.quiet[0]) + SILENCE_S:
            self._note_silence(key, source, now)
            return
        if streams.unsettled and now >= source.done_at:
            source.done_at = now + self.idle_done_s
            self._tell_done(key, streams)
        if seen <= source.quiet[1]:
            return
        if self.about(key).own_numbers and now >= source.quiet[0] + self._end_s:
            streams.come_to_end()
        event_time = self.about(key).event_time
        if event_time is not None and event_time.idle is not None:
            self._note_idle(streams, source, event_time, now, wall)

    def _note_idle(
        self, streams: SourceStreams, source: OpenReader, event_time: EventTime, now: float, wall: float
    ) -> None:
        """Note whether a source that has nothing is idle: it is known to have had nothing for the time that ``withWatermark``
        says (design: idle)."""
        assert source.quiet is not None
        assert event_time.idle is not None
        if source.paused_at >= source.quiet[0] + event_time.idle / 1e6:
            by_clock = int(wall * 1e6) - event_time.idle - event_time.delay
            streams.fall_idle(by_clock if event_time.advance else NEVER)

    def _note_silence(self, key: SourcePartition, source: OpenReader, now: float) -> None:
        """Note that a reader has got no answer from outside. Rows may be there, so the source is not idle. The time of its being
        idle begins again: programs that write rows have had no answer either, and the first one says nothing of the rows that
        they still have."""
        source.quiet, source.quiet_until = None, now + QUIET_S
        self.sources[key].fall_silent()

    def _enough(self, key: SourcePartition, source: OpenReader) -> bool:
        """Tell whether the pending small batches are to be handed on before more are read."""
        several = len(source.small)
        return several >= TOGETHER or (several > 0 and source.small_bytes >= source.room_bytes)

    def _if_small(self, key: SourcePartition, source: OpenReader, batch: Any) -> int:
        """Return the bytes of a batch that is appended together with others; 0: it is appended alone. Numbered rows always are:
        their readers put small batches together themselves, and the places at which rows may be cut depend on those appended
        before."""
        about, settings = self.about(key), self._plan.settings
        if about.positions or not isinstance(batch, pa.RecordBatch):
            return 0
        if not 0 < batch.num_rows <= min(SMALL_ROWS, settings.batch_max_rows) or not batch.schema.equals(about.schema):
            return 0
        nbytes = int(batch.nbytes) if source.row_bytes is None else batch.num_rows * source.row_bytes
        return nbytes if nbytes <= min(SMALL_BYTES, settings.batch_max_bytes) else 0

    def _hand_on(self, key: SourcePartition, source: OpenReader) -> None:
        """Append small batches to the streams of their source, as many as there is room for."""
        if source.small:
            if self.first_row_at is None:
                self.first_row_at = source.small[0][1]
            streams = self.sources[key]
            before = streams.rows
            del source.small[: streams.append_each(source.small)]
            self._rows += streams.rows - before
            source.small_bytes = sum([self._if_small(key, source, batch) for batch, _ in source.small])

    def _take_part(self, key: SourcePartition, unread: deque[ReadPart]) -> ReadPart:
        """Take rows that may be one batch."""
        batch, position, numbers = part = unread.popleft()
        if isinstance(batch, pa.RecordBatch) and batch.num_rows:
            rows = self.sources[key].until_cut(batch.num_rows, numbers)
            if rows < batch.num_rows:
                first, others = (None, None) if numbers is None else (numbers[:rows], numbers[rows:])
                unread.appendleft(ReadPart(batch.slice(rows), position, others))
                return ReadPart(batch.slice(0, rows), b"", first)
        return part

    def _packed(self, key: SourcePartition, position: Any) -> bytes:
        try:
            return packed(position)
        except UsageError as error:
            raise self._failed(key, error) from error

    def _opened(self, key: SourcePartition) -> OpenReader:
        found = self.open.get(key)
        if found is None:
            position = self.sources[key].position
            try:
                about = self.about(key)
                schema = about.schema
                reader = self.open_reader(about, key.partition, position)
                found = OpenReader(reader, reader.next, copier(schema), row_bytes(schema))
                self.open[key] = found
                self._hand_bell(found)
            except BaseException as error:  # the user's, also sys.exit()
                raise self._failed(key, error) from error
        return found

    def _hand_bell(self, source: OpenReader) -> None:
        bell = self.bell
        if bell is None or "when_ready" not in source.reader.defines:
            return

        def ring() -> None:
            source.rung = True
            bell()

        source.reader.when_ready(ring)
        source.rings = True

    def _cut(self, key: SourcePartition, given: ReadPart, unread: deque[ReadPart]) -> None:
        batch, position, numbers = given
        if not isinstance(batch, pa.RecordBatch):
            unread.append(given)  # ``conform`` raises an error that names the source
            return
        about, settings = self.about(key), self._plan.settings
        batch = plain_batch(batch, about.schema)  # before it is cut, so that a dictionary is decoded once
        if about.own_numbers:
            numbers = self._checked_numbers(key, batch, numbers)
        parts = list(split(batch, settings.batch_max_rows, settings.batch_max_bytes))
        at = 0
        for part in parts:
            end = at + part.num_rows
            mine = numbers[at:end] if about.own_numbers and numbers is not None else None
            unread.append(ReadPart(part, position if part is parts[-1] else b"", mine))
            at = end
        if len(unread) > 1 and about.seeks and not about.positions:
            # Its batches are counted: they must be those of the stream.
            raise self._failed(
                key,
                ValueError(f"a batch of {batch.num_rows} rows, {batch.nbytes:,} bytes is beyond spark.flux.batch.*"),
            )

    def _checked_numbers(self, key: SourcePartition, batch: pa.RecordBatch, numbers: Any) -> np.ndarray:
        """Check and return the rows' own numbers. They ascend, and lie behind those of the rows before."""
        found = np.asarray([] if numbers is None else numbers)
        least = max((part.numbers[-1] + 1 for part in self.open[key].unread if part.numbers is not None), default=0)
        least = max(least, self.sources[key].next_number)
        if len(found) == batch.num_rows == 0:
            return np.empty(0, np.int64)
        wrong = found.dtype != np.int64 or len(found) != batch.num_rows
        if wrong or found[0] < least or found[-1] > _NUMBER_MAX or not (found[1:] > found[:-1]).all():
            raise self._failed(
                key,
                ValueError(
                    f"a source with row_numbers gives a number of 64 bits for each row, ascending from one batch to the next: "
                    f"{batch.num_rows} numbers from {least} on were expected, got {found!r:.100}"
                ),
            )
        return found

    # ---- rows

    def take(
        self,
        key: SourcePartition,
        batch: pa.RecordBatch,
        position: bytes,
        created: float,
        numbers: np.ndarray | None = None,
    ) -> None:
        """Append the next batch of a source to its streams. ``position``: the one behind it, packed; ``numbers``: the rows'
        own."""
        streams = self.sources[key]
        if self.first_row_at is None:
            self.first_row_at = created
        schema = self._plan.sources[key.source].schema
        batch = conform(batch, schema, f"source {streams.name}")
        self._rows += batch.num_rows
        streams.append(batch, created, position, numbers)

    def finish(self, key: SourcePartition, created: float) -> None:
        """End the streams of a source."""
        self.ends += 1
        self._rotation.remove(key)
        self.sources[key].finish(created)

    # ---- other methods of readers (see ``PartitionReader``)

    def _pauses(self, key: SourcePartition, source: OpenReader) -> int:
        """Return the number of times at which a reader had nothing since its last count."""
        if "pauses" not in source.reader.defines:
            return 1
        try:
            before, source.pauses = source.pauses, index(source.reader.pauses())
            if source.pauses < before:
                raise ValueError(f"pauses() must return a number that never falls, got {source.pauses} after {before}")
        except BaseException as error:  # the user's, also sys.exit()
            raise self._failed(key, error) from error
        return source.pauses - before

    def lag(self, key: SourcePartition) -> Iterator[SourceLag]:
        """Yield the lag of a partition that is read here, if its reader knows it."""
        if self.sources[key].failed:
            return
        try:
            said = self.open[key].reader.lag()
            if said is None:
                return
            position, end = map(index, said)
            if not (0 <= position <= _RECORDS_MAX and 0 <= end <= _RECORDS_MAX):
                raise ValueError(
                    f"lag() must return two numbers from 0, a position and an end, or None; got {text_of(said, repr):.100}"
                )
        except BaseException as error:  # the user's, also sys.exit()
            raise self._failed(key, error) from error
        yield SourceLag(*key, position, end)

    def times(self) -> list[SourceTime]:
        """Return the event times of the partitions that are read here and have some."""
        return [
            SourceTime(
                *key, timed.watermark, timed.late, timed.late_time, streams.rows, self._state(key, streams)
            )
            for key, streams in self.sources.items()
            if (timed := streams.timed) is not None
        ]  # fmt: skip

    def _state(self, key: SourcePartition, streams: SourceStreams) -> ReaderState:
        if streams.ended:
            return ReaderState.ENDED
        if self._is_ahead(key, streams) and not streams.comes_again():
            return ReaderState.HELD
        if streams.silent:
            return ReaderState.SILENT
        return ReaderState.IDLE if streams.idle else ReaderState.READING

    def not_compared(self) -> list[NotCompared]:
        """Return how often rows of partitions here could not be compared with an earlier reading, because some are gone."""
        return [
            NotCompared(*key, count)
            for key, streams in self.sources.items()
            if (count := max(producer.earlier.left_out for producer in streams.producers))
        ]

    def bad_records(self, key: SourcePartition) -> Iterator[BadRecords]:
        """Yield the count of bad records of a partition that is read here and has had any."""
        if self.sources[key].failed:
            return
        try:
            records = index(self.open[key].reader.bad_records())
            if not 0 <= records <= _RECORDS_MAX:
                raise ValueError(f"bad_records() must return a number from 0, got {records}")
        except BaseException as error:  # the user's, also sys.exit()
            raise self._failed(key, error) from error
        if records:
            yield BadRecords(*key, records)

    @property
    def settled(self) -> bool:
        """True if all consumers of sources with positions have reported that they have all rows that were read."""
        return all(streams.settled for key, streams in self.sources.items() if self.about(key).positions)

    @property
    def lacking(self) -> float:
        """The number of elements of sources with positions that were read here, and that checkpoints may lack."""
        about = [streams for key, streams in self.sources.items() if self.about(key).positions]
        return sum(producer.lacking for streams in about for producer in streams.producers)

    def tell_done(self) -> None:
        """Report to readers and consumers the rows that all have applied since the last time."""
        for key, streams in self.sources.items():
            self._tell_done(key, streams)

    def _tell_done(self, key: SourcePartition, streams: SourceStreams) -> None:
        position = streams.applied() if self.about(key).positions else b""
        if position and key in self.open and not streams.failed:
            try:
                self.open[key].reader.applied(unpacked(position))
            except BaseException as error:  # the user's, also sys.exit()
                raise self._failed(key, error) from error

    # ---- the end

    def close(self) -> None:
        """Close all readers, which may hold files; an exception of one is logged."""
        for key in list(self.open):
            self._close(key, self.sources[key].name)

    def _close(self, key: SourcePartition, name: str) -> None:
        source = self.open.pop(key, None)
        if source is not None:
            closed(_named(name, key.partition), source.reader.close)

    def about(self, key: SourcePartition) -> WorkerSourcePlan:
        """Return the plan of the source of a partition."""
        about = self._plan.sources[key.source]
        assert isinstance(about, WorkerSourcePlan)
        return about

    def _name(self, key: SourcePartition) -> str:
        return _named(self._plan.sources[key.source].name, key.partition)

    def _failed(self, key: SourcePartition, error: BaseException) -> FluxError:
        """Add source and partition to an error, after which the partition is read no more. An error of this project's own
        sources, such as BadFile, keeps its class."""
        self.sources[key].failed, self.failing = True, key.source
        if isinstance(error, FluxError) and not isinstance(error, UsageError | UserCodeError):
            named = copy(error)
            named.args = (f"{self._name(key)}: {error.summary}",)
            named.traceback = user_traceback(error) if raised_by_user(error) else ""
            return named
        return UserCodeError(f"{self._name(key)}: {described(error)}", user_traceback(error))
