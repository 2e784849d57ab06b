"""State of ranks: the best rows of each key, by an order of their columns (design: best-rows).

Law: the kept rows and their ranks depend on the set of rows that came, and on nothing else: rows that are equal in the order of
the user are ordered by all other columns, so two rows have the same place only if they are equal altogether. The order of
arrival, the cut of the rows into calls, and a snapshot and restore in between change nothing.

With ``ties``, rows that are equal in the order of the user share a rank, and all rows with a rank through ``limit`` are kept.

With ``ttl``, a key begins again with a row whose time is more than ``ttl`` behind the newest of the key; then the law holds for
the rows of a key in their order.

Kept rows lie in an arena. Rows that others have replaced stay there until they are more than half of it; then the others move
together, as ``snapshot`` would write them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from flux.ranks import kernels
from flux.ranks.first_rows import KEYS_MIN, next_look
from flux.ranks.order_keys import SortColumn, order_keys
from flux.ranks.row_arena import RowArena
from flux.windows.window import NEVER
from partitioning.errors import StateMismatchError
from partitioning.key_index import KeyIndex
from partitioning.keyed_state import ChangedSlots
from partitioning.slot_tables import grown

#: Rows of the arena below which they do not move together.
ROWS_MIN = 1024
#: Places that a key has at first, at most.
ROOM_MAX = 16


class RankedRows(NamedTuple):
    """Rows and their ranks, int32, counted from 1."""

    rows: pa.RecordBatch
    ranks: np.ndarray


class BestOrder(NamedTuple):
    """The order of rows, and how many of them are kept for each key."""

    limit: int
    by: tuple[SortColumn, ...]
    ties: bool = False
    #: Microseconds; None: keys stay for ever.
    ttl: int | None = None
    #: The last rows in the order are the best: all other columns are in descending order, too.
    backward: bool = False

    def whole(self, columns: int) -> tuple[SortColumn, ...]:
        """Return the order with all other columns behind that of the user."""
        used = {each.at for each in self.by}
        others = (SortColumn(at, self.backward, self.backward) for at in range(columns) if at not in used)
        return (*self.by, *others)


class BestRows:
    """The best rows of the keys of one partition, or of one window of it. Arrays of keys are by slot, those of rows by number."""

    def __init__(self, schema: pa.Schema, keys_at: Sequence[int], order: BestOrder) -> None:
        self._schema, self._keys_at, self._order = schema, list(keys_at), order
        self._whole = order.whole(len(schema))
        self._told: int | None = None  # the number of keys at the last call of ``changes``
        self._changed = ChangedSlots()
        self._clear()

    def _clear(self) -> None:
        fields = [self._schema.field(at) for at in self._keys_at]
        self._index = KeyIndex(fields) if fields else None
        self._size = 0  # of keys
        self._begins, self._filled, self._rooms, self._marks = (np.zeros(0, np.int64) for _ in range(4))
        self._ends = np.zeros(0, np.int64)
        self._rows, self._heads = np.zeros(0, np.int64), np.zeros((0, 2), np.uint64)  # the pool of places
        self._places = 0  # of the pool in use
        self._at, self._bytes = np.zeros((0, 3), np.int64), np.zeros(0, np.uint8)  # keys of order, by row
        self._used = 0  # bytes of keys of order in use
        self._arena = RowArena(self._schema)
        self._mark = self._live = 0
        self._look_at: int | None = None

    def empty(self) -> BestRows:
        """Make another state of the same order, without rows."""
        return BestRows(self._schema, self._keys_at, self._order)

    def __len__(self) -> int:
        """Return the number of kept rows."""
        return self._live

    @property
    def nbytes(self) -> int:
        """Bytes of memory that keys, rows and their orders hold."""
        arrays = (
            self._begins,
            self._filled,
            self._rooms,
            self._marks,
            self._ends,
            self._rows,
            self._heads,
            self._at,
            self._bytes,
        )
        index = 0 if self._index is None else self._index.nbytes
        return index + self._arena.nbytes + sum(array.nbytes for array in arrays)

    # ---- rows

    def add(self, batch: pa.RecordBatch, times: np.ndarray | None = None, tell: bool = False) -> list[RankedRows]:
        """Add rows; ``times`` are needed with ``ttl``. With ``tell``, return the rows whose rank was another row's before, or
        free, in parts: by key in the order of their first changes, then by rank."""
        slots = self._slots(batch)
        by = order_keys(batch.columns, self._order.by, batch.num_rows)
        sizes = np.diff(by.ends)
        if self._order.ttl is None:
            chosen = np.empty(len(slots), np.int64)
            found = kernels.may_enter(
                slots, by.heads(), self._order.limit, self._begins, self._filled, self._heads, chosen
            )
            if not found:
                return []
            if found < len(slots):
                batch, slots, sizes = batch.take(pa.array(chosen[:found])), slots[chosen[:found]], sizes[chosen[:found]]
        new = self._append_keys(batch, sizes)
        return self._enter(batch, slots, new, times, tell)

    def _slots(self, batch: pa.RecordBatch) -> np.ndarray:
        if self._index is None:
            slots, self._size = np.zeros(batch.num_rows, np.int32), 1
        else:
            slots = self._index.slots([batch.column(at) for at in self._keys_at])
            self._size = len(self._index)
        self._make_room_of_keys(self._size)
        return slots

    def _make_room_of_keys(self, keys: int) -> None:
        known = len(self._begins)
        if keys > known:
            room = max(2 * known, keys, 16)
            for name in ("_begins", "_filled", "_rooms", "_marks", "_ends"):
                setattr(self, name, grown(getattr(self, name), room))
            self._ends[known:] = NEVER

    def _append_keys(self, batch: pa.RecordBatch, by_sizes: np.ndarray) -> np.ndarray:
        """Append the keys of order of rows, and return their heads."""
        keys, base = order_keys(batch.columns, self._whole, batch.num_rows), len(self._arena)
        rows, nbytes = base + batch.num_rows, self._used + len(keys.data)
        if rows > len(self._at):
            self._at = grown(self._at, max(2 * len(self._at), rows))
        if nbytes > len(self._bytes):
            self._bytes = grown(self._bytes, max(2 * len(self._bytes), nbytes))
        self._bytes[self._used : nbytes] = keys.data
        at = self._at[base:rows]
        at[:, kernels.START] = keys.ends[:-1] + self._used
        at[:, kernels.SIZE] = np.diff(keys.ends)
        at[:, kernels.BY] = by_sizes
        return keys.heads()

    def _enter(
        self, batch: pa.RecordBatch, slots: np.ndarray, new: np.ndarray, times: np.ndarray | None, tell: bool
    ) -> list[RankedRows]:
        base, rows, order = len(self._arena), batch.num_rows, self._order
        self._mark += 1
        changed, old_ends = np.empty(rows, np.int32), np.zeros(rows + 1, np.int64)
        places = rows * min(order.limit, ROOM_MAX) + ROOM_MAX if tell else 0
        old, old_heads, alive = np.empty(places, np.int64), np.empty((places, 2), np.uint64), np.zeros(rows, np.uint8)
        meta = np.array([self._places, 0, 0, 0], np.int64)
        moments = np.zeros(0, np.int64) if order.ttl is None or times is None else np.ascontiguousarray(times, np.int64)
        done = 0
        while True:
            done = kernels.enter(
                slots, new, base, done, order.limit, order.ties, moments, order.ttl or 0, self._ends,
                self._begins, self._rooms, self._filled, self._rows, self._heads, self._at, self._bytes,
                self._marks, self._mark, changed, alive, tell, old_ends, old, old_heads, meta,
            )  # fmt: skip
            if done == rows:
                break
            if meta[kernels.WANTS] == kernels.WANTS_POOL:
                self._make_places(2 * len(self._rows))
            else:
                places = 2 * len(old) + int(self._filled[slots[done]])
                old, old_heads = grown(old, places), grown(old_heads, places)
        self._places = int(meta[kernels.POOL])
        changed, old_ends = changed[: meta[kernels.CHANGED]], old_ends[: meta[kernels.CHANGED] + 1]
        # Each row may move the end of its key, also one that is not among the best.
        self._changed.note(changed if order.ttl is None else slots, self._size)
        self._keep(batch, changed, alive)
        self._live += int(self._filled[changed].sum() - old_ends[-1])
        told = self._new_ranks(changed, old_ends, old, old_heads) if tell else []
        if len(self._arena) >= ROWS_MIN and 2 * self._live < len(self._arena):
            self._move_together(np.arange(self._size, dtype=np.int32))
        return told

    def _keep(self, batch: pa.RecordBatch, changed: np.ndarray, alive: np.ndarray) -> None:
        """Append new rows to the arena: all of them if most are among the best, because the others cost less than new numbers."""
        base, rows = len(self._arena), batch.num_rows
        stay = np.arange(rows)
        if 2 * np.count_nonzero(alive) < rows:
            numbers = np.empty(rows, np.int64)
            count, self._used = kernels.settle(
                changed, base, self._begins, self._filled, self._rows, self._at, self._bytes, self._used, alive, numbers, stay
            )  # fmt: skip
            stay = stay[:count]
        else:
            last = self._at[base + rows - 1]
            self._used = int(last[kernels.START] + last[kernels.SIZE])
        self._arena.append(batch.take(pa.array(stay)))

    def _make_places(self, places: int) -> None:
        room = max(places, 2 * ROOM_MAX)
        self._rows, self._heads = grown(self._rows, room), grown(self._heads, room)

    def _new_ranks(
        self, changed: np.ndarray, old_ends: np.ndarray, old: np.ndarray, old_heads: np.ndarray
    ) -> list[RankedRows]:
        most = int(self._filled[changed].sum())
        out, ranks = np.empty(most, np.int64), np.empty(most, np.int32)
        count = kernels.new_ranks(
            changed, self._begins, self._filled, self._rows, self._heads, old_ends, old, old_heads, self._at, self._bytes,
            out, ranks,
        )  # fmt: skip
        return list(self._taken(out[:count], ranks[:count])) if count else []

    def _taken(self, numbers: np.ndarray, ranks: np.ndarray) -> Iterator[RankedRows]:
        """Yield rows with their ranks, in parts that can be taken at once."""
        first = 0
        for part in self._arena.parts(numbers):
            yield RankedRows(self._arena.take(part), ranks[first : first + len(part)])
            first += len(part)

    def ranked(self, rows_max: int) -> Iterator[RankedRows]:
        """Yield all rows, in parts: by key in the order of their first rows, then by rank."""
        out, ranks = self._numbers(np.arange(self._size, dtype=np.int32))
        for at in range(0, len(out), rows_max):
            yield from self._taken(out[at : at + rows_max], ranks[at : at + rows_max])

    def _numbers(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of the rows of slots, and their ranks."""
        count = int(self._filled[slots].sum())
        out, ranks = np.empty(count, np.int64), np.empty(count, np.int32)
        kernels.all_ranks(
            slots, self._begins, self._filled, self._rows, self._order.ties, self._at, self._bytes, out, ranks
        )
        return out, ranks

    # ---- keys that are over

    def forget(self, watermark: int) -> None:
        """Forget keys that begin again with any row from this time on, if that is worth it now. Only with ``ttl``."""
        if self._size < KEYS_MIN:
            return
        ends = self._ends[: self._size]
        if self._look_at is None:
            self._look_at = next_look(ends)
        if watermark <= self._look_at:
            return
        kept = np.flatnonzero(ends >= watermark).astype(np.int32)
        look_at = next_look(ends[kept]) if len(kept) >= KEYS_MIN else None
        if 3 * len(kept) <= 2 * self._size:
            self._move_together(kept)
        self._look_at = look_at

    def _move_together(self, kept: np.ndarray) -> None:
        """Give these keys the lowest slots, and their rows the lowest numbers. If keys are forgotten, the next changes are the
        whole state."""
        state, look_at, told = self._state(kept), self._look_at, len(kept) == self._size
        index = None if self._index is None else self._index.only(kept)
        self._clear()
        self._index = index
        self._size = len(kept)
        self._make_room_of_keys(self._size)
        self._put(np.arange(self._size, dtype=np.int32), state)
        self._look_at = look_at
        if not told:
            self._told, self._changed = None, ChangedSlots()

    # ---- beside the steps

    def part(self, batches: Sequence[pa.RecordBatch]) -> BestRows:
        """Return copies of the rows of the keys that these batches have."""
        slots = np.arange(self._size, dtype=np.int32)
        if self._index is not None:
            asked = [[batch.column(at) for at in self._keys_at] for batch in batches]
            slots = np.unique(np.concatenate([slots[:0], *map(self._index.find, asked)]))
            slots = slots[slots >= 0]
        return self.copied(slots)

    def copied(self, slots: np.ndarray | None = None) -> BestRows:
        """Return copies of the rows of these slots, ascending, by default of all."""
        made, which = self.empty(), np.arange(self._size, dtype=np.int32) if slots is None else slots
        if self._index is not None:
            made._index = self._index.only(which)
        made._size = len(which)
        made._make_room_of_keys(made._size)
        made._put(np.arange(made._size, dtype=np.int32), self._state(which))
        return made

    # ---- on its way

    def _state(self, slots: np.ndarray) -> dict[str, Any]:
        """Return the rows of slots, in the order of slots and ranks, the number of each slot, and the ends."""
        rows = self._arena.table(self._numbers(slots)[0])
        return {"rows": rows, "counts": self._filled[slots], "ends": self._ends[slots]}

    def _put(self, slots: np.ndarray, state: Mapping[str, Any]) -> None:
        """Set the rows of slots, for which there is room, to those of a ``_state``."""
        counts = np.asarray(state["counts"], np.int64)
        self._live += int(counts.sum() - self._filled[slots].sum())
        self._ends[slots] = state["ends"]
        rooms = np.maximum(counts, min(self._order.limit, ROOM_MAX))
        begins = self._places + np.cumsum(rooms) - rooms
        self._places += int(rooms.sum())
        if self._places > len(self._rows):
            self._make_places(max(2 * len(self._rows), self._places))
        self._begins[slots], self._rooms[slots], self._filled[slots] = begins, rooms, counts
        places = np.repeat(begins - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        for batch in state["rows"].to_batches():
            by, base, rows = order_keys(batch.columns, self._order.by, batch.num_rows), len(self._arena), batch.num_rows
            heads = self._append_keys(batch, np.diff(by.ends))
            self._used += int(self._at[base : base + rows, kernels.SIZE].sum())
            mine, places = places[:rows], places[rows:]
            self._rows[mine], self._heads[mine] = base + np.arange(rows), heads
            self._arena.append(batch)

    def snapshot(self) -> dict[str, Any]:
        """Return the keys by slot, and the rows in the order of slots and ranks."""
        every = np.arange(self._size, dtype=np.int32)
        return {"keys": None if self._index is None else self._index.to_arrow(), **self._state(every)}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Replace the state by a ``snapshot``. Raises StateMismatchError if it has other columns."""
        rows = snapshot["rows"]
        if rows.schema.types != self._schema.types:
            raise StateMismatchError(f"the snapshot has rows of {rows.schema.types}, expected {self._schema.types}")
        self._clear()
        if self._index is not None:
            self._index = KeyIndex.from_arrow(snapshot["keys"])
        self._size = len(snapshot["counts"])
        self._make_room_of_keys(self._size)
        self._put(np.arange(self._size, dtype=np.int32), snapshot)
        self._told, self._changed = None, ChangedSlots()

    def changes(self, share_max: float = 1.0) -> dict[str, Any] | None:
        """Return the keys that are new, and the rows of the keys that changed since the last call. None: there was no call
        before, more than ``share_max`` of all keys changed, or rows have moved together."""
        told, slots = self._told, self._changed.take()
        self._told = self._size
        if told is None or len(slots) > share_max * self._size:
            return None
        new = np.arange(told, self._size, dtype=np.int32)
        keys = [] if self._index is None else self._index.keys(new)
        return {"first": told, "size": self._size, "keys": keys, "slots": slots, **self._state(slots)}

    def apply_changes(self, changes: Mapping[str, Any]) -> None:
        """Take the ``changes`` of a state that was equal to this one when it was asked for changes before. Raises
        StateMismatchError if it was not."""
        if changes["first"] != self._size:
            raise StateMismatchError(
                f"changes of a state of {changes['first']} keys cannot be applied to one of {self._size}"
            )
        if self._index is not None and len(changes["keys"][0]):
            self._index.slots(changes["keys"])
        self._size = changes["size"]
        self._make_room_of_keys(self._size)
        self._put(changes["slots"], changes)
        if len(self._arena) >= ROWS_MIN and 2 * self._live < len(self._arena):
            self._move_together(np.arange(self._size, dtype=np.int32))
