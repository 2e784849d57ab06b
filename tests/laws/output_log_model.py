"""A model of primaries that write an output log one after the other, and of readers that go on by cursor.

Owner, log and reader are those of the product; the disk is that of the event log's model. A primary is killed, or rests while
another one takes over, and is awake again; it opens the log anew then, as the sink does. Power is lost, and the query goes on
from its checkpoint, or begins anew with other results. Row k of a life has the number k, so the right output is known without
any log.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass

import pyarrow as pa

from flux.eventlog.log_owner import LogLimits
from flux.eventlog.log_reader import LogReader
from flux.eventlog.log_store import SegmentId
from flux.eventlog.records import packed_rows
from flux.outputs.log_owner import ExitBatch, OutputLogOwner
from flux.outputs.reader import MissedRows, PartitionScan
from flux.vault.directory_store import TakenOver
from tests.laws.event_log_model import LawBroken, VirtualDisk, VirtualStore

COLUMNS = pa.schema([pa.field("life", pa.int64()), pa.field("row", pa.int64())])
#: Small limits, so that segments end and are removed all the time.
LIMITS = LogLimits(segment_bytes=900, segment_us=400, retain_us=300, retain_bytes=2500, disk_bytes=1 << 40)


class SpiedDisk(VirtualDisk):
    """A disk that calls ``spy`` before it removes a segment."""

    spy: Callable[[], None] = staticmethod(lambda: None)


class SpiedStore(VirtualStore):
    """A store on a spied disk."""

    disk: SpiedDisk

    def drop(self, segments: Collection[SegmentId]) -> None:
        if segments:
            self.disk.spy()
        super().drop(segments)


@dataclass(eq=False)
class Primary:
    """A process that writes the output, or believes so."""

    life: int
    #: Batches of its life that an earlier primary had reported as outside when this one claimed the log.
    told: int
    owner: OutputLogOwner
    under_way: Generator[None, None, None] | None
    opened: bool = False
    #: The next batch to write, and the one behind those under way.
    at: int = 0
    through: int = 0


@dataclass(eq=False)
class CursorReader:
    """A reader, and the position of its cursor."""

    scan: PartitionScan
    cursor: int = 0


class OutputRun:
    """One run of the model."""

    def __init__(
        self,
        seed: int,
        store: type[SpiedStore] = SpiedStore,
        owner: type[OutputLogOwner] = OutputLogOwner,
        scan: type[PartitionScan] = PartitionScan,
    ) -> None:
        self.rng = random.Random(seed)
        self.happened: Counter[str] = Counter()
        self._store, self._owner, self._scan = store, owner, scan
        self.disk = SpiedDisk(self.rng)
        self.disk.spy = self._spy  # type: ignore[method-assign]
        self.now_us = 10_000
        #: By life, the batches that have left: first row and number of rows. They are equal at each replica.
        self.exits: list[list[tuple[int, int]]] = [[]]
        #: By life, the number of batches that replicas keep no more, because a primary has said that they are outside.
        self.told = [0]
        self.primaries: list[Primary] = []
        #: Life and number of each row, by position, as the first reader that came there saw it.
        self.seen: dict[int, tuple[int, int]] = {}
        self._eye = LogReader(store(self.disk, writes=False), "the spy")
        self.readers = [self._reader(0), self._reader(0)]

    def _reader(self, cursor: int) -> CursorReader:
        reader = LogReader(self._store(self.disk, writes=False), "the log", cursor)
        return CursorReader(self._scan(reader, 0, COLUMNS), cursor)

    def go(self, turns: int = 300) -> None:
        for _ in range(turns):
            self.now_us += self.rng.randint(0, 5)
            self._turn()
        self._end()

    def _turn(self) -> None:
        dice = self.rng.random()
        if not self.primaries or dice < 0.015:
            self._start()
        elif dice < 0.03:
            self.primaries.remove(self.rng.choice(self.primaries))
            self.happened["kill"] += 1
        elif dice < 0.035:
            self._lose_power()
        elif dice < 0.2:
            exits = self.exits[-1]
            first = sum(exits[-1]) if exits else 0
            exits.append((first, self.rng.randint(1, 4)))
        elif dice < 0.35:
            self._read(self.rng.choice(self.readers))
        else:
            # The newest primary has more turns; the others rest between any two, and are awake again.
            self._step(self.primaries[-1] if self.rng.random() < 0.7 else self.rng.choice(self.primaries))

    def _start(self) -> None:
        if len(self.primaries) < 3:
            self.primaries.append(self._opened(len(self.exits) - 1))
            self.happened["take-over"] += len(self.primaries) > 1

    def _opened(self, life: int) -> Primary:
        owner = self._owner(self._store(self.disk), "the log", f"life-{life}/0", LIMITS)
        return Primary(life, self.told[life], owner, owner.open())

    def _lose_power(self) -> None:
        self.primaries.clear()
        self.disk.lose_power()
        self._eye = LogReader(self._store(self.disk, writes=False), "the spy", self._eye.next)
        self.readers = [self._reader(each.cursor) for each in self.readers]
        self.happened["power lost"] += 1
        if self.rng.random() < 0.5:  # no checkpoint: the next life has another id, and other results
            self.exits.append([])
            self.told.append(0)
            self.happened["begun anew"] += 1

    def _step(self, primary: Primary) -> None:
        try:
            if primary.under_way is None:
                primary.under_way = self._work(primary)
            next(primary.under_way)
        except StopIteration:
            primary.under_way = None
            self._done(primary)
        except TakenOver:
            self.happened["fenced"] += 1
            self.primaries.remove(primary)
            if self.rng.random() < 0.5:  # a given-up primary that does not know it yet
                self.primaries.insert(0, self._opened(primary.life))

    def _work(self, primary: Primary) -> Generator[None, None, None]:
        exits = self.exits[primary.life]
        primary.through = min(len(exits), primary.at + self.rng.randint(1, 3))
        batches = []
        for sequence in range(primary.at, primary.through):
            first, count = exits[sequence]
            columns = [pa.array([primary.life] * count), pa.array(range(first, first + count))]
            rows = packed_rows(pa.record_batch(columns, schema=COLUMNS))
            batches.append(ExitBatch(sequence, rows, count))
        before = primary.owner.first
        self.happened["repeat"] += bool(batches) and batches[0].sequence < primary.owner.next_exit
        yield from primary.owner.write(batches, self.now_us)
        self.happened["segment removed"] += primary.owner.first > before

    def _done(self, primary: Primary) -> None:
        if primary.opened:
            primary.at = primary.through
            self.told[primary.life] = max(self.told[primary.life], primary.through)
            return
        primary.opened = True
        has = primary.owner.next_exit
        if has < primary.told:
            raise LawBroken(f"{primary.told} batches were said to be outside, and a take-over finds {has}")
        # A write may have been under way when the outside was asked, or an older checkpoint is gone on from.
        primary.at = primary.through = max(has - self.rng.choice((0, 0, 1, 3)), 0)

    def _note(self, position: int, row: tuple[int, int]) -> None:
        if self.seen.setdefault(position, row) != row:
            raise LawBroken(f"position {position} had row {self.seen[position]}, and has {row}")

    def _spy(self) -> None:
        while records := self._eye.read():
            for record in records:
                batch = pa.ipc.read_record_batch(pa.py_buffer(record.batch), COLUMNS)
                for at, row in enumerate(zip(*batch.to_pydict().values(), strict=True)):
                    self._note(record.stored.first + at, row)

    def _read(self, reader: CursorReader) -> None:
        if self.rng.random() < 0.1:  # the reader comes back after a while, at another gateway
            reader.scan = self._reader(reader.cursor).scan
        missed: list[MissedRows] = []
        most = self.rng.randint(1, 6)
        while most and reader.scan.read(missed):
            self._check_missed(reader, missed)
            piece = reader.scan.take(most)
            most -= piece.rows.num_rows
            if piece.first != reader.cursor:
                raise LawBroken(f"a reader at {reader.cursor} got position {piece.first}")
            for at, row in enumerate(zip(*piece.rows.to_pydict().values(), strict=True)):
                self._note(piece.first + at, row)
            reader.cursor = piece.first + piece.rows.num_rows
        self._check_missed(reader, missed)

    def _check_missed(self, reader: CursorReader, missed: list[MissedRows]) -> None:
        for each in missed:
            if each.first != reader.cursor or each.next <= each.first:
                raise LawBroken(f"a reader at {reader.cursor} was told that it missed {each}")
            reader.cursor = each.next
            self.happened["missed"] += 1
        missed.clear()

    def _end(self) -> None:
        """Have a last primary write all that is left, and the readers come to the end."""
        life = len(self.exits) - 1
        primary = self._opened(life)
        while primary.at < len(self.exits[life]) or not primary.opened:
            self._step_to_the_end(primary)
        self._spy()
        for reader in self.readers:
            before = -1
            while before < reader.cursor:
                before = reader.cursor
                self._read(reader)
            if reader.cursor != primary.owner.next:
                raise LawBroken(f"a reader ends at {reader.cursor}, the log at {primary.owner.next}")
        if sorted(self.seen) != list(range(primary.owner.next)):
            raise LawBroken("a position has no row")
        self._check_lives()

    def _step_to_the_end(self, primary: Primary) -> None:
        for _ in primary.under_way or self._work(primary):
            pass
        primary.under_way = None
        self._done(primary)

    def _check_lives(self) -> None:
        for life, exits in enumerate(self.exits):
            rows = [row for _, (of, row) in sorted(self.seen.items()) if of == life]
            told = sum(count for _, count in exits[: self.told[life]])
            if rows != list(range(len(rows))) or len(rows) < told:
                raise LawBroken(f"life {life} has rows {rows}, and {told} were said to be outside")
            self.happened["rows"] += len(rows)
