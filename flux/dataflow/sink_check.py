"""A trial of a sink, as queries use it among faults (``flux.testing.check_sink``).

Lives of primaries follow each other: some are lost, some write although they have been given up, batches come again. Each trial
is a query of its own. After each, the rows outside are compared with the rows that were given.
"""

from __future__ import annotations

import copy
import json
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import cloudpickle
import pyarrow as pa

from flux.dataflow.batches import logical_bytes
from flux.dataflow.sink import Position, QueryReaders, Sink, SinkContext
from flux.dataflow.user_code import described
from flux.errors import ContractBroken, UsageError

T = TypeVar("T")
#: The values of a row, each as its text, because not every value can be compared.
Row = tuple[str, ...]

#: Partitions of the stage before the sink. Two show a sink that mixes up partitions.
PARTITIONS = 2
#: A transient error is tried again for this time, with this pause.
PATIENCE_S, PAUSE_S = 20.0, 0.05


def check_sink(
    sink: Sink,
    batches: Sequence[pa.RecordBatch] | Callable[[int], Sequence[pa.RecordBatch]],
    outside: Callable[[], Any],
) -> None:
    """Use a sink as queries would, among lost and late writers, and raise ContractBroken with the first mistake, in words.

    batches  three or more batches of output, for each of two partitions; or a function of the partition that returns them
    outside  a function that returns all rows outside, in any order: an Arrow table, batches, dictionaries, or tuples in the
             order of the columns. Rows from before the call do not matter. Columns that are not outside are not compared

    Tried: the lives of two partitions, a primary that is lost half-way, batches that come again at their positions, a late write
    of a primary that was given up, before and behind the same write of its successor, several queries with one outside, and each
    ability in the traits of the sink. A sink that is at least once may have rows twice, but must lose none."""
    given = batches if callable(batches) else lambda partition: batches
    trial = _SinkTrial(sink, [list(given(partition)) for partition in range(PARTITIONS)], outside)
    trial.settle()
    trial.whole_lives()
    trial.lost_primary()
    if sink.traits.joins_bytes:
        trial.joined_batches()
    if sink.traits.exactly_once:
        trial.repeated_batch()
        trial.late_writes()


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
                return call()
            except Exception as error:
                if not self.pattern.is_transient(error) or time.monotonic() > end:
                    raise self.broken(f"{doing} raised {described(error)}") from error
            time.sleep(PAUSE_S)

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
        expected = Counter(tuple(repr(row[name]) for name in self.names) for row in self._expected)
        if lost := expected - found:
            raise self.broken(f"{when}: {_some(lost)} not outside")
        more = found - expected
        if strange := Counter({row: times for row, times in more.items() if row not in expected}):
            raise self.broken(f"{when}: {_some(strange)} outside that no batch had")
        if more and self.traits.exactly_once:
            raise self.broken(f"{when}: {_some(more)} outside more often than given, and the sink says exactly_once")

    # ---- trials

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
        writers = [self.writer(query, partition, first=True) for partition in range(PARTITIONS)]
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
        lost = self.writer(query, 0, first=True)
        lost.write(0, 2)
        heir = self.writer(query, 0)
        if heir.first is not None:
            if heir.first > 2:
                raise self.broken(f"committed() says that batch {heir.first - 1} is outside, though two were written")
            if heir.first < lost.has:
                raise self.broken(
                    f"write() has said that the outside has {lost.has} batches, and committed() of the next primary says "
                    f"{heir.first}: what was in between would be lost"
                )
        heir.write_all()
        lost.close()
        heir.close()
        self.expect(0)
        self.compare("a primary was lost after two batches, and the next one has written the rest")

    def joined_batches(self) -> None:
        """Let a primary write two batches as one, vanish, and another one write them as they come."""
        query = self.begin()
        lost = self.writer(query, 1, first=True)
        lost.write(0, 2, joined=True)
        heir = self.writer(query, 1)
        heir.write_all()
        heir.close()
        self.expect(1)
        self.compare("two batches were joined (joins_bytes), and the next primary went on from committed()")

    def repeated_batch(self) -> None:
        """Write a batch again at its position."""
        query = self.begin()
        writer = self.writer(query, 0, first=True)
        writer.write_all()
        self.expect(0)
        self.compare("a primary has written everything")
        writer.write_again(len(self.batches[0]) - 1)
        self.compare("a batch was written again at the position that it has outside")
        writer.close()

    def late_writes(self) -> None:
        """Let a primary that was given up write after its successor has asked ``committed``: before the write of the successor at
        that position, and behind it."""
        for before in (True, False):
            query = self.begin()
            given_up = self.writer(query, 1, first=True)
            given_up.write(0, 1)
            heir = self.writer(query, 1)
            begin = heir.first if heir.first is not None else 0
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

    def writer(self, query: str, partition: int, first: bool = False) -> _TrialWriter:
        return _TrialWriter(self, query, partition, first)


class _TrialWriter:
    """One life of a primary of one partition: a copy of the sink, and how far it has come."""

    def __init__(self, trial: _SinkTrial, query: str, partition: int, first: bool) -> None:
        self._trial, self._partition = trial, partition
        self._batches = trial.batches[partition]
        self._sink = copy.deepcopy(trial.pattern)
        context = SinkContext(query, 0, "checked", partition, PARTITIONS)
        trial.call("open()", lambda: self._sink.open(context))
        #: The answer of ``committed``.
        self.first = self._committed()
        if first and self.first:
            raise trial.broken(
                f"committed() says that the outside has {self.first} batches of a query that has written none. Keep positions "
                "with query, number and partition (SinkContext)"
            )
        #: Batches that are outside, as far as this life knows.
        self.has = self.first or 0
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
            self._write(first, end, pa.concat_batches(self._batches[first:end]))
            return
        for at in range(first, end):
            if at >= self._written:
                self._write(at, at + 1, self._batches[at])

    def _write(self, at: int, end: int, batch: pa.RecordBatch) -> None:
        trial, sink, position = self._trial, self._sink, Position(self._partition, at)
        if trial.traits.sends_ahead:
            self._send(batch, position)
        try:
            lacks = trial.call(f"write() of batch {at}", lambda: sink.write(batch, position))
        except ContractBroken:
            # A late write may have landed in between: a query asks again, and goes on behind it.
            found = None if trial.traits.committed_changes else self._committed()
            if found is None or found <= at:
                raise
            lacks = found
        lacks = end if lacks is None else lacks
        if not isinstance(lacks, int) or not self.has <= lacks <= max(end, self.has):
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

    def _send(self, batch: pa.RecordBatch, position: Position) -> None:
        try:
            self._sink.send(batch, position)
        except Exception:  # forgotten: write comes all the same
            return

    def write_again(self, at: int) -> None:
        """Write the batch that was written last once more, as after an error that came behind its effect. It may be refused."""
        try:
            self._sink.write(self._batches[at], Position(self._partition, at))
        except Exception:
            return

    def go_on_late(self, end: int) -> None:
        """Write on, up to batch ``end``, exclusive, in a life that was given up. The first error ends it."""
        for at in range(self._written, end):
            try:
                self._sink.write(self._batches[at], Position(self._partition, at))
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
            self._sink.close()
        except Exception:
            return


def _some(rows: Counter[Row]) -> str:
    number, example = rows.total(), ", ".join(next(iter(rows)))
    return f"1 row ({example}) is" if number == 1 else f"{number} rows (such as {example}) are"
