"""Stages that come and go from the command line, in a query of real workers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from harness import LIMIT_S, ThreadQuery
from typer.testing import CliRunner, Result

import flux
from controller.operate import cli
from controller.operate.cli import change as waiting
from controller.operate.requests import GetStatus, Status
from flux.dataflow.plan_change import encode_change
from flux.errors import QueryFailed, UsageError
from tests.controller.growing import copy_of

DONE, REFUSED = 0, 1
SCHEMA = pa.schema([("x", pa.int64())])


def read(partition: int) -> Iterator[pa.RecordBatch | None]:
    while True:
        yield None


@flux.stage(partitions=1, schema=SCHEMA)
def passed(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


@flux.stage(partitions=1)
class Kept(flux.Operator):
    def process(self, batch: pa.RecordBatch) -> None: ...


@pytest.fixture
def query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadQuery]:
    monkeypatch.setenv("FLUX_RUNTIME_DIR", str(tmp_path / "flux"))
    monkeypatch.setattr(waiting, "LOOK_S", 0.01)
    flow = Kept(passed(flux.source(read, SCHEMA, 1, "numbers")))
    with ThreadQuery(flow, replicas=1, on_failure="stage") as query:
        yield query.started()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


def parsed(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == DONE, result.output
    return json.loads(result.stdout)


def program(query: ThreadQuery) -> None:
    """Let the program of the query add a stage of the name that it is given."""

    def add(target: str) -> None:
        if ":" not in target:
            raise UsageError(f"expected MODULE:FLOW, got {target!r}")
        plan, version = query.server.look(query.server.core.plans.newest)
        change = replace(copy_of(plan, target.partition(":")[2], like="Kept", version=version), base=plan.version)
        query.server.add(change, encode_change(change, plan.secret), LIMIT_S)

    query.server.add_flows_by(add)


def test_a_stage_is_added_shown_and_removed(query: ThreadQuery) -> None:
    assert "adds no flows for others" in run("add", "my_flows:Alarm").output
    program(query)
    added = run("add", "my_flows:Alarm")
    assert (added.exit_code, added.stdout) == (DONE, "my_flows:Alarm is added: version 1 of the plan\n"), added.output
    shown = parsed("plan")
    assert [(part["name"], part["since"], part["reads"]) for part in shown["parts"]] == [
        ("numbers", 0, []), ("passed", 0, ["numbers"]), ("Kept", 0, ["passed"]), ("Alarm", 1, ["passed"]),
    ]  # fmt: skip
    assert [(each["version"], each["added"], each["removed"]) for each in shown["versions"]] == [(1, ["Alarm"], [])]
    assert shown["versions"][0]["at"] > 1e9
    assert "Alarm" in run("plan").stdout
    assert "version 1 of the plan" in run("status").stdout
    assert [row["name"] for row in parsed("status")["stages"]] == ["passed", "Kept", "Alarm"]
    removed = run("remove", "Alarm")
    assert (removed.exit_code, removed.stdout) == (DONE, "Alarm is removed: version 2 of the plan\n")
    assert [event["why"] for event in parsed("history")["events"] if event["kind"] == "plan"] == [
        "version 1: addition of Alarm", "version 2: removal of Alarm",
    ]  # fmt: skip
    end = time.monotonic() + LIMIT_S
    while "flux_plan_version" not in (
        shown_metrics := run("metrics").stdout
    ):  # they begin with the first progress report
        assert time.monotonic() < end, shown_metrics
        time.sleep(0.05)


def test_an_impossible_change_is_refused_with_its_reason(query: ThreadQuery) -> None:
    program(query)
    refused = run("remove", "passed")
    assert refused.exit_code == REFUSED
    assert "cannot remove passed: Kept depends on it" in refused.output
    assert "there is no such stage or source" in run("remove", "Nope").output
    failed = run("add", "Alarm")
    assert failed.exit_code == REFUSED
    assert "addition of Alarm was given up: expected MODULE:FLOW, got 'Alarm'" in failed.output
    assert "the query has a stage Kept already" in run("add", "m:Kept").output
    query.server.seal()
    assert "it was sealed" in run("add", "m:More").output
    assert "sealed" in run("plan").stdout


def test_a_failed_stage_is_restarted_by_the_program(query: ThreadQuery) -> None:
    assert "adds no flows for others" in run("restart", "Kept").output
    asked: list[str] = []
    query.server.add_flows_by(asked.append, asked.append)
    done = run("restart", "Kept")
    assert (done.exit_code, done.stdout) == (DONE, "Kept begins anew: version 0 of the plan\n")
    assert asked == ["Kept"]

    def refused(name: str) -> None:
        raise UsageError(f"stage {name} has not failed")

    query.server.add_flows_by(asked.append, refused)
    assert "restart of passed was given up: stage passed has not failed" in run("restart", "passed").output


def test_a_stage_that_has_failed_is_shown_until_it_is_removed_from_the_list(query: ThreadQuery) -> None:
    core = query.server.core
    query.server.look(lambda: core.board.fail(QueryFailed("boom in row 3"), [1]))
    status = query.server.ask(GetStatus())
    while status.plan == 0:  # type: ignore[union-attr]
        status = query.server.ask(GetStatus())
    assert isinstance(status, Status)
    assert [stage.name for stage in status.stages] == ["passed"]
    shown = run("plan").stdout
    assert "Kept FAILED at" in shown
    assert "boom in row 3" in shown
    assert "stage Kept FAILED: boom in row 3" in run("status").stdout
    assert run("remove", "Kept").exit_code == DONE
    assert "FAILED" not in run("plan").stdout
