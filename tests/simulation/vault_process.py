"""The vault of the simulation, its place of storage, and the lives of a query that loses all its processes.

The place is a dumb store: of the bytes appended and not flushed, only some first part outlives the process. Files and segments
are whole or not there.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from flux.dataflow.plan import Plan
from flux.state.standby import Standby
from flux.vault.journal import Journal
from flux.vault.vault import Vault
from flux.wire.control import EdgeStored
from flux.wire.parts import PartLimits
from flux.worker.core import WorkerCore
from partitioning.ids import PartitionKey, StreamId
from tests.simulation.checkers import Ledger
from tests.simulation.numbered_rows import is_end
from tests.simulation.outside import Outside
from tests.simulation.worker_process import WorkerProcess
from tests.simulation.world import World

if TYPE_CHECKING:
    from tests.simulation.run import Simulation

#: Attempt number of the vault, which no worker has.
ATTEMPT = 1_000_000
#: Longest time between two lives of a query.
AWAY_S = 5.0
#: Time for which written records wait for more, in two queries of nine. In a third one they wait as long as a greeting for its
#: answer.
LATE_FLUSH_S = 0.004
#: Least size of the parts of a partition's state in queries with that long wait.
LATE_PART_BYTES = 1000


class AllLost(Exception):
    """The loss of all processes at once."""


class Place:
    """A store in memory in place of ``flux.vault.journal.Store``."""

    def __init__(self, rng: random.Random) -> None:
        #: Flushes until all processes are lost in the middle of one.
        self.fatal: int | None = None
        #: The newest version of a plan that grows.
        self.plan: Plan | None = None
        #: The births of streams that have come to its running sources.
        self.births: dict[StreamId, EdgeStored] = {}
        self.flushes = self.generation = 0
        self._rng = rng
        self._segment = bytearray()
        self._appended = bytearray()
        self._files: dict[str, bytes] = {}

    def newest(self) -> memoryview | None:
        return memoryview(bytes(self._segment)) if self._segment else None

    def begin(self, data: bytes) -> None:
        self._segment, self._appended = bytearray(data), bytearray()

    look_s = 1.0

    def check(self) -> None:
        """Find the place as it was: nothing moves it."""

    @property
    def crowded(self) -> bool:
        return False

    def append(self, data: bytes) -> None:
        self._appended += data

    def flush(self) -> None:
        self.flushes += 1
        if self.fatal is not None:
            self.fatal -= 1
            if self.fatal < 0:
                raise AllLost
        self._segment += self._appended
        self._appended.clear()

    def lose(self) -> None:
        """Lose the process, and the bytes that it had not flushed, but for a first part of them."""
        self._segment += self._appended[: self._rng.randint(0, len(self._appended))]
        self._appended.clear()
        self.fatal = None
        self.generation += 1

    def put(self, name: str, data: memoryview) -> memoryview:
        self._files[name] = bytes(data)
        return memoryview(self._files[name])

    def get(self, name: str) -> memoryview | None:
        return memoryview(self._files[name]) if name in self._files else None

    def remove(self, names: Collection[str]) -> None:
        for name in names:
            del self._files[name]

    def names(self) -> list[str]:
        return list(self._files)


class VaultProcess(WorkerProcess):
    def __init__(self, sim: Simulation, place: Place) -> None:
        super().__init__(sim, 0, ATTEMPT, "vault")
        self.role = "vault"
        self._journal = Journal(place)
        self._journal.keep_only(lambda key: key.stage in sim.first_plan.stages)
        self._journal.begin()
        self.first_epoch = self._journal.highest + 1

    def made(self, workers: int) -> WorkerCore:
        return Vault(self.sim.first_plan, self.node, self._journal, workers=workers, limits=self.sim.copies).core


def _go_on(ledger: Ledger, earlier: Ledger) -> None:
    """Carry the records of an earlier life over: the query gives out the same batches by the same steps again."""
    ledger._home, ledger._given, ledger._touching = earlier._home, earlier._given, earlier._touching
    ledger._given_rows, ledger.lossy = earlier._given_rows, earlier.lossy
    ledger._largest, ledger._official = earlier._largest, earlier._official
    ledger.unsteady, ledger.altered = earlier.unsteady, earlier.altered
    ledger._ordered_unheard = earlier._ordered_unheard
    ledger.event_time = earlier.event_time


@dataclass
class Life:
    """One life of a query with a directory."""

    place: Place
    number: int = 0
    #: The time at which the life begins.
    now: float = 1000.0
    began_with: int = 0
    #: The simulation of the life before.
    earlier: Simulation | None = None
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def world(self, seed: int) -> World:
        world = World(seed + (self.number << 40))
        world.now = self.now
        return world

    def go_on(self, sim: Simulation, slots: int) -> int:
        """Give the simulation of this life the records of the earlier ones, and return its number of workers."""
        plan = sim.dataflow.plan
        self.began_with = self.began_with or slots
        late = plan.settings.resend_timeout if sim.seed % 9 == 0 else LATE_FLUSH_S
        flush = late if sim.seed % 3 == 0 else 0.0
        settings = replace(plan.settings, journal_flush=flush)
        sim.dataflow = replace(
            sim.dataflow, plan=replace(plan, durable=True, began_with=self.began_with, settings=settings)
        )
        if self.earlier is None:
            return slots
        _go_on(sim.ledger, self.earlier.ledger)
        for source, earlier in zip(sim.dataflow.sources, self.earlier.dataflow.sources, strict=True):
            if source.logs is not None and earlier.logs is not None:
                source.logs.go_on(earlier.logs)  # lost records stay lost
        least = max(stage.replicas for stage in plan.stages)
        return self.rng.randint(least, max(slots, least) + 1)

    def kept(self) -> dict[PartitionKey, Standby]:
        """Return the records of each partition in the directory."""
        return Journal(self.place).standbys

    @staticmethod
    def limits(drawn: PartLimits, plan: Plan) -> PartLimits:
        """Return the limits with larger parts if flushes are long: each part of a copy waits for a flush before the next."""
        late = plan.settings.journal_flush > LATE_FLUSH_S
        return replace(drawn, part_bytes=max(drawn.part_bytes, LATE_PART_BYTES)) if late else drawn

    def had_ended(self, sim: Simulation, source: int, partition: int) -> bool:
        """Tell whether the source came to its end in an earlier life: there are steps that wait for this end."""
        if self.earlier is None:
            return False
        streams = [StreamId(edge.id, partition) for edge in sim.plan.edges_of_source(source)]
        given = [sim.ledger.newest_given(stream) for stream in streams]
        return any(each is not None and is_end(each) for each in given)

    def outside_of(self, sim: Simulation) -> Outside:
        outside = Outside(sim)
        if self.earlier is not None:
            earlier = self.earlier.outside
            outside.there, outside.kept = earlier.there, earlier.kept
            sim.spark.versions = self.earlier.spark.versions
        return outside

    def next(self, sim: Simulation) -> Life:
        """Return the life after this one, whose processes are all gone."""
        self.place.lose()
        now = sim.world.now + self.rng.random() * AWAY_S
        return Life(self.place, self.number + 1, now, self.began_with, sim, self.rng)
