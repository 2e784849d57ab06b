"""A trial of a sink, as queries use it among faults (``flux.testing.check_sink``).

Lives of primaries follow each other: some are lost, some write although they have been given up, batches come again. Each trial
is a query of its own. After each, the rows outside are compared with the rows that were given.

Errors and stops come between the lines of the sink's own code (``sink_lines``).
"""

from __future__ import annotations

import copy
import json
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import cloudpickle
import pyarrow as pa

from flux.dataflow.sink import Position, QueryReaders, Sink, SinkContext, shows_tentative
from flux.errors import ContractBroken, UsageError
from flux.operators.batches import logical_bytes
from flux.operators.user_code import described
from flux.sink_lines import LineError, LineStop, SinkLine, SinkLines

T = TypeVar("T")
#: The values of a row, each as its text, because not every value can be compared.
Row = tuple[str, ...]

#: Partitions of the stage before the sink. Two show a sink that mixes up partitions.
PARTITIONS = 2
#: A transient error is tried again for this time, with this pause.
PATIENCE_S, PAUSE_S = 20.0, 0.05
#: Lines of ``write`` before which an error comes, and before which a primary is stopped while its successor writes.
BROKEN_MAX, STOPPED_MAX = 12, 6
#: A successor that waits for a stopped primary is believed to wait for a lock of the primary after this time.
BLOCKED_S = 0.05
#: Event times of tentative rows, in microseconds.
TIMES = (1_000_000, 2_000_000)
#: A call that takes longer than this is given up.
HANGS_S = 120.0


def check_sink(
    sink: Sink,
    batches: Sequence[pa.RecordBatch] | Callable[[int], Sequence[pa.RecordBatch]],
    outside: Callable[[], Any],
) -> None:
    """Use a sink as queries would, among lost and late writers, and raise ContractBroken with the first mistake, in words.

    batches  three or more batches of output, for each of two partitions; or a function of the partition that returns them
    outside  a function that returns all rows outside, in any order: an Arrow table, batches, dictionaries, or tuples in the
             order of the columns. Rows from before the call do not matter. Columns that are not outside are not compared

    Tried: the lives of two partitions, a primary that is lost or closed half-way, batches that come again at their positions, a
    batch behind one that has not come, a late write of a primary that was given up, before, during and behind the same write of
    its successor, several queries, and several sinks of a query, with one outside, and the abilities in the traits of the sink.
    A sink that shows tentative results must have taken back the void ones, also those of a primary that was lost.
    An error breaks ``write`` off before lines of the sink's own files, and the batch is written again. Each call comes in another
    thread, as in a worker. A sink that is at least once may have rows twice, but must lose none.

    Not seen: an error in the middle of one call of a library, in clean-up (except and finally), and in files other than
    those of the sink's classes and functions; and a loss of power."""
    given = batches if callable(batches) else lambda partition: batches
    trial = _SinkTrial(sink, [list(given(partition)) for partition in range(PARTITIONS)], outside)
    trial.check_traits()
    trial.settle()
    trial.whole_lives()
    trial.lost_primary()
    trial.closed_primary()
    trial.two_sinks()
    if sink.traits.joins_bytes:
        trial.joined_batches()
    if sink.traits.exactly_once:
        trial.repeated_batch()
        trial.skipped_batch()
        trial.late_writes()
    lines = trial.lines_of_write()
    trial.broken_writes(lines)
    if sink.traits.exactly_once:
        trial.simultaneous_writes(lines)
    if shows_tentative(sink):
        trial.tentative_rows()
        trial.tentative_rows_of_a_lost_primary()


