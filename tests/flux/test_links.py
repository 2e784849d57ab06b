"""Links between workers are there when a stream, an order or a copy needs them, and go when nothing does (design: links)."""

from __future__ import annotations

import time
from typing import Any

import psutil
import pytest

from benchmarks.test_scale import plan_of, table_of
from controller.replicas.table_changes import drop, retain
from flux.exchange.producer import ToWorker
from flux.shell.transport import Sockets
from flux.shell.worker_links import WorkerLinks
from flux.wire.messages import Orders
from flux.worker.core import WorkerCore
from flux.worker.effects import GRACE_S, UnneededLinks, needed_workers
from partitioning.table import Table

SECRET = b"the secret of this query"
LIMIT_S = 60.0


class CountedSockets:
    """Sockets as ``WorkerLinks`` uses them, which count their links."""

    def __init__(self) -> None:
        #: Endpoints that are linked.
        self.open: list[str] = []
        self.opened = 0

    def link(self, endpoint: str) -> Any:
        self.open.append(endpoint)
        self.opened += 1
        return CountedLink(endpoint)

    def close_link(self, link: CountedLink) -> None:
        self.open.remove(link.endpoint)


class CountedLink:
    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint

    def send_all(self, messages: Any) -> None: ...


class Host:
    """A worker without anything that comes in."""

    def __init__(self, worker: int, plan: Any, workers: int) -> None:
        self.core = WorkerCore(plan, worker, workers=workers)
        self.sockets = CountedSockets()
        self.links = WorkerLinks(self.sockets, 1 << 30)  # type: ignore[arg-type]

    def follow(self, table: Table, now: float) -> None:
        self.links.follow(table)
        self.core.on_table(table, now)
        self.turn(now)

    def turn(self, now: float) -> None:
        for effect in self.core.poll(now):
            if isinstance(effect, ToWorker):
                self.links.send([effect])
        self.links.close_unneeded(needed_workers(self.core), now)

    @property
    def linked(self) -> set[str]:
        return set(self.sockets.open)


