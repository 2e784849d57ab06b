"""The journal of the vault: its reader gets the same standbys (design: journal)."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kept import (
    KEY,
    LARGE,
    OTHER,
    Memory,
    all_held,
    checkpoint,
    entry,
    held,
    opened,
    orders,
    segments_of,
    standby,
    take,
    two_flushes,
)

from flux.errors import QueryFailed
from flux.vault.journal import Journal, files_of
from flux.wire.messages import OrderEntry, PartitionOrder
from partitioning.ids import PartitionKey

# ---- random stories


class Told:
    """A partition as its primary of ``term`` tells it to the standby."""

    def __init__(self, key: PartitionKey) -> None:
        self.key = key
        #: ``claimed`` steps are committed, because the standby has acked them durably.
        self.term, self.number, self.claimed = 0, 0, 0
        self.log: list[OrderEntry] = []
        #: All orders that were ever sent. They may come again.
        self.said: list[PartitionOrder] = []
        self.acked = (-1, 0)

    def becomes_primary(self, term: int, kept: list[OrderEntry]) -> None:
        assert len(kept) >= self.claimed
        self.term, self.log = term, kept


class Lives:
    """Random inputs for a journal, in the order that the protocol allows, and its crashes."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.told = [Told(KEY), Told(OTHER)]
        self.epoch = 0
        #: For each place of a crash: the store that it leaves, the possible contents of its standbys, and the least
        #: ``highest``.
        self.points: list[tuple[Memory, list[Any], int]] = []
        self.flushed: Any = {}
        self.flushing: Any = None
        self.highest = -1
        self.changes_taken = 0
        self._go_on(Memory())

    def _go_on(self, store: Memory) -> None:
        self.store, self.journal = store, opened(store)
        store.crash = self._note
        self.flushing, self.flushed, self.highest = None, all_held(self.journal), self.journal.highest
        self.epoch = max(self.epoch, self.journal.highest + 1)
        self.points.clear()

    def _note(self) -> None:
        may_be = [self.flushed] if self.flushing is None else [self.flushed, self.flushing]
        written = self.rng.randint(0, len(self.store.appended))
        self.points.append((self.store.after_a_crash(written), may_be, self.highest))

    def run(self, steps: int) -> None:
        kinds = [
            self.append,
            self.send,
            self.send,
            self.again,
            self.commit,
            self.checkpoint,
            self.flush,
            self.take_over,
        ]
        kinds += [self.checkpoint, self.checkpoint, self.checkpoint, self.send, self.fence, self.see, self.refused]
        for _ in range(steps):
            self.rng.choice(kinds)(self.rng.choice(self.told))

    def append(self, told: Told) -> None:
        told.log += [entry(step, told.term) for step in range(len(told.log), len(told.log) + self.rng.randint(1, 4))]

    def send(self, told: Told) -> None:
        first = self.rng.randint(0, len(told.log))
        last = self.rng.randint(first, len(told.log))
        left = self.rng.randint(0, told.claimed)
        told.said.append(PartitionOrder(*told.key, 0, told.term, first, told.log[first:last], told.claimed, left))
        standby(self.journal, told.key).on_orders(told.said[-1])

    def again(self, told: Told) -> None:
        if told.said:
            standby(self.journal, told.key).on_orders(self.rng.choice(told.said))

    def commit(self, told: Told) -> None:
        term, verified = told.acked
        if term == told.term:
            told.claimed = max(told.claimed, self.rng.randint(0, min(verified, len(told.log))))

    def checkpoint(self, told: Told) -> None:
        step, told.number = self.rng.randint(0, len(told.log)), told.number + 1
        size = self.rng.choice([0, 0, LARGE])
        base = -1
        if self.rng.random() < 0.7:  # changes, perhaps since a checkpoint that is not there
            held_now = standby(self.journal, told.key)
            base = self.rng.choice([(held_now.beside or held_now.checkpoint).number, held_now.checkpoint.number, 1])
        made = checkpoint(step, told.term, told.number, self.rng.randint(0, 9), size, base=base)
        self.changes_taken += base >= 0 and standby(self.journal, told.key).holds(told.term, base) is not None
        if standby(self.journal, told.key).wants(made.term, made.number):
            kept = self.journal.put(told.key, made)
            if self.rng.random() < 0.3:  # it was put in another thread
                self.flush(told)
                self.send(told)
            standby(self.journal, told.key).take(kept)
            self.journal.landed(told.key, kept)

    def refused(self, told: Told) -> None:
        """Put a checkpoint that is of no use any more by then."""
        take(self.journal, checkpoint(0, 0, 0, size=LARGE), told.key)

    def take_over(self, told: Told) -> None:
        told.becomes_primary(told.term + 1, told.log[: self.rng.randint(told.claimed, len(told.log))])

    def fence(self, told: Told) -> None:
        """Let the next primary begin with the content of the vault."""
        kept = standby(self.journal, told.key)
        kept.fence(told.term + 1)
        told.becomes_primary(told.term + 1, told.log[: kept.order.base] + kept.order.since(kept.order.base))

    def see(self, _: Told) -> None:
        self.epoch += 1
        self.journal.see(self.epoch)

    def flush(self, _: Told) -> None:
        self.flushing = all_held(self.journal)
        self.journal.flush()
        self.flushed, self.flushing, self.highest = self.flushing, None, self.journal.highest
        for told in self.told:
            order = standby(self.journal, told.key).order
            told.acked = order.term, order.verified

    def end(self) -> None:
        """End the program well."""
        self.flushing = all_held(self.journal)
        self.journal.end()
        self.flushed, self.flushing, self.highest = self.flushing, None, self.journal.highest
        self._note()

    def crash(self) -> None:
        store = self.store.after_a_crash(self.rng.randint(0, len(self.store.appended)))
        self._go_on(store)
        for told in self.told:
            kept = standby(self.journal, told.key)
            told.becomes_primary(
                max(self.journal.highest, told.term) + 1,
                told.log[: kept.order.base] + kept.order.since(kept.order.base),
            )
            told.acked, told.said = (-1, 0), []

    def check(self) -> None:
        for store, may_be, highest in self.points:
            read = Journal(store)
            assert all_held(read) in may_be
            assert read.highest >= highest


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 32), segment=st.sampled_from([1, 600, 5_000, 1 << 20]), lives=st.integers(1, 3))
def test_a_crash_anywhere_loses_nothing_that_was_flushed_and_adds_nothing(seed: int, segment: int, lives: int) -> None:
    with segments_of(segment):
        story = Lives(seed)
        for _ in range(lives):
            story.run(25)
            if story.rng.random() < 0.5:
                story.end()
            story.check()
            story.crash()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 32))
