"""Commands that show running queries and checkpoint locations. All but one option change nothing: ``flux checkpoints
--forget-output`` makes sinks begin anew.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from controller.operate.cli import tables
from controller.operate.cli.options import Invocation, Json, shows
from controller.operate.cli.output import console, document, outcome, plain, show
from controller.operate.client import QueryClient, Sighting, survey
from controller.operate.requests import (
    GetHistory,
    GetMetrics,
    GetPartitions,
    GetStatus,
    History,
    MetricsText,
    Partitions,
    Status,
)
from controller.text import count
from flux.errors import Unreachable, UsageError

if TYPE_CHECKING:
    from flux.vault.location import Place


Stage = Annotated[str | None, typer.Option(help="Show only this stage.", show_default=False)]


def list_(as_json: Json = False) -> None:
    """List this user's running queries on this machine. Files left by queries that have ended are shown once and removed."""
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


@shows
def status(call: Invocation) -> None:
    """Show stages, workers, replication, epoch, rows per second, backlog and latency of a query."""
    answer = call.client.ask(GetStatus(), Status)
    if call.as_json:
        document(plain(answer))
    else:
        show(tables.status(answer))


@shows
def partitions(
    call: Invocation,
    stage: Stage = None,
    every: Annotated[bool, typer.Option("--all", help="Show every replica, whatever their number.")] = False,
) -> None:
    """Show where each replica of each partition is, with role, load, queue and state size. If there are more than a thousand,
    show the stages and the replicas with the highest loads; --all and --json show all."""
    if call.as_json:
        document(plain(call.client.partitions(stage)))
        return
    answer = call.client.ask(GetPartitions(stage=stage, heaviest=tables.MANY), Partitions)
    if answer.total > tables.MANY and not every:
        rows = call.client.ask(GetStatus(), Status).stages
        show(tables.many_partitions([row for row in rows if stage in (None, row.name)], answer))
    else:
        answer = call.client.partitions(stage)
        show(tables.partitions(answer.replicas, answer.seconds))


@shows
def history(call: Invocation, stage: Stage = None) -> None:
    """Show take-overs, repairs, moves and other events: when, why, from, to, bytes, duration and stall."""
    answer = call.client.ask(GetHistory(stage=stage), History)
    if call.as_json:
        document(plain(answer))
    elif answer.events:
        show(tables.history(answer.events))
    else:
        show("nothing has happened so far: no take-over, no repair, no move")


@shows
def metrics(call: Invocation) -> None:
    """Print the metrics of a query in the text format of Prometheus, whether or not they are served over HTTP."""
    answer = call.client.ask(GetMetrics(), MetricsText)
    if call.as_json:
        document(plain(answer))
    else:
        print(answer.text, end="")


@shows
def top(
    call: Invocation,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit.")] = False,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0.1, show_default=False, help="Exit after this time; default: when the query ends, or with Ctrl-C."
        ),
    ] = None,
    interval: Annotated[float, typer.Option(min=0.1, max=60, help="Seconds between frames.")] = 1.0,
) -> None:
    """Show a live view: workers and partitions by load, moves and repairs under way. With --json, one frame."""
    if call.as_json:
        answer = call.client.ask(GetStatus(), Status)
        document({"status": plain(answer), "partitions": plain(call.client.partitions())})
        return
    screen = console()
    if once:
        screen.print(tables.top(*_frame(call.client)))
        return
    if not screen.is_terminal and seconds is None:
        raise UsageError("a live view needs a terminal: use --once, or --seconds to end after a time")
    _live(call.client, screen, seconds, interval)


def _live(client: QueryClient, screen: Console, seconds: float | None, interval: float) -> None:
    """Refresh the view until the time is over or the query has ended."""
    end = None if seconds is None else time.monotonic() + seconds
    ended = "no longer running"
    try:
        with Live(console=screen, screen=screen.is_terminal, auto_refresh=False) as live:
            while True:
                live.update(tables.top(*_frame(client)), refresh=True)
                if end is not None and time.monotonic() + interval > end:
                    return
                time.sleep(interval)
    except Unreachable as error:
        ended = str(error)
    except KeyboardInterrupt:
        return
    screen.print(ended)


