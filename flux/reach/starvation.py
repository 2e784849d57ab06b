"""Rows that do not come although some process has them (design: starved-step, owed-rows).

``Starvation`` finds ordered steps that lack rows, and ``OwedRows`` streams of which another replica of their producer has rows
that this worker does not ack. Neither says anything about other workers: to look elsewhere is harmless where the present one is
only busy.

Left to others: the change of the replica that is read (``flux.worker.subscriptions``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf

from flux.exchange.inbound import Inbound
from flux.replica.replica import Replica
from partitioning.ids import StreamId

#: In resend timeouts: the time for which rows of an ordered step may stay away before they are searched elsewhere.
PATIENCE = 2
#: In resend timeouts: the longest such time. It grows, because each change of source costs a handshake.
PATIENCE_MAX = 8


@dataclass
class StarvedStep:
    """The wait of ordered steps for rows of a stream.

    ``received`` is the progress of their partitions; ``since`` the time of that, or of the last change of source;
    ``patience_s`` the time until the next change; ``urgent``: rows are let in although the credit is used up; ``elsewhere``: it
    is time to read them from another replica of their producer."""

    received: int
    since: float
    patience_s: float
    urgent: bool = False
    elsewhere: bool = False


class Starvation:
    """Ordered steps whose rows do not come: the search for these rows, and its time (design: starved-step).

    The replica of the producer that is read from may be slow, or wait itself, in the end for acks that only this step can give;
    and so may the primaries here that hold the credit. If one of them has no room in its logs, a circle is likely, and patience
    gains nothing."""

    def __init__(self, resend_s: float) -> None:
        self._patience_s, self._patience_max_s = PATIENCE * resend_s, PATIENCE_MAX * resend_s
        self._streams: dict[StreamId, StarvedStep] = {}

    @property
    def lacking(self) -> Collection[StreamId]:
        """The streams of which rows were missing at the last look."""
        return self._streams.keys()

    def look(
        self, replicas: Collection[Replica], received: Callable[[StreamId, int], int], now: float
    ) -> dict[StreamId, StarvedStep]:
        """Find the streams of which rows are missing. ``received`` gives the sequence that a partition needs next of a stream."""
        missing: dict[StreamId, int] = {}
        for replica in replicas:
            for stream in replica.missing():
                missing[stream] = missing.get(stream, 0) + received(stream, replica.partition)
        known, self._streams = self._streams, {}
        without_room = _waiting_for_room(replicas) if missing else set()
        for stream, got in missing.items():
            wait = known.get(stream)
            if wait is None:
                self._streams[stream] = StarvedStep(got, now, self._patience_s)
                continue
            self._streams[stream] = wait
            wait.elsewhere = False
            if wait.received != got:
                wait.received, wait.since, wait.patience_s = got, now, self._patience_s
            elif now - wait.since >= wait.patience_s:
                wait.since, wait.patience_s = now, min(2 * wait.patience_s, self._patience_max_s)
                wait.urgent = wait.elsewhere = True
            elif stream in without_room:
                wait.urgent = True
        return self._streams


def _waiting_for_room(replicas: Collection[Replica]) -> set[StreamId]:
    """Find the streams with rows here that wait for a primary whose logs are full, or that is held back by replicas which have
    much of its order to apply: these may wait for rows, too, on a worker whose credit their own primaries hold."""
    full = [
        replica
        for replica in replicas
        if replica.primary and (replica.output.room.full or replica.held_back or replica.output.uncompared)
    ]
    return {stream for replica in full for stream in replica.waiting()}


#: The streams that a worker reads, and the partitions there that read one of them.
Streams = Mapping[StreamId, Inbound]
Hosted = Callable[[StreamId], Collection[int]]
#: A stream, and the worker from whose replica of the producer it is to be read.
Try = tuple[Inbound, int]
#: In link timeouts: the first and the longest time for which a stream that keeps a window open is waited for.
HELD, HELD_MAX = 0.8, 8.0
#: In link timeouts: the time for which owed rows may still come, because they may be in the queue behind the message about them.
GRACE = 1 / 6


@dataclass(slots=True)
class OwedStream:
    """A stream of which rows are owed. ``tellers`` are the workers that have them, each with the end of these."""

    tellers: dict[int, int]
    #: The number of messages that had come when the first of them said so, or when the stream went over to one.
    taken: int
    #: Seconds until it goes over, or further.
    wait_s: float
    #: The time of the first look.
    since: float = -inf


@dataclass(slots=True)
class HeldWindow:
    """A stream that alone keeps a window open. ``came``: messages and the watermark that have come of it; ``since``: the time of
    the look that found these, or of the last change of its source; ``patience_s``: the time until the next change."""

    came: tuple[int, int]
    since: float
    patience_s: float


class OwedRows:
    """Streams whose rows do not come from the replica that they are read from, while another replica of their producer has them
    (design: owed-rows).

    Such a replica says so itself, because acks go to all replicas of a producer: it has seen no ack of these rows for
    ``link_s``. Any message of the stream that comes meanwhile is progress, and ends the search. So does a lack of room here,
    because then this worker holds up the stream itself. ``due_at``: the time at which ``look`` must be called again at the
    latest.

    A watermark has no acks, so no other replica can tell that one is owed. A stream that keeps a window open, although other
    streams have passed its end, and of which nothing comes, is tried elsewhere without that (``held``)."""

    def __init__(self, link_s: float) -> None:
        self._link_s = link_s
        #: Streams that keep a window open.
        self._held: dict[StreamId, HeldWindow] = {}
        self._streams: dict[StreamId, OwedStream] = {}
        self.due_at = inf
        #: Streams that have gone over: from which worker to which, and when.
        self._gone_over: dict[StreamId, tuple[tuple[int, int], float]] = {}

    def went_over(self, inbound: Inbound, before: int, now: float) -> None:
        """Note that a stream is read from another worker than ``before``, from which nothing came."""
        if before >= 0:
            self._gone_over[inbound.stream] = (before, inbound.feed.worker), now

    def greeted(self, stream: StreamId, worker: int) -> None:
        """Note that a worker has offered a stream. If it was left because nothing came, its link is up again."""
        if stream in self._gone_over and self._gone_over[stream][0][0] == worker:
            del self._gone_over[stream]

    def drop(self, stream: StreamId) -> None:
        """Forget a stream whose edge is removed."""
        for noted in (self._held, self._streams, self._gone_over):
            noted.pop(stream, None)

    def detours(self, streams: Streams) -> Iterator[tuple[tuple[int, int], float]]:
        """Yield the changes of streams that are still read from the worker that they went over to, and when they were made."""
        for stream, (way, since) in self._gone_over.items():
            if streams[stream].feed.worker == way[1]:
                yield way, since

    def note(self, inbound: Inbound, worker: int, end: int) -> None:
        """Note that a worker has the elements of a stream below ``end``, and that some of them have not come. If the stream is
        read from there already, the worker has not heard of it; others that have the rows do not wait for that one."""
        if worker == inbound.feed.worker:
            return
        owed = self._streams.get(inbound.stream)
        if owed is None or owed.taken != inbound.taken:
            owed = OwedStream({}, inbound.taken, self._link_s * GRACE)
            self._streams[inbound.stream] = owed
            self.due_at = -inf
        owed.tellers[worker] = end

    def look(self, streams: Streams, hosted_by: Hosted, now: float) -> Iterator[Try]:
        """Yield the streams that have waited for long enough, each with a worker that has its rows. The caller reads from there.
        If nothing comes then either, the next one follows."""
        self.due_at = inf
        for stream, owed in list(self._streams.items()):
            inbound, hosted = streams[stream], hosted_by(stream)
            owed.tellers = {worker: end for worker, end in owed.tellers.items() if inbound.lacks(end, hosted)}
            if owed.taken != inbound.taken or not owed.tellers:
                del self._streams[stream]
                continue
            owed.since = now if owed.since == -inf else owed.since
            if now >= owed.since + owed.wait_s:
                worker = next(iter(owed.tellers))
                del owed.tellers[worker]
                yield inbound, worker
                owed.taken, owed.wait_s, owed.since = inbound.taken, self._link_s, now
            self.due_at = min(self.due_at, owed.since + owed.wait_s)

    def held(self, holders: Iterable[Inbound], now: float) -> list[Inbound]:
        """Return the streams that are to be tried elsewhere, of those that keep a window open now. Patience doubles with each
        try."""
        known, self._held = self._held, {}
        found = []
        for inbound in holders:
            came = inbound.taken, inbound.said.watermark
            held = known.get(inbound.stream)
            if held is None or held.came != came:
                held = HeldWindow(came, now, HELD * self._link_s)
            elif now >= held.since + held.patience_s:
                held.since, held.patience_s = now, min(2 * held.patience_s, HELD_MAX * self._link_s)
                found.append(inbound)
            self._held[inbound.stream] = held
        return found
