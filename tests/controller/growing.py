"""Changes of a plan for tests: copies of a stage of a chain, and sources that workers read."""

from __future__ import annotations

from dataclasses import replace

from flux.dataflow.plan import FromStage, Plan, StagePlan
from flux.dataflow.plan_change import PlanChange


def copy_of(plan: Plan, name: str, like: str = "Sums", version: int | None = None, behind: int = 0) -> PlanChange:
    """Add another stage like one of the plan, which reads the stage of id ``behind``."""
    _, stage, edge = plan.next_ids()
    (pattern,) = (each for each in plan.stages if each.name == like)
    (input_,) = pattern.edges_in
    way = plan.edges[input_]
    assert isinstance(way, FromStage), "a stage that reads another one"
    made: StagePlan = replace(pattern, id=stage, name=name, edges_in=(edge,), edges_out=())
    return PlanChange(
        plan.version + 1 if version is None else version,
        stages=(made,),
        edges=(replace(way, id=edge, consumer=stage, stage=behind, log_bytes=64 << 10),),
    )


def grown(plan: Plan, *names: str) -> Plan:
    """Return the plan with copies of Sums of these names, each by a version of its own."""
    for name in names:
        plan = copy_of(plan, name).applied_to(plan)
    return plan


def without(plan: Plan, stage: int) -> Plan:
    """Return the plan without a stage that feeds no other."""
    edges = plan.stages[stage].edges_in
    return PlanChange(plan.version + 1, removed_stages=(stage,), removed_edges=edges).applied_to(plan)
