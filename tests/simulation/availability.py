"""Runs with tentative results: live sources that fall silent, windows along a chain, a sink that shows tentative rows.

The laws (design: shadow): (1) the stable answer is that of a run without failure; (2) each tentative row is void by the end, none
comes behind its stable window, and none stays beside a later row of its window; (3) no tentative count is above the true count;
(4) a window is shown within the bound, where nothing but silence fails; (5) shadows hold nothing in calm; (9) nothing is
corrected twice.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

import flux
from controller.planning.compiler import compile_plan
from flux.dataflow.flow import Flow, Stage
from flux.dataflow.sink import TentativeEnd, TentativeNews, TentativeOutput, TentativeUndo
from partitioning.ids import PartitionKey
from tests.simulation import timed_relations as relations
from tests.simulation.checkers import Ledger
from tests.simulation.faults import Faults
from tests.simulation.flows import SECRET, Dataflow, _settings
from tests.simulation.outside import Delivery, Line, Outside
from tests.simulation.run import Simulation
from tests.simulation.timed_flows import TimedData
from tests.simulation.timed_kinds import Counts, Sums
from tests.simulation.timed_rows import SECOND, TIME, TIMED, WINDOW_TIME, tuples
from tests.simulation.violation import Violation

if TYPE_CHECKING:
    from tests.simulation.worker_process import WorkerProcess

#: The first seed of these runs. They have a range of their own, so that the seeds of other runs keep their stories.
AVAILABILITY_FROM = 80_000_000_000
#: Virtual seconds between two batches of a partition.
PERIOD_S = 0.1
#: Virtual seconds for messages, turns and calls of the outside, beside the bound.
SLACK_S = 0.15
#: Event time of the first batch, in microseconds.
BEGIN = 1_000_000 * SECOND
ANSWER = "(1) the stable answer is that of a run without failure"
VOID = "(2) tentative rows are void when their window is stable"
TWICE = "(3) a tentative count is not above the true one"
ONCE = "(2) a tentative result is void when the next one of its window is shown"
BOUND = "(4) a window is shown within the bound"
CALM = "(5) shadows hold nothing in calm"
DONE = "(9) nothing is corrected after the correction is done"


class ShowsTentative(flux.Sink):
    """A mark of stages whose tentative results are shown. ``TentativeDelivery`` makes the calls in place of this sink."""

    traits = flux.SinkTraits(exactly_once=True)

    def write(self, batch: pa.RecordBatch, position: flux.Position) -> None:
        raise AssertionError("not called in the simulation")

    def tentative(self, batch: pa.RecordBatch, through: int) -> None:
        raise AssertionError("not called in the simulation")

    def undo(self, start: int | None, end: int | None) -> None:
        raise AssertionError("not called in the simulation")


class LastCounts(Counts):
    """Counts in front of a sink."""

    state = property(lambda self: {})


class LastSums(Sums):
    """Sums in front of a sink."""

    state = property(lambda self: {})


@dataclass
class SilentData(TimedData):
    """A live source: each batch has rows of its moment, and comes at that moment, or when silence is over."""

    #: By partition: stretches of silence, from and to, in seconds from the first reading.
    silences: dict[int, list[tuple[float, float]]] = field(default_factory=dict)

    def counted(self, partition: int) -> Iterator[Any]:
        for number, batch in enumerate(self.read(partition)):
            while self.waits(partition, number):
                yield flux.SILENT if self._is_silent(partition) else None
            yield batch

    def _is_silent(self, partition: int) -> bool:
        at = self.clock() - self.begun[partition]
        return any(begin <= at < end for begin, end in self.silences.get(partition, ()))


@dataclass
class AvailabilityCase:
    """The draw of one run: its flow, its faults and its times."""

    bound_s: float
    policies: tuple[str, str]
    seconds: float
    delay_s: float
    chained: bool
    data: SilentData
    #: By window end: the counts of each key.
    truth: dict[int, Counter[Any]] = field(default_factory=lambda: defaultdict(Counter))
    #: By window end: the second at which the first row of the window comes.
    truth_from: dict[int, float] = field(default_factory=dict)
    #: Microseconds of event time in a window.
    size: int = SECOND // 2
    #: Ways on which each row comes to a result.
    ways: int = 1
    #: Whether each row counts at most once in a tentative result. In a result of a forked operator a row may count twice, between
    #: two copies (design: fork).
    exact: bool = True


def draw(rng: random.Random, clock: Callable[[], float]) -> AvailabilityCase:
    names = ("process", "delay", "suspend")
    case = AvailabilityCase(
        rng.choice([1.5, 3.0]), (rng.choice(names), rng.choice(names)), rng.choice([4.0, 6.0]), rng.choice([0.0, 0.3]),
        rng.random() < 0.5, SilentData("readings", [], clock=clock, delay=0),
    )  # fmt: skip
    data = case.data
    data.delay = round(case.delay_s * SECOND)
    for partition in range(rng.choice([1, 2, 2, 3, 3])):
        silences = []
        for _ in range(rng.choice([0, 1, 1, 2]) if partition else 1):
            begin = rng.uniform(0.5, case.seconds)
            silences.append((begin, begin + rng.choice([0.5, 2.0, 4.0, 4.0, 8.0])))
        add_partition(data, rng, case.seconds, silences)
    return case


def add_partition(
    data: SilentData,
    rng: random.Random,
    seconds: float,
    silences: list[tuple[float, float]],
    time_first: bool = False,
) -> None:
    """Draw the batches of one more partition. Its rows are of the moment at which they come, or up to the delay older.

    ``time_first``: draw the time of a row before its key, as the first seeds of some runs did.
    """
    assert data.delay is not None
    ids = sum(len(batch) for batches in data.batches for batch in batches)
    data.silences[len(data.batches)] = silences
    batches, due = [], []
    for number in range(1, round(seconds / PERIOD_S) + 1):
        moment = number * PERIOD_S
        rows = []
        for _ in range(rng.choice([1, 2, 5])):
            ids += 1
            age = rng.random() if time_first else 0.0
            key = rng.randrange(4)
            age = age if time_first else rng.random()
            rows.append((ids, key, "w", BEGIN + round((moment - age * (data.delay / SECOND)) * SECOND)))
        due_at = moment
        while (silence := next((each for each in silences if each[0] <= due_at < each[1]), None)) is not None:
            due_at = silence[1]
        batches.append(rows)
        due.append(due_at)
    data.batches.append(batches)  # type: ignore[arg-type]
    data.due.append(due)


def build(
    case: AvailabilityCase, rng: random.Random, copies_max: int, availability: float
) -> Callable[[Ledger], Dataflow]:
    """Return the flow of a case."""

    def made(ledger: Ledger) -> Dataflow:
        data = case.data
        source = flux.source(lambda p: data.counted(p), TIMED, len(data.batches), data.name)
        timed = source.withWatermark(TIME, f"{round(case.delay_s * 1000)} milliseconds")
        window = flux.window(TIME, f"{case.size // 1000} milliseconds")
        copies = min(rng.choice([1, 2, 2, 3]), copies_max)
        partitions = rng.choice([1, 2, 3])
        first = Counts if case.chained else LastCounts
        last: Any = Flow(
            Stage(type("counts", (first,), {}), ("key",), partitions, copies, None, "append", "counts", window=window),
            [timed],
        )
        if case.chained:
            again = flux.window(WINDOW_TIME, f"{case.size // 1000} milliseconds")
            last = Flow(
                Stage(
                    type("sums", (LastSums,), {}),
                    ("key",),
                    rng.choice([1, 2]),
                    copies,
                    None,
                    "append",
                    "sums",
                    window=again,
                ),
                [last],
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


class TentativeOutside(Outside):
    """The outside, with tentative rows."""

    def __init__(self, sim: AvailabilitySimulation) -> None:
        super().__init__(sim)
        self.sim = sim
        #: By partition and mark: the tentative rows that are shown.
        self.shown: dict[PartitionKey, dict[int, Counter[Any]]] = defaultdict(lambda: defaultdict(Counter))
        self.stable: Counter[Any] = Counter()
        self.corrected: dict[PartitionKey, int] = {}
        #: By window: the virtual second at which one of its rows was shown first.
        self.seen: dict[int, float] = {}

    def of(self, process: WorkerProcess) -> TentativeDelivery:
        return TentativeDelivery(self, self._sim, process)

    def land(self, key: PartitionKey, position: int, rows: Any) -> None:
        new = position == len(self.there[key])
        super().land(key, position, rows)
        if not new:
            return
        for row in rows:
            end, group = self.sim.window_of(row)
            self.stable[row] += 1
            self.seen.setdefault(end, self.sim.world.now)
            if any(self.sim.window_of(other) == (end, group) for mark in self.shown[key].values() for other in mark):
                raise Violation(VOID, f"{key}: {row} is stable, and tentative rows of it are shown")

    def show(self, key: PartitionKey, news: TentativeNews) -> None:
        shown = self.shown[key]
        match news:
            case TentativeOutput(batch, through):
                self.sim.counts["tentative batches shown"] += 1
                for row in tuples(batch):
                    end, group = self.sim.window_of(row)
                    self._check_tentative(key, row, end, group, through)
                    shown[through][row] += 1
                    self.seen.setdefault(end, self.sim.world.now)
            case TentativeUndo():
                self.sim.counts["undos"] += 1
                for mark in [mark for mark in shown if news.reaches(mark)]:
                    del shown[mark]
            case TentativeEnd(through):
                self.sim.counts["corrections done"] += 1
                self.corrected[key] = max(through, self.corrected.get(key, through))

    def _check_tentative(self, key: PartitionKey, row: Any, end: int, group: Any, through: int) -> None:
        if end > through:
            raise Violation(VOID, f"{key}: {row} is shown with results up to {through}")
        if any(self.sim.window_of(other) == (end, group) for other in self.stable):
            raise Violation(VOID, f"{key}: {row} is shown, and its window is stable")
        if any(self.sim.window_of(other) == (end, group) for rows in self.shown[key].values() for other in rows):
            raise Violation(ONCE, f"{key}: {row} of {through}, and another result of the window is shown")
        if self.sim.case.exact and row[-2] > self.sim.case.truth[end][group]:
            raise Violation(TWICE, f"{key}: {row}, and there are {self.sim.case.truth[end][group]}")
        if through <= self.corrected.get(key, through - 1):
            raise Violation(DONE, f"{key}: {row} of {through}, corrected through {self.corrected[key]}")

    def clear(self, key: PartitionKey) -> None:
        self.shown[key].clear()
        self.corrected.pop(key, None)

    def check(self) -> None:
        super().check()
        expected = {(key, end): count for end, of_keys in self.sim.case.truth.items() for key, count in of_keys.items()}
        found: Counter[Any] = Counter()
        for row, times in self.stable.items():
            end, group = self.sim.window_of(row)
            found[group, end] += row[-2] * times
        if found != expected:
            missing, extra = Counter(expected) - found, found - Counter(expected)
            raise Violation(ANSWER, f"missing {list(missing.items())[:3]}, too many {list(extra.items())[:3]}")
        left = {key: list(shown) for key, shown in self.shown.items() if shown}
        if left:
            raise Violation(VOID, f"{left} are shown at the end")
        self.sim.check_bound()
        self.sim.check_calm()


class TentativeDelivery(Delivery):
    """The deliveries of one worker, with news of tentative results in the same line."""

    def begins(self, stage: int, partition: int, position: int, first: bool) -> None:
        self._outside: TentativeOutside
        super().begins(stage, partition, position, first)
        key = PartitionKey(stage, partition)
        line = self._lines[key]
        self._give(key, line, (line.life, position, TentativeUndo(None, None)))

    def tell(self, stage: int, partition: int, news: TentativeNews) -> None:
        key = PartitionKey(stage, partition)
        self._give(key, self._lines[key], (self._lines[key].life, -1, news))

    def _done(self, key: PartitionKey, line: Line, job: tuple[int, int, Any], there: int) -> None:
        life, _, news = job
        if not isinstance(news, TentativeOutput | TentativeUndo | TentativeEnd):
            super()._done(key, line, job, there)
            return
        if life == line.life or isinstance(news, TentativeUndo):
            if isinstance(news, TentativeUndo) and news.start is None and news.end is None:
                self._outside.clear(key)
            self._outside.show(key, news)
        line.busy = bool(line.jobs)
        if line.busy and not self._process.dead:
            self._call(key, line)


class AvailabilitySimulation(Simulation):
    """One run with availability."""

    #: Virtual seconds by which a window may be late.
    slack_s = SLACK_S

    def __init__(self, seed: int, faults: Faults | None = None, availability: float | None = None, **more: Any) -> None:
        """Prepare a run. ``availability``: seconds, drawn where None; ``more``: arguments of ``Simulation``."""
        rng = random.Random(f"availability {seed}")
        self.case = self.drawn(rng)
        bound_s = self.case.bound_s if availability is None else availability
        self.quiet = faults is None
        slots = rng.choice([1, 2, 3])
        super().__init__(
            seed, faults or Faults(), slots=slots, dataflow=self.built(rng, slots, bound_s), **more
        )  # fmt: skip
        self.outside = TentativeOutside(self)
        for batches, due in zip(self.case.data.batches, self.case.data.due, strict=True):
            for rows, at in zip(batches, due, strict=True):
                for row in rows:
                    end = self.end_of((row[3] // self.case.size + 1) * self.case.size)  # type: ignore[operator, misc]
                    self.case.truth[end][row[1]] += self.case.ways
                    self.case.truth_from[end] = min(at, self.case.truth_from.get(end, at))

    def drawn(self, rng: random.Random) -> AvailabilityCase:
        return draw(rng, lambda: self.world.now)

    def built(self, rng: random.Random, slots: int, bound_s: float) -> Callable[[Ledger], Dataflow]:
        return build(self.case, rng, slots, bound_s)

    def end_of(self, end: int) -> int:
        """Return the end of the last window to which the rows of the first window with this end go."""
        return end + self.case.size if self.case.chained else end

    def window_of(self, row: Any) -> tuple[int, Any]:
        """Return the end and the key of the window of a result."""
        return row[2], row[0]

    def check_bound(self) -> None:
        """Check law (4), in runs in which nothing but silence fails and no policy suspends: a window with rows is shown, in part
        or whole, within the bound from the moment at which the first partition had passed the window."""
        case = self.case
        if "suspend" in case.policies or not self.quiet:
            return
        began = max(case.data.begun.values())
        for end, first in case.truth_from.items():
            passed = [
                due
                for batches, all_due in zip(case.data.batches, case.data.due, strict=True)
                for rows, due in zip(batches, all_due, strict=True)
                if max(row[3] for row in rows) - case.data.delay >= end  # type: ignore[operator, misc, type-var]
            ]
            seen = self.outside.seen.get(end)
            if not passed or seen is None:
                continue
            late = seen - began - max(min(passed), first) - case.bound_s
            self.counts["windows shown within the bound"] += 1
            if late > self.slack_s:
                raise Violation(BOUND, f"window {end - BEGIN}: {late:.3f} s after its time")

    def check_calm(self) -> None:
        for core in self.hosts():
            hosting = core.shadows
            self.counts["shadows at the end"] += len(hosting._shadows)
            if hosting.room.bytes or any(
                not each.shadow.idle or each.shadow.state for each in hosting._shadows.values()
            ):
                raise Violation(CALM, f"worker {core.worker}: {hosting.room}")
            for each in hosting._shadows.values():
                self.counts["tentative marks"] += each.shadow.fired
                self.counts["revisions"] += each.shadow.revised


def main() -> None:
    import sys

    first, seeds = int(sys.argv[1]), int(sys.argv[2])
    counts: Counter[str] = Counter()
    for seed in range(AVAILABILITY_FROM + first, AVAILABILITY_FROM + first + seeds):
        sim = AvailabilitySimulation(seed)
        try:
            sim.run()
        except Violation as violation:
            print(seed - AVAILABILITY_FROM, violation)
        counts.update(sim.counts)
    print(
        {
            name: counts[name]
            for name in (
                "tentative batches shown",
                "undos",
                "corrections done",
                "tentative marks",
                "revisions",
                "shadows at the end",
                "rows outside",
            )
        }
    )


if __name__ == "__main__":
    main()
