"""Runs of one kind, made when a test asks for them: a few for the laws, more where an event is rare.

``make test`` makes a few of each kind, ``make test-long`` all of them (``LONG``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from itertools import product

from tests.simulation.mixes import Mix
from tests.simulation.run import Result, run

#: Whether this is ``make test-long``, which makes every run that a test has.
LONG = bool(os.environ.get("FLUX_TEST_LONG"))


class Runs:
    """Results of runs, in order. Each is made once."""

    def __init__(self, runs: Iterable[Callable[[], Result]], few: int) -> None:
        self._pending = list(runs)[::-1]
        self._few = len(self._pending) if LONG else few
        self.results: list[Result] = []

    def _next(self) -> Result:
        result = self._pending.pop()()
        self.results.append(result)
        return result

    def broken(self) -> list[str]:
        """Make the few, and return those that broke a law."""
        while len(self.results) < self._few:
            self._next()
        return [str(result) for result in self.results if not result.ok]

    def times(self, event: str, enough: int) -> int:
        """Count an event in these runs, and make more of them until it has happened ``enough`` times."""
        assert not self.broken()
        times = sum(result.counts[event] for result in self.results)
        while times < enough and self._pending:
            result = self._next()
            assert result.ok, str(result)
            times += result.counts[event]
        return times


def runs_of(mixes: Iterable[Mix], seeds: Iterable[int], few: int) -> Runs:
    """Return the runs of each seed under each mix."""

    def made(seed: int, mix: Mix) -> Callable[[], Result]:
        return lambda: run(seed, mix)

    return Runs([made(seed, mix) for seed, mix in product(seeds, mixes)], few)
