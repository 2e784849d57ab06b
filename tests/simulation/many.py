"""Many seeds in several processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.simulation.run import Result, run

#: Cores that the runs may use.
PROCESSES = 2
#: Seeds handed out at a time: a second or so of work, so that both processes end together.
CHUNK = 20


def run_all(seeds: Iterable[int]) -> Iterator[Result]:
    """In the order of the seeds. Raises BrokenProcessPool if one of the processes dies: a seed is missing then."""
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        yield from pool.map(run, seeds, chunksize=CHUNK)
