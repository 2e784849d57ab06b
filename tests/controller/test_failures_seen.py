"""Missing inputs in reports: since when and why, the windows to correct, and one entry of the history for each failure."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from operated import REPORT, counter
from rich.console import Console
from test_desk import answer

import flux
from controller.operate.cli import tables
from controller.operate.requests import GetStatus, Status
from controller.planning.compiler import compile_plan
from controller.report.failures import LOST_S, Availabilities
from controller.report.metrics import Metrics
from flux.dataflow.plan import Plan
from flux.settings import Settings
from flux.wire.statistics import SilentStream, TentativeReport, TentativeState

SCHEMA = pa.schema([("key", pa.int64()), ("ts", pa.timestamp("us"))])
AT = datetime(2026, 11, 27, 12, 1, 7).timestamp()
SILENT = SilentStream(0, 3, AT - 3, "its broker does not answer")


@flux.stage(key="key", partitions=2, window=flux.window("ts", "10 seconds"))
class Counted(flux.Aggregate):
    n = flux.count()


@flux.stage(key="n", partitions=1, window=flux.window("window_end", "1 minute"))
class Again(flux.Aggregate):
    n_of_n = flux.count()


def planned(**options: Any) -> Plan:
    source = flux.source(lambda p: iter(()), SCHEMA, 6, name="events").withWatermark("ts", "5 seconds")
    return compile_plan([Again(Counted(source))], Settings.of(**options), lambda schema: schema, "q", b"s")


def told(
    state: TentativeState,
    windows: int,
    rows: int,
    revised: int = 0,
    partition: int = 0,
    stage: int = 1,
    since: float = AT,
) -> TentativeReport:
    return TentativeReport(stage, partition, state, since, windows, rows, revised)


def seen(failures: Availabilities, at: float, *reports: TentativeReport, silent: Any = ()) -> dict[str, Any]:
    """Take reports that come as lists, each from a worker of its own."""
    failures.note([{"tentative": [list(report)]} for report in reports], list(silent), at)
    entry: dict[str, Any] = failures.report()["availability"]
    return entry


def test_a_failure_is_told_from_its_first_tentative_result_to_its_last_correction() -> None:
    failures = Availabilities(planned(availability="1h"))
    assert seen(failures, AT)["message"] == ""
    assert seen(failures, AT)["state"] == "stable"
    entry = seen(
        failures, AT + 1,
        told(TentativeState.UP_FAILURE, 9, 900, stage=0), told(TentativeState.UP_FAILURE, 41, 1234), silent=[SILENT],
    )  # fmt: skip
    assert entry["message"] == (
        "tentative since 12:01:07: events/3 is silent (its broker does not answer), 41 windows to correct"
    ), "windows are counted in the last stage, each once"
    assert (entry["state"], entry["stages"], entry["rowsTentative"]) == ("tentative", ["Again", "Counted"], 2134)
    assert entry["silent"][0]["source"] == "events"
    entry = seen(failures, AT + 10, told(TentativeState.STABILIZATION, 12, 1300, 30))
    assert entry["message"] == "tentative since 12:01:07: all inputs are back, 12 windows to correct"
    assert entry["state"] == "correcting"
    assert failures.ended() == []
    entry = seen(
        failures, AT + 11, told(TentativeState.STABLE, 0, 1300, 37), told(TentativeState.STABLE, 0, 950, 5, stage=0)
    )
    assert (entry["state"], entry["since"], entry["message"]) == ("stable", None, "")
    assert (entry["rowsTentative"], entry["rowsRevised"]) == (2250, 42)
    assert failures.ended() == [
        (
            "events/3 was silent (its broker does not answer); tentative from 12:01:07 to 12:01:18: 2,250 tentative rows, of "
            "which the correction changed 42",
            11.0,
        )
    ]
    assert failures.ended() == []


def test_counts_of_failures_that_ended_stay_and_reports_of_them_open_no_new_one() -> None:
    failures = Availabilities(planned(availability="1h"))
    seen(failures, AT, told(TentativeState.UP_FAILURE, 1, 10))
    done = told(TentativeState.STABLE, 0, 10, 1)
    seen(failures, AT + 1, done)
    assert seen(failures, AT + 2, done)["rowsTentative"] == 10
    assert len(failures.ended()) == 1
    entry = seen(failures, AT + 60, done, told(TentativeState.UP_FAILURE, 1, 5, since=AT + 59, partition=1))
    assert (entry["rowsTentative"], entry["message"]) == (
        15, "tentative since 12:02:06: an input is missing, 1 window to correct",
    )  # fmt: skip


def test_a_worker_that_is_lost_with_its_shadow_ends_no_failure_before_another_one_can_report() -> None:
    failures = Availabilities(planned(availability="1h"))
    seen(failures, AT, told(TentativeState.UP_FAILURE, 5, 50))
    assert seen(failures, AT + 1)["state"] == "tentative"
    entry = seen(failures, AT + 3, told(TentativeState.UP_FAILURE, 7, 20, since=AT + 2))
    assert (entry["message"].split(":")[0], entry["rowsTentative"]) == ("tentative since 12", 70)
    assert entry["since"].endswith("07.000Z")
    seen(failures, AT + 4)
    assert failures.ended() == []
    seen(failures, AT + 4 + LOST_S)
    assert len(failures.ended()) == 1


def test_many_silent_streams_are_counted_and_a_silent_one_alone_is_told() -> None:
    failures = Availabilities(planned(availability="1h"))
    failures.note([], [SilentStream(0, 1, AT, "why"), SILENT, SilentStream(0, 5, AT, "")], AT)
    entry = failures.report()["availability"]
    assert entry["message"] == "events/1, events/3 and 1 more are silent (why)"
    assert entry["state"] == "stable"


def test_a_partition_that_answers_and_has_no_rows_is_named_by_what_it_holds_back() -> None:
    failures = Availabilities(planned(availability="1h"))
    failures.note([{"tentative": [told(TentativeState.UP_FAILURE, 3, 9)]}], [], AT)
    holder = {"name": "Again", "eventTime": {"heldBackBy": "partition 3 of source events: no row since 12:01:02"}}
    entry = failures.report([{"name": "Counted"}, holder])["availability"]
    assert entry["message"] == (
        "tentative since 12:01:07: waiting for partition 3 of source events: no row since 12:01:02, 3 windows to correct"
    )
    failures.note([{"tentative": [told(TentativeState.STABLE, 0, 9)]}], [], AT + 1)
    assert failures.ended()[0][0].startswith("waited for partition 3 of source events")


def test_a_query_without_availability_says_nothing() -> None:
    failures = Availabilities(planned())
    failures.note([{"tentative": [told(TentativeState.UP_FAILURE, 1, 1)]}], [SILENT], AT)
    assert failures.report() == {}


def test_metrics_count_tentative_rows_and_silent_partitions() -> None:
    failures = Availabilities(planned(availability="1h"))
    entry = seen(failures, AT, told(TentativeState.UP_FAILURE, 5, 50), silent=[SILENT])
    metrics = Metrics(planned(availability="1h"), "q", None)
    made = {sample.name: sample.value for metric in metrics._of_availability(entry) for sample in metric.samples}
    assert made == {
        "flux_silent_partitions": 1, "flux_tentative": 1, "flux_tentative_windows": 5,
        "flux_tentative_rows_total": 50, "flux_tentative_revised_total": 0,
    }  # fmt: skip
    assert metrics._of_availability(None) == []


def test_the_status_in_another_terminal_says_the_same_and_marks_the_stages() -> None:
    text = "tentative since 12:01:07: events/3 is silent, 41 windows to correct"
    at = counter(REPORT | {"availability": {"message": text, "stages": ["Worst"]}})
    status = answer(at, GetStatus())
    assert isinstance(status, Status)
    console = Console(width=200)
    with console.capture() as shown:
        console.print(tables.status(status))
    assert text in shown.get()
    assert "Worst (tentative)" in shown.get()
    assert "Delays (tentative)" not in shown.get()


def test_partitions_whose_tentative_work_has_failed_are_told_once_and_shown_as_long_as_they_are_reported() -> None:
    failures = Availabilities(planned(availability="1h"))
    stats = {"ended_shadows": [[0, 1, AT, "peek() raised KeyError"], [1, 0, AT + 1, "other"]]}
    failures.note([stats], [SILENT], AT + 1)
    assert failures.warnings() == [
        (
            "Counted",
            "there are no more tentative results of partition 1, and stable ones go on: peek() raised KeyError",
        ),
        ("Again", "there are no more tentative results of partition 0, and stable ones go on: other"),
    ]
    entry = failures.report()["availability"]
    assert entry["message"] == (
        "events/3 is silent (its broker does not answer); no more tentative results of Counted/1, Again/0 (peek() raised "
        "KeyError)"
    )
    assert entry["ended"][0] == {
        "stage": "Counted",
        "partition": 1,
        "since": datetime.fromtimestamp(AT, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "reason": "peek() raised KeyError",
    }
    failures.note([stats], [], AT + 2)
    assert failures.warnings() == []
    failures.note([{}], [], AT + 3)
    assert (failures.warnings(), failures.report()["availability"]["ended"]) == ([], [])
    assert failures.report()["availability"]["message"] == ""