def test_no_file_stays_that_nobody_needs_and_none_goes_that_somebody_needs(seed: int) -> None:
    with segments_of(2_000):
        story = Lives(seed)
        story.run(40)
        story.see(story.told[0])
        story.flush(story.told[0])
        assert set(story.store.files) == {name for kept in story.journal.standbys.values() for name in files_of(kept)}


# ---- the end of the journal


def test_a_frame_that_is_cut_off_anywhere_is_left_out_silently() -> None:
    store, first, second, start = two_flushes()
    for end in range(start, len(store.segment)):
        assert all_held(Journal(Memory(store.segment[:end]))) == first, f"cut at byte {end}"
    assert all_held(Journal(store)) == second


@pytest.mark.parametrize("fill", [b"\0" * 1, b"\0" * 15, b"\0" * 16, b"\0" * 17, b"\0" * 4096])
def test_zeros_at_the_end_are_a_torn_frame(fill: bytes) -> None:
    """Read past such zeros: a file system may make a file longer before it writes to it."""
    store, first, second, start = two_flushes()
    assert all_held(Journal(Memory(store.segment + fill))) == second
    for end in range(start, len(store.segment)):
        cut = store.segment[:end] + fill
        whole = cut.startswith(store.segment.rstrip(b"\0")) and len(cut) >= len(store.segment)
        assert all_held(Journal(Memory(cut))) == (second if whole else first), f"cut at byte {end}"


def test_after_a_torn_frame_the_next_life_begins_a_segment_of_its_own() -> None:
    store, first, _, start = two_flushes()
    torn = Memory(store.segment[: start + 20])
    journal = opened(torn)
    assert all_held(Journal(torn)) == first
    standby(journal).on_orders(orders(2, 4, 2, committed=1))
    journal.flush()
    assert all_held(Journal(torn)) == all_held(journal) != first


# ---- files


