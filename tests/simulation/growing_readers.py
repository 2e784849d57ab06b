"""Sources of plans that grow: readers in workers whose rows come at a pace, cut differently in each life."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

import flux
from flux.dataflow.source import RowStart
from tests.simulation.flows import SourceData
from tests.simulation.stage_kinds import ROW

#: Seconds between two batches of a source's partition.
BATCH_S = 0.008
#: The kinds of sources behind which stages come in some runs, in this order: batches that are counted, with and without a
#: beginning in the middle; rows that are counted; rows that bring their numbers.
SOURCES = ("counted", "from the start", "numbered", "log")
#: The number of the first row that brings its number, and the difference of two such numbers.
FIRST_NUMBER, NUMBERS_OF = 2, 3


#: Sources that come to running plans, by the name under which they travel.
_sources: dict[str, PacedSource] = {}


def _source(name: str) -> PacedSource:
    return _sources[name]


class PacedSource:
    """A source in workers, its data, and the rows that have been read of it by now."""

    def __init__(self, kind: str, data: SourceData, cuts: random.Random) -> None:
        """Make a source. ``kind``: one of ``SOURCES``; empty: batches that are counted. ``cuts``: decides where numbered rows
        are cut."""
        self.kind, self.data, self.cuts = kind, data, cuts
        #: The clock of the run, once there is one.
        self.clock: Callable[[], float] = lambda: 0.0
        #: By partition: the number of rows that any reader has given by now.
        self.read: Counter[int] = Counter()
        #: The name under which the source travels, because the source itself holds the run.
        self.known = ""

    def travels_as(self, name: str) -> None:
        self.known = name
        _sources[name] = self

    def __reduce__(self) -> Any:
        return _source, (self.known,)

    def source(self) -> flux.Source:
        partitions, name = len(self.data.batches), self.data.name
        if self.kind in ("", "counted"):
            return flux.source(self._counted, ROW, partitions, name)
        if self.kind == "from the start":
            return flux.source(self._from_the_start, ROW, partitions, name)
        return flux.source(_Numbered(self), ROW, partitions, name, positions=True)

    def _seek(self, partition: int, start: int) -> Iterator[pa.RecordBatch]:
        yield from [batch for batch in self.data.read(partition) if batch.num_rows][start:]

    def _counted(self, partition: int, start: int) -> Iterator[pa.RecordBatch | None]:
        began: float | None = None
        for number, batch in enumerate(self._seek(partition, start)):
            began = self.clock() if began is None else began
            while self.clock() < began + number * BATCH_S:
                yield None
            self.note_read(partition, batch)
            yield batch

    def _from_the_start(self, partition: int) -> Iterator[pa.RecordBatch | None]:
        return self._counted(partition, 0)

    def note_read(self, partition: int, batch: pa.RecordBatch) -> None:
        self.read[partition] = max(self.read[partition], int(batch.column("tick")[-1].as_py()) + 1)

    def first_row(self, partition: int, number: int) -> int:
        """Return the first row of a stream that begins with this element."""
        if self.kind == "log":
            return -((FIRST_NUMBER - number) // NUMBERS_OF)
        if self.kind == "numbered":
            return number
        return sum(map(len, [rows for rows in self.data.batches[partition] if rows][:number]))


class _Numbered:
    """The reader of a source whose rows are numbered, or bring their numbers, with gaps between them. The reader cuts its rows
    elsewhere each time, and gives positions now and then."""

    def __init__(self, source: PacedSource) -> None:
        self.row_numbers = source.kind == "log"
        self._source = source

    def __call__(self, partition: int, start: Any) -> Iterator[Any]:
        source, rng = self._source, self._source.cuts
        batches = list(source.data.read(partition))
        rows = pa.Table.from_batches(batches, ROW).combine_chunks()
        at = start[0] if start else 0
        if isinstance(start, RowStart):
            at = max(source.first_row(partition, start.number), 0)
        most, often, began = rng.choice([1, 3, 6]), rng.choice([0.0, 0.3, 1.0, 1.0]), source.clock()
        pieces = 0
        while at < rows.num_rows:
            while source.clock() < began + pieces * BATCH_S:
                yield None
            taken = min(rng.randint(1, most), rows.num_rows - at)
            (batch,) = rows.slice(at, taken).to_batches()
            numbers = FIRST_NUMBER + NUMBERS_OF * np.arange(at, at + taken) if self.row_numbers else None
            at, pieces = at + taken, pieces + 1
            source.note_read(partition, batch)
            yield flux.Positioned(batch, [at] if rng.random() < often else None, numbers)
