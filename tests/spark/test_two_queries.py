"""Two queries in one session, with other keys: a fault of one, or a command to it, has no effect on the other."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from endless import WAIT_S, command, endless, parsed, rows_flow, until

import flux

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600), pytest.mark.usefixtures("nothing_left_behind")]

ROWS = pa.schema([("user", pa.int64()), ("page", pa.string()), ("n", pa.int64())])
SOURCES, BATCHES, BATCH_ROWS = 2, 100, 200
PARTITIONS = [("same", partition) for partition in range(3)] + [("Totals", partition) for partition in range(4)]


def batch(partition: int, number: int) -> pa.RecordBatch:
    at = np.arange(number * BATCH_ROWS, (number + 1) * BATCH_ROWS)
    pages = [f"page {page}" for page in at % 13]
    return pa.record_batch([pa.array((at * 7 + partition) % 101), pa.array(pages), pa.array(at % 5)], schema=ROWS)


def until_there_is(gate: Path) -> Callable[[int, int], Iterator[pa.RecordBatch | None]]:
    """Make a reader of a batch every ten milliseconds; the last ones come when there is a file at ``gate``."""
    gate_path = str(gate)

    def read(partition: int, start: int) -> Iterator[pa.RecordBatch | None]:
        begun = time.monotonic() - start * 0.01
        for number in range(start, BATCHES):
            while time.monotonic() < begun + number * 0.01:
                yield None
            while number == BATCHES - 5 and not os.path.exists(gate_path):
                yield None
            yield batch(partition, number)

    return read


class Totals(flux.Aggregate):
    rows = flux.count()
    total = flux.sum("n")


def started(session: Any, gate: Path, key: str, workers: int) -> Any:
    """Start a query with the name of its gate."""
    same = flux.stage(key=key, partitions=3, replicas=2, name="same")(lambda rows: rows)
    totals = flux.stage(key=key, partitions=4, replicas=2, name="Totals")(Totals)
    source = flux.source(until_there_is(gate), ROWS, partitions=SOURCES)
    return totals(same(source)).start(
        spark=session, workers=workers, keep_output=True, queryName=gate.name, progress_interval="50ms",
        workers_timeout=WAIT_S, heartbeat_timeout="5s", balance_enabled=False,
    )  # fmt: skip


def by_hand(key: str) -> dict[Any, tuple[int, int]]:
    """Compute rows and total of every key in plain Python."""
    rows: Counter[Any] = Counter()
    total: Counter[Any] = Counter()
    for partition in range(SOURCES):
        for number in range(BATCHES):
            for row in batch(partition, number).to_pylist():
                rows[row[key]] += 1
                total[row[key]] += row["n"]
    return {each: (rows[each], total[each]) for each in rows}


def answer(query: Any, gate: Path) -> dict[Any, tuple[int, int]]:
    """Let the last rows come, and return the rows of the ended query."""
    gate.touch()
    return {row[0]: (row["rows"], row["total"]) for row in query.toDF().collect()}


def holders(query: Any, stage: str, partition: int) -> list[int]:
    """List the workers with a replica of this partition."""
    return [r["worker"] for r in query.partitions() if (r["stage"], r["partition"]) == (stage, partition)]


def kinds(query: Any) -> set[str]:
    return {event.kind for event in query.events()}


def test_a_worker_of_one_is_killed_and_the_other_is_moved_about_and_ends(slots: Any, tmp_path: Path) -> None:
    clicks = started(slots, tmp_path / "clicks", "user", workers=2)
    views = started(slots, tmp_path / "views", "page", workers=3)
    try:
        for query in (clicks, views):
            rows_flow(query)
        with pytest.raises(flux.UsageError, match=r"1 worker \+ 1 for the Spark tasks of query clicks that .* fetch"):
            endless().start(spark=slots, workers=1)

        os.kill(next(iter(clicks.members().values())).about.pid, signal.SIGKILL)
        nameless = command("rebalance", "--policy", "even", "--yes")
        assert (nameless.exit_code, "clicks (" in nameless.output, "views (" in nameless.output) == (2, True, True)
        assert len(parsed("list")["queries"]) == 2
        target = min(views.members())
        for stage, partition in PARTITIONS:  # uneven by hand: one worker has something of all of them; then even again
            if target not in holders(views, stage, partition):
                moved = command("move", f"{stage}/{partition}", "--to", str(target), "-q", views.id[:13])
                assert moved.exit_code == 0, moved.output
        carried = parsed("rebalance", "views", "--policy", "even", "--yes")
        assert carried["carried_out"]
        assert all(move["done"] for move in carried["moves"])

        assert answer(views, tmp_path / "views") == by_hand("page")
        assert not views.isActive
        until(lambda: "take-over" in kinds(clicks) and clicks.is_whole(), "the other is whole again")
        assert clicks.phase == "running"
        assert answer(clicks, tmp_path / "clicks") == by_hand("user")
    finally:
        clicks.stop()
        views.stop()
    assert kinds(views) == {"move"}
    assert {"loss", "take-over", "repair"} <= kinds(clicks)
    assert "move" not in kinds(clicks)
