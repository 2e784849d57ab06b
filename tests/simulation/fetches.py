"""Fetching of collected output, as the tasks of ``toDF()`` do it, while the workers that have it die.

The rules are those of ``flux.tasks.output_fetch``; this module has only the way to the other processes. Tasks fetch one after
the other, when all output is there. The law: every row is fetched once, under all faults.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flux.errors import ProtocolError
from flux.operators.collect import Collect
from flux.shell.process import REGISTER_EVERY_S, Stopped
from flux.tasks.output_fetch import OutputFetch
from flux.wire.codec import decode_command
from flux.wire.control import NewTable, Register, Stop
from flux.wire.frames import encode
from flux.wire.messages import Chunk, Fetch
from partitioning.table import Table
from tests.simulation.network import Link

if TYPE_CHECKING:
    from tests.simulation.run import Simulation
    from tests.simulation.stage_kinds import Row

#: Bytes of one answer, so that there are many.
CHUNK_BYTES = 400


class InSmallChunks(Collect):
    def read(self, offset: int, nbytes: int) -> tuple[bytes, int] | None:
        return super().read(offset, min(nbytes, CHUNK_BYTES))


CRASHED = "workers that crashed while they were asked for output"
#: Crashes in one run: a fetch begins again after each, and would hardly ever come to the end of much output in small pieces.
CRASHES_MAX = 20


class SimulatedWay:
    """The way of one attempt of one task to the other processes, in virtual time: while the attempt waits, the world goes on."""

    def __init__(self, sim: Simulation, partition: int, attempt: int, rng: random.Random) -> None:
        self._sim, self._rng = sim, rng
        self._partition, self._attempt = partition, attempt
        self._control = sim.network.link(sim.server.hears, self._hear_order, data=False)
        self._link: Link | None = None
        self._endpoint = ""
        self._table: Table | None = None
        self._stopped = False
        self._answers: list[tuple[Chunk, bytes]] = []

    def now(self) -> float:
        return self._sim.world.now

    def newest_table(self) -> Table:
        self._table = None
        while self._table is None:
            about = Register(
                role="egress", index=self._partition, attempt=self._attempt, host="host", pid=0, executor="",
                endpoint="", edges=[], node=-1,
            )  # fmt: skip
            self._control.send(encode(about))
            self._wait(REGISTER_EVERY_S, lambda: self._table is not None or self._stopped)
            if self._stopped:
                raise Stopped("the query has ended")
        return self._table

    def connect(self, endpoint: str) -> None:
        if self._link is not None:
            self._link.closed = True
            self._sim.counts["fetches that went on at another worker"] += 1
        self._endpoint, self._answers = endpoint, []
        server = self._sim.listening[endpoint]
        self._link = self._sim.network.link(server.hear_data, self._hear_answer, data=True)

    def ask(self, request: Fetch, seconds: float) -> tuple[Chunk, bytes] | None:
        assert self._link is not None
        self._answers.clear()
        self._link.send((request, ()))
        self._lose()
        self._wait(seconds, lambda: any(chunk.offset == request.offset for chunk, _ in self._answers))
        return next((answer for answer in self._answers if answer[0].offset == request.offset), None)

    def close(self) -> None:
        for link in (self._control, self._link):
            if link is not None:
                link.closed = True

    def _lose(self) -> None:
        """Crash the worker that is asked, now and then."""
        sim, worker = self._sim, self._sim.listening[self._endpoint]
        strikes = self._rng.random() < sim.faults.fetch_crash_probability and sim.counts[CRASHED] < CRASHES_MAX
        if strikes and not worker.dead and sim.strikes.spares(worker):
            sim.counts[CRASHED] += 1
            sim.crash(worker, seen=self._rng.random() < 0.7)

    def _wait(self, seconds: float, reached: Callable[[], bool]) -> None:
        world = self._sim.world
        end = world.now + seconds
        world.at(end, lambda: None)
        self._sim.run_until(lambda: reached() or world.now >= end)

    def _hear_order(self, frame: bytes) -> None:
        try:
            order = decode_command(frame)
        except ProtocolError:
            return
        if isinstance(order, NewTable):
            self._table = order.table
        self._stopped |= isinstance(order, Stop)

    def _hear_answer(self, content: Any) -> None:
        if isinstance(content, tuple) and isinstance(content[0], Chunk):
            self._answers.append(content)
            self._sim.fetches.answers += 1


class Fetches:
    """Fetches of all collected output of a run."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        #: Pieces of output that have come.
        self.answers = 0
        #: By collecting stage, in the order of the plan: the rows that were fetched.
        self.rows: dict[int, list[Row]] = {stage.id: [] for stage in sim.plan.stages if stage.collects}
        self._rng = random.Random(f"fetches {sim.seed}")

    def all(self) -> None:
        try:
            for stage in self.rows:
                for partition in range(self.sim.plan.stages[stage].partitions):
                    self.rows[stage] += self._of(stage, partition)
        except Stopped:
            self.sim.counts["fetches that the end of the query broke off"] += 1

    def _of(self, stage: int, partition: int) -> list[Row]:
        """Fetch the rows of one task, attempt by attempt. Spark drops the rows of a failed attempt."""
        attempt = 0
        while True:
            given = self._attempted(stage, partition, attempt)
            if given is not None:
                return given
            attempt += 1

    def _attempted(self, stage: int, partition: int, attempt: int) -> list[Row] | None:
        way = SimulatedWay(self.sim, partition, attempt, self._rng)
        fails = attempt == 0 and self._rng.random() < self.sim.faults.fetch_fails_probability
        given: list[Row] = []
        try:
            for batch in OutputFetch(way, stage, partition).batches():
                ids, keys, words = (batch.column(name).to_pylist() for name in ("id", "key", "word"))
                given += zip(ids, keys, words, strict=True)
                if fails:
                    self.sim.counts["tasks that failed while they fetched"] += 1
                    return None
        finally:
            way.close()
        self.sim.counts["rows fetched"] += len(given)
        return given
