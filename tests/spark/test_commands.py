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


def test_the_move_benchmark_moves_every_partition_twice_and_loses_nothing(tmp_path: Path) -> None:
    sizes = ("--state-mb", "0.1", "--partitions", "2", "--rate", "2000", "--workers", "2")
    done = run("-m", "flux", "bench", "move", *sizes, "--out", str(tmp_path), "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    keys = {"stall_ms_p50", "stall_ms_p99", "p99_before_ms", "p99_during_ms", "throughput_before", "throughput_during"}
    assert all(result[key] > 0 for key in keys - {"stall_ms_p50", "stall_ms_p99"}), result
    assert result["stall_ms_p99"] >= result["stall_ms_p50"] >= 0
    assert (result["moved"], result["lost"], result["duplicated"]) == (4, 0, 0)
    assert result["moved_bytes"] >= 4 * 0.09 * (1 << 20)
    assert json.loads((tmp_path / "move.json").read_text()) == result
    assert (tmp_path / "move.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("load", [("--slow", "4"), ("--zipf", "1.2")])
def test_the_skew_benchmark_runs_with_and_without_balance_and_loses_nothing(load: tuple[str, str]) -> None:
    done = run("-m", "flux", "bench", "skew", *load, "--seconds", "4", "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert {"static_rows_per_s", "adaptive_rows_per_s", "static_latency_ms", "adaptive_latency_ms"} <= set(result)
    assert {"moves", "settled_s"} <= set(result)
    assert min(result["static_rows_per_s"], result["adaptive_rows_per_s"]) > 0
    assert (result["lost"], result["duplicated"]) == (0, 0)


def test_a_benchmark_of_moves_wants_a_worker_to_move_to() -> None:
    done = run("-m", "flux", "bench", "move", "--workers", "2", "--replicas", "2")
    assert done.returncode == 2
    assert "need more than 2 workers" in done.stderr
