"""A streaming data source inside a worker (design: ledger).

The source says where a batch ends when it is asked, and gives another end each time. So ends are entries of a ledger: entry
0 is the initial offset, and batch n goes from entry n - 1 to entry n. An end is written down before a row of its batch is
given. A position is the number of a batch, the index of a partition in it, and the number of its rows that come before.
"""

from __future__ import annotations

import inspect
import json
from collections import deque
from collections.abc import Iterator
from typing import Any

from pyspark.errors import PySparkNotImplementedError
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, SimpleDataSourceStreamReader
from pyspark.sql.types import StructType

from flux.connectors.ledger import HasLedger, Ledger, LedgerBroken
from flux.dataflow.source import Positioned
from flux.dataflow.source_reader import SourceReader
from flux.dataflow.threaded_reader import ThreadedReader
from flux.errors import UsageError
from spark_integration.datasource.rows import batches


class StreamReading(HasLedger, SourceReader):
    """The reader of a source of one partition. ``commit``: the data source is told the applied offsets."""

    endless = True
    partitions = 1

    def __init__(self, made: DataSource, schema: StructType, ledgers: str, poll_s: float, commit: bool) -> None:
        super().__init__(ledgers)
        self.made, self.schema, self.poll_s, self.commit = made, schema, poll_s, commit

    def read(self, partition: int, start: Any) -> StreamRows:
        return StreamRows(self, start)


class StreamRows(ThreadedReader):
    """Rows of the data source, without end. The data source's reader is made, used and stopped by the thread."""

    def __init__(self, how: StreamReading, start: Any) -> None:
        self._how = how
        self._start: tuple[int, int, int] = (
            (1, 0, 0) if start is None else (int(start[0]), int(start[1]), int(start[2]))
        )
        self._ledger = Ledger(how.ledger)
        self._offsets: list[Any] = []
        self._given = self._start  # the position behind the last rows that were given
        #: Batches that are read to their end and not committed: the position behind their rows, and the number of the
        #: batch.
        self._ends = deque([(self._start, self._start[0] - 1)])
        #: Position through which the consumers have applied all rows.
        self._applied: tuple[int, int, int] | None = None
        super().__init__(self._rows, "flux-datasource-stream")

    def applied(self, position: Any) -> None:
        self._applied = (int(position[0]), int(position[1]), int(position[2]))

    def _rows(self) -> Iterator[Positioned | float]:
        """Yield the rows from the start on, and the seconds to pause where there are none. The first batch is ``number``, without
        its partitions below ``index`` and the first ``skip`` rows of partition ``index``; later batches are whole. The end of a
        batch is in the ledger before a row of it is given."""
        source = _opened(self._how.made, self._how.schema)
        try:
            number, index, skip = self._start
            self._learn()
            if skip and len(self._offsets) <= number:
                raise LedgerBroken(
                    f"the ledger {self._ledger.folder} has {len(self._offsets)} offsets, but batch {number} was begun: it was "
                    "removed, or cut off. Put it back, or start with another checkpointLocation"
                )
            if not self._offsets:
                self._decide(_as_kept(source.initial()))
            while True:
                new = len(self._offsets) <= number
                if new:
                    end, now = source.latest(_as_kept(self._offsets[number - 1]))
                    end = _as_kept(end)
                    if _same(end, self._offsets[number - 1]):
                        self._tell(source)
                        yield self._how.poll_s
                        continue
                    if self._decide(end) and now is not None:
                        source.keep(now)
                before = self._given
                for part, given in enumerate(source.parts(self._offsets[number - 1], self._offsets[number])):
                    if part >= index:
                        yield from self._part(number, part, given, skip)
                        index, skip = part + 1, 0
                self._ends.append((self._given, number))
                self._tell(source)
                # Each new end is written to the ledger, so an end without rows is followed by a pause.
                yield self._how.poll_s if new and self._given == before else 0.0
                number, index, skip = number + 1, 0, 0
        finally:
            source.stop()

    def _part(self, number: int, part: int, given: Any, skip: int) -> Iterator[Positioned | float]:
        at = 0
        for batch in batches(given(), self._how.schema, self._how.made):
            left = min(max(skip - at, 0), batch.num_rows)
            at += batch.num_rows
            if left < batch.num_rows:
                self._given = (number, part, at)
                yield Positioned(batch.slice(left), [number, part, at])
            else:
                yield 0.0  # no row, but a chance to stop for a consumer that wants no more

    def _learn(self) -> None:
        self._offsets += [entry["offset"] for entry in self._ledger.news()]

    def _decide(self, offset: Any) -> bool:
        """Add an offset to the ledger. False: another life had added one, and its offset counts."""
        if self._ledger.add({"offset": offset}):
            self._offsets.append(offset)
            return True
        self._learn()
        return False

    def _tell(self, source: _Stream) -> None:
        """Commit the offset of the newest batch whose rows are all applied, if the data source is told offsets."""
        applied, through = self._applied, 0  # 0: of none, because entry 0 is the initial offset
        while applied is not None and self._ends and self._ends[0][0] <= applied:
            through = self._ends.popleft()[1]
        if self._how.commit and through:
            source.commit(self._offsets[through])


