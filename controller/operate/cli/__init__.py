"""The ``flux`` command: benchmarks, and commands that show and change running queries (design: people).

show      Commands that show running queries and change nothing
change    Commands that change the placement of a running query
stages    Commands about the plan of a running query: its versions, and stages that come and go
gateways  Commands around gateways: one that runs a gateway, its tokens, and a client's streams and pushes
serve     Commands at the location of a service: ``flux serve``, and the end of a reader that does not come back
queries   Commands of a client of a service: registered queries, their results, and webhooks
bench     ``flux bench``: the benchmarks, run inside Spark executors on this machine
options   Options that commands share, each defined once, and the decorators that add them to a command
tables    Tables and texts for people, made from the answers of a query
output    Output of all commands: tables, or JSON with --json; errors and progress; exit codes

Exit codes: 0 done, 1 refused or failed, 2 usage, 3 nothing reachable.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

import flux
from controller.operate.cli import change, gateways, queries, serve, show, stages
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
app.command("list")(show.list_)
app.command()(show.checkpoints)
COMMANDS: tuple[Callable[..., None], ...] = (
    show.status, show.top, show.partitions, show.history, show.metrics,
    change.rebalance, change.move, change.drain, change.scale, change.protect, change.fail,
    stages.plan, stages.add, stages.remove, stages.restart,
    serve.serve, serve.forget, gateways.gateway, gateways.token, gateways.streams, gateways.push, gateways.verify,
    queries.queries, queries.tail, queries.outputs,
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
