"""What ``make test`` runs, layer by layer, the quickest first. ``python tests/run.py NAME...`` runs only those.

Tests with Spark wait much of the time, so the simulation, which only computes and goes by a clock of its own, runs beside
them with the lowest priority; asked for alone, it has the machine for itself.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
PYTEST = [str(BIN / "pytest"), "-q", "-p", "no:cacheprovider"]

LAYERS = {
    "lint": [
        [str(BIN / "ruff"), "check", "--quiet", "."],
        [str(BIN / "ruff"), "format", "--check", "--quiet", "."],
        [str(BIN / "mypy")],
        [str(BIN / "lint-imports"), "--no-cache"],
    ],
    "unit": [[*PYTEST, "tests/partitioning", "tests/flux", "tests/controller", "tests/benchmarks"]],
    "laws": [[*PYTEST, "tests/laws"]],
    "kernels": [[*PYTEST, "benchmarks", "--benchmark-disable"]],
    "simulation": [[*PYTEST, "tests/simulation"]],
    "spark": [[*PYTEST, "tests/spark"]],
}
#: Which layer runs beside which, if both are to run.
BESIDE = {"simulation": "spark"}


class Layer:
    """One that is running."""

    def __init__(self, name: str, beside: bool = False) -> None:
        """``beside`` another: with low priority, and shown when it is through."""
        self.name = name
        self.seconds = 0.0
        self._started = time.monotonic()
        self._output: IO[str] | None = tempfile.TemporaryFile("w+") if beside else None  # noqa: SIM115
        commands = [["nice", "-n", "19", *command] if beside else command for command in LAYERS[name]]
        self._commands = iter(commands)
        self._first = self._start(next(self._commands))
        if not beside:
            print(f"\n=== {name}", flush=True)

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, cwd=ROOT, stdout=self._output, stderr=self._output)

    def passed(self) -> bool:
        """Waits for its end."""
        good = self._first.wait() == 0
        for command in self._commands:
            good = good and self._start(command).wait() == 0
        self.seconds = time.monotonic() - self._started
        if self._output is not None:
            self._output.seek(0)
            print(f"\n=== {self.name}\n{self._output.read()}", flush=True)
        return good


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in LAYERS]
    if unknown:
        print(f"no layer {', '.join(unknown)}; there are {', '.join(LAYERS)}")
        return 2
    wanted = [name for name in LAYERS if name in (names or LAYERS)]
    beside = {BESIDE[name]: name for name in wanted if BESIDE.get(name) in wanted}
    results: dict[str, tuple[bool, float]] = {}
    for name in wanted:
        if name in beside.values():
            continue
        layers = [Layer(name), *([Layer(beside[name], beside=True)] if name in beside else [])]
        results |= {layer.name: (layer.passed(), layer.seconds) for layer in layers}
    print("\n=== layers")
    for name, (good, seconds) in results.items():
        print(f"{name:12} {'passed' if good else 'FAILED'} in {seconds:.0f} s")
    return 0 if all(good for good, _ in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
