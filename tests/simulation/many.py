"""Runs of many seeds in several processes."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from tests.simulation.known_seeds import EVENTFUL
from tests.simulation.run import Result, run
from tests.simulation.runs import LONG

#: Seeds that are always the same. ``make test`` runs the few of them in which much happens, ``make test-long`` all.
FIXED = range(500)
#: Seeds that follow from the tested source, so that each change of the source tries others; ``make test`` runs a tenth as many.
ROTATED_COUNT = 200 if LONG else 20
ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("partitioning", "flux", "controller", "tests/simulation")
#: Cores that the runs may use.
PROCESSES = 2
#: Seeds handed out at a time: a second or so of work, so that both processes end together.
CHUNK = 20


#: Allocations between two looks of the garbage collector. Runs make many objects that live as long as the run: to look for cycles
#: among them again and again costs a tenth of all time.
COLLECT_AFTER = 100_000


def source() -> str:
    """Hash the tested source. The hash of the commit would not do: a commit that changes only documents leaves every run as it
    was, and a copy of the source without its history makes the same runs."""
    files = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def rotated(source: str) -> range:
    """Return the seeds that follow from a hash of the source, beyond the fixed ones."""
    first = (1 + int(source[:6], 16)) * len(FIXED)
    return range(first, first + ROTATED_COUNT)


#: Hash of the tested code. Choices that follow from this hash differ from change to change, and stay the same for one change.
SOURCE = source()
ROTATED = rotated(SOURCE)
SEEDS = [*(FIXED if LONG else EVENTFUL), *ROTATED]


def told() -> str:
    fixed = f"seeds {FIXED[0]} to {FIXED[-1]}" if LONG else f"{len(EVENTFUL)} of the seeds below {len(FIXED)}"
    return f"simulated {fixed}, and {ROTATED[0]} to {ROTATED[-1]} of this source; make sim SEED=n repeats one"


def run_all(seeds: Iterable[int]) -> Iterator[Result]:
    """Yield the results in the order of the seeds. Raises BrokenProcessPool if one of the processes dies: a seed is missing then.
    A caller that leaves early does not wait for the rest."""
    with ProcessPoolExecutor(PROCESSES, get_context("spawn"), gc.set_threshold, (COLLECT_AFTER,)) as pool:
        try:
            yield from pool.map(run, seeds, chunksize=CHUNK)
        finally:
            pool.shutdown(cancel_futures=True)
