"""The many seeds run from the start, beside the other tests of the simulation, which leave a core idle."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simulation.many import SEEDS, begin, told
from tests.simulation.run import Result

#: Whether the many seeds were run.
SIMULATED = pytest.StashKey[bool]()


@pytest.fixture(scope="session", autouse=True)
def under_way(request: pytest.FixtureRequest) -> Iterator[Iterator[Result]]:
    wanted = any("many_results" in getattr(item, "fixturenames", ()) for item in request.session.items)
    request.config.stash[SIMULATED] = wanted
    with begin(SEEDS if wanted else ()) as results:
        yield results


@pytest.fixture(scope="session")
def many_results(under_way: Iterator[Result]) -> list[Result]:
    return list(under_way)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.stash.get(SIMULATED, False):
        terminalreporter.write_line(told())
