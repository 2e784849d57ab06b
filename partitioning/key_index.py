"""Slots of the keys of one partition: dense numbers, so that state can live in plain arrays indexed by slot.

Law: the slot of a key is the number of distinct keys that came before it, however they are split into batches; keys are
equal as in Spark's grouping: null equals null, -0.0 equals 0.0, every NaN equals every other, and an empty
string is no null.

Every fixed-width column is one word (decimal128: two words). A string column has a dictionary of its own, whose code is the
word.
A key of one word, or of one string, needs only that. Other keys are rows of words, of which the last ones hold a bit per column
for null.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from partitioning import kernels
from partitioning.clustering import check_key_type
from partitioning.columns import (
    BYTES,
    DECIMAL,
    bytes_column,
    decimal_column,
    fixed_column,
    kind_of,
    raw,
)
from partitioning.slot_tables import StringTable, WideKeyTable, WordTable

#: Rows per chunk of a snapshot: keeps the bytes of a string column within Arrow's 32-bit offsets.
CHUNK_ROWS = 65_536


class KeyIndex:
    """Slots of the keys made of ``fields``, at least one. An index is for one thread."""

    def __init__(self, fields: Sequence[pa.Field], keys: int = 0) -> None:
        """Make an empty index with room for ``keys`` keys, if their number is known."""
        if not fields:
            raise ValueError("an index needs at least one key column")
        for field in fields:
            check_key_type(field.name, field.type)
        self.fields = tuple(fields)
        self.types = [field.type for field in fields]
        kinds = [kind_of(type_) for type_ in self.types]
        single = len(kinds) == 1 and kinds[0] != DECIMAL
        self._index: _Single | _Several
        self._index = _Single(self.types[0], keys) if single else _Several(self.types, keys)

    def __len__(self) -> int:
        """Return the number of distinct keys. Slots are 0 to this number, exclusive."""
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return self._index.nbytes

    def slots(self, columns: Sequence[pa.Array]) -> np.ndarray:
        """Return the int32 slot of every row. New keys get the next slots, in the order of their rows."""
        out = self._checked(columns)
        if len(out):
            self._index.slots(columns, out)
        return out

    def find(self, columns: Sequence[pa.Array]) -> np.ndarray:
        """Return the int32 slot of every row; -1: the index does not have its key."""
        out = self._checked(columns)
        if len(out):
            self._index.find(columns, out)
        return out

    def _checked(self, columns: Sequence[pa.Array]) -> np.ndarray:
        """Return room for the slots of rows."""
        rows = len(columns[0])
        for column, type_ in zip(columns, self.types, strict=True):
            # Checked, because kernels read by address: a wrong type or length would read outside of the column.
            if column.type != type_ or len(column) != rows:
                raise TypeError(f"expected {rows} rows of {type_}, not {len(column)} rows of {column.type}")
        return np.empty(rows, np.int32)

    def keys(self, slots: np.ndarray | None = None) -> list[pa.Array]:
        """Return the key columns of slots, by default of all slots."""
        if slots is None:
            slots = np.arange(len(self), dtype=np.int32)
        elif not kernels.in_range(slots, len(self)):
            raise IndexError(f"slots must be from 0 to {len(self) - 1}")
        return self._index.keys(np.ascontiguousarray(slots, np.int32))

    def only(self, slots: np.ndarray) -> KeyIndex:
        """Return an index of the keys of different slots, which get the slots 0, 1, ... in this order."""
        return KeyIndex.from_arrow(self.table(slots))

    @property
    def words(self) -> WordTable | None:
        """The table of keys of one word; None for other keys."""
        table = self._index._table if isinstance(self._index, _Single) else None
        return table if isinstance(table, WordTable) else None

    def to_arrow(self) -> pa.Table:
        """Return all keys in the order of their slots, perhaps as views of the index's memory."""
        whole = self._index.all_keys()
        if whole is not None:
            return pa.Table.from_arrays([whole], schema=pa.schema(self.fields))
        return self.table(np.arange(len(self), dtype=np.int32))

    def table(self, slots: np.ndarray) -> pa.Table:
        """Return the keys of slots, in chunks: a column of a batch has less than 2 GiB of text."""
        schema = pa.schema(self.fields)
        chunks = [slots[i : i + CHUNK_ROWS] for i in range(0, len(slots), CHUNK_ROWS)]
        return pa.Table.from_batches(
            [pa.RecordBatch.from_arrays(self.keys(each), schema=schema) for each in chunks], schema
        )

    @classmethod
    def from_arrow(cls, keys: pa.Table) -> KeyIndex:
        """Rebuild the index from the result of its ``to_arrow``, with the same slots for the same keys."""
        index = cls(list(keys.schema), keys.num_rows)
        for batch in keys.to_batches():
            index.slots(batch.columns)
        if len(index) != keys.num_rows:
            raise ValueError(f"{keys.num_rows} keys were given, of which only {len(index)} are distinct")
        return index


