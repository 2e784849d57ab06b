"""Answers of a gateway as they travel. The OpenAPI document is made of these classes."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec

from flux.eventlog.streams import Retention
from flux.gateway.problems import Problem
from flux.gateway.webhooks.catalogue import DeliverySize
from flux.outputs.catalogue import OutputMode
from flux.outputs.reader import MissedRows
from flux.registry.definitions import Mode, Phase, RegisteredQuery
from flux.registry.query_catalogue import dependants


class ErrorContent(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A refusal or a failure."""

    #: The reason, for programs.
    code: str
    #: A sentence with the expected thing and the one that came.
    message: str
    #: A sentence with the way on.
    remedy: str
    #: The row that does not fit, from 1, and its column.
    row: int | None = None
    column: str | None = None
    #: The address of the gateway that takes these events.
    gateway: str | None = None
    #: The id of a failure, under which the log of the gateway has its reason.
    failure: str | None = None


class ErrorAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The one form of all errors."""

    error: ErrorContent


class PushAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Events that are on disk."""

    stream: str
    #: The log of the stream, and the position of the first event in it.
    log: int
    first: int
    #: The number of events of the request; 0 if an older request of the client is repeated, whose place is not known any more.
    rows: int
    arrived_at: Annotated[datetime, msgspec.Meta(tz=True)]
    #: The events were there already, under the same name.
    repeated: bool


class StreamAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A registered stream."""

    name: str
    id: str
    #: Columns in DDL; "infer": those of the first events, which have not come yet.
    schema: str
    time: str | None
    delay: str | None
    idle: str | None
    retain: Retention
    partitions: int
    #: Queries that read it.
    readers: list[str]


class StreamsAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All registered streams that the token may see."""

    streams: list[StreamAnswer]


class QueryAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A registered query."""

    name: str
    id: str
    #: Its text, or its operator with arguments and inputs.
    sql: str
    operator: str
    arguments: dict[str, Any]
    inputs: list[str]
    #: The streams and queries that it reads, and the queries that read it.
    reads: list[str]
    read_by: list[str]
    #: Columns of its result, in DDL.
    schema: str
    #: REGISTERING: it is on its way into the plan; RUNNING; FAILED, with ``error``; REMOVING: it is on its way out.
    status: Phase
    error: str
    partitions: int
    #: null: as many as the service has.
    replicas: int | None
    #: The time and bytes for which its results are kept.
    retain: Retention
    mode: Mode
    #: The bound within which its readers get tentative results while something is missing; "": it has none.
    availability: str
    registered_at: datetime


class QueriesAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All registered queries that the token may see."""

    queries: list[QueryAnswer]


class TentativeEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Results that may still change: those of event time before ``through``, beyond earlier ones."""

    partition: int
    #: In UTC, with six digits behind the second; null: the end of time.
    through: str | None
    #: An object each, with the names of the columns.
    rows: msgspec.Raw


class UndoEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """End of all tentative results of a partition with ``start`` before ``through``, and ``through`` not behind ``end``."""

    partition: int
    #: null: without that bound.
    start: str | None
    end: str | None


class CorrectedEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """End of a failure: all results of a partition before ``through`` are stable."""

    partition: int
    through: str | None


class RowsAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Results of a query, and the place behind them."""

    query: str
    #: "append": rows stay; "update": a row takes the place of earlier ones with the same key.
    mode: OutputMode
    #: An object each, with the names of the columns.
    rows: msgspec.Raw
    #: Give it as ``after`` to go on behind these rows.
    cursor: str
    #: Rows before these that were removed after ``retain``.
    missed: list[MissedRows]
    #: With ``tentative=true``: the results that may still change, as far as they stand now. The next answer has them anew.
    tentative: list[TentativeEvent] | msgspec.UnsetType = msgspec.UNSET


DeliveryState = Literal["RUNNING", "FAILING", "PAUSED"]


class OutputAnswer(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A webhook and its state."""

    name: str
    query: str
    url: str
    batch: DeliverySize
    retry: str
    #: RUNNING; FAILING: the newest delivery is tried again; PAUSED: until it is resumed.
    status: DeliveryState
    #: The number of the newest delivery that the receiver has taken; 0: there is none.
    delivery: int
    #: The place behind that delivery.
    cursor: str
    #: The newest reason, unless it is running.
    error: str = ""
    failing_since: datetime | None = None
    #: The secret of the signatures, once, if the gateway has made it.
    secret: str | None = None


class OutputsAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All webhooks that the token may see."""

    outputs: list[OutputAnswer]


class HealthAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A gateway that answers."""

    status: str
    version: str


def query_answer(of: RegisteredQuery, queries: Mapping[str, RegisteredQuery]) -> QueryAnswer:
    """Return the answer about one of the registered queries."""
    made = of.definition
    return QueryAnswer(
        of.name, of.id, made.sql, made.operator, made.arguments, made.inputs, of.reads, dependants(queries, of.name),
        of.schema, of.phase, of.error, made.partitions, made.replicas or None, made.retain, made.mode, made.availability,
        datetime.fromtimestamp(of.registered_at / 1_000_000, UTC),
    )  # fmt: skip


def error_answer(problem: Problem) -> ErrorAnswer:
    kind = problem.kind
    content = ErrorContent(
        kind.code, problem.message, kind.remedy, problem.row, problem.column, problem.gateway, problem.failure
    )
    return ErrorAnswer(content)
