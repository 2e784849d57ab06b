"""``make sim SEED=7`` repeats one run, ``make sim SEEDS=1000`` makes many. Exit code 1 if a law was broken."""

from __future__ import annotations

import time
from collections import Counter
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.simulation.many import run_all
from tests.simulation.run import Result, run


def main(
    seed: Annotated[int | None, typer.Option(help="repeat this run")] = None,
    seeds: Annotated[int, typer.Option(help="make so many runs")] = 2000,
    first: Annotated[int, typer.Option(help="seed of the first of them")] = 0,
) -> None:
    console = Console(highlight=False)
    results = run_all(range(first, first + seeds)) if seed is None else iter([run(seed)])
    runs = seeds if seed is None else 1
    started = time.perf_counter()
    failed: list[Result] = []
    counts: Counter[str] = Counter()
    for result in track(results, "Simulating", total=runs, console=console, disable=seed is not None):
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
    raise typer.Exit(bool(failed))


if __name__ == "__main__":
    typer.run(main)
