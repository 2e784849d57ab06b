"""The declaration of event time: which column of a source has the times, and how late a row may come (design: late-rows).

The declaration belongs to the source, because lateness is judged where rows are read. So a source has one declaration in a query,
and none stands behind a stage.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from flux.dataflow.plan import EventTime, SourcePlan
from flux.dataflow.row_operators import RowOperator
from flux.dataflow.source import Source, StreamSource
from flux.errors import SchemaError, UsageError
from flux.expressions.sql import steps_in_sql
from flux.operators.schema import positions
from flux.windows.durations import microseconds, words

if TYPE_CHECKING:
    from flux.expressions.steps import RowSteps

#: The call that a message shows.
LINE = "source.withWatermark('ts', '10 seconds')"


@dataclass(frozen=True)
class WatermarkDeclaration:
    """A call of ``withWatermark``."""

    #: Conditions and columns in front of it.
    before: tuple[RowOperator, ...]
    #: The name of the column with the times, as the user wrote it.
    column: str
    #: Microseconds.
    delay: int
    #: Microseconds; None: a partition is never idle.
    idle: int | None
    advance: bool
    #: Microseconds; None: each time is believed.
    max_ahead: int | None = None
    #: The name of a column of times that are always believed, as the user wrote it.
    ahead_of: str | None = None

    def __repr__(self) -> str:
        more = [] if self.idle is None else [f"idle={words(self.idle)!r}"]
        more += ["advance=True"] if self.advance else []
        more += [] if self.max_ahead is None else [f"maxAhead={words(self.max_ahead)!r}"]
        more += [] if self.ahead_of is None else [f"aheadOf={self.ahead_of!r}"]
        arguments = ", ".join([repr(self.column), repr(words(self.delay)), *more])
        return ".".join([*map(repr, self.before), f"withWatermark({arguments})"])


def declared(
    origin: Source,
    before: tuple[RowOperator, ...],
    column: Any,
    delay: Any,
    idle: Any,
    advance: Any,
    max_ahead: Any = None,
    ahead_of: Any = None,
) -> WatermarkDeclaration:
    """Return a checked declaration. UsageError names the argument that does not fit."""
    if isinstance(origin, StreamSource):
        _check_stream(origin, advance, max_ahead)
    if not isinstance(column, str) or not column:
        raise UsageError(
            f"withWatermark: eventTime must be the name of a column, as in {LINE}, got {column!r:.100}. Compute times in front "
            "of it: source.withColumn('ts', ...).withWatermark('ts', ...)"
        )
    delay_us = microseconds(delay, "withWatermark, delayThreshold")
    if delay_us < 0:
        raise UsageError(
            f"withWatermark, delayThreshold: expected a duration of zero or more, got {delay!r:.100}: rows may be "
            "late by that much"
        )
    idle_us = None if idle is None else microseconds(idle, "withWatermark, idle")
    if idle_us is not None and idle_us <= 0:
        raise UsageError(
            f"withWatermark, idle: expected a duration above zero, got {idle!r:.100}; leave it out, and a partition without rows "
            "holds the watermark back until its next row"
        )
    if not isinstance(advance, bool):
        raise UsageError(f"withWatermark: advance must be True or False, got {advance!r:.100}")
    if advance and idle_us is None:
        raise UsageError(
            "withWatermark: advance=True lets the watermark of an idle partition go on with the clock; say after which time "
            "without rows a partition is idle, as in idle='1 minute'"
        )
    most = _max_ahead(max_ahead, ahead_of)
    return WatermarkDeclaration(before, _unquoted(column), delay_us, idle_us, advance, most, _unquoted(ahead_of))


def _max_ahead(given: Any, ahead_of: Any) -> int | None:
    if ahead_of is not None and (not isinstance(ahead_of, str) or not ahead_of):
        raise UsageError(
            f"withWatermark, aheadOf: expected the name of a column of times, as in aheadOf='timestamp', got {ahead_of!r:.100}"
        )
    if given is None:
        if ahead_of is not None:
            raise UsageError(
                f"withWatermark: aheadOf={ahead_of!r} says from which time maxAhead is measured; say that too, as in "
                "maxAhead='1 hour'"
            )
        return None
    most = microseconds(given, "withWatermark, maxAhead")
    if most <= 0:
        raise UsageError(
            f"withWatermark, maxAhead: expected a duration above zero, got {given!r:.100}; leave it out, and each time moves the "
            "watermark"
        )
    return most


def _unquoted(column: Any) -> Any:
    quoted = None if column is None else re.fullmatch("`((?:[^`]|``)+)`", column)
    return column if quoted is None else quoted[1].replace("``", "`")


def _check_stream(origin: StreamSource, advance: Any, max_ahead: Any) -> None:
    if origin.dataframe is None:
        raise UsageError(
            f"source {origin.name}: rows that another streaming query writes here (format('flux')) have no watermark yet. Give "
            "flux.stream the streaming DataFrame itself: flux.stream(df).withWatermark('ts', '10 seconds')"
        )
    if advance is True:
        raise UsageError(
            f"source {origin.name}: the watermark of a streaming DataFrame is Spark's own, the greatest time of all earlier "
            "batches less the delay, and does not go on with the clock: leave advance out"
        )
    if max_ahead is not None:
        raise UsageError(
            f"source {origin.name}: the watermark of a streaming DataFrame is Spark's own, the greatest time of all earlier "
            "batches less the delay, whatever that time is. Leave maxAhead out, and rows from the future by where(...) in "
            "front of withWatermark"
        )


def event_time(
    said: WatermarkDeclaration,
    schema: pa.Schema,
    steps: RowSteps | None,
    where: str,
    case_sensitive: bool,
) -> EventTime:
    """Return the event time that a declaration makes of rows. ``schema``: their columns behind ``steps``, those in front of the
    declaration; ``where`` names the source. SchemaError: the column is not there, or holds no times."""
    at = _of_times(said.column, schema, f"{where}, withWatermark", case_sensitive)
    sure = None
    if said.ahead_of is not None:
        sure = _of_times(said.ahead_of, schema, f"{where}, withWatermark, aheadOf", case_sensitive)
    name = schema.field(at).name
    ahead_of = None if sure is None else schema.field(sure).name
    return EventTime(name, at, said.delay, said.idle, said.advance, said.max_ahead, ahead_of, sure, steps=steps)


def _of_times(column: str, schema: pa.Schema, where: str, case_sensitive: bool) -> int:
    """Return the position of a column of times."""
    found = positions(schema, column, case_sensitive)
    if len(found) != 1:
        problem = "is the name of several columns" if found else "is no column"
        raise SchemaError(
            f"{where}: {column!r} {problem} there; there are "
            f"{', '.join(f'{field.name} {field.type}' for field in schema)}"
        )
    field = schema.field(found[0])
    if not pa.types.is_timestamp(field.type):
        raise SchemaError(
            f"{where}: column {field.name!r} is {field.type}, and event time needs a TIMESTAMP. "
            f"{_remedy(field)} in front of it"
        )
    return int(found[0])


def _remedy(field: pa.Field) -> str:
    """Return the call that makes times of a column, as it is written."""
    made = f"timestamp_millis(`{field.name}`)"
    if not pa.types.is_integer(field.type):
        text = pa.types.is_string(field.type) or pa.types.is_large_string(field.type)
        made = f"to_timestamp(`{field.name}`)" if text else f"CAST(`{field.name}` AS TIMESTAMP)"
    also = " (timestamp_seconds, timestamp_micros)" if pa.types.is_integer(field.type) else ""
    return f"Put withColumn({field.name!r}, F.expr({made!r})){also}"


def same_time(source: str, was: EventTime, now: EventTime) -> None:
    """Raise UsageError unless two declarations for one source are the same."""
    if was != now:
        raise UsageError(
            f"source {source} has two watermarks in this query, {told(was)} and {told(now)}, and one source has one: lateness is "
            "judged once, where its rows are read. Call withWatermark once and use what it returns in both places, or make a "
            "second source"
        )


def told(time: EventTime, stable: bool = False) -> str:
    """Return an event time in words. ``stable``: with the text form of expressions, which tells them apart."""
    said = f"{time.column} less {words(time.delay)}"
    if time.idle is not None:
        said += f", idle after {words(time.idle)}"
        said += ", then with the clock" if time.advance else ""
    if time.max_ahead is not None:
        said += f", believed up to {words(time.max_ahead)} ahead" + (f" of {time.ahead_of}" if time.ahead_of else "")
    if time.steps is None:
        return said
    return f"{said}, behind {str(time.steps) if stable else steps_in_sql(time.steps)}"


def told_idleness(source: SourcePlan) -> str | None:
    """Return a line about a source that may fall idle, and that results go on without; None: it is not both."""
    if not source.may_be_silent or source.event_time is None or source.event_time.idle is None:
        return None
    return (
        f"idle={words(source.event_time.idle)!r} is for a partition that answers and has no rows: it is not waited for, and rows "
        "that it gives later may be late for good. availability is for one that does not answer: results without it are "
        "tentative, and corrected"
    )
