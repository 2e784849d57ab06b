"""One program of windows, sessions, late rows, joins, a deduplication and ranks in real executors, again and again under other
faults: its outputs are equal byte for byte, and equal to those of the oracle.

    make every-run                       # ten runs, about ten minutes
    make every-run RUNS=3 SEED=7

The rows come from two topics of Kafka, if a broker can start here, and otherwise from readers with positions. One in twenty is
late. Each run has other numbers of workers and partitions, other kinds of replicas, other sizes of batches and steps. While rows
come, processes of workers are killed, partitions move, and the query is stopped and started again from its checkpoint location.
Exit code 0: all runs have given the same."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pyarrow as pa
import pyarrow.dataset as datasets
import typer
from rich.console import Console

import flux
from benchmarks import session
from tests.kafka import broker
from tests.oracles import disordered
from tests.oracles.disordered import (
    BEST,
    BEST_SIZE,
    BY,
    DELAY,
    GAP,
    JOINED,
    OFFERS,
    PARTITIONS,
    SCHEMA,
    SIZE,
    SLIDE,
    WITHIN,
)  # fmt: skip

EXECUTORS, CORES = 3, 2
#: Events of each partition, and events in a second. Offers are half as many.
ROWS, RATE = 12_000, 2_000
WAIT_S = 300.0
#: Executors run in folders of their own; and no worker is given up because the machine is slow.
CONF = {
    "spark.executorEnv.PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    "spark.task.maxFailures": "1000",
    "spark.flux.workers.timeout": "300s",
}


class Rows(NamedTuple):
    """The rows of a source."""

    name: str
    columns: str
    schema: pa.Schema
    made: disordered.Made
    #: Rows of each partition, and how many come in a second.
    count: int
    rate: int


SOURCES = (
    Rows(
        "events", "partition BIGINT, number BIGINT, ts TIMESTAMP, user BIGINT, amount BIGINT", SCHEMA, disordered.part,
        ROWS, RATE,
    ),
    Rows(
        "offers", "source BIGINT, place BIGINT, at TIMESTAMP, user BIGINT, price BIGINT", OFFERS, disordered.offers,
        ROWS // 2, RATE // 2,
    ),
)  # fmt: skip
#: The outputs that are made by stages whose replicas are of a kind that each run draws.
DRAWN = ("windows", "sessions", "once", "joined", "as_of", "best")

console = Console(highlight=False)


class Sums(flux.Aggregate):
    n = flux.count()
    total = flux.sum("amount")
    kinds = flux.count_distinct("amount")


@cache
def texts(rows: Rows, partition: int) -> list[str]:
    """Make the rows of a partition as JSON."""
    given = rows.made(partition, rows.count).to_pandas()
    return given.to_json(orient="records", lines=True, date_format="iso", date_unit="us").splitlines()


class Feed:
    """The sources of one run. Their rows come share by share, so that faults fall among them however slow the machine is: into
    topics of this run, or as far as a file says."""

    def __init__(self, address: str, run: str, folder: Path) -> None:
        self.address, self.run, self.gate = address, run, folder / "gate"
        self.share = 0.0
        if address:
            for each in SOURCES:
                broker.create_topic(address, self.topic(each), PARTITIONS)

    def topic(self, rows: Rows) -> str:
        return f"{rows.name}-{self.run}"

    def release(self, share: float) -> None:
        """Let the rows come up to this share of all."""
        before, self.share = self.share, share
        if self.address:
            self._produce(before)
            return
        self.gate.with_suffix(".new").write_text(str(share))
        self.gate.with_suffix(".new").replace(self.gate)

    def _produce(self, before: float) -> None:
        from confluent_kafka import Producer

        producer = Producer({"bootstrap.servers": self.address, "queue.buffering.max.messages": 2 * ROWS * PARTITIONS})
        for each in SOURCES:
            for partition in range(PARTITIONS):
                for line in texts(each, partition)[int(before * each.count) : int(self.share * each.count)]:
                    producer.produce(self.topic(each), line, partition=partition)
        producer.flush()

    def source(self, rows: Rows, most: int) -> Any:
        """Return a source of rows at a pace, in batches of up to ``most``."""
        name = rows.name
        if self.address:
            pace = rows.rate * PARTITIONS
            return flux.kafka(
                self.topic(rows), self.address, format="json", schema=rows.columns, max_rows_per_second=pace, name=name
            )
        read = disordered.numbered(rows.count, most, Due(str(self.gate), rows.count, rows.rate), rows.made)
        return flux.source(read, rows.schema, PARTITIONS, name, positions=True)


class Due:
    """A rule that tells whether the next row of a partition is due: it has been released, and its time has come since this life
    of the reader began."""

    def __init__(self, gate: str, count: int, rate: int) -> None:
        self.gate, self.count, self.rate = gate, count, rate
        self.began: dict[int, tuple[float, int]] = {}

    def __call__(self, partition: int, number: int) -> bool:
        at, first = self.began.setdefault(partition, (time.monotonic(), number))
        if number - first > (time.monotonic() - at) * self.rate:
            return False
        try:
            return number < int(float(Path(self.gate).read_text()) * self.count)
        except FileNotFoundError:
            return False


class Run:
    """One run of the program, under the faults that a seed gives."""

    def __init__(self, spark: Any, address: str, folder: Path, seed: str, wanted: dict[str, bytes]) -> None:
        self.spark, self.folder, self.wanted = spark, folder, wanted
        self.random = random.Random(seed)
        folder.mkdir()
        self.feed = Feed(address, folder.name, folder)
        self.done: list[str] = []
        self._declare()

    def _declare(self) -> None:
        """Draw the parts of the plan that all lives of the query share, and write the program down."""
        rng = self.random
        self.kinds = {name: rng.choice(["active", "standby"]) for name in DRAWN}
        self.partitions = {name: rng.randint(1, 8) for name in (*DRAWN, "late")}
        self.cut = rng.choice([7, 100, 1000])
        self.options = {
            "batch_max_rows": rng.choice([10, 100, 5000]),
            "step_max_rows": rng.choice([10, 200, 100_000]),
            "workers": rng.choice([2, 3]),
            "checkpoint_interval": "500ms",
        }

    def __str__(self) -> str:
        standby = [name for name, kind in self.kinds.items() if kind == "standby"]
        counts = ", ".join(f"{count} of {name}" for name, count in self.partitions.items())
        return (
            f"{self.options['workers']} workers, partitions: {counts}; standbys of {', '.join(standby) or 'none'}; "
            + (f"batches of {self.options['batch_max_rows']} rows, steps of {self.options['step_max_rows']}")
        )

    def flows(self) -> dict[str, Any]:
        from pyspark.sql import functions as F  # noqa: N812

        all_events, all_offers = (self.feed.source(rows, self.cut) for rows in SOURCES)
        events, offers = all_events.withWatermark("ts", DELAY), all_offers.withWatermark("at", DELAY)
        counted = events.groupBy("user", F.window("ts", SIZE, SLIDE)).agg(
            F.count("*").alias("n"), F.sum("amount").alias("total"), F.countDistinct("amount").alias("kinds")
        )
        visits = flux.stage(key="user", window=flux.session_window("ts", GAP))(Sums)
        near = F.expr(f"e.user = o.user AND e.ts BETWEEN o.at AND o.at + INTERVAL {WITHIN}")
        pairs = self.placed("joined", events.alias("e").join(offers.alias("o"), near, "left"))
        joined = pairs.select(*(f"e.{name}" if name == "user" else name for name in JOINED))
        as_of = flux.asof_join(events, offers, on="user", tolerance=WITHIN, how="left")
        best = flux.top(joined, BEST, key="user", window=flux.window("ts", BEST_SIZE), by=BY)
        once = events.dropDuplicatesWithinWatermark(["partition", "user"])
        return {
            "windows": self.placed("windows", counted).select(
                "user", "window.start", "window.end", "n", "total", "kinds"
            ),
            "sessions": self.placed("sessions", visits(events)),
            "late": self.placed("late", events.late),
            "once": self.placed("once", once),
            "joined": joined,
            "as_of": self.placed("as_of", as_of),
            "best": self.placed("best", best),
        }

    def placed(self, name: str, flow: Any) -> Any:
        """Give the stage of a flow the partitions and the kind of replicas that this run has drawn."""
        kind = {"recovery": self.kinds[name]} if name in self.kinds else {}
        return flow.withStage(name=name, partitions=self.partitions[name], replicas=2, **kind)

    def start(self) -> flux.Query:
        sinks = [flow.to_parquet(str(self.folder / name), roll_every="300ms") for name, flow in self.flows().items()]
        query = flux.start(
            *sinks, spark=self.spark, checkpointLocation=str(self.folder / "location"), heartbeat_timeout="5s",
            progress_interval="200ms", **self.options,
        )  # fmt: skip
        query.wait_until_running(WAIT_S)
        return query

    def faults(self) -> list[Callable[[flux.Query], flux.Query]]:
        kinds = [self.kill, self.move, self.restart, self.protect]
        return [self.random.choice(kinds) for _ in range(self.random.randint(2, 4))]

    def kill(self, query: flux.Query) -> flux.Query:
        worker = self.random.choice(sorted(query.members()))
        os.kill(query.members()[worker].about.pid, signal.SIGKILL)
        self.done.append(f"worker {worker} killed")
        return query

    def move(self, query: flux.Query) -> flux.Query:
        """Move a few partitions, where a worker has no replica of them. With two workers, a third one comes first."""
        moved = 0
        query.scale(3, timeout=WAIT_S)
        for row in self.random.sample(query.partitions(), 6):
            held = {each["worker"] for each in query.partitions() if self._same(each, row)}
            free = sorted(set(query.members()) - held)
            if free and row["worker"] in held:
                with contextlib.suppress(flux.MoveFailed, flux.UsageError):  # the partition has changed meanwhile
                    query.move(row["stage"], row["partition"], free[0], source=row["worker"], timeout=WAIT_S)
                    moved += 1
        self.done.append(f"{moved} moves")
        return query

    @staticmethod
    def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
        return (one["stage"], one["partition"]) == (other["stage"], other["partition"])

    def restart(self, query: flux.Query) -> flux.Query:
        query.stop()
        self.options["workers"] = self.random.choice([2, 3])
        self.done.append(f"stopped, and started with {self.options['workers']} workers")
        return self.start()

    def protect(self, query: flux.Query) -> flux.Query:
        """Give a stage replicas of the other kind. A restart undoes it."""
        name = self.random.choice(DRAWN)
        kind = "standby" if self.kinds[name] == "active" else "active"
        try:
            query.scale(3, timeout=WAIT_S)
            query.protect(name, recovery=kind, timeout=WAIT_S)
            self.done.append(f"{name} protected by {kind} replicas")
        except flux.UsageError as error:  # workers share executors
            self.done.append(f"{name} not protected: {error}")
        return query

    def outputs(self) -> dict[str, bytes]:
        found = {}
        for name in self.wanted:
            files = [str(path) for path in (self.folder / name).glob("part-*.parquet")]
            found[name] = disordered.lines(datasets.dataset(files).to_table()) if files else b""
        return found

    def run(self) -> dict[str, bytes]:
        """Return the program's output when it is complete, has more than the wanted rows, or takes too long."""
        query, faults = self.start(), self.faults()
        try:
            for number, fault in enumerate(faults):
                self._until_whole(query)
                self.feed.release((number + 1) / (len(faults) + 1))
                time.sleep(self.random.uniform(0.2, 1.5))
                query = fault(query)
            self.feed.release(1.0)
            end = time.monotonic() + WAIT_S
            while query.isActive and time.monotonic() < end and self._missing():
                time.sleep(0.3)
            time.sleep(1.0)  # a row too many would come now
        finally:
            query.stop()
        if (error := query.exception()) is not None:
            raise error
        return self.outputs()

    def _missing(self) -> bool:
        return any(found.count(b"\n") < self.wanted[name].count(b"\n") for name, found in self.outputs().items())

    def _until_whole(self, query: flux.Query) -> None:
        end = time.monotonic() + WAIT_S
        while query.isActive and not query.is_whole():
            assert time.monotonic() < end, "full replication"
            time.sleep(0.02)


