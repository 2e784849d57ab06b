"""A model of queries that are registered while gateways push, beside the model of their log.

Gateways, disk and log are those of ``event_log_model``; each query here reads with the product's reader, and does what
``flux.eventlog.source`` does: it becomes a reader of the stream, then looks for the newest event, and begins behind that. Its
state and its place are kept together by checkpoints, and a later life begins with the newest of these. Between any two of these
steps anything may happen: gateways are killed, rest, and are awake again after a take-over of the log; power is lost, and tears
the last segment; clients repeat a push at another gateway; retention removes segments; the query loses its memory.

Law: each event that is pushed after the registration of a query was answered, and that is answered itself, is counted by the
query exactly once. Any other event is counted at most once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field

from flux.eventlog.log_owner import LogOwner
from flux.eventlog.log_reader import LogReader
from tests.laws.event_log_model import Gateway, LawBroken, Request, Run, VirtualStore

#: Queries that are registered at the same time.
QUERIES_MAX = 3
#: The part of the turns of a query in which its registration goes on: Spark's analyser takes longer than a push.
REGISTERS = 0.15


@dataclass(eq=False)
class CountingQuery:
    """A query that counts rows by their content and number within the request."""

    under_way: Generator[None, None, None] | None = None
    reader: LogReader | None = None
    rows: list[tuple[bytes, int]] = field(default_factory=list)
    #: The newest checkpoint: the position behind its rows, and these rows.
    kept: tuple[int, list[tuple[bytes, int]]] = 0, []
    #: The position below which the query needs nothing more, as the stream has it written down; None: it is no reader.
    noted: int | None = None
    #: The turn in which its registration was answered.
    registered: int | None = None


class QueryRun(Run):
    """One run of the model."""

    def __init__(self, seed: int, store: type[VirtualStore] = VirtualStore, log: type[LogOwner] = LogOwner) -> None:
        super().__init__(seed, store, log)
        self.turns = 0
        self.queries: list[CountingQuery] = []
        #: By request, the turn in which it was pushed for the first time.
        self.pushed: dict[Request, int] = {}

    def needed_from(self) -> int:
        return min([super().needed_from(), *(each.noted for each in self.queries if each.noted is not None)])

    def _turn(self) -> None:
        self.turns += 1
        if self.rng.random() < 0.7:
            super()._turn()
            return
        dice = self.rng.random()
        if len(self.queries) < QUERIES_MAX and dice < 0.1:
            query = CountingQuery()
            query.under_way = self.registration(query)
            self.queries.append(query)
        elif self.queries:
            self._go_on(self.rng.choice(self.queries), dice)

    def _go_on(self, query: CountingQuery, dice: float) -> None:
        if query.registered is None and dice > REGISTERS:
            return
        if query.under_way is not None:
            if next(query.under_way, self) is self:
                query.under_way = None
        elif dice < 0.2:
            query.under_way = self.checkpoint(query)
        elif dice < 0.25:
            self.lose(query)
            self.happened["query lost"] += 1
        else:
            self.read(query)

    def _push(self, gateway: Gateway) -> None:
        super()._push(gateway)
        for request in self.requests[len(self.pushed) :]:
            self.pushed[request] = self.turns

    def _lose_power(self) -> None:
        super()._lose_power()
        for query in self.queries:
            self.lose(query)

    # ---- a query

    def registration(self, query: CountingQuery) -> Generator[None, None, None]:
        """Bring a query into the plan, as ``EventReader.prepare`` does. Yield between any two effects."""
        query.noted = 0  # before the look: nothing is removed from now on
        yield
        start = self.opened().skip()
        yield
        query.noted, query.kept = start, (start, [])
        yield
        query.reader = self.opened(start)
        query.registered = self.turns
        self.happened["registered"] += 1

    def opened(self, start: int = 0) -> LogReader:
        return LogReader(self._store(self.disk, writes=False), "the log", start)

    def read(self, query: CountingQuery) -> None:
        """Count the next rows that are durable, from the position on that is wanted."""
        if query.reader is None:
            return
        wanted = query.reader.next
        for record in query.reader.read():
            stored = record.stored
            skipped = max(wanted - stored.first, 0)
            query.rows += [(bytes(record.batch), row) for row in range(skipped, stored.rows)]

    def checkpoint(self, query: CountingQuery) -> Generator[None, None, None]:
        """Keep the state of a query and its place in one step, and write down later that it needs nothing before."""
        if query.reader is not None:
            query.kept = query.reader.next, list(query.rows)
            yield
            query.noted = query.kept[0]
            self.happened["checkpoint"] += 1

    def lose(self, query: CountingQuery) -> None:
        """Take the memory of a query. One that is on its way into the plan goes on, as the next service makes the same steps."""
        if query.registered is not None:
            query.under_way = None
            query.reader, query.rows = self.opened(query.kept[0]), list(query.kept[1])

    # ---- the end

    def _end(self) -> None:
        super()._end()
        for query in self.queries:
            if query.reader is not None:
                before = -1
                while before < query.reader.next:
                    before = query.reader.next
                    self.read(query)
                self._check_counts(query)

    def _check_counts(self, query: CountingQuery) -> None:
        counted = Counter(query.rows)
        assert query.registered is not None
        for request in self.requests:
            found = [counted[request.content, row] for row in range(request.rows)]
            if max(found) > 1:
                raise LawBroken(f"a query has counted rows of one request {found} times")
            if request.answered is not None and self.pushed[request] > query.registered:
                self.happened["answered after a registration"] += 1
                if min(found) < 1:
                    raise LawBroken(
                        f"a request that was pushed after the registration, and answered with position {request.answered}, was "
                        f"counted {found} times"
                    )
