"""The outside behind the sinks of a simulated query: one place for all workers, which keeps rows with their positions.

The outside acts as a good sink does: a write that comes twice, from a primary that was given up, has no effect. A write
under way when a worker dies lands all the same. The laws: nothing is left out, a write that comes again has the same rows,
and at the end the outside has the output of the partitions, in their order.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

import flux
from flux.dataflow.sink import TentativeNews
from partitioning.ids import PartitionKey
from tests.simulation.timed_rows import tuples
from tests.simulation.violation import Violation

if TYPE_CHECKING:
    from tests.simulation.run import Simulation
    from tests.simulation.worker_process import WorkerProcess

#: Longest time that the outside takes for one call.
CALL_S = 0.02
#: Share of the random flows with sinks that only keep rows in which the sinks hand these rows on as well.
SHARE = 0.3
AHEAD = object()
AHEAD_OF_ALL = "the outside has nothing that no location knows of"
LEFT_OUT = "nothing is left out outside"


class Goes(flux.Sink):
    """A mark of the stages whose output goes outside. The workers call ``Delivery`` in place of this sink."""

    traits = flux.SinkTraits(exactly_once=True)

    def write(self, batch: pa.RecordBatch, position: flux.Position) -> None:
        raise AssertionError("not called in the simulation")


class Outside:
    def __init__(self, sim: Simulation) -> None:
        self.there: dict[PartitionKey, list[Any]] = defaultdict(list)
        self.kept: dict[PartitionKey, int] = defaultdict(int)  # a reader has all positions below for good
        self.call_s = random.Random(f"outside {sim.seed}").choice([0.0, 0.001, CALL_S])
        self._sim = sim

    def of(self, process: WorkerProcess) -> Delivery:
        return Delivery(self, self._sim, process)

    def land(self, key: PartitionKey, position: int, rows: Any) -> None:
        there = self.there[key]
        if position > len(there):
            raise Violation(LEFT_OUT, f"{key}: batch {position} comes behind {len(there)}")
        if position == len(there):
            there.append(rows)
            return
        self._sim.counts["writes that came again outside"] += 1
        if there[position] != rows and not self._sim.ledger.lossy:
            raise Violation("output outside is that of every replica", f"{key}: batch {position} was {there[position]}")

    def rows_of(self, name: str) -> list[Any]:
        """Return all rows of a stage that are outside."""
        ids = {stage.id for stage in self._sim.plan.stages if stage.name == name}
        return [row for key, there in self.there.items() if key.stage in ids for rows in there for row in rows]

    def check(self) -> None:
        """Check, at the end of a query that went well, that the outside has all output."""
        for stage in self._sim.plan.stages:
            if stage.sink is not None:
                for partition, state in enumerate(self._sim.end.states(stage.name)):
                    got = [row for rows in self.there[PartitionKey(stage.id, partition)] for row in rows]
                    if "rows" in state and got != state["rows"] and not self._sim.ledger.lossy:
                        raise Violation(
                            "the outside has all output",
                            f"{stage.name}/{partition}: {len(got)} rows of {len(state['rows'])}",
                        )
                    self._sim.counts["rows outside"] += len(got)


@dataclass
class Line:
    """The calls of one partition: at most one is under way, the others wait."""

    life: int = 0
    has: int = -1
    first: int = 0
    compared: int = -1  # the newest life that was compared with a location
    busy: bool = False
    jobs: deque[tuple[int, int, Any]] = field(
        default_factory=deque
    )  # life, position and rows; without rows: an opening


class Delivery:
    """The way outside of one worker, in place of ``flux.worker.output_delivery.Outside``: one call at a time for each
    partition."""

    def __init__(self, outside: Outside, sim: Simulation, process: WorkerProcess) -> None:
        self._outside, self._sim, self._process = outside, sim, process
        self._lines: dict[PartitionKey, Line] = defaultdict(Line)
        self._rng = random.Random(f"delivery {sim.seed} {process.attempt}")
        self.calls: Counter[str] = Counter()

    def has(self, stage: int, partition: int) -> int:
        return self._lines[PartitionKey(stage, partition)].has

    def begins(self, stage: int, partition: int, position: int, first: bool) -> None:
        line = self._lines[PartitionKey(stage, partition)]
        line.life, line.has = line.life + 1, -1
        deposed = self._sim.leader_of(stage, partition) != self._process.node  # and does not know yet
        if first and not deposed and self._outside.there[PartitionKey(stage, partition)]:
            raise Violation("the first primary finds nothing outside", f"{stage}/{partition}")
        self._sim.counts["primaries that went on outside"] += position > 0
        self._give(PartitionKey(stage, partition), line, (line.life, position, None))

    def write(self, stage: int, partition: int, position: int, batch: pa.RecordBatch) -> None:
        key = PartitionKey(stage, partition)
        rows = tuples(batch)
        self._give(key, self._lines[key], (self._lines[key].life, position, rows))

    def tell(self, stage: int, partition: int, news: TentativeNews) -> None:
        raise Violation("tentative results are for sinks that show them", f"{stage}/{partition}: {news}")

    def recovered(self, stage: int, partition: int, position: int, note: Any) -> None:
        key = PartitionKey(stage, partition)
        self._sim.counts["ends of what a location knows"] += 1
        self._give(key, self._lines[key], (self._lines[key].life, position, AHEAD))

    def compared(self, stage: int, partition: int) -> bool:
        line = self._lines[PartitionKey(stage, partition)]
        return line.compared == line.life

    def ends(self, stage: int, partition: int) -> None:
        line = self._lines[PartitionKey(stage, partition)]
        line.life += 1
        line.jobs.clear()

    def _give(self, key: PartitionKey, line: Line, job: tuple[int, int, Any]) -> None:
        line.jobs.append(job)
        if not line.busy:
            line.busy = True
            self._call(key, line)

    def _call(self, key: PartitionKey, line: Line) -> None:
        """Call the outside for the next job: the answer is made at once, and heard later."""
        there, seconds = len(self._outside.there[key]), self._rng.random() * self._outside.call_s
        self._sim.world.after(seconds, self._done, key, line, line.jobs.popleft(), there)

    def _done(self, key: PartitionKey, line: Line, job: tuple[int, int, Any], there: int) -> None:
        """End a call. It lands also if its worker has died meanwhile."""
        life, position, rows = job
        if rows is None:
            if there < position:
                raise Violation(LEFT_OUT, f"{key}: {there} are there, kept from {position} on")
            line.first, has = there, there
        elif rows is AHEAD:
            has = line.first
            if has > position and life == line.life:
                raise Violation(AHEAD_OF_ALL, f"{key}: {has}, known {position}")
            line.compared = life
        elif position < line.first:
            has = line.first
        else:
            self._outside.land(key, position, rows)
            has = position + 1
        if self._process.dead:
            return
        if life == line.life:
            line.has = max(line.has, has)
            self._process.wake()
        line.busy = bool(line.jobs)
        if line.busy:
            self._call(key, line)
