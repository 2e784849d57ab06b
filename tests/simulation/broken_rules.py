"""Deliberately broken variants of rules that only few interleavings need: each takes away one rule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from math import inf
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from msgspec.structs import replace

import controller.decide.losses
import controller.decide.registration
import controller.replicas.addition_tracker
import flux.replica.order_exchange
from controller.decide.board import Board
from controller.decide.controller import Controller
from controller.decide.driver_events import DriverEvents
from controller.decide.slots import Slots
from controller.decide.sweep import Sweep
from controller.replicas.addition_tracker import AdditionTracker
from flux.exchange.inbound import Inbound, PartitionProgress
from flux.exchange.log import Log
from flux.exchange.marks import Marks
from flux.exchange.producer import Producer, ToWorker
from flux.reach.loans import Borrower, Lender
from flux.reach.relays import RelayedWays, Relays
from flux.reach.starvation import Starvation
from flux.reach.unreached_primaries import UnreachedPrimaries
from flux.replica.replica import Replica
from flux.state.sender import StateSender
from flux.tasks.output_fetch import OutputFetch, RemoteFile
from flux.tasks.output_pull import OutputPull, PullQuestion
from flux.wire.control import Unreached
from flux.wire.messages import Data, OrdersSeen, Relayed
from flux.worker.subscriptions import Subscriptions
from partitioning.table import ReplicaAt, Table

Patch = pytest.MonkeyPatch


# ---- producers and consumers


def accepts_duplicates(patch: Patch) -> None:
    """Let a consumer take a slice that it has taken before."""
    slices = Inbound._slices

    def broken(self: Inbound, *given: Any) -> Any:
        received, self.received = self.received, PartitionProgress()
        try:
            return slices(self, *given)
        finally:
            self.received = received

    patch.setattr(Inbound, "_slices", broken)


def compares_no_repetition(patch: Patch) -> None:
    """Accept any output of a replica that repeats the steps of a lost primary."""
    patch.setattr(Replica, "_check_repetition", lambda self: None)


def evicts_when_one_has_acked(patch: Patch) -> None:
    """Evict a batch from the log when the fastest partition has acked it."""
    evict = Log.evict
    patch.setattr(Log, "evict", lambda self, acked: evict(self, np.full_like(acked, acked.max(initial=-1))))


def takes_answers_of_an_older_table(patch: Patch) -> None:
    patch.setattr(Producer, "_outdated", lambda *given: False)


def serves_what_is_left_to_who_needs_more(patch: Patch) -> None:
    """Send the rest to a replica that needs batches which have left the log."""
    patch.setattr(Producer, "_still_here", lambda *given: None)


def keeps_acks_of_an_earlier_life(patch: Patch) -> None:
    """Keep the acks of a replica when the table puts a new one in its place."""
    on_table = Producer.on_table

    def broken(self: Producer, *given: Any) -> None:
        known = {
            worker: dict(zip(c.at.partitions.tolist(), c.acked.tolist(), strict=True))
            for worker, c in self._cursors.items()
        }
        on_table(self, *given)
        for worker, cursor in self._cursors.items():
            before = known.get(worker, {})
            acked = np.array([before.get(partition, -1) for partition in cursor.at.partitions.tolist()])
            np.maximum(cursor.acked, acked, out=cursor.acked)
            self._acks[cursor.at.partitions, cursor.at.slots] = cursor.acked
            self._settle(cursor.at.partitions)

    patch.setattr(Producer, "on_table", broken)


def begins_where_all_is_received(patch: Patch) -> None:
    """Read a source again behind the rows that workers have received, and not behind the rows that they have applied."""
    floor = Producer.floor

    def broken(self: Producer) -> Any:
        acked = {worker: cursor.acked for worker, cursor in self._cursors.items()}
        for cursor in self._cursors.values():
            cursor.acked = np.maximum(cursor.acked, cursor.wanted_from - 1) if len(cursor.wanted_from) else cursor.acked
        try:
            return floor(self)
        finally:
            for worker, cursor in self._cursors.items():
                cursor.acked = acked[worker]

    patch.setattr(Producer, "floor", broken)


def keeps_marks_as_if_what_has_come_were_applied(patch: Patch) -> None:
    """Forget the marks of a source's stream below the newest row that has come, instead of the newest that was applied."""
    keep = Marks.keep
    patch.setattr(Marks, "keep", lambda self, applied: keep(self, lambda: self.newest.sequence))


def resumes_who_does_not_know_the_new_replica(patch: Patch) -> None:
    """Ask a producer to go on for a new replica, though the producer goes by a table without it."""

    def broken(self: Subscriptions, inbound: Inbound, incarnation: int) -> None:
        if inbound.feed.connection is not None:
            self._subscribe(
                inbound, inbound.feed.connection, inbound.incarnation, inbound.feed.epoch, inbound.feed.worker
            )

    patch.setattr(Subscriptions, "_ask_again", broken)


