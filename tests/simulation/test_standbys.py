"""Standbys in place of secondaries: checkpoints and the order instead of state, and every law is kept."""

from __future__ import annotations

from itertools import chain

import pytest

from tests.simulation.mixes import CHANGES, STANDBY_REPAIRS, STANDBYS
from tests.simulation.run import Result, run

SEEDS = range(45)


@pytest.fixture(scope="module")
def results() -> list[Result]:
    return [run(seed, mix) for mix in (STANDBYS, STANDBY_REPAIRS) for seed in SEEDS]


@pytest.mark.timeout(3600)  # a minute and a half on a free core
def test_standbys_keep_every_law(results: list[Result]) -> None:
    broken = [str(result) for result in results if not result.ok]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    "event",
    [
        "take-overs",
        "take-overs by standbys",
        "steps repeated by standbys",
        "standbys that took over without a checkpoint",
        "checkpoints that waited for their commits",
        "sources read again for a standby",
        "checkpoints that producers asked for",
        "batches evicted that a checkpoint has",
        "workers that crashed during a take-over",
        "repairs",
        "runs that came to rest",
        "runs that were repaired before their end",
    ],
)
def test_it_happens_among_standbys(results: list[Result], event: str) -> None:
    assert sum(result.counts[event] for result in results) > 1


def test_a_checkpoint_of_a_deposed_primary_is_thrown_away(results: list[Result]) -> None:
    """It is seldom, about one run in ten: its standby must hear the next primary before the checkpoint's last step is
    committed. So more runs follow until it is seen."""
    seen = "checkpoints of deposed primaries"
    more = (run(seed, STANDBYS) for seed in range(SEEDS.stop, SEEDS.stop + 150))
    assert any(result.counts[seen] for result in chain(results, more))


@pytest.fixture(scope="module")
def with_changes() -> list[Result]:
    return [run(seed, CHANGES) for seed in range(45)]


@pytest.mark.timeout(3600)
def test_checkpoints_of_what_has_changed_keep_every_law(with_changes: list[Result]) -> None:
    broken = [str(result) for result in with_changes if not result.ok]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    "event",
    [
        "checkpoints of what has changed",
        "changes of what was not committed",
        "changes of several cuts",
        "take-overs with changes to apply",
    ],
)
def test_it_happens_among_changes(with_changes: list[Result], event: str) -> None:
    assert sum(result.counts[event] for result in with_changes) > 10
