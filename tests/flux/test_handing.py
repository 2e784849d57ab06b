"""The copy that the vault gives to a future primary: all that a standby holds, whole and in parts (design: restore)."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kept import KEY, LARGE, Memory, checkpoint, held, opened, orders, standby
from msgspec.structs import replace

from flux.errors import ProtocolError
from flux.exchange.feed import Counters
from flux.exchange.producer import ToWorker
from flux.state import standby as image
from flux.state.receiver import StateReceiver, sign
from flux.state.standby import Standby
from flux.vault.vault import HandedCopies
from flux.wire.handshake import MAC_BYTES
from flux.wire.messages import Install, Installed, Restore
from flux.wire.parts import PartLimits, StatePart, StateParts
from partitioning.ids import PartitionKey
from partitioning.table import ReplicaAt, Table

SECRET, AGAIN_S = b"secret", 1.0
#: A few parts, two under way.
SMALL = PartLimits(part_bytes=100, parts=2, inline_bytes=0)
LIFE, WORKER = 7, 4
ASKED = Restore(*KEY, LIFE, WORKER)


def filled(size: int = 300, beside: bool = False) -> Standby:
    kept = Standby(KEY, 0)
    kept.on_orders(orders(2, 0, 6, committed=4, left=3))
    kept.take(checkpoint(3, 2, 5, incarnation=1, size=size))
    if beside:
        kept.take(checkpoint(6, 2, 6))
        assert kept.beside is not None
    return kept


def through(kept: Standby) -> Standby:
    return image.decode(image.encode(kept), kept.key, LIFE)


def given_of(kept: Standby) -> Any:
    """Return the part that a new primary goes by. ``term`` and ``verified`` belong to the messages of the old one."""
    checkpoint_, _, base, end, _, _, committed, entries, left = held(kept)
    return checkpoint_, base, end, committed, entries, left


# ---- the image


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    entries=st.integers(0, 30),
    committed=st.integers(0, 30),
    step=st.integers(0, 30),
    size=st.one_of(st.integers(0, 200), st.just(LARGE)),
    left=st.integers(0, 1 << 40),
)
def test_a_standby_comes_back_from_its_image(entries: int, committed: int, step: int, size: int, left: int) -> None:
    kept = Standby(KEY, 0)
    kept.on_orders(orders(1, 0, entries, min(committed, entries), left))
    kept.take(checkpoint(min(step, entries), 1, 3, size=size))
    back = through(kept)
    assert given_of(back) == given_of(kept)
    assert (back.key, back.incarnation) == (KEY, LIFE)


def test_one_that_has_nothing_comes_back_empty() -> None:
    back = through(Standby(KEY, 0))
    assert given_of(back) == given_of(Standby(KEY, 0))
    assert back.checkpoint.data is None


def test_order_without_a_checkpoint_comes_back() -> None:
    kept = Standby(KEY, 0)
    kept.on_orders(orders(1, 0, 5, committed=2))
    assert given_of(through(kept)) == given_of(kept)
    assert through(kept).checkpoint.step == 0


def test_a_checkpoint_whose_steps_may_not_be_committed_is_not_given() -> None:
    back = through(filled(beside=True))
    assert back.beside is None
    assert back.checkpoint.step == 3


@pytest.mark.parametrize("entries", range(0, 40, 3))
def test_the_checkpoint_begins_where_arrays_may_be_used_and_is_not_copied(entries: int) -> None:
    kept = filled()
    kept.on_orders(orders(2, 6, entries, committed=4))
    data = image.encode(kept)
    back = image.decode(data, KEY, LIFE)
    assert back.checkpoint.data is not None
    assert (len(data) - back.checkpoint.nbytes) % 64 == 0
    assert np.shares_memory(np.frombuffer(back.checkpoint.data, np.uint8), np.frombuffer(data, np.uint8))


def test_the_image_is_a_copy_so_that_the_standby_may_change() -> None:
    kept = filled()
    before, data = given_of(kept), image.encode(kept)
    kept.on_orders(orders(2, 6, 3, committed=9))
    kept.take(checkpoint(9, 2, 9, size=10))
    assert given_of(image.decode(data, KEY, LIFE)) == before


def test_a_standby_that_the_journal_keeps_in_a_file_has_an_image_too() -> None:
    journal = opened(Memory())
    kept = standby(journal)
    kept.on_orders(orders(2, 0, 6, committed=4))
    put = journal.put(KEY, checkpoint(3, 2, 5, size=LARGE))
    kept.take(put)
    assert given_of(through(kept)) == given_of(kept)


# ---- parts


def parts(nbytes: int = 450, signature: bytes | None = b"s" * MAC_BYTES) -> StateParts:
    return StateParts(memoryview(bytes(range(256)) * 4)[:nbytes], signature)


def test_no_more_parts_are_under_way_than_allowed() -> None:
    made = parts()
    assert [part.offset for part in made.due(0.0, AGAIN_S, SMALL)] == [0, 100]
    assert list(made.due(0.5, AGAIN_S, SMALL)) == []
    made.on_received(100, 0.5)
    assert [part.offset for part in made.due(0.6, AGAIN_S, SMALL)] == [200]
    made.validate()


def test_the_signature_comes_last_and_when_it_is_there() -> None:
    made = parts(150, None)
    assert [len(part.payload) for part in made.due(0.0, AGAIN_S, SMALL)] == [100, 50]
    made.on_received(150, 0.1)
    assert list(made.due(0.2, AGAIN_S, SMALL)) == []
    made.signature = b"s" * MAC_BYTES
    assert list(made.due(0.3, AGAIN_S, SMALL)) == [StatePart(150, b"s" * MAC_BYTES)]
    made.validate()


def test_of_nothing_the_signature_is_sent() -> None:
    assert list(parts(0).due(0.0, AGAIN_S, SMALL)) == [StatePart(0, b"s" * MAC_BYTES)]


def test_what_has_no_answer_for_long_is_sent_again_from_where_the_other_end_is() -> None:
    made = parts()
    list(made.due(0.0, AGAIN_S, SMALL))
    made.on_received(100, 0.5)
    list(made.due(0.5, AGAIN_S, SMALL))
    assert list(made.due(1.4, AGAIN_S, SMALL)) == []
    assert [part.offset for part in made.due(1.5, AGAIN_S, SMALL)] == [100, 200]
    assert list(made.due(1.6, AGAIN_S, SMALL)) == [], "once per time"


def test_when_all_has_come_it_asks_whether_the_replica_lives() -> None:
    made = parts(50)
    list(made.due(0.0, AGAIN_S, SMALL))
    made.on_received(made.total, 0.1)
    assert list(made.due(0.5, AGAIN_S, SMALL)) == []
    assert list(made.due(1.2, AGAIN_S, SMALL)) == [StatePart(made.total, b"")]


def test_what_the_other_end_has_forgotten_is_sent_again_when_it_says_so_on_being_asked() -> None:
    """Send all parts again: a standby that has no use for an older checkpoint keeps nothing of it, and its answer may
    be lost."""
    made = parts(50)
    list(made.due(0.0, AGAIN_S, SMALL))
    made.on_received(made.total, 0.1)
    made.on_received(0, 0.2)
    assert list(made.due(0.5, AGAIN_S, SMALL)) == [], "nobody has asked: this answer is old"
    assert list(made.due(1.2, AGAIN_S, SMALL)) == [StatePart(made.total, b"")]
    made.on_received(0, 1.3)
    assert [part.offset for part in made.due(1.3, AGAIN_S, SMALL)] == [0, 50]
    made.validate()
    made.on_received(50, 1.4)
    made.on_received(0, 1.5)
    assert list(made.due(1.6, AGAIN_S, SMALL)) == [], "nor is anything asked for by now"


@pytest.mark.parametrize("received", [-1, 0, 100, 483, 1 << 60])
def test_answers_that_make_no_sense_or_are_old_change_nothing(received: int) -> None:
    made = parts()
    list(made.due(0.0, AGAIN_S, SMALL))
    made.on_received(100, 0.1)
    made.on_received(received, 0.9)
    assert (made.acked, made.heard) == (100, 0.1)
    made.validate()


# ---- handing


def handing(limits: PartLimits = SMALL) -> HandedCopies:
    return HandedCopies(SECRET, AGAIN_S, limits)


def sent(given: HandedCopies, now: float = 0.0) -> list[Install]:
    return [effect.message for effect in given.poll(now) if isinstance(effect.message, Install)]


def installed(message: Install, received: int, done: bool = False, **more: Any) -> Installed:
    return replace(Installed(*KEY, message.incarnation, message.copy, received, done), **more)


def test_who_asks_gets_it_and_earlier_primaries_are_not_heeded_any_more() -> None:
    made, kept = handing(), filled(beside=True)
    assert made.ask(kept, ASKED, 0.0)
    assert kept.order.term == LIFE
    assert kept.beside is None
    assert kept.on_orders(orders(2, 6, 1, committed=6)) is None
    assert made.workers == {WORKER}
    first = sent(made)[0]
    assert (first.stage, first.partition, first.incarnation, first.term, first.offset) == (*KEY, LIFE, LIFE, 0)


def test_the_fence_is_in_the_journal_before_anything_is_given() -> None:
    store = Memory()
    journal = opened(store)
    standby(journal).on_orders(orders(2, 0, 6, committed=4))
    journal.flush()
    handing().ask(standby(journal), ASKED, 0.0)
    journal.flush()
    assert standby(opened(store)).order.term == LIFE


def test_who_asks_again_gets_the_same_once() -> None:
    made, kept = handing(), filled()
    made.ask(kept, ASKED, 0.0)
    first = sent(made)
    assert made.ask(kept, ASKED, 0.1)
    assert sent(made, 0.2) == []
    assert {message.copy for message in (*first, *sent(made, 1.5))} == {first[0].copy}


def test_who_has_got_it_and_asks_again_gets_another_copy() -> None:
    """Send another copy: a worker asks until its replica lives, so its answer may have been another life's."""
    made, kept = handing(), filled()
    made.ask(kept, ASKED, 0.0)
    first = sent(made)[0]
    made.on_installed(WORKER, installed(first, first.total, done=True), 0.1)
    assert (made.workers, sent(made, 9.0)) == (set(), [])
    made.ask(kept, ASKED, 10.0)
    assert sent(made, 10.0)[0].copy > first.copy


