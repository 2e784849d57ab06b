"""The law of progress: once the table is confirmed by all and no fault follows, no stream stands still for long.

A stream stands still at a replica while a batch that was given out has rows for it and is not applied there, and nothing
of that stream is; a log stands still while it holds batches and loses none; a partition stands still while the primary has
steps that nobody commits. Each is counted from the last of: what it did last, the last fault (with its after-effects),
and the moment when all went by the newest table.
What waits for something else that waits stands still too: a law about the whole, not about who is to blame.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flux.stage_worker import StageWorker
from partitioning.ids import StreamId
from tests.simulation.checkers import Violation

if TYPE_CHECKING:
    from tests.simulation.processes import Process
    from tests.simulation.run import Simulation

#: How often it is looked at, in virtual time.
LOOK_S = 0.05
#: So many resend time-outs, and so long besides for who has much to do, a stream may stand still.
RESENDS_MAX, BESIDES_S = 6.0, 1.0


@dataclass
class Standing:
    """What stands still, how long by now, and how far it has got."""

    what: str
    since: float
    got: int


class StallWatch:
    """``worst``: the longest that anything stood still, in seconds, with its name and the time of its end."""

    def __init__(self, sim: Simulation, enforced: bool) -> None:
        self.sim = sim
        self.enforced = enforced
        self.worst: tuple[float, str, float] = (0.0, "", 0.0)
        self._standing: dict[Hashable, Standing] = {}
        self._epoch = -1
        self._confirmed_at: float | None = None
        sources = zip(sim.plan.sources, sim.dataflow.sources, strict=True)
        partitions = {source.id: len(data.batches) for source, data in sources}
        self._producers = [
            partitions[edge.source] if edge.source is not None else edge.producers or 0 for edge in sim.plan.edges
        ]
        sim.world.after(LOOK_S, self._look)

    @property
    def limit_s(self) -> float:
        return RESENDS_MAX * self.sim.plan.settings.resend_timeout + BESIDES_S

    def _look(self) -> None:
        sim = self.sim
        if sim.controller.phase == "ended" and sim._at_rest():
            return
        sim.world.after(LOOK_S, self._look)
        now = sim.world.now
        self._note_confirmation(now)
        if self._confirmed_at is None or now < sim.network.disturbed_until:
            self._standing.clear()
        else:
            since = max(sim.network.disturbed_until, self._confirmed_at)
            known, self._standing = self._standing, {}
            for key, what, got in self._owed():
                before = known.get(key)
                if before is None or before.got != got:
                    before = Standing(what, now, got)
                before.since = max(before.since, since)
                self._standing[key] = before
                self._judge(before, now)

    def _note_confirmation(self, now: float) -> None:
        """Whether everybody goes by the newest table, and since when."""
        table = self.sim.controller.table
        if table is None or not self._all_go_by_it():
            self._confirmed_at = None
        elif self._confirmed_at is None or self._epoch != table.epoch:
            self._epoch, self._confirmed_at = table.epoch, now

    def _all_go_by_it(self) -> bool:
        sim = self.sim
        table = sim.controller.table
        assert table is not None
        cores = [sim._core_of(worker) for worker in table.endpoints]
        epochs = [-1 if core is None else core.epoch for core in cores]
        for attempt in sim._alive():
            if attempt.core is not None and attempt._current():
                epochs += [producer._epoch for producer in attempt.core.producers.values()]
        return sim.all_in and min(epochs) >= table.epoch

    def _owed(self) -> Iterator[tuple[Hashable, str, int]]:
        """What is to go on: a key, what it is called, and how far it has got."""
        for process in self._processes():
            for stream, producer in () if process.core is None else process.core.producers.items():
                if producer.log:
                    yield (
                        (process.node, *stream),
                        f"log of stream {stream} at {process.role} {process.node}",
                        producer.log.base,
                    )
            if isinstance(process.core, StageWorker):
                yield from self._owed_by(process.core)

    def _processes(self) -> list[Process]:
        """That take part, as the controller sees it."""
        table = self.sim.controller.table
        assert table is not None
        attempts = [attempt for attempt in self.sim._alive() if attempt._current()]
        return [*(self.sim.by_node[worker] for worker in table.endpoints), *attempts]

    def _owed_by(self, core: StageWorker) -> Iterator[tuple[Hashable, str, int]]:
        ledger = self.sim.ledger
        for key, replica in core.replicas.items():
            watch = ledger._watches.get(id(replica))
            role = "primary" if replica.primary else "secondary"
            where = f"{role} {key[0]}/{key[1]} of worker {core.worker}"
            for edge in () if watch is None else replica.stage.edges_in:
                for producer in range(self._producers[edge]):
                    stream = StreamId(edge, producer)
                    given = len(ledger._touching.get((stream, key[1]), ()))
                    done = watch.counts.get(stream, 0) if watch is not None else 0
                    if given > done:
                        yield (core.worker, key, stream), f"stream {stream} at {where}", done
            if replica.primary and replica.order.committed < replica.order.end:
                yield (core.worker, key), f"commits at {where}", replica.order.committed

    def _judge(self, standing: Standing, now: float) -> None:
        stood = now - standing.since
        if stood > self.worst[0]:
            self.worst = (stood, standing.what, now)
        if self.enforced and stood > self.limit_s:
            raise Violation("no stream stands still", f"{standing.what}: for {stood:.2f} s at {now - 1000:.2f} s")