def reads_from_who_was_dropped(patch: Patch) -> None:
    """Welcome replicas of a producer that are not in the table."""
    welcome, producers_of = Subscriptions._welcome_replica, Subscriptions._producers_of

    def broken(self: Subscriptions, connection: Any, hello: Any, inbound: Inbound) -> None:
        listed = producers_of(self, inbound.stream)
        live = listed.get(hello.worker, (-1, True))[1]
        self._producers_of = lambda stream: listed | {hello.worker: (hello.incarnation, live)}  # type: ignore[method-assign]
        try:
            welcome(self, connection, hello, inbound)
        finally:
            del self._producers_of

    patch.setattr(Subscriptions, "_welcome_replica", broken)


def takes_a_batch_that_skips_others(patch: Patch) -> None:
    """Look at the number of a message alone: a batch that skips others counts as the next one."""
    take = Inbound.take

    def broken(self: Inbound, message: Data, *given: Any) -> Any:
        return take(self, replace(message, first=0), *given)

    patch.setattr(Inbound, "take", broken)


def forgets_greetings_of_a_newer_table(patch: Patch) -> None:
    on_hello = Subscriptions.on_hello

    def broken(self: Subscriptions, connection: Any, hello: Any) -> None:
        on_hello(self, connection, hello)
        self._early = []

    patch.setattr(Subscriptions, "on_hello", broken)


def answers_who_does_not_know_new_replicas(patch: Patch) -> None:
    """Answer a greeting that goes by a table without the newest replica here."""
    on_hello = Subscriptions.on_hello

    def broken(self: Subscriptions, connection: Any, hello: Any) -> None:
        hosted = self._hosted
        newest, hosted.newest = hosted.newest, dict.fromkeys(hosted.newest, -1)
        try:
            on_hello(self, connection, hello)
        finally:
            hosted.newest = newest

    patch.setattr(Subscriptions, "on_hello", broken)


# ---- credit


def secondaries_hold_credit(patch: Patch) -> None:
    """Count slices that wait for a primary elsewhere against the credit of their stream."""
    take = Inbound.take
    patch.setattr(
        Inbound,
        "take",
        lambda self, message, batches, hosted, secondary, *given: take(self, message, batches, hosted, (), *given),
    )


def lets_nothing_in_beyond_credit(patch: Patch) -> None:
    """Let no rows in beyond the credit, even if an ordered step waits for them."""
    look = Starvation.look

    def broken(self: Starvation, *given: Any) -> Any:
        found = look(self, *given)
        for wait in found.values():
            wait.urgent = False
        return found

    patch.setattr(Starvation, "look", broken)


def waits_for_the_link(patch: Patch) -> None:
    """Read a stream from the same replica on, though nothing comes from there and another replica has its rows."""

    def broken(self: Subscriptions, now: float) -> None:
        self.owed.due_at = inf

    patch.setattr(Subscriptions, "look_for_owed", broken)


def lends_nothing(patch: Patch) -> None:
    """Let a secondary keep slices for itself that its primary cannot get."""
    patch.setattr(Lender, "look", lambda *given: ())


def relays_nothing(patch: Patch) -> None:
    """Let orders and acks wait for the link."""
    patch.setattr(RelayedWays, "next", lambda *given: -1)


def answers_relayed_orders_over_the_cut_link(patch: Patch) -> None:
    """Send answers directly, also to orders that were relayed."""
    to = Relays._to

    def broken(self: Relays, worker: int, message: Relayed, *given: Any) -> ToWorker:
        direct = isinstance(message.message, OrdersSeen) and message.origin == self._worker
        return to(self, message.to if direct else worker, message, *given)

    patch.setattr(Relays, "_to", broken)


def asks_nobody_for_the_acks_of_a_source(patch: Patch) -> None:
    """Relay orders, but no questions for acks."""
    patch.setattr(Relays, "_lacking", lambda *given: {})


def lends_nothing_over_a_third_worker(patch: Patch) -> None:
    """Relay orders and acks, and let rows that a secondary has wait for the link."""
    patch.setattr(Relays, "loans", lambda self, lent, now: lent)


def lends_nothing_out_of_a_log(patch: Patch) -> None:
    """Let the only replica of a partition wait for the link to the reader of a source."""
    patch.setattr(Borrower, "ask_reader", lambda *given: ())


def lends_rows_over_the_cut_link(patch: Patch) -> None:
    """Send lent rows directly, also if the question for them was relayed."""
    to = Relays._to

    def broken(self: Relays, worker: int, message: Relayed, *given: Any) -> ToWorker:
        direct = isinstance(message.message, Data) and message.origin == self._worker
        return to(self, message.to if direct else worker, message, *given)

    patch.setattr(Relays, "_to", broken)


