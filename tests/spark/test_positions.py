"""A reader with positions of its own, which never cuts its rows at the same places, while its worker is killed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from striking import KEYS, LAST_ROUNDS, PARTITIONS, ROUND_S, ROUNDS, ROWS, SEEN, WAIT_S, Seen, rows_in, until

import flux

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

TOTAL = KEYS * PARTITIONS * ROUNDS


def topic(gate: Path) -> Callable[[int, list[int] | None], Iterator[flux.Positioned | None]]:
    """Row n of a partition is due n / KEYS rounds after its reader begins, the last ones when there is a file at ``gate``.
    A batch has the due rows once there are enough, or a part of these."""
    gate_path = str(gate)

    def read(partition: int, start: list[int] | None) -> Iterator[flux.Positioned | None]:
        at = first = start[0] if start else 0
        begun, rng = time.time(), random.Random()
        while at < KEYS * ROUNDS:
            due = first + int((time.time() - begun) / ROUND_S * KEYS)
            end = KEYS * (ROUNDS if os.path.exists(gate_path) else ROUNDS - LAST_ROUNDS)
            rows = min(due, end) - at
            if rows < min(KEYS // 2, end - at) or rows <= 0:
                yield None
                continue
            numbers = np.arange(at, at + rng.randint(1, rows))
            at += len(numbers)
            keys = numbers % KEYS * PARTITIONS + partition
            batch = pa.record_batch([pa.array(keys), pa.array(numbers // KEYS)], schema=ROWS)
            yield flux.Positioned(batch, [at])

    return read


@pytest.mark.usefixtures("nothing_left_behind")
@pytest.mark.long  # test_columns_of_flows.py shows the same with conditions on the source
@pytest.mark.parametrize("recovery", ["active", "standby"])
def test_rows_cut_elsewhere_each_time_are_counted_once_and_in_order(cluster, tmp_path: Path, recovery: str) -> None:  # type: ignore[no-untyped-def]
    folder, gate = tmp_path / "rows", tmp_path / "gate"
    counted = flux.stage(key="key", partitions=4, replicas=2, recovery=recovery, schema=SEEN)(Seen)
    flow = counted(flux.source(topic(gate), ROWS, partitions=PARTITIONS, positions=True))
    query = flow.to_parquet(str(folder), roll_every="200ms").start(
        spark=cluster, workers=3, progress_interval="100ms", checkpoint_interval="200ms"
    )
    try:
        for share in (4, 2):
            until(lambda share=share: rows_in(query) > TOTAL // share * 0.8, "some of the rows")  # type: ignore[misc]
            table = query._server.core.table
            assert table is not None
            reader = table.sources[0][0]
            os.kill(query.members()[reader].about.pid, signal.SIGKILL)
            until(lambda lost=reader: lost not in query.members(), "the loss is noticed")  # type: ignore[misc]
            until(query.is_whole, "full replication")
        assert rows_in(query) < TOTAL, "the faults must come in mid-stream"
        gate.touch()
        assert query.awaitTermination(WAIT_S)
    finally:
        query.stop()
    found = cluster.read.parquet(str(folder)).toPandas()
    assert len(found) == TOTAL
    assert found.groupby(["key", "sequence"]).size().max() == 1
    assert (found["sequence"] == found["seen"]).all(), "each row has met the state of all before it"
