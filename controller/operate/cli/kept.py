"""``flux checkpoints``: show and check a checkpoint location, which is only read; with ``--forget-output``, make sinks begin anew
(design: forgotten-output)."""

from __future__ import annotations

import json
import time
import uuid
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from controller.operate.cli import tables
from controller.operate.cli.options import Json
from controller.operate.cli.output import document, outcome, show
from controller.wording import count
from flux.errors import UsageError
from partitioning.ids import PartitionKey

if TYPE_CHECKING:  # a command that needs neither is to begin fast
    from flux.durable.journal import Journal
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
    show(f"the sinks of query {found['id']} begin anew at the next start, under the id {found['forgotten']['query']}")
    made = tables.table("partition", ">batches that are not shown again")
    for stage, firsts in found["forgotten"]["first"].items():
        for partition, first in enumerate(firsts):
            made.add_row(f"{stage}/{partition}", f"{first:,}")
    show(made, "later output is shown again; remove it from the outside, or write to another folder or topic")


def _forget_output(location: str) -> dict[str, Any]:
    """Make sinks begin anew, under another id, behind the output that the location knows to be outside. It is written into the
    location. UsageError: a query uses it."""
    from flux.durable.names import ABOUT

    place, about = _opened(location)
    with place.locked():
        if place.is_held():
            raise UsageError(f"a query is using {place}: stop it first")
        journal, _ = _journal(place)
        stages = {
            name: (about["plan"]["stages"][name]["number"], about["plan"]["stages"][name]["partitions"])
            for name in about["plan"]["stages"]
            if about["plan"]["stages"][name]["sink"]
        }
        first = {
            name: [_left(journal, PartitionKey(number, partition)) for partition in range(partitions)]
            for name, (number, partitions) in stages.items()
        }
        forgotten = {"query": str(uuid.uuid4()), "first": first}
        # Settings that sinks have made, such as the ids of Kafka's producers, belong to the output that is forgotten.
        kept = {**about.get("kept", {}), "sinks": {}}
        place.write(ABOUT, json.dumps({**about, "kept": kept, "forgotten": forgotten}, indent=1).encode())
    return {"id": about["query"], "forgotten": forgotten}


def _left(journal: Journal, key: PartitionKey) -> int:
    """Return the position below which the location knows all output of a partition to be outside."""
    from flux.replicas.copy_state import decode_state

    kept = journal.standbys.get(key)
    if kept is None:
        return 0
    pieces = kept.checkpoint.pieces
    exit_: Any = decode_state(pieces[-1]).replica["exit"] if pieces else None
    return max(kept.left, 0 if exit_ is None else exit_[1])


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


def _journal(place: Place) -> tuple[Journal, int]:
    """Read a journal, and the number of times it was opened for writing. SnapshotError: something in it is damaged."""
    from flux.durable.journal import Journal

    store = place.store(writes=False)
    try:
        return Journal(store, f"the journal in {place}"), store.starts()
    except msgspec.ValidationError as error:
        raise UsageError(f"{place} was written by another release of Flux: {error}") from error
    finally:
        store.close()


def _survey(location: str) -> dict[str, Any]:
    """Read a checkpoint location. UsageError: it is none; SnapshotError: something in it is damaged."""
    place, about = _opened(location)
    stages = list(about["plan"]["stages"])
    journal, starts = _journal(place)
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
