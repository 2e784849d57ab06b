"""What a user types, from the outside: the main job and the benchmarks, each in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYSPARK_PYTHON")}
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=clean, capture_output=True, text=True, timeout=200)


def test_the_main_job_ends_with_0_and_says_that_its_answer_is_sparks() -> None:
    done = run("examples/flights.py")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "336,776 flights" in done.stdout
    assert "97 airports, equal" in done.stdout
    assert "rows in" in done.stderr, "progress is shown while it runs"


def test_the_throughput_benchmark_prints_one_json_object_last() -> None:
    done = run(
        "-m",
        "flux",
        "bench",
        "throughput",
        "--rows",
        "300000",
        "--source",
        "spark",
        "--shape",
        "wide",
        "--peer",
        "--json",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert {"rows_per_s", "peer_rows_per_s", "ratio", "p50_ms", "p99_ms", "peak_log_bytes"} <= set(result)
    assert result["rows"] == 300_000
    assert result["rows_per_s"] > 0


def test_the_latency_benchmark_counts_every_row() -> None:
    done = run("-m", "flux", "bench", "latency", "--rate", "5000", "--seconds", "2", "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["rows"] == 5000 * (2 + 2), "the measured seconds and the warm-up"
    assert 0 < result["p50_ms"] <= result["p99_ms"] <= result["max_ms"]
