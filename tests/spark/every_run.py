"""One program of windows, sessions and late rows in real executors, again and again under other faults: its outputs are equal
byte for byte, and equal to those of the oracle.

    make every-run                       # ten runs, about ten minutes
    make every-run RUNS=3 SEED=7

The rows come from a topic of Kafka, if a broker can start here, and otherwise from a reader with positions. One in twenty is
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
from pathlib import Path
from typing import Annotated, Any

import pyarrow.dataset as datasets
import typer
from rich.console import Console

import flux
from benchmarks import session
from tests.kafka import broker
from tests.oracles import disordered
from tests.oracles.disordered import DELAY, GAP, PARTITIONS, SCHEMA, SIZE, SLIDE

EXECUTORS, CORES = 3, 2
#: Rows of each partition, and how many come in a second.
ROWS, RATE = 12_000, 2_000
TOPIC = "events"
WAIT_S = 300.0
#: Executors run in folders of their own; and no worker is given up because the machine is slow.
CONF = {
    "spark.executorEnv.PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    "spark.task.maxFailures": "1000",
    "spark.flux.workers.timeout": "300s",
}
DDL = "partition BIGINT, number BIGINT, ts TIMESTAMP, user BIGINT, amount BIGINT"

console = Console(highlight=False)


class Sums(flux.Aggregate):
    n = flux.count()
    total = flux.sum("amount")
    kinds = flux.count_distinct("amount")


def produce(address: str) -> None:
    """Write all rows into a topic."""
    from confluent_kafka import Producer

    broker.create_topic(address, TOPIC, PARTITIONS)
    producer = Producer({"bootstrap.servers": address, "queue.buffering.max.messages": ROWS * PARTITIONS + 1})
    for partition in range(PARTITIONS):
        rows = disordered.part(partition, ROWS).to_pandas()
        for line in rows.to_json(orient="records", lines=True, date_format="iso", date_unit="us").splitlines():
            producer.produce(TOPIC, line, partition=partition)
    producer.flush()


def paced(partition: int, number: int, began: dict[int, tuple[float, int]]) -> bool:
    """Tell whether the next row is due, by the time at which this life of the reader has begun."""
    at, first = began.setdefault(partition, (time.monotonic(), number))
    return number - first <= (time.monotonic() - at) * RATE


def source(address: str, most: int) -> Any:
    if address:
        return flux.kafka(
            TOPIC, address, format="json", schema=DDL, max_rows_per_second=RATE * PARTITIONS, name="events"
        )
    began: dict[int, tuple[float, int]] = {}
    read = disordered.numbered(ROWS, most, lambda partition, number: paced(partition, number, began))
    return flux.source(read, SCHEMA, PARTITIONS, "events", positions=True)


class Run:
    """One run of the program, under the faults that a seed gives."""

    def __init__(self, spark: Any, address: str, folder: Path, seed: str, wanted: dict[str, bytes]) -> None:
        self.spark, self.address, self.folder, self.wanted = spark, address, folder, wanted
        self.random = random.Random(seed)
        self.done: list[str] = []
        self._declare()

    def _declare(self) -> None:
        """Draw the parts of the plan that all lives of the query share, and write the program down."""
        rng = self.random
        self.kinds = [rng.choice(["active", "standby"]) for _ in range(2)]
        self.partitions = [rng.randint(1, 8) for _ in range(3)]
        self.cut = rng.choice([7, 100, 1000])
        self.options = {
            "batch_max_rows": rng.choice([10, 100, 5000]),
            "step_max_rows": rng.choice([10, 200, 100_000]),
            "workers": rng.choice([2, 3]),
            "checkpoint_interval": "500ms",
        }

    def __str__(self) -> str:
        return f"{self.options['workers']} workers, partitions {self.partitions}, {' and '.join(self.kinds)}, " + (
            f"batches of {self.options['batch_max_rows']} rows, steps of {self.options['step_max_rows']}"
        )

    def start(self) -> flux.Query:
        from pyspark.sql import functions as F  # noqa: N812

        events = source(self.address, self.cut).withWatermark("ts", DELAY)
        windows, sessions, late = self.partitions
        counted = events.groupBy("user", F.window("ts", SIZE, SLIDE)).agg(
            F.count("*").alias("n"), F.sum("amount").alias("total"), F.countDistinct("amount").alias("kinds")
        )
        visits = flux.stage(
            key="user", window=flux.session_window("ts", GAP), partitions=sessions, replicas=2, recovery=self.kinds[1]
        )(Sums)
        flows = {
            "windows": counted.withStage(partitions=windows, replicas=2, recovery=self.kinds[0]).select(
                "user", "window.start", "window.end", "n", "total", "kinds"
            ),
            "sessions": visits(events),
            "late": events.late.withStage(partitions=late, replicas=2),
        }
        sinks = [flow.to_parquet(str(self.folder / name), roll_every="300ms") for name, flow in flows.items()]
        query = flux.start(
            *sinks, spark=self.spark, checkpointLocation=str(self.folder / "location"), heartbeat_timeout="5s",
            progress_interval="200ms", **self.options,
        )  # fmt: skip
        query.wait_until_running(WAIT_S)
        return query

    def faults(self) -> list[Callable[[flux.Query], flux.Query]]:
        return [self.random.choice([self.kill, self.move, self.restart]) for _ in range(self.random.randint(2, 4))]

    def kill(self, query: flux.Query) -> flux.Query:
        worker = self.random.choice(sorted(query.members()))
        os.kill(query.members()[worker].about.pid, signal.SIGKILL)
        self.done.append(f"worker {worker} killed")
        return query

    def move(self, query: flux.Query) -> flux.Query:
        """Move a few partitions, where a worker has no replica of them."""
        moved = 0
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

    def outputs(self) -> dict[str, bytes]:
        found = {}
        for name in self.wanted:
            files = [str(path) for path in (self.folder / name).glob("part-*.parquet")]
            found[name] = disordered.lines(datasets.dataset(files).to_table()) if files else b""
        return found

    def run(self) -> dict[str, bytes]:
        """Return what the program has given when it has given all that is wanted, has given more, or takes too long."""
        query = self.start()
        try:
            for fault in self.faults():
                self._until_whole(query)
                time.sleep(self.random.uniform(0.2, 1.5))
                query = fault(query)
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
    kafka: Annotated[bool, typer.Option(help="through a topic, where a broker can start")] = True,
) -> None:
    why = broker.missing() if kafka else "no topic is asked for"
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flux-every-run-")))
        address = "" if why else stack.enter_context(broker.Broker()).address
        if address:
            produce(address)
        wanted = disordered.answers(ROWS, disordered.watermark(ROWS)) if address else disordered.answers(ROWS)
        counts = ", ".join(f"{rows.count(10) + 1:,} {name}" for name, rows in wanted.items())
        console.print(
            f"{ROWS * PARTITIONS:,} rows {f'from a topic at {address}' if address else why}; the oracle: {counts}"
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
