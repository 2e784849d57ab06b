"""A trial of a source, as workers read it in several lives (``flux.testing.check_source``).

A partition is read from its start, from positions and from the middle of batches, each time by a fresh copy of the reader, as in
another worker. Every life must give the same rows. Methods of the readers are called as a worker calls them.
"""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import cloudpickle
import numpy as np
import pyarrow as pa

import flux
from flux.dataflow.source import Positioned, RowStart, Source, WorkerSource, source
from flux.dataflow.source_reader import SILENT, PartitionReader, SourceReader, SourceSettings, opened
from flux.errors import ContractBroken, SchemaError, UsageError
from flux.exchange.source_streams import packed, unpacked
from flux.operators.batches import conform
from flux.operators.plain_columns import plain_schema
from flux.operators.schema import parse_ddl
from flux.operators.user_code import closed, described, text_of

T = TypeVar("T")
#: Partitions that are tried at most, and positions from which each is read again.
SEEKS = 8
#: Batches of the first reading, if there are as many: rows are needed behind a position to go on from it.
BATCHES = 3
#: Rows that are compared behind each position.
ROWS_BEHIND_SEEK = 1000
#: Pause of the trial when a reader has nothing, as in a worker.
_IDLE_S = 0.002
#: Batches at the beginning of the first life whose memory is watched for a moment longer.
_WATCHED, _WATCH_S = 8, 0.003
#: A call that takes longer than this, in ``patience_s``, is given up.
_HANGS = 3
#: Times ``quiet_s`` for which rows that must come are awaited.
_MISSING = 10


def check_source(
    given: Source | SourceReader | Callable[..., Any],
    schema: Any = None,
    partitions: int | None = None,
    *,
    positions: bool = False,
    rows: int = 10_000,
    quiet_s: float = 1.0,
    patience_s: float = 5.0,
) -> None:
    """Read a source as workers would, and raise ContractBroken with the first mistake, in words.

    given       a source, as ``flux.kafka``, ``flux.files``, ``flux.datasource`` and ``flux.source`` return it; or a reader or
                function for ``flux.source``, with ``schema``, ``partitions`` and ``positions`` as there
    rows        rows of each partition that are compared, or three batches if these have more. They must be there already:
                nothing is written meanwhile
    quiet_s     time after which a reader that has nothing is believed to have nothing more, if it has counted a pause. Rows of
                the first reading are awaited ten times as long in later lives
    patience_s  time that a call may take, but for the first of its kind, which may load modules. The worker's thread does other
                work besides

    Tried: partitions are read again from their start, twice at once, and from positions, in other lives and behind restarts;
    rows, their numbers and their order are compared. Also schema, positions, end, blocking calls, ``close``, ``when_ready``,
    ``lag``, ``pauses``, ``bad_records``, ``applied``, ``prepare``, names of partitions, and batches that change after they were
    given."""
    if isinstance(given, Source) and not isinstance(given, WorkerSource):
        raise UsageError(f"check_source: {given!r} is read by Spark, not by a reader; there is nothing to check")
    tried = given if isinstance(given, Source) else source(given, schema, partitions, positions=positions)
    assert isinstance(tried, WorkerSource)
    pa.array(np.zeros(1))  # loads pandas, if it is there: no call of the reader takes that long then
    trial = SourceTrial(tried, rows, quiet_s, patience_s)
    thread = threading.Thread(target=trial.run, name="flux-check-source", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.05)
        doing, since = trial.calling
        if doing and time.monotonic() - since > _HANGS * patience_s:
            raise trial.broken(f"{doing} has not returned for {_HANGS * patience_s:g} s. {_NO_WAIT}")
    if trial.error is not None:
        raise trial.error


FROM_START = "read from the start"
_NO_WAIT = "It must not wait, because the worker's thread applies rows besides: read ahead in a thread, and return None meanwhile"


