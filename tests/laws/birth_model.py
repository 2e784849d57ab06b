"""A model of a stream that comes to a running source of a query with a checkpoint location, for random schedules (design:
kept-births).

A reader gives rows 0, 1, 2... to an old stream, and from some row on to a new one. The location has the version with the new
stream from some event on, and carries out the orders of the product's ``SourceBirths`` one after the other. Meanwhile checkpoints
are made, the reader is lost alone, and everything is lost: then consumers go on from their checkpoints, and the controller from
the location. A removal of the new stream is kept now and then, and taken back, because a process has refused it.

``WITHOUT`` names the rules that a model may be made without, each of which a law must catch.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable

from controller.course.plan_requests import BirthsToKeep
from controller.course.source_births import SourceBirths
from flux.wire.control import EdgeStored
from flux.wire.messages import Mark
from partitioning.ids import StreamId

OLD, NEW = 0, 1
ROWS = 60
#: Events of a schedule after which it must have come to its end.
EVENTS_MAX = 20_000
#: The share of the orders that the location cannot carry out.
FAILS = 0.2
WITHOUT = ("kept before told", "births of the location", "births of versions", "answer when kept")
STREAM = StreamId(NEW, 0)


class BirthLawBroken(AssertionError):
    """A law that a schedule has broken."""


class ModelConsumer:
    """The consumer of one stream, with its applied rows, and the rows in its checkpoint."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.kept = 0

    @property
    def next(self) -> int | None:
        """The row for which the consumer waits; None before its first row."""
        return self.rows[-1] + 1 if self.rows else None

    def take(self, row: int) -> None:
        if self.next is not None and row < self.next:
            return  # the consumer has the row
        if self.next is not None and row > self.next:
            raise BirthLawBroken(f"row {row} comes behind row {self.next - 1}")
        self.rows.append(row)

    def lose(self) -> None:
        del self.rows[self.kept :]


class ModelReader:
    """One life of the reader."""

    def __init__(self, at: int | None) -> None:
        #: The row that comes next; None: not known before the birth of the new stream is told.
        self.at = at
        #: The birth that the reader reports; None: there is nothing to report.
        self.reports: int | None = None
        #: The birth that the reader was told.
        self.told: int | None = None


