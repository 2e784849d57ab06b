"""Links that stand still now and then, and the age of rows by the way in which copies of a stage are read (design: feeds).

Three hosts of the network laboratory (``tests/netlab``) have a Spark worker each. Rows come at a steady rate, are counted in a
stage with two replicas, and arrive at a sink with as many. All links go through the laboratory's forwarder, which counts their
bytes; each direction of each link stands still at times of its own. Each way of reading gets the same rows.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import SparkSession
from rich.console import Console

from benchmarks import window_gaps
from benchmarks.arrivals import Seen, collect, percentile
from benchmarks.failover import KEYS, WORKERS, flow
from benchmarks.paced import END, START, Script
from benchmarks.timeline import Report
from flux.errors import UsageError
from spark_integration.query.start import start_query

if TYPE_CHECKING:
    from tests.netlab.forwarder import Weather
    from tests.netlab.lab import Lab

PARTITIONS, REPLICAS = 6, 2
#: The windows of a count with ``--order``, whose results come at their ends.
WINDOW, WINDOW_MS = "20 milliseconds", 20.0
#: Seconds before the links have weather, and after it, when rows that waited come.
WARM_UP_S, CALM_S = 3.0, 3.0


@contextlib.contextmanager
def laboratory() -> Iterator[tuple[Lab, SparkSession]]:
    """Make three hosts with a Spark worker each. UsageError: there can be no laboratory here, with the reason."""
    sys.path.insert(0, str(Path(__file__).parents[1]))  # the laboratory is a part of the tests
    from tests.netlab.cluster import Cluster
    from tests.netlab.lab import Lab
    from tests.netlab.namespaces import why_not

    if reason := why_not():
        raise UsageError(f"flux bench paths needs the network laboratory, which cannot be made here: {reason}")
    with Lab() as lab, Cluster(lab) as cluster:
        yield lab, cluster.session()


def count_bytes(lab: Lab) -> None:
    """Let all links go through the forwarder, which counts their bytes, without any delay of its own."""
    from tests.netlab.forwarder import Weather

    for a, b in lab.pairs():
        lab.weather(a, b, Weather())


@dataclass(frozen=True)
class Shape:
    """The count of a run. ``order`` None: it gives the changed groups after each step; else it gives windows, by an order of
    steps or at marks."""

    order: str | None = None
    replicas: int = REPLICAS
    sources: int = WORKERS

    def flow(self, script: Script) -> Any:
        if self.order is None:
            return flow(script, self.replicas, PARTITIONS)
        return window_gaps.flow(script, self.order, self.replicas, PARTITIONS, WINDOW, REPLICAS)

    @property
    def pace_ms(self) -> float:
        """The age of each result that is its own doing, in milliseconds."""
        return 0.0 if self.order is None else WINDOW_MS


def run(
    ways: Sequence[str],
    stall_s: float,
    every_s: float,
    jitter_s: float,
    seconds: float,
    rate: int,
    console: Console,
    shape: Shape = Shape(),
) -> Report:
    """Measure each way of reading. UsageError: there can be no laboratory here, with the reason."""
    found: dict[str, dict[str, Any]] = {}
    with laboratory() as (lab, spark):
        from tests.netlab.forwarder import Weather

        weather = Weather(0.0, jitter_s, 0.0, stall_s, every_s)
        for way in ways:
            found[way] = measure(spark, lab, weather, way, seconds, rate, shape)
            console.print(f"  feeds={way}: {told(found[way])}")
    first = found[ways[0]]
    for each in found.values():
        each["bytes_ratio"] = round(each["bytes"] / first["bytes"], 2) if first["bytes"] else None
        each["ratio"] = round(first["p99_ms"] / each["p99_ms"], 2) if first["p99_ms"] and each["p99_ms"] else None
    figures = {
        "benchmark": "paths", **asdict(shape), "stall_s": stall_s, "every_s": every_s, "jitter_s": jitter_s,
        "seconds": seconds, "rate": rate, "feeds": found,
    }  # fmt: skip
    wrong = any(each["lost"] or each["doubled"] for each in found.values())
    return Report(figures, failed="rows were lost or counted twice" if wrong else None)


def measure(
    spark: SparkSession, lab: Lab, weather: Weather, way: str, seconds: float, rate: int, shape: Shape
) -> dict[str, Any]:
    """Run the count once under this weather, with copies read in one way."""
    count_bytes(lab)
    script = Script(rate, shape.sources, KEYS)
    query = start_query([shape.flow(script)], f"paths {way}", spark, keep_output=True, workers=WORKERS, feeds=way)
    try:
        query.wait_until_running(60)
        script.say(START, time.time() + 1)
        time.sleep(1 + WARM_UP_S)
        for a, b in lab.pairs():
            lab.weather(a, b, weather)
        before, began = travelled(lab), time.time()
        time.sleep(seconds)
        after, ended = travelled(lab), time.time()
        races = dict(query.lastProgress or {}).get("feeds", ())
        count_bytes(lab)
        script.say(END, script.batch_due_at(time.time() + CALM_S))
        seen = collect(query, script)
        exact = seen.exactness(script.expected())
    finally:
        query.stop()
        script.clear()
    return figures(seen, began, ended, shape.pace_ms) | {
        "bytes": after - before,
        "lost": exact["lost"],
        "doubled": exact["duplicated"],
        "second_feeds": sum(each["secondFeeds"] for each in races),
        "won": sum(each["won"] for each in races),
    }


def travelled(lab: Lab) -> int:
    """Return the bytes that have gone over all links, in both directions."""
    return sum(counts["bytes"] for counts in lab.counts().values())


def figures(seen: Seen, began: float, ended: float, pace_ms: float = 0.0) -> dict[str, Any]:
    """Return percentiles of the age of the oldest rows of a step, of those that were due in this time, beyond ``pace_ms``."""
    ages = seen.age_ms[seen.due_between(began, ended)] - pace_ms
    return {"p50_ms": percentile(ages, 50), "p99_ms": percentile(ages, 99), "max_ms": percentile(ages, 100)}


def told(found: dict[str, Any]) -> str:
    """Put the figures of one way into words."""
    return (
        f"age p50 {found['p50_ms']} ms, p99 {found['p99_ms']} ms; {found['bytes'] / 1e6:.1f} MB over links; "
        f"{found['second_feeds']} second feeds, {found['won']} won; {found['lost']} lost, {found['doubled']} counted twice"
    )
