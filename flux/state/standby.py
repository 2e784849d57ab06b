"""A replica without an operator: a checkpoint of its primary's state, and the order of the steps after it (design: standby).

It acks rows by what its checkpoint covers, and order entries as they come. A checkpoint may hold steps that are not committed
yet. It is kept beside the older one until the primary of the same term says that its steps are committed, and only then
replaces it: a later primary may commit other steps with the same numbers.

``encode`` and ``decode``: its whole content as bytes, and back.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from flux.replica.order_log import NO_CLAIM, Heard, OrderClaim, OrderLog
from flux.state.state_copy import ReplicaState, StreamPosition, decode_state
from flux.wire.messages import Mark, OrderEntry, PartitionOrder, PartitionSeen, end_mark
from partitioning.ids import PartitionKey, StreamId


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint: the state after ``step`` steps.

    ``data`` is the copy as it came, without its signature; None: the empty state at the start. ``next`` has the next batch of
    each stream, 0 for streams that are not named. ``term`` and ``number`` are those of the copy, by which newer ones are known;
    ``at`` is the time of the last step in it, by the wall clock of its primary. ``changes`` are copies of changes after
    ``data``, each after the one before. ``base``: as it came, ``data`` are the changes since the checkpoint of the same term
    and this number; -1: it is whole."""

    step: int = 0
    data: memoryview | None = None
    positions: tuple[StreamPosition, ...] = ()
    term: int = -1
    number: int = -1
    next: dict[StreamId, int] = field(default_factory=dict)
    at: float = 0.0
    changes: tuple[memoryview, ...] = ()
    base: int = -1

    @property
    def nbytes(self) -> int:
        return 0 if self.data is None else sum(piece.nbytes for piece in self.pieces)

    @property
    def pieces(self) -> tuple[memoryview, ...]:
        """The whole copy, and the copies of changes since."""
        return () if self.data is None else (self.data, *self.changes)

    def after(self, base: Checkpoint) -> Checkpoint:
        """Return the whole checkpoint, made from the one to which this one is the changes."""
        assert self.data is not None
        return replace(self, data=base.data, changes=(*base.changes, self.data), base=-1)

    @classmethod
    def of(cls, data: memoryview, state: ReplicaState, term: int, number: int, base: int = -1) -> Checkpoint:
        applied, at = state.replica["applied"], state.replica["now"]
        assert isinstance(applied, int)
        assert isinstance(at, float)
        where = {position.stream: position.next for position in state.positions}
        return cls(applied, data, state.positions, term, number, where, at, base=base)


class OrdersTaken(NamedTuple):
    """Change of a standby: it has taken orders that were news."""

    item: PartitionOrder


class CheckpointTaken(NamedTuple):
    """Change of a standby: it has taken a checkpoint, as it came."""

    checkpoint: Checkpoint


class EarlierFenced(NamedTuple):
    """Change of a standby: it heeds no primary of a term before this one."""

    term: int


class SettledThrough(NamedTuple):
    """Change of a standby: its checkpoint has all rows of a stream through a mark (design: needed-no-more)."""

    stream: StreamId
    mark: Mark


StandbyChange = OrdersTaken | CheckpointTaken | EarlierFenced | SettledThrough


def _told_to_nobody(standby: Standby, change: StandbyChange) -> None:
    """Ignore a change: only a store that outlives its process keeps changes."""


