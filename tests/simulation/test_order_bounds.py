"""A replica that lags its primary: it holds back only this primary, and is dropped when it stands still."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from flux.replica.order_log import OrderLog
from flux.replica.replica import Replica
from flux.wire.messages import OrderEntry
from tests.simulation.checkers import Ledger
from tests.simulation.flows import chain
from tests.simulation.run import Simulation
from tests.simulation.stage_kinds import Watched
from tests.simulation.test_claims import (
    PATIENT,
    applied,
    begun,
    data_links,
    replicas,
    replicas_listed,
    run_for,
    simulation,
)
from tests.simulation.violation import Violation

STEPS_MAX = 5
#: A replica that applies nothing for this time is dropped.
STANDS_STILL_S = 0.2
#: Longer than any part of a run here.
NEVER_S = 60.0


def with_a_replica_that_stops(stands_still_s: float) -> tuple[Simulation, Replica]:
    """Start a run and stop the second replica of the first partition: it takes no more steps, but hears and answers as
    ever."""
    sim = simulation(
        (Watched,), slots=3, partitions=3, batches=150, faults=PATIENT, order_max_steps=STEPS_MAX, step_max_rows=1,
        step_timeout=stands_still_s,
    )  # fmt: skip
    sim.run_until(lambda: begun(sim))
    stopped = next(replica for replica in replicas(sim)[0, 0] if not replica.primary)
    stopped.ready = lambda now: False  # type: ignore[method-assign]
    return sim, stopped


def steps_in(sim: Simulation, seconds: float) -> Counter[tuple[int, int]]:
    """Run on for a while, and count the steps that primaries have applied meanwhile."""
    before = applied(sim)
    run_for(sim, seconds)
    return Counter({key: steps - before[key] for key, steps in applied(sim).items()})


def test_a_replica_that_stops_holds_back_its_primary_and_nobody_else() -> None:
    sim, stopped = with_a_replica_that_stops(NEVER_S)
    run_for(sim, 0.03)
    primary = replicas(sim)[0, 0][0]
    assert primary.held_back
    assert primary.order.end - stopped.applied == STEPS_MAX
    steps = steps_in(sim, 2 * STANDS_STILL_S)
    assert steps[0, 0] == 0, "for ever, but for the limit in time"
    assert min(steps[0, 1], steps[0, 2]) > 50


def test_a_replica_that_stands_still_is_replaced_and_its_primary_goes_on() -> None:
    sim, stopped = with_a_replica_that_stops(STANDS_STILL_S)
    sim.run()
    assert sim.controller.error is None
    first = [event for event in sim.controller.repairs.history if event.kind in ("drop", "repair")][:2]
    assert [(event.kind, event.partition) for event in first] == [("drop", 0), ("repair", 0)]
    assert "it has applied nothing for" in first[0].why
    assert not stopped.finished
    assert sim.counts["rows at sinks"] == 2 * 150 * 4


def test_a_replica_that_is_only_slow_sets_the_pace_of_its_primary_and_is_not_replaced() -> None:
    sim = simulation(
        (Watched,), slots=2, batches=40, faults=PATIENT, order_max_steps=STEPS_MAX, step_max_rows=1,
        step_timeout=STANDS_STILL_S,
    )  # fmt: skip
    sim.workers[1].slowness = 20.0
    sim.run()
    assert sim.counts["turns with a full order log"] > 50
    assert not [event for event in sim.controller.repairs.history if event.kind == "drop"]
    assert sim.counts["rows at sinks"] == 2 * 40 * 4


def with_ordered(steps: int) -> Any:
    """Make a replica with this number of ordered steps, none of which it has applied."""
    order = OrderLog()
    for _ in range(steps):
        order.append(OrderEntry(0.0, 0.0, []))
    return SimpleNamespace(order=order, stage=SimpleNamespace(id=0), partition=0, where="stage 0, partition 0")


@pytest.mark.parametrize(
    ("unheard_below", "longest"),
    [(0, STEPS_MAX), (STEPS_MAX + 2, STEPS_MAX + 2), (10 * STEPS_MAX, 2 * STEPS_MAX)],
)
def test_the_law_allows_more_only_where_the_primary_had_not_heard_from_all_and_at_most_once_more(
    unheard_below: int, longest: int
) -> None:
    ledger = Ledger()
    ledger.plan = chain(ledger, (Watched,), 2, order_max_steps=STEPS_MAX).plan
    ledger._ordered_unheard[0, 0] = unheard_below
    ledger.check_order(with_ordered(longest))
    with pytest.raises(Violation, match="order logs stay within their bound"):
        ledger.check_order(with_ordered(longest + 1))


def test_what_a_new_primary_orders_before_it_has_heard_from_a_replica_is_noted_and_nothing_after_that() -> None:
    """Kill the primary while the next one hears nothing from the third replica for a while."""
    sim = simulation(
        (Watched,), copies=3, slots=4, partitions=1, batches=300, faults=PATIENT, order_max_steps=STEPS_MAX,
        step_max_rows=1,
    )  # fmt: skip
    sim.run_until(lambda: begun(sim))
    key = (0, 0)
    assert sim.ledger._ordered_unheard.get(key, 0) <= STEPS_MAX, "only until the first answers"
    first, second, third = (listed.worker for listed in replicas_listed(sim, *key))
    for link in data_links(sim, sim.by_node[third]):
        link.cut_up(0.3)
        link.cut_down(0.3)
    sim.crash(sim.by_node[first], back=False)
    run_for(sim, 0.2)
    heir = sim.by_node[second].core
    assert heir is not None
    unheard = sim.ledger._ordered_unheard[key]
    assert unheard == heir.replicas[key].order.end
    run_for(sim, 1.0)
    assert sim.ledger._ordered_unheard[key] == unheard < heir.replicas[key].order.end
