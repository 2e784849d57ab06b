"""Wishes: number and kinds of the replicas that each stage is to have, first by the plan, later by request (design: wish).

A change names the new number and kind. The sweep then adds replicas of kinds that are missing, as repairs do, and drops
surplus ones once enough others are safe. Law: by a change alone, no partition ever has fewer safe replicas than the
smaller of both numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from controller.replicas.kinds import counts, wanted
from controller.text import technique
from flux.dataflow.plan import ById, Plan, StagePlan
from partitioning.ids import ACTIVE
from partitioning.table import ReplicaAt

Rows = Sequence[tuple[ReplicaAt, ...]]


class ChangePhase(StrEnum):
    """The phases of a change."""

    UNDER_WAY = "under way"
    DONE = "done"
    GIVEN_UP = "given up"


@dataclass
class Change:
    """One change of the protection of a stage."""

    stage: int
    #: Safe replicas that each partition keeps.
    least: int
    #: Replicas that a partition may have, apart from replicas that repairs or moves add.
    most: int
    #: The protection before the change, in words.
    before: str
    #: The protection after the change, in words.
    after: str
    #: Time of the request.
    since: float
    #: Its number.
    request: int
    #: Partitions that do not have the new protection yet.
    left: int = 0
    phase: ChangePhase = ChangePhase.UNDER_WAY
    #: Reason for giving it up.
    ended: str = ""

    @property
    def over(self) -> bool:
        return self.phase != ChangePhase.UNDER_WAY

    def __str__(self) -> str:
        return f"from {self.before} to {self.after}"


class ProtectionWishes:
    """The wishes for all stages, and the changes that are not over."""

    def __init__(self, plan: Plan) -> None:
        #: The plan as it is wished now. Only ``replicas`` and ``recovery`` of its stages ever differ from the workers' plan.
        self.plan = plan
        #: By stage.
        self.open: dict[int, Change] = {}

    def follow(self, plan: Plan) -> list[Change]:
        """Go by another version of the plan, with the wishes for stages that stay. Return the changes of other stages, which end
        here."""
        gone = [stage for stage in self.open if stage not in plan.stages]
        ended = [self.give_up(stage, "the stage was removed") for stage in gone]
        self.plan = replace(plan, stages=ById(map(self._wished, plan.stages)))
        return ended

    def _wished(self, stage: StagePlan) -> StagePlan:
        """Return a stage of another version of the plan with the replicas that it is to have."""
        if stage.id not in self.plan.stages:
            return stage
        wish = self.plan.stages[stage.id]
        if (wish.replicas, wish.recovery) == (stage.replicas, stage.recovery):
            return stage
        return replace(stage, replicas=wish.replicas, recovery=wish.recovery)

    def most(self, stage: StagePlan) -> int:
        """Return the number of replicas that a partition of the stage may have, not counting the target of a move."""
        change = self.open.get(stage.id)
        return len(wanted(stage)) if change is None else change.most

    def places(self, stage: StagePlan) -> int:
        """Return the number of workers that a partition of the stage needs from now on."""
        change = self.open.get(stage.id)
        return len(wanted(stage)) if change is None else most_at_a_time(stage, change.least)

    def ask(self, wish: StagePlan, rows: Rows, now: float, request: int) -> Change:
        """Begin a change to ``wish``. A change of the stage that is under way ends here. ``rows`` has the replicas of its
        partitions."""
        before = self.plan.stages[wish.id]
        earlier = self.open.get(wish.id)
        if earlier is not None:
            self.give_up(wish.id, f"request {request} asks for {in_words(wish)}")
        self.plan = replace(self.plan, stages=self.plan.stages.with_part(wish))
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
        """End a change without completing it. Its wish stays, but its progress is not followed any more."""
        change = self.open.pop(stage)
        change.phase, change.ended = ChangePhase.GIVEN_UP, why
        return change


def wished(stage: StagePlan, replicas: int | None, recovery: str | None) -> StagePlan:
    """Return the stage with another number of replicas, or other kinds; None: as before."""
    number = stage.replicas if replicas is None else replicas
    # A single replica is always active.
    kind = ACTIVE if number == 1 else stage.recovery if recovery is None else recovery
    return replace(stage, replicas=number, recovery=kind)


def least_safe(before: StagePlan, after: StagePlan) -> int:
    """Return the number of safe replicas that every partition keeps during a change, if no worker is lost."""
    return min(before.replicas, after.replicas)


def most_at_a_time(wish: StagePlan, least: int) -> int:
    """Return the replicas that a partition may have while surplus ones are exchanged for others: one more than are kept safe."""
    return len(wanted(wish)) + max(least + 1 - wish.replicas, 0)


def places_needed(rows: Rows, before: StagePlan, after: StagePlan) -> int:
    """Return the highest number of workers that a partition needs for a change, beginning with any of these rows."""
    least = least_safe(before, after)
    return max(_places(kinds, after, least) for kinds in {tuple(each.kind for each in row) for row in rows})


def _places(kinds: tuple[str, ...], wish: StagePlan, least: int) -> int:
    """Count the workers for a partition with replicas of these kinds, by the steps of the sweep, one by one."""
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
    """Describe the protection of a stage, such as "1 active replica and 2 standbys"."""
    return technique(stage.replicas, stage.recovery)
