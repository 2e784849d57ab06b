"""What ``make test`` runs, layer by layer, the quickest first. ``python tests/run.py NAME...`` runs only those.

The simulation computes for minutes and goes by a clock of its own; the other layers go by the wall clock and wait much of the
time. So the simulation runs beside them, at the priority that only takes time nobody else wants (``SCHED_IDLE``): a test
that wakes up has the core at once. Asked for alone, it has the machine for itself.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
PYTEST = [str(BIN / "pytest"), "-q", "-p", "no:cacheprovider", "--durations=12", "--durations-min=4"]

LAYERS = {
    "lint": [
        [str(BIN / "ruff"), "check", "--quiet", "."],
        [str(BIN / "ruff"), "format", "--check", "--quiet", "."],
        [str(BIN / "mypy")],
        [str(BIN / "lint-imports"), "--no-cache"],
    ],
    "unit": [
        [*PYTEST, "tests/flux", "tests/benchmarks"],
        [
            *PYTEST,
            "tests/partitioning",
            "tests/controller",
            "tests/transcripts",
            "tests/test_documents.py",
            "tests/test_language.py",
            "tests/test_packaging.py",
        ],
    ],
    "laws": [[*PYTEST, "tests/laws"]],
    "kernels": [[*PYTEST, "benchmarks", "--benchmark-disable"]],
    "spark": [
        [*PYTEST, "tests/spark", "-m", "not second"],
        [*PYTEST, "tests/spark", "-m", "second"],
    ],
    "kafka": [[*PYTEST, "tests/kafka", "--timeout=240"]],
    "simulation": [[*PYTEST, "tests/simulation", "--timeout=3600"]],
}
#: Their commands run at once, because each waits much of the time; those of the others one after the other.
AT_ONCE = ("unit", "spark")
#: Begins with the first of the others that follow, and ends last.
BESIDE, FOLLOWING = "simulation", ("unit", "laws", "kernels", "spark", "kafka")


class Command:
    """One that is running. ``aside``: what it prints is kept until it is through, because another prints meanwhile."""

    def __init__(self, command: list[str], aside: bool = False, idle: bool = False) -> None:
        self._output = tempfile.TemporaryFile() if aside else None  # noqa: SIM115
        self.process = psutil.Popen(
            command, cwd=ROOT, stdout=self._output, stderr=self._output, preexec_fn=be_idle if idle else None
        )

    def good(self) -> bool:
        """Once it is through."""
        good = self.process.wait() == 0
        if self._output is not None:
            self._output.seek(0)
            sys.stdout.buffer.write(self._output.read())
            sys.stdout.flush()
            self._output.close()
        return good


def be_idle() -> None:
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError):  # not Linux, or a container that does not allow it
        os.nice(19)


def be_idle_no_more(process: psutil.Process) -> None:
    """As this process is: others may use the machine, too, and the rest would wait for all that they compute."""
    for each in [process, *process.children(recursive=True)]:
        try:
            os.sched_setscheduler(each.pid, os.sched_getscheduler(0), os.sched_param(0))
        except (AttributeError, OSError):
            pass  # as above, or it has ended meanwhile


class Layers:
    """Runs them and knows how they ended: whether all was well, and after how many seconds."""

    def __init__(self) -> None:
        self.results: dict[str, tuple[bool, float]] = {}
        self._beside: tuple[Command, float] | None = None

    def run(self, wanted: list[str]) -> None:
        beside = BESIDE in wanted and any(name in FOLLOWING for name in wanted)
        for name in wanted:
            if beside and name in FOLLOWING and self._beside is None:
                self._beside = Command(LAYERS[BESIDE][0], aside=True, idle=True), time.monotonic()
            if name != BESIDE or not beside:
                self._run(name)
        if self._beside is not None:
            command, began = self._beside
            be_idle_no_more(command.process)
            print(f"\n=== {BESIDE}", flush=True)
            self.results[BESIDE] = command.good(), time.monotonic() - began

    def _run(self, name: str) -> None:
        began = time.monotonic()
        print(f"\n=== {name}", flush=True)
        if name in AT_ONCE:
            running = [Command(command, aside=True) for command in LAYERS[name]]
            ends = [command.good() for command in running]
            good = all(ends)
        else:
            good = all(Command(command).good() for command in LAYERS[name])
        self.results[name] = good, time.monotonic() - began


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in LAYERS]
    if unknown:
        print(f"no layer {', '.join(unknown)}; there are {', '.join(LAYERS)}")
        return 2
    began, layers = time.monotonic(), Layers()
    layers.run(names or list(LAYERS))
    print("\n=== layers")
    for name, (good, seconds) in layers.results.items():
        print(f"{name:12} {'passed' if good else 'FAILED'} in {seconds:.0f} s")
    print(f"{'together':12} {time.monotonic() - began:.0f} s")
    return 0 if all(good for good, _ in layers.results.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
