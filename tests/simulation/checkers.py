"""The laws that every run must keep, checked from outside with the simulation's own bookkeeping.

Two kinds of evidence: what the operators of the simulation see (rows), and what passes the seams of the state
machines (steps applied, batches given out, acked, evicted). The ledger knows the whole cluster at once, which no
process does: it sees at the moment when an output leaves whether every safe replica could make it again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from flux.control import PartitionFinished
from flux.log import Entry, Log
from flux.messages import Ack, Resume, Standby, StepKind
from flux.operator import Context
from flux.plan import Plan
from flux.producer import MESSAGE_BYTES, Producer
from flux.replica import Replica
from flux.stage_worker import StageWorker
from partitioning.cluster import Clustered
from partitioning.ids import StreamId

if TYPE_CHECKING:
    from controller.state import Controller
    from controller.sweep import Addition

#: (stage, partition)
Key = tuple[int, int]


class Violation(Exception):
    """A law was broken."""

    def __init__(self, law: str, detail: str) -> None:
        super().__init__(f"{law}: {detail}")
        self.law = law
        self.detail = detail


class Watch:
    """What the ledger knows of one replica. ``counts[stream]``: how many batches with rows for it are applied;
    ``steps``: (step, where its output begins in each log), ``orders[t]``: what step t is."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.counts: dict[StreamId, int] = {}
        self.steps: list[tuple[int, list[int]]] = []
        self.orders: dict[int, Any] = {}
        self.final = replica.applied


