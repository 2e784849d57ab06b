"""The desk answers from the controller's state, hands on orders, and refuses requests that it cannot read."""

from __future__ import annotations

from typing import Any

import pytest
from operated import ID, NOW, Counter, counter

from controller.balance.load import Move
from controller.decide.controller import Tell
from controller.operate.cli.tables import head
from controller.operate.requests import (
    Accepted,
    DrainWorker,
    FailWorker,
    GetHistory,
    GetMetrics,
    GetPartitions,
    GetStatus,
    History,
    MetricsText,
    Partitions,
    ProtectStage,
    Refusal,
    Request,
    SetWorkers,
    StartMoves,
    Status,
    Suggest,
    Suggested,
    UnreadFiles,
    WantedMove,
    all_partitions,
    decode_answer,
    encode_request,
)
from controller.replicas.additions import WantedAddition
from flux.wire.control import Stop
from flux.wire.frames import encode


def asked(at: Counter, request: Request) -> tuple[Any, list[Tell]]:
    frame, effects = at.desk.handle(encode_request(request), NOW)
    return decode_answer([frame]), effects


def answer(at: Counter, request: Request) -> Any:
    said, effects = asked(at, request)
    assert effects == []
    return said


# ---- looking


def test_the_status_tells_of_changes_of_the_plan_and_of_stages_that_have_failed() -> None:
    status = answer(counter(), GetStatus())
    assert [(stage.stage, stage.because_of, stage.traceback) for stage in status.failed] == [
        ("Late", "Late", "Traceback ..."),
        ("LateAlarm", "Late", "Traceback ..."),
    ]
    text = head(status).plain
    assert "change of the plan: addition of Alarm: being confirmed" in text
    assert "stage Late FAILED: boom in row 3" in text
    assert "stage LateAlarm FAILED: it depends on Late" in text
    assert "version 0" not in text, "it was never added to"


def test_the_status_says_who_the_query_is_and_how_it_does() -> None:
    status = answer(counter(), GetStatus(number=5))
    assert isinstance(status, Status)
    assert (status.number, status.id, status.name, status.pid, status.phase) == (5, ID, "clicks", 4321, "running")
    assert (status.uptime_s, status.rows_in, status.rows_per_s) == (90.0, 6000, 100.0)
    assert (status.backlog_slices, status.backlog_bytes) == (3, 3 << 20)
    assert status.source_lags == {"days": 1, "clicks": 12345}
    assert status.lag_units == {"days": "file"}
    lines = head(status).plain.splitlines()
    assert {"source days is 1 file behind", "source clicks is 12,345 records behind"} <= {*lines}
    assert status.bad_records == {"clicks": 7}
    assert status.unread_files == {"flights": {"corrupt": UnreadFiles(2, {"a.parquet": "no footer"})}}
    assert "source flights: corrupt file a.parquet, and 1 more: no footer" in head(status).plain
    delays, worst = status.stages
    assert (delays.name, delays.partitions, delays.replicas, delays.safe, delays.short) == ("Delays", 4, 2, 2, 0)
    assert (delays.p50_ms, delays.p99_ms, worst.p50_ms) == (1.5, 20.0, None)
    assert [worker.worker for worker in status.workers] == [0, 1, 2]
    assert sum(worker.primaries for worker in status.workers) == 6
    assert sum(worker.replicas for worker in status.workers) == 4 * 2 + 2
    assert status.workers[2].rows_per_s == 20.0
    assert status.workers[0].load == pytest.approx(0.1 * status.workers[0].replicas)


def test_a_query_that_is_only_starting_has_a_status_too() -> None:
    at = counter(report=None)
    at.core.phase, at.core.table = "starting", None
    status = answer(at, GetStatus())
    assert (status.phase, status.epoch, status.rows_in) == ("starting", -1, 0)
    assert [stage.safe for stage in status.stages] == [0, 0]
    assert answer(at, GetPartitions()).replicas == []
    assert "flux_query_phase" in answer(at, GetMetrics()).text


def test_a_replica_that_is_short_of_copies_shows_in_the_status() -> None:
    at = counter()
    lost = at.core.table.stages[0][1][1].worker
    from controller.replicas.table_changes import drop

    at.core.table = drop(at.core.table, 0, 1, lost)
    delays = answer(at, GetStatus()).stages[0]
    assert (delays.replicas, delays.safe, delays.short) == (2, 1, 1)


def test_replicas_are_told_of_page_by_page_and_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    at = counter()
    whole = answer(at, GetPartitions())
    assert (whole.following, whole.total) == (None, 10)
    monkeypatch.setattr("controller.operate.request_handler.PAGE", 3)
    page = answer(at, GetPartitions())
    assert ({row.partition for row in page.replicas}, page.following) == ({0, 1, 2}, 3)
    assert all_partitions(lambda request: answer(at, request)).replicas == whole.replicas
    worst = all_partitions(lambda request: answer(at, request), "Worst").replicas
    assert worst == [row for row in whole.replicas if row.stage == "Worst"]
    assert answer(at, GetPartitions(first=99)).replicas == []