def _as_kept(offset: Any) -> Any:
    """Return an offset as the ledger has it: a copy that later changes by the data source do not reach."""
    try:
        return json.loads(json.dumps(offset))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"offsets of a data source must be JSON, as Spark wants them: {error}; got {offset!r:.200}"
        ) from None


class _Stream:
    """Common part of both kinds of stream readers. ``parts`` returns the partitions of a batch, as functions that read them."""

    def __init__(self, reader: Any) -> None:
        self.reader = reader

    def initial(self) -> Any:
        return self.reader.initialOffset()

    def latest(self, start: Any) -> tuple[Any, Any]:
        """Return the present end, and the rows up to there if they came with it."""
        raise NotImplementedError

    def keep(self, rows: Any) -> None:
        """Keep rows that came with the end: they are read next."""

    def parts(self, start: Any, end: Any) -> list[Any]:
        raise NotImplementedError

    def commit(self, end: Any) -> None:
        self.reader.commit(end)

    def stop(self) -> None:
        stop = getattr(self.reader, "stop", None)
        if stop is not None:
            stop()


class _Partitioned(_Stream):
    """Adapter of a ``DataSourceStreamReader``."""

    def latest(self, start: Any) -> tuple[Any, Any]:
        ask = self.reader.latestOffset
        if inspect.signature(ask).parameters:
            return ask(start, self.reader.getDefaultReadLimit()), None
        return ask(), None  # signature of data sources before Spark 4.2

    def parts(self, start: Any, end: Any) -> list[Any]:
        return [lambda part=part: self.reader.read(part) for part in self.reader.partitions(start, end)]


class _Simple(_Stream):
    """Adapter of a ``SimpleDataSourceStreamReader``, which gives rows with their end, once."""

    _rows: Any = None

    def latest(self, start: Any) -> tuple[Any, Any]:
        rows, end = self.reader.read(start)
        return end, rows

    def keep(self, rows: Any) -> None:
        self._rows = rows

    def parts(self, start: Any, end: Any) -> list[Any]:
        rows, self._rows = self._rows, None
        return [lambda: self.reader.readBetweenOffsets(start, end) if rows is None else iter(rows)]


def _opened(made: DataSource, schema: StructType) -> _Stream:
    """Open the stream as Spark does: with the simple reader if there is no other."""
    try:
        reader = made.streamReader(schema=schema)
    except PySparkNotImplementedError:
        simple = made.simpleStreamReader(schema=schema)
        if not isinstance(simple, SimpleDataSourceStreamReader):
            raise TypeError(
                f"simpleStreamReader() of {made.name()} must return a SimpleDataSourceStreamReader, got {simple!r:.100}"
            ) from None
        return _Simple(simple)
    if not isinstance(reader, DataSourceStreamReader):
        raise TypeError(f"streamReader() of {made.name()} must return a DataSourceStreamReader, got {reader!r:.100}")
    return _Partitioned(reader)


def _same(one: Any, other: Any) -> bool:
    """Compare two offsets as Spark writes them."""
    return json.dumps(one) == json.dumps(other)
