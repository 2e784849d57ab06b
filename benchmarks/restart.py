"""How soon a query goes on after everything was killed: driver, executors, workers, at once (design: vault).

A program of its own keeps some MiB of state in keyed counts and gives output at a steady rate; all its processes are killed, and
it is run again. The time counts from the call of ``start`` to the first output that had not been shown before. Spark's own start
is told apart.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
from rich.console import Console

import flux
from benchmarks import session
from benchmarks.timeline import Report

PARTITIONS, WORKERS, KEYS_PER_BATCH, BATCH_S = 8, 3, 500, 0.01
SCHEMA = pa.schema([("key", pa.int64()), ("sequence", pa.int64())])
#: How long a life lasts before it is killed, once its output flows: several checkpoints.
FLOWS_S, LIMIT_S = 4.0, 120.0


def paced(partition: int, start: int) -> Iterator[pa.RecordBatch | None]:
    """A batch each hundredth of a second, at most as many behind as were missed in a second."""
    number, due = start, time.time()
    while True:
        if time.time() < due:
            yield None
            continue
        due += BATCH_S
        keys = (np.arange(KEYS_PER_BATCH) + number * KEYS_PER_BATCH) * WORKERS + partition
        yield pa.record_batch([pa.array(keys), pa.array(np.full(KEYS_PER_BATCH, number))], schema=SCHEMA)
        number += 1


class Ballast(flux.Operator):
    """Counts rows, beside so many bytes of state that never change but are part of each checkpoint."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def open(self, context: flux.Context) -> None:
        self.ballast, self.rows = np.zeros(self.nbytes, np.uint8), 0

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        self.rows += batch.num_rows
        return pa.record_batch([pa.array([self.rows])], names=["rows"])

    def snapshot(self) -> object:
        return {"ballast": self.ballast, "rows": self.rows}

    def restore(self, snapshot: Any) -> None:
        self.ballast, self.rows = snapshot["ballast"], snapshot["rows"]

    def state_bytes(self) -> int:
        return self.nbytes


class Shown(flux.Sink):
    """A line for each batch that the outside has not seen: time, partition, position."""

    exactly_once = True

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def open(self, context: Any) -> None:
        self.path = Path(self.folder) / str(context.partition)
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.position = int(lines[-1].split()[1]) if lines else -1
        self.file = self.path.open("a")

    def write(self, batch: pa.RecordBatch, position: flux.Position) -> None:
        if position.sequence > self.position:
            self.position = position.sequence
            self.file.write(f"{time.time()} {position.sequence}\n")
            self.file.flush()

    def committed(self, partition: int) -> int:
        return self.position + 1


def life(folder: str, state_mb: int) -> None:
    """The program. It says when it starts the query, and never ends."""
    spark, seconds = session.start(WORKERS, 1, 1024, idle_jvm=True)
    counted = flux.stage(partitions=PARTITIONS, key="key", schema="rows long")(Ballast)
    flow = counted(nbytes=(state_mb << 20) // PARTITIONS)(flux.source(paced, SCHEMA, partitions=WORKERS))
    print(json.dumps({"start_at": time.time(), "spark_s": seconds}), flush=True)
    query = flow.to(Shown(f"{folder}/shown")).start(
        spark=spark, workers=WORKERS, checkpointLocation=f"{folder}/location", operate=False
    )
    query.awaitTermination()


def run(state_mb: int, times: int, console: Console) -> Report:
    """``times``: everything is killed so often."""
    restarts, sparks = [], []
    with tempfile.TemporaryDirectory(prefix="flux-bench-") as folder:
        (Path(folder) / "shown").mkdir()
        for number in range(times + 1):
            said, first = _one_life(folder, state_mb)
            sparks.append(said["spark_s"])
            if number:
                restarts.append(first - said["start_at"])
                console.print(f"  kill {number} of {times}: new output {restarts[-1]:.2f} s after start()")
        positions = [[int(line.split()[1]) for line in path.read_text().splitlines()]
                     for path in sorted((Path(folder) / "shown").iterdir())]  # fmt: skip
    twice = sum(len(found) - len(set(found)) for found in positions)
    left_out = sum(len(set(range(found[-1] + 1)) - set(found)) for found in positions)
    return Report(
        {
            "benchmark": "restart", "state_mb": state_mb, "kills": times,
            "restart_s": round(float(np.median(restarts)), 2), "restart_s_max": round(max(restarts), 2),
            "spark_startup_s": round(float(np.median(sparks)), 2), "batches": sum(map(len, positions)),
            "lost": left_out, "duplicated": twice,
        }
    )  # fmt: skip


def _one_life(folder: str, state_mb: int) -> tuple[dict[str, float], float]:
    """What it has said, and when its first new output came. All its processes are killed at the end."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
    began = time.time()
    program = [sys.executable, "-m", "benchmarks.restart", folder, str(state_mb)]
    driver = subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert driver.stdout is not None
        said: dict[str, float] = json.loads(driver.stdout.readline())
        first = _first_since(Path(folder) / "shown", began)
        time.sleep(FLOWS_S)
    finally:
        family = [*psutil.Process(driver.pid).children(recursive=True), psutil.Process(driver.pid)]
        for process in family:
            process.kill()
        driver.wait()
        psutil.wait_procs(family, 10)
    return said, first


def _first_since(folder: Path, began: float) -> float:
    """When the first batch came after that time. QueryTimeout: none has come."""
    while time.time() < began + LIMIT_S:
        for path in folder.iterdir():
            times = [float(line.split()[0]) for line in path.read_text().splitlines()[-20000:] if " " in line]
            new = [at for at in times if at > began]
            if new:
                return min(new)
        time.sleep(0.05)
    raise flux.QueryTimeout(f"no output within {LIMIT_S:g} s after the start")


if __name__ == "__main__":
    life(sys.argv[1], int(sys.argv[2]))
