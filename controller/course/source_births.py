"""Births of streams that come to running sources: the row or batch with which each begins (design: edge-of-a-source,
kept-births).

A reader reports a birth, and all processes are told when it is stored: in a query with a checkpoint location, when the location
has it. A reader that is told may send rows, which outlive the loss of everything, so the next start has to know the same birth.

Left to others: the reader whose reports count, and messages (``controller.decide.plan_changes``), and the work of the location
(the shell).
"""

from __future__ import annotations

from collections.abc import Iterable

from controller.course.plan_requests import BirthsToKeep
from flux.wire.control import EdgeStored
from partitioning.ids import StreamId


def stream_of(birth: EdgeStored) -> StreamId:
    return StreamId(birth.edge, birth.producer)


class SourceBirths:
    """The births of one query. ``report`` and ``kept`` return those of which all processes are to be told now.

    Law: a birth that is told never changes, and a location has it before. The first report of a stream counts; a location that
    cannot keep it makes the next report the first one."""

    def __init__(self, keeps: bool) -> None:
        #: Births are kept in a checkpoint location.
        self.keeps = keeps
        self._stored: dict[StreamId, EdgeStored] = {}
        #: Births that the location does not have yet.
        self._reported: dict[StreamId, EdgeStored] = {}
        #: The order that the location carries out.
        self._order: BirthsToKeep | None = None
        #: By stream that is not stored: the time of the first report.
        self._since: dict[StreamId, float] = {}
        #: The newest error of the location.
        self.error = ""

    def begin(self, births: Iterable[EdgeStored]) -> None:
        """Begin with the births that the location has."""
        self._stored.update((stream_of(birth), birth) for birth in births)

    def of(self, stream: StreamId) -> EdgeStored | None:
        """Return the birth of a stream; None: it is not stored, or the stream began with its source."""
        return self._stored.get(stream)

    @property
    def stored(self) -> tuple[EdgeStored, ...]:
        return tuple(self._stored.values())

    @property
    def known(self) -> tuple[EdgeStored, ...]:
        """All births that are reported, for a version of the plan that is written meanwhile."""
        return (*self._stored.values(), *self._reported.values())

    def has_all(self, edge: int, partitions: int) -> bool:
        """Tell whether the streams of an edge are stored, one for each of the ``partitions`` of its source."""
        return all(StreamId(edge, partition) in self._stored for partition in range(partitions))

    def awaits(self, edge: int) -> bool:
        """Tell whether the location has still to keep a birth of an edge that is reported."""
        return any(stream.edge == edge for stream in self._since)

    def report(self, birth: EdgeStored, now: float) -> tuple[EdgeStored, ...]:
        """Take the report of a reader."""
        stream = stream_of(birth)
        if stream in self._stored or stream in self._reported:
            return ()
        if self.keeps:
            self._reported[stream] = birth
            self._since.setdefault(stream, now)
            return ()
        self._stored[stream] = birth
        return (birth,)

    def next_order(self) -> BirthsToKeep | None:
        """Return the next order to the location, with all births that came since the last one; None: there are none, or it is
        at work."""
        if self._order is not None or not self._reported:
            return None
        self._order = BirthsToKeep(tuple(self._reported.values()))
        return self._order

    def kept(self, order: BirthsToKeep, error: str = "") -> tuple[EdgeStored, ...]:
        """Take the end of an order; ``error``: it could not be carried out, and readers report again."""
        if order is not self._order:
            return ()
        self._order, self.error = None, error
        ordered = frozenset(order.births)
        done = {stream: birth for stream, birth in self._reported.items() if birth in ordered}
        for stream in done:
            del self._reported[stream]
        if error:
            return ()
        self._stored |= done
        self._since = {stream: since for stream, since in self._since.items() if stream not in done}
        return tuple(done.values())

    def forget(self, edges: Iterable[int]) -> None:
        """Forget the streams of removed edges."""
        gone = frozenset(edges)
        for known in (self._stored, self._reported, self._since):
            for stream in [stream for stream in known if stream.edge in gone]:
                del known[stream]

    def take_late(self, limit_s: float, now: float) -> list[StreamId]:
        """Return the streams whose births the location has not kept within the limit, each once."""
        late = [stream for stream, since in self._since.items() if now - since > limit_s]
        for stream in late:
            del self._since[stream]
        return late

    def validate(self) -> None:
        """Check that no stream has two births."""
        assert not self._stored.keys() & self._reported.keys()
        assert self.keeps or not self._reported
