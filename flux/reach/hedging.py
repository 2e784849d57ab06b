"""Further feeds of streams: second ones while the first stands still, and the race between the two (design: feeds, hedged).

A feed is judged by its own history: it stands still if nothing has come over it for three times its usual gap, while the stream
had rows a moment ago, or an ordered step lacks some. Then another replica of the producer is read as well. The first news decide:
the feed that brings them stays, and the other is closed.

Law: an idle stream opens no feed, and repetitions cost at most a tenth of the bytes that come over links.

Left to others: messages of a feed (``flux.exchange.inbound``), handshakes (``flux.worker.subscriptions``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from math import inf

from flux.arguments import HEDGED
from flux.exchange.feed import Feed
from flux.exchange.inbound import Inbound
from flux.reach.starvation import Starvation
from flux.wire.messages import Bound, Data, ElementKind
from partitioning.ids import StreamId

#: Seconds, and in usual gaps: the time for which a feed may bring nothing. The least time is that of some turns of a busy worker.
LEAST_S, TIMES = 0.02, 3.0
#: The usual gap: at most one of twenty is longer. The number of gaps that are kept, and that are needed to know it.
USUAL, GAPS, GAPS_LEAST = 0.95, 64, 2
#: Seconds: a stream whose last rows are older is idle, and a longer gap says nothing of its feed.
LIVELY_S = 1.0
#: Seconds after which a race is over in which neither feed brings news. Rows that are owed by then are said so by others
#: (``flux.reach.starvation``).
RACE_S = 1.0
#: Each race that the second feed does not win doubles the patience, up to this.
PATIENCE_MAX = 8.0
#: The share of the bytes over links that may be repetitions. And the most bytes that are saved up, so that a long calm does not
#: pay for a storm of them.
BUDGET, SAVED_MAX = 0.1, 4 << 20


@dataclass(slots=True)
class HedgedStream:
    """A stream that is hedged."""

    inbound: Inbound
    #: The handshake of the first feed at the last look, and the time of the last message over it.
    nonce: int
    moved_at: float
    #: By the worker that is read: seconds between messages, the newest last.
    gaps: dict[int, deque[float]] = field(default_factory=dict)
    #: The time of the last rows.
    rows_at: float = -inf
    #: The time since which it has two feeds; infinite: it has one.
    since: float = inf
    patience: float = 1.0
    #: The number of second feeds until now.
    tries: int = 0
    ended: bool = False

    def note(self, feed: Feed, now: float) -> None:
        """Note a message over the first feed. Messages that came at the same time count as one."""
        if 0 < (gap := now - self.moved_at) < LIVELY_S and feed.nonce == self.nonce:
            self.gaps.setdefault(feed.worker, deque(maxlen=GAPS)).append(gap)
        self.nonce, self.moved_at = feed.nonce, now

    @property
    def due(self) -> float:
        """The time at which its first feed stands still, if nothing comes over it before; infinite: its usual gap is not
        known, nor that of a feed before it."""
        known = [self.gaps.get(self.inbound.feed.worker, ()), *self.gaps.values()]
        gaps = next((gaps for gaps in known if len(gaps) >= GAPS_LEAST), None)
        usual_s = inf if gaps is None else sorted(gaps)[int(USUAL * len(gaps))]
        return self.moved_at + max(TIMES * usual_s, LEAST_S) * self.patience


@dataclass(slots=True)
class FeedCounts:
    """Counts of the feeds from one worker: messages that were first, bytes that were repetitions, second feeds, and races that
    these have won."""

    firsts: int = 0
    repeated_bytes: int = 0
    opened: int = 0
    won: int = 0


class FurtherFeeds:
    """The further feeds of a worker's streams. ``due_at``: the time at which ``hedge`` must be called again at the latest."""

    def __init__(
        self,
        worker: int,
        readable: Callable[[Inbound], Collection[int]],
        open_: Callable[[Inbound, int], None],
        close: Callable[[Inbound, int], None],
        starvation: Starvation,
    ) -> None:
        """Begin without streams. ``readable`` gives the workers from which a stream may be read; ``open_`` and ``close`` open
        and close the further feed from one of them; ``starvation``: the ordered steps of the worker that lack rows."""
        self._worker = worker
        self._readable, self._open, self._close = readable, open_, close
        self._starvation = starvation
        self._streams: dict[StreamId, HedgedStream] = {}
        #: Bytes that repetitions may still cost. Races that cost more leave a debt, and none begins before that is paid.
        self.budget = 0.0
        self.due_at = inf
        #: By the worker that is read.
        self.counts: dict[int, FeedCounts] = {}

    def of(self, worker: int) -> FeedCounts:
        """Return the counts of the feeds from a worker."""
        return self.counts.setdefault(worker, FeedCounts())

    def drop(self, stream: StreamId) -> None:
        """Forget a stream whose edge is removed."""
        self._streams.pop(stream, None)

    def note(self, inbound: Inbound, connection: Hashable, news: bool, message: Data | Bound, now: float) -> None:
        """Note a message of a stream over one of its feeds: a part of it, or a statement. The first news decide a race."""
        feed = inbound.over(connection)
        assert feed is not None
        nbytes = message.nbytes if isinstance(message, Data) else 0
        hedged = inbound.mode == HEDGED  # repetitions of a stream that reads all feeds are asked for, and no debt
        ended = isinstance(message, Data) and message.element is ElementKind.END
        if not news:
            self._repeated(feed.worker, nbytes, hedged)
        else:
            self.of(feed.worker).firsts += 1
            self._save(feed.worker, BUDGET * nbytes * hedged)
        if hedged:
            self._note(inbound, feed, news and nbytes > 0, ended, now)
            if news and inbound.others:
                self._decide(inbound, feed, now)

    def _note(self, inbound: Inbound, feed: Feed, rows: bool, ended: bool, now: float) -> None:
        stream = self._streams.get(inbound.stream)
        if stream is None:
            stream = self._streams[inbound.stream] = HedgedStream(inbound, inbound.feed.nonce, now)
        if feed is inbound.feed:
            stream.note(feed, now)
        if rows:
            stream.rows_at = now
        stream.ended |= ended
        self.due_at = min(self.due_at, now + LEAST_S)

    def closed(self, inbound: Inbound | None, connection: Hashable, nbytes: int) -> None:
        """Note bytes of a stream that come over a connection which is read no more: they were on their way when it was closed."""
        if inbound is not None and inbound.mode == HEDGED:
            for worker, offer in inbound.offers.items():
                if offer == connection:
                    self._repeated(worker, nbytes)

    def _repeated(self, worker: int, nbytes: int, hedged: bool = True) -> None:
        self.of(worker).repeated_bytes += nbytes
        self._save(worker, -nbytes * hedged)

    def _save(self, worker: int, nbytes: float) -> None:
        if worker != self._worker:  # rows of a replica here go over no link
            self.budget = min(self.budget + nbytes, SAVED_MAX)

    def _decide(self, inbound: Inbound, winner: Feed, now: float) -> None:
        """Close all feeds of a stream but one."""
        stream, slower = self._streams[inbound.stream], inbound.feed.worker
        stream.since = inf
        if winner is not inbound.feed:
            inbound.prefer(winner.worker)
            stream.patience, stream.nonce, stream.moved_at = 1.0, winner.nonce, now
            self.of(winner.worker).won += 1
            self._close(inbound, slower)
        self._close_all(inbound)

    def _close_all(self, inbound: Inbound) -> None:
        for worker in list(inbound.others):
            self._close(inbound, worker)

    def hedge(self, now: float) -> None:
        """Open a second feed of each stream whose first one stands still, and close those over which nothing came either."""
        self.due_at, lacking = inf, self._starvation.lacking
        for stream in self._streams.values():
            inbound = stream.inbound
            if inbound.feed.nonce != stream.nonce:  # another handshake: its feed has just begun
                stream.nonce, stream.moved_at = inbound.feed.nonce, now
            if inbound.others:
                stream.since = min(stream.since, now)
                due = stream.since + RACE_S
                if now >= due:
                    self._close_all(inbound)
                    stream.since = inf
            elif stream.ended or not (now < stream.rows_at + LIVELY_S or inbound.stream in lacking):
                continue
            else:
                due = stream.due
                if now >= due and self.budget > 0 and inbound.has_room:
                    self._race(stream, self._readable(inbound), now)
            self.due_at = min(self.due_at, due if due > now else now + LEAST_S)

    def _race(self, stream: HedgedStream, readable: Collection[int], now: float) -> None:
        """Open a second feed of a stream, in turn from each other worker that has offered it."""
        others: Sequence[int] = sorted(worker for worker in readable if worker != stream.inbound.feed.worker)
        if others and stream.inbound.feed.connection is not None:
            chosen = others[stream.tries % len(others)]
            self._open(stream.inbound, chosen)
            stream.since, stream.tries = now, stream.tries + 1
            stream.patience = min(2 * stream.patience, PATIENCE_MAX)
            self.of(chosen).opened += 1
