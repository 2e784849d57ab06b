"""Code of an addition is loaded beside the loop of a worker, one change at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import flux
from flux.dataflow.plan import StagePlan
from flux.dataflow.plan_change import PlanChange, encode_change
from flux.shell.threads import BackgroundJobs
from flux.shell.transport import Sockets
from flux.shell.worker_loop import WorkerLoop
from flux.wire.control import PlanChanged, PlanSeen
from flux.worker.core import WorkerCore
from flux.worker.effects import ToController
from tests.flux.one_worker import SECRET, Kept, planned, worker

#: Longest wait in seconds. No result depends on it.
LIMIT_S = 20.0


class Gate:
    """A gate that holds up the making of operators until it is opened."""

    opened = threading.Event()
    made: list[str] = []


def slow() -> flux.Operator:
    Gate.made.append(threading.current_thread().name)
    assert Gate.opened.wait(LIMIT_S), "the loop waits for the import"
    return Kept()


def missing() -> flux.Operator:
    raise ModuleNotFoundError("No module named 'missing'")


class Loading(WorkerLoop):
    """A worker's loop with no more parts than changes of the plan need."""

    def __init__(self) -> None:
        self.sockets = Sockets(None, SECRET)
        self._bell = self.sockets.bell()
        self._background, self._loader = BackgroundJobs(self._bell), BackgroundJobs(self._bell)
        self._loading = {}
        self.port = self._lifeline = None  # type: ignore[assignment]
        #: Reports to the controller.
        self.sent: list[Any] = []
        self.control: Any = SimpleNamespace(link=None, report=self.sent.append)
        self.core: WorkerCore = worker(planned(flux.stage(partitions=1)(Kept)))
        self.plan = self.core.plan
        self.newest = self.core.plan
        list(self.core.poll(0.0))

    def changed(self, make: Any) -> PlanChanged:
        """Return a change with one more stage behind the source."""
        _, stage, edge = self.newest.next_ids()
        like, way = self.newest.stages[0], self.newest.edges[0]
        made: StagePlan = replace(like, id=stage, name=f"s{stage}", edges_in=(edge,), make=make)
        change = PlanChange(
            self.newest.version + 1, stages=(made,), edges=(replace(way, id=edge, consumer=stage, log_bytes=1 << 16),)
        )
        self.newest = change.applied_to(self.newest)
        return PlanChanged(version=change.version, change=encode_change(change, SECRET))

    def seen(self, at_least: int) -> list[tuple[int, bool]]:
        """Return versions that were confirmed, and whether with an error, once there are this many."""
        found: list[tuple[int, bool]] = []
        while len(found) < at_least:
            assert self._bell in self.sockets.wait(LIMIT_S), "no load has ended"
            self._receive(self.core, self._bell)
            found += self.told()
        return found

    def told(self) -> list[tuple[int, bool]]:
        polled = [effect.message for effect in self.core.poll(0.0) if isinstance(effect, ToController)]
        sent = [*self.sent, *polled]
        self.sent.clear()
        return [(each.version, bool(each.error)) for each in sent if isinstance(each, PlanSeen)]


@pytest.fixture
def loop() -> Iterator[Loading]:
    Gate.opened.clear()
    Gate.made.clear()
    loop = Loading()
    yield loop
    Gate.opened.set()
    loop._background.close()
    loop._loader.close()
    loop.sockets.close()


def test_a_worker_goes_on_while_an_import_takes_long(loop: Loading) -> None:
    changes = [loop.changed(slow), loop.changed(slow)]
    for change in (*changes, changes[0]):  # the controller repeats it
        loop._on_command(loop.core, change, 0.0)
    assert loop.told() == [], "it is still loaded"
    Gate.opened.set()
    assert loop.seen(2) == [(1, False), (2, False)]
    assert len(Gate.made) == 2
    assert threading.current_thread().name not in Gate.made
    loop._on_command(loop.core, changes[0], 0.0)
    assert loop.told() == [(1, False)], "a change that is known is confirmed at once"


def test_an_error_of_an_import_is_the_answer(loop: Loading) -> None:
    loop._on_command(loop.core, loop.changed(missing), 0.0)
    assert loop.seen(1) == [(1, True)]
    assert loop.core.plans.newest.version == 0


def test_code_that_never_ends_loading_does_not_keep_a_worker() -> None:
    """Close without such a thread, which is a daemon, so that it does not keep the process either."""
    bell, begun, goes_on = Sockets(None, SECRET).bell(), threading.Event(), threading.Event()
    jobs = BackgroundJobs(bell)
    jobs.give(1, lambda: begun.set() or goes_on.wait(LIMIT_S))
    jobs.give(2, lambda: 2)
    assert begun.wait(LIMIT_S)
    assert not jobs.close(0.01)
    goes_on.set()
    assert jobs.close(LIMIT_S)
    assert list(jobs.done()) == [(1, True)], "jobs that have not begun are given up"
    assert jobs._thread.daemon
    assert BackgroundJobs(bell).close(), "a thread that had nothing to do"
