"""Deliberately broken variants of the exchange, and the laws that show it (design: variants).

Each takes away one rule. ``VARIANTS`` lists the laws that may be broken then, and the faults under which that happens soon;
``seeds.json`` holds the seeds that show it, and ``make seeds`` looks for them anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from controller.replicas.addition_tracker import AdditionTracker
from controller.replicas.membership import Membership
from controller.replicas.replica_safety import ReplicaSafety
from flux.exchange.inbound import Inbound
from flux.exchange.log import NEVER, Log
from flux.exchange.producer import Producer
from flux.operators.operator import Operator
from flux.replica.order_exchange import OrderExchange
from flux.replica.order_log import OrderLog, Peer
from flux.replica.replica import Replica
from flux.replica.step_queue import StepQueue
from flux.replica.user_code_guard import UserCodeGuard
from flux.worker.core import WorkerCore
from flux.worker.effects import LOCAL
from flux.worker.replica_lifecycle import ReplicaLifecycle
from flux.worker.subscriptions import Subscriptions
from partitioning.clustering import Clustering
from tests.simulation import broken_batches as batches
from tests.simulation import broken_event_time as times
from tests.simulation import broken_feeds as feeds
from tests.simulation import broken_growing as growing
from tests.simulation import broken_lives as lives
from tests.simulation import broken_marks as marks
from tests.simulation import broken_moves as moves
from tests.simulation import broken_numbers as numbers
from tests.simulation import broken_protects as protects
from tests.simulation import broken_relations as relations
from tests.simulation import broken_requests as asked
from tests.simulation import broken_rules as rules
from tests.simulation import broken_runs as runs
from tests.simulation import broken_standbys as standbys
from tests.simulation import broken_tables as tables
from tests.simulation import broken_witnesses as witnesses
from tests.simulation.alignment import FOR_NOTHING, RUNS_AWAY
from tests.simulation.event_time_laws import AGREE, ANSWER, COMES, FALLS, HOLDS, IN_FRONT, LATE, VERSIONS
from tests.simulation.feed_laws import BUDGET, DECIDED, LISTED, NOT_READ, OF_LOSSES
from tests.simulation.growing_laws import ALIKE as BEGINS_ALIKE
from tests.simulation.growing_laws import EXACT, FED, SHARES, STORED
from tests.simulation.known_seeds import OF_VARIANTS
from tests.simulation.mixes import (
    AHEAD_FAULTLESS,
    AHEAD_LIVES,
    AHEAD_REPAIRS,
    ANEW,
    ANEW_FAILING,
    ANY,
    BOUNDED,
    BUSY,
    BUSY_LIVES_OF_ONE,
    BUSY_STANDBYS,
    CHANGES,
    CONTROL,
    CUT_ALONE_OF_ONE,
    CUT_ALONE_OF_READERS,
    CUT_APART_OF_READERS,
    CUT_LINKS,
    CUT_LINKS_OF_READERS,
    DEPOSED,
    DIVERGING,
    EVENT_TIME,
    EVENT_TIME_FAULTLESS,
    EVENT_TIME_LIVES,
    EVENT_TIME_LIVES_OF_ONE,
    EVENT_TIME_STANDBYS,
    EVENT_TIME_UNEVEN,
    FAILING_LIVES,
    FAULTLESS,
    FEEDS,
    FEEDS_OF_THREE,
    FEEDS_REPAIRS,
    FEEDS_UNEVEN,
    FETCHED,
    GOING_ON_LIVES,
    GROWING,
    GROWING_SOURCES,
    LATE_ATTEMPTS,
    LIVES,
    LIVES_OF_ONE,
    LOOKUPS_UNEVEN,
    LOSING_LIVES,
    MANY_DIVERGENCES,
    MARKS_UNEVEN,
    NUMBERED,
    NUMBERED_LIVES,
    OLD_ACKS,
    PROTECTED,
    RECKLESS_LIVES_OF_ONE,
    RELATED_FAULTLESS,
    REPAIRS,
    RIVALS,
    STANDBY_REPAIRS,
    STANDBYS,
    STANDING,
    STORM,
    STORM_AT_THE_END,
    TABLES,
    UNEVEN,
    UNREACHED,
    UNREACHED_AMONG_CRASHES,
    WAITING,
    WIDE_FAULTLESS,
    WITNESSED,
    Mix,
)  # fmt: skip
from tests.simulation.outside import AHEAD_OF_ALL
from tests.simulation.reach_laws import FOLLOWS, GOES_ON, HAS_ROWS, RELAYED, SAFE
from tests.simulation.timed_kinds import LEFT_OUT
from tests.simulation.timed_relations import ONCE_IN

Patch = pytest.MonkeyPatch
#: Laws that a row breaks which is lost, doubled or out of order.
ROWS = {
    "each partition applies each batch once and in order",
    "order within a stream",
    "every row counted once at the sink",
    "no unhandled exception",
}
OWN = {"state machines keep their invariants"}
STILL = {"no stream stands still"}
STUCK = {"every run comes to its end"} | STILL
ACKED = {"an ack never exceeds what was applied", "no batch leaves the log before it is applied"}
KEPT = {"no batch leaves the log before it is in the checkpoints"}
COMMITTED = {"nothing is given out before it is committed"}
#: Laws that break when replicas go different ways. A replica that repeats steps may notice it, too, and end the query.
ALIKE = ROWS | {"replicas take the same steps", "equal sequences are equal batches", "replicas agree", "no run fails"}

#: Laws that break when a watermark does not hold for all rows behind it.
BELOW = {HOLDS, LEFT_OUT, ANSWER}


# ---- the variants


def acks_before_it_applies(patch: Patch) -> None:
    """Ack the rows received, and not the rows applied."""
    ack = Inbound.ack

    def broken(self: Inbound, *given: Any) -> Any:
        waiting, self.waiting = self.waiting, {}
        try:
            return ack(self, *given)
        finally:
            self.waiting = waiting

    patch.setattr(Inbound, "ack", broken)


def never_returns_credit(patch: Patch) -> None:
    """Count applied rows as held for ever. (If only one connection forgot them, the next handshake would mend it.)"""
    applied = Inbound.applied

    def broken(self: Inbound, *given: Any) -> bool:
        held = self.held_bytes
        urgent = applied(self, *given)
        self.held_bytes = held
        return urgent

    patch.setattr(Inbound, "applied", broken)


def sends_without_credit(patch: Patch) -> None:
    """Let a producer send beyond its granted credit."""
    data = Producer._data

    def broken(self: Producer, worker: int, cursor: Any, now: float) -> Any:
        cursor.granted = 1 << 60
        return data(self, worker, cursor, now)

    patch.setattr(Producer, "_data", broken)


def appends_to_a_full_log(patch: Patch) -> None:
    """Ignore back-pressure."""
    patch.setattr(Log, "_fits", lambda self: True)


def room_is_told_once(patch: Patch) -> None:
    """Let a log that drains tell its owner so only the first time. The log does not check its own flag either, so that only the
    law about progress can see it."""
    note = Log._note_room

    def broken(self: Log) -> None:
        if self.has_room or not getattr(self, "told", False):
            self.told = not self.has_room or getattr(self, "told", False)  # type: ignore[attr-defined]
            note(self)

    patch.setattr(Log, "_note_room", broken)
    patch.setattr(Log, "validate", lambda self: None)


def overlooks_gaps(patch: Patch) -> None:
    """Let a consumer overlook that a message is missing."""
    take = Inbound.take

    def broken(self: Inbound, message: Any, *given: Any) -> Any:
        return take(self, msgspec.structs.replace(message, number=self.feed.number, first=0), *given)

    patch.setattr(Inbound, "take", broken)


def never_greets_again(patch: Patch) -> None:
    """Let a producer wait for ever for a lost ack."""
    patch.setattr(Producer, "_silent", lambda self, cursor, now: False)


def greets_again_much_too_late(patch: Patch) -> None:
    """Give a silent consumer minutes for its answer."""
    silent = Producer._silent

    def broken(self: Producer, cursor: Any, now: float) -> bool:
        return silent(self, cursor, now - 100.0)

    patch.setattr(Producer, "_silent", broken)


def resumes_one_too_far(patch: Patch) -> None:
    """Let a consumer ask for the batch after the one that it needs."""
    resume = Inbound.resume

    def broken(self: Inbound, *given: Any) -> Any:
        message = resume(self, *given)
        if self.feed.connection == LOCAL:
            return message  # a worker that talks to itself would not come to an end
        return msgspec.structs.replace(message, next=[(partition, needed + 1) for partition, needed in message.next])

    patch.setattr(Inbound, "resume", broken)


def finishes_with_the_first_stream(patch: Patch) -> None:
    """Take the end of one stream for the end of a stage's input."""
    patch.setattr(StepQueue, "all_ended", property(lambda self: any(self.ended.values())))


