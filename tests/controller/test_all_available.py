"""Whether all rows that the sources had to give are through: of reports, and of threads with real sockets."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from harness import LIMIT_S, Rows, ThreadQuery, dataframe

import flux
from controller.operate.all_available import REPORTS, TIMES, AllAvailable
from flux.wire.control import Heartbeat
from tests.controller.cluster import Cluster

SCHEMA = pa.schema([("x", pa.int64())])


class Reporting:
    """A cluster whose workers report, and one question about it."""

    def __init__(self, **options: Any) -> None:
        self.cluster = Cluster(slots=2, replicas=1, readers=2, **options)
        self.all_available = AllAvailable(self.cluster.core.plan)
        self.drained = [0, 0]
        self.pauses = [0, 0]
        self.ended = [False, False]
        self.reader = dict(enumerate(self.cluster.table.sources[0]))

    def report(self, *nodes: int) -> str:
        for node in nodes or (0, 1):
            self.drained[node] += 1
            mine = [(0, p, self.pauses[p], self.ended[p]) for p, owner in self.reader.items() if owner == node]
            stats = {"pauses": mine, "drained": self.drained[node]}
            self.cluster.report(node, Heartbeat(node=node, progress=1, stats=stats))
        return self.look()

    def look(self) -> str:
        return self.all_available.look(self.cluster.core.board)


def test_sources_must_have_nothing_more_after_the_question_and_logs_be_emptied_once_for_each_stage() -> None:
    r = Reporting(stages=2)
    both = "rows has not paused in partitions 0, 1"
    r.pauses = [5, 5]
    for _ in range(REPORTS):
        assert r.report() == both, "whatever they have said before counts for nothing"
    r.pauses[1] = 6
    assert r.report() == "rows has not paused in partition 0"
    r.pauses[0] = 6
    assert r.report() == "rows have 2 stages to pass, in the logs of workers 0, 1"
    for _ in range(TIMES - 1):
        assert "2 stages" in r.report()
    assert r.report(0).endswith("2 stages to pass, in the logs of worker 1")
    assert "1 stage to pass" in r.report(1)
    for _ in range(TIMES - 1):
        assert "1 stage to pass" in r.report()
    assert r.report() == ""


def test_a_worker_whose_logs_do_not_empty_holds_it_up_and_the_other_does_not() -> None:
    r = Reporting()
    for pauses in range(REPORTS + 1):
        r.pauses = [pauses, pauses]
        r.report()
    for _ in range(TIMES):
        r.report(0)
    assert r.look() == "rows have 1 stage to pass, in the logs of worker 1"


def test_sources_that_have_all_ended_let_it_wait_for_the_end_of_the_query() -> None:
    r = Reporting()
    r.ended = [True, False]
    assert "partition 1" in r.report()
    r.ended = [True, True]
    assert r.report() == "the end of the query"
    r.cluster.take(r.cluster.core.driver.on_stop())
    assert r.look() == ""


def test_a_source_that_another_worker_reads_is_asked_anew() -> None:
    r = Reporting()
    for pauses in range(REPORTS + 1):
        r.pauses = [pauses, pauses]
        r.report()
    assert "1 stage" in r.look()
    r.cluster.take(r.cluster.core.leave([0], "a test", r.cluster.now))
    assert "has not paused in partitions 0, 1" in r.look()


def test_before_the_workers_have_come_it_waits_for_them() -> None:
    c = Cluster(slots=2, readers=1)
    c.core.board.phase = "starting"
    assert AllAvailable(c.core.plan).look(c.core.board) == "workers have not joined yet"


# ---- with threads and sockets


class Feed:
    """A source that gives the rows of ``put`` as they come."""

    def __init__(self) -> None:
        self.given: deque[pa.RecordBatch] = deque()

    def put(self, *values: int) -> None:
        self.given.append(pa.record_batch([pa.array(values)], schema=SCHEMA))

    def read(self, partition: int) -> Iterator[pa.RecordBatch | None]:
        while True:
            yield self.given.popleft() if self.given else None


def wait(query: ThreadQuery) -> None:
    """Wait in the way of a query's handle."""
    waiting, end = AllAvailable(query.plan), time.monotonic() + LIMIT_S
    while what := query.server.look(lambda: waiting.look(query.server.core.board)):
        assert time.monotonic() < end, what
        time.sleep(0.005)


@pytest.mark.parametrize("replicas", [1, 2])
def test_all_that_was_there_has_reached_the_sink_whatever_still_comes(replicas: int) -> None:
    feed, rows = Feed(), Rows()

    @flux.stage(partitions=2, replicas=replicas)
    def slowly(batch: pa.RecordBatch) -> pa.RecordBatch:
        time.sleep(0.02)  # long against the heartbeats below
        return batch

    flow = rows.stage(slowly(slowly(flux.source(feed.read, SCHEMA, partitions=1))))
    with ThreadQuery(flow, operate=False, replicas_allow_same_executor=True, heartbeat_interval="10ms") as query:
        query.started()
        stop = threading.Event()
        for number in range(3):
            feed.put(*range(number * 100, number * 100 + 100))
            wait(query)
            assert {row["x"] for row in rows} >= set(range(number * 100 + 100))
        noise = threading.Thread(target=lambda: [feed.put(-1) for _ in iter(lambda: stop.wait(0.25), True)])
        noise.start()
        try:
            feed.put(1000)
            wait(query)
            assert {row["x"] for row in rows} >= {1000}
        finally:
            stop.set()
            noise.join()


def test_finite_inputs_are_waited_for_to_the_end_of_the_query() -> None:
    rows = Rows()

    @flux.stage(partitions=1)
    class Total(flux.Aggregate):
        total = flux.sum("x")

    with ThreadQuery(rows.stage(Total(dataframe(SCHEMA))), operate=False) as query:
        query.started()
        waiting = AllAvailable(query.plan)
        assert query.server.look(lambda: waiting.look(query.server.core.board)) == "all of input is read"
        query.feed([[pa.record_batch([pa.array([1, 2, 3])], schema=SCHEMA)]])
        wait(query)
        assert rows == [{"total": 6}]
        assert query.server.phase == "ended"
