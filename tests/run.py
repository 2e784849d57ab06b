"""What ``make test`` runs, layer by layer, the quickest first. ``python tests/run.py NAME...`` runs only those."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

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
    "simulation": [[*PYTEST, "tests/simulation"]],
    "kernels": [[*PYTEST, "benchmarks", "--benchmark-disable"]],
    "spark": [[*PYTEST, "tests/spark"]],
}


def run(name: str) -> tuple[bool, float]:
    started = time.monotonic()
    print(f"\n=== {name}", flush=True)
    good = all(subprocess.run(command, cwd=ROOT).returncode == 0 for command in LAYERS[name])
    return good, time.monotonic() - started


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in LAYERS]
    if unknown:
        print(f"no layer {', '.join(unknown)}; there are {', '.join(LAYERS)}")
        return 2
    results = {name: run(name) for name in names or LAYERS}
    print("\n=== layers")
    for name, (good, seconds) in results.items():
        print(f"{name:12} {'passed' if good else 'FAILED'} in {seconds:.0f} s")
    return 0 if all(good for good, _ in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
