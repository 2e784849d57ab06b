"""A stream that gateways fill, as a source of queries: its partitions are the logs of the stream (design: event-log-source)."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa

from flux.arguments import checked
from flux.dataflow.source import Positioned, RowStart, Source, source
from flux.dataflow.source_reader import PartitionReader, SourceReader
from flux.dataflow.threaded_reader import ThreadedReader
from flux.errors import QueryFailed, UsageError
from flux.eventlog.log_reader import LogReader
from flux.eventlog.log_store import open_log
from flux.eventlog.records import EventRecord, rows_of
from flux.eventlog.streams import (
    SERVICE_READER,
    NoSuchStream,
    ReaderPositions,
    StreamCatalogue,
    StreamDefinition,
    reader_of,
)
from flux.vault.location import Place, there

#: Seconds until a log that had nothing is asked again: at first, and at most. An object store has a request each time.
_ASK_S, _ASK_MAX_S, _ASK_REMOTE_S = 0.004, 0.032, 0.2
#: The events with which a query may begin that is started for the first time.
Start = Literal["earliest", "latest"]
_STARTS = get_args(Start)
#: Seconds between two looks whether the stream is still registered, while nothing comes.
_LOOK_S = 5.0


class EventReader(SourceReader):
    """The source of a stream's events."""

    endless = True
    row_numbers = True
    keeps_partitions = True
    lag_unit = "event"

    def __init__(
        self, place: Place, of: StreamDefinition, arrival: str | None, start: str = "earliest", reader: str = ""
    ) -> None:
        """``reader``: its name among the readers of the stream; "": another one for each query."""
        self._wanted = reader
        self._place, self._of, self._arrival, self._start = place, of, arrival, start
        self._columns = of.columns()
        self.partitions = of.partitions
        self.schema = self._columns
        if arrival is not None:
            self.schema = self._columns.append(pa.field(arrival, pa.timestamp("us", "UTC"), nullable=False))
        self._reader = ""
        #: By log, the position at which the query began when it was started for the first time.
        self._starts: list[int] = []

    def prepare(self, kept: Any) -> Any:
        """Register the query as a reader, so that no event is removed before the query has it durably."""
        if kept is None:
            catalogue = StreamCatalogue(self._place)
            reader, positions = (
                self._wanted or f"query-{uuid.uuid4().hex}",
                ReaderPositions(catalogue.readers_place(self._of)),
            )
            for log in range(self._of.partitions):
                positions.note(reader, log, 0)  # before the look: nothing is removed from now on
            starts = [self._begins_at(log) for log in range(self._of.partitions)]
            for log, start in enumerate(starts):
                positions.note(reader, log, start)
            kept = {"stream": self._of.id, "reader": reader, "starts": starts}
        elif kept["stream"] != self._of.id:
            raise UsageError(
                f"stream {self._of.name!r} was removed and registered again since this query was started for the first time: "
                "its events are others. Start the query with another checkpointLocation"
            )
        self._reader, self._starts = kept["reader"], kept["starts"]
        return kept

    def _begins_at(self, log: int) -> int:
        """Return the position of the first row that a new query gets from a log."""
        reader = self._open(log, 0)
        try:
            return reader.first() if self._start == "earliest" else reader.skip()
        finally:
            reader.close()

    def forget(self) -> None:
        ReaderPositions(StreamCatalogue(self._place).readers_place(self._of)).forget(self._reader)

    def partition_name(self, partition: int) -> str:
        return f"{self._of.name}/{partition}"

    def _named(self, log: int) -> str:
        return f"log {log} of stream {self._of.name!r}"

    def read(self, partition: int, start: RowStart | None) -> PartitionReader:
        first = start.number if start is not None else self._starts[partition] if self._starts else 0
        return _LogRows(self, partition, first)

    def _open(self, log: int, start: int) -> LogReader:
        store = open_log(StreamCatalogue(self._place).log_place(self._of, log))
        return LogReader(store, self._named(log), start)

    def _check_registered(self) -> None:
        """Raise QueryFailed if the stream is not registered any more."""
        try:
            found = StreamCatalogue(self._place).get(self._of.name)
        except NoSuchStream as error:
            raise QueryFailed(f"{error}: it was removed while a query read it") from error
        if found.id != self._of.id:
            raise QueryFailed(f"stream {self._of.name!r} was removed and registered again while a query read it")

    def _rows(self, record: EventRecord, wanted: int) -> Positioned:
        """Return the rows of a record from the wanted position on."""
        stored = record.stored
        batch = rows_of(record, self._columns)
        if self._arrival is not None:
            at = pa.scalar(stored.arrival, pa.timestamp("us", "UTC"))
            batch = pa.RecordBatch.from_arrays([*batch.columns, pa.repeat(at, batch.num_rows)], schema=self.schema)
        skipped = max(wanted - stored.first, 0)
        behind = stored.first + stored.rows
        return Positioned(batch.slice(skipped), behind, np.arange(stored.first + skipped, behind, dtype=np.int64))

    def _note(self, log: int, position: int) -> None:
        if self._reader:
            try:
                ReaderPositions(StreamCatalogue(self._place).readers_place(self._of)).advance(
                    self._reader, log, position
                )
            except FileNotFoundError:  # the stream was removed, or the reader forgotten
                self._check_registered()

    @property
    def _ask_s(self) -> tuple[float, float]:
        return (_ASK_S, _ASK_MAX_S) if self._place.flush_s == 0 else (_ASK_REMOTE_S, _ASK_REMOTE_S)


