"""Requests for changes of the plan, and the records of changes that are done (design: change-of-plan).

A request is known to its requester from the beginning to the end, and only ``controller.decide.plan_changes`` changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from controller.course.plan_phases import PlanEvent, PlanPhase, after
from controller.text import some
from flux.dataflow.plan import Plan
from flux.dataflow.plan_change import PlanChange
from flux.errors import FluxError, UsageError
from flux.wire.control import EdgeStored

#: Stages that are named in a line about a failure, at most.
WENT_WITH = 5


class PlanHasChanged(UsageError):
    """The plan is not the one by which an addition was compiled. Compile it anew by the newest one, and ask again."""


class WorkersAreMissing(UsageError):
    """The workers of the moment cannot hold the replicas of an addition, and others are expected. Ask again later."""


@dataclass(frozen=True)
class VersionToKeep:
    """Order to the shell: make a plan the newest one in the checkpoint location, and then call ``PlanChanges.kept``."""

    #: The version that is kept, or taken back.
    version: int
    #: The plan of that version; if it is taken back, the one before.
    plan: Plan
    #: Names of stages that have failed.
    failed: tuple[str, ...] = ()
    #: All births that are known, of streams that come to running sources.
    births: tuple[EdgeStored, ...] = ()


@dataclass(frozen=True)
class BirthsToKeep:
    """Order to the shell: put births into the checkpoint location, beside those that it has, and then call
    ``PlanChanges.kept``."""

    births: tuple[EdgeStored, ...]


#: An order about the description in the checkpoint location.
LocationOrder = VersionToKeep | BirthsToKeep


@dataclass
class PlanRequest:
    """A change of the plan that is asked for."""

    #: Its name in sentences, such as "addition of Alarm".
    what: str
    #: Makes the change by the newest plan, with the number of the version; UsageError: that is impossible. Called again when its
    #: turn comes, because the plan may be another one by then.
    make: Callable[[Plan, int], PlanChange]
    since: float
    request: int = 0
    #: The name of the stage or source that it removes; "" for an addition, and for stages that have failed.
    removes: str = ""
    #: Given for additions, which only the driver can encode.
    encoded: bytes = b""
    #: The error, and the name of the stage in which it happened: the request removes the failed stages, and is repeated until it
    #: is done.
    failure: tuple[FluxError, str] | None = None
    phase: PlanPhase = PlanPhase.REQUESTED
    #: Time at which the phase began.
    at: float = 0.0
    #: Reason for refusing it.
    why: str = ""
    #: The class of the error that says so.
    refusal: type[UsageError] = UsageError
    change: PlanChange | None = None
    plan: Plan | None = None
    #: The newest order to the checkpoint location about it.
    order: VersionToKeep | None = None
    #: The epoch of the table that names it.
    epoch: int = -1
    repeat_at: float = 0.0

    def on(self, event: PlanEvent, now: float) -> None:
        self.phase, self.at = after(self.phase, event), now

    @property
    def version(self) -> int:
        assert self.change is not None
        return self.change.version


@dataclass(frozen=True)
class FailedStage:
    """A stage that has failed, or depended on one that has."""

    name: str
    #: Its id, which no other stage gets.
    stage: int
    #: By the wall clock, in seconds since 1970.
    at: float
    #: The name of the stage whose failure it was.
    because_of: str
    error: str
    traceback: str = ""


def failures(stages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Put into words which stages have failed, each with those that depended on it. ``stages``: those of a progress report."""
    lines = []
    for each in stages:
        name = each["stage"]
        if each["becauseOf"] == name:
            went = [other["stage"] for other in stages if other["becauseOf"] == name and other["stage"] != name]
            also = f", and with it {some(went, WENT_WITH)}" if went else ""
            lines.append(f"stage {name} has failed{also}: {each['error']:.300}")
    return lines


@dataclass(frozen=True)
class PlanVersion:
    """A version of the plan that a table has named: its number, its time by the wall clock, and the names of stages and sources
    that came with it or went."""

    version: int
    at: float
    added: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    #: Seconds from the table that named it until all processes followed that table.
    followed_s: float = 0.0
