"""Queries that lose everything at once, and are started again from their directory (design: vault)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from tests.simulation.mixes import Mix
from tests.simulation.run import Result, Simulation, outcome, simulated
from tests.simulation.run_end import NO_WORKER
from tests.simulation.vault_process import AllLost, Life, Place
from tests.simulation.witness import witnesses

#: The longest time that a life lasts which ends in a loss.
LASTS_S = 3.0
#: The share of losses in the middle of a flush, and the number of flushes among which that flush is drawn.
IN_A_FLUSH, FLUSHES = 0.5, 400
#: The share of lives that are stopped before their loss.
STOPS = 0.3


def run_lives(seed: int, mix: Mix, lives: int, watch: Callable[[Simulation], None] = lambda sim: None) -> Result:
    """Run the lives of a query. The last life comes to its end. ``watch``: called with each life when it begins."""
    with witnesses(mix.witnesses):
        return _run(seed, mix, lives, watch)


def _run(seed: int, mix: Mix, lives: int, watch: Callable[[Simulation], None]) -> Result:
    rng = random.Random(f"lives {seed}")
    life, counts = Life(Place(rng), rng=rng), Counter[str]()
    while True:
        try:
            sim = simulated(seed, mix, life)
        except Exception as error:  # the directory cannot be read
            return Result(
                seed, "what was kept can be read", f"life {life.number}: {type(error).__name__}: {error}", None, counts
            )
        watch(sim)
        last = life.number + 1 >= lives
        result = outcome(sim) if last else _until_it_is_lost(sim, rng)
        counts.update(sim.counts)
        if not result.ok:
            return Result(seed, result.law, f"life {life.number} of {lives}: {result.detail}", result.error, counts)
        error = sim.controller.error
        if last and not (error is not None and NO_WORKER in str(error)):
            return Result(seed, None, "", result.error, counts)
        if error is not None and NO_WORKER not in str(error):
            return Result(seed, None, "", result.error, counts)  # the query ends as it would without a directory
        counts["lives that went on"] += 1
        life = life.next(sim)


def _until_it_is_lost(sim: Simulation, rng: random.Random) -> Result:
    """Run a life until everything is lost after some time, unless the query has ended before."""
    ends_at = sim.world.now + rng.random() * LASTS_S
    assert sim.life is not None
    if rng.random() < IN_A_FLUSH:
        sim.life.place.fatal = rng.randrange(FLUSHES)
    part = _Part(sim, ends_at, rng.random() < STOPS)
    return outcome(part)  # type: ignore[arg-type]


class _Part:
    """The run of a life that ends in a loss, or in a stop before the loss (``stops``)."""

    def __init__(self, sim: Simulation, ends_at: float, stops: bool) -> None:
        self._sim, self._ends_at, self._stops = sim, ends_at, stops
        self.seed, self.counts, self.controller = sim.seed, sim.counts, sim.controller

    def run(self) -> None:
        sim = self._sim
        controller = sim.controller
        try:
            sim.run_until(lambda: sim.world.now >= self._ends_at or controller.phase == "ended")
            if self._stops and controller.phase == "running":
                sim.server.perform(controller.driver.on_pause(sim.world.now))
                sim.run_until(lambda: controller.phase == "ended")
                sim.counts["queries that were stopped"] += 1
                kept = controller.departures._kept
                if kept.keys() >= controller.members.workers.keys() and all(kept.values()):
                    sim.counts["stops with all checkpoints"] += 1
                    sim.losses.lose_what_was_read()
            sim.counts["losses of everything"] += 1
        except AllLost:
            sim.counts["losses in the middle of a flush"] += 1
        error = sim.controller.error
        if error is not None and NO_WORKER not in str(error):
            sim.end.check()