class Cluster:
    """Two stages of two replicas."""

    def __init__(self, workers: int, partitions: int) -> None:
        self.plan = plan_of(partitions)
        self.table = table_of(self.plan, workers)
        self.hosts = [Host(worker, self.plan, workers) for worker in range(workers)]
        self.now = 0.0
        self.follow(self.table)

    def follow(self, table: Table) -> None:
        self.table = table
        self.now += 0.01
        for host in self.hosts:
            host.follow(table, self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for host in self.hosts:
            host.turn(self.now)

    def sockets(self, worker: int) -> int:
        """Count the TCP sockets between a worker and the others: its own links, and those that come to its port."""
        own = f"tcp://127.0.0.1:{worker}"
        return len(self.hosts[worker].sockets.open) + sum(own in host.sockets.open for host in self.hosts)


def test_a_worker_of_a_hundred_has_one_link_to_each_other_at_most() -> None:
    """Give every worker partitions of both stages: each greets all the others, and more links than that cannot be."""
    cluster = Cluster(100, 200)
    counts = [cluster.sockets(worker) for worker in range(100)]
    assert max(counts) <= 200, "99 each way; data port, controller and lifeline are three more"
    cluster.wait(10 * GRACE_S)
    assert counts == [cluster.sockets(worker) for worker in range(100)], "all of them are needed"


def test_a_message_to_a_worker_that_a_table_has_dropped_in_the_same_turn_is_lost_and_others_are_not() -> None:
    sockets = CountedSockets()
    links = WorkerLinks(sockets, 1 << 30)  # type: ignore[arg-type]
    endpoints = {0: "tcp://127.0.0.1:0", 1: "tcp://127.0.0.1:1", 2: "tcp://127.0.0.1:2"}
    links.follow(Table(0, (), (), endpoints))
    loans = [ToWorker(worker, Orders([])) for worker in (2, 1)]
    links.follow(Table(1, (), (), {worker: endpoints[worker] for worker in (0, 1)}))
    links.send(loans)
    assert sockets.open == ["tcp://127.0.0.1:1"]


def test_workers_that_have_nothing_to_say_to_each_other_have_no_link() -> None:
    cluster = Cluster(100, 8)
    consumers = {replica.worker for row in cluster.table.stages[1] for replica in row}
    for worker, host in enumerate(cluster.hosts):
        mine = [row for stage in cluster.table.stages for row in stage if row[0].worker == worker]
        reached = {replica.worker for row in mine for replica in row}
        produces = any(worker == replica.worker for row in cluster.table.stages[0] for replica in row)
        needed = reached | (consumers if produces else set())
        assert host.linked == {f"tcp://127.0.0.1:{other}" for other in needed - {worker}}


def test_replicas_that_come_and_go_leave_no_links_behind() -> None:
    """Let one worker after the other get a replica and lose it: the sender to this partition kept a link to all of
    them."""
    cluster = Cluster(40, 4)
    sender = cluster.hosts[cluster.table.stages[0][0][0].worker]
    before = sender.linked
    holders = {replica.worker for stage in cluster.table.stages for row in stage for replica in row}
    for target in [worker for worker in range(40) if worker not in holders]:
        cluster.follow(retain(cluster.table, 1, 0, target))
        assert f"tcp://127.0.0.1:{target}" in sender.linked
        cluster.follow(drop(cluster.table, 1, 0, target))
        cluster.wait(GRACE_S / 4)
        assert len(sender.linked) <= len(before) + 6, "those whose time is not over yet"
    cluster.wait(2 * GRACE_S)
    assert sender.linked == before
    assert sender.sockets.opened > len(before) + 20


def test_a_replica_that_is_dropped_and_comes_back_finds_the_link_open() -> None:
    cluster = Cluster(12, 2)
    primary = cluster.table.stages[1][0][0].worker
    target = next(w for w in range(12) if f"tcp://127.0.0.1:{w}" not in cluster.hosts[primary].linked and w != primary)
    host = cluster.hosts[primary]
    for _ in range(3):
        cluster.follow(retain(cluster.table, 1, 0, target))
        cluster.wait(GRACE_S)
        cluster.follow(drop(cluster.table, 1, 0, target))
        cluster.wait(GRACE_S / 2)
    assert host.sockets.opened <= len(host.sockets.open), "it was opened once"
    cluster.wait(GRACE_S)
    assert f"tcp://127.0.0.1:{target}" not in host.linked


def test_the_time_of_a_link_begins_anew_when_it_was_needed_in_between() -> None:
    unneeded = UnneededLinks(5.0)
    assert unneeded.look([1, 2], {2}, 0.0) == []
    assert unneeded.look([1, 2], {2}, 4.9) == []
    assert unneeded.look([1, 2], {1, 2}, 4.95) == []
    assert unneeded.look([1, 2], {2}, 5.0) == []
    assert unneeded.look([1, 2], {2}, 10.0) == [1]
    assert unneeded.look([2], {2}, 10.1) == []


# ---- real sockets


class Ends:
    """Two ports with a thread's sockets each, and links to both."""

    def __init__(self) -> None:
        self.sockets = [Sockets(None, SECRET) for _ in range(3)]
        self.ports = [sockets.port("127.0.0.1") for sockets in self.sockets[1:]]
        self.links = WorkerLinks(self.sockets[0], 1 << 20)
        endpoints = {worker: port.endpoint for worker, port in enumerate(self.ports)}
        self.links.follow(Table(0, (), (), endpoints))

    def heard(self) -> list[int]:
        """Return the number of messages that have come to each port."""
        counts = [0, 0]
        end = time.monotonic() + LIMIT_S
        while not all(counts) and time.monotonic() < end:
            for sockets in self.sockets:
                for ready in sockets.wait(0.01):
                    if ready in self.ports:
                        counts[self.ports.index(ready)] += len(list(ready.receive()))
                    else:
                        list(self.links.answers(ready))
        return counts

    def connections(self) -> int:
        """Count the established connections from here to one of the ports."""
        ports = {int(port.endpoint.rpartition(":")[2]) for port in self.ports}
        here = psutil.Process().net_connections("tcp")
        return sum(c.status == "ESTABLISHED" and bool(c.raddr) and c.raddr.port in ports for c in here)


@pytest.fixture
def ends() -> Any:
    made = Ends()
    yield made
    for sockets in made.sockets:
        sockets.close()


def test_a_link_that_is_not_needed_closes_its_connection_and_opens_again_with_the_next_message(ends: Ends) -> None:
    say = [ToWorker(worker, Orders([])) for worker in (0, 1)]
    ends.links.send(say)
    assert ends.heard() == [1, 1]
    assert ends.connections() == 2
    for now in (0.0, GRACE_S):
        ends.links.close_unneeded({1}, now)
    end = time.monotonic() + LIMIT_S
    while ends.connections() > 1 and time.monotonic() < end:
        time.sleep(0.01)
    assert ends.connections() == 1
    ends.links.send(say)
    assert ends.heard() == [1, 1]
    assert ends.connections() == 2
