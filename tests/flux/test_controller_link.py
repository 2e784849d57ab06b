"""Silence of the controller ends a worker; time in which the worker itself stood still is no silence."""

from __future__ import annotations

import time
from typing import Any

import pytest

from flux.errors import QueryTimeout
from flux.shell.process import GRACE_S, ControllerLink, Rendezvous
from flux.shell.transport import Sockets

LIMIT_S = 60.0


@pytest.fixture
def link() -> Any:
    """Yield a link to a port without a listener."""
    sockets = Sockets(None, b"secret", 1 << 20)
    yield ControllerLink(sockets, Rendezvous("tcp://127.0.0.1:9", None, b"secret"), LIMIT_S)
    sockets.close()


def look_for(link: ControllerLink, since: float, seconds: float) -> float:
    """Check ten times a second; returns after how many seconds the link gave up."""
    for tenth in range(int(seconds * 10)):
        try:
            link.check(since + tenth / 10)
        except QueryTimeout:
            return tenth / 10
    return float("inf")


def test_a_controller_that_stays_silent_is_given_up_after_the_limit(link: ControllerLink) -> None:
    now = time.monotonic()
    assert LIMIT_S < look_for(link, now, 2 * LIMIT_S) <= LIMIT_S + GRACE_S + 1


def test_a_worker_that_was_stopped_reads_what_waits_before_it_gives_up(link: ControllerLink) -> None:
    now = time.monotonic()
    link.check(now)
    woken = now + 3 * LIMIT_S
    link.check(woken)
    link._heard, link._silent_since = woken, None  # as when something has come
    assert LIMIT_S < look_for(link, woken, 2 * LIMIT_S) <= LIMIT_S + GRACE_S + 1


def test_a_worker_whose_steps_are_long_gives_up_all_the_same(link: ControllerLink) -> None:
    now = time.monotonic()
    link.check(now + 3 * LIMIT_S)
    with pytest.raises(QueryTimeout):
        link.check(now + 4 * LIMIT_S)
