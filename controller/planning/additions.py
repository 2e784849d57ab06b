"""Additions to a running query: flows compiled into a change of its plan (design: additions).

New parts get ids behind all that were ever given. Parts that run stay as they are: their columns, the steps of event time at
which their watermarks are told, their availability, their logs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from controller.planning.checks import check_added_tables, check_durable, check_ends, check_folders, check_taken
from controller.planning.compiled_plan import CompiledPlan
from controller.planning.compiler import Compiler
from controller.planning.names import KeptNames
from controller.planning.steps import Resolvers
from flux.arguments import MARKS
from flux.dataflow.flow import Flow
from flux.dataflow.plan import EdgePlan, FromStage, Plan, SourcePlan, StagePlan
from flux.dataflow.plan_change import PlanChange
from flux.dataflow.sink import FlowTo
from flux.errors import UsageError
from flux.operators.user_code import text_of


@dataclass(frozen=True)
class PlanAddition:
    """A change that adds parts to a running plan, and the plan with them."""

    running: CompiledPlan
    change: PlanChange
    #: The next version, with the declarations of all parts.
    made: CompiledPlan
    #: Facts that its sources and sinks have settled, as they are kept in a checkpoint location.
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def with_parts(
        self, sources: Iterable[SourcePlan], stages: Iterable[StagePlan], facts: dict[str, dict[str, Any]]
    ) -> PlanAddition:
        """Return the addition with prepared forms of its parts, and the facts that they have settled."""
        made = self._with(replace(self.change, sources=tuple(sources), stages=tuple(stages)))
        return replace(made, facts=facts)

    def with_log_shares(self, workers: int) -> PlanAddition:
        """Return the addition with the shares of log of its streams. ``workers``: the number with which the query began.
        UsageError: too little is left."""
        return self._with(self.change.with_log_shares(self.running.plan, workers))

    def _with(self, change: PlanChange) -> PlanAddition:
        return replace(self, change=change, made=self.made.with_plan(change.applied_to(self.running.plan)))


def compiled_addition(
    flows: Sequence[Flow | FlowTo], running: CompiledPlan, resolvers: Resolvers, trial: bool = False
) -> PlanAddition:
    """Compile flows into the next change of a running plan. ``trial``: a flow is being written, and a column that has its name
    twice may yet be left out. UsageError and SchemaError name the stage, the expected value and the actual value."""
    plan = running.plan
    if plan.durable:
        check_durable(flows)
    _check_sinks(flows, running)
    compiler = Compiler(plan.settings, resolvers, {}, trial, running)
    compiler.compile(flows)
    sources, stages, edges = compiler.sources.new, compiler.stages.new, compiler.edges.new
    change = PlanChange(plan.version + 1, tuple(sources), tuple(stages), tuple(edges), base=plan.version)
    made = compiler.described(change.applied_to(plan))
    return PlanAddition(running, change, replace(made, sinks={**made.sinks, **running.sinks}))


def _check_sinks(flows: Sequence[Flow | FlowTo], running: CompiledPlan) -> None:
    """Raise UsageError for a sink that is there already: a flow that is added for a second time would write its output twice."""
    for given in flows:
        for stage, sink in running.sinks.items() if isinstance(given, FlowTo) else ():
            if sink is given.sink:
                raise UsageError(
                    f"the sink of this flow, {text_of(sink, repr)}, is that of stage {running.plan.stages[stage].name} already, "
                    "so the output would be there twice. A flow that was added runs; for a second output make a sink of its own"
                )


def compiled_version(
    flows: Sequence[Flow | FlowTo],
    running: CompiledPlan,
    resolvers: Resolvers,
    version: int,
    began_with: Mapping[str, int],
    kept: KeptNames,
    collect: int = 0,
) -> CompiledPlan:
    """Compile flows into the ``version`` of a plan that added them once, on top of the earlier versions (design: same-form). All
    ids are new ones. ``began_with``: the partitions of sources, by name, at the first start; ``kept``: names of the version;
    ``collect``: partitions of collecting stages, 0: none. Errors are those of ``compiled_addition``."""
    plan = running.plan
    compiler = Compiler(plan.settings, resolvers, began_with, False, running, kept)
    compiler.compile(flows, collect)
    parts = tuple(compiler.sources.new), tuple(compiler.stages.new), tuple(compiler.edges.new)
    made = compiler.described(PlanChange(version, *parts, base=plan.version).applied_to(plan))
    return replace(made, sinks={**made.sinks, **running.sinks})


def check_addition(addition: PlanAddition) -> None:
    """Check the whole plan with an addition, before any process hears of it. UsageError: nothing is added, or output of an added
    stage would never come, or goes nowhere."""
    plan, new = addition.made.plan, {stage.id for stage in addition.change.stages}
    if not new:
        raise UsageError(
            "nothing is added: all stages of these flows run already. A flow goes on from a running stage, as in "
            'Alarm(query["Delays"]).to_kafka("alarms", "host:9092")'
        )
    for edge in addition.change.edges:
        _check_begins(addition.running.plan, edge)
    if plan.durable:
        check_added_tables(plan)
    check_ends(plan, goes_on=plan.durable)
    check_folders(plan)
    check_taken(plan, new)


def _check_begins(running: Plan, edge: EdgePlan) -> None:
    """Raise UsageError if an edge cannot begin in the middle of the rows of its origin."""
    if isinstance(edge, FromStage) and edge.stage in running.stages and running.stages[edge.stage].at_marks:
        raise UsageError(
            f"stage {running.stages[edge.stage].name} has order={MARKS!r}: its replicas have no common order of steps, so "
            "nothing can begin behind the same row of all of them. Read the input by a source of its own, or start the query anew"
        )