def test_a_file_that_only_replaced_checkpoints_had_may_be_gone() -> None:
    store = Memory()
    journal = opened(store)
    standby(journal).on_orders(orders(1, 0, 4, committed=4))
    for number in range(3):
        take(journal, checkpoint(number + 1, 1, number, size=LARGE))
        journal.flush()
    assert list(store.files) == ["0-3-1-2-1"]
    assert all_held(Journal(store)) == all_held(journal)


def test_a_checkpoint_that_waits_beside_and_the_older_one_both_keep_their_files() -> None:
    store = Memory()
    journal = opened(store)
    standby(journal).on_orders(orders(1, 0, 4, committed=2))
    take(journal, checkpoint(2, 1, 0, size=LARGE))
    take(journal, checkpoint(4, 1, 1, size=LARGE))
    journal.flush()
    assert set(store.files) == {"0-3-1-0-1", "0-3-1-1-1"}
    standby(journal).on_orders(orders(1, 4, 0, committed=4))
    assert set(store.files) == {"0-3-1-0-1", "0-3-1-1-1"}, "nothing goes before it is durable that it is not needed"
    journal.flush()
    assert set(store.files) == {"0-3-1-1-1"}


@pytest.mark.parametrize("word", ["orders", "fence"])
def test_the_file_of_a_checkpoint_that_a_later_term_throws_away_goes(word: str) -> None:
    store = Memory()
    journal = opened(store)
    take(journal, checkpoint(4, 1, 1, size=LARGE))
    journal.flush()
    assert set(store.files) == {"0-3-1-1-1"}
    standby(journal).fence(2) if word == "fence" else standby(journal).on_orders(orders(2, 0, 1))
    journal.flush()
    assert not store.files


@pytest.mark.parametrize("size", [0, LARGE])
@pytest.mark.parametrize("segment", [1, 1 << 20])
def test_changes_keep_what_they_are_the_changes_of_until_a_whole_one_comes(size: int, segment: int) -> None:
    store = Memory()
    with segments_of(segment):
        journal = opened(store)
        standby(journal).on_orders(orders(1, 0, 6, committed=6))
        take(journal, checkpoint(1, 1, 1, size=LARGE))
        for number in (2, 3):
            take(journal, checkpoint(number, 1, number, size=size, base=number - 1))
            journal.flush()
        assert "0-3-1-1-1" in store.files
        assert len(store.files) == (3 if size else 1)
        read = Journal(store)
        assert all_held(read) == all_held(journal)
        assert len(standby(read).checkpoint.pieces) == 3
        take(journal, checkpoint(4, 1, 4, size=size, base=7))
        journal.flush()
        assert standby(journal).checkpoint.step == 3, "it has no number 7"
        take(journal, checkpoint(5, 1, 5, size=LARGE))
        journal.flush()
    assert set(store.files) == {"0-3-1-5-1"}


def test_changes_beside_leave_the_checkpoint_as_it_is() -> None:
    store = Memory()
    journal = opened(store)
    standby(journal).on_orders(orders(1, 0, 4, committed=2))
    take(journal, checkpoint(2, 1, 1, size=LARGE))
    take(journal, checkpoint(3, 1, 2, size=LARGE, base=1))
    take(journal, checkpoint(4, 1, 3, size=LARGE, base=2))
    journal.flush()
    assert set(store.files) == {"0-3-1-1-1", "0-3-1-2-1", "0-3-1-3-1"}
    standby(journal).fence(2)
    journal.flush()
    assert set(store.files) == {"0-3-1-1-1"}, "what was not committed goes, and only that"
    assert len(standby(Journal(store)).checkpoint.pieces) == 1


def test_the_random_stories_have_changes() -> None:
    stories = [Lives(seed) for seed in range(10)]
    for story in stories:
        story.run(25)
    assert sum(story.changes_taken for story in stories) > 10


def test_the_file_of_a_checkpoint_that_is_refused_goes_with_the_next_flush() -> None:
    store = Memory()
    journal = opened(store)
    standby(journal).fence(5)
    assert not take(journal, checkpoint(1, 1, 0, size=LARGE))
    journal.flush()
    assert not store.files


