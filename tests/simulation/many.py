"""Many seeds in several processes."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context

from tests.simulation.run import Result, run

#: Those of every run of the tests.
SEEDS = range(2000)
#: Cores that the runs may use.
PROCESSES = 2
#: Seeds handed out at a time: a second or so of work, so that both processes end together.
CHUNK = 20


#: Runs make many objects that live as long as they do: looking for cycles among them again and again costs a tenth.
COLLECT_AFTER = 100_000


def run_all(seeds: Iterable[int]) -> Iterator[Result]:
    """In the order of the seeds. Raises BrokenProcessPool if one of the processes dies: a seed is missing then."""
    with begin(seeds) as results:
        yield from results


@contextmanager
def begin(seeds: Iterable[int]) -> Iterator[Iterator[Result]]:
    """The same, and the processes begin at once; whoever leaves early does not wait for the rest."""
    with ProcessPoolExecutor(PROCESSES, get_context("spawn"), gc.set_threshold, (COLLECT_AFTER,)) as pool:
        try:
            yield pool.map(run, seeds, chunksize=CHUNK)
        finally:
            pool.shutdown(cancel_futures=True)
