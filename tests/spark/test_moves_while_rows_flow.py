"""Partitions move and workers come and go under a running query, and the answer stays exact.

The rows are the same for all tests: ``ROUNDS`` rounds of the same keys, each key with a sequence number, counted by the detector
of ``test_faults``. The last rounds come only when a test has made its moves and faults, so that these always happen in
mid-stream, on a slow machine too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import functions as F  # noqa: N812
from test_faults import KEYS, PARTITIONS, ROWS, Detector, echo, rows_in
from test_faults import until as until_within

import flux
from spark_integration.query.query import Query

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600), pytest.mark.usefixtures("nothing_left_behind")]

ROUNDS, LAST_ROUNDS = 150, 15
ROUND_S = 0.01
TOTAL = KEYS * PARTITIONS * ROUNDS
#: A machine under load takes its time; nothing here is judged by it.
WAIT_S = 180.0
ROOT = Path(__file__).resolve().parents[2]


def rounds_until(gate: Path) -> Callable[[int, int], Iterator[pa.RecordBatch | None]]:
    """Make a reader of rounds at a steady pace; the last ones come when there is a file at ``gate``. A reader that waits there
    leaves a file beside it."""
    gate_path = str(gate)

    def read(partition: int, start: int) -> Iterator[pa.RecordBatch | None]:
        begun = time.time() - start * ROUND_S
        keys = pa.array(np.arange(KEYS) * PARTITIONS + partition)
        for number in range(start, ROUNDS):
            while time.time() < begun + number * ROUND_S:
                yield None
            if number == ROUNDS - LAST_ROUNDS:
                Path(f"{gate_path}.{partition}").touch()
                while not os.path.exists(gate_path):
                    yield None
            yield pa.record_batch([keys, pa.array(np.full(KEYS, number))], schema=ROWS)

    return read


@cache
def by_spark(session: Any) -> dict[int, tuple[int, int]]:
    """Compute Spark's own answer: rows and last sequence number of every key."""
    rows = session.range(0, TOTAL, 1, 2).selectExpr(
        f"id % {KEYS * PARTITIONS} as key", f"id div {KEYS * PARTITIONS} as n"
    )
    counted = rows.groupBy("key").agg(F.count("*").alias("rows"), F.max("n").alias("last")).collect()
    return {row.key: (row.rows, row.last) for row in counted}


def until(condition: Callable[[], object], what: str) -> None:
    until_within(condition, what, WAIT_S)


class SlowToCopy(Detector.target):  # type: ignore[name-defined, misc]
    """A stage that copies partition 0 as long as there is a file at ``hold``, so that a test can act meanwhile."""

    def __init__(self, hold: str) -> None:
        self.hold = hold

    def snapshot(self) -> Any:
        while self.context.partition == 0 and os.path.exists(self.hold):
            time.sleep(0.02)
        return super().snapshot()

    def restore(self, snapshot: Any) -> None:
        super().restore(snapshot)


class Run:
    """A query over the rows of all tests, and the laws of its output."""

    def __init__(self, session: Any, gate: Path, workers: int, replicas: int = 2, **options: Any) -> None:
        self.session = session
        self.gate, self.hold = gate, gate.with_suffix(".hold")
        source = flux.source(rounds_until(gate), ROWS, partitions=PARTITIONS)
        first = flux.stage(key="key", partitions=4, replicas=replicas, name="echo")(echo.target)
        last = flux.stage(key="key", partitions=3, replicas=replicas, name="Detector")(SlowToCopy)
        settings = {
            "progress_interval": "50ms",
            "workers": workers,
            "queryName": gate.name,
            **options,
        }
        self.query: Query = flux.start(
            last(hold=str(self.hold))(first(source)), spark=session, keep_output=True, **settings
        )

    def __enter__(self) -> Run:
        try:
            self.query.wait_until_running(WAIT_S)
            self.flowing()
        except BaseException:
            self.query.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.hold.unlink(missing_ok=True)
        self.query.stop()

    def flowing(self) -> None:
        """Wait until all rows have come that may come before the gate is open. The query's count does not show this: it may miss
        rows where another worker has gone on reading."""
        before = rows_in(self.query)
        there = [Path(f"{self.gate}.{partition}") for partition in range(PARTITIONS)]

        def flow() -> bool:
            return rows_in(self.query) > before or all(path.exists() for path in there) or not self.query.isActive

        until(flow, "rows flow")
        if self.query.exception() is not None:
            raise self.query.exception()

    def check(self) -> None:
        """Let the last rounds come, and compare the output with Spark's own."""
        assert rows_in(self.query) <= TOTAL - KEYS * PARTITIONS * LAST_ROUNDS, "it must have happened in mid-stream"
        self.gate.touch()
        out = self.query.toDF().collect()
        assert {row.key: (row.rows, row.s4) for row in out} == by_spark(self.session)
        assert [row for row in out if row.wrong] == []
        assert len(out) == KEYS * PARTITIONS
        assert not self.happened("divergence")

    # ---- observed state

    def happened(self, kind: str) -> list[Any]:
        return [event for event in self.query.events() if event.kind == kind]

    def holders(self, stage: str, partition: int) -> list[int]:
        """List the workers with a copy, the primary first."""
        rows = [r for r in self.query.partitions() if (r["stage"], r["partition"]) == (stage, partition)]
        return [r["worker"] for r in sorted(rows, key=lambda r: r["role"] != "primary")]

    def held(self) -> set[int]:
        return {replica["worker"] for replica in self.query.partitions()}

    def other_worker(self, stage: str, partition: int) -> int:
        return min(set(self.query.members()) - set(self.holders(stage, partition)))

    def tasks(self) -> int:
        """Spark tasks of its workers that have not ended."""
        tracker = self.session.sparkContext.statusTracker()
        stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        return sum(stage.numTasks - stage.numCompletedTasks for stage in stages if stage is not None)


