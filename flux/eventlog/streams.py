"""Registered streams, and the documents that a location has of them (design: registered-streams).

streams.json           all definitions: one document, so that it is changed as a whole
streams/ID/log-0       the first log of a stream; ID is of its own for each registration, so a stream of the same name that
                       comes later has nothing of an earlier one
streams/ID/readers     for each reader and log the position below which it needs nothing more
"""

from __future__ import annotations

import re
import uuid
import zlib
from collections.abc import Callable, Container, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from flux.errors import FluxError, UsageError
from flux.eventlog.documents import NamedEntries
from flux.eventlog.log_owner import LogLimits
from flux.operators.schema import ddl_text, parse_ddl
from flux.vault.location import Place
from flux.windows.durations import microseconds

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}")
#: The end of the name under which a query reads the late events of a stream with a time column: those of "clicks" are
#: "clicks.late".
LATE = ".late"
#: More logs than that would be more open files and flushes than a gateway should have for one stream.
PARTITIONS_MAX = 64
#: Definitions that one document may have: it is read and written as a whole.
STREAMS_MAX = 10_000
#: Columns of a stream: each takes memory for every row without a value, and some kilobytes in readers of text.
COLUMNS_MAX = 1000
_TYPES = {
    pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.string(), pa.date32(),
    pa.timestamp("us", "UTC"), pa.timestamp("us"),
}  # fmt: skip


class StreamExists(FluxError):
    """Refusal of a registration: the name belongs to a stream with another definition."""


class StreamsFull(FluxError):
    """Refusal of a registration because the location has all the streams that it may have."""


class StreamIsRead(FluxError):
    """Refusal of a removal because registered queries read the stream."""


class NoSuchStream(FluxError):
    """Refusal of a request about a stream that is not registered."""


