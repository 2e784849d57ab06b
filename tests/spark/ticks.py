"""A streaming data source whose batches end elsewhere each time it is asked."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

#: Rows in all; the last quarter when there is a file at ``gate``.
TICKS = 6000


class Ticks(DataSource):
    """A stream whose batches end where it happens to be asked: a few rows each, over some seconds."""

    @classmethod
    def name(cls) -> str:
        return "ticks"

    def schema(self) -> str:
        return "n long"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:  # noqa: N802
        return TicksReader(float(self.options["began"]), self.options["gate"])


class TicksReader(DataSourceStreamReader):
    def __init__(self, began: float, gate: str) -> None:
        self.began, self.gate = began, gate

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return {"n": 0}

    def latestOffset(self, start: dict[str, int], limit: Any) -> dict[str, int]:  # noqa: N802
        most = TICKS * (4 if os.path.exists(self.gate) else 3) // 4
        return {"n": min(most, int((time.time() - self.began) * 1500))}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [InputPartition((start["n"] + odd, end["n"], start["n"])) for odd in range(2)]

    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        first, end, start = partition.value
        return iter([(n,) for n in range(start, end) if n % 2 == (first - start)])
