"""Output that leaves the dataflow: the committed output of last stages, once, by any of their replicas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from flux.replica.order_exchange import OrderExchange
from flux.replica.output import SinkBuffer
from partitioning.ids import PartitionKey
from tests.simulation import flows
from tests.simulation.faults import Faults
from tests.simulation.run import Simulation
from tests.simulation.runs import LONG
from tests.simulation.violation import Violation

Patch = pytest.MonkeyPatch
MOMENTS = [0.006 + moment * 0.005 for moment in range(12)]
#: ``make test`` tries one of this many moments.
STRIDE = 1 if LONG else 5


def simulated(
    copies: int, crash_at: float | None = None, seed: int = 0, call_s: float = 0.001, **settings: Any
) -> Simulation:
    """Run a query under the laws of ``tests.simulation.outside``, which are checked on the way and at the end. ``call_s``: the
    longest time of a call of the outside."""
    sim = Simulation(
        seed, Faults(), copies, 3, lambda ledger: flows.chain(ledger, (), copies, outside=True, **settings)
    )
    sim.outside.call_s = call_s
    if crash_at is not None:
        sim.world.after(crash_at, lambda: sim.crash(sim.workers[1]))
    sim.run()
    assert sim.controller.error is None
    return sim


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_without_faults_all_output_leaves_once_and_in_order(copies: int) -> None:
    sim = simulated(copies)
    assert sim.counts["rows outside"] == 320
    assert sim.counts["writes that came again outside"] == 0


def test_nothing_is_left_out_whoever_takes_over() -> None:
    runs = [
        simulated(2, moment, seed, call_s)
        for moment in MOMENTS[::STRIDE]
        for seed, call_s in enumerate((0.0, 0.02, 0.3))
    ]
    assert sum(sim.counts["primaries that went on outside"] for sim in runs) > 0
    assert sum(sim.counts["writes that came again outside"] for sim in runs) > 0


def test_a_sink_without_room_for_two_batches_is_slow_and_nothing_else() -> None:
    assert simulated(2, MOMENTS[5], sink_max_bytes=1).counts["rows outside"] == 320


# ---- without a rule


def hands_on_what_is_not_committed(patch: Patch) -> None:
    hand_on = SinkBuffer.hand_on
    patch.setattr(SinkBuffer, "hand_on", lambda self, below: hand_on(self, below + 1000))


def forgets_what_it_has_handed_on(patch: Patch) -> None:
    """Forget output that was handed on and tell the others, although the write may be lost with its worker."""
    hand_on = SinkBuffer.hand_on

    def careless(self: SinkBuffer, below: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        for position, batch in list(hand_on(self, below)):
            yield position, batch
            self.forget(position + 1)

    patch.setattr(SinkBuffer, "hand_on", careless)


def copies_without_what_has_not_left(patch: Patch) -> None:
    patch.setattr(SinkBuffer, "state", lambda self: (self.position, self.position, []))


def secondaries_keep_nothing(patch: Patch) -> None:
    follow = OrderExchange._follow

    def forgetful(self: OrderExchange, replica: Any, item: Any) -> bool:
        if replica.output.exit is not None:
            replica.output.exit.forget(replica.output.exit.position)
        return follow(self, replica, item)

    patch.setattr(OrderExchange, "_follow", forgetful)


def tells_only_once_that_there_is_room(patch: Patch) -> None:
    """Tell only the first time that there is room. The buffer does not check its own flag either, so that only the law about
    progress can see it."""
    note = SinkBuffer._note_room

    def broken(self: SinkBuffer) -> None:
        full, told = not self.has_room, getattr(self, "told", False)
        if not (full and told):
            note(self)
            self.told = told or (full and self.has_room)  # type: ignore[attr-defined]

    patch.setattr(SinkBuffer, "_note_room", broken)
    patch.setattr(SinkBuffer, "validate", lambda self: None)


LEFT_OUT, ALL = "nothing is left out outside", "the outside has all output"
ALIKE, NOTHING = "output outside is that of every replica", "the first primary finds nothing outside"
#: By variant: the broken law, and the seed and the number of the moment that show it; one of the next moments may, too.
BROKEN = {
    hands_on_what_is_not_committed: (ALL, 0, 1),
    forgets_what_it_has_handed_on: (LEFT_OUT, 1, 10),
    copies_without_what_has_not_left: (LEFT_OUT, 4, 6),
    secondaries_keep_nothing: (LEFT_OUT, 0, 0),
}
#: The laws proved by the tests of this file.
LAWS = {LEFT_OUT, ALL, ALIKE, NOTHING}


@pytest.mark.parametrize("break_it", BROKEN)
def test_a_broken_rule_of_sinks_is_seen(break_it: Any, monkeypatch: Patch) -> None:
    break_it(monkeypatch)
    law, *first = BROKEN[break_it]
    with pytest.raises(Violation) as caught:
        crash_after_crash(*first)
    assert caught.value.law == law


def test_kept_output_that_does_not_say_that_it_has_left_stops_its_replica(monkeypatch: Patch) -> None:
    tells_only_once_that_there_is_room(monkeypatch)
    with pytest.raises(Violation, match=r"no stream stands still|every run comes to its end"):
        simulated(2, sink_max_bytes=1)


def test_an_outside_that_lacks_something_or_has_something_else_is_seen() -> None:
    sim = simulated(1)
    with pytest.raises(Violation, match=ALIKE):
        sim.outside.land(PartitionKey(0, 0), 0, [(1, 2, "other rows")])
    sim.outside.there.popitem()
    with pytest.raises(Violation, match=ALL):
        sim.outside.check()
    sim = Simulation(0, Faults(), 1, 3, lambda ledger: flows.chain(ledger, (), 1, outside=True))
    sim.outside.there[PartitionKey(0, 0)].append([])
    with pytest.raises(Violation, match=NOTHING):
        sim.run()


def crash_after_crash(seed: int, number: int) -> None:
    """Crash workers at this moment of this seed, and at the moments that follow."""
    tried = [(each, moment) for each in range(seed, seed + 20) for moment in MOMENTS]
    for each, moment in tried[number:]:
        twice(each, moment)


def twice(seed: int, moment: float) -> None:
    """Crash a second worker when the first has been repaired."""
    sim = Simulation(seed, Faults(), 2, 3, lambda ledger: flows.chain(ledger, (), 2, batches=200, outside=True))
    sim.world.after(moment, lambda: sim.crash(sim.workers[1]))
    sim.world.after(moment + 0.1, lambda: sim.crash(sim.workers[0]))
    sim.run()
