"""``make sim SEED=7`` repeats one run, ``make sim SEEDS=1000`` makes many. Exit code 1 if a law was broken.

If the one run breaks a law, its story follows, from the beginning to there: what concerns the partitions and streams that
the law names, or everything with ``ALL=1``. ``STORY=1`` tells that of a run that is fine, too. ``VARIANT=name`` takes a rule
away, as ``variants.py`` says, under the faults that soon show it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Annotated

import pytest
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.simulation.catch import named
from tests.simulation.last_look import last_look
from tests.simulation.many import run_all
from tests.simulation.mixes import ANY, Mix
from tests.simulation.run import Result, run
from tests.simulation.story_hashes import tell as tell_run

#: Lines of a story that are shown, unless all are asked for. A story is read from its end, where the law breaks.
LINES_MAX = 200


def main(
    seed: Annotated[int | None, typer.Option(help="repeat this run")] = None,
    seeds: Annotated[int, typer.Option(help="make so many runs")] = 2000,
    first: Annotated[int, typer.Option(help="seed of the first of them")] = 0,
    story: Annotated[bool, typer.Option("--story", help="tell the run of --seed, also if it breaks no law")] = False,
    variant: Annotated[
        str, typer.Option(help="make the run of --seed without the rule that this variant takes away")
    ] = "",
    all_: Annotated[bool, typer.Option("--all", help="tell everything, not only what the law concerns")] = False,
) -> None:
    console = Console(highlight=False)
    mix = ANY
    with pytest.MonkeyPatch.context() as patch:
        if variant and seed is None:
            raise typer.BadParameter("--variant goes with --seed; python -m tests.simulation.catch looks for seeds")
        if variant:
            broken = named(variant)
            broken.break_it(patch)
            mix = broken.mix
        results = run_all(range(first, first + seeds)) if seed is None else map(partial(run, mix=mix), [seed])
        failed = _count(console, results, seeds if seed is None else 1, quiet=seed is not None)
        if seed is not None and (failed or story or all_):
            tell(console, seed, mix, variant, all_)
    raise typer.Exit(bool(failed))


def _count(console: Console, results: Iterator[Result], runs: int, quiet: bool) -> list[Result]:
    """Show the events of these runs; return the runs that broke a law."""
    started = time.perf_counter()
    failed: list[Result] = []
    counts: Counter[str] = Counter()
    for result in track(results, "Simulating", total=runs, console=console, disable=quiet):
        counts.update(result.counts)
        counts["runs"] += 1
        if not result.ok:
            failed.append(result)
            console.print(str(result), markup=False, soft_wrap=True)
    table = Table("what happened", "times")
    for name, times in sorted(counts.items()):
        table.add_row(name, f"{times:,}")
    console.print(table)
    seconds = time.perf_counter() - started
    console.print(f"{runs} runs in {seconds:.1f} s ({runs / seconds:.1f} per second), {len(failed)} broke a law")
    return failed


def tell(console: Console, seed: int, mix: Mix, variant: str, everything: bool) -> None:
    """Make the run once more, with its story. The first run keeps no record, as most runs are never asked about."""
    told = tell_run(seed, mix)
    simulation, story, result = told.simulation, told.story, told.result
    concerned = story.concerned(result.detail)
    events = story.told(None if everything or not concerned else concerned)
    left_out = 0 if everything else max(len(events) - LINES_MAX, 0)
    console.print("\n       ms  what happened")
    if left_out or len(events) < len(story.events):
        console.print(
            f"      ...  ({left_out} earlier lines and {len(story.events) - len(events)} about other partitions and streams; "
            f"make sim SEED={seed}{f' VARIANT={variant}' * bool(variant)} ALL=1 shows them)",
            soft_wrap=True,
        )
    for event in events[left_out:]:
        console.print(str(event), markup=False, soft_wrap=True)
    end = "the run has ended well" if result.ok else f"BROKEN: {result.law}: {result.detail}"
    console.print(f"{(simulation.world.now - story.began) * 1000:9.1f}  {end}", markup=False, soft_wrap=True)
    standing = [] if result.ok else list(last_look(simulation, story.words, concerned))
    if standing:
        console.print("\nHow things stood then, where the law is concerned:")
    for line in standing:
        console.print(f"           {line}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
