"""Stages, sinks and sources that come to a running query and go again, while executors are killed.

    make soak-growing                          # 200 additions and as many removals, 50 kills, about half an hour
    make soak-growing TIMES=20 KILLS=5 SEED=7

Rounds of rows flow at a steady pace, one row of each key in a round, through a stage that counts the rows of each key. Additions
of several kinds come and go behind it. All that they have written is compared with a plain model (``wrong_rows``): of each key,
the rounds from the first to the last that a stage has given, each once. Exit code 0: no stage has deviated, and the stages that
are there at the end have given the last round.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import typer
from rich.console import Console
from rounds_given import rows_of, wrong_rows
from striking import strike, until

import flux
from benchmarks import session
from spark_integration.query.query import Query

#: Partitions of the source, rounds in a second, and executors, each with a worker.
PARTITIONS, ROUNDS_PER_S, EXECUTORS = 3, 25, 4
#: Additions that are there at a time, and the longest pause between two changes, in seconds.
AT_ONCE, PAUSE_S = 5, 0.3
#: Seconds between two looks whether the last round has come.
LOOK_S = 2.0
#: Seconds by which sources are told of the end ahead.
AHEAD_S = 10.0
#: A machine under load takes its time; nothing here is judged by it.
WAIT_S = 300.0
ROUND = pa.schema([("key", pa.int64()), ("round", pa.int64())])


def rounds_until(end: float, begun: float) -> int:
    """Return the number of rounds that are due before ``end``."""
    number = max(int((end - begun) * ROUNDS_PER_S) - 1, 0)
    while begun + number / ROUNDS_PER_S < end:
        number += 1
    return number


class Rounds:
    """A reader: round n has one row of each key of the partition, and is due n / ``ROUNDS_PER_S`` seconds after ``begun``. The
    file at ``gate`` has the time of the end, once it is known."""

    def __init__(self, gate: str, keys: int, begun: float) -> None:
        self.gate, self.keys, self.begun = gate, keys, begun

    def __call__(self, partition: int, start: int) -> Iterator[pa.RecordBatch | None]:
        keys, number = pa.array(np.arange(partition, self.keys, PARTITIONS)), start
        while True:
            while time.time() < self.begun + number / ROUNDS_PER_S:
                yield None
            if os.path.exists(self.gate) and number >= rounds_until(float(Path(self.gate).read_text()), self.begun):
                return
            yield pa.record_batch([keys, pa.array(np.full(len(keys), number))], schema=ROUND)
            number += 1


class Counted(flux.Operator):
    """A counter, for each row, of earlier rows of its key: this is its round, unless a row was lost, doubled or out of order."""

    schema = "key BIGINT, round BIGINT, before BIGINT"

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.counts = pd.Series(dtype="int64")

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        keys = batch.column("key").to_pandas()
        before = (
            self.counts.reindex(keys).fillna(0).astype("int64").to_numpy() + keys.groupby(keys).cumcount().to_numpy()
        )
        self.counts = self.counts.add(keys.value_counts(), fill_value=0).astype("int64")
        return pa.record_batch([*batch.columns, pa.array(before)], names=["key", "round", "before"])


class Since(flux.Aggregate):
    """The rounds of each key since the stage began."""

    first = flux.min("round")
    last = flux.max("round")
    n = flux.count()


class Addition(NamedTuple):
    """An addition that is there: the name by which it is removed, its folders, and the time of round 0 of its source."""

    name: str
    folders: tuple[Path, ...]
    begun: float


# ---- the query


def since(name: str) -> Any:
    return flux.stage(name=name, key="key", partitions=2, replicas=2, output_mode="update")(Since)


def beside(folder: Path) -> Path:
    """Return the folder of the first of two outputs of an addition."""
    return folder.with_name(f"{folder.name}-first")


def kept(flow: Any, folder: Path) -> Any:
    return flow.to_parquet(str(folder), roll_every="200ms")


class Soak:
    """The query, and the additions that are there."""

    def __init__(self, query: Query, folder: Path, gate: Path, keys: int, begun: float, seed: int) -> None:
        self.query, self.folder, self.gate, self.keys, self.begun = query, folder, gate, keys, begun
        self.random = random.Random(seed)
        self.there: list[Addition] = []
        self.found: list[str] = []
        self.rows = 0
        self.kinds: Counter[str] = Counter()
        self.killed = 0

    def a_stage(self, number: int, folder: Path) -> Addition:
        """Add a stage behind the running one."""
        return self.added(f"Since{number}", folder, kept(since(f"Since{number}")(self.query["Counted"]), folder))

    def some_rows(self, number: int, folder: Path) -> Addition:
        """Add a stage of the rows for which a condition holds, and a sink of them, in one step."""
        some = self.query["Counted"].where(f"key % 7 = {number % 7}")
        passed = flux.stage(name=f"Passed{number}", key="key", partitions=2, replicas=2)(passes)(some)
        flows = kept(passed, beside(folder)), kept(since(f"Some{number}")(passed), folder)
        return self.added(f"Passed{number}", folder, *flows)

    def one_behind_the_other(self, number: int, folder: Path) -> Addition:
        """Add a stage and, in a second step, one behind it."""
        passed = flux.stage(name=f"Passed{number}", key="key", partitions=2, replicas=2)(passes)(self.query["Counted"])
        self.added(f"Passed{number}", folder, kept(passed, beside(folder)))
        behind = since(f"Behind{number}")(self.query[f"Passed{number}"])
        return self.added(f"Passed{number}", folder, kept(behind, folder))

    def of_the_source(self, number: int, folder: Path) -> Addition:
        """Add a stage behind the running source."""
        return self.added(f"Of{number}", folder, kept(since(f"Of{number}")(self.query.source("rounds")), folder))

    def a_source(self, number: int, folder: Path) -> Addition:
        """Add a source of its own, with a stage behind it."""
        begun = time.time()
        source = flux.source(Rounds(str(self.gate), self.keys, begun), ROUND, PARTITIONS, f"rounds{number}")
        self.query.add(kept(since(f"Own{number}")(source), folder), timeout=WAIT_S)
        return Addition(f"Own{number}", (folder,), begun)

    def added(self, name: str, folder: Path, *flows: Any) -> Addition:
        self.query.add(*flows, timeout=WAIT_S)
        return Addition(name, tuple(each for each in (folder, beside(folder)) if each.exists()), self.begun)

    def change(self, number: int) -> None:
        """Make an addition, and remove another one if there are many."""
        kinds = [self.a_stage, self.some_rows, self.one_behind_the_other, self.of_the_source, self.a_source]
        kind = self.random.choice(kinds)
        self.there.append(kind(number, self.folder / f"{number}"))
        self.kinds[kind.__name__] += 1
        time.sleep(self.random.random() * PAUSE_S)
        if len(self.there) > AT_ONCE:
            self.remove(self.there.pop(self.random.randrange(len(self.there))))

    def remove(self, addition: Addition) -> None:
        self.query.remove(addition.name, cascade=True, timeout=WAIT_S)
        self.compare(addition)

    def compare(self, addition: Addition, rounds: int | None = None) -> None:
        """Compare the rows of an addition with the model. ``rounds``: their number, if it was there to the end."""
        for folder in addition.folders:
            given = rows_of(folder)
            self.rows += len(given)
            if wrong := wrong_rows(given, rounds):
                self.found.append(f"{addition.name} in {folder}: {wrong}")
            else:
                shutil.rmtree(folder, ignore_errors=True)

    def change_while_an_executor_dies(self, number: int) -> None:
        """Kill an executor at a random moment of the addition or the removal."""
        lost: list[int] = []
        moment = self.random.random() * PAUSE_S * 2
        killer = threading.Timer(moment, lambda: lost.append(strike(self.query, signal.SIGKILL, True, stage=0)))
        killer.start()
        self.change(number)
        killer.join(WAIT_S)
        self.killed += 1
        until(lambda: lost[0] not in self.query.members(), "the loss is noticed", WAIT_S)
        until(lambda: self.query.is_whole() and len(self.query.members()) == EXECUTORS, "it is whole again", WAIT_S)

    def end(self) -> None:
        """Tell the sources their end, and compare the additions that are there and the first stage with all rounds."""
        end = time.time() + AHEAD_S
        made = self.gate.with_suffix(".new")
        made.write_text(str(end))
        made.rename(self.gate)
        for each in [Addition("Counted", (self.folder / "counted",), self.begun), *self.there]:
            rounds, limit = rounds_until(end, each.begun), time.monotonic() + WAIT_S
            while time.monotonic() < limit and any(wrong_rows(rows_of(folder), rounds) for folder in each.folders):
                time.sleep(LOOK_S)
            self.compare(each, rounds)


def passes(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def soak(times: int, kills: int, seed: int, rate: int, folder: Path, say: Callable[[str], None]) -> Soak:
    """Make the given number of additions, with kills among them."""
    # Workers are not given up because the machine is slow, as in the tests.
    slow = {"spark.flux.workers.timeout": "300s", "spark.flux.heartbeat.timeout": "5s"}
    conf = {"spark.task.maxFailures": 1000, "spark.excludeOnFailure.enabled": "false"} | slow
    spark, _ = session.start(EXECUTORS, 2, 1024, idle_jvm=True, **conf)
    keys, gate, begun = max(rate // ROUNDS_PER_S, PARTITIONS), folder / "gate", time.time()
    source = flux.source(Rounds(str(gate), keys, begun), ROUND, partitions=PARTITIONS, name="rounds")
    counted = flux.stage(name="Counted", key="key", partitions=4, replicas=2)(Counted)(source)
    query = flux.start(
        kept(counted, folder / "counted"), spark=spark, workers=EXECUTORS, balance_enabled=False,
        progress_interval="200ms", replicas_allow_same_executor=True,
    )  # fmt: skip
    run = Soak(query, folder, gate, keys, begun, seed)
    try:
        query.wait_until_running(WAIT_S)
        deadly = set(run.random.sample(range(times), min(kills, times)))
        for number in range(times):
            (run.change_while_an_executor_dies if number in deadly else run.change)(number)
            if (number + 1) % 10 == 0:
                say(f"  {number + 1} additions, {run.killed} kills")
            if run.found:
                break
        if not run.found:
            run.end()
    finally:
        query.stop()
        spark.stop()
    return run


def main(
    times: Annotated[int, typer.Option(min=1, help="Additions; all but the last few are removed again.")] = 200,
    kills: Annotated[int, typer.Option(min=0, help="Kills of an executor during a change.")] = 50,
    seed: Annotated[int | None, typer.Option(help="Seed of the choices. (default: another one each time)")] = None,
    rate: Annotated[int, typer.Option(min=100, help="Rows per second.")] = 10_000,
) -> None:
    console = Console(highlight=False)
    seed = random.randrange(10_000) if seed is None else seed
    console.print(f"seed {seed}, {EXECUTORS} executors, {rate:,} rows/s")
    folder, began = Path(tempfile.mkdtemp(prefix="flux-soak-growing-")), time.monotonic()
    run = soak(times, kills, seed, rate, folder, console.print)
    kinds = ", ".join(f"{kind} {times}" for kind, times in sorted(run.kinds.items()))
    console.print(f"{sum(run.kinds.values())} additions ({kinds}), {run.killed} kills, {run.rows:,} rows compared, "
                  f"{time.monotonic() - began:.0f} s", soft_wrap=True)  # fmt: skip
    for each in run.found:
        console.print(f"DEVIATION: {each}", markup=False, soft_wrap=True)
    console.print("equal to the model" if not run.found else f"see {folder}; seed {seed}")
    if not run.found:
        shutil.rmtree(folder, ignore_errors=True)
    raise typer.Exit(bool(run.found))


if __name__ == "__main__":
    sys.exit(typer.run(main))
