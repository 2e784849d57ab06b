"""Standbys that outlive their process: a standby's inputs are written down before its answers leave (design: journal, vault).

A standby is a state machine, and the journal has its inputs. Fresh standbys that read these inputs get the same state. Law:
no answer of a standby leaves before ``flush``.

The inputs are records. They are written in frames, a frame into a segment, and segments follow one another in a ``Store``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from flux.errors import SnapshotError
from flux.replica.order_log import OrderClaim, OrderLog
from flux.state.standby import (
    Checkpoint,
    CheckpointTaken,
    EarlierFenced,
    OrdersTaken,
    SettledThrough,
    Standby,
    StandbyChange,
    StandbyStore,
)
from flux.state.state_copy import decode_state
from flux.vault.framing import framed, frames_from, is_followed
from flux.wire.messages import Mark, OrderEntry, PartitionOrder
from partitioning.ids import PartitionKey, StreamId


class Seen(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """Record that the vault goes by the table of this epoch."""

    epoch: int


class Ordered(msgspec.Struct, frozen=True, array_like=True, tag="o"):
    """Record of orders of a primary that were news."""

    item: PartitionOrder


class FencedRecord(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """Record that primaries of earlier terms are not heeded any more."""

    stage: int
    partition: int
    term: int


class KeptState(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint, in ``data`` or in a ``file``."""

    #: The number of steps in the state. ``step``, ``term``, ``number``, ``at`` and ``base`` are those of ``Checkpoint``.
    step: int
    term: int
    number: int
    at: float
    #: The highest incarnation of any stream in it.
    highest: int
    #: Size and CRC-32 of the state.
    nbytes: int
    crc: int
    #: Name of its file; empty: the state is in ``data``.
    file: str = ""
    data: bytes = b""
    base: int = -1