class Retention(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The least that a stream keeps of its events. A log begins to remove some when it has both more time and more bytes than
    its share, or more bytes than the disk may have."""

    #: A duration, as in "1 hour".
    time: str = "1 day"
    bytes: int = 1 << 30

    def limits(self, partitions: int) -> LogLimits:
        """Return the limits of each of several logs that share it."""
        time_us, nbytes = microseconds(self.time, "retain.time"), self.bytes // partitions
        return LogLimits(
            segment_bytes=min(16 << 20, max(nbytes // 4, 1 << 16)), segment_us=max(time_us // 4, 1_000_000),
            retain_us=time_us, retain_bytes=nbytes, disk_bytes=8 * nbytes,
        )  # fmt: skip


class StreamDefinition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A registered stream."""

    name: str
    #: Columns in DDL; "infer": those of the first events.
    schema: str
    #: The column with the time of an event; None: it is the time of arrival.
    time: str | None = None
    #: The lateness of events, and the time after which a partition without events is idle; both only with ``time``.
    delay: str | None = None
    idle: str | None = None
    retain: Retention = Retention()
    #: The number of its logs.
    partitions: int = 1
    #: Given when it is registered.
    id: str = ""

    def columns(self) -> pa.Schema:
        """Return the columns of its events."""
        return parse_ddl(self.schema)

    def limits(self) -> LogLimits:
        """Return the limits of each of its logs."""
        return self.retain.limits(self.partitions)

    def log_of(self, name: str) -> int:
        """Return the log of requests under a name: a repeat goes to the log of the first one, at every gateway."""
        return zlib.crc32(name.encode()) % self.partitions


def checked_definition(made: StreamDefinition) -> StreamDefinition:
    """Return a definition whose parts fit together. UsageError names the part that does not."""
    check_name(made.name)
    check_not_late(made.name)
    if not 1 <= made.partitions <= PARTITIONS_MAX:
        raise UsageError(f"partitions: expected 1 to {PARTITIONS_MAX}, got {made.partitions}")
    check_retention(made.retain)
    for what, text in (("delay", made.delay), ("idle", made.idle)):
        if text is not None and made.time is None:
            raise UsageError(f"{what}: it belongs to a time column; name that in 'time'")
        if text is not None and microseconds(text, what) < 0:
            raise UsageError(f"{what}: expected a duration from 0 on, got {text!r}")
    if made.schema == "infer":
        if made.time is not None:
            raise UsageError("time: the columns are not known yet; write the schema, or leave out 'time'")
        return made
    schema = made.columns()
    ddl = ddl_of(schema)
    if made.time is not None and (
        made.time not in schema.names or not pa.types.is_timestamp(schema.field(made.time).type)
    ):
        raise UsageError(f"time: expected a TIMESTAMP column of {ddl}, got {made.time!r}")
    return msgspec.structs.replace(made, schema=ddl)


def check_name(name: str) -> None:
    """Raise UsageError for a name that streams, queries and outputs cannot have."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"name: expected letters, digits, _, . and -, at most 100, beginning with a letter; got {name!r:.120}"
        )


def check_not_late(name: str) -> None:
    """Raise UsageError for a name that means the late events of a stream."""
    if name.endswith(LATE):
        raise UsageError(
            f"name: {name!r:.120} would mean the late events of a stream; choose one that does not end in {LATE}"
        )


def stream_read(name: str, streams: Container[str]) -> str:
    """Return the registered name that a name in a query means: that of the stream for its late events, itself otherwise."""
    base = name.removesuffix(LATE)
    return base if name not in streams and base in streams else name


def check_retention(retain: Retention) -> None:
    """Raise UsageError for a retention that no log can keep."""
    if not 1 << 20 <= retain.bytes <= 1 << 50:
        raise UsageError(f"retain.bytes: expected {1 << 20} to {1 << 50}, got {retain.bytes}")
    if microseconds(retain.time, "retain.time") < 1_000_000:
        raise UsageError(f"retain.time: expected at least '1 second', got {retain.time!r}")


def ddl_of(schema: pa.Schema) -> str:
    """Return columns as DDL. UsageError: two have one name, or a type that events cannot have."""
    names = [name.casefold() for name in schema.names]
    if len(set(names)) < len(names):
        raise UsageError(f"schema: two columns have one name, in {', '.join(schema.names)[:1000]}")
    if not 0 < len(names) <= COLUMNS_MAX:
        raise UsageError(f"schema: expected 1 to {COLUMNS_MAX:,} columns, got {len(names):,}")
    for field in schema:
        _check_type(field.type, field.name)
    ddl = ddl_text(schema)
    parse_ddl(ddl)  # events may have names and types of columns that DDL has not: the stream would be of no use
    return ddl


def _check_type(type_: pa.DataType, column: str) -> None:
    while pa.types.is_list(type_):
        type_ = type_.value_type
    if type_ not in _TYPES and not pa.types.is_decimal128(type_):
        raise UsageError(
            f"schema: column {column!r} has type {type_}; events have BOOLEAN, numbers, STRING, DATE, TIMESTAMP and ARRAY of "
            "these"
        )


class StreamCatalogue:
    """The definitions at a location. Other programs may change them, so each method reads the document."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._entries = NamedEntries(place, "streams", StreamDefinition)

    def all(self) -> dict[str, StreamDefinition]:
        """Return all definitions by name. QueryFailed: the document is damaged, or of another release."""
        return self._entries.all()

    def get(self, name: str) -> StreamDefinition:
        return self._of(self.all(), name)

    def register(
        self, wanted: StreamDefinition, taken: Callable[[], Container[str]] = tuple
    ) -> tuple[StreamDefinition, bool]:
        """Register a stream; return its definition, and whether it is new. ``taken``: returns the names of queries, whose results
        are streams. StreamExists: the name has another definition, or is that of a query."""
        made = checked_definition(wanted)
        with self._entries.changing() as found:
            if made.name in taken():
                raise StreamExists(f"{made.name!r} is the name of a query, whose result is a stream")
            there = found.get(made.name)
            if there is not None:
                if msgspec.structs.replace(there, id="") != made and wanted.schema != "infer":
                    raise StreamExists(f"stream {made.name!r} has another definition: {_described(there)}")
                return there, False
            if len(found) >= STREAMS_MAX:
                raise StreamsFull(f"{self.place} has {STREAMS_MAX:,} streams, all that it may have. Remove some")
            made = found[made.name] = msgspec.structs.replace(made, id=uuid.uuid4().hex)
            self._entries.begin_place(made.id)
            for name in ("readers", *(f"log-{log}" for log in range(made.partitions))):
                self._place_of(made, name, new=True)
        return made, True

    def infer(self, of: StreamDefinition, schema: pa.Schema) -> StreamDefinition:
        """Give a stream without columns those of its first events, unless it has some by now."""
        ddl = ddl_of(schema)
        with self._entries.changing() as found:
            there = found.get(of.name)
            if there is None or there.id != of.id:
                raise NoSuchStream(f"stream {of.name!r} was removed")
            if there.schema == "infer":
                there = found[of.name] = msgspec.structs.replace(there, schema=ddl)
        return there

    def remove(self, name: str, read_by: Callable[[], Sequence[str]] = tuple) -> None:
        """Remove a stream and its events. Owners of its logs find out before their next answer. ``read_by``: returns the
        registered queries that read it. StreamIsRead: there are some."""
        with self._entries.changing() as found:
            gone = self._of(found, name)
            if readers := read_by():
                raise StreamIsRead(f"stream {name!r} is read by {', '.join(readers)}")
            del found[name]
            self._entries.leave_place(gone.id)
        self._entries.place_of(gone.id).clear()

    def _of(self, found: dict[str, StreamDefinition], name: str) -> StreamDefinition:
        if name not in found:
            raise NoSuchStream(f"no stream {name!r} is registered at {self.place}")
        return found[name]

    def log_place(self, of: StreamDefinition, log: int) -> Place:
        return self._place_of(of, f"log-{log}")

    def readers_place(self, of: StreamDefinition) -> Place:
        return self._place_of(of, "readers")

    def _place_of(self, of: StreamDefinition, name: str, new: bool = False) -> Place:
        return self.place.below(f"streams/{of.id}/{name}", new)


def _described(of: StreamDefinition) -> str:
    fields: dict[str, Any] = msgspec.to_builtins(of)
    return ", ".join(f"{name} {value}" for name, value in fields.items() if name != "id")


#: The reader of the service of a location, for all queries without availability: it reads each stream once for them, so one name
#: is enough, and a later service knows it. A query with availability has a reader of its own, with its name behind the other one.
SERVICE_READER, _OF_QUERY = "service", "service."


def reader_of(query: str) -> str:
    """Return the name of the reader of a query with availability."""
    return _OF_QUERY + query


def query_of(reader: str) -> str:
    """Return the query that has a reader of its own; "": the reader is another one."""
    return reader.removeprefix(_OF_QUERY) if reader.startswith(_OF_QUERY) else ""


class ReaderPositions:
    """Positions below which the readers of a stream need nothing more (J6). A query is one reader."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def note(self, reader: str, log: int, position: int) -> None:
        """Write down, durably, that a reader needs no row of a log below a position in any later life."""
        self._place.write(f"{reader}-{log}", str(position).encode())

    def advance(self, reader: str, log: int, position: int) -> None:
        """Write down a later position. FileNotFoundError: the reader was forgotten. A worker that ends may be late with it, and
        would keep events for ever."""
        self._place.read(f"{reader}-{log}")
        self.note(reader, log, position)

    def names(self) -> list[str]:
        """Return the readers."""
        return sorted({name.rpartition("-")[0] for name in self._place.names()})

    def needed_from(self, log: int) -> int | None:
        """Return the lowest position of a log that a reader may want again; None: there is no reader."""
        found = []
        for name in self._place.names():
            if name.rpartition("-")[2] == str(log):
                try:
                    found.append(int(self._place.read(name)))
                except FileNotFoundError:  # it was forgotten meanwhile
                    continue
        return min(found, default=None)

    def forget(self, reader: str) -> None:
        """Forget a reader that does not come back."""
        for name in self._place.names():
            if name.rpartition("-")[0] == reader:
                self._place.remove(name)
