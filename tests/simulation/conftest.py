"""Fixtures of all tests of the simulation: the many seeds, and a collector of garbage that looks seldom."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.simulation.many import COLLECT_AFTER, SEEDS, run_all, told
from tests.simulation.run import Result, run
from tests.simulation.runs import LONG

#: Whether the many seeds were run.
SIMULATED = pytest.StashKey[bool]()


@pytest.fixture(scope="session", autouse=True)
def _garbage_is_looked_for_seldom() -> Iterator[None]:
    """As in processes of their own: a run makes many objects that live as long as it, and looking costs an eighth of all."""
    before = gc.get_threshold()
    gc.set_threshold(COLLECT_AFTER)
    yield
    gc.set_threshold(*before)


@pytest.fixture(scope="session")
def many_results(request: pytest.FixtureRequest) -> list[Result]:
    """The many seeds. ``make test`` has a process on each core by itself, and two more would load everything again."""
    request.config.stash[SIMULATED] = True
    return list(run_all(SEEDS)) if LONG else [run(seed) for seed in SEEDS]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.stash.get(SIMULATED, False):
        terminalreporter.write_line(told())