class Standby:
    """A standby of one partition.

    ``taken`` is called with each new checkpoint, ``changed`` with each input that has changed the standby: a fresh standby with
    the same inputs gets the same state."""

    def __init__(
        self,
        key: PartitionKey,
        incarnation: int,
        taken: Callable[[Standby], None] = lambda standby: None,
        changed: Callable[[Standby, StandbyChange], None] = _told_to_nobody,
    ) -> None:
        self.key = key
        self.incarnation = incarnation
        #: The newest checkpoint whose steps are all committed, and a newer one with steps that may not be.
        self.checkpoint = Checkpoint()
        self.beside: Checkpoint | None = None
        #: The steps after the checkpoint.
        self.order = OrderLog()
        #: It is to take over, and takes no more orders.
        self.leads = False
        #: It came from a checkpoint location.
        self.from_vault = False
        #: The outside has the positions of its partition's output below this.
        self.left = 0
        #: The newest claim about committed output.
        self.claim = NO_CLAIM
        #: No primary has said that a step with rows gave no batch of output, or several (design: rows-that-are-gone).
        self.steady = True
        #: As primary: the epoch in which it became primary.
        self.reads_since = -1
        #: No row of a stream through its mark is missing in the checkpoint (design: needed-no-more).
        self.settled: dict[StreamId, Mark] = {}
        self._taken = taken
        self._changed = changed

    def goes_on(self, incarnation: int, taken: Callable[[Standby], None]) -> None:
        """Begin another life of the standby, with the same content."""
        self.incarnation, self._taken = incarnation, taken

    def begin(self, checkpoint: Checkpoint, state: ReplicaState) -> None:
        """Take the first copy after the standby was added. It is safe only when its primary says that the steps in it are
        committed; before, it is dropped with its primary."""
        self.checkpoint = checkpoint
        self.order = OrderLog(checkpoint.step)
        entries, committed = state.replica["entries"], state.replica["committed"]
        assert isinstance(entries, bytes)
        assert isinstance(committed, int)
        self.order.adopt(msgspec.msgpack.decode(entries, type=list[OrderEntry]), committed)
        self._taken(self)

    @property
    def behind_s(self) -> float:
        """Seconds from the last step of its checkpoint to the last step that it knows of."""
        newest = self.order.since(self.order.end - 1)
        begun = self.checkpoint.at or (self.order[self.order.base].now if newest else 0.0)
        return max(newest[-1].now - begun, 0.0) if newest else 0.0

    def position(self, stream: StreamId) -> int:
        """Return the next batch of a stream that its checkpoint lacks."""
        settled = self.settled.get(stream)
        return max(self.checkpoint.next.get(stream, 0), 0 if settled is None else settled.sequence + 1)

    def end_of(self, stream: StreamId) -> int:
        """Return the number of the end of a stream of source rows if the checkpoint knows it; -1: it does not."""
        marks = [Mark(*mark) for each in self.checkpoint.positions if each.stream == stream for mark in each.marks]
        return max([mark.sequence for mark in marks if mark == end_mark(mark.sequence)], default=-1)

    def note_settled(self, stream: StreamId, mark: Mark) -> bool:
        """Note that the checkpoint has all rows of a stream through this mark, and tell whether that is news."""
        known = self.settled.get(stream)
        if known is not None and known.sequence >= mark.sequence:
            return False
        self.settled[stream] = mark
        self._changed(self, SettledThrough(stream, mark))
        return True

    @property
    def positions(self) -> tuple[StreamPosition, ...]:
        """Return the position of each stream behind the checkpoint."""
        found = {position.stream: position for position in self.checkpoint.positions}
        for stream, mark in self.settled.items():
            known = found.get(stream) or StreamPosition(stream, 0, -1, ())
            marks = [each for each in known.marks if each[0] > mark.sequence]
            found[stream] = replace(known, next=max(known.next, mark.sequence + 1), marks=((*mark,), *marks))
        return tuple(found.values())

    def on_orders(self, item: PartitionOrder) -> PartitionSeen | None:
        """Take orders of a primary, and return the answer. None: the primary is deposed, or this standby takes over."""
        order = self.order
        if self.leads:
            return None
        heard = order.on_orders(item.term, item.first, item.entries, item.committed, self.checkpoint.step)
        if not heard:
            return None
        news = heard is Heard.NEWS or item.left > self.left or (self.steady and not item.steady)
        self.left = max(self.left, item.left)
        self.steady = self.steady and item.steady
        self.claim = max(self.claim, OrderClaim(item.checked, item.checksum), key=lambda claim: claim.steps)
        self.settle()
        if news:
            self._changed(self, OrdersTaken(item))
        return PartitionSeen(
            *self.key, self.incarnation, order.term, order.verified, self.checkpoint.step, checked=0, checksum=0,
            left=self.left,
        )  # fmt: skip

    def wants(self, term: int, number: int) -> bool:
        """Tell whether a checkpoint with this name would be news."""
        newest = self.beside or self.checkpoint
        return not self.leads and term >= self.order.term and (term, number) > (newest.term, newest.number)

    def holds(self, term: int, number: int) -> Checkpoint | None:
        """Return the checkpoint with this name, if it is here."""
        for kept in (self.beside, self.checkpoint):
            if kept is not None and (kept.term, kept.number) == (term, number):
                return kept
        return None

    def take(self, checkpoint: Checkpoint) -> bool:
        """Take a checkpoint, and tell whether it is used, now or when its steps are committed.

        Changes are of use only with their base. The base may be the checkpoint beside, and then the result waits there, too."""
        if not self.wants(checkpoint.term, checkpoint.number) or checkpoint.step < self.checkpoint.step:
            return False
        if checkpoint.base >= 0:
            base = self.holds(checkpoint.term, checkpoint.base)
            if base is None:
                return False
            self.beside = checkpoint.after(base)
        else:
            self.beside = checkpoint
        self.settle()
        self._changed(self, CheckpointTaken(checkpoint))
        return True

    def fence(self, term: int) -> None:
        """Accept no primary of an earlier term any more: the content of this standby is given to the next one."""
        if term > self.order.term:
            # Without entries: it learns the term, and nothing else.
            self.order.on_orders(term, 0, [], 0, self.checkpoint.step)
            self.settle()
            self._changed(self, EarlierFenced(term))

    def settle(self) -> None:
        """Check whether the checkpoint beside may replace the other, or is of no use any more."""
        found, order = self.beside, self.order
        if found is None:
            return
        if order.term > found.term:
            self.beside = None  # other steps may have their numbers by now
        elif order.term == found.term and order.committed >= found.step:
            self.checkpoint, self.beside = found, None
            order.trim(found.step)
            self._taken(self)

    def lead(self, epoch: int) -> None:
        """Take over. A checkpoint that may not be committed is of no use."""
        self.leads, self.beside, self.reads_since = True, None, epoch

    def validate(self) -> None:
        """Check the invariants that hold between any two events. AssertionError names the broken one."""
        self.order.validate()
        where = f"standby of {self.key}"
        assert self.order.base == self.checkpoint.step, (
            f"{where}: its order begins at {self.order.base}, its checkpoint ends at {self.checkpoint.step}"
        )
        if self.beside is not None:
            assert self.beside.step >= self.checkpoint.step, f"{where}: an older checkpoint waits"
            assert self.beside.term >= self.order.term, f"{where}: a checkpoint of an earlier primary waits"