def applies_the_newest_first(patch: Patch) -> None:
    add = StepQueue.add

    def broken(self: StepQueue, slice_: Any) -> None:
        add(self, slice_)
        self.by_stream[slice_.stream].rotate(1)

    patch.setattr(StepQueue, "add", broken)


def sends_a_key_to_two_partitions(patch: Patch) -> None:
    def broken(self: Clustering, batch: Any, order: Any = None) -> Any:
        return self.whole(batch, batch.num_rows % self.partitions)

    patch.setattr(Clustering, "by_key", broken)


# ---- variants of the rules that keep replicas alike


def sends_before_it_is_committed(patch: Patch) -> None:
    """Leave the release rule out."""
    release = Replica.release

    def broken(self: Replica) -> None:
        release(self)
        for outlet in self.outlets:
            outlet.producer.release_from = NEVER

    patch.setattr(Replica, "release", broken)


def reports_the_end_before_it_is_committed(patch: Patch) -> None:
    patch.setattr(Replica, "complete", property(lambda self: self.finished))


def applies_what_is_not_committed(patch: Patch) -> None:
    """Let a secondary apply steps as soon as it hears of them."""
    ready = Replica.ready

    def broken(self: Replica, now: float) -> bool:
        committed, self.order.committed = self.order.committed, self.order.end
        try:
            return ready(self, now)
        finally:
            self.order.committed = committed

    follow = OrderExchange._follow

    def wakes(self: OrderExchange, replica: Replica, item: Any) -> bool:
        self._wake((item.stage, item.partition))
        return follow(self, replica, item)

    patch.setattr(Replica, "ready", broken)
    patch.setattr(OrderExchange, "_follow", wakes)


