"""A sink that notes arriving rows and their times, and an evaluation of its notes at the end.

For every step and each partition of the stage before it, the sink notes when the step was applied (the step's time, the same on
every replica, so that the notes survive faults), when the oldest of its rows was due, and the number of rows. Besides, it keeps
the count of each key, to be compared with the result of the source alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

import flux
from benchmarks.paced import Script
from partitioning.clustering import hash_columns, partition_ids
from spark_integration.query.output import fetch_all
from spark_integration.query.query import Query

#: Size of a value that leaves the sink.
CHUNK_BYTES = 1 << 20
#: Small steps are evaluated together, because the work of the sink should not be part of the measurement.
STEPS, ROWS = 64, 4096


class Arrivals(flux.Operator):
    """A sink for columns key, due_ns and rows. ``newest``: rows is the newest count of a key; else it is added to the count."""

    schema = pa.schema([("kind", pa.string()), ("data", pa.binary())])
    keys = 0
    partitions = 1
    newest = True

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.counts = np.zeros(self.keys, np.int64)
        self.notes: list[np.ndarray] = []
        self._steps: list[tuple[int, pa.RecordBatch]] = []
        self._rows = 0

    def process(self, batch: pa.RecordBatch) -> None:
        self._steps.append((round(self.context.now * 1e9), batch))
        self._rows += batch.num_rows
        if len(self._steps) >= STEPS or self._rows >= ROWS:
            self._look()

    def _look(self) -> None:
        """Evaluate the steps since the last time."""
        if not self._steps:
            return
        times = np.array([now for now, _ in self._steps])
        of_step = np.repeat(np.arange(len(times)), [batch.num_rows for _, batch in self._steps])
        batch = pa.concat_batches([batch for _, batch in self._steps])
        self._steps, self._rows = [], 0
        keys, rows = batch.column("key").to_numpy(), batch.column("rows").to_numpy()
        (np.maximum if self.newest else np.add).at(self.counts, keys, rows)
        ids = partition_ids(hash_columns([batch.column("key")]), self.partitions)
        groups = of_step * self.partitions + ids
        oldest = np.full(len(times) * self.partitions, np.iinfo(np.int64).max)
        np.minimum.at(oldest, groups, batch.column("due_ns").to_numpy())
        arrived = np.bincount(groups, minlength=len(oldest))
        used = np.flatnonzero(arrived)
        now, partition = times[used // self.partitions], used % self.partitions
        self.notes.append(np.column_stack([now, partition, oldest[used], arrived[used]]))

    def finish(self) -> Iterator[pa.RecordBatch]:
        self._look()
        yield from self._chunks("count", self.counts.astype(np.int32).tobytes())
        yield from self._chunks("note", self._all_notes().tobytes())

    def _chunks(self, kind: str, data: bytes) -> Iterator[pa.RecordBatch]:
        """Yield the parts of a note in order. Each is a batch of its own, with the partition by which parts are put together."""
        for start in range(0, len(data), CHUNK_BYTES):
            name = f"{kind} {self.context.partition} {start:012}"
            columns = [pa.array([name]), pa.array([data[start : start + CHUNK_BYTES]], pa.binary())]
            yield pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _all_notes(self) -> np.ndarray:
        return np.concatenate([np.zeros((0, 4), np.int64), *self.notes])

    def snapshot(self) -> Any:
        self._look()
        return self.counts, self._all_notes()

    def restore(self, snapshot: Any) -> None:
        self.counts, self.notes = snapshot[0].copy(), [snapshot[1]]


def sink(keys: int, partitions: int, newest: bool = True) -> type[Arrivals]:
    """Make the sink for ``keys`` keys, behind a stage of ``partitions`` partitions."""
    settings = {"keys": keys, "partitions": partitions, "newest": newest, "__module__": __name__}
    return type("Arrived", (Arrivals,), settings)


class Span(NamedTuple):
    """A time from ``start`` to ``end``, in seconds since 1970."""

    start: float
    end: float


@dataclass(frozen=True)
class Seen:
    """The arrivals: one entry for each step and partition of the stage before, by time, in seconds. ``due`` is 0 if
    rows came as fast as they could."""

    at: np.ndarray
    partition: np.ndarray
    due: np.ndarray
    rows: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, notes: np.ndarray, counts: np.ndarray) -> Seen:
        notes = notes[np.argsort(notes[:, 0], kind="stable")]
        return cls(notes[:, 0] / 1e9, notes[:, 1], notes[:, 2] / 1e9, notes[:, 3], counts)

    @property
    def age_ms(self) -> np.ndarray:
        ages: np.ndarray = (self.at - self.due) * 1e3
        return ages

    def between(self, start: float, end: float) -> np.ndarray:
        """Make a mask of the entries that had a due time and arrived in this span."""
        return (self.at >= start) & (self.at < end) & (self.due > 0)

    def due_between(self, start: float, end: float) -> np.ndarray:
        """Make a mask of the entries that were due in this span, whenever they arrived."""
        return (self.due >= start) & (self.due < end)

    def rate(self, start: float, end: float) -> float:
        """Compute the rows per second that arrived in this time."""
        inside = (self.at >= start) & (self.at < end)
        return float(self.rows[inside].sum() / (end - start))

    def longest_gap_ms(self, partition: int, start: float, end: float) -> float:
        """Compute the longest time without rows of a partition. The time before the first and after the last row counts, too."""
        at = self.at[(self.at > start) & (self.at < end) & (self.partition == partition)]
        return float(np.diff([start, *at, end]).max() * 1e3)

    def exactness(self, expected: np.ndarray) -> dict[str, int]:
        """Count missing rows and rows counted twice, by comparison with the rows that the source gives by itself."""
        return {
            "rows": int(expected.sum()),
            "lost": int(np.maximum(expected - self.counts, 0).sum()),
            "duplicated": int(np.maximum(self.counts - expected, 0).sum()),
        }


def collect(query: Query, script: Script, keys: int | None = None) -> Seen:
    """Wait for the end of the output and put the notes of all sinks together. ``keys`` are those of the sink; None: as many as
    the script has."""
    query.wait_for_output()
    found: dict[str, list[bytes]] = {"count": [], "note": []}
    for row in sorted(fetch_all(query).collect(), key=lambda row: row.kind):
        found[row.kind.split()[0]].append(bytes(row.data))
    notes = np.frombuffer(b"".join(found["note"]), np.int64).reshape(-1, 4)
    # A key arrives at one sink, and the others have counted none of it.
    counts = np.frombuffer(b"".join(found["count"]), np.int32).reshape(-1, keys or script.keys).sum(axis=0)
    return Seen.of(notes, counts)


def percentile(values: Any, percent: float) -> float | None:
    """Compute a percentile, rounded; None without values."""
    return round(float(np.percentile(values, percent)), 3) if len(values) else None