class BirthModel:
    """One schedule, by a seed."""

    def __init__(self, seed: int, without: Iterable[str] = ()) -> None:
        self.without = frozenset(without)
        self.random = random.Random(seed)
        self.old, self.new = ModelConsumer(), ModelConsumer()
        #: The document of the location: the stream is in the plan, and its birth.
        self.grown = False
        self.kept: int | None = None
        self.births = SourceBirths("kept before told" not in self.without)
        #: Orders to the location: births to keep, a version without the stream ("removal"), and the births of the version before.
        self.orders: deque[BirthsToKeep | str | tuple[EdgeStored, ...]] = deque()
        self.removes = self.removed = False
        #: Results of orders that the controller has not heard of.
        self.results: deque[tuple[BirthsToKeep, str]] = deque()
        self.reader = ModelReader(0)
        #: The first birth that any reader was told; rows that any reader had given when the addition was answered.
        self.first_told: int | None = None
        self.read = 0
        self.answered: int | None = None

    # ---- events

    def run(self) -> None:
        grows_at = self.random.randrange(5, 120)
        losses = self.random.randrange(4)
        for event in range(EVENTS_MAX):
            if event == grows_at:
                self._grow()
            self.random.choice([self._read, self._read, self._checkpoint, self._report, self._keep, self._hear])()
            if self.grown and self.random.random() < (0.3 if self.removes else 0.01):
                self._remove()
            if self.random.random() < 0.01:
                self._lose_reader()
            elif losses and self.random.random() < 0.02:
                losses -= 1
                self._lose_everything()
                if self.removed:
                    return None  # the removal is done
            if self.grown and self.reader.at == ROWS and self.reader.told is not None:
                return self._check_end()
        raise BirthLawBroken(f"the query stands still: read {self.read}, told {self.reader.told}")

    def _grow(self) -> None:
        """Let the reader follow a table with the version of the new stream, which the location has kept."""
        self.grown = True
        self.reader.reports = self.reader.at

    def _read(self) -> None:
        reader = self.reader
        if reader.at is None or reader.at == ROWS:
            return
        row, reader.at = reader.at, reader.at + 1
        self.read = max(self.read, reader.at)
        self.old.take(row)
        if reader.told is not None:
            self._send_new()

    def _send_new(self) -> None:
        """Send all rows of the new stream that its consumer lacks, as its log has them."""
        reader = self.reader
        assert reader.told is not None
        assert reader.at is not None
        for row in range(max(reader.told, self.new.next or 0), reader.at):
            self.new.take(row)

    def _checkpoint(self) -> None:
        for consumer in (self.old, self.new):
            consumer.kept = len(consumer.rows)

    def _report(self) -> None:
        number = self.reader.reports
        if number is None or self.reader.told is not None:
            return
        self._tell(self.births.report(EdgeStored(NEW, 0, number, Mark(number - 1, 0)), 0.0))
        if "answer when kept" in self.without:
            self._answer()
        if self.births.of(STREAM) is not None:
            self._tell([birth for birth in [self.births.of(STREAM)] if birth is not None])
        order = self.births.next_order()
        if order is not None:
            self.orders.append(order)

    def _keep(self) -> None:
        """Let the location carry out the next order, or fail to."""
        if not self.orders:
            return
        order = self.orders.popleft()
        if not isinstance(order, BirthsToKeep):
            self.removed = order == "removal"
            self.kept = order[0].number if order and isinstance(order, tuple) else None
            return
        if self.removed:
            self.results.append((order, ""))  # the plan of the location has no such stream
            return
        failed = self.random.random()
        if failed > FAILS / 2:  # half of the failures leave the birth there
            self.kept = order.births[0].number
        self.results.append((order, "no space left" if failed < FAILS else ""))

    def _remove(self) -> None:
        """Order a version without the stream, or take it back."""
        stays = () if "births of versions" in self.without else self.births.known
        self.orders.append(stays if self.removes else "removal")
        self.removes = not self.removes

    def _hear(self) -> None:
        if self.results:
            self._tell(self.births.kept(*self.results.popleft()))

    def _tell(self, births: Iterable[EdgeStored]) -> None:
        """Tell the reader a birth that is stored, and answer the addition."""
        for birth in births:
            if self.first_told is None:
                self.first_told = birth.number
            if birth.number != self.first_told:
                raise BirthLawBroken(
                    f"the stream begins with row {birth.number}, and with row {self.first_told} before"
                )
            self._answer()
            self.reader.told = birth.number
            if self.reader.at is None:
                self._begin()
            else:
                self._send_new()

    def _answer(self) -> None:
        if self.answered is None:
            self.answered = self.read

    # ---- losses

    def _lose_reader(self) -> None:
        """Lose the reader. Another one goes on from the place of the consumers, and knows the births known to the controller."""
        self.reader = ModelReader(None)
        stored = self.births.of(STREAM)
        if not self.grown or stored is not None:
            self.reader.told = None if stored is None else stored.number
            self._begin()
        else:
            self.reader.reports = self.old.next or 0

    def _begin(self) -> None:
        wanted = [self.old.next or 0]
        if self.reader.told is not None:
            wanted.append(self.new.next or self.reader.told)
        self.reader.at = min(wanted)

    def _lose_everything(self) -> None:
        while self.orders and self.random.random() < 0.5:  # the driver may be lost between any two steps
            self._keep()
        self.orders.clear()
        self.grown = self.grown and not self.removed
        self.removes = False
        self.results.clear()
        for consumer in (self.old, self.new):
            consumer.lose()
        self.births = SourceBirths(self.births.keeps)
        if self.kept is not None and "births of the location" not in self.without:
            self.births.begin([EdgeStored(NEW, 0, self.kept, Mark(self.kept - 1, 0))])
            if self.first_told is None:
                self.first_told = self.kept
        self._lose_reader()

    # ---- laws

    def _check_end(self) -> None:
        self._send_new()
        first = self.first_told
        assert first is not None
        if self.new.rows != list(range(first, ROWS)):
            raise BirthLawBroken(f"the new stream brought {self.new.rows}, not rows {first} to {ROWS - 1}")
        if self.old.rows != list(range(ROWS)):
            raise BirthLawBroken(f"the old stream brought {self.old.rows}")
        if self.answered is not None and first > self.answered:
            raise BirthLawBroken(f"the stream begins with row {first}, and {self.answered} were read at the answer")
