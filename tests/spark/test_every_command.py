"""Every command against one running query, in the order in which a user would try them: their effects, and their exits."""

from __future__ import annotations

from typing import Any

import pytest
from endless import begin_elsewhere, command, parsed, rows_flow, ticks, until

import flux

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600), pytest.mark.usefixtures("nothing_left_behind")]

DONE, REFUSED, USAGE, UNREACHABLE = 0, 1, 2, 3


@flux.stage(key="k", partitions=4, replicas=2)
class Counts(flux.Aggregate):
    n = flux.count()


@flux.stage(key="k", partitions=2, replicas=2)
class Void(flux.Operator):
    def process(self, batch: Any) -> None:
        pass


def holders(partition: int) -> list[int]:
    """List the workers with a copy of a partition, the primary first."""
    rows = parsed("partitions", "clicks", "--stage", "Counts")["replicas"]
    mine = [row for row in rows if row["partition"] == partition]
    return [row["worker"] for row in sorted(mine, key=lambda row: row["role"] != "primary")]


def workers() -> list[int]:
    return [row["worker"] for row in parsed("status", "clicks")["workers"]]


def happened() -> list[str]:
    """List the kinds of events without those of loads, which no command asks for: a busy machine makes loads uneven."""
    return [event["kind"] for event in parsed("history", "clicks")["events"] if event["kind"] != "balance"]


def test_a_query_is_looked_at_moved_about_grown_emptied_and_rehearsed_with_the_flux_command(slots: Any) -> None:
    flow = Void(Counts(flux.source(ticks, schema="k BIGINT", partitions=3, name="ticks")))
    query = flux.start(
        flow, spark=slots, workers=3, queryName="clicks", progress_interval="200ms", balance_round="200ms",
        balance_threshold=1.0,  # nothing moves for load: on a busy machine some worker may look slow
    )  # fmt: skip
    try:
        rows_flow(query)
        look()
        move()
        rebalance()
        protect()
        grow()
        drain()
        fail()
        assert query.exception() is None
        history()
    finally:
        query.stop()
    for arguments in (("status",), ("rebalance", "--dry-run"), ("scale", "--workers", "2"), ("drain", "0")):
        assert command(*arguments).exit_code == UNREACHABLE
    assert parsed("move", "Counts/0", "--to", "1", code=UNREACHABLE)["error"]["kind"] == "unreachable"
    assert command("list").stdout == "no query is running\n"


def look() -> None:
    shown = command("status", "clicks")
    assert (shown.exit_code, "2 of 2" in shown.stdout) == (DONE, True), shown.output
    status = parsed("status")
    assert [stage["name"] for stage in status["stages"]] == ["Counts", "Void"]
    assert len(status["workers"]) == 3
    frame = command("top", "clicks", "--once")
    assert (frame.exit_code, "Counts/0" in frame.stdout) == (DONE, True), frame.output
    assert parsed("top")["partitions"]["replicas"]
    assert command("top", "--seconds", "0.3", "--interval", "0.1").exit_code == DONE
    assert command("top").exit_code == USAGE, "a live view needs a terminal"
    assert len(holders(0)) == 2
    assert parsed("history", "clicks")["events"] == []
    metrics = command("metrics", "clicks")
    assert (metrics.exit_code, "flux_rows_in_total" in metrics.stdout) == (DONE, True)
    listed, unknown = command("list"), command("status", "cliks")
    assert (listed.exit_code, "clicks" in listed.stdout) == (DONE, True)
    assert (unknown.exit_code, "no running query is called 'cliks'" in unknown.stderr) == (UNREACHABLE, True)
    assert command("partitions", "--stage", "Cuonts").exit_code == REFUSED


def move() -> None:
    primary, secondary = holders(0)
    (third,) = set(workers()) - {primary, secondary}
    moved = command("move", "Counts/0", "--to", str(third))
    assert moved.exit_code == DONE, moved.output
    assert moved.stdout.startswith(f"moved: Counts/0 from worker {primary} to worker {third} in ")
    assert holders(0) == [third, secondary]
    again_ends = begin_elsewhere("move", "Counts/0", "--to", str(third))
    assert command("move", "Counts", "--to", "0").exit_code == USAGE
    again = again_ends()
    assert again.returncode == REFUSED
    assert again.stderr == "flux: cannot move: Counts/0 would stay where it is\n"
    document = parsed("move", "Counts/0", "--to", str(primary), "--from", str(secondary))
    assert [one["done"] for one in document["moves"]] == [True]
    assert holders(0) == [third, primary]
    assert parsed("move", "Counts/4", "--to", "0", code=REFUSED)["error"]["kind"] == "refused"
    assert command("move", "Counts/0").exit_code == USAGE
    assert happened() == ["move", "move"]