def test_who_is_deposed_gets_nothing() -> None:
    made, kept = handing(), filled()
    kept.fence(LIFE + 1)
    assert not made.ask(kept, ASKED, 0.0)
    assert (made.workers, kept.order.term) == (set(), LIFE + 1)


def led_by(kept: tuple[int, int], other: tuple[int, int]) -> Table:
    """Make a table with these workers and lives of the primaries of ``KEY`` and of partition 0 of stage 1. Each worker
    has replicas of both."""
    workers = range(WORKER, WORKER + 3)

    def row(worker: int, life: int) -> tuple[ReplicaAt, ...]:
        return ReplicaAt(worker, life), *(ReplicaAt(each, LIFE) for each in workers if each != worker)

    first = tuple(row(WORKER, 0) for _ in range(KEY.partition))
    return Table(LIFE + 1, ((*first, row(*kept)), (row(*other),)), (), dict.fromkeys(workers, ""))


def test_what_is_on_its_way_to_one_that_is_deposed_since_is_given_up() -> None:
    """Give up the first copy: the last answer of its worker may be lost, and the replica may be somewhere else by
    now."""
    made, kept = handing(), filled()
    made.ask(kept, ASKED, 0.0)
    assert made.ask(kept, Restore(*KEY, LIFE + 1, WORKER + 1), 0.1)
    made.follow(led_by((WORKER + 1, LIFE + 1), (WORKER, LIFE)))
    assert made.workers == {WORKER + 1}
    assert {message.incarnation for message in sent(made, 0.2)} == {LIFE + 1}
    assert not made.ask(kept, ASKED, 0.3), "it is not given again either"


