"""Replicas of another kind among active ones: witnesses keep only the order, and every law is kept."""

from __future__ import annotations

import pytest

from flux.replica import kinds
from tests.simulation.mixes import WITNESSED
from tests.simulation.runs import Runs, runs_of
from tests.simulation.witness import WITNESS, witnesses

SEEDS = range(100)
#: Cheap runs in which all events happen.
FEW = [(seed, WITNESSED) for seed in (0, 2, 6, 7, 8, 12, 14, 17)]


@pytest.fixture(scope="module")
def witnessed() -> Runs:
    return runs_of((WITNESSED,), SEEDS, FEW)


@pytest.mark.timeout(3600)  # a minute on a free core
def test_active_replicas_and_witnesses_together_keep_every_law(witnessed: Runs) -> None:
    broken = witnessed.broken()
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    "event",
    [
        "steps that a witness had to know",
        "witnesses added",
        "witnesses moved",
        "workers that crashed during a repair",
        "take-overs",
        "repairs",
        "primaries moved",
        "drains completed",
        "moves that lost a bystander",
        "runs that were repaired before their end",
        "runs that came to rest",
    ],
)
def test_it_happens_among_witnesses(witnessed: Runs, event: str) -> None:
    assert witnessed.happens(event, 4)


def test_a_kind_is_known_only_as_long_as_it_is_registered() -> None:
    with witnesses(1):
        assert WITNESS in kinds.without_streams()
        assert WITNESS in [kind.name for kind in kinds.registered()]
    assert not kinds.without_streams()
    assert WITNESS not in [kind.name for kind in kinds.registered()]
