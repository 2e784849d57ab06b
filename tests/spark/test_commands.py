"""Commands of users, from the outside: the jobs of the Makefile and the benchmarks. The jobs and one benchmark run in processes
of their own, which start Spark themselves; the other benchmarks in this one, with the executors that are there."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import platformdirs
import pytest
from typer.testing import CliRunner

from controller.operate import cli
from tests import postgres_server
from tests.kafka import broker

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

Bench = Callable[..., dict[str, Any]]


@pytest.fixture
def bench(cluster: Any, monkeypatch: pytest.MonkeyPatch, nothing_left_behind: None) -> Bench:
    """Return a function that runs ``flux bench ... --json`` on the executors of the tests and returns the document that the
    command prints last."""
    monkeypatch.setattr("benchmarks.session.start", lambda *_, **__: (cluster, 0.0))
    monkeypatch.setattr(cluster, "stop", lambda: None)
    monkeypatch.setattr("tempfile.tempdir", os.environ["TMPDIR"])  # for data that is kept for the next benchmark

    def invoke(*arguments: str) -> dict[str, Any]:
        done = CliRunner().invoke(cli.app, ["bench", *arguments, "--json"])
        assert done.exit_code == 0, (done.output, done.exception)
        return json.loads(done.stdout.splitlines()[-1])

    return invoke


#: The jobs of the Makefile, and texts that they print.
JOBS = {
    "run": ("336,776 flights", "97 airports, equal", "rows in", "Killing worker"),
    "run-kafka": ("336,776 flights", "336,776 running delays; Spark's batch answer: equal", "Killing worker"),
    "run-windows": ("336,776 flights", "worst connections of weeks; Spark's batch answer: equal", "Killing worker"),
    "run-postgres": ("336,776 flights", "16 carriers; Spark's batch answer is equal", "Killing worker"),
}
LATENCY = [sys.executable, "-m", "flux", "bench", "latency", "--rate", "5000", "--seconds", "2", "--json"]


class Program(NamedTuple):
    """A process that a test waits for, and the files that it prints into."""

    process: subprocess.Popen[bytes]
    out: Path
    err: Path

    def said(self) -> str:
        """Wait for the end and return ``out``, the result. Everything else is printed into ``err``."""
        code = self.process.wait(500)
        assert code == 0, self.out.read_text()[-2000:] + self.err.read_text()[-2000:]
        return self.out.read_text()


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Program]]:
    """Start all programs that start Spark, at once, because each waits much of the time: as users do, from another folder, with
    an empty home, and without the paths that tests have. Only packages and jars are there: fetching them takes minutes."""
    home = tmp_path_factory.mktemp("home")
    theirs = {"PYTHONPATH", "PYSPARK_PYTHON", "FLUX_RUNTIME_DIR"}
    clean = {key: value for key, value in os.environ.items() if key not in theirs}
    clean |= {"HOME": str(home), "XDG_CACHE_HOME": platformdirs.user_cache_dir()}
    make = ["make", "-C", str(ROOT), f"VENV={sys.prefix}", "-o", f"{sys.prefix}/.installed"]
    started = {}
    for name, command in {**{job: [*make, job] for job in JOBS}, "latency": LATENCY}.items():
        out, err = home / f"{name}.out", home / f"{name}.err"
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(command, cwd=home, env=clean, stdout=stdout, stderr=stderr, process_group=0)
        started[name] = Program(process, out, err)
    yield started
    for program in started.values():
        if program.process.poll() is None:
            os.killpg(program.process.pid, signal.SIGTERM)
            program.process.wait(60)


@pytest.mark.long
@pytest.mark.starts_spark
@pytest.mark.parametrize("job", JOBS)
def test_each_job_of_the_makefile_ends_with_0_and_says_that_its_answer_is_sparks(
    programs: dict[str, Program], job: str
) -> None:
    missing = {"run-kafka": broker.missing, "run-postgres": postgres_server.missing}.get(job)
    if missing is not None and (why := missing()):
        pytest.skip(why)
    text = programs[job].said() + programs[job].err.read_text()
    assert [each for each in JOBS[job] if each not in text] == []


@pytest.mark.long
def test_the_throughput_benchmark_is_compared_with_sparks_own_streaming(bench: Bench) -> None:
    result = bench("throughput", "--rows", "300000", "--source", "spark", "--shape", "wide", "--peer")
    assert {"rows_per_s", "peer_rows_per_s", "ratio", "p50_ms", "p99_ms", "peak_log_bytes"} <= set(result)
    assert result["rows"] == 300_000
    assert result["rows_per_s"] > 0


@pytest.mark.long
@pytest.mark.starts_spark
def test_the_latency_benchmark_starts_spark_counts_every_row_and_prints_one_json_object_last(
    programs: dict[str, Program],
) -> None:
    result = json.loads(programs["latency"].said().splitlines()[-1])
    assert result["rows"] == 5000 * (2 + 2), "the measured seconds and the warm-up"
    assert 0 < result["p50_ms"] <= result["p99_ms"] <= result["max_ms"]


@pytest.mark.long
def test_the_move_benchmark_moves_every_partition_twice_and_loses_nothing(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long measurements make the figures exact, which this test does not need.
    for name, seconds in {"WARM_UP_S": 0.5, "CALM_S": 2.0, "FLAT_WARM_UP_S": 0.5, "FLAT_S": 1.5}.items():
        monkeypatch.setattr(f"benchmarks.move.{name}", seconds)
    sizes = ("--state-mb", "0.1", "--partitions", "2", "--rate", "2000", "--workers", "2")
    result = bench("move", *sizes, "--out", str(tmp_path))
    keys = {"stall_ms_p50", "stall_ms_p99", "p99_before_ms", "p99_during_ms", "throughput_before", "throughput_during"}
    assert all(result[key] > 0 for key in keys - {"stall_ms_p50", "stall_ms_p99"}), result
    assert result["stall_ms_p99"] >= result["stall_ms_p50"] >= 0
    assert (result["moved"], result["lost"], result["duplicated"]) == (4, 0, 0)
    assert result["moved_bytes"] >= 4 * 0.09 * (1 << 20)
    assert json.loads((tmp_path / "move.json").read_text()) == result
    assert (tmp_path / "move.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
@pytest.mark.parametrize("load", [("--slow", "4"), ("--zipf", "1.2")])
def test_the_skew_benchmark_runs_with_and_without_balance_and_loses_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, load: tuple[str, str]
) -> None:
    monkeypatch.setattr("benchmarks.skew.BEFORE_S", 1.0)
    result = bench("skew", *load, "--seconds", "2")
    assert {"static_rows_per_s", "adaptive_rows_per_s", "static_latency_ms", "adaptive_latency_ms"} <= set(result)
    assert {"moves", "settled_s"} <= set(result)
    assert min(result["static_rows_per_s"], result["adaptive_rows_per_s"]) > 0
    assert (result["lost"], result["duplicated"]) == (0, 0)


def test_a_benchmark_of_moves_wants_a_worker_to_move_to() -> None:
    done = CliRunner().invoke(cli.app, ["bench", "move", "--workers", "2", "--replicas", "2"])
    assert done.exit_code == 2
    assert "need more than 2 workers" in done.output