class Ledger:
    def __init__(self) -> None:
        self.plan: Plan
        self.controller: Controller
        self.counts: Counter[str] = Counter()
        self.keys: dict[str, tuple[str, ...]] = {}
        #: Streams whose batches differ between attempts: their sequence numbers prove nothing.
        self.unsteady: set[StreamId] = set()
        #: The worker of this id if its process is alive.
        self.alive: Callable[[int], StageWorker | None] = lambda worker: None
        self._home: dict[tuple[str, Any], int] = {}
        self._given: dict[StreamId, list[Any]] = defaultdict(list)  # what streams have given out, by sequence
        self._touching: dict[tuple[StreamId, int], list[int]] = defaultdict(list)
        self._largest: dict[StreamId, int] = defaultdict(int)
        self._credit: dict[tuple[int, StreamId], int] = defaultdict(int)
        self._published: dict[int, int] = {}  # id of a producer -> batches seen to be given out
        self._kept: list[Any] = []  # so that ids stay unique
        self._watches: dict[int, Watch] = {}
        self._maker: dict[int, Watch] = {}  # id of a producer -> the replica that feeds it
        self._official: dict[Key, dict[int, Any]] = defaultdict(dict)  # what each committed step was
        self._moved: set[tuple[int, int, int]] = set()  # stage, partition, incarnation of copies that are moves
        self._leaders: dict[tuple[int, int, int], int] = {}
        self._table_seen = -1
        self._copies_at_first: dict[tuple[int, int, int], int] = {}  # when a target was listed, this among them
        self._stalled: dict[Key, float] = {}  # partitions that stand still while they are copied -> until when

    # ---- rows, as operators see them

    def one_home(self, stage: str, context: Context, batch: pa.RecordBatch) -> None:
        if self.keys.get(stage):
            for key in set(zip(*(batch.column(name).to_pylist() for name in self.keys[stage]), strict=True)):
                if self._home.setdefault((stage, key), context.partition) != context.partition:
                    raise Violation("one partition per key", f"{stage}: {key} came to two partitions")

    # ---- producers

    def watch_producer(self, producer: Producer, current: Callable[[], bool], careless: Callable[[], bool]) -> None:
        """``current``: whether its process has a part in the query still, as far as the controller knows; ``careless``:
        whether it shall send again, this time, what nobody asked for."""
        self._make_careless(producer, careless)
        self._kept.append(producer)
        stream, log = producer.stream, producer.log
        append, evict = log.append, log.evict

        def watched_append(entry: Entry) -> None:
            if not log.has_room and not entry.last:
                raise Violation(
                    "log bytes <= bound + one batch", f"stream {stream}: {log.bytes} of {log.bytes_max} bytes"
                )
            append(entry)

        def watched_evict(acked: np.ndarray) -> int:
            self.publish(producer)
            if not log or (acked[(head := log[log.base]).touches] < head.sequence).any():
                return 0
            base, entries = log.base, log.entries()
            dropped = evict(acked)
            self.counts["batches evicted"] += dropped
            if stream not in self.unsteady and current():
                for entry in entries[:dropped]:
                    self._evicted(stream, entry)
            assert log.base == base + dropped
            return dropped

        log.append, log.evict = watched_append, watched_evict  # type: ignore[method-assign]

    def _make_careless(self, producer: Producer, chance: Callable[[], bool]) -> None:
        """Now and then it goes on from the start of its log instead of where it was told to."""
        on_resume = producer.on_resume

        def careless_resume(worker: int, message: Resume, now: float) -> None:
            on_resume(worker, message, now)
            cursor = producer._cursors.get(worker)
            if cursor is not None and cursor.nonce == message.nonce and producer.log.base < cursor.next and chance():
                self.counts["resumed too early on purpose"] += 1
                cursor.first = cursor.next = producer.log.base
                cursor.catching_up_to = 0

        producer.on_resume = careless_resume  # type: ignore[method-assign]

    def publish(self, producer: Producer) -> None:
        """Look at what this producer may give out by now: always the same, by whichever replica or attempt."""
        stream, log = producer.stream, producer.log
        seen = self._published.get(id(producer), 0)
        end = min(log.end, producer.release_from)
        if end <= seen:
            return
        self._published[id(producer)] = end
        given = self._given[stream]
        for sequence in range(max(seen, log.base), end):
            entry = log[sequence]
            self._largest[stream] = max(self._largest[stream], entry.nbytes)
            while sequence > len(given):
                given.append(None)  # it had no rows, and was evicted as soon as it was there
            if sequence == len(given) or given[sequence] is None:
                self._first_given(stream, entry, self._maker.get(id(producer)))
            elif given[sequence] is not entry and stream not in self.unsteady:
                self.counts["batches made again"] += 1
                if not _same(given[sequence], entry):
                    raise Violation("equal sequences are equal batches", f"stream {stream}, batch {sequence}")

    def _first_given(self, stream: StreamId, entry: Entry, maker: Watch | None) -> None:
        given = self._given[stream]
        if entry.sequence < len(given):
            if entry.touches.any():
                raise Violation("equal sequences are equal batches", f"stream {stream}, batch {entry.sequence}")
            given[entry.sequence] = entry
        else:
            given.append(entry)
        for partition in np.flatnonzero(entry.touches).tolist():
            self._touching[stream, partition].append(entry.sequence)
        if maker is not None:
            self._committed_everywhere(stream, entry.sequence, maker)

    def _committed_everywhere(self, stream: StreamId, sequence: int, maker: Watch) -> None:
        """Nothing leaves before its step is known to all that may have to take over."""
        outlet = next(i for i, o in enumerate(maker.replica.outlets) if o.producer.stream == stream)
        made = [step for step, starts in maker.steps if starts[outlet] <= sequence]
        if made:
            self._known_everywhere(maker, made[-1], f"batch {sequence} of stream {stream} was given out")

    def _known_everywhere(self, maker: Watch, step: int, what: str) -> None:
        key = maker.replica.stage.id, maker.replica.partition
        table = self.controller.table
        assert table is not None
        for listed in table.stages[key[0]][key[1]]:
            core = self.alive(listed.worker)
            other = core.replicas.get(key) if core is not None else None
            if core is None or not self.controller.repairs.is_safe(*key, listed) or other is maker.replica:
                continue
            knows = other is not None and other.incarnation == listed.incarnation and other.order.end > step
            if knows and other is not None and step >= max(other.order.base, other.applied):
                entry = other.order[step]
                knows = _step(entry.kind, entry.now, entry.slices) == maker.orders[step]
            if not knows:
                raise Violation(
                    "nothing is given out before it is committed",
                    f"{what}, made by step {step} of {key}, which the safe replica on worker {listed.worker} does not know",
                )

    def _evicted(self, stream: StreamId, entry: Entry) -> None:
        table = self.controller.table
        assert table is not None
        consumer = self.plan.edges[stream.edge].consumer
        for partition in np.flatnonzero(entry.touches).tolist():
            addition = self.controller.repairs.under_way.get((consumer, partition))
            for listed in table.stages[consumer][partition]:
                unconfirmed = addition is not None and addition.worker == listed.worker and addition.phase == "retain"
                core = self.alive(listed.worker)
                replica = core.replicas.get((consumer, partition)) if core is not None else None
                if replica is None or replica.incarnation != listed.incarnation or unconfirmed:
                    continue
                if not self._has_applied(replica, stream, entry.sequence):
                    raise Violation(
                        "no batch leaves the log before it is applied",
                        f"stream {stream} dropped batch {entry.sequence}, which partition {partition} on worker "
                        f"{listed.worker} has not applied",
                    )

    def check_log(self, log: Log, stream: StreamId, where: str) -> None:
        if not log._entries:
            return
        held = sum(entry.nbytes for entry in log._entries)
        if held != log.bytes:
            raise Violation("the log counts its bytes", f"{where}, stream {stream}: {log.bytes} counted, {held} held")

    # ---- replicas

    def watch_replica(self, core: StageWorker, replica: Replica) -> None:
        watch = self._watches[id(replica)] = Watch(replica)
        self._kept.append(replica)
        for outlet in replica.outlets:
            self._maker[id(outlet.producer)] = watch
            self._published[id(outlet.producer)] = outlet.producer.log.base
        if replica.applied:
            for stream, inbound in core._inbound.items():
                if stream.edge in replica.stage.edges_in:
                    touching = self._touching[stream, replica.partition]
                    watch.counts[stream] = bisect_left(touching, inbound.next_to_apply(replica.partition))
            self.counts["copies of state with timers"] += bool(replica.context.timers.pending)
            self._inherit(watch)
        step = replica.step

        def watched_step(now: float) -> Any:
            before, time, decides = replica.applied, replica.context.now, replica.applied == replica.order.end
            if replica.between_steps:
                watch.steps.append((before, [outlet.producer.next_sequence for outlet in replica.outlets]))
                if not replica.primary and before >= replica.order.committed:
                    raise Violation(
                        "a secondary applies committed steps only", f"{replica.where}, step {before} on {core.worker}"
                    )
            slices = step(now)
            context = replica.context
            watch.orders[before] = _step(replica.kind, context.now, [(*s.stream, s.sequence) for s in replica.applying])
            if context.now < time:
                raise Violation("time never goes back", f"{replica.where}, step {before}: {context.now} after {time}")
            if replica.applied > before:
                self.counts["steps of a time that the clock has not reached"] += context.now > now
                if replica.kind is StepKind.TICK:
                    self._note_tick(replica, decides)
                self._stepped(watch, slices)
            return slices

        replica.step = watched_step  # type: ignore[method-assign]

    def _inherit(self, watch: Watch) -> None:
        """A copy of state has the steps of the primary that was copied, and must hold back the same of them."""
        replica = watch.replica
        step, stage, partition = replica.applied - 1, replica.stage.id, replica.partition
        others = [other for other in self._watches.values() if step in other.orders and other is not watch]
        same = [o for o in others if (o.replica.stage.id, o.replica.partition) == (stage, partition)]
        copied = max(same, key=lambda other: other.replica.leads_since, default=None)
        if copied is not None:
            watch.steps = [(at, starts) for at, starts in copied.steps if at <= step]
            watch.orders = {at: order for at, order in copied.orders.items() if at <= step}
            self.counts["copies of state with uncommitted steps"] += replica.order.committed <= step

    def _note_tick(self, replica: Replica, decides: bool) -> None:
        moved = (replica.stage.id, replica.partition, replica.incarnation) in self._moved
        self.counts["ticks applied by secondaries"] += not replica.primary
        self.counts["ticks applied by a moved copy"] += moved
        if decides:
            self.counts["ticks ordered by a moved copy"] += moved
            self.counts["ticks ordered by a promoted secondary"] += replica.leads_since > max(replica.incarnation, 0)

    def _stepped(self, watch: Watch, slices: list[Any]) -> None:
        replica = watch.replica
        for slice_ in slices:
            self._apply(watch, slice_.stream, slice_.sequence)
        official = self._official[replica.stage.id, replica.partition]
        while watch.final < min(replica.applied, replica.order.committed):
            order = watch.orders.get(watch.final)  # None: applied before it was copied
            if order is not None and official.setdefault(watch.final, order) != order:
                raise Violation(
                    "replicas take the same steps",
                    f"{replica.where}, step {watch.final}: {order} after {official[watch.final]}",
                )
            watch.final += 1

    def _apply(self, watch: Watch, stream: StreamId, sequence: int) -> None:
        partition = watch.replica.partition
        touching, count = self._touching[stream, partition], watch.counts.get(stream, 0)
        watch.counts[stream] = count + 1
        if stream not in self.unsteady and (count >= len(touching) or touching[count] != sequence):
            expected = touching[count] if count < len(touching) else "nothing more"
            raise Violation(
                "each partition applies each batch once and in order",
                f"stream {stream}, {watch.replica.where}: applied {sequence} where {expected} was next",
            )

    def _has_applied(self, replica: Replica, stream: StreamId, through: int) -> bool:
        watch = self._watches.get(id(replica))
        needed = bisect_right(self._touching[stream, replica.partition], through)
        return watch is not None and watch.counts.get(stream, 0) >= needed

    # ---- workers

    def watch_worker(self, core: StageWorker) -> None:
        answer = core._answer

        def watched_answer(connection: Any, message: Any) -> None:
            if isinstance(message, Ack | Resume | Standby):
                stream = StreamId(message.edge, message.producer)
                if not isinstance(message, Standby):
                    at = core.worker, stream
                    self._credit[at] = max(self._credit[at], core._inbound[stream].credit)
                    if core._inbound[stream].urgent:
                        self.counts["credit beyond the bound for starving replicas"] += 1
                        self._credit[at] = 1 << 60
                self._acked(core, stream, message)
            self.counts["resets"] += type(message).__name__ == "Reset"
            self.counts["streams that nobody reads from this replica"] += isinstance(message, Standby)
            self.counts["stale producers refused"] += getattr(message, "code", "") == "stale"
            answer(connection, message)

        core._answer = watched_answer  # type: ignore[method-assign]

    def _acked(self, core: StageWorker, stream: StreamId, message: Ack | Resume | Standby) -> None:
        if stream in self.unsteady:
            return
        behind = dict(message.behind)
        consumer = self.plan.edges[stream.edge].consumer
        for (stage, partition), replica in core.replicas.items():
            if stage == consumer and id(replica) in self._watches:
                through = behind.get(partition, message.through)
                if not self._has_applied(replica, stream, through):
                    raise Violation(
                        "an ack never exceeds what was applied",
                        f"worker {core.worker} acked stream {stream} through {through} for partition {partition}",
                    )
        for stage, partition in core.awaited:
            if stage == consumer and behind.get(partition, message.through) >= 0:
                raise Violation("nothing is acked before the state has come", f"worker {core.worker}, {partition}")

    def watch_roles(self, core: StageWorker) -> None:
        """After a new table: one primary per partition and term."""
        for (stage, partition), replica in core.replicas.items():
            if not replica.primary:
                continue
            at = stage, partition, replica.leads_since
            if self._leaders.setdefault(at, core.worker) != core.worker:
                raise Violation(
                    "one primary per partition and epoch",
                    f"{replica.where}, epoch {replica.leads_since}: workers {self._leaders[at]} and {core.worker}",
                )
            if replica.leads_since == core.epoch > replica.incarnation and replica.applied < replica.order.end:
                self.counts["promoted secondaries that had order left"] += 1
                if not replica._has(replica.order[replica.applied]):
                    self.counts["promoted secondaries that waited for rows"] += 1

    def check_worker(self, core: StageWorker) -> None:
        for stream, producer in core.producers.items():
            self.check_log(producer.log, stream, f"worker {core.worker}")
        held: dict[StreamId, dict[int, int]] = {}
        for replica in core.replicas.values():
            for stream, slices in replica._waiting.items():
                for slice_ in slices:
                    if slice_.held:
                        held.setdefault(stream, {})[id(slice_.packet)] = slice_.packet.nbytes
        for stream, packets in held.items():
            bound = self._credit[core.worker, stream] + self._largest[stream] + MESSAGE_BYTES
            if sum(packets.values()) > bound:
                raise Violation(
                    "bytes held <= credit + one message",
                    f"worker {core.worker} holds {sum(packets.values())} of stream {stream}, bound {bound}",
                )

    def check_idle(self, core: StageWorker, now: float) -> None:
        """After it has said that there is nothing to apply."""
        for replica in core.replicas.values():
            if replica.ready(now + core.wall_ahead):
                raise Violation("what is ready is applied", f"worker {core.worker}, {replica.where}")
            if now < replica.timer_at - core.wall_ahead < core.due():  # timers go by the wall clock
                raise Violation("a worker wakes up for its timers", f"worker {core.worker}, {replica.where}")

    def replicas_of(self, stage: int, partition: int) -> list[Replica]:
        """All that there have been, dead ones too."""
        replicas = (watch.replica for watch in self._watches.values())
        return [replica for replica in replicas if (replica.stage.id, replica.partition) == (stage, partition)]

    @property
    def entries_cut(self) -> int:
        return sum(watch.replica.order.cut for watch in self._watches.values())

    def check_finished(self, core: StageWorker, message: PartitionFinished) -> None:
        replica = core.replicas.get((message.stage, message.partition))
        if replica is not None and replica.applied:
            step = replica.applied - 1
            watch = self._watches[id(replica)]
            if step in watch.orders:
                self._known_everywhere(watch, step, "the end was reported")

    # ---- the controller

    def stall(self, stage: int, partition: int, now: float, seconds: float) -> None:
        """The state of a partition is being copied. Seen where it happens, not where it is ordered."""
        self._stalled = {key: until for key, until in self._stalled.items() if until > now}
        self._stalled[stage, partition] = now + seconds
        if len(self._stalled) > self.plan.settings.repairs_at_once:
            raise Violation("at most so many partitions stalled at a time", f"{sorted(self._stalled)}")

    def resume_all(self, stalled: Iterable[Key]) -> None:
        """Their process is dead."""
        for key in stalled:
            self._stalled.pop(key, None)

    def check_controller(self) -> None:
        """After each of its decisions."""
        table, repairs = self.controller.table, self.controller.repairs
        if table is None:
            return
        stages = {addition.stage for addition in repairs.under_way.values()}
        if len(repairs.under_way) > self.plan.settings.repairs_at_once:
            raise Violation("at most so many additions at a time", f"{list(repairs.under_way)}")
        if len(stages) > 1:
            raise Violation("the sweep goes stage by stage", f"additions in stages {sorted(stages)}")
        self._moved |= {(*a.key, a.incarnation) for a in repairs.under_way.values() if a.source is not None}
        if table.epoch == self._table_seen:
            return
        self._table_seen = table.epoch
        for stage in self.plan.stages:
            for partition, replicas in enumerate(table.stages[stage.id]):
                workers = [replica.worker for replica in replicas]
                if len(set(workers)) < len(workers) or not set(workers) <= set(table.endpoints):
                    raise Violation("replicas are on different workers of the table", f"{stage.name}/{partition}")
                if replicas and not repairs.is_safe(stage.id, partition, replicas[0]):
                    raise Violation("a primary is safe", f"{stage.name}/{partition}: {replicas}")
                addition = repairs.under_way.get((stage.id, partition))
                moving = addition is not None and addition.source is not None
                if len(replicas) > stage.replicas + moving:
                    raise Violation("no more replicas than asked for", f"{stage.name}/{partition}: {replicas}")
                self._check_apart((stage.id, partition), workers, addition)

    def _check_apart(self, key: Key, workers: list[int], addition: Addition | None) -> None:
        """The loss of one executor takes one copy. Source and target of a move may share one: only one of them stays."""
        if self.plan.settings.same_executor:
            return
        if addition is not None and addition.source is not None:
            at_first = self._copies_at_first.setdefault((*key, addition.incarnation), len(workers))
            if len(workers) == at_first:  # none of the others was lost
                workers = [worker for worker in workers if worker != addition.source]
        members = self.controller.members.workers
        executors = [members[worker].about.executor for worker in workers]
        if len(set(executors)) < len(executors):
            at = dict(zip(workers, executors, strict=True))
            raise Violation("copies are on different executors", f"{self.plan.stages[key[0]].name}/{key[1]}: {at}")


def _step(kind: StepKind, now: float, slices: Iterable[Any]) -> Any:
    return kind, now, tuple(tuple(one) for one in slices)


def _same(one: Entry, other: Entry) -> bool:
    if (one.data is None) != (other.data is None) or one.last != other.last:
        return False
    if not np.array_equal(one.touches, other.touches):
        return False
    if one.data is None or other.data is None:
        return True
    return _same_rows(one.data, other.data)


def _same_rows(one: Clustered, other: Clustered) -> bool:
    if np.array_equal(one.order, other.order):
        return np.array_equal(one.offsets, other.offsets) and one.batch.equals(other.batch)
    return all(one.rows_of(p).equals(other.rows_of(p)) for p in range(one.partitions))
