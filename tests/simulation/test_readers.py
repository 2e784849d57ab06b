"""Output that is kept for readers: each batch stays until a reader has it for good, under any primary and any reader."""

from __future__ import annotations

from typing import Any

import pytest

from flux.replica.order_exchange import OrderExchange
from flux.replica.output import ReaderBuffer
from flux.tasks.output_pull import OutputPull
from flux.worker.output_delivery import OutputOffers
from tests.simulation import flows
from tests.simulation.faults import Faults
from tests.simulation.outside import LEFT_OUT
from tests.simulation.run import Simulation
from tests.simulation.runs import LONG
from tests.simulation.violation import Violation

Patch = pytest.MonkeyPatch
MOMENTS = [0.006 + moment * 0.005 for moment in range(12)]
#: ``make test`` tries one of this many moments.
STRIDE = 1 if LONG else 5
ROOM, TINY = 1 << 20, 1


def simulated(
    copies: int, crash_at: tuple[float, ...] = (), seed: int = 0, room: int = ROOM, batches: int = 80
) -> Simulation:
    """Run a query with a reader under the laws of ``tests.simulation.outside``, checked on the way and at the end."""
    sim = Simulation(
        seed, Faults(), copies, 3, lambda ledger: flows.chain(ledger, (), copies, batches=batches, readers=room)
    )
    sim.reader.calm_at = sim.world.now + 0.5
    for worker, moment in zip((1, 0), crash_at, strict=False):
        sim.world.after(moment, lambda worker=worker: sim.crash(sim.workers[worker]))
    sim.run()
    return sim


@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("room", [ROOM, TINY])
def test_all_output_is_read_once_and_in_order(copies: int, room: int) -> None:
    assert simulated(copies, room=room).counts["rows outside"] == 640


def test_nothing_is_left_out_whoever_takes_over_and_whoever_reads() -> None:
    runs = [
        simulated(2, (moment,), seed, room)
        for moment in MOMENTS[::STRIDE]
        for seed, room in enumerate((TINY, 2_000, ROOM))
    ]
    assert sum(sim.counts["readers that began again"] for sim in runs) > 0
    assert sum(sim.counts["writes that came again outside"] for sim in runs) > 0
    assert not any(sim.controller.error for sim in runs)
    assert all(sim.counts["rows outside"] == 640 for sim in runs)


# ---- without a rule


def forgets_what_was_only_sent(patch: Patch) -> None:
    answer = OutputOffers._answer

    def careless(self: OutputOffers, connection: Any, pull: Any, offer: ReaderBuffer) -> None:
        answer(self, connection, pull, offer)
        offer.forget(offer.shown)

    patch.setattr(OutputOffers, "_answer", careless)


def copies_without_what_was_not_read(patch: Patch) -> None:
    patch.setattr(ReaderBuffer, "state", lambda self: (self.position, self.position, []))


def secondaries_keep_nothing(patch: Patch) -> None:
    follow = OrderExchange._follow

    def forgetful(self: OrderExchange, replica: Any, item: Any) -> bool:
        if replica.output.exit is not None:
            replica.output.exit.forget(replica.output.exit.position)
        return follow(self, replica, item)

    patch.setattr(OrderExchange, "_follow", forgetful)


def acknowledges_what_it_has_not_got(patch: Patch) -> None:
    question = OutputPull._question

    def hasty(self: OutputPull, partition: int, part: Any) -> Any:
        part.acknowledged = part.position + 1
        return question(self, partition, part)

    patch.setattr(OutputPull, "_question", hasty)


@pytest.mark.parametrize(
    "break_it",
    [
        forgets_what_was_only_sent,
        copies_without_what_was_not_read,
        secondaries_keep_nothing,
        acknowledges_what_it_has_not_got,
    ],
)
def test_a_broken_rule_of_readers_is_seen(break_it: Any, monkeypatch: Patch) -> None:
    break_it(monkeypatch)
    with pytest.raises(Violation, match=LEFT_OUT):
        crash_after_crash()


def crash_after_crash() -> None:
    for seed in range(20):
        for moment in MOMENTS:
            simulated(2, (moment, moment + 0.1), seed, batches=200)
