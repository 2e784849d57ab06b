"""Ways over a third worker, for messages of two workers that cannot reach each other (design: relayed-answers).

Three kinds of messages have answers without which work stands still: orders of steps, whose answers commit these steps, rows of
a source, whose acks empty its log, and statements of a secondary about rows that its primary may lack. A worker that lacks such
an answer for long sends the order, a question for the acks, or the statement, over a third worker. The answer takes the same way
back, and so do rows that are borrowed in it, of a secondary or out of the log of the reader. Once an answer has come so, orders
and statements take this way at once, until another one comes directly.

Law: nothing is believed that would not be believed on the direct way. Orders have a term, a life and numbers, acks an epoch, a
question for acks the life of the producer, and lent rows the nonce of their loan, of which there is one for the way. All of them
may be lost, late and repeated. The worker in between keeps no row: a loan has no more bytes than its borrower has credit for.

Left to others: the messages themselves (``flux.replica.order_exchange``, ``flux.exchange.producer``, ``flux.reach.loans``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

import pyarrow as pa

from flux.exchange.feed import Counters
from flux.exchange.inbound import Inbound
from flux.exchange.producer import Producer, ToWorker, lent_from_log, owing
from flux.exchange.source_streams import SourceStreams
from flux.reach.loans import LONGEST, Borrower, Lender
from flux.replica.replica import Replica
from flux.wire.messages import (
    Ack,
    Acks,
    Answered,
    Borrow,
    Bound,
    Data,
    Orders,
    OrdersSeen,
    Relayed,
    Unordered,
    UnorderedRows,
    WantAck,
)
from partitioning.ids import PartitionKey, SourcePartition, StreamId
from partitioning.table import Table

#: In link timeouts: the time between two looks at the acks of sources, and between two attempts over different workers.
LOOK = 1 / 3
#: The number of attempts that follow each other so soon, because a worker in a long step answers none. Each further attempt waits
#: twice as long as the one before, at most this number of link timeouts.
QUICK_TRIES, PATIENCE_MAX = 4, 2.0
#: In link timeouts: the time for which a question asks for acks. The next one comes after one.
LEASE = 3.0
#: In link timeouts: the time after its last message for which the way of statements counts. They come at least as often while
#: rows wait, so none is left for a link that is up again.
STATED = LONGEST + 2
#: In link timeouts: the time for which a worker counts as out of reach after something has come from it over a third one.
KNOWN = 2.0
#: In link timeouts: the time after its last request for which a worker counts as one that borrows out of logs here.
BORROWS = STATED
#: Seconds after its last message for which a link is kept open.
KEPT_S = 5.0


class RelayedFrom(NamedTuple):
    """The way of a message over a third worker, in place of the connection of a direct one: answers take it back."""

    origin: int
    over: int


@dataclass(slots=True)
class RelayedWay:
    """The way of messages to one worker which does not answer directly."""

    #: The worker over which the last one went.
    over: int = -1
    #: The time before which none goes over another worker, and none is repeated.
    next_at: float = -inf
    #: The number of attempts without an answer, and link timeouts from the last one to the next.
    tries: int = 0
    patience: float = LOOK
    #: An answer has come this way, the first one then.
    answers: bool = False
    since: float = inf
    #: The time of the next message that goes directly as well, to find out whether the link is up again.
    direct_at: float = -inf
    #: The time of the last message or answer.
    used: float = -inf


class RelayedWays:
    """The ways of one worker's messages of one kind, by the worker to which they go."""

    def __init__(self, worker: int, link_s: float) -> None:
        self._worker, self._link_s = worker, link_s
        self.ways: dict[int, RelayedWay] = {}

    def next(self, to: int, others: Collection[int], now: float) -> int:
        """Return the worker over which a message goes that has had no answer for long; -1: none goes now, or there is no third
        worker. Attempts go over all ``others`` in turn."""
        way = self.ways.setdefault(to, RelayedWay())
        ring = sorted(other for other in others if other not in (self._worker, to))
        if now < way.next_at or not ring:
            return -1
        way.over = next((other for other in ring if other > way.over), ring[0])
        quick = way.tries < min(len(ring), QUICK_TRIES)
        way.patience = LOOK if quick else min(max(2 * way.patience, 1.0), PATIENCE_MAX)
        way.tries, way.answers = way.tries + 1, False
        way.next_at, way.used = now + self._link_s * way.patience, now
        return way.over

    def answered(self, to: int, over: int, now: float) -> None:
        """Note that an answer has come over a third worker."""
        if (way := self.ways.get(to)) is not None:
            way.over, way.answers, way.tries, way.next_at, way.used = over, True, 0, -inf, now
            way.since = min(way.since, now)

    def keep(self, workers: Collection[int], used_after: float = -inf) -> None:
        """Forget ways to and over workers that are gone, and those that were last used before a time."""
        self.ways = {
            to: way for to, way in self.ways.items() if to in workers and way.over in workers and way.used >= used_after
        }


