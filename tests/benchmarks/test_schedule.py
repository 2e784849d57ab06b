"""The benchmark of checkpoint schedules: its figures, computed from arrivals, and the rows that it sends."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.arrivals import Seen
from benchmarks.paced import END, START
from benchmarks.schedule import (
    FRESH_MS,
    PARTITIONS,
    ROW_S,
    SIZES_MIB,
    WORKERS,
    Kill,
    Laborious,
    Unequal,
    names,
    recovery_s,
    summary,
    why_failed,
)
from flux.replica.deltas import DeltaTracker
from flux.replica.kinds import standby
from flux.settings import Settings
from flux.worker.checkpoint_scheduler import CheckpointScheduler
from partitioning.clustering import hash_columns, partition_ids
from partitioning.ids import PartitionKey

LATE_MS = FRESH_MS + 1


def script() -> Unequal:
    return Unequal(300, WORKERS, PARTITIONS, zipf=1.2, tick_s=0.25, names=names(PARTITIONS))


def test_each_key_belongs_to_another_partition() -> None:
    ids = partition_ids(hash_columns([pa.array(names(PARTITIONS))]), PARTITIONS)
    assert ids.tolist() == list(range(PARTITIONS))


def test_what_is_expected_is_what_the_source_gives_and_the_first_partition_gets_most() -> None:
    made = script()
    try:
        made.say(START, 1.0)
        made.say(END, 40)
        given = [
            batch.column("key").to_numpy() for p in range(WORKERS) for batch in made.read(p, 0) if batch is not None
        ]
        counts = np.bincount(np.concatenate(given), minlength=int(made.names.max()) + 1)
        assert counts.tolist() == made.expected().tolist()
        assert counts.sum() == 40 * WORKERS * made.per_batch
        by_partition = counts[made.names]
        assert by_partition[0] == by_partition.max() > 5 * np.median(by_partition)
    finally:
        made.clear()


def seen(*rows: tuple[float, int, float]) -> Seen:
    """Seconds since the kill, partition, and how many milliseconds before the rows were due."""
    at, partition, age_ms = np.array(rows).T
    at = 1000.0 + at
    return Seen(at, partition.astype(int), at - age_ms / 1e3, np.ones(len(at)), np.zeros(1, np.int64))


def test_a_loss_is_over_when_the_last_of_its_partitions_gives_fresh_rows_that_were_due_after_it() -> None:
    arrived = seen(
        (0.1, 0, 200.0), (1.0, 0, 900.0), (2.0, 0, FRESH_MS),  # the first was due before the kill
        (3.0, 1, LATE_MS), (4.0, 1, 100.0), (4.5, 1, 100.0),
        (9.0, 2, 100.0),
    )  # fmt: skip
    assert recovery_s(arrived, 1000.0, [0]) == pytest.approx(2.0)
    assert recovery_s(arrived, 1000.0, [0, 1]) == pytest.approx(4.0)
    assert recovery_s(arrived, 1000.0, [0, 1, 3]) == np.inf, "nothing came of partition 3"


def kills(*recovered: float | None, lost: int = 0, duplicated: int = 0) -> list[Kill]:
    return [Kill(each, 10, lost, duplicated) for each in recovered]


def test_the_schedules_are_compared_by_their_slow_recoveries() -> None:
    said = summary({"round-robin": kills(2.0, 4.0, 4.0), "min-max": kills(1.0, 2.0, 2.0)})
    assert [row["schedule"] for row in said["schedules"]] == ["round-robin", "min-max"]
    assert [row["p50_s"] for row in said["schedules"]] == [4.0, 2.0]
    assert said["p95_ratio"] == 2.0
    assert summary({"round-robin": kills(None), "min-max": kills(1.0)})["p95_ratio"] is None


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (kills(1.0, 2.0), None),
        (kills(1.0, None), "min-max: after 1 of 2 kills not all partitions gave rows within 500 ms again"),
        (kills(1.0, lost=3), "min-max: 3 rows lost, 0 duplicated, 0 are allowed"),
        (kills(1.0, duplicated=2), "min-max: 0 rows lost, 2 duplicated, 0 are allowed"),
    ],
)
def test_a_run_fails_if_rows_are_lost_or_doubled_or_a_loss_never_ends(found: list[Kill], why: str | None) -> None:
    assert why_failed({"round-robin": kills(1.0), "min-max": found}) == why


def test_the_operator_copies_all_of_its_state_and_gives_each_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    operator, context = Laborious(ROW_S), type("Context", (), {"partition": PARTITIONS - 1})()
    given: Any = context
    operator.open(given)
    assert operator.state_bytes() == len(operator.snapshot()) == SIZES_MIB[-1] << 20
    columns = {"key": [1, 2], "due_ns": [3, 4], "value": [5, 6]}
    assert operator.process(pa.record_batch(columns)).to_pydict() == {"key": [1, 2], "due_ns": [3, 4], "rows": [1, 1]}
    assert slept == [2 * ROW_S]


class NoneUnderWay:
    checkpoints = 0

    def under_way(self, key: PartitionKey, worker: int) -> None:
        return None


def to_repeat_s(policy: str, bytes_per_s: int, seconds: int = 300, rate: int = 300) -> np.ndarray:
    """Compute, at each tenth of a second by the clock of this loop, the seconds of work that the loss of the worker with the most
    rows would cost the survivor that has more of this work. Copies take no time."""
    shares = 1 / np.arange(1, PARTITIONS + 1) ** 1.2
    rows_per_s = (shares / shares.sum() * rate)[::WORKERS]
    replicas: dict[PartitionKey, Any] = {}
    for number, size in enumerate(SIZES_MIB):
        peers = {1: SimpleNamespace(kind=standby, live=True, incarnation=0, applied=0)}
        about = {"primary": True, "finished": False, "between_steps": True, "step_s": ROW_S, "state_bytes": size << 20}
        order = SimpleNamespace(peers=peers, end=0)
        replicas[PartitionKey(0, number)] = SimpleNamespace(applied=0, order=order, deltas=DeltaTracker(), **about)
    given: Any = NoneUnderWay()
    settings = replace(
        Settings.of(), checkpoint_policy=policy, checkpoint_interval=0.25, checkpoint_max_bytes_per_second=bytes_per_s,
        order_max_steps=1 << 30, resend_timeout=0.25,
    )  # fmt: skip
    made = CheckpointScheduler(replicas, settings, given)
    found = []
    for tick in range(seconds * 100):
        now = tick / 100
        for each, rows in zip(replicas.values(), rows_per_s, strict=True):
            each.applied = int(rows * now)
        for begin in made.next(now):
            replica = replicas[begin.key]
            replica.order.peers[1].applied = replica.applied
        if tick % 10 == 0 and now > 60:
            behind = [(each.applied - each.order.peers[1].applied) * ROW_S for each in replicas.values()]
            found.append(max(sum(behind[::2]), sum(behind[1::2])))
    return np.array(found)


def test_min_max_leaves_less_to_repeat_in_the_slow_recoveries_of_this_benchmark() -> None:
    """Without the noise of a machine: half as much. The benchmark is to measure at least 1.3 times."""
    in_turn, by_need = (np.percentile(to_repeat_s(policy, 4 << 20), 95) for policy in ("round-robin", "min-max"))
    assert in_turn >= 2 * by_need
