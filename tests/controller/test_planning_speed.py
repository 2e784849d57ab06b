"""Planning for large clusters takes no time to speak of. Each limit is ten times the measured time; the command
``pytest benchmarks/test_planning.py`` makes the figures."""

from __future__ import annotations

import time

from benchmarks.test_planning import LOST, Large


def test_a_plan_for_the_loss_of_10_of_1000_workers_with_100_000_partitions() -> None:
    large = Large()
    started = time.process_time()
    after, wanted = large.plan_for_losses()
    assert time.process_time() - started < 10.0
    assert len(wanted) == LOST * 200, "every copy that the lost workers held"
    assert all(worker in after.endpoints for worker in {addition.worker for addition in wanted})
    spread = large.held(after, wanted)
    assert max(spread) - min(spread) <= 1


def test_a_round_of_pairing_over_200_000_copies() -> None:
    large = Large()
    loads = large.loads()
    pairing = large.pairing()
    for number in range(3):
        started = time.process_time()
        suggestion = pairing.suggest(loads, float(number))
        assert time.process_time() - started < 5.0
    assert suggestion.moves
    assert {move.from_worker for move in suggestion.moves} <= set(large.overloaded)
