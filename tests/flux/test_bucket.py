"""A journal in objects that are written once: two writers at every request, crashes, damage (design: object-stores)."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
from kept import KEY, LARGE, all_held, checkpoint, opened, orders, standby, take
from objects import Objects, bucket

from flux.errors import QueryFailed, SnapshotError
from flux.vault import journal as journal_module
from flux.vault import object_store as module
from flux.vault.journal import Journal

STEPS = 5


class Killed(Exception):
    """The process is gone before this request."""


class Writer:
    """A writer as in ``test_two_writers``, whose journal is in a store of objects."""

    def __init__(self, objects: Objects, base: int = 0) -> None:
        #: Content of the standbys as each flush returned.
        self.shown: list[Any] = []
        self.steps, self._base = 0, base
        self.store = bucket(objects)
        self.journal = Journal(self.store)
        #: ``written`` is the content as the last flush began.
        self.read = self.written = all_held(self.journal)
        self.journal.begin()
        self.shown.append(self.read)

    def step(self) -> None:
        kept, term = standby(self.journal), self._base + 1
        self.steps += 1
        kept.on_orders(orders(term, kept.order.end, 1, committed=kept.order.end))
        if self.steps % 2:
            take(self.journal, checkpoint(kept.order.committed, term, self.steps, size=LARGE))
        self.written = all_held(self.journal)
        self.journal.flush()
        self.shown.append(self.written)


def held_in(objects: Objects) -> Any:
    return all_held(Journal(bucket(objects.beside(), writes=False)))


@pytest.fixture(params=[False, True], ids=["one segment", "a segment each flush"])
def short_segments(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    if request.param:
        monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 0)
        monkeypatch.setattr(journal_module, "SEGMENT_TIMES", 0)


def each_request(run: Callable[[int], bool]) -> int:
    number = 1
    while run(number):
        number += 1
    return number - 1


@pytest.mark.usefixtures("short_segments")
def test_a_second_writer_may_come_at_any_request_and_both_see_what_is_right() -> None:
    def run(number: int) -> bool:
        objects, found = Objects(), list[Writer]()
        for base in range(2):
            Writer(objects, base).step()
        objects.calls = 0

        def before(request: str) -> None:
            if objects.calls == number:
                found.append(Writer(objects.beside(), base=100))
                found[0].step()

        objects.before = before
        first = None
        with contextlib.suppress(QueryFailed):  # which the last lines look at
            first = Writer(objects, base=10)
            for _ in range(STEPS):
                first.step()
        last = held_in(objects)
        if not found:
            assert first is not None
            assert last == first.shown[-1]
            return False
        (other,) = found
        if first is not None and first.store.generation > other.store.generation:
            assert first.read == other.shown[-1], "the second one was the first after all"
            assert last == first.shown[-1]
        else:
            assert last == other.shown[-1], "what the later one has written is as it was"
            assert first is None or other.read in (first.shown[-1], first.written)
            if first is not None and len(first.shown) > STEPS:  # the other one came when all was written
                assert other.read == first.shown[-1]
                with pytest.raises(
                    QueryFailed, match="another query has been started on the checkpoint location the store"
                ):
                    first.step()
                assert held_in(objects) == last
        return True

    assert each_request(run) > 20


@pytest.mark.usefixtures("short_segments")
def test_a_writer_that_is_killed_before_any_request_loses_nothing_that_it_has_shown() -> None:
    def run(number: int) -> bool:
        objects, first = Objects(), list[Writer]()
        Writer(objects).step()
        before = held_in(objects)
        objects.calls = 0

        def kill(request: str) -> None:
            if objects.calls == number:
                raise Killed

        objects.before = kill
        try:
            first.append(Writer(objects, base=10))
            for _ in range(STEPS):
                first[0].step()
            killed = False
        except Killed:
            killed = True
        again = Writer(objects.beside(), base=20)
        assert again.read in ((first[0].shown[-1], first[0].written) if first else (before,))
        again.step()
        assert held_in(objects) == again.shown[-1]
        assert not {name for name in objects.held if name.startswith("journal")} - parts_of(again, objects)
        return killed

    assert each_request(run) > 20


def parts_of(writer: Writer, objects: Objects) -> set[str]:
    return {name for name in objects.held if name.startswith(f"journal/{writer.store.generation:08}-")}


def test_two_that_claim_at_the_same_time_get_generations_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each request of one claim fall between any two of the other."""
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    for seed in range(200):
        got = claimed_between(random.Random(seed))
        assert len(set(got)) == len(got), got


