"""One query of Nexmark on real executors, among faults: processes of workers are killed, and everything is stopped and started
again from its checkpoint location.

Events come at a pace, so that faults fall among rows. Each kill waits until every partition has all of its replicas again: a
second loss before that may end a query with two of each, as it should.
"""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

import flux
from benchmarks.nexmark import checkout
from benchmarks.nexmark.held import HeldEvents
from benchmarks.nexmark.outputs import KeptOutput, kept, late_rows
from benchmarks.operating import until
from spark_integration.query.query import Query

WORKERS, SOURCES, PARTITIONS, REPLICAS = 3, 2, 4, 2
#: Seconds for which the events of a run come, and the longest wait for anything.
SECONDS, WAIT_S = 15.0, 300.0
#: Seconds of event time over which the events of a compared run are spread, so that windows close.
EVENT_TIME_S = 50
#: Events come out of order within this part of a second, and this share of them is late.
DISORDER_S, LATE = 0.25, 0.01


def options(events: int) -> dict[str, Any]:
    """Return the options of events that are compared with the oracle: out of order, and some of them late."""
    per_second = max(events // EVENT_TIME_S, 50)
    return {"per_second": per_second, "disorder": int(per_second * DISORDER_S), "late": LATE}


@dataclass
class Outcome:
    """The outcome of one query among faults."""

    rows: int = 0
    seconds: float = 0.0
    late: int = 0
    kills: int = 0
    #: The kind of the second replica of each partition: "active" or "standby".
    recovery: str = "active"
    #: Rows that differ from those of the oracle, in words.
    differences: list[str] = field(default_factory=list)


class Chaos:
    """Runs of queries among faults. The faults of a query follow from a seed and its name, whatever else runs."""

    def __init__(self, spark: Any, events: int, folder: Path, kills: int = 3, seed: int = 1) -> None:
        self._spark, self._events, self._folder, self._kills = spark, events, folder, kills
        self._seed, self._random = seed, random.Random(seed)
        self._oracle = checkout.oracle(checkout.events(events, SOURCES, **options(events)))

    @property
    def late(self) -> int:
        """The number of late events of all kinds."""
        return int(self._oracle.late())

    def run(self, name: str) -> Outcome:
        """Run a query to its end. Its rows are compared with those of the oracle."""
        self._random = random.Random(f"{self._seed} {name}")
        standby = self._random.random() < 0.5
        restart_after = self._random.randrange(self._kills + 1)
        done, began = Outcome(recovery="standby" if standby else "active"), time.monotonic()
        query = self._start(name, standby)
        try:
            for number in range(self._kills + 1):
                if number == restart_after:
                    query = self._restarted(query, name, standby)
                if number < self._kills:
                    done.kills += self._kill(query)
            self._gate(name).touch()
            if not query.awaitTermination(WAIT_S):
                raise AssertionError(f"{name} has not ended after {WAIT_S:g} s")
            done.late = late_rows(query)
        finally:
            query.stop()
        done.seconds = time.monotonic() - began
        found = kept(self._folder / name, self._schema(name))
        done.rows, done.differences = found.num_rows, self._oracle.differences(name, found)
        if done.kills != self._kills:
            done.differences.append(f"{name}: {done.kills} of {self._kills} kills happened")
        if done.late != self.late:
            done.differences.append(f"{name}: {done.late} late rows are counted, and {self.late} are late")
        return done

    def _schema(self, name: str) -> pa.Schema:
        schema: pa.Schema = self._oracle.answer(name).schema
        return schema

    def _gate(self, name: str) -> Path:
        return self._folder / f"{name}-gate"

    def _start(self, name: str, standby: bool) -> Query:
        pace = self._events / SECONDS
        reader = HeldEvents(checkout.generator(self._events, SOURCES, pace, **options(self._events)), self._gate(name))
        flow = checkout.query(name, checkout.flows(reader)).withStage(
            name=name, replicas=REPLICAS, recovery="standby" if standby else "active"
        )
        query: Query = flux.start(
            flow.foreach_batch(KeptOutput(self._folder / name)),
            spark=self._spark,
            queryName=f"nexmark-{name}",
            checkpointLocation=str(self._folder / f"{name}-location"),
            workers=WORKERS,
            workers_timeout=f"{WAIT_S:g}s",
            partitions=PARTITIONS,
            replicas=REPLICAS,
            heartbeat_timeout="5s",
            checkpoint_interval="500ms",
            progress_interval="200ms",
        )
        query.wait_until_running(WAIT_S)
        return query

    def _restarted(self, query: Query, name: str, standby: bool) -> Query:
        time.sleep(self._random.uniform(0.5, 2.0))
        if not query.isActive:
            return query
        query.stop()
        return self._start(name, standby)

    def _kill(self, query: Query) -> int:
        """Kill the process of a worker at a random time, when every partition has its replicas. Return the number of processes
        killed: none, if the query has ended."""
        time.sleep(self._random.uniform(0.2, SECONDS / (2 * self._kills)))
        until(lambda: query.is_whole() or not query.isActive, WAIT_S, "every partition has its replicas")
        if not query.isActive:
            return 0
        members = query.members()
        victim = self._random.choice(sorted(members))
        os.kill(members[victim].about.pid, signal.SIGKILL)
        until(lambda: victim not in query.members() or not query.isActive, WAIT_S, "the loss is noticed")
        return 1
