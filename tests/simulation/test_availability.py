"""Tentative results in simulated runs: sources fall silent, workers die, and every law of availability holds; and each rule that
is left out breaks a law. With availability on and no silent source, old runs stay as they were."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from flux.dataflow.availability import Availability
from flux.dataflow.plan import ById
from flux.exchange.producer import Producer
from flux.operators.tentative import BARRIER, tentative_kind
from flux.shadows.overlay import Overlay
from flux.shadows.peeked_operator import PeekedOperator
from flux.shadows.shadow import CorrectionDone, MarkOutput, Shadow, Undone
from flux.shadows.shadow_hosts import ShadowHosting
from flux.wire.messages import Tentative
from flux.worker.core import WorkerCore
from flux.worker.effects import Effect
from partitioning.ids import ACTIVE, StreamId
from tests.simulation import timed_flows
from tests.simulation.availability import (
    AVAILABILITY_FROM,
    DONE,
    ONCE,
    AvailabilityCase,
    AvailabilitySimulation,
    SilentData,
    TentativeDelivery,
    add_partition,
)
from tests.simulation.availability_wide import LOGS, WIDE_FROM, WideCase, WideSimulation, check_same
from tests.simulation.faults import Faults
from tests.simulation.outside import Delivery
from tests.simulation.story_hashes import tell
from tests.simulation.timed_rows import SECOND
from tests.simulation.violation import Violation

#: Faults with workers that die and come back, broken connections and lost single messages.
HARD = Faults(
    calm_after_s=7.0,
    crashes_per_s=0.3,
    breaks_per_s=1.0,
    loss_probability=0.05,
    cuts_per_s=0.5,
    cut_s=0.5,
    patient=True,
)


def runs(seeds: tuple[int, ...], faults: Faults | None = None) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        sim = AvailabilitySimulation(AVAILABILITY_FROM + seed, faults)
        sim.run()
        counts.update(sim.counts)
    return counts


def test_runs_with_silent_sources_keep_all_laws() -> None:
    counts = runs((1, 4, 5))
    assert counts["tentative batches shown"] > 10
    assert counts["corrections done"] >= 3
    assert counts["windows shown within the bound"] > 5


def test_runs_with_silent_sources_and_lost_workers_keep_all_laws() -> None:
    counts = runs((0, 1, 2, 4), HARD)
    assert counts["tentative batches shown"] > 10
    assert counts["take-overs"] > 1


@pytest.mark.long
def test_many_runs_keep_all_laws() -> None:
    runs(tuple(range(100, 140)))
    runs(tuple(range(200, 240)), HARD)


@pytest.mark.parametrize("seed", [16, 21, 18, 39])
def test_wide_runs_keep_all_laws(seed: int) -> None:
    """Run one seed of each kind of faults: silence alone, lost workers, moves, cut links."""
    sim = WideSimulation(WIDE_FROM + seed)
    sim.run()
    assert sim.counts["tentative batches shown"]


@pytest.mark.long
def test_many_wide_runs_keep_all_laws() -> None:
    counts: Counter[str] = Counter()
    for seed in range(100):
        sim = WideSimulation(WIDE_FROM + seed)
        sim.run()
        counts.update(sim.counts)
    assert counts["runs with an input that stays away"]
    assert counts["take-overs from replay points"]
    assert counts["moves done"] > 10


def test_the_stable_lane_has_as_many_rows_with_availability_as_without() -> None:
    check_same(WIDE_FROM + 16)


@pytest.mark.parametrize("seed", [60_000_000_001, 70_000_000_003])
def test_with_nothing_silent_a_run_is_what_it_is_without_availability(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare both runs line by line: each message, step and commit, at its time. X is ten minutes, so that no spell of a source
    is a failure."""
    before, draw, timed = list(tell(seed).lines()), timed_flows.draw, []

    def with_availability(*given: Any, **more: Any) -> Any:
        flow = draw(*given, **more)
        stages = []
        for stage in flow.plan.stages:
            if stage.timed_inputs and stage.output_schema is not None and tentative_kind(stage.make()) != BARRIER:
                stage = replace(stage, availability=Availability(600_000_000))
                timed.append(stage.name)
            stages.append(stage)
        return replace(flow, plan=replace(flow.plan, stages=ById(stages)))

    monkeypatch.setattr(timed_flows, "draw", with_availability)
    assert list(tell(seed).lines()) == before
    assert timed


def keeps_the_overlay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Overlay, "void", lambda *given: False)
    patch.setattr(Overlay, "applied", lambda *given: [])


def changes_the_state(patch: pytest.MonkeyPatch) -> None:
    """Let a tentative mark close its windows."""
    mark = PeekedOperator.mark

    def marks(self: PeekedOperator, after: int, through: int, overlay: Any) -> Any:
        given = mark(self, after, through, overlay)
        for _ in self._replica.operator._flux_groups._close(through):  # type: ignore[attr-defined]
            pass
        return given

    patch.setattr(PeekedOperator, "mark", marks)


def gives_tentative_rows_to_the_log(patch: pytest.MonkeyPatch) -> None:
    do = ShadowHosting._do

    def does(self: ShadowHosting, hosted: Any, effects: Any) -> None:
        for effect in effects:
            for batch in effect.batches if isinstance(effect, MarkOutput) else ():
                for outlet in hosted.replica.outlets:
                    outlet.send(batch, 0.0, str)
        do(self, hosted, effects)

    patch.setattr(ShadowHosting, "_do", does)


