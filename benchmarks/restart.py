"""Time until a query goes on after driver, executors and workers were killed at once (design: vault).

A program of its own keeps some MiB of state in keyed counts and gives output at a steady rate. All its processes are killed,
and it is run again. The time counts from the call of ``start`` to the first output that had not been shown before. Spark's own
start is reported separately.
"""

from __future__ import annotations

import contextlib
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
#: Time of a life before it is killed, once its output flows: several checkpoints; longest wait.
FLOWS_S, LIMIT_S = 4.0, 120.0


def paced(partition: int, start: int) -> Iterator[pa.RecordBatch | None]:
    """Yield a batch each hundredth of a second. After a pause, at most the batches of one second are made up for."""
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
    """Operator that counts rows, with ``nbytes`` of state that never changes but is part of each checkpoint."""

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
    """Sink that writes a line for each batch that the outside has not seen: time, partition, position."""

    traits = flux.SinkTraits(exactly_once=True)

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
    """Run the program. It prints the time at which it starts the query, and never ends."""
    spark, seconds = session.start(WORKERS, 1, 1024, idle_jvm=True)
    counted = flux.stage(partitions=PARTITIONS, key="key", schema="rows long")(Ballast)
    flow = counted(nbytes=(state_mb << 20) // PARTITIONS)(flux.source(paced, SCHEMA, partitions=WORKERS))
    print(json.dumps({"start_at": time.time(), "spark_s": seconds}), flush=True)
    query = flow.to(Shown(f"{folder}/shown")).start(
        spark=spark, workers=WORKERS, checkpointLocation=f"{folder}/location", operate=False
    )
    query.awaitTermination()


def run(state_mb: int, times: int, console: Console, peer: bool = False) -> Report:
    """Run the benchmark: everything is killed ``times`` times. ``peer``: also with Structured Streaming, in turn with the other
    program."""
    programs = {"": Killed("benchmarks.restart")} | ({"peer_": Killed("benchmarks.restart_peer")} if peer else {})
    for number in range(times + 1):
        for name, program in programs.items():
            program.live(state_mb)
            if number:
                console.print(
                    f"  kill {number} of {times}: {name}restart_s {program.restarts[-1]:.2f}", highlight=False
                )
    figures: dict[str, Any] = {"benchmark": "restart", "state_mb": state_mb, "kills": times}
    for name, program in programs.items():
        figures |= {f"{name}{key}": value for key, value in program.figures().items()}
    if peer:
        figures["ratio"] = round(figures["peer_restart_s"] / figures["restart_s"], 2)
    return Report(figures, failed=why_failed(figures))


def why_failed(figures: dict[str, Any]) -> str | None:
    """Return the reason why the run counts as failed; None: no batch was left out or given twice."""
    lost, duplicated = figures["lost"], figures["duplicated"]
    return f"{lost} batches lost, {duplicated} duplicated, 0 are allowed" if lost or duplicated else None


class Killed:
    """The program of a module, run again and again. ``restarts`` has the seconds from its call of ``start`` to its first new
    output."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.restarts: list[float] = []
        self._sparks: list[float] = []
        self._kept = tempfile.TemporaryDirectory(prefix="flux-bench-")
        self._folder = Path(self._kept.name)
        self._shown = self._folder / "shown"
        self._shown.mkdir()

    def live(self, state_mb: int) -> None:
        """Run the program until its output has flowed for a while. Then kill all its processes."""
        again = any(self._shown.iterdir())
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
        began = time.time()
        program = [sys.executable, "-m", self.module, str(self._folder), str(state_mb)]
        driver = subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env=environment)
        try:
            assert driver.stdout is not None
            said: dict[str, float] = json.loads(driver.stdout.readline())
            first = self._first(began, 0)
            self._first(0.0, int(said.get("full_at", 0)))
            time.sleep(FLOWS_S)
        finally:
            family = [*psutil.Process(driver.pid).children(recursive=True), psutil.Process(driver.pid)]
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):  # some processes end when others do
                    process.kill()
            driver.wait()
            psutil.wait_procs(family, 10)
        self._sparks.append(said["spark_s"])
        if again:
            self.restarts.append(first - said["start_at"])

    def _lines(self) -> list[list[tuple[float, int]]]:
        """Return the times and positions of the output of each partition. The last line may be half written."""
        texts = [path.read_text() for path in sorted(self._shown.iterdir())]
        whole = [text[: text.rfind("\n") + 1].splitlines() for text in texts]
        return [[(float(line.split()[0]), int(line.split()[1])) for line in lines] for lines in whole]

    def _first(self, since: float, position: int) -> float:
        """Return the time of the first output from this position on, after a given time. QueryTimeout: none has come."""
        end = time.time() + LIMIT_S
        while time.time() < end:
            new = [at for lines in self._lines() for at, number in lines[-20000:] if at > since and number >= position]
            if new:
                return min(new)
            time.sleep(0.05)
        raise flux.QueryTimeout(f"{self.module}: no output within {LIMIT_S:g} s after the start")

    def figures(self) -> dict[str, Any]:
        positions = [[number for _, number in lines] for lines in self._lines()]
        self._kept.cleanup()
        return {
            "restart_s": round(float(np.median(self.restarts)), 2),
            "restart_s_max": round(max(self.restarts), 2),
            "spark_startup_s": round(float(np.median(self._sparks)), 2),
            "batches": sum(map(len, positions)),
            "lost": sum(len(set(range(max(found, default=-1) + 1)) - set(found)) for found in positions),
            "duplicated": sum(len(found) - len(set(found)) for found in positions),
        }


if __name__ == "__main__":
    life(sys.argv[1], int(sys.argv[2]))