def test_the_heaviest_replicas_come_first_and_are_as_many_as_asked_for() -> None:
    at = counter()
    table = at.core.load_table()
    assert table is not None
    table.busy[3, 1] = 0.75
    at.core.load_table = lambda: table  # type: ignore[method-assign]
    said = answer(at, GetPartitions(heaviest=3))
    assert [(row.stage, row.partition, row.role, row.load) for row in said.replicas] == [
        ("Delays", 3, "secondary", 0.75), ("Delays", 0, "primary", 0.1), ("Delays", 0, "secondary", 0.1),
    ]  # fmt: skip
    assert (said.total, said.following) == (10, None)
    assert [row.stage for row in answer(at, GetPartitions(stage="Worst", heaviest=1)).replicas] == ["Worst"]


def test_a_move_under_way_is_not_listed_as_a_repair() -> None:
    at = counter()
    at.core.repairs.begin(WantedAddition(0, 1, 0), 1, NOW)
    at.core.repairs.begin(WantedAddition(0, 2, 1, from_worker=2, why="by hand"), 2, NOW)
    assert [(r.stage, r.partition) for r in answer(at, GetStatus()).repairs_under_way] == [("Delays", 1)]


def test_partitions_are_listed_with_role_and_load_and_can_be_asked_for_by_stage() -> None:
    at = counter()
    both = answer(at, GetPartitions())
    assert isinstance(both, Partitions)
    assert both.seconds == 5.0
    assert [(r.stage, r.partition, r.role) for r in both.replicas][:3] == [
        ("Delays", 0, "primary"),
        ("Delays", 0, "secondary"),
        ("Delays", 1, "primary"),
    ]
    assert both.replicas[2].state_bytes == 1000
    assert all(replica.safe and replica.movable for replica in both.replicas)
    only = answer(at, GetPartitions(stage="Worst"))
    assert {replica.stage for replica in only.replicas} == {"Worst"}
    assert len(only.replicas) == 2


@pytest.mark.parametrize("request_", [GetPartitions(stage="Nope"), GetHistory(stage="Nope")])
def test_a_stage_that_does_not_exist_is_refused_and_those_that_do_are_named(request_: Request) -> None:
    refused = answer(counter(), request_)
    assert isinstance(refused, Refusal)
    assert (refused.kind, refused.reason) == ("usage", "there is no stage Nope; there are Delays, Worst")


def test_the_history_tells_what_happened_the_oldest_first() -> None:
    at = counter()
    at.core.happened("take-over", "Delays", 1, 2)
    at.core.happened("move", "Worst", 0, 1, stall_ms=12.5)
    history = answer(at, GetHistory())
    assert isinstance(history, History)
    assert [(e.kind, e.stage, e.partition, e.worker) for e in history.events] == [
        ("take-over", "Delays", 1, 2),
        ("move", "Worst", 0, 1),
    ]
    assert (history.events[1].stall_ms, history.events[1].seconds, history.events[1].why) == (12.5, 0.5, "by hand")
    assert [e.kind for e in answer(at, GetHistory(stage="Worst")).events] == ["move"]


def test_the_metrics_are_those_of_now_and_not_of_the_last_progress() -> None:
    at = counter()
    before = answer(at, GetMetrics())
    assert isinstance(before, MetricsText)
    at.metrics.note(at.core.happened("move", "Worst", 0, 1, stall_ms=12.5))
    sample = f'flux_moves_total{{id="{ID}",query="clicks",stage="Worst"}} '
    assert sample + "0.0" in before.text
    assert sample + "1.0" in answer(at, GetMetrics()).text


def test_a_mistake_while_looking_is_an_answer_and_not_the_end_of_the_query(monkeypatch: pytest.MonkeyPatch) -> None:
    at = counter()
    monkeypatch.setattr(at.core, "load_table", lambda: 1 / 0)
    refused = answer(at, GetStatus())
    assert (refused.kind, refused.reason) == ("failed", "ZeroDivisionError: division by zero")


# ---- acting


def test_a_suggestion_is_shown_and_nothing_is_moved() -> None:
    at = counter()
    suggested = answer(at, Suggest(policy="pairing"))
    assert isinstance(suggested, Suggested)
    assert [(m.stage, m.partition, m.source, m.target, m.gain, m.cost) for m in suggested.moves] == [
        ("Delays", 0, 0, 2, 0.25, 1 << 20),
        ("Delays", 3, 0, 1, 0.125, 1 << 10),
    ]
    assert suggested.notes == at.core.notes
    assert at.core.told == []
    assert answer(at, Suggest(policy="wild")).reason == "there is no policy wild; there are pairing"


