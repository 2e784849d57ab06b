"""One slow consumer: the others go on until the log is full, then the input stops; nothing grows beyond its bound."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import flux

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("nothing_left_behind")]

pytest.importorskip("pyspark")
WAIT_S = 120.0
ROWS = 1_000
BATCH_BYTES = ROWS * (8 + 8 + 104 + 4)
LOG, CREDIT = 4 << 20, 256 << 10
#: Bytes that a message may be held beyond the credit, and that one batch may be beyond its rows.
SLACK = BATCH_BYTES + (16 << 10)
RSS_GROWTH = 100 << 20


def slowed(folder: Path, slices: int) -> flux.Stage:
    """Make a stage that counts rows; partition 0 takes 20 ms for each of the first slices, and then waits until the gate is
    open: so it is slow against any machine. Writes the time and the number of applied rows after each step."""
    name = str(folder)

    @flux.stage(key="k", partitions=2)
    class Slowed(flux.Operator):
        transient = ("file",)

        def open(self, context: flux.Context) -> None:
            self.context = context
            self.rows = self.slices = 0
            self.file = open(f"{name}/log-{context.partition}", "x", buffering=1)  # noqa: SIM115

        def process(self, batch: pa.RecordBatch) -> None:
            if self.context.partition == 0 and not os.path.exists(f"{name}/gate"):
                time.sleep(0.02)
                while self.slices == slices and not os.path.exists(f"{name}/gate"):
                    time.sleep(0.02)
            self.slices += 1
            self.rows += batch.num_rows
            self.file.write(json.dumps([time.time(), self.rows]) + "\n")

        def close(self) -> None:
            self.file.close()

    return Slowed


def applied(folder: Path, partition: int) -> list[tuple[float, int]]:
    """Read the time of each step, and the rows through it."""
    try:
        text = (folder / f"log-{partition}").read_text()
    except FileNotFoundError:
        return []
    return [tuple(json.loads(line)) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def rows(spark: Any, batches: int) -> Any:
    wide = "concat(cast(id as string), repeat('x', 104 - length(cast(id as string)))) as wide"
    return spark.range(0, ROWS * batches, 1, 1).selectExpr("id as k", "id as v", wide)


def start(spark: Any, folder: Path, batches: int, slices: int) -> Any:
    return slowed(folder, slices)(rows(spark, batches)).start(
        workers=2, batch_max_rows=ROWS, step_max_rows=1, log_max_bytes=LOG, credit_max_bytes=CREDIT,
        progress_interval="50ms", heartbeat_interval="20ms", step_timeout="10m",
    )  # fmt: skip


def until(look: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not look():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def assert_bounded(reports: list[dict[str, Any]]) -> None:
    assert 0 < max(report["peakLogBytes"] for report in reports) <= LOG + SLACK
    held = [worker["heldBytes"] for report in reports for worker in report["workers"]]
    assert 0 < max(held) <= CREDIT + SLACK
    for slot in (0, 1):
        rss = [w["rssBytes"] for report in reports for w in report["workers"] if w["slot"] == slot and w["rssBytes"]]
        assert max(rss) - rss[0] < RSS_GROWTH


@pytest.mark.long  # tests/flux/test_credit.py shows the rule, and the next test the bounds
def test_a_slow_consumer_does_not_slow_the_other_while_the_log_has_room(spark: Any, tmp_path: Path) -> None:
    batches = 40  # about 5 MB, of which the slow half can stay behind in the log
    assert batches * BATCH_BYTES / 2 < LOG
    query = start(spark, tmp_path, batches, slices=8)
    try:
        total = ROWS * batches
        # All that partition 1 will ever get is there when the input is through; partition 0 is still at work.
        until(lambda: query.lastProgress and query.lastProgress["totalInputRows"] == total, "input is held back")
        until(lambda: applied(tmp_path, 1)[-1][1] > 0.45 * total, "the fast consumer is held back")
        slow, fast = applied(tmp_path, 0), applied(tmp_path, 1)
        assert slow[-1][1] < 0.25 * total
        (tmp_path / "gate").touch()
        assert query.awaitTermination(WAIT_S)
    finally:
        (tmp_path / "gate").touch()
        query.stop()
    slow, fast = applied(tmp_path, 0), applied(tmp_path, 1)
    assert slow[-1][1] + fast[-1][1] == total
    assert fast[-1][0] < slow[len(slow) // 2][0]  # it was through before the slow one was half-way
    assert_bounded(query.recentProgress)


def test_when_the_log_is_full_the_input_stops_and_goes_on_later(spark: Any, tmp_path: Path) -> None:
    batches = 200  # 25 MB
    total = ROWS * batches
    query = start(spark, tmp_path, batches, slices=25)
    try:
        until(lambda: query.lastProgress and query.lastProgress["backlog"]["bytes"] >= LOG, "the log is never full")
        stopped_at = query.lastProgress["totalInputRows"]
        # As fast as the slow one takes it now.
        until(lambda: applied(tmp_path, 0)[-1][1] > stopped_at / 8, "the slow consumer stands still")
        now = query.lastProgress["totalInputRows"]
        assert now < 0.6 * total
        assert applied(tmp_path, 1)[-1][1] < 0.6 * total / 2
        (tmp_path / "gate").touch()
        assert query.awaitTermination(WAIT_S)
    finally:
        (tmp_path / "gate").touch()
        query.stop()
    assert applied(tmp_path, 0)[-1][1] + applied(tmp_path, 1)[-1][1] == total
    assert query.lastProgress["totalInputRows"] == total
    assert query.lastProgress["backlog"]["bytes"] == 0
    assert_bounded(query.recentProgress)
