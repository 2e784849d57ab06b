"""State of deduplication: for each key, the last time at which it is a duplicate (design: moving-together).

Law: a row is a duplicate if its time is at most ``ttl`` behind that of the last given row of its key, or before it. So the given
rows depend on the rows of their key and their order alone: neither on the watermark, nor on the cut of the rows into calls, nor
on a snapshot and restore in between. The watermark only says which keys can be forgotten, because no row that it lets through
would be a duplicate of theirs.

Keys that are over stay in memory until they are a third or more of all; then the others move together. So memory is about twice
that of the keys that are not over, where rows come evenly, however many came. The time of the next look is that at which three of
four keys will be over: a look reads the end of each key, and a look for each watermark would cost more than the rows.

Many keys are divided into pieces by hash. Each moves together by itself, and a step moves one or two of them, so that no step
waits for all keys of a partition; for the same reason a table of a piece doubles by itself. Changes are told piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from flux.ranks import kernels
from flux.windows.window import END_OF_TIME, NEVER
from partitioning import kernels as kernels_of_keys
from partitioning.clustering import hash_columns
from partitioning.errors import StateMismatchError
from partitioning.key_index import KeyIndex
from partitioning.keyed_state import ChangedSlots
from partitioning.slot_tables import grown

#: Below this number of keys they do not move together.
KEYS_MIN = 1024
#: Keys beyond this number are divided, into this number of pieces.
WHOLE_MAX, PIECES = 1 << 18, 64
#: Keys are spread over this number of buckets by hash, and a piece has several buckets.
BUCKETS = 4096
#: A call goes to no further piece once it has moved this number of keys. To look at sixteen keys costs as much as to move one.
MOVED_MAX, LOOKED_AS_MOVED = 1 << 18, 16
#: The piece of a key comes from other bits of its hash than its partition, and so does its place in a table.
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


class FirstRows:
    """The keys of one partition, and the end of each. ``ttl``: in microseconds, as all times."""

    def __init__(self, keys: Sequence[pa.Field], ttl: int) -> None:
        self._keys, self._ttl = tuple(keys), ttl
        self._pieces = [KeyPiece(self._keys, ttl)]
        self._told = 0  # the number of pieces at the last call of ``changes``
        self._turn = 0  # the piece at which the next look begins
        #: Whether pieces are left to look at, by the watermark of the last call of ``forget``.
        self.behind = False
        self._piece_of = pieces_of_buckets(PIECES)
        self._order = np.arange(PIECES, dtype=np.int32)

    def __len__(self) -> int:
        """Return the number of keys in memory."""
        return sum(map(len, self._pieces))

    @property
    def nbytes(self) -> int:
        """Bytes of memory that keys and times hold."""
        return sum(piece.nbytes for piece in self._pieces)

    def take(self, keys: Sequence[pa.Array], times: np.ndarray) -> np.ndarray:
        """Take rows in their order, and return the int64 numbers of those that are no duplicates."""
        if len(self._pieces) == 1:
            if len(self._pieces[0]) + len(times) <= WHOLE_MAX:
                return self._pieces[0].take(keys, times)
            self._divide()
        first = [rows[piece.take(part, times[rows])] for piece, rows, part in self._divided(keys)]
        found = np.concatenate(first).astype(np.int64)
        found.sort()
        return found

    def _divided(self, keys: Sequence[pa.Array]) -> Iterator[tuple[KeyPiece, np.ndarray, list[pa.Array]]]:
        """Yield the pieces that have rows, each with the numbers of its rows, ascending, and with their keys."""
        count = len(keys[0])
        ids, rows = np.empty(count, np.uint16), np.empty(count, np.int32)
        kernels_of_keys.reduce_hashes(hash_columns(keys) * _SPREAD, BUCKETS, ids)
        ids = self._piece_of[ids]
        present, offsets = np.empty(PIECES, np.int32), np.empty(PIECES + 1, np.int64)
        found = kernels_of_keys.counting_sort(ids, self._order, np.empty(PIECES, np.int64), rows, present, offsets)
        by_piece = [column.take(pa.array(rows)) for column in keys]
        for number, first, end in zip(present[:found].tolist(), offsets.tolist(), offsets[1:].tolist(), strict=False):
            yield self._pieces[number], rows[first:end], [column.slice(first, end - first) for column in by_piece]

    def _divide(self) -> None:
        """Divide the keys into pieces. The next changes are the whole state."""
        (whole,) = self._pieces
        self._pieces = [KeyPiece(self._keys, self._ttl) for _ in range(PIECES)]
        if len(whole):
            keys, ends = whole.content()
            for piece, rows, part in self._divided(keys):
                piece.put(part, ends[rows])

    def part(self, keys: Sequence[Sequence[pa.Array]]) -> FirstRows:
        """Return copies of the ends of these keys, given by batch."""
        made = FirstRows(self._keys, self._ttl)
        for asked in keys:
            if not len(asked[0]):
                continue
            divided = [(self._pieces[0], None, asked)] if len(self._pieces) == 1 else self._divided(asked)
            for piece, _, part in divided:
                made._pieces[0].enter(*piece.ends_of(part))
        return made

    def forget(self, watermark: int) -> None:
        """Forget keys that are over by a watermark, where that is worth it now, in some of the pieces."""
        cost = 0
        for _ in range(len(self._pieces)):
            self.behind = cost >= MOVED_MAX
            if self.behind:
                return
            self._turn = (self._turn + 1) % len(self._pieces)
            cost += self._pieces[self._turn].forget(watermark)

    # ---- on its way

    def snapshot(self) -> dict[str, Any]:
        """Return the pieces; perhaps as views of the state."""
        return {"pieces": [piece.snapshot() for piece in self._pieces]}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Replace the state by a ``snapshot``. Raises StateMismatchError if it has other keys."""
        # Without pieces, it is that of an earlier release.
        self._pieces = [self._restored(piece) for piece in snapshot.get("pieces", [snapshot])]
        self._told, self._turn, self.behind = 0, 0, False

    def _restored(self, snapshot: Mapping[str, Any]) -> KeyPiece:
        piece = KeyPiece(self._keys, self._ttl)
        piece.restore(snapshot)
        return piece

    def changes(self, share_max: float = 1.0) -> dict[str, Any] | None:
        """Return the changes since the last call by piece, and whole pieces where keys have moved together, or more than
        ``share_max`` of them changed. None: there was no call before, or keys have been divided since."""
        first, self._told = self._told != len(self._pieces), len(self._pieces)
        found = [piece.changes(share_max) for piece in self._pieces]
        if first or (len(found) == 1 and found[0] is None):
            return None
        whole = {number: self._pieces[number].snapshot() for number, each in enumerate(found) if each is None}
        changed = {
            number: each
            for number, each in enumerate(found)
            if each is not None and (len(each["slots"]) or each["size"] != each["first"])
        }
        return {"pieces": len(self._pieces), "changed": changed, "whole": whole}

    def apply_changes(self, changes: Mapping[str, Any]) -> None:
        """Take the ``changes`` of a state that was equal to this one when it was asked for changes before. Raises
        StateMismatchError if it was not."""
        if changes["pieces"] != len(self._pieces):
            raise StateMismatchError(
                f"changes of keys in {changes['pieces']} pieces cannot be applied to {len(self._pieces)}"
            )
        for number, whole in changes["whole"].items():
            self._pieces[number] = self._restored(whole)
        for number, each in changes["changed"].items():
            self._pieces[number].apply_changes(each)


