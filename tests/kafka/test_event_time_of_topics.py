"""Event time of topics of a real broker: partitions without rows, partitions that stop and come back, and a broker that is away.
Counts and results are those of a plain model (design: idle)."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
from harness import Rows, ThreadQuery
from outside_store import until

import flux
from tests.kafka.broker import Broker
from tests.kafka.topics import send

DELAY_S, SIZE_S = 2, 10
USERS = 5
#: A partition and the times of rows that come there, in seconds.
Phase = tuple[int, Sequence[int]]


@flux.stage(key="user", partitions=2, window=flux.window("ts", f"{SIZE_S} seconds"))
class Visits(flux.Aggregate):
    n = flux.count()


def moment(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Model:
    """The answer to phases of rows, each of which comes when the phase before has been applied."""

    def __init__(self) -> None:
        self.newest: dict[int, int] = {}
        self.watermark = -1
        self.late = self.behind = 0
        #: By start of window and user.
        self.windows = Counter[tuple[int, int]]()

    def add(self, partition: int, times: Sequence[int]) -> None:
        for at in times:
            if at < self.newest.get(partition, at) - DELAY_S:
                self.late += 1
                continue
            self.newest[partition] = max(self.newest.get(partition, at), at)
            if at < self.watermark:
                self.behind += 1
            else:
                self.windows[at // SIZE_S * SIZE_S, at % USERS] += 1

    def all_idle(self) -> None:
        """Advance the watermark to that of the newest partition, as all partitions are idle."""
        self.watermark = max(self.watermark, *(at - DELAY_S for at in self.newest.values()))

    def least(self, partitions: int) -> None:
        """Advance the watermark to the least of all partitions, as none is idle."""
        if len(self.newest) == partitions:
            self.watermark = max(self.watermark, min(self.newest.values()) - DELAY_S)

    @property
    def final(self) -> dict[tuple[int, int], int]:
        return {window: n for window, n in self.windows.items() if window[0] + SIZE_S <= self.watermark}


class Running:
    """A query that counts visits by user and window, and its topic."""

    def __init__(self, query: ThreadQuery, rows: Rows, address: str, topic: str) -> None:
        self.query, self.rows, self.address, self.topic = query, rows, address, topic
        self.model = Model()

    def give(self, partition: int, times: Sequence[int]) -> None:
        rows = [json.dumps({"user": at % USERS, "ts": moment(at)}).encode() for at in times]
        send(self.address, self.topic, rows, partition)
        self.model.add(partition, times)

    @property
    def report(self) -> Any:
        """The newest report on the event time of source and stage."""
        progress = self.query.server.progress
        if self.query.server.error is not None:
            raise self.query.server.error
        told = progress[-1] if progress else {"sources": [{}], "stages": [{}]}
        return told["sources"][0].get("eventTime", {}), told["stages"][0].get("eventTime", {})

    @property
    def watermark(self) -> Any:
        return self.report[1].get("watermark")

    def held_back_by(self, partition: int, why: str) -> bool:
        name = f"partition {self.topic}-{partition} of source visits: {why}"
        return str(self.report[1].get("heldBackBy")).startswith(name)

    def state(self, partition: int) -> Any:
        return self.report[0]["partitions"][f"{self.topic}-{partition}"]["state"]

    def settles(self) -> None:
        """Wait for the watermark of the model, and compare everything with it."""
        model = self.model
        until(lambda: self.watermark == moment(model.watermark), f"the watermark {model.watermark}")
        until(lambda: len(self.rows) >= len(model.final), f"{self.rows}, and not {model.final}")
        found = {(int(row["window_start"].timestamp()), row["user"]): row["n"] for row in self.rows}
        assert found == model.final
        assert len(self.rows) == len(model.final), "each window once"
        until(lambda: self.report[1]["rowsBehindWatermark"] >= model.behind, "all rows behind the watermark")
        assert self.report[1]["rowsBehindWatermark"] == model.behind
        assert self.report[0]["lateRows"] == model.late


@contextmanager
def running(broker: Broker, topic: str, idle: str | None = None) -> Iterator[Running]:
    visits: Any = flux.kafka(
        topic, broker.address, format="json", schema="user BIGINT, ts TIMESTAMP", name="visits", retry_timeout="5min"
    )
    rows = Rows()
    flow = rows.stage(Visits(visits.withWatermark("ts", f"{DELAY_S} seconds", idle=idle)))
    with ThreadQuery(flow, workers=1, operate=False, progress_interval="50ms") as query:
        query.started()
        yield Running(query, rows, broker.address, topic)


def test_an_empty_partition_is_named_and_with_idle_results_come(broker: Broker, new_topic: Callable[..., str]) -> None:
    topic = new_topic(2)
    with running(broker, topic) as query:
        query.give(0, range(26))
        until(lambda: query.held_back_by(1, "no row since the start"), f"{query.report}")
        assert query.watermark is None
        assert query.rows == []
    with running(broker, topic, idle="300 milliseconds") as query:
        query.model.add(0, range(26))
        query.model.all_idle()
        query.settles()


def test_a_partition_that_stops_and_comes_back_brings_rows_behind_the_watermark_and_they_are_counted(
    broker: Broker, new_topic: Callable[..., str]
) -> None:
    phases: list[Phase] = [
        (0, [0, 5, 30, 29, 3]),
        (1, [12, 4, 31, 40]),
        (0, [28, 29, 37, 38, 55, 39]),
        (1, [38, 54, 70, 52, 69]),
        (0, [66, 69, 68, 90]),
    ]
    with running(broker, new_topic(2), idle="300 milliseconds") as query:
        for partition, times in phases:
            query.give(partition, times)
            query.model.all_idle()
            query.settles()
        assert query.model.behind == 6
        assert query.model.late == 4


def away(broker: Broker, topic: str, pause_s: float, idle: str, kill: bool) -> None:
    """Run a query whose broker is away for a while: nothing becomes idle, neither then nor when it is back, and no row is left
    out."""
    assert broker.process is not None
    with running(broker, topic, idle) as query:
        query.give(0, [0, 7, 14, 33])
        query.give(1, [3, 11, 13])
        query.model.least(2)
        query.settles()
        before = query.watermark
        gone_at = time.monotonic()
        broker.kill() if kill else broker.process.send_signal(signal.SIGSTOP)
        try:
            until(lambda: {query.state(0), query.state(1)} == {"silent"}, f"{query.report}")
            until(lambda: query.held_back_by(1, "no answer from outside"), f"{query.report}")
            while time.monotonic() < gone_at + pause_s:
                assert query.held_back_by(1, "no answer from outside")
                assert (query.state(0), query.state(1)) == ("silent", "silent")
                assert query.watermark == before
                time.sleep(0.05)
        finally:
            broker.start() if kill else broker.process.send_signal(signal.SIGCONT)
        until(lambda: query.state(0) != "silent" != query.state(1), "answers")
        back_at = time.monotonic()
        while time.monotonic() < back_at + 0.5:  # programs that write have had no answer either, and come back now
            assert (query.state(0), query.state(1)) == ("reading", "reading")
            assert query.watermark == before
            time.sleep(0.05)
        query.give(0, [44, 35])
        query.give(1, [15, 19, 12, 38, 45])
        query.model.least(2)
        query.settles()
        assert query.model.behind == 0


def test_nothing_is_idle_while_the_broker_is_away_and_no_row_is_behind_the_watermark_afterwards(
    broker: Broker, new_topic: Callable[..., str]
) -> None:
    away(broker, new_topic(2), pause_s=4.0, idle="3 seconds", kill=False)


@pytest.mark.long
@pytest.mark.parametrize("kill", [False, True])
def test_nothing_is_idle_while_the_broker_is_away_for_a_minute(
    broker: Broker, new_topic: Callable[..., str], kill: bool
) -> None:
    away(broker, new_topic(2), pause_s=60.0, idle="10 seconds", kill=kill)