def leaves_the_lead_to_a_primary_out_of_reach(patch: Patch) -> None:
    """Let a primary lead for as long as the link is cut over which its rows, or acks of its output, would come."""
    patch.setattr(Sweep, "unreached", lambda *given: None)


def asks_no_secondary_for_acks(patch: Patch) -> None:
    """Hide from a primary that acks which it lacks have come to a secondary."""
    patch.setattr(UnreachedPrimaries, "_unacked", lambda *given: ())


def lets_a_replica_lead_that_lacks_rows(patch: Patch) -> None:
    """Let a secondary lead that lends rows, though it cannot get ordered rows of another reader."""
    look = UnreachedPrimaries.look

    def broken(self: UnreachedPrimaries, now: float) -> Any:
        self._committed = dict.fromkeys(self._committed, 0)
        return look(self, now)

    patch.setattr(UnreachedPrimaries, "look", broken)


def lets_any_replica_follow_an_unreached_primary(patch: Patch) -> None:
    """Let a replica take over from an unreached primary although its state has just come, and may lack committed steps."""

    def broken(self: AdditionTracker, message: Unreached, table: Table) -> ReplicaAt | None:
        leader, *others = table.replicas(message.stage, message.partition)
        found = [replica for replica in others if not self.safety.is_safe(message.stage, message.partition, replica)]
        return found[0] if found and leader.worker == message.primary else None

    patch.setattr(AdditionTracker, "heir_of_unreached", broken)


def secondaries_hold_credit_for_ever(patch: Patch) -> None:
    """Let secondaries hold credit, without the rule that lets rows in beyond it and so covers for this."""
    secondaries_hold_credit(patch)
    lets_nothing_in_beyond_credit(patch)


def a_step_under_way_keeps_its_credit(patch: Patch) -> None:
    """Keep the credit of a step under way when its replica is dropped."""

    def broken(self: Replica) -> Any:
        return {stream: list(slices) for stream, slices in self._waiting.items()}

    patch.setattr(Replica, "waiting", broken)


def what_waits_keeps_its_credit(patch: Patch) -> None:
    """Keep the credit of waiting slices when their replica is dropped."""
    discard = Inbound.discard
    patch.setattr(Inbound, "discard", lambda self, partition, slices: discard(self, partition, ()))


# ---- copies


def copies_again_what_has_arrived(patch: Patch) -> None:
    on_copy_state = StateSender.on_copy_state

    def broken(self: StateSender, order: Any) -> None:
        replica = self._host.replicas.get((order.stage, order.partition))
        peer = None if replica is None else self._peer(replica, order)
        if peer is None:
            return
        acked, peer.acked = peer.acked, None
        on_copy_state(self, order)
        peer.acked = acked

    patch.setattr(StateSender, "on_copy_state", broken)


def forgets_what_a_copy_holds_back(patch: Patch) -> None:
    adopt = Replica.adopt
    patch.setattr(Replica, "adopt", lambda self, state: adopt(self, state | {"marks": []}))


# ---- order


def orders_without_end(patch: Patch) -> None:
    """Order steps however far the other replicas are behind."""
    patch.setattr(Replica, "held_back", property(lambda self: False))


def heeds_orders_for_another_life(patch: Patch) -> None:
    on_orders = flux.replica.order_exchange.OrderExchange.on_orders

    def broken(self: Any, message: Any) -> Any:
        items = []
        for item in message.items:
            replica = self._replicas.get((item.stage, item.partition))
            items.append(item if replica is None else replace(item, incarnation=replica.incarnation))
        return on_orders(self, replace(message, items=items))

    patch.setattr(flux.replica.order_exchange.OrderExchange, "on_orders", broken)


def never_reports_a_divergence(patch: Patch) -> None:
    on_seen = flux.replica.order_exchange.on_seen

    def broken(*given: Any) -> Any:
        return [report for report in on_seen(*given) if not isinstance(report, flux.replica.order_exchange.Diverged)]

    patch.setattr(flux.replica.order_exchange, "on_seen", broken)


# ---- the controller


def who_joins_need_not_confirm(patch: Patch) -> None:
    """Begin an addition before workers that have joined since its table go by that table."""
    is_confirmed = Board.is_confirmed

    def broken(self: Board, epoch: int) -> bool:
        new = [member for member in self.members.processes if member.epoch < 0 and not member.left]
        for member in new:
            member.left = True
        confirmed = is_confirmed(self, epoch)
        for member in new:
            member.left = False
        return confirmed

    patch.setattr(Board, "is_confirmed", broken)


