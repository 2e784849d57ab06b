"""State of deduplication: for each key, the last time at which it is a duplicate (design: moving-together).

Law: a row is a duplicate if its time is at most ``ttl`` behind that of the last given row of its key, or before it. So the given
rows depend on the rows of their key and their order alone: neither on the watermark, nor on the cut of the rows into calls, nor
on a snapshot and restore in between. The watermark only says which keys can be forgotten, because no row that it lets through
would be a duplicate of theirs.

Keys that are over stay in memory until they are a third or more of all; then the others move together. So memory is about twice
that of the keys that are not over, where rows come evenly, however many came. The time of the next look is that at which three of
four keys will be over: a look reads the end of each key, and a look for each watermark would cost more than the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from flux.ranks import kernels
from flux.windows.window import END_OF_TIME, NEVER
from partitioning.errors import StateMismatchError
from partitioning.key_index import KeyIndex
from partitioning.keyed_state import ChangedSlots
from partitioning.slot_tables import grown

#: Below this number of keys they do not move together.
KEYS_MIN = 1024


class FirstRows:
    """The keys of one partition, and the end of each. ``ttl``: in microseconds, as all times."""

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
        """Return the number of keys in memory."""
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that keys and times hold."""
        return self._index.nbytes + self._ends.nbytes

    def take(self, keys: Sequence[pa.Array], times: np.ndarray) -> np.ndarray:
        """Take rows in their order, and return the int64 numbers of those that are no duplicates."""
        slots = self._index.slots(keys)
        size, room = len(self._index), len(self._ends)
        if size > room:
            self._ends = grown(self._ends, max(2 * room, size, KEYS_MIN))
            self._ends[room:] = NEVER
        out = np.empty(len(slots), np.int64)
        first = out[: kernels.first_rows(slots, np.ascontiguousarray(times, np.int64), self._ttl, self._ends, out)]
        self._changed.note(slots[first] if self._changed.noting else slots[:0], size)
        return first

    def forget(self, watermark: int) -> None:
        """Forget keys that are over by a watermark, if that is worth it now."""
        size = len(self._index)
        if size < KEYS_MIN:
            return
        ends = self._ends[:size]
        if self._look_at is None:
            self._look_at = next_look(ends)
        if watermark <= self._look_at:
            return
        kept = np.flatnonzero(ends >= watermark).astype(np.int32)
        if 3 * len(kept) <= 2 * size:
            self._move_together(kept)
        self._look_at = None if len(kept) < KEYS_MIN else next_look(ends[kept])

    def _move_together(self, kept: np.ndarray) -> None:
        """Give these keys the lowest slots. The next changes are the whole state."""
        keys, ends = self._index.keys(kept), self._ends[kept]
        self._clear()
        if len(kept):
            self._index.slots(keys)
        self._ends = ends
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


def next_look(ends: np.ndarray) -> int:
    """Return the time at which three of four keys with these ends will be over."""
    place = min(3 * len(ends) // 4, len(ends) - 1)
    return int(np.partition(ends, place)[place]) if len(ends) else END_OF_TIME
