"""The events of a location, read to find damage (J5)."""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa

from flux.errors import QueryFailed
from flux.eventlog.log_reader import LogReader
from flux.eventlog.log_store import open_log
from flux.eventlog.records import rows_of
from flux.eventlog.streams import StreamCatalogue, StreamDefinition
from flux.vault.location import Place


class LogCondition(NamedTuple):
    """The condition of one log."""

    stream: str
    log: int
    #: The lowest position in it, and the position behind the last event that can be read.
    first: int
    next: int
    #: Bytes of the rows.
    bytes: int
    #: Empty: none was found. Otherwise segment, byte and position.
    damage: str


def verified(place: Place) -> list[LogCondition]:
    """Read all logs of a location, as far as they are published. Gateways may write meanwhile."""
    catalogue = StreamCatalogue(place)
    return [_log(catalogue, of, log) for of in catalogue.all().values() for log in range(of.partitions)]


def _log(catalogue: StreamCatalogue, of: StreamDefinition, log: int) -> LogCondition:
    reader = LogReader(open_log(catalogue.log_place(of, log)), f"log {log} of stream {of.name!r}")
    first = nbytes = 0
    damage = ""
    try:
        first = reader.first()
        reader.next = first
        while records := reader.read():
            for record in records:
                rows_of(record, of.columns()).validate(full=True)
                nbytes += len(record.batch)
    except (QueryFailed, pa.ArrowException) as error:
        damage = str(error)
    finally:
        reader.close()
    return LogCondition(of.name, log, first, reader.next, nbytes, damage)
