"""Versions of a table that is read anew: kept, judged, and the times of their readings (design: refreshed-lookup)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa

from controller.course.query_phases import QueryPhase
from controller.decide.board import Board
from flux.dataflow.plan import FromDataFrame, Plan
from flux.dataflow.relations.lookups import VERSION
from flux.joins.refreshed_lookup import RefreshedLookup
from flux.operators.operator import chain_of
from flux.vault.location import Place
from flux.windows.window import FIRST_VERSION
from spark_integration.query.lookup_tables import file_of, table_of_file
from spark_integration.streaming.stream_ends import quoted

#: The metadata of a kept version with its number.
_NUMBER = b"flux version"


class Version(NamedTuple):
    """A version of a table: its number, from 1 on, and its rows with the column of versions."""

    number: int
    rows: pa.Table


class KeptVersions:
    """The newest version of a table in a checkpoint location; without one it is in memory alone. Two documents take turns: a
    version which all consumers have applied is written over by the next one but one."""

    def __init__(self, place: Place | None, name: str) -> None:
        self._place, self._name = place, name

    def keep(self, version: Version) -> None:
        """Write a version down. OSError: it cannot be written."""
        if self._place is not None:
            told = version.rows.replace_schema_metadata({_NUMBER: str(version.number).encode()})
            self._place.write(self._document(version.number), file_of(told))

    def kept(self, number: int) -> Version | None:
        """Return a version that was begun; None: it was not. OSError, ArrowInvalid: it cannot be read."""
        if self._place is None:
            return None
        try:
            rows = table_of_file(self._place.read(self._document(number)))
        except FileNotFoundError:
            return None
        found = int((rows.schema.metadata or {}).get(_NUMBER, b"0"))
        return Version(number, rows.replace_schema_metadata(None)) if found == number else None

    def _document(self, number: int) -> str:
        return f".table-{quoted(self._name)}-{number % 2}"


@dataclass
class RefreshSchedule:
    """The times at which a table is read. A reading that is late does not make the next ones come faster."""

    every_s: float
    due_at: float
    #: Time at which the version in force was read; None: by an earlier start.
    read_at: float | None

    #: The reason for which the last reading gave no version; empty: it gave one.
    reason: str = ""

    def read(self, now: float) -> None:
        """Note that a version was read."""
        self.read_at, self.due_at, self.reason = now, now + self.every_s, ""

    def failed(self, now: float, reason: str) -> str:
        """Note that no version could be read, and return a warning; empty: it was given for this reason before."""
        self.due_at, before, self.reason = now + self.every_s, self.reason, reason
        if reason == before:
            return ""
        table = "an earlier start" if self.read_at is None else f"{now - self.read_at:.0f} s ago"
        return f"{reason}. Rows are looked up in the table of {table}, and it is read again every {self.every_s:g} s"


def with_number(rows: pa.Table, schema: pa.Schema, number: int) -> Version:
    """Return a version of a table of these rows. ``schema``: that of the source, with the column of versions."""
    numbers = pa.chunked_array([pa.repeat(pa.scalar(FIRST_VERSION + number, VERSION.type), len(rows))])
    return Version(number, pa.table([*rows.columns, numbers], names=schema.names).cast(schema))


def key_twice(plan: Plan, source: int, version: Version) -> str:
    """Return a key that several rows of a version have, where that is not allowed, in words; empty: there is none."""
    batch = version.rows.combine_chunks()
    for edge in plan.edges_of_source(source):
        operator = chain_of(plan.stages[edge.consumer].make())[0]
        assert isinstance(operator, RefreshedLookup)
        sent = [edge.rows_of(each, lambda: plan.sources[source].name)[0] for each in batch.to_batches()]
        rows = pa.Table.from_batches(sent, edge.schema)
        if found := operator.spec.twice(rows.select(range(rows.num_columns - 1))):
            return found
    return ""


def others_ended(plan: Plan, board: Board) -> bool:
    """Tell whether all sources have been read to their ends but the tables that are read anew."""
    if board.phase != QueryPhase.RUNNING:
        return False
    reports = [member.stats for member in board.members.workers.values()]
    ended = {(each[0], each[1]) for stats in reports for each in stats.get("pauses", ()) if each[3]}
    for source in plan.sources:
        if source.refresh_us:
            continue
        if any((source.id, partition) not in ended for partition in range(source.worker_partitions)):
            return False
        edges = plan.edges_of_source(source.id)
        if any(isinstance(edge, FromDataFrame) and edge.id not in board.complete for edge in edges):
            return False
    return True
