"""Runs with tentative results in more of the world: diamonds, all kinds of replicas, clocks that are apart, moves and repairs
in the middle of a failure, cut links, silence of 30 seconds and for ever.

Beside the laws of ``availability`` (design: shadow):

(6) healthy logs stay short       while one input is missing, the log of a stream whose rows come has no more batches than in calm
(7) the stable lane is the same   streams have as many stable rows with availability as without, in any silence
(8) replicas take the same steps  also for watermarks: this is a law of all runs (``checkers``)

The seed, modulo the number of kinds, chooses the faults of a run: nothing but silence; lost workers and messages; these and
moves; moves and cut links.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import flux
from controller.planning.compiler import compile_plan
from flux.dataflow.flow import Flow, Stage
from flux.dataflow.plan import FromSource
from flux.operators.operator import PEEK
from flux.worker.source_scheduler import IDLE_SOURCE_MAX_S
from partitioning.ids import ACTIVE, STANDBY, UPSTREAM
from tests.simulation import timed_relations as relations
from tests.simulation.availability import (
    ANSWER,
    AVAILABILITY_FROM,
    AvailabilityCase,
    AvailabilitySimulation,
    LastCounts,
    LastSums,
    ShowsTentative,
    SilentData,
    add_partition,
)
from tests.simulation.checkers import Ledger
from tests.simulation.faults import Faults
from tests.simulation.flows import SECRET, Dataflow, _settings
from tests.simulation.operators import QUIET, Habits
from tests.simulation.timed_kinds import Counts
from tests.simulation.timed_rows import SECOND, TIME, TIMED, WINDOW_TIME
from tests.simulation.violation import Violation

#: The first seed of these runs.
WIDE_FROM = AVAILABILITY_FROM + 1_000_000
#: Virtual seconds by which the clocks of two workers are apart at most.
SKEW_S = 0.05
#: Virtual seconds between two looks at logs; the most batches in a log of a healthy stream; and the virtual seconds from the end
#: of a silence until a stream is healthy again.
LOOK_S, BATCHES, HEALS_S = 0.1, 4, 1.5
#: Virtual seconds for which a run goes on behind its last batch, if an input stays away for ever.
GOES_ON_S = 6.0
LOGS = "(6) healthy logs stay short"
SAME = "(7) the stable lane is the same"
#: People move replicas about.
MOVES = Habits(asks_per_s=2.0, drains=0.1, plans=0.1)
#: Workers die and come back, connections break, single messages are lost.
HARD = Faults(
    calm_after_s=7.0, crashes_per_s=0.3, breaks_per_s=1.0, loss_probability=0.05, cuts_per_s=0.5, cut_s=0.5, patient=True
)  # fmt: skip
#: Links between two workers are cut for seconds.
CUT = Faults(calm_after_s=6.0, pair_cuts_per_s=0.6, pair_cut_s=4.0)
#: Faults, habits, and whether workers go round cut links: by the seed modulo the number of kinds.
KINDS: tuple[tuple[Faults | None, Habits, bool], ...] = (
    (None, QUIET, False), (HARD, QUIET, False), (HARD, MOVES, False), (CUT, MOVES, True),
)  # fmt: skip


@dataclass
class WideCase(AvailabilityCase):
    """The draw of one wide run. Shadows peek at the last stage of an ``exact`` run, and fork it in others."""

    #: "one" stage, two in a "chain", or a "diamond" of three.
    shape: str = "one"
    #: The kind of the other replicas.
    recovery: str = ACTIVE
    #: Whether a partition that falls silent stays away.
    forever: bool = False
    #: Whether the wall clocks of workers are apart.
    skewed: bool = False


def draw(rng: random.Random, clock: Callable[[], float], quiet: bool) -> WideCase:
    names = ("process", "delay", "suspend")
    shape = rng.choice(["one", "chain", "diamond", "diamond"])
    long = rng.random() < 0.1
    case = WideCase(
        rng.choice([1.5, 3.0]), (rng.choice(names), rng.choice(names)), 32.0 if long else rng.choice([4.0, 6.0]),
        rng.choice([0.0, 0.3]), shape != "one", SilentData("readings", [], clock=clock, delay=0), shape=shape,
        recovery=rng.choice([ACTIVE, ACTIVE, STANDBY, UPSTREAM]), forever=quiet and not long and rng.random() < 0.15,
        skewed=rng.random() < 0.5, ways=2 if shape == "diamond" else 1, exact=rng.random() < 0.7,
    )  # fmt: skip
    data = case.data
    data.delay = round(case.delay_s * SECOND)
    for partition in range(rng.choice([2, 2, 3])):
        add_partition(data, rng, case.seconds, _silences(rng, case, partition, long), time_first=True)
    return case


def _silences(rng: random.Random, case: WideCase, partition: int, long: bool) -> list[tuple[float, float]]:
    """Draw the silences of a partition. The first partition always has one, and in one of ten runs it lasts 30 seconds."""
    found = []
    for _ in range(rng.choice([0, 1, 1, 2]) if partition else 1):
        begin = rng.uniform(0.5, min(case.seconds, 6.0))
        found.append((begin, begin + (30.0 if long and not partition else rng.choice([0.5, 2.0, 4.0, 8.0]))))
    if case.forever and not partition:
        found = [(found[0][0], inf)]
    return found


def build(case: WideCase, rng: random.Random, copies_max: int, availability: float) -> Callable[[Ledger], Dataflow]:
    """Return the flow of a case."""

    def made(ledger: Ledger) -> Dataflow:
        data = case.data
        source = flux.source(lambda p: data.counted(p), TIMED, len(data.batches), data.name)
        timed = source.withWatermark(TIME, f"{round(case.delay_s * 1000)} milliseconds")
        copies = min(rng.choice([1, 2, 2, 3]), copies_max)

        def stage(kind: type, name: str, time: str, partitions: int, inputs: list[Any]) -> Any:
            window = flux.window(time, f"{case.size // 1000} milliseconds")
            # The last stages tell a state, which makes them operators with methods of their own: without PEEK these are forked.
            made_of = type(name, (kind,), {"_flux_tentative": PEEK} if case.exact else {})
            recovery = case.recovery if copies > 1 else ACTIVE
            if recovery == UPSTREAM and kind is not Counts:
                recovery = STANDBY  # stages in front of the sink tell a state of their own
            return Flow(
                Stage(made_of, ("key",), partitions, copies, None, "append", name, recovery, window=window), inputs
            )

        names = {"one": [], "chain": ["counts"], "diamond": ["left", "right"]}[case.shape]
        firsts = [stage(Counts, name, TIME, rng.choice([1, 2, 3]), [timed]) for name in names]
        last = (
            stage(LastSums, "sums", WINDOW_TIME, rng.choice([1, 2]), firsts)
            if firsts
            else stage(LastCounts, "counts", TIME, rng.choice([1, 2, 3]), [timed])
        )
        settings = replace(
            _settings(rng), availability=availability, availability_failure=case.policies[0],
            availability_stabilization=case.policies[1], watermark_interval=rng.choice([0.01, 0.05]),
            log_max_bytes=1_000_000, credit_max_bytes=1_000_000,
        )  # fmt: skip
        plan = compile_plan(
            [last.to(ShowsTentative())], settings, lambda given: given, "q", SECRET, to_steps=relations.to_steps
        )
        return Dataflow(plan, [data], [], rng.choice([500, 64 << 10]), False)

    return made


class WideSimulation(AvailabilitySimulation):
    """One wide run. ``availability``: seconds; 0 means without tentative results, and None that the run draws it."""

    case: WideCase

    def __init__(self, seed: int, availability: float | None = None) -> None:
        faults, habits, reach = KINDS[seed % len(KINDS)]
        self._faultless = faults is None
        super().__init__(seed, faults, availability, habits=habits, reach=reach)
        self.quiet &= availability != 0  # windows wait for their input without availability
        rng = random.Random(f"clocks {seed}")
        if self.case.skewed:
            self.slack_s += SKEW_S
            for worker in self.workers:
                worker.wall_ahead = rng.uniform(-SKEW_S / 2, SKEW_S / 2)
        self.idle_source_max_s = IDLE_SOURCE_MAX_S  # each question costs a turn
        #: The most batches in the log of a healthy stream.
        self.longest = 0
        if self._faultless and self.case.recovery == ACTIVE:
            self.world.after(LOOK_S, self._look_at_logs)

    def drawn(self, rng: random.Random) -> WideCase:
        return draw(rng, lambda: self.world.now, self._faultless)

    def built(self, rng: random.Random, slots: int, bound_s: float) -> Callable[[Ledger], Dataflow]:
        return build(self.case, rng, slots, bound_s)

    def run(self) -> None:
        if not self.case.forever:
            super().run()
            return
        until = self.world.now + self.case.seconds + GOES_ON_S
        self.run_until(lambda: self.world.now >= until)
        self.check_bound()
        for row in self.outside.stable:
            end, key = self.window_of(row)
            if row[-2] != self.case.truth[end][key]:
                raise Violation(ANSWER, f"{row}, and there are {self.case.truth[end][key]}")
        self.counts["runs with an input that stays away"] += 1

    def _look_for_progress(self) -> None:
        """Look for progress only behind the last batch of all sources: during a silence nothing advances."""
        began = max(self.case.data.begun.values(), default=self.world.now)
        if self.world.now > began + max(each[-1] for each in self.case.data.due):
            super()._look_for_progress()

    def _look_at_logs(self) -> None:
        """Check law (6)."""
        if self.controller.phase == "ended":
            return
        self.world.after(LOOK_S, self._look_at_logs)
        for core in self.hosts():
            for stream, producer in core.producers.items():
                if isinstance(self.plan.edges[stream.edge], FromSource) and self._is_healthy(stream.producer):
                    self.longest = max(self.longest, len(producer.log))
                    self.counts["looks at logs of healthy streams"] += 1
                    if len(producer.log) > BATCHES:
                        raise Violation(
                            LOGS, f"{stream} has {len(producer.log)} batches at {self.world.now - 1000:.2f} s"
                        )

    def _is_healthy(self, partition: int) -> bool:
        data = self.case.data
        if partition not in data.begun:
            return False
        at = self.world.now - data.begun[partition]
        return all(not begin <= at < end + HEALS_S for begin, end in data.silences[partition])

    def stable_rows(self) -> Counter[str]:
        """Count the stable rows that primaries have given on each edge, and the outside has, at the end of a run."""
        found: Counter[str] = Counter()
        for core in self.hosts():
            for replica in core.replicas.values():
                for outlet in replica.outlets if replica.leads else ():
                    found[f"edge {outlet.producer.stream.edge}"] += outlet.producer.rows
        return found + Counter({"outside": sum(self.outside.stable.values())})


def check_same(seed: int) -> None:
    """Check law (7): make a run with and without availability."""
    rows = []
    for availability in (None, 0.0):
        sim = WideSimulation(seed, availability)
        sim.run()
        rows.append(sim.stable_rows())
    if rows[0] != rows[1]:
        raise Violation(SAME, f"{dict(rows[0])} with availability, {dict(rows[1])} without")


def main() -> None:
    import sys

    first, seeds = int(sys.argv[1]), int(sys.argv[2])
    counts: Counter[str] = Counter()
    for seed in range(WIDE_FROM + first, WIDE_FROM + first + seeds):
        try:
            sim = WideSimulation(seed)
            sim.run()
            counts.update(sim.counts)
            if sim._faultless and not sim.case.forever:
                check_same(seed)
        except (Violation, AssertionError) as broken:
            print(seed - WIDE_FROM, type(broken).__name__, broken, flush=True)
    for name in sorted(counts):
        print(f"{counts[name]:>9,} {name}")


if __name__ == "__main__":
    main()
