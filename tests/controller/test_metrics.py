"""Metrics in the terms of Prometheus: their values, counters that never fall, and the addresses that can reach them."""

from __future__ import annotations

import copy
import re
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from operated import ID, REPORT, FakeCore, plan_of
from prometheus_client.parser import text_string_to_metric_families

from controller.operate.request_handler import About
from controller.operate.service import Service
from controller.replicas.addition_tracker import Event
from controller.replicas.replica_safety import Life
from controller.replicas.table_index import TableIndex
from controller.report import metrics as metrics_http
from controller.report.metrics import STALL_BUCKETS_S, Metrics, merged
from controller.report.progress import Level, levels
from flux.errors import UsageError

LEVELS = [Level(2, 2, 0, 8, 0), Level(1, 1, 0, 2, 0)]


def observed(metrics: Metrics, report: dict[str, Any] | None = REPORT, **changes: Any) -> Metrics:
    core = FakeCore()
    given = {
        "phase": "running",
        "levels": LEVELS,
        "busy": core.loads().of_workers(),
        "moves_pending": 2,
        "refused": 1,
    } | changes
    metrics.observe(report=report, **given)
    return metrics


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Parse samples: (sample name, values of the labels but the query's) -> value. Fail on text that a Prometheus server could
    not read."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(value for key, value in sample.labels.items() if key not in ("query", "id"))
            assert (sample.name, *labels) not in found, "the same twice"
            found[sample.name, *labels] = sample.value
    return found


def event(kind: str, stage: str = "Delays", stall_ms: float = 0.0) -> Event:
    return Event(kind, 1.0, stage, 0, 1, "why", 0.5, stall_ms)


def test_a_snapshot_says_all_that_there_is_to_say() -> None:
    metrics = Metrics(plan_of(), ID, "clicks")
    for kind in ("take-over", "repair", "move", "move"):
        metrics.note(event(kind, stall_ms=15.0 if kind == "move" else 0.0))
    said = samples(observed(metrics).text())
    assert said["flux_rows_in_total", "Delays"] == 4000
    assert said["flux_rows_out_total", "Delays"] == 40
    assert said["flux_rows_per_second", "Delays"] == 150
    assert said["flux_step_latency_seconds", "0.99", "Delays"] == pytest.approx(0.02)
    assert ("flux_step_latency_seconds", "0.99", "Worst") not in said, "nothing is known of it"
    assert (said["flux_backlog_slices",], said["flux_backlog_bytes",]) == (3, 3 << 20)
    assert (said["flux_replicas_wanted", "Delays"], said["flux_replicas_safe_min", "Delays"]) == (2, 2)
    assert said["flux_under_replicated_partitions", "Delays"] == 0
    assert (said["flux_epoch",], said["flux_workers",], said["flux_moves_pending",]) == (4, 3, 2)
    assert (said["flux_take_overs_total", "Delays"], said["flux_repairs_total", "Delays"]) == (1, 1)
    assert (said["flux_moves_total", "Delays"], said["flux_moves_total", "Worst"]) == (2, 0)
    lags = {
        labels: value
        for (name, *labels), value in said.items()
        if name == "flux_source_lag_records"
        for labels in [tuple(labels)]
    }
    assert lags == {("0", "days"): 1, ("clicks-0", "clicks"): 12000, ("clicks-1", "clicks"): 345}, (
        "nothing of sources that do not know it"
    )
    assert said["flux_source_bad_records_total", "clicks"] == 7
    assert said["flux_source_unread_files", "corrupt", "flights"] == 2
    assert said["flux_duplicates_refused_total",] == 6
    assert said["flux_stale_dropped_total",] == 3
    assert said["flux_requests_refused_total",] == 1
    assert said["flux_worker_cpu_seconds_total", "1"] == 7.5
    assert said["flux_worker_rss_bytes", "1"] == 200 << 20
    assert said["flux_worker_load", "1"] == pytest.approx(0.1 * sum(r.worker == 1 for r in FakeCore().loads().replicas))
    assert (said["flux_query_phase", "running"], said["flux_query_phase", "ended"]) == (1, 0)


def test_rows_that_a_stage_has_forfeited_are_counted() -> None:
    report = copy.deepcopy(REPORT)
    times = {"lagSeconds": None, "rowsBehindWatermark": 9, "rowsWithoutTime": 0}
    report["stages"][0]["eventTime"] = times
    said = samples(observed(Metrics(plan_of(), ID, None), report).text())
    assert ("flux_forfeited_rows_total", "Delays") not in said
    report["stages"][0]["eventTime"] = times | {"forfeitedRows": 7}
    said = samples(observed(Metrics(plan_of(), ID, None), report).text())
    assert said["flux_forfeited_rows_total", "Delays"] == 7


def test_stalls_are_a_histogram_of_each_kind() -> None:
    metrics = Metrics(plan_of(), ID, None)
    for stall_ms in (0.5, 20.0, 20.1, 60_000.0):
        metrics.note(event("move", stall_ms=stall_ms))
    said = samples(observed(metrics).text())
    assert said["flux_stall_seconds_bucket", "move", "0.001"] == 1
    assert said["flux_stall_seconds_bucket", "move", "0.02"] == 2, "a bound belongs to its bucket"
    assert said["flux_stall_seconds_bucket", "move", "0.05"] == 3
    assert said["flux_stall_seconds_bucket", "move", str(STALL_BUCKETS_S[-1])] == 3
    assert said["flux_stall_seconds_bucket", "move", "+Inf"] == said["flux_stall_seconds_count", "move"] == 4
    assert said["flux_stall_seconds_sum", "move"] == pytest.approx(60.0406)
    assert said["flux_stall_seconds_count", "repair"] == 0
    assert metrics.stall_ms_max == 60_000


def test_counters_never_fall_although_workers_come_and_go() -> None:
    metrics = Metrics(plan_of(), ID, None)
    before = samples(observed(metrics).text())
    report = copy.deepcopy(REPORT)
    lost = report["workers"].pop(0)
    report["workers"].append(lost | {"id": 7, "counters": {"duplicate": 1}})
    after = samples(observed(metrics, report).text())
    assert after["flux_duplicates_refused_total",] == before["flux_duplicates_refused_total",] + 1
    fallen = [key for key in before if key[0].endswith("_total") and key in after and after[key] < before[key]]
    assert fallen == []


def test_metrics_that_are_not_served_are_made_when_a_person_asks_and_know_of_lost_workers() -> None:
    reports = [copy.deepcopy(REPORT), copy.deepcopy(REPORT)]
    lost = reports[1]["workers"].pop(0)
    service = Service(FakeCore(), About(ID, None, "flights", 1, 0.0), lambda: reports[0])  # type: ignore[arg-type]
    service.on_report()
    assert service.metrics.collect() == []
    del reports[0]
    service.on_report()
    said = samples(observed(service.metrics, reports[0]).text())
    of_others = sum(worker["counters"].get("duplicate", 0) for worker in reports[0]["workers"])
    assert said["flux_duplicates_refused_total",] == of_others + lost["counters"]["duplicate"]
    assert lost["counters"]["duplicate"] > 0


def test_before_the_first_report_the_phase_is_known_and_nothing_else() -> None:
    metrics = Metrics(plan_of(), ID, None)
    assert metrics.text() == ""
    assert set(samples(observed(metrics, None, phase="starting").text())) == {
        ("flux_query_phase", phase) for phase in ("starting", "running", "finished", "ended")
    }


def test_a_snapshot_that_somebody_reads_is_not_changed_by_the_next() -> None:
    metrics = observed(Metrics(plan_of(), ID, None))
    reading = metrics.collect()
    kept = copy.deepcopy(reading)
    metrics.note(event("move"))
    observed(metrics, copy.deepcopy(REPORT) | {"epoch": 99})
    assert reading == kept
    assert metrics.collect() != kept


def test_the_level_of_replication_is_that_of_the_worst_partition() -> None:
    core = FakeCore()
    assert core.levels() == LEVELS
    assert levels(core.plan, None, (), []) == [Level(2, 0, 4), Level(1, 0, 2)]
    assert core.table is not None
    unsafe = core.table.replicas(0, 1)[1]
    columns, low = TableIndex(core.plan).look(core.table), core.repairs.low(core.table)
    assert levels(core.plan, columns, [Life(0, 1, unsafe.worker, unsafe.incarnation)], low)[0] == Level(2, 1, 0, 8, 0)
    assert levels(core.plan, columns, [Life(0, 1, unsafe.worker, 99)], low) == LEVELS, "another life of it"


def test_several_queries_give_each_family_once() -> None:
    one, two = observed(Metrics(plan_of(), "1", "same")), observed(Metrics(plan_of(), "2", "same"))
    families = merged([one.collect(), two.collect()])
    assert len({family.name for family in families}) == len(families) == len(one.collect())
    epochs = next(family for family in families if family.name == "flux_epoch").samples
    assert [(sample.labels["query"], sample.labels["id"]) for sample in epochs] == [("same", "1"), ("same", "2")]
    assert len(one.collect()[1].samples) == 1, "the queries' own snapshots are as they were"


# ---- over HTTP


def fetched(address: str) -> str:
    with urllib.request.urlopen(address, timeout=60) as response:
        return str(response.read().decode())


def test_queries_of_one_process_share_a_server_and_the_last_one_ends_it() -> None:
    one, two = observed(Metrics(plan_of(), "1", "one")), observed(Metrics(plan_of(), "2", "two"))
    address = metrics_http.serve("127.0.0.1", 0, one)
    assert address.startswith("http://127.0.0.1:")
    assert metrics_http.serve("127.0.0.1", 0, two) == address
    both = fetched(address)
    assert 'flux_epoch{id="1",query="one"} 4.0' in both
    assert 'flux_epoch{id="2",query="two"} 4.0' in both
    assert both.count("# HELP flux_epoch ") == 1
    metrics_http.withdraw(one)
    assert 'id="1"' not in fetched(address)
    metrics_http.withdraw(two)
    with pytest.raises(urllib.error.URLError):
        fetched(address)
    metrics_http.withdraw(two)  # a second time is no harm


def test_a_port_that_is_taken_is_an_error_that_says_what_to_do() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=rf"127\.0\.0\.1:{port}.*spark\.flux\.metrics\.port"):
            metrics_http.serve("127.0.0.1", port, Metrics(plan_of(), ID, None))


def test_only_this_machine_can_reach_them_by_default() -> None:
    settings = plan_of().settings
    assert (settings.metrics_port, settings.metrics_host) == (-1, "127.0.0.1")


def test_every_metric_is_explained_to_people_and_none_that_there_is_not() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "operating.md").read_text()
    explained = set(re.findall(r"`(flux_[a-z_]+)`", page.split("## Metrics")[1].split("They are as new as")[0]))
    metrics = Metrics(plan_of(), ID, None)
    metrics.note(event("move", stall_ms=1.0))
    available = {"state": "stable", "silent": [], "windowsToCorrect": 0, "rowsTentative": 0, "rowsRevised": 0}
    told = observed(metrics, REPORT | {"availability": available}).collect()
    named = {f.name + ("_total" if f.type == "counter" else "") for f in told}
    assert explained == named
