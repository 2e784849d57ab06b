"""The events of Nexmark: people register at an auction house, open auctions and bid.

Every event is a function of its number: random choices are hashes of the number and of the choice. So any range of events can be
made by itself, a source may begin anywhere, and each run has the same events.

Proportions and choices are those of the Nexmark benchmark of Flink: of fifty events in succession one is a person, three are
auctions and the rest bids. Half of the bids go to one hot auction in each hundred, three quarters come from hot bidders, and
three quarters of the auctions from hot sellers. Bids may name an auction that opens only a moment later.

The rows of all three kinds have one schema, so that they are one source: ``kind`` says which it is, and the columns of other
kinds are null.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa

import flux

PERSON, AUCTION, BID = range(3)
TIME = pa.timestamp("us", "UTC")
_TEXT = pa.string()
#: The columns of each kind, by name.
COLUMNS = {
    "person": ("id", "name", "emailAddress", "creditCard", "city", "state", "dateTime", "extra"),
    "auction": (
        "id", "itemName", "description", "initialBid", "reserve", "dateTime", "expires", "seller", "category", "extra",
    ),
    "bid": ("auction", "bidder", "price", "channel", "url", "dateTime", "extra"),
}  # fmt: skip
KINDS = tuple(COLUMNS)
_NUMBERS = ("id", "initialBid", "reserve", "seller", "category", "auction", "bidder", "price")
_TIMES = ("dateTime", "expires")
SCHEMA = pa.schema(
    [("kind", pa.int8())]
    + [
        (name, pa.int64() if name in _NUMBERS else TIME if name in _TIMES else _TEXT)
        for name in dict.fromkeys(name for names in COLUMNS.values() for name in names)
    ]
)

#: Events in succession, and the first of them that is a bid; the first is a person, those between are auctions.
ROUND, FIRST_BID = 50, 4
AUCTIONS_OF_ROUND = 3
#: Milliseconds since the epoch: the time of the first event, 2015-07-15.
BASE_MS = 1_436_918_400_000
FIRST_ID, FIRST_CATEGORY, CATEGORIES = 1000, 10, 5
#: Numbers of the newest auctions and people that events name, and of those named that do not exist yet.
AUCTIONS_OPEN, PEOPLE_ACTIVE, AHEAD = 100, 1000, 10
#: One in this many bids goes to any auction, and so on; the others to the hot one of each hundred.
ANY_AUCTION, ANY_SELLER, ANY_BIDDER, HOT_ONE_OF = 2, 4, 4, 100
#: Lateness of a late event: the least, in milliseconds, and the most that is added. The delay of the queries is four seconds.
LATE_MS, LATE_MORE_MS = 5_000, 20_000
#: Disorder within a group of events: the stride by which their places are mixed.
STRIDE = 953
#: Bounds of a piece of a partition: seconds of event time, and number of events.
PIECE_S, PIECE_MAX = 1.0, 20_000

_CHANNELS = 10_000
_HOT_CHANNELS = ("Google", "Facebook", "Baidu", "Apple")
_FIRST_NAMES = ["Peter", "Paul", "Luke", "John", "Saul", "Vicky", "Kate", "Julie", "Sarah", "Deiter", "Walter"]
_LAST_NAMES = ["Shultz", "Abrams", "Spencer", "White", "Bartels", "Walton", "Smith", "Jones", "Noris"]
_CITIES = [
    "Phoenix",
    "Los Angeles",
    "San Francisco",
    "Boise",
    "Portland",
    "Bend",
    "Redmond",
    "Seattle",
    "Kent",
    "Cheyenne",
]
_STATES = ["AZ", "CA", "ID", "OR", "WA", "WY"]


# ---- random choices


def _draw(events: np.ndarray, number: int) -> np.ndarray:
    """Return 32 random bits for each event, as its draw ``number``: the end of splitmix64 (Steele, Lea, Flood)."""
    bits = events.astype(np.uint64) * np.uint64(0xD1342543DE82EF95)
    bits += np.uint64((number + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF)
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(0x94D049BB133111EB)
    return bits >> np.uint64(32)


def _below(events: np.ndarray, number: int, limit: int | np.ndarray) -> np.ndarray:
    """Return a random number from 0 to below a limit for each event."""
    return (_draw(events, number) * np.asarray(limit).astype(np.uint64) >> np.uint64(32)).astype(np.int64)


@cache
def _prices() -> np.ndarray:
    """Return prices in cents from 1 to a million dollars: their logarithms are spread evenly."""
    return np.round(10.0 ** (np.arange(1 << 20) / (1 << 20) * 6.0) * 100.0).astype(np.int64)


def _price(events: np.ndarray, number: int) -> np.ndarray:
    return _prices()[(_draw(events, number) >> np.uint64(12)).astype(np.int64)]


@cache
def _texts(mean: int, letters: str = "abcdefghijklmnopqrstuvwxyz") -> pa.Array:
    """Return random texts, whose lengths are spread around a mean."""
    random = np.random.default_rng(mean)
    pool, count = np.array(list(letters)), 4096
    lengths = random.integers(mean - mean // 5, mean + mean // 5 + 1, count)
    return pa.array(["".join(random.choice(pool, length)) for length in lengths])


def _text(events: np.ndarray, number: int, mean: int, letters: str = "abcdefghijklmnopqrstuvwxyz") -> pa.Array:
    return _texts(mean, letters).take(pa.array(_draw(events, number) >> np.uint64(20)))


@cache
def _channels() -> tuple[pa.Array, pa.Array]:
    """Return the names of channels and their pages. Most pages of channels that are not hot name the channel's number."""
    random, names, pages = np.random.default_rng(0), list(_HOT_CHANNELS), []
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz_"))
    names += [f"channel-{number}" for number in range(_CHANNELS)]
    for number in range(len(names)):
        folders = "/".join("".join(random.choice(letters, 3 + number % 3)) for _ in range(3))
        page = f"https://www.nexmark.com/{folders}/item.htm?query=1"
        known = number >= len(_HOT_CHANNELS) and number % 10
        pages.append(f"{page}&channel_id={number * 2_654_435_761 % (1 << 31)}" if known else page)
    return pa.array(names), pa.array(pages)


