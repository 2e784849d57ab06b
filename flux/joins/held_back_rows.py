"""Rows of one input that wait for the watermark, in the order of their arrival."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from flux.ranks.row_arena import RowArena
from flux.windows.window import NEVER

#: Rows in memory below which rows that have been taken stay there.
ROWS_MIN = 1024


class HeldBackRows:
    """Rows with their times. Law: the taken rows depend on the rows and the watermarks alone, not on the cut of the rows into
    calls, nor on a snapshot and restore in between."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._taken = NEVER  # all rows below this time have been taken
        self._new_from: int | None = None  # the first row that ``changes`` has not told
        self._clear()

    def _clear(self) -> None:
        self._arena = RowArena(self._schema)
        self._numbers = np.zeros(0, np.int64)
        #: Microseconds, of each row.
        self.times = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def nbytes(self) -> int:
        return self._arena.nbytes + self._numbers.nbytes + self.times.nbytes

    def add(self, batch: pa.RecordBatch, times: np.ndarray) -> None:
        """Add rows, none of them below the watermark."""
        first = len(self._arena)
        self._arena.append(
            batch.take(pa.array(np.arange(batch.num_rows)))
        )  # a view would hold the batch of a whole stream
        self._numbers = np.concatenate([self._numbers, first + np.arange(batch.num_rows)])
        self.times = np.concatenate([self.times, times])

    def take(self, watermark: int) -> tuple[pa.RecordBatch, np.ndarray]:
        """Take the rows below the watermark, with their times."""
        self._taken = max(self._taken, watermark)
        ready = self.times < watermark
        rows, times = self._arena.take(self._numbers[ready]), self.times[ready]
        if len(times):
            if self._new_from is not None:
                self._new_from -= int(np.count_nonzero(ready[: self._new_from]))
            self._numbers, self.times = self._numbers[~ready], self.times[~ready]
            if len(self._arena) >= ROWS_MIN and 2 * len(self) < len(self._arena):
                self._load(self._arena.table(self._numbers), self.times)
        return rows, times

    @property
    def longest(self) -> int:
        """A number of bytes of text that no row exceeds."""
        return self._arena.longest

    def lengths(self, ready: np.ndarray) -> np.ndarray:
        """Return the bytes of text of some of the rows."""
        found: np.ndarray = np.zeros(np.count_nonzero(ready), np.int64) + self._arena.lengths(self._numbers[ready])
        return found

    def _load(self, rows: pa.Table, times: np.ndarray) -> None:
        self._clear()
        self._arena.append_table(rows)
        self._numbers, self.times = np.arange(rows.num_rows), times

    def part(self, chosen: np.ndarray) -> HeldBackRows:
        """Return copies of some of the rows."""
        made = HeldBackRows(self._schema)
        made._taken = self._taken
        made._load(self._arena.table(self._numbers[chosen]), self.times[chosen])
        return made

    def columns(self, chosen: np.ndarray, at: Sequence[int]) -> list[pa.Array]:
        """Return columns of some of the rows."""
        rows = self._arena.take(self._numbers[chosen])
        return [rows.column(each) for each in at]

    # ---- on its way

    def snapshot(self) -> dict[str, Any]:
        return {"taken": self._taken, "times": self.times, "rows": self._table(self._numbers)}

    def _table(self, numbers: np.ndarray) -> pa.Table:
        return self._arena.table(numbers)

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        self._clear()
        self._taken, self._new_from = snapshot["taken"], None
        self._append(snapshot)

    def _append(self, state: Mapping[str, Any]) -> None:
        times = np.array(state["times"], np.int64)
        for batch in state["rows"].to_batches():
            self.add(batch, times[: batch.num_rows])
            times = times[batch.num_rows :]

    def changes(self) -> dict[str, Any] | None:
        """Return the rows that came since the last call and still wait. None: there was no call before."""
        first, self._new_from = self._new_from, len(self)
        if first is None:
            return None
        return {"taken": self._taken, "times": self.times[first:], "rows": self._table(self._numbers[first:])}

    def apply_changes(self, changes: Mapping[str, Any]) -> None:
        """Take the ``changes`` of rows that were equal to these when they were asked for changes before."""
        self.take(changes["taken"])
        self._append(changes)
