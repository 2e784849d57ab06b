"""All queries of Nexmark as one query over one source, with disorder and late events, while an executor is killed and
partitions move: row by row the answers of the oracle."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from striking import WAIT_S, rows_in, strike, until

import flux
from benchmarks.nexmark import checkout
from benchmarks.nexmark.held import HeldEvents
from benchmarks.nexmark.outputs import KeptOutput, kept, late_rows
from examples.nexmark.generator import Events, Generator
from spark_integration.query.query import Query

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600), pytest.mark.usefixtures("nothing_left_behind")]

EVENTS, PARTITIONS, PACE = 100_000, 2, 25_000
#: Fifty seconds of event time, so that there are some windows of ten seconds.
OPTIONS: dict[str, Any] = {"per_second": 2_000, "disorder": 1_000, "late": 0.03}
#: Queries that pass rows on: one partition of each does.
STATELESS = ("q0", "q1", "q2", "q10", "q13", "q14", "q21", "q22")


def move_one(query: Query, stage: str) -> None:
    """Move the primary of a partition of a stage to a worker without a replica of it."""
    replicas = [each for each in query.partitions() if each["stage"] == stage and each["partition"] == 0]
    held = {each["worker"] for each in replicas}
    (free, *_) = sorted(set(query.members()) - held)
    (primary,) = (each["worker"] for each in replicas if each["role"] == "primary")
    query.move(stage, 0, free, source=primary, timeout=WAIT_S)


def kinds(query: Query) -> set[str]:
    return {event.kind for event in query.events()}


@pytest.mark.costs_an_executor
def test_all_queries_of_nexmark_give_the_answers_of_the_oracle_among_faults(cluster: Any, tmp_path: Path) -> None:
    gate, names = tmp_path / "gate", checkout.QUERIES
    nexmark = checkout.flows(HeldEvents(Generator(EVENTS, PARTITIONS, PACE, **OPTIONS), gate))
    flows = {name: checkout.query(name, nexmark).withStage(name=name) for name in names}
    flows |= {name: flows[name].withStage(partitions=1) for name in STATELESS}
    query = flux.start(
        *(flow.foreach_batch(KeptOutput(tmp_path / name)) for name, flow in flows.items()),
        spark=cluster, workers=3, partitions=2, replicas=2, progress_interval="500ms",
        watermark_interval="200ms",
    )  # fmt: skip
    try:
        query.wait_until_running(WAIT_S)
        until(lambda: rows_in(query) >= EVENTS * 0.1, "the first events")
        move_one(query, "q11")
        until(query.is_whole, "every partition has its replicas")
        strike(query, signal.SIGKILL, executor=True)
        until(lambda: "take-over" in kinds(query), "the loss is noticed")
        until(query.is_whole, "every partition has its replicas again")
        gate.touch()
        assert query.awaitTermination(WAIT_S)
        late, seen = late_rows(query), kinds(query)
    finally:
        query.stop()
    oracle = checkout.oracle(Events(EVENTS, PARTITIONS, **OPTIONS).ask_for_all())
    assert late == oracle.late() > 0.025 * EVENTS
    assert {"take-over", "move"} <= seen
    told = [
        each for name in names for each in oracle.differences(name, kept(tmp_path / name, oracle.answer(name).schema))
    ]
    assert told == []
