"""All that one worker hosts, as one state machine without I/O: replicas, their streams, and sources (DESIGN 3, 7).

Events come in through ``on_*``; ``work`` applies one step; ``poll`` gives the effects. What a worker sends to itself
goes the same way as what it sends to others, without leaving this file: no frames, no copy.

``now`` is the monotonic clock: time-outs and polls go by it. What operators and rows are told is the wall clock, which
may be set back: ``wall_ahead`` of the other.

Left to others: frames, sockets, clocks and the source iterators (worker), placement (the controller's table).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from flux.batches import conform
from flux.collect import Collect
from flux.control import CopyState, PartitionFinished, ReplicaCaughtUp, ReplicaDiverged, TableSeen
from flux.copy_state import StateCopy, restore
from flux.credit import Credit
from flux.drained import Drained
from flux.errors import Fenced, ProtocolError, QueryFailed
from flux.log import Meter
from flux.messages import (
    Ack,
    Chunk,
    Data,
    Fetch,
    Hello,
    Install,
    Installed,
    Mark,
    Orders,
    OrdersSeen,
    Refuse,
    Reset,
    Resume,
    Standby,
    StepKind,
)
from flux.pairing import CaughtUp, Diverged, Pairing
from flux.plan import EdgePlan, Plan
from flux.producer import Producer, ToWorker
from flux.pulse import IN_STEP, KIND, PARTITION, STEP, TURN, WHAT, Note, no_note
from flux.receiver import Counters, Inbound
from flux.replica import Outlet, Replica
from flux.source_streams import SourceStreams
from flux.starvation import Starvation
from flux.transfers import Aside, Limits, ToSender, Transfers
from flux.turns import Turns
from partitioning.ids import StreamId
from partitioning.table import FIRST_EPOCH, Table

#: The connection of a worker to itself.
LOCAL = "local"
#: Bytes of one answer to an egress task: large enough to be fast, small enough not to hold up the data path.
CHUNK_BYTES = 4 << 20
#: So often the same batch may come damaged: more is no accident on the way.
UNDECODABLE_MAX = 5


@dataclass(frozen=True, slots=True)
class ToConnection:
    """Effect: answer on a connection to the data port."""

    connection: Hashable
    message: Resume | Standby | Ack | Reset | Refuse | Chunk | OrdersSeen | Installed
    payload: bytes | None = None


@dataclass(frozen=True, slots=True)
class ToController:
    """Effect: report to the controller."""

    message: PartitionFinished | TableSeen | ReplicaCaughtUp | ReplicaDiverged


Effect = ToWorker | ToConnection | ToController | Aside


class StageWorker:
    """One worker's share of a plan."""

    def __init__(
        self,
        plan: Plan,
        worker: int,
        clock: Callable[[], float] = lambda: 0.0,
        workers: int = 1,
        limits: Limits | None = None,
    ) -> None:
        """``clock`` (seconds) only measures how long steps take; nothing is decided by it. ``workers``: as many as the
        query began with; ``limits`` of copies of state."""
        self.plan = plan
        self.worker = worker
        self.epoch = -1
        self.table: Table | None = None
        self.replicas: dict[tuple[int, int], Replica] = {}
        self.producers: dict[StreamId, Producer] = {}
        self.sources: dict[tuple[int, int], SourceStreams] = {}
        self.counters = Counters()
        self.latencies: dict[int, deque[float]] = {stage.id: deque(maxlen=4096) for stage in plan.stages}
        self.first_row_at: float | None = None
        self.finished_at: float | None = None
        self.note: Note = no_note()  # what it is at, for those who watch it from outside
        self.ticked = False  # the last step was for timers
        self.wall_ahead = 0.0  # of the wall clock to ``now``; renewed by the shell
        self.log_meter = Meter()
        self._clock = clock
        self._workers = workers
        self._credit = Credit(plan.settings.credit_max_bytes)
        self._inbound: dict[StreamId, Inbound] = {}
        self._hosted: dict[int, np.ndarray] = {}  # stage -> partitions of its replicas here, ascending
        self._newest: dict[int, int] = {}  # stage -> newest incarnation of its replicas here
        self._early: list[tuple[Hashable, Hello]] = []
        self._complete: dict[int, list[int]] = {}
        self._turns = Turns(self.replicas)
        self._effects: deque[Effect] = deque()
        self._nonce = 0
        self._ack_at = np.inf
        self._timers_at = 0.0
        self.drained = Drained()
        # The earliest timer of an operator here that is still to come, by the wall clock; 0: look again.
        self._tick_at = np.inf
        self._pairing = Pairing(
            self.replicas, plan.settings, self.counters, self._turns.wake, self._report_through
        )  # fmt: skip
        self.awaited: dict[tuple[int, int], int] = {}  # placed here, state not come yet -> incarnation
        self._secondary: dict[int, frozenset[int]] = {}  # stage -> partitions here that follow a primary elsewhere
        self._transfers = Transfers(self, plan.secret, plan.settings.resend_timeout, clock, limits)
        self._starvation = Starvation(plan.settings.resend_timeout)

    # ---- orders

    def on_table(self, table: Table, now: float) -> None:
        """Follow the newest table. Raises Fenced if this worker is not in it."""
        if table.epoch <= self.epoch:
            return
        if self.worker not in table.endpoints:
            raise Fenced(f"worker {self.worker} is not in the table of epoch {table.epoch}")
        self.epoch, self.table = table.epoch, table
        self._install_replicas(table)
        self._assign_roles(table)
        self._install_sources(table)
        for stream, producer in self.producers.items():
            producer.on_table(table, self.plan.edges[stream.edge].consumer, now)
        self._turns.wake_all(self.replicas)  # fewer replicas to wait for may have made room in the logs
        self._tick_at = 0.0  # those that lead from now on have timers to fire
        self._choose_sources()
        early, self._early = self._early, []
        for connection, hello in early:
            self._on_hello(connection, hello, now)
        self._effects.append(ToController(TableSeen(node=self.worker, epoch=self.epoch)))

    def _install_replicas(self, table: Table) -> None:
        wanted = {
            (stage.id, partition): replica
            for stage in self.plan.stages
            for partition, replicas in enumerate(table.stages[stage.id])
            for replica in replicas
            if replica.worker == self.worker
        }
        for key in list(self.replicas):
            if key not in wanted or wanted[key].incarnation != self.replicas[key].incarnation:
                self._discard(key)
        self.awaited = {}
        for key, replica in wanted.items():
            if key in self.replicas:
                continue
            if replica.live:
                # One that was added comes to life with a copy of state; only those of the first table begin empty.
                assert replica.incarnation == FIRST_EPOCH, f"the state of replica {key} is lost"
                self._create(key, replica.incarnation)
            else:
                self.awaited[key] = replica.incarnation
        self._transfers.on_table()
        self._note_hosted()

    def _note_hosted(self) -> None:
        for stage in self.plan.stages:
            mine = sorted(partition for (s, partition) in self.replicas if s == stage.id)
            self._hosted[stage.id] = np.array(mine, np.int64)
            self._newest[stage.id] = max((self.replicas[stage.id, p].incarnation for p in mine), default=-1)
        self._turns.arrange()
        inbound = [edge for edge in self.plan.edges if len(self._hosted[edge.consumer])]
        counts = [
            sum(edge.producers or 0 for edge in inbound if (edge.stage is None) == kind) for kind in (True, False)
        ]
        self._credit.expect(sources=counts[0], stages=counts[1])

    def _assign_roles(self, table: Table) -> None:
        for (stage, partition), replica in self.replicas.items():
            self._assign_role(table, stage, partition, replica)
        for stage_plan in self.plan.stages:
            followers = (p for (s, p), replica in self.replicas.items() if s == stage_plan.id and not replica.primary)
            self._secondary[stage_plan.id] = frozenset(followers)

    def _assign_role(self, table: Table, stage: int, partition: int, replica: Replica) -> None:
        first, *others = table.stages[stage][partition]
        if not self.plan.settings.ordered:
            replica.lead(table.epoch, {})  # every copy for itself
        elif first.worker == self.worker:
            replica.lead(table.epoch, {other.worker: (other.incarnation, other.live) for other in others})
            self._pairing.tell((stage, partition))
            self._report_through(replica)
        else:
            replica.follow()

    def _create(self, key: tuple[int, int], incarnation: int) -> None:
        self._enter(self.build(key, incarnation, []))

    def build(self, key: tuple[int, int], incarnation: int, bases: Sequence[int]) -> Replica:
        """A fresh replica. ``bases``: where its output logs begin, for one that gets a copy of another's state."""
        stage = self.plan.stages[key[0]]
        outlets = []
        for index, edge_id in enumerate(stage.edges_out):
            edge = self.plan.edges[edge_id]
            stream = StreamId(edge_id, key[1])
            producer = self._producer(stream, edge, incarnation, self.worker, bases[index] if bases else 0)
            outlets.append(Outlet(producer, edge.key))
        return Replica(stage, key[1], incarnation, outlets, self.plan.settings)

    def _enter(self, replica: Replica) -> None:
        stage = replica.stage
        self.producers |= {outlet.producer.stream: outlet.producer for outlet in replica.outlets}
        for edge_id in stage.edges_in:
            producers = self.plan.edges[edge_id].producers
            if producers is not None:
                replica.expect(edge_id, range(producers))
            elif edge_id in self._complete:
                replica.expect(edge_id, self._complete[edge_id])
        self.replicas[stage.id, replica.partition] = replica
        self._turns.wake((stage.id, replica.partition))

    def _discard(self, key: tuple[int, int]) -> None:
        replica = self.replicas.pop(key)
        replica.close()
        self._turns.forget(key)
        waiting = replica.waiting()
        for stream, inbound in self._inbound.items():
            if self.plan.edges[stream.edge].consumer == key[0]:
                inbound.discard(key[1], waiting.get(stream, ()))
        for outlet in replica.outlets:
            outlet.producer.log.clear()
            self.producers.pop(outlet.producer.stream, None)

    def _producer(
        self, stream: StreamId, edge: EdgePlan, incarnation: int, worker: int = -1, base: int = 0
    ) -> Producer:
        settings = self.plan.settings
        return Producer(
            stream, incarnation, edge.partitions, self.plan.log_share(edge.stage, self._workers), settings.resend_timeout,
            self.log_meter, worker, base,
        )  # fmt: skip

    def _install_sources(self, table: Table) -> None:
        for source_id, partition in list(self.sources):
            if table.sources[source_id][partition] != self.worker:
                # Another worker reads it from now on, and makes again what is not acked.
                for producer in self.sources.pop((source_id, partition)).producers:
                    producer.log.clear()
                    del self.producers[producer.stream]
        for source in self.plan.sources:
            if source.partitions is None:
                continue
            for partition, worker in enumerate(table.sources[source.id]):
                if worker == self.worker and (source.id, partition) not in self.sources:
                    edges = self.plan.edges_of_source(source.id)
                    producers = [
                        self._producer(StreamId(edge.id, partition), edge, self.epoch, self.worker) for edge in edges
                    ]
                    self.producers |= {producer.stream: producer for producer in producers}
                    self.sources[source.id, partition] = SourceStreams(
                        edges, producers, source.name, seeks=source.seeks and self.epoch > 0
                    )

    def on_edge_complete(self, edge: int, producers: list[int]) -> None:
        self._complete[edge] = producers
        for replica in self.replicas.values():
            if edge in replica.stage.edges_in:
                replica.expect(edge, producers)
                self._turns.wake((replica.stage.id, replica.partition))

    # ---- the data port

    def on_data_plane(self, connection: Hashable, message: Any, batches: Sequence[pa.RecordBatch], now: float) -> None:
        """A message from a producer of a stream that this worker consumes, or from an egress task."""
        match message:
            case Data():
                self._on_data(connection, message, batches, now)
            case Hello():
                self._on_hello(connection, message, now)
            case Fetch():
                self._on_fetch(connection, message)
            case Orders():
                self._on_orders(connection, message)
            case _:
                raise ProtocolError(f"a consumer does not take {type(message).__name__}")

    def knows(self, connection: Hashable, message: Data) -> bool:
        """Whether this stream is read from this connection; only then is a payload worth decoding."""
        inbound = self._inbound.get(StreamId(message.edge, message.producer))
        return inbound is not None and inbound.connection == connection

    def on_undecodable(self, connection: Hashable, message: Data, reason: str) -> None:
        """The payload of a message cannot be decoded, from a connection that has proved the secret for its stream. What was
        damaged on the way is sent again; QueryFailed where that does not help, because it never will."""
        self.counters.malformed += 1
        stream = StreamId(message.edge, message.producer)
        inbound = self._inbound[stream]
        if message.nonce != inbound.nonce or inbound.broken:
            return
        if inbound.spoilt(message.sequence) >= UNDECODABLE_MAX:
            raise QueryFailed(
                f"{self.plan.describe_stream(*stream)}: batch {message.sequence} cannot be decoded by worker {self.worker}, "
                f"{UNDECODABLE_MAX} times in a row: {reason}. Its columns are {_columns(self.plan.edges[stream.edge].schema)}. "
                "Do all executors run the same releases of Flux and pyarrow?"
            )
        self._answer(connection, Reset(*stream, f"batch {message.sequence} cannot be decoded"))

    def on_answer(self, worker: int, message: Any, now: float) -> None:
        """An answer from the data port of a worker that consumes a stream of ours or follows a primary of ours."""
        if isinstance(message, OrdersSeen):
            self._on_orders_seen(worker, message, now)
            return
        if isinstance(message, Installed):
            self._transfers.on_installed(worker, message, now)
            return
        producer = self.producers.get(StreamId(message.edge, message.producer))
        if producer is None:
            return
        producer.on_answer(worker, message, now)
        stage = self.plan.edges[message.edge].stage
        if stage is not None and producer.has_room:
            self._turns.wake((stage, message.producer))

    def _on_hello(self, connection: Hashable, hello: Hello, now: float) -> None:
        stream = StreamId(hello.edge, hello.producer)
        if not 0 <= hello.edge < len(self.plan.edges) or hello.producer < 0:
            self._refuse(connection, stream, "edge", f"the plan has no edge {hello.edge}")
        elif hello.epoch > self.epoch:
            # The producer has heard of a table that has not come here yet; answer when it has.
            self._early = [
                (c, h) for c, h in self._early if (h.edge, h.producer, h.worker) != (*stream, hello.worker)
            ] + [(connection, hello)]
        elif hello.epoch < self._newest[self.plan.edges[hello.edge].consumer]:
            # It does not know of all replicas here and would leave out rows for them; it will, and then greet again.
            self.counters.stale += 1
        else:
            self._welcome(connection, hello, stream)

    def _inbound_of(self, stream: StreamId) -> Inbound:
        inbound = self._inbound.get(stream)
        if inbound is None:
            edge = self.plan.edges[stream.edge]
            of_source = edge.stage is None
            inbound = Inbound(stream, edge.input, edge.partitions, self._credit.floor, marked=of_source)
            self._inbound[stream] = inbound
            self._credit.admit(inbound, of_source)
        return inbound

    def _welcome(self, connection: Hashable, hello: Hello, stream: StreamId) -> None:
        inbound = self._inbound_of(stream)
        if self.plan.edges[hello.edge].stage is not None:
            self._welcome_replica(connection, hello, inbound)
        elif not self._reads(hello):
            self.counters.stale += 1
        elif hello.incarnation < inbound.incarnation:
            self._refuse(
                connection, stream, "stale", f"incarnation {inbound.incarnation} of this producer has taken over"
            )
        else:
            self._subscribe(inbound, connection, hello.incarnation, hello.epoch)

    def _reads(self, hello: Hello) -> bool:
        """Whether its sender reads that partition of the source, as the newest table says; always true of ingress."""
        source = self.plan.edges[hello.edge].source
        assert source is not None
        if self.plan.sources[source].partitions is None:
            return True
        assert self.table is not None
        readers = self.table.sources[source]
        return hello.producer < len(readers) and readers[hello.producer] == hello.worker

    # ---- which replica of a producer to read from

    def _welcome_replica(self, connection: Hashable, hello: Hello, inbound: Inbound) -> None:
        listed = self._producers_of(inbound.stream)
        if listed.get(hello.worker, (-1, False))[0] != hello.incarnation:
            self.counters.stale += 1  # dropped meanwhile; it will hear of it
            return
        inbound.offers[hello.worker] = connection
        live = listed[hello.worker][1]
        if live and inbound.source in (-1, hello.worker):
            self._subscribe(inbound, connection, 0, hello.epoch, hello.worker)
        else:
            ack = inbound.ack(self.epoch, self._hosted_by(inbound.stream), self._awaited_by(inbound.stream))
            self._answer(connection, Standby(*inbound.stream, self.epoch, ack.through, ack.behind))
            self._ack_soon(inbound)

    def _producers_of(self, stream: StreamId) -> dict[int, tuple[int, bool]]:
        """Replicas of the partition that produces a stage's stream: worker -> (incarnation, live)."""
        stage = self.plan.edges[stream.edge].stage
        assert stage is not None
        assert self.table is not None
        if stream.producer >= len(self.table.stages[stage]):
            return {}
        return {r.worker: (r.incarnation, r.live) for r in self.table.stages[stage][stream.producer]}

    def _choose_sources(self) -> None:
        """Go on reading from a survivor where the replica that was read from is gone."""
        for stream, inbound in self._inbound.items():
            if self.plan.edges[stream.edge].stage is None:
                continue
            listed = self._producers_of(stream)
            inbound.offers = {worker: c for worker, c in inbound.offers.items() if worker in listed}
            if inbound.source in listed and listed[inbound.source][1]:
                continue
            self.counters.switched += inbound.source >= 0
            inbound.leave()
            candidates = [worker for worker in inbound.offers if listed[worker][1]]
            if candidates:
                # This worker's own replica first; else spread over the others.
                chosen = self.worker if self.worker in candidates else candidates[self.worker % len(candidates)]
                self._subscribe(inbound, inbound.offers[chosen], 0, self.epoch, chosen)

    def _subscribe(
        self, inbound: Inbound, connection: Hashable, incarnation: int, epoch: int, source: int = -1
    ) -> None:
        self._nonce += 1
        inbound.greet(incarnation, connection, self._nonce, epoch, source)
        hosted, awaited = self._hosted_by(inbound.stream), self._awaited_by(inbound.stream)
        self._answer(connection, inbound.resume(self.epoch, hosted, awaited))
        if len(inbound.offers) > 1:
            self._ack_soon(inbound)

    def _relieve(self, now: float) -> None:
        """Where a step is ordered and its rows do not come: read them from another replica of their producer, and let
        them come though the credit is used up."""
        received = lambda stream, partition: int(self._inbound_of(stream).received[partition])  # noqa: E731
        for inbound in self._inbound.values():
            inbound.urgent = False
        for stream, wait in self._starvation.look(self.replicas.values(), received, now).items():
            inbound = self._inbound[stream]
            if wait.elsewhere:
                self._read_from_next(inbound)
            if wait.urgent:
                inbound.urgent = True
                self._ack_soon(inbound)

    def _read_from_next(self, inbound: Inbound) -> None:
        if self.plan.edges[inbound.stream.edge].stage is None:
            return
        listed = self._producers_of(inbound.stream)
        ring = sorted(worker for worker in inbound.offers if listed.get(worker, (-1, False))[1])
        others = [worker for worker in ring if worker > inbound.source] + [w for w in ring if w < inbound.source]
        if others:
            self.counters.switched += 1
            self._subscribe(inbound, inbound.offers[others[0]], 0, self.epoch, others[0])

    def _ack_soon(self, inbound: Inbound) -> None:
        """Resume and Standby carry an ack to one replica of the producer; the others have to hear it too."""
        inbound.ack_due = True
        self._ack_at = 0.0

    def _awaited_by(self, stream: StreamId) -> list[int]:
        stage = self.plan.edges[stream.edge].consumer
        return [partition for (s, partition) in self.awaited if s == stage]

    # ---- order of steps

    def _on_orders(self, connection: Hashable, message: Orders) -> None:
        answers = self._pairing.on_orders(message)
        if answers:
            self._answer(connection, OrdersSeen(answers))

    def _on_orders_seen(self, worker: int, message: OrdersSeen, now: float) -> None:
        for report in self._pairing.on_orders_seen(worker, message, now):
            self._effects.append(ToController(_to_control(self.worker, report)))

    # ---- copies of state

    def on_copy_state(self, order: CopyState) -> None:
        """Copy at the next step boundary; safe to repeat."""
        self._transfers.on_copy_state(order)

    def on_install(self, connection: Hashable, message: Install, part: bytes | memoryview, now: float) -> None:
        """A part of a copy of a replica's state has come."""
        if not self._transfers.on_install(connection, message, part, now):
            self.counters.stale += 1
        self.counters.refused += self._transfers.newly_forged()

    def on_done(self, token: int, result: Any, now: float) -> None:
        """What was to be done aside is done."""
        self._transfers.on_done(token, result, now)
        self.counters.refused += self._transfers.newly_forged()

    def snapshot_classes(self, key: tuple[int, int]) -> tuple[type, ...] | None:
        return self.plan.stages[key[0]].make().snapshot_classes

    def inbounds_of(self, replica: Replica) -> list[Inbound]:
        return [i for i in self._inbound.values() if i.stream.edge in replica.stage.edges_in]

    def goes_on(self, key: tuple[int, int]) -> None:
        if key in self.replicas:
            self._turns.wake(key)
            self._pairing.tell(key)

    def adopt(self, replica: Replica, state: StateCopy, now: float) -> None:
        """A replica whose operator has got its state comes to life."""
        restore(state, replica)
        self._enter(replica)
        self._note_hosted()
        stage, partition = replica.stage.id, replica.partition
        self._secondary[stage] |= {partition}
        assert self.table is not None
        for outlet in replica.outlets:
            outlet.producer.on_table(self.table, self.plan.edges[outlet.producer.stream.edge].consumer, now)
        for position in state.positions:
            inbound = self._inbound_of(position.stream)
            inbound.received[partition] = position.next
            inbound.adopt(position.incarnation, [Mark(*mark) for mark in position.marks])
        # Also streams that the other did not know: their handshakes are without this partition.
        for stream, inbound in self._inbound.items():
            if stream.edge in replica.stage.edges_in:
                self._ask_again(inbound, replica.incarnation)

    def _ask_again(self, inbound: Inbound, incarnation: int) -> None:
        """A replica has joined those that the stream is read for."""
        if inbound.connection is not None and inbound.epoch >= incarnation:
            self._subscribe(inbound, inbound.connection, inbound.incarnation, inbound.epoch, inbound.source)
        else:
            inbound.leave()  # the producer may not know of this replica yet; then it will greet again

    def _refuse(self, connection: Hashable, stream: StreamId, code: str, reason: str) -> None:
        self.counters.refused += 1
        self._answer(connection, Refuse(*stream, code, reason))

    def _hosted_by(self, stream: StreamId) -> np.ndarray:
        return self._hosted[self.plan.edges[stream.edge].consumer]

    def _on_data(self, connection: Hashable, message: Data, batches: Sequence[pa.RecordBatch], now: float) -> None:
        stream = StreamId(message.edge, message.producer)
        inbound = self._inbound.get(stream)
        if inbound is None or inbound.connection != connection:
            self.counters.refused += 1
            self._answer(connection, Reset(*stream, "say Hello first"))
            return
        hosted = self._hosted_by(stream)
        secondary = self._secondary[self.plan.edges[stream.edge].consumer]
        taken = inbound.take(message, batches, hosted, secondary, self.counters)
        if isinstance(taken, Reset):
            self._answer(connection, taken)
            return
        stage = self.plan.edges[stream.edge].consumer
        for partition, slice_ in taken:
            replica = self.replicas[stage, partition]
            replica.add(slice_)
            self._turns.wake((stage, partition))
            if replica.order.peers:
                self._pairing.tell((stage, partition))
        self._note_ack(inbound, now)

    def _on_fetch(self, connection: Hashable, fetch: Fetch) -> None:
        replica = self.replicas.get((fetch.stage, fetch.partition))
        if replica is None or not isinstance(replica.operator, Collect) or not replica.through:
            self.counters.misrouted += 1
            return
        found = replica.operator.read(fetch.offset, CHUNK_BYTES)
        if found is not None:
            data, total = found
            self._effects.append(
                ToConnection(connection, Chunk(fetch.stage, fetch.partition, fetch.offset, total), data)
            )

    # ---- work

    def work(self, now: float) -> bool:
        """Apply one step of the next partition whose turn it is. False: nothing can be applied now."""
        if now + self.wall_ahead >= self._tick_at:
            self._wake_for_timers(now + self.wall_ahead)
        replica = self._turns.next(now, self.wall_ahead)
        if replica is None:
            return False
        self._step(replica, now)
        return True

    def _wake_for_timers(self, wall: float) -> None:
        """Those whose time has come have a step to apply; what keeps them from it, wakes them when it is over."""
        self._tick_at = np.inf
        for key, replica in self.replicas.items():
            if replica.timer_at <= wall:
                self._turns.wake(key)
            else:
                self._tick_at = min(self._tick_at, replica.timer_at)

    def _step(self, replica: Replica, now: float) -> None:
        started, wall = self._clock(), now + self.wall_ahead
        note = self.note
        note[WHAT], note[PARTITION], note[STEP], note[KIND] = (
            replica.stage.id,
            replica.partition,
            replica.applied,
            IN_STEP,
        )
        slices = replica.step(wall)
        note[KIND] = TURN
        replica.busy_s += self._clock() - started
        self.ticked = not slices and replica.kind is StepKind.TICK
        if replica.context.timers.pending:
            self._tick_at = min(self._tick_at, replica.timer_at)
        if replica.order.peers:
            self._pairing.tell((replica.stage.id, replica.partition))
        for slice_ in slices:
            inbound = self._inbound[slice_.stream]
            inbound.applied(replica.partition, slice_)
            self._note_ack(inbound, now)
            if slice_.last and not any(inbound.waiting.values()):
                self._credit.release(slice_.stream)
        if slices and not slices[0].last:
            self.latencies[replica.stage.id].append(wall - replica.context.created)
        if replica.finished and not replica.outlets:
            self.finished_at = wall
        self._report_through(replica)

    def _report_through(self, replica: Replica) -> None:
        if replica.through and not replica.outlets and not replica.reported:
            replica.reported = True
            self._effects.append(
                ToController(PartitionFinished(node=self.worker, stage=replica.stage.id, partition=replica.partition))
            )

    def report_again(self) -> None:
        """The connection to the controller was lost, and perhaps reports with it."""
        self._effects.append(ToController(TableSeen(node=self.worker, epoch=self.epoch)))
        for replica in self.replicas.values():
            replica.reported = False
            replica.order.report_again()
            self._pairing.tell((replica.stage.id, replica.partition))
            self._report_through(replica)

    def _note_ack(self, inbound: Inbound, now: float) -> None:
        if inbound.ack_due:
            self._ack_at = min(self._ack_at, now if inbound.ack_urgent else now + self.plan.settings.ack_interval)

    def wants(self, source: int, partition: int) -> bool:
        """Whether a source may be read: its logs have room. False of one that another worker reads by now."""
        streams = self.sources.get((source, partition))
        return streams is not None and streams.has_room and streams.place()

    def source_start(self, source: int, partition: int) -> int:
        """Number of the batch with which to begin reading, once the source is wanted."""
        start = self.sources[source, partition].start
        assert start is not None
        return start

    def on_source(self, source: int, partition: int, batch: pa.RecordBatch | None, now: float) -> None:
        """The next batch of a source; None: it has ended."""
        streams = self.sources[source, partition]
        created = now + self.wall_ahead
        if batch is None:
            streams.finish(created)
        else:
            if self.first_row_at is None:
                self.first_row_at = created
            streams.append(conform(batch, self.plan.sources[source].schema, f"source {streams.name}"), created)

    # ---- effects

    def poll(self, now: float) -> Iterator[Effect]:
        """Everything to be sent now, in order. What goes to this worker itself is delivered on the way."""
        if now >= self._ack_at:
            self._flush_acks()
        if now >= self._timers_at:
            self._timers_at = now + self.plan.settings.resend_timeout / 4
            for producer in self.producers.values():
                producer.dirty = True
            self._relieve(now)
        yield from self._copies_of_state(now)
        busy = True
        while busy:
            busy = False
            for producer in [producer for producer in self.producers.values() if producer.dirty]:
                for send in producer.poll(now):
                    busy = True
                    if send.worker == self.worker:
                        self.on_data_plane(LOCAL, send.message, send.batches, now)
                    else:
                        yield send
            while self._effects:
                busy = True
                effect = self._effects.popleft()
                if isinstance(effect, ToConnection) and effect.connection == LOCAL:
                    self.on_answer(self.worker, effect.message, now)
                else:
                    yield effect
        # After the rows that were just read here: their order goes with what there was to say.
        yield from self._pairing.poll(now, busy=bool(self._turns), wall_ahead=self.wall_ahead)

    def _copies_of_state(self, now: float) -> Iterator[ToWorker | Aside]:
        for effect in self._transfers.poll(now):
            if isinstance(effect, ToSender):
                self._answer(effect.connection, effect.message)
            else:
                yield effect

    def due(self) -> float:
        """When ``poll`` must be called again at the latest, if nothing happens before."""
        return min(self._ack_at, self._timers_at, self._tick_at - self.wall_ahead, self._pairing.due())

    def _flush_acks(self) -> None:
        self._ack_at = np.inf
        for inbound in self._inbound.values():
            if not inbound.ack_due:
                continue
            ack = inbound.ack(self.epoch, self._hosted_by(inbound.stream), self._awaited_by(inbound.stream))
            # To every replica of the producer, so that each can truncate its log.
            for connection in inbound.offers.values() or [inbound.connection]:
                if connection is not None:
                    self._answer(connection, ack)

    def _answer(
        self, connection: Hashable, message: Resume | Standby | Ack | Reset | Refuse | OrdersSeen | Installed
    ) -> None:
        self._effects.append(ToConnection(connection, message))

    # ---- reports

    @property
    def held_bytes(self) -> int:
        return sum(inbound.held_bytes for inbound in self._inbound.values())

    def close(self) -> None:
        """End every operator; what one raises is logged."""
        self._transfers.close()
        for replica in self.replicas.values():
            replica.close()


def _to_control(node: int, report: CaughtUp | Diverged) -> ReplicaCaughtUp | ReplicaDiverged:
    kind = ReplicaCaughtUp if isinstance(report, CaughtUp) else ReplicaDiverged
    return kind(node=node, **asdict(report))


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
