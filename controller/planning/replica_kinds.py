"""Kinds of replicas in a plan: their number, and the stages that may have replicas without an order (design: independent)."""

from __future__ import annotations

from collections.abc import Container, Iterator

from controller.planning.event_time_edges import window_of
from controller.replicas.kinds import NEEDS_UNKNOWN
from flux.arguments import CONVERGE, MARKS, STEPS, check_feeds, check_on_loss, check_recovery
from flux.dataflow.flow import Stage
from flux.dataflow.plan import EdgePlan, FromMicroBatches, FromSource, FromStage, Plan, StagePlan
from flux.dataflow.sink import QueryReaders
from flux.errors import UsageError
from flux.operators.operator import Operator, chain_of, note_of_output, says_needs
from flux.settings import Settings
from flux.windows.window import Window
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
    check_on_loss(stage.on_loss, replicas)
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


def check_kinds(plan: Plan, promises: Container[int]) -> None:
    """Check the stages whose replicas, or their losses, are not like others. ``promises``: see ``check_independent``."""
    check_independent(plan, promises)
    check_converging(plan)


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


def check_converging(plan: Plan) -> None:
    """Check the stages that begin empty when the last replica of a partition is lost (design: converge). UsageError: the results
    of one would not be whole again, or something outside the partition would have to know its state."""
    for stage in plan.stages:
        if stage.on_loss == CONVERGE and (why := _keeps_from_converging(plan, stage)):
            raise UsageError(f"stage {stage.name} has on_loss={CONVERGE!r}: {why}; or leave on_loss out")


def _keeps_from_converging(plan: Plan, stage: StagePlan) -> str:
    """Return the reason why a stage cannot begin empty, and the way out; empty: it can."""
    operator = stage.make()
    if stage.replicas != 1:
        return f"it has replicas={stage.replicas}, which keep the state of a lost worker: say replicas=1"
    if not isinstance(window_of(chain_of(operator)[0]), Window) or stage.output_mode != "append":
        return (
            "without a horizon its results would lack rows for ever, and a horizon is the length of its windows: give "
            "window=flux.window(...) of event time, and output_mode='append'"
        )
    if stage.edges_out or stage.collects or stage.sink is None or isinstance(stage.sink, QueryReaders):
        return (
            "its output would go on behind rows that are lost, and only a sink can say how many these were: end the flow in a "
            "sink right behind it, to(sink); to_parquet() writes by a stage of its own"
        )
    if note_of_output(operator) is not None:
        return (
            f"sink {stage.sink!r} knows rows by numbers that are a part of the lost state: use one that knows batches, "
            "such as to(sink) with a sink that defines committed()"
        )
    edges = [plan.edges[number] for number in stage.edges_in]
    if not all(isinstance(edge, FromSource) and edge.producers_known and edge.states for edge in edges):
        return (
            "rows of its input may come from tasks that are over, or from another stage, and cannot be asked for again: read it "
            "from sources inside the workers, such as flux.kafka or flux.files, with withWatermark(...)"
        )
    return ""


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