@pytest.fixture
def gate(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return tmp_path / request.node.name.partition("[")[0][5:45]


# ---- moves


@pytest.mark.parametrize("replicas", [2])
def test_partitions_move_all_the_time_while_rows_flow(slots: Any, gate: Path, replicas: int) -> None:
    with Run(slots, gate, workers=3, replicas=replicas, balance_enabled=False) as run:
        places = [("echo", p) for p in range(4)] + [("Detector", p) for p in range(3)]
        for number in range(2 * len(places)):
            stage, partition = places[number % len(places)]
            source = run.holders(stage, partition)[number // len(places) % replicas]
            target = run.other_worker(stage, partition)
            took = run.query.move(stage, partition, target, source=source, timeout=WAIT_S)
            assert took["seconds"] > 0
            assert target in run.holders(stage, partition)
            assert source not in run.holders(stage, partition)
            run.flowing()
        assert len(run.happened("move")) == 2 * len(places)
        run.check()


@pytest.mark.long  # test_every_command.py has such refusals, a plan and its moves by the command
def test_what_cannot_be_moved_is_refused_and_a_plan_can_be_looked_at(slots: Any, gate: Path) -> None:
    with Run(slots, gate, workers=3, balance_enabled=False) as run:
        _, second = run.holders("echo", 0)
        third = run.other_worker("echo", 0)
        with pytest.raises(flux.UsageError, match=f"echo/0: worker {second} holds a replica already"):
            run.query.move("echo", 0, second)
        with pytest.raises(flux.UsageError, match="there is no stage ech; there are echo, Detector"):
            run.query.move("ech", 0, third)
        with pytest.raises(flux.UsageError, match="expected a number of 0 or more, got -1"):
            run.query.move("echo", 0, -1)
        with pytest.raises(flux.UsageError, match="timeout must be positive, got 0"):
            run.query.drain(third, timeout=0)
        with pytest.raises(flux.UsageError, match="there is no balance policy 'nobody'"):
            run.query.rebalance(policy="nobody")
        run.query.move("echo", 0, third)
        assert run.holders("echo", 0) == [third, second], "the primary moved"
        planned = run.query.rebalance(policy="even", dry_run=True)
        assert len(run.happened("move")) == 1, "a dry run moves nothing"
        done = run.query.rebalance(policy="even")
        assert [(m["stage"], m["partition"], m["target"]) for m in done] == [
            (m["stage"], m["partition"], m["target"]) for m in planned
        ]
        assert len(run.happened("move")) == 1 + len(planned)
        run.check()


@pytest.mark.parametrize("victim", [pytest.param("source", marks=pytest.mark.long), "target"])
def test_a_worker_is_killed_in_the_middle_of_a_move(slots: Any, gate: Path, victim: str) -> None:
    with Run(slots, gate, 3, balance_enabled=False) as run:
        source, target = run.holders("Detector", 0)[0], run.other_worker("Detector", 0)
        run.hold.touch()
        with pytest.raises(flux.QueryTimeout, match=r"Detector/0 to worker \d+ \((retain|copy|waiting)\)"):
            run.query.move("Detector", 0, target, timeout=0.01)
        under_way = run.query._server.core.repairs.under_way
        key = (1, 0)
        until(lambda: key in under_way and under_way[key].phase == "copy", "the copy is under way")
        addition = under_way[key]
        lost = {"source": source, "target": target}[victim]
        os.kill(run.query.members()[lost].about.pid, signal.SIGKILL)
        assert addition.phase in ("copy", "follows", "live"), "the fault must hit during the move"
        assert not run.happened("move"), "the fault must hit during the move"
        run.hold.unlink()
        until(lambda: lost not in run.query.members(), "the loss is noticed")
        until(lambda: len(run.query.members()) == 3 and run.query.is_whole(), "full replication")
        kinds = [event.kind for event in run.query.events()]
        assert "loss" in kinds
        if victim == "target":
            (given_up,) = run.happened("move given up")
            assert (given_up.partition, given_up.source, given_up.worker) == (0, source, target)
        else:
            assert any((e.stage, e.partition) == ("Detector", 0) for e in run.happened("take-over"))
        run.check()


# ---- workers that leave and come


def test_a_worker_that_is_drained_leaves_and_the_others_go_on(slots: Any, gate: Path) -> None:
    with Run(slots, gate, workers=3) as run:
        worker = run.holders("Detector", 0)[0]
        run.query.drain(worker, timeout=WAIT_S)
        assert worker not in run.query.members()
        assert worker not in run.held()
        until(lambda: run.tasks() == 2, "its Spark task has ended")
        run.flowing()
        with pytest.raises(flux.UsageError, match="replicas=2, and without worker"):
            run.query.drain(min(run.query.members()))
        run.check()
        assert not run.happened("loss")


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_query_grows_from_two_workers_to_four_and_shrinks_again(slots: Any, gate: Path, replicas: int) -> None:
    # Nothing moves for load: on a busy machine some worker may look slow.
    calm = {"balance_round": "200ms", "balance_threshold": 1.0}
    with Run(slots, gate, workers=2, replicas=replicas, **calm) as run:
        with pytest.raises(
            flux.UsageError, match="cannot scale to 6 workers: 6 task slots exist, 1 for the Spark tasks"
        ):
            run.query.scale(workers=6)
        if replicas == 1:
            run.query.scale(workers=4, timeout=WAIT_S)
        else:  # from another process
            refused = flux_command("scale", gate.name, "--workers", "9")
            assert (refused.returncode, "6 task slots exist" in refused.stderr) == (1, True), refused.stderr
            grown = flux_command("scale", gate.name, "--workers", "4", "--json")
            assert grown.returncode == 0, grown.stderr
            assert len(json.loads(grown.stdout)["status"]["workers"]) == 4
        assert len(run.query.members()) == 4
        assert run.held() == set(run.query.members()), "every worker has its share when it is done"
        joined = run.happened("join")[0].at
        spread = [move for move in run.happened("move") if move.at - move.seconds > joined]
        assert spread, "somebody gave them their share"
        assert {move.why for move in spread} == {"balance: even"}, "counts come before loads"
        run.query.scale(workers=2, timeout=WAIT_S)
        assert sorted(member.about.index for member in run.query.members().values()) == [0, 1]
        assert run.held() == set(run.query.members())
        until(lambda: run.tasks() == 2, "the tasks of the others have ended")
        run.query.scale(workers=3, timeout=WAIT_S)  # in a slot that was never used
        assert sorted(member.about.index for member in run.query.members().values()) == [0, 1, 4]
        run.check()
        assert not run.happened("loss")


@pytest.mark.costs_an_executor
def test_an_executor_that_spark_decommissions_is_emptied_before_it_goes_and_its_worker_replaced(
    cluster: Any, gate: Path
) -> None:
    with Run(cluster, gate, workers=3) as run:
        worker = run.holders("Detector", 0)[0]
        executor = int(run.query.members()[worker].about.executor.rpartition(":")[2])
        os.kill(executor, signal.SIGPWR)
        until(lambda: worker not in run.query.members(), "its worker has left")
        (drained,) = run.happened("drain")
        assert drained.worker == worker
        assert drained.why.startswith("Spark decommissions executor ")
        assert not run.happened("loss"), "it gave everything away before it went"
        until(lambda: not os.path.exists(f"/proc/{executor}"), "the executor goes when its task has ended")
        until(lambda: len(run.query.members()) == 3, "another worker has come")
        until(lambda: run.held() == set(run.query.members()), "it has its share")
        until(run.query.is_whole, "full replication")
        assert all(m.about.executor.rpartition(":")[2] != str(executor) for m in run.query.members().values())
        run.flowing()
        run.check()
        assert not run.happened("loss")


def flux_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flux", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S
    )
