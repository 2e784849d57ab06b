"""The law of reachable replicas: rows of a replica that can be reached do not wait for a link that is cut.

reachable means going on    a worker that reads a stage's stream, and has room for more of it, does not stand still for longer
                            than ``link.timeout`` and a third of it, times the replicas that it may try, while another replica
                            of the producer has committed rows for it, and links between the two let everything through. Nor
                            does it if it reads that replica over a further feed.
                            A primary does not lack rows of a secondary that it can reach in the same way for longer than
                            ``link.timeout`` and two thirds of it
the law ``RELAYED``
                            orders do not wait for an answer, nor a source for acks of rows that are applied, for longer than
                            ``link.timeout`` and two thirds of it, and a third of it for each other worker that may be tried,
                            while links between both ends and a third worker let everything through. If several links are cut
                            at once, an attempt over a worker that was out of reach is repeated two timeouts later.
                            Rows in the log of a source do not stay away for longer from a primary that no replica can lend rows.
                            Rows of a secondary do not stay away from their primary for longer than that and another third, if
                            a third worker reaches both
out of reach means following
                            a primary that lacks rows, or acks of its output, and can reach a replica that has them and could
                            lead, does not lead for longer than ``link.unreached`` and a half of it
a safe replica follows an unreached primary
                            the replica that leads then was there, and safe, before
no replica follows that lacks rows
                            the replica that leads then has not lacked rows of its next step for longer than two fifths of
                            ``link.unreached``

The replicas with such rows are looked up in the processes, and the cut links in the network; the code that keeps the rule is
asked for neither. The laws are checked in runs in which links are cut and nothing else fails: any other fault may cost time
by itself.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from controller.report.events import Event
from flux.dataflow.plan import FromStage
from flux.exchange.consumer_progress import STANDING_BY
from flux.exchange.inbound import Inbound
from flux.exchange.producer import Producer
from flux.replica.replica import Replica
from flux.worker.core import WorkerCore
from partitioning.ids import PartitionKey, StreamId
from tests.simulation.faults import Faults
from tests.simulation.violation import Key, Violation

if TYPE_CHECKING:
    from tests.simulation.run import Simulation

#: Worker and incarnation of a replica.
Life = tuple[int, int]

GOES_ON = "reachable means going on"
RELAYED = "what a third worker can relay does not wait"
FOLLOWS = "out of reach means following"
SAFE = "a safe replica follows an unreached primary"
HAS_ROWS = "no replica follows that lacks rows"
#: Virtual time between two looks.
LOOK_S = 0.01
#: In link timeouts, for each replica that may be tried: the timeout, its sixth for rows that are on their way, and a sixth for
#: the messages of a handshake and for the turns in which they are read.
TIMES = 4 / 3
#: In link timeouts, for rows of a secondary: two thirds of a timeout, two looks of a third each, and a third for the messages.
LENT_TIMES = 5 / 3
#: In link timeouts: the time for a direct answer of the primary, before its secondary tells it of the rows over a third worker.
ANSWER_TIMES = 1 / 3
#: In link timeouts: the longest time between two attempts to relay after attempts that could not succeed.
AGAIN_TIMES = 2.0
#: In times of ``link.unreached``: the time itself, a look before its begin and one after its end, of a fifth each, and a tenth.
#: The second number is seconds for messages and the way over the controller.
FOLLOWS_TIMES, FOLLOWS_S = 3 / 2, 0.3
#: Seconds between two loans after which the first has been forgotten, with some to spare.
LOANS_S = 2.5
#: In times of ``link.unreached``: the longest time for which the next primary may have lacked rows of its next step, two looks.
LACKED_TIMES = 2 / 5


@dataclass
class Stop:
    """A stream that stands still at a worker."""

    #: The place that the stream has reached.
    got: int
    since: float


@dataclass
class Unreached:
    """A primary that may be out of reach."""

    mark: int
    #: Time of the last change of ``mark``; infinite before the first loan.
    since: float
    #: Time of the last loan.
    last: float
    #: The place up to which loans have brought the primary; None for a primary that lacks acks.
    got: int | None


class ReachWatch:
    """The look-out for the laws of reachable replicas in a run with cut links."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        #: In seconds: the longest waits for rows of a reachable replica of their producer, for rows of a secondary, and for
        #: rows of a secondary that a third worker had to bring. Then the longest lead of a primary that was out of reach, as
        #: a share of ``link.unreached``, and the longest wait for an answer that could be relayed.
        self.worst = self.worst_lent = self.worst_lent_over = self.worst_unreached = self.worst_relayed = 0.0
        self._stops: dict[Hashable, Stop] = {}
        #: By primary and stream: the time since which it gets nothing but loans, or no acks.
        self._unreached: dict[Hashable, Unreached] = {}
        #: By partition: the lives of its safe replicas after the last decision.
        self._safe: dict[Key, set[Life]] = {}
        #: By replica: the time since which it has lacked rows of its next step.
        self._starved: dict[Hashable, float] = {}
        #: The partitions whose primaries have left the lead with the last decision.
        self.left: set[Key] = set()
        if sim.faults.pair_cuts_per_s and only_cuts(sim.faults):
            sim.world.after(LOOK_S, self._look)

    @property
    def link_s(self) -> float:
        """The link timeout as it should be: a variant may have another one."""
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
                hosted = _hosted(core, stream)
                # A worker that still applies received rows of the stream has work.
                got = sum(inbound.received[p] + inbound.next_to_apply(p) for p in hosted)
                key = core.worker, stream
                stop = known.get(key)
                if stop is None or stop.got != got:
                    stop = Stop(got, now)
                self._stops[key] = stop
                self._judge(core, stream, inbound, now - stop.since, others)
        for key, worker, stream, got, lender in self._lacking():
            stop = known.get((*key, stream))
            if stop is None or stop.got != got:
                stop = Stop(got, now)
            self._stops[*key, stream] = stop
            self._judge_lent(key, worker, stream, lender, now - stop.since)
        starved = ((c.worker, key) for c in sim.hosts() for key, replica in c.replicas.items() if replica.missing())
        self._starved = {name: self._starved.get(name, now) for name in starved}
        self._look_for_unanswered(known, now)
        self._look_for_unreached(now)

    # ---- answers that a third worker could relay

    def _look_for_unanswered(self, known: dict[Hashable, Stop], now: float) -> None:
        for core in self.sim.hosts():
            answers = *self._uncommitted(core), *self._unacked_sources(core), *self._unlent(core)
            for key, worker, got in answers:
                thirds = self._between(core.worker, worker)
                if not thirds:
                    continue
                stop = known.get(key)
                if stop is None or stop.got != got:
                    stop = Stop(got, now)
                self._stops[key] = stop
                waited = now - stop.since
                self.worst_relayed = max(self.worst_relayed, waited)
                self.sim.counts["looks at answers that could be relayed"] += 1
                if waited > self.link_s * (LENT_TIMES + self._attempts):
                    raise Violation(
                        RELAYED, f"{key}: for {waited:.3f} s at {now - 1000:.2f} s, though workers {thirds} reach both"
                    )

    def _between(self, one: int, other: int) -> list[int]:
        """Return the workers that reach both ends in both directions; if nothing is cut between the ends, the ends."""
        cut = self.sim.network.cut_off
        if not cut(one, other) and not cut(other, one):
            return [one, other]
        return [
            core.worker
            for core in self.sim.hosts()
            if core.worker not in (one, other)
            and not any(cut(end, core.worker) or cut(core.worker, end) for end in (one, other))
        ]

    def _uncommitted(self, core: WorkerCore) -> Iterator[tuple[Hashable, int, int]]:
        """Yield the orders of primaries that wait for the ack of a replica without which nothing is committed."""
        for replica in core.replicas.values():
            for worker, peer in replica.order.peers.items() if replica.leads and not replica.orders_itself else ():
                other = self.sim.core_of(worker)
                there = None if other is None else other.replicas.get(replica.key) or other.followers.get(replica.key)
                here = there is not None and there.incarnation == peer.incarnation
                if (
                    here
                    and peer.votes
                    and peer.acked is not None
                    and not peer.copying
                    and peer.acked < replica.order.end
                ):
                    yield (core.worker, replica.key, worker, "orders"), worker, peer.acked

    def _unacked_sources(self, core: WorkerCore) -> Iterator[tuple[Hashable, int, int]]:
        """Yield the rows of sources that all replicas on a worker have applied, but not acked."""
        for source in core.sources.values():
            for producer in source.producers:
                log = producer.log
                for worker, cursor in producer._cursors.items() if log else ():
                    other, oldest = self.sim.core_of(worker), log[log.base]
                    inbound = None if other is None else other.subscriptions.streams.get(producer.stream)
                    if (
                        other is None
                        or inbound is None
                        or inbound.incarnation != producer.incarnation
                        or inbound.copies
                    ):
                        continue
                    lacking = [
                        partition
                        for partition, acked, reads in zip(
                            cursor.at.partitions, cursor.acked, cursor.at.reads, strict=True
                        )
                        if reads and acked < oldest.sequence and partition in oldest.touches
                    ]
                    hosted, answered = _hosted(other, producer.stream), cursor.answered
                    applied = all(p in hosted and inbound.next_to_apply(p) > oldest.sequence for p in lacking)
                    if answered and lacking and applied and other.epoch == core.epoch:
                        yield (core.worker, producer.stream, worker, "acks"), worker, oldest.sequence

    def _unlent(self, core: WorkerCore) -> Iterator[tuple[Hashable, int, int]]:
        """Rows in the log of a source here that the only replica of a partition lacks."""
        for source in core.sources.values():
            for producer in source.producers:
                for worker, cursor in producer._cursors.items() if producer.log else ():
                    other = self.sim.core_of(worker)
                    inbound = None if other is None else other.subscriptions.streams.get(producer.stream)
                    if other is None or inbound is None or inbound.incarnation != producer.incarnation:
                        continue
                    for replica in other.replicas.values() if cursor.known and worker != core.worker else ():
                        at = inbound.received[replica.partition]
                        reads = producer.stream.edge in replica.stage.edges_in and replica.partition in cursor.at.at
                        lacks = reads and any(
                            entry.sequence >= at and replica.partition in entry.touches
                            for entry in producer.log.entries()
                        )
                        if lacks and alone(replica) and inbound.held_bytes < inbound.credit:
                            self.sim.counts["looks at rows in a log that an only replica lacks"] += 1
                            yield (core.worker, producer.stream, replica.key, worker, "rows"), worker, at

    # ---- primaries that are out of reach

    def look(self, events: list[Event]) -> None:
        """Check after a decision that each primary that has left the lead has left it to a safe replica."""
        table, safety = self.sim.controller.table, self.sim.controller.repairs.safety
        if table is None or not self.sim.faults.pair_cuts_per_s:
            return
        names = {stage.name: stage.id for stage in self.sim.plan.stages}
        alive = self.sim.controller.members.workers
        self.left = {
            (names[event.stage], event.partition)
            for event in events
            if event.kind == "take-over" and event.source in alive
        }
        self.sim.counts["primaries out of reach that left the lead"] += len(self.left)
        for stage, partition in self.left:
            heir = table.replicas(stage, partition)[0]
            if (heir.worker, heir.incarnation) not in self._safe.get((stage, partition), ()):
                raise Violation(SAFE, f"{stage}/{partition}: {heir}")
            now = self.sim.world.now
            lacked = now - self._starved.get((heir.worker, PartitionKey(stage, partition)), now)
            if lacked > LACKED_TIMES * self.sim.plan.settings.link_unreached + FOLLOWS_S:
                raise Violation(HAS_ROWS, f"{stage}/{partition}: {heir} has lacked them for {lacked:.3f} s")
        self._safe = {
            (stage, partition): {(r.worker, r.incarnation) for r in replicas if safety.is_safe(stage, partition, r)}
            for stage, partitions in enumerate(table.stages)
            for partition, replicas in enumerate(partitions)
        }

    def _look_for_unreached(self, now: float) -> None:
        known, self._unreached = self._unreached, {}
        limit = self.sim.plan.settings.link_unreached
        for key, mark, got in (*self._by_loans_alone(), *self._without_acks()):
            state = known.get(key)
            if state is None or state.mark != mark:
                state = Unreached(mark, now if got is None else math.inf, now, got)
            self._unreached[key] = state
            if state.got != got:
                state.since, state.last, state.got = min(state.since, now), now, got
            elif got is not None and now - state.last > LOANS_S:
                state.since = math.inf
            waited = now - state.since
            self.worst_unreached = max(self.worst_unreached, waited / limit)
            self.sim.counts["looks at primaries out of reach"] += waited > limit
            if waited > limit * FOLLOWS_TIMES + FOLLOWS_S:
                raise Violation(FOLLOWS, f"{key}: for {waited:.3f} s at {now - 1000:.2f} s")

    def _heirs(self, core: WorkerCore, key: PartitionKey) -> Iterator[WorkerCore]:
        """Yield the workers that the primary of a partition can reach and that have replicas which could lead at once."""
        controller, network = self.sim.controller, self.sim.network
        table = controller.table
        if table is None or controller.phase != "running" or key in controller.repairs.under_way:
            return
        leader, *others = table.replicas(*key)
        for other in others if leader.worker == core.worker else ():
            here = self.sim.core_of(other.worker)
            cut = network.cut_off(core.worker, other.worker) or network.cut_off(other.worker, core.worker)
            if (
                here is not None
                and not cut
                and key in here.replicas
                and not here.replicas[key].missing()
                and controller.repairs.safety.keeps_up(*key, other)
            ):
                yield here

    def _primaries(self) -> Iterator[tuple[WorkerCore, Replica]]:
        for core in self.sim.hosts():
            for replica in core.replicas.values():
                if replica.leads and replica.order.peers and not replica.orders_itself:
                    yield core, replica

    def _by_loans_alone(self) -> Iterator[tuple[Hashable, int, int | None]]:
        """Yield the primaries that borrow rows of a stream, each with a mark that changes when rows come from the producer
        itself, and the place up to which rows have come."""
        for core, replica in self._primaries():
            for stream, inbound in core.subscriptions.streams.items():
                if inbound.borrowed and stream.edge in replica.stage.edges_in and any(self._heirs(core, replica.key)):
                    got = inbound.received[replica.partition]
                    yield (core.worker, replica.key, stream), inbound.taken - inbound.borrowed, got

    def _without_acks(self) -> Iterator[tuple[Hashable, int, int | None]]:
        """Yield the primaries that lack an ack of committed output which a replica that could lead has got."""
        for core, replica in self._primaries():
            for stream, producer in core.producers.items():
                log = producer.log
                mine = any(outlet.producer is producer for outlet in replica.outlets)
                if not mine or not log or log[log.base].sequence >= producer.release_from:
                    continue
                oldest = log[log.base].sequence
                for heir in self._heirs(core, replica.key):
                    other = heir.producers.get(stream)
                    if other is not None and other.log.base > oldest:
                        yield (core.worker, replica.key, stream, "acks"), oldest, None

    def _lacking(self) -> Iterator[tuple[PartitionKey, int, StreamId, int, int]]:
        """Yield the primaries that lack rows of a secondary that they can reach, perhaps over a third worker: partition,
        worker, stream, the element that comes next, and the worker of the secondary."""
        for core in self.sim.hosts():
            for key, replica in core.replicas.items():
                for worker in replica.order.peers if replica.primary and not replica.finished else ():
                    other = self.sim.core_of(worker)
                    cut = not self._between(core.worker, worker)
                    lender = None if other is None or cut else other.replicas.get(key)
                    for stream, slices in () if lender is None else lender.waits.by_stream.items():
                        inbound = core.subscriptions.streams.get(stream)
                        at = 0 if inbound is None else inbound.received[key.partition]
                        room = inbound is None or inbound.held_bytes < inbound.credit
                        if (
                            slices[0].first < replica.order.ordered_below(stream)
                            and not self.sim.faults.pair_cuts_alone
                        ):
                            continue  # two cuts overlap: older rows wait for the commit of their step, and others behind them
                        if room and slices[-1].sequence >= at >= replica.order.ordered_below(stream):
                            yield key, core.worker, stream, at, worker

    def _judge_lent(self, key: PartitionKey, worker: int, stream: StreamId, lender: int, stood: float) -> None:
        thirds = [third for third in self._between(worker, lender) if third not in (worker, lender)]
        self.sim.counts["looks at primaries that lack rows of a secondary"] += 1
        if thirds:
            self.sim.counts["looks at primaries that lack rows which a third worker could bring"] += 1
            self.worst_lent_over = max(self.worst_lent_over, stood)
        else:
            self.worst_lent = max(self.worst_lent, stood)
        if stood > self.link_s * (LENT_TIMES + (ANSWER_TIMES + self._attempts if thirds else 0.0)):
            over = f", and workers {thirds} reach both" if thirds else ""
            raise Violation(
                RELAYED if thirds else GOES_ON,
                f"partition {tuple(key)} at worker {worker} lacks rows of stream {stream} for {stood:.3f} s at "
                f"{self.sim.world.now - 1000:.2f} s, which its secondary at worker {lender} has{over}",
            )

    @property
    def _attempts(self) -> float:
        """The time for attempts over other workers than the first, in link timeouts."""
        return max(len(self.sim.hosts()) - 3, 0) / 3 + (0.0 if self.sim.faults.pair_cuts_alone else AGAIN_TIMES)

    def _judge(self, core: WorkerCore, stream: StreamId, inbound: Inbound, stood: float, others: list[int]) -> None:
        if stood > self.worst:
            self.worst = stood
        self.sim.counts["looks at streams that a reachable replica has rows of"] += 1
        if stood > self.link_s * TIMES * max(len(inbound.offers) - 1, 1):
            raise Violation(
                GOES_ON,
                f"stream {stream} at worker {core.worker}, which reads it from worker {inbound.feed.worker}: for {stood:.3f} s "
                f"at {self.sim.world.now - 1000:.2f} s, though workers {others} have rows",
            )

    def _others(self, core: WorkerCore, stream: StreamId, inbound: Inbound) -> Iterator[int]:
        """Yield the workers of other replicas of the producer that have rows for a worker and can be reached from there."""
        edge = self.sim.plan.edges[stream.edge]
        hosted = _hosted(core, stream)
        if not isinstance(edge, FromStage) or not hosted or inbound.held_bytes >= inbound.credit:
            return
        network = self.sim.network
        for worker in inbound.offers:
            if (
                worker == inbound.feed.worker
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
                and (cursor.phase is STANDING_BY or worker in inbound.others)
                and has_rows(producer, inbound, hosted)
            ):
                yield worker


def alone(replica: Replica) -> bool:
    """Tell whether a primary has no secondary that could lend it rows."""
    peers = replica.order.peers.values()
    return (
        replica.primary
        and not replica.finished
        and (replica.orders_itself or not any(p.live and p.kind.applies for p in peers))
    )


def _hosted(core: WorkerCore, stream: StreamId) -> list[int]:
    return list(core.subscriptions.hosted_by(stream))


def has_rows(producer: Producer, inbound: Inbound, hosted: list[int]) -> bool:
    """Tell whether a replica has committed elements that a partition of a worker has not received."""
    end = min(producer.log.end, producer.release_from)
    return any(
        entry.sequence < end and any(p in entry.touches and inbound.received[p] <= entry.sequence for p in hosted)
        for entry in producer.log.entries()
    )


def only_cuts(faults: Faults) -> bool:
    """Tell whether links between workers are cut, and nothing else fails."""
    slow = replace(faults, calm_after_s=0.0, delay_s=Faults().delay_s, read_s=0.0, pair_cuts_per_s=0.0, pair_cut_s=0.0)
    return replace(slow, patient=False, pair_cuts_alone=False, pair_cuts_both=False) == Faults()
