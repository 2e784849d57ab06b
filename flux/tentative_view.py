"""Table by key of stable and tentative rows, which tells the rows that an undo changes (design: tentative-view).

Law: the row of a key is its tentative row of the latest time that no undo has reached, of equal times the last one; without any
its newest stable row; without that none. So the order in which stable and tentative rows come makes no difference. Every call
returns the keys whose row is another one now: a copy of the table elsewhere needs nothing else.

Rows are kept in columns, by slot of their key. A call costs as much as its own rows, but for keys with several tentative rows: to
take one of these back is to look through all tentative rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from flux.errors import UsageError
from partitioning.key_index import KeyIndex

#: Bytes of memory of a row or a key beside its values: its slot, and the entries of the arrays by slot.
ROW_BYTES = 32
#: Before all times of rows, and behind them.
NEVER, LAST = -(1 << 63), (1 << 63) - 1
#: Name of the column that marks tentative rows in ``TentativeView.table``.
MARK = "tentative"


class ViewChanges(NamedTuple):
    """The keys of a table whose row is another one since the call before, each once."""

    #: The rows of keys that have one.
    rows: pa.RecordBatch
    #: Whether each of these is tentative.
    tentative: pa.BooleanArray
    #: The key columns of keys that have none any more.
    removed: pa.RecordBatch


class RowsOfTime(NamedTuple):
    """Tentative rows of one call that no undo has reached."""

    through: int
    batch: pa.RecordBatch
    #: The slot of the key of each row.
    slots: np.ndarray

    def is_void(self, start: int | None, end: int | None) -> bool:
        return (start is None or start < self.through) and (end is None or self.through <= end)


class StableRows:
    """The newest stable row of each slot, in batches in the order in which they came."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._batches: list[pa.RecordBatch] = []
        #: By slot: the number of its row among all rows; -1: none.
        self._at = np.zeros(0, np.int64)
        self._rows = self._dead = 0

    def grow(self, slots: int) -> None:
        """Make room for the slots below ``slots``."""
        self._at = _grown(self._at, slots, -1)

    @property
    def nbytes(self) -> int:
        return sum(batch.nbytes for batch in self._batches)

    def put(self, batch: pa.RecordBatch, slots: np.ndarray) -> None:
        """Take a row for each of different slots."""
        self._dead += int((self._at[slots] >= 0).sum())
        self._at[slots] = np.arange(self._rows, self._rows + len(slots))
        self._batches.append(batch)
        self._rows += len(slots)
        if 2 * self._dead > self._rows:
            self.keep(self.slots())

    def has(self, slots: np.ndarray) -> np.ndarray:
        found: np.ndarray = self._at[slots] >= 0
        return found

    def slots(self) -> np.ndarray:
        """Return the slots with a row, those of the oldest rows in front."""
        found = np.flatnonzero(self._at >= 0)
        return found[np.argsort(self._at[found], kind="stable")]

    def rows(self, slots: np.ndarray) -> pa.Table:
        return pa.Table.from_batches(self._batches, self._schema).take(pa.array(self._at[slots]))

    def keep(self, slots: np.ndarray, names: np.ndarray | None = None) -> None:
        """Keep the rows of these slots alone, under other slots where ``names`` has some."""
        kept, size = self.rows(slots).combine_chunks(), len(self._at)
        self._batches, self._rows, self._dead = kept.to_batches(), len(slots), 0
        self._at = np.full(size, -1, np.int64)
        self._at[slots if names is None else names] = np.arange(len(slots))