class Taken(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """Record that a standby has taken a checkpoint."""

    stage: int
    partition: int
    kept: KeptState


class Through(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    """Record that the checkpoint of a partition has all rows of a stream through a mark (design: needed-no-more)."""

    stage: int
    partition: int
    edge: int
    producer: int
    mark: Mark


class Whole(msgspec.Struct, frozen=True, array_like=True, tag="w"):
    """Record of all that is held of a partition, at the beginning of a segment."""

    stage: int
    partition: int
    #: The pieces of the committed checkpoint: the whole copy, if there is one, and those of the changes after it.
    checkpoint: list[KeptState]
    #: The pieces of the checkpoint that waits for its commits.
    beside: list[KeptState]
    #: The step at which ``entries`` begin.
    step: int
    term: int
    #: Ends of the verified and of the committed part of the order.
    verified: int
    committed: int
    #: The position in the output below which all output is outside.
    left: int
    entries: list[OrderEntry]
    claim: tuple[int, int] = (0, 0)
    #: Edge, producer and mark: the checkpoint has all rows of that stream through the mark.
    settled: list[tuple[int, int, Mark]] = []
    #: No primary has said that a step with rows gave no batch of output, or several.
    steady: bool = True


class Removed(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """Record that the stage of a partition was removed from the plan: nothing is held of the partition any more."""

    stage: int
    partition: int


Record = Seen | Ordered | FencedRecord | Taken | Through | Whole | Removed
_decoder = msgspec.msgpack.Decoder(list[Record])


def frame(records: Sequence[Record]) -> bytes:
    """Make the frame of records that become durable at once."""
    return framed(msgspec.msgpack.encode(records))


def frames(data: memoryview, where: str) -> Iterator[list[Record]]:
    """Yield the frames of a segment, but for the torn one at its end.

    Only the last frame may be torn: its records have never been acked. The first frame of a segment is durable before the segment
    has its name. A damaged frame with a whole one anywhere behind it is damage to acked records: SnapshotError. So is a whole
    frame whose records this release does not know."""
    start = 0
    for found in frames_from(data, start):
        try:
            decoded = _decoder.decode(found.content)
        except msgspec.ValidationError as error:
            raise SnapshotError(
                f"{where} was written by another release of Flux: {error}. Start that release"
            ) from error
        yield decoded
        start = found.end
    if start == 0 or is_followed(data, start):
        raise SnapshotError(
            f"{where} is damaged at byte {start:,} of {len(data):,}, and that was whole once: output that was shown outside "
            "since then cannot be repeated from it. Restore the directory from a copy, or begin anew in an empty one"
        )


#: Checkpoints of up to this size are written into the journal: a file of its own needs a flush of its own.
INLINE_BYTES = 32 << 10
#: A segment of the journal is followed by another one when it has grown by SEGMENT_BYTES since it began, and by at least
#: SEGMENT_TIMES its first size. The next program reads the newest one before anything else: a second for these bytes of small
#: records.
SEGMENT_BYTES, SEGMENT_TIMES = 4 << 20, 4


class Store(Protocol):
    """A place that survives its processes, and does not know the meaning of its content."""

    @property
    def generation(self) -> int:
        """Return the number of this opening: another one each time that the place is opened."""

    def newest(self) -> memoryview | None:
        """Return the newest segment of the journal; None: there is none."""

    def begin(self, data: bytes) -> None:
        """Begin a new segment with this data, which is durable when the call returns. Earlier segments are removed."""

    def append(self, data: bytes) -> None:
        """Append to the newest segment."""

    @property
    def crowded(self) -> bool:
        """Return whether the newest segment has too many pieces: then another one should begin, however small it is."""

    def flush(self) -> None:
        """Make appended data durable before this call returns. QueryFailed: another process has taken over the place."""

    def check(self) -> None:
        """Raise QueryFailed if another process has taken over the place, or if the place was moved or removed."""

    @property
    def look_s(self) -> float:
        """Return the seconds between two calls of ``check`` while nothing is flushed."""

    def put(self, name: str, data: memoryview) -> memoryview:
        """Write a file, whole and durable when this returns. Returns the same bytes, as they are kept. From any thread."""

    def get(self, name: str) -> memoryview | None: ...

    def remove(self, names: Collection[str]) -> None: ...

    def names(self) -> list[str]:
        """Return the names of the files that were put."""


@dataclass(frozen=True)
class Written(Checkpoint):
    """A checkpoint as it is in the journal. ``data`` is empty while the journal is read, because later checkpoints replace most
    of those read. ``earlier`` are the pieces before the newest one, if the newest is only changes."""

    as_kept: KeptState = field(kw_only=True)
    earlier: tuple[KeptState, ...] = field(kw_only=True, default=())

    def after(self, base: Checkpoint) -> Checkpoint:
        made = super().after(base)
        assert isinstance(made, Written)
        assert isinstance(base, Written)
        return replace(made, earlier=base.all_kept)

    @property
    def all_kept(self) -> tuple[KeptState, ...]:
        return (*self.earlier, self.as_kept)


def whole_of(standby: Standby) -> Whole:
    """Make the record of all that a standby holds."""
    order = standby.order
    checkpoint = [*standby.checkpoint.all_kept] if isinstance(standby.checkpoint, Written) else []
    beside = [*standby.beside.all_kept] if isinstance(standby.beside, Written) else []
    return Whole(
        *standby.key, checkpoint=checkpoint, beside=beside, step=order.base, term=order.term, verified=order.verified,
        committed=order.committed, left=standby.left, entries=order.since(order.base), claim=standby.claim,
        settled=[(*stream, mark) for stream, mark in standby.settled.items()], steady=standby.steady,
    )  # fmt: skip


def restore(standby: Standby, whole: Whole, load: Callable[[KeptState], Checkpoint]) -> None:
    """Give a standby the content of a record."""

    def chain(pieces: list[KeptState]) -> Checkpoint | None:
        found: Checkpoint | None = None
        for piece in pieces:
            found = load(piece) if found is None else load(piece).after(found)
        return found

    standby.checkpoint, standby.beside = chain(whole.checkpoint) or Checkpoint(), chain(whole.beside)
    standby.order = OrderLog(whole.step)
    standby.order.adopt(whole.entries, whole.committed)
    standby.order.term, standby.order.verified, standby.left = whole.term, whole.verified, whole.left
    standby.claim, standby.steady = OrderClaim(*whole.claim), whole.steady
    standby.settled = {StreamId(edge, producer): mark for edge, producer, mark in whole.settled}


def files_of(standby: Standby) -> set[str]:
    """Return the names of the files that a standby needs."""
    held = (standby.checkpoint, standby.beside)
    return {piece.file for kept in held if isinstance(kept, Written) for piece in kept.all_kept} - {""}


class Journal(StandbyStore):
    """The store of standbys that are written down. SnapshotError: the kept data cannot be read."""

    def __init__(self, store: Store, where: str = "the journal") -> None:
        #: By partition.
        self.standbys: dict[PartitionKey, Standby] = {}
        #: No epoch, term or incarnation in the kept data is above this; -1: nothing is kept.
        self.highest = -1
        #: ``bytes``: all written bytes, files too. ``order_bytes``: the bytes of frames that have nothing but orders.
        #: ``order_slices``: the slices that those orders name.
        self.bytes = self.order_bytes = self.order_slices = 0
        #: Errors about damaged checkpoints that were left out, because no process was told that they are kept.
        self.left_out: list[str] = []
        self._store = store
        self._where = where
        self._pending: list[Record] = []
        self._put: set[str] = set()  # existing files, needed or not
        self._touched: set[PartitionKey] = set()  # partitions whose files may have become needless
        self._began = self._size = 0
        #: Whether records are read: the changes that follow from them are in the journal already.
        self._reads = True
        self._read(store.newest())
        self._reads = False
        self._put.update(store.names())

    def begin(self) -> None:
        """Write from now on, to a new segment; remove files that are not needed."""
        self._segment()
        needed = {file for kept in self.standbys.values() for file in files_of(kept)}
        self._store.remove(self._put - needed)
        self._put &= needed

    def keep_only(self, exists: Callable[[PartitionKey], bool]) -> None:
        """Forget the partitions of stages that are removed from the plan. Their files go when that is durable: a journal without
        the record cannot be read without the files."""
        for key in [key for key in self.standbys if not exists(key)]:
            del self.standbys[key]
            self._note(Removed(*key))

    # ---- as a store of standbys

    def standby(self, key: PartitionKey, incarnation: int, taken: Callable[[Standby], None]) -> Standby:
        kept = self._of(key)
        kept.goes_on(incarnation, taken)
        return kept

    def put(self, key: PartitionKey, checkpoint: Checkpoint) -> Checkpoint:
        data, name = checkpoint.data, ""
        assert data is not None
        crc, highest = zlib.crc32(data), max((position.incarnation for position in checkpoint.positions), default=-1)
        if len(data) > INLINE_BYTES:
            # The name has the generation, because an earlier writer that was not fenced yet may write the same checkpoint.
            name = f"{key.stage}-{key.partition}-{checkpoint.term}-{checkpoint.number}-{self._store.generation}"
            data = self._store.put(name, data)
        kept = KeptState(
            step=checkpoint.step, term=checkpoint.term, number=checkpoint.number, at=checkpoint.at, highest=highest,
            nbytes=len(data), crc=crc, file=name, data=b"" if name else bytes(data), base=checkpoint.base,
        )  # fmt: skip
        return Written(
            step=checkpoint.step, data=data, positions=checkpoint.positions, term=checkpoint.term,
            number=checkpoint.number, next=checkpoint.next, at=checkpoint.at, base=checkpoint.base, as_kept=kept,
        )  # fmt: skip

    def landed(self, key: PartitionKey, checkpoint: Checkpoint) -> None:
        """Count a checkpoint's file, after the checkpoint was offered to its standby."""
        if isinstance(checkpoint, Written) and checkpoint.as_kept.file:
            self.bytes += checkpoint.as_kept.nbytes
            self._put.add(checkpoint.as_kept.file)
            self._touched.add(key)

    # ---- writing

    def see(self, epoch: int) -> None:
        self._note(Seen(epoch))

    def _on_change(self, standby: Standby, change: StandbyChange) -> None:
        if self._reads:
            return
        match change:
            case OrdersTaken(item):
                self._note(Ordered(item))
            case CheckpointTaken(checkpoint):
                assert isinstance(checkpoint, Written)
                self._note(Taken(*standby.key, checkpoint.as_kept))
            case EarlierFenced(term):
                self._note(FencedRecord(*standby.key, term))
            case SettledThrough(stream, mark):
                self._note(Through(*standby.key, *stream, mark))

    def _note(self, record: Record) -> None:
        self._pending.append(record)
        self._highest_of(record)
        if not isinstance(record, Seen | Ordered | Whole):
            self._touched.add(PartitionKey(record.stage, record.partition))
        elif isinstance(record, Ordered):
            self._touched.add(PartitionKey(record.item.stage, record.item.partition))

    @property
    def pending(self) -> bool:
        """Return whether any record is not durable yet."""
        return bool(self._pending)

    def flush(self) -> None:
        """Make all pending records durable."""
        if not self._pending:
            return
        data = frame(self._pending)
        self._store.append(data)
        self._store.flush()
        if all(isinstance(record, Ordered) for record in self._pending):
            self.order_bytes += len(data)
            self.order_slices += sum(
                len(entry.slices)
                for record in self._pending
                if isinstance(record, Ordered)
                for entry in record.item.entries
            )
        self._pending.clear()
        self.bytes, self._size = self.bytes + len(data), self._size + len(data)
        if self._size > max(SEGMENT_BYTES, SEGMENT_TIMES * self._began) or self._store.crowded:
            self._segment()
        self._remove_needless()

    @property
    def look_s(self) -> float:
        return self._store.look_s

    def check(self) -> None:
        """Raise QueryFailed if another program would not find the flushed data at the place."""
        self._store.check()

    def move_to(self, store: Store) -> None:
        """Write all that is held to another place, and go on there: the content of this place is gone."""
        self._store = store
        for kept in self.standbys.values():
            for held in (kept.checkpoint, kept.beside):
                if isinstance(held, Written) and held.data is not None:
                    for piece, data in zip(held.all_kept, (held.data, *held.changes), strict=True):
                        if piece.file:
                            store.put(piece.file, data)
        self._segment()

    def end(self) -> None:
        """Leave a segment with the present content of the standbys, in place of the history: the next program reads it at once.

        QueryFailed: another program has the place, or it is gone. After an error the earlier segment counts."""
        self.flush()
        if self._size > SEGMENT_TIMES * self._began:
            self._store.check()  # the path may lead to another place by now
            self._segment()

    def _segment(self) -> None:
        """Begin a new segment with all that is held."""
        data = frame([Seen(self.highest), *(whole_of(kept) for kept in self.standbys.values())])
        self._store.begin(data)
        self.bytes += len(data)
        self._began = self._size = len(data)
        self._touched.update(self.standbys)

    def _remove_needless(self) -> None:
        if self._put and self._touched:
            needed: set[str] = set()
            for key in self._touched & self.standbys.keys():
                needed |= files_of(self.standbys[key])
            of_touched = {(str(stage), str(partition)) for stage, partition in self._touched}
            gone = {name for name in self._put - needed if tuple(name.split("-")[:2]) in of_touched}
            if gone:
                self._store.remove(gone)
                self._put -= gone
        self._touched.clear()

    # ---- reading

    def _of(self, key: PartitionKey) -> Standby:
        if key not in self.standbys:
            self.standbys[key] = Standby(key, -1, changed=self._on_change)
        return self.standbys[key]

    def _read(self, data: memoryview | None) -> None:
        if data is None:
            return
        for records in frames(data, self._where):
            for record in records:
                self._replay(record)
        for kept in self.standbys.values():
            kept.checkpoint = self._loaded(kept.key, kept.checkpoint)
            kept.beside = self._loaded_beside(kept.key, kept.beside)

    def _replay(self, record: Record) -> None:
        self._highest_of(record)
        match record:
            case Ordered(item):
                self._of(PartitionKey(item.stage, item.partition)).on_orders(item)
            case Taken(stage, partition, kept):
                self._of(PartitionKey(stage, partition)).take(self._described(kept))
            case FencedRecord(stage, partition, term):
                self._of(PartitionKey(stage, partition)).fence(term)
            case Through(stage, partition, edge, producer, mark):
                self._of(PartitionKey(stage, partition)).note_settled(StreamId(edge, producer), mark)
            case Removed(stage, partition):
                self.standbys.pop(PartitionKey(stage, partition), None)
            case Whole(stage, partition):
                restore(self._of(PartitionKey(stage, partition)), record, self._described)

    @staticmethod
    def _described(kept: KeptState) -> Checkpoint:
        return Written(
            kept.step, memoryview(b""), (), kept.term, kept.number, {}, kept.at, base=kept.base, as_kept=kept
        )  # fmt: skip

    def _loaded_beside(self, key: PartitionKey, found: Checkpoint | None) -> Checkpoint | None:
        """Load a checkpoint that waits for its commits, or return None if it is damaged. Producers keep rows until the checkpoint
        is committed, so the checkpoint before it will do."""
        try:
            return None if found is None else self._loaded(key, found)
        except SnapshotError as error:
            self.left_out.append(str(error))
            return None

    def _loaded(self, key: PartitionKey, found: Checkpoint) -> Checkpoint:
        if not isinstance(found, Written):
            return found
        whole, *changes = [self._piece(key, piece) for piece in found.all_kept]
        state = Checkpoint.of(whole, decode_state(changes[-1] if changes else whole), found.term, found.number)
        return Written(
            state.step, whole, state.positions, state.term, state.number, state.next, state.at, tuple(changes),
            as_kept=found.as_kept, earlier=found.earlier,
        )  # fmt: skip

    def _piece(self, key: PartitionKey, kept: KeptState) -> memoryview:
        data = self._store.get(kept.file) if kept.file else memoryview(kept.data)
        if data is None or len(data) != kept.nbytes or zlib.crc32(data) != kept.crc:
            what = "is not there" if data is None else "is damaged"
            raise SnapshotError(
                f"{self._where}: the checkpoint of partition {key.partition} of stage {key.stage} ({kept.file}, {kept.nbytes:,} "
                f"bytes) {what}. Restore the directory from a copy, or begin anew in an empty one"
            )
        return data

    def _highest_of(self, record: Record) -> None:
        match record:
            case Seen(epoch):
                seen = [epoch]
            case Ordered(item):
                seen = [item.term]
            case Taken(_, _, kept):
                seen = [kept.term, kept.highest]
            case FencedRecord() | Whole():
                seen = [record.term]
            case Through() | Removed():
                return
        self.highest = max(self.highest, *seen)
