"""Marks of changed slots: each slot once, and only since the first request."""

from __future__ import annotations

import numpy as np

from partitioning.keyed_state import ROOM_MIN, ChangedSlots


def slots(*given: int) -> np.ndarray:
    return np.array(given, np.int32)


def test_nothing_is_noted_before_anybody_asks() -> None:
    changed = ChangedSlots()
    changed.note(slots(1, 2), 3)
    assert len(changed) == 0
    assert changed.nbytes == 0
    assert changed.take().tolist() == []


def test_each_slot_is_given_once_in_the_order_of_its_first_change() -> None:
    changed = ChangedSlots()
    changed.take()
    changed.note(slots(5, 1, 5), 6)
    changed.note(slots(1, 0, 5), 6)
    assert changed.take().tolist() == [5, 1, 0]
    assert changed.take().tolist() == []


def test_a_slot_that_changes_again_is_given_again() -> None:
    changed = ChangedSlots()
    changed.take()
    for _ in range(3):
        changed.note(slots(7), 8)
        assert changed.take().tolist() == [7]


def test_it_grows_with_the_slots_and_gives_back_memory_that_one_burst_needed() -> None:
    changed = ChangedSlots()
    changed.take()
    every = np.arange(100 * ROOM_MIN, dtype=np.int32)
    changed.note(every, len(every))
    assert changed.take().tolist() == every.tolist()
    burst = changed.nbytes
    changed.note(slots(3), len(every))
    assert changed.take().tolist() == [3]
    assert changed.nbytes < burst