_LENGTH = struct.Struct("<Q")
#: Each piece of the checkpoint begins at a multiple of this, so that arrays in it can be used in place.
_ALIGNMENT = 64


class _Head(msgspec.Struct, array_like=True):
    """The head of a standby as bytes: everything but the pieces of its checkpoint, which come behind it."""

    #: Bytes of the whole copy, and of each copy of changes since; none: the standby began empty.
    pieces: list[int]
    #: Term and number of the newest copy in the checkpoint, and the steps in the checkpoint.
    term: int
    number: int
    step: int
    #: The order after the checkpoint, and the end of its committed part.
    entries: list[OrderEntry]
    committed: int
    #: The position in the output below which all output is outside.
    left: int
    #: The newest checksum of the primary's output that it knows, as steps and checksum.
    claim: tuple[int, int] = NO_CLAIM
    #: Edge, producer and mark: the checkpoint has all rows of that stream through the mark.
    settled: list[tuple[int, int, Mark]] = []
    steady: bool = True


_head = msgspec.msgpack.Decoder(_Head)


def encode(standby: Standby) -> memoryview:
    """Encode the whole content of a standby, which the vault gives to a worker that is to lead (design: restore)."""
    kept, order = standby.checkpoint, standby.order
    head = msgspec.msgpack.encode(
        _Head(
            [piece.nbytes for piece in kept.pieces], kept.term, kept.number, kept.step, order.since(order.base), order.committed,
            standby.left, standby.claim, [(*stream, mark) for stream, mark in standby.settled.items()],
            standby.steady,
        )
    )  # fmt: skip
    starts, end = _places(_LENGTH.size + len(head), [piece.nbytes for piece in kept.pieces])
    whole = bytearray(end)
    whole[: _LENGTH.size] = _LENGTH.pack(len(head))
    whole[_LENGTH.size : _LENGTH.size + len(head)] = head
    for start, piece in zip(starts, kept.pieces, strict=True):
        whole[start : start + piece.nbytes] = piece
    return memoryview(whole)


def decode(
    data: memoryview, key: PartitionKey, incarnation: int, taken: Callable[[Standby], None] = lambda standby: None
) -> Standby:
    """Decode a standby with the content that ``encode`` was given. Its checkpoint stays a view into ``data``."""
    (length,) = _LENGTH.unpack_from(data)
    head = _head.decode(data[_LENGTH.size : _LENGTH.size + length])
    standby = Standby(key, incarnation, taken)
    if head.pieces:
        starts, _ = _places(_LENGTH.size + length, head.pieces)
        whole, *changes = [data[start : start + size] for start, size in zip(starts, head.pieces, strict=True)]
        newest = Checkpoint.of(whole, decode_state(changes[-1] if changes else whole), head.term, head.number)
        standby.checkpoint = replace(newest, changes=tuple(changes))
    standby.order = OrderLog(head.step)
    standby.order.adopt(head.entries, head.committed)
    standby.left, standby.claim, standby.steady = head.left, OrderClaim(*head.claim), head.steady
    standby.settled = {StreamId(edge, producer): mark for edge, producer, mark in head.settled}
    return standby


def _places(end: int, sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the beginnings of the pieces that come behind ``end``, and the end of the last one."""
    starts = []
    for size in sizes:
        starts.append(_aligned(end))
        end = starts[-1] + size
    return starts, end


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


class StandbyStore:
    """The store of a worker's standbys: in memory. The vault has another store (design: vault)."""

    def standby(self, key: PartitionKey, incarnation: int, taken: Callable[[Standby], None]) -> Standby:
        """Make a standby that begins here, with the stored content of its partition, or empty. ``taken``: see ``Standby``."""
        return Standby(key, incarnation, taken)

    def put(self, key: PartitionKey, checkpoint: Checkpoint) -> Checkpoint:
        """Keep a checkpoint, and return it as it is kept. The call may come from any thread, and take long."""
        return checkpoint

    def landed(self, key: PartitionKey, checkpoint: Checkpoint) -> None:
        """Note that a checkpoint that was put has been offered to its standby, or is of no use any more."""
