"""Commands that change the placement of a running query: what is meant is shown and asked for, then followed to its end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import typer
from rich.text import Text

from controller import outstanding
from controller.cli import tables
from controller.cli.output import REFUSED, Json, Query, QueryOption, document, outcome, plain, show
from controller.cli.waiting import Left, wait_for, wait_for_moves
from controller.client import Client, RequestRefused, choose
from controller.outstanding import Carried
from controller.requests import (
    Accepted,
    DrainWorker,
    FailWorker,
    GetPartitions,
    GetStatus,
    Partitions,
    ReplicaStatus,
    SetWorkers,
    StartMoves,
    Status,
    Suggest,
    Suggested,
    WantedMove,
)
from controller.wording import count, listed
from flux.errors import UsageError

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask first.")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it is done.")]
Timeout = Annotated[
    float, typer.Option(min=0.1, help="Seconds to wait at most; what was asked for goes on after that.")
]
Worker = Annotated[int, typer.Argument(min=0, metavar="WORKER", help="Its number, as in flux status.")]


@dataclass(frozen=True)
class How:
    """To wait for the end or not, and to say it to whom."""

    wait: bool
    timeout_s: float
    as_json: bool


def rebalance(
    query: Query = None,
    policy: Annotated[
        str,
        typer.Option(help="What decides which partitions move; default: the policy of the query.", show_default=False),
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan, and no more.")] = False,
    yes: Yes = False,
    wait: Wait = True,
    timeout: Timeout = 600,
    as_json: Json = False,
) -> None:
    """Compute a plan, show each move with its expected gain and cost, carry it out and follow it."""
    with outcome(as_json), Client(choose(query)) as client:
        plan = client.ask(Suggest(policy=policy), Suggested)
        if not as_json:
            show(*_plan(plan))
        if dry_run or not plan.moves:
            if as_json:
                document(plain(plan) | {"carried_out": False})
            return
        _confirm(f"Carry out {count(len(plan.moves), 'move')}?", yes, as_json)
        wanted = [
            WantedMove(stage=m.stage, partition=m.partition, source=m.source, target=m.target) for m in plan.moves
        ]
        more = plain(plan) | {"carried_out": True}
        _move(client, wanted, f"flux rebalance, policy {plan.policy}", How(wait, timeout, as_json), more)


def _plan(plan: Suggested) -> list[Any]:
    notes: list[Any] = [Text(note, style="yellow") for note in plan.notes]
    if not plan.moves:
        return [*notes, f"policy {plan.policy} suggests no move"]
    cost = sum(move.cost for move in plan.moves)
    total = (
        f"{count(len(plan.moves), 'move')}, {tables.size(cost)} of state to copy; gain: of the higher load of the two"
    )
    return [tables.moves(plan.moves), Text(total, style="dim"), *notes]


def move(
    partition: Annotated[str, typer.Argument(metavar="STAGE/PARTITION", help="For example Delays/3.")],
    to: Annotated[int, typer.Option("--to", min=0, help="Worker that takes the copy over.")],
    source: Annotated[
        int | None,
        typer.Option("--from", min=0, show_default=False, help="Worker that has the copy; default: its primary's."),
    ] = None,
    query: QueryOption = None,
    wait: Wait = True,
    timeout: Timeout = 600,
    as_json: Json = False,
) -> None:
    """Move one copy of a partition to another worker while rows flow."""
    with outcome(as_json), Client(choose(query)) as client:
        stage, number = _partition(partition)
        wanted = WantedMove(stage=stage, partition=number, target=to, source=source)
        _move(client, [wanted], "flux move", How(wait, timeout, as_json), {})


def _partition(text: str) -> tuple[str, int]:
    stage, slash, number = text.rpartition("/")
    if not stage or not slash or not number.isdecimal() or len(number) > 9:
        raise UsageError(f"expected STAGE/PARTITION, for example Delays/3; got {text!r}")
    return stage, int(number)


def _move(client: Client, wanted: Sequence[WantedMove], why: str, how: How, more: dict[str, Any]) -> None:
    before = client.ask(GetStatus(), Status)
    accepted = client.ask(StartMoves(moves=list(wanted), why=why), Accepted)
    if not how.wait:
        if how.as_json:
            document(more | {"moves": msgspec.to_builtins(accepted.moves), "waited": False})
        else:
            show(f"{count(len(accepted.moves), 'move')} begun; look at it with flux status")
        return
    carried = wait_for_moves(client, accepted.moves, before, how.timeout_s)
    if how.as_json:
        document(more | {"moves": [_moved(one) for one in carried], "waited": True})
    else:
        show(*(_said(one) for one in carried))
    if not all(one.done for one in carried):
        undone = sum(not one.done for one in carried)
        print(
            f"flux: {count(undone, 'move')} of {len(carried)} not carried out; flux history says more", file=sys.stderr
        )
        raise typer.Exit(REFUSED)


def _moved(one: Carried) -> dict[str, Any]:
    event = msgspec.to_builtins(one.event) if one.event else {}
    measured = {key: event.get(key) for key in ("bytes", "seconds", "stall_ms")}
    return msgspec.to_builtins(one.move) | {"done": one.done, "phase": "done" if one.done else "not done"} | measured


def _said(one: Carried) -> str:
    if not one.done:
        return f"not moved: {one}" + (f": {one.event.why}" if one.event else "")
    if one.event is None:
        return f"moved: {one}"
    return (
        f"moved: {one} in {one.event.seconds:.3f} s, {tables.size(one.event.bytes)} of state, "
        f"stall {one.event.stall_ms:.1f} ms"
    )


# ---- workers


def drain(
    worker: Worker,
    query: QueryOption = None,
    wait: Wait = True,
    timeout: Timeout = 600,
    as_json: Json = False,
) -> None:
    """Move everything away from a worker; then it leaves the query."""
    with outcome(as_json), Client(choose(query)) as client:
        client.ask(DrainWorker(worker=worker), Accepted)
        held: list[int] = []

        def look(status: Status) -> Left:
            left = sum(row.replicas for row in status.workers if row.worker == worker)
            held.append(left)
            return Left(max(held) - left, max(held), outstanding.of_drain(status, worker))

        _finish(
            client,
            f"draining worker {worker}",
            look,
            How(wait, timeout, as_json),
            lambda _: f"worker {worker} has left the query",
        )


def scale(
    workers: Annotated[int, typer.Option("--workers", min=1, max=4096, help="How many workers there shall be.")],
    query: Query = None,
    wait: Wait = True,
    timeout: Timeout = 600,
    as_json: Json = False,
) -> None:
    """Run with more workers, until they have their share of the partitions, or with fewer, which are drained first."""
    with outcome(as_json), Client(choose(query)) as client:

        def look(status: Status) -> Left:
            here = len(status.workers)
            return Left(min(here, workers), max(here, workers), outstanding.of_scale(status, workers))

        before = {row.worker for row in client.ask(GetStatus(), Status).workers}
        client.ask(SetWorkers(workers=workers), Accepted)
        _finish(
            client, count(workers, "worker"), look, How(wait, timeout, as_json), lambda status: _scaled(status, before)
        )


def _scaled(status: Status, before: set[int]) -> str:
    held = [row.replicas for row in status.workers]
    copies = f"{min(held)} to {max(held)}" if min(held) != max(held) else str(held[0])
    said = f"{count(len(held), 'worker')} now, with {copies} copies each"
    if status.balancing or all(row.worker in before for row in status.workers):
        return said
    return f"{said}; load is not balanced here (spark.flux.balance.enabled): flux rebalance --policy even gives each as many"


def fail(
    worker: Worker,
    query: QueryOption = None,
    yes: Yes = False,
    wait: Wait = True,
    timeout: Timeout = 60,
    as_json: Json = False,
) -> None:
    """Give a worker up as if it had died, to rehearse that. Asks first."""
    with outcome(as_json), Client(choose(query)) as client:
        _require_worker(worker, client.ask(GetStatus(), Status))
        replicas = client.ask(GetPartitions(), Partitions).replicas
        for line in _risk(worker, replicas):
            print(line, file=sys.stderr)
        _confirm(f"Fail worker {worker}?", yes, as_json)
        client.ask(FailWorker(worker=worker), Accepted)

        def look(status: Status) -> Left:
            if status.phase == "ended":
                raise RequestRefused("failed", f"the query did not survive: {status.error}")
            here = any(row.worker == worker for row in status.workers)
            return Left(int(not here), 1, f"worker {worker} being given up" if here else "")

        _finish(
            client,
            f"failing worker {worker}",
            look,
            How(wait, timeout, as_json),
            lambda _: f"worker {worker} is out of the query",
        )


def _require_worker(worker: int, status: Status) -> None:
    """Before anything is said of its copies, or asked."""
    known = sorted(row.worker for row in status.workers)
    if worker not in known:
        raise RequestRefused("refused", f"cannot fail: there is no worker {worker}; there are {listed(known)}")


def _risk(worker: int, replicas: Sequence[ReplicaStatus]) -> list[str]:
    """What a loss of this worker means, as far as it is known beforehand."""
    here = [row for row in replicas if row.worker == worker]
    safe = {(row.stage, row.partition) for row in replicas if row.worker != worker and row.safe}
    lost = [f"{row.stage}/{row.partition}" for row in here if (row.stage, row.partition) not in safe]
    primaries = sum(row.role == "primary" for row in here)
    lines = [f"worker {worker} holds {count(len(here), 'copy', 'copies')}, {primaries} of them primary"]
    if lost:
        named = ", ".join(lost[:8]) + (f" and {len(lost) - 8} more" if len(lost) > 8 else "")
        lines.append(f"the query will FAIL: worker {worker} has the only safe copy of {named}")
    return lines


# ---- common


def _finish(
    client: Client, title: str, look: Callable[[Status], Left], how: How, done: Callable[[Status], str]
) -> None:
    """``done``: what is said when it is, to the status at that time."""
    status = wait_for(client, title, look, how.timeout_s) if how.wait else client.ask(GetStatus(), Status)
    if how.as_json:
        document({"waited": how.wait, "status": plain(status)})
    else:
        show(done(status) if how.wait else "asked for; look at it with flux status")


def _confirm(question: str, yes: bool, as_json: bool) -> None:
    if yes:
        return
    if as_json:
        raise UsageError("--json asks no questions: add --yes")
    if not typer.confirm(question, err=True):
        print("flux: nothing was changed", file=sys.stderr)
        raise typer.Exit(REFUSED)
