"""The law of reachable replicas: what some replica has that can be reached does not wait for a link that is cut.

reachable means going on    a worker that reads a stage's stream, and has room for more of it, does not stand still for longer
                            than ``link.timeout`` and a third of it, times the replicas that it may try, while another replica
                            of the producer has committed rows for it, and links between the two let everything through

Which replica has such rows, and which links are cut, is looked up in the processes and in the network, and not asked of the code
that keeps the rule. It is looked at in runs in which links are cut and nothing else fails: any other fault may cost time by
itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flux.dataflow.plan import FromStage
from flux.exchange.consumer_progress import STANDING_BY
from flux.exchange.inbound import Inbound
from flux.exchange.producer import Producer
from flux.worker.core import WorkerCore
from partitioning.ids import StreamId
from tests.simulation.faults import Faults
from tests.simulation.violation import Violation

if TYPE_CHECKING:
    from tests.simulation.run import Simulation

GOES_ON = "reachable means going on"
#: How often it is looked at, in virtual time.
LOOK_S = 0.01
#: In link timeouts, for each replica that may be tried: the timeout, its sixth for rows that are on their way, and a sixth for
#: the messages of a handshake and for the turns in which they are read.
TIMES = 4 / 3


@dataclass
class Stop:
    """A stream that stands still at a worker ``since`` then, having got this far."""

    got: int
    since: float


class ReachWatch:
    """``worst``: the longest time for which rows waited that a reachable replica had, in seconds."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.worst = 0.0
        self._stops: dict[tuple[int, StreamId], Stop] = {}
        if sim.faults.pair_cuts_per_s and only_cuts(sim.faults):
            sim.world.after(LOOK_S, self._look)

    @property
    def link_s(self) -> float:
        """As it should be: a variant may have another one."""
        return 0.3

    def _look(self) -> None:
        sim = self.sim
        if sim.controller.phase == "ended" and sim.at_rest():
            return
        sim.world.after(LOOK_S, self._look)
        now, known = sim.world.now, self._stops
        self._stops = {}
        for core in sim.hosts():
            for stream, inbound in core.subscriptions.streams.items():
                others = list(self._others(core, stream, inbound))
                if not others:
                    continue
                key, got = (core.worker, stream), sum(map(inbound.received.__getitem__, _hosted(core, stream)))
                stop = known.get(key)
                if stop is None or stop.got != got:
                    stop = Stop(got, now)
                self._stops[key] = stop
                self._judge(core, stream, inbound, now - stop.since, others)

    def _judge(self, core: WorkerCore, stream: StreamId, inbound: Inbound, stood: float, others: list[int]) -> None:
        if stood > self.worst:
            self.worst = stood
        self.sim.counts["looks at streams that a reachable replica has rows of"] += 1
        if stood > self.link_s * TIMES * max(len(inbound.offers) - 1, 1):
            raise Violation(
                GOES_ON,
                f"stream {stream} at worker {core.worker}, which reads it from worker {inbound.read_from}: for {stood:.3f} s at "
                f"{self.sim.world.now - 1000:.2f} s, though workers {others} have rows",
            )

    def _others(self, core: WorkerCore, stream: StreamId, inbound: Inbound) -> Iterator[int]:
        """Other replicas of the producer that have rows for a worker, and can be reached from there."""
        edge = self.sim.plan.edges[stream.edge]
        hosted = _hosted(core, stream)
        if not isinstance(edge, FromStage) or not hosted or inbound.held_bytes >= inbound.credit:
            return
        network = self.sim.network
        for worker in inbound.offers:
            if (
                worker == inbound.read_from
                or network.cut_off(core.worker, worker)
                or network.cut_off(worker, core.worker)
            ):
                continue
            other = self.sim.core_of(worker)
            producer = None if other is None else other.producers.get(stream)
            cursor = None if producer is None else producer._cursors.get(core.worker)
            if (
                producer is not None
                and cursor is not None
                and cursor.phase is STANDING_BY
                and has_rows(producer, inbound, hosted)
            ):
                yield worker


def _hosted(core: WorkerCore, stream: StreamId) -> list[int]:
    return list(core.subscriptions.hosted_by(stream))


def has_rows(producer: Producer, inbound: Inbound, hosted: list[int]) -> bool:
    """Whether a replica has committed elements that a partition of a worker has not received."""
    end = min(producer.log.end, producer.release_from)
    return any(
        entry.sequence < end and any(p in entry.touches and inbound.received[p] <= entry.sequence for p in hosted)
        for entry in producer.log.entries()
    )


def only_cuts(faults: Faults) -> bool:
    """Whether links between workers are cut, and nothing else fails."""
    slow = replace(faults, calm_after_s=0.0, delay_s=Faults().delay_s, read_s=0.0, pair_cuts_per_s=0.0, pair_cut_s=0.0)
    return replace(slow, patient=False) == Faults()