def heeds_a_deposed_primary(patch: Patch) -> None:
    """Accept orders without comparing the terms of primaries."""
    on_orders = OrderLog.on_orders
    patch.setattr(OrderLog, "on_orders", lambda self, term, *given: on_orders(self, max(term, self.term), *given))


def acks_what_an_earlier_primary_sent(patch: Patch) -> None:
    """Let a secondary take its whole log for the part shared with the new primary."""
    on_orders = OrderLog.on_orders

    def broken(self: OrderLog, *given: Any) -> bool:
        good = on_orders(self, *given)
        self.verified = self.end
        return good

    patch.setattr(OrderLog, "on_orders", broken)


def copies_before_producers_retain(patch: Patch) -> None:
    """Order the copy as soon as the new replica is listed."""
    patch.setattr(
        AdditionTracker, "confirmed", lambda self, _: [a for a in self.under_way.values() if a.phase == "retain"]
    )


def acks_for_a_state_that_has_not_come(patch: Patch) -> None:
    patch.setattr(Subscriptions, "_not_reading", lambda self, stream: [])


def counts_on_a_replica_before_it_is_safe(patch: Patch) -> None:
    """Take live replicas for safe ones."""
    patch.setattr(ReplicaSafety, "is_safe", lambda self, stage, partition, replica: replica.live)


def forgets_the_order_in_the_copy(patch: Patch) -> None:
    """Leave the steps ordered but not yet applied out of a copy, while the primary believes that they are in it."""
    adopt = OrderLog.adopt
    patch.setattr(OrderLog, "adopt", lambda self, entries, committed: adopt(self, [], committed))
    note_copy = OrderLog.note_copy

    def broken(self: OrderLog, worker: int, applied: int) -> None:
        note_copy(self, worker, applied)
        self.peers[worker].acked = self.peers[worker].sent = self.end

    patch.setattr(OrderLog, "note_copy", broken)


def sends_orders_only_once(patch: Patch) -> None:
    patch.setattr(Peer, "overdue", lambda *given: False)


def asks_anew_for_nothing(patch: Patch) -> None:
    """Let a new replica ask the producers for no rows."""
    patch.setattr(Subscriptions, "_ask_again", lambda *given: None)


