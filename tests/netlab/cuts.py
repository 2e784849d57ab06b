"""``python -m tests.netlab.cuts --seconds 30``: each link between two of three hosts is cut in one direction, one by one.

Rows that a function makes by the clock are read in the workers, and pass a stage with two replicas, without ``availability``.
The sink writes down when each row has come. Each cut begins when all partitions have their two replicas. It prints, for each
link, the longest time that a row of the cut took, and a total as JSON in the end. Exit code 0: each row has come once.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pyarrow as pa
import typer
from rich.console import Console

import flux
from spark_integration.query.query import Query
from spark_integration.query.start import start_query
from tests.netlab.cluster import Cluster
from tests.netlab.lab import Lab
from tests.netlab.namespaces import why_not

SCHEMA = pa.schema([("source", pa.int64()), ("number", pa.int64())])
#: Partitions of the source, two on each worker, and rows of each per second.
SOURCES, RATE = 6, 50
PARTITIONS, REPLICAS, WORKERS = 6, 2, 3
#: Seconds until the query runs, without a cut before and behind each one, and until all rows are there in the end.
START_S, CALM_S, DRAIN_S = 240.0, 3.0, 240.0
#: Seconds until all partitions have all replicas before a cut. A worker that was out of reach rests for half a minute.
WHOLE_S = 90.0
LOOK_S = 0.01


class Arrival(NamedTuple):
    """A row that has come, ``waited_s`` after its time."""

    source: int
    number: int
    waited_s: float


@dataclass(frozen=True)
class Cut:
    """The outcome of one cut. Times are in milliseconds, of the rows that were made while it lasted."""

    link: str
    rows: int
    p50_ms: float
    longest_ms: float


# ---- the query


def rows_of(partition: int, first: int, end: int) -> pa.RecordBatch:
    numbers = range(first, end)
    return pa.RecordBatch.from_pylist([{"source": partition, "number": number} for number in numbers], schema=SCHEMA)


def flow(folder: Path, began: float) -> Any:
    """Return the rows from ``began`` on, through a stage with two replicas, to the sink. They end with the number in the file
    ``end``."""
    place = str(folder)

    def read(partition: int, start: int | None) -> Iterator[flux.Positioned | None]:
        number, end = start or 0, Path(place, "end")
        while True:
            last = int(end.read_text()) if end.exists() else None
            due = max(int((time.time() - began) * RATE), 0) if last is None else last
            if due > number:
                yield flux.Positioned(rows_of(partition, number, due), due)
                number = due
            elif last is not None:
                return
            else:
                yield None

    source: Any = flux.source(read, SCHEMA, SOURCES, "rows", positions=True)
    passed = flux.stage(key="number", partitions=PARTITIONS, replicas=REPLICAS, name="passed", schema=SCHEMA)
    return passed(lambda batch: batch)(source).to(Written(folder, began))


class Written(flux.Sink):
    """A sink that writes down each batch with the time at which it has come."""

    def __init__(self, folder: Path, began: float) -> None:
        self._folder, self._began = str(folder), began

    def open(self, context: flux.SinkContext) -> None:
        self._partition = context.partition
        self._file = open(Path(self._folder, f"out-{uuid.uuid4().hex}.jsonl"), "ab", buffering=0)  # noqa: SIM115

    def write(self, batch: pa.RecordBatch, position: flux.Position) -> None:
        rows = [batch.column(name).to_pylist() for name in SCHEMA.names]
        line = json.dumps([self._partition, position.sequence, time.time() - self._began, *rows])
        self._file.write(f"{line}\n".encode())

    def close(self) -> None:
        self._file.close()


def arrivals(folder: Path) -> list[Arrival]:
    """Return the rows that have come. A batch that came again at its position counts once."""
    batches: dict[tuple[int, int], list[Any]] = {}
    for path in sorted(folder.glob("out-*.jsonl")):
        text = path.read_text()
        for line in text[: text.rfind("\n") + 1].splitlines():
            partition, sequence, *batch = json.loads(line)
            batches.setdefault((partition, sequence), batch)
    return [
        Arrival(source, number, at - number / RATE)
        for at, sources, numbers in batches.values()
        for source, number in zip(sources, numbers, strict=True)
    ]


def counted(found: Iterable[Arrival], end: int) -> tuple[int, int]:
    """Count lost and doubled rows, of those below ``end`` of each source."""
    times = Counter((each.source, each.number) for each in found)
    wanted = {(source, number) for source in range(SOURCES) for number in range(end)}
    strange = sum(count for row, count in times.items() if row not in wanted)
    return len(wanted - times.keys()), strange + sum(times[row] - 1 for row in wanted & times.keys())


# ---- the cuts


def until_whole(query: Query) -> None:
    """Wait until each partition has its replicas: the cut before may have cost one of them, and the only one of a partition has
    nothing to go over to."""
    limit = time.monotonic() + WHOLE_S
    while not query.is_whole():
        if time.monotonic() > limit:
            raise TimeoutError(f"some partition lacks a replica {WHOLE_S:g} s after a cut")
        time.sleep(0.1)


def cut_each(lab: Lab, query: Query, folder: Path, began: float, seconds: float) -> Iterator[Cut]:
    for a, b in lab.pairs():
        until_whole(query)
        time.sleep(CALM_S)
        first = int((time.time() - began) * RATE) + 1
        lab.cut(a, b)
        time.sleep(seconds)
        last = int((time.time() - began) * RATE)
        lab.heal(a, b)
        time.sleep(CALM_S)
        waits = [1e3 * each.waited_s for each in arrivals(folder) if first <= each.number <= last]
        yield Cut(f"{a}>{b}", len(waits), round(statistics.median(waits), 1), round(max(waits), 1))


def through(query: Query, folder: Path, began: float) -> tuple[int, int]:
    """End the rows, wait for all of them, and count those that are lost or doubled."""
    last = int((time.time() - began) * RATE)
    (folder / "end.new").write_text(str(last))
    (folder / "end.new").rename(folder / "end")
    limit = time.monotonic() + DRAIN_S
    active = True
    while (found := counted(arrivals(folder), last))[0] and time.monotonic() < limit and active:
        time.sleep(0.5)
        active = query.isActive  # asked before the next count, which has all rows of a query that has ended
    if (error := query.exception()) is not None:
        raise error
    return found


def main(
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="Duration of each cut.")] = 30.0,
) -> None:
    """Cut each link in one direction, and count lost and doubled rows."""
    console = Console(highlight=False)
    if reason := why_not():
        console.print(f"There is no network laboratory here: {reason}")
        raise typer.Exit(2)
    folder = Path(tempfile.mkdtemp(prefix="flux-cuts-"))
    with Lab() as lab, Cluster(lab) as cluster:
        spark, began = cluster.session(), time.time()
        query = start_query([flow(folder, began)], "cuts", spark, workers=WORKERS, workers_timeout="4min")
        try:
            query.wait_until_running(START_S)
            cuts = []
            for cut in cut_each(lab, query, folder, began, seconds):
                cuts.append(cut)
                console.print(f"{cut.link}: {cut.rows:,} rows, p50 {cut.p50_ms:g} ms, longest {cut.longest_ms:g} ms")
            lost, doubled = through(query, folder, began)
            for event in query.events():
                console.print(f"  {event}")
        finally:
            query.stop()
    shutil.rmtree(folder, ignore_errors=True)
    longest = max(cut.longest_ms for cut in cuts)
    found = {
        "seconds": seconds,
        "gap_ms_max": longest,
        "lost": lost,
        "doubled": doubled,
        "cuts": list(map(asdict, cuts)),
    }
    print(json.dumps(found), flush=True)
    if lost or doubled:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