def test_a_file_that_is_put_and_not_taken_yet_stays_also_when_a_segment_begins() -> None:
    store = Memory()
    journal = opened(store)
    standby(journal).on_orders(orders(1, 0, 2, committed=2))
    kept = journal.put(KEY, checkpoint(2, 1, 0, size=LARGE))
    with segments_of(1):
        journal.see(4)
        standby(journal).on_orders(orders(1, 2, 1, committed=3))
        journal.flush()
    assert store.begun == 2
    assert standby(journal).take(kept)
    journal.landed(KEY, kept)
    journal.flush()
    assert set(store.files) == {"0-3-1-0-1"}
    assert all_held(Journal(store)) == all_held(journal)


def test_files_of_partitions_with_similar_names_are_not_mistaken_for_each_other() -> None:
    store, keys = Memory(), [PartitionKey(0, 1), PartitionKey(0, 11), PartitionKey(10, 1), PartitionKey(1, 0)]
    journal = opened(store)
    for key in keys:
        standby(journal, key).on_orders(orders(1, 0, 2, committed=2, key=key))
        take(journal, checkpoint(1, 1, 1, size=LARGE), key)
    journal.flush()
    take(journal, checkpoint(2, 1, 11, size=LARGE), keys[0])
    journal.flush()
    assert set(store.files) == {"0-1-1-11-1", "0-11-1-1-1", "10-1-1-1-1", "1-0-1-1-1"}


def test_partitions_of_a_removed_stage_go_with_their_files() -> None:
    store, keys = Memory(), [PartitionKey(0, 1), PartitionKey(4, 1)]
    journal = opened(store)
    for key in keys:
        standby(journal, key).on_orders(orders(1, 0, 2, committed=2, key=key))
        take(journal, checkpoint(1, 1, 1, size=LARGE), key)
    journal.flush()
    journal.keep_only(lambda key: key.stage != 4)
    standby(journal, keys[0]).on_orders(orders(1, 2, 1, committed=3, key=keys[0]))
    journal.flush()
    assert set(store.files) == {"0-1-1-1-1"}
    again = Journal(store)
    again.keep_only(lambda key: key.stage != 4)  # a process that was lost before a new segment began
    assert all_held(again) == all_held(journal)
    assert again.highest == journal.highest


def test_files_that_a_crash_has_left_go_when_the_next_life_begins() -> None:
    store = two_flushes()[0]
    store.files["0-3-1-9-1"] = b"put, and not flushed"
    assert all_held(Journal(store)) == all_held(opened(store))
    assert not store.files


def test_who_only_reads_changes_nothing() -> None:
    store = two_flushes()[0]
    store.files["0-3-1-9-1"] = b"left"
    before = store.segment
    Journal(store)
    assert (store.segment, store.files, store.begun) == (before, {"0-3-1-9-1": b"left"}, 1)


def test_checkpoints_are_put_by_other_threads_while_the_journal_is_flushed() -> None:
    store = Memory()
    journal = opened(store)
    keys = [PartitionKey(0, partition) for partition in range(4)]
    kept: dict[tuple[PartitionKey, int], Any] = {}

    def put(key: PartitionKey) -> None:
        for number in range(20):
            kept[key, number] = journal.put(key, checkpoint(1, 1, number, size=LARGE))

    threads = [threading.Thread(target=put, args=(key,)) for key in keys]
    for thread in threads:
        thread.start()
    for step in range(30):
        for key in keys:
            standby(journal, key).on_orders(orders(1, step, 1, committed=step, key=key))
        journal.flush()
    for thread in threads:
        thread.join()
    for (key, _), made in kept.items():
        standby(journal, key).take(made)
        journal.landed(key, made)
    journal.see(9)
    journal.flush()
    assert set(store.files) == {f"0-{key.partition}-1-19-1" for key in keys}
    assert all_held(Journal(store)) == all_held(journal)


# ---- segments


def test_a_segment_that_has_grown_is_followed_by_one_with_all_that_is_held() -> None:
    store = Memory()
    journal = opened(store)
    with segments_of(4_000):
        for step in range(300):
            standby(journal).on_orders(orders(1, step, 1, committed=step))
            if step % 10 == 9:
                take(journal, checkpoint(step, 1, step))
            journal.flush()
            assert len(store.segment) < 4_000 + 1_000
    assert store.begun > 3
    assert all_held(Journal(store)) == all_held(journal)