class KeyPiece:
    """Some of the keys of a partition, and the end of each."""

    def __init__(self, keys: Sequence[pa.Field], ttl: int) -> None:
        self._keys, self._ttl = tuple(keys), ttl
        self._changed = ChangedSlots()
        self._told: int | None = None  # the number of keys at the last call of ``changes``
        self._clear()

    def _clear(self) -> None:
        self._index = KeyIndex(self._keys)
        self._ends = np.zeros(0, np.int64)
        self._look_at: int | None = None  # the watermark at which to look for keys that are over; None: not known

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        return self._index.nbytes + self._ends.nbytes

    def content(self) -> tuple[list[pa.Array], np.ndarray]:
        """Return the keys and their ends."""
        return self._index.keys(), self._ends[: len(self._index)]

    def put(self, keys: Sequence[pa.Array], ends: np.ndarray) -> None:
        """Take different keys with their ends. The state is empty, and has not been asked for changes."""
        self._index.slots(keys)
        self._ends = ends

    def ends_of(self, keys: Sequence[pa.Array]) -> tuple[list[pa.Array], np.ndarray]:
        """Return those of the keys that are there, each once, with their ends."""
        slots = np.unique(self._index.find(keys))
        slots = slots[slots >= 0]
        return self._index.keys(slots), self._ends[slots]

    def enter(self, keys: Sequence[pa.Array], ends: np.ndarray) -> None:
        """Set the ends of keys."""
        slots = self._entered(keys)
        self._ends[slots] = ends

    def _entered(self, keys: Sequence[pa.Array]) -> np.ndarray:
        """Return the slots of keys, of which some may be new."""
        slots = self._index.slots(keys)
        size, room = len(self._index), len(self._ends)
        if size > room:
            self._ends = grown(self._ends, max(2 * room, size, KEYS_MIN))
            self._ends[room:] = NEVER
        return slots

    def take(self, keys: Sequence[pa.Array], times: np.ndarray) -> np.ndarray:
        """Take rows in their order, and return the int64 numbers of those that are no duplicates."""
        slots = self._entered(keys)
        size = len(self._index)
        out = np.empty(len(slots), np.int64)
        first = out[: kernels.first_rows(slots, np.ascontiguousarray(times, np.int64), self._ttl, self._ends, out)]
        self._changed.note(slots[first] if self._changed.noting else slots[:0], size)
        return first

    def forget(self, watermark: int) -> int:
        """Forget keys that are over by a watermark, if that is worth it now. Return the cost in moved
        keys."""
        size = len(self._index)
        if size < KEYS_MIN:
            return 0
        ends, looked = self._ends[:size], 0
        if self._look_at is None:
            self._look_at, looked = next_look(ends), size
        if watermark <= self._look_at:
            return looked // LOOKED_AS_MOVED
        kept, moved = np.flatnonzero(ends >= watermark).astype(np.int32), 0
        self._look_at = None if len(kept) < KEYS_MIN else next_look(ends[kept])
        if 3 * len(kept) <= 2 * size:
            look_at, moved = self._look_at, len(kept)
            self._move_together(kept)
            self._look_at = look_at
        return (looked + size) // LOOKED_AS_MOVED + moved

    def _move_together(self, kept: np.ndarray) -> None:
        """Give these keys the lowest slots. The next changes are the whole state."""
        index, ends = self._index.only(kept), self._ends[kept]
        self._clear()
        self._index, self._ends = index, ends
        self._told, self._changed = None, ChangedSlots()

    # ---- on its way

    def snapshot(self) -> dict[str, Any]:
        """Return the keys by slot, and their ends; perhaps as views of the state."""
        return {"keys": self._index.to_arrow(), "ends": self._ends[: len(self._index)]}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Replace the state by a ``snapshot``. Raises StateMismatchError if it has other keys."""
        keys = snapshot["keys"]
        if keys.schema.types != [field.type for field in self._keys]:
            raise StateMismatchError(f"the snapshot has keys of types {keys.schema.types}, expected {list(self._keys)}")
        self._clear()
        self._index, self._ends = KeyIndex.from_arrow(keys), np.array(snapshot["ends"], np.int64)
        self._told, self._changed = None, ChangedSlots()

    def changes(self, share_max: float = 1.0) -> dict[str, Any] | None:
        """Return the new keys, and the ends that changed since the last call. None: there was no call before, more than
        ``share_max`` of all keys changed, or keys have moved together."""
        told, slots = self._told, self._changed.take()
        self._told = size = len(self._index)
        if told is None or len(slots) > share_max * size:
            return None
        new = self._index.keys(np.arange(told, size, dtype=np.int32))
        return {"first": told, "size": size, "keys": new, "slots": slots, "ends": self._ends[slots]}

    def apply_changes(self, changes: Mapping[str, Any]) -> None:
        """Take the ``changes`` of a state that was equal to this one when it was asked for changes before. Raises
        StateMismatchError if it was not."""
        if changes["first"] != len(self._index):
            raise StateMismatchError(
                f"changes of a state of {changes['first']} keys cannot be applied to one of {len(self._index)}"
            )
        if len(changes["keys"][0]):
            self._index.slots(changes["keys"])
        room = len(self._ends)
        if changes["size"] > room:
            self._ends = grown(self._ends, max(2 * room, changes["size"]))
            self._ends[room:] = NEVER
        self._ends[changes["slots"]] = changes["ends"]
        self._look_at = None


def pieces_of_buckets(pieces: int) -> np.ndarray:
    """Return the piece of each bucket. The last piece has nearly twice the buckets of the first one, and the others lie between
    them: tables of powers of two would double in one step otherwise, as they would all be full at one time."""
    shares = np.cumsum(2 ** (np.arange(pieces) / pieces))
    ends = np.rint(BUCKETS * shares / shares[-1]).astype(np.int64)
    return np.repeat(np.arange(pieces, dtype=np.uint16), np.diff(ends, prepend=0))


def next_look(ends: np.ndarray) -> int:
    """Return the time at which three of four keys with these ends will be over."""
    place = min(3 * len(ends) // 4, len(ends) - 1)
    return int(np.partition(ends, place)[place]) if len(ends) else END_OF_TIME
