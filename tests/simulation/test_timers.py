"""Timers survive all that rows survive: stories, each with the rule without which it goes wrong.

Rows flow for 60 ms here, and the sources end a second later: rows passed on in between have been passed on by timers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from controller.balance.load import Move
from flux.replica.order_log import OrderLog
from flux.replica.replica import Replica
from flux.replica.step_queue import StepQueue
from flux.wire.messages import OrderEntry
from flux.worker.core import WorkerCore
from tests.simulation.faults import Faults
from tests.simulation.flows import chain
from tests.simulation.run import Result, Simulation, outcome
from tests.simulation.stage_kinds import PAUSES_S, Delay, Sink

Patch = pytest.MonkeyPatch

#: The time at which all rows are in and some are still held back, and the time at which all have been passed on.
HELD_S, PASSED_ON_S = 0.2, 0.8
#: From the time of a timer to its step, on a worker that has nothing else to do: some turns of its loop.
PUNCTUAL_S = 0.002


def simulation(copies: int = 2, slots: int = 3, seed: int = 0, faults: Faults | None = None, **flow: Any) -> Simulation:
    patient = Faults(patient=True, calm_after_s=1.0)
    return Simulation(seed, faults or patient, copies, slots, lambda ledger: chain(ledger, (Delay,), copies, **flow))


def run_until(sim: Simulation, seconds: float) -> None:
    """Run until this time after the start."""
    end = 1000.0 + seconds
    sim.world.at(end, lambda: None)
    sim.run_until(lambda: sim.world.now >= end)


def primaries(sim: Simulation, stage: int = 0) -> list[tuple[WorkerCore, Replica]]:
    cores = [process.core for process in sim.workers if process.core is not None and not process.dead]
    return [(c, r) for c in cores for (s, _), r in c.replicas.items() if s == stage and r.primary]


def held(sim: Simulation) -> int:
    return sum(len(replica.operator.state["held"]) for _, replica in primaries(sim))  # type: ignore[attr-defined]


def at_sink(sim: Simulation) -> int:
    assert sim.dataflow.sinks[0].kind is Sink
    return sum(len(replica.operator.state["rows"]) for _, replica in primaries(sim, 1))  # type: ignore[attr-defined]


def total(sim: Simulation) -> int:
    return len(sim.dataflow.sinks[0].model({}))


# ---- stories


def all_passed_on(sim: Simulation) -> bool:
    run_until(sim, PASSED_ON_S)
    if held(sim) or at_sink(sim) < total(sim):
        return False
    sim.run()
    return sim.controller.error is None


def in_peace() -> bool:
    sim = simulation()
    run_until(sim, HELD_S)
    assert held(sim) > 10
    return all_passed_on(sim)


def after_a_take_over() -> bool:
    """Tell how a primary is lost. The new one has heard only the order, and hears of no row any more."""
    sim = simulation(slots=2)
    run_until(sim, HELD_S)
    sim.crash(sim.workers[0], back=False)
    assert held(sim) > 10
    return all_passed_on(sim) and bool(sim.counts["ticks ordered by a promoted secondary"])


def after_a_move() -> bool:
    """Tell how the only copy is moved. The new one knows its timers from the state alone."""
    sim = simulation(copies=1, slots=2)
    run_until(sim, HELD_S)
    other = {core.worker for core, _ in primaries(sim)}
    for core, replica in primaries(sim):
        (target,) = other - {core.worker}
        sim.server.perform(
            sim.controller.move([Move(0, replica.partition, core.worker, target)], "by hand", sim.world.now)
        )
    assert held(sim) > 10
    return all_passed_on(sim) and bool(sim.counts["ticks ordered by a moved copy"])


def after_a_repair() -> bool:
    """Tell how both copies are made after the timers were set, and the first of them is lost as well."""
    sim = simulation()
    run_until(sim, HELD_S)
    victims = [process for process in sim.workers if process.core is not None and process.core.replicas]
    sim.crash(victims[0])
    sim.run_until(lambda: not sim.returning and sim.controller.phase == "running" and sim.all_in and sim.settled)
    sim.crash(victims[1], back=False)
    return all_passed_on(sim) and bool(sim.counts["copies of state with timers"])


STORIES = [in_peace, after_a_take_over, after_a_move, after_a_repair]


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_timers_fire_while_nothing_else_happens(story: Callable[[], bool]) -> None:
    assert story()


def test_a_timer_fires_at_its_time() -> None:
    late: list[float] = []

    class Punctual(Delay):
        def on_timer(self, name: str) -> Any:
            if name == "pass on":
                late.append(self.context.now - self.state["held"][0][0])
            yield from super().on_timer(name)

    sim = Simulation(0, Faults(), 2, 3, lambda ledger: chain(ledger, (Punctual,), 2))
    for process in sim.workers:
        process._skew = 0.0
    sim.run()
    assert len(late) > 100
    assert min(late) >= 0
    assert max(late) < PUNCTUAL_S + min(PAUSES_S)


def test_replicas_fire_at_the_same_steps_whatever_their_clocks_say() -> None:
    sim = simulation(copies=3)
    run_until(sim, PASSED_ON_S)
    steps: dict[tuple[int, int], set[Any]] = {}
    for watch in sim.ledger._watches.values():
        key = watch.replica.stage.id, watch.replica.partition
        steps.setdefault(key, set()).add(tuple(watch.orders[step] for step in range(40)))
    assert all(len(each) == 1 for each in steps.values())
    assert sim.counts["ticks applied by secondaries"] > 100
    sim.run()


# ---- variants without a rule


def leaves_timers_out_of_the_copy(patch: Patch) -> None:
    adopt = Replica.adopt

    def broken(self: Replica, state: Any) -> None:
        adopt(self, {**state, "timers": {}})

    patch.setattr(Replica, "adopt", broken)


def keeps_what_a_fresh_operator_has_set(patch: Patch) -> None:
    """Add the timers of a copy to those of the fresh operator, in place of replacing these."""
    adopt = Replica.adopt

    def broken(self: Replica, state: Any) -> None:
        adopt(self, {**state, "timers": dict(self.context.timers.pending) | {"stale": 1.0} | state["timers"]})

    patch.setattr(Replica, "adopt", broken)


def never_wakes_up(patch: Patch) -> None:
    patch.setattr(WorkerCore, "_wake_for_timers", lambda *given: None)


def fires_by_its_own_clock(patch: Patch) -> None:
    """Let a secondary go by its own clock, and not by the time in the order."""
    fired = Replica._fired

    def broken(self: Replica) -> Any:
        self.context.now += 0.0 if self.primary else 0.05
        return fired(self)

    patch.setattr(Replica, "_fired", broken)


def fires_without_being_told(patch: Patch) -> None:
    """Let a secondary fire timers as they are due, without an order."""
    begin = Replica._begin

    def broken(self: Replica, now: float) -> Any:
        if not self.primary:
            for name in self.context.timers.due(self.order[self.applied].now):
                if self.context.timers.take(name, now):
                    list(self.operator.on_timer(name) or ())
        return begin(self, now)

    patch.setattr(Replica, "_begin", broken)


def lets_rows_go_first(patch: Patch) -> None:
    """Let rows go before due timers, also rows of a later time."""
    tick_due = StepQueue.tick_due
    patch.setattr(StepQueue, "tick_due", lambda self, order, now: not self.by_stream and tick_due(self, order, now))
    decide = StepQueue.decide

    def broken(self: StepQueue, order: OrderLog, now: float, busy_s: float) -> OrderEntry:
        self.latest = max(self.latest, now)
        return decide(self, order, now, busy_s)

    patch.setattr(StepQueue, "decide", broken)


def goes_by_the_clock_of_a_new_primary(patch: Patch) -> None:
    lead = Replica.lead

    def broken(self: Replica, *given: Any) -> None:
        lead(self, *given)
        self.waits.latest = 0.0

    patch.setattr(Replica, "lead", broken)


#: Workers die again and again while rows flow and are held back; they are slow, so that rows wait for them.
CRASHES = Faults(calm_after_s=1.5, delay_s=0.005, crashes_per_s=4.0, slowness=60.0, loss_probability=0.05, patient=True)
FIRES, TIME = "a timer fires at its time", "time never goes back"
ALIKE = {"replicas take the same steps", "equal sequences are equal batches", "replicas agree", FIRES, TIME}


def under_crashes(seed: int) -> Result:
    return outcome(simulation(seed=seed, faults=CRASHES, step_max_rows=1))


@pytest.mark.parametrize("seed", range(8))
def test_every_law_is_kept_while_workers_die(seed: int) -> None:
    result = under_crashes(seed)
    assert result.ok, result


@pytest.mark.parametrize(
    ("break_it", "laws"),
    [
        (never_wakes_up, {"a ready replica takes its step"}),
        (fires_by_its_own_clock, ALIKE),
        (fires_without_being_told, ALIKE),
        (lets_rows_go_first, {FIRES}),
        (goes_by_the_clock_of_a_new_primary, {TIME}),
        (leaves_timers_out_of_the_copy, ALIKE | {"only a diverging replica is named"}),
        (keeps_what_a_fresh_operator_has_set, ALIKE | {"only a diverging replica is named"}),
    ],
)
def test_a_broken_variant_is_caught(monkeypatch: Patch, break_it: Callable[[Patch], None], laws: set[str]) -> None:
    break_it(monkeypatch)
    caught = next((result for result in map(under_crashes, range(1, 9)) if not result.ok), None)
    assert caught is not None, "it got through"
    assert caught.law in laws, str(caught)


def test_a_copy_without_timers_forgets_what_it_holds_back(monkeypatch: Patch) -> None:
    leaves_timers_out_of_the_copy(monkeypatch)
    assert not after_a_move()


def test_a_new_primary_that_does_not_look_at_its_timers_lets_them_lie(monkeypatch: Patch) -> None:
    never_wakes_up(monkeypatch)
    monkeypatch.setattr("tests.simulation.checkers.Ledger.check_idle", lambda *given: None)
    assert not after_a_take_over()