def resumes_without_a_nonce(patch: Patch) -> None:
    """Take data of an earlier handshake for an answer to the newest."""
    take = Inbound.take

    def broken(self: Inbound, message: Any, *given: Any) -> Any:
        if message.nonce == self.feed.nonce:
            return take(self, message, *given)
        return take(self, msgspec.structs.replace(message, nonce=self.feed.nonce, number=self.feed.number), *given)

    patch.setattr(Inbound, "take", broken)


def waits_for_rows_for_ever(patch: Patch) -> None:
    """Neither look elsewhere for rows of an ordered step nor raise the credit for them."""
    patch.setattr(Subscriptions, "relieve", lambda *given: None)


def says_nothing_again_on_a_new_connection(patch: Patch) -> None:
    """Repeat no reports on a new connection, although earlier ones may have been lost with the old one."""
    patch.setattr(WorkerCore, "report_again", lambda self: None)


def never_goes_over_to_a_survivor(patch: Patch) -> None:
    patch.setattr(Subscriptions, "_choose_replicas_to_read", lambda self, changed: None)


def waits_for_ingress_that_has_left(patch: Patch) -> None:
    """Wait for an ingress attempt that came after the work was done, and died."""
    admit = Membership.admit

    def broken(self: Membership, *given: Any) -> Any:
        member = admit(self, *given)
        member.left = False
        return member

    patch.setattr(Membership, "admit", broken)


def repairs_everything_at_once(patch: Patch) -> None:
    """Repair a stage without waiting for the stages before it."""
    due = AdditionTracker.due

    def broken(self: AdditionTracker, *given: Any) -> Any:
        under_way, self.under_way = self.under_way, {}
        try:
            wanted = due(self, *given)
        finally:
            self.under_way = under_way
        return [each for each in wanted if each.key not in under_way]

    patch.setattr(AdditionTracker, "due", broken)


def never_repairs(patch: Patch) -> None:
    patch.setattr(AdditionTracker, "to_ask", lambda self, now: [])


def everybody_leads(patch: Patch) -> None:
    """Let each live replica take itself for the primary."""

    def broken(self: ReplicaLifecycle, replica: Replica, row: Any, epoch: int) -> None:
        replica.lead(epoch, [other for other in row if other.worker != self._hosted.worker])

    patch.setattr(ReplicaLifecycle, "_assign_role", broken)


def follows_in_its_own_order(patch: Patch) -> None:
    """Let a secondary apply the slices of a step in its own order."""
    take = StepQueue.take
    patch.setattr(StepQueue, "take", lambda self, entry: sorted(take(self, entry), key=lambda s: -s.sequence))


def leaves_the_state_out_of_the_copy(patch: Patch) -> None:
    patch.setattr(UserCodeGuard, "restore", lambda *given: None)


def takes_no_attributes_for_state(patch: Patch) -> None:
    """Save no state of an operator that defines no snapshot, as in earlier versions."""
    patch.setattr(Operator, "snapshot", lambda operator: None)


