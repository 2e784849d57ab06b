"""Schedule of requests: the partitions a process asks for next, the broker of each, and the time. These are the rules of
``fetch_thread``, without sockets and clock.

All partitions that a broker leads, and that want rows, are asked for in one request. Law: a partition is in at most one
request at a time, and in none while its rows are being worked off; one that fails, or is held up, holds up no other one.

    LOST -> LOOKED_UP -> READY -> ASKED -> WORKED_OFF (perhaps PAUSED on the way) -> READY
     ^------ a failure, from any phase; after a pause that gets longer until an answer comes --'

A request may wait at the broker for half a second, and no partition can join it meanwhile. A partition that wants rows
later than the others goes over a second connection, whose requests wait for a shorter time. As soon as both want rows at
the same time, one request asks for both again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Any, NamedTuple

from flux.connectors.kafka.client.cluster import Address, Wanted
from flux.connectors.kafka.client.topic_ids import UNKNOWN

#: Time for which a broker holds back an empty answer, over the first and the second connection. ``close`` does not wait for
#: it.
WAIT_S = (0.5, 0.05)
#: A partition waits this long for the first connection before it uses the second: under load, answers come sooner.
LATE_S = 0.005
#: Least time between two requests for a partition whose reader has all records of the log, and its largest value. The cost
#: of an answer hardly depends on the number of its records, so a short wait brings more of them together. A partition whose
#: records come one by one has waited longer already. If there is more work than processors, each later step waits for a
#: processor as well, and fewer and larger answers come through sooner: then the time grows, up to the largest value.
GATHER_S, GATHER_MAX_S = 0.003, 0.025
#: The time grows while a thread that could run waits for a processor for more than the first share of time, and shrinks
#: below the second.
CROWDED, FREE = 0.6, 0.45
_STEP = 1.3
#: Pauses after a failure that may pass.
PAUSE_S, PAUSE_MAX_S = 0.1, 2.0

#: A partition that asks again within this time sees the errors of a broker whose topic is deleted.
STALE_S = 1.0


class FetchPhase(Enum):
    """A phase of a partition that is read."""

    #: Its leader is not known, and is to be looked up.
    LOST = "lost"
    #: Its leader is being looked up.
    LOOKED_UP = "looked up"
    #: It wants rows.
    READY = "ready"
    #: A request for rows of it is under way.
    ASKED = "asked"
    #: Its reader has rows to decode, or waits for room for them.
    WORKED_OFF = "worked off"
    #: Its reader goes on with the rows that it has at a known time.
    PAUSED = "paused"
    #: It was removed. Nothing comes back for it.
    GONE = "gone"


LOST, LOOKED_UP, READY, ASKED, WORKED_OFF, PAUSED, GONE = FetchPhase
#: The phases that may follow each phase.
TRANSITIONS: dict[FetchPhase, frozenset[FetchPhase]] = {
    LOST: frozenset({LOOKED_UP, LOST, GONE}),
    LOOKED_UP: frozenset({READY, LOST, GONE}),
    READY: frozenset({ASKED, LOST, GONE}),
    ASKED: frozenset({READY, WORKED_OFF, LOST, GONE}),
    WORKED_OFF: frozenset({READY, PAUSED, LOST, GONE}),
    PAUSED: frozenset({READY, WORKED_OFF, LOST, GONE}),
    GONE: frozenset({GONE}),
}


@dataclass(eq=False)
class FetchedPartition:
    """Partition that this process reads."""

    #: Reader of the partition, see ``fetch_thread.PartitionOwner``.
    owner: Any
    topic: str
    number: int
    #: Offset to ask for next.
    offset: int
    #: Time of the last answer of a broker, or of the end of a pause: silence counts from here.
    good: float
    #: A broker has answered, in this life of the partition's reader or in one before.
    answered: bool = False
    #: Id of the topic that ``offset`` belongs to.
    topic_id: str = UNKNOWN
    #: ``become`` alone changes it.
    phase: FetchPhase = LOST
    #: Leader, once it was found.
    broker: Address | None = None
    #: The partition is not asked for, looked up or resumed before this time.
    due: float = 0.0
    #: From this time on the second connection is used, too.
    late_at: float = 0.0
    #: Next pause after a failure, in seconds.
    pause: float = PAUSE_S
    #: Time of the last request.
    asked_at: float = 0.0
    #: The last request asked for other partitions as well.
    among: bool = False
    #: The next request asks for no other partition, because a broker may cut off records that do not fit behind those of
    #: others.
    alone: bool = False
    #: The broker that was asked last looks topics up by id.
    by_id: bool = False

    def become(self, phase: FetchPhase) -> None:
        assert phase in TRANSITIONS[self.phase], (
            f"partition {self.number} of {self.topic} was {self.phase.value}, and is {phase.value}"
        )
        self.phase = phase

    @property
    def wanted(self) -> Wanted:
        """The records to ask for next."""
        return Wanted(self.topic, self.number, self.offset, self.topic_id)


@dataclass(eq=False)
class BrokerSlot:
    """Connection to a broker, as the schedule sees it."""

    broker: Address
    #: 0 for the first connection to the broker, 1 for the second.
    index: int
    #: A request is under way.
    busy: bool = False
    #: The broker wants no request before this time.
    free_at: float = 0.0


class FetchRequest(NamedTuple):
    """Request over a connection."""

    #: Connection that the request goes over.
    slot: BrokerSlot
    #: Partitions that the request asks for.
    parts: tuple[FetchedPartition, ...]
    #: Time for which the broker may hold back an empty answer, in seconds.
    wait: float

    @property
    def wanted(self) -> list[Wanted]:
        return [part.wanted for part in self.parts]


@dataclass
class _Broker:
    """Broker that leads partitions."""

    #: First and second connection.
    slots: tuple[BrokerSlot, BrokerSlot]
    #: Partitions that want rows. The one that has waited for longest stands first, because a broker fills its answer in
    #: this order.
    ready: dict[FetchedPartition, None] = field(default_factory=dict)


class FetchSchedule:
    """Schedule of all partitions. Its methods are told each event with its time, and return times of the same clock."""

    def __init__(self) -> None:
        self._parts: set[FetchedPartition] = set()
        self._brokers: dict[Address, _Broker] = {}
        #: Partitions in the phase LOST, whose leaders are to be looked up.
        self._lost: set[FetchedPartition] = set()
        #: Partitions in the phase PAUSED.
        self._paused: set[FetchedPartition] = set()
        #: Least time between two requests for a partition whose reader has all records of the log: between ``GATHER_S`` and
        #: ``GATHER_MAX_S``, longer while processors are scarce.
        self.gather_s = GATHER_S

    def __len__(self) -> int:
        return len(self._parts)

    # ---- partitions

    def add(self, part: FetchedPartition) -> None:
        self._parts.add(part)
        self._lost.add(part)

    def remove(self, part: FetchedPartition) -> None:
        """Remove a partition. A request that is under way brings nothing for it any more."""
        self._leave(part)
        self._parts.discard(part)
        part.become(GONE)

    def waited(self, share: float) -> None:
        """Adapt the time for gathering. ``share`` is the part of its recent time in which the thread that asks could have run,
        and waited for a processor."""
        if share > CROWDED:
            self.gather_s = min(_STEP * self.gather_s, GATHER_MAX_S)
        elif share < FREE:
            self.gather_s = max(self.gather_s / _STEP, GATHER_S)

    # ---- leaders

    def lookups(self, now: float) -> list[FetchedPartition]:
        """Return the partitions whose leaders are to be looked up now."""
        found = [part for part in self._lost if part.due <= now]
        for part in found:
            self._leave(part)
            part.become(LOOKED_UP)
        return found

    def found(self, part: FetchedPartition, broker: Address, now: float) -> None:
        if part.phase is LOOKED_UP:
            part.broker = broker
            self._brokers.setdefault(broker, _Broker((BrokerSlot(broker, 0), BrokerSlot(broker, 1))))
            self._wants_rows(part, now, now)

    # ---- requests

    def asks(self, now: float) -> Iterator[FetchRequest]:
        """Yield the requests to send now. A request asks for all partitions that want rows, also for those not yet due: they
        cost nothing more."""
        for broker in self._brokers.values():
            while broker.ready and self._time(broker) <= now:
                slot = broker.slots[broker.slots[0].busy]
                # The partition that has waited for longest. If it has to be alone, the request is for it alone; otherwise
                # those that have to be alone stay, and come first in one of the next requests.
                first = next(iter(broker.ready))
                chosen = (first,) if first.alone else tuple(part for part in broker.ready if not part.alone)
                for part in chosen:
                    self._leave(part)
                    part.become(ASKED)
                    part.asked_at, part.among = now, len(chosen) > 1
                slot.busy = True
                yield FetchRequest(slot, chosen, WAIT_S[slot.index])

    def answered(self, ask: FetchRequest, now: float, throttle_s: float = 0.0) -> list[FetchedPartition]:
        """Note that an answer has come, or that none will. Returns the partitions of the request that still wait for it."""
        ask.slot.busy, ask.slot.free_at = False, now + throttle_s
        return [part for part in ask.parts if part.phase is ASKED]

    def works_off(self, part: FetchedPartition, now: float) -> None:
        """Note that rows have come for a partition, which are now decoded."""
        if part.phase is ASKED:
            part.become(WORKED_OFF)
            part.good, part.pause, part.answered = now, PAUSE_S, True

    def goes_on(self, part: FetchedPartition, offset: int, now: float, lags: bool, alone: bool = False) -> None:
        """Ask for rows from an offset on. ``lags``: the log has more already."""
        if part.phase in (ASKED, WORKED_OFF, PAUSED):
            self._leave(part)
            part.offset, part.alone = offset, alone
            part.good, part.pause, part.answered = now, PAUSE_S, True
            self._wants_rows(
                part, now if lags else max(now, part.asked_at + self.gather_s), now if lags else now + LATE_S
            )

    # ---- pauses

    def pauses(self, part: FetchedPartition, until: float) -> None:
        """Pause a partition: its reader goes on with the rows that it has at the time ``until``."""
        if part.phase is WORKED_OFF:
            self._paused.add(part)
            part.become(PAUSED)
            part.due = until

    def resumed(self, now: float) -> list[FetchedPartition]:
        """Return the partitions whose pause is over: their readers go on with the rows that they have."""
        found = [part for part in self._paused if part.due <= now]
        for part in found:
            self._paused.discard(part)
            part.become(WORKED_OFF)
            part.good = now
        return found

    def failed(self, part: FetchedPartition, offset: int, now: float, retry_s: float) -> float | None:
        """Note a failure that may pass: the leader is looked up again after a pause, and rows from ``offset`` on are asked
        for. Returns the time without an answer of a broker, in seconds, if that is too long."""
        self._leave(part)
        if part.phase is GONE:
            return None
        silent = now - part.good
        if silent >= retry_s:
            return silent
        part.become(LOST)
        part.offset, part.due = offset, now + part.pause
        part.pause = min(2 * part.pause, PAUSE_MAX_S)
        self._lost.add(part)
        return None

    def stale(self, part: FetchedPartition, now: float) -> bool:
        """Tell whether the leader is to be looked up again before the next request. A partition that asks for nothing for a
        while may miss that its topic is deleted and made anew, and a request by name does not show it."""
        return not part.by_id and part.topic_id != UNKNOWN and now - part.asked_at > STALE_S

    # ---- time

    def due(self, looking_up: bool = False) -> float:
        """Return the time of the next action, if no event comes before. ``looking_up``: leaders are being looked up, and no
        others will be until that is over."""
        times = [self._time(broker) for broker in self._brokers.values() if broker.ready]
        times += [] if looking_up else [part.due for part in self._lost]
        times += [part.due for part in self._paused]
        return min(times, default=inf)

    @staticmethod
    def _time(broker: _Broker) -> float:
        first, second = broker.slots
        if not first.busy:
            return max(first.free_at, min(part.due for part in broker.ready))
        if not second.busy:
            return max(second.free_at, min(max(part.due, part.late_at) for part in broker.ready))
        return inf

    # ---- sets

    def _wants_rows(self, part: FetchedPartition, due: float, late_at: float) -> None:
        assert part.broker is not None
        part.become(READY)
        part.due, part.late_at = due, late_at
        self._brokers[part.broker].ready[part] = None

    def _leave(self, part: FetchedPartition) -> None:
        self._lost.discard(part)
        self._paused.discard(part)
        if part.broker is not None:
            self._brokers[part.broker].ready.pop(part, None)
