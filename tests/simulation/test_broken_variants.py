"""The checkers can fail: each deliberately broken variant of the exchange is caught, and the unbroken code is not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np
import pytest

import flux.replica
import flux.stage_worker
from controller.repairs import Repairs
from flux.log import Log
from flux.order import Peer
from flux.producer import NEVER, Producer
from flux.receiver import Inbound
from flux.replica import Replica
from flux.stage_worker import LOCAL, StageWorker
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
ACKED = {"an ack never exceeds what was applied", "no batch leaves the log before it is applied"}
COMMITTED = {"nothing is given out before it is committed"}
#: How it shows that replicas have gone different ways.
ALIKE = ROWS | {"replicas take the same steps", "equal sequences are equal batches", "replicas agree"}


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
        if self.connection == LOCAL:
            return message  # a worker that talks to itself would not come to an end
        return msgspec.structs.replace(message, next=[(partition, needed + 1) for partition, needed in message.next])

    patch.setattr(Inbound, "resume", broken)


def finishes_with_the_first_stream(patch: Patch) -> None:
    """A stage takes the end of one stream for the end of its input."""
    patch.setattr(Replica, "_input_ended", property(lambda self: any(self._ended.values())))


def applies_the_newest_first(patch: Patch) -> None:
    add = Replica.add

    def broken(self: Replica, slice_: Any) -> None:
        add(self, slice_)
        self._waiting[slice_.stream].rotate(1)

    patch.setattr(Replica, "add", broken)


def sends_a_key_to_two_partitions(patch: Patch) -> None:
    def broken(batch: Any, key: Any, partitions: int, order: Any = None) -> Any:
        return whole(batch, batch.num_rows % partitions, partitions, order)

    patch.setattr(flux.replica, "cluster_by_key", broken)
    patch.setattr(flux.stage_worker, "cluster_by_key", broken)


# ---- variants of what keeps replicas alike


def sends_before_it_is_committed(patch: Patch) -> None:
    """The release rule is left out."""
    release = Replica.release

    def broken(self: Replica) -> None:
        release(self)
        for outlet in self.outlets:
            outlet.producer.release_from = NEVER

    patch.setattr(Replica, "release", broken)


def reports_the_end_before_it_is_committed(patch: Patch) -> None:
    patch.setattr(Replica, "through", property(lambda self: self.finished))


def applies_what_is_not_committed(patch: Patch) -> None:
    """A secondary applies steps as soon as it hears of them."""
    ready = Replica.ready.fget  # type: ignore[attr-defined]

    def broken(self: Replica) -> bool:
        committed, self.order.committed = self.order.committed, self.order.end
        try:
            return bool(ready(self))
        finally:
            self.order.committed = committed

    patch.setattr(Replica, "ready", property(broken))


def copies_before_producers_retain(patch: Patch) -> None:
    """The copy is ordered as soon as the new replica is listed."""
    patch.setattr(Repairs, "confirmed", lambda self, epoch: [a for a in self.under_way.values() if a.phase == "retain"])


def acks_for_a_state_that_has_not_come(patch: Patch) -> None:
    patch.setattr(StageWorker, "_awaited_by", lambda self, stream: [])


def counts_on_a_replica_before_it_is_safe(patch: Patch) -> None:
    """Live is taken for safe."""
    patch.setattr(Repairs, "is_safe", lambda self, stage, partition, replica: replica.live)


def sends_orders_only_once(patch: Patch) -> None:
    patch.setattr(Peer, "overdue", lambda *given: False)


def asks_anew_for_nothing(patch: Patch) -> None:
    """A new replica does not tell the producers what it needs."""
    patch.setattr(StageWorker, "_ask_again", lambda *given: None)


def never_goes_over_to_a_survivor(patch: Patch) -> None:
    patch.setattr(StageWorker, "_choose_sources", lambda self: None)


def repairs_everything_at_once(patch: Patch) -> None:
    next_ = Repairs.next

    def broken(self: Repairs, *given: Any) -> Any:
        under_way, self.under_way = self.under_way, {}
        try:
            wanted = next_(self, *given)
        finally:
            self.under_way = under_way
        return wanted if wanted and (wanted.stage, wanted.partition) not in under_way else None

    patch.setattr(Repairs, "next", broken)


def never_repairs(patch: Patch) -> None:
    patch.setattr(Repairs, "to_ask", lambda self, now: [])


@pytest.mark.parametrize(
    ("break_it", "laws"),
    [
        (accepts_duplicates, ROWS),
        (acks_before_it_applies, {"an ack never exceeds what was applied"}),
        (evicts_when_one_has_acked, {"no batch leaves the log before it is applied"}),
        (never_returns_credit, STUCK | {"logs and queues drain"}),
        (sends_without_credit, {"bytes held <= credit + one message"}),
        (appends_to_a_full_log, {"log bytes <= bound + one batch"}),
        (overlooks_gaps, ROWS | ACKED),
        (never_greets_again, STUCK),
        (resumes_one_too_far, ROWS | STUCK),
        (finishes_with_the_first_stream, ROWS | STUCK | {"logs and queues drain"}),
        (applies_the_newest_first, ROWS),
        (sends_a_key_to_two_partitions, {"one partition per key"}),
        (sends_before_it_is_committed, COMMITTED),
        (reports_the_end_before_it_is_committed, COMMITTED),
        (applies_what_is_not_committed, {"a secondary applies committed steps only"}),
        (copies_before_producers_retain, ROWS | STUCK | ACKED),
        (acks_for_a_state_that_has_not_come, {"nothing is acked before the state has come"}),
        (counts_on_a_replica_before_it_is_safe, COMMITTED | ALIKE | STUCK),
        (sends_orders_only_once, STUCK),
        (asks_anew_for_nothing, ROWS | STUCK | ACKED),
        (never_goes_over_to_a_survivor, STUCK),
        (repairs_everything_at_once, {"at most so many additions at a time", "the sweep goes stage by stage"}),
        (never_repairs, STUCK),
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
        unsteady = (seed for seed in range(1000, 3000) if Simulation(seed).faults.nondeterministic)
        caught = _first_caught(unsteady)
    assert caught is not None
    assert caught.law in ROWS | STUCK
    assert run(caught.seed).ok