@dataclass(slots=True)
class Lease:
    """A request for the acks of a stream over a third worker, until a time."""

    origin: int
    over: int
    until: float


@dataclass(slots=True)
class Statements:
    """Statements of the secondaries here to the primaries on one worker that have had no answer, the first one made ``at``."""

    at: float
    rows: dict[Hashable, UnorderedRows] = field(default_factory=dict)


@dataclass(slots=True)
class OwedAcks:
    """The acks of a worker at the last looks at a source that lacks some: their sum, and the least of a partition that owes some,
    each with the first look that found it so."""

    total: int
    total_since: float
    least: int
    least_since: float

    def look(self, total: int, least: int, now: float) -> None:
        if total != self.total:
            self.total, self.total_since = total, now
        if least != self.least:
            self.least, self.least_since = least, now


class Relays:
    """The messages of one worker that go over others, and those of others that go over it."""

    def __init__(
        self,
        worker: int,
        link_s: float,
        replicas: Mapping[PartitionKey, Replica],
        sources: Mapping[SourcePartition, SourceStreams],
        streams: Mapping[StreamId, Inbound],
        ack_soon: Callable[[Inbound], None],
        lender: Lender,
        borrower: Borrower,
        take: Callable[[Hashable, Any, Sequence[pa.RecordBatch], float], None],
        on_answer: Callable[[int, Answered, float], None],
        counters: Counters,
    ) -> None:
        """Begin without any. ``replicas``, ``sources`` and ``streams``: those of the worker, live mappings; ``lender`` and
        ``borrower`` have its loans; ``take`` takes a message as if it had come on a connection; ``on_answer`` takes the answer of
        a worker, ``ack_soon`` makes acks of a stream."""
        self._worker, self._link_s = worker, link_s
        self._replicas = replicas
        self._sources = sources
        self._streams = streams
        self._ack_soon = ack_soon
        self._lender, self._borrower, self._take = lender, borrower, take
        self._on_answer = on_answer
        self._counters = counters
        self._table: Table | None = None
        #: The time of the last call of ``ask``. If it was long before that of this one, answers wait to be read here.
        self._now, self._late = -inf, False
        #: Ways of orders to secondaries, of questions for acks to consumers, and of statements about rows to primaries.
        self._orders, self._questions = RelayedWays(worker, link_s), RelayedWays(worker, link_s)
        self._loans = RelayedWays(worker, link_s)
        #: Ways of questions to workers of which some partition acks nothing, while others do. It may be busy, or out of reach.
        self._offers = RelayedWays(worker, link_s)
        #: By the worker of the primaries: the statements that go over a third worker unless these borrow something before.
        self._stated: dict[int, Statements] = {}
        #: By worker that borrows out of logs here: the worker over which its last request has come, and the time of that.
        self._borrowed: dict[int, tuple[int, float]] = {}
        #: By worker: the time of the last message that has come from there over a third one.
        self._heard: dict[int, float] = {}
        self._owed: dict[tuple[StreamId, int], OwedAcks] = {}
        self._leases: dict[StreamId, Lease] = {}
        self._look_at = -inf
        #: By worker: the time of the last message that went there for others, or over it.
        self._used: dict[int, float] = {}

    @property
    def reaches(self) -> set[int]:
        """Workers to which a message has gone lately because others cannot reach each other."""
        return {worker for worker, used in self._used.items() if self._now <= used + KEPT_S}

    def links(self) -> list[tuple[int, int, float]]:
        """List the workers whose answers come over others, with these, and the time since which."""
        found: dict[tuple[int, int], float] = {}
        for ways in self._orders.ways, self._questions.ways, self._loans.ways:
            for to, way in ways.items():
                if way.answers:
                    found[to, way.over] = min(way.since, found.get((to, way.over), inf))
        return [(*link, since) for link, since in found.items()]

    # ---- messages that come

    def take(
        self, message: Relayed, batches: Sequence[pa.RecordBatch], table: Table | None, now: float
    ) -> Iterator[ToWorker]:
        """Send a message on, or take it and yield the answer. ``batches``: its payload."""
        ends = {message.origin, message.over, message.to}
        if table is None or len(ends) < 3 or not ends <= table.endpoints.keys() or self._worker == message.origin:
            self._counters.stale += 1
        elif self._worker == message.over:
            if isinstance(message.message, Data) and len(message.message.runs) != len(batches):
                self._counters.stale += 1  # of an edge that the plan here does not have
            else:
                yield self._to(message.to, message, now, batches)
        elif self._worker == message.to:
            self._heard[message.origin] = now
            yield from self._deliver(message, batches, now)
        else:
            self._counters.misrouted += 1

    def _deliver(self, relayed: Relayed, batches: Sequence[pa.RecordBatch], now: float) -> Iterator[ToWorker]:
        message, origin, over = relayed.message, relayed.origin, relayed.over
        way = RelayedFrom(origin, over)
        match message:
            case Orders() | Unordered():
                self._take(way, message, (), now)
            case Data() | Bound():
                if self._borrower.knows(way, message):
                    self._take(way, message, batches, now)
                else:
                    self._counters.stale += 1
            case Borrow():
                if message.of_log:
                    self._borrowed[origin] = over, now
                else:
                    self._loans.answered(origin, over, now)
                    self._stated.pop(origin, None)
                for lent, rows in self._lent(origin, message):
                    yield self._to(over, Relayed(self._worker, over, origin, lent), now, rows)
            case OrdersSeen():
                self._orders.answered(origin, over, now)
                self._on_answer(origin, message, now)
            case Acks():
                self._questions.answered(origin, over, now)
                self._on_answer(origin, message, now)
            case WantAck():
                stream = StreamId(message.edge, message.producer)
                inbound = self._streams.get(stream)
                if inbound is None or inbound.incarnation != message.incarnation:
                    self._counters.stale += 1
                    return
                self._leases[stream] = Lease(origin, over, now + LEASE * self._link_s)
                self._ack_soon(inbound)
                for question in self._borrower.ask_reader(way, stream, message, origin, now):
                    yield self._to(over, Relayed(self._worker, over, origin, question), now)

    def _lent(self, worker: int, message: Borrow) -> Iterator[tuple[Data | Bound, tuple[pa.RecordBatch, ...]]]:
        """Yield the slices that a primary on a worker borrows, of its secondary here or in the log of a reader."""
        if not message.of_log:
            yield from self._lender.slices(message)
            return
        for source in self._sources.values():
            for producer in source.producers:
                if producer.stream == (message.edge, message.producer):
                    yield from lent_from_log(producer, worker, message)

    def answer(self, way: RelayedFrom, message: Answered) -> ToWorker:
        """Return an answer to a message that has come over a third worker."""
        assert isinstance(message, OrdersSeen | Borrow), f"{type(message).__name__} answers nothing that is relayed"
        return self._to(way.over, Relayed(self._worker, way.over, way.origin, message), self._now)

    def came_directly(self, worker: int, message: Answered) -> None:
        """Note an answer that has come directly: the link is up, in both directions."""
        if isinstance(message, OrdersSeen):
            self._orders.ways.pop(worker, None)
        elif isinstance(message, Ack | Acks):
            self._questions.ways.pop(worker, None)
        elif isinstance(message, Borrow):
            self._loans.ways.pop(worker, None)
            self._stated.pop(worker, None)

    # ---- messages that go

    def borrows_over_a_third(self, worker: int) -> bool:
        """Tell whether primaries on a worker have borrowed rows over a third one lately, and not directly since then."""
        way = self._loans.ways.get(worker)
        return way is not None and way.answers

    def loans(self, lent: Iterable[ToWorker], now: float) -> Iterator[ToWorker]:
        """Yield lent rows and statements about such, and statements once more over a third worker: at once if their primary is
        known to be out of reach, else if it has borrowed nothing until some time has passed."""
        for effect in lent:
            yield effect
            if isinstance(effect.message, Unordered) and self._link_s < inf:
                stated = self._stated.setdefault(effect.worker, Statements(now))
                for rows in effect.message.items:
                    stated.rows[rows.stage, rows.partition, rows.edge, rows.producer] = rows
        for worker, stated in list(self._stated.items()) if self._table is not None else ():
            assert self._table is not None
            known = now <= self._heard.get(worker, -inf) + KNOWN * self._link_s
            way, over = self._loans.ways.get(worker), -1
            if way is not None and way.answers:
                over, way.used = way.over, now
            elif known or now >= stated.at + LOOK * self._link_s:
                over = self._loans.next(worker, self._table.endpoints, now)
            if over >= 0:
                del self._stated[worker]
                message = Unordered(self._worker, list(stated.rows.values()))
                yield self._to(over, Relayed(self._worker, over, worker, message), now)

    def ways(self, orders: Iterable[ToWorker], now: float) -> Iterator[ToWorker]:
        """Yield orders, each on its way: directly, or over a third worker, or both."""
        for effect in orders:
            message, to = effect.message, effect.worker
            way = self._orders.ways.get(to)
            relayed = way is not None and way.answers
            if way is None or not relayed or now >= way.direct_at:
                yield effect
                if way is not None:
                    way.direct_at = now + self._link_s
            if self._table is None or not isinstance(message, Orders):
                continue
            over = way.over if way is not None and relayed else -1
            if not self._late and self._stands(message, to, now):
                over = self._orders.next(to, self._table.endpoints, now)
            if over >= 0:
                yield self._to(over, Relayed(self._worker, over, to, message), now)

    def _stands(self, message: Orders, worker: int, now: float) -> bool:
        """Tell whether orders have the oldest one that a replica on a worker has not acked, and it has acked none for long."""
        for item in message.items:
            replica = self._replicas.get(PartitionKey(item.stage, item.partition))
            peer = None if replica is None or replica.orders_itself else replica.order.peers.get(worker)
            if replica is None or peer is None or peer.acked is None or now < peer.unseen[1] + self._link_s:
                continue
            if item.first <= peer.acked < replica.order.end:
                return True
        return False

    def ask(self, table: Table | None, now: float) -> Iterator[ToWorker]:
        """Yield questions for acks that the sources here lack. It is called as often as there is occasion, and needs no time of
        its own: a worker beats ten times a second."""
        self._late = now > self._now + LOOK * self._link_s
        self._table, self._now = table, now
        if table is None or now < self._look_at or self._link_s == inf:
            return
        self._look_at = now + LOOK * self._link_s
        self._orders.keep(table.endpoints)
        self._questions.keep(table.endpoints)
        self._loans.keep(table.endpoints, now - STATED * self._link_s)
        self._offers.keep(table.endpoints)
        self._stated = {
            worker: stated
            for worker, stated in self._stated.items()
            if worker in table.endpoints and now <= stated.at + STATED * self._link_s
        }
        self._heard = {worker: at for worker, at in self._heard.items() if now <= at + KNOWN * self._link_s}
        self._borrowed = {
            worker: (over, at)
            for worker, (over, at) in self._borrowed.items()
            if {worker, over} <= table.endpoints.keys() and now <= at + BORROWS * self._link_s
        }
        for worker, producers in self._lacking(now).items():
            over = self._over(worker, [self._owed[producer.stream, worker] for producer in producers], table, now)
            for producer in producers if over >= 0 else ():
                question = WantAck(*producer.stream, producer.incarnation, producer.log.end)
                yield self._to(over, Relayed(self._worker, over, worker, question), now)

    def _over(self, worker: int, owed: Sequence[OwedAcks], table: Table, now: float) -> int:
        """Return the worker over which a question for acks goes now; -1: none goes."""
        way, least_since = self._questions.ways.get(worker), min(each.least_since for each in owed)
        over, _ = self._borrowed.get(worker, (-1, now))
        if over >= 0:  # rows wait for a question, and acks that come directly say nothing of later rows
            return over if now >= least_since + LOOK * self._link_s else -1
        if now >= min(each.total_since for each in owed) + self._link_s:
            return self._questions.next(worker, table.endpoints, now)
        if way is not None and way.answers and now >= way.next_at:
            way.next_at = now + self._link_s
            return way.over
        if now >= least_since + self._link_s:
            return self._offers.next(worker, table.endpoints, now)
        self._offers.ways.pop(worker, None)
        return -1

    def _lacking(self, now: float) -> dict[int, list[Producer]]:
        """Return the producers of sources here that lack acks, by the worker that owes them."""
        known, self._owed = {} if self._late else self._owed, {}
        found: dict[int, list[Producer]] = {}
        for source in self._sources.values():
            for producer in source.producers:
                for worker, (total, least) in owing(producer).items():
                    owed = known.get((producer.stream, worker)) or OwedAcks(total, now, least, now)
                    owed.look(total, least, now)
                    self._owed[producer.stream, worker] = owed
                    if worker != self._worker:
                        found.setdefault(worker, []).append(producer)
        return found

    def copies(self, message: Ack | Acks) -> Iterator[ToWorker]:
        """Yield acks once more for the readers of sources that have asked for them over a third worker."""
        if not self._leases:
            return
        self._leases = {stream: lease for stream, lease in self._leases.items() if self._now <= lease.until}
        found: dict[tuple[int, int], list[Ack]] = {}
        for ack in message.items if isinstance(message, Acks) else [message]:
            if lease := self._leases.get(StreamId(ack.edge, ack.producer)):
                found.setdefault((lease.origin, lease.over), []).append(ack)
        for (origin, over), acks in found.items():
            yield self._to(over, Relayed(self._worker, over, origin, Acks(acks)), self._now)

    def _to(self, worker: int, message: Relayed, now: float, batches: Sequence[pa.RecordBatch] = ()) -> ToWorker:
        self._used[worker] = now
        return ToWorker(worker, message, tuple(batches))
