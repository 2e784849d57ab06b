"""A reader in a thread ahead of its worker: the batches that it joins, its bell, and its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from flux.dataflow import threaded_reader as ahead
from flux.dataflow.source import Positioned
from flux.dataflow.source_reader import SILENT
from flux.dataflow.threaded_reader import ThreadedReader

LONG_S = 20.0


def rows(number: int, first: int = 0) -> Positioned:
    return Positioned(pa.record_batch({"n": range(first, first + number)}), first + number)


class Reading:
    """A reader ahead whose items this test gives one by one, with its bell."""

    def __init__(self, gather_s: float = 0.0) -> None:
        self._more = threading.Semaphore(0)
        self._items: list[Any] = []
        self.rang = threading.Event()
        self.ahead = ThreadedReader(self._given, "test", gather_s)
        self.ahead.when_ready(self.rang.set)

    def _given(self) -> Iterator[Any]:
        while True:
            self._more.acquire(timeout=LONG_S)
            item = self._items.pop(0)
            if item is None:
                return
            if isinstance(item, Exception):
                raise item
            yield item

    def gives(self, *items: Any) -> None:
        for item in items:
            self._items.append(item)
            self._more.release()

    def waits(self, number: int) -> None:
        """Wait until ``number`` batches are ready."""
        until(lambda: len(self.ahead._ready) >= number)


def until(reached: Callable[[], Any]) -> None:
    end = time.monotonic() + LONG_S
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture
def reading() -> Iterator[Reading]:
    made = Reading()
    yield made
    made.ahead.close()
    made.gives(None)


def numbers(taken: Positioned | None) -> list[int]:
    assert taken is not None
    return taken.batch.column(0).to_pylist()  # type: ignore[no-any-return]


def test_small_batches_that_wait_come_together_with_the_position_behind_them(reading: Reading) -> None:
    reading.gives(rows(2), rows(3, 2), rows(1, 5))
    reading.waits(3)
    taken = next(reading.ahead)
    assert numbers(taken) == [0, 1, 2, 3, 4, 5]
    assert taken is not None
    assert taken.position == 6
    assert next(reading.ahead) is None


def test_no_more_come_together_than_the_limit(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "JOINED_ROWS", 4)
    reading.gives(rows(2), rows(2, 2), rows(1, 4), rows(9, 5))
    reading.waits(4)
    assert [len(numbers(next(reading.ahead))) for _ in range(3)] == [4, 1, 9]


def test_a_batch_of_another_schema_comes_alone_so_that_whoever_takes_it_can_say_what_is_wrong(reading: Reading) -> None:
    other = Positioned(pa.record_batch({"other": ["x"]}), 2)
    reading.gives(rows(1), other, rows(1, 2))
    reading.waits(3)
    taken = [next(reading.ahead) for _ in range(3)]
    assert [each and each.batch.schema.names for each in taken] == [["n"], ["other"], ["n"]]


def test_batches_whose_dictionaries_have_no_room_in_one_come_apart(reading: Reading) -> None:
    def coded(first: int) -> Positioned:
        values = [f"value {n}" for n in range(first, first + 100)]
        indices = pa.array(range(100), pa.int8())
        return Positioned(pa.record_batch({"n": pa.DictionaryArray.from_arrays(indices, values)}), first + 100)

    reading.gives(coded(0), coded(100), coded(200))
    reading.waits(3)
    taken = [next(reading.ahead) for _ in range(3)]
    assert [each and each.position for each in taken] == [100, 200, 300]
    assert [each and each.batch.column(0)[0].as_py() for each in taken] == ["value 0", "value 100", "value 200"]
    assert next(reading.ahead) is None
    reading.gives(rows(ahead.JOINED_ROWS))  # there is room for these
    reading.waits(1)


def test_it_rings_once_something_has_come_after_there_was_nothing(reading: Reading) -> None:
    reading.gives(rows(1))
    reading.waits(1)
    assert not reading.rang.is_set(), "nobody has asked in vain"
    assert numbers(next(reading.ahead)) == [0]
    assert next(reading.ahead) is None
    reading.gives(rows(1, 1))
    assert reading.rang.wait(LONG_S)
    reading.rang.clear()
    reading.gives(rows(1, 2))
    reading.waits(2)
    assert not reading.rang.is_set(), "it has rung already"


@pytest.mark.parametrize("end", [None, ValueError("broken")])
def test_it_rings_at_its_end_which_comes_behind_all_rows(reading: Reading, end: Exception | None) -> None:
    assert next(reading.ahead) is None
    reading.gives(end)
    assert reading.rang.wait(LONG_S)
    with pytest.raises(StopIteration if end is None else ValueError):
        next(reading.ahead)


def test_a_reader_that_is_at_it_has_not_paused(reading: Reading) -> None:
    """Count pauses exactly: a wait for all rows that there are goes by this number."""
    assert next(reading.ahead) is None
    assert reading.ahead.pauses() == 0
    reading.gives(rows(1), 0.0)
    reading.waits(1)
    assert reading.ahead.pauses() == 0
    reading.gives(0.001, rows(1, 1))
    reading.waits(2)
    assert reading.ahead.pauses() == 1


def test_rows_before_an_error_are_taken_first(reading: Reading) -> None:
    reading.gives(rows(2), ValueError("broken"))
    until(lambda: reading.ahead._error)
    assert numbers(next(reading.ahead)) == [0, 1]
    with pytest.raises(ValueError, match="broken"):
        next(reading.ahead)


def test_few_rows_wait_for_more_but_not_for_long() -> None:
    reading = Reading(gather_s=0.2)
    assert next(reading.ahead) is None
    began = time.monotonic()
    reading.gives(rows(1))
    reading.waits(1)
    while (taken := next(reading.ahead)) is None:
        time.sleep(0.001)
    assert time.monotonic() - began >= 0.2
    assert numbers(taken) == [0]
    assert not reading.rang.is_set(), "a worker asks again by itself"
    reading.gives(None)


@pytest.mark.parametrize("end", [None, "many"])
def test_what_is_many_or_the_last_waits_for_nothing(end: str | None) -> None:
    reading = Reading(gather_s=LONG_S)
    assert next(reading.ahead) is None
    reading.gives(rows(1), None if end is None else rows(ahead.JOINED_ROWS // 2, 1))
    assert reading.rang.wait(LONG_S / 2)
    taken = next(reading.ahead)
    assert taken is not None
    assert numbers(taken)[0] == 0
    reading.gives(None)


def test_a_reader_that_is_asked_for_long_and_does_not_answer_is_silent(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "SILENCE_S", 0.05)
    assert next(reading.ahead) is None
    until(lambda: next(reading.ahead) is SILENT)
    assert reading.ahead.pauses() == 0
    since = reading.ahead._asked_in_vain_since()
    assert since is not None
    assert since <= time.monotonic() - 0.05
    reading.gives(LONG_S)
    until(lambda: reading.ahead.pauses() == 1)
    assert reading.ahead._asked_in_vain_since() is None, "it is not asked now"
    time.sleep(0.1)
    assert next(reading.ahead) is None, "it has answered that there is nothing for a while"
