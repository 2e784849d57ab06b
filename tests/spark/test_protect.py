"""A running keyed count is protected by standbys, and by active replicas again, while workers are killed: Spark's own answer."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F  # noqa: N812
from striking import KEYS, PARTITIONS, ROWS, WAIT_S, rounds_until_told, rows_in, strike, tell, until

import flux

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900), pytest.mark.usefixtures("nothing_left_behind")]


@flux.stage(key="key", partitions=4, replicas=2)
class Counts(flux.Aggregate):
    n = flux.count()
    last = flux.max("sequence")


def by_spark(session: Any, rounds: int) -> dict[int, tuple[int, int]]:
    keys = KEYS * PARTITIONS
    rows = session.range(0, keys * rounds, 1, 4).selectExpr(f"id % {keys} as key", f"id div {keys} as sequence")
    counted = rows.groupBy("key").agg(F.count("*").alias("n"), F.max("sequence").alias("last")).collect()
    return {row.key: (row.n, row.last) for row in counted}


def kinds(query: Any) -> set[tuple[str, ...]]:
    """Return the kinds of the replicas of each partition, the primary's first."""
    found: dict[int, list[tuple[bool, str]]] = {}
    for row in query.partitions():
        if row["stage"] == "Counts":
            found.setdefault(row["partition"], []).append((row["role"] != "primary", row["kind"]))
    return {tuple(kind for _, kind in sorted(rows)) for rows in found.values()}


def flowing(query: Any) -> None:
    before = rows_in(query)
    until(lambda: rows_in(query) > before + KEYS * PARTITIONS, "rows flow")


def kill(query: Any) -> None:
    lost = strike(query, signal.SIGKILL, stage=0)
    until(lambda: lost not in query.members(), "the loss is noticed")
    until(lambda: query.is_whole() and len(query.members()) == 4, "all copies are there again")


def test_a_count_is_exact_while_its_protection_changes_and_workers_are_killed(slots: Any, tmp_path: Path) -> None:
    gate = tmp_path / "rounds"
    source = flux.source(rounds_until_told(gate), ROWS, partitions=PARTITIONS)
    begun = time.time()
    query = flux.start(
        Counts(source), spark=slots, workers=4, keep_output=True, progress_interval="100ms", checkpoint_interval="200ms",
        balance_enabled=False, replicas_allow_same_executor=True,  # Spark may start two of the four on one executor again
    )  # fmt: skip
    try:
        query.wait_until_running(WAIT_S)
        flowing(query)
        assert kinds(query) == {("active", "active")}
        query.protect("Counts", recovery="standby", timeout=WAIT_S)
        assert kinds(query) == {("active", "standby")}
        assert query.status["protection"]["Counts"] == "1 active replica and 1 standby"
        flowing(query)
        until(lambda: query.lastProgress["stages"][0].get("checkpointBytes"), "checkpoints are kept, and spoken of")
        kill(query)
        assert kinds(query) == {("active", "standby")}, "a standby has taken over, and another has come"
        flowing(query)
        with pytest.raises(
            flux.QueryTimeout, match=r"partitions? of Counts, from 1 active replica and 1 standby to 2 active"
        ):
            query.protect("Counts", recovery="active", timeout=0.001)
        kill(query)
        assert kinds(query) == {("active", "active")}
        flowing(query)
        query.protect("Counts", recovery="active", timeout=WAIT_S)  # as it is
        query.protect("Counts", replicas=1, timeout=WAIT_S)
        assert kinds(query) == {("active",)}
        query.protect("Counts", replicas=2, recovery="standby", timeout=WAIT_S)
        with pytest.raises(flux.UsageError, match="replicas must be 1 to 3; got 4"):
            query.protect("Counts", replicas=4)
        with pytest.raises(flux.UsageError, match="there is no stage Count; there are Counts"):
            query.protect("Count", replicas=2)
        with pytest.raises(flux.UsageError, match="say what is to change"):
            query.protect("Counts")
        rounds = tell(gate, begun)
        out = {row.key: (row.n, row.last) for row in query.toDF().collect()}
    finally:
        query.stop()
    events = [event.kind for event in query.events()]
    assert events.count("protected") == 4
    assert {"loss", "take-over", "repair"} <= set(events)
    assert "divergence" not in events
    assert out == by_spark(slots, rounds)