def test_what_is_large_when_a_segment_begins_does_not_make_the_next_one_begin_at_once() -> None:
    store = Memory()
    journal = opened(store)
    with segments_of(1_000, times=4):
        noise = random.Random(0).randbytes(20_000)
        standby(journal).on_orders(orders(1, 0, 2, committed=2))
        take(journal, checkpoint(1, 1, 0, size=1, text=noise))
        journal.flush()
        begun = store.begun
        for epoch in range(100):
            journal.see(epoch)
            journal.flush()
    assert store.begun == begun


def test_a_journal_that_has_ended_has_what_is_held_and_not_what_has_happened() -> None:
    store = Memory()
    journal = opened(store)
    for step in range(300):
        standby(journal).on_orders(orders(1, step, 1, committed=step))
        take(journal, checkpoint(step, 1, step))
        journal.flush()
    standby(journal).on_orders(orders(1, 300, 1, committed=300))  # not flushed
    happened = len(store.segment)
    journal.end()
    assert len(store.segment) < happened / 10
    assert all_held(Journal(store)) == all_held(journal)


def test_a_journal_whose_place_another_program_has_ends_without_a_segment() -> None:
    class Lost(Memory):
        def check(self) -> None:
            raise QueryFailed("another query")

    store = Lost()
    journal = opened(store)
    for epoch in range(100):
        journal.see(epoch)
        journal.flush()
    begun = store.begun
    with pytest.raises(QueryFailed, match="another query"):
        journal.end()
    assert store.begun == begun


# ---- records that are written


def test_nothing_is_written_of_what_is_no_news() -> None:
    store = Memory()
    journal = opened(store)
    standby(journal).on_orders(orders(2, 0, 4, committed=2, left=1))
    take(journal, checkpoint(1, 2, 1))
    standby(journal).fence(2)
    journal.flush()
    size, flushes = len(store.segment), store.flushes
    for late in (orders(2, 0, 4, committed=2, left=1), orders(2, 1, 2, committed=1), orders(1, 0, 9, committed=9)):
        standby(journal).on_orders(late)
    assert not take(journal, checkpoint(1, 2, 1))
    assert not take(journal, checkpoint(0, 2, 2))
    standby(journal).fence(1)
    journal.flush()
    assert (len(store.segment), store.flushes) == (size, flushes)


def test_an_order_that_only_says_what_is_committed_or_has_left_is_news() -> None:
    store = Memory()
    journal = opened(store)
    for news in (orders(1, 0, 4), orders(1, 4, 0, committed=3), orders(1, 4, 0, committed=3, left=2), orders(2, 9, 0)):
        standby(journal).on_orders(news)
        journal.flush()
        assert all_held(Journal(store)) == all_held(journal)


def test_entries_that_a_later_primary_replaces_by_as_many_others_are_news() -> None:
    store = Memory()
    journal = opened(store)
    standby(journal).on_orders(orders(1, 0, 2, committed=1))
    standby(journal).on_orders(orders(2, 2, 0, committed=1))
    journal.flush()
    standby(journal).on_orders(orders(2, 1, 1, committed=1))
    journal.flush()
    assert all_held(Journal(store)) == all_held(journal)
    assert standby(Journal(store)).order[1] == entry(1, 2)


def test_what_is_not_flushed_is_not_there() -> None:
    store, _, second, _ = two_flushes()
    journal = Journal(store)
    standby(journal).on_orders(orders(1, 7, 3, committed=5))
    assert all_held(Journal(store)) == second


def test_who_has_lost_the_place_hears_of_it_from_flush() -> None:
    class Lost(Memory):
        def flush(self) -> None:
            raise QueryFailed("another query")

    journal = opened(Lost())
    journal.see(1)
    with pytest.raises(QueryFailed, match="another query"):
        journal.flush()


def test_a_standby_goes_on_in_another_life_with_what_it_holds() -> None:
    journal, taken = Journal(two_flushes()[0]), list[Any]()
    before = held(journal.standbys[KEY])
    kept = journal.standby(KEY, 17, taken.append)
    assert (held(kept), kept.incarnation) == (before, 17)
    seen = kept.on_orders(orders(1, 7, 0, committed=5))
    assert seen is not None
    assert (seen.incarnation, seen.applied, taken) == (17, 5, [kept]), "the checkpoint beside is committed now"
