"""The laws that every run must keep, checked from outside with the simulation's own bookkeeping (design: laws).

There are two kinds of evidence: the rows that operators of the simulation see, and the steps and batches that pass the
seams of the state machines (applied, given out, acked, evicted). The ledger knows the whole cluster at once, which no
process does: at the moment when an output leaves, the ledger sees whether every safe replica could make that output again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from flux.arguments import ONE
from flux.dataflow.plan import FromSource, Plan
from flux.exchange.consumer_progress import MESSAGE_BYTES
from flux.exchange.log import Log, LogEntry, Rows
from flux.exchange.producer import Producer
from flux.operators.operator import Context
from flux.replica.replica import Replica
from flux.replica.step_queue import ReplicaStep
from flux.state.standby import Standby
from flux.wire.control import PartitionFinished
from flux.wire.messages import Ack, Acks, Borrow, ReadsElsewhere, Resume, StepKind
from flux.worker.core import WorkerCore
from partitioning.ids import DISK, PartitionKey, StreamId
from partitioning.table import FIRST_EPOCH
from tests.simulation.contents import contents
from tests.simulation.evidence import batches_of, order_of, same_batch, step_of, through
from tests.simulation.numbered_rows import last_of, makes_again, numbered, publish
from tests.simulation.step_watch import watch_order, watch_steps
from tests.simulation.table_laws import TableLaws
from tests.simulation.violation import Key, Violation
from tests.simulation.witness import WITNESS

if TYPE_CHECKING:
    from controller.decide.controller import Controller
    from tests.simulation.event_time_laws import EventTimeLaws
    from tests.simulation.feed_laws import FeedLaws

#: Turns of workers after which the state machines of one worker are asked to look at themselves.
VALIDATED_EVERY = 16


class Watch:
    """The ledger's knowledge of one replica."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        #: By stream: the number of batches with rows for the replica that it has applied.
        self.counts: dict[StreamId, int] = {}
        #: The number of each step, and the position in each log at which the output of that step begins.
        self.steps: list[tuple[int, dict[StreamId, int]]] = []
        #: By number: the content of a step (``step_of``).
        self.orders: dict[int, Any] = {}
        #: By stream: elements through this one may be gone, because an earlier life that is lost has acked them.
        self.lacks: dict[StreamId, int] = {}
        #: Steps below this one are committed, and compared with the same steps of other replicas.
        self.final = replica.applied