def test_what_is_on_its_way_to_an_earlier_life_of_the_same_worker_is_given_up() -> None:
    made, kept = handing(), filled()
    made.ask(kept, ASKED, 0.0)
    made.follow(led_by((WORKER, LIFE + 1), (WORKER, LIFE)))
    assert (made.workers, sent(made)) == (set(), [])


def test_who_leads_goes_on_getting_it_when_another_table_comes() -> None:
    made, kept = handing(), filled()
    made.ask(kept, ASKED, 0.0)
    first = sent(made)
    made.follow(led_by((WORKER, LIFE), (WORKER, LIFE)))
    assert made.workers == {WORKER}
    assert sent(made, 0.1) == []
    assert {message.copy for message in sent(made, 1.5)} == {first[0].copy}


def test_workers_that_are_gone_get_nothing_more() -> None:
    made, kept, other = handing(), filled(), Standby(PartitionKey(1, 0), 0)
    made.ask(kept, ASKED, 0.0)
    made.ask(other, Restore(1, 0, LIFE, WORKER + 1), 0.0)
    made.follow(led_by((WORKER + 2, LIFE + 1), (WORKER + 1, LIFE)))
    assert made.workers == {WORKER + 1}
    assert {(message.stage, message.partition) for message in sent(made)} == {(1, 0)}


def test_a_partition_of_a_stage_that_is_removed_gets_nothing_more() -> None:
    made, kept = handing(), filled()
    made.ask(kept, ASKED, 0.0)
    made.follow(Table(LIFE + 1, ((), ()), (), {WORKER: ""}, 1))
    assert (made.workers, sent(made)) == (set(), [])


@pytest.mark.parametrize(
    "wrong", [{"copy": 9}, {"incarnation": LIFE - 1}, {"partition": 0}, {"stage": 5}, {"worker": 9}]
)
def test_answers_of_others_are_left_out(wrong: dict[str, int]) -> None:
    made, kept = handing(), filled()
    made.ask(kept, ASKED, 0.0)
    first = sent(made)[0]
    worker = wrong.pop("worker", WORKER)
    made.on_installed(worker, installed(first, first.total, done=True, **wrong), 0.1)
    assert made.workers == {WORKER}
    assert sent(made, 0.2) == [], "nothing is taken for acked either"


