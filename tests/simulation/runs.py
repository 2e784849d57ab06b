"""Runs of one kind, made when a test asks for them: a few for the laws, more where an event is rare.

``make test`` makes a few of each kind, ``make test-long`` all of them (``LONG``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from itertools import product

from tests.simulation.mixes import Mix
from tests.simulation.run import Result, run

#: Whether this is ``make test-long``, which makes every run that a test has.
LONG = bool(os.environ.get("FLUX_TEST_LONG"))


class Runs:
    """Results of runs, in order. Each run is made once."""

    def __init__(self, runs: Iterable[Callable[[], Result]], few: int) -> None:
        self._pending = list(runs)[::-1]
        self._few = len(self._pending) if LONG else few
        self.results: list[Result] = []

    def _next(self) -> Result:
        result = self._pending.pop()()
        self.results.append(result)
        return result

    def broken(self) -> list[str]:
        """Make the first few runs, and return the results that broke a law."""
        while len(self.results) < self._few:
            self._next()
        return [str(result) for result in self.results if not result.ok]

    def happens(self, event: str, times: int = 1) -> bool:
        """Tell whether an event happens ``times`` times, and make more runs until it has. One time is enough for
        ``make test``."""
        assert not self.broken()
        wanted = times if LONG else 1
        found = sum(result.counts[event] for result in self.results)
        while found < wanted and self._pending:
            result = self._next()
            assert result.ok, str(result)
            found += result.counts[event]
        return found >= wanted


def runs_of(mixes: Iterable[Mix], seeds: Iterable[int], few: int | Sequence[tuple[int, Mix]]) -> Runs:
    """Return the runs of each seed under each mix. ``make test`` makes the first ``few``, or the ones listed by ``few``.

    A list has cheap runs in which all events happen, so that ``happens`` need not look for a rare event in run after run."""

    def made(seed: int, mix: Mix) -> Callable[[], Result]:
        return lambda: run(seed, mix)

    first = () if isinstance(few, int) else few
    runs = [made(seed, mix) for seed, mix in dict.fromkeys([*first, *product(seeds, mixes)])]
    return Runs(runs, few if isinstance(few, int) else len(few))