def _frame(client: QueryClient) -> tuple[Status, Partitions]:
    return client.ask(GetStatus(), Status), client.ask(GetPartitions(heaviest=tables.TOP_PARTITIONS), Partitions)


Location = Annotated[
    str, typer.Argument(metavar="LOCATION", show_default=False, help="The checkpointLocation of a query.")
]


Forget = Annotated[
    bool,
    typer.Option(
        "--forget-output",
        help="Have sinks begin anew at the next start: for a location that was restored from an older copy.",
    ),
]


def checkpoints(location: Location, as_json: Json = False, forget_output: Forget = False) -> None:
    """List and check the checkpoints of a checkpoint location: for each partition its checkpoint and the steps after it."""
    with outcome(as_json):
        if forget_output:
            _show_forgotten(_forget_output(location), as_json)
            return
        found = _survey(location)
        if as_json:
            document(found)
            return
        show(
            f"query {found['id']}, which began with {count(found['workers'], 'worker')}; started "
            f"{count(found['starts'], 'time')}, last epoch {found['epoch']}"
        )
        made = tables.table("partition", ">steps", ">size", ">changes in it", ">age", ">steps after it")
        for each in found["partitions"]:
            age = "" if each["age_s"] is None else tables.duration(each["age_s"])
            made.add_row(
                f"{each['stage']}/{each['partition']}", f"{each['steps']:,}", tables.size(each["bytes"]),
                tables.size(each["changes_bytes"]), age,
                f"{each['steps_after']:,}",
            )  # fmt: skip
        show(made, f"{tables.size(found['bytes'])} in all; every checkpoint is whole")
        for problem in found["left_out"]:
            show(f"left out, with the checkpoint before it in its place: {problem}")


def _show_forgotten(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        document(found)
        return
    show(f"the sinks of query {found['id']} begin anew at the next start, under other ids")
    made = tables.table("partition", ">batches that it does not show again", "id since then")
    for stage, forgotten in found["forgotten"].items():
        for partition, first in enumerate(forgotten["first"]):
            made.add_row(f"{stage}/{partition}", f"{first:,}", forgotten["query"])
    show(made, "output after those is shown again; remove what is outside of it, or write to another folder or topic")


def _forget_output(location: str) -> dict[str, Any]:
    """Write into a location that sinks begin anew (design: forgotten-output). UsageError: a query uses it."""
    from flux.vault.location import forget
    from flux.vault.names import ABOUT

    place, about = _opened(location)
    with place.locked():
        about = forget(place, about, [name for name, stage in about["plan"]["stages"].items() if stage["sink"]])
        place.write(ABOUT, json.dumps(about, indent=1).encode())
    return {"id": about["query"], "forgotten": about["forgotten"]}


def _opened(location: str) -> tuple[Place, dict[str, Any]]:
    """Return the place and its description of the query. UsageError: it is no checkpoint location."""
    from flux.vault.location import there
    from flux.vault.names import ABOUT

    try:
        place = there(location)
        about = json.loads(place.read(ABOUT))
        list(about["plan"]["stages"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(f"{location} is no checkpoint location of a Flux query: {error}") from error
    return place, about


def _survey(location: str) -> dict[str, Any]:
    """Read a checkpoint location. UsageError: it is none; SnapshotError: something in it is damaged."""
    from flux.vault.location import read_journal

    place, about = _opened(location)
    stages = list(about["plan"]["stages"])
    journal, starts = read_journal(place)
    now = time.time()
    partitions = [
        {
            "stage": stages[key.stage] if key.stage < len(stages) else str(key.stage),
            "partition": key.partition,
            "steps": kept.checkpoint.step,
            "bytes": kept.checkpoint.nbytes,
            "changes": len(kept.checkpoint.changes),
            "changes_bytes": sum(piece.nbytes for piece in kept.checkpoint.changes),
            "age_s": round(max(now - kept.checkpoint.at, 0.0), 3) if kept.checkpoint.at else None,
            "steps_after": len(kept.order),
        }
        for key, kept in sorted(journal.standbys.items())
    ]
    return {
        "id": about["query"],
        "workers": about["workers"],
        "starts": starts,
        "epoch": journal.highest,
        "bytes": sum(each["bytes"] for each in partitions),
        "left_out": journal.left_out,
        "partitions": partitions,
    }