def rebalance() -> None:
    """Make counts uneven by hand, and even again."""
    source = min(workers())
    for partition in range(4):
        if source in holders(partition):
            (free,) = set(workers()) - set(holders(partition))
            assert command("move", f"Counts/{partition}", "--from", str(source), "--to", str(free)).exit_code == DONE
    before = happened()
    plan = parsed("rebalance", "--policy", "even", "--dry-run")
    assert (plan["carried_out"], {move["target"] for move in plan["moves"]}) == (False, {source})
    shown = command("rebalance", "--policy", "even", "--dry-run")
    assert (shown.exit_code, f"{len(plan['moves'])} moves" in shown.stdout) == (DONE, True), shown.output
    assert command("rebalance", "--policy", "even").exit_code == REFUSED, "nobody has said yes"
    assert parsed("rebalance", "--policy", "even", code=USAGE)["error"]["kind"] == "usage"
    assert happened() == before, "nothing has moved"
    carried = parsed("rebalance", "--policy", "even", "--yes")
    assert carried["carried_out"]
    assert [one["done"] for one in carried["moves"]] == [True] * len(plan["moves"])
    assert "policy even suggests no move" in command("rebalance", "--policy", "even").stdout
    assert command("rebalance", "--policy", "odd").exit_code == REFUSED


def protect() -> None:
    done = command("protect", "Void", "--replicas", "1")
    assert (done.exit_code, done.stdout) == (DONE, "Void is protected by 1 active replica of each partition\n"), (
        done.output
    )
    begun = command("protect", "Void", "--replicas", "2", "--recovery", "standby")
    assert (begun.exit_code, "1 active replica and 1 standby" in begun.stdout) == (DONE, True), begun.output
    rows = parsed("partitions", "clicks", "--stage", "Void")["replicas"]
    assert (
        sorted((row["role"], row["kind"]) for row in rows) == [("primary", "active")] * 2 + [("standby", "standby")] * 2
    )
    assert "of checkpoints" in command("status", "clicks").stdout
    document = parsed("protect", "Void", "--recovery", "active")
    assert [(stage["replicas"], stage["recovery"]) for stage in document["status"]["stages"]] == [(2, "active")] * 2
    assert parsed("protect", "Void", "--recovery", "active")["waited"], "it is like that already"
    refused = command("protect", "Void", "--replicas", "4")
    assert (refused.exit_code, "replicas must be 1 to 3; got 4" in refused.stderr) == (REFUSED, True), refused.output
    assert parsed("protect", "Viod", "--replicas", "2", code=REFUSED)["error"]["kind"] == "refused"
    assert command("protect", "Void").exit_code == USAGE
    told = [event for event in parsed("history", "--stage", "Void")["events"] if event["kind"].startswith("protect")]
    assert [event["kind"] for event in told] == ["protect", "protected"] * 3
    assert told[0]["request"] == told[1]["request"] > 0


def grow() -> None:
    refused = command("scale", "--workers", "9")
    assert (refused.exit_code, "6 task slots exist" in refused.stderr) == (REFUSED, True), refused.output
    grown = command("scale", "--workers", "4")
    assert grown.exit_code == DONE, grown.output
    assert grown.stdout.startswith("4 workers now, with ")
    held = [row["replicas"] for row in parsed("status")["workers"]]
    assert (len(held), max(held) - min(held) < 2) == (4, True), held
    assert parsed("scale", "--workers", "4")["waited"]
    assert command("scale", "--workers", "0").exit_code == USAGE


def drain() -> None:
    worker = max(workers())
    drained = command("drain", str(worker))
    assert (drained.exit_code, drained.stdout) == (DONE, f"worker {worker} has left the query\n"), drained.output
    assert worker not in workers()
    assert command("drain", str(worker)).exit_code == REFUSED, "it is gone"
    assert command("drain", "one").exit_code == USAGE


def fail() -> None:
    worker = holders(0)[0]
    assert command("fail", str(worker)).exit_code == REFUSED, "nobody has said yes"
    failed = command("fail", str(worker), "--yes")
    assert failed.exit_code == DONE, failed.output
    assert f"worker {worker} holds" in failed.stderr
    assert failed.stdout == f"worker {worker} is out of the query\n"
    until(lambda: len(workers()) == 3, "Spark starts its task again")
    until(lambda: not any(stage["short"] for stage in parsed("status")["stages"]), "all copies are there again")
    assert parsed("fail", str(worker), "--yes", code=REFUSED)["error"]["kind"] == "refused"


def history() -> None:
    assert {"move", "scale", "join", "drain", "loss", "take-over", "repair"} <= set(happened())
    shown = command("history")
    assert (shown.exit_code, "declared lost for a rehearsal" in shown.stdout) == (DONE, True), shown.output
    assert {event["stage"] for event in parsed("history", "--stage", "Counts")["events"]} == {"Counts"}
    assert "flux_workers_lost_total{" in command("metrics").stdout
