"""Registered outputs, and the place of their logs (design: output-log).

outputs.json           all definitions: one document, so that it is changed as a whole
outputs/ID/log-0       the log of the first partition; ID is of its own for each registration, so an output of the same name
                       that comes later has nothing of an earlier one, and a cursor tells one from the other
outputs/ID/tentative-0 the side channel of the first partition, if the query has availability
"""

from __future__ import annotations

import uuid
from typing import Literal

import msgspec
import pyarrow as pa

from flux.errors import FluxError, UsageError
from flux.eventlog.documents import NamedEntries
from flux.eventlog.log_owner import LogLimits
from flux.eventlog.streams import PARTITIONS_MAX, Retention, check_name, check_retention
from flux.operators.schema import ddl_text
from flux.vault.location import Place

#: The modes of results: "append", rows that stay; "update", rows in place of earlier ones with the same key.
OutputMode = Literal["append", "update"]
#: A log that is never full: retention alone bounds it, because a reader that does not come back holds no query up.
_NEVER_FULL = 1 << 62


class OutputExists(UsageError):
    """Refusal of a registration: the name belongs to an output with other columns."""


class NoSuchOutput(FluxError):
    """Refusal of a request about an output that is not registered."""


class OutputDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """A registered output."""

    #: The name of its query.
    name: str
    #: Columns in DDL, for people.
    schema: str
    #: These columns as a schema of Arrow IPC, for readers.
    columns_ipc: bytes
    mode: OutputMode = "append"
    #: The least that is kept of it. A reader has this time to come back.
    retain: Retention = Retention()
    #: The number of its logs, one for each partition of the stage.
    partitions: int = 1
    #: Whether each partition has a side channel with tentative rows.
    tentative: bool = False
    #: Given when it is registered.
    id: str = ""

    def columns(self) -> pa.Schema:
        """Return the columns of its rows."""
        return pa.ipc.read_schema(pa.py_buffer(self.columns_ipc))

    def limits(self) -> LogLimits:
        """Return the limits of each of its logs."""
        return self.retain.limits(self.partitions)._replace(disk_bytes=_NEVER_FULL, pending_bytes=_NEVER_FULL)


def output_of(
    name: str,
    columns: pa.Schema,
    partitions: int,
    retain: Retention,
    mode: OutputMode = "append",
    tentative: bool = False,
) -> OutputDefinition:
    """Return the definition of an output. UsageError names the part that cannot be."""
    check_name(name)
    check_retention(retain)
    if not 1 <= partitions <= PARTITIONS_MAX:
        raise UsageError(f"output {name}: expected a stage of 1 to {PARTITIONS_MAX} partitions, got {partitions}")
    if mode not in ("append", "update"):
        raise UsageError(f"output {name}: expected mode 'append' or 'update', got {mode!r:.100}")
    plain = columns.remove_metadata()
    for field in plain:
        if _has_dictionary(field.type):  # a record has no place for the dictionary
            raise UsageError(
                f"output {name}: column {field.name!r} has type {field.type}; decode it in a stage, for example to STRING"
            )
    return OutputDefinition(
        name=name, schema=ddl_text(plain), columns_ipc=plain.serialize().to_pybytes(), mode=mode, retain=retain,
        partitions=partitions, tentative=tentative,
    )  # fmt: skip


def _has_dictionary(type_: pa.DataType) -> bool:
    if pa.types.is_dictionary(type_):
        return True
    return any(_has_dictionary(type_.field(at).type) for at in range(type_.num_fields))


class OutputCatalogue:
    """The outputs at a location. Other programs may change them, so each method reads the document."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._entries = NamedEntries(place, "outputs", OutputDefinition)

    def all(self) -> dict[str, OutputDefinition]:
        """Return all outputs by name. QueryFailed: the document is damaged, or of another release."""
        return self._entries.all()

    def get(self, name: str) -> OutputDefinition:
        """Return one output. NoSuchOutput: it is not registered."""
        return self._of(self.all(), name)

    def register(self, wanted: OutputDefinition) -> OutputDefinition:
        """Register an output, or go on with the one of the same name and columns, whose retention is changed then.
        OutputExists: the one of the same name is another."""
        with self._entries.changing() as found:
            there = found.get(wanted.name)
            if there is None:
                made = msgspec.structs.replace(wanted, id=uuid.uuid4().hex)
                self._entries.begin_place(made.id)
                for partition in range(made.partitions):
                    self._place_of(made, partition, new=True)
                    if made.tentative:
                        self.channel_place(made, partition, new=True)
            else:
                made = msgspec.structs.replace(wanted, id=there.id)
                if msgspec.structs.replace(there, retain=made.retain) != made:
                    raise OutputExists(
                        f"output {wanted.name!r} is registered at {self.place} {_described(there)}, and not "
                        f"{_described(wanted)}. Use another name, or remove the query that had it"
                    )
            found[made.name] = made
        return made

    def remove(self, name: str) -> None:
        """Remove an output and its rows. A sink that still writes to it finds its place gone. NoSuchOutput: it is not
        registered."""
        with self._entries.changing() as found:
            gone = self._of(found, name)
            del found[name]
            self._entries.leave_place(gone.id)
        self._entries.place_of(gone.id).clear()

    def _of(self, found: dict[str, OutputDefinition], name: str) -> OutputDefinition:
        if name not in found:
            raise NoSuchOutput(f"no query {name!r:.120} has results here")
        return found[name]

    def log_place(self, of: OutputDefinition, partition: int) -> Place:
        return self._place_of(of, partition)

    def channel_place(self, of: OutputDefinition, partition: int, new: bool = False) -> Place:
        """Return the place of the side channel of a partition."""
        return self.place.below(f"outputs/{of.id}/tentative-{partition}", new)

    def _place_of(self, of: OutputDefinition, partition: int, new: bool = False) -> Place:
        return self.place.below(f"outputs/{of.id}/log-{partition}", new)


def _described(of: OutputDefinition) -> str:
    tentative = ", with tentative rows" if of.tentative else ""
    return f"with columns {of.schema}, mode {of.mode} and {of.partitions} partitions{tentative}"
