"""The safety of replicas: arrived ones, ones that could take over, and their lags behind their primaries (design: safe, behind,
standing-still).

A replica is safe when its primary has reported so. Only a safe one may take over, or allow another to be dropped. Lags are those
that the primaries' workers report: the distance, and the time of standing still.

A replica beyond one of the bounds (``spark.flux.replicas.maxStepsBehind``, ``.maxReplay``) has the order, and can take
over if no better one is left. But the partition would wait until it has applied its steps, so nothing is given up in
its favour.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from controller.replicas.kinds import outlives_primary
from controller.replicas.table_changes import Judge
from flux.replica.kinds import kind_of
from flux.settings import Settings
from flux.wire.statistics import TOLD_SHARE, lag_share
from flux.wire.statistics import Lag as Reported
from partitioning.ids import PartitionKey
from partitioning.table import ReplicaAt


class Life(NamedTuple):
    """One replica, from its introduction to its end. It equals the plain tuple, and a set finds one by the other."""

    stage: int
    partition: int
    worker: int
    incarnation: int

    @property
    def key(self) -> PartitionKey:
        return PartitionKey(self.stage, self.partition)

    def is_in(self, replicas: Iterable[ReplicaAt]) -> bool:
        """Tell whether these replicas of its partition include it."""
        return any((r.worker, r.incarnation) == (self.worker, self.incarnation) for r in replicas)


class UnappliedReport(NamedTuple):
    """A worker's report about its secondaries that have many steps to apply."""

    at: float
    lives: set[Life]


class LagChanges(NamedTuple):
    """Replicas that are newly beyond the bounds, and replicas that have caught up."""

    fallen: list[Life]
    caught_up: list[Life]


@dataclass
class ReplicaLag:
    """The lag of one replica."""

    #: The worker of the primary that reports it.
    said_by: int
    #: Steps behind the primary.
    steps: int
    #: Estimated time for these steps.
    seconds: float
    #: Steps that the replica has applied.
    applied: int
    #: Since this time ``applied`` has not changed, although nothing else kept the replica from its next step.
    since: float
    #: Time of the last report.
    heard: float
    #: It has exceeded one of the bounds, and has not caught up since.
    beyond: bool = False

    def __str__(self) -> str:
        return f"{self.steps:,} steps behind its primary" + (f", about {self.seconds:.1f} s" if self.seconds else "")


class Lags:
    """The known lags, by replica. It is false while none is known."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lags: dict[Life, ReplicaLag] = {}
        self._by_themselves: dict[int, UnappliedReport] = {}  # worker -> its last report

    def __bool__(self) -> bool:
        """Tell whether any lag is known."""
        return bool(self._lags)

    def beyond(self, life: Life) -> ReplicaLag | None:
        """Return the lag of a replica, if it is beyond the bounds."""
        lag = self._lags.get(life)
        return lag if lag is not None and lag.beyond else None

    def all_beyond(self) -> dict[Life, ReplicaLag]:
        return {life: lag for life, lag in self._lags.items() if lag.beyond}

    # ---- reports

    def note(self, said_by: int, reported: Iterable[Reported], leads: Callable[[Life], bool], now: float) -> LagChanges:
        """Take all lags that a worker reports, and return the changes.

        Only lags in partitions that the worker ``leads`` count, because others are out of date."""
        found = {Life(*lag[:4]): lag[4:] for lag in reported}
        were_beyond = [life for life, lag in self._lags.items() if leads(life) and lag.beyond]
        self._lags = {life: lag for life, lag in self._lags.items() if life in found or not leads(life)}
        fallen = [life for life, lag in found.items() if leads(life) and self.note_one(said_by, life, *lag, now)]
        return LagChanges(fallen, [life for life in were_beyond if self.beyond(life) is None])

    def note_one(
        self, said_by: int, life: Life, steps: int, seconds: float, applied: int, told: bool, now: float
    ) -> bool:
        """Take the lag of one replica, and tell whether it is newly beyond the bounds. ``told``: nothing but the replica
        itself keeps it from its next step."""
        known = self._lags.get(life)
        stands = known is not None and known.said_by == said_by and known.applied == applied and told
        lag = ReplicaLag(said_by, steps, seconds, applied, known.since if known is not None and stands else now, now)
        before = known is not None and known.beyond
        share = lag_share(steps, seconds, self._settings)
        lag.beyond = share > 1 or (before and share > TOLD_SHARE)
        self._lags[life] = lag
        return lag.beyond and not before

    def note_unapplied(self, worker: int, unapplied: Iterable[Sequence[int]], now: float) -> None:
        """Take a worker's report about its own secondaries with many steps to apply."""
        lives = {Life(stage, partition, worker, incarnation) for stage, partition, incarnation in unapplied}
        self._by_themselves[worker] = UnappliedReport(now, lives)

    def has_applied(self, life: Life, since: float) -> bool:
        """Tell whether the replica's own worker has reported after ``since`` that it has few steps left. This counts when its
        primary is silent."""
        said = self._by_themselves.get(life.worker)
        return said is not None and said.at > since and life not in said.lives

    def forget(self, worker: int) -> None:
        """Forget the report of a worker that is out of the table."""
        self._by_themselves.pop(worker, None)

    def keep(self, wanted: Callable[[Life, ReplicaLag], bool]) -> None:
        """Forget all other lags."""
        self._lags = {life: lag for life, lag in self._lags.items() if wanted(life, lag)}

    # ---- standing still

    def controller_stood_still(self, seconds: float, now: float) -> None:
        """Leave this time out of all standing still: reports that came meanwhile have not been read."""
        for lag in self._lags.values():
            lag.since = min(now, lag.since + seconds)

    def standing_still(self) -> dict[Life, ReplicaLag]:
        """Return the replicas that have applied nothing for longer than any step may take."""
        limit = self._settings.step_timeout
        return {life: lag for life, lag in self._lags.items() if lag.heard - lag.since > limit}


