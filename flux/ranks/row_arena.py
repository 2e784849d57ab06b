"""Rows of an operator's state, by number: appended at the end, taken in any order, never changed.

Rows lie in chunks, each more than twice as large as the one behind it. So there are few chunks, and a row is copied a few times
in all, however small the batches are that come. Chunks with much text stay apart: a column of a batch has less than 2 GiB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from flux.operators.batches import at_once, text_cuts, text_lengths

#: Bytes beyond which chunks stay apart.
CHUNK_BYTES_MAX = 1 << 28


class RowArena:
    """Rows with numbers from 0 on."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self._has_text = has_text(schema)
        self._chunks: list[pa.RecordBatch] = []
        self._starts = np.zeros(1, np.int64)  # of each chunk, then the number of rows
        self._lengths: list[np.ndarray | None] = []  # of the text of rows, by chunk; None: not asked for yet
        #: No row has more bytes of text.
        self.longest = 0

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def nbytes(self) -> int:
        lengths = sum(each.nbytes for each in self._lengths if each is not None)
        return lengths + sum(int(chunk.nbytes) for chunk in self._chunks)

    def append(self, rows: pa.RecordBatch) -> None:
        """Append rows. The batch owns its memory: a view would hold the batch that it is a part of."""
        if not rows.num_rows:
            return
        self.longest = max(self.longest, int(np.max(lengths_of(rows))))
        small, count, nbytes = [rows], rows.num_rows, rows.nbytes
        while self._chunks and self._chunks[-1].num_rows <= 2 * count:
            nbytes += self._chunks[-1].nbytes
            if nbytes > CHUNK_BYTES_MAX:
                break
            small.insert(0, self._chunks.pop())
            self._lengths.pop()
            count += small[0].num_rows
        self._chunks.append(small[0] if len(small) == 1 else pa.concat_batches(small))
        self._lengths.append(None)
        self._starts = np.cumsum([0, *(chunk.num_rows for chunk in self._chunks)])

    def append_table(self, rows: pa.Table) -> None:
        """Append the rows of a table, whose batches own their memory."""
        for batch in rows.to_batches():
            self.append(batch)

    def lengths(self, numbers: np.ndarray) -> np.ndarray | int:
        """Return the bytes of text of rows, as ``text_lengths`` counts them."""
        if not self._has_text:
            return 0
        places, found = np.searchsorted(self._starts, numbers, side="right") - 1, np.zeros(len(numbers), np.int64)
        for place, chunk in enumerate(self._chunks):
            here = places == place
            if here.any():
                lengths = self._lengths[place]
                if lengths is None:
                    lengths = self._lengths[place] = np.asarray(lengths_of(chunk))
                found[here] = lengths[numbers[here] - self._starts[place]]
        return found

    def parts(self, numbers: np.ndarray) -> Iterator[np.ndarray]:
        """Yield numbers in parts whose rows can be taken at once; at least one part."""
        parts = text_parts(len(numbers), self.longest, lambda: self.lengths(numbers))
        yield from (numbers[part] for part in parts)

    def table(self, numbers: np.ndarray) -> pa.Table:
        """Return the rows with these numbers, in this order, however much text they have."""
        return pa.Table.from_batches([self.take(part) for part in self.parts(numbers)], self.schema)

    def take(self, numbers: np.ndarray) -> pa.RecordBatch:
        """Return the rows with these numbers, in this order."""
        if len(self._chunks) == 1:
            return self._chunks[0].take(pa.array(numbers))
        places = np.searchsorted(self._starts, numbers, side="right") - 1
        order = np.argsort(places, kind="stable")
        cuts = np.searchsorted(places[order], np.arange(len(self._chunks) + 1))
        parts = []
        for place, (begin, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
            if end > begin:
                parts.append(self._chunks[place].take(pa.array(numbers[order[begin:end]] - self._starts[place])))
        if not parts:
            return pa.RecordBatch.from_arrays([pa.array([], type_) for type_ in self.schema.types], schema=self.schema)
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return (
            parts[0]
            if len(parts) == 1 and (np.diff(order) == 1).all()
            else pa.concat_batches(parts).take(pa.array(back))
        )


def text_parts(rows: int, longest: int, lengths: Callable[[], np.ndarray | int]) -> Iterator[slice]:
    """Yield parts of rows that can be taken at once; at least one. ``longest``: no row has more text; ``lengths`` tells the text
    of each row, and is called where that is not enough."""
    return text_cuts(0 if at_once(rows, longest) else lengths(), rows)


def has_text(schema: pa.Schema) -> bool:
    """Return whether rows may have text or lists."""
    return not all(isinstance(text_lengths(pa.array([], type_)), int) for type_ in schema.types)


def lengths_of(rows: pa.RecordBatch) -> np.ndarray | int:
    """Return the bytes of text of each row."""
    return sum([text_lengths(column) for column in rows.columns])
