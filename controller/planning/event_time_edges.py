"""Event time in a plan: the columns that its edges need, the inputs whose watermarks count, and windows that would never close.

A watermark is stated by the streams of a source that has one, and by those of a stage that keeps a time: an aggregate with
windows in append mode, a stage with ``event_time=``, and a stage that only passes rows on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import pyarrow as pa

from controller.planning.inputs import places_among
from controller.planning.parts import Parts
from flux.dataflow.flow import Stage
from flux.dataflow.plan import (
    DataFrameSourcePlan,
    EdgePlan,
    EventTime,
    FromSource,
    FromStage,
    Plan,
    SourcePlan,
    StagePlan,
    Timed,
)
from flux.errors import SchemaError, UsageError
from flux.expressions.steps import RowSteps
from flux.joins.join import Join
from flux.joins.join_spec import EITHER, LEFT, JoinSpec
from flux.operators.aggregate import Aggregate
from flux.operators.operator import Operator, chain_of
from flux.operators.schema import positions
from flux.operators.windowed_groups import WINDOW_COLUMNS
from flux.windows.window import Closing, SessionWindow, Window


class InputTime(NamedTuple):
    """The event time of the rows of an input."""

    origin: SourcePlan | StagePlan
    timed: Timed
    steps: RowSteps | None
    #: The columns that have the event time of the rows of the origin; empty: they have none.
    columns: tuple[str, ...]

    @property
    def has(self) -> bool:
        return bool(self.columns)

    @property
    def kept(self) -> list[str]:
        """The names of the columns of times behind the steps."""
        if self.steps is None:
            return list(self.columns)
        return [name for column in self.columns for name in self.steps.names_of(column)]


def window_of(operator: Operator) -> Window | SessionWindow | None:
    """Return the windows of event time by which an operator groups rows; None: it has none."""
    window = operator._flux_window
    return None if window is None or window.by_clock else window


def timed_inputs(operator: Operator, inputs: Sequence[InputTime]) -> tuple[int, ...]:
    """Return the inputs whose watermarks count for a stage. A window needs them all: rows of an input without a watermark may
    have any time until the input has ended."""
    if window_of(operator) is not None or operator._flux_waits:
        return tuple(range(len(inputs)))
    return tuple(number for number, each in enumerate(inputs) if each.has)


def times_given(
    stage: Stage, operator: Operator, plan: StagePlan, inputs: Sequence[InputTime], case_sensitive: bool
) -> tuple[str, ...]:
    """Return the columns that have the event time of the rows that a stage gives; empty: they have none. SchemaError: it promises
    a column that its output lacks."""
    if stage.event_time is not None:
        _check_promised(stage.event_time, plan.output_schema, plan.name, case_sensitive)
    if not plan.timed_inputs:
        return ()
    if (window := window_of(operator)) is not None and isinstance(operator, Aggregate):
        end = window.column if isinstance(window, Closing) else WINDOW_COLUMNS[1]
        return (str(end),) if plan.output_mode == "append" else ()
    if stage.event_time is not None:
        return (stage.event_time,)
    if isinstance(operator, Join):
        return _times_of_join(operator.spec, plan.schemas)
    if (found := operator._flux_times([each.kept for each in inputs])) is not None:
        return found
    if not stage.passes:
        return ()
    first, *others = [each.kept for each in inputs]
    return tuple(column for column in first if all(column in names for names in others))


def _times_of_join(spec: JoinSpec, schemas: Sequence[pa.Schema]) -> tuple[str, ...]:
    """Return the names of the event time among the columns of a join. Rows of a full outer join that have no left row have their
    time in another column: windows of the left one leave them out."""
    if spec.time_of is None:
        return ()
    side = LEFT if spec.time_of == EITHER else spec.time_of
    time = spec.times[side]
    assert time is not None, "checked when the declaration was made"
    place = time + (0 if side == LEFT else len(schemas[LEFT]))
    # A time that is not given is one all the same: windows behind may be of a column that is computed of it, as of a window.
    return tuple(name for name, at in spec.outputs if at == place) or (schemas[side].names[time],)


def _check_promised(column: str, output: pa.Schema | None, name: str, case_sensitive: bool) -> None:
    if output is None:
        raise SchemaError(f"stage {name}: event_time={column!r} is a column of the output, and the stage gives no rows")
    found = positions(output, column, case_sensitive)
    if len(found) != 1 or not pa.types.is_timestamp(output.field(found[0]).type):
        there = ", ".join(f"{field.name} {field.type}" for field in output)
        raise SchemaError(
            f"stage {name}: event_time={column!r} must be a column of times of its output; there are {there}"
        )


def check_window(name: str, operator: Operator, inputs: Sequence[InputTime], case_sensitive: bool) -> None:
    """Raise UsageError if windows would be closed by the watermark of another column than the one that they are made of.

    A time that is known beforehand (``Closing``) is of another column anyway. A column that is computed behind a stage is not
    judged: the time of a result may be written in several ways."""
    window = window_of(operator)
    if window is None or isinstance(window, Closing):
        return
    assert window.column is not None
    for each in inputs:
        if not each.has or isinstance(each.origin, DataFrameSourcePlan):
            continue  # windows over a DataFrame close at its end, as in Spark
        steps, of_stage = each.steps, isinstance(each.origin, StagePlan)
        kept = each.kept
        if any(_same(window.column, column, case_sensitive) for column in kept):
            continue
        if (
            of_stage
            and steps is not None
            and steps.came_as(_found(steps.output, window.column, case_sensitive)) is None
        ):
            continue
        kept_as = f", which is called {', '.join(kept)} there" if kept else ", which is not there any more"
        kept_as = "" if set(kept) >= set(each.columns) else kept_as
        raise UsageError(
            f"stage {name} has windows of {window.column!r}, and the watermark of {'stage' if of_stage else 'source'} "
            f"{each.origin.name} is that of {' or '.join(map(repr, each.columns))}{kept_as}. Windows close by the "
            "watermark of their own column: keep the column as it is, and name it in both places. A time that has to be computed "
            "comes in front of withWatermark"
        )


def _found(schema: pa.Schema, column: str, case_sensitive: bool) -> str:
    """Return the name of a column as a schema writes it."""
    found = positions(schema, column, case_sensitive)
    return str(schema.names[found[0]]) if found else column


def check_windows_close(plan: Plan, stage: StagePlan, never: Mapping[int, SourcePlan]) -> None:
    """Raise UsageError if a stage with windows would never give one. ``never``: by edge, a source that never ends and on whose
    rows the edge depends."""
    for edge in (plan.edges[number] for number in stage.edges_in):
        if edge.id in never and not edge.states:
            raise UsageError(
                f'stage {stage.name} has windows and output_mode="append": it gives a window when it is final, and '
                f"{_without_watermark(plan, edge, never[edge.id], window_of(chain_of(stage.make())[0]))}; or say "
                'output_mode="update" for the changed groups after every step'
            )


def check_timers_fire(plan: Plan, stage: StagePlan, never: Mapping[int, SourcePlan]) -> None:
    """Raise UsageError if a stage has a method for timers of event time, and none would ever fire: its inputs have no watermark,
    and one of them never ends. ``never``: as in ``check_windows_close``."""
    if stage.timed_inputs:
        return
    method = next((name for each in chain_of(stage.make()) if (name := each._flux_event_timed)), "")
    edge = next((plan.edges[number] for number in stage.edges_in if number in never), None)
    if method and edge is not None:
        raise UsageError(
            f"stage {stage.name} has {method}, which is called when the watermark has reached a time, and "
            f"{_without_watermark(plan, edge, never[edge.id], None)}; or set timers by the clock"
        )


def check_rows_come(plan: Plan, stage: StagePlan, never: Mapping[int, SourcePlan]) -> None:
    """Raise UsageError if a stage that waits for the watermark would never give a row. ``never``: as for
    ``check_windows_close``."""
    for edge in (plan.edges[number] for number in stage.edges_in):
        if edge.id in never and not edge.states:
            said = _without_watermark(plan, edge, never[edge.id], None)
            raise UsageError(f"stage {stage.name} gives rows when the watermark has passed them, and {said}")


def _without_watermark(plan: Plan, edge: EdgePlan, source: SourcePlan, window: Window | SessionWindow | None) -> str:
    """Tell why no watermark comes through an edge, and what to write."""
    line = f"withWatermark({window.column if window else 'ts'!r}, '10 seconds')"
    if isinstance(edge, FromStage):
        before = plan.stages[edge.stage]
        if before.timed_inputs:
            return (
                f"the rows that stage {before.name} gives have no event time. If it gives no row below its watermark, say which "
                f"column has the times: @flux.stage(..., event_time={window.column if window else 'ts'!r})"
            )
        return f"source {source.name}, some stages before, has no watermark and may never end. Declare it: {source.name}.{line}"
    assert isinstance(edge, FromSource)
    if edge.timed is Timed.LATE:
        return (
            f"late rows of source {source.name} have no watermark: keep them as they are, as in late.to_parquet(path)"
        )
    if source.event_time is not None:
        return f"it reads source {source.name} beside its watermark: give it the flow that {line} has returned"
    return f"source {source.name} has no watermark and may never end. Declare it: {source.name}.{line}"


def set_quanta(stages: Parts[StagePlan], edges: Parts[EdgePlan]) -> None:
    """Give new edges the greatest step of event time in which the windows behind each of them end. Edges that run keep theirs: a
    watermark travels there at the latest after ``spark.flux.watermark.interval``."""
    for stage in reversed(stages.new):
        quantum = _quantum(window_of(chain_of(stage.make())[0])) if stage.timed_inputs else 0
        for number in stage.edges_out:
            quantum = math.gcd(quantum, edges[number].quantum if edges[number].states else 0)
        for number in stage.edges_in:
            edges[number] = replace(edges[number], quantum=quantum)


def _quantum(window: Window | SessionWindow | None) -> int:
    """Return a step of event time at whose multiples windows end. A session ends at any time: a quarter of its gap is near."""
    if isinstance(window, Window):
        return window.grid
    return 0 if window is None else max(window.gap // 4, 1)


def _same(one: str, other: str, case_sensitive: bool) -> bool:
    return one == other if case_sensitive else one.casefold() == other.casefold()


def narrowed(schema: pa.Schema, time: EventTime, edges: Sequence[FromSource]) -> tuple[EventTime, list[FromSource]]:
    """Return the event time of a source, and the edges of its on-time and late rows, with the columns alone that these edges or
    the event time itself look at. ``schema``: that of the source."""
    behind = schema if time.steps is None else time.steps.output
    wanted = [edge.columns for edge in edges]
    steps = time.steps
    if None in wanted:
        read: Sequence[int] = range(len(behind))
    else:
        own = {time.at} if time.sure is None else {time.at, time.sure}
        read = sorted({*own, *(column for columns in wanted for column in columns or ())})
    if steps is not None:
        steps = steps.only([behind.names[at] for at in read])
        needs = tuple(map(schema.names.index, steps.needs()))
    else:
        needs = tuple(read)
    made = replace(
        time,
        at=list(read).index(time.at),
        sure=None if time.sure is None else list(read).index(time.sure),
        steps=steps,
        columns=None if len(needs) == len(schema) else needs,
    )
    return made, [replace(edge, columns=places_among(read, edge.columns)) for edge in edges]
