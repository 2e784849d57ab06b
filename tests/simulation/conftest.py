"""Fixtures of all tests of the simulation: results of the many seeds, and a garbage collector that runs seldom."""

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
    """Collect garbage seldom, as processes of the many seeds do: the many objects of a run live as long as the run, and looking
    for garbage costs an eighth of all time."""
    before = gc.get_threshold()
    gc.set_threshold(COLLECT_AFTER)
    yield
    gc.set_threshold(*before)


@pytest.fixture(scope="session")
def many_results(request: pytest.FixtureRequest) -> list[Result]:
    """Run the many seeds. They run in this process, except in long runs: ``make test`` has a process on each core already, and
    two more would load everything again."""
    request.config.stash[SIMULATED] = True
    return list(run_all(SEEDS)) if LONG else [run(seed) for seed in SEEDS]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.stash.get(SIMULATED, False):
        terminalreporter.write_line(told())
