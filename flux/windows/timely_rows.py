"""Rows of an operator that needs their times: those that count, and how many are left out.

Left out are rows without a time, as Spark leaves them out of windows, and rows below the watermark. A source gives no row below
its own watermark; such a row comes from an idle source that is back, or from an operator that has moved times back. Both are
counted, and the counts are part of the operator's state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flux.windows.times import TIME_MAX, microseconds_of
from flux.windows.window import NEVER


class TimelyRows:
    """The judge of the rows of one input of one partition."""

    def __init__(self) -> None:
        #: Rows below this time are left out.
        self.watermark = NEVER
        #: Rows without a time.
        self.without_time = 0
        #: Rows below the watermark of their step.
        self.behind_watermark = 0

    def advance(self, watermark: int) -> None:
        """Take a watermark; it never falls."""
        self.watermark = max(self.watermark, watermark)

    def take(self, batch: pa.RecordBatch, column: pa.Array, before: int = 0) -> tuple[pa.RecordBatch, np.ndarray]:
        """Return the rows that count, and their times in microseconds: those of the column less ``before``. ValueError: a time is
        too far away from 1970."""
        if column.null_count:
            self.without_time += column.null_count
            batch = batch.filter(pc.is_valid(column))
            column = column.drop_null()
        times = microseconds_of(column) - before
        if not len(times):
            return batch, times
        least = int(times.min())
        if not -TIME_MAX <= least <= int(times.max()) <= TIME_MAX:
            raise ValueError(f"a time more than {TIME_MAX:,} us away from 1970: are the times right?")
        if least < self.watermark:
            kept = times >= self.watermark
            self.behind_watermark += int(len(times) - np.count_nonzero(kept))
            batch, times = batch.filter(pa.array(kept)), times[kept]
        return batch, times

    @property
    def left_out(self) -> tuple[int, int]:
        """The rows below the watermark of their step, and those without a time."""
        return self.behind_watermark, self.without_time

    def state(self) -> dict[str, int]:
        return {"watermark": self.watermark, "no_time": self.without_time, "behind": self.behind_watermark}

    def put(self, state: Mapping[str, Any]) -> None:
        """Replace the counts and the watermark by an earlier ``state``."""
        self.watermark, self.without_time, self.behind_watermark = (
            state["watermark"],
            state["no_time"],
            state["behind"],
        )