# ---- people and auctions that exist when an event happens


def _last_person(events: np.ndarray) -> np.ndarray:
    return events // ROUND


def _last_auction(events: np.ndarray) -> np.ndarray:
    before = events // ROUND * AUCTIONS_OF_ROUND
    return before + np.clip(events % ROUND - 1, -1, AUCTIONS_OF_ROUND - 1)


def _any_person(events: np.ndarray, number: int) -> np.ndarray:
    people = _last_person(events) + 1
    active = np.minimum(people, PEOPLE_ACTIVE)
    return people - active + _below(events, number, active + AHEAD)


def _any_auction(events: np.ndarray, number: int) -> np.ndarray:
    last = np.maximum(_last_auction(events), 0)
    least = np.maximum(last - AUCTIONS_OPEN, 0)
    return least + _below(events, number, last - least + 1 + AHEAD)


def _hot_or(one_in: int, hot: np.ndarray, other: np.ndarray, events: np.ndarray, number: int) -> np.ndarray:
    return np.where(_below(events, number, one_in) > 0, hot, other) + FIRST_ID


# ---- columns: the numbers of events and their times in milliseconds, to values


def _times(ms: np.ndarray) -> pa.Array:
    return pa.array(ms * 1000).view(TIME)


def _picked(values: list[str], events: np.ndarray, number: int) -> pa.Array:
    return pa.array(values).take(pa.array(_below(events, number, len(values))))


def _seller(events: np.ndarray, ms: np.ndarray) -> np.ndarray:
    hot = _last_person(events) // HOT_ONE_OF * HOT_ONE_OF
    return _hot_or(ANY_SELLER, hot, _any_person(events, 11), events, 10)


def _auction_of_bid(events: np.ndarray, ms: np.ndarray) -> np.ndarray:
    hot = _last_auction(events) // HOT_ONE_OF * HOT_ONE_OF
    return _hot_or(ANY_AUCTION, hot, _any_auction(events, 11), events, 10)