class TentativeView:
    """Table with one row for each key, made of the calls of a sink that shows tentative results. The sink passes its ``write``,
    ``tentative``, ``undo`` and ``corrected`` on, and each returns the rows that have changed (``ViewChanges``).

        class Board(flux.Sink):
            def open(self, context):
                self.view = flux.TentativeView(["window_start", "site"])

            def tentative(self, batch, through):
                self.show(self.view.tentative(batch, through))

            def undo(self, start, end):
                self.show(self.view.undo(start, end))

    key        names of the columns that tell rows apart; a column of structs, as windows are, counts by its fields
    max_bytes  bound of the memory for rows. Beyond it the oldest stable rows are forgotten (``forgotten`` counts them): an undo
               that ends at one of them says that the key has no row. Tentative rows that would take more than half of it are not
               shown (``left_out``)

    A view is for one partition and one thread, and does no I/O."""

    def __init__(self, key: str | Sequence[str], *, max_bytes: int = 64 << 20) -> None:
        names = [key] if isinstance(key, str) else list(key) if isinstance(key, Iterable) else []
        if not names or not all(isinstance(name, str) for name in names):
            raise UsageError(f"TentativeView wants the names of its key columns, got {key!r:.100}")
        self._key = names
        if not isinstance(max_bytes, int) or isinstance(max_bytes, bool) or max_bytes < 1:
            raise UsageError(f"TentativeView: max_bytes must be a number of bytes above zero, got {max_bytes!r}")
        self._bytes_max = max_bytes
        #: Tentative rows that were not shown, and stable rows that were forgotten, for want of memory.
        self.left_out = self.forgotten = 0
        self._schema: pa.Schema | None = None
        self._shown: list[RowsOfTime] = []  # in order of time, and of calls where times are equal
        self._shown_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory that rows and keys take."""
        if self._schema is None:
            return 0
        return self._shown_bytes + self._stable.nbytes + self._index.nbytes + ROW_BYTES * len(self._index)

    # ---- the calls of a sink

    def write(self, batch: pa.RecordBatch) -> ViewChanges:
        """Take stable rows. A key with a tentative row keeps that one until it is taken back."""
        slots = self._slots(batch)
        last = _last_of_each(slots)
        self._stable.put(batch.take(pa.array(last)), slots[last])
        bare = last[self._live[slots[last]] == 0]
        return self._found(batch.take(pa.array(bare)), np.zeros(len(bare), bool))

    def tentative(self, batch: pa.RecordBatch, through: int) -> ViewChanges:
        """Take rows that may still change."""
        if not isinstance(through, int) or isinstance(through, bool):
            raise UsageError(
                "TentativeView: tentative() wants the time that Flux gives with the rows, through, in microseconds; got "
                f"{through!r:.100}"
            )
        self._check_rows(batch)
        nbytes = batch.nbytes + ROW_BYTES * batch.num_rows
        if self._shown_bytes + nbytes > self._bytes_max // 2:
            self.left_out += batch.num_rows
            batch, nbytes = batch.slice(0, 0), 0
        slots = self._slots(batch)
        place = len(self._shown)
        while place and self._shown[place - 1].through > through:
            place -= 1
        self._shown.insert(place, RowsOfTime(through, batch, slots))
        self._shown_bytes += nbytes
        np.add.at(self._live, slots, 1)
        last = _last_of_each(slots)
        last = last[self._through[slots[last]] <= through]
        self._through[slots[last]] = through
        return self._found(batch.take(pa.array(last)), np.ones(len(last), bool))

    def undo(self, start: int | None, end: int | None) -> ViewChanges:
        """Take back the tentative rows of the calls with ``start < through <= end``; None: without that bound."""
        void = [each for each in self._shown if each.is_void(start, end)]
        if not void:
            return self._nothing()
        self._shown = [each for each in self._shown if not each.is_void(start, end)]
        self._shown_bytes -= sum(each.batch.nbytes + ROW_BYTES * len(each.slots) for each in void)
        slots = np.concatenate([each.slots for each in void])
        np.subtract.at(self._live, slots, 1)
        last = _last_of_each(slots)
        shown = self._through[slots[last]]  # the row of a key is that of its latest time
        is_void = (shown > (NEVER if start is None else start)) & (shown <= (LAST if end is None else end))
        self._through[slots] = NEVER
        if self._live[slots].any():
            for each in self._shown:
                self._through[each.slots] = each.through
        last = last[is_void]
        return self._left(slots[last], pa.Table.from_batches([each.batch for each in void]).take(pa.array(last)))

    def corrected(self, through: int) -> ViewChanges:
        """Take back everything tentative before ``through``, for which stable rows have come."""
        return self.undo(None, through)

    def table(self) -> pa.Table:
        """Return the row of each key, with a column that marks tentative ones (``tentative``)."""
        if self._schema is None:
            return pa.table({MARK: pa.array([], pa.bool_())})
        every = np.arange(len(self._index))
        found = self._left(every[(self._live > 0)[every] | self._stable.has(every)], None)
        return pa.Table.from_batches([found.rows]).append_column(MARK, found.tentative)

    # ---- slots

    def _slots(self, batch: pa.RecordBatch) -> np.ndarray:
        """Return the slot of the key of each row. Forgets rows if there are too many, so slots of earlier calls do not count."""
        self._check_rows(batch)
        if self._schema is None:
            self._begin(batch.schema)
        if batch.schema != self._schema:
            raise UsageError(f"TentativeView: expected rows of {self._schema}, got {batch.schema}")
        if self.nbytes > self._bytes_max:
            self._forget()
        slots = self._index.slots([column for name in self._key for column in _flat(batch.column(name))])
        self._grow()
        return slots

    def _check_rows(self, batch: Any) -> None:
        if not isinstance(batch, pa.RecordBatch):
            raise UsageError(f"TentativeView: expected a pyarrow.RecordBatch, got {type(batch).__name__}")

    def _begin(self, schema: pa.Schema) -> None:
        if missing := [name for name in self._key if name not in schema.names]:
            raise UsageError(f"TentativeView: no column {missing[0]!r} in {', '.join(schema.names)}")
        fields = [field for name in self._key for field in _flat_fields(schema.field(name))]
        if not fields:
            raise UsageError(f"TentativeView: no field in the structs of its key columns, {', '.join(self._key)}")
        self._index = KeyIndex(fields)
        self._schema, self._stable = schema, StableRows(schema)
        #: By slot: the number of its tentative rows, and the latest time of one.
        self._live, self._through = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._grow()

    def _grow(self) -> None:
        size = len(self._index)
        self._stable.grow(size)
        self._live, self._through = _grown(self._live, size, 0), _grown(self._through, size, NEVER)

    def _forget(self) -> None:
        """Forget keys without a row, and the older half of the stable rows, but not that of a key with tentative rows."""
        stable = self._stable.slots()
        is_kept = (self._live[stable] > 0) | (np.arange(len(stable)) >= len(stable) // 2)
        self.forgotten += int((~is_kept).sum())
        stable = stable[is_kept]
        kept = np.union1d(stable, np.flatnonzero(self._live)).astype(np.int32)
        names = np.full(len(self._live), -1, np.int32)
        names[kept] = np.arange(len(kept), dtype=np.int32)
        self._stable.keep(stable, names[stable])
        self._index = self._index.only(kept)
        self._live, self._through = self._live[kept], self._through[kept]
        self._shown = [each._replace(slots=names[each.slots]) for each in self._shown]
        self._grow()

    # ---- answers

    def _left(self, slots: np.ndarray, void: pa.Table | None) -> ViewChanges:
        """Return the rows that different slots have now. ``void``: the rows that they had."""
        live = self._live[slots] > 0
        stable = ~live & self._stable.has(slots)
        rows = [self._stable.rows(slots[stable])]
        if live.any():
            number, first = np.full(len(self._live), -1, np.int64), 0
            for each in self._shown:
                number[each.slots] = np.arange(first, first + len(each.slots))
                first += len(each.slots)
            rows.append(pa.Table.from_batches([each.batch for each in self._shown]).take(pa.array(number[slots[live]])))
        removed = None if void is None else void.filter(pa.array(~live & ~stable))
        return self._found(_one(pa.concat_tables(rows)), np.repeat([False, True], [stable.sum(), live.sum()]), removed)

    def _found(self, rows: pa.RecordBatch, tentative: np.ndarray, removed: pa.Table | None = None) -> ViewChanges:
        keys = rows.slice(0, 0).select(self._key) if removed is None else _one(removed.select(self._key))
        return ViewChanges(rows, pa.array(tentative, pa.bool_()), keys)

    def _nothing(self) -> ViewChanges:
        rows = pa.schema([]).empty_table() if self._schema is None else self._schema.empty_table()
        keys = rows if self._schema is None else rows.select(self._key)
        return ViewChanges(_one(rows), pa.array([], pa.bool_()), _one(keys))


def _one(table: pa.Table) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_arrays([[] for _ in table.schema], schema=table.schema)


def _flat_fields(field: pa.Field) -> list[pa.Field]:
    """Return the fields of a struct, and of structs in it, each with the whole way to it as its name."""
    if not pa.types.is_struct(field.type):
        return [field]
    return [flat for each in field.type for flat in _flat_fields(each.with_name(f"{field.name}.{each.name}"))]


def _flat(column: pa.Array) -> list[pa.Array]:
    """Return the columns of a struct, and of structs in it."""
    if not pa.types.is_struct(column.type):
        return [column]
    return [flat for each in column.flatten() for flat in _flat(each)]


def _last_of_each(slots: np.ndarray) -> np.ndarray:
    """Return the number of the last row of each slot, in ascending order."""
    _, behind = np.unique(slots[::-1], return_index=True)
    return np.sort(len(slots) - 1 - behind)


def _grown(values: np.ndarray, size: int, fill: int) -> np.ndarray:
    """Return an array of at least ``size`` values, of which new ones are ``fill``."""
    if size <= len(values):
        return values
    grown = np.full(max(size, 2 * len(values)), fill, np.int64)
    grown[: len(values)] = values
    return grown