class ReplicaStanding(NamedTuple):
    """The replicas of a partition that count at one time."""

    arrived: list[ReplicaAt]
    #: Arrived ones that could take over at once.
    keeping_up: list[ReplicaAt]


class ReplicaSafety:
    """The safety of every replica in the table."""

    def __init__(self, settings: Settings) -> None:
        #: Replicas that have not arrived. Other live replicas have.
        self.unsafe: set[Life] = set()
        self.lags = Lags(settings)

    def has_arrived(self, stage: int, partition: int, replica: ReplicaAt) -> bool:
        """Tell whether a replica is live, and its primary has reported that it has everything committed."""
        return replica.live and (stage, partition, replica.worker, replica.incarnation) not in self.unsafe

    def outlives_primary(self, stage: int, partition: int, replica: ReplicaAt) -> bool:
        return outlives_primary(replica) and self.has_arrived(stage, partition, replica)

    def is_safe(self, stage: int, partition: int, replica: ReplicaAt) -> bool:
        return kind_of(replica).safe and self.has_arrived(stage, partition, replica)

    def is_behind(self, stage: int, partition: int, replica: ReplicaAt) -> bool:
        # Called for every replica, and mostly no lag is known.
        return (
            bool(self.lags)
            and self.lags.beyond(Life(stage, partition, replica.worker, replica.incarnation)) is not None
        )

    def keeps_up(self, stage: int, partition: int, replica: ReplicaAt) -> bool:
        """Tell whether a replica is safe and could take over at once. Only then may another be given up in its favour."""
        return (
            kind_of(replica).at_once
            and self.is_safe(stage, partition, replica)
            and not self.is_behind(stage, partition, replica)
        )

    def standing(self, key: PartitionKey, replicas: Iterable[ReplicaAt]) -> ReplicaStanding:
        """Judge these replicas of a partition."""
        arrived = [replica for replica in replicas if self.has_arrived(*key, replica)]
        return ReplicaStanding(arrived, [replica for replica in arrived if self.keeps_up(*key, replica)])

    def doubtful(self) -> set[Life]:
        """Return the replicas that have not arrived, or do not keep up."""
        return self.unsafe | self.lags.all_beyond().keys()

    def is_heir_of_silent(self, since: float) -> Judge:
        """Return the test for the heirs of a primary that is given up because it has been silent ``since`` then.

        A standby that has arrived passes, because checkpoints bound its work of repeating (design: standby-heir). An active
        replica passes if it keeps up, or has applied by now all steps that the primary had ordered."""

        def is_heir(stage: int, partition: int, replica: ReplicaAt) -> bool:
            if not self.is_safe(stage, partition, replica):
                return False
            if not kind_of(replica).at_once or not self.is_behind(stage, partition, replica):
                return True
            return self.lags.has_applied(Life(stage, partition, replica.worker, replica.incarnation), since)

        return is_heir

    def forget(self, stages: Collection[int]) -> None:
        """Forget the replicas of stages that are gone."""
        self.unsafe = {life for life in self.unsafe if life.stage not in stages}
        self.lags.keep(lambda life, _: life.stage not in stages)

    def lost(self, worker: int, is_listed: Callable[[Life], bool]) -> None:
        """Follow the loss of a worker. ``is_listed`` tells whether the table after it has a replica."""
        self.unsafe = {life for life in self.unsafe if is_listed(life)}
        # A new primary makes its own reports.
        self.lags.keep(lambda life, lag: lag.said_by != worker and is_listed(life))
        self.lags.forget(worker)
