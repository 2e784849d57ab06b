"""Throughput of healthy streams while another one is silent, beside their throughput before and after.

Two of three partitions of a source give rows as fast as these are taken, with the time at which they are given as their event
time; the third gives a row a tick, and is silent in some spans. The healthy ones need not wait: their rows are applied as they
come, and tentative results are made beside that. So the rows of a stable window are the rate at its time, and the cost of a
failure is the ratio of windows within the spans to those outside. The stable windows are compared with the rows that each
partition has given.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession
from rich.console import Console

import flux
from benchmarks import session
from benchmarks.availability import (
    BOUND_S,
    FAST_BATCH,
    KEYS,
    SCHEMA,
    SILENT_PARTITION,
    SIZE_S,
    SIZE_US,
    SOURCES,
    STABLE,
    TENTATIVE,
    TICK_S,
    WORKERS,
    Noted,
    Notes,
    await_end,
    flow_of,
    notes_in,
)
from benchmarks.operating import until
from benchmarks.timeline import Report
from spark_integration.query.start import start_query

#: Seconds of a failure, between two, and before the first one, when connections are made and kernels loaded.
SILENT_S, CALM_S, WARM_UP_S = 8.0, 5.0, 4.0
FAILURES = 2
#: A worker that is given up on a busy machine ends the run: its source cannot give the same rows again.
HEARTBEAT = "1min"
#: Seconds behind a failure in which its backlog is worked off, and whose windows count for neither side.
SETTLE_S = 1.0


@dataclass(frozen=True)
class Spans:
    """The script of one run: some failures of one length. Times are in seconds since the epoch."""

    start: float
    failures: int = FAILURES

    def begins(self, number: int) -> float:
        return self.start + WARM_UP_S + CALM_S + number * (SILENT_S + CALM_S)

    @property
    def ends(self) -> float:
        return self.begins(self.failures)

    def silent(self, at: float) -> bool:
        """Return whether the third partition is silent at a time."""
        return any(self.begins(number) <= at < self.begins(number) + SILENT_S for number in range(self.failures))

    def calm(self, end: float) -> bool:
        """Return whether the window that ends at a time shows the rate without a failure."""
        spans = [(self.start + WARM_UP_S, self.begins(0))]
        spans += [(self.begins(n) + SILENT_S + SETTLE_S, self.begins(n + 1)) for n in range(self.failures)]
        return any(start + SIZE_S <= end <= stop for start, stop in spans)

    def tentative(self, end: float) -> bool:
        """Return whether a window ends at a time when tentative results are made: the bound has passed in a failure."""
        spans = [(self.begins(n) + BOUND_S, self.begins(n) + SILENT_S) for n in range(self.failures)]
        return any(start + SIZE_S <= end <= stop for start, stop in spans)


def rows_as_taken(folder: str) -> Any:
    """Make a source of the script that the driver writes to this folder. Each partition writes its counts down there."""

    def read(partition: int) -> Iterator[Any]:
        script = Path(folder, "script")
        while not script.exists():
            yield None
        spans, given = Spans(**json.loads(script.read_text())), Counter[int]()
        keys, ts = pa.array(np.arange(FAST_BATCH) % KEYS), SCHEMA.field("ts").type
        tick = spans.start
        while (now := time.time()) < spans.ends:
            if partition != SILENT_PARTITION:
                times = np.full(FAST_BATCH, round(now * 1e6))
            elif spans.silent(now):
                yield flux.SILENT
                continue
            else:
                times = np.round(np.arange(tick, now, TICK_S)[:FAST_BATCH] * 1e6).astype(np.int64)
                tick += len(times) * TICK_S
            if not len(times) or now < spans.start:
                yield None
                continue
            given.update(ends_of(times))
            yield pa.RecordBatch.from_arrays([keys.slice(0, len(times)), pa.array(times).view(ts)], schema=SCHEMA)
        Path(folder, f"given-{partition}").write_text(json.dumps(list(given.items())))

    return read


def ends_of(times: np.ndarray) -> dict[int, int]:
    """Count times by the end of their window, all in microseconds."""
    ends, counts = np.unique(times // SIZE_US * SIZE_US + SIZE_US, return_counts=True)
    return dict(zip(ends.tolist(), counts.tolist(), strict=True))


def run(chain: int, kind: str, policies: tuple[str, str], console: Console) -> Report:
    spark, _ = session.start(WORKERS, 2, idle_jvm=True)
    try:
        figures = {"benchmark": "availability", "x_s": BOUND_S, "chain": chain, "kind": kind, "failures": FAILURES}
        figures |= measured(spark, chain, kind, policies)
    finally:
        spark.stop()
    console.print(
        f"healthy streams, {kind}: {figures['during_rows_per_s']:,} rows/s while another is silent, "
        f"{figures['calm_rows_per_s']:,} otherwise, {figures['ratio']} times; {figures['lost']} rows lost, "
        f"{figures['doubled']} doubled"
    )
    wrong = figures["lost"] or figures["doubled"]
    failed = "the stable answer is not that of the source" if wrong else None
    return Report(figures, failed=failed or (None if figures["tentative"] else "no result was tentative"))


def measured(spark: SparkSession, chain: int, kind: str, policies: tuple[str, str]) -> dict[str, Any]:
    """Run the failures, and return the figures of the windows."""
    folder = tempfile.mkdtemp(prefix="flux-bench-")
    try:
        source: Any = flux.source(rows_as_taken(folder), SCHEMA, partitions=SOURCES)
        made = flow_of(source.withWatermark("ts", "0 seconds"), chain, kind, None)
        query = start_query(
            [made.to(Notes(folder))], "availability", spark, workers=WORKERS, availability=f"{BOUND_S:g}s",
            availability_failure=policies[0], availability_stabilization=policies[1], heartbeat_timeout=HEARTBEAT,
        )  # fmt: skip
        try:
            until(lambda: query.phase == "running", 120, "the query runs")
            spans = Spans(math.ceil(time.time() + 1))
            new = Path(folder, "script.new")
            new.write_text(json.dumps(asdict(spans)))
            os.rename(new, Path(folder, "script"))
            await_end(query, spans.ends - time.time() + 120)
        finally:
            query.stop()
        given = [json.loads(path.read_text()) for path in Path(folder).glob("given-*")]
        if len(given) != SOURCES:
            raise flux.QueryFailed(
                f"{len(given)} of {SOURCES} partitions have come to their end: {query.status['message']}"
            )
        return figures_of(notes_in(folder), spans, sum((Counter(dict(each)) for each in given), Counter()))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def figures_of(notes: Iterable[Noted], spans: Spans, given: Mapping[int, int]) -> dict[str, Any]:
    """Return rates and their ratio by the stable windows, and compare these with the ``given`` rows, by ends of windows."""
    counts: Counter[int] = Counter()
    tentative = 0
    for note in notes:
        if note.kind == STABLE:
            counts.update(note.counts)
        tentative += note.kind == TENTATIVE
    calm, during = (
        # A window without rows is one of rate 0, and not one that is left out.
        [
            counts[end] / SIZE_S
            for end in range(_first_end(spans), round(spans.ends * 1e6) + 1, SIZE_US)
            if which(end / 1e6)
        ]
        for which in (spans.calm, spans.tentative)
    )
    rates = [float(np.mean(each)) if each else 0.0 for each in (calm, during)]
    missing = {end: given.get(end, 0) - counts[end] for end in given.keys() | counts.keys()}
    return {
        "calm_rows_per_s": round(rates[0]),
        "during_rows_per_s": round(rates[1]),
        "ratio": round(rates[1] / rates[0], 3) if rates[0] else None,
        "tentative": tentative,
        "rows": sum(given.values()),
        "lost": sum(max(each, 0) for each in missing.values()),
        "doubled": sum(max(-each, 0) for each in missing.values()),
    }


def _first_end(spans: Spans) -> int:
    return round(spans.start * 1e6) // SIZE_US * SIZE_US
