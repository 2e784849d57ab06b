"""Streams with events, pushed without a gateway."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from flux.eventlog.log_owner import LogOwner
from flux.eventlog.records import PushName, packed_rows
from flux.eventlog.streams import StreamCatalogue, StreamDefinition
from flux.vault.location import Folder


def owned(catalogue: StreamCatalogue, of: StreamDefinition, log: int = 0) -> LogOwner:
    """Open a log as its owner."""
    owner = LogOwner(catalogue.log_place(of, log).store(True, keeps=True), f"log {log}", of.limits())
    for _ in owner.open():
        pass
    return owner


def pushed(owner: LogOwner, batch: pa.RecordBatch, at_us: int, name: PushName | None = None) -> int:
    """Push rows; return their first position."""
    ticket = owner.offer(packed_rows(batch), batch.num_rows, name or PushName(), at_us)
    for _ in owner.commit(owner.take()):
        pass
    return ticket.stored.first


def registered(folder: Path, name: str = "clicks", **more: object) -> tuple[StreamCatalogue, StreamDefinition]:
    folder.chmod(0o700)
    catalogue = StreamCatalogue(Folder(folder))
    schema = more.pop("schema", "user BIGINT, page STRING")
    return catalogue, catalogue.register(StreamDefinition(name=name, schema=schema, **more))[0]  # type: ignore[arg-type]


def clicks(*users: int) -> pa.RecordBatch:
    return pa.record_batch(
        [pa.array(users, pa.int64()), pa.array([f"page {each}" for each in users])], ["user", "page"]
    )
