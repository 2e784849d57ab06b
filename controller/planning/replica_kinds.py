"""Kinds of replicas in a plan: their number, and the stages that may have replicas without an order (design: independent)."""

from __future__ import annotations

from collections.abc import Container, Iterator

from controller.replicas.kinds import NEEDS_UNKNOWN
from flux.arguments import MARKS, STEPS, check_feeds, check_recovery
from flux.dataflow.flow import Stage
from flux.dataflow.plan import EdgePlan, FromMicroBatches, FromStage, Plan, StagePlan
from flux.errors import UsageError
from flux.operators.operator import Operator, says_needs
from flux.settings import Settings
from partitioning.ids import ACTIVE, UPSTREAM

#: The beginning of the refusals, and the way out.
ASKS, INSTEAD = (
    f"order={MARKS!r}, which is for stages whose output does not depend on the order of rows",
    "leave order out",
)


def replicas_of(stage: Stage, name: str, operator: Operator, settings: Settings) -> int:
    """Return the number of replicas of a stage. UsageError: there can be none of its kind."""
    replicas = settings.replicas if stage.replicas is None else stage.replicas
    check_recovery(stage.recovery, replicas, stage.order)
    if stage.recovery != ACTIVE and not settings.ordered:
        raise UsageError(
            f"stage {name}: recovery={stage.recovery!r} needs spark.flux.replicas.ordered=true: it repeats the order"
        )
    if stage.order != STEPS and not settings.ordered:
        raise UsageError(
            f"stage {name}: order={stage.order!r} needs spark.flux.replicas.ordered=true: without it replicas drift apart"
        )
    if stage.recovery == UPSTREAM and not says_needs(operator, stage.output_mode):
        raise UsageError(f"stage {name}: recovery={UPSTREAM!r} {NEEDS_UNKNOWN}")
    return replicas


def feeds_of(stage: Stage, name: str, replicas: int, settings: Settings) -> str:
    """Return the way in which the copies of a stage are read. UsageError: the stage asks for copies that it has not."""
    try:
        check_feeds(stage.feeds, replicas, stage.recovery)
    except UsageError as error:
        raise UsageError(f"stage {name}: {error}") from None
    return stage.feeds or settings.feeds


def check_independent(plan: Plan, promises: Container[int]) -> None:
    """Check the stages with replicas that have no common order. UsageError: the operator of one does not commute, or rows come to
    it in a way in which its copies could differ. ``promises``: stages that keep to the watermark by the user's word alone."""
    for stage in plan.stages:
        if stage.order != MARKS:
            continue
        if reason := stage.make()._flux_needs_order(stage.schemas, stage.output_mode):
            raise UsageError(f"stage {stage.name} has {ASKS}: {reason}; or {INSTEAD}")
        if stage.availability is not None:
            raise UsageError(
                f"stage {stage.name} has order={MARKS!r} and availability: tentative results are those of one replica, and its "
                "replicas are at different rows. Leave one of them out"
            )
        for edge in _before(plan, stage):
            if why := _differs(plan, edge, promises):
                raise UsageError(f"stage {stage.name} has order={MARKS!r}: {why}; {INSTEAD}")


def _before(plan: Plan, stage: StagePlan) -> Iterator[EdgePlan]:
    """Yield the edges by which rows come to a stage, near or far, each once."""
    found = list(dict.fromkeys(stage.edges_in))
    for number in found:
        edge = plan.edges[number]
        yield edge
        if isinstance(edge, FromStage):
            found += [each for each in plan.stages[edge.stage].edges_in if each not in found]


def _differs(plan: Plan, edge: EdgePlan, promises: Container[int]) -> str:
    """Return the reason why copies could get other rows, or count others as late; empty: they cannot."""
    origin = plan.origin(edge)
    if isinstance(origin, StagePlan):
        if origin.id in promises:
            return (
                f"rows of stage {origin.name} keep to the watermark by its own word (event_time=), and a row below it would be "
                "late on one replica and not on another"
            )
        return ""
    if isinstance(edge, FromMicroBatches):
        return f"source {origin.name} comes in micro-batches, whose watermark the driver knows after all replicas"
    time = origin.event_time
    if time is not None and (time.idle is not None or time.advance):
        return (
            f"source {origin.name} has idle= in its withWatermark, and the rows of a partition that was idle would be late on "
            "one replica and not on another"
        )
    if plan.may_lose(edge, passed_over=True):
        return f"source {origin.name} goes on after a loss of rows, and a replica may have got rows that are gone for another"
    return ""
