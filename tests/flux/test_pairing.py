"""The traffic between a primary and the others, told as stories: told at once, again after silence, and no more often."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from flux.replica.kinds import standby
from flux.replica.order_exchange import CATCH_UP_MAX_S, ENTRIES_MAX, PROBE_S, CaughtUp, Diverged, on_seen, outgoing
from flux.replica.order_log import OrderLog
from flux.wire.messages import OrderEntry, PartitionOrder, PartitionSeen
from partitioning.table import ReplicaAt

AGAIN_S = 0.1
A, B = 11, 12


class Primary(SimpleNamespace):
    """A primary with no more parts than pairing looks at. ``checksums[n]`` is that of the output of the first n
    steps."""

    def __init__(self, peers: dict[int, tuple[int, bool]], steps: int = 0) -> None:
        order = OrderLog()
        order.lead([ReplicaAt(worker, *peer) for worker, peer in peers.items()], 0)
        super().__init__(
            stage=SimpleNamespace(id=2), partition=3, incarnation=0, leads_since=9, order=order, checksums={},
            held_back=False, step_s=0.5, gone=[], steady=True,
        )  # fmt: skip
        self.output = SimpleNamespace(exit=None, compared=True, checksums=Checksums(self))
        self.decide(steps)

    def decide(self, steps: int) -> None:
        for _ in range(steps):
            self.order.append(OrderEntry(0.0, 0.0, [(0, 0, self.order.end)]))

    @property
    def applied(self) -> int:
        return self.order.end


class Checksums:
    """The steps that a test has given to a primary."""

    def __init__(self, primary: Primary) -> None:
        self._primary = primary

    @property
    def steps(self) -> int:
        return max(self._primary.checksums, default=0)

    def at(self, applied: int) -> int | None:
        found: int | None = self._primary.checksums.get(applied)
        return found


def paired(steps: int = 0, live: bool = True) -> Primary:
    return Primary({A: (0, live)}, steps)


def told(replica: Any, now: float = 0.0) -> list[tuple[int, int, int]]:
    """Return (first, end, committed) of the orders that go to A."""
    items: list[PartitionOrder] = outgoing([replica], now, AGAIN_S).get(A, [])
    return [(item.first, item.first + len(item.entries), item.committed) for item in items]


def answer(replica: Any, below: int, applied: int = 0, **more: Any) -> list[CaughtUp | Diverged]:
    given = {"term": 9, "incarnation": 0, "checked": 0, "checksum": 0, "now": 0.0, **more}
    seen = PartitionSeen(2, 3, given["incarnation"], given["term"], below, applied, given["checked"], given["checksum"])
    return list(on_seen(replica, A, seen, given["now"]))


def test_new_entries_go_out_once_and_commits_with_them_or_after_them() -> None:
    primary = paired(steps=2)
    assert told(primary) == [(0, 2, 0)]
    assert told(primary) == []
    answer(primary, below=2)
    assert told(primary) == [(2, 2, 2)]  # nothing new but that these are committed
    assert told(primary) == []


def test_an_ack_that_crosses_with_newer_entries_sends_nothing_again() -> None:
    primary = paired(steps=2)
    told(primary)
    primary.decide(2)
    told(primary)
    answer(primary, below=2)
    assert [first for first, _, _ in told(primary)] == [4]


def test_the_only_secondary_holds_for_committed_what_it_receives_once_it_has_answered() -> None:
    primary = paired(steps=2)
    assert told(primary) == [(0, 2, 0)], "it may still have other entries, of an earlier term"
    answer(primary, below=2)
    primary.decide(3)
    assert told(primary) == [(2, 5, 5)]
    assert primary.order.committed == 2, "here it is committed when the answer has come"


def test_one_of_two_secondaries_has_to_be_told_what_is_committed() -> None:
    primary = Primary({A: (0, True), B: (0, True)}, steps=2)
    told(primary)
    answer(primary, below=2)
    primary.decide(1)
    assert told(primary) == [(2, 3, 0)]


def test_what_is_promised_to_a_replica_itself_does_not_keep_it_from_being_safe() -> None:
    primary = paired(steps=1)
    told(primary)
    reports = []
    for step in range(1, 6):  # there is always a step on its way
        primary.decide(1)
        told(primary)
        reports += answer(primary, below=step)
    assert [report.safe for report in reports] == [True]


def test_what_was_promised_to_a_replica_that_is_gone_is_still_needed() -> None:
    primary = paired(steps=1)
    told(primary)
    answer(primary, below=1)
    primary.decide(1)
    told(primary)  # A may have shown step 1 to the outside
    primary.order.lead([ReplicaAt(B, 5, False)], 0)
    primary.order.note_copy(B, 1)
    primary.order.note_copy_arrived(B)
    primary.order.lead([ReplicaAt(B, 5, True)], 0)
    seen = [PartitionSeen(2, 3, 5, 9, below, 1, 0, 0) for below in (1, 2)]
    assert [[report.safe for report in on_seen(primary, B, one, 0.0)] for one in seen] == [[], [True]]


def test_another_replica_is_not_safe_before_it_has_what_the_only_one_may_hold_for_committed() -> None:
    primary = paired(steps=1)
    told(primary)
    answer(primary, below=1)
    primary.decide(1)
    assert told(primary) == [(1, 2, 2)]  # on its way to A, which may show its output to the outside
    primary.order.lead([ReplicaAt(A, 0, True), ReplicaAt(B, 5, True)], 0)
    primary.order.note_copy(B, 1)
    primary.order.note_copy_arrived(B)

    def b(below: int) -> list[Any]:
        return list(on_seen(primary, B, PartitionSeen(2, 3, 5, 9, below, 1, 0, 0), 0.0))

    assert b(below=1) == [], "it lacks step 1, which A may have shown"
    assert [report.safe for report in b(below=2)] == [True]


def test_what_is_not_answered_goes_out_again_also_while_there_is_always_something_new() -> None:
    primary = paired(steps=1)
    told(primary)
    again = []
    for turn in range(1, 30):  # the first message was lost: the replica answers that it has nothing
        primary.decide(1)
        again += [first for first, _, _ in told(primary, turn * 0.01) if first == 0]
        answer(primary, below=0)
    assert len(again) == 2, "once per interval"


def test_a_replica_that_has_everything_is_left_in_peace() -> None:
    primary = paired(steps=1)
    told(primary)
    answer(primary, below=1, applied=1)
    told(primary)
    answer(primary, below=1, applied=1)
    assert [told(primary, now) for now in (1.0, 2.0, 3.0)] == [[], [], []]


def test_a_replica_that_does_not_apply_what_is_committed_is_told_again_that_it_is() -> None:
    primary = paired(steps=1)
    told(primary)
    answer(primary, below=1)
    told(primary)
    assert told(primary, AGAIN_S) == [(1, 1, 1)]


def test_many_entries_go_out_in_pieces() -> None:
    primary = paired(steps=ENTRIES_MAX + 5)
    assert told(primary) == [(0, ENTRIES_MAX, 0)]
    assert told(primary) == [(ENTRIES_MAX, ENTRIES_MAX + 5, 0)]


def test_a_replica_without_a_state_is_told_nothing() -> None:
    assert told(paired(steps=3, live=False)) == []


def test_orders_for_a_new_replica_wait_for_its_state() -> None:
    primary = paired(steps=3, live=False)
    primary.order.note_copy(A, 2)
    assert told(primary) == []
    assert not primary.order.untold
    primary.order.note_copy_arrived(A)
    assert primary.order.untold
    assert told(primary) == [(2, 3, 3)]


def test_an_answer_to_another_primary_or_of_another_life_does_not_count() -> None:
    primary = paired(steps=2)
    told(primary)
    answer(primary, below=2, term=8)
    answer(primary, below=2, incarnation=4)
    assert primary.order.committed == 0


def being_added(steps: int, copied_at: int) -> Primary:
    primary = paired(steps, live=False)
    primary.order.note_copy(A, copied_at)
    primary.order.note_copy_arrived(A)
    told(primary)
    return primary


def test_a_new_replica_has_caught_up_when_it_has_applied_what_was_committed_and_this_is_said_once() -> None:
    """Wait for committed steps: the replica may have to lead at once, and then the outside waits for those not yet
    applied."""
    primary = being_added(steps=3, copied_at=2)
    assert answer(primary, below=2, applied=2) == []
    assert answer(primary, below=3, applied=2) == []
    assert answer(primary, below=3, applied=3) == [CaughtUp(2, 3, A, 0, False, 0.0)]
    assert answer(primary, below=3, applied=3) == []


def test_a_replica_that_is_catching_up_is_asked_how_far_it_is_also_if_there_is_nothing_new() -> None:
    primary = being_added(steps=3, copied_at=2)
    answer(primary, below=3, applied=2, now=1.0)
    told(primary, 1.0)
    assert told(primary, 1.0 + PROBE_S / 2) == []
    assert told(primary, 1.0 + 1.1 * PROBE_S) == [(3, 3, 3)]
    answer(primary, below=3, applied=3, now=1.0 + 2 * PROBE_S)
    assert told(primary, 1.0 + 4 * PROBE_S) == [], "it has caught up, and the controller has been told"


def test_a_replica_that_has_more_to_apply_than_it_can_becomes_live_with_the_order_alone() -> None:
    primary = being_added(steps=3, copied_at=2)
    assert answer(primary, below=3, applied=2, now=1.0) == []
    late = answer(primary, below=3, applied=2, now=1.0 + CATCH_UP_MAX_S)
    assert late == [CaughtUp(2, 3, A, 0, False, 0.0)]


def test_a_new_replica_catches_up_with_a_primary_that_never_rests() -> None:
    primary = paired(steps=3, live=False)
    primary.order.note_copy(A, 2)
    primary.order.note_copy_arrived(A)
    reports = []
    for step in range(3, 9):  # each answer comes when another step is committed already
        told(primary)
        primary.decide(1)
        reports += answer(primary, below=step, applied=step)
    assert reports == [CaughtUp(2, 3, A, 0, False, 0.0)]


def test_it_is_safe_when_it_is_live_and_its_copy_holds_nothing_that_is_not_committed() -> None:
    primary = Primary({A: (0, False), B: (0, True)}, steps=3)
    primary.order.note_copy(A, 3)  # steps that the other live replica has not received
    primary.order.note_copy_arrived(A)
    told(primary)
    answer(primary, below=3)
    primary.order.lead([ReplicaAt(A, 0, True), ReplicaAt(B, 0, True)], 3)
    assert answer(primary, below=3) == [], "should the primary die now, the other goes on without these steps"
    primary.order.on_seen(B, 0, 3)
    assert answer(primary, below=3) == [CaughtUp(2, 3, A, 0, True, 0.0)]


def test_after_a_new_table_it_is_asked_again_even_if_nothing_is_going_on() -> None:
    primary = paired(steps=1, live=False)
    primary.order.note_copy(A, 1)
    primary.order.note_copy_arrived(A)
    told(primary)
    answer(primary, below=1, applied=1)
    primary.order.lead([ReplicaAt(A, 0, True)], 1)
    assert told(primary) == [(1, 1, 1)]
    assert told(primary, AGAIN_S) == [(1, 1, 1)], "the question or its answer was lost"
    assert answer(primary, below=1, applied=1) == [CaughtUp(2, 3, A, 0, True, 0.0)]
    assert told(primary, 3 * AGAIN_S) == []


def test_other_output_for_the_same_steps_is_reported_by_name_with_every_answer() -> None:
    primary = paired(steps=3)
    primary.checksums = {1: 100, 2: 200}
    told(primary)
    (safe,) = answer(primary, 3, applied=1, checked=1, checksum=100)
    assert safe == CaughtUp(2, 3, A, 0, True, 0.0, steps_behind=2, replay_s=1.0), "and how far behind it is"
    assert answer(primary, 3, applied=2, checked=2, checksum=201) == [Diverged(2, 3, A, 0, 2)]
    assert answer(primary, 3, applied=2, checked=2, checksum=201) == [Diverged(2, 3, A, 0, 2)], "it is not dropped yet"
    assert answer(primary, 3, applied=3, checked=3, checksum=1) == [], "the primary is not there itself"


def test_a_report_of_other_output_that_was_lost_is_repeated_though_no_step_follows() -> None:
    primary = paired(steps=1)
    primary.checksums = {1: 100}
    told(primary)
    assert Diverged(2, 3, A, 0, 1) in answer(primary, 1, applied=1, checked=1, checksum=101)
    told(primary)
    assert told(primary, 2 * AGAIN_S) == [], "there is nothing to say"
    primary.order.report_again()  # on a new connection to the controller
    assert told(primary, 2 * AGAIN_S) == [(1, 1, 1)]
    assert Diverged(2, 3, A, 0, 1) in answer(primary, 1, applied=1, checked=1, checksum=101)


def test_a_new_primary_compares_the_step_at_which_it_took_over() -> None:
    primary = paired(steps=0)
    primary.checksums = {5: 500}
    primary.order.lead([ReplicaAt(A, 7, True)], applied=5)
    told(primary)
    assert Diverged(2, 3, A, 7, 5) in answer(primary, 0, applied=5, incarnation=7, checked=5, checksum=501)


def test_a_secondary_that_is_always_ahead_of_its_primary_is_compared_too_when_that_has_come_as_far() -> None:
    primary = paired(steps=6)
    told(primary)
    answer(primary, 6, applied=3, checked=3, checksum=300)
    answer(primary, 6, applied=5, checked=5, checksum=500)
    primary.checksums = {3: 300, 4: 400}
    assert answer(primary, 6, applied=6, checked=6, checksum=601) == [], "as far as step 3 they are the same"
    assert primary.order.peers[A].checked == 3
    primary.checksums |= {5: 500, 6: 600}
    assert answer(primary, 6, applied=6, checked=6, checksum=601) == [Diverged(2, 3, A, 0, 6)]


def test_a_secondary_that_was_ahead_is_asked_again_until_it_is_compared() -> None:
    primary = paired(steps=2)
    told(primary)
    answer(primary, 2, applied=2, checked=2, checksum=200)
    told(primary)
    assert told(primary, 2 * AGAIN_S) == [(2, 2, 2)]
    primary.checksums = {2: 200}
    answer(primary, 2, applied=2, checked=2, checksum=200)
    assert told(primary, 4 * AGAIN_S) == []


def test_a_secondary_that_holds_back_its_primary_is_asked_soon_how_far_it_is() -> None:
    primary = paired(steps=2)
    told(primary)
    answer(primary, 2, applied=1)
    told(primary)
    assert told(primary, 2 * PROBE_S) == []
    primary.held_back = True
    assert told(primary, 4 * PROBE_S) == [(2, 2, 2)]


def test_a_standby_follows_as_soon_as_it_has_the_order_and_its_steps_are_no_lag() -> None:
    """Count no lag: a standby applies nothing, however long one waits; the steps that it would repeat are reported
    elsewhere."""
    primary = paired(steps=3, live=False)
    primary.order.peers[A].kind = standby
    primary.order.note_copy(A, 1)
    primary.order.note_copy_arrived(A)
    told(primary)
    assert answer(primary, below=3, applied=1) == [CaughtUp(2, 3, A, 0, False, 0.0)]
    primary.order.lead([ReplicaAt(A, 0, True)], 3)
    assert answer(primary, below=3, applied=1) == [CaughtUp(2, 3, A, 0, True, 0.0, steps_behind=0)]


def test_a_standby_hears_the_checksum_of_committed_output_and_a_secondary_is_asked_for_its_own() -> None:
    primary = paired(steps=3)
    primary.checksums = {1: 11, 2: 22, 3: 33}
    ((item,),) = list(outgoing([primary], 0.0, 1.0).values())  # type: ignore[list-item]
    assert (item.checked, item.checksum) == (0, 0)
    primary.order.peers[A].kind = standby
    primary.order.on_seen(A, 0, 2, 0)
    primary.decide(1)
    ((item,),) = list(outgoing([primary], 0.0, 1.0).values())  # type: ignore[list-item]
    assert (item.checked, item.checksum) == (2, 22), "step 3 may still be another one"
