"""State of tumbling and hopping windows whose rows are wanted as they came: the rows of each open pane.

Law: the groups of a window, their order and the order of their rows depend on the rows, their order and the watermarks alone:
neither on the cut of the rows into calls, nor on a snapshot and restore in between. A window is given once, when the watermark
has reached its end: its groups in the order of their first rows, and the rows of a group as they came, pane by pane, the oldest
first.

A row is kept once, in its pane. Its group is found when the window ends, for all rows of the window in one pass: nothing is
looked up while rows come.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from flux.windows.kept_rows import GroupRows, KeptRows, grouped, taken_of, whole_groups
from flux.windows.open_panes import OpenPanes
from flux.windows.window import NEVER, Window
from partitioning.errors import StateMismatchError
from partitioning.key_index import KeyIndex


class RowPanes(OpenPanes[KeptRows]):
    """The rows of the open panes of one partition."""

    def __init__(self, schema: pa.Schema, keys_at: Sequence[int], window: Window) -> None:
        """``schema``: that of rows; ``keys_at``: the positions of the keys by which they are grouped."""
        super().__init__(window)
        self._schema, self._keys_at = schema, tuple(keys_at)
        self._rows_told: dict[int, int] = {}  # by piece, the rows at the last call of ``changes``

    @property
    def nbytes(self) -> int:
        """Bytes of memory that all rows hold."""
        return sum(rows.nbytes for rows in self._pieces.values())

    def _copied(self, piece: KeptRows, keys: Sequence[Sequence[pa.Array]]) -> KeptRows:
        return piece.aside()

    def _make(self) -> KeptRows:
        return KeptRows(self._schema)

    def add(self, times: np.ndarray, rows: pa.RecordBatch, step: int = 0) -> None:
        """Add rows of a step, none of them below the watermark; ``times`` in microseconds. Raises TooManyPanes, which leaves the
        state unusable."""
        self._step = step
        order, cuts = self._by_piece(self.window.panes(times))
        if order is None:
            self._piece(cuts[0].start).add(rows)
            return
        ordered = rows.take(pa.array(order))
        for start, begin, count in cuts:
            self._piece(start).add(ordered.slice(begin, count))

    def close(self, watermark: int, rows_max: int = 1 << 62) -> Iterator[GroupRows]:
        """Yield the groups of the windows that end at the watermark or before, the earliest window first and each once, in parts
        of ``rows_max`` rows at most or of one group. Consume all of it."""
        for start, end, panes in self._ended(watermark):
            batches = [batch for pane in panes for batch in self._pieces[pane].batches()]
            order, offsets = grouped(*self._slots(batches))
            for first, last in whole_groups(offsets, rows_max):
                counts = np.diff(offsets[first : last + 1])
                rows = taken_of(batches, order[offsets[first] : offsets[last]], self._schema)
                yield GroupRows(rows, counts, np.full(len(counts), start), np.full(len(counts), end))

    def _slots(self, batches: Sequence[pa.RecordBatch]) -> tuple[np.ndarray, int]:
        """Return the number of the group of each row, and the number of groups."""
        if not self._keys_at:
            return np.zeros(sum(batch.num_rows for batch in batches), np.int32), 1
        index = KeyIndex([self._schema.field(at) for at in self._keys_at])
        slots = [index.slots([batch.column(at) for at in self._keys_at]) for batch in batches]
        return np.concatenate(slots), len(index)

    # ---- on its way

    def snapshot(self) -> dict[str, Any]:
        """Return the rows of the open panes, by their starts."""
        return {
            "closed": self.closed,
            "begun": dict(self._begun),
            "pieces": {start: self._pieces[start].since(0) for start in sorted(self._pieces)},
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Replace the state by a ``snapshot``."""
        self.closed, self._told, self._begun = snapshot["closed"], None, dict(snapshot["begun"])
        self._pieces, self._idle_below = {}, NEVER
        for start, rows in snapshot["pieces"].items():
            self._take(start, rows)

    def changes(self, share_max: float = 1.0) -> dict[str, Any] | None:
        """Return the rows that came since the last call, by their panes, and the starts of panes that are gone. None: there was
        no call before."""
        told, rows = self._told, self._rows_told
        self._told = set(self._pieces)
        self._rows_told = {start: len(piece) for start, piece in self._pieces.items()}
        if told is None:
            return None
        new = {start: piece.since(rows.get(start, 0)) for start, piece in sorted(self._pieces.items())}
        return {
            "closed": self.closed,
            "begun": {start: self._begun[start] for start in sorted(self._told - told)},
            "rows": {start: (rows.get(start, 0), table) for start, table in new.items() if table.num_rows},
            "gone": sorted(told - self._told),
        }

    def apply_changes(self, changes: Mapping[str, Any]) -> None:
        """Take the ``changes`` of a state that was equal to this one when it was asked for changes before. Raises
        StateMismatchError if it was not."""
        self.closed, self._idle_below = changes["closed"], NEVER
        for start in changes["gone"]:
            self._drop(start)
        self._begun |= changes["begun"]
        for start, (first, table) in changes["rows"].items():
            known = len(self._pieces[start]) if start in self._pieces else 0
            if known != first:
                raise StateMismatchError(f"changes of a pane of {first} rows cannot be applied to one of {known}")
            self._take(start, table)

    def _take(self, start: int, rows: pa.Table) -> None:
        piece = self._pieces.setdefault(start, self._make())
        for batch in rows.to_batches():
            piece.add(batch)
