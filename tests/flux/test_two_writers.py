"""Two writers of one directory, and writers that are killed, at every call to the file system (design: journal)."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kept import KEY, LARGE, all_held, checkpoint, opened, orders, standby, take
from kept_watched import SYNCED, At, watch

from flux.errors import QueryFailed
from flux.vault import journal as journal_module
from flux.vault.directory_store import Directory, check_location
from flux.vault.journal import Journal


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the files of killed writers: there are hundreds of writers, and more files than a process may have open."""
    made: list[Directory] = []
    init = Directory.__init__

    def noted(self: Directory, *given: Any, **more: Any) -> None:
        made.append(self)
        init(self, *given, **more)

    monkeypatch.setattr(Directory, "__init__", noted)
    yield
    for each in made:
        with contextlib.suppress(OSError, AttributeError):
            each.close()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return check_location(tmp_path / "kept")


def segments(place: Path) -> list[str]:
    return sorted(path.name for path in place.glob("journal-*"))


class Writer:
    """A writer that opens the place and writes step by step. Each flush begins a new segment, each second step has a
    checkpoint in a file of its own."""

    def __init__(self, place: Path, base: int = 0) -> None:
        #: Content of the standbys as each flush returned.
        self.shown: list[Any] = []
        #: Content of the standbys as the last flush began.
        self.written: Any = {}
        self.steps = 0
        self._base = base
        self.directory = Directory(place)
        self.journal = Journal(self.directory)
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


STEPS = 5


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SYNCED:
        monkeypatch.setattr(os, name, lambda file: None)
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 0)
    monkeypatch.setattr(journal_module, "SEGMENT_TIMES", 0)


def each_call(run: Callable[[int], bool]) -> int:
    """Call ``run`` with the number of each call until there is none of that number, and return the number of calls."""
    number = 1
    while run(number):
        number += 1
    return number - 1


@pytest.mark.usefixtures("short_segments")
def test_a_second_writer_may_come_at_any_call_and_both_see_what_is_right(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(number: int) -> bool:
        where = check_location(place / str(number))
        for base in range(2):
            Writer(where, base).step()
        found: list[Writer] = []
        at = At(number, lambda: found.append(second()))

        def second() -> Writer:
            other = Writer(where, base=100)
            other.step()
            return other

        with monkeypatch.context() as patched:
            watch(patched, at)
            first = None
            try:
                first = Writer(where, base=10)
                for _ in range(STEPS):
                    first.step()
            except QueryFailed:
                pass  # the last one: see test_a_writer_whose_half_written_file_is_swept_says_that_it_is_replaced
        _check_two(where, first, found)
        return at.done

    assert each_call(run) > 60


def _check_two(where: Path, first: Writer | None, found: list[Writer]) -> None:
    """Check the contents that two writers have read and left. ``first`` is None if it ended before its journal had
    begun."""
    last = all_held(Journal(Directory(where, writes=False)))
    if not found:
        assert first is not None
        assert last == first.shown[-1]
    elif first is not None and first.directory.generation > found[0].directory.generation:
        assert first.read == found[0].shown[-1], "the second one was the first after all"
        assert last == first.shown[-1]
    else:
        (other,) = found
        assert last == other.shown[-1], "what the later one has written is as it was"
        if first is not None:
            assert other.read in (first.shown[-1], first.written)
            assert len(first.shown) <= STEPS or other.read == first.shown[-1]
            if len(first.shown) > STEPS:
                with pytest.raises(QueryFailed):
                    first.step()
                assert all_held(Journal(Directory(where, writes=False))) == last


def test_a_writer_that_is_replaced_while_it_begins_a_segment_says_so(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, looked = Directory(place), list[str]()

    def replaced(call: str, name: str) -> None:
        if call == "exists" and name == "generation-00000002":
            looked.append(name)
        elif call == "open" and len(looked) == 1:
            looked.append(name)
            opened(Directory(place))

    watch(monkeypatch, replaced)
    with pytest.raises(QueryFailed, match="another query has been started"):
        opened(first)


def test_a_writer_that_is_replaced_while_it_puts_a_checkpoint_says_so(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(Directory(place))

    def replaced(call: str, name: str) -> None:
        if call == "fsync" and name == "state":
            opened(Directory(place))

    watch(monkeypatch, replaced)
    with pytest.raises(QueryFailed, match="another query has been started"):
        journal.put(KEY, checkpoint(1, 1, 0, size=LARGE))
    assert os.listdir(place / "state") == []


@pytest.mark.parametrize("what", ["segment", "checkpoint"])
def test_a_writer_whose_half_written_file_is_swept_says_that_it_is_replaced(
    place: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = Directory(place)
    journal = opened(directory)
    came: list[Journal] = []

    def replaced(call: str, name: str) -> None:
        if call == "fsync" and name.startswith((".journal-00000001-", ".0-3-1-0-1")):
            came.append(opened(Directory(place)))

    watch(monkeypatch, replaced)
    with pytest.raises(QueryFailed, match="another query has been started"):
        journal.begin() if what == "segment" else journal.put(KEY, checkpoint(1, 1, 0, size=LARGE))
    assert came


def test_a_writer_that_is_replaced_before_it_sweeps_leaves_the_files_of_the_later_one(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed, goes_on = threading.Event(), threading.Event()
    slow = threading.Thread(target=lambda: Directory(place))

    def interleaved(call: str, name: str) -> None:
        if threading.current_thread() is slow and call == "fsync" and name == place.name:
            claimed.set()
            assert goes_on.wait(5)
        elif call == "fsync" and name.startswith(".journal-00000002-00000001"):
            goes_on.set()
            slow.join(5)

    watch(monkeypatch, interleaved)
    slow.start()
    assert claimed.wait(5)
    try:
        assert opened(Directory(place)).highest == -1
    finally:
        goes_on.set()
        slow.join(5)
    assert segments(place) == ["journal-00000002-00000001"]


def test_an_earlier_writer_finds_out_after_its_next_flush_and_at_its_next_segment(place: Path) -> None:
    first = Directory(place)
    journal = opened(first)
    second = Directory(place)
    journal.see(7)
    with pytest.raises(
        QueryFailed, match=f"checkpoint location {re.escape(str(place))}, and goes on where this one was"
    ):
        journal.flush()
    assert Journal(second).highest == 7, "it was flushed before it looked: the later one may read it"
    newest = second.newest()
    assert newest is not None
    with pytest.raises(QueryFailed):
        first.begin(bytes(newest))
    assert segments(place) == ["journal-00000001-00000001", "journal-00000001-00000002"], "nothing goes"


def test_a_writer_knows_of_a_later_one_also_when_more_have_come_since(place: Path) -> None:
    journal = opened(Directory(place))
    Directory(place), Directory(place)
    journal.see(1)
    with pytest.raises(QueryFailed):
        journal.flush()


def test_a_checkpoint_that_an_earlier_writer_still_puts_does_not_replace_one_of_the_later_one(place: Path) -> None:
    """Put such a checkpoint in another thread, and before anything is flushed. The earlier query had gone on to an
    epoch of which the later one has not read, so both have a primary of that term, and both count their copies from the
    same number."""
    first = opened(Directory(place))
    first.see(4)
    first.flush()
    second = opened(Directory(place))
    assert second.highest == 4
    standby(second).on_orders(orders(5, 0, 2, committed=2))
    take(second, checkpoint(2, 5, 0, size=LARGE, text=b"later"))
    second.flush()
    first.put(KEY, checkpoint(2, 5, 0, size=LARGE, text=b"older"))
    assert all_held(Journal(Directory(place, writes=False))) == all_held(second)
