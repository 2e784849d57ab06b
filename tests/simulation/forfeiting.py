"""Runs whose windows close without a source that is silent, because the state is beyond its limit (design: forfeit).

(a) replicas forfeit alike     replicas of a partition that have applied as many steps have the same spans and counts
(b) each row is given or told  a row is either in a stable window or counted as forfeited
(c) live partitions lose none  without other faults, each window has all rows of the partitions that were never silent
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

import flux
from controller.planning.compiler import compile_plan
from flux.dataflow.flow import Flow, Stage
from flux.replica.replica import Replica
from flux.replica.step_queue import ReplicaStep
from partitioning.ids import PartitionKey
from tests.simulation import timed_relations as relations
from tests.simulation.checkers import Ledger
from tests.simulation.faults import Faults
from tests.simulation.faults import draw as draw_faults
from tests.simulation.flows import SECRET, Dataflow, _settings
from tests.simulation.outside import Goes, Outside
from tests.simulation.run import Simulation
from tests.simulation.timed_flows import TimedData
from tests.simulation.timed_rows import SECOND, TIME, TIMED
from tests.simulation.violation import Violation

#: The first seed of these runs. They have a range of their own, so that the seeds of other runs keep their stories.
FORFEITS_FROM = 88_000_000_000
#: Virtual seconds between two batches of a partition, seconds of the whole, and the bound.
PERIOD_S, WHOLE_S, BOUND_S = 0.1, 10.0, 1.0
#: Seconds of event time by which a partition is behind the one before it.
LAG_S = 0.3
#: Event time of the first batch, in microseconds, and the length of a window.
BEGIN, SIZE = 1_000_000 * SECOND, SECOND // 2
ALIKE = "(a) replicas forfeit alike"
TOLD = "(b) each row is given or told"
ANSWERS = "(c) who answers loses nothing"


class Tally(flux.Aggregate):
    """The rows of each key in a window."""

    n = flux.count()

    state = property(lambda self: {})


@dataclass
class LiveData(TimedData):
    """A live source: each batch comes at its moment, or when the silence of its partition is over."""

    #: By partition: the stretch of silence, in seconds from the first reading.
    silent: dict[int, tuple[float, float]] = field(default_factory=dict)

    def counted(self, partition: int) -> Iterator[Any]:
        for number, batch in enumerate(self.read(partition)):
            while self.waits(partition, number):
                yield flux.SILENT
            yield batch


def draw(rng: random.Random, clock: Callable[[], float]) -> LiveData:
    data = LiveData("readings", [], clock=clock, delay=0)
    ids = 0
    for partition in range(rng.choice([2, 3])):
        begin, end = 0.0, 0.0
        if not partition or rng.random() < 0.3:
            begin = rng.uniform(0.0, 3.0)
            end = begin + rng.uniform(2.0, 5.0)
            data.silent[partition] = begin, end
        batches, due = [], []
        for number in range(1, round(WHOLE_S / PERIOD_S) + 1):
            moment = number * PERIOD_S
            rows = []
            for _ in range(rng.choice([1, 2, 3])):
                ids += 1
                rows.append((ids, rng.randrange(4), "w", BEGIN + round((moment - LAG_S * partition) * SECOND)))
            batches.append(rows)
            due.append(end if begin <= moment < end else moment)
        data.batches.append(batches)  # type: ignore[arg-type]
        data.due.append(due)
    return data


def build(data: LiveData, rng: random.Random, copies_max: int) -> Callable[[Ledger], Dataflow]:
    def made(ledger: Ledger) -> Dataflow:
        source = flux.source(lambda p: data.counted(p), TIMED, len(data.batches), data.name)
        timed = source.withWatermark(TIME, "0 seconds")
        copies = min(rng.choice([1, 2, 2, 3]), copies_max)
        window = flux.window(TIME, f"{SIZE // 1000} milliseconds")
        tally = type("tally", (Tally,), {})
        flow = Flow(Stage(tally, ("key",), rng.choice([1, 2]), copies, None, "append", "tally", window=window), [timed])
        settings = replace(
            _settings(rng), availability=2 * SIZE / SECOND + 0.1, availability_overflow="forfeit",
            availability_max_state=1, log_max_bytes=1_000_000, credit_max_bytes=1_000_000,
        )  # fmt: skip
        plan = compile_plan([flow.to(Goes())], settings, lambda given: given, "q", SECRET, to_steps=relations.to_steps)
        return Dataflow(plan, [data], [], rng.choice([500, 64 << 10]), False)

    return made


class ForfeitOutside(Outside):
    """The outside, with the balance of rows at the end."""

    def check(self) -> None:
        super().check()
        assert isinstance(self._sim, ForfeitSimulation)
        self._sim.check_balance(self.rows_of("tally"))


class ForfeitSimulation(Simulation):
    """One run whose stage forfeits: its state is always beyond the limit. ``faults`` are drawn if they are not given."""

    def __init__(self, seed: int, faults: Faults | None = None) -> None:
        rng = random.Random(f"forfeits {seed}")
        self.data, self.quiet = draw(rng, lambda: self.world.now), faults is not None
        slots = rng.choice([1, 2, 3])
        if faults is None:
            drawn = draw_faults(rng, slots > 1)
            faults = replace(drawn, nondeterministic=False, reckless=False, calm_after_s=rng.choice([1.6, 7.0]))
        super().__init__(seed, faults, slots=slots, dataflow=build(self.data, rng, slots))
        self.outside = ForfeitOutside(self)
        #: By replica and number of applied steps: spans and forfeited rows.
        self._forfeits: dict[tuple[PartitionKey, int], tuple[tuple[tuple[int, int], ...], int]] = {}
        self._rows: Counter[PartitionKey] = Counter()

    def run(self, *given: Any, **more: Any) -> Any:
        count = Replica._count

        def noted(replica: Replica, step: ReplicaStep) -> None:
            count(replica, step)
            self._note(replica)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Replica, "_count", noted)
            return super().run(*given, **more)

    def _note(self, replica: Replica) -> None:
        now = tuple(replica.forfeits.spans), replica.forfeits.rows
        known = self._forfeits.setdefault((replica.key, replica.applied), now)
        if known != now:
            raise Violation(ALIKE, f"{replica.where}, {replica.applied} steps: {now}, and another one has {known}")
        self._rows[replica.key] = max(self._rows[replica.key], replica.forfeits.rows)
        self.counts["steps behind a forfeit"] += bool(replica.forfeits.spans)

    def check_balance(self, results: list[tuple[Any, ...]]) -> None:
        given = sum(row[-1] for row in results)
        rows = [len(self.data.rows_of(partition)) for partition in range(len(self.data.batches))]
        forfeited = sum(self._rows.values())
        self.counts["forfeited rows"] += forfeited
        if given + forfeited != sum(rows):
            raise Violation(TOLD, f"{given} rows are in windows, {forfeited} are forfeited, of {sum(rows)}")
        wanted: Counter[tuple[int, int]] = Counter()
        for partition in set(range(len(rows))) - self.data.silent.keys() if self.quiet else ():
            for _, key, _, time in self.data.rows_of(partition):
                assert time is not None
                wanted[key, (time // SIZE + 1) * SIZE] += 1
        if missing := wanted - Counter({(row[0], row[2]): row[-1] for row in results}):
            raise Violation(ANSWERS, f"{missing} are missing")