def additions_outlive_their_primary(patch: Patch) -> None:
    """Let the addition of a lost primary go on with its successor."""
    without_worker = controller.decide.losses.without_worker

    def broken(table: Table, worker: int, *given: Any) -> Any:
        changed, lost = without_worker(table, worker, *given)
        stages = []
        for stage, rows in enumerate(changed.stages):
            stages.append(
                tuple(
                    (
                        *replicas,
                        *(r for r in table.stages[stage][p] if replicas and r.worker != worker and r not in replicas),
                    )
                    for p, replicas in enumerate(rows)
                )
            )
        return Table(changed.epoch, tuple(stages), changed.sources, changed.endpoints), lost

    patch.setattr(controller.decide.losses, "without_worker", broken)


def keeps_who_stands_still(patch: Patch) -> None:
    """Keep replicas that apply nothing."""
    patch.setattr(Sweep, "drop_standing", lambda *given: None)


# ---- divergences, pulses, tasks of workers


def keeps_who_diverges(patch: Patch) -> None:
    """Report a divergence as an event, and do nothing else."""

    def broken(self: Sweep, message: Any, now: float) -> None:
        if self.board.table is not None:
            self.repairs.note_divergence(message, self.board.table, now)

    patch.setattr(Sweep, "diverged", broken)


def rebuilds_without_end(patch: Patch) -> None:
    """Rebuild replicas of a partition however often they diverge."""
    patch.setattr(AdditionTracker, "too_divergent", lambda self: None)


def ends_with_the_first_divergence(patch: Patch) -> None:
    patch.setattr(controller.replicas.addition_tracker, "DIVERGENCES_MAX", 0)


def pulses_are_no_sign_of_life(patch: Patch) -> None:
    patch.setattr(Controller, "on_pulse", lambda *given: [])


def a_step_may_take_for_ever(patch: Patch) -> None:
    on_pulse = Controller.on_pulse

    def broken(self: Controller, worker: int, pulse: Any, now: float) -> Any:
        effects = on_pulse(self, worker, pulse, now)
        member = self.members.workers.get(worker)
        if member is not None:
            member.turned = now
            member.heard = now
        return effects

    patch.setattr(Controller, "on_pulse", broken)


def a_long_step_counts_from_the_one_before(patch: Patch) -> None:
    """Count the time of a long step from the step before: a turn of the loop between the two is not noticed."""
    on_pulse = Controller.on_pulse

    def broken(self: Controller, worker: int, pulse: Any, now: float) -> Any:
        member = self.members.workers.get(worker)
        turned = None if member is None else member.turned
        effects = on_pulse(self, worker, pulse, now)
        if member is not None and turned is not None and pulse.busy:
            member.heard, member.turned = now, turned
        return effects

    patch.setattr(Controller, "on_pulse", broken)


def a_second_attempt_takes_over_at_once(patch: Patch) -> None:
    """Let a second attempt take over at once, though the first is alive."""
    patch.setattr(controller.decide.registration, "ALIVE_S", -1.0)


def closed_slots_are_opened_again(patch: Patch) -> None:
    grow = Slots.grow

    def broken(self: Slots, workers: int) -> None:
        for slot in sorted(self.closed):
            if len(self.open) < workers:
                self.closed.discard(slot)
        grow(self, workers)

    patch.setattr(Slots, "grow", broken)


def the_end_of_any_task_ends_the_query(patch: Patch) -> None:
    """End the query with the end of any task, also in a closed slot."""
    on_tasks_ended = DriverEvents.on_tasks_ended

    def broken(self: DriverEvents, slots: Any, what: str, reason: str) -> Any:
        closed, self._slots.closed = self._slots.closed, set()
        try:
            return on_tasks_ended(self, slots, what, reason)
        finally:
            self._slots.closed = closed

    patch.setattr(DriverEvents, "on_tasks_ended", broken)


# ---- fetching of output


def hands_on_again_what_was_fetched(patch: Patch) -> None:
    """Hand on all of an output that moves to another worker, with the part that was fetched before."""

    def broken(self: OutputFetch) -> Any:
        self._locate()
        while True:
            remote = RemoteFile(self)
            try:
                with pa.ipc.open_stream(pa.PythonFile(remote, mode="r")) as reader:
                    yield from reader
                return
            except OSError:
                if not remote.moved:
                    raise

    patch.setattr(OutputFetch, "batches", broken)


def asks_who_was_lost(patch: Patch) -> None:
    """Ask the controller once only for the worker that has the output."""
    locate = OutputFetch._locate
    patch.setattr(OutputFetch, "_locate", lambda self: self._table is None and locate(self))


def says_the_last_word_once(patch: Patch) -> None:
    """Stop asking about a part that is over: the last word of the reader is said once, and may be lost."""
    asks = OutputPull.asks

    def broken(self: OutputPull, now: float) -> Iterator[PullQuestion]:
        for part in self.parts.values():
            if self._is_over(part):
                part.again_at = math.inf
        yield from asks(self, now)

    patch.setattr(OutputPull, "asks", broken)
