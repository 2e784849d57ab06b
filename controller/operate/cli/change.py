"""Commands that change the placement of a running query: they show the change, ask for it, and follow it to its end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from controller.operate.cli import tables
from controller.operate.cli.options import Invocation, Query, changes
from controller.operate.cli.output import REFUSED, console, document, plain, show
from controller.operate.client import QueryClient, RequestRefused
from controller.operate.requests import (
    Accepted,
    Carried,
    DrainWorker,
    FailWorker,
    Follow,
    Followed,
    GetStatus,
    ProtectStage,
    ReplicaStatus,
    RequestStatus,
    SetWorkers,
    StartMoves,
    Status,
    Suggest,
    Suggested,
    WantedMove,
)
from controller.text import count, listed, technique
from flux.errors import QueryFailed, QueryTimeout, UsageError

#: Time between two questions.
LOOK_S = 0.2


def follow(client: QueryClient, title: str, request: int, timeout_s: float) -> Followed:
    """Wait until the request is done or given up: ask for its state again and again, and show it meanwhile. QueryTimeout names
    the part that is still to come; QueryFailed says that the request was given up because the query has failed."""
    end = time.monotonic() + timeout_s
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    screen = console(stderr=True)
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:
        task = progress.add_task(title, total=None)
        while True:
            followed = client.ask(Follow(request=request), Followed)
            asked = followed.asked
            description = f"{title}: {asked.left}" if asked.left else title
            progress.update(task, completed=asked.done, total=asked.total, description=description)
            if asked.state == "given up" and followed.error:
                raise QueryFailed(f"{asked.what} was given up: {asked.why}")
            if asked.over:
                return followed
            if time.monotonic() >= end:
                raise QueryTimeout(
                    f"after {timeout_s:g} s (--timeout) this is still to come: {asked.left}. It goes on; look at it with "
                    "flux status and flux history"
                )
            time.sleep(LOOK_S)


Worker = Annotated[int, typer.Argument(min=0, metavar="WORKER", help="Number of the worker, as in flux status.")]


@changes(query=Query, confirmed=True)
def rebalance(
    call: Invocation,
    policy: Annotated[
        str,
        typer.Option(help="Policy that makes the plan; default: the policy of the query.", show_default=False),
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and exit.")] = False,
) -> None:
    """Make a plan, show each move with its expected gain and cost, ask, and carry it out."""
    plan = call.client.ask(Suggest(policy=policy), Suggested)
    if not call.as_json:
        show(*_plan(plan))
    if dry_run or not plan.moves:
        if call.as_json:
            document(plain(plan) | {"carried_out": False})
        return
    _confirm(f"Carry out {count(len(plan.moves), 'move')}?", call)
    wanted = [WantedMove(stage=m.stage, partition=m.partition, source=m.source, target=m.target) for m in plan.moves]
    _move(call, wanted, f"flux rebalance, policy {plan.policy}", plain(plan) | {"carried_out": True})


def _plan(plan: Suggested) -> list[Any]:
    notes: list[Any] = [Text(note, style="yellow") for note in plan.notes]
    if not plan.moves:
        return [*notes, f"policy {plan.policy} suggests no move"]
    cost = sum(move.cost for move in plan.moves)
    total = f"{count(len(plan.moves), 'move')}, {tables.size(cost)} of state to copy; gain: fall of the higher load of the two"
    return [tables.moves(plan.moves), Text(total, style="dim"), *notes]


@changes()
def move(
    call: Invocation,
    partition: Annotated[str, typer.Argument(metavar="STAGE/PARTITION", help="For example Delays/3.")],
    to: Annotated[int, typer.Option("--to", min=0, help="Worker that the replica goes to.")],
    source: Annotated[
        int | None,
        typer.Option(
            "--from", min=0, show_default=False, help="Worker that has the replica; default: the primary's worker."
        ),
    ] = None,
) -> None:
    """Move one replica of a partition to another worker while rows flow."""
    stage, number = _partition(partition)
    _move(call, [WantedMove(stage=stage, partition=number, target=to, source=source)], "flux move", {})


def _partition(text: str) -> tuple[str, int]:
    stage, slash, number = text.rpartition("/")
    if not stage or not slash or not number.isdecimal() or len(number) > 9:
        raise UsageError(f"expected STAGE/PARTITION, for example Delays/3; got {text!r}")
    return stage, int(number)


def _move(call: Invocation, wanted: Sequence[WantedMove], why: str, more: dict[str, Any]) -> None:
    accepted = call.client.ask(StartMoves(moves=list(wanted), why=why), Accepted)
    if not call.wait:
        if call.as_json:
            document(
                more | {"request": accepted.request, "moves": msgspec.to_builtins(accepted.moves), "waited": False}
            )
        else:
            show(
                f"{count(len(accepted.moves), 'move')} begun as request {accepted.request}; look at it with flux status"
            )
        return
    followed = follow(call.client, "moving", accepted.request, call.timeout)
    carried = followed.moves
    if call.as_json:
        document(more | {"request": accepted.request, "moves": [_moved(one) for one in carried], "waited": True})
    else:
        show(*(_said(one, followed.asked.why) for one in carried))
    if not all(one.done for one in carried):
        undone = sum(not one.done for one in carried)
        print(
            f"flux: {count(undone, 'move')} of {len(carried)} not carried out; flux history says more", file=sys.stderr
        )
        raise typer.Exit(REFUSED)


def _moved(one: Carried) -> dict[str, Any]:
    event = msgspec.to_builtins(one.event) if one.event else {}
    measured = {key: event.get(key) for key in ("bytes", "seconds", "stall_ms")}
    move: dict[str, Any] = msgspec.to_builtins(one.move)
    return move | {"done": one.done, "phase": "done" if one.done else "not done"} | measured


def _said(one: Carried, why: str) -> str:
    """``why``: reason for giving up the request, for a move that has no event of its own."""
    if not one.done:
        return f"not moved: {one}: {one.event.why if one.event else why}"
    if one.event is None:
        return f"moved: {one}"
    return (
        f"moved: {one} in {one.event.seconds:.3f} s, {tables.size(one.event.bytes)} of state, "
        f"stall {one.event.stall_ms:.1f} ms"
    )


# ---- workers


@changes()
def drain(call: Invocation, worker: Worker) -> None:
    """Move everything off a worker; the worker then leaves the query."""
    request = call.client.ask(DrainWorker(worker=worker), Accepted).request
    finish(call, f"draining worker {worker}", request, lambda _: f"worker {worker} has left the query")


@changes(query=Query)
def scale(
    call: Invocation,
    workers: Annotated[int, typer.Option("--workers", min=1, max=4096, help="New number of workers.")],
) -> None:
    """Change the number of workers: wait until new ones have their share of the partitions, or drain surplus ones first."""
    before = {row.worker for row in call.client.ask(GetStatus(), Status).workers}
    request = call.client.ask(SetWorkers(workers=workers), Accepted).request
    finish(call, count(workers, "worker"), request, lambda status: _scaled(status, before))


def _scaled(status: Status, before: set[int]) -> str:
    held = [row.replicas for row in status.workers]
    replicas = f"{min(held)} to {max(held)}" if min(held) != max(held) else str(held[0])
    said = f"{count(len(held), 'worker')} now, with {replicas} replicas each"
    if status.balancing or all(row.worker in before for row in status.workers):
        return said
    return f"{said}; load is not balanced here (spark.flux.balance.enabled): flux rebalance --policy even evens the numbers out"


# ---- stages


@changes()
def protect(
    call: Invocation,
    stage: Annotated[str, typer.Argument(metavar="STAGE", help="Name of the stage, as in flux status.")],
    replicas: Annotated[
        int | None,
        typer.Option(
            "--replicas", show_default=False, help="Replicas of each partition, the primary included; default: no change."
        ),
    ] = None,
    recovery: Annotated[
        str | None,
        typer.Option(
            "--recovery", show_default=False,
            help="Kind of the replicas beside the primary, as in @flux.stage: active or standby; default: no change.",
        ),
    ] = None,
) -> None:  # fmt: skip
    """Change the number and the kind of a stage's replicas while rows flow."""
    if replicas is None and recovery is None:
        raise UsageError("say what is to change: --replicas, --recovery, or both")
    wanted = ProtectStage(stage=stage, replicas=replicas, recovery=recovery)
    request = call.client.ask(wanted, Accepted).request
    finish(call, f"protecting {stage}", request, lambda status: _protected(status, stage))


