"""The next step that brings the plan and the outputs to the state of the registry (design: registry-steps).

Law: whatever step a service was lost in, the next one comes to the same end. A query whose registration was answered is in the
plan. One that was not answered is there as a whole or not at all. Nothing of a removed one is left: no stage, no output and no
entry.

Every step may be repeated, because a service may be lost between its effect and the next look. Registration, removal, failure and
the start of a service are all the same: the registry is changed first, and then steps are made until none is due.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from flux.registry.definitions import RegisteredQuery


@dataclass(frozen=True)
class AddToPlan:
    """Add the stages of a query to the plan, with those of the streams that it reads first."""

    query: RegisteredQuery


@dataclass(frozen=True)
class NoteRunning:
    """Write down that a query runs. From then on its registration is answered."""

    query: RegisteredQuery


@dataclass(frozen=True)
class NoteFailed:
    """Write down that a query has failed."""

    query: RegisteredQuery
    error: str


@dataclass(frozen=True)
class TakeFromPlan:
    """Remove the stages of a query or of a stream from the plan. Nothing reads them any more."""

    name: str


@dataclass(frozen=True)
class Forget:
    """Remove the output of a query, and then its entry."""

    query: RegisteredQuery


Step = AddToPlan | NoteRunning | NoteFailed | TakeFromPlan | Forget


@dataclass(frozen=True)
class PlanParts:
    """The queries and streams whose stages are in the plan, with the names that each query reads; and the queries whose stages
    have failed, with the errors."""

    queries: Mapping[str, Collection[str]]
    streams: Collection[str]
    failed: Mapping[str, str]


def next_step(registered: Mapping[str, RegisteredQuery], plan: PlanParts) -> Step | None:
    """Return the next step; None: plan and outputs are as the registry says."""
    entries = sorted(registered.values(), key=lambda each: each.number)
    for each in entries:
        if each.name in plan.failed and each.phase in ("RUNNING", "REGISTERING"):
            return NoteFailed(each, plan.failed[each.name])
    if (unread := _unread(registered, plan)) is not None:
        return TakeFromPlan(unread)
    for each in reversed(entries):  # readers before those that they read
        if each.phase == "REMOVING" and each.name not in plan.queries:
            # A note of failure would be taken for one of the next query of this name.
            return TakeFromPlan(each.name) if each.name in plan.failed else Forget(each)
    for each in entries:
        if each.phase in ("REGISTERING", "RUNNING") and each.name not in plan.queries:
            return AddToPlan(each)
        if each.phase == "REGISTERING":
            return NoteRunning(each)
    return None


def _unread(registered: Mapping[str, RegisteredQuery], plan: PlanParts) -> str | None:
    """Return a part of the plan that is to go, and that no other part reads; None: there is none."""
    read = {name for reads in plan.queries.values() for name in reads}
    for name in plan.queries:
        entry = registered.get(name)
        if (entry is None or entry.phase in ("REMOVING", "FAILED")) and name not in read:
            return name
    wanted = {name for each in registered.values() if each.phase in ("REGISTERING", "RUNNING") for name in each.reads}
    return next((name for name in plan.streams if name not in read and name not in wanted), None)
