"""The ``flux`` command: benchmarks, and commands that show and change running queries (design: people).

Exit codes: 0 done, 1 refused or failed, 2 usage, 3 nothing reachable.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

import flux
from controller.operate.cli import kept, look, operate
from controller.operate.cli.bench import bench
from controller.operate.cli.output import Commands
from flux.errors import FluxError

app = typer.Typer(
    cls=Commands,
    help="Flux: a fault-tolerant, load-balancing exchange for PySpark.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench, name="bench")
app.command("list")(look.list_)
app.command()(kept.checkpoints)
COMMANDS: tuple[Callable[..., None], ...] = (
    look.status, look.top, look.partitions, look.history, look.metrics,
    operate.rebalance, operate.move, operate.drain, operate.scale, operate.protect, operate.fail,
)  # fmt: skip
for command in COMMANDS:
    app.command()(command)


def _version(asked: bool) -> None:
    if asked:
        print(f"flux {flux.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Flux: a fault-tolerant, load-balancing exchange for PySpark."""


def main() -> None:
    try:
        app()
    except FluxError as error:
        print(f"flux: {error}", file=sys.stderr)
        sys.exit(1)
