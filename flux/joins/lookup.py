"""A small table in every worker, in which the rows of an edge look up the row of their key (design: lookup).

Law: a row that leaves for each row that comes, in the same order, with the columns of the table behind its own, and a column that
tells whether a row was found. So a lookup is a step of an edge, and costs no exchange. Keys of the table are unique, because
rows are numbered as they are read, and a step that gives several rows for one has no numbers for them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flux.errors import UsageError
from flux.expressions.kernels.logic import equal
from flux.expressions.kernels.values import spread
from flux.ranks.row_arena import lengths_of
from partitioning.clustering import hash_columns

#: Bytes of text that the rows found for one batch may have: a column has less than 2 GiB.
TEXT_MAX = 1 << 30
_CACHES = ("_order", "_hashes", "_keys", "_lengths")


class LookupTable:
    """The rows of a table by their keys."""

    def __init__(
        self, rows: pa.Table, key: Sequence[int], names: Sequence[str], read_by: Sequence[str], text: str
    ) -> None:
        """``key``: positions of the key columns of the table; ``names``: those that its columns get, and the column that tells
        whether a row was found; ``read_by``: the columns of the rows that come with the keys, in the same types; ``text`` is the
        name of the lookup.

        Rows with a null in the key are left out: nothing is equal to null."""
        keys = [rows.column(at).combine_chunks() for at in key]
        whole = (
            np.logical_and.reduce([np.asarray(each.is_valid()) for each in keys])
            if rows.num_rows
            else np.zeros(0, bool)
        )
        self._rows = rows.filter(pa.array(whole)).combine_chunks()
        self._key, self._names, self._read_by, self._text = tuple(key), tuple(names), tuple(read_by), text

    @property
    def name(self) -> str:
        return self._text

    @property
    def read_by(self) -> tuple[str, ...]:
        """The columns of the rows that come with the keys."""
        return self._read_by

    def only(self, names: Collection[str]) -> LookupTable:
        """Return the table without the columns that are neither keys nor have these names."""
        width = len(self._rows.schema)
        kept = [at for at in range(width) if at in self._key or self._names[at] in names]
        if len(kept) == width:
            return self
        called, key = [*(self._names[at] for at in kept), self._names[-1]], list(map(kept.index, self._key))
        return LookupTable(self._rows.select(kept), key, called, self._read_by, self._text)

    def with_rows(self, rows: pa.Table) -> LookupTable:
        """Return the table with other rows, of the same columns."""
        return LookupTable(rows, self._key, self._names, self._read_by, self._text)

    @property
    def added(self) -> list[pa.Field]:
        """The columns that it puts behind those that come."""
        types = [*self._rows.schema.types, pa.bool_()]
        return [pa.field(name, type_) for name, type_ in zip(self._names, types, strict=True)]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _CACHES}

    @cached_property
    def _keys(self) -> list[pa.Array]:
        return [_whole(self._rows.column(at)) for at in self._key]

    @cached_property
    def _lengths(self) -> np.ndarray:
        """The bytes of text of each row."""
        every = [np.broadcast_to(lengths_of(batch), batch.num_rows) for batch in self._rows.to_batches()]
        return np.concatenate(every) if every else np.zeros(0, np.int64)

    @cached_property
    def _order(self) -> np.ndarray:
        """The rows in the order of the hashes of their keys."""
        return np.argsort(hash_columns(self._keys), kind="stable")

    @cached_property
    def _hashes(self) -> np.ndarray:
        hashes: np.ndarray = hash_columns(self._keys)[self._order]
        return hashes

    @cached_property
    def _run(self) -> int:
        """The most rows with the same hash."""
        if not len(self._hashes):
            return 0
        starts = np.flatnonzero(np.concatenate([[True], self._hashes[1:] != self._hashes[:-1]]))
        return int(np.diff(np.append(starts, len(self._hashes))).max())

    def first_twice(self) -> list[Any] | None:
        """Return a key that several rows have; None: keys are unique."""
        at = self._found(self._keys)
        other = np.flatnonzero(at != np.arange(len(at)))
        return None if not len(other) else [each[int(other[0])].as_py() for each in self._keys]

    def unique(self) -> LookupTable:
        """Return the table with one row of each key: the first in the order of hashes."""
        at = self._found(self._keys)
        return self.with_rows(self._rows.filter(pa.array(at == np.arange(len(at)))))

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows of a batch with the rows of the table behind them; null where there is none."""
        keys = [batch.column(batch.schema.get_field_index(name)) for name in self._read_by]
        at = self._found(keys)
        there = at >= 0
        self._check_text(at[there])
        places = pa.array(at, mask=~there)
        found = [_whole(column.take(places)) for column in self._rows.columns]
        names = [*batch.schema.names, *self._names]
        return pa.RecordBatch.from_arrays([*batch.columns, *found, pa.array(there)], names=names)

    def _check_text(self, rows: np.ndarray) -> None:
        """Raise UsageError if these rows have more text together than fits into a batch."""
        longest = int(self._lengths.max(initial=0))
        if len(rows) * longest <= TEXT_MAX or int(self._lengths[rows].sum()) <= TEXT_MAX:
            return
        fits = max(TEXT_MAX // longest, 1)
        raise UsageError(
            f"looking up {self._text} gives {len(rows):,} rows of one batch up to {longest:,} bytes of text each, and they may "
            f"have {TEXT_MAX:,} together: say spark.flux.batch.maxRows={fits}, or leave long columns out of the table"
        )

    def _found(self, keys: Sequence[pa.Array]) -> np.ndarray:
        """Return the row of the table for each key; -1: there is none."""
        rows = len(keys[0])
        at = np.full(rows, -1, np.int64)
        if not rows or not len(self._hashes):
            return at
        hashes = hash_columns(keys)
        first = np.searchsorted(self._hashes, hashes)
        for step in range(self._run):
            place = np.minimum(first + step, len(self._hashes) - 1)
            same = (at < 0) & (self._hashes[place] == hashes)
            if not same.any():
                break
            row = self._order[place]
            for own, theirs in zip(keys, self._keys, strict=True):
                same &= _equal(own, theirs.take(pa.array(row)))
            at[same] = row[same]
        return at


def _equal(one: pa.Array, other: pa.Array) -> np.ndarray:
    """Return where values are equal as in Spark; null is equal to nothing."""
    result = spread(equal(pa.bool_(), one, other), len(one))
    return np.asarray(pc.fill_null(result, False))


def _whole(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    if isinstance(column, pa.Array):
        return column
    combined = column.combine_chunks()
    return combined.chunk(0) if isinstance(combined, pa.ChunkedArray) else combined
