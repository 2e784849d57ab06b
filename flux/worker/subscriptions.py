"""The streams that a worker reads: their offers, the chosen replica of each producer, and acks (design: subscription).

A stream of a source has one producer. A stream of a stage is offered by every replica of its producer; it is read from one
of them and acked to all, so that each can truncate its log.

Left to others: one stream (``flux.exchange.inbound``), and applying slices (the replicas).

``Credit`` shares the bytes that the worker is ready to hold. Rows that do not come are found by ``flux.reach.starvation``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from flux.dataflow.plan import FromDataFrame, FromSource, FromStage, Plan
from flux.dataflow.plan_change import PlanVersions
from flux.errors import QueryFailed
from flux.exchange.feed import IN_ORDER, Counters
from flux.exchange.inbound import Delivery, Inbound
from flux.reach.hedging import FurtherFeeds
from flux.reach.loans import Borrower
from flux.reach.starvation import OwedRows, Starvation
from flux.replica.replica import Replica
from flux.replica.step_queue import ReplicaStep
from flux.state.copies_sent import CopiesSent
from flux.state.standby import Standby
from flux.state.state_copy import StreamPosition
from flux.wire.messages import (
    Ack,
    Acks,
    AppliedThrough,
    Borrow,
    Bound,
    Data,
    Hello,
    Mark,
    Passed,
    ReadsElsewhere,
    Refuse,
    Reset,
    Settled,
    ToProducer,
    Unordered,
    Unread,
    in_messages,
)
from flux.worker.hosted_replicas import HostedReplicas
from partitioning.ids import PartitionKey, StreamId


@dataclass
class Half:
    """One half of the credit. ``expected`` is the number of streams that will come, as far as is known, so that the first
    streams do not get the share of later ones."""

    expected: int = 0
    streams: dict[StreamId, Inbound] = field(default_factory=dict)


@dataclass
class Credit:
    """The credit of a worker's inbound streams: shares of the bytes that the worker is ready to hold (design: credit-halves).
    ``floor`` is the least credit of a stream: with less than the size of a typical batch, every message would wait for an ack.

    Streams of sources, which are few and fast, share one half, and streams of stages the other, as in the logs of their senders.
    Otherwise a source beside a stage of many partitions would get the share of one partition, and wait for acks all the time."""

    bytes_max: int
    floor: int = 64 << 10
    sources: Half = field(default_factory=Half)
    stages: Half = field(default_factory=Half)

    def expect(self, sources: int, stages: int) -> None:
        """Note the numbers of streams that will come from sources and from stages."""
        self.sources.expected, self.stages.expected = sources, stages

    def admit(self, inbound: Inbound, of_source: bool) -> None:
        (self.sources if of_source else self.stages).streams[inbound.stream] = inbound
        halves = [half for half in (self.sources, self.stages) if half.expected or half.streams]
        for half in halves:
            share = self.bytes_max // len(halves) // max(len(half.streams), half.expected, 1)
            for other in half.streams.values():
                other.credit = max(share, self.floor)

    def release(self, stream: StreamId) -> None:
        """Release the credit of a stream that has ended."""
        self.sources.streams.pop(stream, None)
        self.stages.streams.pop(stream, None)


#: Limit on the times that the same batch arrives damaged: more often is no accident on the way.
UNDECODABLE_MAX = 5

Answer = Callable[[Hashable, ToProducer | Acks | Borrow], None]


class Subscriptions:
    """The subscriptions of one worker. ``answer`` sends a message back on a connection."""

    def __init__(self, plans: PlanVersions, hosted: HostedReplicas, counters: Counters, answer: Answer) -> None:
        plan = plans.newest
        self.streams: dict[StreamId, Inbound] = {}
        self.credit = Credit(plan.settings.credit_max_bytes)
        #: Time at which ``flush_acks`` has something to send.
        self.ack_at = np.inf
        #: Seconds for which an ack may wait for others, unless a producer may be short of credit by then. The shell of a busy
        #: worker makes it longer.
        self.ack_s = plan.settings.ack_interval
        self._plan, self._plans = plan, plans
        self._hosted = hosted
        self._counters = counters
        self.answer = answer
        #: Greetings that came before the table or the state that they need.
        self._early: list[tuple[Hashable, Hello]] = []
        #: Streams of stages that are read from no replica at present.
        self._left: set[StreamId] = set()
        #: Copies of states under way from here.
        self.copies = CopiesSent(plan, hosted.worker, self.streams, self.of_stream, self.ack_soon)
        self._nonce = 0
        self._starvation = Starvation(plan.settings.resend_timeout)
        link_s = plan.settings.link_timeout
        self.owed = OwedRows(link_s)
        self.feeds = FurtherFeeds(hosted.worker, self._readable, self._open, self._read_elsewhere, self._starvation)
        self.borrower = Borrower(hosted.replicas, hosted.besides, self.of_stream, self._next_nonce, counters, link_s)

    def validate(self) -> None:
        """Check the invariants that hold between any two events. AssertionError names the broken one."""
        waits = 0
        for replica in self._hosted.replicas.values():
            begun = None if replica.under_way is None else replica.under_way.slices
            for stream, slices in replica.waits.by_stream.items():
                noted, count = self.streams[stream].waiting[replica.partition], len(slices)
                waits += count
                count += sum([slice_.stream == stream for slice_ in begun]) if begun else 0
                assert len(noted) == count, f"{replica.where}, stream {stream}: {count} wait, {len(noted)} noted"
                newest = slices[-1].first
                assert noted[-1] == newest, f"{replica.where}, stream {stream}: {newest} came last, {noted[-1]} noted"
            waits += len(begun) if begun else 0
        in_all = sum([len(noted) for inbound in self.streams.values() for noted in inbound.waiting.values()])
        assert in_all == waits, f"{waits} slices wait for replicas, {in_all} are noted"
        for stream, inbound in self.streams.items():
            inbound.validate_marks(self.hosted_by(stream))

    # ---- the table

    def go_by(self, plan: Plan) -> None:
        """Go by this version of the plan, whose table comes next: the streams of removed edges end here without another word."""
        self._plan = plan
        for stream in [stream for stream in self.streams if stream.edge not in plan.edges]:
            del self.streams[stream]
            self.credit.release(stream)
            self._left.discard(stream)
            self.owed.drop(stream)
            self.feeds.drop(stream)
            self.borrower.drop(stream)
        self.copies.go_by(plan)

    def _expect(self) -> None:
        """Share the credit anew among the streams to read by the partitions that the worker hosts now."""
        inbound = [edge for edge in self._plan.edges if len(self._hosted.partitions[edge.consumer])]
        of_stages = sum(edge.producers for edge in inbound if edge.from_stage)
        self.credit.expect(sources=sum(edge.producers for edge in inbound) - of_stages, stages=of_stages)

    def on_table(self, changed: Sequence[Sequence[int]]) -> None:
        """Go on by the newest table, and answer the producers that knew it first. ``changed`` partitions of each stage."""
        self._choose_replicas_to_read(changed)
        assert self._hosted.table is not None
        self.copies.forget(self._hosted.table)
        self._answer_early()

    def discard(self, replica: Replica) -> None:
        waiting, others = replica.waiting(), self._hosted.besides(replica)
        for inbound in self.of(replica):
            inbound.discard(replica.partition, waiting.get(inbound.stream, ()), others)

    def enter(self, replicas: Sequence[Replica]) -> None:
        """Share the credit anew, because the worker hosts other partitions than before, and add new replicas, which need their
        streams from the start."""
        self._expect()
        for place, replica in enumerate(replicas):
            if streams := self.of(replica):
                later = {each.partition for each in replicas[place + 1 :] if each.stage is replica.stage}
                others = [partition for partition in self._hosted.besides(replica) if partition not in later]
                for inbound in streams:
                    inbound.join(replica.partition, others)

    def adopt(self, replica: Replica, others: Collection[int], positions: Iterable[StreamPosition]) -> None:
        """Add a replica that has come to life, and read on for it. It has applied its streams through these positions, and needs
        all other streams from the start. ``others``: the other partitions of its stage here."""
        self._expect()
        at = {position.stream: position for position in positions}
        for inbound in self.of(replica):
            if inbound.stream not in at:
                inbound.join(replica.partition, others)
        for position in at.values():
            marks = [Mark(*mark) for mark in position.marks]
            inbound = self.of_stream(position.stream)
            inbound.join_at(replica.partition, position.next, others, position.incarnation, marks)
        # Also streams that the copied replica did not know: their handshakes are without this partition.
        for inbound in self.of(replica):
            self._ask_again(inbound, replica.reads_since)
        self._answer_early()

    def _answer_early(self) -> None:
        """Answer greetings that came too early and need not wait any longer."""
        early, self._early = self._early, []
        for connection, hello in early:
            self.on_hello(connection, hello)

    def kept(self, standby: Standby) -> None:
        """Ack rows that are in a standby's new checkpoint, because its producers need not keep these any more."""
        for position in standby.positions:
            inbound = self.of_stream(position.stream)
            inbound.adopt(position.incarnation, [Mark(*mark) for mark in position.marks])
        for inbound in self.streams.values():
            if self._plan.edges[inbound.stream.edge].consumer == standby.key.stage:
                self.ack_soon(inbound)

    def on_press(self, connection: Hashable, stream: StreamId) -> None:
        """Ack again to a producer that waits for acks of standbys. They may have been lost with an earlier connection."""
        inbound = self.streams.get(stream)
        if inbound is not None and self._hosted.standbys_of(self._plan.edges[stream.edge].consumer):
            self.answer(connection, self._ack(inbound))

    def on_bound(self, connection: Hashable, message: Bound, now: float) -> bool:
        """Take a statement about a stream's watermark, and tell whether it says anything new. A worker for which a stream has no
        rows gets nothing but statements, so these show that the connection of the last handshake is gone."""
        if self.borrower.knows(connection, message):
            return self.borrower.hear(message)
        known = self._greeted(connection, StreamId(message.edge, message.producer))
        inbound = None if known is None else self._stated(connection, message)
        if inbound is None:
            if known is not None and (feed := known.over(connection)) and feed.goes_on_without_resume(message.nonce):
                self.ack_soon(known)  # it names the newest handshake (design: lost-resume)
            return False
        said = inbound.hear(message, self.hosted_by(inbound.stream), self._counters)
        if inbound.has_feeds:
            self.feeds.note(inbound, connection, said, message, now)
        return said

    def _stated(self, connection: Hashable, message: Settled | Passed | Bound) -> Inbound | None:
        """Return the stream that a producer's statement is about. None: the statement is of no use, because it is of another life
        or handshake, or because its producer does not know all replicas here."""
        inbound = self.streams.get(StreamId(message.edge, message.producer))
        feed = None if inbound is None else inbound.over(connection)
        if inbound is None or feed is None:
            self._counters.stale += 1
            return None
        if isinstance(message, Settled):
            current, epoch = inbound.incarnation == message.incarnation, message.epoch
        else:
            current, epoch = feed.nonce == message.nonce, feed.epoch
        if not current:
            self._counters.stale += 1
            return None
        # A producer that does not know a replica here repeats its statement once it does.
        return inbound if self._hosted.newest[self._plan.edges[message.edge].consumer] <= epoch else None

    def on_settled(self, connection: Hashable, message: Settled) -> None:
        """Note a producer's report that no row through a mark is needed any more. A new replica may begin with an older state, so
        the report counts only if it is about all replicas here."""
        inbound, stage = self._stated(connection, message), self._plan.edges[message.edge].consumer
        if inbound is None or self._hosted.awaited_of(stage):
            return
        inbound.settle(message.mark)
        for standby in self._hosted.standbys_of(stage):
            if standby.incarnation <= message.epoch:
                standby.note_settled(inbound.stream, message.mark)
        self.ack_soon(inbound)

    def on_passed(self, connection: Hashable, message: Passed) -> list[PartitionKey]:
        """Take a producer's report that rows of an earlier life do not come any more. Return the replicas with an ordered step
        that goes on without such rows. DataLost: a step that wants them may not.

        Only a worker that has everything the producer has sent can tell which rows are missing, and only a handshake that
        names all replicas here has asked for the rows of all."""
        inbound = self._stated(connection, message)
        if inbound is None or inbound.feed.phase is not IN_ORDER or inbound.feed.number != message.number:
            return []  # a step that waits in vain asks again
        stage = self._plan.edges[message.edge].consumer
        mine = [replica for replica in self._hosted.replicas.values() if replica.stage.id == stage]
        return [replica.key for replica in mine if replica.note_passed(inbound.stream, message.below)]

    # ---- greetings

    def on_hello(self, connection: Hashable, hello: Hello) -> None:
        stream = StreamId(hello.edge, hello.producer)
        exists, newer = self._exists(stream), hello.epoch > self._hosted.epoch
        named = exists or self._plans.may_name(hello.edge)
        if newer and named:
            # The producer knows a table that has not arrived here yet; answer when it has.
            self._wait(connection, hello)
        elif not named and not newer:
            self._refuse(connection, stream, "edge", f"the plan has no edge {hello.edge}")
        elif not exists:
            self._counters.stale += 1  # of a removed edge, or of a version that is asked for: then it greets again
        elif self._plan.durable and self._begins(hello):
            # The beginning of its replicas here is not known yet, and a source has to be read from there.
            self._wait(connection, hello)
        elif hello.epoch < self._hosted.newest[self._plan.edges[hello.edge].consumer]:
            # It does not know of all replicas here and would leave out rows for them. It will learn of them, and then greet
            # again.
            self._counters.stale += 1
        else:
            self._welcome(connection, hello, self.of_stream(stream))

    def _wait(self, connection: Hashable, hello: Hello) -> None:
        """Keep a greeting for later, in place of an earlier one of the same producer."""
        who = hello.edge, hello.producer, hello.worker
        waiting = [(c, h) for c, h in self._early if (h.edge, h.producer, h.worker) != who]
        self._early = [*waiting, (connection, hello)]

    def _begins(self, hello: Hello) -> bool:
        """Tell whether a source greets a stage with a replica here that has no state yet, because its state has still to come
        from the vault or to be restored."""
        edge = self._plan.edges[hello.edge]
        return not edge.from_stage and self._hosted.restores(edge.consumer)

    def _welcome(self, connection: Hashable, hello: Hello, inbound: Inbound) -> None:
        if self._plan.edges[hello.edge].from_stage:
            self._welcome_replica(connection, hello, inbound)
        elif not self._reads(hello) or (hello.worker >= 0 and hello.incarnation < inbound.incarnation):
            # The table names the worker that reads a source. A later incarnation may be known here before that table.
            self._counters.stale += 1
        elif hello.incarnation < inbound.incarnation:
            reason = f"incarnation {inbound.incarnation} of this producer has taken over"
            self._refuse(connection, inbound.stream, "stale", reason)
        else:
            self._subscribe(inbound, connection, hello.incarnation, hello.epoch)

    def _reads(self, hello: Hello) -> bool:
        """Tell whether the sender reads that partition of the source by the newest table; always true of ingress."""
        match self._plan.edges[hello.edge]:
            case FromDataFrame():
                return True
            case FromSource(source=source):
                return self._hosted.reader_of(source, hello.producer) == hello.worker
        return False

    def _refuse(self, connection: Hashable, stream: StreamId, code: str, reason: str) -> None:
        self._count_refused(stream)
        self.answer(connection, Refuse(*stream, code, reason))

    def _exists(self, stream: StreamId) -> bool:
        """Tell whether the plan has such a stream."""
        return stream.edge in self._plan.edges and stream.producer >= 0

    def _count_refused(self, stream: StreamId) -> None:
        """Count a message about a stream that is not read from its sender. Such messages are under way whenever a worker is given
        up, a reader of a source changes or a task is tried again, so they are stale. A message about a stream that the plan does
        not have is refused, because its sender has made it up."""
        if self._exists(stream) or self._plans.may_name(stream.edge):
            self._counters.stale += 1
        else:
            self._counters.refused += 1

    # ---- which replica of a producer to read from

    def _welcome_replica(self, connection: Hashable, hello: Hello, inbound: Inbound) -> None:
        listed = self._producers_of(inbound.stream)
        if listed.get(hello.worker, (-1, False))[0] != hello.incarnation:
            self._counters.stale += 1  # dropped meanwhile; the table will tell the sender
            return
        inbound.offers[hello.worker], inbound.offered[hello.worker] = connection, hello.epoch
        self.owed.greeted(inbound.stream, hello.worker)
        live = listed[hello.worker][1]
        if live and inbound.feed.worker in (-1, hello.worker):
            self._subscribe(inbound, connection, 0, hello.epoch, hello.worker)
        elif live and (inbound.reads_all or hello.worker in inbound.others):
            self._open(inbound, hello.worker)
        else:
            self._read_elsewhere(inbound, hello.worker)
            self.ack_soon(inbound)

    def _read_elsewhere(self, inbound: Inbound, worker: int) -> None:
        """Tell a replica of the producer that it is not read, and close the feed from there, if there is one."""
        inbound.others.pop(worker, None)
        ack = self._ack(inbound)
        self.answer(inbound.offers[worker], ReadsElsewhere(*inbound.stream, ack.epoch, ack.through, ack.behind))

    def _producers_of(self, stream: StreamId) -> dict[int, tuple[int, bool]]:
        return self._hosted.producers_of(stream)

    def _choose_replicas_to_read(self, changed: Sequence[Sequence[int]]) -> None:
        """Go on reading from a survivor if the replica that a stream was read from is gone."""
        of_changed = (
            StreamId(edge.id, producer)
            for edge in self._plan.edges
            if isinstance(edge, FromStage)
            for producer in changed[edge.stage]
        )
        for stream in sorted({*of_changed, *self._left}):
            inbound = self.streams.get(stream)
            if inbound is None:
                continue
            listed = self._producers_of(stream)
            inbound.offers = {worker: c for worker, c in inbound.offers.items() if worker in listed}
            inbound.others = {worker: f for worker, f in inbound.others.items() if listed.get(worker, (-1, False))[1]}
            if inbound.feed.worker in listed and listed[inbound.feed.worker][1]:
                continue
            self._counters.switched += inbound.feed.worker >= 0
            if inbound.others:  # it goes on without a handshake
                inbound.prefer(min(inbound.others))
                self.ack_soon(inbound)
                continue
            self._leave(inbound)
            candidates = self._readable(inbound)
            if candidates:
                # Prefer this worker's own replica; otherwise spread over the other ones.
                mine = self._hosted.worker
                chosen = mine if mine in candidates else candidates[mine % len(candidates)]
                self._subscribe(inbound, inbound.offers[chosen], 0, inbound.offered[chosen], chosen)

    def _readable(self, inbound: Inbound) -> list[int]:
        """List the workers from whose replica of the producer the stream may be read, among those that have offered it. A worker
        that does not know yet all replicas that read here would leave out rows for them. It will learn of them, and then greet
        again."""
        listed = self._producers_of(inbound.stream)
        newest = self._hosted.newest[self._plan.edges[inbound.stream.edge].consumer]
        return [w for w in inbound.offers if listed.get(w, (-1, False))[1] and inbound.offered[w] >= newest]

    def _subscribe(
        self, inbound: Inbound, connection: Hashable, incarnation: int, epoch: int, read_from: int = -1,
        starved: bool = False,
    ) -> None:  # fmt: skip
        """Read a stream from this connection. ``starved``: an ordered step here lacks its rows."""
        self._left.discard(inbound.stream)
        inbound.greet(incarnation, connection, self._next_nonce(), epoch, read_from)
        hosted = self.hosted_by(inbound.stream)
        others = self._not_reading(inbound.stream)
        front = self._front(inbound) if inbound.numbered or starved or inbound.may_lose else 0
        end = self._ordered_end(inbound) if inbound.own_numbers else -1
        self.answer(connection, inbound.resume(self._hosted.epoch, hosted, others, front, end))
        if len(inbound.offers) > 1:
            self.ack_soon(inbound)

    def _open(self, inbound: Inbound, worker: int) -> None:
        """Read a stage's stream also from the replica of its producer on another worker, which has offered it."""
        inbound.open(inbound.offers[worker], self._next_nonce(), inbound.offered[worker], worker)
        others = self._not_reading(inbound.stream)
        resume = inbound.resume(self._hosted.epoch, self.hosted_by(inbound.stream), others, worker=worker)
        self.answer(inbound.offers[worker], resume)

    def _next_nonce(self) -> int:
        self._nonce += 1
        return self._nonce

    def on_unordered(self, connection: Hashable, message: Unordered) -> None:
        """Ask a secondary for slices that its primary here lacks."""
        for question in self.borrower.ask(connection, message):
            self.answer(connection, question)

    def _ask_again(self, inbound: Inbound, since: int) -> None:
        """Read a stream also for a replica that has joined, and that reads since the table of this epoch."""
        for worker in list(inbound.others):
            if inbound.offered[worker] >= since:
                self._open(inbound, worker)
            else:
                del inbound.others[worker]
        if inbound.feed.connection is not None and inbound.feed.epoch >= since:
            self._subscribe(
                inbound, inbound.feed.connection, inbound.incarnation, inbound.feed.epoch, inbound.feed.worker
            )
        else:
            self._leave(inbound)  # the producer may not know of this replica yet; it will greet again when it does

    def _leave(self, inbound: Inbound) -> None:
        inbound.leave()
        if self._plan.edges[inbound.stream.edge].from_stage:
            self._left.add(inbound.stream)

    def relieve(self, now: float) -> None:
        """Help ordered steps whose rows do not come: read these from another replica of their producer, and admit them
        even if the credit is used up."""
        received = lambda stream, partition: self.of_stream(stream).received[partition]  # noqa: E731
        for inbound in self.streams.values():
            inbound.urgent = False
        for stream, wait in self._starvation.look(self._hosted.replicas.values(), received, now).items():
            inbound = self.streams[stream]
            if wait.elsewhere:
                self.read_from_next(inbound)
            if wait.urgent:
                inbound.urgent = True
                self.ack_soon(inbound)

    def on_unread(self, connection: Hashable, message: Unread) -> None:
        """Note the statement of a replica that is not read: it has elements that are not acked. The acks may have been lost."""
        inbound = self.streams.get(StreamId(message.edge, message.producer))
        if inbound is None or inbound.offers.get(message.worker) != connection:
            self._counters.stale += 1
            return
        self.ack_soon(inbound)
        if inbound.lacks(message.end, self.hosted_by(inbound.stream)):
            self.owed.note(inbound, message.worker, message.end)

    def look_for_owed(self, now: float) -> None:
        """Read streams from another replica of their producer that has rows which do not come from the present one (design:
        owed-rows)."""
        for inbound, worker in self.owed.look(self.streams, self.hosted_by, now):
            if worker != (before := inbound.feed.worker) and worker in self._readable(inbound):
                self._go_over(inbound, worker)
                self.owed.went_over(inbound, before, now)

    def try_elsewhere(self, holders: Iterable[Inbound], now: float) -> None:
        """Read streams from another replica of their producer that keep a window open, and of which nothing comes (design:
        owed-rows)."""
        for inbound in self.owed.held((each for each in holders if len(each.offers) > 1), now):
            before = inbound.feed.worker
            self.read_from_next(inbound)
            self.owed.went_over(inbound, before, now)

    def _go_over(self, inbound: Inbound, worker: int) -> None:
        """Read a stream from the replica of its producer on another worker, which has offered it. The present feed stays if the
        stream may have several."""
        self._counters.switched += 1
        before = inbound.feed
        if inbound.has_feeds and before.worker in inbound.offers:
            inbound.others[before.worker] = before
        self._subscribe(inbound, inbound.offers[worker], 0, inbound.offered[worker], worker)

    def read_from_next(self, inbound: Inbound) -> None:
        """Read a stage's stream from the next live replica of its producer that has offered it. The reader of a source gets the
        end of the orders here instead: it has more room for these rows (design: ordered-room). So does the only replica of a
        producer whose rows may be gone: it answers that they do not come."""
        if self._plan.edges[inbound.stream.edge].from_stage:
            ring = sorted(self._readable(inbound))
            others = [w for w in ring if w > inbound.feed.worker] + [w for w in ring if w < inbound.feed.worker]
            if others:
                self._go_over(inbound, others[0])
            if others or not inbound.may_lose:
                return
        if inbound.feed.connection is not None:
            where = inbound.feed.epoch, inbound.feed.worker
            self._subscribe(inbound, inbound.feed.connection, inbound.incarnation, *where, starved=True)

    # ---- rows

    def knows(self, connection: Hashable, message: Data) -> bool:
        """Tell whether this stream is read from this connection, or lent on it, and has rows that are new by its header; only
        then is a payload worth decoding."""
        inbound = self.streams.get(StreamId(message.edge, message.producer))
        if inbound is None or self.borrower.knows(connection, message):
            return inbound is not None
        return inbound.over(connection) is not None and not inbound.repeats(message)

    def _greeted(self, connection: Hashable, stream: StreamId) -> Inbound | None:
        """Return a stream that is read on a connection. None: it is not, and its producer is to greet first."""
        inbound = self.streams.get(stream)
        if inbound is not None and inbound.over(connection) is not None:
            return inbound
        self._count_refused(stream)
        self.answer(connection, Reset(*stream, "say Hello first"))
        return None

    def take(
        self, connection: Hashable, message: Data, batches: Sequence[pa.RecordBatch], now: float
    ) -> list[Delivery]:
        """Take a message, and return its slices to be applied, by partition."""
        if self.borrower.knows(connection, message):
            self._ack_within(self.ack_s, now)
            return self.borrower.take(message, batches, now)
        inbound = self._greeted(connection, StreamId(message.edge, message.producer))
        if inbound is None:
            self.feeds.closed(self.streams.get(StreamId(message.edge, message.producer)), connection, message.nbytes)
            return []
        stage, before = self._plan.edges[message.edge].consumer, inbound.received.least
        hosted, secondary = self._hosted.partitions[stage], self._hosted.secondary[stage]
        taken = inbound.take(message, batches, hosted, secondary, self._counters)
        if isinstance(taken, Reset):
            self.answer(connection, taken)
            return []
        self._note_ack(inbound, now)
        if inbound.has_feeds:
            self.feeds.note(inbound, connection, inbound.received.least > before, message, now)
        return taken

    def on_undecodable(self, connection: Hashable, message: Data, reason: str) -> None:
        """Ask again for a payload damaged on the way; QueryFailed if that does not help, because it never will."""
        self._counters.malformed += 1
        stream = StreamId(message.edge, message.producer)
        inbound = self.streams[stream]
        feed = inbound.over(connection)
        if feed is None or message.nonce != feed.nonce or feed.phase is not IN_ORDER:
            return
        if inbound.spoilt(feed, message.first) >= UNDECODABLE_MAX:  # the first: a run may have grown meanwhile
            raise QueryFailed(
                f"{self._plan.describe_stream(*stream)}: batch {message.sequence} cannot be decoded by worker "
                f"{self._hosted.worker}, {UNDECODABLE_MAX} times in a row: {reason}. Its columns are "
                f"{_columns(self._plan.edges[stream.edge].schema)}. "
                "Do all executors run the same releases of Flux and pyarrow?"
            )
        self.answer(connection, Reset(*stream, f"batch {message.sequence} cannot be decoded"))

    def applied(self, step: ReplicaStep, now: float) -> None:
        """Return the credit of a step, whose slices were the oldest pending ones of its partition: they are in its state and its
        output logs."""
        if not step.slices:
            return
        urgent, partition = False, step.key.partition
        for slice_ in step.slices:
            inbound = self.streams[slice_.stream]
            urgent |= inbound.applied(partition, slice_)
            if step.rows is None and slice_.ends_stream and not any(inbound.waiting.values()):
                self.credit.release(slice_.stream)
        self._ack_within(0.0 if urgent else self.ack_s, now)

    # ---- acks

    def flush_acks(self) -> None:
        self.ack_at = np.inf
        due: dict[Hashable, list[Ack]] = {}
        for inbound in self.streams.values():
            if not inbound.ack_due:
                continue
            ack = self._ack(inbound)
            # All replicas of the producer get it, so that each can truncate its log.
            for worker, connection in inbound.offers.items() or [(-1, inbound.feed.connection)]:
                if connection is not None:
                    due.setdefault(connection, []).append(inbound.ack_over(worker, ack))
        for connection, acks in due.items():
            for some in in_messages(acks):
                self.answer(connection, some[0] if len(some) == 1 else Acks(some))

    def _ack(self, inbound: Inbound) -> Ack:
        return inbound.ack(self._hosted.epoch, self.hosted_by(inbound.stream), self._not_reading(inbound.stream))

    def _note_ack(self, inbound: Inbound, now: float) -> None:
        if inbound.ack_due:
            self._ack_within(0.0 if inbound.ack_urgent else self.ack_s, now)

    def _ack_within(self, seconds: float, now: float) -> None:
        self.ack_at = min(self.ack_at, now + seconds)

    def ack_soon(self, inbound: Inbound) -> None:
        """Ack to all replicas of the producer at once: Resume and ReadsElsewhere carry an ack to one of them only."""
        inbound.ack_due = True
        self.ack_at = 0.0

    # ---- look-ups

    def of_stream(self, stream: StreamId) -> Inbound:
        inbound = self.streams.get(stream)
        if inbound is None:
            edge = self._plan.edges[stream.edge]
            numbered = self._plan.numbered(edge)
            inbound = Inbound(stream, edge.input, self.credit.floor, not edge.from_stage, numbered)
            inbound.may_lose = self._plan.may_lose(edge, passed_over=True)
            inbound.own_numbers = self._plan.brings_numbers(edge.id)
            self.streams[stream] = inbound
            if isinstance(edge, FromStage) and not inbound.may_lose:  # else repeated batches may have fewer rows
                inbound.mode = self._plan.stages[edge.stage].feeds
            self.copies.begin(inbound)
            self.credit.admit(inbound, of_source=not edge.from_stage)
        return inbound

    def _front(self, inbound: Inbound) -> int:
        """Return the number below which all rows have come, or are in an order here or in the checkpoint of a standby (design:
        numbered-rows, ordered-room)."""
        stage = self._plan.edges[inbound.stream.edge].consumer
        fronts = [inbound.received[partition] for partition in self._hosted.partitions[stage]]
        fronts += [order.ordered_below(inbound.stream) for order in self._hosted.orders_of(stage)]
        if inbound.own_numbers:
            fronts += [standby.position(inbound.stream) for standby in self._hosted.standbys_of(stage)]
        return max(fronts, default=0)

    def _ordered_end(self, inbound: Inbound) -> int:
        """Return the number of the end of a stream if an order here has it, or the checkpoint of a standby, or -1 (design:
        row-numbers). A standby receives nothing, so it has no mark of the end but that in its checkpoint."""
        stage = self._plan.edges[inbound.stream.edge].consumer
        ends = [order.ordered_end(inbound.stream) for order in self._hosted.orders_of(stage)]
        ends += [standby.end_of(inbound.stream) for standby in self._hosted.standbys_of(stage)]
        return max(ends, default=-1)

    def of(self, replica: Replica) -> list[Inbound]:
        return [inbound for inbound in self.streams.values() if inbound.stream.edge in replica.stage.edges_in]

    def hosted_by(self, stream: StreamId) -> Collection[int]:
        """Return the partitions here that read a stream."""
        return self._hosted.partitions[self._plan.edges[stream.edge].consumer]

    def _not_reading(self, stream: StreamId) -> list[AppliedThrough]:
        """Return the progress of replicas here that do not read a stream themselves: none for a replica whose state has not come
        yet, the position in its checkpoint for a standby."""
        stage, hosted = self._plan.edges[stream.edge].consumer, self._hosted
        said = [AppliedThrough(partition, -1) for partition in hosted.awaited_of(stage)] if hosted.awaited else []
        if hosted.followers:
            said += [AppliedThrough(s.key.partition, s.position(stream) - 1) for s in hosted.standbys_of(stage)]
        return said

    @property
    def held_bytes(self) -> int:
        return sum(inbound.held_bytes for inbound in self.streams.values())


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
