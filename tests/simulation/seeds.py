"""``make seeds`` finds, for each broken variant, a seed that shows it in little time, and writes it into ``seeds.json``.

Each change of the course of runs changes the meaning of a seed. A seed that still shows its variant in little time is kept, so
that the file changes only where necessary. ``make seeds VARIANT=name`` looks at one variant alone. The exit code is 1 if no
seed shows a variant: then another rule covers the missing one, or the rule needs its own story.
"""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import pytest
import typer
from rich.progress import track

from tests.simulation.events import EVENTS
from tests.simulation.known_seeds import EVENTFUL, write
from tests.simulation.many import COLLECT_AFTER, FIXED
from tests.simulation.run import Result, run
from tests.simulation.variants import VARIANTS, Variant

#: A seed that shows its variant in less processor time is good enough, the run of the unbroken code included.
ENOUGH_S = 0.5
#: Processor time for one variant while no seed of it is known. Rare interleavings show in one of a hundred runs.
SEARCH_S = 300.0
#: Each event happens in this number of the chosen runs, so that it still happens after a change that spoils one of them.
TIMES = 3
#: Processor time for one variant once a seed of it is known: cheaper seeds show early or never.
CHEAPER_S = 20.0


class OutOfTimeError(BaseException):
    """The end of a run at its limit. It passes every ``except Exception`` of the simulation."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise ``OutOfTimeError`` inside the block, once it has taken the given processor time."""

    def stop(*given: Any) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, max(seconds, 0.01))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def broken(variant: Variant, seed: int) -> Result:
    """Make the run of this seed without the rule."""
    with pytest.MonkeyPatch.context() as patch:
        variant.break_it(patch)
        return run(seed, variant.mix)


def cost(variant: Variant, seed: int, limit_s: float) -> float | None:
    """Return the processor time after which the seed has shown the variant, the unbroken run included; None if the limit comes
    first."""
    began = time.process_time()
    try:
        with limited(limit_s):
            result = broken(variant, seed)
            if result.ok or result.law not in variant.laws or not run(seed, variant.mix).ok:
                return None
    except OutOfTimeError:
        return None
    return time.process_time() - began


def cheapest(variant: Variant) -> int | None:
    """Look for the cheapest seed, beginning with the seeds of the file."""
    began = time.process_time()
    best: tuple[float, int] | None = None
    for seed in (*variant.seeds, *range(100_000)):
        spent = time.process_time() - began
        if (best is not None and (best[0] < ENOUGH_S or spent > CHEAPER_S)) or spent > SEARCH_S:
            break
        needed = cost(variant, seed, best[0] if best is not None else SEARCH_S)
        if needed is not None:
            best = needed, seed
    return None if best is None else best[1]


def eventful() -> list[int]:
    """Choose a few of the fixed seeds in which all events happen, the cheapest for the events that they show.

    The choice is greedy: the next seed shows the most events for its processor time that no seed before has shown."""
    shows: dict[int, set[str]] = {}
    costs: dict[int, float] = {}
    for seed in track(FIXED, "Runs of the fixed seeds"):
        began = time.process_time()
        counts = run(seed).counts
        costs[seed] = time.process_time() - began
        shows[seed] = {event for event in EVENTS if counts[event]}
    wanted = {event: min(TIMES, sum(event in shown for shown in shows.values())) for event in EVENTS}
    chosen: list[int] = []
    while any(wanted.values()):
        left = [seed for seed in FIXED if seed not in chosen]
        best = max(left, key=lambda seed: sum(wanted[event] > 0 for event in shows[seed]) / costs[seed])
        chosen.append(best)
        for event in shows[best]:
            wanted[event] = max(wanted[event] - 1, 0)
    return sorted(chosen)


def main(name: Annotated[str, typer.Argument(help="look at this variant alone")] = "") -> None:
    if name and name not in {variant.name for variant in VARIANTS}:
        raise typer.BadParameter(f"there is no variant {name}; there are {', '.join(sorted(v.name for v in VARIANTS))}")
    gc.set_threshold(COLLECT_AFTER)
    fixed = EVENTFUL if name else eventful()
    found = {variant.key: list(variant.seeds) for variant in VARIANTS}
    missing = []
    for variant in VARIANTS:
        if name in ("", variant.name):
            seed = cheapest(variant)
            typer.echo(f"{variant.key}: {seed}")
            if seed is None:
                missing.append(variant.key)
            else:
                found[variant.key] = [seed]
                write(found, fixed)  # after each variant, because the search takes minutes
    typer.echo("python -m tests.simulation.story_hashes --write adds the runs of new seeds to its file")
    if missing:
        typer.echo(f"no seed shows {', '.join(missing)}", err=True)
    raise typer.Exit(bool(missing))


if __name__ == "__main__":
    typer.run(main)
