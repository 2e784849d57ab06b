"""How many replicas each stage is to have, of which kinds: first as the plan says, later as people ask (design: wish).

A change names the new number and kind. The sweep then adds replicas of kinds that are missing, as repairs do, and drops those
that are too many once enough others are safe. Law: by a change alone, no partition ever has fewer safe replicas than the
smaller of both numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from controller.replicas.kinds import counts, wanted
from controller.wording import technique
from flux.dataflow.plan import Plan, StagePlan
from partitioning.ids import ACTIVE
from partitioning.table import ReplicaAt

Rows = Sequence[tuple[ReplicaAt, ...]]


class ChangePhase(StrEnum):
    UNDER_WAY = "under way"
    DONE = "done"
    GIVEN_UP = "given up"


@dataclass
class Change:
    """One change of a stage. ``least``: safe replicas that each partition keeps; ``most``: replicas that it may have, those
    that only repairs or moves add not counted; ``before``, ``after``: in words; ``left``: partitions that are not as they
    shall be; ``ended``: why it was given up."""

    stage: int
    least: int
    most: int
    before: str
    after: str
    since: float
    request: int
    left: int = 0
    phase: ChangePhase = ChangePhase.UNDER_WAY
    ended: str = ""

    @property
    def over(self) -> bool:
        return self.phase != ChangePhase.UNDER_WAY

    def __str__(self) -> str:
        return f"from {self.before} to {self.after}"


class Wishes:
    """``plan``: as it is wished now; only ``replicas`` and ``recovery`` of its stages ever differ from the plan of the
    workers. ``open``: the changes that are not over, by stage."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.open: dict[int, Change] = {}

    def most(self, stage: StagePlan) -> int:
        """Replicas that a partition of the stage may have, the target of a move not counted."""
        change = self.open.get(stage.id)
        return len(wanted(stage)) if change is None else change.most

    def places(self, stage: StagePlan) -> int:
        """Workers that a partition of the stage needs from now on."""
        change = self.open.get(stage.id)
        return len(wanted(stage)) if change is None else most_at_a_time(stage, change.least)

    def ask(self, wish: StagePlan, rows: Rows, now: float, request: int) -> Change:
        """Have a stage as ``wish`` says from now on. ``rows``: the replicas of its partitions. A change that is under way
        ends here."""
        before = self.plan.stages[wish.id]
        earlier = self.open.get(wish.id)
        if earlier is not None:
            self.give_up(wish.id, f"request {request} asks for {in_words(wish)}")
        stages = tuple(wish if stage.id == wish.id else stage for stage in self.plan.stages)
        self.plan = replace(self.plan, stages=stages)
        least = least_safe(before, wish)
        most = max(most_at_a_time(wish, least), *(len(row) for row in rows))
        change = Change(wish.id, least, most, in_words(before), in_words(wish), now, request)
        self.open[wish.id] = change
        return change

    def done(self, stage: int) -> Change:
        change = self.open.pop(stage)
        change.phase, change.left = ChangePhase.DONE, 0
        return change

    def give_up(self, stage: int, why: str) -> Change:
        """The wish stays; nobody follows the change any more."""
        change = self.open.pop(stage)
        change.phase, change.ended = ChangePhase.GIVEN_UP, why
        return change


def wished(stage: StagePlan, replicas: int | None, recovery: str | None) -> StagePlan:
    """The stage with another number of replicas, or other kinds; None: as it is."""
    number = stage.replicas if replicas is None else replicas
    # A single replica is an active one, whatever others would be.
    kind = ACTIVE if number == 1 else stage.recovery if recovery is None else recovery
    return replace(stage, replicas=number, recovery=kind)


def least_safe(before: StagePlan, after: StagePlan) -> int:
    """Safe replicas that every partition keeps during a change, if nothing is lost."""
    return min(before.replicas, after.replicas)


def most_at_a_time(wish: StagePlan, least: int) -> int:
    """Replicas of a partition while those that are too many are exchanged for others: one more than are kept safe."""
    return len(wanted(wish)) + max(least + 1 - wish.replicas, 0)


def places_needed(rows: Rows, before: StagePlan, after: StagePlan) -> int:
    """Workers that a partition needs for a change at the most, beginning with any of these rows."""
    least = least_safe(before, after)
    return max(_places(kinds, after, least) for kinds in {tuple(each.kind for each in row) for row in rows})


def _places(kinds: tuple[str, ...], wish: StagePlan, least: int) -> int:
    """The same for a partition with replicas of these kinds: as the sweep does it, step by step."""
    have, goal, most = list(kinds), counts(wish), len(kinds)
    while True:
        too_many = [kind for kind in reversed(have) if have.count(kind) > goal.get(kind, 0)]
        missing = [kind for kind in goal if have.count(kind) < goal[kind]]
        if too_many and (len(have) > least or not missing):
            have.remove(too_many[0])
        elif missing:
            have.append(missing[0])
        else:
            return most
        most = max(most, len(have))


def in_words(stage: StagePlan) -> str:
    """Such as "1 active replica and 2 standbys"."""
    return technique(stage.replicas, stage.recovery)
