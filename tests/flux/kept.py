"""Parts that tests of the vault's journal share: checkpoints and orders of a partition, the content of a standby as a
value, and a place in memory that says when a crash could come."""

from __future__ import annotations

import contextlib
import pickle
import struct
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from flux.state.standby import Checkpoint, Standby
from flux.state.state_copy import ReplicaState, StreamPosition, decode_state
from flux.vault import journal as journal_module
from flux.vault.journal import Journal
from flux.wire.messages import OrderEntry, PartitionOrder
from partitioning.ids import PartitionKey, StreamId

KEY, OTHER = PartitionKey(0, 3), PartitionKey(1, 0)
STREAM = StreamId(0, 0)
#: Bytes of a state that is too large for the journal, and goes into a file of its own.
LARGE = 40_000
EMPTY = Standby(KEY, 0)


def entry(step: int, term: int = 1) -> OrderEntry:
    """Make the entry of a step. Steps of another term have other slices."""
    return OrderEntry(float(step), float(term), [(0, 0, step), (0, term, step)])


def orders(
    term: int, first: int, count: int, committed: int = 0, left: int = 0, key: PartitionKey = KEY
) -> PartitionOrder:
    return PartitionOrder(
        *key, 0, term, first, [entry(step, term) for step in range(first, first + count)], committed, left
    )


def checkpoint(
    step: int,
    term: int,
    number: int,
    incarnation: int = 0,
    size: int = 0,
    text: bytes = b"s",
    base: int = -1,
    left: int | None = None,
) -> Checkpoint:
    """Make a checkpoint as it comes from a primary, with ``size`` bytes of operator state. A ``base`` of at least 0
    makes it one of changes since the checkpoint with that number."""
    about: dict[str, object] = {"applied": step, "now": float(step), "entries": b"\x90", "committed": step}
    about["exit"] = None if left is None else (step, left, [])
    pickled = pickle.dumps(ReplicaState(about, (StreamPosition(STREAM, step, incarnation, ((step, 7),)),), ()))
    data = struct.pack("<Q", len(pickled)) + pickled + b"B" + text * size
    return Checkpoint.of(memoryview(data), decode_state(data), term, number, base)


def take(journal: Journal, given: Checkpoint, key: PartitionKey = KEY) -> bool:
    """Take a checkpoint as ``flux.state.receiver`` does if the checkpoint is news when its first part comes."""
    kept = journal.put(key, given)
    taken = standby(journal, key).take(kept)
    journal.landed(key, kept)
    return taken


def standby(journal: Journal, key: PartitionKey = KEY) -> Standby:
    return journal.standby(key, 0, lambda _: None)


def held_checkpoint(kept: Checkpoint | None) -> Any:
    if kept is None:
        return None
    data = [bytes(piece) for piece in kept.pieces]
    return kept.step, kept.term, kept.number, kept.at, kept.next, kept.positions, data


def held(kept: Standby) -> Any:
    """Return all that a standby holds, as one value."""
    kept.validate()
    order = kept.order
    about = (order.base, order.end, order.term, order.verified, order.committed, order.since(order.base), kept.left)
    return held_checkpoint(kept.checkpoint), held_checkpoint(kept.beside), *about


def all_held(journal: Journal) -> dict[PartitionKey, Any]:
    """Return the content of each standby that has any."""
    return {key: held(kept) for key, kept in journal.standbys.items() if held(kept) != held(EMPTY)}


@dataclass
class Memory:
    """A ``flux.vault.journal.Store`` in memory, which can crash."""

    #: The newest segment as far as it is durable.
    segment: bytes = b""
    #: Files by name. All of them are durable.
    files: dict[str, bytes] = field(default_factory=dict)
    #: Bytes that are not flushed. After a crash the segment may end with any first part of them.
    appended: bytes = b""
    begun: int = 0
    flushes: int = 0
    generation: int = 1
    look_s: float = 1.0
    looks: int = 0
    #: Called wherever a crash could come.
    crash: Callable[[], None] = lambda: None

    def newest(self) -> memoryview | None:
        return memoryview(self.segment) if self.segment else None

    def begin(self, data: bytes) -> None:
        assert not self.appended, "what was appended is not durable yet"
        self.crash()
        self.segment, self.begun = data, self.begun + 1
        self.crash()

    @property
    def crowded(self) -> bool:
        return False

    def append(self, data: bytes) -> None:
        self.crash()
        self.appended += data
        self.crash()

    def flush(self) -> None:
        self.segment, self.appended, self.flushes = self.segment + self.appended, b"", self.flushes + 1
        self.crash()

    def check(self) -> None:
        self.looks += 1

    def put(self, name: str, data: memoryview) -> memoryview:
        self.crash()
        self.files[name] = bytes(data)
        self.crash()
        return memoryview(self.files[name])

    def get(self, name: str) -> memoryview | None:
        return memoryview(self.files[name]) if name in self.files else None

    def remove(self, names: Collection[str]) -> None:
        for name in sorted(names):
            self.crash()
            del self.files[name]
            self.crash()

    def names(self) -> list[str]:
        return list(self.files)

    def after_a_crash(self, written: int) -> Memory:
        """Return the store as a crash leaves it, with the first ``written`` of the bytes that were not flushed."""
        return Memory(self.segment + self.appended[:written], dict(self.files), generation=self.generation + 1)


def opened(store: Any) -> Journal:
    """Open a journal for writing."""
    journal = Journal(store)
    journal.begin()
    return journal


def two_flushes() -> tuple[Memory, Any, Any, int]:
    """Write a journal with two flushes. Return its store, the content of the standbys after each flush, and the byte at
    which its last frame begins."""
    store = Memory()
    journal = opened(store)
    standby(journal).on_orders(orders(1, 0, 4, committed=1))
    take(journal, checkpoint(1, 1, 0))
    journal.flush()
    first, start = all_held(journal), len(store.segment)
    standby(journal).on_orders(orders(1, 4, 3, committed=3, left=2))
    take(journal, checkpoint(5, 1, 1))
    standby(journal, OTHER).on_orders(orders(1, 0, 1, key=OTHER))
    journal.flush()
    return store, first, all_held(journal), start


@contextlib.contextmanager
def segments_of(nbytes: int, times: int = 1) -> Iterator[None]:
    """Let the journal begin another segment when the newest one has grown by ``nbytes`` and ``times`` its first
    size."""
    with (
        patch.object(journal_module, "SEGMENT_BYTES", nbytes),
        patch.object(journal_module, "SEGMENT_TIMES", times),
    ):
        yield
