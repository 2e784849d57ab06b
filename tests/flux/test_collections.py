"""Modules that a process has loaded are not looked through again and again for garbage; garbage of tasks is
collected."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from flux.shell import process as shell


class Cyclic:
    def __init__(self) -> None:
        self.myself = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    gc.unfreeze()
    threshold = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*threshold)


def test_what_is_loaded_is_left_out_and_what_a_task_leaves_behind_is_collected() -> None:
    gone = weakref.ref(Cyclic())
    shell.short_collections()
    assert gone() is None
    loaded = gc.get_freeze_count()
    assert loaded > shell.LOADED, "the modules of this process"
    assert len(gc.get_objects()) < shell.LOADED
    left = weakref.ref(Cyclic())
    shell.short_collections()  # the next task in this process
    assert left() is None
    assert gc.get_freeze_count() <= loaded, "what a task has is not left out for ever"


def test_what_is_loaded_later_is_left_out_too_if_it_is_much(monkeypatch: pytest.MonkeyPatch) -> None:
    shell.short_collections()
    loaded = gc.get_freeze_count()
    monkeypatch.setattr(shell, "LOADED", 10_000)
    more = [[number] for number in range(20_000)]
    shell.short_collections()
    assert gc.get_freeze_count() > loaded + len(more) // 2


def test_rows_that_come_one_by_one_are_not_looked_through_again_and_again() -> None:
    gc.set_threshold(700, 10, 10)
    shell.short_collections()
    assert gc.get_threshold() == (shell.YOUNG, 10, 10)


def test_whoever_looks_for_garbage_more_seldom_or_never_goes_on_like_that() -> None:
    for threshold in (0, 2 * shell.YOUNG):
        gc.set_threshold(threshold)
        shell.short_collections()
        assert gc.get_threshold()[0] == threshold


def test_a_process_that_does_something_else_afterwards_looks_for_garbage_as_before() -> None:
    gc.set_threshold(600, 9, 8)
    shell.short_collections()
    shell.usual_collections()
    assert gc.get_threshold() == (600, 9, 8)
    gc.set_threshold(5)  # by the program
    shell.usual_collections()
    assert gc.get_threshold()[0] == 5


def test_a_few_objects_that_hold_much_do_not_wait_until_there_are_many() -> None:
    """Look for cycles before there are many: a function inside ``process`` that calls itself is one, and holds the
    batch that it sees."""
    gc.set_threshold(700, 10, 10)
    shell.short_collections()
    garbage = [Cyclic() for _ in range(2 * shell.FEW)]
    held = weakref.ref(garbage[0])
    garbage.clear()
    assert held() is not None
    shell.look_for_garbage()
    assert held() is None
    assert gc.get_threshold() == (shell.YOUNG, 10, 10)


def test_garbage_that_was_none_at_the_first_look_is_found_at_a_later_one() -> None:
    gc.set_threshold(700, 3, 3)
    shell.short_collections()
    old = Cyclic()
    held = weakref.ref(old)
    gc.collect(0)
    del old
    kept = []
    for _ in range(5):
        kept.append([Cyclic() for _ in range(2 * shell.FEW)])
        shell.look_for_garbage()
    assert held() is None


def test_who_makes_few_objects_is_left_alone() -> None:
    shell.short_collections()
    gc.collect()
    held = weakref.ref(Cyclic())
    shell.look_for_garbage()
    assert held() is not None
