"""Simulated runs whose partitions begin empty when the worker of their last replica is lost: laws, and variants that break
them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from controller.course import beginnings
from flux.exchange.consumer_map import ConsumersAt
from flux.exchange.log import Log
from flux.replica.output import SinkBuffer
from flux.replica.replica import Replica
from tests.simulation.converging import COMES, CONVERGES_FROM, HONEST, ONCE, WHOLE, ConvergingSimulation
from tests.simulation.violation import Violation

pytestmark = pytest.mark.long


#: Longest time of a call of a slow outside, as long as a window: a partition could fire one before it has the answer.
SLOW_S = 0.5


def runs(seeds: range | tuple[int, ...], call_s: float | None = None) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        sim = ConvergingSimulation(CONVERGES_FROM + seed, call_s=call_s)
        sim.run()
        counts.update(sim.counts)
    return counts


def test_runs_that_begin_empty_keep_all_laws() -> None:
    counts = runs((0, 1, 2, 3))
    assert counts["partitions that began empty"] > 3
    assert counts["results that lack rows"] > 3
    assert counts["results with all rows"] > 50


def test_runs_that_begin_empty_in_front_of_a_slow_sink_keep_all_laws() -> None:
    counts = runs((0, 2), SLOW_S)
    assert counts["partitions that began empty"] > 3
    assert counts["writes behind a late one of a lost worker"] > 0


def test_many_runs_that_begin_empty_keep_all_laws() -> None:
    counts = runs(range(4, 60))
    assert counts["horizons that were not known by the end"] < counts["partitions that began empty"] / 4


def keeps_to_rows_that_are_gone(patch: pytest.MonkeyPatch) -> None:
    """Refuse a replica that begins empty, because rows from the start on are gone."""
    patch.setattr(
        ConsumersAt,
        "empty",
        property(lambda self: np.zeros(len(self.partitions), bool), lambda *given: None),
        raising=False,
    )


def forgets_that_a_stream_has_ended(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Log, "restore_end", lambda self: None)


def numbers_its_output_from_the_start(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replica, "begin_behind_lost", lambda self: None)


def orders_before_the_outside_has_answered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SinkBuffer, "waits", property(lambda self: self.uncompared))


def leaves_the_window_out(patch: pytest.MonkeyPatch) -> None:
    """Report results as whole right behind the newest lost row."""
    patch.setattr(beginnings, "_through", lambda begun, plan: begun.newest)


def says_that_nothing_is_whole(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(beginnings, "_through", lambda begun, plan: 1 << 62)


@pytest.mark.parametrize(
    ("variant", "law", "seed", "call_s"),
    [
        (keeps_to_rows_that_are_gone, ONCE, 2, None),
        (forgets_that_a_stream_has_ended, "every run comes to its end", 6, None),
        (numbers_its_output_from_the_start, "no run fails", 1, None),
        (orders_before_the_outside_has_answered, COMES, 0, SLOW_S),
        (leaves_the_window_out, WHOLE, 1, None),
        (says_that_nothing_is_whole, HONEST, 0, None),
    ],
)
def test_each_law_is_broken_without_its_rule(
    variant: Callable[[pytest.MonkeyPatch], None], law: str, seed: int, call_s: float | None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        variant(patch)
        with pytest.raises(Violation) as broken:
            ConvergingSimulation(CONVERGES_FROM + seed, call_s=call_s).run()
    assert broken.value.law == law, str(broken.value)
