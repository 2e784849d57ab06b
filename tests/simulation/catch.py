"""A search for seeds that show a broken variant: ``python -m tests.simulation.catch NAME``. It is needed when the seeds in the
table no longer show the variant: each change of the course of runs changes the meaning of a seed."""

from __future__ import annotations

import time
from typing import Annotated

import pytest
import typer

from tests.simulation.run import run
from tests.simulation.variants import REDUNDANT, VARIANTS, Variant


def named(name: str) -> Variant:
    known = {variant.name: variant for variant in [*VARIANTS, *REDUNDANT]}
    if name not in known:
        raise typer.BadParameter(f"there is no variant {name}; there are {', '.join(sorted(known))}")
    return known[name]


def main(
    name: str,
    seeds: Annotated[int, typer.Option(help="try so many")] = 2000,
    first: Annotated[int, typer.Option(help="the first of them")] = 0,
    wanted: Annotated[int, typer.Option(help="stop when so many are found")] = 5,
) -> None:
    variant = named(name)
    found = 0
    with pytest.MonkeyPatch.context() as patch:
        variant.break_it(patch)
        for seed in range(first, first + seeds):
            started = time.process_time()
            result = run(seed, variant.mix)
            if not result.ok:
                found += 1
                typer.echo(f"{seed} in {time.process_time() - started:.2f} s: {result.law}: {result.detail[:160]}")
            if found == wanted:
                break
    raise typer.Exit(found == 0)


if __name__ == "__main__":
    typer.run(main)