class _SinkTrial:
    """The trials of one sink, and the rows that must be outside by now."""

    def __init__(self, sink: Sink, batches: list[list[pa.RecordBatch]], outside: Callable[[], Any]) -> None:
        if not isinstance(sink, Sink):
            raise UsageError(f"check_sink wants an instance of a class derived from flux.Sink, got {sink!r}")
        if isinstance(sink, QueryReaders):
            raise UsageError("readers fetch their output themselves, so there is no sink to check")
        for given in batches:
            if len([batch for batch in given if batch.num_rows]) < 3:
                raise UsageError("check_sink wants three or more batches with rows for each partition")
        self.name, self.traits, self.schema = type(sink).__name__, sink.traits, batches[0][0].schema
        self.batches = [self._as_given(each) for each in batches]
        self.pattern = self._given = sink
        self._settled: Any = None
        self._outside = outside
        self._before = self._rows()
        self._expected: list[dict[str, Any]] = []

    def _as_given(self, batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
        """Return batches as the sink would get them: without empty ones, or with one at the end, which closes a collection."""
        if self.traits.takes_empty:
            return [*batches, batches[-1].slice(0, 0)]
        return [batch for batch in batches if batch.num_rows]

    def broken(self, text: str) -> ContractBroken:
        return ContractBroken(f"{self.name}: {text}")

    def call(self, doing: str, call: Callable[[], T]) -> T:
        """Call the sink. Transient errors are tried again, as in a query."""
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self.once(doing, call)
            except Exception as error:
                if not self.pattern.is_transient(error) or time.monotonic() > end:
                    raise self.broken(f"{doing} raised {described(error)}") from error
            time.sleep(PAUSE_S)

    def once(self, doing: str, call: Callable[[], T]) -> T:
        """Call the sink in a thread of its own: the threads of a worker take turns with a partition."""
        thread = _CallThread(call)
        thread.join(HANGS_S)
        if thread.is_alive():
            raise self.broken(f"{doing} has not returned for {HANGS_S:g} s")
        found: T = thread.result()
        return found

    # ---- rows

    def _rows(self) -> Counter[Row]:
        """Return the rows outside, and note in ``names`` which columns they have."""
        found = self._outside()
        listed: list[Any] = []
        for row in found.to_pylist() if isinstance(found, pa.Table | pa.RecordBatch) else found:
            listed += row.to_pylist() if isinstance(row, pa.RecordBatch | pa.Table) else [row]
        every = self.schema.names
        rows = [row if isinstance(row, dict) else dict(zip(every, row, strict=False)) for row in listed]
        self.names = [name for name in every if not rows or name in rows[0]]
        # As text, because cells may be NaN, or lists, which cannot be hashed. ``compare`` writes the expected rows alike.
        return Counter(tuple(repr(row.get(name)) for name in self.names) for row in rows)

    def expect(self, partition: int) -> None:
        """Note that all rows of a partition must be outside once more."""
        for batch in self.batches[partition]:
            self._expected += batch.to_pylist()

    def compare(self, when: str) -> None:
        """Raise ContractBroken if the rows outside are not the expected ones."""
        found = self._rows()
        found.subtract(self._before)
        found = +found
        expected = self._as_rows(self._expected)
        if lost := expected - found:
            raise self.broken(f"{when}: {_some(lost)} not outside")
        more = found - expected
        if strange := Counter({row: times for row, times in more.items() if row not in expected}):
            raise self.broken(f"{when}: {_some(strange)} outside that no batch had")
        if more and self.traits.exactly_once:
            raise self.broken(f"{when}: {_some(more)} outside more often than given, and the sink says exactly_once")

    # ---- trials

    def check_traits(self) -> None:
        """Refuse abilities with no method behind them."""
        kind = type(self._given)
        for trait, method in (("sends_ahead", "send"), ("committed_changes", "committed")):
            if getattr(self.traits, trait) and getattr(kind, method) is getattr(Sink, method):
                raise self.broken(f"its traits say {trait} = True, and it does not define {method}()")

    def settle(self) -> None:
        """Settle a query as its program does, at its first start and when it starts again."""
        try:
            self._given = cloudpickle.loads(cloudpickle.dumps(self._given))
        except Exception as error:
            raise self.broken(f"it cannot travel to the workers: {described(error)}. Connect in open()") from error
        if self._given.destination() != copy.deepcopy(self._given).destination():
            raise self.broken("destination() differs from copy to copy, though the place is the same")
        self.begin()
        try:
            kept = json.loads(json.dumps(self._settled))
        except (TypeError, ValueError) as error:
            raise self.broken(f"prepare() must return data for JSON: {described(error)}") from error
        again = copy.deepcopy(self._given)
        again.check(self.schema)
        self.call("prepare() of a query that starts again", lambda: again.prepare(PARTITIONS, kept))

    def begin(self) -> str:
        """Begin a query, as the program does that starts it. Return the id of the query."""
        self.pattern = sink = copy.deepcopy(self._given)
        self.call("check()", lambda: sink.check(self.schema))
        self._settled = self.call("prepare()", lambda: sink.prepare(PARTITIONS, None))
        return f"check-{uuid.uuid4().hex[:12]}"

    def whole_lives(self) -> None:
        """Let two partitions write everything, in turns."""
        query = self.begin()
        writers = [self.writer(query, partition, fresh=True) for partition in range(PARTITIONS)]
        for at in range(max(map(len, self.batches))):
            for writer in writers:
                writer.write(at, at + 1)
        for partition, writer in enumerate(writers):
            writer.expect_all_outside()
            self.expect(partition)
        self.compare("two partitions have written everything")
        for writer in writers:
            writer.close()
        self.compare("close() of both")

    def lost_primary(self) -> None:
        """Let a primary vanish after two batches, and another one go on."""
        query = self.begin()
        lost = self.writer(query, 0, fresh=True)
        lost.write(0, 2)
        heir = self.writer(query, 0)
        self._check_follows(lost, heir)
        heir.write_all()
        lost.close()
        heir.close()
        self.expect(0)
        self.compare("a primary was lost after two batches, and the next one has written the rest")

    def closed_primary(self) -> None:
        """Close a primary after two batches, as at a move of the partition, and let another one go on."""
        query = self.begin()
        closed = self.writer(query, 0, fresh=True)
        closed.write(0, 2)
        closed.close()
        heir = self.writer(query, 0)
        self._check_follows(closed, heir, " after close()")
        heir.write_all()
        heir.close()
        self.expect(0)
        self.compare("a primary was closed after two batches, and the next one has written the rest")

    def _check_follows(self, earlier: _TrialWriter, heir: _TrialWriter, when: str = "") -> None:
        """Compare the answer of ``committed`` with the writes of the primary before, which has written two batches."""
        if heir.committed_at_start is None:
            return
        if heir.committed_at_start > 2:
            raise self.broken(
                f"committed(){when} says that batch {heir.committed_at_start - 1} is outside, though two were written"
            )
        self._check_said(earlier, heir, when)

    def _check_said(self, earlier: _TrialWriter, heir: _TrialWriter, when: str) -> None:
        if heir.committed_at_start is not None and heir.committed_at_start < earlier.has:
            raise self.broken(
                f"write() has said that the outside has {earlier.has} batches, and committed() of the next primary{when} says "
                f"{heir.committed_at_start}: the batches between would be lost"
            )

    def two_sinks(self) -> None:
        """Let two sinks of one query write into one outside, as where two flows end in the same table."""
        query = self.begin()
        for number in range(2):
            if number:
                self.begin()
            writer = self.writer(query, 0, fresh=True, number=number)
            writer.write_all()
            writer.close()
            self.expect(0)
        self.compare("two sinks of one query, SinkContext.number 0 and 1, have written everything")

    def lines_of_write(self) -> list[SinkLine]:
        """Return the lines that are reached in ``write``."""
        query, lines = self.begin(), SinkLines(self._given)
        writer = self.writer(query, 0, fresh=True)
        writer.follow(lines, lambda line: None)
        writer.close()
        self.expect(0)
        self.compare("a primary has written everything")
        return lines.reached

    def broken_writes(self, lines: list[SinkLine]) -> None:
        """Break a write off before a line, repeat it as a query does, and let the next primary write the rest."""
        for line in _spread(lines, BROKEN_MAX):
            query = self.begin()
            writer = self.writer(query, 0, fresh=True)
            try:
                writer.follow(SinkLines(self._given), LineError(line))
            except Exception as error:
                if self.pattern.is_transient(error):
                    writer.repeat()
            writer.close_anyhow()
            heir = self.writer(query, 0)
            self._check_said(writer, heir, f", after an error before {line},")
            heir.write_all()
            heir.expect_all_outside()
            heir.close()
            self.expect(0)
            self.compare(f"an error has broken write() off before {line}, and the batch was written again")

    def simultaneous_writes(self, lines: list[SinkLine]) -> None:
        """Stop a primary before a line, let its successor write the same batch, and let the first go on. If the successor waits
        for the first, as for a lock, the first goes on before."""
        for line in _spread(lines, STOPPED_MAX):
            query, stop = self.begin(), LineStop(line, PATIENCE_S)
            given_up = self.writer(query, 0, fresh=True)
            late = _CallThread(partial(given_up.follow, SinkLines(self._given), stop, alone=False))
            while late.is_alive() and not stop.stopped.is_set():
                late.join(0.001)
            heir = _CallThread(partial(self._write_as_heir, query))
            heir.join(BLOCKED_S)
            stop.release()
            for thread in (late, heir):
                thread.join(HANGS_S)
                if thread.is_alive():
                    raise self.broken(f"two primaries write at once, and one has not returned for {HANGS_S:g} s")
            heir.result()
            given_up.close_anyhow()
            self.expect(0)
            self.compare(f"a primary that was given up has stood before {line}, while its successor wrote")

    def _write_as_heir(self, query: str) -> None:
        heir = self.writer(query, 0)
        heir.write_all()
        heir.expect_all_outside()
        heir.close()

    def joined_batches(self) -> None:
        """Let a primary write two batches as one, vanish, and another one write them as they come."""
        query = self.begin()
        lost = self.writer(query, 1, fresh=True)
        lost.write(0, 2, joined=True)
        heir = self.writer(query, 1)
        heir.write_all()
        heir.close()
        self.expect(1)
        self.compare("two batches were joined (joins_bytes), and the next primary went on from committed()")

    def repeated_batch(self) -> None:
        """Write a batch again at its position."""
        query = self.begin()
        writer = self.writer(query, 0, fresh=True)
        writer.write_all()
        self.expect(0)
        self.compare("a primary has written everything")
        writer.write_at(len(self.batches[0]) - 1)
        self.compare("a batch was written again at the position that it has outside")
        writer.close()

    def skipped_batch(self) -> None:
        """Write a batch though the one before it has not come, as where the outside has lost its end. It may be refused, or left
        out. A sink that takes it must take the one before it later."""
        query = self.begin()
        early = self.writer(query, 0, fresh=True)
        early.write(0, 1)
        early.write_at(2)
        early.close_anyhow()
        heir = self.writer(query, 0)
        what = "batch 2 was written though batch 1 had not come"
        if heir.committed_at_start is not None and heir.committed_at_start > 1:
            raise self.broken(
                f"{what}, and committed() of the next primary says {heir.committed_at_start}: batch 1 would be lost. "
                "write() must refuse a position that is not the next"
            )
        heir.write_all()
        heir.close()
        self.expect(0)
        self.compare(what)

    def late_writes(self) -> None:
        """Let a primary that was given up write after its successor has asked ``committed``: before the write of the successor at
        that position, and behind it."""
        for before in (True, False):
            query = self.begin()
            given_up = self.writer(query, 1, fresh=True)
            given_up.write(0, 1)
            heir = self.writer(query, 1)
            begin = heir.committed_at_start if heir.committed_at_start is not None else 0
            if begin > 1:
                raise self.broken(f"committed() says that batch {begin - 1} is outside, though only one was written")
            when = "before" if before else "behind"
            if not before:
                heir.write(begin, 2)
            given_up.go_on_late(2)
            heir.write_all()
            given_up.go_on_late(len(self.batches[1]))
            given_up.close_anyhow()
            heir.expect_all_outside()
            heir.close()
            self.expect(1)
            self.compare(f"a primary that was given up has written late, {when} the same write of its successor")

    # ---- tentative results

    def tentative_rows(self) -> None:
        """Show batches that are not written yet, take one back and then the other, and write all."""
        query, before = self.begin(), self._rows()
        writer, given = self.writer(query, 0, fresh=True), self.batches[0]
        writer.write(0, 1)
        writer.show(given[1], TIMES[0])
        writer.show(given[2], TIMES[1])
        writer.undo(None, TIMES[0])
        self._compare_shown("undo() of the first of two tentative batches", before, writer.has, [given[0], given[2]])
        writer.undo(TIMES[0], None)
        writer.undo(TIMES[0], None)
        self._compare_shown("undo() of all tentative rows, twice", before, writer.has, given[:1])
        writer.show(given[1], TIMES[1])
        writer.write(1, 2)
        writer.undo(TIMES[0], TIMES[1])
        writer.corrected(TIMES[1])
        self._compare_shown("a batch was shown and then written, and undo() of its time", before, writer.has, given[:2])
        writer.write_all()
        writer.close()
        self.expect(0)
        self.compare("tentative rows were shown and taken back, and everything was written")

    def tentative_rows_of_a_lost_primary(self) -> None:
        """Let a primary vanish while its tentative rows are shown. Each later primary begins with an undo of everything."""
        query, before = self.begin(), self._rows()
        lost, given = self.writer(query, 0, fresh=True), self.batches[0]
        lost.write(0, 1)
        lost.show(given[2], TIMES[1])
        heir = self.writer(query, 0)
        heir.undo(None, None)
        self._compare_shown(
            "a primary was lost, and the next one has called undo(None, None)", before, heir.has, given[:1]
        )
        heir.write_all()
        lost.close_anyhow()
        heir.close()
        self.expect(0)
        self.compare("a primary was lost that had shown tentative rows, and the next one has written the rest")

    def _compare_shown(self, when: str, before: Counter[Row], has: int, most: list[pa.RecordBatch]) -> None:
        """Raise ContractBroken if the trial has brought other rows outside than the first ``has`` batches of partition 0, which
        are written, and rows of ``most``, each once."""
        found = self._rows()
        found.subtract(before)
        written = self._as_rows([row for batch in self.batches[0][:has] for row in batch.to_pylist()])
        if lost := written - found:
            raise self.broken(f"{when}: {_some(lost)} not outside")
        if void := +found - self._as_rows([row for batch in most for row in batch.to_pylist()]):
            raise self.broken(f"{when}: {_some(void)} outside that no longer count")

    def _as_rows(self, rows: list[dict[str, Any]]) -> Counter[Row]:
        """Return rows in the form of ``_rows``."""
        return Counter(tuple(repr(row[name]) for name in self.names) for row in rows)

    def writer(self, query: str, partition: int, fresh: bool = False, number: int = 0) -> _TrialWriter:
        return _TrialWriter(self, query, partition, fresh, number)


class _CallThread(threading.Thread):
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(name="flux-check-sink", daemon=True)
        self._call = call
        self._result: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        """Return the result of the call, or raise its error, once it has ended."""
        if self._error is not None:
            raise self._error
        return self._result


class _TrialWriter:
    """One life of a primary of one partition: a copy of the sink, and how far it has come."""

    def __init__(self, trial: _SinkTrial, query: str, partition: int, fresh: bool, number: int) -> None:
        """Open the sink, and ask it for its position. ``fresh``: no life of this query has written the partition before, so
        ``committed`` must find nothing."""
        self._trial, self._partition = trial, partition
        self._batches = trial.batches[partition]
        self._sink = copy.deepcopy(trial.pattern)
        context = SinkContext(query, number, f"checked{number or ''}", partition, PARTITIONS)
        trial.call("open()", lambda: self._sink.open(context))
        #: The answer of ``committed`` to this life, before its first write.
        self.committed_at_start = self._committed()
        if fresh and self.committed_at_start:
            of = f"the second sink of a query (number = {number})" if number else "a query"
            raise trial.broken(
                f"committed() says that the outside has {self.committed_at_start} batches of {of} that has written none. "
                "Keep positions with query, number and partition (SinkContext)"
            )
        #: Batches that are outside, as far as this life knows.
        self.has = self.committed_at_start or 0
        self._written = self.has

    def _committed(self) -> int | None:
        found = self._trial.call("committed()", lambda: self._sink.committed(self._partition))
        if found is not None and (not isinstance(found, int) or isinstance(found, bool) or found < 0):
            raise self._trial.broken(f"committed() must return a number of batches, or None; got {found!r}")
        return found

    def write_all(self) -> None:
        self.write(self._written, len(self._batches))

    def write(self, first: int, end: int, joined: bool = False) -> None:
        """Write batches ``first`` to ``end``, exclusive, that this life has not written yet."""
        first, end = max(first, self._written), min(end, len(self._batches))
        if joined and first < end:
            self._write(first, end)
            return
        for at in range(first, end):
            if at >= self._written:
                self._write(at, at + 1)

    def _write(self, at: int, end: int) -> None:
        """Write batches ``at`` to ``end``, exclusive: several joined."""
        trial, sink = self._trial, self._sink
        given = [(Position(self._partition, number), self._batches[number]) for number in range(at, end)]
        position, batch = given[0]
        if trial.traits.sends_ahead:
            self._send(batch if len(given) == 1 else pa.concat_batches([each for _, each in given]), position)
        write = partial(sink.write, batch, position) if len(given) == 1 else partial(sink.write_joined, given)
        try:
            lacks = trial.call(f"write() of batch {at}", write)
        except ContractBroken:
            # A late write may have landed in between: a query asks again, and goes on behind it.
            found = None if trial.traits.committed_changes else self._committed()
            if found is None or found <= at:
                raise
            self.has = self._written = found
            return
        lacks = end if lacks is None else lacks
        if not isinstance(lacks, int) or isinstance(lacks, bool) or not self.has <= lacks <= max(end, self.has):
            raise trial.broken(
                f"write() of batch {at} must return None, or a number of batches from {self.has} to {end}; got {lacks!r}"
            )
        self.has, self._written = lacks, max(end, lacks)
        kept = sum([logical_bytes(batch) for batch in self._batches[lacks : self._written]])
        if kept > trial.traits.holds_bytes:
            raise trial.broken(
                f"write() of batch {at} leaves {kept} bytes unwritten, more than holds_bytes of its traits, "
                f"{trial.traits.holds_bytes}"
            )

    def show(self, batch: pa.RecordBatch, through: int) -> None:
        self._trial.call("tentative()", lambda: self._sink.tentative(batch, through))

    def undo(self, start: int | None, end: int | None) -> None:
        self._trial.call("undo()", lambda: self._sink.undo(start, end))

    def corrected(self, through: int) -> None:
        self._trial.call("corrected()", lambda: self._sink.corrected(through))

    def _send(self, batch: pa.RecordBatch, position: Position) -> None:
        try:
            self._trial.once("send()", lambda: self._sink.send(batch, position))
        except ContractBroken:
            raise
        except Exception:  # forgotten: write comes all the same
            return

    def follow(self, lines: SinkLines, before: Callable[[SinkLine], None], alone: bool = True) -> None:
        """Write everything, and tell ``before`` the lines that the sink reaches. ``alone``: it must succeed, but for errors of
        ``before``; otherwise the first error ends it, as in a life that was given up."""
        for at, batch in enumerate(self._batches):
            position = Position(self._partition, at)
            if self._trial.traits.sends_ahead:
                self._send(batch, position)
            call = partial(self._sink.write, batch, position)
            try:
                lacks = self._trial.once(f"write() of batch {at}", partial(lines.follow, call, before))
            except Exception:
                if not alone:
                    return
                self._written = at
                raise
            self.has = lacks if lacks is not None else at + 1
        self._written = len(self._batches)

    def repeat(self) -> None:
        """Write the batch once more at which an error came."""
        batch, position = self._batches[self._written], Position(self._partition, self._written)
        try:
            self._trial.once("write()", lambda: self._sink.write(batch, position))
        except ContractBroken:
            raise
        except Exception:  # the primary ends, and the next one goes on
            return

    def write_at(self, at: int) -> None:
        """Write a batch that is not the next: the last one once more, as after an error that came behind its effect, or a later
        one. It may be refused."""
        position = Position(self._partition, at)
        try:
            self._trial.once("write()", lambda: self._sink.write(self._batches[at], position))
        except ContractBroken:
            raise
        except Exception:
            return

    def go_on_late(self, end: int) -> None:
        """Write on, up to batch ``end``, exclusive, in a life that was given up. The first error ends it."""
        for at in range(self._written, end):
            call = partial(self._sink.write, self._batches[at], Position(self._partition, at))
            try:
                self._trial.once("write()", call)
            except ContractBroken:
                raise
            except Exception:
                self._written = len(self._batches)
                return
            self._written = at + 1

    def expect_all_outside(self) -> None:
        if self.has < len(self._batches):
            raise self._trial.broken(
                f"of {len(self._batches)} batches, {len(self._batches) - self.has} are not outside after the last write()"
            )

    def close(self) -> None:
        self._trial.call("close()", self._sink.close)

    def close_anyhow(self) -> None:
        """Close a life that was given up: its errors are only logged."""
        try:
            self._trial.once("close()", self._sink.close)
        except ContractBroken:
            raise
        except Exception:
            return


def _some(rows: Counter[Row]) -> str:
    number, example = rows.total(), ", ".join(next(iter(rows)))
    return f"1 row ({example}) is" if number == 1 else f"{number} rows (such as {example}) are"


def _spread(lines: list[SinkLine], most: int) -> list[SinkLine]:
    """Return up to ``most`` lines from all parts of a list, the last one among them."""
    if len(lines) <= most:
        return lines
    return [lines[(number + 1) * len(lines) // most - 1] for number in range(most)]
