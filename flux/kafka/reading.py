"""One partition of a topic, read in a thread of its own, ahead of the worker that takes its batches.

Law: no method blocks. What is fetched and not taken has at most about ``AHEAD_BYTES``, and one answer of a
broker. The thread ends soon after ``close``, whatever it waits for.

Positions are offsets: a position says which record comes next, so a reader may go on between any two of them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from flux.dataflow.batches import split
from flux.dataflow.sources import Positioned
from flux.kafka.client import EARLIEST, LATEST, Address, Client, OutOfRange, Passing
from flux.kafka.committing import Committer
from flux.kafka.dead_letters import WANTED, DeadLetters
from flux.kafka.errors import BadRecord, CorruptRecords, DataLost
from flux.kafka.formats import Bad, Format
from flux.kafka.records import COLUMNS, SCHEMA, Decoded, Decoder
from flux.kafka.security import Security

log = logging.getLogger("flux.kafka")

#: Rows and bytes of the batches that are given out. A batch of a source must stay within ``spark.flux.batch.*``, because a
#: larger one is cut where there is no position.
ROWS_MAX, BYTES_MAX = 65536, 4 << 20
#: So much is fetched and decoded before the worker wants it: some hundredths of a second of work.
AHEAD_BYTES = 16 << 20
#: How long a broker holds back an empty answer. ``close`` does not wait for it.
WAIT_S = 0.5
#: What a fetch costs hardly depends on how few records it brings. Who has all that the log has asks again this long after he
#: asked last, at the soonest, so that more records come together. Where records come one by one, he has waited longer already.
GATHER_S = 0.003
#: Small batches that wait are given out together, up to so many rows: each costs its way through the worker.
JOINED_ROWS = 4096
#: Pauses after something that may pass.
_PAUSE_S, _PAUSE_MAX_S = 0.1, 2.0
#: Bytes of a bad record that a message shows.
_SHOWN = 60


@dataclass(frozen=True)
class Reading:
    """How the partitions of a source are read. Is shipped to the workers. ``dead_letters``: the topic for records that do not fit
    ``format``, and how many partitions it has; without, they are left out (``drop_bad``), or one ends the reading."""

    bootstrap: Sequence[Address]
    security: Security
    schema: pa.Schema
    format: Format | None = None
    drop_bad: bool = False
    dead_letters: tuple[str, int] | None = None
    read_committed: bool = True
    fail_on_data_loss: bool = True
    rows_per_second: float | None = None
    fetch_bytes: int = 8 << 20
    retry_s: float = 300.0

    @property
    def goes_on(self) -> bool:
        """Behind records that do not fit."""
        return self.drop_bad or self.dead_letters is not None


class PartitionReader:
    """``start``: the first offset that is wanted. ``committer``: of the group that is told what has been applied."""

    def __init__(
        self, how: Reading, topic: str, partition: int, start: int, committer: Committer | None = None
    ) -> None:
        self._how, self._topic, self._partition, self._next = how, topic, partition, start
        self._client = Client(how.bootstrap, how.security)
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
        self._bad_records = 0
        self._taken = start  # behind what was taken
        self._done: int | None = None  # all before was applied
        self._end: int | None = None  # of the log, by the last answer
        self._ready: deque[Positioned] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"flux-kafka-{topic}-{partition}", daemon=True)
        self._thread.start()
        self._committer = committer
        if committer is not None:
            committer.add((topic, partition), self.applied)

    def take(self) -> Positioned | None:
        """The next batch; None if there is none yet. Raises what ended the reading, once everything before is taken."""
        with self._changed:
            if self._ready:
                taken = self._joined()
                self._taken = taken.position
                self._changed.notify()
                return taken
            if self._error is not None:
                raise self._error
        return None

    def _joined(self) -> Positioned:
        """What waits first, and small batches behind it."""
        parts = [self._ready.popleft()]
        rows, size = parts[0].batch.num_rows, parts[0].batch.nbytes
        self._bytes -= size
        while self._ready:
            following = self._ready[0].batch
            rows, size = rows + following.num_rows, size + following.nbytes
            if rows > JOINED_ROWS or size > BYTES_MAX:
                break
            self._bytes -= following.nbytes
            parts.append(self._ready.popleft())
        if len(parts) == 1:
            return parts[0]
        return Positioned(pa.concat_batches([part.batch for part in parts]), parts[-1].position)

    def __iter__(self) -> Iterator[Positioned | None]:
        return self

    __next__ = take

    def lag(self) -> tuple[int, int] | None:
        """The offset that is taken next, and the end of the log as the last answer of a broker says it; None before the first.
        What stands in the log behind the last row, as the ends of transactions do, is not waited for."""
        with self._changed:
            return None if self._end is None else (self._position(), self._end)

    def bad_records(self) -> int:
        """How many did not fit their format, since this reader began."""
        return self._bad_records

    def done(self, position: int) -> None:
        """Every consumer has applied what comes before this offset."""
        with self._changed:
            self._done = position

    def applied(self) -> int | None:
        """The offset behind all that was applied, for any thread; None: not known yet. Once all is applied that was taken, it
        is also behind what stands in the log without being a row."""
        with self._changed:
            if self._done is None or self._done < self._taken:
                return self._done
            return self._position()

    def _position(self) -> int:
        """Where who has all that was taken goes on."""
        return self._taken if self._ready else max(self._taken, self._next)

    def close(self) -> None:
        """Does not wait for the thread, which may be connecting: the worker has other things to do."""
        if self._committer is not None:
            self._committer.remove((self._topic, self._partition))
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify()
        self._client.abort()
        if self._dead_letters is not None:
            self._dead_letters.abort()

    def _run(self) -> None:
        try:
            self._read()
        except BaseException as error:  # for whoever takes
            if not self._closed:
                with self._changed:
                    self._error = error
        finally:
            self._client.close()
            if self._dead_letters is not None:
                self._dead_letters.close()

    def _read(self) -> None:
        """Until it is closed. What passes is tried again, until nothing has come for ``retry_s``."""
        good, pause = time.monotonic(), _PAUSE_S
        while not self._closed:
            try:
                self._fetch()
                good, pause = time.monotonic(), _PAUSE_S
            except (OSError, Passing, OutOfRange) as error:
                if isinstance(error, OutOfRange):
                    self._go_on_in_range()
                self._client.forget()
                silent = time.monotonic() - good
                if silent >= self._how.retry_s:
                    doing = f"reading partition {self._partition} of topic {self._topic!r} from offset {self._next}"
                    raise self._client.unreachable(doing, silent, error) from error
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, pause)
                pause = min(2 * pause, _PAUSE_MAX_S)

    def _fetch(self) -> None:
        """One answer of a broker, in chunks."""
        how, start, asked = self._how, self._next, time.monotonic()
        fetched = self._client.fetch(self._topic, self._partition, start, WAIT_S, how.fetch_bytes, how.read_committed)
        self._end = fetched.end
        used, size = 0, fetched.records.size
        while used < size and not self._closed:
            decoded = self._decoder.decode(fetched.records.slice(used), self._next, fetched.transactions)
            if not decoded.used:
                break
            used += decoded.used
            for given in self._batches(decoded):
                if not self._put(given):
                    return
            self._next = decoded.next
        if size and self._next == start and not self._closed:
            # Asking again would bring the same again, for ever.
            raise CorruptRecords(
                f"the broker sent {size} bytes for topic {self._topic!r}, partition {self._partition}, offset {start}, and no "
                "record batch that has this offset or a later one"
            )
        if size and self._next >= fetched.end:
            with self._changed:
                self._changed.wait_for(lambda: self._closed, asked + GATHER_S - time.monotonic())

    def _batches(self, decoded: Decoded) -> Iterator[Positioned]:
        """The rows of a chunk as they are wanted, each part with the offset behind it."""
        if decoded.rows is None:
            return
        offsets = decoded.rows.column("offset")
        rows = decoded.rows if self._how.format is None else self._parsed(decoded.rows, self._how.format)
        if isinstance(rows, tuple):
            rows, offsets = rows
        rows = rows.select(self._how.schema.names)
        most = self._pace.rows_at_once(ROWS_MAX)
        at = 0
        for part in split(rows, most, BYTES_MAX):
            at += part.num_rows
            following = decoded.next if at == rows.num_rows else offsets[at].as_py()
            yield Positioned(part, following)

    def _parsed(self, raw: pa.RecordBatch, format_: Format) -> pa.RecordBatch | tuple[pa.RecordBatch, pa.Array]:
        """Values in their format, beside those of Kafka's columns that were asked for."""
        parsed = format_.parse(raw.column("value"), find_all=self._how.goes_on)
        if parsed.bad and not self._how.goes_on:
            raise self._bad(raw, parsed.bad[0])
        if parsed.kept is not None:
            if self._dead_letters is not None:
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
            f"a record of topic {self._topic!r}, partition {self._partition}, offset {offset} is no {self._how.format!r}: "
            f"{bad.why}. It begins with {_begin(raw, bad.row)}. bad_records='drop' leaves such records out, and "
            "'dead_letter:TOPIC' puts them into a topic of their own",
            self._topic, self._partition, offset,
        )  # fmt: skip

    def _tell_bad(self, raw: pa.RecordBatch, bad: Sequence[Bad]) -> None:
        """The first of a chunk: a topic full of bad records must not fill the disk with complaints."""
        self._bad_records += len(bad)
        offset = raw.column("offset")[bad[0].row].as_py()
        to = self._how.dead_letters
        log.warning(
            "%s %d records of topic %r, partition %d that are no %r (%d in all). First, offset %d: %s. It begins with %s",
            "dropped" if to is None else f"wrote to topic {to[0]!r}", len(bad), self._topic, self._partition, self._how.format,
            self._bad_records, offset, bad[0].why, _begin(raw, bad[0].row),
        )  # fmt: skip

    def _put(self, given: Positioned) -> bool:
        """Whether it was wanted; waits for room, and for the pace that was asked for."""
        size = given.batch.nbytes
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._ready or self._bytes + size <= AHEAD_BYTES)
            if not self._closed:
                self._ready.append(given)
                self._bytes += size
            self._changed.wait_for(lambda: self._closed, self._pace.pause(given.batch.num_rows))
            return not self._closed

    def _go_on_in_range(self) -> None:
        """The records that come next are not there: deleted by retention, or the topic was made anew."""
        key = self._topic, self._partition
        first = self._client.offsets({key: EARLIEST}, self._how.retry_s)[key]
        end = self._client.offsets({key: LATEST}, self._how.retry_s, read_committed=False)[key]
        if first <= self._next <= end:
            return
        where = f"topic {self._topic!r}, partition {self._partition}: offset {self._next} was to be read next"
        if self._next < first:
            lost = f"{where}, but the broker begins with {first}: the records before are gone"
        else:
            lost = f"{where}, but the log ends at {end}: the topic was made anew, or cut off"
        if self._how.fail_on_data_loss:
            raise DataLost(
                f"{lost}. Keep records for longer than a query may stand still; fail_on_data_loss=False goes on"
            )
        with self._changed:
            self._next = self._taken = first if self._next < first else end
        log.warning("%s; reading goes on with offset %d", lost, self._next)


class _Pace:
    """Rows per second at the most; None: no limit."""

    def __init__(self, rows_per_second: float | None) -> None:
        self._rate = rows_per_second
        self._due = 0.0

    def rows_at_once(self, most: int) -> int:
        """A tenth of a second's worth, so that rows come evenly."""
        return most if self._rate is None else max(1, min(most, int(self._rate / 10)))

    def pause(self, rows: int) -> float:
        """Seconds to wait after so many."""
        if self._rate is None:
            return 0.0
        now = time.monotonic()
        self._due = max(self._due, now) + rows / self._rate
        return self._due - now


def _columns(batch: pa.RecordBatch) -> dict[str, pa.Array]:
    return dict(zip(batch.schema.names, batch.columns, strict=True))


def _begin(raw: pa.RecordBatch, row: int) -> str:
    value = raw.column("value")[row].as_py()
    return repr(value[:_SHOWN]) + ("..." if len(value) > _SHOWN else "")


def kafka_schema(headers: bool) -> pa.Schema:
    """Spark's columns."""
    return SCHEMA if headers else pa.schema([field for field in SCHEMA if field.name != "headers"])