def _protected(status: Status, stage: str) -> str:
    (row,) = (row for row in status.stages if row.name == stage)
    return f"{stage} is protected by {technique(row.replicas, row.recovery)} of each partition"


@changes(timeout=60, confirmed=True)
def fail(call: Invocation, worker: Worker) -> None:
    """Give a worker up as if it had died, to rehearse a loss. Asks for confirmation."""
    client = call.client
    status = client.ask(GetStatus(), Status)
    _require_worker(worker, status)
    replicas = client.partitions().replicas
    for line in _risk(worker, replicas, restores=status.checkpoint is not None and len(status.workers) > 1):
        print(line, file=sys.stderr)
    _confirm(f"Fail worker {worker}?", call)
    request = client.ask(FailWorker(worker=worker), Accepted).request
    followed = client.ask(Follow(request=request), Followed)
    if followed.error:
        raise RequestRefused("failed", f"the query did not survive: {followed.error}")
    finish(call, f"failing worker {worker}", request, lambda _: f"worker {worker} is out of the query")


def _require_worker(worker: int, status: Status) -> None:
    """Refuse an unknown worker, before its replicas are described and before the question."""
    known = sorted(row.worker for row in status.workers)
    if worker not in known:
        raise RequestRefused("refused", f"cannot fail: there is no worker {worker}; there are {listed(known)}")


