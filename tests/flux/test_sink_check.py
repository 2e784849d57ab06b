"""``flux.testing.check_sink`` passes for sinks that keep their contract, and tells the mistakes planted in copies of them."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import flux
from flux.connectors.files.parquet_sink import ParquetFiles
from flux.dataflow.sink import QueryReaders
from flux.errors import ContractBroken, UsageError
from flux.testing import check_sink

BATCHES = [pa.record_batch({"k": list(range(9 * n, 9 * n + n + 1)), "x": [f"{n}"] * (n + 1)}) for n in range(5)]


class Table(flux.Sink):
    """A sink that stores rows and position in one transaction, in a database in a file."""

    traits = flux.SinkTraits(exactly_once=True)

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self, context: flux.SinkContext) -> None:
        self.context = context
        self.base = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        self.base.execute("pragma synchronous = off")  # nothing here outlives a power failure
        self.base.execute("create table if not exists rows (k, x)")
        self.base.execute("create table if not exists done (place primary key, next)")

    def place(self) -> str:
        return f"{self.context.query} {self.context.number} {self.context.partition}"

    def committed(self, partition: int) -> int | None:
        found = self.base.execute("select next from done where place = ?", [self.place()]).fetchone()
        return 0 if found is None else found[0]

    def is_next(self, position: flux.Position) -> bool:
        return self.committed(position.partition) == position.sequence

    def write(self, batch: pa.RecordBatch, position: flux.Position) -> int | None:
        self.base.execute("begin immediate")
        if self.is_next(position):
            self.store(batch)
            self.base.execute("insert or replace into done values (?, ?)", [self.place(), position.sequence + 1])
        self.base.execute("commit")
        return None

    def store(self, batch: pa.RecordBatch) -> None:
        self.base.executemany("insert into rows values (?, ?)", [tuple(row.values()) for row in batch.to_pylist()])

    def close(self) -> None:
        self.base.close()


def rows_in(path: Path) -> Callable[[], list[Any]]:
    def rows() -> list[Any]:
        base = sqlite3.connect(path)
        found = base.execute("select k, x from rows").fetchall() if path.stat().st_size else []
        base.close()
        return found

    return rows


class Refusing(Table):
    """A late write is an error, and the next write goes on behind it."""

    def write(self, batch: pa.RecordBatch, position: flux.Position) -> int | None:
        self.base.execute("begin immediate")
        if not self.is_next(position):
            self.base.execute("rollback")
            raise KeyError("there already")
        self.base.execute("rollback")
        return super().write(batch, position)


class Joining(Table):
    """A sink that knows rows by their key, and no positions."""

    traits = flux.SinkTraits(exactly_once=True, joins_bytes=1 << 20)

    def open(self, context: flux.SinkContext) -> None:
        super().open(context)
        self.base.execute("create table if not exists seen (place, k, primary key (place, k))")

    def committed(self, partition: int) -> int | None:
        return None

    def write(self, batch: pa.RecordBatch, position: flux.Position) -> int | None:
        self.base.execute("begin immediate")
        for at in range(batch.num_rows):
            row = batch.slice(at, 1)
            try:
                self.base.execute("insert into seen values (?, ?)", [self.place(), row.column("k")[0].as_py()])
            except sqlite3.IntegrityError:
                continue
            self.store(row)
        self.base.execute("commit")
        return None


class Collecting(Table):
    """A table that brings two batches outside at once."""

    traits = flux.SinkTraits(exactly_once=True, holds_bytes=1 << 20, takes_empty=True)

    def open(self, context: flux.SinkContext) -> None:
        super().open(context)
        self.held: list[tuple[pa.RecordBatch, flux.Position]] = []

    def write(self, batch: pa.RecordBatch, position: flux.Position) -> int | None:
        self.held.append((batch, position))
        if batch.num_rows and len(self.held) < 2:
            return self.held[0][1].sequence
        for each in self.held:
            super().write(*each)
        self.held = []
        return None


class Sending(Table):
    traits = flux.SinkTraits(exactly_once=True, sends_ahead=True)

    def send(self, batch: pa.RecordBatch, position: flux.Position) -> list[int]:
        super().write(batch, position)
        return []


class Showing(Table):
    """A table with tentative rows in a table of their own, which readers see as well."""

    def open(self, context: flux.SinkContext) -> None:
        super().open(context)
        self.base.execute("create table if not exists shown (place, through, k, x)")

    def tentative(self, batch: pa.RecordBatch, through: int) -> None:
        rows = [(self.place(), through, *row.values()) for row in batch.to_pylist()]
        self.base.executemany("insert into shown values (?, ?, ?, ?)", rows)

    def undo(self, start: int | None, end: int | None) -> None:
        low, high = (-(1 << 63) if start is None else start), ((1 << 63) - 1 if end is None else end)
        self.base.execute(
            "delete from shown where place = ? and ? < through and through <= ?", [self.place(), low, high]
        )


def shown_in(path: Path) -> Callable[[], list[Any]]:
    def rows() -> list[Any]:
        base = sqlite3.connect(path)
        made = base.execute("select name from sqlite_master where name = 'shown'").fetchall()
        found = base.execute("select k, x from shown").fetchall() if made else []
        base.close()
        return rows_in(path)() + found

    return rows


def by_function(path: Path) -> flux.Sink:
    return flux.stage(partitions=1)(lambda batch: batch)(flow()).foreach_batch(partial(append, path)).sink


def by_committed_function(path: Path) -> flux.Sink:
    def committed(context: flux.SinkContext) -> int | None:
        table = Table(path)
        table.open(context)
        return table.committed(context.partition)

    def write(batch: pa.RecordBatch, position: flux.Position, context: flux.SinkContext) -> None:
        table = Table(path)
        table.open(context)
        try:
            table.write(batch, position)
        finally:
            table.close()

    return flux.stage(partitions=1)(lambda batch: batch)(flow()).foreach_batch(write, committed=committed).sink


def flow() -> Any:
    return flux.source(lambda p: iter(BATCHES), BATCHES[0].schema, 1)


def append(path: Path, batch: pa.RecordBatch, position: flux.Position) -> None:
    table = Table(path)
    table.open(flux.SinkContext("q", 0, "s", 0, 1))
    table.store(batch)


@pytest.mark.parametrize("made", [Table, Refusing, Joining, Collecting, Sending, by_function, by_committed_function])
def test_a_sink_that_keeps_its_contract_passes(made: Callable[[Path], flux.Sink], tmp_path: Path) -> None:
    path = tmp_path / "base"
    path.touch()
    check_sink(made(path), BATCHES, rows_in(path))


def test_a_sink_that_takes_its_tentative_rows_back_passes(tmp_path: Path) -> None:
    path = tmp_path / "base"
    path.touch()
    check_sink(Showing(path), BATCHES, shown_in(path))


class NeverUndoes(Showing):
    def undo(self, start: int | None, end: int | None) -> None: ...


class UndoesTooMuch(Showing):
    def undo(self, start: int | None, end: int | None) -> None:
        super().undo(None, end if start is None else start)


class UndoesItsOwnLife(Showing):
    """A wrong sink that takes back only rows that its own copy has shown."""

    def tentative(self, batch: pa.RecordBatch, through: int) -> None:
        self.showed = True
        super().tentative(batch, through)

    def undo(self, start: int | None, end: int | None) -> None:
        if hasattr(self, "showed"):
            super().undo(start, end)


class ShowsAsWritten(Showing):
    """A wrong sink that stores tentative rows as stable ones, so that no undo finds them."""

    traits = flux.SinkTraits()

    def tentative(self, batch: pa.RecordBatch, through: int) -> None:
        self.store(batch)


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (NeverUndoes, "no longer count"),
        (UndoesTooMuch, "no longer count"),
        (UndoesItsOwnLife, r"the next one has called undo\(None, None\)"),
        (ShowsAsWritten, "no longer count"),
    ],
)
def test_tentative_rows_that_stay_are_told(made: Callable[[Path], flux.Sink], problem: str, tmp_path: Path) -> None:
    path = tmp_path / "base"
    path.touch()
    with pytest.raises(ContractBroken, match=problem):
        check_sink(made(path), BATCHES, shown_in(path))


@pytest.mark.parametrize("by", [(), ("x",)])
def test_the_sink_of_parquet_files_passes(tmp_path: Path, by: tuple[str, ...]) -> None:
    """Check the sink also where files of several folders end together, and a writer is lost between two of them."""
    folder = tmp_path / "out"

    def rows() -> list[Any]:
        found = [
            (path, row) for path in folder.rglob("part-*.parquet") for row in pq.ParquetFile(path).read().to_pylist()
        ]
        return [{**row, "x": path.parent.name.removeprefix("x=")} if by else row for path, row in found]

    check_sink(
        ParquetFiles(str(folder), 1 << 20, by), [BATCHES[0], BATCHES[1], BATCHES[0].slice(0, 0), *BATCHES[2:]], rows
    )


class IgnoresQuery(Table):
    def place(self) -> str:
        return f"{self.context.partition}"


class IgnoresPartition(Table):
    def place(self) -> str:
        return self.context.query


class IgnoresPosition(Table):
    def is_next(self, position: flux.Position) -> bool:
        return True


class TakesGaps(Table):
    """A sink that refuses positions it has, and takes any later position for the next one."""

    def is_next(self, position: flux.Position) -> bool:
        return position.sequence >= (self.committed(position.partition) or 0)


class TakesGapsTwice(Table):
    """A wrong table that takes a batch behind a gap, and goes on in front of the gap."""

    def write(self, batch: pa.RecordBatch, position: flux.Position) -> int | None:
        if position.sequence > (self.committed(position.partition) or 0):
            self.store(batch)
            return None
        return super().write(batch, position)


class TrustsItsLife(Table):
    """A wrong table that looks at the outside when it opens, and counts by itself from then on."""

    def open(self, context: flux.SinkContext) -> None:
        super().open(context)
        self.next = super().committed(context.partition)

    def is_next(self, position: flux.Position) -> bool:
        if position.sequence != self.next:
            return False
        self.next += 1
        return True


class LosesRows(Table):
    def store(self, batch: pa.RecordBatch) -> None:
        super().store(batch.slice(0, 3))


class ChangesRows(Table):
    def store(self, batch: pa.RecordBatch) -> None:
        super().store(batch.set_column(1, "x", pa.array([str(id(batch))] * batch.num_rows)))


class SaysTooLittle(Table):
    def committed(self, partition: int) -> int | None:
        return max((super().committed(partition) or 0) - 1, 0)

    def is_next(self, position: flux.Position) -> bool:
        return super().committed(position.partition) == position.sequence


class SaysTooMuch(Table):
    def committed(self, partition: int) -> int | None:
        found = super().committed(partition) or 0
        return found and found + 1

    def is_next(self, position: flux.Position) -> bool:
        return super().committed(position.partition) == position.sequence


class Forgets(Collecting):
    """A wrong sink that claims a batch to be outside as soon as the batch is collected."""

    traits = flux.SinkTraits(exactly_once=True)

    def write(self, batch: pa.RecordBatch, position: flux.Position) -> int | None:
        super().write(batch, position)
        return None


class HoldsMore(Collecting):
    traits = flux.SinkTraits(exactly_once=True, takes_empty=True, holds_bytes=8)


class KeepsTheLast(Collecting):
    """A wrong sink that does not know when the last batch has come."""

    traits = flux.SinkTraits(exactly_once=True, holds_bytes=1 << 20)


class Shares(Collecting):
    """A wrong sink that collects in one list of the class, for all partitions."""

    shared: ClassVar[list[Any]] = []

    def open(self, context: flux.SinkContext) -> None:
        super().open(context)
        self.held = self.shared


class Counts(Table):
    """A wrong table whose ``write`` returns a number of rows."""

    def write(self, batch: pa.RecordBatch, position: flux.Position) -> int | None:
        super().write(batch, position)
        return 1000 + batch.num_rows


class JoinsByPosition(Table):
    """A wrong table that takes joined batches, and stores the position of the first as if it were alone."""

    traits = flux.SinkTraits(exactly_once=True, joins_bytes=1 << 20)


class SendsTwice(Sending):
    def send(self, batch: pa.RecordBatch, position: flux.Position) -> list[int]:
        self.store(batch)
        return []


class Cleans(Table):
    def close(self) -> None:
        self.base.execute("delete from rows where k = 0")
        super().close()


class ConnectsTooEarly(Table):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.base = sqlite3.connect(path)


class NoJson(Table):
    def prepare(self, partitions: int, kept: Any) -> Any:
        return {1, 2}


class OnlyFirstStart(Table):
    def prepare(self, partitions: int, kept: Any) -> Any:
        if kept is not None:
            raise ValueError("there already")
        return {"made": True}


class Moves(Table):
    def destination(self) -> str:
        return str(time.monotonic_ns())


class CommitsAfterErrors(Table):
    """A wrong table that commits its transaction after an error, too."""

    def write(self, batch: pa.RecordBatch, position: flux.Position) -> int | None:
        self.base.execute("begin immediate")
        try:
            if self.is_next(position):
                self.store(batch)
                self.base.execute("insert or replace into done values (?, ?)", [self.place(), position.sequence + 1])
        finally:
            self.base.execute("commit")
        return None


class PositionFirst(Table):
    """A wrong table that stores the position, and then the rows, in two transactions."""

    def write(self, batch: pa.RecordBatch, position: flux.Position) -> int | None:
        if self.is_next(position):
            self.base.execute("insert or replace into done values (?, ?)", [self.place(), position.sequence + 1])
            self.store(batch)
        return None


class ChecksTooEarly(Table):
    """A wrong table that compares the position before its transaction begins."""

    def write(self, batch: pa.RecordBatch, position: flux.Position) -> int | None:
        if self.is_next(position):
            self.base.execute("begin immediate")
            self.store(batch)
            self.base.execute("insert or replace into done values (?, ?)", [self.place(), position.sequence + 1])
            self.base.execute("commit")
        return None


class Swallows(Table):
    """A wrong table that hides errors."""

    def write(self, batch: pa.RecordBatch, position: flux.Position) -> int | None:
        try:
            return super().write(batch, position)
        except Exception:
            self.base.execute("rollback")
            return None


class IgnoresNumber(Table):
    def place(self) -> str:
        return f"{self.context.query} {self.context.partition}"


class ForgetsAtClose(Table):
    def close(self) -> None:
        self.base.execute("delete from done where place = ?", [self.place()])
        super().close()


class OneThread(Table):
    """A connection for one thread. SQLite goes by numbers of threads, which a later thread may have again."""

    def open(self, context: flux.SinkContext) -> None:
        super().open(context)
        self.thread = threading.current_thread()

    def write(self, batch: pa.RecordBatch, position: flux.Position) -> int | None:
        if threading.current_thread() is not self.thread:
            raise sqlite3.ProgrammingError("SQLite objects created in a thread can only be used in that same thread")
        return super().write(batch, position)


class SaysTrue(Table):
    def write(self, batch: pa.RecordBatch, position: flux.Position) -> int | None:
        super().write(batch, position)
        return True


class CannotSend(Table):
    traits = flux.SinkTraits(exactly_once=True, sends_ahead=True)


class ChangesNothing(Table):
    traits = flux.SinkTraits(committed_changes=True)
    committed = flux.Sink.committed

    def is_next(self, position: flux.Position) -> bool:
        return True


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (CommitsAfterErrors, r"an error has broken write\(\) off before line \d+ of .* more often than given"),
        (PositionFirst, r"an error has broken write\(\) off before line \d+ of .* not outside"),
        (Swallows, r"committed\(\) of the next primary, after an error before line \d+ of .*: the batches between"),
        (ChecksTooEarly, r"given up has stood before line \d+ of .*, while its successor wrote: .* more often"),
        (IgnoresNumber, r"5 batches of the second sink of a query \(number = 1\) that has written none"),
        (
            ForgetsAtClose,
            r"committed\(\) of the next primary after close\(\) says 0: the batches between would be lost",
        ),
        (OneThread, "ProgrammingError: SQLite objects created in a thread can only be used in that same thread"),
        (SaysTrue, r"write\(\) of batch 0 must return None, or a number of batches from 0 to 1; got True"),
        (CannotSend, r"its traits say sends_ahead = True, and it does not define send\(\)"),
        (ChangesNothing, r"its traits say committed_changes = True, and it does not define committed\(\)"),
        (IgnoresQuery, r"committed\(\) says that the outside has \d batches of a query that has written none"),
        (IgnoresPartition, "not outside"),
        (
            IgnoresPosition,
            r"a batch was written again at the position that it has outside: 5 rows .* more often than given",
        ),
        (
            TakesGaps,
            r"batch 2 was written though batch 1 had not come, .* of the next primary says 3: batch 1 would be lost",
        ),
        (TakesGapsTwice, r"batch 2 was written though batch 1 had not come.* more often than given"),
        (
            TrustsItsLife,
            "a primary that was given up has written late, before the same write of its successor: .* more often",
        ),
        (LosesRows, r"two partitions have written everything: 6 rows \(such as 30, '3'\) are not outside"),
        (ChangesRows, "not outside"),
        (
            SaysTooLittle,
            r"the outside has 2 batches, and committed\(\) of the next primary says 1: the batches between",
        ),
        (SaysTooMuch, r"committed\(\) says that batch 2 is outside, though two were written"),
        (Forgets, "not outside"),
        (HoldsMore, r"leaves \d+ bytes unwritten, more than holds_bytes of its traits, 8"),
        (KeepsTheLast, r"of 5 batches, 1 are not outside after the last write\(\)"),
        (Shares, "Shares: "),
        (Counts, r"write\(\) of batch 0 must return None, or a number of batches from 0 to 1; got 1001"),
        (JoinsByPosition, r"two batches were joined \(joins_bytes\)"),
        (SendsTwice, "more often than given, and the sink says exactly_once"),
        (Cleans, r"close\(\) of both: 2 rows \(such as 0, '0'\) are not outside"),
        (ConnectsTooEarly, r"cannot travel to the workers: .*Connect in open\(\)"),
        (NoJson, r"prepare\(\) must return data for JSON"),
        (OnlyFirstStart, r"prepare\(\) of a query that starts again raised ValueError: there already"),
        (Moves, r"destination\(\) differs from copy to copy"),
    ],
)
def test_a_mistake_is_told(kind: type[Table], said: str, tmp_path: Path) -> None:
    path = tmp_path / "base"
    path.touch()
    Shares.shared.clear()
    with pytest.raises(ContractBroken, match=said):
        check_sink(kind(path), BATCHES, rows_in(path))


def test_a_sink_that_is_at_least_once_may_have_rows_twice_and_may_not_lose_any(tmp_path: Path) -> None:
    path = tmp_path / "base"
    path.touch()
    kind = type("Plain", (IgnoresPosition,), {"traits": flux.SinkTraits()})
    check_sink(kind(path), BATCHES, rows_in(path))
    kind = type("Careless", (LosesRows,), {"traits": flux.SinkTraits()})
    with pytest.raises(ContractBroken, match="not outside"):
        check_sink(kind(path), BATCHES, rows_in(path))


def test_calls_without_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="readers fetch their output themselves"):
        check_sink(QueryReaders(1), BATCHES, list)
    with pytest.raises(UsageError, match="three or more batches with rows"):
        check_sink(Table(tmp_path), BATCHES[:2], list)
    with pytest.raises(UsageError, match=r"an instance of a class derived from flux\.Sink"):
        check_sink(Table, BATCHES, list)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "near"),
    [("comitted", "committed"), ("is_transiant", "is_transient"), ("destinaton", "destination"), ("clsoe", "close")],
)
def test_a_misspelt_method_of_a_sink_is_refused(name: str, near: str) -> None:
    with pytest.raises(UsageError, match=rf"Mine\.{name} is not part of flux\.Sink, .* did you mean '{near}'"):
        type("Mine", (flux.Sink,), {name: lambda self: None})


def test_helpers_of_a_sink_may_have_other_names() -> None:
    class Base:
        def comitted(self) -> None: ...

    helpers = ("_comitted", "write_rows", "closed", "connected", "store", "place", "committed_rows")
    type("Mine", (Base, flux.Sink), dict.fromkeys((*helpers, "comitted"), lambda self: None))