class _Single:
    """Index of keys of one word or one string."""

    def __init__(self, type_: pa.DataType, keys: int) -> None:
        self._type = type_
        self._table: WordTable | StringTable = StringTable(keys) if (kind_of(type_) or 0) >= BYTES else WordTable(keys)

    def __len__(self) -> int:
        return len(self._table)

    @property
    def nbytes(self) -> int:
        return self._table.nbytes

    def slots(self, columns: Sequence[pa.Array], out: np.ndarray) -> None:
        self._table.slots(columns[0], out)

    def find(self, columns: Sequence[pa.Array], out: np.ndarray) -> None:
        self._table.find(columns[0], out)

    def all_keys(self) -> pa.Array | None:
        """Return all keys as a view of the words, or None for strings, which are copied chunk by chunk."""
        table = self._table
        if isinstance(table, StringTable):
            return None
        size = len(table)
        valid = np.arange(size) != table.meta[1] if table.meta[1] >= 0 else None
        return fixed_column(self._type, table.words[:size], valid)

    def keys(self, slots: np.ndarray) -> list[pa.Array]:
        table = self._table
        valid = ~table.nulls(slots) if table.meta[1] >= 0 else None
        if isinstance(table, StringTable):
            return [_string_column(self._type, table, slots, valid)]
        return [fixed_column(self._type, table.words.take(slots), valid)]


class _Several:
    """Index of keys of several words: the words of each column in turn, then one bit per column, set for null."""

    def __init__(self, types: Sequence[pa.DataType], keys: int) -> None:
        self._types = list(types)
        self._dictionaries = [StringTable() if (kind_of(t) or 0) >= BYTES else None for t in types]
        widths = [2 if kind_of(t) == DECIMAL else 1 for t in types]
        self._places = [int(place) for place in np.cumsum([0, *widths])]
        self._width = self._places[-1] + -(-len(types) // 64)
        self._table = WideKeyTable(self._width, keys)

    def __len__(self) -> int:
        return len(self._table)

    @property
    def nbytes(self) -> int:
        return self._table.nbytes + sum(d.nbytes for d in self._dictionaries if d is not None)

    def slots(self, columns: Sequence[pa.Array], out: np.ndarray) -> None:
        self._table.slots(self._rows(columns, out, StringTable.slots), out)

    def find(self, columns: Sequence[pa.Array], out: np.ndarray) -> None:
        # The code -1 of an unknown text is in no key.
        self._table.find(self._rows(columns, out, StringTable.find), out)

    def _rows(
        self, columns: Sequence[pa.Array], out: np.ndarray, code: Callable[[StringTable, pa.Array, np.ndarray], None]
    ) -> np.ndarray:
        """Return keys as rows of words. ``code`` writes the codes of texts to ``out``."""
        rows = np.zeros((len(out), self._width), np.uint64)
        for c, (column, place, dictionary) in enumerate(zip(columns, self._places, self._dictionaries, strict=False)):
            if dictionary is None:
                kernels.put_words(rows, place, self._places[-1] + c // 64, c % 64, *raw(column))
            else:
                code(dictionary, column, out)  # null has a code, too
                kernels.put_codes(rows, place, out)
        return rows

    def all_keys(self) -> None:
        return None

    def keys(self, slots: np.ndarray) -> list[pa.Array]:
        words = self._table.words[slots]
        columns = []
        for c, (type_, place, dictionary) in enumerate(
            zip(self._types, self._places, self._dictionaries, strict=False)
        ):
            if dictionary is not None:
                codes = words[:, place].astype(np.int32)
                columns.append(_string_column(type_, dictionary, codes, ~dictionary.nulls(codes)))
                continue
            valid = (words[:, self._places[-1] + c // 64] >> np.uint64(c % 64)) & np.uint64(1) == 0
            if kind_of(type_) == DECIMAL:
                columns.append(decimal_column(type_, words[:, place], words[:, place + 1], valid))
            else:
                columns.append(fixed_column(type_, words[:, place], valid))
        return columns


def _string_column(type_: pa.DataType, table: StringTable, slots: np.ndarray, valid: np.ndarray | None) -> pa.Array:
    return bytes_column(type_, *table.strings(slots), valid)
