"""Cores that processes use, and who compiles: of processes that are there."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.kafka import cores
from benchmarks.kafka.cores import Meter, await_compiled, compile_s, families

#: Processor seconds that ``WORK`` uses before it prints a line and waits for the end of its input.
WORK_S = 0.3
WORK = f"import sys,time\nwhile time.process_time() < {WORK_S}: pass\nprint(flush=True)\nsys.stdin.read()"
IDLE = "import sys\nprint(flush=True)\nsys.stdin.read()"


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    made: list[subprocess.Popen[str]] = []
    yield made
    for each in made:
        each.kill()
        each.wait(30)


def start(made: list[subprocess.Popen[str]], code: str) -> int:
    made.append(
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    )
    out = made[-1].stdout
    assert out is not None
    out.readline()
    return made[-1].pid


def test_each_group_has_what_its_families_use_and_not_what_others_do(started: list[subprocess.Popen[str]]) -> None:
    idle = start(started, IDLE)
    working: list[int] = []
    meter = Meter(
        {"mine": lambda: [os.getpid()], "theirs": lambda: working, "idle": lambda: [idle], "none": list},
        lambda: working,
    )
    meter.mark()
    began = time.monotonic()
    working.append(start(started, WORK))
    meter.mark()
    took = time.monotonic() - began
    used = {name: None if value is None else value * took for name, value in meter.cores().items()}
    assert used["none"] is None
    assert used["theirs"] is not None
    assert used["theirs"] == pytest.approx(WORK_S, rel=0.5)
    assert used["idle"] == pytest.approx(0, abs=0.1)
    assert used["mine"] is not None
    assert used["mine"] < WORK_S, "without what counts as another's"


def test_what_was_used_before_a_process_was_killed_counts_if_it_was_marked(
    started: list[subprocess.Popen[str]],
) -> None:
    working: list[int] = []
    meter = Meter({"theirs": lambda: working})
    meter.mark()
    began = time.monotonic()
    working.append(start(started, WORK))
    meter.mark()
    started[-1].kill()
    started[-1].wait(30)
    working.append(start(started, WORK))
    meter.mark()
    used = meter.cores()["theirs"]
    assert used is not None
    assert used * (time.monotonic() - began) >= 2 * WORK_S * 0.9


def test_a_family_is_all_that_a_process_has_started(started: list[subprocess.Popen[str]]) -> None:
    pid = start(started, IDLE)
    assert psutil.Process(pid) in families([os.getpid()])
    assert families([pid]) == {psutil.Process(pid)}
    started[-1].kill()
    started[-1].wait(30)
    assert families([pid]) == set()


def test_only_compilers_count_as_compiling(tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    """Threads are told apart by their names: one has the name that a JVM gives to a compiler."""
    named = (
        "import ctypes,sys,threading,time\n"
        "def work(name):\n"
        "    ctypes.CDLL(None).prctl(15, name, 0, 0, 0)\n"
        f"    while time.thread_time() < {WORK_S}: pass\n"
        "    done.set(); over.wait()\n"
        "done, over = threading.Event(), threading.Event()\n"
        "threading.Thread(target=work, args=(NAME,), daemon=True).start()\n"
        "done.wait(); print(flush=True); sys.stdin.read()"
    )
    compiling = start(started, named.replace("NAME", "b'C2 CompilerThre'"))
    other = start(started, named.replace("NAME", "b'kafka-network'"))
    assert compile_s(compiling) == pytest.approx(WORK_S, abs=0.1)
    assert compile_s(other) is None
    assert compile_s(2**30) is None


def test_it_waits_until_nothing_compiles_and_no_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    now, used = [0.0], [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def sleep(seconds: float) -> None:
        now[0] += seconds
        used[0] += seconds * (0.5 if now[0] < 40 else 0.0)

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(cores, "compile_s", lambda pid: used[0])
    assert await_compiled(1, 20.0, 90.0) == pytest.approx(44, abs=3)
    now[0], used[0] = 0.0, 0.0
    assert await_compiled(1, 20.0, 30.0) == pytest.approx(30, abs=3)
    assert await_compiled(None, 20.0, 90.0) == 20.0
