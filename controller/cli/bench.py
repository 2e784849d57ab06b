"""``flux bench``: the benchmarks, run inside Spark executors on this machine."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

bench = typer.Typer(help="Benchmarks, run inside Spark executors on this machine.", no_args_is_help=True)


class SourceKind(StrEnum):
    worker = "worker"
    spark = "spark"


class ShapeName(StrEnum):
    narrow = "narrow"
    wide = "wide"


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
Workers = Annotated[int, typer.Option(min=1, max=64, help="Workers, each in an executor of its own.")]


@bench.command()
def throughput(
    rows: Annotated[int, typer.Option(min=1, help="Rows to read.")] = 60_000_000,
    source: Annotated[SourceKind, typer.Option(help="Read in the workers, or by Spark.")] = SourceKind.worker,
    workers: Workers = 2,
    partitions: Annotated[int, typer.Option(min=1, max=4096, help="Partitions of the keyed stage.")] = 32,
    shape: Annotated[ShapeName, typer.Option(help="32-byte rows, or 8 columns with a string key.")] = ShapeName.narrow,
    replicas: Annotated[int, typer.Option(min=1, max=3, help="Above 1: compared with one and unordered copies.")] = 1,
    peer: Annotated[
        bool, typer.Option("--peer", help="Also run Spark Structured Streaming over the same files.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Keyed count and sum over one million keys: rows per second, against Spark's own streaming."""
    from benchmarks import throughput as benchmark

    console = _console(as_json)
    result = benchmark.run(rows, source.value, workers, peer, shape.value, partitions, console, replicas)
    _finish(result, console, as_json)


@bench.command()
def latency(
    rate: Annotated[int, typer.Option(min=1, help="Rows per second over all sources.")] = 100_000,
    seconds: Annotated[float, typer.Option(min=1, max=3600, help="How long to measure.")] = 20,
    workers: Workers = 2,
    partitions: Annotated[int, typer.Option(min=1, max=4096, help="Partitions of the keyed stage.")] = 8,
    as_json: Json = False,
) -> None:
    """Latency from ingress to egress at a steady rate, through a keyed stage and a sink."""
    from benchmarks import latency as benchmark

    console = _console(as_json)
    _finish(benchmark.run(rate, seconds, workers, partitions, console), console, as_json)


class FaultKind(StrEnum):
    kill_executor = "kill-executor"
    kill_worker = "kill-worker"
    pause = "pause"


@bench.command()
def failover(
    fault: Annotated[FaultKind, typer.Option(help="What happens to a worker.")] = FaultKind.kill_executor,
    rate: Annotated[int, typer.Option(min=100, help="Rows per second over all sources.")] = 50_000,
    times: Annotated[int, typer.Option(min=1, max=200, help="How many faults, one after the other.")] = 5,
    replicas: Annotated[int, typer.Option(min=1, max=3, help="Copies of each partition.")] = 2,
    partitions: Annotated[int, typer.Option(min=1, max=4096, help="Partitions of the keyed stage.")] = 3,
    peer: Annotated[
        bool, typer.Option("--peer", help="Also kill an executor under Spark Structured Streaming.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Faults at a steady rate: gap between outputs, latency, lost and duplicated rows, time to full replication."""
    from benchmarks import failover as benchmark

    console = _console(as_json)
    _finish(benchmark.run(fault.value, rate, times, replicas, partitions, peer, console), console, as_json)


def _console(as_json: bool) -> Console:
    return Console(stderr=as_json, highlight=False)


def _finish(result: dict[str, Any], console: Console, as_json: bool) -> None:
    table = Table(show_header=False, title=f"flux bench {result['benchmark']}")
    for key, value in result.items():
        table.add_row(
            key, f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
        )
    console.print(table)
    if as_json:
        print(json.dumps(result))
