"""Replicas without a common order, among faults: equal batches, and no gap when one of them is lost or stands still."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

import flux
from flux.arguments import MARKS, STEPS
from flux.dataflow.plan import ById
from tests.simulation import mixes, timed_flows
from tests.simulation import timed_kinds as kinds
from tests.simulation.checkers import Ledger
from tests.simulation.faults import Faults
from tests.simulation.flows import Dataflow
from tests.simulation.run import Simulation
from tests.simulation.runs import Runs, runs_of
from tests.simulation.timed_rows import SECOND, TIME

MIXES = (mixes.MARKS, mixes.MARKS_FAULTLESS, mixes.MARKS_UNEVEN, mixes.MARKS_REPAIRS)
SEEDS = range(30)


@pytest.fixture(scope="module")
def results() -> Runs:
    return runs_of(MIXES, SEEDS, few=8)


@pytest.mark.timeout(3600)
def test_replicas_without_an_order_keep_every_law(results: Runs) -> None:
    broken = results.broken()
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("event", ["batches made again", "take-overs", "repairs", "moves done"])
def test_things_happen_that_endanger_them(results: Runs, event: str) -> None:
    assert results.happens(event)


#: Virtual seconds between two batches of the source and between two ends of windows; windows of event time; the delay by which a
#: result may be later than usual when a replica is lost or stands still.
PERIOD_S, WINDOW_S, WINDOW, DELAY_S = 0.005, 0.05, 10 * SECOND, 0.03


def steady(order: str, holder: dict[str, Any]) -> Any:
    """Return the maker of a flow: a source whose rows come every few milliseconds, and windows that end every 50 ms, in two
    replicas."""

    def make(ledger: Ledger) -> Dataflow:
        builder = timed_flows._Builder(
            random.Random(0), ledger, 2, 2, lambda: holder["sim"].world.now, None, None
        )  # fmt: skip
        builder.idles = False
        count, ticks = 300, int(WINDOW_S / PERIOD_S)
        data = timed_flows.TimedData("source0", [], clock=builder.clock, delay=0)
        data.batches = [[[builder._row(WINDOW * number // ticks)] for number in range(count)]]  # type: ignore[misc]
        data.due = [[PERIOD_S * number for number in range(count)]]
        given = flux.source(lambda p, start: data.seeking(p, start), timed_flows.TIMED, 1, "source0")
        node = timed_flows.TimedNode(given, "source0", data=data, time=TIME, rows=data.on_time, raw=given)
        node.given = given.withWatermark(TIME, "0 seconds")
        builder.nodes.append(node)
        window = flux.window(TIME, "10 seconds")
        counts = builder._stage(kinds.Counts, [node], ("key",), "append", window, 1)
        counts.time = "window_end"
        counts.rows = lambda: timed_flows._answer(node.rows(), window, False, True)
        builder.nodes.append(counts)
        builder.outside = False
        builder.sink(counts)
        flow = timed_flows._compiled(builder, random.Random(1), False, 0.0)
        settings = replace(flow.plan.settings, log_max_bytes=1 << 20, credit_max_bytes=1 << 20, ack_interval=0.005)
        stages = ById(replace(stage, order=order) if stage.id == 0 else stage for stage in flow.plan.stages)
        return replace(flow, plan=replace(flow.plan, stages=stages, settings=settings), credit_floor=1 << 20)

    return make


def longest_gap(order: str, strike: str) -> float:
    """Return the longest virtual time between two batches of results when one replica is struck."""
    holder: dict[str, Any] = {}
    sim = Simulation(7, Faults(patient=True, calm_after_s=1.0), 2, 4, steady(order, holder))
    holder["sim"] = sim
    times: list[float] = []
    edge = sim.plan.stages[0].edges_out[0]
    first_given = sim.ledger._first_given

    def noted(stream: Any, entry: Any, maker: Any) -> None:
        if stream.edge == edge:
            times.append(sim.world.now)
        first_given(stream, entry, maker)

    sim.ledger._first_given = noted  # type: ignore[method-assign]

    def hit() -> None:
        assert sim.controller.table is not None
        reader = sim.controller.table.sources[0][0]
        consumers = {replica.worker for replica in sim.controller.table.stages[1][0]}
        listed = [replica.worker for replica in sim.controller.table.stages[0][0]]
        # The fault strikes the first listed worker, but never the worker that reads the source.
        struck = next(worker for worker in [*listed, *consumers] if worker != reader)
        victim = sim.by_node[struck]
        if strike == "killed":
            sim.crash(victim, back=True)
        else:
            victim.pause(0.2)

    sim.world.after(0.6, hit)
    sim.run()
    after = [time for time in times if time > 0.3]
    return max(later - earlier for earlier, later in pairwise(after))


@pytest.mark.parametrize("strike", ["killed", "paused"])
def test_results_go_on_when_one_replica_is_lost_or_stands_still(strike: str) -> None:
    """Compare with replicas that have a common order. Their results wait for the other replica, or until its loss is noticed."""
    assert longest_gap(MARKS, strike) <= WINDOW_S + DELAY_S
    if strike == "paused":
        assert longest_gap(STEPS, strike) >= 0.15
