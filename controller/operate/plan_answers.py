"""Answers about the plan of a query: its versions, the changes under way, and stages that have failed (design: change-of-plan,
stage-fails)."""

from __future__ import annotations

import threading
from collections.abc import Callable

from controller.decide.plan_changes import PlanChanges
from controller.decide.request_book import FlowAddition
from controller.operate.requests import FailedStatus, PlanStatus, RunningPart, VersionStatus
from flux.dataflow.plan import Plan, StagePlan
from flux.errors import FluxError
from flux.operators.user_code import described, text_of


def plan_versions(plan: Plan, plans: PlanChanges) -> PlanStatus:
    """Describe the plan, the sources first."""
    sources = [RunningPart(name=source.name, since=source.since, source=True) for source in plan.sources]
    stages = [RunningPart(name=stage.name, since=stage.since, reads=_reads(plan, stage)) for stage in plan.stages]
    return PlanStatus(
        version=plan.version,
        parts=[*sources, *stages],
        versions=[
            VersionStatus(version=each.version, at=each.at, added=each.added, removed=each.removed)
            for each in plans.versions
        ],
        failed=failed_stages(plans),
        changes=plans.in_words(),
        sealed=plans.sealed,
    )


def _reads(plan: Plan, stage: StagePlan) -> list[str]:
    return list(dict.fromkeys(plan.origin(plan.edges[edge]).name for edge in stage.edges_in))


def failed_stages(plans: PlanChanges) -> list[FailedStatus]:
    return [
        FailedStatus(
            stage=each.name, at=each.at, because_of=each.because_of, error=each.error, traceback=each.traceback
        )
        for each in plans.failed.values()
    ]


def begin_addition(what: str, target: str, add: Callable[[str], None]) -> FlowAddition:
    """Have the program of the query add a flow, or restart a stage, in a thread of its own: the program imports, compiles and
    waits. ``what``: the request in words, without its target."""
    addition = FlowAddition(f"{what} of {target}")

    def run() -> None:
        try:
            add(target)
        except FluxError as error:
            addition.error = text_of(error)
        except Exception as error:
            addition.error = described(error)
        addition.over = True

    threading.Thread(target=run, name="flux-add", daemon=True).start()
    return addition
