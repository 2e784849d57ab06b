"""A lifeline that swallows all packets, as behind a firewall that drops: the worker does not stand still for it."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
from harness import LIMIT_S, SECRET, Rows, dataframe

from controller.planning.compiler import compile_plan
from flux.settings import Settings
from flux.shell import worker_loop as module
from flux.shell.lifeline import Lifeline
from flux.shell.process import Rendezvous
from flux.shell.worker_loop import JOINING_SHARE, WorkerLoop
from flux.worker.core import WorkerCore
from tests.controller.cluster import SCHEMA


@pytest.fixture
def swallows() -> Iterator[str]:
    """Yield an endpoint whose queue of connections is full."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    held = [listener]
    for _ in range(3):
        held.append(socket.socket())
        held[-1].setblocking(False)
        held[-1].connect_ex(listener.getsockname())
    yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    for one in held:
        one.close()


def test_who_cannot_connect_knows_it_after_the_time_it_gave(swallows: str) -> None:
    began = time.monotonic()
    with pytest.raises(OSError, match="timed out"):
        Lifeline(swallows, SECRET, 7, connect_s=0.05)
    assert time.monotonic() - began < LIMIT_S, "the kernel tries for minutes"


def test_a_worker_stands_still_for_less_than_it_may_be_silent_and_ever_more_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wait less and less often: a worker stood still for two seconds of every three, and was given up although all else
    was well."""
    waited: list[float] = []
    reached = False

    class Dropped(Lifeline):
        raw = -1

        def __init__(self, *about: object) -> None:
            waited.append(about[-1])  # type: ignore[arg-type]
            if not reached:
                raise TimeoutError

        def close(self) -> None: ...

    monkeypatch.setattr(module, "Lifeline", Dropped)
    plan = compile_plan([Rows().stage(dataframe(SCHEMA))], Settings.of(None), lambda schema: schema, "q", SECRET)
    worker = WorkerLoop(plan, Rendezvous("tcp://127.0.0.1:1", None, SECRET, "tcp://127.0.0.1:2"))
    monkeypatch.setattr(worker.sockets, "add", lambda opened: None)
    core = WorkerCore(plan, 0, time.perf_counter, 1)
    worker._open_lifeline(core, 0.0, JOINING_SHARE)
    tried = []
    for tenth in range(1, 1500):
        before = len(waited)
        worker._open_lifeline(core, tenth / 10)
        tried += [round(tenth / 10)] * (len(waited) - before)
    assert tried == [1, 3, 7, 15, 31, 61, 91, 121]
    timeout = plan.settings.heartbeat_timeout
    assert waited[0] <= timeout / 2
    assert max(waited[1:]) <= timeout / 5
    reached = True
    worker._open_lifeline(core, 200.0)
    worker._lifeline, reached = None, False  # it breaks
    del waited[:]
    for tenth in range(2001, 2020):
        worker._open_lifeline(core, tenth / 10)
    assert len(waited) == 1, "after one that was opened the next comes soon"
    worker._close()
