"""Thousands of random schedules of order logs lose no committed step; without any one rule, some do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flux.replica.order_log import OrderLog, Peer
from tests.simulation.orders import Lost, Schedule
from tests.simulation.runs import LONG
from tests.simulation.variants import acks_what_an_earlier_primary_sent, heeds_a_deposed_primary

Patch = pytest.MonkeyPatch
#: Schedules that keep the law. A missing rule shows in one of the first some hundreds, or later.
SEEDS, MORE = range(4000 if LONG else 1500), range(4000)
#: The shares of messages lost on the way, in turn.
LOSSES = (0.0, 0.1, 0.3, 0.5)


def _schedule(seed: int) -> Schedule:
    return Schedule(seed, LOSSES[seed % len(LOSSES)])


def test_whoever_may_take_over_has_all_that_anybody_holds_for_committed() -> None:
    committed = take_overs = 0
    for seed in SEEDS:
        schedule = _schedule(seed)
        schedule.run()
        committed += len(schedule.official)
        take_overs += schedule.primary.leads_since > 0
    assert committed > 10 * len(SEEDS)
    assert take_overs > len(SEEDS) / 4


def promises_although_another_is_live(patch: Patch) -> None:
    patch.setattr(OrderLog, "alone", lambda self, peer: peer.live and peer.greeted)


def counts_on_a_replica_that_lacks_what_was_promised(patch: Patch) -> None:
    patch.setattr(OrderLog, "settled", lambda self, peer: self.committed >= peer.copied_at)


def promises_before_the_secondary_has_answered(patch: Patch) -> None:
    """Promise to the only live secondary before it has answered, though it may hold entries of an earlier term in the places of
    the new ones."""

    def broken(self: OrderLog, peer: Peer) -> bool:
        return peer.live and sum(other.live for other in self.peers.values()) == 1

    patch.setattr(OrderLog, "alone", broken)


def forgets_that_a_copy_has_uncommitted_steps(patch: Patch) -> None:
    """Forget that a copy of the state may hold steps that the survivors of its primary order otherwise."""
    settled = OrderLog.settled

    def broken(self: OrderLog, peer: Peer) -> bool:
        copied_at, peer.copied_at = peer.copied_at, 0
        try:
            return settled(self, peer)
        finally:
            peer.copied_at = copied_at

    patch.setattr(OrderLog, "settled", broken)


def _first_broken() -> int | None:
    for seed in MORE:
        try:
            _schedule(seed).run()
        except (Lost, AssertionError):  # a replica whose committed steps are contradicted ends itself
            return seed
    return None


@pytest.mark.parametrize(
    "break_it",
    [
        promises_although_another_is_live,
        counts_on_a_replica_that_lacks_what_was_promised,
        forgets_that_a_copy_has_uncommitted_steps,
        promises_before_the_secondary_has_answered,
        acks_what_an_earlier_primary_sent,
        heeds_a_deposed_primary,
    ],
    ids=lambda value: value.__name__,
)
def test_each_rule_is_needed(break_it: Callable[[Patch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        break_it(patch)
        seed = _first_broken()
    assert seed is not None, f"{break_it.__name__} got through {len(MORE)} schedules"
    _schedule(seed).run()  # the unbroken code keeps the law under the same seed
