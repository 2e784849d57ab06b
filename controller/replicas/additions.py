"""The next additions: stages in topological order, a few partitions at a time (design: sweep, add-replica)."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import NamedTuple

from controller.replicas.addition_limits import CONFIRM_MAX_S, READY_MAX_S, SAFE_MAX_S
from controller.replicas.kinds import incomplete, missing
from controller.replicas.placement import Placement
from controller.replicas.protection_wishes import ProtectionWishes
from controller.replicas.replica_safety import Life
from flux.dataflow.plan import Plan, StagePlan
from flux.replica.kinds import AckMeaning, kind_named
from flux.wire.control import CopyState, TableChanged
from partitioning.ids import ACTIVE, PartitionKey
from partitioning.table import ReplicaAt, Table


class Phase(StrEnum):
    """The phases of an addition. Each comment tells how long the phase lasts.

        RETAIN --confirmed--> READY --turn--> COPY --follows--> FOLLOWS --listed--> LIVE --complete--> SAFE
        READY --follows--> FOLLOWS, of a kind without a state
        RETAIN, READY, COPY, FOLLOWS, LIVE --dropped--> DROPPED

    An addition begins in RETAIN with the table that lists the new replica, or in READY if producers keep nothing for its
    kind. Additions of a batch begin with one table, and one table lists them as live; only the copies go one by one. An
    event that is not in the table of steps is a mistake of the caller, which has to check first whether a report is meant
    for this phase."""

    #: Until every process goes by the table that lists the replica.
    RETAIN = "retain"
    #: Until its turn comes: few partitions stand still for a copy at the same time.
    READY = "ready"
    #: Until the replica follows the order of its primary.
    COPY = "copy"
    #: Until a table lists it as live, with others of its batch.
    FOLLOWS = "follows"
    #: Until it has everything that is committed; in a move, also until the remaining replicas keep up well enough.
    LIVE = "live"
    #: It may take over: the addition is done.
    SAFE = "safe"
    #: Its worker or its primary was lost, or the attempt took too long.
    DROPPED = "dropped"


class AdditionEvent(Enum):
    """The events of an addition."""

    CONFIRMED = "every process goes by the table that lists the replica"
    TURN = "another copy is through"
    FOLLOWS = "its primary says that it follows the order"
    LISTED = "a table that lists it as live is on its way"
    COMPLETE = "its primary says that it has everything committed"
    DROPPED = "a table without it is on its way"


@dataclass(frozen=True, slots=True)
class AdditionStep:
    """A step from one phase to the next: the phase that follows, the message that goes out with it, and its time limit."""

    #: The next phase.
    to: Phase
    #: The message that goes out with it, if any.
    tells: type | None
    #: The longest time in the next phase.
    limit_s: float = math.inf


STEPS: dict[tuple[Phase, AdditionEvent], AdditionStep] = {
    (Phase.RETAIN, AdditionEvent.CONFIRMED): AdditionStep(Phase.READY, None, READY_MAX_S),
    # The phase COPY has another limit: the number of copies that are ordered (``addition_limits.COPIES_MAX``), with more patience
    # each time.
    (Phase.READY, AdditionEvent.TURN): AdditionStep(Phase.COPY, CopyState),
    # The controller itself ends the phase FOLLOWS, after at most ``addition_limits.LISTED_EVERY_S``.
    (Phase.COPY, AdditionEvent.FOLLOWS): AdditionStep(Phase.FOLLOWS, None),
    # A kind without a state needs no copy.
    (Phase.READY, AdditionEvent.FOLLOWS): AdditionStep(Phase.FOLLOWS, None),
    (Phase.FOLLOWS, AdditionEvent.LISTED): AdditionStep(Phase.LIVE, TableChanged, SAFE_MAX_S),
    # If the addition is a move, a table without the source goes out.
    (Phase.LIVE, AdditionEvent.COMPLETE): AdditionStep(Phase.SAFE, None),
} | {
    (phase, AdditionEvent.DROPPED): AdditionStep(Phase.DROPPED, TableChanged)
    for phase in (Phase.RETAIN, Phase.READY, Phase.COPY, Phase.FOLLOWS, Phase.LIVE)
}

#: The longest time that an addition may be in each phase.
LIMIT_S: dict[Phase, float] = {Phase.RETAIN: CONFIRM_MAX_S} | {
    step.to: step.limit_s for step in STEPS.values() if any(phase == step.to for phase, _ in STEPS)
}


def after(phase: Phase, heard: AdditionEvent) -> Phase:
    """Return the phase that follows."""
    assert (phase, heard) in STEPS, f"{heard.name} of an addition in phase {phase}"
    return STEPS[phase, heard].to


Replicas = tuple[ReplicaAt, ...]
Rows = tuple[Replicas, ...]


@dataclass(frozen=True, slots=True)
class Moment:
    """The facts by which the additions of one look are chosen, repairs and moves alike. They are worked out once, and hold until
    the next table."""

    #: The table as it stands.
    table: Table
    #: The workers that may hold replicas.
    placement: Placement
    #: Partitions that rest after many attempts, and get no addition.
    resting: AbstractSet[PartitionKey] = frozenset()
    #: The free share of the fullest log.
    log_room: float = 1.0
    now: float = math.inf


@dataclass
class Addition:
    """One AddReplica under way.

    An addition goes through the phases of ``Phase``, each entered when the one before is confirmed. Every command is safe
    to repeat. An addition that a loss has made impossible is dropped, and the next look at the table plans another. The
    first half of a move is an addition like any other."""

    stage: int
    partition: int
    worker: int
    #: The epoch of the table that introduced the replica.
    incarnation: int
    #: Time of the beginning.
    started: float
    #: Time between the next order for a copy and the one after it.
    patience_s: float
    phase: Phase = Phase.RETAIN
    #: Time of the next order for a copy.
    ask_at: float = -1.0
    why: str = "too few replicas"
    #: For how long the primary stood still for the copy.
    stall_ms: float = 0.0
    #: In a move, the worker whose replica this one replaces; None: a repair.
    from_worker: int | None = None
    #: Time at which ``phase`` began.
    since: float = 0.0
    #: Orders for a copy.
    asked: int = 0
    #: Time at which the replica had everything committed; None: it has not. Then a move waits only for the next table, and for
    #: replicas that are far behind.
    arrived_at: float | None = None
    #: Size of the copy.
    bytes: int = 0
    kind: str = ACTIVE
    #: The number of the request that changes the stage; 0: none.
    request: int = 0
    key: PartitionKey = field(init=False)
    #: The new replica.
    life: Life = field(init=False)

    def __post_init__(self) -> None:
        self.key = PartitionKey(self.stage, self.partition)
        self.life = Life(self.stage, self.partition, self.worker, self.incarnation)

    @classmethod
    def of(cls, wanted: WantedAddition, epoch: int, patience_s: float, now: float) -> Addition:
        """Begin an addition with the table of this epoch."""
        return cls(
            wanted.stage, wanted.partition, wanted.worker, epoch, now, patience_s, first_phase(wanted.kind), why=wanted.why,
            from_worker=wanted.from_worker, since=now, kind=wanted.kind, request=wanted.request,
        )  # fmt: skip

    @property
    def moves(self) -> bool:
        return self.from_worker is not None

    @property
    def arrived(self) -> bool:
        return self.arrived_at is not None

    def on(self, heard: AdditionEvent, now: float) -> None:
        self.phase, self.since = after(self.phase, heard), now


@dataclass(frozen=True)
class WantedAddition:
    """An addition to begin. ``from_worker`` and ``request``: see Addition."""

    stage: int
    partition: int
    worker: int
    from_worker: int | None = None
    why: str = "too few replicas"
    kind: str = ACTIVE
    request: int = 0

    @property
    def key(self) -> PartitionKey:
        return PartitionKey(self.stage, self.partition)


class HolderCount(NamedTuple):
    """The number of replicas on a worker. Entries sort by the number."""

    replicas: int
    worker: int


def first_phase(kind: str) -> Phase:
    """Return RETAIN, or READY for a kind for which producers keep nothing, so that its table needs no confirmation."""
    return Phase.READY if kind_named(kind).acks is AckMeaning.NOTHING else Phase.RETAIN


class Census:
    """Counts of the replicas on workers, and the partitions with too few replicas of some kind.

    The first table is counted as a whole, later tables only in the stages that have changed, because the sweep looks far more
    often than a stage changes."""

    def __init__(self, wishes: ProtectionWishes) -> None:
        self.wishes = wishes
        #: By stage: the rows of the table, and the wish, by which it was counted last.
        self._counted: dict[int, Rows] = {}
        self._wished: dict[int, StagePlan] = {}
        #: By stage: its partitions with too few replicas.
        self._low: dict[int, list[int]] = {}
        #: By stage and worker, and by worker alone: the number of replicas.
        self._held: dict[int, dict[int, int]] = {}
        self._total: Counter[int] = Counter()

    def look(self, table: Table) -> None:
        """Count the stages of a table anew whose replicas or wishes have changed since the last look."""
        stages = self.wishes.plan.stages
        self._forget([stage for stage in self._counted if stage not in stages])
        for wish in stages:
            stage, rows = wish.id, table.stages[wish.id]
            if stage not in self._counted or rows is not self._counted[stage] or wish is not self._wished[stage]:
                self._counted[stage], self._wished[stage] = rows, wish
                self._low[stage] = incomplete(wish, rows, mixed=stage in self.wishes.open)
                held = Counter([replica.worker for replicas in rows for replica in replicas])
                self._total.subtract(self._held.get(stage, {}))
                self._total.update(held)
                self._held[stage] = held

    def _forget(self, gone: Iterable[int]) -> None:
        for stage in gone:
            self._total.subtract(self._held[stage])
            for of_stage in (self._counted, self._wished, self._low, self._held):
                del of_stage[stage]

    def low_of_stages(self) -> dict[int, list[int]]:
        """Return, by id of each stage, its partitions with fewer replicas than it wants."""
        return self._low

    def low(self) -> Iterator[PartitionKey]:
        """Yield the partitions with fewer replicas than their stage wants, in topological order.

        While a stage changes, its partitions that have the number that is kept safe come after all others, and partitions that
        have to drop a replica first are left out."""
        later: list[PartitionKey] = []
        for stage, partitions in self._low.items():
            change = self.wishes.open.get(stage)
            rows = self._counted[stage]
            for partition in partitions:
                if change is None or len(rows[partition]) < change.least:
                    yield PartitionKey(stage, partition)
                elif len(rows[partition]) < change.most:
                    later.append(PartitionKey(stage, partition))
        yield from later

    def held(self) -> dict[int, int]:
        """Count the replicas on each worker that has any."""
        return {worker: count for worker, count in self._total.items() if count}


def under_replicated(plan: Plan, table: Table) -> list[PartitionKey]:
    """Return the partitions with fewer replicas than their stage wants, in topological order."""
    return [
        PartitionKey(stage.id, partition)
        for stage in plan.stages
        for partition in incomplete(stage, table.stages[stage.id])
    ]


def next_additions(
    plan: Plan,
    table: Table,
    under_way: Iterable[Addition],
    at_once: int,
    placement: Placement,
    census: Census | None = None,
    resting: AbstractSet[PartitionKey] = frozenset(),
) -> list[WantedAddition]:
    """Return the additions to begin now. Stages go in order: none begins while another has an addition under way.

    Keep a ``census`` from call to call to save counting. It knows the wishes of the moment, ``plan`` only the first ones.
    Partitions that are ``resting`` are skipped for now."""
    busy = list(under_way)
    if len(busy) >= at_once:
        return []
    stage = min((addition.stage for addition in busy), default=None)
    wanted: list[WantedAddition] = []
    for each in _additions(table, busy, placement, census or Census(ProtectionWishes(plan)), stage, resting):
        # Partitions that no worker can take are skipped, and so is a stage that has no others.
        if wanted and each.stage != wanted[0].stage:
            break
        wanted.append(each)
        if len(busy) + len(wanted) >= at_once:
            break
    return wanted


def all_additions(plan: Plan, table: Table, placement: Placement) -> list[WantedAddition]:
    """Return all additions that the sweep will make, in order, if nothing else happens meanwhile."""
    return list(_additions(table, [], placement, Census(ProtectionWishes(plan)), None, frozenset()))


def _additions(
    table: Table,
    busy: Sequence[Addition],
    placement: Placement,
    census: Census,
    stage: int | None,
    resting: AbstractSet[PartitionKey],
) -> Iterator[WantedAddition]:
    """Yield the additions in order, each on the worker with the fewest replicas at that time, of the workers that may hold it
    and have the best rank. ``stage`` is the only stage to look at; None: all."""
    census.look(table)
    held = census.held()
    emptiest = [HolderCount(held.get(worker, 0), worker) for worker in {**table.endpoints, **held}]
    heapq.heapify(emptiest)
    taken = {addition.key for addition in busy} | resting
    wishes = census.wishes
    hopeless: set[tuple[int, ...]] = set()
    for key in census.low():
        if stage is not None and key.stage != stage:
            return
        if key in taken:
            continue
        replicas = table.replicas(*key)
        holders = tuple(replica.worker for replica in replicas)
        if holders in hopeless:
            continue  # no worker may hold a replica beside these: with few workers, many partitions are like this one
        worker = _emptiest(emptiest, key, holders, placement)
        if worker is None:
            hopeless.add(holders)
        else:
            kind = missing(wishes.plan.stages[key.stage], replicas) or ACTIVE
            change = wishes.open.get(key.stage)
            if change is None:
                yield WantedAddition(*key, worker, kind=kind)
            else:
                yield WantedAddition(*key, worker, why=f"change {change}", kind=kind, request=change.request)


def _emptiest(
    emptiest: list[HolderCount], key: PartitionKey, holders: tuple[int, ...], placement: Placement
) -> int | None:
    """Choose the worker with the fewest replicas, of the workers that may hold a replica and have the best rank.

    Its entry in the heap then counts one more. Thanks to the heap, not all workers are examined for each of many partitions."""
    wanted = placement.best(key, holders)
    seen: list[HolderCount] = []
    chosen: int | None = None  # its place among those seen
    best = wanted
    while emptiest and (chosen is None or best > wanted):
        seen.append(heapq.heappop(emptiest))
        worker = seen[-1].worker
        if placement.may_hold(worker, holders):
            rank = placement.rank(key, worker, holders)
            if chosen is None or rank < best:
                chosen, best = len(seen) - 1, rank
    for at, (replicas, worker) in enumerate(seen):
        heapq.heappush(emptiest, HolderCount(replicas + (at == chosen), worker))
    return None if chosen is None else seen[chosen].worker
