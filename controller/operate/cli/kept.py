"""``flux checkpoints``: show and check a checkpoint location, which is only read; with ``--forget-output``, make sinks begin anew
(design: forgotten-output)."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from controller.operate.cli import tables
from controller.operate.cli.options import Json
from controller.operate.cli.output import document, outcome, show
from controller.wording import count
from flux.errors import UsageError

if TYPE_CHECKING:  # a command that needs none is to begin fast
    from flux.durable.place import Place

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
    """Write into a location that sinks begin anew. UsageError: a query uses it."""
    from flux.durable.forgetting import forget
    from flux.durable.names import ABOUT

    place, about = _opened(location)
    with place.locked():
        about = forget(place, about, [name for name, stage in about["plan"]["stages"].items() if stage["sink"]])
        place.write(ABOUT, json.dumps(about, indent=1).encode())
    return {"id": about["query"], "forgotten": about["forgotten"]}


def _opened(location: str) -> tuple[Place, dict[str, Any]]:
    """Return the place and its description of the query. UsageError: it is no checkpoint location."""
    from flux.durable.names import ABOUT
    from flux.durable.place import there

    try:
        place = there(location)
        about = json.loads(place.read(ABOUT))
        list(about["plan"]["stages"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(f"{location} is no checkpoint location of a Flux query: {error}") from error
    return place, about


def _survey(location: str) -> dict[str, Any]:
    """Read a checkpoint location. UsageError: it is none; SnapshotError: something in it is damaged."""
    from flux.durable.forgetting import read_journal

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