def claimed_between(rng: random.Random) -> list[int]:
    """Return the generations of up to four writers, each of which comes between two requests of another one."""
    objects, got, others = Objects(), list[int](), [3]

    def between(request: str) -> None:
        if others[0] and rng.random() < 0.4:
            others[0] -= 1
            other = objects.beside()
            other.before = between
            got.append(bucket(other).generation)

    objects.before = between
    got.append(bucket(objects).generation)
    return got


def test_who_finds_others_again_and_again_gives_up_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    objects = Objects()

    def before(request: str) -> None:
        if request.startswith("write claims"):
            objects.held[f"{request.removeprefix('write ')[:15]}-ffff"] = b""

    objects.before = before
    with pytest.raises(QueryFailed, match="other programs start queries on it again and again"):
        bucket(objects)


def test_a_torn_part_at_the_end_is_left_out_and_one_in_the_middle_is_damage() -> None:
    """Read past a part that is not whole, because some file systems show a file while it is written."""
    objects = Objects()
    writer = Writer(objects)
    for _ in range(4):  # the last one has no checkpoint, for which an earlier one would be gone
        writer.step()
    parts = sorted(name for name in objects.held if name.startswith("journal"))
    objects.held[parts[-1]] = objects.held[parts[-1]][:-1]
    assert held_in(objects) == writer.shown[-2]
    whole, objects.held[parts[1]] = objects.held[parts[1]], b""
    with pytest.raises(SnapshotError, match=r"the store: journal/.* is damaged"):
        held_in(objects)
    del objects.held[parts[1]]
    with pytest.raises(SnapshotError, match="part 1 of its journal is not there"):
        held_in(objects)
    objects.held[parts[1]] = whole
    assert held_in(objects) == writer.shown[-2]


def test_a_segment_whose_first_part_is_torn_has_not_begun() -> None:
    objects = Objects()
    writer = Writer(objects)
    writer.step()
    objects.held["journal/00000001-00000002-00000000-000100"] = b"x"
    assert held_in(objects) == writer.shown[-1]


def test_a_journal_that_has_gone_is_not_taken_for_one_that_never_was() -> None:
    objects = Objects()
    assert Journal(bucket(objects)).highest == -1, "nothing was begun"
    assert Journal(bucket(objects)).highest == -1
    Writer(objects)
    for name in [name for name in objects.held if name.startswith("journal")]:
        del objects.held[name]
    with pytest.raises(SnapshotError, match="had a journal, and it is not there any more"):
        bucket(objects).newest()


def test_a_journal_of_many_small_flushes_begins_anew_so_that_it_has_few_objects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PARTS_MAX", 4)
    objects = Objects()
    writer = Writer(objects)
    for _ in range(20):
        writer.step()
        assert len(parts_of(writer, objects)) <= 4
    assert held_in(objects) == writer.shown[-1]


def test_checkpoints_that_nobody_needs_go_and_the_others_can_be_read() -> None:
    objects = Objects()
    journal = opened(bucket(objects))
    standby(journal).on_orders(orders(1, 0, 1, committed=1))
    for number in range(4):
        take(journal, checkpoint(1, 1, number, size=LARGE))
        journal.flush()
    assert [name for name in objects.held if name.startswith("state")] == [f"state/{KEY.stage}-{KEY.partition}-1-3-1"]
    assert held_in(objects) == all_held(journal)
    (name,) = (name for name in objects.held if name.startswith("state"))
    objects.held[name] = objects.held[name][:-1] + b"?"
    with pytest.raises(SnapshotError, match="is damaged"):
        held_in(objects)
    del objects.held[name]
    with pytest.raises(SnapshotError, match="is not there"):
        held_in(objects)