@dataclass
class RowsTaken:
    """Rows that one life of a partition has given, each batch as it was when it was given."""

    schema: pa.Schema
    batches: list[pa.RecordBatch] = field(default_factory=list)
    #: Numbers of the rows, if they bring some.
    numbers: list[np.ndarray] = field(default_factory=list)
    #: Positions, each with the number of rows of this life before it.
    positions: list[tuple[int, Any]] = field(default_factory=list)
    rows: int = 0
    #: The reader has come to its end.
    ended: bool = False

    def table(self, first: int, end: int) -> pa.Table:
        return pa.Table.from_batches(self.batches, schema=self.schema).slice(first, max(end - first, 0))

    def all_numbers(self) -> np.ndarray:
        return np.concatenate(self.numbers) if self.numbers else np.empty(0, np.int64)

    def position_before(self, row: int) -> Any:
        """Return the last position that has at most this number of rows before it; None: there is none."""
        return max((each for each in self.positions if each[0] <= row), key=lambda each: each[0], default=(0, None))[1]

    @property
    def newest(self) -> Any:
        return self.positions[-1][1] if self.positions else None


class SourceTrial:
    """The trial of one source. ``run`` may be called in a thread of its own; ``error`` is its result."""

    def __init__(self, tried: WorkerSource, rows: int, quiet_s: float, patience_s: float) -> None:
        self.name, self.rows, self.quiet_s, self.patience_s = tried.name, rows, quiet_s, patience_s
        self.partitions, self.given = tried.partitions, tried.reader
        declared = tried.declared
        if not isinstance(declared, pa.Schema):
            declared = parse_ddl(declared) if isinstance(declared, str) else flux._arrow_schema(declared)
        self.schema = plain_schema(declared, f"source {tried.name}")
        self.error: BaseException | None = None
        #: The call under way, with the time of its beginning; an empty name: none.
        self.calling: tuple[str, float] = ("", 0.0)
        #: Methods that have been called.
        self._called: set[str] = set()
        #: Lives that are not closed.
        self._lives: list[SourceLife] = []

    def broken(self, text: str) -> ContractBroken:
        return ContractBroken(f"source {self.name}: {text}")

    def call(self, doing: str, call: Callable[[], T], ends: bool = False) -> T:
        """Call a method of the source. An error, and a call that takes too long, break the contract. StopIteration is passed on
        if ``ends``."""
        began = time.monotonic()
        self.calling = doing, began
        try:
            result = call()
        except StopIteration:
            if ends:
                raise
            raise self.broken(f"{doing} raised StopIteration") from None
        except Exception as error:
            raise self.broken(f"{doing} raised {described(error)}") from error
        finally:
            self.calling = "", 0.0
        took, method = time.monotonic() - began, doing.rpartition(": ")[2]
        if took > self.patience_s and method in self._called:
            raise self.broken(f"{doing} took {took:.1f} s. {_NO_WAIT}")
        self._called.add(method)
        return result

    def run(self) -> None:
        try:
            first, kept = self._prepared(None)
            try:
                self._lives_of(first, self._prepared(kept)[0])
            finally:
                for life in self._lives:
                    closed(f"source {self.name}", life.reader.close)
                self.call("forget()", first.forget)
        except BaseException as error:
            self.error = error

    def _lives_of(self, first: SourceReader, later: SourceReader) -> None:
        """Read all partitions with the reader of a first start, and again with that of a later start."""
        self._check_names(first)
        tried = _spread(range(self.partitions))
        found = {partition: self._first(first, partition) for partition in tried}
        if not any(each.rows for each in found.values()):
            raise UsageError(f"check_source: source {self.name} has given no row: there is nothing to compare")
        self._check_seekable(first, found.values())
        for partition, expected in found.items():
            if expected.rows and first.positions and not expected.positions:
                raise self.broken(
                    f"partition {partition} has given {expected.rows} rows and no position, so each life would begin at the "
                    "start. Give flux.Positioned(batch, position), or say positions = False"
                )
            self._again(later, partition, expected)
            self._seeks(later, partition, expected)

    # ---- in the program

    def _prepared(self, kept: Any) -> tuple[SourceReader, Any]:
        """Return a prepared copy of the reader, as it is in a worker, and the facts for a later start."""
        mine, said = self.given, None
        if mine.defines & {"prepare", "configure"}:
            mine = self._travelled(lambda: copy.deepcopy(self.given))
            self.call("configure()", lambda: mine.configure(SourceSettings()))
        if "prepare" in mine.defines:
            said = self._prepare(mine, kept)
        return self._travelled(lambda: cloudpickle.loads(cloudpickle.dumps(mine))), said

    def _travelled(self, copied: Callable[[], SourceReader]) -> SourceReader:
        try:
            return copied()
        except Exception as error:
            raise self.broken(
                f"its reader cannot be pickled for the workers: {described(error)}. Open files and connections in read()"
            ) from error

    def _prepare(self, mine: SourceReader, kept: Any) -> Any:
        try:  # it may take longer than a call in a worker
            said = mine.prepare(kept)
        except Exception as error:
            again = "" if kept is None else ", given what it had returned at the first start,"
            raise self.broken(f"prepare(){again} raised {described(error)}") from error
        try:
            return json.loads(json.dumps(said))
        except (TypeError, ValueError) as error:
            raise self.broken(
                f"prepare() must return data for JSON, got {text_of(said, repr):.100}: {error}"
            ) from error

    def _check_seekable(self, reader: SourceReader, found: Iterable[RowsTaken]) -> None:
        """Refuse rows of which none lies behind a position: nothing could be compared there."""
        if not reader.seeks or reader.row_numbers:
            return
        if reader.positions:
            seekable = any(rows < taken.rows for taken in found for rows, _ in taken.positions)
        else:
            seekable = any(len(taken.batches) > 1 for taken in found)
        if not seekable and any(taken.positions or not reader.positions for taken in found):
            raise UsageError(
                f"check_source: source {self.name} has given no row behind a position or a batch, so there is nothing to go on "
                "with. Give it more rows, or have it give smaller batches"
            )

    def _check_names(self, reader: SourceReader) -> None:
        listed = range(self.partitions)
        names = self.call("partition_name()", lambda: [reader.partition_name(partition) for partition in listed])
        for name in names:
            if not isinstance(name, str) or names.count(name) > 1:
                raise self.broken(f"partition_name() must return another text for each partition, got {names!r:.100}")
        if "unread" in reader.defines:
            unread = list(self.call("unread()", reader.unread))
            if not all(isinstance(each, str) for each in unread):
                raise self.broken(f"unread() must return names, got {unread!r:.100}")

    # ---- lives

    def life(self, reader: SourceReader, partition: int, start: Any, about: str) -> SourceLife:
        made = SourceLife(self, cloudpickle.loads(cloudpickle.dumps(reader)), partition, start, about)
        self._lives.append(made)
        return made

    def close(self, life: SourceLife) -> None:
        """Close a life, twice."""
        self._lives.remove(life)
        life.call("close()", life.reader.close)
        life.call("close(), called a second time,", life.reader.close)

    def _first(self, reader: SourceReader, partition: int) -> RowsTaken:
        unused = self.life(reader, partition, None, "opened and not read")
        self.close(unused)
        life = self.life(reader, partition, None, FROM_START)
        taken = life.take(self.rows, known=False, batches=BATCHES)
        life.check_at_rest()
        self.close(life)
        return taken

    def _again(self, reader: SourceReader, partition: int, expected: RowsTaken) -> None:
        """Read from the start, two lives in turn: a worker that was given up may go on for a while."""
        lives = [self.life(reader, partition, None, about) for about in ("read again", "read again, at the same time")]
        for rows in range(1, 5):
            for life in lives:
                life.take(rows * expected.rows // 4)
        for life in lives:
            self._compare(life, life.take(self._wanted(expected, 0)), expected, 0)
            self.close(life)

    def _wanted(self, expected: RowsTaken, first: int) -> int:
        """Return the number of rows to be read behind ``first``: one more than there are, if the source has ended."""
        return expected.rows - first + expected.ended

    def _seeks(self, reader: SourceReader, partition: int, expected: RowsTaken) -> None:
        if not reader.seeks:
            return
        if not reader.positions:
            for batches in _spread(range(1, len(expected.batches) + 1)):
                first = sum(batch.num_rows for batch in expected.batches[:batches])
                self._seek(reader, partition, expected, first, batches)
            return
        for first, position in _spread(expected.positions):
            self._seek(reader, partition, expected, first, self._start(expected, first, position))
        if reader.row_numbers:
            numbers = expected.all_numbers()
            for first in _spread(range(1, expected.rows)):
                start = RowStart(int(numbers[first]), expected.position_before(first), expected.newest)
                self._seek(reader, partition, expected, first, start)

    def _start(self, expected: RowsTaken, first: int, position: Any) -> Any:
        """Return the start of a reader that goes on behind a position, as the exchange gives it."""
        if not self.given.row_numbers:
            return position
        numbers = expected.all_numbers()
        number = int(numbers[first]) if first < len(numbers) else int(numbers[-1]) + 1
        return RowStart(number, position, expected.newest)

    def _seek(self, reader: SourceReader, partition: int, expected: RowsTaken, first: int, start: Any) -> None:
        """Read on from ``start``, which is behind ``first`` rows, and from a position of that life again."""
        shown = f"read(partition, {text_of(start, repr):.80}), behind {first} rows"
        life = self.life(reader, partition, start, shown)
        taken = life.take(min(self._wanted(expected, first), ROWS_BEHIND_SEEK))
        life.hear(taken)
        self._compare(life, taken, expected, first)
        self.close(life)
        if not reader.positions or not taken.positions:
            return
        rows, position = taken.positions[0]
        if rows > 0 and first + rows < expected.rows:
            begin = self._start(expected, first + rows, position)
            later = self.life(reader, partition, begin, f"{shown}; then read(partition, {text_of(begin, repr):.80})")
            self._compare(
                later, later.take(min(expected.rows - first - rows, ROWS_BEHIND_SEEK)), expected, first + rows
            )
            self.close(later)

    # ---- comparison

    def _compare(self, life: SourceLife, taken: RowsTaken, expected: RowsTaken, first: int) -> None:
        """Compare the rows of a life with those of the first reading from row ``first`` on."""
        count = min(taken.rows, expected.rows - first)
        self._compare_rows(life, taken.table(0, count), expected.table(first, first + count), first)
        if self.given.row_numbers and not np.array_equal(
            taken.all_numbers()[:count], expected.all_numbers()[first : first + count]
        ):
            at = int(np.flatnonzero(taken.all_numbers()[:count] != expected.all_numbers()[first : first + count])[0])
            raise life.broken(
                f"row {first + at} has number {taken.all_numbers()[at]} and had {expected.all_numbers()[first + at]} in the "
                "first reading: a number stands for the same row in every life"
            )
        wanted = min(expected.rows - first, ROWS_BEHIND_SEEK if first else expected.rows)
        if taken.rows < wanted:
            how = "ended" if taken.ended else f"gave nothing more for {_MISSING * self.quiet_s:g} s"
            raise life.broken(
                f"it {how} behind row {first + taken.rows}; the first reading gave {expected.rows} rows. Each life must give "
                "all of them"
            )
        if expected.ended and taken.rows > expected.rows - first:
            raise life.broken(
                f"it gave more rows than the {expected.rows} of the first reading, which had come to its end"
            )
        if not self.given.positions:
            self._compare_batches(life, taken, expected, first)

    def _compare_rows(self, life: SourceLife, got: pa.Table, want: pa.Table, first: int) -> None:
        if got.equals(want):
            return
        rows, others = got.to_pylist(), want.to_pylist()
        for at, (row, other) in enumerate(zip(rows, others, strict=True)):
            if repr(row) != repr(other):
                raise life.broken(
                    f"row {first + at} is {row!r:.120} and was {other!r:.120} in the first reading{_hint(row, others, at)}. The "
                    "same rows must come in the same order in each life"
                )

    def _compare_batches(self, life: SourceLife, taken: RowsTaken, expected: RowsTaken, first: int) -> None:
        sizes, begun = [batch.num_rows for batch in expected.batches], 0
        while sum(sizes[:begun]) < first:
            begun += 1
        for at, (got, want) in enumerate(zip([each.num_rows for each in taken.batches], sizes[begun:], strict=False)):
            if got != want:
                raise life.broken(
                    f"batch {begun + at} has {got} rows and had {want} in the first reading: batches of a source without "
                    "positions are counted, and must be cut alike"
                )


def _hint(row: Any, others: list[Any], at: int) -> str:
    """Return the probable mistake behind a row that is another one."""
    found = next((n for n, other in enumerate(others) if repr(other) == repr(row)), None)
    if found is None or found == at:
        return ""
    if found > at:
        return f": {found - at} rows before it are missing" if found - at > 1 else ": a row before it is missing"
    return ": it comes twice"


def _spread(values: Any) -> list[Any]:
    """Return up to ``SEEKS`` values, the first and the last among them."""
    listed = list(values)
    if len(listed) <= SEEKS:
        return listed
    return [listed[round(each * (len(listed) - 1) / (SEEKS - 1))] for each in range(SEEKS)]


class SourceLife:
    """One life of a partition: its reader, called as a worker calls it, and the rows that it has given."""

    def __init__(self, trial: SourceTrial, reader: SourceReader, partition: int, start: Any, about: str) -> None:
        self._trial, self._source = trial, reader
        self._about = f"partition {partition}, {about}"
        self.taken = RowsTaken(trial.schema)
        self.reader: PartitionReader = self.call("read()", lambda: opened(reader, partition, start))
        self._rung = threading.Event()
        self._rings = "when_ready" in self.reader.defines
        if self._rings:
            self.call("when_ready()", lambda: self.reader.when_ready(self._rung.set))
        #: The reader had nothing when it was asked last.
        self._idle = False
        self._pauses = self._bad_records = 0
        self._watched = _WATCHED if about == FROM_START else 0
        self._next_number = 0
        self._rested = False

    def broken(self, text: str) -> ContractBroken:
        return self._trial.broken(f"{self._about}: {text}")

    def call(self, doing: str, call: Callable[[], T], ends: bool = False) -> T:
        return self._trial.call(f"{self._about}: {doing}", call, ends)

    def take(self, rows: int, known: bool = True, batches: int = 0) -> RowsTaken:
        """Read until this life has given ``rows`` rows, in ``batches`` or more, or has ended, or has had nothing for a while.
        ``known``: there are as many."""
        since, pauses = time.monotonic(), self._pauses
        while self.taken.rows < rows or len(self.taken.batches) < batches:
            self._rested = self.taken.ended or self._has_no_more(since, pauses, must_come=known)
            if self._rested:
                break
            self._pauses_now()
            try:
                given = self.call("next()", self.reader.next, ends=True)
            except StopIteration:
                self._check_rung()
                self.taken.ended = True
                if self._source.endless:
                    raise self.broken("it has ended, and the source says endless = True") from None
                break
            if given is None or given is SILENT:
                self._idle = True
                time.sleep(_IDLE_S)
                continue
            self._check_rung()
            self._add(given)
            since, pauses = time.monotonic(), self._pauses
        return self.taken

    def _has_no_more(self, since: float, pauses: int, must_come: bool) -> bool:
        """Return whether nothing more is to be expected of a reader that has had nothing ``since`` then."""
        quiet_s = self._trial.quiet_s
        paused = not must_come and ("pauses" not in self.reader.defines or self._pauses > pauses)
        return time.monotonic() > since + (quiet_s if paused else _MISSING * quiet_s)

    def _check_rung(self) -> None:
        """Check that the reader has rung, if rows have come after it had none."""
        if self._rings and self._idle and not self._rung.wait(self._trial.patience_s):
            raise self.broken(
                "rows or the end have come after next() had returned None, and ring() was not called. A reader with "
                "when_ready() must call it, "
                "or the rows wait for a tenth of a second"
            )
        self._rung.clear()
        self._idle = False

    def _add(self, given: Any) -> None:
        batch, position, numbers = given, None, None
        if isinstance(given, Positioned):
            if not self._source.positions:
                raise self.broken("next() has returned flux.Positioned, and the source says positions = False")
            batch, position, numbers = given
        try:
            fitted = conform(batch, self._trial.schema, "the batch")
            fitted.validate(full=True)
        except (SchemaError, pa.ArrowException) as error:
            raise self.broken(f"next() has returned a batch that does not fit: {error}") from error
        kept = _copied(fitted)
        self._look(batch)
        if isinstance(batch, pa.RecordBatch) and not _same_bytes(conform(batch, self._trial.schema, "the batch"), kept):
            raise self.broken(
                "a batch has changed after it was given: its memory may be used again when next() is called the next time, "
                "not before"
            )
        if not kept.num_rows:
            return
        self._add_numbers(kept, numbers)
        self.taken.batches.append(kept)
        self.taken.rows += kept.num_rows
        if position is not None:
            try:
                self.taken.positions.append((self.taken.rows, unpacked(packed(position))))
            except UsageError as error:
                raise self.broken(str(error)) from error

    def _add_numbers(self, batch: pa.RecordBatch, numbers: Any) -> None:
        if not self._source.row_numbers:
            return
        found = np.asarray([] if numbers is None else numbers)
        if found.dtype != np.int64 or len(found) != batch.num_rows:
            raise self.broken(
                f"a source with row_numbers gives an int64 number for each row: {batch.num_rows} were expected, "
                f"got {found!r:.100}"
            )
        if found[0] < self._next_number or not (found[1:] > found[:-1]).all():
            raise self.broken(
                f"numbers of rows must ascend from row to row, also from one batch to the next: expected {self._next_number} or "
                f"more, ascending; got {found!r:.100}"
            )
        self._next_number = int(found[-1]) + 1
        self.taken.numbers.append(found.copy())

    # ---- the other methods

    def _look(self, batch: Any) -> None:
        """Call methods of reports between two batches, as a worker does."""
        self._pauses_now()
        self._lag()
        said = self.call("bad_records()", self.reader.bad_records)
        if not _is_number(said) or said < self._bad_records:
            raise self.broken(
                f"bad_records() must return a number that never falls, got {said!r:.50} after {self._bad_records}"
            )
        self._bad_records = int(said)
        self._watched -= 1
        if self._watched >= 0 and isinstance(batch, pa.RecordBatch):
            time.sleep(_WATCH_S)  # a thread of the reader would have written by now

    def _pauses_now(self) -> int:
        if "pauses" not in self.reader.defines:
            return 0
        said = self.call("pauses()", self.reader.pauses)
        if not _is_number(said) or said < self._pauses:
            raise self.broken(f"pauses() must return a number that never falls, got {said!r:.50} after {self._pauses}")
        self._pauses = int(said)
        return self._pauses

    def _lag(self) -> tuple[int, int] | None:
        said: Any = self.call("lag()", self.reader.lag)
        if said is None:
            return None
        if (
            not isinstance(said, tuple | list)
            or len(said) != 2
            or not all(_is_number(each) and each >= 0 for each in said)
        ):
            raise self.broken(
                f"lag() must return two numbers from 0, a position and an end, or None; got {said!r:.100}"
            )
        return int(said[0]), int(said[1])

    def check_at_rest(self) -> None:
        """Check reports of a reader that has nothing more, if it has not ended."""
        if self.taken.ended or not self._rested:
            return
        said, end = self._lag(), time.monotonic() + self._trial.quiet_s
        while said is not None and said[0] > said[1]:
            if time.monotonic() > end:
                raise self.broken(
                    f"lag() says that record {said[0]} is next, and that the last one is before {said[1]}"
                )
            time.sleep(_IDLE_S)
            said = self._lag()
        if "pauses" in self.reader.defines and not self._pauses_now():
            raise self.broken(
                f"pauses() is 0, though next() has had nothing for {_MISSING * self._trial.quiet_s:g} s: processAllAvailable "
                "would wait for ever"
            )

    def hear(self, taken: RowsTaken) -> None:
        """Tell the reader that rows before its positions are applied."""
        for _, position in _spread(taken.positions):
            self.call("applied()", lambda each=position: self.reader.applied(each))  # type: ignore[misc]


def _is_number(given: Any) -> bool:
    return isinstance(given, int | np.integer) and not isinstance(given, bool)


def _copied(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Copy a batch with its memory."""
    return pa.ipc.read_record_batch(pa.py_buffer(batch.serialize().to_pybytes()), batch.schema)


def _same_bytes(batch: pa.RecordBatch, kept: pa.RecordBatch) -> bool:
    return batch.equals(kept) or repr(batch.to_pylist()) == repr(kept.to_pylist())
