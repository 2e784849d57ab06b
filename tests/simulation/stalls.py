"""The law of progress: once the table is confirmed by all and no fault follows, no stream stands still for long.

A stream stands still at a replica while a batch given out has rows for the replica that are not applied there, no other batch
of the stream is applied there, and the awaited event comes no nearer. The awaited event follows from the place of these rows.
Each replica is judged alone, so that a secondary which gets no rows is seen although its primary goes on:

not received here           rows of that stream that come to the replica's worker, and steps of the producer's replica that it
                            reads: the rows of a partition may lie far apart in a stream whose credit is for one message
received, not ordered       a secondary waits for its primary, and so for the event that its primary awaits; a primary waits for
                            its turn: rows that came before these, and replicas that have not applied its orders
ordered                     the steps before these, their commit, and the rows that the next of these steps lacks
its own logs are full       steps of the consumers that have to apply the batches in the logs: a log of one batch gives way
                            slowly; and output kept for the sink until it is committed and has left

A log stands still while it holds batches and loses none, unless it has room and waits for a checkpoint, or for the replay point
of a standby, which may need rows that have not come; a partition stands still while its primary has steps that are not
committed. The time counts from the last of: the last progress, the last fault (with its after-effects), the moment when all
followed the newest table, and the last part of a state that was copied: logs keep rows that a new replica will need.
A replica that waits for a waiting one stands still, too: the law is about the whole, and does not look for the cause.
A stream of a source whose attempts give different batches stands still where the log of its newest attempt does: a replica
need not get the batches of an earlier attempt. A query that is being stopped reads nothing more, so batches that a lost reader
has given, and that no consumer has received or has in its order, do not come again before the next start.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flux.dataflow.plan import FromSource, FromStage
from flux.exchange.inbound import Inbound
from flux.exchange.log import Log
from flux.exchange.producer import Producer
from flux.exchange.retention import PRESSED_SHARE
from flux.replica.replica import Replica
from flux.worker.core import WorkerCore
from partitioning.ids import StreamId
from tests.simulation.violation import Key, Violation

if TYPE_CHECKING:
    from tests.simulation.process import Process
    from tests.simulation.run import Simulation

#: Virtual time between two looks.
LOOK_S = 0.05
#: A stream may stand still for this number of resend time-outs, and these seconds besides for replicas with much to do.
RESENDS_MAX, BESIDES_S = 6.0, 1.0


@dataclass
class Standing:
    """A stream, log or partition that stands still."""

    #: The name in messages.
    what: str
    since: float
    #: Its own progress, and that of the awaited event.
    got: Hashable


class StallWatch:
    """The look-out for streams, logs and partitions that stand still."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        #: The longest standstill: its seconds, its name, and the time of its end.
        self.worst: tuple[float, str, float] = (0.0, "", 0.0)
        self._standing: dict[Hashable, Standing] = {}
        self._epoch = -1
        self._confirmed_at: float | None = None
        self._copied_at = -1.0
        self._hosts: dict[int, WorkerCore] = {}
        self._given_way: dict[int, int] = {}  # id of a full replica -> the progress of its readers at this look
        partitions = {source: len(data.batches) for source, data in sim.source_data.items()}
        self._producers = {
            edge.id: partitions[edge.source] if isinstance(edge, FromSource) else edge.producers
            for edge in sim.plan.edges
        }
        sim.world.after(LOOK_S, self._look)

    @property
    def limit_s(self) -> float:
        return RESENDS_MAX * self.sim.plan.settings.resend_timeout + BESIDES_S

    def copied(self) -> None:
        """Note that a part of some state has arrived."""
        self._copied_at = self.sim.world.now

    def _look(self) -> None:
        sim = self.sim
        if sim.controller.phase == "ended" and sim.at_rest():
            return
        sim.world.after(LOOK_S, self._look)
        now = sim.world.now
        disturbed_until = max(sim.network.disturbed_until, sim.standing.until)
        self._note_confirmation(now)
        if self._confirmed_at is None or now < disturbed_until or sim.some_are_gone:
            self._standing.clear()
        else:
            since = max(disturbed_until, self._confirmed_at, self._copied_at)
            self._hosts = {core.worker: core for core in sim.hosts()}
            self._given_way = {}
            known, self._standing = self._standing, {}
            for key, what, got in self._owed():
                before = known.get(key)
                if before is None or before.got != got:
                    before = Standing(what, now, got)
                before.since = max(before.since, since)
                self._standing[key] = before
                self._judge(before, now)

    def _note_confirmation(self, now: float) -> None:
        """Note the time since which all processes follow the newest table, if they do."""
        table = self.sim.controller.table
        if table is None or not self._all_go_by_it():
            self._confirmed_at = None
        elif self._confirmed_at is None or self._epoch != table.epoch:
            self._epoch, self._confirmed_at = table.epoch, now

    def _all_go_by_it(self) -> bool:
        sim = self.sim
        table = sim.controller.table
        assert table is not None
        cores = [sim.core_of(worker) for worker in table.endpoints]
        epochs = [-1 if core is None else core.epoch for core in cores]
        for attempt in sim.spark.alive():
            if attempt.core is not None and attempt._current():
                epochs += [producer._epoch for producer in attempt.core.producers.values()]
        return sim.all_in and min(epochs) >= table.epoch

    # ---- streams, logs and commits that have to go on: a key, a name, and the progress

    def _owed(self) -> Iterator[tuple[Hashable, str, Hashable]]:
        for process in self._processes():
            for stream, producer in () if process.core is None else process.core.producers.items():
                if producer.log and not self._may_wait(producer):
                    yield (
                        (process.node, *stream),
                        f"log of stream {stream} at {process.role} {process.node}",
                        producer.log.base + self._behind_head(stream, producer.log),
                    )
            if isinstance(process.core, WorkerCore):
                yield from self._owed_by(process.core)

    def _may_wait(self, producer: Producer) -> bool:
        """Tell whether a log may wait for the next checkpoint or replay point, because it has room and holds up no replica."""
        log, consumers = producer.log, producer._consumers
        unpressed = consumers is not None and consumers.kept and log.bytes < log.bytes_max * PRESSED_SHARE
        return producer.has_room and (self.sim.plan.durable or unpressed)

    def _processes(self) -> list[Process]:
        """Return the processes that take part in the view of the controller."""
        table = self.sim.controller.table
        assert table is not None
        attempts = [attempt for attempt in self.sim.spark.alive() if attempt._current()]
        return [*(self.sim.by_node[worker] for worker in table.endpoints), *attempts]

    def _owed_by(self, core: WorkerCore) -> Iterator[tuple[Hashable, str, Hashable]]:
        ledger = self.sim.ledger
        for key, replica in core.replicas.items():
            watch = ledger._watches.get(id(replica))
            role = "primary" if replica.primary else "secondary"
            where = f"{role} {key[0]}/{key[1]} of worker {core.worker}"
            for edge in () if watch is None else replica.stage.edges_in:
                for stream in (StreamId(edge, producer) for producer in range(self._streams_of(edge))):
                    if stream in ledger.unsteady:
                        continue
                    touching = ledger._touching.get((stream, key[1]), ())
                    done = watch.counts.get(stream, 0) if watch is not None else 0
                    if len(touching) > done and not self._is_left_for_later(stream, touching[done]):
                        got = done, *self._waits_for(core, replica, stream, done)
                        yield (core.worker, key, stream), f"stream {stream} at {where}", got
            if replica.primary and replica.order.committed < replica.order.end:
                yield (core.worker, key), f"commits at {where}", replica.order.committed

    def _streams_of(self, edge: int) -> int:
        edges = self.sim.plan.edges
        return 0 if edge not in edges else self._producers.get(edge, edges[edge].producers)

    def _is_left_for_later(self, stream: StreamId, sequence: int) -> bool:
        """Tell whether only a lost reader has had an element, in a query that is being stopped."""
        edge = self.sim.plan.edges[stream.edge]
        if not self.sim.controller.departures.stopping or not isinstance(edge, FromSource):
            return False
        readers = [core.producers[stream] for core in self._hosts.values() if stream in core.producers]
        if self.sim.plan.sources[edge.source].worker_partitions == 0 or any(
            reader.next_sequence > sequence for reader in readers
        ):
            return False
        ends = [
            core.subscriptions.streams[stream].received[partition]
            for core in self._hosts.values()
            if stream in core.subscriptions.streams
            for partition in core.subscriptions.hosted_by(stream)
        ]
        orders = [order for core in self._hosts.values() for order in core.hosted.orders_of(edge.consumer)]
        return sequence >= max([*ends, *(order.ordered_below(stream) for order in orders)], default=0)

    # ---- progress of the event for which a replica waits

    def _waits_for(self, core: WorkerCore, replica: Replica, stream: StreamId, index: int) -> tuple[object, ...]:
        """Return the next thing for which a replica waits before it can apply one of the batches with rows for it, and the
        progress of that thing."""
        key, ledger = (replica.stage.id, replica.partition), self.sim.ledger
        sequence = ledger._touching[stream, replica.partition][index]
        if _is_full(replica):
            return "its logs", self._gives_way(replica)
        inbound = core.subscriptions.streams.get(stream)
        if inbound is None or inbound.received[replica.partition] <= sequence:
            return "its rows", self._comes(core, replica, stream, inbound)
        order = replica.order
        ordered = (
            through for entry in order.since(replica.applied) for *of, through in entry.slices if (*of,) == stream
        )
        if any(sequence <= through for through in ordered):
            coming = sum(
                self._comes(core, replica, missing, core.subscriptions.streams.get(missing))
                for missing in replica.missing()
            )
            return "its steps", replica.applied, order.committed, coming
        if replica.primary:
            return "its turn", self._batches_applied(replica), self._ordered_behind(replica)
        leader = self._leader(key)
        if leader is None:
            return ("its primary",)
        at, primary = leader
        watch = ledger._watches.get(id(primary))
        if watch is not None and watch.counts.get(stream, 0) > index:
            return "its order", order.verified
        return "its primary", order.verified, *self._waits_for(at, primary, stream, index)

    def _leader(self, key: Key) -> tuple[WorkerCore, Replica] | None:
        worker = self.sim.leader_of(*key)
        core = None if worker is None else self._hosts.get(worker)
        replica = None if core is None else core.replicas.get(key)
        return (core, replica) if core is not None and replica is not None and replica.primary else None

    def _comes(self, core: WorkerCore, replica: Replica, stream: StreamId, inbound: Inbound | None) -> int:
        """Sum the progress of a stream on its way to a worker: rows received, steps of other replicas there whose waiting rows
        use up the credit, and steps of the producer's replica that the worker reads."""
        if inbound is None:
            return 0
        got = sum(inbound.received[partition] for partition in core.subscriptions.hosted_by(stream))
        for partition, waiting in inbound.waiting.items():
            other = core.replicas.get((replica.stage.id, partition))
            if waiting and other is not None:
                got += self._batches_applied(other) + self._full(replica.stage.id, partition)
        edge, read = self.sim.plan.edges[stream.edge], self._hosts.get(inbound.feed.worker)
        if isinstance(edge, FromStage) and read is not None and (edge.stage, stream.producer) in read.replicas:
            got += read.replicas[edge.stage, stream.producer].applied + self._full(edge.stage, stream.producer)
        return got

    def _batches_applied(self, replica: Replica) -> int:
        """Count the batches of all streams that a replica has applied. Timers do not count: they bring it no closer to the
        waiting batches."""
        watch = self.sim.ledger._watches.get(id(replica))
        return 0 if watch is None else sum(watch.counts.values())

    def _ordered_behind(self, replica: Replica) -> int:
        """Return the progress of the replicas for which a primary waits that may order nothing more; else 0."""
        return replica.order.oldest if replica.held_back else 0

    # ---- progress of replicas that wait for room

    def _behind_head(self, stream: StreamId, log: Log) -> int:
        """Sum the progress of the replicas that wait for room or for their turn, in the partitions of the oldest batch."""
        consumer = self.sim.plan.edges[stream.edge].consumer
        touched = log[log.base].touches.tolist()
        turns = [_others_first(r, stream) for partition in touched for r in self._replicas(consumer, partition)]
        return sum(self._full(consumer, partition) for partition in touched) + sum(turns)

    def _full(self, stage: int, partition: int) -> int:
        """Sum the progress of the logs of replicas of a partition that wait for room, and, if the order log of the primary is
        full, the steps of all its replicas."""
        replicas = self._replicas(stage, partition)
        got = sum(self._gives_way(replica) for replica in replicas if _is_full(replica))
        if any(replica.primary and replica.held_back for replica in replicas):
            got += sum(replica.applied for replica in replicas)
        return got

    def _gives_way(self, replica: Replica) -> int:
        """Sum the progress of the logs for which a full replica waits, and of the consumers of these logs."""
        known = self._given_way.get(id(replica))
        if known is None:
            self._given_way[id(replica)] = 0  # a circle ends here
            producers = [outlet.producer for outlet in replica.outlets if outlet.producer.log]
            known = self._given_way[id(replica)] = sum(
                producer.log.base + producer.log.end + self._behind_head(producer.stream, producer.log)
                for producer in producers
            )
            if replica.output.exit is not None and not replica.output.exit.has_room:
                known = self._given_way[id(replica)] = known + replica.order.committed + replica.output.exit.left
        return known

    def _replicas(self, stage: int, partition: int) -> list[Replica]:
        return [core.replicas[stage, partition] for core in self._hosts.values() if (stage, partition) in core.replicas]

    def _judge(self, standing: Standing, now: float) -> None:
        stood = now - standing.since
        if stood > self.worst[0]:
            self.worst = (stood, standing.what, now)
        if stood > self.limit_s:
            raise Violation(
                "no stream stands still",
                f"{standing.what}: for {stood:.2f} s at {now - 1000:.2f} s, got {standing.got}",
            )


def _is_full(replica: Replica) -> bool:
    return replica.output.room.full > 0 or not replica.between_steps


def _others_first(replica: Replica, stream: StreamId) -> int:
    """Count the steps that a replica has applied, if the next one in the order is for other streams than this; else 0."""
    order = replica.order
    if not order.base <= replica.applied < order.end:
        return 0
    return 0 if any(StreamId(*of[:2]) == stream for of in order[replica.applied].slices) else replica.applied
