"""Tentative rows that a sink was shown in a failure, and the number of those that the correction has changed.

Law: a row is changed if no equal stable row has come by the end of the failure. Rows are kept as hashes, eight bytes each, and no
more than ``COUNTED_MAX`` of them: a failure that has more is counted in part.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from flux.dataflow.sink import TentativeNews, TentativeOutput, TentativeUndo
from partitioning.clustering import hash_columns
from partitioning.columns import kind_of

#: The most rows of a failure whose corrections are counted: 8 MiB of hashes.
COUNTED_MAX = 1 << 20
#: Columns with this beginning number rows for a topic; a correction may have other numbers.
NUMBERS = "_kafka_"


class ShownRows:
    """The tentative rows of one partition's sink in the newest failure."""

    def __init__(self) -> None:
        #: Tentative rows of the newest failure, and those that its correction has changed, as far as it has come.
        self.rows = self.changed = 0
        self._shown: list[tuple[int, np.ndarray]] = []
        self._void: list[np.ndarray] = []
        self._stable: list[np.ndarray] = []
        self._kept = 0
        self._over = False

    def tell(self, news: TentativeNews) -> None:
        if isinstance(news, TentativeOutput):
            if self._over:
                self.rows = self.changed = 0
                self._over = False
            self.rows += news.batch.num_rows
            if (hashes := self._hashes(news.batch)) is not None:
                self._shown.append((news.through, hashes))
        elif isinstance(news, TentativeUndo):
            self._void += [hashes for through, hashes in self._shown if news.reaches(through)]
            self._shown = [each for each in self._shown if not news.reaches(each[0])]
        else:
            self._count()
            self._over = True

    def write(self, batch: pa.RecordBatch) -> None:
        """Take stable rows. They count from the first tentative row of a failure on."""
        if (self._shown or self._void) and (hashes := self._hashes(batch)) is not None:
            self._stable.append(hashes)

    def _hashes(self, batch: pa.RecordBatch) -> np.ndarray | None:
        """Return a hash of each row; None: there are too many, or no column has a hash."""
        self._kept += batch.num_rows
        named = [batch.column(name) for name in batch.schema.names if not name.startswith(NUMBERS)]
        columns = [flat for column in named for flat in _flat(column) if kind_of(flat.type) is not None]
        return hash_columns(columns) if columns and self._kept <= COUNTED_MAX else None

    def _count(self) -> None:
        """Count the void rows without an equal stable one."""
        void = np.concatenate([*self._void, np.zeros(0, np.uint64)])
        stable = np.concatenate([*self._stable, np.zeros(0, np.uint64)])
        self.changed += int((~np.isin(void, stable)).sum())
        self._void, self._stable, self._kept = [], [], 0


def _flat(column: pa.Array) -> list[pa.Array]:
    """Return the columns of a struct, and of structs in it."""
    if not pa.types.is_struct(column.type):
        return [column]
    return [flat for each in column.flatten() for flat in _flat(each)]
