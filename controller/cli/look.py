"""Commands that look at running queries and change nothing."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from controller.cli import tables
from controller.cli.output import Json, Query, console, document, outcome, plain, show
from controller.client import Client, Sighting, choose, survey
from controller.requests import (
    GetHistory,
    GetMetrics,
    GetPartitions,
    GetStatus,
    History,
    MetricsText,
    Partitions,
    Status,
)
from flux.errors import Unreachable, UsageError

Stage = Annotated[str | None, typer.Option(help="Only this stage.", show_default=False)]


def list_(as_json: Json = False) -> None:
    """Running queries of this user on this machine. What a query left behind that is over is shown once, and removed."""
    with outcome(as_json):
        sightings = survey()
        if as_json:
            document({"queries": [_sighted(sighting) for sighting in sightings]})
        elif sightings:
            show(tables.queries(sightings))
        else:
            show("no query is running")


def _sighted(sighting: Sighting) -> dict[str, Any]:
    status, connection = sighting.status, sighting.found.connection
    known = status or connection
    return {
        "id": known.id if known else None,
        "name": known.name if known else None,
        "application": known.application if known else None,
        "pid": known.pid if known else None,
        "started": known.started if known else None,
        "phase": status.phase if status else None,
        "workers": len(status.workers) if status else None,
        "rows_per_s": status.rows_per_s if status else None,
        "stale": sighting.stale or None,
        "file": str(sighting.found.path),
    }


def status(query: Query = None, as_json: Json = False) -> None:
    """Stages, workers, replication, epoch, rows per second, backlog and latency of a query."""
    with outcome(as_json), Client(choose(query)) as client:
        answer = client.ask(GetStatus(), Status)
        if as_json:
            document(plain(answer))
        else:
            show(tables.status(answer))


def partitions(query: Query = None, stage: Stage = None, as_json: Json = False) -> None:
    """Where each copy of each partition is: role, load, queue and size of its state."""
    with outcome(as_json), Client(choose(query)) as client:
        answer = client.ask(GetPartitions(stage=stage), Partitions)
        if as_json:
            document(plain(answer))
        else:
            show(tables.partitions(answer.replicas, answer.seconds))


def history(query: Query = None, stage: Stage = None, as_json: Json = False) -> None:
    """Every take-over, repair and move: when, why, from, to, bytes, duration and stall."""
    with outcome(as_json), Client(choose(query)) as client:
        answer = client.ask(GetHistory(stage=stage), History)
        if as_json:
            document(plain(answer))
        elif answer.events:
            show(tables.history(answer.events))
        else:
            show("nothing has happened so far: no take-over, no repair, no move")


def metrics(query: Query = None, as_json: Json = False) -> None:
    """Metrics of a query in the text format of Prometheus, also where they are not served over HTTP."""
    with outcome(as_json), Client(choose(query)) as client:
        answer = client.ask(GetMetrics(), MetricsText)
        if as_json:
            document(plain(answer))
        else:
            print(answer.text, end="")


def top(
    query: Query = None,
    once: Annotated[bool, typer.Option("--once", help="One frame, and no more.")] = False,
    seconds: Annotated[
        float | None,
        typer.Option(min=0.1, show_default=False, help="End after so long; else with the query or Ctrl-C."),
    ] = None,
    interval: Annotated[float, typer.Option(min=0.1, max=60, help="Seconds between two frames.")] = 1.0,
    as_json: Json = False,
) -> None:
    """Live view: workers and partitions by load, moves and repairs under way. With --json, one frame."""
    with outcome(as_json), Client(choose(query)) as client:
        answer, replicas = _frame(client)
        if as_json:
            document({"status": plain(answer), "partitions": plain(replicas)})
            return
        screen = console()
        if once:
            screen.print(tables.top(answer, replicas.replicas))
            return
        if not screen.is_terminal and seconds is None:
            raise UsageError("a live view needs a terminal: use --once, or --seconds for so long")
        _live(client, screen, seconds, interval)


def _live(client: Client, screen: Console, seconds: float | None, interval: float) -> None:
    """Until the time is over or the query is."""
    end = None if seconds is None else time.monotonic() + seconds
    ended = "no longer running"
    try:
        with Live(console=screen, screen=screen.is_terminal, auto_refresh=False) as live:
            while True:
                answer, replicas = _frame(client)
                live.update(tables.top(answer, replicas.replicas), refresh=True)
                if end is not None and time.monotonic() + interval > end:
                    return
                time.sleep(interval)
    except Unreachable as error:
        ended = str(error)
    except KeyboardInterrupt:
        return
    screen.print(ended)


def _frame(client: Client) -> tuple[Status, Partitions]:
    return client.ask(GetStatus(), Status), client.ask(GetPartitions(), Partitions)
