"""The reader of one partition of a topic, for the worker that takes its batches. ``fetcher`` brings the records, ahead of the
worker.

Law: no method that the worker calls blocks. Batches that are decoded and not taken have at most about ``AHEAD_BYTES``;
beside them there is at most one answer of a broker, which waits for room.

Positions are offsets, with the id of the topic that they belong to: a position names the record that comes next, so a
reader may go on between any two records.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa

from flux.connectors.kafka.client.cluster import EARLIEST, LATEST, Address, Client, Fetched, Passing
from flux.connectors.kafka.client.security import Security
from flux.connectors.kafka.client.topic_ids import UNKNOWN, LogPosition, differ
from flux.connectors.kafka.errors import BadRecord, DataLost
from flux.connectors.kafka.formats.base import Bad, Format
from flux.connectors.kafka.read.dead_letters import WANTED, DeadLetters
from flux.connectors.kafka.read.fetch_thread import Fetcher, NothingWhole, PartitionOwner, Paused, TakesTime
from flux.connectors.kafka.read.group_commit import GroupCommit
from flux.connectors.kafka.records.decoder import COLUMNS, SCHEMA, Decoded, Decoder, Transactions
from flux.dataflow.source import Positioned
from flux.dataflow.source_reader import SILENT, PartitionReader, Silence
from flux.dataflow.threaded_reader import first_joined
from flux.operators.batches import split

log = logging.getLogger("flux.kafka")

#: Largest rows and bytes of the batches that are given out. A batch of a source must stay within ``spark.flux.batch.*``,
#: because a larger one is cut where there is no position.
ROWS_MAX, BYTES_MAX = 65536, 4 << 20
#: Bytes that are fetched and decoded before the worker wants them: some hundredths of a second of work.
AHEAD_BYTES = 16 << 20
#: Largest answer for a partition that the fetching thread decodes itself.
SMALL_BYTES = 64 << 10
#: Largest compressed answer that this thread decodes itself: such an answer may be a thousand times as large when
#: decompressed. The codec stands in the attributes of a record batch, and that of the first batch stands for all.
SMALL_COMPRESSED_BYTES = 1 << 10
_CODEC_AT, _CODEC_BITS = 22, 7
#: Waiting small batches are given out together, up to this number of rows: each one costs its way through the worker.
JOINED_ROWS = 4096
NOTHING = Fetched(pa.py_buffer(b""), 0, Transactions())
#: Seconds without an answer of a broker after which a partition is silent. A broker answers a request without records after half
#: a second, and one that cannot be reached is told at once.
SILENCE_S = 2.0
#: Seconds after which the same is told of a partition that results go on without.
OVERDUE_S = 1.0
#: Bytes of a bad record that a message shows.
_SHOWN = 60


@dataclass(frozen=True)
class ReadOptions:
    """Settings by which the partitions of a source are read. They are shipped to the workers."""

    bootstrap: Sequence[Address]
    security: Security
    #: Columns that come out.
    schema: pa.Schema
    #: Format of values; None: the columns are Kafka's.
    format: Format | None = None
    #: Leave out records that do not fit the format.
    drop_bad: bool = False
    #: Topic for records that do not fit the format, and its number of partitions. Without it and ``drop_bad``, such a
    #: record ends the reading.
    dead_letters: tuple[str, int] | None = None
    #: Leave out records of transactions that are open or aborted.
    read_committed: bool = True
    #: End the reading when records are gone that were still to be read, or the topic was made anew; otherwise it goes on.
    fail_on_data_loss: bool = True
    #: Largest rate of one partition.
    rows_per_second: float | None = None
    #: Approximate size of an answer.
    fetch_bytes: int = 8 << 20
    #: Longest time, in seconds, without an answer of any broker for a partition.
    retry_s: float = 300.0
    #: Results go on without the partition, so once a broker has answered there is no such limit.
    may_be_silent: bool = False

    def fetcher(self) -> Fetcher:
        return Fetcher(self.bootstrap, self.security, self.fetch_bytes, self.read_committed, self.retry_s)

    @property
    def goes_on(self) -> bool:
        """Reading goes on behind records that do not fit."""
        return self.drop_bad or self.dead_letters is not None


class _Decoded(NamedTuple):
    """Decoded batch that is to be put out."""

    rows: Positioned
    #: Bytes of the rows.
    size: int


class TopicPartitionReader(PartitionReader, PartitionOwner):
    """Reader of one partition.

    ``start`` is the place of the first wanted record. ``committer`` commits for the consumer group that is told the applied
    offsets. ``fetcher`` is shared by all partitions of the source that are read in this process; without it, the reader has
    its own. ``newest`` is the newest place that earlier lives have come to, as far as it is known; ``least_generation`` that of
    a topic that is found to be made anew, or a later one; ``answered_before``: a broker has answered an earlier life."""

    _tells_silence = True
    _silence = "its broker does not answer"

    def __init__(
        self,
        how: ReadOptions,
        topic: str,
        partition: int,
        start: LogPosition,
        committer: GroupCommit | None = None,
        fetcher: Fetcher | None = None,
        newest: LogPosition | None = None,
        least_generation: int = 0,
        answered_before: bool = False,
    ) -> None:
        self._how, self.topic, self.partition = how, topic, partition
        self.may_be_silent, self.answered_before = how.may_be_silent, answered_before
        if newest is not None:
            start = self._behind_cut(start, newest)
        self.next_offset, self.topic_id, self.generation, self.began = start
        self._newest = newest
        self._least_generation = least_generation
        self._client = Client(how.bootstrap, how.security)  # for questions that a fetch does not answer
        kept = [name for name in how.schema.names if name in COLUMNS]
        columns = {*kept, "offset"} | ({"value"} if how.format is not None else set())
        self._dead_letters: DeadLetters | None = None
        if how.dead_letters is not None:
            to, many = how.dead_letters
            columns |= {*WANTED}
            self._dead_letters = DeadLetters(
                how.bootstrap, how.security, (to, partition % many), (topic, partition), how.retry_s
            )
        self._decoder = Decoder(topic, partition, sorted(columns))
        self._pace = _Pace(how.rows_per_second)
        self._bad_records = self._pauses = 0
        #: Time of the last answer, or of the end of the work on it; -inf: the broker was found not to answer.
        self._answered_at = time.monotonic()
        #: Time of the last answer, or of the end of the work on it, also while the broker does not answer.
        self._silent_from = self._answered_at
        self._start = self._taken = start  # behind the last batch that was taken
        self._done: LogPosition | None = None  # all records before are applied
        self._end: int | None = None  # end of the log, by the last answer
        #: Batches that the worker may take, each with its bytes.
        self._ready: deque[tuple[Positioned, int]] = deque()
        #: Bytes of the ready batches.
        self._bytes = 0
        # The last answer, the number of its bytes that are decoded, and the offset that was asked for; then its remaining
        # batches, and the batch that waits for room.
        self._answer, self._used, self._begun = NOTHING, 0, self.next_offset
        self._coming: Iterator[_Decoded] = iter(())
        self._given: _Decoded | None = None
        #: ``work_off`` runs in a thread that may wait.
        self._may_wait = False
        self.full = False
        self._ring: Callable[[], None] | None = None
        #: ``next`` had no batch, so the next one rings.
        self._asked_in_vain = False
        self._lock = threading.Lock()
        self._closed = False
        self._error: BaseException | None = None
        self._committer = committer
        if committer is not None:
            committer.add((topic, partition), self._applied_offset)
        self._fetcher = how.fetcher() if fetcher is None else fetcher
        self._fetcher.add(self)

    # ---- for the worker

    def next(self) -> Positioned | Silence | None:
        """Return the next batch; None if there is none yet, SILENT if the broker does not answer. Raise the error that ended the
        reading, once every batch before it is taken."""
        if not self._ready:
            self._asked_in_vain = True  # set before the second look: a batch that comes from now on rings
            # An error is set after the last batch was put out, hence the second look.
            if self._error is not None and not self._ready:
                raise self._error
            if not self._ready:
                return SILENT if self._is_silent() else None
        with self._lock:
            taken, nbytes = first_joined(self._ready, JOINED_ROWS, BYTES_MAX)
            self._bytes -= nbytes
            self._taken = LogPosition.of(taken.position)
            goes_on = self.full and self._has_room()
            if goes_on:
                self.full = False
        if goes_on:
            self._fetcher.has_room(self)
        return taken

    def _is_silent(self) -> bool:
        """Tell whether the broker was found not to answer, or an answer is overdue and there is no rest of an earlier one."""
        overdue = time.monotonic() >= self._answered_at + SILENCE_S
        return overdue and (self._answer is NOTHING or self._answered_at == -math.inf)

    def _asked_in_vain_since(self) -> float | None:
        """Return the time of the last answer, if a later one is overdue: a broker without records answers after ``WAIT_S``."""
        if self._ready or (self._answer is not NOTHING and self._answered_at > -math.inf):
            return None
        overdue = time.monotonic() >= self._answered_at + OVERDUE_S
        return self._silent_from if overdue else None

    def when_ready(self, ring: Callable[[], None]) -> None:
        """Have ``ring`` called when a batch comes after ``next`` had none."""
        self._ring = ring

    def _tell_ready(self) -> None:
        if self._asked_in_vain and self._ring is not None:
            self._asked_in_vain = False
            self._ring()

    def lag(self) -> tuple[int, int] | None:
        """Return the offset that is taken next, and the end of the log by the last answer of a broker; None before the first
        answer. Entries of the log behind the last row that are no rows, as the ends of transactions, do not count as lag."""
        with self._lock:
            return None if self._end is None else (self._position().offset, self._end)

    def bad_records(self) -> int:
        """Return the number of records that did not fit their format, since this reader began."""
        return self._bad_records

    def pauses(self) -> int:
        """Return how often the log had no more records. The pause may have been before rows that have not been taken yet."""
        return self._pauses

    def applied(self, position: Any) -> None:
        with self._lock:
            self._done = LogPosition.of(position)

    def _applied_offset(self) -> int | None:
        """Return the offset behind all applied records, for any thread; None: not known yet. Once all taken rows are applied,
        it is also behind entries of the log that are no rows."""
        with self._lock:
            done, at = self._done, self._position()
            if done is None and self._taken == self._start and at.offset > self._start.offset and not self._ready:
                done = self._start  # entries since then were no rows, as records of aborted transactions
            if done is None or differ(done.topic_id, self.topic_id):
                return None
            return at.offset if done == self._taken else done.offset

    def _position(self) -> LogPosition:
        """Return the place where a reader goes on that has all rows taken here."""
        taken = self._taken
        if self._ready:
            return taken
        ahead = differ(taken.topic_id, self.topic_id) or self.next_offset > taken.offset
        return LogPosition(self.next_offset if ahead else taken.offset, self.topic_id, self.generation, self.began)

    def close(self) -> None:
        """Close without waiting for work under way, which may be a connection attempt: the worker has other things to do."""
        if self._closed:
            return
        if self._committer is not None:
            self._committer.remove((self.topic, self.partition))
        with self._lock:
            self._closed = True
            self._ready.clear()
        self._client.abort()
        if self._dead_letters is not None:
            self._dead_letters.abort()
        self._fetcher.remove(self)

    # ---- for the fetcher

    @property
    def takes_time(self) -> bool:
        waits = self._how.format is not None and self._how.format.waits
        records = self._answer.records
        compressed = records.size > _CODEC_AT and bool(records[_CODEC_AT] & _CODEC_BITS)
        return waits or records.size > (SMALL_COMPRESSED_BYTES if compressed else SMALL_BYTES)

    def came(self, answer: Fetched) -> None:
        """Take over an answer. The one before is decoded, or its rest is in this answer again."""
        self._answer, self._used, self._begun, self._end = answer, 0, self.next_offset, answer.end
        self._answered_at = self._silent_from = time.monotonic()
        self._coming, self._given = self._rows_of_answer(), None

    def nothing(self, end: int, lags: bool = False) -> None:
        self._end, self._answered_at = end, time.monotonic()
        self._silent_from = self._answered_at
        self._pauses += not lags

    def not_answered(self) -> None:
        self._answered_at = -math.inf

    def work_off(self, may_wait: bool) -> bool:
        """Put out batches of the answer while there is room. Returns whether the log has more."""
        self._may_wait = may_wait
        while not self._closed:
            if self._given is None:
                try:
                    self._given = next(self._coming, None)
                except TakesTime:
                    self._coming = self._rows_of_answer()
                    raise
                if self._given is None:
                    break
            with self._lock:
                if not self._has_room():
                    self.full = True
                    raise Paused(None)
                self._ready.append(self._given)
                self._bytes += self._given.size
            self._tell_ready()
            rows, self._given = self._given.rows.batch.num_rows, None
            if self._how.rows_per_second is not None:
                raise Paused(self._pace.due(rows))
        self._answered_at, self._answer = time.monotonic(), NOTHING
        self._silent_from = self._answered_at
        lags = self.next_offset < (self._end or 0)
        self._pauses += not lags
        return lags

    def _has_room(self) -> bool:
        """Tell whether there is room for the batch that waits."""
        return not self._ready or self._given is None or self._bytes + self._given.size <= AHEAD_BYTES

    def fail(self, error: BaseException) -> None:
        if not self._closed:
            self._error = error
            self._tell_ready()

    def over(self) -> None:
        self._client.close()
        if self._dead_letters is not None:
            self._dead_letters.close()

    def _rows_of_answer(self) -> Iterator[_Decoded]:
        """Decode the answer chunk by chunk. A new iterator, after an error, goes on behind the last chunk that was put out
        whole."""
        answer, size = self._answer, self._answer.records.size
        while self._used < size:
            transactions = answer.transactions.copy() if answer.transactions else answer.transactions
            decoded = self._decoder.decode(answer.records.slice(self._used), self.next_offset, transactions)
            if not decoded.used:
                break
            for given in self._batches(decoded):
                yield _Decoded(given, given.batch.nbytes)
            self._used, self.next_offset = self._used + decoded.used, decoded.next
            answer = self._answer = answer._replace(transactions=transactions)
        if self.next_offset == self._begun:
            # Asking again would bring the same answer, for ever.
            raise NothingWhole(
                f"the broker sent {size} bytes for topic {self.topic!r}, partition {self.partition}, offset {self._begun}, and "
                "no record batch that has this offset or a later one"
            )

    # ---- rows

    def _batches(self, decoded: Decoded) -> Iterator[Positioned]:
        """Cut a chunk into batches, each with the position behind it."""
        if decoded.rows is None:
            return
        offsets = decoded.rows.column("offset")
        rows = decoded.rows if self._how.format is None else self._parsed(decoded.rows, self._how.format)
        if isinstance(rows, tuple):
            rows, offsets = rows
        rows = rows.select(self._how.schema.names)
        most = self._pace.rows_at_once(ROWS_MAX)
        at = 0
        numbers = offsets.to_numpy()
        for part in split(rows, most, BYTES_MAX):
            first, at = at, at + part.num_rows
            following = decoded.next if at == rows.num_rows else int(numbers[at])
            place = LogPosition(following, self.topic_id, self.generation, self.began)
            yield Positioned(part, place.position, numbers[first:at] + place.first_number)

    def _parsed(self, raw: pa.RecordBatch, format_: Format) -> pa.RecordBatch | tuple[pa.RecordBatch, pa.Array]:
        """Parse the values, and put the wanted columns of Kafka beside the result."""
        parsed = format_.parse(raw.column("value"), find_all=self._how.goes_on)
        if parsed.bad and not self._how.goes_on:
            raise self._bad(raw, parsed.bad[0])
        if parsed.kept is not None:
            if self._dead_letters is not None:
                if not self._may_wait:
                    raise TakesTime
                self._dead_letters.write(raw, parsed.bad)
            self._tell_bad(raw, parsed.bad)
            raw = raw.take(pa.array(parsed.kept))
        columns = {**_columns(raw), **_columns(parsed.rows)}
        wanted = self._how.schema
        made = pa.RecordBatch.from_arrays([columns[name] for name in wanted.names], schema=wanted)
        return made, raw.column("offset")

    def _bad(self, raw: pa.RecordBatch, bad: Bad) -> BadRecord:
        offset = raw.column("offset")[bad.row].as_py()
        return BadRecord(
            f"a record of topic {self.topic!r}, partition {self.partition}, offset {offset} is no {self._how.format!r}: "
            f"{bad.why}. It begins with {_begin(raw, bad.row)}. bad_records='drop' leaves such records out, and "
            "'dead_letter:TOPIC' puts them into a topic of their own",
            self.topic, self.partition, offset,
        )  # fmt: skip

    def _tell_bad(self, raw: pa.RecordBatch, bad: Sequence[Bad]) -> None:
        """Log the first bad record of a chunk: a topic full of bad records must not fill the disk with messages."""
        self._bad_records += len(bad)
        offset = raw.column("offset")[bad[0].row].as_py()
        to = self._how.dead_letters
        log.warning(
            "%s %d records of topic %r, partition %d that are no %r (%d in all). First, offset %d: %s. It begins with %s",
            "dropped" if to is None else f"wrote to topic {to[0]!r}", len(bad), self.topic, self.partition, self._how.format,
            self._bad_records, offset, bad[0].why, _begin(raw, bad[0].row),
        )  # fmt: skip

    # ---- records that are gone

    def go_on_in_range(self) -> None:
        """Go on where the log begins or ends: retention has deleted the records that come next, or the log was cut off."""
        first, end = self._first_offset(), self._end_offset()
        if first <= self.next_offset <= end:
            return
        where = f"topic {self.topic!r}, partition {self.partition}: offset {self.next_offset} was to be read next"
        if self.next_offset < first:
            lost = f"{where}, but the broker begins with {first}: the records before are gone"
        elif self.topic_id == UNKNOWN:
            lost = f"{where}, but the log ends at {end}: the topic was made anew, or cut off"
        else:
            lost = f"{where}, but the log ends at {end}: it was cut off, as by an unclean election of a leader"
        if self._how.fail_on_data_loss:
            raise DataLost(
                f"{lost}. Keep records for longer than a query may stand still; fail_on_data_loss=False goes on"
            )
        if self.next_offset > end:
            self._begin_generation(end)  # the next records have offsets that other records had
        self._go_on_at(first if self.next_offset < first else end, self.topic_id)
        log.warning("%s; reading goes on with offset %d", lost, self.next_offset)

    def go_on_in(self, topic_id: str) -> None:
        """Go on with all records of the new topic of this name, or raise DataLost."""
        lost = (
            f"topic {self.topic!r} was deleted and made anew: its id was {self.topic_id}, and is {topic_id} now. Records of "
            f"partition {self.partition} from offset {self.next_offset} on are gone with the old topic, if it had any"
        )
        if self._how.fail_on_data_loss:
            raise DataLost(
                f"{lost}. Start with fail_on_data_loss=False to go on with all records of the new topic, or with another "
                "checkpointLocation to begin anew"
            )
        self._client.forget()
        partitions = len(self._client.partitions([self.topic], self._how.retry_s)[self.topic])
        if self.partition >= partitions:
            raise DataLost(
                f"{lost}. The new topic has {partitions} partitions only. Start with another checkpointLocation to begin anew"
            )
        first, newest = self._first_offset(topic_id), self._newest
        if newest is not None and newest.topic_id == topic_id:  # an earlier life has come to the new topic
            if newest.began > first:
                raise self._cut_off(newest)
            self.generation, self.began = newest.generation, newest.began
        else:
            self._begin_generation(0)
        self._go_on_at(first, topic_id)
        log.warning("%s; reading goes on with offset %d of the new topic", lost, first)

    def _begin_generation(self, began: int) -> None:
        """Begin a generation behind all that are known. Orders may have rows of a generation that no position tells of: a topic
        was made anew while the query was down, and the query was killed before a checkpoint had its rows."""
        newest = 0 if self._newest is None else self._newest.generation
        self.generation, self.began = max(self.generation + 1, newest + 1, self._least_generation), began

    def _behind_cut(self, start: LogPosition, newest: LogPosition) -> LogPosition:
        """Return the place where a reader goes on that was to begin at ``start``: an earlier life may have come behind the end
        of a log that was cut off. DataLost: that is not wanted, or some records cannot be told from others."""
        place = start.behind_cut(newest)
        if place is None:
            raise self._cut_off(newest)
        if place != start:
            lost = (
                f"topic {self.topic!r}, partition {self.partition}: offset {start.offset} was to be read next, but an earlier "
                "reader has found that the log was made anew or cut off since: the record there is gone"
            )
            if self._how.fail_on_data_loss:
                raise DataLost(f"{lost}. fail_on_data_loss=False goes on")
            log.warning("%s; reading goes on with offset %d", lost, place.offset)
        return place

    def _cut_off(self, newest: LogPosition) -> DataLost:
        return DataLost(
            f"topic {self.topic!r}, partition {self.partition}: the log was cut off at offset {newest.began}, as by an unclean "
            "election of a leader, and some replica of the query lacks records that were read before. Those that are left "
            "cannot be told from others that had the same offsets. Start with another checkpointLocation"
        )

    def _go_on_at(self, offset: int, topic_id: str) -> None:
        with self._lock:
            self.next_offset, self.topic_id, self._end = offset, topic_id, None
            if not self._ready:
                self._taken = LogPosition(offset, topic_id, self.generation, self.began)

    def _first_offset(self, topic_id: str | None = None) -> int:
        """Look up the beginning of the log. ``topic_id`` is given for another topic than the one that has been read."""
        return self._offset(EARLIEST, True, topic_id)

    def _end_offset(self) -> int:
        return self._offset(LATEST, False)

    def _offset(self, at: int, read_committed: bool, topic_id: str | None = None) -> int:
        """Look up an end of the log. Passing if a broker gives another id for the topic: brokers look offsets up by name."""
        key = self.topic, self.partition
        found = self._client.offsets({key: at}, self._how.retry_s, read_committed)[key]
        self._client.confirm(self.topic, 0.0)
        if differ(self._client.topic_ids[self.topic], self.topic_id if topic_id is None else topic_id):
            raise Passing(f"topic {self.topic!r} was made anew")
        return found


class _Pace:
    """Limit of rows per second; None: no limit."""

    def __init__(self, rows_per_second: float | None) -> None:
        self._rate = rows_per_second
        self._due = 0.0

    def rows_at_once(self, most: int) -> int:
        """Return the rows of a tenth of a second, so that rows come evenly."""
        return most if self._rate is None else max(1, min(most, int(self._rate / 10)))

    def due(self, rows: int) -> float:
        """Return the time at which the next rows may come, after ``rows`` of them."""
        assert self._rate is not None
        self._due = max(self._due, time.monotonic()) + rows / self._rate
        return self._due


def _columns(batch: pa.RecordBatch) -> dict[str, pa.Array]:
    return dict(zip(batch.schema.names, batch.columns, strict=True))


def _begin(raw: pa.RecordBatch, row: int) -> str:
    value = raw.column("value")[row].as_py()
    return repr(value[:_SHOWN]) + ("..." if len(value) > _SHOWN else "")


def kafka_schema(headers: bool) -> pa.Schema:
    """Return the schema of Spark's columns."""
    return SCHEMA if headers else pa.schema([field for field in SCHEMA if field.name != "headers"])