class _LogRows(ThreadedReader):
    """The reader of one log. Its thread reads ahead, and writes down the position below which the query has all rows durably."""

    def __init__(self, source: EventReader, log: int, start: int) -> None:
        self._source, self._log, self._start = source, log, start
        self._applied: int | None = None
        super().__init__(self._items, f"flux-log-{log}")

    def applied(self, position: Any) -> None:
        self._applied = int(position)

    def _items(self) -> Iterator[Positioned | float]:
        reader = self._source._open(self._log, self._start)
        first_s, most_s = self._source._ask_s
        wait_s, noted, looked_at = first_s, self._applied, time.monotonic()
        try:
            while True:
                wanted = reader.next
                records = reader.read()
                for record in records:
                    yield self._source._rows(record, wanted)
                if noted != self._applied:
                    noted = self._applied
                    assert noted is not None
                    self._source._note(self._log, noted)
                if records:
                    wait_s = first_s
                    continue
                if time.monotonic() - looked_at > _LOOK_S:
                    self._source._check_registered()
                    looked_at = time.monotonic()
                yield wait_s
                wait_s = min(2 * wait_s, most_s)
        finally:
            reader.close()


@checked("flux.events")
def events(
    location: str,
    stream: str,
    arrival: str | None = "arrived_at",
    name: str | None = None,
    start: Start = "earliest",
) -> Source:
    """Make a source of the events that are pushed to a stream (``flux gateway``), the oldest that is kept first.

    location  the location of the gateways, a directory or a URI that the workers can read, too
    stream    the name of the stream
    arrival   the name of an additional column with the time of arrival, TIMESTAMP, which never falls within a partition; None:
              no such column. Only for streams without a time column of their own
    name      name of the source in reports; default: that of the stream
    start     "earliest", the oldest event that is kept, or "latest", the first one after the start of the query

    Each event counts once. The stream keeps events until the query has them durably, if it has a ``checkpointLocation``.
    UsageError: no such stream, or no columns yet."""
    if start not in _STARTS:
        raise UsageError(f"flux.events: start must be one of {', '.join(_STARTS)}, got {start!r:.100}")
    return _source(location, stream, arrival, name or stream, start)


def service_events(location: str, stream: str, name: str, query: str = "") -> Source:
    """Make the source of a stream in the plan of its service. Arguments as for ``events``; it begins behind the newest event.
    ``query``: the only query that reads it; "": several may."""
    reader = reader_of(query) if query else SERVICE_READER
    return _source(location, stream, "arrived_at", name, "latest", reader)


def _source(location: str, stream: str, arrival: str | None, name: str, start: Start, reader: str = "") -> Source:
    place = there(location)
    try:
        of = StreamCatalogue(place).get(stream)
    except NoSuchStream as error:
        raise UsageError(f"flux.events: {error}. POST /v1/streams registers one") from error
    if of.schema == "infer":
        raise UsageError(f"flux.events: stream {stream!r} has no columns before its first events are pushed")
    added = arrival if of.time is None else None
    if added is not None and added.casefold() in (column.casefold() for column in of.columns().names):
        remedy = f'register it with "time": {added!r}, or with another name for the column'
        if not reader:
            remedy = "give arrival another name, or None"
        raise UsageError(
            f"flux.events: stream {stream!r} has a column {added!r}, the name of its time of arrival; {remedy}"
        )
    return source(EventReader(place, of, added, start, reader), name=name)
