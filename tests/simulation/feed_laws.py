"""The laws of streams that are read over several feeds (design: feeds).

a feed is of a replica that is listed   a further feed leads to a live replica of the stream's producer, by the worker's own table
the first news decide a race            a hedged stream has two feeds only as long as neither has brought anything new
one feed unless it is asked for         a stream whose stage does not ask for more feeds is read over one
no feed is told that it is not read     a producer hears ``ReadsElsewhere`` only if it is read over no feed
repetitions have a budget               a second feed opens only while repetitions are less than a tenth of the bytes that have
                                        come over links first
gaps come of losses                     no message over a feed has another number than the next one, unless a message was lost

Rows once and in order, equal batches, acks and credit have laws of their own, in all runs (``checkers``), and so has a stream
that stands still though an open feed could bring rows (``reach_laws``). These laws look at a worker's table and at the messages
that the worker sends, and not at the code that chooses feeds.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flux.arguments import HEDGED, ONE
from flux.dataflow.plan import FromStage
from flux.exchange.inbound import Inbound
from flux.wire.messages import Data, ReadsElsewhere, Reset
from flux.worker.core import WorkerCore
from partitioning.ids import StreamId
from tests.simulation.reach_laws import only_cuts
from tests.simulation.violation import Violation

if TYPE_CHECKING:
    from tests.simulation.run import Simulation

LISTED, DECIDED, ASKED_FOR, NOT_READ, BUDGET, OF_LOSSES = (
    "a feed is of a replica that is listed",
    "the first news decide a race",
    "one feed unless it is asked for",
    "no feed is told that it is not read",
    "repetitions have a budget",
    "gaps come of losses",
)


#: The share of the bytes over links that may be repetitions.
SHARE = 0.1


@dataclass
class LinkBytes:
    """Bytes of hedged streams that have come to a worker over links."""

    #: Bytes that brought news.
    first: int = 0
    #: Bytes of repetitions.
    again: int = 0


class FeedLaws:
    """The laws of one run. If no stage asks for feeds, only the law that there are none is checked."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self._asked = any(stage.feeds != ONE for stage in sim.plan.stages)
        #: Whether no message is lost.
        self._lossless = only_cuts(sim.faults)
        #: By worker and stream: the further feeds at the last look, by nonce, the least progress then, and the number of slices
        #: that the worker had been lent, which come over no feed.
        self._races: dict[tuple[int, StreamId], tuple[set[int], int, int]] = {}

    def watch(self, core: WorkerCore) -> None:
        """Count the bytes of hedged streams that come to a worker, and look at the feeds that it opens then."""
        if not self._asked:
            return
        take, hedge, mine = core.subscriptions.take, core.subscriptions.feeds.hedge, LinkBytes()

        def taken(connection: Hashable, message: Data, *given: Any) -> Any:
            stream = StreamId(message.edge, message.producer)
            inbound = core.subscriptions.streams.get(stream)
            feed = None if inbound is None else inbound.over(connection)
            lent = core.subscriptions.borrower.knows(connection, message)
            if inbound is not None and feed is None and inbound.mode == HEDGED and not lent:
                # This message was on its way when the feed was closed. Rows of a replica here go over no link.
                came_from = {worker for worker, offer in inbound.offers.items() if offer == connection}
                mine.again += message.nbytes * len(came_from - {core.worker})
            if inbound is None or feed is None or feed.worker == core.worker or feed.nonce != message.nonce:
                return take(connection, message, *given)
            number, least = feed.number, inbound.received.least
            slices = take(connection, message, *given)
            if inbound.mode == HEDGED and feed.number > number:
                news = inbound.received.least > least
                mine.first += message.nbytes * news
                mine.again += message.nbytes * (not news)
            return slices

        def hedged(now: float) -> None:
            single = [inbound for inbound in core.subscriptions.streams.values() if not inbound.others]
            hedge(now)
            for inbound in single:
                if inbound.others and inbound.mode == HEDGED:
                    self._check_budget(core.worker, inbound.stream, mine)

        core.subscriptions.take = taken  # type: ignore[method-assign]
        core.subscriptions.feeds.hedge = hedged  # type: ignore[method-assign]

    def _check_budget(self, worker: int, stream: StreamId, known: LinkBytes) -> None:
        self.sim.counts["second feeds within the budget"] += 1
        if known.again > SHARE * known.first:
            raise Violation(BUDGET, f"worker {worker} reads stream {stream} twice: {known}")

    def check(self, core: WorkerCore) -> None:
        """Look at all streams of a worker."""
        for stream, inbound in core.subscriptions.streams.items():
            if inbound.others:
                self._check(core, stream, inbound)
            elif self._asked:
                self._races.pop((core.worker, stream), None)

    def _check(self, core: WorkerCore, stream: StreamId, inbound: Inbound) -> None:
        edge, table = self.sim.plan.edges[stream.edge], core.table
        what = (
            f"stream {stream} at worker {core.worker} is read from {inbound.feed.worker} and {sorted(inbound.others)}"
        )
        self.sim.counts["looks at streams with several feeds"] += 1
        if not isinstance(edge, FromStage) or self.sim.plan.stages[edge.stage].feeds == ONE:
            raise Violation(ASKED_FOR, what)
        assert table is not None
        live = {replica.worker for replica in table.stages[edge.stage][stream.producer] if replica.live}
        if not inbound.others.keys() <= live:
            raise Violation(LISTED, f"{what}; workers {sorted(live)} have live replicas of its producer")
        if self.sim.plan.stages[edge.stage].feeds == HEDGED:
            self._check_race(core, stream, inbound, what)

    def _check_race(self, core: WorkerCore, stream: StreamId, inbound: Inbound, what: str) -> None:
        nonces, lent = {feed.nonce for feed in inbound.others.values()}, core.subscriptions.borrower.slices
        before, came, had = self._races.get((core.worker, stream), (set(), 0, lent))
        if before & nonces and inbound.received.least > came and lent == had:
            raise Violation(DECIDED, f"{what}; it came from {came} to {inbound.received.least} meanwhile")
        self._races[core.worker, stream] = nonces, inbound.received.least, lent

    def note_answer(self, core: WorkerCore, connection: Hashable, message: Any) -> None:
        """Look at a message of a worker to a producer of one of its streams."""
        if isinstance(message, ReadsElsewhere):
            inbound = core.subscriptions.streams[StreamId(message.edge, message.producer)]
            if inbound.over(connection) is not None:
                raise Violation(NOT_READ, f"stream {inbound.stream} at worker {core.worker}, {connection}")
        elif isinstance(message, Reset) and self._lossless and message.reason.startswith("message "):
            raise Violation(
                OF_LOSSES, f"stream {message.edge}.{message.producer} at worker {core.worker}: {message.reason}"
            )
