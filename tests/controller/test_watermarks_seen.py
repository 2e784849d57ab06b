"""Event time in reports: the watermark of a stage, the source partition that holds it back and why, late rows, and warnings."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

import flux
from controller.planning.compiler import compile_plan
from controller.report.watermarks import EventTimes
from flux.dataflow.plan import Plan
from flux.settings import Settings
from flux.windows.window import NEVER
from flux.wire.statistics import Forfeited, ReaderState, SourceTime, StageTime
from flux.worker import report
from tests.flux.test_watermarks import Windows, rows

SCHEMA = pa.schema([("key", pa.int64()), ("ts", pa.timestamp("us"))])
S = 1_000_000


@flux.stage(key="key", partitions=2, window=flux.window("ts", "10 seconds"))
class Counted(flux.Aggregate):
    n = flux.count()


@flux.stage(key="n", partitions=1, window=flux.window("window_end", "1 minute"))
class Again(flux.Aggregate):
    n_of_n = flux.count()


def planned() -> Plan:
    source = flux.source(lambda p: iter(()), SCHEMA, 2, name="bids").withWatermark("ts", "5 seconds")
    return compile_plan([Again(Counted(source))], Settings.of(), lambda schema: schema, "q", b"s")


def times(*sources: SourceTime, stages: Any = ()) -> EventTimes:
    seen = EventTimes(planned())
    seen.note([{"times": sources, "stages": [{"stage": number, "times": each} for number, each in enumerate(stages)]}])
    return seen


def held(state: ReaderState, watermark: int) -> str:
    """Return the words for a stage behind a stage that waits for partition 1 of the source in this state."""
    seen = times(
        SourceTime(0, 0, 90 * S, 3, 80 * S, 100, ReaderState.READING),
        SourceTime(0, 1, watermark, 0, NEVER, 0, state),
        stages=[[StageTime(0, 60 * S, 0, 0), StageTime(1, 20 * S, 2, 1, 0, 1)], [StageTime(0, 20 * S, 0, 0, 1, 1)]],
    )
    entry = seen.of_stage(1, 50.0)["eventTime"]
    assert (entry["watermark"], entry["lagSeconds"]) == ("1970-01-01T00:00:20.000Z", 30.0)
    return str(entry["heldBackBy"])


def test_a_stage_names_the_partition_of_a_source_that_holds_it_back_and_why() -> None:
    where = "partition 1 of source bids: "
    assert held(ReaderState.READING, NEVER) == where + "no row since the start"
    assert held(ReaderState.SILENT, 20 * S) == where + "no answer from outside"
    assert "held by alignment, at 1970-01-01T00:00:20.000Z" in held(ReaderState.HELD, 20 * S)
    assert held(ReaderState.READING, 20 * S) == where + "it is the farthest behind, at 1970-01-01T00:00:20.000Z"


def test_rows_that_were_left_out_are_counted() -> None:
    seen = times(
        SourceTime(0, 0, 90 * S, 3, 80 * S, 100, ReaderState.READING),
        SourceTime(0, 1, NEVER, 4, NEVER, 0, ReaderState.IDLE),
        stages=[[StageTime(0, NEVER, 5, 1), StageTime(1, NEVER, 2, 1)]],
    )
    entry = seen.of_stage(0, 50.0)["eventTime"]
    assert (entry["rowsBehindWatermark"], entry["rowsWithoutTime"], entry["watermark"]) == (7, 2, None)
    of_source = seen.of_source(0)["eventTime"]
    assert of_source["lateRows"] == 7
    assert [each["state"] for each in of_source["partitions"].values()] == ["reading", "idle"]


def test_a_watermark_that_stands_still_while_rows_come_is_told_once() -> None:
    seen = times(stages=[[StageTime(0, 60 * S, 0, 0)]])
    assert seen.warnings({0: 10, 1: 0}, 30.0, 0.0) == []
    assert seen.warnings({0: 20, 1: 0}, 30.0, 29.0) == []
    ((stage, text),) = seen.warnings({0: 20, 1: 0}, 30.0, 31.0)
    assert stage == "Counted"
    assert "has not moved for 31 s, though rows come, so nothing that waits for it is given" in text
    assert "idle='1 minute'" in text
    assert seen.warnings({0: 30, 1: 0}, 30.0, 99.0) == []


def test_a_watermark_without_rows_is_no_reason_to_warn() -> None:
    seen = times(stages=[[StageTime(0, 60 * S, 0, 0)]])
    assert seen.warnings({0: 10, 1: 0}, 30.0, 0.0) == []
    assert seen.warnings({0: 10, 1: 0}, 30.0, 99.0) == []


def test_a_partition_of_which_most_rows_are_late_is_told_once_with_the_newest_time() -> None:
    seen = times(SourceTime(0, 0, 90 * S, 400, 7 * S, 500, ReaderState.READING))
    ((_, text),) = seen.warnings({0: 0, 1: 0}, 30.0, 0.0)
    assert "400 of 500 rows of partition 0 of source bids were late" in text
    assert "its newest time is 1970-01-01T00:01:35.000Z, and the last late row has 1970-01-01T00:00:07.000Z" in text
    seen.note([{"times": [SourceTime(0, 0, 90 * S, 900, 7 * S, 1000, ReaderState.READING)]}])
    assert seen.warnings({0: 0, 1: 0}, 30.0, 0.0) == []


def test_a_worker_reports_watermarks_late_rows_and_the_stream_that_is_waited_for() -> None:
    windows = Windows(partitions=2, delay=3)
    windows.script.given[0] += [rows(1, 20, 5)]
    windows.run()
    said = report.stats(windows.core)
    assert said["times"][0][2:5] == (17, 1, 5)
    assert said["times"][1].watermark == NEVER
    assert {time.producer for time in said["stages"][0]["times"]} >= {1}


def test_windows_that_closed_without_an_input_are_told_once_and_counted() -> None:
    seen = times(SourceTime(0, 0, 90 * S, 0, NEVER, 10, ReaderState.READING), stages=[[StageTime(0, 60 * S, 0, 0)]])

    def note(*told: Forfeited, full: bool = False, state: ReaderState = ReaderState.SILENT) -> list[tuple[str, str]]:
        time = SourceTime(0, 0, 90 * S, 0, NEVER, 10, state)
        seen.note([{"stages": [{"stage": 0, "forfeits": list(told)}], "state_full": full, "times": [time]}])
        return seen.warnings([10, 0], 30.0, 0.0)

    ((stage, text),) = note(Forfeited(0, 10 * S, 20 * S, 3), Forfeited(1, 10 * S, 30 * S, 4))
    assert stage == seen.plan.stages[0].name
    assert text.startswith("windows from 1970-01-01T00:00:10.000Z on are closed without inputs that do not answer")
    assert note(Forfeited(0, 10 * S, 25 * S, 5)) == [], "the same failure"
    about = seen.of_stage(0, 0.0)["eventTime"]
    assert about["incomplete"] == {"from": "1970-01-01T00:00:10.000Z", "to": "1970-01-01T00:00:30.000Z"}
    assert about["forfeitedRows"] == 9
    assert len(note(Forfeited(1, 50 * S, 60 * S, 4))) == 1, "another one"
    assert note(full=True, state=ReaderState.READING) == [], "nothing is missing"
    ((_, text),) = note(full=True)
    assert "the other inputs stand still until it is back" in text
    assert note(full=True) == []
