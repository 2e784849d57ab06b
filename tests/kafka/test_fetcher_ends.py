"""The end of readers and sockets when the thread that fetches ends, with an error or without."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from flux.connectors.kafka.client.cluster import Client, Located
from flux.connectors.kafka.client.security import Security
from flux.connectors.kafka.client.topic_ids import UNKNOWN
from flux.connectors.kafka.errors import BrokerBroken
from flux.connectors.kafka.read.fetch_thread import Fetcher, _FetchRun

LIMIT_S = 20.0
HERE, THERE = ("here", 1), ("there", 1)


class Reader:
    topic, topic_id, next_offset, takes_time, full = "clicks", UNKNOWN, 0, False, False
    may_be_silent = answered_before = False

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self.failed: list[BaseException] = []
        self.is_over = threading.Event()

    def came(self, answer: Any) -> None: ...

    def nothing(self, end: int, lags: bool = False) -> None: ...

    def not_answered(self) -> None: ...

    def work_off(self, may_wait: bool) -> bool:
        return False

    def fail(self, error: BaseException) -> None:
        self.failed.append(error)

    def over(self) -> None:
        self.is_over.set()


def until(there: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT_S
    while not there():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def asks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Requests, with the run that would send them. Partition 0 is led here, all others there."""
    asked: list[Any] = []

    def looked_up(self: _FetchRun, parts: Any) -> None:
        leaders = {part.number: THERE if part.number else HERE for part in parts}
        self.tell(functools.partial(self._found, parts, {"clicks": Located(UNKNOWN, leaders)}))

    monkeypatch.setattr(_FetchRun, "_looked_up", looked_up)
    monkeypatch.setattr(_FetchRun, "_send", lambda self, ask: asked.append((self, ask)))
    return asked


def fetcher() -> Fetcher:
    return Fetcher([HERE], Security({}), 1 << 20, True, 300.0)


def crash() -> None:
    raise RuntimeError("a fault of ours")


def test_an_answer_without_parts_ends_those_that_were_asked_for_and_says_why(asks: list[Any]) -> None:
    """Null in an answer ended every reader of every broker, with a TypeError."""
    fetching, here, there = fetcher(), Reader(0), Reader(1)
    for reader in (here, there):
        fetching.add(reader)
    until(lambda: len(asks) == 2)
    run, ask = next((run, ask) for run, ask in asks if ask.slot.broker == HERE)
    empty = SimpleNamespace(throttle_time_ms=0, error_code=0, responses=None)
    run.tell(functools.partial(run._answered, ask, empty))
    until(lambda: here.failed)
    assert [type(error) for error in here.failed] == [BrokerBroken]
    assert not there.failed
    assert not run.ended
    for reader in (here, there):
        fetching.remove(reader)
        assert reader.is_over.wait(LIMIT_S)
    until(lambda: run.ended)


def test_readers_of_a_thread_that_has_failed_are_told_and_leave_the_next_one_alone(asks: list[Any]) -> None:
    """Removing one of these readers ended the thread of later ones, without an error."""
    fetching, first, later = fetcher(), Reader(0), Reader(1)
    fetching.add(first)
    until(lambda: asks)
    failed = asks[0][0]
    failed.tell(crash)
    until(lambda: first.failed)
    fetching.add(later)
    until(lambda: len(asks) == 2)
    following = asks[1][0]
    fetching.remove(first)
    assert first.is_over.wait(LIMIT_S)
    time.sleep(0.05)
    assert following is not failed
    assert not following.ended
    assert not later.failed
    fetching.remove(later)
    assert later.is_over.wait(LIMIT_S)


def test_the_connection_for_leaders_is_closed_with_the_last_reader(
    asks: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Client] = []
    monkeypatch.setattr(Client, "close", lambda self: closed.append(self))
    fetching, reader = fetcher(), Reader(0)
    fetching.add(reader)
    until(lambda: asks)
    run = asks[0][0]
    fetching.remove(reader)
    until(lambda: run._leaders in closed)
