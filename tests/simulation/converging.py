"""Runs whose partitions begin empty when the worker of their last replica is lost (design: converge).

(a) a window comes once        each life of a partition gives each window of a key once; a window comes again only from a life
                               whose results may lack rows there, and if it ends less than two lengths before
                               the newest window that an earlier life has given. All windows come again after no partition
                               is left that knows how far sources were read
(b) whole means whole          a result behind the time up to which its life says that rows are missing has all rows
(c) nothing is made up         no result has more rows than there are
(d) whole windows come         a window behind all such times of its partition comes
(e) the horizon is honest      such a time is at most a window later than the newest row that was read when the time became known
(f) the query goes on          the loss of a worker does not end it
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

import flux
from controller.course.beginnings import EmptyBeginning
from controller.planning.compiler import compile_plan
from flux.arguments import CONVERGE
from flux.dataflow.flow import Flow, Stage
from flux.windows.window import END_OF_TIME, NEVER
from partitioning.ids import PartitionKey
from tests.simulation import timed_relations as relations
from tests.simulation.availability import SilentData, add_partition
from tests.simulation.checkers import Ledger
from tests.simulation.faults import Faults
from tests.simulation.flows import SECRET, Dataflow, _settings
from tests.simulation.outside import Delivery, Goes, Outside
from tests.simulation.run import Simulation
from tests.simulation.timed_rows import SECOND, TIME, TIMED, tuples
from tests.simulation.violation import Violation

if TYPE_CHECKING:
    from tests.simulation.worker_process import WorkerProcess

#: The first seed of these runs. They have a range of their own, so that the seeds of other runs keep their stories.
CONVERGES_FROM = 89_000_000_000
#: Virtual seconds from which on nothing fails; and the rate of lost workers until then.
CALM_S, LOSSES_PER_S = 5.0, 0.5
#: Epochs in which a partition that began empty may have got no row yet.
LATELY = 4
#: Virtual seconds between two looks at horizons.
LOOK_S = 0.05
#: Microseconds of event time in a window.
SIZE = SECOND // 2
ONCE = "(a) a window comes once"
WHOLE = "(b) whole means whole"
MADE_UP = "(c) nothing is made up"
COMES = "(d) what is whole comes"
HONEST = "(e) the horizon is honest"
GOES_ON = "(f) the query goes on"
#: Lost workers, and single messages and connections beside them.
LOSING = Faults(calm_after_s=CALM_S, crashes_per_s=LOSSES_PER_S, reckless=True)
HARD = replace(LOSING, breaks_per_s=1.0, loss_probability=0.05)


class Tally(flux.Aggregate):
    """The rows of each key in a window."""

    n = flux.count()

    state = property(lambda self: {})


class SeekingData(SilentData):
    """A live source that can be read from any batch on."""

    def counted_from(self, partition: int, start: int) -> Iterator[Any]:
        for number, batch in enumerate(self.read(partition)):
            if number >= start:
                while self.waits(partition, number):
                    yield None
                yield batch


def draw(rng: random.Random, clock: Callable[[], float]) -> SeekingData:
    delay_s = rng.choice([0.0, 0.3])
    data = SeekingData("readings", [], clock=clock, delay=round(delay_s * SECOND))
    for _ in range(rng.choice([1, 2, 3])):
        add_partition(data, rng, rng.choice([2.0, 5.0, 8.0]), [])
    return data


def build(data: SeekingData, rng: random.Random) -> Callable[[Ledger], Dataflow]:
    """Return the flow of a run: windows over a live source, with one replica, in front of a sink."""

    def made(ledger: Ledger) -> Dataflow:
        assert data.delay is not None
        source = flux.source(lambda p, start: data.counted_from(p, start), TIMED, len(data.batches), data.name)
        timed = source.withWatermark(TIME, f"{data.delay // 1000} milliseconds")
        window = flux.window(TIME, f"{SIZE // 1000} milliseconds", f"{SIZE // rng.choice([1000, 2000])} milliseconds")
        tally = type("tally", (Tally,), {})
        stage = Stage(
            tally, ("key",), rng.choice([2, 3, 4]), 1, None, "append", "tally", window=window, on_loss=CONVERGE
        )
        settings = replace(_settings(rng), replicas=1, log_max_bytes=1_000_000, credit_max_bytes=1_000_000)
        flow = Flow(stage, [timed]).to(Goes())
        plan = compile_plan([flow], settings, lambda given: given, "q", SECRET, to_steps=relations.to_steps)
        return Dataflow(plan, [data], [], rng.choice([500, 64 << 10]), False)

    return made


class ConvergingOutside(Outside):
    """The outside, with the life of the partition that has given each row."""

    _sim: ConvergingSimulation

    def of(self, process: WorkerProcess) -> ConvergingDelivery:
        return ConvergingDelivery(self, self._sim, process)

    def land(self, key: PartitionKey, position: int, rows: Any) -> None:
        if position < len(self.there[key]):
            self._sim.counts["writes behind a late one of a lost worker"] += 1
            return
        super().land(key, position, rows)

    def check(self) -> None:
        super().check()
        self._sim.check_results()


class ConvergingDelivery(Delivery):
    """The deliveries of one worker, whose rows tell the life of their partition."""

    def write(self, stage: int, partition: int, position: int, batch: pa.RecordBatch) -> None:
        key, core = PartitionKey(stage, partition), self._process.core
        assert core is not None
        life = core.replicas[key].incarnation
        line = self._lines[key]
        self._give(key, line, (line.life, position, [(*row, life) for row in tuples(batch)]))


class ConvergingSimulation(Simulation):
    """One run whose partitions begin empty after losses. ``call_s``: the longest time of a call of the outside; None: drawn."""

    def __init__(self, seed: int, faults: Faults | None = None, call_s: float | None = None) -> None:
        rng = random.Random(f"converges {seed}")
        self.data = draw(rng, lambda: self.world.now)
        drawn = rng.choice([LOSING, LOSING, HARD]) if faults is None else faults
        super().__init__(seed, drawn, slots=rng.choice([2, 3, 4]), dataflow=build(self.data, rng))
        self.outside: ConvergingOutside = ConvergingOutside(self)
        if call_s is not None:
            self.outside.call_s = call_s
        window = self.plan.stages[0].make()._flux_window
        assert isinstance(window, flux.windows.window.Window)
        self.window = window
        #: By key and window end: the number of rows.
        self.truth: Counter[tuple[int, int]] = Counter()
        for partition in range(len(self.data.batches)):
            for _, key, _, time in self.data.rows_of(partition):
                assert time is not None
                for end in self._ends(time):
                    self.truth[key, end] += 1
        self._looked_at = 0
        self.world.after(LOOK_S, self._look)

    def run(self) -> None:
        super().run()
        if self.controller.error is not None and self.controller.members.workers:
            raise Violation(GOES_ON, str(self.controller.error))

    def _ends(self, time: int) -> Iterator[int]:
        """Yield the ends of all windows with a time."""
        end = time // self.window.slide * self.window.slide + self.window.slide
        while end - self.window.size <= time:
            if end > time:
                yield end
            end += self.window.slide

    def _look(self) -> None:
        """Check law (e) for lives whose horizon has become known."""
        if self.controller.phase != "ended":
            self.world.after(LOOK_S, self._look)
        known = [begun.through for begun in self.beginnings if begun.through is not None]
        for through in known[self._looked_at :]:
            newest = max(self._times_until_now(), default=NEVER)
            if through > newest + self.window.size:
                raise Violation(HONEST, f"rows lack up to {through}, and the newest time is {newest}")
        self._looked_at = len(known)

    def _times_until_now(self) -> Iterator[int]:
        for partition, begun in self.data.begun.items():
            for rows, due in zip(self.data.batches[partition], self.data.due[partition], strict=True):
                if begun + due <= self.world.now:
                    yield max(row[3] for row in rows)  # type: ignore[misc, type-var]

    @property
    def beginnings(self) -> list[EmptyBeginning]:
        return self.controller.losses.beginnings._all

    def check_results(self) -> None:
        """Check all laws, at the end of a run."""
        stage = self.plan.stages[0]
        through: dict[int, dict[int, int]] = defaultdict(dict)  # by partition and life
        for begun in self.beginnings:
            self.counts["horizons that were not known by the end"] += begun.through is None
            through[begun.key.partition][begun.epoch] = END_OF_TIME if begun.through is None else begun.through
        self.counts["partitions that began empty"] += len(self.beginnings)
        given: Counter[tuple[int, int]] = Counter()
        homes: dict[int, int] = {}
        for partition in range(stage.partitions):
            lives = through[partition]
            seen: set[tuple[int, int, int]] = set()
            newest: dict[int, int] = {}  # by life: the newest end of a window
            for batch in self.outside.there[PartitionKey(stage.id, partition)]:
                for key, _, end, n, life in batch:
                    homes[key] = partition
                    lacks = end <= lives.get(life, NEVER)
                    before = max((at for other, at in newest.items() if other < life), default=NEVER)
                    old = end <= before - 2 * self.window.size
                    again = given[key, end] and (not lacks or old) and not self._begins_anew(life)
                    if (key, end, life) in seen or again:
                        raise Violation(ONCE, f"key {key}, window {end}, of life {life}")
                    seen.add((key, end, life))
                    newest[life] = max(end, newest.get(life, NEVER))
                    given[key, end] += 1
                    self._check_count(key, end, n, lacks)
        for (key, end), rows in self.truth.items():
            lives = [through[homes[key]]] if key in homes else through.values()
            last = max((at for each in lives for at in each.values()), default=NEVER)
            if end > last and not given[key, end]:
                raise Violation(COMES, f"key {key}, window {end} with {rows} rows, whole behind {last}")

    def _begins_anew(self, life: int) -> bool:
        """Tell whether no partition may have known how far sources were read when a life began: all had begun empty lately."""
        lately = {begun.key.partition for begun in self.beginnings if life - LATELY <= begun.epoch <= life}
        return len(lately) == self.plan.stages[0].partitions

    def _check_count(self, key: int, end: int, n: int, lacks: bool) -> None:
        rows = self.truth[key, end]
        if n > rows:
            raise Violation(MADE_UP, f"key {key}, window {end}: {n} of {rows} rows")
        if n < rows and not lacks:
            raise Violation(WHOLE, f"key {key}, window {end}: {n} of {rows} rows")
        self.counts["results that lack rows" if n < rows else "results with all rows"] += 1
