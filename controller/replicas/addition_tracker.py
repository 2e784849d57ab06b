"""Knowledge of the controller about replicas beyond the table: additions under way, and the history of all replicas.

The additions of moves are kept here, too; ``moves`` knows the moves that they belong to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, NamedTuple

from controller.replicas.addition_limits import (
    ASK_EVERY_MAX_S,
    ASK_EVERY_S,
    COPIES_MAX,
    MOST,
    AdditionAttempts,
    AdditionBatches,
)
from controller.replicas.additions import (
    LIMIT_S,
    Addition,
    AdditionEvent,
    Census,
    Moment,
    Phase,
    WantedAddition,
    next_additions,
)
from controller.replicas.kinds import may_lead
from controller.replicas.membership import Member
from controller.replicas.protection_wishes import ProtectionWishes
from controller.replicas.replica_safety import Life, ReplicaSafety
from controller.report.events import Event, EventLog
from flux.dataflow.plan import Plan
from flux.wire.control import ReplicaCaughtUp, ReplicaDiverged, Unreached
from flux.wire.statistics import Lag as Reported
from partitioning.ids import PartitionKey
from partitioning.table import ReplicaAt, Table

__all__ = ["ASK_EVERY_S", "DIVERGENCES_MAX", "AdditionTracker", "Event"]

#: Divergences of one partition after which a replica is built anew. The next one ends the query, because an operator that is
#: not deterministic would diverge for ever.
DIVERGENCES_MAX = 3
#: After this time of agreement between enough replicas, the count begins again at nothing. Divergences as rare as that are
#: faults of a machine rather than of the operator, and must not end a query that runs for months.
DIVERGENCE_CALM_S = 600.0


class Overdue(NamedTuple):
    """An addition whose time is over, and the reason for giving it up."""

    addition: Addition
    why: str


class Divergences(NamedTuple):
    """Divergences of a partition: their number, and the time at which enough of its replicas existed again."""

    times: int
    agreed_since: float


class AdditionTracker:
    """The additions under way. ``safety`` is that of all replicas; ``done`` and ``take_overs`` are counts since the start."""

    def __init__(self, plan: Plan, events: EventLog, wishes: ProtectionWishes | None = None) -> None:
        self.wishes = wishes or ProtectionWishes(plan)
        self.under_way: dict[PartitionKey, Addition] = {}
        self.events = events
        #: Failed additions of each partition.
        self.attempts = AdditionAttempts()
        #: Repairs that have come to their end.
        self.done = 0
        self.take_overs = 0
        self._divergences: dict[PartitionKey, Divergences] = {}
        self.safety = ReplicaSafety(plan.settings)
        #: Replicas on each worker, and the partitions with too few.
        self._census = Census(self.wishes)
        #: The numbers of additions that may begin with one table.
        self.batches = AdditionBatches(plan.settings)
        #: Epochs of tables that dropped a replica while its partition was copied. The copy may go on until all processes go by
        #: them.
        self._lapsing: list[int] = []

    @property
    def plan(self) -> Plan:
        """The newest plan, with the numbers and kinds of replicas that are wished now."""
        return self.wishes.plan

    def low(self, table: Table) -> dict[int, list[int]]:
        """Return, by id of each stage, its partitions with fewer replicas than it wants."""
        self._census.look(table)
        return self._census.low_of_stages()

    # ---- additions

    def due(self, moment: Moment) -> list[WantedAddition]:
        """Return the repairs to begin with the next table: a batch, if no addition waits for a copy any more."""
        if not self.may_begin:
            return []
        wanted = self._next(moment, self.under_way.values(), len(self.under_way) + MOST)
        if wanted:
            wanted = wanted[: self.batches.size(wanted[0].stage, moment.log_room)]
        avoided = self.attempts.out_of_reach(moment.now)
        return [self._elsewhere(each, moment, avoided.get(each.key, frozenset())) for each in wanted]

    def waits(self, moment: Moment) -> bool:
        """Tell whether a repair is due that waits only for additions of another stage.

        Then no move may begin: one move after the other could keep the repair waiting without end."""
        return bool(self.under_way) and bool(self._next(moment, (), 1))

    def _next(self, moment: Moment, under_way: Iterable[Addition], most: int) -> list[WantedAddition]:
        avoided = self.attempts.out_of_reach(moment.now)
        resting = {
            key for key, workers in avoided.items() if not _places(key, moment, without=workers)
        } | moment.resting
        return next_additions(self.plan, moment.table, under_way, most, moment.placement, self._census, resting)

    @property
    def may_begin(self) -> bool:
        """The next batch may begin: no addition waits for a copy, and another copy may be taken."""
        copying = 0
        for addition in self.under_way.values():
            if addition.phase in (Phase.RETAIN, Phase.READY):
                return False
            copying += addition.phase == Phase.COPY
        return copying < self.plan.settings.repairs_at_once

    def _elsewhere(self, wanted: WantedAddition, moment: Moment, avoided: AbstractSet[int]) -> WantedAddition:
        """Put an addition on the worker with the fewest failures for this partition, if the chosen worker has had any, or is
        among the ``avoided`` ones. There are others then."""
        key = wanted.key
        if wanted.worker not in avoided and not self.attempts.with_worker(key, wanted.worker):
            return wanted
        fit = _places(
            key,
            moment,
            without=avoided,
            first=lambda worker: self.attempts.with_worker(key, worker),
            then=lambda worker: (worker != wanted.worker, worker),
        )
        return replace(wanted, worker=fit[0])

    def begin(self, wanted: WantedAddition, epoch: int, now: float) -> Addition:
        """Begin an addition, whose replica the caller lists in the table of ``epoch``."""
        attempts = self.attempts
        patience_s = attempts.patience_s(wanted.key) if attempts.failures else ASK_EVERY_S
        addition = Addition.of(wanted, epoch, patience_s, now)
        self.under_way[addition.key] = addition
        self.safety.unsafe.add(addition.life)
        return addition

    def confirmed(self, by_all: Callable[[int], bool]) -> list[Addition]:
        """Return the additions whose table all processes go by. ``by_all`` tells this for the table of an epoch."""
        retained = [a for a in self.under_way.values() if a.phase == Phase.RETAIN]
        confirmed = {epoch for epoch in {a.incarnation for a in retained} if by_all(epoch)}
        return [a for a in retained if a.incarnation in confirmed]

    def _turns(self, by_all: Callable[[int], bool]) -> list[Addition]:
        """Return the additions whose copies may begin now, the oldest first: few partitions stand still at the same time.

        A copy that is not wanted any more counts until its primary knows."""
        ready = [a for a in self.under_way.values() if a.phase == Phase.READY]
        if not ready:
            return []
        self._lapsing = [epoch for epoch in self._lapsing if not by_all(epoch)]
        copying = sum(a.phase == Phase.COPY for a in self.under_way.values()) + len(self._lapsing)
        return ready[: max(self.plan.settings.repairs_at_once - copying, 0)]

    def copies_due(self, by_all: Callable[[int], bool], now: float) -> list[Addition]:
        """Let the next additions take their turns, and return those whose copies are to be ordered now."""
        for addition in self._turns(by_all):
            addition.on(AdditionEvent.TURN, now)
        return self.to_ask(now)

    def waiting_too_long(self, now: float) -> list[Addition]:
        """Return the additions that have waited too long for their turn while producers keep rows for them."""
        return [a for a in self.under_way.values() if a.phase == Phase.READY and now - a.since > LIMIT_S[Phase.READY]]

    def to_ask(self, now: float) -> list[Addition]:
        due = [a for a in self.under_way.values() if a.phase == Phase.COPY and now >= a.ask_at]
        for addition in due:
            addition.ask_at = now + addition.patience_s
            addition.patience_s = min(2 * addition.patience_s, ASK_EVERY_MAX_S)
            addition.asked += 1
        return due

    def asked(self) -> list[Addition]:
        """Return the additions whose copy was ordered and, as far as is known, has not arrived."""
        return [a for a in self.under_way.values() if a.phase == Phase.COPY and a.asked]

    def overdue(self, now: float, behind: Callable[[int], str]) -> list[Overdue]:
        """Return the additions whose time is over, with the reason. ``behind(epoch)`` names the processes that do not go by
        that table yet."""
        late = []
        for addition in self.under_way.values():
            waited = now - addition.since
            if addition.phase == Phase.READY:
                continue  # see waiting_too_long
            copied = addition.phase == Phase.COPY and addition.asked >= COPIES_MAX and now >= addition.ask_at
            if copied or waited > LIMIT_S[addition.phase]:
                late.append(Overdue(addition, f"{_unheard(addition, behind)} {waited:.0f} s"))
        return late

    def give_up(self, addition: Addition, why: str, epoch: int, now: float, failed: bool = True) -> None:
        """End an attempt, whose replica the caller drops with the table of ``epoch``. ``failed``: it counts as a
        failure, and is reported."""
        self._drop(addition, epoch, now)
        self.safety.unsafe.discard(addition.life)
        if not failed:
            return
        rest = self.attempts.failed(addition.key, addition.worker, now)
        self.note(
            "failed attempt", now, *addition.key, addition.worker, why, seconds=now - addition.started,
            stall_ms=addition.stall_ms, source=-1 if addition.from_worker is None else addition.from_worker,
        )  # fmt: skip
        if rest:
            text = f"no replica could be added, attempt after attempt; it is tried again in {rest:.0f} s"
            self.note("warning", now, *addition.key, -1, text)

    def _drop(self, addition: Addition, epoch: int, now: float) -> None:
        """End an addition whose replica is not in the table of this epoch."""
        if addition.phase == Phase.COPY:
            self._lapsing.append(epoch)
        addition.on(AdditionEvent.DROPPED, now)
        del self.under_way[addition.key]

    def caught_up(self, message: ReplicaCaughtUp, now: float = 0.0) -> bool:
        """Take a report, and tell whether it is news, so that the replica is to be made live."""
        addition = self._meant(message)
        if addition is None or addition.phase not in (Phase.READY, Phase.COPY):
            return False
        if addition.phase == Phase.COPY:
            self.batches.note_copy(addition.stage, now - addition.since)
        addition.on(AdditionEvent.FOLLOWS, now)
        addition.stall_ms, addition.bytes = message.stall_ms, message.bytes
        return True

    def arrived(self, message: ReplicaCaughtUp, now: float) -> Addition | None:
        """Take a report, and return the addition whose replica has everything committed with it; None: it is no news."""
        addition = self._meant(message)
        if addition is None or addition.phase != Phase.LIVE or addition.arrived:
            return None
        addition.arrived_at = now
        life = addition.life
        if self.safety.lags.note_one(message.node, life, message.steps_behind, message.replay_s, -1, False, now):
            self._note_fallen(life, now)
        return addition

    def complete(self, addition: Addition, now: float) -> None:
        """Note that the replica of this addition is safe from now on."""
        addition.on(AdditionEvent.COMPLETE, now)
        del self.under_way[addition.key]
        self.safety.unsafe.discard(addition.life)
        self.attempts.succeeded(addition.key)
        if addition.key in self._divergences:
            self._divergences[addition.key] = self._divergences[addition.key]._replace(agreed_since=now)

    def note_repair(self, addition: Addition, now: float) -> None:
        self.done += 1
        self.note(
            "repair", now, *addition.key, addition.worker, addition.why, seconds=now - addition.started,
            stall_ms=addition.stall_ms, nbytes=addition.bytes, request=addition.request,
        )  # fmt: skip

    def _meant(self, message: ReplicaCaughtUp) -> Addition | None:
        addition = self.under_way.get(PartitionKey(message.stage, message.partition))
        meant = addition is not None and addition.life == _life(message)
        return addition if meant else None

    def forget(self, stages: Collection[int], epoch: int, now: float) -> None:
        """Forget the replicas of stages that the table of this epoch does not have any more."""
        for addition in [each for each in self.under_way.values() if each.stage in stages]:
            self._drop(addition, epoch, now)
        self._divergences = {key: known for key, known in self._divergences.items() if key.stage not in stages}
        self.attempts.forget(stages)
        self.batches.forget(stages)
        self.safety.forget(stages)

    # ---- losses

    def note_loss(self, member: Member, why: str, before: Table, after: Table, now: float, request: int = 0) -> None:
        """Follow the loss of a worker, which is not in the table ``after``: note the take-overs, and end the additions that
        needed it."""
        self.events.note(Event("loss", now, "", -1, member.node, why, request=request))
        for addition in list(self.under_way.values()):
            if not addition.life.is_in(after.replicas(*addition.key)):
                self._drop(addition, after.epoch, now)
        for stage, partitions in enumerate(after.stages):
            for partition, replicas in enumerate(partitions):
                old = before.stages[stage][partition]
                if replicas and replicas[0].empty and replicas[0].incarnation == after.epoch:
                    text = f"{why}; no other replica had its state (on_loss='converge')"
                    self.note("begins empty", now, stage, partition, replicas[0].worker, text, source=member.node)
                elif old and replicas and old[0].worker == member.node:
                    self.take_overs += 1
                    lag = self.safety.lags.beyond(Life(stage, partition, replicas[0].worker, replicas[0].incarnation))
                    text = why if lag is None else f"{why}; the heir was {lag}, and makes up for them first"
                    self.note("take-over", now, stage, partition, replicas[0].worker, text, source=member.node)

        def is_listed(life: Life) -> bool:
            return life.is_in(after.replicas(*life.key))

        self.safety.lost(member.node, is_listed)

    def heir_of_unreached(self, message: Unreached, table: Table) -> ReplicaAt | None:
        """Return the replica that is to lead in place of a primary that is out of reach; None: all stays as it is.

        It could lead at once, and has all that is committed. No addition of the partition is under way: its replica is not
        safe, and would have to go with the primary whose state it gets."""
        key = PartitionKey(message.stage, message.partition)
        if not (replicas := table.row(*key)) or message.edge not in self.plan.edges:
            return None  # the stage is gone, or that which fed it or read it
        leader, *others = replicas
        meant = leader.worker == message.primary and leader.incarnation == message.leader
        life = Life(*key, message.worker, message.incarnation)
        heir = next((replica for replica in others if life.is_in([replica])), None)
        if heir is None or not meant or key in self.under_way or not may_lead(heir):
            return None
        return heir if self.safety.keeps_up(*key, heir) else None

    def note_unreached(self, message: Unreached, now: float) -> None:
        """Note that another replica leads in place of a primary that is out of reach. The worker of that one gets no replica of
        the partition for a while."""
        key, plan = PartitionKey(message.stage, message.partition), self.plan
        self.attempts.unreached(key, message.primary, now)
        self.take_overs += 1
        stream = plan.describe_stream(message.edge, message.producer)
        what = f"acks of {stream}" if message.acks else f"rows of {stream}"
        text = (
            f"{what} have not come to worker {message.primary} for {plan.settings.link_unreached:g} s "
            f"(spark.flux.link.unreached), and worker {message.worker} has them"
        )
        self.note("take-over", now, *key, message.worker, text, source=message.primary)

    def note_divergence(self, message: ReplicaDiverged, table: Table, now: float) -> bool:
        """Take a report, and tell whether the secondary is to be dropped."""
        life = _life(message)
        key = life.key
        if not life.is_in(table.row(*key)[1:]):
            return False
        before = self._divergences.get(key, Divergences(0, now))
        calm = now - before.agreed_since > DIVERGENCE_CALM_S
        self._divergences[key] = Divergences(1 if calm else before.times + 1, now)
        addition = self.under_way.get(key)
        if addition is not None and addition.worker == message.worker:
            self._drop(addition, table.epoch + 1, now)
        self.safety.unsafe.discard(life)
        self.note("divergence", now, *key, message.worker, f"other output for the steps before {message.step}")
        return True

    def note_behind(self, primary: int, reported: Iterable[Reported], table: Table, now: float) -> None:
        """Take a worker's newest report on the replicas of its primaries.

        A replica that is far behind stays, as it has the order, but it does not count as an heir: a take-over would have to wait
        for it."""

        def leads(life: Life) -> bool:
            return any(replica.worker == primary for replica in table.row(*life.key)[:1])

        changes = self.safety.lags.note(primary, reported, leads, now)
        for life in changes.caught_up:
            if life.is_in(table.row(*life.key)):
                self.note("caught up", now, *life.key, life.worker, "it had been far behind its primary")
        for life in changes.fallen:
            self._note_fallen(life, now)

    def _note_fallen(self, life: Life, now: float) -> None:
        self.note(
            "behind", now, *life.key, life.worker, f"{self.safety.lags.beyond(life)}: a take-over would wait for these"
        )

    def drop_standing(self, table: Table, now: float) -> Life | None:
        """Return a replica that is to be dropped because it stands still, and may hold back its primary; None: there is
        none."""
        for life, lag in self.safety.lags.standing_still().items():
            key, worker = life.key, life.worker
            meant = [replica for replica in table.replicas(*key)[1:] if life.is_in([replica])]
            self.safety.lags.keep(lambda other, _, life=life: other != life)  # type: ignore[misc]
            if meant and self.safety.is_safe(*key, meant[0]):
                text = f"it has applied nothing for {lag.heard - lag.since:.0f} s, {lag}, and is built anew"
                self.note("drop", now, *key, worker, text)
                rest = self.attempts.stood_still(key, worker, now)
                if rest:
                    text = f"its replicas stand still, one after the other; the next is made in {rest:.0f} s"
                    self.note("warning", now, *key, -1, text)
                return life
        return None

    def too_divergent(self) -> PartitionKey | None:
        return next((key for key, known in self._divergences.items() if known.times > DIVERGENCES_MAX), None)

    def validate(self, table: Table) -> None:
        """Check that there are few copies, that all additions are of one stage, that each adds a replica in the table, and
        that only these replicas have not arrived."""
        copies = sum(addition.phase == Phase.COPY for addition in self.under_way.values())
        assert copies <= self.plan.settings.repairs_at_once, "at most so many copies at once"
        assert len({stage for stage, _ in self.under_way}) <= 1, "stage by stage"
        assert all(key == addition.key for key, addition in self.under_way.items())
        assert all(addition.phase in LIMIT_S for addition in self.under_way.values()), "one that is over"
        for stage, partitions in enumerate(table.stages):
            for partition, replicas in enumerate(partitions):
                addition = self.under_way.get(PartitionKey(stage, partition))
                unsafe = [
                    Life(stage, partition, r.worker, r.incarnation)
                    for r in replicas
                    if not self.safety.has_arrived(stage, partition, r)
                ]
                added = [] if addition is None else [addition.life]
                assert unsafe == added, f"{stage}/{partition}: what is not safe is what is being added"
                assert not replicas or self.safety.is_safe(stage, partition, replicas[0]), (
                    f"{stage}/{partition}: a primary is safe"
                )

    # ---- reports

    def note(
        self, kind: str, now: float, stage: int, partition: int, worker: int, why: str,
        seconds: float = 0.0, stall_ms: float = 0.0, source: int = -1, nbytes: int = 0, request: int = 0,
    ) -> Event:  # fmt: skip
        name = self.plan.stages[stage].name
        return self.events.note(
            Event(
                kind, now, name, partition, worker, why, round(seconds, 6), round(stall_ms, 3), source, nbytes, request
            )
        )

    @property
    def history(self) -> deque[Event]:
        return self.events.kept

    def news(self) -> list[Event]:
        """Return the events since the last call."""
        return self.events.news()

    def report(self, table: Table | None) -> dict[str, Any]:
        """Make the part of ``lastProgress`` about replicas."""
        if table is None:
            return {}
        stalls = [event.stall_ms for event in self.history if event.kind == "repair"]
        return {
            "underReplicated": [
                f"{self.plan.stages[stage].name}/{partition}"
                for stage, partitions in self.low(table).items()
                for partition in partitions
            ],
            "behind": [
                {
                    "stage": self.plan.stages[life.stage].name,
                    "partition": life.partition,
                    "worker": life.worker,
                    "steps": lag.steps,
                    "seconds": lag.seconds,
                }
                for life, lag in self.safety.lags.all_beyond().items()
            ],
            "takeOvers": self.take_overs,
            "repairsDone": self.done,
            "repairsUnderWay": [
                {
                    "stage": self.plan.stages[a.stage].name,
                    "partition": a.partition,
                    "worker": a.worker,
                    "phase": str(a.phase),
                }
                for a in self.under_way.values()
                if a.from_worker is None
            ],
            "stallMsMax": max(stalls, default=0.0),
            "recent": self.events.recent(),
        }


def _places(
    key: PartitionKey, moment: Moment, then: Callable[[int], Any] = lambda worker: worker, **more: Any
) -> list[int]:
    """List the workers that may hold one more replica of a partition, in order of preference (``Placement.candidates``)."""
    return moment.placement.candidates(key, [r.worker for r in moment.table.replicas(*key)], then, **more)


def _life(message: ReplicaCaughtUp | ReplicaDiverged) -> Life:
    return Life(message.stage, message.partition, message.worker, message.incarnation)


def _unheard(addition: Addition, behind: Callable[[int], str]) -> str:
    """Describe the event that an addition has waited for in vain, as the beginning of a sentence that ends with the time."""
    if addition.phase == Phase.RETAIN:
        return f"{behind(addition.incarnation)} did not confirm its table within"
    if addition.phase == Phase.COPY:
        return f"it does not follow after {addition.asked} copies of state in"
    return (
        "the replicas that would be left are far behind" if addition.arrived else "it is live, and still not safe"
    ) + " after"