def test_moves_go_to_the_controller_by_number_and_its_orders_go_out() -> None:
    at = counter()
    wanted = WantedMove(stage="Worst", partition=1, target=0, source=2)
    said, effects = asked(at, StartMoves(moves=[wanted], why="by hand"))
    assert isinstance(said, Accepted)
    assert at.core.told == [("move", (Move(1, 1, 2, 0, cost=1000),), "by hand", NOW)]
    assert effects == [Tell("somebody", Stop(reason="not really"))]
    assert [(m.stage, m.partition, m.phase) for m in answer(at, GetStatus()).moves_pending] == [("Worst", 1, "waiting")]


def test_without_a_source_the_primary_is_meant() -> None:
    at = counter()
    primary = at.core.table.stages[0][2][0].worker
    said, _ = asked(at, StartMoves(moves=[WantedMove(stage="Delays", partition=2, target=1)], why=""))
    assert at.core.told[0][1] == (Move(0, 2, primary, 1, cost=2000),)
    assert said.moves[0].source == primary


@pytest.mark.parametrize(
    ("move", "reason"),
    [
        (WantedMove(stage="Nope", partition=0, target=1), "there is no stage Nope; there are Delays, Worst"),
        (WantedMove(stage="Worst", partition=2, target=1), "stage Worst has the partitions 0 to 1, there is no 2"),
        (WantedMove(stage="Worst", partition=1, target=9), "there is no worker 9; there are 0, 1, 2"),
    ],
)
def test_moves_that_cannot_be_are_refused_and_none_of_the_request_is_begun(move: WantedMove, reason: str) -> None:
    at = counter()
    good = WantedMove(stage="Worst", partition=0, target=0)
    refused = answer(at, StartMoves(moves=[good, move], why=""))
    assert (refused.kind, refused.reason) == ("usage", reason)
    assert at.core.told == []


def test_a_change_of_protection_goes_to_the_controller_with_the_number_of_its_stage() -> None:
    at = counter()
    asked(at, ProtectStage(stage="Worst", replicas=2))
    assert at.core.told == [("protect", 1, 2, None, NOW)]
    status = answer(at, GetStatus())
    assert [(stage.replicas, stage.recovery) for stage in status.stages] == [(2, "active"), (2, "active")]
    assert status.requests[0].left == "2 partitions of Worst, from 1 active replica to 2 active replicas"
    assert (
        answer(at, ProtectStage(stage="Nope", replicas=2)).reason == "there is no stage Nope; there are Delays, Worst"
    )
    assert answer(at, ProtectStage(stage="Worst", replicas=9)).kind == "usage"


def test_drain_fail_and_scale_go_to_the_controller() -> None:
    at = counter()
    for request in (DrainWorker(worker=1), SetWorkers(workers=5), FailWorker(worker=2)):
        assert isinstance(asked(at, request)[0], Accepted)
    assert at.core.told == [("drain", 1, NOW), ("scale", 5, NOW), ("fail", 2, NOW)]
    status = answer(at, GetStatus())
    assert [worker.worker for worker in status.workers if worker.leaving] == [1]
    assert status.missing_slots == [3, 4]
    assert (status.balancing, status.evening_out) == (True, False)
    at.core.rounds.joined(NOW)
    assert answer(at, GetStatus()).evening_out
    assert answer(at, FailWorker(worker=2)).reason == "there is no worker 2; there are 0, 1"


@pytest.mark.parametrize("phase", ["starting", "finished", "ended"])
def test_replicas_are_changed_only_while_the_query_runs(phase: str) -> None:
    at = counter()
    at.core.phase = phase
    move = StartMoves(moves=[WantedMove(stage="Worst", partition=0, target=1)], why="")
    for request in (
        move,
        DrainWorker(worker=1),
        FailWorker(worker=1),
        SetWorkers(workers=2),
        Suggest(policy="pairing"),
    ):
        refused = answer(at, request)
        assert (refused.kind, f"the query is {phase}" in refused.reason) == ("usage", True)
    assert at.core.told == []
    assert answer(at, GetStatus()).phase == phase


# ---- bad requests


@pytest.mark.parametrize("frames", [[], [b""], [b"", b""], [b"garbage"]])
def test_what_cannot_be_read_is_counted_and_answered(frames: list[bytes]) -> None:
    at = counter()
    frame, effects = at.desk.handle(frames, NOW)
    assert (effects, at.desk.refused, at.core.told) == ([], 1, [])
    assert decode_answer([frame]).kind == "request"


def test_an_answer_is_no_request() -> None:
    at = counter()
    frame, _ = at.desk.handle([encode(Accepted())], NOW)
    assert isinstance(decode_answer([frame]), Refusal)
    assert at.core.told == []
