"""A standby: its orders and checkpoints, its acks, and the replacement of one checkpoint by another (design:
standby)."""

from __future__ import annotations

import msgspec

from flux.state.standby import Checkpoint, Standby
from flux.state.state_copy import ReplicaState, StreamPosition
from flux.wire.messages import OrderEntry, PartitionOrder
from partitioning.ids import PartitionKey, StreamId

KEY = PartitionKey(0, 3)
STREAM = StreamId(0, 0)


def entries(first: int, count: int) -> list[OrderEntry]:
    return [OrderEntry(float(step), float(step), [(0, 0, step)]) for step in range(first, first + count)]


def orders(term: int, first: int, count: int, committed: int, left: int = 0) -> PartitionOrder:
    return PartitionOrder(*KEY, 0, term, first, entries(first, count), committed, left)


def checkpoint(step: int, term: int, number: int) -> Checkpoint:
    return Checkpoint(step, memoryview(b"state"), (), term, number, {STREAM: step}, float(step))


def made() -> Standby:
    standby = Standby(KEY, 0)
    standby.on_orders(orders(1, 0, 6, 2))
    return standby


def test_it_has_received_entries_at_once_and_applied_what_its_checkpoint_has() -> None:
    standby = made()
    standby.take(checkpoint(2, 1, 0))
    seen = standby.on_orders(orders(1, 6, 1, 2))
    assert seen is not None
    assert (seen.received_below, seen.applied) == (7, 2)
    assert standby.position(STREAM) == 2


def test_a_checkpoint_waits_beside_the_older_one_until_its_steps_are_committed() -> None:
    standby, said = made(), []
    standby._taken = said.append
    assert standby.take(checkpoint(5, 1, 0))
    assert (standby.checkpoint.step, standby.position(STREAM), said) == (0, 0, [])
    standby.on_orders(orders(1, 6, 0, 5))
    assert (standby.checkpoint.step, standby.position(STREAM), said) == (5, 5, [standby])
    assert standby.order.base == 5
    standby.validate()


def test_the_first_word_of_a_later_primary_throws_away_what_may_not_be_committed() -> None:
    standby = made()
    standby.take(checkpoint(5, 1, 0))
    standby.on_orders(orders(2, 2, 4, 6))
    assert standby.beside is None
    assert standby.checkpoint.step == 0, "its steps may have had other numbers"
    assert not standby.take(checkpoint(5, 1, 1)), "of a primary that is deposed"


def test_a_checkpoint_of_a_primary_that_has_not_spoken_yet_waits() -> None:
    standby = made()
    assert standby.take(checkpoint(2, 2, 0))
    assert standby.checkpoint.step == 0, "what is committed by the word of the earlier one may be other steps"
    standby.on_orders(orders(2, 6, 0, 2))
    assert standby.checkpoint.step == 2


def test_older_checkpoints_are_not_taken() -> None:
    standby = made()
    standby.take(checkpoint(2, 1, 4))
    assert not standby.take(checkpoint(2, 1, 3))
    assert not standby.take(checkpoint(1, 1, 5)), "fewer steps: of a primary that was a standby itself"


def test_one_that_leads_hears_nobody() -> None:
    standby = made()
    standby.take(checkpoint(5, 1, 0))
    standby.lead(epoch=7)
    assert standby.beside is None
    assert standby.on_orders(orders(1, 6, 1, 6)) is None
    assert not standby.take(checkpoint(6, 1, 1))
    assert standby.reads_since == 7


def test_it_keeps_what_has_left_for_the_primary_that_it_may_be() -> None:
    standby = made()
    seen = standby.on_orders(orders(1, 6, 0, 2, left=4))
    assert seen is not None
    assert (standby.left, seen.left) == (4, 4)


def test_one_that_was_added_begins_with_its_first_copy_and_the_order_after_it() -> None:
    position = StreamPosition(STREAM, 9, 0, ())
    about: dict[str, object] = {
        "applied": 4, "now": 4.0, "entries": msgspec.msgpack.encode(entries(4, 2)), "committed": 3,
    }  # fmt: skip
    state, said = ReplicaState(about, (position,), ()), []
    standby = Standby(KEY, 8, said.append)
    standby.begin(Checkpoint.of(memoryview(b"state"), state, 1, 0), state)
    assert (standby.order.base, standby.order.end, standby.position(STREAM), said) == (4, 6, 9, [standby])
    standby.validate()


def test_the_age_of_its_checkpoint_is_counted_in_the_time_of_steps() -> None:
    standby = made()
    assert standby.behind_s == 5.0
    standby.take(checkpoint(2, 1, 0))
    assert standby.behind_s == 3.0
    standby.on_orders(orders(1, 6, 0, 6))
    standby.take(checkpoint(6, 1, 1))
    assert standby.behind_s == 0.0, "it lacks nothing"


def test_it_keeps_the_newest_claim_of_what_was_committed_and_of_a_deposed_primary_none() -> None:
    standby = made()
    for term, checked in ((2, 4), (2, 3), (1, 5)):
        standby.on_orders(PartitionOrder(*KEY, 0, term, 6, [], 4, 0, checked, 100 + checked))
    assert standby.claim == (4, 104)
