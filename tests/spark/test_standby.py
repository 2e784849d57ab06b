"""Standbys in place of secondaries while workers and executors are killed: the same rows as without a fault."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from striking import KEYS, PARTITIONS, ROUNDS, ROWS, SEEN, WAIT_S, Seen, paced, rows_in, strike, until

import flux

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

TOTAL = KEYS * PARTITIONS * ROUNDS


COUNTED = flux.stage(key="key", partitions=4, replicas=2, recovery="standby", schema=SEEN)(Seen)


@pytest.mark.usefixtures("nothing_left_behind")
@pytest.mark.parametrize("executor", [pytest.param(True, marks=pytest.mark.costs_an_executor), False])
def test_after_a_kill_each_row_has_met_the_state_of_all_before_it(cluster, tmp_path: Path, executor: bool) -> None:  # type: ignore[no-untyped-def]
    folder, gate = tmp_path / "rows", tmp_path / "gate"
    flow = COUNTED(flux.source(paced(gate), ROWS, partitions=PARTITIONS))
    query = flow.to_parquet(str(folder), roll_every="200ms").start(
        spark=cluster, workers=3, progress_interval="100ms", checkpoint_interval="200ms"
    )
    try:
        until(lambda: rows_in(query) > TOTAL // 4, "a quarter of the rows")
        lost = strike(query, signal.SIGKILL, executor, stage=0)
        until(lambda: lost not in query.members(), "the loss is noticed")
        until(query.is_whole, "full replication")
        assert rows_in(query) < TOTAL, "the fault must come in mid-stream"
        gate.touch()
        assert query.awaitTermination(WAIT_S)
    finally:
        query.stop()
    assert "take-over" in {event.kind for event in query.events()}
    found = cluster.read.parquet(str(folder))
    assert found.distinct().count() == found.count() == TOTAL
    assert found.where("seen != sequence").count() == 0
