"""Waiting for a request to a query: its state is asked for again and again, with a limit, and shown meanwhile."""

from __future__ import annotations

import time

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from controller.operate.cli.output import console
from controller.operate.client import QueryClient
from controller.operate.requests import Follow, Followed
from flux.errors import QueryFailed, QueryTimeout

#: Time between two questions.
LOOK_S = 0.2


def follow(client: QueryClient, title: str, request: int, timeout_s: float) -> Followed:
    """Wait until the request is done or given up. QueryTimeout names the part that is still to come; QueryFailed says that the
    request was given up because the query has failed."""
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
