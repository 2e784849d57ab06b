"""Queries as they are registered, and checks of their parts (design: registry).

A definition is text and numbers alone. Nothing in it is code, so a service that starts again makes the same flows of it.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from flux.dataflow.availability import bound_of_stage
from flux.errors import FluxError, UsageError
from flux.eventlog.streams import Retention, check_not_late
from flux.windows.durations import microseconds

#: The checkpoint location of the plan, below that of the service.
PLAN = "plan"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}")
_OPERATOR = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
#: Characters of a text: Spark's parser takes seconds for longer ones, and all registrations wait for it.
TEXT_MAX = 20_000
#: Bytes of the arguments of an operator, and its inputs.
ARGUMENTS_MAX, INPUTS_MAX = 10_000, 16
PARTITIONS_MAX = 64
#: The phases of a registered query. REGISTERING: it is on its way into the plan, and was not answered. RUNNING: it is in the
#: plan. FAILED: its stages have failed, or one that it reads. REMOVING: it is on its way out.
Phase = Literal["REGISTERING", "RUNNING", "FAILED", "REMOVING"]

#: The modes of results: "append", rows that stay; "update", rows in place of earlier ones with the same key.
Mode = Literal["append", "update"]


class QueryExists(FluxError):
    """Refusal of a registration: the name belongs to another query, or to a stream."""


class QueriesFull(FluxError):
    """Refusal of a registration because the service has all the queries that it may have."""


class NoSuchQuery(FluxError):
    """Refusal of a request about a query that is not registered."""


class NoSuchInput(FluxError):
    """Refusal of a registration with an input that is neither a stream nor a query."""


class InputFailed(FluxError):
    """Refusal of the restart of a query that reads one which does not run."""


class HasDependants(FluxError):
    """Refusal of a removal because other queries read the result."""


class QueryDefinition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A query as a client registers it: a text of SQL, or an operator that the service allows."""

    name: str
    #: A text over streams and results of other queries, by their names; "": there is an operator instead.
    sql: str = ""
    #: MODULE:NAME of a stage or of a class of operators, its arguments, and the streams and queries that it reads.
    operator: str = ""
    arguments: dict[str, Any] = {}
    inputs: list[str] = []
    #: The partitions of its stages.
    partitions: int = 1
    #: The replicas of its stages; 0: as many as the service has.
    replicas: int = 0
    #: "update": aggregates without a window give each group again when it has changed.
    mode: Mode = "append"
    #: The longest time from an event to a result with it, as "3s", also while something is missing: results are tentative then.
    #: "": results wait.
    availability: str = ""
    #: The time and bytes for which results are kept for readers.
    retain: Retention = Retention(time="10 minutes", bytes=64 << 20)


class RegisteredQuery(msgspec.Struct, frozen=True, kw_only=True):
    """A registered query."""

    definition: QueryDefinition
    #: Another one for each registration, so that a query of the same name that comes later has nothing of an earlier one.
    id: str
    #: Grows from registration to registration: a query reads only queries with lower numbers.
    number: int
    phase: Phase
    #: The streams and queries that it reads.
    reads: list[str]
    #: The columns of its result, in DDL.
    schema: str
    #: Microseconds since the epoch.
    registered_at: int
    #: The reason of its failure; "": it has not failed.
    error: str = ""

    @property
    def name(self) -> str:
        return self.definition.name


def checked_query(made: QueryDefinition) -> QueryDefinition:
    """Return a definition whose parts fit together. UsageError names the part that does not."""
    if not _NAME.fullmatch(made.name):
        raise UsageError(
            f"name: expected letters, digits, _, . and -, at most 100, beginning with a letter; got {made.name!r:.120}"
        )
    check_not_late(made.name)
    if bool(made.sql) == bool(made.operator):
        raise UsageError(f"expected 'sql' or 'operator', and got {'both' if made.sql else 'none of them'}")
    if len(made.sql) > TEXT_MAX:
        raise UsageError(
            f"sql: expected at most {TEXT_MAX:,} characters, got {len(made.sql):,}. Register a part of it as a query of its own"
        )
    if made.sql and (made.arguments or made.inputs):
        raise UsageError(
            "'arguments' and 'inputs' belong to an operator: a text has its values and the names that it reads"
        )
    if made.operator:
        _check_operator(made)
    if made.availability:
        bound_of_stage(made.availability)
    if not 1 <= made.partitions <= PARTITIONS_MAX:
        raise UsageError(f"partitions: expected 1 to {PARTITIONS_MAX}, got {made.partitions}")
    if not 0 <= made.replicas <= 3:
        raise UsageError(f"replicas: expected 1 to 3, or 0 for as many as the service has; got {made.replicas}")
    if not 1 << 20 <= made.retain.bytes <= 1 << 50:
        raise UsageError(f"retain.bytes: expected {1 << 20} to {1 << 50}, got {made.retain.bytes}")
    if microseconds(made.retain.time, "retain.time") < 1_000_000:
        raise UsageError(f"retain.time: expected at least '1 second', got {made.retain.time!r}")
    return made


def _check_operator(made: QueryDefinition) -> None:
    if not _OPERATOR.fullmatch(made.operator):
        raise UsageError(f"operator: expected MODULE:NAME, as in my_stages:Alarm, got {made.operator!r:.100}")
    if not 1 <= len(made.inputs) <= INPUTS_MAX:
        raise UsageError(
            f"inputs: expected 1 to {INPUTS_MAX} names of streams or queries for an operator, got {len(made.inputs)}"
        )
    size = len(msgspec.json.encode(made.arguments))
    if size > ARGUMENTS_MAX:
        raise UsageError(f"arguments: expected at most {ARGUMENTS_MAX:,} bytes of JSON, got {size:,}")
