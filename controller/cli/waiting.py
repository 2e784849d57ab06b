"""Waiting for what was asked of a query: its status is looked at again and again, with a limit, and shown meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from controller import outstanding
from controller.cli.output import console
from controller.client import Client
from controller.outstanding import Carried
from controller.requests import GetHistory, GetPartitions, GetStatus, History, MoveStatus, Partitions, Status
from flux.errors import QueryFailed, QueryTimeout

#: How often the status is looked at.
LOOK_S = 0.2


@dataclass(frozen=True)
class Left:
    """How far it is: ``what`` is still to happen, empty when all is done."""

    done: int
    total: int
    what: str = ""


def wait_for(client: Client, title: str, look: Callable[[Status], Left], timeout_s: float) -> Status:
    """Until nothing is left. QueryTimeout says what was waited for, QueryFailed that the query has ended meanwhile."""
    end = time.monotonic() + timeout_s
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    screen = console(stderr=True)
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:
        task = progress.add_task(title, total=None)
        while True:
            status = client.ask(GetStatus(), Status)
            left = look(status)
            description = f"{title}: {left.what}" if left.what else title
            progress.update(task, completed=left.done, total=left.total, description=description)
            if not left.what:
                return status
            if status.phase != "running":
                raise QueryFailed(
                    f"the query is {status.phase}, before {left.what}" + (f": {status.error}" if status.error else "")
                )
            if time.monotonic() >= end:
                raise QueryTimeout(
                    f"after {timeout_s:g} s (--timeout) this is still to come: {left.what}. It goes on; look at it with "
                    "flux status and flux history"
                )
            time.sleep(LOOK_S)


def wait_for_moves(client: Client, moves: Sequence[MoveStatus], before: Status, timeout_s: float) -> list[Carried]:
    """Until the controller has none of them on its list. ``before``: the status when they were asked for."""

    def look(status: Status) -> Left:
        left = len(outstanding.moves_left(status, moves))
        return Left(len(moves) - left, len(moves), outstanding.of_moves(status, moves))

    wait_for(client, "moving", look, timeout_s)
    replicas = client.ask(GetPartitions(), Partitions).replicas
    return outstanding.carried(moves, before, replicas, client.ask(GetHistory(), History).events)
