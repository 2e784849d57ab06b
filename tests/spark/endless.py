"""A query without end to look at and to operate, and the ``flux`` command to do it with."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from typer.testing import CliRunner, Result

import flux
from controller.operate import cli

ROOT = Path(__file__).resolve().parents[2]
#: A machine under load takes its time; nothing is judged by it.
WAIT_S = 120.0
TICK_S = 0.03


def ticks(partition: int) -> Iterator[pa.RecordBatch | None]:
    """Yield a few rows now and then, without end."""
    start = time.monotonic()
    for number in range(1 << 30):
        while time.monotonic() < start + number * TICK_S:
            yield None
        yield pa.RecordBatch.from_pydict({"k": [partition, number]})


@flux.stage(key="k", partitions=4)
class Nothing(flux.Operator):
    def process(self, batch: pa.RecordBatch) -> None:
        pass


def endless() -> flux.Flow:
    return Nothing(flux.source(ticks, schema="k BIGINT", partitions=3, name="ticks"))


def until(look: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + WAIT_S
    while not (found := look()):
        assert time.monotonic() < end, what
        time.sleep(0.02)
    return found


def rows_flow(query: Any) -> None:
    until(lambda: query.lastProgress and query.lastProgress["totalInputRows"] > 0, "no rows")


# ---- the flux command


def command(*arguments: str) -> Result:
    """Run a command in this process: the request goes through connection file and port all the same."""
    return CliRunner().invoke(cli.app, list(arguments))


def command_elsewhere(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, as users type it."""
    return begin_elsewhere(*arguments)()


def begin_elsewhere(*arguments: str) -> Callable[[], subprocess.CompletedProcess[str]]:
    """Begin a command in a process of its own; return a function that waits for its end. A command takes seconds, most of them to
    begin."""
    line = [sys.executable, "-m", "flux", *arguments]
    process = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def ended() -> subprocess.CompletedProcess[str]:
        try:
            out, err = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
        return subprocess.CompletedProcess(line, process.returncode, out, err)

    return ended


def parsed(*arguments: str, code: int = 0) -> Any:
    """Run a command and return the one JSON document that it prints."""
    done = command(*arguments, "--json")
    assert done.exit_code == code, done.output
    assert done.stdout.count("\n") == 1, "one document and nothing else"
    return json.loads(done.stdout)
