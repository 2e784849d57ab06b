"""The search for the highest rate, with systems that are made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.kafka import bench
from benchmarks.kafka.fastest import CLOSE, FIRST, LEAST, MOST, fastest
from flux.errors import QueryFailed


@pytest.mark.parametrize("most", [300, 1_100, FIRST, 5_000, 77_000, 600_000])
def test_what_is_found_passes_and_a_little_more_does_not(most: int) -> None:
    asked: list[int] = []

    def measure(rate: int) -> dict[str, Any]:
        asked.append(rate)
        return {"p99_ms": 20.0 if rate <= most else 90.0, "cores": 0.5, "lost": 0, "duplicated": 0}

    found = fastest(measure, 50.0)
    assert most / CLOSE**2 <= found["sustained_rows_per_s"] <= most
    assert found["sustained_rows_per_core_s"] == pytest.approx(2 * found["sustained_rows_per_s"])
    assert (found["sustained_p99_ms"], found["sustained_cores"]) == (20.0, 0.5)
    assert len(asked) == len(set(asked)) <= 16
    assert LEAST <= min(asked) <= max(asked) <= MOST


@pytest.mark.parametrize(
    "figures", [{"p99_ms": 90.0}, {"p99_ms": None}, {"failed": "too fast"}, {"p99_ms": 1.0, "lost": 1}]
)
def test_a_rate_that_is_not_sustained_does_not_pass(figures: dict[str, Any]) -> None:
    assert fastest(lambda rate: figures, 50.0)["sustained_rows_per_s"] == 0


def test_who_passes_everything_and_who_cannot_be_run_end_the_search() -> None:
    assert MOST / 2 < fastest(lambda rate: {"p99_ms": 1.0, "cores": None}, 50.0)["sustained_rows_per_s"] <= MOST
    asked: list[int] = []

    def missing(rate: int) -> dict[str, Any]:
        asked.append(rate)
        return {"not_run": "Maven is missing"}

    assert fastest(missing, 50.0) == {"not_run": "Maven is missing"}
    assert asked == [FIRST]


def test_each_system_is_searched_by_itself_and_losses_of_ours_fail_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def ours(topics: Any, rate: int, *_: Any) -> bench.Run:
        if rate > 10_000:
            raise QueryFailed("the load is not through")
        return bench.Run({"p99_ms": 10.0, "cores": 1.0, "lost": 0, "duplicated": 3}, None)

    def theirs(peer: str, topics: Any, rate: int, *_: Any) -> bench.Run:
        return bench.Run({"p99_ms": 10.0 if rate <= 40_000 else 90.0, "cores": 2.0, "lost": 0, "duplicated": 0}, None)

    monkeypatch.setattr(bench, "_flux", ours)
    monkeypatch.setattr(bench, "_peer", theirs)
    console: Any = SimpleNamespace(print=lambda *_, **__: None)
    runs = bench._fastest(None, ["kstreams"], 1.0, 2, 2, 50.0, console)  # type: ignore[arg-type]
    made = bench.report({"benchmark": "kafka"}, runs)
    assert 8_000 <= made.figures["sustained_rows_per_s"] <= 10_000
    assert 32_000 <= made.figures["peer_kstreams_sustained_rows_per_s"] <= 40_000
    assert made.failed is not None
    assert "3 should not be there" in made.failed