# ---- to the other end


class Newcomer:
    """The worker that asks, as its arrivals see it."""

    def __init__(self) -> None:
        self.replicas: dict[PartitionKey, Any] = {}
        self.awaited = {KEY: LIFE}
        self.followers: dict[PartitionKey, Any] = {}
        self.led: list[Standby] = []
        self.answers: list[Installed] = []
        self.aside: list[tuple[Callable[[], Any], Callable[[Any, float], None]]] = []
        host: Any = self
        self.arrivals = StateReceiver(host, SECRET, 0, self._aside, self._answer, Counters())

    def _aside(self, what: str, key: PartitionKey, job: Callable[[], Any], then: Callable[[Any, float], None]) -> None:
        self.aside.append((job, then))

    def _answer(self, connection: Hashable, message: Install, received: int, done: bool) -> None:
        self.answers.append(Installed(*KEY, message.incarnation, message.copy, received, done))

    def keeps_checkpoints(self, key: PartitionKey) -> bool:
        return False

    def begins_on_disk(self, key: PartitionKey) -> bool:
        return True

    def came_from_vault(self, kept: Standby) -> None:
        del self.awaited[kept.key]
        kept.leads = True
        self.followers[kept.key] = kept
        self.led.append(kept)

    def work(self) -> None:
        """Do the jobs that are to be done aside, and hand over their results."""
        jobs, self.aside[:] = list(self.aside), []
        for job, then in jobs:
            then(job(), 0.0)


def carry(made: HandedCopies, new: Newcomer, now: float, rng: random.Random, loss: float) -> None:
    under_way = [effect for effect in made.poll(now) for _ in range(1 + (rng.random() < loss))]
    rng.shuffle(under_way) if loss else None
    for effect in under_way:
        if rng.random() >= loss:
            assert isinstance(effect, ToWorker)
            assert effect.worker == WORKER
            assert isinstance(effect.message, Install)
            assert effect.payload is not None
            new.arrivals.on_install("c", effect.message, effect.payload, now)
            new.arrivals.validate()
    for answer in new.answers:
        if rng.random() >= loss:
            made.on_installed(WORKER, answer, now)
    new.answers.clear()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 32), loss=st.sampled_from([0.0, 0.3, 0.6]), size=st.sampled_from([0, 1, 300, 2000]))
def test_it_comes_whole_whatever_is_lost_twice_or_out_of_order(seed: int, loss: float, size: int) -> None:
    made, kept, new, rng = handing(), filled(size), Newcomer(), random.Random(seed)
    before, now = given_of(kept), 0.0
    while not new.led:
        made.ask(kept, ASKED, now)
        carry(made, new, now, rng, loss)
        if rng.random() < 0.5:
            new.work()
        now += 0.4
        assert now < 400, "it never comes"
    new.work()
    (led,) = new.led
    assert given_of(led) == before
    new.followers.clear()
    new.replicas[KEY] = Standby(KEY, LIFE)  # it lives
    while made.workers:
        carry(made, new, now, rng, loss)
        now += 0.4
        assert now < 800, "it is sent for ever"
    assert len(new.led) == 1


@pytest.mark.parametrize("secret", [b"another", SECRET])
def test_what_is_forged_never_leads(secret: bytes) -> None:
    data = image.encode(filled())
    signature = sign(secret, (*KEY, LIFE, 1, -1), data)
    forged = bytes(data[:-1]) + (bytes([data[-1] ^ 1]) if secret == SECRET else bytes(data[-1:])) + signature
    new = Newcomer()
    new.arrivals.on_install("c", Install(*KEY, LIFE, 1, 0, len(forged), LIFE), forged, 0.0)
    new.work()
    assert (new.led, new.arrivals._counters.refused, new.awaited) == ([], 1, {KEY: LIFE})


def test_a_copy_of_another_life_or_number_does_not_fit() -> None:
    """Refuse such copies: the signature covers the life and the number."""
    data = image.encode(filled())
    for life, number in ((LIFE, 2), (LIFE + 1, 1)):
        new = Newcomer()
        whole = bytes(data) + sign(SECRET, (*KEY, life, number, -1), data)
        new.arrivals.on_install("c", Install(*KEY, LIFE, 1, 0, len(whole), LIFE), whole, 0.0)
        new.work()
        assert (new.led, new.arrivals._counters.refused) == ([], 1)


def test_more_than_was_announced_is_an_error_of_the_other_end() -> None:
    with pytest.raises(ProtocolError, match="part of a copy of 10 bytes goes to 11"):
        Newcomer().arrivals.on_install("c", Install(*KEY, LIFE, 1, 0, 10, LIFE), bytes(11), 0.0)
