"""The controller's decisions as a state machine without I/O (design: controller, pure-core).

starting -> running -> finished -> ended: the controller waits for the workers, publishes the first table, learns how
many streams a DataFrame has, hears that the last stages are complete, and tells all processes to stop. It takes a lost
worker out of the table in one epoch, and the sweep adds replicas until there are enough again. This sweep also moves
replicas: for balance, at a person's request, or to empty a worker that leaves. A loss that cannot be survived ends the
query with one error, which says what would have prevented it. Rows never pass through the controller.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from controller.alignment import Alignment, StateStop
from controller.balance.load import Loads, LoadTable, Move, Suggestion
from controller.balance.rounds import Rounds
from controller.course.query_phases import QueryEvent, QueryPhase
from controller.decide.balancer import Balancer
from controller.decide.board import Board, Tell
from controller.decide.departures import Departures
from controller.decide.driver_events import DriverEvents
from controller.decide.losses import Losses, without_copies
from controller.decide.plan_changes import PlanChanges
from controller.decide.protection import Protection
from controller.decide.registration import Registration
from controller.decide.request_book import Asked
from controller.decide.slots import Drain, Slots
from controller.decide.sweep import Sweep
from controller.decide.user_requests import UserRequests
from controller.replicas.addition_tracker import AdditionTracker
from controller.replicas.membership import Member, Membership
from controller.replicas.moves import MoveQueue
from controller.replicas.spread import APART, Shared, closest
from controller.report.progress import InputRows, Level, levels
from controller.text import count, named
from flux.dataflow.plan import Plan
from flux.errors import FluxError, QueryFailed, QueryTimeout, rebuilt
from flux.wire.control import (
    Checkpointed,
    EdgeBorn,
    Failure,
    GetPlan,
    Goodbye,
    GoodbyeSeen,
    Heartbeat,
    HeartbeatSeen,
    InStep,
    PartitionFinished,
    PlanSeen,
    Register,
    RegisterAgain,
    ReplicaCaughtUp,
    ReplicaDiverged,
    Stop,
    TableMissed,
    TableSeen,
    ToController,
    Unreached,
)
from flux.wire.pulse import Pulse
from partitioning.ids import PartitionKey
from partitioning.table import Table

__all__ = ["Controller", "Tell"]


class Controller:
    """The controller: it puts the parts together and passes each event to the part concerned. Every event returns the commands
    that it leads to.

    ``board``: the table, the processes that take part, and the commands; ``repairs``, ``moving``, ``places``: state of
    replicas, of moves and of slots; ``sweeper``: repairs and moves, step by step; ``protecting``: stages whose replicas become
    others; ``losses``: workers that are given up, and take-overs; ``departures``: workers that leave; ``registration``: processes
    that register; ``balancer``: loads for policies, and their suggestions; ``driver``: events of Spark's driver, which
    reports them to this part itself; ``people``: requests; ``plans``: changes of the plan. No part knows this class."""

    def __init__(self, plan: Plan, slots: int, now: float) -> None:
        self.refused = 0
        self.inputs = InputRows()
        self.alignment, self.state_stop = Alignment(plan.settings.watermark_drift > 0), StateStop()
        self.board = board = Board(plan)
        self.places = places = Slots(slots)
        self.repairs = repairs = AdditionTracker(plan, board.events, board.wishes)
        self.moving = moving = MoveQueue(repairs)
        self.balancer = balancer = Balancer(board, repairs, moving)
        self.departures = departures = Departures(board, places, repairs, moving, balancer)
        self.protecting = protecting = Protection(board, repairs, moving)
        self.sweeper = sweeper = Sweep(board, repairs, moving, departures, protecting)
        self.losses = losses = Losses(board, repairs, moving, balancer, departures, sweeper)
        self.driver = driver = DriverEvents(board, places, departures)
        self.plans = plans = PlanChanges(
            board, plan.began_with or slots, self._forget_stages, self._follow, sweeper.sweep, lambda: places.wanted
        )
        self.people = UserRequests(
            board,
            places,
            repairs,
            moving,
            departures,
            losses,
            sweeper,
            protecting,
            driver,
            plans,
            lambda: balancer.rounds,
        )
        self.registration = Registration(board, places, departures, losses, sweeper, balancer, self._start)
        #: Partitions whose end has been reported, and those of the last stages whose end has not.
        self._finished: set[PartitionKey] = set()
        self.unfinished = _last_partitions(plan)
        self._complete_since = 0.0
        self._deadline = now + plan.settings.workers_timeout

    # ---- state for readers

    @property
    def plan(self) -> Plan:
        """The newest version of the plan that a table goes by."""
        return self.board.plan

    @property
    def phase(self) -> QueryPhase:
        return self.board.phase

    @property
    def error(self) -> FluxError | None:
        return self.board.error

    @property
    def table(self) -> Table | None:
        return self.board.table

    @property
    def members(self) -> Membership:
        return self.board.members

    @property
    def wished(self) -> Plan:
        """The plan with the numbers and kinds of replicas that people ask for by now."""
        return self.board.wishes.plan

    @property
    def drains(self) -> dict[int, Drain]:
        return self.departures.drains

    @property
    def rounds(self) -> Rounds:
        return self.balancer.rounds

    @property
    def slots(self) -> int:
        """Slots that have ever been opened: their numbers are below this."""
        return self.places.count

    def report(self) -> dict[str, Any]:
        """Make the part of ``lastProgress`` about replicas, moves and workers that leave."""
        if self.table is None:
            return {}
        return {
            **self.repairs.report(self.table),
            **self.moving.report(),
            "copiesOn": self._copies_on(),
            "leaving": sorted(self.drains),
            "balance": self.balancer.report(),
            "plan": self.plans.report(),
        }

    def _copies_on(self) -> str:
        """Describe the least distance between the replicas of a partition, such as "different hosts". Empty: no partition has
        two."""
        columns = self.board.columns()
        most = None if columns is None else closest(self.wished, columns, self.members.places)
        labelled = any(member.about.domain for member in self.members.workers.values())
        return "" if most is None else APART[most if labelled else max(most, Shared.DOMAIN)]

    def validate(self) -> None:
        """Check the invariants of all parts that apply in this phase. Holds after every event."""
        self.board.validate()
        if self.table is None or self.phase == QueryPhase.ENDED:
            return
        self.departures.validate()
        self.people.book.validate()
        self.moving.validate()
        self.plans.validate()
        if self.phase == QueryPhase.RUNNING:
            self.repairs.validate(self.table)
            self.sweeper.validate()
            self.protecting.validate()

    # ---- reports of processes

    def on_report(self, connection: Hashable, message: ToController, now: float) -> list[Tell]:
        if isinstance(message, Register):
            self.registration.register(connection, message, now)
            self.plans.greeted(connection)
        elif (member := self.members.by_connection(connection)) is not None:
            self._on_member(member, message, now)
        elif not (isinstance(message, Goodbye) and self.departures.says_goodbye(message.node, connection)):
            self.refused += 1  # the message is on an unknown connection, or its sender was given up
            ended = self.phase == QueryPhase.ENDED
            self.board.answer(connection, Stop(reason="the query has ended") if ended else RegisterAgain())
        return self.board.take()

    def _on_member(self, member: Member, message: ToController, now: float) -> None:
        """Pass a message of a known member to the part concerned. The goodbye of a worker or of the vault comes after the
        end of the query; that of a task that feeds the query or fetches output is the normal end of the task, and is answered."""
        match message:
            case Heartbeat():
                member.take(message, now, self.plan.stages)
                self._count(member, member.stats, now)
                self.board.tell(member, self._seen(member.node))
            case InStep():
                self.losses.in_step(member, message, now)
            case TableSeen():
                member.epoch = max(member.epoch, message.epoch)
                self.sweeper.sweep(now)
                self.plans.look(now)
            case TableMissed():
                self.board.show_member(member)
            case ReplicaCaughtUp():
                self.sweeper.caught_up(message, now)
            case ReplicaDiverged():
                self.sweeper.diverged(message, now)
            case Unreached():
                self.sweeper.unreached(message, now)
            case PartitionFinished():
                self._on_finished(message, now)
            case Goodbye() if member.about.role == "worker":
                self.places.vacate(member.about.index)  # the query has ended
            case Checkpointed():
                self.departures.checkpointed(message)
            case Goodbye() if member.about.role == "vault":
                pass  # the query has ended
            case Goodbye():
                member.left = True
                self.board.tell(member, GoodbyeSeen())
                self.sweeper.sweep(now)
            case PlanSeen() | GetPlan() | EdgeBorn():
                self.plans.hears(member, message, now)
            case Failure():
                stages = [message.stage] if message.stage >= 0 else []
                self.board.fail(rebuilt(message.kind, message.message, message.traceback), stages)

    def _seen(self, node: int) -> HeartbeatSeen:
        epoch = self.table.epoch if self.table else -1
        return HeartbeatSeen(epoch=epoch, others_at=self.alignment.of_others(node), stands_at=self.state_stop.at)

    def _count(self, member: Member, stats: dict[str, Any], now: float) -> None:
        if member.about.role == "worker":
            self.balancer.take(member.node, stats)
            self.alignment.note(member.node, stats.get("times", ()))
            self.losses.note_times(member, now)
            if self.table is not None:
                self.repairs.note_behind(member.node, stats.get("behind", ()), self.table, now)
            if "unapplied" in stats:
                self.repairs.safety.lags.note_unapplied(member.node, stats["unapplied"], now)
            self.inputs.from_worker(member.node, stats.get("sources", ()))
            self.inputs.note_ends(stats.get("pauses", ()))
        elif member.about.role == "ingress" and "sources" in stats:
            self.inputs.from_worker(member.node, stats["sources"])
        elif member.about.role == "ingress":
            self.inputs.from_ingress(member.about.edges, member.about.index, stats.get("source_rows", 0))

    def on_closed(self, worker: int, now: float) -> list[Tell]:
        """Take the closed lifeline of a worker."""
        self.losses.closed(worker, now)
        return self.board.take()

    def on_reset(self, worker: int) -> list[Tell]:
        """Take the reset lifeline of a worker, by its host or by a device between."""
        self.losses.reset(worker)
        return self.board.take()

    def on_pulse(self, worker: int, pulse: Pulse, now: float) -> list[Tell]:
        """Take a pulse: the process of a worker lives, and reports its activity."""
        self.losses.pulse(worker, pulse, now)
        return self.board.take()

    # ---- the course of the query

    def _start(self, now: float) -> None:
        """Start the query: all workers are here."""
        workers = sorted(self.members.workers.values(), key=lambda member: member.about.index)
        try:
            endpoints = {member.node: member.about.endpoint for member in workers}
            plan = self.plan if self.losses.waiting is None else without_copies(self.plan)
            table = self.board.disks.first(self.board.placement().first_table(plan, endpoints))
        except QueryFailed as error:
            self.board.fail(error)
            return
        self.losses.others_came()
        self.board.on(QueryEvent.ALL_HERE)
        self.board.publish(table)

    def _forget_stages(self, stages: Sequence[int], epoch: int, now: float) -> None:
        """Forget stages that the table of this epoch has no more, while the plan still has them."""
        self.protecting.forget(stages, now)
        self.moving.forget(stages, now)
        self.repairs.forget(stages, epoch, now)
        self.losses.forget(stages)

    def _follow(self, plan: Plan) -> None:
        """Go by another version of the plan."""
        self.balancer.follow(plan)
        self._finished = {key for key in self._finished if key.stage in plan.stages}
        self.unfinished = _last_partitions(plan) - self._finished

    def _on_finished(self, message: PartitionFinished, now: float) -> None:
        key = PartitionKey(message.stage, message.partition)
        if message.stage not in self.plan.stages:
            return  # it was removed since
        self.losses.note_complete(key, message.node)
        self._finished.add(key)
        self.unfinished.discard(key)
        if not self.unfinished:
            self._complete_since = now
        self._finish(now)

    def _finish(self, now: float) -> None:
        """Finish the query when its last stages are complete, and nothing more is added. One that has been added to waits for the
        time of a progress report, unless it is sealed: its program may be about to add more (design: added-and-finished)."""
        plans = self.plans
        waits = plans.under_way or (
            self.plan.version > 0
            and not plans.sealed
            and now < max(plans.quiet_since, self._complete_since) + self.plan.settings.progress_interval
        )
        if not self.unfinished and self.phase == QueryPhase.RUNNING and not waits:
            self.board.on(QueryEvent.ALL_OUT)
            if any(stage.collects for stage in self.plan.stages):
                self.sweeper.wind_down("the query is through; output that is fetched stays where it is", now)
            else:
                self.board.end(None)

    def on_tick(self, now: float) -> list[Tell]:
        self.alignment.look()
        self.state_stop.look([member.stats for member in self.members.workers.values()])
        if self.losses.waiting is not None:
            self.losses.look_for_others(len(self.places.open), self._start, now)
        elif self.phase == QueryPhase.STARTING and now > self._deadline:
            self.board.fail(self._too_few())
        if self.phase in (QueryPhase.RUNNING, QueryPhase.FINISHED):
            self.losses.give_up_silent(now)  # also when finished, because kept output has replicas, too
            self.losses.give_up_vault(now)
        if self.phase == QueryPhase.RUNNING:
            self.sweeper.drop_standing(now)
            self.balancer.rebalance(now)
        self.losses.end_incomplete(now)
        self.plans.look(now)
        self._finish(now)
        self.sweeper.sweep(now)
        self.people.book.look()
        self.departures.end_with_checkpoints(now)
        return self.board.take()

    def _too_few(self) -> QueryTimeout:
        here = sorted(member.about.index for member in self.members.workers.values())
        missing = sorted(set(range(self.slots)) - set(here))
        if not missing:
            return QueryTimeout(
                "the process that writes to the checkpoint location has not come within "
                f"{self.plan.settings.workers_timeout:g} s (spark.flux.workers.timeout): is the directory very large or slow?"
            )
        return QueryTimeout(
            f"{len(here)} of {count(self.slots, 'worker')} joined within {self.plan.settings.workers_timeout:g} s "
            f"(spark.flux.workers.timeout); missing: {named('slot', missing)}. Are there "
            f"{count(self.slots, 'free task slot')}, and can executors reach the driver? The first start after an "
            "installation compiles for up to a minute on each executor: run python -m partitioning.warm_up there, or set "
            "spark.flux.workers.timeout longer"
        )

    # ---- policies and people

    def loads(self) -> Loads:
        """Make the loads for policies."""
        return self.balancer.loads()

    def load_table(self) -> LoadTable | None:
        """Make the loads as arrays, for reports; None before the first table."""
        return self.balancer.load_table()

    def levels(self) -> list[Level]:
        """Compute the level of replication of each stage."""
        table = self.board.table
        low = {} if table is None else self.repairs.low(table)
        return levels(self.wished, self.board.columns(), self.repairs.safety.doubtful(), low)

    def suggest(self, policy: str, now: float) -> Suggestion:
        """Return all moves that a policy would make now. UsageError: there is no policy of that name."""
        return self.balancer.suggest(policy, now)

    def moves_pending(self) -> list[Move]:
        """Return the moves in the queue, those under way first. Target -1: not chosen yet."""
        return [job.move for job in self.moving.jobs()]

    def next_request(self) -> int:
        """Return the number for the next request of a person."""
        return self.people.book.next_number()

    def request(self, number: int) -> Asked:
        """Return the request of this number, with its state. UsageError: there is none."""
        self.people.book.look()
        return self.people.book.of(number)

    def open_requests(self) -> list[Asked]:
        """Return the open requests, the oldest first."""
        self.people.book.look()
        return self.people.book.open()

    def move(self, moves: Sequence[Move], why: str, now: float, request: int = 0) -> list[Tell]:
        """Move replicas. UsageError, and nothing is moved: one of the moves is impossible."""
        self.people.move(moves, why, now, request)
        return self.board.take()

    def drain(self, worker: int, now: float, request: int = 0) -> list[Tell]:
        """Empty a worker and let it go. UsageError, and nothing changes, if the others could not hold all replicas."""
        return self.leave([worker], "asked for", now, request)

    def leave(self, workers: Sequence[int], why: str, now: float, request: int = 0) -> list[Tell]:
        """Empty several workers at once: no replica moves from one of them to another."""
        self.people.leave(workers, why, now, request)
        return self.board.take()

    def scale(self, workers: int, now: float, request: int = 0) -> list[Tell]:
        """Change the number of workers. UsageError, and nothing changes, if that is impossible."""
        self.people.scale(workers, now, request)
        return self.board.take()

    def protect(
        self, stage: int, replicas: int | None, recovery: str | None, now: float, request: int = 0
    ) -> list[Tell]:
        """Change number and kind of the replicas of a stage's partitions; None: no change. UsageError, and nothing changes:
        that is impossible."""
        self.people.protect(stage, replicas, recovery, now, request)
        return self.board.take()

    def fail(self, worker: int, now: float, request: int = 0) -> list[Tell]:
        """Declare a worker lost, as if its connection had closed: a rehearsal."""
        self.people.fail(worker, now, request)
        return self.board.take()


def _last_partitions(plan: Plan) -> set[PartitionKey]:
    """Return the partitions of the stages that feed no others."""
    return {PartitionKey(stage.id, p) for stage in plan.terminal for p in range(stage.partitions)}
