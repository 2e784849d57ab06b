"""The order log told as stories: the decisions of a primary, the entries that others take, and those that survive
it."""

from __future__ import annotations

from flux.replica.order_log import OrderLog
from flux.wire.messages import OrderEntry
from partitioning.table import ReplicaAt

A, B = 11, 12  # workers of the other replicas


def entry(number: int, by: str = "first") -> OrderEntry:
    """Make the entry of step ``number`` as one primary or another decided it."""
    return OrderEntry(1.0, 1.0, [(0, 0 if by == "first" else 1, number)])


def entries(first: int, end: int, by: str = "first") -> list[OrderEntry]:
    return [entry(number, by) for number in range(first, end)]


def leading(*workers: int, steps: int = 0, live: bool = True) -> OrderLog:
    log = OrderLog()
    log.lead([ReplicaAt(worker, 0, live) for worker in workers], 0)
    for number in range(steps):
        log.append(entry(number))
    return log


def following(steps: int = 0, committed: int = 0, term: int = 0) -> OrderLog:
    log = OrderLog()
    log.follow()
    log.on_orders(term, 0, entries(0, steps), committed, 0)
    return log


# ---- the primary


def test_without_another_replica_every_step_is_committed_at_once() -> None:
    assert leading(steps=3).committed == 3


def test_a_step_is_committed_when_every_live_replica_has_received_it() -> None:
    log = leading(A, B, steps=3)
    log.on_seen(A, 0, 3)
    assert log.committed == 0
    log.on_seen(B, 0, 2)
    assert log.committed == 2


def test_who_leads_from_a_copy_knows_that_all_in_it_is_committed() -> None:
    """Count the steps of a copy as committed: the primary would else ask another replica for a step that no replica
    keeps any more."""
    log = OrderLog(7)
    log.adopt([], 6)
    log.lead([ReplicaAt(A, 0)], 7)
    log.validate()
    assert (log.committed, log.peers[A].acked) == (7, 7)


def test_a_replica_that_is_not_live_is_not_waited_for() -> None:
    log = leading(A, steps=2, live=False)
    assert log.committed == 2
    log.lead([ReplicaAt(A, 0, True)], 0)  # it has become live without a copy: nothing more is committed until it acks
    log.append(entry(2))
    assert log.committed == 3  # it has no state yet, so it cannot be asked
    log.note_copy(A, 3)
    log.append(entry(3))
    assert log.committed == 3


def test_the_ack_of_an_earlier_life_on_the_same_worker_does_not_count() -> None:
    log = leading(A, steps=2)
    log.lead([ReplicaAt(A, 7, True)], 0)
    assert not log.on_seen(A, 0, 2)
    assert log.committed == 0
    assert log.on_seen(A, 7, 2)
    assert log.committed == 2


def test_an_ack_beyond_the_log_or_by_a_stranger_changes_nothing() -> None:
    log = leading(A, steps=2)
    log.on_seen(A, 0, 99)
    assert log.committed == 2
    assert not log.on_seen(B, 0, 2)


def test_the_loss_of_a_replica_commits_what_only_it_had_not_acked() -> None:
    log = leading(A, B, steps=4)
    log.on_seen(A, 0, 4)
    log.lead([ReplicaAt(A, 0, True)], 0)
    assert log.committed == 4


def test_entries_stay_until_they_are_applied_and_every_replica_has_them() -> None:
    log = leading(A, steps=5)
    log.trim(applied=5)
    assert (log.base, len(log)) == (0, 5)
    log.on_seen(A, 0, 3)
    log.trim(applied=2)
    assert log.base == 2
    log.trim(applied=5)
    assert (log.base, log.end) == (3, 5)


def test_entries_are_kept_from_the_first_copy_on_because_it_may_be_the_one_that_arrives() -> None:
    log = leading(A, steps=4, live=False)
    log.note_copy(A, 2)
    log.note_copy(A, 4)
    log.trim(applied=4)
    assert log.base == 2
    assert (log.peers[A].sent, log.peers[A].copied_at) == (2, 4)


# ---- a secondary


def test_a_secondary_takes_entries_in_order_and_knows_what_is_committed() -> None:
    log = following(steps=3, committed=2)
    assert (log.end, log.verified, log.committed) == (3, 3, 2)
    log.on_orders(0, 3, entries(3, 5), 4, 0)
    assert (log.end, log.committed) == (5, 4)


def test_a_gap_is_not_taken_and_not_acked() -> None:
    log = following(steps=2)
    assert log.on_orders(0, 4, entries(4, 6), 6, 0)
    assert (log.end, log.verified, log.committed) == (2, 2, 2)


def test_what_is_sent_again_is_taken_once() -> None:
    log = following(steps=3)
    log.on_orders(0, 1, entries(1, 4), 0, 0)
    assert (log.end, log.cut) == (4, 0)


def test_a_primary_of_an_earlier_term_is_deposed() -> None:
    log = following(steps=2, term=5)
    assert not log.on_orders(4, 2, entries(2, 3), 3, 0)
    assert (log.end, log.committed) == (2, 0)


def test_a_new_primary_has_other_entries_and_those_of_the_old_one_are_cut() -> None:
    log = following(steps=5, committed=2)
    log.on_orders(1, 2, entries(2, 4, "second"), 2, 2)
    assert log.since(2) == entries(2, 4, "second")
    assert log.cut == 3
    assert log.verified == 4


def test_what_a_new_primary_has_not_contradicted_is_kept_but_not_acked() -> None:
    """Keep entries that may be committed and known to the outside, because this replica may be the next primary."""
    log = following(steps=5, committed=2)
    log.on_orders(1, 2, [], 2, 2)
    assert (log.end, log.verified) == (5, 2)
    log.on_orders(1, 2, entries(2, 4), 2, 2)
    assert (log.end, log.verified, log.cut) == (5, 4, 0)


def test_after_a_lost_message_of_a_new_primary_the_entries_of_the_old_one_are_not_acked_for_its_own() -> None:
    log = following(steps=5, committed=2)
    # The new primary's entries 2 to 5 are lost on the way. This message comes next.
    log.on_orders(1, 5, entries(5, 6, "second"), 2, 2)
    assert (log.verified, log.committed) == (2, 2)
    log.on_orders(1, 2, entries(2, 6, "second"), 6, 2)
    assert log.since(2) == entries(2, 6, "second")
    assert log.committed == 6


def test_a_new_primary_that_knows_of_more_commits_need_not_send_what_is_committed_again() -> None:
    log = following(steps=5, committed=1)
    log.on_orders(1, 4, entries(4, 6), 4, 1)
    assert (log.verified, log.committed) == (6, 4)


# ---- take-over


def test_the_next_primary_keeps_all_that_it_has_received_and_waits_for_the_acks_of_its_own_term() -> None:
    log = following(steps=5, committed=2)
    log.lead([ReplicaAt(B, 0, True)], applied=2)
    assert (log.end, log.committed) == (5, 2)
    assert (log.peers[B].acked, log.peers[B].sent) == (2, 2)  # everything committed it has for certain
    log.on_seen(B, 0, 5)
    assert log.committed == 5


def test_a_replica_made_of_a_copy_goes_on_with_the_order_that_its_model_had_not_applied() -> None:
    log = OrderLog(3)
    log.adopt(entries(3, 6), committed=2)
    assert (log.base, log.end, log.committed) == (3, 6, 2)
    log.on_orders(4, 3, entries(3, 7), 7, 3)
    assert (log.end, log.verified, log.committed) == (7, 7, 7)
