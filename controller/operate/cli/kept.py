"""``flux checkpoints``: what a checkpoint location holds. It is only read, and every checkpoint is checked."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import msgspec
import typer

from controller.operate.cli import tables
from controller.operate.cli.options import Json
from controller.operate.cli.output import document, outcome, show
from controller.wording import count
from flux.errors import UsageError

Location = Annotated[
    str, typer.Argument(metavar="LOCATION", show_default=False, help="The checkpointLocation of a query.")
]


def checkpoints(location: Location, as_json: Json = False) -> None:
    """List and check what a checkpoint location holds: for each partition its checkpoint and the steps after it."""
    with outcome(as_json):
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


def _survey(location: str) -> dict[str, Any]:
    """UsageError: it is no checkpoint location; SnapshotError: something in it is damaged."""
    from flux.durable.journal import Journal
    from flux.durable.names import ABOUT
    from flux.durable.place import there

    try:
        place = there(location)
        about = json.loads(place.read(ABOUT))
        stages = list(about["plan"]["stages"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(f"{location} is no checkpoint location of a Flux query: {error}") from error
    store = place.store(writes=False)
    try:
        journal = Journal(store, f"the journal in {place}")
    except msgspec.ValidationError as error:
        raise UsageError(f"{place} was written by another release of Flux: {error}") from error
    finally:
        store.close()
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
        "starts": store.starts(),
        "epoch": journal.highest,
        "bytes": sum(each["bytes"] for each in partitions),
        "left_out": journal.left_out,
        "partitions": partitions,
    }
