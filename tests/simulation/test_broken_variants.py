"""The checkers can fail: each deliberately broken variant of the exchange is caught, and the unbroken code is not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np
import pytest

import flux.replica
import flux.stage_worker
from flux.log import Log
from flux.producer import Producer
from flux.receiver import Inbound
from flux.replica import Replica
from partitioning.cluster import whole
from tests.simulation.run import Result, Simulation, run

Patch = pytest.MonkeyPatch
SEEDS_MAX = 120
#: How a row that is lost, doubled or out of order shows.
ROWS = {
    "each partition applies each batch once and in order",
    "order within a stream",
    "every row counted once at the sink",
    "no unhandled exception",
}
STUCK = {"every run comes to its end"}


def _first_caught(seeds: Iterable[int]) -> Result | None:
    return next((result for result in map(run, seeds) if not result.ok), None)


# ---- the variants


def accepts_duplicates(patch: Patch) -> None:
    """A consumer takes a slice that it has taken before."""
    slices = Inbound._slices

    def broken(self: Inbound, *given: Any) -> Any:
        received, self.received = self.received, np.zeros_like(self.received)
        try:
            return slices(self, *given)
        finally:
            self.received = received

    patch.setattr(Inbound, "_slices", broken)


def acks_before_it_applies(patch: Patch) -> None:
    """An ack says what was received, not what was applied."""
    ack = Inbound.ack

    def broken(self: Inbound, *given: Any) -> Any:
        waiting, self.waiting = self.waiting, {}
        try:
            return ack(self, *given)
        finally:
            self.waiting = waiting

    patch.setattr(Inbound, "ack", broken)


def evicts_when_one_has_acked(patch: Patch) -> None:
    """A batch leaves the log when the fastest partition has acked it."""
    evict = Log.evict
    patch.setattr(Log, "evict", lambda self, acked: evict(self, np.full_like(acked, acked.max(initial=-1))))


def never_returns_credit(patch: Patch) -> None:
    """What was applied counts as held for ever. (Forgotten by one connection alone, the next handshake mends it.)"""
    applied = Inbound.applied

    def broken(self: Inbound, *given: Any) -> None:
        held = self.held_bytes
        applied(self, *given)
        self.held_bytes = held

    patch.setattr(Inbound, "applied", broken)


def sends_without_credit(patch: Patch) -> None:
    """A producer does not heed what it was granted."""
    data = Producer._data

    def broken(self: Producer, worker: int, cursor: Any, now: float) -> Any:
        cursor.granted = 1 << 60
        return data(self, worker, cursor, now)

    patch.setattr(Producer, "_data", broken)


def appends_to_a_full_log(patch: Patch) -> None:
    """Back-pressure is ignored."""
    patch.setattr(Producer, "has_room", property(lambda self: not self.finished))


def overlooks_gaps(patch: Patch) -> None:
    """A consumer does not see that a message is missing."""
    take = Inbound.take

    def broken(self: Inbound, message: Any, *given: Any) -> Any:
        return take(self, msgspec.structs.replace(message, number=self.number, first=0), *given)

    patch.setattr(Inbound, "take", broken)


def never_greets_again(patch: Patch) -> None:
    """A producer waits for ever for an ack that was lost."""
    patch.setattr(Producer, "_silent", lambda self, cursor, now: False)


def resumes_one_too_far(patch: Patch) -> None:
    """A consumer asks for the batch after the one that it needs."""
    resume = Inbound.resume

    def broken(self: Inbound, *given: Any) -> Any:
        message = resume(self, *given)
        return msgspec.structs.replace(message, next=[(partition, needed + 1) for partition, needed in message.next])

    patch.setattr(Inbound, "resume", broken)


def finishes_with_the_first_stream(patch: Patch) -> None:
    """A stage takes the end of one stream for the end of its input."""
    patch.setattr(Replica, "_input_ended", property(lambda self: any(self._ended.values())))


def applies_the_newest_first(patch: Patch) -> None:
    patch.setattr(Replica, "add", lambda self, slice_: self._queue.appendleft(slice_))


def sends_a_key_to_two_partitions(patch: Patch) -> None:
    def broken(batch: Any, key: Any, partitions: int, order: Any = None) -> Any:
        return whole(batch, batch.num_rows % partitions, partitions, order)

    patch.setattr(flux.replica, "cluster_by_key", broken)
    patch.setattr(flux.stage_worker, "cluster_by_key", broken)


@pytest.mark.parametrize(
    ("break_it", "laws"),
    [
        (accepts_duplicates, ROWS),
        (acks_before_it_applies, {"an ack never exceeds what was applied"}),
        (evicts_when_one_has_acked, {"no batch leaves the log before it is applied"}),
        (never_returns_credit, STUCK | {"logs and queues drain"}),
        (sends_without_credit, {"bytes held <= credit + one message"}),
        (appends_to_a_full_log, {"log bytes <= bound + one batch"}),
        (overlooks_gaps, ROWS),
        (never_greets_again, STUCK),
        (resumes_one_too_far, ROWS | STUCK),
        (finishes_with_the_first_stream, ROWS | STUCK),
        (applies_the_newest_first, ROWS),
        (sends_a_key_to_two_partitions, {"one partition per key"}),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_broken_variant_is_caught(break_it: Callable[[Patch], None], laws: set[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        break_it(patch)
        caught = _first_caught(range(SEEDS_MAX))
    assert caught is not None, f"{break_it.__name__} got through {SEEDS_MAX} runs"
    assert caught.law in laws, str(caught)
    assert run(caught.seed).ok, "the unbroken code keeps the laws under the same seed"


def test_a_retry_that_reads_other_rows_would_be_caught_by_its_wrong_result() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Producer, "_compare", lambda *given: None)
        patch.setattr(Producer, "_check", lambda *given: None)
        unsteady = (seed for seed in range(1000) if Simulation(seed).faults.nondeterministic)
        caught = _first_caught(unsteady)
    assert caught is not None
    assert caught.law in ROWS | STUCK
    assert run(caught.seed).ok
