"""Plans without code of the user's, for processes that run none of it and may not find its modules (design: vault)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from flux.dataflow.plan import ById, EdgePlan, Plan, SourcePlan, StagePlan, WorkerSourcePlan
from flux.dataflow.plan_change import PlanChange
from flux.dataflow.source_reader import AbsentReader
from flux.expressions.steps import MapRows, RowSteps


def without_code(plan: Plan) -> Plan:
    """Return the plan without readers and operators, for tasks that only send rows through the steps of edges."""
    return replace(plan, sources=ById(_unread(plan.sources)), stages=ById(_unmade(plan.stages)))


def for_a_vault(plan: Plan) -> Plan:
    """Return the plan without any code of the user's."""
    made = without_code(plan)
    return replace(made, sources=ById(_untimed(made.sources)), edges=ById(_unstepped(made.edges)))


def change_for_a_vault(change: PlanChange) -> PlanChange:
    """Return the change without any code of the user's. The plan that it makes is as ``for_a_vault`` returns it."""
    return replace(
        change,
        sources=tuple(_untimed(_unread(change.sources))),
        stages=tuple(_unmade(change.stages)),
        edges=tuple(_unstepped(change.edges)),
    )


def _unread(sources: Iterable[SourcePlan]) -> Iterator[SourcePlan]:
    for source in sources:
        yield replace(source, reader=AbsentReader(source.reader)) if isinstance(source, WorkerSourcePlan) else source


def _unmade(stages: Iterable[StagePlan]) -> Iterator[StagePlan]:
    for stage in stages:
        yield replace(stage, make=_nothing, sink=None)


def _untimed(sources: Iterable[SourcePlan]) -> Iterator[SourcePlan]:
    for source in sources:
        time = source.event_time
        yield (
            source if time is None else replace(source, event_time=replace(time, steps=_without_functions(time.steps)))
        )


def _unstepped(edges: Iterable[EdgePlan]) -> Iterator[EdgePlan]:
    for edge in edges:
        yield replace(edge, steps=_without_functions(edge.steps))


def _without_functions(steps: RowSteps | None) -> RowSteps | None:
    return None if steps is None or any(isinstance(each, MapRows) for each in steps.chain) else steps


def _nothing(*given: Any) -> Any:
    raise AssertionError("a vault runs no code of the user's")