def compare(number: int, wanted: dict[str, bytes], found: dict[str, bytes]) -> bool:
    for name, rows in found.items():
        if rows != wanted[name]:
            given, expected = rows.split(b"\n"), wanted[name].split(b"\n")
            more, fewer = set(given) - set(expected), set(expected) - set(given)
            twice = len(given) - len(set(given))
            console.print(
                f"[bold]run {number}: {name} DIFFER[/bold]: {len(more)} more, {len(fewer)} missing, {twice} twice"
            )
            for each in sorted(more | fewer)[:5]:
                console.print(f"    {'more' if each in more else 'missing'}: {each.decode()}", markup=False)
    return found == wanted


def main(
    runs: Annotated[int, typer.Option(help="how many")] = 10,
    seed: Annotated[int, typer.Option(help="of the faults")] = 1,
    kafka: Annotated[bool, typer.Option(help="through topics, where a broker can start")] = True,
) -> None:
    why = broker.missing() if kafka else "no topics are asked for"
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flux-every-run-")))
        address = "" if why else stack.enter_context(broker.Broker()).address
        final_us = [disordered.watermark(rows.count, rows.made) for rows in SOURCES] if address else []
        wanted = disordered.answers(ROWS, *final_us)
        counts = ", ".join(f"{rows.count(10) + 1:,} {name}" for name, rows in wanted.items())
        console.print(
            f"{sum(rows.count for rows in SOURCES) * PARTITIONS:,} rows {f'from topics at {address}' if address else why}; "
            f"the oracle: {counts}"
        )
        spark, _ = session.start(EXECUTORS, CORES, 1024, **CONF)
        equal = 0
        try:
            for number in range(1, runs + 1):
                run = Run(spark, address, folder / str(number), f"{seed} {number}", wanted)
                console.print(f"run {number}: {run}")
                began = time.monotonic()
                same = compare(number, wanted, run.run())
                equal += same
                console.print(
                    f"  {'; '.join(run.done)}: {'equal' if same else 'DIFFERENT'} after {time.monotonic() - began:.0f} s"
                )
        finally:
            spark.stop()
    console.print(f"{equal} of {runs} runs are equal, byte for byte")
    sys.exit(0 if equal == runs else 1)


if __name__ == "__main__":
    typer.run(main)
