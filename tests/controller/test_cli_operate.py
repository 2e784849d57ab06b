"""The command line against served queries: its tables, its orders, its one JSON document and its exit codes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from operated import ID, NOW, FakeCore, served
from rich.console import Console
from typer.testing import CliRunner, Result

from controller.balance.load import Move
from controller.operate import cli
from controller.operate.cli import change as waiting
from controller.operate.cli import show as look
from controller.operate.cli import tables
from controller.operate.cli.change import _risk
from controller.operate.client import QueryClient, choose
from controller.operate.connection_file import write
from controller.replicas.moves import MovePhase
from controller.replicas.replica_safety import Life
from flux.errors import QueryFailed

DONE, REFUSED, USAGE, UNREACHABLE = 0, 1, 2, 3


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLUX_RUNTIME_DIR", str(tmp_path / "flux"))
    monkeypatch.setattr(waiting, "LOOK_S", 0.001)
    return tmp_path / "flux"


@pytest.fixture
def core() -> Iterator[FakeCore]:
    with served() as core:
        yield core


def run(*arguments: str, says: str | None = None) -> Result:
    return CliRunner().invoke(cli.app, list(arguments), input=says)


def parsed(*arguments: str, code: int = DONE) -> Any:
    """Run a command and return the JSON document that is its whole output."""
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


# ---- looking


def test_running_queries_are_listed_and_stale_ones_shown_as_such_once(core: FakeCore) -> None:
    write(msgspec.structs.replace(choose(None), id="dead", name="old", pid=1 << 22))
    shown = run("list")
    assert shown.exit_code == DONE
    clicks = next(line for line in shown.stdout.splitlines() if "clicks" in line)
    assert (ID[:8] in clicks, "running" in clicks, str(os.getpid()) in clicks) == (True, True, True)
    assert f"stale: its process {1 << 22} is gone" in shown.stdout
    (query,) = parsed("list")["queries"]
    assert (query["id"], query["phase"], query["workers"], query["stale"]) == (ID, "running", 3, None)


def test_without_any_query_list_is_empty_and_all_else_exits_with_3() -> None:
    assert run("list").stdout == "no query is running\n"
    assert parsed("list") == {"queries": []}
    for command in (
        ("status",), ("top", "--once"), ("partitions",), ("history",), ("metrics",), ("rebalance",), ("move", "A/0", "--to", "1"),
        ("drain", "1"), ("scale", "--workers", "2"), ("fail", "1"),
        ("protect", "A", "--replicas", "2"),
    ):  # fmt: skip
        result = run(*command)
        assert (result.exit_code, result.stdout) == (UNREACHABLE, "")
        assert result.stderr.startswith("flux: no query is running")
        error = parsed(*command, code=UNREACHABLE)["error"]
        assert error["kind"] == "unreachable"


def test_the_status_has_stages_workers_replication_and_latency(core: FakeCore) -> None:
    shown = run("status").stdout
    for part in (
        "clicks",
        "running for 1 min 30 s",
        "epoch 0",
        "rows in 6,000",
        "100 input rows/s",
        "3 slices and 3.0 MiB",
    ):
        assert part in shown
    delays = next(line for line in shown.splitlines() if line.startswith("Delays"))
    assert delays.split() == [
        "Delays",
        "4",
        "1",
        "2",
        "of",
        "2",
        "0",
        "4,000",
        "40",
        "150",
        "2",
        "2.0",
        "MiB",
        "1.5",
        "/",
        "20.0",
        "ms",
        "0.5",
        "s",
    ]
    assert shown.splitlines()[shown.splitlines().index(delays) + 1].endswith("the query"), "it has one copy"
    status = parsed("status")
    assert (status["id"], status["name"], status["epoch"], status["rows_per_s"]) == (ID, "clicks", 0, 100.0)
    assert [stage["name"] for stage in status["stages"]] == ["Delays", "Worst"]
    assert [worker["worker"] for worker in status["workers"]] == [0, 1, 2]
    assert not {"type", "number", "secret"} & set(status)


def test_a_query_can_be_named_and_must_be_where_there_are_several(core: FakeCore) -> None:
    with served("views", "aa22"):
        assert parsed("status", "views")["id"] == "aa22"
        assert parsed("status", ID[:6])["id"] == ID
        nameless = run("status")
        assert (nameless.exit_code, nameless.stdout) == (USAGE, "")
        assert "say which: " in nameless.stderr
        assert "views (aa22)" in nameless.stderr
        assert parsed("status", code=USAGE)["error"]["kind"] == "usage"
        assert run("status", "cliks").exit_code == UNREACHABLE
        assert run("drain", "1", "-q", "views").exit_code == DONE
    assert core.told == []


def test_partitions_are_shown_with_role_load_and_state(core: FakeCore) -> None:
    shown = run("partitions", "--stage", "Delays").stdout
    assert len([line for line in shown.splitlines() if line.startswith("Delays/")]) == 8
    assert "primary" in shown
    assert "load and rows/s over the last 5.0 s" in shown
    replicas = parsed("partitions")["replicas"]
    assert len(replicas) == 10
    assert replicas[0] == {
        "stage": "Delays", "partition": 0, "worker": 0, "role": "primary", "safe": True, "load": 0.1, "queued": 1,
        "state_bytes": 0, "rows_per_s": 50.0, "movable": True, "behind": 0, "kind": "active",
        "checkpoint_behind_s": None,
    }  # fmt: skip
    assert run("partitions", "--stage", "Nope").exit_code == REFUSED
    refused = parsed("partitions", "--stage", "Nope", code=REFUSED)["error"]
    assert refused == {"kind": "refused", "message": "there is no stage Nope; there are Delays, Worst"}


def test_where_there_are_too_many_copies_to_read_stages_are_shown_unless_all_are_asked_for(
    core: FakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "MANY", 9)
    shown = run("partitions").stdout
    assert "age p50" in shown, "the stages"
    assert "10 replicas in all: --all shows each" in shown
    assert "load and rows/s over" in run("partitions", "--stage", "Delays").stdout, "these are 8"
    every = run("partitions", "--all").stdout
    assert len([line for line in every.splitlines() if line.startswith(("Delays/", "Worst/"))]) == 10
    assert len(parsed("partitions")["replicas"]) == 10


def test_the_history_is_shown_with_when_why_and_stall(core: FakeCore) -> None:
    assert run("history").stdout.startswith("nothing has happened so far")
    core.happened("take-over", "Delays", 1, 2)
    core.happened("move", "Worst", 0, 1, stall_ms=12.5)
    shown = run("history").stdout
    assert "take-over" in shown
    assert "12.5 ms" in shown
    assert tables.moment(NOW) in shown
    assert [event["kind"] for event in parsed("history", "--stage", "Worst")["events"]] == ["move"]


def test_the_metrics_are_the_text_of_prometheus(core: FakeCore) -> None:
    result = run("metrics")
    assert result.exit_code == DONE
    assert "# TYPE flux_rows_in_total counter" in result.stdout
    assert parsed("metrics")["text"] == result.stdout


def test_top_shows_one_frame_on_demand_and_ends_in_time(core: FakeCore) -> None:
    shown = run("top", "--once")
    assert shown.exit_code == DONE
    assert "Delays/0" in shown.stdout
    assert "Delays/0" in run("top", "--seconds", "0.2", "--interval", "0.1").stdout
    assert set(parsed("top")) == {"status", "partitions"}
    endless = run("top")
    assert endless.exit_code == USAGE, "not a terminal"


def test_top_fits_into_80_columns_and_says_where_each_worker_is(core: FakeCore) -> None:
    for member in core.members.workers.values():
        member.stats |= {"rows_in": 123_456_789, "queued": 12_345, "rss_bytes": 123 << 30}
    core.leaving.add(1)
    shown = run("top", "--once").stdout
    workers = shown[shown.index("worker") :]
    assert {"e0", "e1", "e2"} <= set(workers.split())
    assert "leaving" in workers
    narrow = Console(width=80, record=True, file=StringIO())
    with QueryClient(choose(ID)) as client:
        narrow.print(tables.top(*look._frame(client)))
    lines = narrow.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines), "nothing had to be cut"
    assert "executor" in run("status").stdout


def test_every_command_takes_the_query_with_q(core: FakeCore) -> None:
    with served("views", "aa22"):
        for command in (
            ("status",),
            ("top", "--once"),
            ("history",),
            ("rebalance", "--dry-run"),
            ("scale", "--workers", "3"),
        ):
            assert run(*command, "-q", "views").exit_code == DONE, command
        assert run("status", "views", "-q", "views").exit_code == DONE
        twice = run("status", "clicks", "-q", "views")
        assert (twice.exit_code, "two queries are named, clicks and views" in twice.stderr) == (USAGE, True)


# ---- rebalance


def test_a_dry_run_shows_moves_with_gain_and_cost_and_moves_nothing(core: FakeCore) -> None:
    shown = run("rebalance", "--dry-run").stdout
    rows = [line.split() for line in shown.splitlines() if line.startswith("Delays/")]
    assert rows[:2] == [["Delays/0", "0", "2", "25%", "1.0", "MiB"], ["Delays/3", "0", "1", "12%", "1.0", "KiB"]]
    assert core.notes[0] in shown
    plan = parsed("rebalance", "--dry-run")
    assert (plan["carried_out"], plan["moves"][0]["cost"], plan["notes"]) == (False, 1 << 20, core.notes)
    assert core.told == []


def test_rebalance_asks_first_carries_out_and_follows_to_the_end(core: FakeCore) -> None:
    core.suggested = [Move(0, 0, 0, 2, 0.25, 1), Move(1, 0, core.table.stages[1][0][0].worker, 0, 0.1, 1)]
    asked = run("rebalance", says="y\n")
    assert asked.exit_code == DONE, asked.output
    assert "Carry out 2 moves?" in asked.stderr
    assert "moved: Delays/0 from worker 0 to worker 2 in 0.500 s" in asked.stdout
    assert "stall 12.5 ms" in asked.stdout
    assert [told[0] for told in core.told] == ["move"]
    assert core.told[0][2] == "flux rebalance, policy pairing"
    assert core.pending == []


@pytest.mark.parametrize("says", ["n\n", ""])
def test_rebalance_does_nothing_unless_it_is_wanted(core: FakeCore, says: str) -> None:
    assert run("rebalance", says=says).exit_code == REFUSED
    assert core.told == []


def test_rebalance_with_json_asks_no_questions(core: FakeCore) -> None:
    assert "--yes" in parsed("rebalance", code=USAGE)["error"]["message"]
    assert core.told == []
    result = parsed("rebalance", "--yes")
    assert result["carried_out"]
    assert [move["done"] for move in result["moves"]] == [True, True]
    assert [move["stall_ms"] for move in result["moves"]] == [12.5, 12.5]


def test_without_a_policy_that_of_the_query_is_asked() -> None:
    with served(balance_policy="even"):
        assert parsed("rebalance", "--dry-run")["policy"] == "even"
        assert parsed("rebalance", "--dry-run", "--policy", "pairing")["policy"] == "pairing"


def test_a_policy_that_suggests_nothing_is_done_at_once(core: FakeCore) -> None:
    assert "suggests no move" in run("rebalance", "--policy", "nothing").stdout
    assert parsed("rebalance", "--policy", "nothing")["moves"] == []
    unknown = run("rebalance", "--policy", "wild")
    assert (unknown.exit_code, unknown.stderr) == (REFUSED, "flux: there is no policy wild; there are pairing\n")


# ---- by hand


def test_a_partition_is_moved_by_hand(core: FakeCore) -> None:
    source = core.table.stages[1][1][0].worker
    target = (source + 1) % 3
    shown = run("move", "Worst/1", "--to", str(target))
    assert shown.exit_code == DONE, shown.output
    assert f"moved: Worst/1 from worker {source} to worker {target}" in shown.stdout
    assert core.told[0][1] == (Move(1, 1, source, target, cost=1000),)
    assert core.table.stages[1][1][0].worker == target


@pytest.mark.parametrize("wrong", ["Worst", "Worst/", "/1", "Worst/one", "Worst/-1", "Worst/1.5", "Worst/" + "9" * 30])
def test_a_partition_is_named_by_stage_and_number(core: FakeCore, wrong: str) -> None:
    result = run("move", wrong, "--to", "1")
    assert (result.exit_code, core.told) == (USAGE, [])
    assert "expected STAGE/PARTITION, for example Delays/3" in result.stderr


def test_a_move_that_the_controller_refuses_exits_with_1(core: FakeCore) -> None:
    for arguments in (("Worst/1", "--to", "9"), ("Worst/7", "--to", "1"), ("Nope/1", "--to", "1")):
        result = run("move", *arguments)
        assert (result.exit_code, result.stdout) == (REFUSED, "")
        assert "there is no" in result.stderr


def test_what_is_not_done_in_time_is_named_and_exits_with_1() -> None:
    with served(tick=lambda core: None) as core:
        result = run("move", "Worst/1", "--to", "0", "--timeout", "0.1")
        assert result.exit_code == REFUSED
        assert "after 0.1 s (--timeout) this is still to come: moves of Worst/1 to worker 0 (waiting)" in result.stderr
        assert parsed("rebalance", "--yes", "--timeout", "0.1", code=REFUSED)["error"]["kind"] == "failed"
        assert len(core.pending) == 3, "it goes on"
        begun = parsed("move", "Worst/0", "--to", "0", "--no-wait")
        assert (begun["waited"], begun["moves"][0]["phase"]) == (False, "waiting")


def test_a_move_that_comes_to_nothing_exits_with_1() -> None:
    def give_up(core: FakeCore) -> None:
        if core.pending:
            move = core.pending.pop()
            event = core.happened("move given up", core.plan.stages[move.stage].name, move.partition, move.target)
            core.end(move, MovePhase.GIVEN_UP, event)

    with served(tick=give_up):
        result = run("move", "Worst/1", "--to", "0")
        assert result.exit_code == REFUSED
        assert "not moved: Worst/1" in result.stdout
        assert "1 move of 1 not carried out" in result.stderr
        assert [move["done"] for move in parsed("rebalance", "--yes", code=REFUSED)["moves"]] == [False, False]


def end(core: FakeCore) -> None:
    if core.numbers:
        core.phase = "ended"


def test_a_query_that_ends_meanwhile_ends_the_wait() -> None:
    with served(tick=end):
        result = run("move", "Worst/1", "--to", "0")
        assert result.exit_code == REFUSED
        assert result.stdout == "not moved: Worst/1 from worker 2 to worker 0: the query has come to its end\n"


def test_more_workers_are_no_failure_for_a_query_that_comes_to_its_end_before_they_are_there() -> None:
    with served(tick=end):
        result = run("scale", "--workers", "5")
        assert (result.exit_code, result.stdout) == (
            DONE, "scale to 5 was given up: the query has come to its end\n"
        ), result.output  # fmt: skip
    with served(tick=end):
        document = parsed("scale", "--workers", "5")
        assert (document["given_up"], document["status"]) == ("the query has come to its end", None)


def test_a_query_that_fails_meanwhile_fails_the_wait() -> None:
    def fail(core: FakeCore) -> None:
        if core.numbers:
            core.phase, core.error = "ended", QueryFailed("worker 1 was lost")  # type: ignore[assignment]

    with served(tick=fail):
        result = run("scale", "--workers", "5")
        assert result.exit_code == REFUSED
        assert "scale to 5 was given up: worker 1 was lost" in result.stderr


def test_a_worker_is_drained_until_it_has_left(core: FakeCore) -> None:
    result = run("drain", "1")
    assert result.exit_code == DONE, result.output
    assert result.stdout == "worker 1 has left the query\n"
    assert sorted(core.members.workers) == [0, 2]
    assert run("drain", "1").exit_code == REFUSED


def test_a_stage_gets_other_replicas() -> None:
    with served() as core:
        done = run("protect", "Delays", "--recovery", "standby")
        assert (done.exit_code, done.stdout) == (
            DONE, "Delays is protected by 1 active replica and 1 standby of each partition\n"
        )  # fmt: skip
        document = parsed("protect", "Worst", "--replicas", "3")
        assert document["waited"]
        assert [(stage["replicas"], stage["recovery"]) for stage in document["status"]["stages"]] == [
            (2, "standby"), (3, "active"),
        ]  # fmt: skip
        assert [told[:4] for told in core.told] == [("protect", 0, None, "standby"), ("protect", 1, 3, None)]
        refused = parsed("protect", "Worst", "--replicas", "4", code=REFUSED)["error"]
        assert refused == {"kind": "refused", "message": "cannot protect Worst: replicas must be 1 to 3; got 4"}
        assert "there is no stage Nope; there are Delays, Worst" in run("protect", "Nope", "--replicas", "2").stderr
        assert run("protect", "Delays").exit_code == USAGE, "nothing is said to change"
        assert run("protect", "Delays", "--replicas", "many").exit_code == USAGE


def test_a_change_that_takes_longer_goes_on_and_one_that_is_replaced_has_failed() -> None:
    with served(tick=lambda core: None) as core:
        late = run("protect", "Delays", "--recovery", "standby", "--timeout", "0.1")
        assert late.exit_code == REFUSED
        assert "4 partitions of Delays, from 2 active replicas to 1 active replica and 1 standby" in late.stderr
        begun = run("protect", "Delays", "--replicas", "3", "--no-wait")
        assert (begun.exit_code, begun.stdout) == (DONE, "asked for as request 2; look at it with flux status\n")
        assert "protection of Delays" in run("status").stdout
        assert core.request(1).standing.why == "request 2 asks for 1 active replica and 2 standbys"


def test_workers_are_scaled_and_slots_that_stay_empty_are_named() -> None:
    with served() as core:
        assert parsed("scale", "--workers", "3")["waited"]
        late = run("scale", "--workers", "5", "--timeout", "0.1")
        assert late.exit_code == REFUSED
        assert "3 workers there, 5 wanted, slots 3, 4 empty" in late.stderr
        assert run("scale", "--workers", "5", "--no-wait").exit_code == DONE
        assert [told[:2] for told in core.told] == [("scale", 3), ("scale", 5), ("scale", 5)]
    for wrong in ("0", "-1", "5000", "many"):
        assert run("scale", "--workers", wrong).exit_code == USAGE


def test_scale_is_done_when_workers_that_have_joined_have_their_share() -> None:
    def spread(core: FakeCore) -> None:
        if len(core.told) == 2:
            core.rounds.evened_out()

    with served(tick=spread) as core:
        core.rounds.joined(NOW)
        late = run("scale", "--workers", "3", "--timeout", "0.1")
        assert late.exit_code == REFUSED
        assert "still to come: workers hold 3 to 4 replicas, which are being evened out. It goes on" in late.stderr
        assert "are given their share" in run("status").stdout
        done = run("scale", "--workers", "3")
        assert (done.exit_code, core.rounds.evening_out) == (DONE, False), done.output
        assert done.stdout == "3 workers now, with 3 to 4 replicas each\n"


def test_where_load_is_not_balanced_scale_says_how_new_workers_get_their_share() -> None:
    with served(balance_enabled="false") as core:
        member = core.members.workers.pop(2)
        core.joins = [member]
        done = run("scale", "--workers", "3")
        assert done.exit_code == DONE, done.output
        assert "3 workers now, with " in done.stdout
        assert "flux rebalance --policy even evens the numbers out" in done.stdout
        assert "rebalance" not in run("scale", "--workers", "3").stdout, "nobody has joined"


def test_fail_says_what_is_at_stake_and_asks(core: FakeCore) -> None:
    lonely = core.table.stages[1][0][0].worker
    asked = run("fail", str(lonely), says="n\n")
    assert (asked.exit_code, core.told) == (REFUSED, [])
    assert f"the query will FAIL: worker {lonely} has the only safe replica of Worst/0" in asked.stderr
    assert "nothing was changed" in asked.stderr
    spare = next(worker for worker in range(3) if worker not in {r[0].worker for r in core.table.stages[1]})
    done = run("fail", str(spare), says="y\n")
    assert done.exit_code == DONE
    assert done.stdout.endswith(f"worker {spare} is out of the query\n")
    assert "FAIL" not in done.stderr
    gone = run("fail", str(spare), "--yes")
    known = ", ".join(str(worker) for worker in range(3) if worker != spare)
    assert gone.exit_code == REFUSED
    assert gone.stderr == f"flux: cannot fail: there is no worker {spare}; there are {known}\n", (
        "and nothing of replicas"
    )


def test_fail_does_not_warn_of_the_end_where_the_checkpoint_location_has_the_partitions(core: FakeCore) -> None:
    lonely = core.table.stages[1][0][0].worker
    with QueryClient(choose(ID)) as client:
        replicas = client.partitions().replicas
    assert "the query will FAIL" in _risk(lonely, replicas, restores=False)[-1]
    assert _risk(lonely, replicas, restores=True)[-1] == "Worst/0 will be restored from the checkpoint location"


def test_fail_says_which_partitions_would_wait_for_a_copy_that_is_far_behind(core: FakeCore) -> None:
    primary, heir = core.table.stages[0][0]
    core.repairs.safety.lags.note_one(
        primary.worker, Life(0, 0, heir.worker, heir.incarnation), 5000, 9.5, 0, True, 0.0
    )
    asked = run("fail", str(primary.worker), says="n\n")
    name = core.plan.stages[0].name
    assert f"{name}/0 will wait: worker {heir.worker} is 5,000 steps behind" in asked.stderr
    assert f"only safe replica of {name}/0" not in asked.stderr
    assert "5,000 behind" in run("partitions", "--stage", name).stdout


def test_a_query_of_another_secret_refuses_and_changes_nothing(core: FakeCore, place: Path) -> None:
    (path,) = place.iterdir()
    connection = choose(None)
    path.unlink()
    forged = write(msgspec.structs.replace(connection, secret=b"guess"))
    result = run("fail", "1", "--yes")
    assert (result.exit_code, core.told) == (REFUSED, [])
    assert "does not accept the secret of this query: the connection file is another's or an old one" in result.stderr
    forged.unlink()


@pytest.mark.parametrize(
    "arguments",
    [("scale", "--workers", "many"), ("move", "Worst/1"), ("drain", "one"), ("status", "--nope"), ("nonsense",),
     ("bench", "throughput", "--rows", "0")],
)  # fmt: skip
def test_with_json_arguments_that_do_not_parse_are_a_document_too(arguments: tuple[str, ...]) -> None:
    error = parsed(*arguments, code=USAGE)["error"]
    assert error["kind"] == "usage"
    assert error["message"] in " ".join(run(*arguments).stderr.replace("│", " ").split())


def test_a_file_that_is_not_used_is_named_with_the_reason(core: FakeCore, place: Path) -> None:
    (path,) = place.iterdir()
    with served("views", "aa22"):
        path.chmod(0o644)
        other = run("status", "clicks")
        assert other.exit_code == UNREACHABLE
        assert f"running are views (aa22). Not asked: {path.name}: only its owner" in other.stderr
    alone = run("status")
    assert (alone.exit_code, alone.stdout) == (UNREACHABLE, "")
    assert f"{path.name}: only its owner may have access to it, others do; run: chmod 600 {path}" in alone.stderr
    path.chmod(0o600)


def test_one_worker_is_not_one_workers(core: FakeCore) -> None:
    for worker in (1, 2):
        del core.members.workers[worker]
    late = run("scale", "--workers", "2", "--timeout", "0.1")
    assert "still to come: 1 worker there, 2 wanted" in late.stderr


def test_a_folder_that_others_can_write_to_is_a_usage_error(core: FakeCore, place: Path) -> None:
    place.chmod(0o777)
    try:
        result = run("list")
        assert result.exit_code == USAGE
        assert "chmod 700" in result.stderr
    finally:
        place.chmod(0o700)


# ---- small things


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1.0 KiB"),
        (3 << 20, "3.0 MiB"),
        (5 << 30, "5.0 GiB"),
        (9 << 42, "36,864.0 GiB"),
    ],
)
def test_sizes_are_read_easily(nbytes: int, text: str) -> None:
    assert tables.size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.0, "59 s"), (90.0, "1 min 30 s"), (3 * 3600 + 60, "3 h 1 min"), (90_000, "1 d 1 h")],
)
def test_durations_are_read_easily(seconds: float, text: str) -> None:
    assert tables.duration(seconds) == text
