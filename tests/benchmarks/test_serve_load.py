"""``flux bench serve``: the times of requests that were due, and events that are missing or twice in a log."""

from __future__ import annotations

import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from rich.console import Console

from benchmarks import serve, serve_queries, serve_readers
from flux.errors import Unreachable
from tests.flux.pushed import owned, pushed, registered


class SlowClient:
    """A client that takes a tenth of a second for a push, and fails with the fifth."""

    def __init__(self) -> None:
        self.pushed: list[Any] = []

    def push_events(self, stream: str, body: Any) -> None:
        time.sleep(0.1)
        self.pushed.append(body)
        if len(self.pushed) == 5:
            raise Unreachable("no gateway")


def test_a_late_request_counts_from_the_time_at_which_it_was_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "WARM_UP_S", 0.0)
    client = SlowClient()
    load = serve.Load(lambda number: number, 100.0, 0.1, [client])  # type: ignore[list-item]
    load.join()
    assert client.pushed == list(range(10))
    figures = load.figures()
    assert figures["errors"] == 1
    assert np.isnan(load.answered).tolist() == [number == 4 for number in range(10)]
    assert figures["gap_ms_max"] >= 900, "the last of ten was due after 90 ms and answered after 1,000"


def test_events_that_are_missing_or_twice_are_counted(tmp_path: Path) -> None:
    catalogue, of = registered(tmp_path, serve.STREAM, schema=serve.SCHEMA)
    owner = owned(catalogue, of)
    for n in ([0, 1], [4, 5], [4, 5]):
        rows = pa.record_batch([pa.array(n, pa.int64()), *(pa.nulls(2, field.type) for field in list(of.columns())[1:])],
                               schema=of.columns())  # fmt: skip
        pushed(owner, rows, 0)
    answered = np.array([True, True, True, False])
    assert serve._exactness(tmp_path, 2, answered) == {"lost": 2, "doubled": 2}


@pytest.mark.long
@pytest.mark.parametrize("fault", [None, "kill-gateway"])
def test_the_benchmark_loses_and_doubles_nothing(fault: str | None) -> None:
    report = serve.run(50, "rows", 2, 4, fault, Console(quiet=True))
    assert (report.failed, report.figures["errors"]) == (None, 0)
    assert report.figures["p50_ms"] > 0


def test_rows_at_a_reader_count_from_the_push_that_was_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the second of three pushes was not answered; a row of the first one is missing, and one of the third came twice."""
    monkeypatch.setattr(serve_queries, "LAST_ROWS_S", 0.0)
    monkeypatch.setattr(serve_queries, "WARM_UP_S", 0.0)
    load = types.SimpleNamespace(answered=np.array([0.1, np.nan, 0.3]), due=np.array([0.0, 0.01, 0.02]), began=100.0)
    rows = [n for n in range(0, 300, 10) if n != 50] + [200]
    reader = types.SimpleNamespace(rows=rows, came=[100.07] * len(rows), error="")
    found = serve_queries.arrived(load, reader).figures()  # type: ignore[arg-type]
    assert (found["lost"], found["doubled"]) == (1, 1)
    assert found["reader_gap_ms_max"] == pytest.approx(70.0)
    assert found["reader_p50_ms"] == pytest.approx(60.0)


def test_rows_of_an_earlier_load_do_not_count_for_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_queries, "WARM_UP_S", 0.0)
    load = types.SimpleNamespace(answered=np.array([0.1]), due=np.array([0.0]), began=100.0)
    rows = list(range(0, 300, 10))
    came = [90.0] * 20 + [100.02] * 10
    reader = types.SimpleNamespace(rows=rows, came=came, error="")
    found = serve_queries.arrived(load, reader, first=2)  # type: ignore[arg-type]
    assert (found.took_ms.round().tolist(), found.lost, found.doubled) == ([20.0] * 10, 0, 0)


def test_times_beside_an_idle_reader_are_compared_with_those_without_it() -> None:
    with_it, without = (serve_queries.Arrivals(np.full(100, ms), lost, 0) for ms, lost in ((30.0, 1), (20.0, 2)))
    found = serve_readers.compared([(False, without), (True, with_it), (True, with_it), (False, without)])
    assert (found["reader_p99_ms"], found["reader_without_p99_ms"], found["ratio"]) == (30.0, 20.0, 1.5)
    assert found["lost"] == 6


@pytest.mark.long
def test_a_reader_that_never_reads_takes_no_row_from_others() -> None:
    report = serve_readers.run(20, 1, 4, 3, 5, "local[4,1000]", Console(quiet=True))
    assert report.failed is None
    assert report.figures["ratio"] > 0


@pytest.mark.long
@pytest.mark.parametrize("fault", [None, "kill-worker", "kill-gateway"])
def test_the_reader_of_a_filter_gets_each_row_once(fault: str | None) -> None:
    report = serve_queries.run(20, 4, 4, 3, 5, fault, "local[4,1000]", Console(quiet=True))
    assert (report.failed, report.figures["errors"]) == (None, 0)
    assert report.figures["reader_p50_ms"] > 0