class Ledger:
    def __init__(self) -> None:
        #: By edge, removed ones included: the source or the stage of its rows, as (from a stage, id).
        self.origins: dict[int, tuple[bool, int]] = {}
        #: Edges of numbered rows, removed ones included: a worker that still follows an earlier version goes on with them.
        self.numbered: set[int] = set()
        self.controller: Controller
        self.counts: Counter[str] = Counter()
        self.keys: dict[str, tuple[str, ...]] = {}
        #: Streams whose batches differ between attempts: their sequence numbers prove nothing.
        self.unsteady: set[StreamId] = set()
        #: Streams in which some replica has given rows another origin than its primary did (``divergence``).
        self.altered: set[StreamId] = set()
        #: The worker of this id if its process is alive.
        self.alive: Callable[[int], WorkerCore | None] = lambda worker: None
        self._home: dict[tuple[str, Any], int] = {}
        self._given: dict[StreamId, list[Any]] = defaultdict(list)  # elements that streams have given out, by sequence
        #: Rows that streams of numbered rows have given out, and the ends of these streams, by ascending number.
        self._given_rows: dict[StreamId, dict[int, tuple[tuple[int, ...], Any]]] = defaultdict(dict)
        #: Whether some log has lost a record before all replicas had applied it: a batch that is made again may have fewer rows.
        self.lossy = False
        #: Whether some source goes on after a loss.
        self.goes_on = False
        #: Tells whether the record with a number of a stream has been lost before all replicas had applied it.
        self.is_gone: Callable[[StreamId, int], bool] = lambda stream, number: False
        self._touching: dict[tuple[StreamId, int], list[int]] = defaultdict(list)
        self._largest: dict[StreamId, int] = defaultdict(int)
        self._credit: dict[tuple[int, StreamId], int] = defaultdict(int)
        #: By worker and stream: the most bytes that each partition has asked a secondary for.
        self._lent: dict[tuple[int, StreamId], dict[int, int]] = defaultdict(dict)
        self._published: dict[int, int] = {}  # id of a producer -> batches seen to be given out
        self._kept: list[Any] = []  # so that ids stay unique
        self._watches: dict[int, Watch] = {}
        self._maker: dict[int, Watch] = {}  # id of a producer -> the replica that feeds it
        #: By stream and partition: the element through which any replica has acked.
        self._acked_through: dict[tuple[StreamId, int], int] = {}
        self._official: dict[Key, dict[int, Any]] = defaultdict(dict)  # the content of each committed step
        self._leaders: dict[tuple[int, int, int], int] = {}
        #: The end of the steps that a primary has ordered before it had heard from all live replicas.
        self._ordered_unheard: dict[Key, int] = {}
        self._turns = 0  # of all workers
        #: The laws of event time, of all lives; None: rows have no event time.
        self.event_time: EventTimeLaws = None  # type: ignore[assignment]
        self.tables = TableLaws(self)
        #: The laws of streams with several feeds, of the run under way.
        self.feeds: FeedLaws = None  # type: ignore[assignment]

    @property
    def plan(self) -> Plan:
        """The version of the plan by which the controller goes. Workers may still follow an earlier one."""
        return self._plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self._plan = plan
        self.origins |= {edge.id: (edge.from_stage, plan.origin(edge).id) for edge in plan.edges}
        self.numbered |= {edge.id for edge in plan.edges if plan.numbered(edge)}

    def newest_given(self, stream: StreamId) -> Any:
        """Return the last batch, row or end that a stream has given out; None if there is none."""
        rows = self._given_rows[stream]
        return rows[next(reversed(rows))] if rows else next(reversed(self._given[stream]), None)

    # ---- rows, as operators see them

    def one_home(self, stage: str, context: Context, batch: pa.RecordBatch) -> None:
        if self.keys.get(stage):
            columns = (batch.column(name).to_pylist() for name in self.keys[stage])
            for key in dict.fromkeys(
                zip(*columns, strict=True)
            ):  # in the order of the rows: a law names the same key always
                if self._home.setdefault((stage, key), context.partition) != context.partition:
                    raise Violation("one partition per key", f"{stage}: {key} came to two partitions")

    # ---- producers

    def watch_producer(self, producer: Producer, current: Callable[[], bool], careless: Callable[[], bool]) -> None:
        """Watch the log of a producer.

        ``current``: whether its process still has a part in the query, as far as the controller knows; ``careless``: whether
        the producer shall repeat, this time, batches that no consumer asked for.
        """
        self._make_careless(producer, careless)
        self._kept.append(producer)
        stream, log = producer.stream, producer.log
        append, evict = log.append, log.evict

        def watched_append(entry: LogEntry) -> None:
            beyond = log.bytes >= log.bytes_max and isinstance(entry.element, Rows)
            if beyond and not makes_again(self.origins, self._kept, producer):
                detail = f"stream {stream}: {log.bytes} of {log.bytes_max} bytes"
                raise Violation("log bytes <= bound + one batch", detail)
            append(entry)

        def watched_evict(acked: np.ndarray) -> int:
            self.publish(producer)
            if not log or np.count_nonzero(acked[(head := log[log.base]).touches] < head.sequence):
                return 0
            entries = log.entries()
            dropped = evict(acked)
            self.counts["batches evicted"] += dropped
            if stream not in self.unsteady and current():
                for entry in entries[:dropped]:
                    self._evicted(stream, entry)
            assert log.base == entries[dropped - 1].sequence + 1 if dropped else not log.base
            return dropped

        log.append, log.evict = watched_append, watched_evict  # type: ignore[method-assign]

    def _make_careless(self, producer: Producer, chance: Callable[[], bool]) -> None:
        """Let a producer go on, now and then, from the start of its log instead of the position that it was told."""
        on_resume = producer.on_resume

        def careless_resume(worker: int, message: Resume, now: float) -> None:
            on_resume(worker, message, now)
            cursor = producer._cursors.get(worker)
            if cursor is not None and cursor.nonce == message.nonce and producer.log.base < cursor.next and chance():
                self.counts["resumed too early on purpose"] += 1
                cursor.first = cursor.next = producer.log.base
                cursor.become_reading()

        producer.on_resume = careless_resume  # type: ignore[method-assign]

    def publish(self, producer: Producer) -> None:
        """Check the batches that a producer may give out by now: they are the same from every replica and every attempt."""
        stream, log = producer.stream, producer.log
        seen = self._published.get(id(producer), 0)
        end = min(log.end, producer.release_from)
        if end <= seen:
            return
        self._published[id(producer)] = end
        if numbered(self, stream):
            publish(self, producer, seen)
            return
        given = self._given[stream]
        for sequence in range(max(seen, log.base), end):
            entry = log[sequence]
            self._largest[stream] = max(self._largest[stream], entry.nbytes)
            while sequence > len(given):
                given.append(None)  # a batch without rows, which was evicted as soon as it was there
            if sequence == len(given) or given[sequence] is None:
                self._first_given(stream, entry, self._maker.get(id(producer)))
            elif given[sequence] is not entry and stream not in self.unsteady:
                self.counts["batches made again"] += 1
                if not same_batch(given[sequence], entry, stream in self.altered):
                    was, now = contents(given[sequence]), contents(entry)
                    detail = f"stream {stream}, batch {sequence}: at first {was}, and now {now}"
                    raise Violation("equal sequences are equal batches", detail)

    def _first_given(self, stream: StreamId, entry: LogEntry, maker: Watch | None) -> None:
        given = self._given[stream]
        if entry.sequence < len(given):
            if len(entry.touches):
                raise Violation("equal sequences are equal batches", f"stream {stream}, batch {entry.sequence}")
            given[entry.sequence] = entry
        else:
            given.append(entry)
        for partition in entry.touches.tolist():
            self._touching[stream, partition].append(entry.sequence)
        if self.event_time is not None:
            self.event_time.given(stream, entry)
        if maker is not None:
            self._committed_everywhere(stream, entry.sequence, maker)

    def _committed_everywhere(self, stream: StreamId, sequence: int, maker: Watch) -> None:
        """Check that a batch leaves only when all replicas that may have to take over know its step."""
        made = [step for step, starts in maker.steps if starts.get(stream, 0) <= sequence]
        if made:
            self._known_everywhere(maker, made[-1], f"batch {sequence} of stream {stream} was given out")

    def _known_everywhere(self, maker: Watch, step: int, what: str) -> None:
        key = maker.replica.stage.id, maker.replica.partition
        listing = () if self.controller.table is None else self.controller.board.shown.row(*key)
        for listed in listing:
            core, repairs = self.alive(listed.worker), self.controller.repairs
            counts = (
                listed.kind == DISK or repairs.safety.is_safe(*key, listed) or repairs.safety.has_arrived(*key, listed)
            )
            if core is None or not counts or core.replicas.get(key) is maker.replica:
                continue
            other = core.replicas.get(key) or core.hosted.followers.get(key)
            other = None if other is None or other.incarnation != listed.incarnation else other
            if other is None and self.plan.durable and listed.incarnation > FIRST_EPOCH:
                continue  # its state is to come from the vault, with all steps that the vault knows
            order = None if other is None else order_of(other)
            knows = order is not None and order.end > step
            if knows and order is not None and step >= max(order.base, getattr(other, "applied", 0)):
                entry = order[step]
                knows = step_of(entry.kind, entry.now, entry.slices) == maker.orders[step]
            self.counts["steps that a witness had to know"] += listed.kind == WITNESS
            if not knows:
                raise Violation(
                    "nothing is given out before it is committed",
                    f"{what}, made by step {step} of {key}, which the replica on worker {listed.worker} does not know",
                )

    def _evicted(self, stream: StreamId, entry: LogEntry) -> None:
        if self.controller.table is None or stream.edge not in self.plan.edges:
            return  # all workers were lost, or the edge is removed: this one does not know yet
        table, edge = self.controller.board.shown, self.plan.edges[stream.edge]
        again = isinstance(edge, FromSource) and self.plan.sources[edge.source].seeks
        for partition in entry.touches.tolist():
            last = last_of(entry, partition) if numbered(self, stream) else entry.sequence
            addition = self.controller.repairs.under_way.get((edge.consumer, partition))
            for listed in table.row(edge.consumer, partition):
                core = self.alive(listed.worker)
                if core is None or (
                    addition is not None and addition.worker == listed.worker and addition.phase == "retain"
                ):
                    continue
                replica = core.replicas.get((edge.consumer, partition))
                kept = core.followers.get(PartitionKey(edge.consumer, partition))
                if again and (replica is None or replica.reads_since >= replica.incarnation):
                    continue  # for a standby, and for a replica that was a standby before, the batch is read again
                if isinstance(kept, Standby) and kept.incarnation == listed.incarnation:
                    self.counts["batches evicted that a checkpoint has"] += 1
                    if kept.checkpoint.next.get(stream, 0) <= last:
                        raise Violation(
                            "no batch leaves the log before it is in the checkpoints",
                            f"stream {stream} dropped batch {entry.sequence}, and the checkpoint of partition {partition} on "
                            f"worker {listed.worker} goes to {kept.checkpoint.next.get(stream, 0)}",
                        )
                if replica is None or replica.incarnation != listed.incarnation:
                    continue
                if not self._has_applied(replica, stream, last):
                    raise Violation(
                        "no batch leaves the log before it is applied",
                        f"stream {stream} dropped batch {entry.sequence}, which partition {partition} on worker "
                        f"{listed.worker} has not applied",
                    )

    def check_log(self, log: Log, stream: StreamId, where: str) -> None:
        held = sum([entry.nbytes for entry in log._entries])
        if held != log.bytes:
            raise Violation("the log counts its bytes", f"{where}, stream {stream}: {log.bytes} counted, {held} held")

    # ---- replicas

    def watch_outlets(self, replica: Replica) -> None:
        """Watch the outlets of a replica that are not watched yet."""
        for outlet in replica.outlets:
            if id(outlet.producer) not in self._published:
                if not replica.orders_itself:
                    self._maker[id(outlet.producer)] = self._watches[id(replica)]
                self._published[id(outlet.producer)] = outlet.producer.log.base

    def watch_replica(self, core: WorkerCore, replica: Replica) -> None:
        watch = self._watches[id(replica)] = Watch(replica)
        self._kept.append(replica)
        self.watch_outlets(replica)
        if core.hosted.placed[replica.key].empty:
            streams = [known for known in self._acked_through if known[1] == replica.partition]
            watch.lacks = {stream: self._acked_through[stream, partition] for stream, partition in streams}
            self._official[replica.stage.id, replica.partition].clear()
        if replica.applied:
            for stream, inbound in core.subscriptions.streams.items():
                if stream.edge in replica.stage.edges_in:
                    touching = self._touching[stream, replica.partition]
                    watch.counts[stream] = bisect_left(touching, inbound.next_to_apply(replica.partition))
            self.counts["copies of state with timers"] += bool(replica.context.timers.pending)
            self._inherit(watch)
        began = (
            0.0,
            0.0,
            False,
        )  # time of the worker and of the operator, and whether the replica orders the step itself

        def begins(now: float) -> None:
            nonlocal began
            before, order = replica.applied, replica.order
            began = now, replica.context.now, before == order.end
            if self.lossy and before < order.end:  # a batch without rows may leave the log before the step is over
                ordered = order[before]
                watch.orders[before] = step_of(ordered.kind, ordered.now, ordered.slices)
            watch.steps.append(
                (before, {each.producer.stream: each.producer.next_sequence for each in replica.outlets})
            )
            if not replica.primary and before >= order.committed:
                raise Violation(
                    "a secondary applies committed steps only", f"{replica.where}, step {before} on {core.worker}"
                )

        def ends(step: ReplicaStep, applied: bool | None) -> None:
            if applied is None:
                return
            number, kind = step.number, step.entry.kind
            context, (now, time, decides) = replica.context, began
            if step.gone and not self.goes_on:
                raise Violation("lost records are told", f"{replica.where}: step {number} goes on without all its rows")
            watch.orders[number] = step_of(kind, context.now, step.entry.slices if step.gone else through(step.slices))
            if context.now < time:
                raise Violation("time never goes back", f"{replica.where}, step {number}: {context.now} after {time}")
            if applied:
                self.counts["steps of a time that the clock has not reached"] += context.now > now
                if kind is StepKind.TICK:
                    self._note_tick(replica, decides)
                self._stepped(watch, step.slices)

        watch_steps(replica, begins, ends)
        if not replica.orders_itself:
            watch_order(replica, self.plan.settings.order_max_steps, self.alive, self._ordered_unheard)
        if self.event_time is not None:
            self.event_time.watch(core, replica)

    def _inherit(self, watch: Watch) -> None:
        """Give a copy of state the steps of the primary that was copied: output of the same steps must be held back."""
        replica = watch.replica
        if replica.orders_itself:
            return
        step, stage, partition = replica.applied - 1, replica.stage.id, replica.partition
        others = [other for other in self._watches.values() if step in other.orders and other is not watch]
        same = [o for o in others if (o.replica.stage.id, o.replica.partition) == (stage, partition)]
        copied = max(same, key=lambda other: other.replica.leads_since, default=None)
        if copied is not None:
            watch.steps = [(at, starts) for at, starts in copied.steps if at <= step]
            watch.orders = {at: order for at, order in copied.orders.items() if at <= step}
            self.counts["copies of state with uncommitted steps"] += replica.order.committed <= step

    def _note_tick(self, replica: Replica, decides: bool) -> None:
        moved = (replica.stage.id, replica.partition, replica.incarnation) in self.tables.moved
        self.counts["ticks applied by secondaries"] += not replica.primary
        self.counts["ticks applied by a moved copy"] += moved
        if decides:
            self.counts["ticks ordered by a moved copy"] += moved
            self.counts["ticks ordered by a promoted secondary"] += replica.leads_since > max(replica.incarnation, 0)

    def _stepped(self, watch: Watch, slices: Sequence[Any]) -> None:
        replica = watch.replica
        for slice_ in slices:
            batches = batches_of(slice_)
            self.counts["slices of several batches"] += len(batches) > 1
            for sequence in batches:
                self._apply(watch, slice_.stream, sequence)
        if replica.orders_itself:
            return
        official = self._official[replica.stage.id, replica.partition]
        while watch.final < min(replica.applied, replica.order.committed):
            order = watch.orders.get(watch.final)  # None: applied before it was copied
            if order is not None and official.setdefault(watch.final, order) != order:
                detail = f"{replica.where}, step {watch.final}: {order} after {official[watch.final]}"
                raise Violation("replicas take the same steps", detail)
            watch.final += 1

    def _apply(self, watch: Watch, stream: StreamId, sequence: int) -> None:
        partition = watch.replica.partition
        touching, count = self._touching[stream, partition], watch.counts.get(stream, 0)
        lacks = watch.lacks.get(stream, -1)
        while (self.lossy or lacks >= 0) and count < len(touching) and touching[count] != sequence:
            if touching[count] > lacks and not (self.lossy and self.is_gone(stream, touching[count])):
                break
            count += 1
        watch.counts[stream] = count + 1
        if stream not in self.unsteady and (count >= len(touching) or touching[count] != sequence):
            expected = touching[count] if count < len(touching) else "nothing more"
            detail = f"stream {stream}, {watch.replica.where}: applied {sequence} where {expected} was next"
            raise Violation("each partition applies each batch once and in order", detail)

    def _has_applied(self, replica: Replica, stream: StreamId, through: int) -> bool:
        watch = self._watches.get(id(replica))
        touching = self._touching[stream, replica.partition]
        needed, count = bisect_right(touching, through), 0 if watch is None else watch.counts.get(stream, 0)
        if watch is not None and watch.lacks:
            needed = needed if through > watch.lacks.get(stream, -1) else 0
            count = max(count, bisect_right(touching, watch.lacks.get(stream, -1)))
        gone = self.lossy and all(self.is_gone(stream, number) for number in touching[count:needed])
        return watch is not None and (count >= needed or gone)

    # ---- workers

    def watch_worker(self, core: WorkerCore) -> None:
        answer = core.subscriptions.answer
        self.feeds.watch(core)

        def watched_answer(connection: Any, message: Any) -> None:
            for one in message.items if isinstance(message, Acks) else (message,):
                if isinstance(one, Ack | Resume | ReadsElsewhere):
                    stream = StreamId(one.edge, one.producer)
                    if not isinstance(one, ReadsElsewhere):
                        self._granted(core, stream)
                    self._acked(core, stream, one)
            if isinstance(message, Borrow):
                lent = self._lent[core.worker, StreamId(message.edge, message.producer)]
                lent[message.partition] = max(message.room, lent.get(message.partition, 0))
            self.feeds.note_answer(core, connection, message)
            self.counts["resets"] += type(message).__name__ == "Reset"
            self.counts["streams that nobody reads from this replica"] += isinstance(message, ReadsElsewhere)
            self.counts["stale producers refused"] += getattr(message, "code", "") == "stale"
            answer(connection, message)

        core.subscriptions.answer = watched_answer

    def _granted(self, core: WorkerCore, stream: StreamId) -> None:
        at, inbound = (core.worker, stream), core.subscriptions.streams[stream]
        self._credit[at] = max(self._credit[at], inbound.credit)
        if inbound.urgent:
            self.counts["credit beyond the bound for starving replicas"] += 1
            self._credit[at] = 1 << 60

    def _acked(self, core: WorkerCore, stream: StreamId, message: Ack | Resume | ReadsElsewhere) -> None:
        if stream in self.unsteady:
            return
        behind = dict(message.behind)
        if stream.edge not in self.plan.edges:
            return
        consumer = self.plan.edges[stream.edge].consumer
        for (stage, partition), replica in core.replicas.items():
            if stage == consumer and id(replica) in self._watches:
                through = behind.get(partition, message.through)
                at = stream, partition
                self._acked_through[at] = max(through, self._acked_through.get(at, -1))
                if not self._has_applied(replica, stream, through):
                    raise Violation(
                        "an ack never exceeds what was applied",
                        f"worker {core.worker} acked stream {stream} through {through} for partition {partition}",
                    )
        for stage, partition in core.awaited:
            if stage == consumer and behind.get(partition, message.through) >= 0:
                raise Violation("nothing is acked before the state has come", f"worker {core.worker}, {partition}")

    def watch_roles(self, core: WorkerCore) -> None:
        """Check after a new table that there is one primary per partition and term."""
        for (stage, partition), replica in core.replicas.items():
            if not replica.leads:
                continue
            at = stage, partition, replica.leads_since
            if self._leaders.setdefault(at, core.worker) != core.worker:
                raise Violation(
                    "one primary per partition and epoch",
                    f"{replica.where}, epoch {replica.leads_since}: workers {self._leaders[at]} and {core.worker}",
                )
            if replica.leads_since == core.epoch > replica.incarnation and replica.applied < replica.order.end:
                self.counts["promoted secondaries that had order left"] += 1
                if not replica.waits.has(replica.order[replica.applied]):
                    self.counts["promoted secondaries that waited for rows"] += 1

    def check_machines(self, core: WorkerCore) -> None:
        """Let each state machine check itself, now and then: a broken one stays broken until the next look."""
        self._turns += 1
        if self._turns % VALIDATED_EVERY:
            return
        for what, machine in [
            *((f"producer of stream {stream}", producer) for stream, producer in core.producers.items()),
            *((f"stream {stream}", inbound) for stream, inbound in core.subscriptions.streams.items()),
            *((f"order of {replica.where}", replica.order) for replica in core.replicas.values()),
            *((replica.where, replica) for replica in core.replicas.values()),
            ("itself", core),
        ]:
            try:
                machine.validate()
            except AssertionError as broken:
                raise Violation(
                    "state machines keep their invariants", f"worker {core.worker}, {what}: {broken}"
                ) from None

    def check_order(self, replica: Replica) -> None:
        """Check that the steps that a replica has still to apply are within the bound, or were ordered before the primary had
        heard from all live replicas.

        Such a primary cannot know how far the others are. They are at most a bound behind the last step that was committed when
        it took over, because an earlier primary had heard from them up to there. No step is committed without them, and the
        primary's own log keeps all uncommitted steps: so the primary orders at most a bound beyond that step. The step stays the
        same however many primaries follow each other unheard."""
        order, bound = replica.order, self.plan.settings.order_max_steps
        kept = len(order)
        if kept <= bound:
            return
        unheard = self._ordered_unheard.get((replica.stage.id, replica.partition), 0)
        if kept > 2 * bound or order.end > unheard:
            raise Violation(
                "order logs stay within their bound",
                f"{replica.where}: {kept} steps below {order.end}, bound {bound}; its primary had not heard from all others "
                f"below {unheard}",
            )

    def check_worker(self, core: WorkerCore) -> None:
        self.check_machines(core)
        self.feeds.check(core)
        for stream, producer in core.producers.items():
            if producer.log:
                self.check_log(producer.log, stream, f"worker {core.worker}")
        held: dict[StreamId, dict[int, int]] = {}
        for replica in core.replicas.values():
            self.check_order(replica)
            self.counts["turns with a full order log"] += replica.primary and replica.held_back
            for stream, slices in replica._waiting.items():
                for slice_ in slices:
                    if slice_.held:
                        held.setdefault(stream, {})[id(slice_.packet)] = slice_.packet.nbytes
        for stream, packets in held.items():
            bound = self._credit[core.worker, stream] + self._largest[stream] + MESSAGE_BYTES
            # Rows that a secondary lends come beside the credit that the producer has already, which cannot be taken back.
            bound += sum(self._lent[core.worker, stream].values())
            if core.subscriptions.streams[stream].mode != ONE:
                # Two feeds divide a stream into messages in different ways: each message has bytes of its own beside its rows.
                bound += MESSAGE_BYTES * len(packets)
            if sum(packets.values()) > bound:
                raise Violation(
                    "bytes held <= credit + one message",
                    f"worker {core.worker} holds {sum(packets.values())} of stream {stream}, bound {bound}",
                )

    def check_idle(self, core: WorkerCore, now: float) -> None:
        """Check a worker that has said that there is nothing to apply."""
        wall = now + core.wall_ahead
        for replica in core.replicas.values():
            if replica.ready(wall):
                raise Violation("a ready replica takes its step", f"worker {core.worker}, {replica.where}")
            timer_at = replica.timer_at
            if wall < timer_at < inf and now < timer_at - core.wall_ahead < core.due():  # timers go by the wall clock
                raise Violation("a worker wakes up for its timers", f"worker {core.worker}, {replica.where}")

    def replicas_of(self, stage: int, partition: int) -> list[Replica]:
        """Return all replicas that a partition has had, dead ones included."""
        replicas = (watch.replica for watch in self._watches.values())
        return [replica for replica in replicas if (replica.stage.id, replica.partition) == (stage, partition)]

    @property
    def entries_cut(self) -> int:
        return sum(watch.replica.order.cut for watch in self._watches.values())

    def check_finished(self, core: WorkerCore, message: PartitionFinished) -> None:
        replica = core.replicas.get((message.stage, message.partition))
        if replica is not None and replica.applied and not replica.orders_itself:
            step = replica.applied - 1
            watch = self._watches[id(replica)]
            # A finished partition still takes the steps at which new edges begin, perhaps in the same turn.
            while step in watch.orders and watch.orders[step][0] is StepKind.CHANGE:
                step -= 1
            if step in watch.orders:
                self._known_everywhere(watch, step, "the end was reported")
