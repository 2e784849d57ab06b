"""Trials without Spark: ``apply`` for a stage, ``check_source`` for a source, ``check_sink`` for a sink, ``check_policy`` for a
policy of load balance.

A stage is tried with one partition, in this process, in the order in which the exchange would call it."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from numbers import Real
from typing import Any

import pyarrow as pa

import flux
from flux.arguments import MARKS
from flux.dataflow.flow import Stage
from flux.errors import ContractBroken, SchemaError, UsageError
from flux.operators.aggregate import computed_columns
from flux.operators.attributes import open_operator
from flux.operators.batches import conform, given_batches
from flux.operators.operator import Context, Operator, gives_changes, last_output, move_watermarks
from flux.operators.plain_columns import plain_schema
from flux.operators.schema import check_key, parse_ddl
from flux.replica.snapshot import check_snapshot, decode_snapshot, encode_snapshot
from flux.sink_check import check_sink
from flux.source_check import check_source
from flux.windows.window import END_OF_TIME, NEVER
from partitioning.errors import ColumnTypeError, KeyTypeError

__all__ = ["ContractBroken", "apply", "check_policy", "check_sink", "check_source"]


def check_policy(policy: Any, loads: Any, settings: Any = None) -> None:
    """Try a policy of load balance in a model of a cluster; see ``controller.balance.policy_check.check_policy``."""
    importlib.import_module("controller.balance.policy_check").check_policy(policy, loads, settings)


def apply(
    stage: Stage | Operator,
    *batches: pa.RecordBatch | Sequence[pa.RecordBatch],
    restart_after: int | None = None,
    checkpoint_after: int | None = None,
    times: Sequence[float] | None = None,
    watermarks: Sequence[Any] | None = None,
) -> pa.Table | None:
    """Send batches through a stage and return its output as one table, None for a sink.

    Each argument is a batch of input 0, or a sequence of batches with one argument per input. ``restart_after``: after this
    many batches a fresh operator, which gets the snapshot, replaces the operator, as in a repair or a move.
    ``checkpoint_after``: after this many batches, at most ``restart_after``, the snapshot is taken; ``changes`` gives the later
    changes, which go to ``apply_changes`` of the fresh operator, as from a standby. ``times``: the time at which each batch
    comes (``context.now``) and the time at which the input ends, in seconds, ascending; timers fire in between, each at its
    time. Without ``times`` everything happens at 0. ``watermarks``: the watermark behind each batch, ascending: a datetime (UTC
    if it says no zone), microseconds since the epoch, None for no change, or a tuple with one of these per input. At the end of
    the input it is at the end of time.

    Everything is checked as in a query: key columns, column types, the declared schema (also in DDL, with UTC as time zone)."""
    stage = _stage(stage)
    inputs = [_batches(given) for given in batches]
    if batches and all(isinstance(given, pa.RecordBatch) for given in batches):
        inputs = [[batch for given in inputs for batch in given]]
    if not inputs or not all(inputs):
        raise UsageError("give at least one batch for every input of the stage")
    ordered = [(number, batch) for number, given in enumerate(inputs) for batch in given]
    if restart_after is not None and not (_is(restart_after, int) and 0 <= restart_after <= len(ordered)):
        raise UsageError(
            f"restart_after must be a number of batches from 0 to {len(ordered)}, as many as are given; got {restart_after!r}"
        )
    if checkpoint_after is not None:
        if restart_after is None or not (_is(checkpoint_after, int) and 0 <= checkpoint_after <= restart_after):
            raise UsageError(
                f"checkpoint_after must be a number of batches from 0 to restart_after ({restart_after}); "
                f"got {checkpoint_after!r}"
            )
        if not gives_changes(stage.make()):
            raise UsageError(f"stage {stage.name} defines no changes() and apply_changes(): whole snapshots travel")
    moments = [0.0] * (len(ordered) + 1) if times is None else _moments(times)
    if len(moments) != len(ordered) + 1 or sorted(moments) != moments:
        raise UsageError(
            f"times: expected those of {len(ordered)} batches and of the end, {len(ordered) + 1} in all and ascending; "
            f"got {moments}"
        )
    marks = _watermarks(watermarks, len(ordered), len(inputs))
    run = _StageRun(stage, tuple(given[0].schema for given in inputs))
    for step, (number, batch) in enumerate(ordered):
        if step == checkpoint_after:
            run.checkpoint()
        if step == restart_after:
            run.restart()
        run.until(moments[step])
        run.process(number, batch, marks[step])
    if checkpoint_after == len(ordered):
        run.checkpoint()
    if restart_after == len(ordered):
        run.restart()
    run.until(moments[-1])
    return run.finish()


def _stage(given: Any) -> Stage:
    if isinstance(given, Operator) and given._flux_stage is not None:
        stage: Stage = given._flux_stage  # made by calling a stage with the operator's arguments
        return stage
    if not isinstance(given, Stage):
        raise UsageError(f"expected a class or function decorated with flux.stage, got {type(given).__name__}")
    return given


def _batches(given: Any) -> list[pa.RecordBatch]:
    """Return the batches of one argument. UsageError names the type of a value that is no batch."""
    listed = given if isinstance(given, list | tuple | Iterator) else [given]
    batches = list(listed)
    for batch in batches:
        if not isinstance(batch, pa.RecordBatch):
            kind = type(batch)
            package = kind.__module__.partition(".")[0]
            raise UsageError(
                f"expected pyarrow.RecordBatches, got {'' if package == 'builtins' else f'{package}.'}{kind.__name__}: "
                "pa.RecordBatch.from_pylist(rows), pa.RecordBatch.from_pandas(df, preserve_index=False) and table.to_batches() "
                "make some"
            )
    return batches


def _moments(times: Any) -> list[float]:
    moments = list(times) if isinstance(times, Iterable) and not isinstance(times, str | bytes) else []
    if not moments or not all(_is(moment, Real) for moment in moments):
        raise UsageError(f"times: expected numbers of seconds, one for each batch and one for the end; got {times!r}")
    return moments


def _watermarks(given: Any, batches: int, inputs: int) -> list[list[int]]:
    """Return the watermark of each input behind each batch, in microseconds. UsageError: there are not as many as batches, one is
    no time, or one falls."""
    if given is None:
        return [[NEVER] * inputs] * batches
    listed = list(given) if isinstance(given, Sequence) and not isinstance(given, str | bytes) else []
    if len(listed) != batches:
        raise UsageError(f"watermarks: expected {batches}, one behind each batch, got {given!r:.200}")
    made, newest = [], [NEVER] * inputs
    for each in listed:
        now = each if isinstance(each, tuple) else (each,) * inputs
        if len(now) != inputs:
            raise UsageError(f"watermarks: expected one for each of {inputs} inputs, got {each!r}")
        told = [was if mark is None else _event_time(mark) for was, mark in zip(newest, now, strict=True)]
        if any(mark < was for was, mark in zip(newest, told, strict=True)):
            raise UsageError(f"watermarks never fall; got {given!r:.200}")
        made.append(newest := told)
    return made


def _event_time(given: Any) -> int:
    """Return a time in microseconds since the epoch."""
    if isinstance(given, datetime):
        aware = given if given.tzinfo is not None else given.replace(tzinfo=UTC)
        return (aware - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    if not (_is(given, int) and NEVER <= given <= END_OF_TIME):
        raise UsageError(
            f"watermarks: expected datetimes or whole microseconds since the epoch, of 64 bits; got {given!r:.100}"
        )
    return int(given)


def _is(given: Any, kind: type) -> bool:
    return isinstance(given, kind) and not isinstance(given, bool)


def _schema(declared: Any) -> pa.Schema:
    if isinstance(declared, str):
        return parse_ddl(declared)
    return declared if isinstance(declared, pa.Schema) else flux._arrow_schema(declared)


class _StageRun:
    """One partition of a stage, and its output."""

    def __init__(self, stage: Stage, schemas: tuple[pa.Schema, ...]) -> None:
        self.stage = stage
        schemas = tuple(plain_schema(schema, f"input {number}") for number, schema in enumerate(schemas))
        self.context = Context(stage.name, key=stage.key, schemas=schemas, output_mode=stage.output_mode)
        self.context._flux_at_marks = stage.order == MARKS
        self.operator = stage.make()
        texts = computed_columns(self.operator)
        #: By input, the columns of conditions of measures; None: there are none.
        self.steps = [flux._computed(schema, texts) if texts else None for schema in schemas]
        if texts:
            self.context.schemas = tuple(each.output for each in self.steps if each is not None)
        self.schema = self._checked()
        self.out: list[pa.RecordBatch] = []
        self.kept: bytes | memoryview | None = None
        self.has_rows = False
        open_operator(self.operator, self.context)
        self._check_state()

    def _check_state(self) -> None:
        """Raise SnapshotError if the state cannot travel, so that it would end a query."""
        check_snapshot(self.operator.snapshot(), f"stage {self.stage.name}", self.operator.snapshot_classes)

    def _checked(self) -> pa.Schema | None:
        """Return the schema of the output, as a plan would have it."""
        schemas, key, where = self.context.schemas, self.stage.key, f"stage {self.stage.name}"
        try:
            for schema in schemas:
                check_key(key, schema)
            declared = self.operator.output_schema(schemas, key)
        except (UsageError, KeyTypeError, ColumnTypeError) as error:
            raise SchemaError(f"{where}: {error}") from error
        return None if declared is None else plain_schema(_schema(declared), f"{where}, output")

    def _encoded(self, state: Any) -> bytes | memoryview:
        return encode_snapshot(state, f"stage {self.stage.name}", classes=self.operator.snapshot_classes)

    def checkpoint(self) -> None:
        self.operator.changes()
        self.kept = self._encoded(self.operator.snapshot())

    def restart(self) -> None:
        """Replace the operator. The timers travel with the state, and replace those that the fresh operator sets."""
        found = None if self.kept is None else self.operator.changes()
        changes = None if found is None else self._encoded(found)
        state = self._encoded(self.operator.snapshot()) if self.kept is None or changes is None else self.kept
        pending, event_timers = dict(self.context.timers.pending), dict(self.context.event_timers.pending)
        self.operator.close()
        self.operator = self.stage.make()
        open_operator(self.operator, self.context)
        classes = self.operator.snapshot_classes
        restored = decode_snapshot(state, classes=classes)
        if restored is not None:
            self.operator.restore(restored)
        if changes is not None:
            self.operator.apply_changes(decode_snapshot(changes, classes=classes))
        self.context.timers.replace(pending)
        self.context.event_timers.replace(event_timers)

    def until(self, moment: float) -> None:
        """Fire the timers up to this time, before the batch or the end that comes at it; timers of one moment fire in one step. A
        timer that sets itself again for the same moment lets that batch or end go first."""
        context, fired_at = self.context, -math.inf
        while fired_at < context.timers.next <= moment:
            fired_at = context.now = max(context.now, context.timers.next)
            for name in context.timers.due(fired_at):
                if context.timers.take(name, fired_at):
                    self._take(self.operator.on_timer(name))
            context.step += 1
        context.now = moment

    def process(self, number: int, batch: pa.RecordBatch, watermarks: Sequence[int]) -> None:
        steps, what = self.steps[number], f"batch of input {number}"
        schema = self.context.schemas[number] if steps is None else steps.schema
        batch = conform(batch, schema, what)
        batch = batch if steps is None else steps.apply(batch)
        self.context.input = number
        self._take(self.operator.process(batch))
        self._take(move_watermarks(self.operator, self.context, watermarks))
        if not self.has_rows:  # most defects of a state show after the first rows
            self.has_rows = True
            self._check_state()
        self.context.step += 1

    def finish(self) -> pa.Table | None:
        self.context.timers.replace({})
        self._take(last_output(self.operator, self.context))
        self.operator.close()
        return None if self.schema is None else pa.Table.from_batches(self.out, schema=self.schema)

    def _take(self, result: Any) -> None:
        what = f"output of stage {self.stage.name}"
        self.out.extend(conform(batch, self.schema, what) for batch in given_batches(result))