@dataclass(frozen=True)
class Variant:
    """A variant of the product without one rule."""

    break_it: Callable[[Patch], None]
    #: The laws that may be broken, and no others.
    laws: frozenset[str] | set[str]
    #: The faults under which a law breaks soon.
    mix: Mix = ANY
    #: A word to tell two variants of one rule apart.
    case: str = ""

    @property
    def name(self) -> str:
        return self.break_it.__name__

    @property
    def key(self) -> str:
        """The name in ``seeds.json``."""
        return f"{self.name} ({self.case})" if self.case else self.name

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of the file that show the variant; none for a new one."""
        return tuple(OF_VARIANTS.get(self.key, ()))


VARIANTS = [
    Variant(rules.accepts_duplicates, ROWS),
    Variant(acks_before_it_applies, {"an ack never exceeds what was applied"}),
    Variant(rules.evicts_when_one_has_acked, {"no batch leaves the log before it is applied"}),
    Variant(never_returns_credit, STUCK | {"logs and queues drain"}),
    Variant(sends_without_credit, {"bytes held <= credit + one message"}),
    Variant(appends_to_a_full_log, {"log bytes <= bound + one batch"}),
    Variant(room_is_told_once, STUCK),
    Variant(overlooks_gaps, ROWS | ACKED),
    Variant(never_greets_again, STUCK),
    Variant(greets_again_much_too_late, STILL, UNEVEN),
    Variant(resumes_one_too_far, ROWS | STUCK),
    Variant(finishes_with_the_first_stream, ROWS | STUCK | {"logs and queues drain"}),
    Variant(applies_the_newest_first, ROWS),
    Variant(sends_a_key_to_two_partitions, {"one partition per key"}),
    Variant(numbers.believes_every_retry, ROWS | STUCK),
    Variant(sends_before_it_is_committed, COMMITTED),
    Variant(reports_the_end_before_it_is_committed, COMMITTED),
    Variant(applies_what_is_not_committed, {"a secondary applies committed steps only"}),
    Variant(everybody_leads, {"one primary per partition and epoch"}),
    Variant(follows_in_its_own_order, ALIKE),
    Variant(heeds_a_deposed_primary, COMMITTED | ALIKE, DEPOSED),
    Variant(copies_before_producers_retain, ROWS | STUCK | ACKED, OLD_ACKS),
    Variant(acks_for_a_state_that_has_not_come, {"nothing is acked before the state has come"}),
    Variant(leaves_the_state_out_of_the_copy, ALIKE | STUCK, REPAIRS),
    Variant(takes_no_attributes_for_state, ROWS | ALIKE | STUCK, REPAIRS),
    Variant(counts_on_a_replica_before_it_is_safe, COMMITTED | ALIKE | STUCK),
    Variant(forgets_the_order_in_the_copy, COMMITTED | ALIKE | STUCK, WAITING),
    Variant(sends_orders_only_once, STUCK),
    Variant(rules.forgets_what_a_copy_holds_back, COMMITTED, UNEVEN),
    Variant(rules.additions_outlive_their_primary, COMMITTED | ALIKE | STUCK, UNEVEN),
    Variant(asks_anew_for_nothing, ROWS | STUCK | ACKED),
    Variant(resumes_without_a_nonce, ROWS | STUCK | ACKED, REPAIRS),
    Variant(waits_for_rows_for_ever, STUCK, FAULTLESS),
    Variant(rules.orders_without_end, {"order logs stay within their bound"}, BOUNDED),
    Variant(rules.secondaries_hold_credit_for_ever, STUCK),
    Variant(says_nothing_again_on_a_new_connection, STUCK, CONTROL),
    Variant(never_goes_over_to_a_survivor, STUCK),
    Variant(waits_for_ingress_that_has_left, STUCK, LATE_ATTEMPTS),
    Variant(repairs_everything_at_once, {"the sweep goes stage by stage"}),
    Variant(batches.copies_a_batch_at_once, {"copies at a time are limited"}),
    Variant(never_repairs, STUCK),
    Variant(moves.drops_the_source_before_the_target_is_safe, {"no move costs a safe replica"}),
    Variant(moves.the_target_leads_before_it_is_safe, {"a primary is safe"}),
    Variant(moves.who_leaves_gets_new_replicas, {"a leaving worker gets nothing new"}),
    Variant(moves.a_target_stays_beside_a_source_on_its_own_executor, {"copies are on different executors"}),
    Variant(moves.a_move_is_forgotten_when_its_target_is_lost, {"every move ends"}),
    Variant(rules.hands_on_again_what_was_fetched, {"every row counted once at the sink"}, FETCHED),
    Variant(rules.asks_who_was_lost, {"no unhandled exception"}, FETCHED),
    Variant(rules.never_reports_a_divergence, {"a divergence is noticed"}, DIVERGING),
    Variant(rules.keeps_who_stands_still, {"who stands still is dropped"}, STANDING),
    Variant(rules.keeps_who_diverges, {"a diverging replica is dropped"}, DIVERGING),
    Variant(rules.rebuilds_without_end, {"four divergences end the query"}, MANY_DIVERGENCES),
    Variant(rules.ends_with_the_first_divergence, {"four divergences end the query"}, DIVERGING),
    Variant(rules.pulses_are_no_sign_of_life, {"a pulsing worker is not given up"}, BUSY),
    Variant(rules.a_step_may_take_for_ever, {"a step beyond step.timeout is given up"}, BUSY),
    Variant(rules.a_long_step_counts_from_the_one_before, {"a pulsing worker is not given up"}, BUSY),
    Variant(rules.a_second_attempt_takes_over_at_once, {"a second attempt waits"}, RIVALS),
    Variant(rules.closed_slots_are_opened_again, {"a closed slot stays closed"}, RIVALS),
    Variant(rules.the_end_of_any_task_ends_the_query, {"no run fails"}, RIVALS),
    Variant(witnesses.witnesses_may_lead, {"a witness never leads"}, WITNESSED),
    Variant(witnesses.witnesses_count_as_safe, {"no unhandled exception"}, WITNESSED),
    Variant(witnesses.commits_without_its_witness, COMMITTED, WITNESSED),
    Variant(witnesses.waits_for_acks_of_a_witness, STUCK, WITNESSED),
    Variant(witnesses.waits_for_a_witness_to_be_copied, STUCK, WITNESSED),
    Variant(standbys.acks_what_is_ordered, KEPT, STANDBYS),
    Variant(standbys.takes_checkpoints_before_they_are_committed, ALIKE | COMMITTED | OWN, STANDBYS),
    Variant(standbys.keeps_checkpoints_of_earlier_terms, OWN, STANDBYS),
    Variant(standbys.checkpoints_have_no_output, ROWS | STUCK, STANDBY_REPAIRS),
    Variant(standbys.sends_the_changes_of_the_newest_cut_alone, ALIKE, CHANGES),
    Variant(standbys.applies_changes_to_the_checkpoint_before, ALIKE, CHANGES),
    Variant(standbys.keeps_the_newest_changes_alone, ALIKE, CHANGES),
    Variant(standbys.commits_without_standbys, COMMITTED, STANDBYS),
    Variant(
        standbys.takes_the_first_table_that_comes_for_the_first,
        {"each partition applies each batch once and in order"},
    ),
    Variant(standbys.a_standby_is_no_heir_of_a_silent_worker, {"a stopped worker is given up"}, BUSY_STANDBYS),
    Variant(standbys.the_directory_is_no_heir_of_a_silent_worker, {"a stopped worker is given up"}, BUSY_LIVES_OF_ONE),
    Variant(standbys.nobody_presses, STUCK, STANDBY_REPAIRS),
    Variant(standbys.standbys_ack_once, STUCK, STANDBYS),
    Variant(standbys.a_standby_reads_on_without_a_greeting, ROWS | STUCK, STANDBY_REPAIRS),
    Variant(standbys.reads_from_who_does_not_know_all_readers, ROWS | ACKED, LIVES_OF_ONE),
    Variant(lives.answers_before_it_is_durable, ALIKE | COMMITTED | STUCK | {AHEAD_OF_ALL}, LIVES),
    Variant(lives.checkpoints_are_forgotten, ROWS | STUCK | {"order logs stay within their bound"}, LIVES),
    Variant(lives.a_segment_begins_without_earlier_changes, ROWS, LIVES),
    Variant(lives.restores_without_a_fence, ALIKE | COMMITTED | ACKED | KEPT, LIVES_OF_ONE),
    Variant(lives.restores_without_the_order, ALIKE | COMMITTED | {AHEAD_OF_ALL}, LIVES),
    Variant(lives.restores_without_the_order, {AHEAD_OF_ALL}, LIVES, "ahead of all"),
    Variant(lives.begins_again_at_the_first_epoch, ALIKE | STUCK, LIVES),
    Variant(lives.starts_no_task_while_it_waits, STUCK, RECKLESS_LIVES_OF_ONE),
    Variant(protects.drops_the_old_before_the_new_is_safe, {"no move costs a safe replica"}, PROTECTED),
    Variant(protects.drops_more_than_is_too_many, {"no move costs a safe replica"}, PROTECTED),
    Variant(protects.keeps_what_is_too_many, STUCK, PROTECTED),
    Variant(
        protects.a_change_is_over_too_soon,
        {"every wish comes true", "everything is repaired", "no more replicas than asked for"},
        PROTECTED,
    ),
    Variant(asked.a_scale_waits_though_a_worker_was_drained, {"every request ends"}, STORM),
    Variant(asked.requests_outlive_the_query, {"every request ends"}, STORM_AT_THE_END),
    Variant(asked.outcomes_are_looked_at_again, {"an outcome stands"}, STORM),
    Variant(tables.applies_changes_to_any_table, {"a table is what the controller made"}, TABLES),
    Variant(tables.never_asks_for_a_table, STUCK, TABLES),
    Variant(runs.gathers_what_an_order_waits_for, {"a ready replica takes its step"}),
    Variant(runs.takes_runs_whole, ROWS | {"no run fails"}),
    Variant(runs.orders_name_slices, ALIKE),
    Variant(runs.drops_what_is_cut_off, ALIKE),
    Variant(numbers.numbers_rows_anew, ALIKE, NUMBERED_LIVES),
    Variant(numbers.reads_from_the_start_each_time, ALIKE, NUMBERED_LIVES),
    Variant(numbers.counts_rows_of_a_log, ALIKE, LOSING_LIVES),
    Variant(numbers.settles_what_checkpoints_lack, ALIKE | ACKED, LOSING_LIVES),
    Variant(numbers.passes_over_rows_whatever_a_source_says, {"lost records are told"}, FAILING_LIVES),
    Variant(numbers.gives_nothing_for_a_step_without_rows, ALIKE | STUCK, GOING_ON_LIVES),
    Variant(numbers.numbers_a_new_topic_like_the_old_one, ALIKE | STUCK, ANEW),
    Variant(numbers.believes_every_topic_of_the_name, ROWS | {"lost records are told"}, ANEW_FAILING),
    Variant(numbers.cuts_no_numbered_rows, ALIKE, NUMBERED_LIVES),
    Variant(numbers.has_no_room_for_what_was_there, STUCK | STILL, NUMBERED_LIVES),
    Variant(numbers.has_room_only_where_rows_were_there, STUCK | STILL, NUMBERED),
    Variant(rules.waits_for_the_link, {GOES_ON}, CUT_LINKS),
    Variant(rules.lends_nothing, {GOES_ON}, CUT_LINKS_OF_READERS),
    Variant(rules.relays_nothing, {RELAYED}, CUT_ALONE_OF_READERS),
    Variant(rules.answers_relayed_orders_over_the_cut_link, {RELAYED}, CUT_ALONE_OF_READERS),
    Variant(rules.asks_nobody_for_the_acks_of_a_source, {RELAYED}, CUT_ALONE_OF_READERS),
    Variant(rules.lends_nothing_over_a_third_worker, {RELAYED}, CUT_ALONE_OF_READERS),
    Variant(rules.lends_rows_over_the_cut_link, {RELAYED}, CUT_ALONE_OF_READERS),
    Variant(rules.lends_nothing_out_of_a_log, {RELAYED}, CUT_ALONE_OF_ONE),
    Variant(rules.leaves_the_lead_to_a_primary_out_of_reach, {FOLLOWS}, UNREACHED),
    Variant(rules.asks_no_secondary_for_acks, {FOLLOWS}, UNREACHED),
    Variant(rules.lets_a_replica_lead_that_lacks_rows, {HAS_ROWS}, CUT_APART_OF_READERS),
    Variant(rules.lets_any_replica_follow_an_unreached_primary, {SAFE}, UNREACHED_AMONG_CRASHES),
    Variant(rules.says_the_last_word_once, STUCK),
    Variant(rules.keeps_marks_as_if_what_has_come_were_applied, OWN),
    Variant(moves.moves_begin_as_they_were_asked_for, {"moves keep the topological order"}),
    Variant(times.takes_its_own_watermark, ALIKE | {AGREE}, EVENT_TIME_UNEVEN),
    Variant(times.believes_what_others_have_heard, BELOW, EVENT_TIME_LIVES_OF_ONE),
    Variant(times.says_each_watermark_once, {COMES}, EVENT_TIME_UNEVEN),
    Variant(times.states_before_rows_are_ordered, BELOW, EVENT_TIME_UNEVEN),
    Variant(times.reads_again_without_the_newest_time, ALIKE | BELOW | {LATE}, EVENT_TIME),
    Variant(times.states_in_front_of_its_rows, BELOW, EVENT_TIME_UNEVEN),
    Variant(times.begins_below_what_was_ordered, BELOW | {AGREE, FALLS}, EVENT_TIME_STANDBYS),
    Variant(times.takes_silence_for_idleness, BELOW, EVENT_TIME_UNEVEN),
    Variant(times.ended_streams_hold_the_watermark, {COMES}, EVENT_TIME_FAULTLESS),
    Variant(times.hears_statements_behind_lost_messages, BELOW | ACKED, EVENT_TIME_UNEVEN),
    Variant(times.judges_rows_by_the_batch, {LATE}, EVENT_TIME_FAULTLESS),
    Variant(times.inputs_without_watermark_hold_nothing, {LEFT_OUT}, EVENT_TIME_FAULTLESS),
    Variant(times.numbers_what_is_left, ALIKE | {LATE, ANSWER}, EVENT_TIME_LIVES),
    Variant(times.needs_no_rows_of_open_windows, ALIKE | {ANSWER}, EVENT_TIME_STANDBYS),
    Variant(times.reads_again_without_doubted_rows, ALIKE | BELOW | {LATE}, AHEAD_LIVES),
    Variant(times.believes_each_time, {LATE}, AHEAD_FAULTLESS),
    Variant(times.counts_no_batch_without_rows, ALIKE | {COMES}, AHEAD_LIVES),
    Variant(times.rows_go_before_watermarks, {IN_FRONT}, EVENT_TIME_FAULTLESS),
    Variant(times.waits_for_readers_without_a_watermark, {FOR_NOTHING} | STUCK, AHEAD_FAULTLESS),
    Variant(times.takes_waiting_for_idleness, BELOW, AHEAD_FAULTLESS),
    Variant(times.forgets_lost_readers, {RUNS_AWAY}, AHEAD_REPAIRS),
    Variant(relations.drops_rows_by_their_own_watermark, {ANSWER}, RELATED_FAULTLESS),
    Variant(relations.gives_outer_rows_too_early, {ANSWER}, RELATED_FAULTLESS),
    Variant(relations.forgets_keys_with_their_first_rows, {ONCE_IN}, RELATED_FAULTLESS),
    Variant(relations.ranks_equal_rows_by_arrival, {ANSWER}, RELATED_FAULTLESS),
    Variant(relations.gives_matched_rows_alone, {ANSWER}, WIDE_FAULTLESS),
    Variant(relations.joins_with_the_row_that_is_there, {ANSWER}, WIDE_FAULTLESS),
    Variant(marks.gives_results_in_the_order_of_slots, ALIKE, MARKS_UNEVEN),
    Variant(marks.fires_marks_before_all_rows_below_are_applied, ALIKE | BELOW, MARKS_UNEVEN),
    Variant(marks.joins_results_of_all_marks_that_it_jumps_over, ALIKE, MARKS_UNEVEN),
    Variant(feeds.feeds_share_a_number, {OF_LOSSES}, FEEDS_OF_THREE),
    Variant(feeds.repetitions_are_held, STUCK | {"logs and queues drain"}, FEEDS),
    Variant(feeds.keeps_the_feed_of_a_dropped_replica, {LISTED}, FEEDS_REPAIRS),
    Variant(feeds.tells_a_further_feed_that_it_is_not_read, {NOT_READ}, FEEDS_UNEVEN),
    Variant(feeds.races_never_end, {DECIDED}, FEEDS),
    Variant(feeds.repetitions_cost_nothing, {BUDGET}, FEEDS_UNEVEN),
    Variant(relations.takes_the_newest_table, ALIKE | {VERSIONS}, LOOKUPS_UNEVEN),
    Variant(growing.begins_edges_with_the_table, ALIKE | {BEGINS_ALIKE, EXACT}, GROWING),
    Variant(growing.numbers_a_new_edge_by_the_log_beside, ALIKE | STUCK, GROWING),
    Variant(growing.copies_feed_the_edges_of_the_beginning, {FED}, GROWING),
    Variant(growing.shares_the_log_by_the_plan_of_the_day, {SHARES}, GROWING),
    Variant(growing.takes_changes_for_known, {"no unhandled exception"}, GROWING),
    Variant(growing.is_heard_before_it_is_stored, {STORED}, GROWING_SOURCES),
    Variant(growing.each_reader_begins_an_edge_anew, ALIKE | {EXACT}, GROWING_SOURCES),
]

#: Variants that break no law: another rule covers each rule taken away, see docs/design/code.md, redundant-rules. To be tried
#: again by ``tests.simulation.catch`` when one of the covering rules changes.
REDUNDANT = [
    Variant(rules.answers_who_does_not_know_new_replicas, set()),
    Variant(rules.resumes_who_does_not_know_the_new_replica, set()),
    Variant(rules.takes_a_batch_that_skips_others, set()),
    Variant(rules.copies_again_what_has_arrived, set()),
    Variant(rules.heeds_orders_for_another_life, set()),
    Variant(rules.secondaries_hold_credit, set()),
]
