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


@pytest.mark.parametrize(
    "seldom",
    [
        # Its standby must hear the next primary before the checkpoint's last step is committed.
        "checkpoints of deposed primaries",
        # Nothing else has the rows: each replica of its stage has left, and no log keeps them for a standby.
        "sources read again for a standby",
    ],
)
def test_it_happens_once_among_more_of_them(results: list[Result], seldom: str) -> None:
    more = (run(seed, mix) for seed in range(SEEDS.stop, SEEDS.stop + 150) for mix in (STANDBYS, STANDBY_REPAIRS))
    assert any(result.counts[seldom] for result in chain(results, more))


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
