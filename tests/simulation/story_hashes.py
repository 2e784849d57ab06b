"""Hashes of told runs: proof that a change of names, places or texts leaves the protocol as it was (design: story-hashes).

``story_hashes.json`` holds one hash for each fixed seed and some late ones, for each seed of a variant, made without the rule
that the variant takes away, and for each transcript. A hash covers the whole story of a run, all partitions and streams, and the
law that the run broke. It leaves out sizes of pickled states and the product's own text, which may be worded anew: reasons of
refusals and events, and messages of errors. ``python -m tests.simulation.story_hashes`` prints the runs that differ;
``--every 40`` makes a sample, ``--write`` renews the file.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import pytest
import typer
from rich.progress import track

from tests.simulation.catch import named
from tests.simulation.lives import run_lives
from tests.simulation.many import COLLECT_AFTER, FIXED, PROCESSES
from tests.simulation.mixes import ANY, Mix
from tests.simulation.run import LOSSES_FROM, Result, Simulation, lives_of, outcome, simulated
from tests.simulation.story import Story
from tests.simulation.variants import REDUNDANT, VARIANTS
from tests.simulation.witness import witnesses
from tests.transcripts import kit
from tests.transcripts.flows import FLOWS

FILE = Path(__file__).parent / "story_hashes.json"
#: Characters of a hash. Among a thousand hashes of sixteen hexadecimal digits, no two are equal by chance.
LENGTH = 16
#: Seeds that draw everything, also parts that fixed seeds lack: sinks, standbys, directories, logs that lose records.
LATE = range(LOSSES_FROM, LOSSES_FROM + 60)
#: Runs handed to a process at a time. Runs of one variant follow one another, and some take seconds.
CHUNK = 4


@dataclass(frozen=True)
class Told:
    """A run with its story."""

    simulation: Simulation
    story: Story
    result: Result
    #: Stories of the earlier lives of a query that lost everything and went on; ``simulation`` is the last life.
    earlier: tuple[Story, ...] = ()

    def lines(self) -> Iterator[str]:
        """Yield all events of all lives, then how the run ended."""
        for story in (*self.earlier, self.story):
            yield from map(str, story.told(None))
        yield f"broken: {self.result.law}; error of the query: {self.result.error}"


def left_out(text: str) -> str:
    """Stand in for every text of the product, which may be worded anew, with the same dots."""
    return "..."


def tell(seed: int, mix: Mix = ANY, make: type[Story] | partial[Story] = Story) -> Told:
    """Make a run with its story, which costs more than the run. ``make`` makes the story of a simulation."""
    told: list[tuple[Simulation, Story]] = []
    if lives := lives_of(seed, mix):
        result = run_lives(seed, mix, lives, lambda sim: told.append((sim, make(sim))))
    else:
        with witnesses(mix.witnesses):
            alone = simulated(seed, mix)
            told.append((alone, make(alone)))
            result = outcome(alone)
    *earlier, (simulation, story) = told
    return Told(simulation, story, result, tuple(story for _, story in earlier))


def names() -> list[str]:
    """Return the runs that have a hash."""
    variants = [f"variant {variant.name} {seed}" for variant in [*VARIANTS, *REDUNDANT] for seed in variant.seeds]
    return [
        *(f"seed {seed}" for seed in (*FIXED, *LATE)),
        *dict.fromkeys(variants),
        *(f"transcript {name}" for name in FLOWS),
    ]


def hash_of(name: str) -> str:
    """Make the run of this name, and hash its story."""
    what, *rest = name.split()
    make = partial(Story, said=left_out)
    with pytest.MonkeyPatch.context() as patch:
        if what == "transcript":
            patch.setattr(kit, "Story", make)
            lines: Iterator[str] = map(str, FLOWS[rest[0]]().story.told(None))
        elif what == "variant":
            variant = named(rest[0])
            variant.break_it(patch)
            lines = tell(int(rest[1]), variant.mix, make).lines()
        else:
            lines = tell(int(rest[0]), make=make).lines()
    text = "\n".join(map(kit.without_sizes, lines))
    return hashlib.sha256(text.encode()).hexdigest()[:LENGTH]


def hashes(names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each name with its hash, made in several processes."""
    with ProcessPoolExecutor(PROCESSES, get_context("spawn"), gc.set_threshold, (COLLECT_AFTER,)) as pool:
        yield from zip(names, pool.map(hash_of, names, chunksize=CHUNK), strict=True)


def written() -> dict[str, str]:
    """Return the hashes of the file."""
    known: dict[str, str] = json.loads(FILE.read_text())
    return known


def main(
    write: Annotated[bool, typer.Option("--write", help="renew the file")] = False,
    every: Annotated[int, typer.Option(help="make one run of this many")] = 1,
) -> None:
    if write and every > 1:
        raise typer.BadParameter("--write needs all runs: leave --every out")
    wanted = names()
    sample = wanted[::every]
    before = written() if FILE.exists() else {}
    now = dict(track(hashes(sample), "Telling", total=len(sample)))
    different = [name for name in sample if before.get(name) != now[name]]
    gone = sorted(before.keys() - set(wanted))
    for name in different:
        typer.echo(f"{name}: {before.get(name, 'not in the file')} -> {now[name]}")
    for name in gone:
        typer.echo(f"{name}: in the file, and there is no such run")
    typer.echo(f"{len(now)} runs, {len(different) + len(gone)} differ from {FILE.name}")
    if write:
        FILE.write_text(json.dumps(now, indent=0) + "\n")
    raise typer.Exit(bool(different or gone) and not write)


if __name__ == "__main__":
    typer.run(main)