def _bidder(events: np.ndarray, ms: np.ndarray) -> np.ndarray:
    hot = _last_person(events) // HOT_ONE_OF * HOT_ONE_OF + 1
    return _hot_or(ANY_BIDDER, hot, _any_person(events, 13), events, 12)


def _channel(events: np.ndarray) -> pa.Array:
    hot = _below(events, 16, len(_HOT_CHANNELS))
    other = len(_HOT_CHANNELS) + _below(events, 17, _CHANNELS)
    return pa.array(np.where(_below(events, 15, 2) > 0, hot, other))


Maker = Callable[[np.ndarray, np.ndarray], "np.ndarray | pa.Array"]
_NAMES = [f"{first} {last}" for first in _FIRST_NAMES for last in _LAST_NAMES]
#: By kind and column, draws from 10 on. ``expires`` depends on the rate, and is made elsewhere.
_MAKERS: tuple[dict[str, Maker], ...] = (
    {
        "id": lambda events, ms: _last_person(events) + FIRST_ID,
        "name": lambda events, ms: _picked(_NAMES, events, 10),
        "emailAddress": lambda events, ms: _text(events, 11, 20),
        "creditCard": lambda events, ms: _text(events, 12, 19, "0123456789"),
        "city": lambda events, ms: _picked(_CITIES, events, 13),
        "state": lambda events, ms: _picked(_STATES, events, 14),
        "extra": lambda events, ms: _text(events, 15, 130),
    },
    {
        "id": lambda events, ms: _last_auction(events) + FIRST_ID,
        "itemName": lambda events, ms: _text(events, 12, 20),
        "description": lambda events, ms: _text(events, 13, 50),
        "initialBid": lambda events, ms: _price(events, 14),
        "reserve": lambda events, ms: _price(events, 14) + _price(events, 15),
        "seller": _seller,
        "category": lambda events, ms: FIRST_CATEGORY + _below(events, 16, CATEGORIES),
        "extra": lambda events, ms: _text(events, 17, 380),
    },
    {
        "auction": _auction_of_bid,
        "bidder": _bidder,
        "price": lambda events, ms: _price(events, 14),
        "channel": lambda events, ms: _channels()[0].take(_channel(events)),
        "url": lambda events, ms: _channels()[1].take(_channel(events)),
        "extra": lambda events, ms: _text(events, 18, 68),
    },
)


@cache
def _nulls(kind: pa.DataType) -> pa.Array:
    return pa.nulls(PIECE_MAX, kind)


