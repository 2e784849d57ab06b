"""The controller's decisions: members, the start and the end of the query, and the reason of a failure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

import flux
from controller.decide.controller import Controller, Tell
from controller.decide.registration import ALIVE_S
from controller.planning.compiler import compile_plan
from flux.connectors.files.errors import BadFile
from flux.connectors.kafka.errors import BadRecord
from flux.dataflow.source import DataFrameSource
from flux.errors import NonDeterministicInputError, QueryFailed, QueryTimeout, UserCodeError
from flux.settings import Settings
from flux.wire.control import (
    EdgeComplete,
    Failure,
    FromController,
    Heartbeat,
    HeartbeatSeen,
    NewTable,
    PartitionFinished,
    Register,
    RegisterAgain,
    Rejected,
    Stop,
    Welcome,
)

SECRET = b"s"


class Sink(flux.Operator):
    def process(self, batch: pa.RecordBatch) -> None: ...


def controller(slots: int = 2, collect: int = 0) -> Controller:
    flow: Any = DataFrameSource("rows", pa.schema([("x", pa.int64())]))
    flow = flux.stage(partitions=3, name="Sums")(lambda batch: batch)(flow)
    if not collect:
        flow = flux.stage(partitions=2)(Sink)(flow)
    settings = replace(Settings.of(), workers_timeout=60.0)
    return Controller(compile_plan([flow], settings, lambda s: s, "q", SECRET, collect), slots, now=0.0)


def register(index: int, role: str = "worker", attempt: int = 0) -> Register:
    edges = [0] if role == "ingress" else []
    return Register(role=role, index=index, attempt=attempt, host="h", pid=1, endpoint=f"at {index}", edges=edges)


def orders(effects: list[Tell], connection: str | None = None) -> list[FromController]:
    return [effect.command for effect in effects if connection in (None, effect.connection)]


def running(slots: int = 2, collect: int = 0) -> Controller:
    made = controller(slots, collect)
    for slot in range(slots):
        made.on_report(f"worker {slot}", register(slot), 1.0)
    assert made.phase == "running"
    return made


def test_the_table_goes_out_when_the_last_worker_has_come() -> None:
    c = controller()
    assert orders(c.on_report("b", register(1), 1.0)) == [Welcome(node=0, incarnation=0, workers=2)]
    effects = c.on_report("a", register(0, attempt=5), 2.0)
    assert orders(effects, "a")[0] == Welcome(node=1, incarnation=5, workers=2)
    (table,) = [order.table for order in orders(effects, "b") if isinstance(order, NewTable)]
    assert table.epoch == 0
    assert table.endpoints == {1: "at 0", 0: "at 1"}
    # Dealt evenly in the order of the slots, the second stage starting where the first stopped.
    assert [[replicas[0].worker for replicas in stage] for stage in table.stages] == [[1, 0, 1], [0, 1]]


def test_workers_that_never_come_are_an_error_that_names_their_slots() -> None:
    c = controller(slots=3)
    c.on_report("b", register(1), 1.0)
    assert c.on_tick(60.0) == []
    assert orders(c.on_tick(60.1), "b")[0].__class__ is Stop
    assert isinstance(c.error, QueryTimeout)
    assert "1 of 3 workers joined within 60 s" in str(c.error)
    assert "missing: slots 0, 2." in str(c.error)
    assert "python -m partitioning.warm_up" in str(c.error), "the first start after an installation is slow"


def test_reports_of_one_who_has_not_registered_do_not_count() -> None:
    c = controller(slots=1)
    (again,) = orders(c.on_report("x", Failure(node=0, kind="QueryFailed", message="gone"), 1.0))
    assert isinstance(again, RegisterAgain), "who reports on a connection that nobody knows has to say who it is"
    assert (c.phase, c.refused) == ("starting", 1)


def test_a_registration_that_is_repeated_is_answered_again_with_the_same_id() -> None:
    c = running()
    again = orders(c.on_report("worker 0", register(0), 2.0))
    assert again[0] == Welcome(node=0, incarnation=0, workers=2)
    assert isinstance(again[1], NewTable)
    assert len(c.members.workers) == 2


def test_a_slot_that_does_not_exist_is_rejected() -> None:
    (order,) = orders(controller(slots=2).on_report("x", register(2), 1.0))
    assert isinstance(order, Rejected)


def test_a_speculative_attempt_of_a_worker_waits_while_the_first_is_heard() -> None:
    c = running()
    c.on_report("worker 0", Heartbeat(node=0, progress=1, stats={}), 10.0)
    assert c.on_report("copy", register(0, attempt=9), 10.0 + ALIVE_S) == []
    assert c.phase == "running"


def test_an_older_attempt_is_rejected() -> None:
    c = controller()
    c.on_report("new", register(0, attempt=5), 1.0)
    (order,) = orders(c.on_report("old", register(0, attempt=4), 1.0))
    assert isinstance(order, Rejected)
    c.on_report("new ingress", register(3, "ingress", attempt=8), 1.0)
    (order,) = orders(c.on_report("old ingress", register(3, "ingress", attempt=7), 1.0))
    assert isinstance(order, Rejected)


def test_before_the_start_a_worker_that_fell_silent_is_replaced() -> None:
    c = controller()
    c.on_report("first", register(0), 1.0)
    assert c.on_report("second", register(0, attempt=1), 1.0 + ALIVE_S) == []
    assert isinstance(orders(c.on_report("second", register(0, attempt=1), 1.1 + ALIVE_S))[0], Welcome)
    assert len(c.members.workers) == 1


def test_a_lost_worker_ends_the_query_and_the_error_names_what_was_lost_and_why_that_matters() -> None:
    c = running()
    effects = c.on_report("copy", register(1, attempt=9), 1.0 + ALIVE_S + 0.1)
    assert all(isinstance(order, Stop) for order in orders(effects))
    assert isinstance(c.error, QueryFailed)
    assert "worker 1 (slot 1, h pid 1) was lost (another attempt of its task has come), and with it" in str(c.error)
    assert "the only safe replica of Sums/1, Sink/0" in str(c.error)
    assert "replicas=1 do not survive" in str(c.error)


def test_an_ingress_task_gets_the_table_and_its_attempt_as_incarnation() -> None:
    c = running()
    welcome, table = orders(c.on_report("ingress", register(3, "ingress", attempt=7), 2.0))
    assert welcome == Welcome(node=2, incarnation=7, workers=2)
    assert isinstance(table, NewTable)
    newer = orders(c.on_report("again", register(3, "ingress", attempt=8), 2.0))
    assert newer[0] == Welcome(node=3, incarnation=8, workers=2)


def test_everybody_hears_that_an_edge_is_complete_also_who_comes_later() -> None:
    c = controller()
    c.on_report("a", register(0), 1.0)
    assert c.driver.on_edge_complete(0, [0, 1]) == []  # no worker has a table yet
    (table,) = [order for order in orders(c.on_report("b", register(1), 1.0), "b") if isinstance(order, NewTable)]
    assert table.complete == {0: [0, 1]}
    assert orders(c.driver.on_edge_complete(1, [0])) == [EdgeComplete(edge=1, producers=[0])] * 2


def test_heartbeats_are_answered() -> None:
    c = running()
    assert orders(c.on_report("worker 0", Heartbeat(node=0, progress=4, stats={"rows_in": 3}), 5.0)) == [
        HeartbeatSeen(epoch=0)
    ]
    assert c.members.workers[0].stats == {"rows_in": 3}


def finish(c: Controller, stage: int, partition: int) -> list[FromController]:
    return orders(c.on_report("worker 0", PartitionFinished(node=0, stage=stage, partition=partition), 5.0))


def test_the_query_ends_when_every_partition_of_its_last_stages_has_finished() -> None:
    c = running()
    assert finish(c, 1, 0) == []
    assert finish(c, 1, 0) == []  # told twice
    assert all(isinstance(order, Stop) for order in finish(c, 1, 1))
    assert (c.phase, c.error) == ("ended", None)


def test_with_output_to_fetch_the_workers_stay_until_they_are_told_to_go() -> None:
    c = running(collect=1)
    assert finish(c, 1, 0) == []
    assert c.phase == "finished"
    assert len(orders(c.driver.on_stop())) == 2
    assert (c.phase, c.error) == ("ended", None)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("UserCodeError", UserCodeError),
        ("NonDeterministicInputError", NonDeterministicInputError),
        ("BadFile", BadFile),
        ("BadRecord", BadRecord),
        ("RefusedError", QueryFailed),
        ("KeyError", QueryFailed),
        ("Any", QueryFailed),
    ],
)
def test_a_failure_ends_the_query_with_the_error_that_the_process_had(kind: str, expected: type[Exception]) -> None:
    c = running()
    effects = c.on_report("worker 0", Failure(node=0, kind=kind, message="what happened"), 5.0)
    assert type(c.error) is expected
    assert str(c.error) == "what happened"
    assert orders(effects) == [Stop(reason="what happened")] * 2


def test_the_first_error_stays_and_who_comes_later_is_sent_home() -> None:
    c = running()
    c.driver.on_job_failed("the Spark job 'workers'", "killed")
    c.on_report("worker 0", Failure(node=0, kind="UserCodeError", message="later"), 5.0)
    assert str(c.error) == "the Spark job 'workers' failed: killed"
    assert isinstance(orders(c.on_report("late", register(0, attempt=9), 99.0))[0], Stop)