def forgets_to_undo(patch: pytest.MonkeyPatch) -> None:
    taken = Shadow._taken
    patch.setattr(Shadow, "_taken", lambda self: [each for each in taken(self) if not isinstance(each, Undone)])


def waits_for_the_whole_bound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("flux.shadows.shadow.ALPHA", 1.5)


def acks_tentative_rows(patch: pytest.MonkeyPatch) -> None:
    """Let a shadow that takes tentative rows count the elements that they stand for as received."""
    take = ShadowHosting._on_tentative

    def takes(self: ShadowHosting, message: Tentative, *given: Any) -> None:
        take(self, message, *given)
        inbound = self._streams.get(StreamId(message.edge, message.producer))
        for partition in message.partitions if inbound is not None else ():
            if inbound is not None and inbound.received[partition] <= message.sequence:
                inbound.received.join(partition, message.sequence + 1, ())

    patch.setattr(ShadowHosting, "_on_tentative", takes)


def forgets_to_undo_after_a_take_over(patch: pytest.MonkeyPatch) -> None:
    """Let a new primary leave the tentative rows shown by earlier ones."""
    patch.setattr(TentativeDelivery, "begins", Delivery.begins)
    made = Shadow.__init__

    def makes(self: Shadow, *given: Any, **more: Any) -> None:
        made(self, *given, **more)
        self._effects.clear()

    patch.setattr(Shadow, "__init__", makes)


def keeps_logs_for_a_redo(patch: pytest.MonkeyPatch) -> None:
    """Keep rows of healthy streams in their logs until the failure is over, as if all of them were applied again then."""
    poll, evict = WorkerCore._poll, Producer._evict
    failing: set[int] = set()

    def polls(self: WorkerCore, now: float) -> Iterator[Effect]:
        fails = any(hosted.shadow.state for hosted in self.shadows._shadows.values())
        (failing.add if fails else failing.discard)(self.worker)
        return poll(self, now)

    def evicts(self: Producer) -> None:
        if not failing:
            evict(self)

    patch.setattr(WorkerCore, "_poll", polls)
    patch.setattr(Producer, "_evict", evicts)


def says_more_is_corrected_than_is(patch: pytest.MonkeyPatch) -> None:
    """Report the end of a correction also for ten seconds of windows that are still to come."""
    settle = Shadow._settle

    def settles(self: Shadow, now: float) -> None:
        settle(self, now)
        self._effects = [
            CorrectionDone(each.through + 10 * SECOND) if isinstance(each, CorrectionDone) else each
            for each in self._effects
        ]

    patch.setattr(Shadow, "_settle", settles)


class SilentTwice(AvailabilitySimulation):
    """A run in which one failure follows another."""

    def drawn(self, rng: random.Random) -> AvailabilityCase:
        data = SilentData("readings", [], clock=lambda: self.world.now, delay=0)
        add_partition(data, rng, 9.0, [(1.0, 3.5), (5.5, 8.0)])
        add_partition(data, rng, 9.0, [])
        return AvailabilityCase(1.5, ("process", "process"), 9.0, 0.0, False, data)


class SilentAlone(WideSimulation):
    """A run in which one of two inputs is missing for five seconds, and nothing else fails."""

    def drawn(self, rng: random.Random) -> WideCase:
        case = super().drawn(rng)
        case.recovery, case.forever = ACTIVE, False
        for drawn in case.data.batches, case.data.due, case.data.silences:
            drawn.clear()  # type: ignore[attr-defined]
        add_partition(case.data, rng, 6.0, [(1.0, 6.0)])
        add_partition(case.data, rng, 6.0, [])
        return case


@pytest.mark.long
@pytest.mark.parametrize(
    ("broken", "make", "law"),
    [
        (says_more_is_corrected_than_is, lambda: SilentTwice(AVAILABILITY_FROM), DONE),
        (keeps_logs_for_a_redo, lambda: SilentAlone(WIDE_FROM), LOGS),
    ],
    ids=["corrections", "logs"],
)
def test_a_directed_run_without_a_rule_breaks_a_law(
    broken: Callable[[pytest.MonkeyPatch], None],
    make: Callable[[], AvailabilitySimulation],
    law: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make().run()
    broken(monkeypatch)
    with pytest.raises(Violation) as violation:
        make().run()
    assert violation.value.law == law


@pytest.mark.parametrize(
    ("broken", "seed", "law"),
    [
        (acks_tentative_rows, 16, "an ack never exceeds what was applied"),
        (forgets_to_undo_after_a_take_over, 6, ONCE),
    ],
)
def test_a_wide_run_without_a_rule_breaks_a_law(
    broken: Callable[[pytest.MonkeyPatch], None], seed: int, law: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    with pytest.raises(Violation) as violation:
        WideSimulation(WIDE_FROM + seed).run()
    assert violation.value.law == law


@pytest.mark.parametrize(
    ("broken", "seed"),
    [
        (keeps_the_overlay, 2),
        (changes_the_state, 2),
        (gives_tentative_rows_to_the_log, 2),
        (forgets_to_undo, 2),
        (waits_for_the_whole_bound, 4),
    ],
)
def test_a_run_without_a_rule_breaks_a_law(
    broken: Callable[[pytest.MonkeyPatch], None], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    with pytest.raises((Violation, AssertionError)):
        AvailabilitySimulation(AVAILABILITY_FROM + seed).run()