def _risk(worker: int, replicas: Sequence[ReplicaStatus], restores: bool) -> list[str]:
    """Describe the effect of a loss of this worker, as far as it is known beforehand. ``restores``: there is a checkpoint
    location, and another worker that restores partitions from it."""
    here = [row for row in replicas if row.worker == worker]
    others = [row for row in replicas if row.worker != worker]
    safe = {(row.stage, row.partition) for row in others if row.safe}
    late = {(row.stage, row.partition): row for row in others if row.behind}
    lost = [f"{r.stage}/{r.partition}" for r in here if (r.stage, r.partition) not in safe | late.keys()]
    primaries = [(row.stage, row.partition) for row in here if row.role == "primary"]
    lines = [f"worker {worker} holds {count(len(here), 'replica')}, {len(primaries)} of them primary"]
    for key in primaries:
        if key in late and key not in safe:
            heir = late[key]
            lines.append(
                f"{heir.stage}/{heir.partition} will wait: worker {heir.worker} is {heir.behind:,} steps behind"
            )
    if lost:
        named = ", ".join(lost[:8]) + (f" and {len(lost) - 8} more" if len(lost) > 8 else "")
        lines.append(
            f"{named} will be restored from the checkpoint location"
            if restores
            else f"the query will FAIL: worker {worker} has the only safe replica of {named}"
        )
    return lines


# ---- common


def finish(call: Invocation, title: str, request: int, done: Callable[[Status], str]) -> None:
    """Follow a request to its end and print the outcome. ``done`` describes it, given the status at that time."""
    if call.wait:
        followed = follow(call.client, title, request, call.timeout)
        asked = followed.asked
        if asked.state == "given up" and followed.phase != "running":
            _nothing_left_to_do(call, asked)
            return
        if asked.state == "given up":
            raise RequestRefused("failed", f"{asked.what} was given up: {asked.why}")
    status = call.client.ask(GetStatus(), Status)
    if call.as_json:
        document({"request": request, "waited": call.wait, "status": plain(status)})
    else:
        show(done(status) if call.wait else f"asked for as request {request}; look at it with flux status")


def _nothing_left_to_do(call: Invocation, asked: RequestStatus) -> None:
    """Say that the query has come to its end before the request was done, which is no failure. The query may not answer any
    more, so its status is not shown."""
    if call.as_json:
        document({"request": asked.request, "waited": True, "given_up": asked.why, "status": None})
    else:
        show(f"{asked.what} was given up: {asked.why}")


def _confirm(question: str, call: Invocation) -> None:
    if call.yes:
        return
    if call.as_json:
        raise UsageError("--json asks no questions: add --yes")
    if not typer.confirm(question, err=True):
        print("flux: nothing was changed", file=sys.stderr)
        raise typer.Exit(REFUSED)
