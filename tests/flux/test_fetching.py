"""Fetching of collected output: the patience with workers, in virtual time."""

from __future__ import annotations

import pytest

from flux.errors import QueryTimeout
from flux.tasks.output_fetch import ASK_EVERY_S, SILENCE_MAX_S, OutputFetch
from flux.wire.messages import Chunk, Fetch
from partitioning.table import ReplicaAt, Table

ENOUGH = 10_000  # questions; a fetch that asks more has no end


class Lost:
    """A way to workers each of which is lost ``each_s`` after it was given the output; the ``last`` one answers."""

    def __init__(self, each_s: float, last: int) -> None:
        self._each_s, self._last = each_s, last
        self._now = 0.0
        self._asked = 0
        self._connected = ""

    def now(self) -> float:
        return self._now

    def newest_table(self) -> Table:
        worker = min(int(self._now / self._each_s), self._last)
        return Table(worker, (((ReplicaAt(worker, worker),),),), (), {worker: str(worker)})

    def connect(self, endpoint: str) -> None:
        self._connected = endpoint

    def ask(self, request: Fetch, seconds: float) -> tuple[Chunk, bytes] | None:
        self._asked += 1
        assert self._asked < ENOUGH
        if self._connected == str(self._last):
            return Chunk(request.stage, request.partition, request.offset, 0), b""
        self._now += seconds
        return None


def test_a_worker_that_has_just_taken_over_owes_nothing_for_those_lost_before_it() -> None:
    way = Lost(each_s=SILENCE_MAX_S * 0.8, last=5)
    assert OutputFetch(way, 0, 0).fetch(0) is not None
    assert way.now() == pytest.approx(SILENCE_MAX_S * 0.8 * 5, abs=2 * ASK_EVERY_S)


def test_one_worker_that_is_silent_for_long_is_named() -> None:
    way = Lost(each_s=1e9, last=1)
    with pytest.raises(QueryTimeout, match=f"worker at 0 did not send .* within {SILENCE_MAX_S:g} s"):
        OutputFetch(way, 0, 0).fetch(0)
    assert way.now() == pytest.approx(SILENCE_MAX_S, abs=2 * ASK_EVERY_S)
