"""One worker's share of a query, without I/O: replicas, their streams, and sources (design: pure-core, subscription).

Events come in through ``on_*``; ``work`` applies one step; ``poll`` yields the effects. Messages of a worker to itself take
the same way as those to other workers, without leaving this file: no frames, no copy.

``now`` is the monotonic clock, which time-outs and polls go by. Operators and rows get the time of the wall clock, which may be
set back: it is ``wall_ahead`` of the monotonic clock.

Left to others: frames, sockets, clocks and the source iterators (the shell), placement (the controller's table), and in this
package: making the replicas that the table places (``replica_lifecycle``), reading streams (``subscriptions``), reading sources
(``source_scheduler``), the choice of the next step (``step_scheduler``), and copies of state (``flux.state``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from math import inf
from typing import Any

import numpy as np
import pyarrow as pa

from flux.dataflow.plan import FromStage, Plan
from flux.errors import Fenced, ProtocolError, RefusedError, UserCodeError
from flux.exchange.feed import Counters
from flux.exchange.producer import ToWorker, unread_due
from flux.reach.loans import Lender
from flux.reach.relays import RelayedFrom, Relays
from flux.reach.unreached_primaries import UnreachedPrimaries
from flux.replica.batched_steps import apply_together
from flux.replica.event_clock import check_entries
from flux.replica.order_exchange import OrderExchange
from flux.replica.replica import Replica
from flux.replica.step_queue import ReplicaStep
from flux.shadows.shadow_hosts import ShadowHosting
from flux.state.sender import Aside, StateSender, ToSender
from flux.state.standby import StandbyStore
from flux.wire.control import CopyState, EdgeStored, PlanChanged, TableSeen
from flux.wire.messages import (
    Ack,
    Acks,
    Answered,
    Borrow,
    Bound,
    Data,
    Fetch,
    Hello,
    Install,
    Installed,
    Orders,
    OrdersSeen,
    Passed,
    Press,
    Pull,
    Relayed,
    Settled,
    StepKind,
    Tentative,
    ToProducer,
    Unacked,
    Unordered,
    Unread,
    WantTentative,
)
from flux.wire.parts import PartLimits
from flux.wire.pulse import IN_STEP, KIND, PARTITION, STEP, TURN, WHAT, Note, no_note
from flux.worker.checkpoint_scheduler import CheckpointScheduler, LastCheckpointWatch
from flux.worker.effects import (
    LOCAL,
    Effect,
    StageFailures,
    ToConnection,
    ToController,
    WorkerExtension,
    taken_reports,
    to_control,
)
from flux.worker.hosted_replicas import HostedReplicas
from flux.worker.output_delivery import OutputDelivery
from flux.worker.pacing import Pacing
from flux.worker.replica_lifecycle import ReplicaLifecycle
from flux.worker.report import DrainCounter, StepAges
from flux.worker.source_scheduler import SourceScheduler
from flux.worker.step_scheduler import StepScheduler
from flux.worker.subscriptions import Subscriptions
from flux.worker.table_follower import AssignedPartitions, PlanFollower
from flux.worker.watermarks import WatermarkScheduler
from partitioning.ids import PartitionKey, SourcePartition, StreamId
from partitioning.table import Table

#: Seconds. A wall clock that has gone back by more than this was set; smaller differences are drift.
CLOCK_BACK_S = 0.001
#: An ack waits for other acks at most for the time after which a producer asks again, divided by this number.
ACK_SHARE = 8


class WorkerCore:
    """One worker's share of a plan."""

    def __init__(
        self,
        plan: Plan,
        worker: int,
        clock: Callable[[], float] = lambda: 0.0,
        workers: int = 1,
        limits: PartLimits | None = None,
        standby_store: StandbyStore | None = None,
        extension: WorkerExtension | None = None,
    ) -> None:
        """Begin without replicas. ``clock`` (seconds) only measures how long steps take; nothing is decided by it. ``workers``:
        the number of workers with which the query began; ``limits`` of copies of state; ``standby_store``:
        the store of standbys, in memory by default; ``extension``: of a worker of a special kind."""
        self.plans = PlanFollower(plan, runs_code=extension is None)
        self.plan = plan
        self.worker = worker
        self.hosted = HostedReplicas(plan, worker)
        self.replicas = self.hosted.replicas
        self.awaited = self.hosted.awaited
        self.followers = self.hosted.followers
        self.counters = Counters()
        self.subscriptions = Subscriptions(self.plans, self.hosted, self.counters, self._answer)
        self.latencies = {stage.id: StepAges() for stage in plan.stages}
        #: The present activity, for threads that watch this worker from outside.
        self.note: Note = no_note()
        #: The last step was a tick.
        self.ticked = False
        #: Rows and steps applied by this worker. A replica's own counts travel with its state.
        self.rows_in = self.steps = 0
        #: Sum, over all steps, of the age of the oldest row of a step.
        self.aged_s = 0.0
        #: Seconds by which the wall clock is ahead of ``now``; renewed by the shell.
        self.wall_ahead = 0.0
        self._clock = clock
        self._extension = extension
        self.turns = StepScheduler(self.replicas)
        self.watermarks = WatermarkScheduler(plan, self.hosted, self.subscriptions.streams, self._wake_key)
        #: Time of the next look for statements about watermarks that are to be told, or told again.
        self._bounds_at = np.inf
        #: Time before which no worker is to be told of elements here of a stream that it reads elsewhere.
        self._unread_at = np.inf
        self._effects: deque[Effect] = deque()
        self.failures = StageFailures(worker, self._effects.append)
        self.leaving = OutputDelivery(worker, plan, self.replicas, self._effects.append, self.turns.wake)
        self.order_exchange = OrderExchange(
            self.replicas, self.hosted.followers, plan.settings, self.counters, self.turns.wake, self.leaving.report
        )  # fmt: skip
        self.lifecycle = ReplicaLifecycle(
            self.plans, self.hosted, self.subscriptions, self.turns, self.leaving, self.order_exchange,
            standby_store or StandbyStore(), workers, self.failures, self._look_for_timers,
        )  # fmt: skip
        self.shadows = ShadowHosting(
            plan, self.hosted, self.subscriptions.streams, self.leaving.tell, self._effects.append, self.counters, clock
        )  # fmt: skip
        self.lifecycle.note = lambda: self.note
        self.producers = self.lifecycle.producers
        self.log_meter = self.lifecycle.log_meter
        self.reading = SourceScheduler(plan, self.lifecycle.producer)
        self.sources = self.reading.sources
        self._assigned = AssignedPartitions(plan, worker, self.reading, self.producers)
        self._revivals, self._timers_at = self.lifecycle.revivals, 0.0
        self.drained = DrainCounter()
        #: The earliest future timer of an operator here, by the wall clock; 0: look again.
        self._tick_at = np.inf
        #: ``wall_ahead`` at the last look for timers.
        self._looked_ahead = 0.0
        parts = (limits or PartLimits()).within(plan.settings.message_max_bytes)
        self._state_sender = StateSender(
            self.lifecycle, plan.secret, plan.settings.resend_timeout, clock, parts, self.counters
        )
        self._state_receiver = self._state_sender.incoming
        self.lender = Lender(
            worker, plan.settings.link_timeout, self.replicas, self.subscriptions.streams,
            lambda worker: self.relays.borrows_over_a_third(worker),
        )  # fmt: skip
        self.unreached = UnreachedPrimaries(
            worker, plan.settings.link_unreached, self.replicas, self.producers, self.subscriptions.borrower, self.counters
        )  # fmt: skip
        self.relays = Relays(
            worker, plan.settings.link_timeout, self.replicas, self.sources, self.subscriptions.streams,
            self.subscriptions.ack_soon, self.lender, self.subscriptions.borrower, self.on_data_plane, self._take_answer,
            self.counters,
        )  # fmt: skip
        self.checkpoints = CheckpointScheduler(self.replicas, plan.settings, self._state_sender)
        self._last_checkpoints = LastCheckpointWatch(self.hosted, self.reading, self.checkpoints, self._tell_done)

    @property
    def epoch(self) -> int:
        return self.hosted.epoch

    @property
    def table(self) -> Table | None:
        return self.hosted.table

    @property
    def written(self) -> tuple[int, int, int]:
        """Counts of writes to a disk: bytes in all, bytes of orders, and slices named by these orders."""
        return (0, 0, 0) if self._extension is None else self._extension.written

    @property
    def reaches(self) -> set[int]:
        """Workers with which a state is exchanged other than between replicas."""
        if self._extension is not None:
            return self._extension.reaches
        return set() if self._revivals.vault is None else {self._revivals.vault}

    def validate(self) -> None:
        """Check the invariants that hold between any two events, beside those that each state machine in it checks itself.
        AssertionError names the broken one."""
        self.hosted.validate()
        self._state_sender.validate()
        self._state_receiver.validate()
        made = sum([len(source.born) for source in self.sources.values()])
        for replica in self.replicas.values():
            made += len(replica.outlets)
            for outlet in replica.outlets:
                stream = outlet.producer.stream
                assert self.producers.get(stream) is outlet.producer, f"{replica.where} is not who produces {stream}"
        assert made == len(self.producers), f"{len(self.producers)} producers, replicas and sources have {made}"
        self.subscriptions.validate()

    # ---- orders

    def on_table(self, table: Table, now: float) -> None:
        """Follow the newest table. Raises Fenced if this worker is not in it."""
        if table.epoch <= self.epoch:
            return
        if self.worker not in table.endpoints:
            raise Fenced(f"worker {self.worker} is not in the table of epoch {table.epoch}")
        if not self.plans.may_follow(table):
            return
        if self._extension is not None:
            self._extension.on_table(table)
        if table.plan > self.plan.version:
            self._go_by(table.plan)
        update = self.hosted.follow(table)
        # Replicas first, as all that follows goes by them; then their roles, before producers and subscriptions act on the table.
        rising = self.lifecycle.on_table(update)
        self._state_receiver.on_table()
        self._assigned.on_table(table, update.before)
        self.lifecycle.show(self.producers.values(), now)
        self.turns.wake_all(self.replicas)  # fewer replicas to wait for may have made room in the logs
        self._tick_at = 0.0  # new primaries have timers to fire
        self.watermarks.note_all(now)
        self.subscriptions.on_table(update.changed)
        self.shadows.on_table(now)
        for standby in rising:
            self._state_receiver.promote(standby, table.epoch, now)
        self._effects.append(ToController(TableSeen(node=self.worker, epoch=self.epoch)))
        if self._extension is not None:
            self._extension.on_followed(now)

    def _go_by(self, version: int) -> None:
        """Go by another version of the plan. The table that names it comes next."""
        plan = self.plans.of(version)
        assert plan is not None
        self.plan = plan
        self.plans.go_by(version)
        self.latencies = {stage.id: self.latencies.get(stage.id) or StepAges() for stage in plan.stages}
        parts = (
            self.hosted, self.lifecycle, self.subscriptions, self.leaving, self.watermarks, self.shadows, self.reading,
            self._assigned,
        )  # fmt: skip
        for part in parts:
            part.go_by(plan)

    def reports(self) -> list[ToController]:
        """Take the reports that are due, to be sent before all else; none of a worker of a special kind, which may have to act
        before its reports."""
        return taken_reports(self._effects) if self._extension is None else []

    def on_plan_changed(self, message: PlanChanged, now: float, loaded: Any = None) -> None:
        """Take a change of the plan, and follow the table that waits for it. ``loaded``: see ``PlanFollower.on_changed``."""
        if (seen := self.plans.on_changed(message, self.worker, loaded)) is not None:
            self._effects.append(ToController(seen))
            self.lifecycle.on_plan()
        if self.plans.held is not None:
            self.on_table(self.plans.held, now)

    def on_edge_complete(self, edge: int, producers: list[int]) -> None:
        self.lifecycle.on_edge_complete(edge, producers)
        if edge in self.plan.edges:
            self.watermarks.note(self.plan.edges[edge].consumer, 0.0)

    def on_edge_stored(self, message: EdgeStored, now: float) -> None:
        if begun := self._assigned.on_edge_stored(message):
            self.lifecycle.show(begun, now)

    def on_edge_watermark(self, edge: int, watermark: int, now: float) -> None:
        """Take the watermark of an edge from micro-batches."""
        self.watermarks.note_edge(edge, watermark, now)

    # ---- the data port

    def on_data_plane(self, connection: Hashable, message: Any, batches: Sequence[pa.RecordBatch], now: float) -> None:
        """Handle a message from a producer of a stream that this worker consumes, an egress task or a reader."""
        match message:
            case Data():
                self._on_data(connection, message, batches, now)
            case Hello():
                self.subscriptions.on_hello(connection, message)
            case Fetch() | Pull():
                self.counters.misrouted += not self.leaving.on_asked(connection, message, now)
            case Orders():
                self._on_orders(connection, message)
            case Relayed():
                self._effects.extend(self.relays.take(message, batches, self.table, now))
            case Press():
                self._on_press(connection, message)
            case Unordered():
                self.subscriptions.on_unordered(connection, message)
            case Unacked():
                self._effects.extend(map(ToController, self.unreached.on_unacked(message, self.table)))
            case Settled() | Passed() | Bound() | Unread():
                self._on_statement(connection, message, now)
            case Tentative() | WantTentative():
                self.shadows.on_message(message, batches, now, now + self.wall_ahead)
            case _:
                if self._extension is None or not self._extension.on_message(message, now):
                    raise ProtocolError(f"a consumer does not take {type(message).__name__}")

    def _has(self, edge: int) -> bool:
        """Tell whether the plan has an edge. ProtocolError: no version that is known here has or had it."""
        if edge in self.plan.edges:
            return True
        if not self.plans.may_name(edge):
            raise ProtocolError(f"the plan has no edge {edge}")
        self.counters.stale += 1
        return False

    def _on_press(self, connection: Hashable, message: Press) -> None:
        if not self._has(message.edge):
            return
        stage = self.plan.edges[message.edge].consumer
        self.subscriptions.on_press(connection, StreamId(message.edge, message.producer))
        for partition in message.partitions:
            self.checkpoints.press(PartitionKey(stage, partition), message.anew)

    def _on_statement(self, connection: Hashable, message: Settled | Passed | Bound | Unread, now: float) -> None:
        if not self._has(message.edge):
            return
        if isinstance(message, Settled):
            self.subscriptions.on_settled(connection, message)
        elif isinstance(message, Unread):
            self.subscriptions.on_unread(connection, message)
        elif isinstance(message, Bound):
            if self.subscriptions.on_bound(connection, message, now):
                self.watermarks.note(self.plan.edges[message.edge].consumer, now)
                self.shadows.note(self.plan.edges[message.edge].consumer, now)
        else:
            self.turns.wake_all(self.subscriptions.on_passed(connection, message))

    def rows_of(self, connection: Hashable, message: Any) -> Data | None:
        """Return the header of the rows in a message whose payload is worth decoding: their stream is read from this connection,
        or they are to be sent on. None: there are no such rows."""
        if isinstance(message, Relayed):
            connection, data = RelayedFrom(message.origin, message.over), message.message
            if isinstance(data, Data) and message.over == self.worker:
                return data if data.edge in self.plan.edges and len(data.runs) <= 1 else None
            message = data if message.to == self.worker else None
        return message if isinstance(message, Data) and self.subscriptions.knows(connection, message) else None

    def on_undecodable(self, connection: Hashable, message: Data, reason: str) -> None:
        """Ask again for a message whose payload cannot be decoded, from a connection that has proved the secret for its stream. A
        payload damaged on the way is sent again; QueryFailed if that does not help, because it never will."""
        self.subscriptions.on_undecodable(connection, message, reason)

    def on_answer(self, worker: int, message: Any, now: float) -> None:
        """Handle an answer from the data port of a worker that consumes a stream of ours or follows a primary of ours."""
        self.relays.came_directly(worker, message)
        self._take_answer(worker, message, now)

    def _take_answer(self, worker: int, message: Any, now: float) -> None:
        if isinstance(message, OrdersSeen):
            self._on_orders_seen(worker, message, now)
            return
        if isinstance(message, Installed):
            (self._extension or self._state_sender).on_installed(worker, message, now)
            return
        if isinstance(message, Borrow):
            self.lender.lend(worker, message)
            return
        if isinstance(message, Acks):
            for ack in message.items:
                self._on_answer(worker, ack, now)
            return
        self._on_answer(worker, message, now)

    def _on_answer(self, worker: int, message: ToProducer, now: float) -> None:
        producer = self.producers.get(StreamId(message.edge, message.producer))
        if producer is None:
            return
        try:
            producer.on_answer(worker, message, now)
        except RefusedError as refused:
            if refused.code != "stale" or not producer.reads_again or self.epoch <= producer.incarnation:
                raise
            self.lifecycle.show(self._assigned.read_again(message.edge, message.producer), now)
            return
        edge = self.plan.edges[message.edge]
        if isinstance(edge, FromStage) and producer.has_room:
            self.turns.wake(PartitionKey(edge.stage, message.producer))

    # ---- order of steps

    def _on_orders(self, connection: Hashable, message: Orders) -> None:
        """Follow the orders of primaries, and answer for the replicas here."""
        for item in message.items:
            if item.stage in self.plan.stages:  # no replica takes other items
                check_entries(self.plan.stages[item.stage], item)
        if answers := self.order_exchange.on_orders(message):
            self._answer(connection, OrdersSeen(answers))

    def _on_orders_seen(self, worker: int, message: OrdersSeen, now: float) -> None:
        for report in self.order_exchange.on_orders_seen(worker, message, now):
            self._effects.append(ToController(to_control(self.worker, report)))

    # ---- copies of state

    def on_copy_state(self, order: CopyState) -> None:
        """Copy a state at the next step boundary; safe to repeat."""
        self._state_sender.on_copy_state(order)

    def on_install(self, connection: Hashable, message: Install, part: bytes | memoryview, now: float) -> None:
        """Take a part of a copy of a replica's state."""
        if not self._state_receiver.on_install(connection, message, part, now):
            self.counters.stale += 1

    def on_done(self, token: int, result: Any, now: float) -> None:
        """Take the result of a job that was done in another thread."""
        self._state_sender.on_done(token, result, now)

    def _look_for_timers(self) -> None:
        self._tick_at = 0.0

    def _on_data(self, connection: Hashable, message: Data, batches: Sequence[pa.RecordBatch], now: float) -> None:
        taken = self.subscriptions.take(connection, message, batches, now)
        if message.watermark is not None and message.edge in self.plan.edges:
            self.watermarks.note(self.plan.edges[message.edge].consumer, now)
            self.shadows.note(self.plan.edges[message.edge].consumer, now)
        if not taken:
            return  # the stream may not exist in the plan
        mine = self.hosted.of_stage[self.plan.edges[message.edge].consumer]
        for partition, slice_ in taken:
            replica = mine[partition]
            replica.add(slice_)
            if not (self.turns.gather_s and self.turns.gathers(replica, slice_, now)):
                self._wake(replica)

    def _wake_key(self, key: PartitionKey) -> None:
        self._wake(self.replicas[key])

    def _wake(self, replica: Replica) -> None:
        """Wake a replica that has more to apply; as primary it also has more to order."""
        self.turns.wake(replica.key)
        if replica.order.peers:
            self.order_exchange.tell(replica.key)

    # ---- work

    def work(self, now: float) -> bool:
        """Apply one step of the partition whose turn it is, and of those that go with it. Return False if nothing can be applied
        now."""
        if now >= self.turns.gathered_at:
            for gathered in self.turns.gathered(now):
                self._wake(gathered)
        if now + self.wall_ahead >= self._tick_at or self.wall_ahead < self._looked_ahead - CLOCK_BACK_S:
            self._wake_for_timers(now + self.wall_ahead)
        if now >= self.watermarks.due_at:
            self.watermarks.look(now)
        if now >= self.shadows.due_at and self.shadows.work(now, now + self.wall_ahead):
            return True
        started = self._clock()
        if steps := self.turns.next(now, self.wall_ahead):
            self._apply(steps, started, now)
        return bool(steps)

    @property
    def has_work(self) -> bool:
        """True if there may be something to apply."""
        return bool(self.turns)

    def _wake_for_timers(self, wall: float) -> None:
        """Wake every replica whose timer is due. A replica that cannot step yet is woken again by whatever blocks it. If the wall
        clock is set back meanwhile, its timer is not due after all."""
        self._tick_at, self._looked_ahead = np.inf, self.wall_ahead
        for key, replica in self.replicas.items():
            if replica.timer_at <= wall:
                self.turns.wake(key)
            else:
                self._tick_at = min(self._tick_at, replica.timer_at)

    def _apply(self, steps: Sequence[ReplicaStep], started: float, now: float) -> None:
        """Apply steps, several only if they go together, and return the credit of their slices. ``started``: the time at which
        the first of them was looked for."""
        first, note = steps[0], self.note
        note[WHAT], note[PARTITION], note[STEP], note[KIND] = *first.key, first.number, IN_STEP
        turns = [(self.replicas[step.key], step) for step in steps]
        try:
            applied = [turns[0][0].apply(first)] if len(turns) == 1 else apply_together(turns)
        except UserCodeError as error:
            self.failures.take(self.plan, first.key.stage, error)
            for replica, _ in turns:
                replica.failed = True
            return
        note[KIND] = TURN
        rows = [
            step.rows.num_rows if done and step.rows is not None else 0
            for step, done in zip(steps, applied, strict=True)
        ]
        in_all, busy_s = sum(rows), self._clock() - started
        self.rows_in += in_all
        self.steps += len(steps)
        for (replica, step), mine, done in zip(turns, rows, applied, strict=True):
            replica.busy_s += busy_s * mine / in_all if in_all else busy_s / len(steps)
            self._after_step(replica, step, done, now)

    def _after_step(self, replica: Replica, step: ReplicaStep, done: bool, now: float) -> None:
        """Follow up a step. ``done``: all of its output is emitted."""
        wall = now + self.wall_ahead
        self.ticked = step.entry.kind is StepKind.TICK
        if replica.context.timers.pending:
            self._tick_at = min(self._tick_at, replica.timer_at)
        if replica.order.peers:
            # Results of windows come at once, and seldom: they do not wait until the order has company.
            ends = step.entry.kind.moves_watermarks and replica.output.given > 0
            self.order_exchange.tell(replica.key, at_once=ends)
        if replica.clock is not None and replica.primary:
            self.watermarks.note(replica.stage.id, now)
        if done:
            self.subscriptions.applied(step, now)
            if step.rows is not None:
                age_s = wall - step.entry.created
                self.latencies[replica.stage.id].add(age_s)
                self.aged_s += age_s
        if self.shadows:
            self.shadows.after_step(replica, step, now, wall)
        if step.entry.kind is StepKind.CHANGE:
            self.lifecycle.show_new(replica, now)
        elif replica.finished:
            self.leaving.note_end(replica, wall)
            self.leaving.report(replica)

    def report_again(self) -> None:
        """Repeat all reports, because the connection to the controller was lost, and perhaps reports with it."""
        self.failures.report_again(self.plan)
        self._effects.append(ToController(TableSeen(node=self.worker, epoch=self.epoch)))
        self._last_checkpoints.report_again()
        for replica in self.replicas.values():
            replica.said_complete = False
            replica.order.report_again()
            self.order_exchange.tell(replica.key)
            self.leaving.report(replica)

    # ---- sources

    def read(self, idle: bool, now: float) -> bool:
        """Read one batch of a source, if it is time for one. It is called until it returns False. ``idle``: there was nothing to
        apply. After a tick sources may be read, too, because timers without end would keep the rows out."""
        with self.failures.of_readers(self.plan, self.reading):
            return self.reading.read(idle or self.ticked, now, now + self.wall_ahead, self.note)
        return False

    def _tell_done(self) -> None:
        with self.failures.of_readers(self.plan, self.reading):
            self.reading.tell_done()

    def set_pace(self, pace: Pacing) -> None:
        """Go at this pace from now on: in reading sources, in gathering slices, and in holding back orders and acks. None of
        these waits is shorter than the settings say."""
        settings = self.plan.settings
        self.reading.interval_s, self.turns.gather_s = pace.interval_s, pace.gather_s
        self.order_exchange.patience_s = max(self.order_exchange.least_patience_s, pace.order_s)
        self.subscriptions.ack_s = max(settings.ack_interval, min(pace.ack_s, settings.resend_timeout / ACK_SHARE))

    def wants(self, source: int, partition: int) -> bool:
        """Tell whether a source may be read. False if another worker reads it by now."""
        return self.reading.wants(SourcePartition(source, partition))

    def on_source(self, source: int, partition: int, batch: pa.RecordBatch, now: float) -> None:
        """Take the next batch of a source that is read outside this class."""
        self.reading.take(SourcePartition(source, partition), batch, b"", now + self.wall_ahead)

    def on_source_ended(self, source: int, partition: int, now: float) -> None:
        self.reading.finish(SourcePartition(source, partition), now + self.wall_ahead)

    # ---- effects

    def poll(self, now: float) -> Iterator[Effect]:
        """Yield everything to be sent now, in order. Messages to this worker itself are delivered on the way."""
        effects = self._poll(now)
        return effects if self._extension is None else self._extension.passed(effects, now)

    def _poll(self, now: float) -> Iterator[Effect]:
        """Yield effects in this order: acks, timers, checkpoints and copies, output for the outside, then rows and answers, last
        the orders. Rows and answers take turns until neither brings more, because a message to this worker itself is
        delivered at once and may bring the next."""
        if now >= self.subscriptions.ack_at:
            self.subscriptions.flush_acks()
        if now >= self._timers_at:
            self._timers_at = now + self.plan.settings.resend_timeout / 4
            for producer in self.producers.values():
                producer.dirty = True
            self.subscriptions.relieve(now)
            self.subscriptions.try_elsewhere(self.watermarks.holders(), now)
        if now >= self.subscriptions.owed.due_at:
            self.subscriptions.look_for_owed(now)
        if now >= self.subscriptions.feeds.due_at:
            self.subscriptions.feeds.hedge(now)
        if now >= self._unread_at:
            self._unread_at = np.inf
            for producer in self.producers.values():
                if now >= (due := unread_due(producer)):
                    producer.dirty = True
                else:
                    self._unread_at = min(self._unread_at, due)
        if now >= self._bounds_at:
            self._bounds_at = np.inf
            for producer in self.producers.values():
                producer.dirty |= producer.bounds is not None
        self._effects.extend(map(ToController, self._last_checkpoints.look(now)))
        for begin in self.checkpoints.next(now):
            self._state_sender.checkpoint(*begin)
        if self._state_sender.active:
            yield from self._copies_of_state(now)
        for asked in self.plans.asks(self.worker, now):
            yield ToController(asked)
        yield from self._assigned.reports(now)
        yield from self._revivals.poll(now)
        yield from self.relays.ask(self.table, now)
        yield from self.relays.loans(self.lender.poll(self.table, now), now)
        self.subscriptions.borrower.forget(now)
        if now >= self.unreached.look_at:
            for told in self.unreached.look(now):
                yield told if isinstance(told, ToWorker) else ToController(told)
        self.leaving.flush(now)  # output that became committed, or left, since the last time
        busy = True
        while busy:
            busy = False
            for producer in [producer for producer in self.producers.values() if producer.dirty]:
                for send in producer.poll(now):
                    busy = True
                    if send.worker == self.worker:
                        self.on_data_plane(LOCAL, send.message, send.batches, now)
                    else:
                        yield send
                if producer.bounds is not None:
                    self._bounds_at = min(self._bounds_at, producer.bounds.due_at)
                self._unread_at = min(self._unread_at, unread_due(producer))
            while self._effects:
                busy = True
                effect = self._effects.popleft()
                if isinstance(effect, ToConnection) and effect.connection == LOCAL:
                    self.on_answer(self.worker, effect.message, now)
                else:
                    yield effect
        # After the rows that were just read here, so that their order travels with the other pending orders.
        yield from self.relays.ways(self.order_exchange.poll(now, bool(self.turns), self.wall_ahead), now)

    def on_last_checkpoints(self, now: float, epoch: int = -1) -> None:
        """Prepare the stop of the query. ``epoch``: that of the table whose primaries here are to give the vault their last
        checkpoints."""
        self._last_checkpoints.begin(now, epoch)

    def _copies_of_state(self, now: float) -> Iterator[ToWorker | Aside]:
        for effect in self._state_sender.poll(now):
            if isinstance(effect, ToSender):
                self._answer(effect.connection, effect.message)
            else:
                yield effect

    def due(self) -> float:
        """Return the time at which ``poll`` must be called again at the latest, if nothing happens before."""
        at = min(
            self.subscriptions.ack_at, self._timers_at, self._tick_at - self.wall_ahead, self.order_exchange.due(),
            self.checkpoints.due(), self._revivals.due(), self.leaving.due(), self.subscriptions.owed.due_at,
            self.turns.gathered_at, self._last_checkpoints.due_at, self._bounds_at, self.watermarks.due_at, self.shadows.due_at,
            self.plans.due(), self.subscriptions.feeds.due_at, self._assigned.due(),
            inf if self._extension is None else self._extension.due(),
        )  # fmt: skip
        if self._unread_at < at:  # acks have come since it was computed
            self._unread_at = min([unread_due(producer) for producer in self.producers.values()], default=np.inf)
        return min(at, self._unread_at)

    def _answer(self, connection: Hashable, message: Answered) -> None:
        if isinstance(connection, RelayedFrom):
            self._effects.append(self.relays.answer(connection, message))
            return
        self._effects.append(ToConnection(connection, message))
        if isinstance(message, Ack | Acks):
            self._effects.extend(self.relays.copies(message))

    def close(self) -> None:
        """Close every reader and operator; an exception of one is logged."""
        self.reading.close()
        self._state_receiver.close()
        self.shadows.close()
        for replica in self.replicas.values():
            replica.close()
