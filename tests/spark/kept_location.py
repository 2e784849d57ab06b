"""The query of the checkpoint location in ``tests/flux/data/location``, which was written by Flux before its modules were moved.

``python -m tests.spark.kept_location FOLDER`` writes such a location: a copy while the query runs, so that it holds checkpoints,
and steps ordered since. Run it from a worktree of the commit whose location is wanted. Classes and names here stay as they are.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import flux

KEYS, PARTITIONS = 12, 2
#: Rows of a partition of the source: those of the checkpoints, those that were ordered when the location was copied, and all.
CHECKPOINTED, ORDERED, ALL = 900, 1_700, 3_000
ROWS = pa.schema([("key", pa.int64()), ("name", pa.string()), ("at", pa.int64())])
#: Rows of a batch.
BATCH = 100


class Last:
    """A row that a user's object holds."""

    def __init__(self, at: int, name: str) -> None:
        self.at, self.name = at, name


class Seen(flux.Operator):
    """An operator that adds to each row the number of rows of its key before it. Its attributes are its state."""

    def open(self, context: flux.Context) -> None:
        self.counts: Counter[int] = Counter()
        self.last: dict[int, Last] = {}
        self.recent: deque[int] = deque(maxlen=3)
        self.weight = np.zeros(4)
        self.sum = Decimal(0)

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        before = []
        for row in batch.to_pylist():
            key = row["key"]
            before.append(self.counts[key])
            assert key not in self.last or self.last[key].at < row["at"]
            assert key not in self.last or self.last[key].name == row["name"]
            self.counts[key] += 1
            self.last[key] = Last(row["at"], row["name"])
            self.recent.append(row["at"])
            self.weight[key % 4] += 1
            self.sum += Decimal(row["at"])
        assert self.weight.sum() == self.counts.total()
        return pa.record_batch([*batch.columns, pa.array(before, pa.int64())], names=[*ROWS.names, "seen"])


class Totals(flux.Aggregate):
    """Spark's aggregates of the rows of a name."""

    rows = flux.count()
    seen = flux.sum("seen")
    first = flux.min("at")
    last = flux.max("at")
    mean = flux.mean("at")
    greatest = flux.max("name")


seen = flux.stage(key="key", partitions=3, schema="key long, name string, at long, seen long")(Seen)
totals = flux.stage(key="name", partitions=2)(Totals)


def rows_of(partition: int, start: int, end: int) -> pa.RecordBatch:
    numbers = np.arange(start, end)
    keys = numbers % KEYS * PARTITIONS + partition
    names = [f"name {key // 3}" for key in keys.tolist()]
    return pa.record_batch([pa.array(keys), pa.array(names), pa.array(numbers)], schema=ROWS)


def numbered(gate: Path) -> Callable[[int, list[int] | None], Iterator[flux.Positioned | None]]:
    """Make a reader whose positions are numbers of rows. The file ``gate`` holds the number of rows that each partition gives."""
    gate_path = str(gate)

    def opened() -> int:
        with open(gate_path) as file:
            return int(file.read() or 0)

    def read(partition: int, start: list[int] | None) -> Iterator[flux.Positioned | None]:
        at = start[0] if start else 0
        while at < ALL:
            end = min(at + BATCH, opened())
            if end == at:
                yield None
                continue
            batch, at = rows_of(partition, at, end), end
            yield flux.Positioned(batch, [at])

    return read


def start(spark: Any, location: Path, gate: Path, results: Path) -> Any:
    rows = flux.source(numbered(gate), ROWS, partitions=PARTITIONS, positions=True)
    return (
        totals(seen(rows))
        .to_parquet(str(results))
        .start(
            spark=spark, workers=2, checkpointLocation=location, checkpoint_interval="2s", progress_interval="100ms",
            batch_max_rows=BATCH,
        )
    )  # fmt: skip


def answer() -> list[dict[str, Any]]:
    """Return the rows of the query as plain Python makes them."""
    rows = [row for partition in range(PARTITIONS) for row in rows_of(partition, 0, ALL).to_pylist()]
    counts: Counter[int] = Counter()
    groups: dict[str, list[tuple[int, int]]] = {}
    for row in rows:
        groups.setdefault(row["name"], []).append((row["at"], counts[row["key"]]))
        counts[row["key"]] += 1
    return [
        {
            "name": name,
            "rows": len(found),
            "seen": sum(seen for _, seen in found),
            "first": min(at for at, _ in found),
            "last": max(at for at, _ in found),
            "mean": sum(at for at, _ in found) / len(found),
            "greatest": name,
        }
        for name, found in sorted(groups.items())
    ]


def main(folder: str) -> None:
    from pyspark.sql import SparkSession
    from striking import until

    spark = (
        SparkSession.builder.master("local[4]")
        .config("spark.ui.enabled", "false")
        .config("spark.flux.workers.timeout", "300")
        .getOrCreate()
    )
    with tempfile.TemporaryDirectory() as scratch:
        location, gate, results = (Path(scratch) / name for name in ("location", "gate", "results"))
        gate.touch()
        query = start(spark, location, gate, results)

        def let(rows: int) -> None:
            gate.write_text(str(rows))
            until(
                lambda: (query.lastProgress or {"totalInputRows": 0})["totalInputRows"] == rows * PARTITIONS, "the rows"
            )

        let(CHECKPOINTED)
        time.sleep(10)  # checkpoints of all partitions
        let(ORDERED)
        shutil.copytree(location, folder)
        query.stop()
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
