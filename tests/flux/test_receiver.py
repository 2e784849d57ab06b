"""The receiving end of a stream: every sequence once, in order, and never more than was granted."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from flux.exchange.feed import Counters
from flux.exchange.inbound import Inbound, Slice
from flux.exchange.log import End
from flux.wire.messages import Data, ElementKind, Hello, Mark, Reset
from partitioning.ids import StreamId

STREAM = StreamId(4, 1)
#: This worker hosts partitions 1 and 3 of 5.
HOSTED = [1, 3]


def hello(incarnation: int = 0) -> Hello:
    return Hello(*STREAM, incarnation, 0)


def greeted(credit: int = 1000, incarnation: int = 0) -> Inbound:
    inbound = Inbound(STREAM, 0, credit)
    inbound.greet(incarnation, "first", 7)
    return inbound


def data(number: int, sequence: int, rows: dict[int, int], first: int | None = None, **more: Any) -> tuple[Data, list]:
    """Make a message with ``rows``, partition -> number of rows, which lie next to each other."""
    batches = [pa.record_batch({"x": pa.array(range(sum(rows.values())))})] if rows else []
    message = Data(
        *STREAM, more.pop("nonce", 7), number, sequence if first is None else first, sequence, list(rows),
        list(rows.values()), [len(rows)] if rows else [], 100, **more,
    )  # fmt: skip
    return message, batches


def take(inbound: Inbound, message: tuple[Data, list], counters: Counters | None = None) -> Any:
    return inbound.take(*message, HOSTED, (), counters or Counters())


def numbered(taken: list[tuple[int, Slice]]) -> list[tuple[int, int]]:
    return [(partition, slice_.sequence) for partition, slice_ in taken]


def apply(inbound: Inbound, taken: list[tuple[int, Slice]]) -> None:
    for partition, slice_ in taken:
        inbound.applied(partition, slice_)


def test_a_message_gives_each_partition_its_slice() -> None:
    taken = take(greeted(), data(0, 0, {1: 2, 3: 1}))
    assert numbered(taken) == [(1, 0), (3, 0)]
    assert [slice_.batch.column("x").to_pylist() for _, slice_ in taken] == [[0, 1], [2]]


def test_a_slice_taken_before_is_dropped_and_counted() -> None:
    inbound, counters = greeted(), Counters()
    take(inbound, data(0, 0, {1: 1}))
    inbound.greet(0, "second", 8)
    assert take(inbound, data(0, 0, {1: 1}, nonce=8), counters) == []
    assert counters.duplicate == 1
    assert numbered(take(inbound, data(1, 1, {1: 1}, nonce=8), counters)) == [(1, 1)]


def test_a_missing_message_leads_to_one_reset_and_what_follows_is_dropped() -> None:
    inbound, counters = greeted(), Counters()
    assert isinstance(take(inbound, data(1, 1, {1: 1}), counters), Reset)
    assert take(inbound, data(2, 2, {1: 1}), counters) == []
    assert (counters.gap, counters.stale) == (1, 1)
    assert inbound.resume(0, HOSTED).next == [(1, 0), (3, 0)]


def test_a_message_that_skips_batches_without_saying_so_is_a_gap() -> None:
    counters = Counters()
    assert isinstance(take(greeted(), data(0, 3, {1: 1}, first=1), counters), Reset)
    assert counters.gap == 1


def test_a_message_that_says_what_it_skips_is_in_order() -> None:
    inbound = greeted()
    assert numbered(take(inbound, data(0, 3, {1: 1}, first=0))) == [(1, 3)]
    assert inbound.resume(0, HOSTED).next == [(1, 4), (3, 4)]


def test_data_of_another_handshake_changes_nothing() -> None:
    inbound, counters = greeted(), Counters()
    assert take(inbound, data(0, 0, {1: 1}, nonce=6), counters) == []
    assert (counters.stale, inbound.feed.received_bytes) == (1, 0)


def test_rows_for_a_partition_that_is_not_here_are_dropped_and_counted() -> None:
    counters = Counters()
    taken = take(greeted(), data(0, 0, {2: 5, 3: 1}), counters)
    assert numbered(taken) == [(3, 0)]
    assert taken[0][1].batch.column("x").to_pylist() == [5]
    assert counters.misrouted == 1


def test_the_end_of_a_stream_is_a_slice_for_every_partition() -> None:
    taken = take(greeted(), data(0, 0, {}, element=ElementKind.END))
    assert [(partition, slice_.word) for partition, slice_ in taken] == [(1, End()), (3, End())]


def test_an_ack_says_what_is_applied_and_not_what_was_received() -> None:
    inbound = greeted()
    taken = take(inbound, data(0, 0, {1: 1})) + take(inbound, data(1, 1, {1: 1, 3: 1}))
    assert dict(inbound.ack(0, HOSTED).behind) == {1: -1, 3: 0}
    apply(inbound, taken[:1])
    ack = inbound.ack(0, HOSTED)
    assert (ack.through, dict(ack.behind)) == (1, {1: 0, 3: 0})
    apply(inbound, taken[1:])
    assert (inbound.ack(0, HOSTED).through, inbound.ack(0, HOSTED).behind) == (1, [])


def test_credit_returns_when_the_last_slice_of_a_message_is_applied() -> None:
    inbound = greeted(credit=150)
    taken = take(inbound, data(0, 0, {1: 1, 3: 1}))
    assert inbound.ack(0, HOSTED).granted == 150
    apply(inbound, taken[:1])
    assert inbound.ack(0, HOSTED).granted == 150
    apply(inbound, taken[1:])
    assert inbound.ack(0, HOSTED).granted == 250


def test_a_new_handshake_grants_only_what_is_not_held_any_more() -> None:
    inbound = greeted(credit=150)
    taken = take(inbound, data(0, 0, {1: 1}))
    inbound.greet(0, "second", 8)
    assert inbound.resume(0, HOSTED).granted == 50
    apply(inbound, taken)
    assert inbound.ack(0, HOSTED).granted == 150


def test_a_message_of_nothing_but_duplicates_returns_its_credit_at_once() -> None:
    inbound = greeted(credit=150)
    apply(inbound, take(inbound, data(0, 0, {1: 1})))
    inbound.greet(0, "second", 8)
    take(inbound, data(0, 0, {1: 1}, nonce=8))
    assert inbound.ack_due
    assert inbound.ack_urgent
    assert inbound.ack(0, HOSTED).granted == 250


def test_a_new_life_of_the_producer_is_shown_the_checksum_with_every_resume() -> None:
    inbound = greeted()
    take(inbound, data(0, 0, {1: 1}, checksum=55))
    assert inbound.resume(0, HOSTED).shown == []  # the same life knows its own rows
    for nonce in (8, 9):  # the first answer may be lost
        inbound.greet(1, f"connection {nonce}", nonce)
        assert inbound.resume(0, HOSTED).shown == [Mark(0, 55)]


def test_what_is_shown_to_a_life_is_what_earlier_lives_have_sent() -> None:
    inbound = greeted()
    take(inbound, data(0, 0, {1: 1}, checksum=55))
    inbound.greet(1, "second", 8)
    take(inbound, data(0, 1, {1: 1}, nonce=8, checksum=66))
    assert inbound.resume(0, HOSTED).shown == [Mark(0, 55)]
    inbound.greet(2, "third", 9)
    assert inbound.resume(0, HOSTED).shown == [Mark(0, 55), Mark(1, 66)]


def test_a_primary_does_not_ack_beyond_a_copy_of_its_state_that_is_on_its_way() -> None:
    """Hold the ack back: a new reader begins where all have acked, and the receiver of the copy will want the rows
    after it."""
    inbound = greeted()
    for number in range(4):
        apply(inbound, take(inbound, data(number, number, {1: 1, 3: 1})))
    inbound.copies[3, 7, 5] = 2
    assert (inbound.ack(0, HOSTED).through, inbound.ack(0, HOSTED).behind) == (3, [(3, 1)])
    assert inbound.ack(0, [1]).behind == [], "nothing of what is not here any more"
    del inbound.copies[3, 7, 5]
    assert (inbound.ack(0, HOSTED).through, inbound.ack(0, HOSTED).behind) == (3, [])


@pytest.mark.parametrize("copied", [True, False])
def test_a_mark_below_a_copy_on_its_way_is_kept(copied: bool) -> None:
    inbound = greeted()
    for number in range(400):
        if number == 50 and copied:
            inbound.copies[1, 7, 5] = 50
        apply(inbound, take(inbound, data(number, number, {1: 1, 3: 1}, checksum=1000 + number)))
    assert any(40 < mark.sequence < 50 for mark in inbound.marks.shown()) == copied


def test_a_mark_below_what_is_applied_is_kept_whenever_batches_come() -> None:
    """Keep such a mark, because a source that is read again would else begin at its very start: a batch that has come
    is not yet applied."""
    inbound = greeted()
    for number in range(100):
        taken = take(inbound, data(number, number, {1: 1, 3: 1}, checksum=1000 + number))
        inbound.validate_marks(HOSTED)
        applied = number - 1
        assert applied < 1 or any(mark.sequence < applied for mark in inbound.marks.shown()), f"batch {number}"
        apply(inbound, taken)