class Events:
    """The events of a run. Partitions take turns: piece k of the whole belongs to partition k modulo the number of partitions. A
    piece gives three batches: its people, then its auctions, then its bids.

    Only columns in ``asked`` are made, beside ``kind`` and ``dateTime``; the others are null."""

    def __init__(
        self, events: int, partitions: int, per_second: int = 100_000, disorder: int = 1, late: float = 0.0
    ) -> None:
        """Choose the events.

        events      their number
        partitions  of the source
        per_second  of event time, from 50 to 1,000,000: it decides how many events a window has
        disorder    events in each group that come mixed; 1: no disorder
        late        the share of events that come five to twenty-five seconds too late"""
        _check("events", events, 1, 1 << 40)
        _check("partitions", partitions, 1, 4096)
        _check("per_second", per_second, ROUND, 1_000_000)
        _check("disorder", disorder, 1, 1 << 30)
        if math.gcd(disorder, STRIDE) > 1:
            raise flux.UsageError(f"disorder: {disorder} is a multiple of {STRIDE}, which mixes nothing; take one more")
        if not 0 <= late < 1:
            raise flux.UsageError(f"late is a share from 0 to below 1, got {late!r}")
        self.partitions = partitions
        self.asked: dict[str, set[str]] = {kind: set() for kind in KINDS}
        #: Events of a piece.
        self.piece = min(int(per_second * PIECE_S) // ROUND * ROUND or ROUND, PIECE_MAX)
        self._events, self._per_second, self._disorder, self._late = events, per_second, disorder, late

    def ask_for_all(self) -> Events:
        """Make all columns of all kinds."""
        for kind, columns in COLUMNS.items():
            self.asked[kind].update(columns)
        return self

    def count(self, partition: int) -> int:
        """Return the number of batches of a partition."""
        pieces = -(-self._events // self.piece)
        return max(-(-(pieces - partition) // self.partitions), 0) * len(KINDS)

    def batches(self, partition: int, first: int = 0) -> Iterator[pa.RecordBatch]:
        """Yield the batches of a partition from one of them on."""
        for number in range(first, self.count(partition)):
            yield self.batch(partition, number)

    def batch(self, partition: int, number: int) -> pa.RecordBatch:
        """Return the rows of one kind of one piece."""
        piece, kind = divmod(number, len(KINDS))
        first = (piece * self.partitions + partition) * self.piece
        places = np.arange(first, min(first + self.piece, self._events))
        groups = places // self._disorder * self._disorder
        events = groups + (places - groups) * STRIDE % self._disorder
        turn = events % ROUND
        return self._of_kind(kind, events[(turn == 0, (turn > 0) & (turn < FIRST_BID), turn >= FIRST_BID)[kind]])

    def _of_kind(self, kind: int, events: np.ndarray) -> pa.RecordBatch:
        ms = self._ms(events)
        if self._late:
            is_late = _draw(events, 0) < np.uint64(self._late * (1 << 32))
            ms = ms - np.where(is_late, LATE_MS + _below(events, 1, LATE_MORE_MS), 0)
        made: dict[str, np.ndarray | pa.Array] = {
            "kind": np.full(len(events), kind, np.int8),
            "dateTime": _times(ms),
        }
        for name in self.asked[KINDS[kind]] - made.keys():
            made[name] = self._expires(events, ms) if name == "expires" else _MAKERS[kind][name](events, ms)
        columns = [
            pa.array(made[field.name]) if field.name in made else _nulls(field.type).slice(0, len(events))
            for field in SCHEMA
        ]
        return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)

    def _ms(self, events: np.ndarray) -> np.ndarray:
        return BASE_MS + events * 1000 // self._per_second

    def _expires(self, events: np.ndarray, ms: np.ndarray) -> pa.Array:
        """Return the ends of auctions: on average there are as many open as ``AUCTIONS_OPEN`` says."""
        mean = self._ms(events + AUCTIONS_OPEN * ROUND // AUCTIONS_OF_ROUND) - self._ms(events)
        return _times(ms + 1 + _below(events, 2, np.maximum(mean * 2, 1)))


class Generator(flux.SourceReader):
    """The source of events. A position is the number of a batch, so a reader may begin at each of them.

    ``events.asked`` grows until the query starts: each flow of the events adds the columns that it reads."""

    schema = SCHEMA

    def __init__(self, events: int = 1_000_000, partitions: int = 2, pace: float | None = None, **options: Any) -> None:
        """Make the events. ``pace``: the most events per second of the clock; without it reading sets the pace. Options
        are those of ``Events``."""
        if pace is not None and not pace > 0:
            raise flux.UsageError(f"pace is a number of events per second above 0, got {pace!r}")
        self.events, self.partitions = Events(events, partitions, **options), partitions
        self._pace = pace

    def read(self, partition: int, start: int | None) -> Iterator[flux.Positioned | None]:
        first, began = start or 0, time.monotonic()
        for number, batch in enumerate(self.events.batches(partition, first), first):
            if self._pace is not None:
                due = (number - first) / len(KINDS) * self.events.piece * self.partitions / self._pace
                while time.monotonic() < began + due:
                    yield None
            yield flux.Positioned(batch, number + 1)


def _check(name: str, value: int, least: int, most: int) -> None:
    if not isinstance(value, int) or not least <= value <= most:
        raise flux.UsageError(f"{name} must be a whole number from {least:,} to {most:,}, got {value!r}")
