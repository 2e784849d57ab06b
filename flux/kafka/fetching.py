"""Which partitions a process asks for next, of which broker, and when: the rules of ``fetcher``, without its sockets and clock.

All partitions that a broker leads, and that want rows, are asked for in one request. Law: a partition is in at most one request
at a time, and in none while its rows are being worked off; one that fails, or is held up, holds up no other one.

    its leader is not known -> looked up -> it wants rows -> asked for -> worked off (perhaps a pause on the way) -> it wants rows
           ^--------------- a failure, from anywhere; after a pause that gets longer until an answer comes --------------'

A request may wait at the broker for half a second, and takes nobody along meanwhile. Who wants rows later than the others
goes over a second connection, whose requests wait for a shorter time; as soon as both want rows together, they are asked for
together again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

from flux.kafka.client import Address, Wanted
from flux.kafka.topic_ids import UNKNOWN

#: How long a broker holds back an empty answer, over the first and the second connection. ``close`` does not wait for it.
WAIT_S = (0.5, 0.05)
#: How long who wants rows waits for the first connection before he takes the second: under load, answers come sooner.
LATE_S = 0.005
#: What an answer costs hardly depends on how few records it brings. Who has all that the log has asks again this long after he
#: asked last, at the soonest, so that more records come together. Where records come one by one, he has waited longer already.
#: Where the processors are wanted by more than there are, every step behind waits for one, and fewer and larger answers come
#: through sooner: then the time grows, up to the longest.
GATHER_S, GATHER_MAX_S = 0.003, 0.025
#: It grows above the one share of time in which a thread that could go on waits for a processor, and shrinks below the other.
CROWDED, FREE = 0.6, 0.45
_STEP = 1.3
#: Pauses after something that may pass.
PAUSE_S, PAUSE_MAX_S = 0.1, 2.0

#: A partition that asks again within this time sees the errors of a broker whose topic is deleted.
STALE_S = 1.0

# Where a partition is.
LOST, LOOKED_UP, READY, ASKED, WORKED_OFF, PAUSED, GONE = range(7)


@dataclass(eq=False)
class Part:
    """A partition that somebody here reads. ``owner``: who gets what comes; ``offset``: what is asked for next. ``due``: not
    before; ``late_at``: from then also over the second connection. ``good``: when a broker answered last.
    ``asked_at``, ``among``: when it was asked for last, and whether with others. ``alone``: next it is asked for without others,
    because a broker may cut off what does not fit behind the records of these. ``topic_id``: the topic that ``offset`` belongs
    to; ``by_id``: the broker that was asked last looks topics up by id."""

    owner: Any
    topic: str
    number: int
    offset: int
    good: float
    topic_id: str = UNKNOWN
    phase: int = LOST
    broker: Address | None = None
    due: float = 0.0
    late_at: float = 0.0
    pause: float = PAUSE_S
    asked_at: float = 0.0
    among: bool = False
    alone: bool = False
    by_id: bool = False

    @property
    def wanted(self) -> Wanted:
        """The records that are asked for next."""
        return Wanted(self.topic, self.number, self.offset, self.topic_id)


@dataclass(eq=False)
class Line:
    """A connection to a broker. ``free_at``: the broker wants no request before."""

    broker: Address
    index: int
    busy: bool = False
    free_at: float = 0.0


class Ask(NamedTuple):
    """A request over a line. ``wait``: seconds for which the broker may hold back an empty answer."""

    line: Line
    parts: tuple[Part, ...]
    wait: float

    @property
    def wanted(self) -> list[Wanted]:
        return [part.wanted for part in self.parts]


@dataclass
class _Broker:
    """``ready``: those that want rows, who has waited for longest first: a broker fills its answer in this order."""

    lines: tuple[Line, Line]
    ready: dict[Part, None] = field(default_factory=dict)


class Fetching:
    """Told of all that happens, with the time. Times of the same clock come out."""

    def __init__(self) -> None:
        self._parts: set[Part] = set()
        self._brokers: dict[Address, _Broker] = {}
        self._lost: set[Part] = set()
        self._paused: set[Part] = set()
        self.gather_s = GATHER_S

    def __len__(self) -> int:
        return len(self._parts)

    # ---- who reads

    def add(self, part: Part) -> None:
        self._parts.add(part)
        self._lost.add(part)

    def remove(self, part: Part) -> None:
        """A request that is under way brings nothing for it any more."""
        self._leave(part)
        self._parts.discard(part)
        part.phase = GONE

    def waited(self, share: float) -> None:
        """So much of the time in which it could go on, the thread that asks has waited for a processor of late."""
        if share > CROWDED:
            self.gather_s = min(_STEP * self.gather_s, GATHER_MAX_S)
        elif share < FREE:
            self.gather_s = max(self.gather_s / _STEP, GATHER_S)

    # ---- leaders

    def lookups(self, now: float) -> list[Part]:
        """Whose leader is to be looked up now."""
        found = [part for part in self._lost if part.due <= now]
        for part in found:
            self._leave(part)
            part.phase = LOOKED_UP
        return found

    def found(self, part: Part, broker: Address, now: float) -> None:
        if part.phase == LOOKED_UP:
            part.broker = broker
            self._brokers.setdefault(broker, _Broker((Line(broker, 0), Line(broker, 1))))
            self._wants_rows(part, now, now)

    # ---- requests

    def asks(self, now: float) -> Iterator[Ask]:
        """What is to be sent now. Whoever wants rows is in it, also who need not be asked for yet: it costs nothing more."""
        for broker in self._brokers.values():
            while broker.ready and self._time(broker) <= now:
                line = broker.lines[broker.lines[0].busy]
                first = next(iter(broker.ready))
                chosen = (first,) if first.alone else tuple(part for part in broker.ready if not part.alone)
                for part in chosen:
                    self._leave(part)
                    part.phase, part.asked_at, part.among = ASKED, now, len(chosen) > 1
                line.busy = True
                yield Ask(line, chosen, WAIT_S[line.index])

    def answered(self, ask: Ask, now: float, throttle_s: float = 0.0) -> list[Part]:
        """An answer has come, or none will. Returns those that still wait for it."""
        ask.line.busy, ask.line.free_at = False, now + throttle_s
        return [part for part in ask.parts if part.phase == ASKED]

    def works_off(self, part: Part, now: float) -> None:
        """Rows have come for it, and are not its own yet."""
        part.good, part.pause, part.phase = now, PAUSE_S, WORKED_OFF

    def goes_on(self, part: Part, offset: int, now: float, lags: bool, alone: bool = False) -> None:
        """It wants what comes from an offset on. lags: the log has more already."""
        if part.phase in (ASKED, WORKED_OFF, PAUSED):
            self._leave(part)
            part.offset, part.alone = offset, alone
            part.good, part.pause = now, PAUSE_S
            self._wants_rows(
                part, now if lags else max(now, part.asked_at + self.gather_s), now if lags else now + LATE_S
            )

    # ---- pauses

    def pauses(self, part: Part, until: float) -> None:
        """It goes on with the rows that it has, later."""
        if part.phase == WORKED_OFF:
            self._paused.add(part)
            part.phase, part.due = PAUSED, until

    def resumed(self, now: float) -> list[Part]:
        """Whose pause is over: they work off what they have."""
        found = [part for part in self._paused if part.due <= now]
        for part in found:
            self._paused.discard(part)
            part.phase, part.good = WORKED_OFF, now
        return found

    def failed(self, part: Part, offset: int, now: float, retry_s: float) -> float | None:
        """Something that may pass: its leader is looked up again, a little later, and it is asked for from ``offset`` on. Returns
        for how long no broker has answered, if that is too long."""
        self._leave(part)
        if part.phase == GONE:
            return None
        silent = now - part.good
        if silent >= retry_s:
            return silent
        part.phase, part.offset, part.due = LOST, offset, now + part.pause
        part.pause = min(2 * part.pause, PAUSE_MAX_S)
        self._lost.add(part)
        return None

    def stale(self, part: Part, now: float) -> bool:
        """Tell whether the leader is to be looked up again before the next request. A partition that asks for nothing for a
        while may miss that its topic is deleted and made anew, and a request by name does not show it."""
        return not part.by_id and part.topic_id != UNKNOWN and now - part.asked_at > STALE_S

    # ---- time

    def due(self, looking_up: bool = False) -> float:
        """When there is something to do again, if nothing happens before. looking_up: leaders are being looked up, and no others
        until that is over."""
        times = [self._time(broker) for broker in self._brokers.values() if broker.ready]
        times += [] if looking_up else [part.due for part in self._lost]
        times += [part.due for part in self._paused]
        return min(times, default=inf)

    @staticmethod
    def _time(broker: _Broker) -> float:
        first, second = broker.lines
        if not first.busy:
            return max(first.free_at, min(part.due for part in broker.ready))
        if not second.busy:
            return max(second.free_at, min(max(part.due, part.late_at) for part in broker.ready))
        return inf

    # ---- sets

    def _wants_rows(self, part: Part, due: float, late_at: float) -> None:
        assert part.broker is not None
        part.phase, part.due, part.late_at = READY, due, late_at
        self._brokers[part.broker].ready[part] = None

    def _leave(self, part: Part) -> None:
        self._lost.discard(part)
        self._paused.discard(part)
        if part.broker is not None:
            self._brokers[part.broker].ready.pop(part, None)
