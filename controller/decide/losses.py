"""Losses: workers that are given up, replicas that take over, and the end of the query if no replica is left that could
(design: take-over, silence).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from controller.course.beginnings import EmptyBeginnings
from controller.course.query_phases import QueryPhase
from controller.decide.balancer import Balancer
from controller.decide.board import Board
from controller.decide.departures import Departures
from controller.decide.sweep import Sweep
from controller.replicas.addition_tracker import AdditionTracker
from controller.replicas.membership import Member, goes_on
from controller.replicas.moves import MoveQueue
from controller.replicas.table_changes import AfterLoss, Judge, without_worker
from controller.replicas.vault_replicas import revived
from controller.report.watermarks import shown
from controller.text import some
from flux.arguments import CONVERGE
from flux.dataflow.plan import ById, Plan
from flux.errors import QueryFailed
from flux.replica.kinds import replicated
from flux.wire.control import InStep
from flux.wire.pulse import LoopActivity, Pulse
from partitioning.ids import PartitionKey
from partitioning.table import ReplicaAt, Table

#: Seconds that a query which has lost all workers waits for further ones once the first has come: all partitions would go to the
#: first one otherwise.
OTHERS_S = 5.0
#: Partitions that an error names; further ones are only counted.
NAMED = 8
#: A part of the reason for giving up a worker that spends more than its time in one call.
TOO_LONG = "longer than spark.flux.step.timeout"


def without_copies(plan: Plan) -> Plan:
    """Return the plan with one replica for each partition. The sweep adds the others when the state has been restored."""
    return replace(plan, stages=ById(replace(stage, replicas=1) for stage in plan.stages))


@dataclass
class WaitForWorkers:
    """The wait of a query whose workers are all lost."""

    #: Time at which the last of them was lost.
    since: float
    #: The end of the query if no other worker comes.
    error: QueryFailed
    #: Time at which the first of the present workers came. None: none is present.
    first: float | None = None


class Losses:
    """The losses of a query: signs of life of its workers, the workers that are given up, and the tables after them (design:
    take-over, silence).

    A loss that leaves a partition without a replica ends the query. With a checkpoint location, a worker takes the
    partition up from there instead, and without any worker the query waits for others. A stage with ``on_loss="converge"``
    begins empty there (design: converge)."""

    #: Set while the query waits for workers in place of those that are lost.
    waiting: WaitForWorkers | None = None

    def __init__(
        self,
        board: Board,
        repairs: AdditionTracker,
        moving: MoveQueue,
        balancer: Balancer,
        departures: Departures,
        sweeper: Sweep,
    ) -> None:
        self._board = board
        self._repairs = repairs
        self._moving = moving
        self._balancer = balancer
        self._departures = departures
        self._sweeper = sweeper
        self._looked_at: float | None = None  # time of the last look for silence
        self._incomplete_since: dict[PartitionKey, float] = {}
        self._complete: set[tuple[PartitionKey, int]] = set()  # partitions, and workers that have all of their output
        #: Partitions that have begun empty.
        self.beginnings = EmptyBeginnings()

    @property
    def _plan(self) -> Plan:
        return self._board.plan

    # ---- signs of life

    def closed(self, worker: int, now: float) -> None:
        """Take the closed lifeline of a worker, which is gone for certain. After the end of the query it was told to go, and
        stays a member: the last progress report has its counts, and may be made later than it goes."""
        member, vault = self._board.members.workers.get(worker), self._board.members.vault
        if self._board.phase == QueryPhase.ENDED:
            self._departures.closed(worker)
        elif member is not None:
            self.lose(member, "its connection closed", now)
        elif vault is not None and vault.node == worker:
            self._board.fail(
                QueryFailed(
                    f"the process that writes to the checkpoint location {self._board.location} (pid {vault.about.pid}) has "
                    "ended. Start the query again with the same location: it goes on where it was"
                )
            )
        else:
            self._departures.closed(worker)

    def reset(self, worker: int) -> None:
        """Take the reset lifeline of a worker, by its host or by a device between: the worker is gone if it is silent, too."""
        member = self._board.members.workers.get(worker)
        if member is not None:
            member.cut = True

    def pulse(self, worker: int, pulse: Pulse, now: float) -> None:
        """Take a pulse: the process of a worker runs.

        A loop that has not turned since the last pulse is in a long step and cannot send heartbeats. A loop that turns sends
        heartbeats, so it gets no more time: perhaps it cannot reach the controller. A loop that opens operators of several
        partitions does not turn between them, and each of them has its own time."""
        member = self._board.members.workers.get(worker)
        if member is not None and self._exists(pulse.kind, pulse.what, pulse.partition):
            before, member.pulse, member.cut = member.pulse, pulse, False
            stands = pulse.busy and before is not None and before.turns == pulse.turns
            if stands:
                member.heard = now
            if not stands or pulse.opens_another_than(before):
                member.turned = now

    def in_step(self, member: Member, message: InStep, now: float) -> None:
        """Take a sign of life like a pulse, which comes without a lifeline, too. The loop has not turned."""
        if self._exists(LoopActivity.STEP, message.stage, message.partition):
            member.heard, member.in_step = now, message
            turns = -1 if member.pulse is None else member.pulse.turns
            member.pulse = Pulse(turns, LoopActivity.STEP, message.stage, message.partition, message.step)

    def _exists(self, kind: int, what: int, partition: int) -> bool:
        """Tell whether the plan has this stage or source and partition. A pulse may be forged, and a note may be read half
        written."""
        if kind in (LoopActivity.STEP, LoopActivity.OPEN):
            return what in self._plan.stages and 0 <= partition < self._plan.stages[what].partitions
        if kind == LoopActivity.READ:
            return what in self._plan.sources and 0 <= partition < self._plan.sources[what].worker_partitions
        return kind in (LoopActivity.WAITS, LoopActivity.TURNS)

    # ---- losses

    def give_up(self, member: Member, why: str, now: float, request: int = 0) -> None:
        """Take a worker out of the table that may still live. If it does, its task ends normally, and another slot is
        opened in its place: Spark tolerates only a few failed tasks, and would count each false suspicion."""
        self.lose(member, why, now, request)
        if self._board.phase in (QueryPhase.RUNNING, QueryPhase.FINISHED) or self.waiting is not None:
            self._departures.fence(member)

    def lose(self, member: Member, why: str, now: float, request: int = 0) -> None:
        """Take a worker out of the table; survivors take over its partitions."""
        board, repairs = self._board, self._repairs
        # 1. In any phase, the worker is no member any more: after the end of the query nothing else is to be done.
        board.members.remove(member.node)
        self._balancer.forget(member.node)
        drain = self._departures.stop_draining(member.node)
        if board.table is None or board.phase == QueryPhase.ENDED:
            return
        # 2. The table without the worker. A query that cannot go on ends here, before anything is noted.
        readers = self._departures.readers(member.node)
        table, orphans = self._after_loss(
            board.table, member.node, repairs.safety.is_safe, readers, repairs.safety.keeps_up, repairs.safety.outlives_primary
        )  # fmt: skip
        converges = not self._plan.durable and self._converges(orphans)
        begins = orphans and (self._plan.durable or converges)
        revived_ = revived(table, orphans, board.placement(), empty=converges) if begins else None
        if orphans and revived_ is None and not self._plan.durable:
            concerned = sorted({key.stage for key in orphans}) if board.members.workers else []
            if not board.fail(self._all_gone(member, orphans, why), concerned):
                return
        alone = bool(orphans) and revived_ is None and self._plan.durable
        if revived_ is not None and converges:
            self.beginnings.begin(orphans, board.table, revived_.epoch, self._plan)
        table = revived_ or table
        # 3. The others learn of the loss: first the additions, by the old and the new table, then drains and moves, which look
        # at the additions that are left. The sweep comes last, because it begins repairs in the table that is published.
        repairs.note_loss(member, why, board.table, table, now, request)
        self._departures.note_lost(member, drain, now)
        self._moving.reconcile(table, now)
        if alone:
            self._wait_for_others(self._all_gone(member, orphans, why), now)
            return
        board.publish(table)
        self._sweeper.sweep(now)

    def _converges(self, orphans: Collection[PartitionKey]) -> bool:
        """Tell whether all of these partitions, whose last replicas are lost, go on from an empty state. A stage that has more
        replicas by now does so no more."""
        wished = self._board.wishes.plan.stages
        running = self._board.phase == QueryPhase.RUNNING
        return running and all(wished[s].on_loss == CONVERGE and not replicated(wished[s]) for s, _ in orphans)

    def note_times(self, member: Member, now: float) -> None:
        """Take the event times that a worker reports, by which it becomes known which results lack rows."""
        board = self._board
        if board.table is None or not self.beginnings:
            return
        times = member.stats.get("times", ())
        for begun in self.beginnings.note(member.node, member.epoch, times, board.table, self._plan):
            assert begun.through is not None
            until = shown(begun.through)
            stage, partition = self._plan.stages[begun.key.stage].name, begun.key.partition
            board.note(
                f"partition {partition} has begun empty. Its results are whole again "
                + (f"behind {until}; until there they lack rows that the lost replica had" if until else "from the first one on"),
                now, stage=stage,
            )  # fmt: skip

    # ---- no worker is left, and the checkpoint location has everything

    def _wait_for_others(self, error: QueryFailed, now: float) -> None:
        self.waiting = WaitForWorkers(now, error)
        self._board.wait_for_workers()
        limit = self._plan.settings.workers_timeout
        self._board.note(f"no worker is left; the query waits for others, {limit:g} s at most", now)

    def look_for_others(self, open_slots: int, start: Callable[[float], None], now: float) -> None:
        """While the query waits for workers in place of those that are lost: ``start`` when all have come, or some time after the
        first. End the query if none comes within ``workers.timeout``."""
        waiting, here = self.waiting, len(self._board.members.workers)
        if waiting is None:
            return
        self.give_up_vault(now)
        if not here:
            waiting.first = None
            if now - waiting.since > self._plan.settings.workers_timeout:
                self._board.fail(waiting.error)
            return
        waiting.first = now if waiting.first is None else waiting.first
        if here >= open_slots or now - waiting.first >= OTHERS_S:
            start(now)

    def others_came(self) -> None:
        self.waiting = None

    def forget(self, stages: Collection[int]) -> None:
        """Forget the partitions of stages that are about to go."""
        self._complete = {known for known in self._complete if known[0].stage not in stages}
        self._incomplete_since = {key: at for key, at in self._incomplete_since.items() if key.stage not in stages}
        self.beginnings.forget(stages)

    def note_complete(self, key: PartitionKey, worker: int) -> None:
        """Note that this worker's replica has reached the end of its input."""
        self._complete.add((key, worker))

    def _after_loss(self, table: Table, worker: int, safe: Judge, readers: list[int], *more: Judge) -> AfterLoss:
        """Make the table after a loss (``without_worker``), with those orphans that the query still needs.

        When the query is finished, only kept output is needed. A safe replica of it has the whole order, and still gets the
        rows, unless a stage before it has lost its last replica: then only a replica with all output can show it."""
        after = without_worker(table, worker, safe, readers, *more)
        if self._board.phase != QueryPhase.FINISHED or self._plan.durable:
            return after  # the vault has every partition, and its checkpoints of the last ones may still need rows of the others
        collects = {stage.id: stage.collects for stage in self._plan.stages}

        def shows(stage: int, partition: int, replica: ReplicaAt) -> bool:
            known = not collects[stage] or (PartitionKey(stage, partition), replica.worker) in self._complete
            return known and safe(stage, partition, replica)

        before = (partitions for stage, partitions in enumerate(after.table.stages) if not collects[stage])
        if not all(replicas for partitions in before for replicas in partitions):
            after = without_worker(table, worker, shows, readers, *more)
        return AfterLoss(after.table, [key for key in after.orphans if collects[key.stage]])

    def end_incomplete(self, now: float) -> None:
        """End a finished query whose kept output is incomplete for good: its primary waits for rows of a stage that has lost
        its last replica since the primary took over. It may have these rows, and gets time to apply them."""
        board, stages = self._board, self._plan.stages
        if board.phase != QueryPhase.FINISHED or board.table is None:
            return
        gone = [
            f"{stage.name}/{partition}"
            for stage in stages
            for partition, replicas in enumerate(board.table.stages[stage.id])
            if not replicas and not stage.collects
        ]
        for stage in stages if gone else ():
            for partition, replicas in enumerate(board.table.stages[stage.id] if stage.collects else ()):
                key, leader = PartitionKey(stage.id, partition), replicas[0].worker
                member = board.members.workers[leader]
                if (
                    key,
                    leader,
                ) in self._complete or member.heard > member.turned:  # the replica has all, or is in a step
                    self._incomplete_since.pop(key, None)
                elif now - self._incomplete_since.setdefault(key, now) > self._plan.settings.heartbeat_last_timeout:
                    board.fail(
                        QueryFailed(
                            f"the output of {stage.name}/{partition} is lost: worker {leader} has a part of it, and would need "
                            f"further rows, but with a worker the only safe replica of {some(gone, NAMED)} was lost. More "
                            "replicas would have helped, or toDF() before the loss"
                        )
                    )
                    return

    def _all_gone(self, member: Member, orphans: list[PartitionKey], why: str) -> QueryFailed:
        lost = [f"{self._plan.stages[stage].name}/{partition}" for stage, partition in orphans]
        wished = [self._board.wishes.plan.stages[stage] for stage, _ in orphans]
        fewest = min(stage.replicas for stage in wished)
        who = f"worker {member.node} (slot {member.about.index}, {member.about.host} pid {member.about.pid})"
        if self._plan.durable:
            return QueryFailed(
                f"{who} was lost ({why}), no worker is left, and none has come within {self._plan.settings.workers_timeout:g} s "
                f"(spark.flux.workers.timeout). Start the query again with the same checkpoint location: it "
                "goes on where it was"
            )
        if TOO_LONG in why:
            advice = (
                "Another worker would take as long: let the call do less, or raise spark.flux.step.timeout, the time that it may "
                "take"
            )
        elif not all(map(replicated, wished)):
            advice = "Stages with replicas=1 do not survive the loss of a worker; replicas=2 does"
        else:
            advice = f"More losses at once than replicas={fewest} survives; a higher number, or more executors, would have helped"
        return QueryFailed(
            f"{who} was lost ({why}), and with it the only safe replica of {some(lost, NAMED)}. {advice}"
        )

    # ---- silence

    def give_up_vault(self, now: float) -> None:
        """End a query whose directory does not answer: it must not go on unprotected."""
        vault, limit = self._board.members.vault, self._plan.settings.journal_timeout
        if vault is not None and now - vault.heard > limit:
            self._board.fail(
                QueryFailed(
                    f"the checkpoint location {self._board.location} has not answered for {now - vault.heard:.0f} s "
                    f"(spark.flux.journal.timeout is {limit:g} s): a write takes too long, or the process that writes (pid "
                    f"{vault.about.pid} on {vault.about.host}) stands still"
                )
            )

    def give_up_silent(self, now: float) -> None:
        """Give up silent workers. A worker with the last safe replica of a partition gets more time: it may only be
        slow. An active replica that is far behind does not count as another safe one."""
        settings = self._plan.settings
        asleep = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        if asleep > settings.heartbeat_timeout:
            # This process itself stood still: reports that came meanwhile have not been read yet.
            for member in self._board.members.processes:
                member.heard = min(now, member.heard + asleep)  # a few reports may have been read first
                member.turned = min(now, member.turned + asleep)
            self._repairs.safety.lags.controller_stood_still(asleep, now)
        # Reports may have come since the last look and not be read yet. If that was long ago, silence is known only up
        # to that time.
        known = now if asleep <= 1.5 * settings.heartbeat_interval else now - asleep
        self._forget_silent_ingress(known)
        for member in list(self._board.members.workers.values()):
            if self._board.phase == QueryPhase.ENDED or self._board.table is None:
                return
            quiet = known - member.heard
            busy = member.heard > member.turned and quiet <= settings.heartbeat_timeout
            if busy and now - member.turned > settings.step_timeout:
                self.give_up(member, self._too_long(member, now - member.turned), now)
            elif quiet > settings.heartbeat_timeout and (
                member.cut or quiet > settings.heartbeat_last_timeout or self._others_go_on(member, known)
            ):
                self.give_up(member, f"no heartbeat for {quiet * 1e3:.0f} ms", now)

    def _others_go_on(self, member: Member, known: float) -> bool:
        """Tell whether each partition of a silent worker has another replica that goes on with it: an active one that keeps up,
        a standby, or the one in the directory.

        The directory counts only if the vault and some other worker have been heard lately: without them, the partition stands
        still in any case, and the silent worker may be back sooner."""
        board, timeout = self._board, self._plan.settings.heartbeat_timeout
        assert board.table is not None
        # The last orders that it sent have arrived after half of that time.
        is_heir = self._repairs.safety.is_heir_of_silent(member.heard + timeout / 2)
        _, orphans = self._after_loss(board.table, member.node, is_heir, [])
        if not orphans:
            return True
        vault = board.members.vault
        others = [other for other in board.members.workers.values() if other is not member]
        return (
            vault is not None
            and known - vault.heard <= timeout
            and any(known - other.heard <= timeout for other in others)
        )

    def _forget_silent_ingress(self, known: float) -> None:
        """Forget silent tasks that send a micro-batch. Repairs wait for tasks that take part, and there is no report of a
        killed task that will not be tried again. A task that lives after all is turned away when it is heard, before it may
        end, and Spark tries it again (design: micro-batches)."""
        plan, members = self._plan, self._board.members
        for member in list(members.ingress.values()):
            silent = known - member.heard > plan.settings.heartbeat_timeout
            if silent and not member.left and goes_on(plan, member.about):
                members.forget(member)

    def _too_long(self, member: Member, seconds: float) -> str:
        """Describe the reason for giving up a worker whose loop has not turned for ``seconds``, with its activity."""
        pulse, limit = member.pulse, f"for {seconds:.1f} s, {TOO_LONG}"
        if pulse is not None and not self._exists(pulse.kind, pulse.what, pulse.partition):
            pulse = None  # the stage or source was removed since
        if pulse is not None and pulse.kind == LoopActivity.READ:
            return (
                f"source {self._plan.sources[pulse.what].name}, partition {pulse.partition} has given nothing {limit}"
            )
        if pulse is not None and pulse.kind == LoopActivity.OPEN:
            return f"stage {self._plan.stages[pulse.what].name}, partition {pulse.partition}: open() has run {limit}"
        if pulse is None or pulse.kind != LoopActivity.STEP:
            return f"its loop has stood still {limit}"
        where = f"stage {self._plan.stages[pulse.what].name}, partition {pulse.partition}, step {pulse.step}"
        known = member.in_step
        if known is None or (known.stage, known.partition, known.step) != (pulse.what, pulse.partition, pulse.step):
            return f"{where}: a call has run {limit}, and holds the interpreter lock, so its first row is not known"
        row = f"; first row of the step: {known.row}" if known.row else ""
        return f"{where}: {known.method}() has run {limit}{row}"
