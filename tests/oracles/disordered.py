"""Events in disorder, equal in each process, and the answers of the oracle to the questions of one program about them.

One row in twenty is late, some have no time, and neighbours are equal in time. Rows are numbered within their partition. Users
come in spells, so that each has several sessions. Offers are the rows of another source, half as many, with which events are
joined. Two runs are equal if ``answers`` and the ``lines`` of their outputs are: the rows, sorted, as bytes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa

import flux
from flux.windows.window import END_OF_TIME
from tests.oracles.event_time import AT, OTHER_AT, EventTimeOracle

PARTITIONS = 3
DELAY, DELAY_US = "5 seconds", 5_000_000
#: Windows and sessions of the program, in microseconds.
SIZE, SLIDE, GAP = "10 seconds", "4 seconds", "3 seconds"
SIZE_US, SLIDE_US, GAP_US = 10_000_000, 4_000_000, 3_000_000
#: An event is joined with the offers to its user that are at most this much older; the best events of each user in each window.
WITHIN, WITHIN_US = "250 milliseconds", 250_000
BEST_SIZE, BEST_SIZE_US, BEST = "10 seconds", 10_000_000, 3
#: Microseconds: the mean distance of two rows of a partition, and the most by which a late row exceeds the delay.
STEP_US, LATE_US = 100_000, 20_000_000
USERS, SPELL = 40, 50
TIME = pa.timestamp("us", "UTC")
SCHEMA = pa.schema(
    [("partition", pa.int64()), ("number", pa.int64()), ("ts", TIME), ("user", pa.int64()), ("amount", pa.int64())]
)
OFFERS = pa.schema(
    [("source", pa.int64()), ("place", pa.int64()), ("at", TIME), ("user", pa.int64()), ("price", pa.int64())]
)
#: The columns of joined rows, and the names that the oracle has for them.
JOINED = ("partition", "number", "ts", "user", "amount", "source", "place", "at", "price")
_JOINED = tuple({"ts": AT, "at": OTHER_AT}.get(name, name) for name in JOINED)
#: The order of the best events: these columns, then all others.
BY = "price desc nulls last, amount desc nulls last"
SUMS = "count(*) as n, sum(amount)::bigint as total, count(distinct amount) as kinds"


@cache
def part(partition: int, count: int) -> pa.RecordBatch:
    """Return the rows of one partition. The first lie before 1970. Some behind the middle are late: a reader that begins again
    there finds that out only if it knows the newest time before."""
    rng, number = np.random.default_rng(partition), np.arange(count)
    times = _times(rng, count, STEP_US)
    user = (number // SPELL * 7 + rng.integers(0, 5, count)) % USERS
    ts = pa.array(times, mask=rng.random(count) < 0.01).cast(TIME)
    amount = rng.integers(-9, 100, count)
    columns = [pa.array(np.full(count, partition)), pa.array(number), ts, pa.array(user), pa.array(amount)]
    return pa.record_batch(columns, schema=SCHEMA)


@cache
def offers(partition: int, count: int) -> pa.RecordBatch:
    """Return the offers of one partition. Each takes as long as two events."""
    rng, number = np.random.default_rng([partition, 1]), np.arange(count)
    at = pa.array(_times(rng, count, 2 * STEP_US), mask=rng.random(count) < 0.01).cast(TIME)
    user = (2 * number // SPELL * 7 + rng.integers(0, 5, count)) % USERS
    price = rng.integers(0, 20, count)
    columns = [pa.array(np.full(count, partition)), pa.array(number), at, pa.array(user), pa.array(price)]
    return pa.record_batch(columns, schema=OFFERS)


def _times(rng: np.random.Generator, count: int, step_us: int) -> np.ndarray:
    """Draw times of rows, out of order, some of them late."""
    times = np.cumsum(rng.integers(0, 2 * step_us, count)) - 30_000_000 - rng.integers(0, DELAY_US, count)
    late = rng.random(count) < 0.05
    late[count // 2 : count // 2 + 5] = True
    times[late] -= DELAY_US + rng.integers(STEP_US, LATE_US, int(late.sum()))
    return times // 10_000 * 10_000


#: A maker of the rows of one partition, ``part`` or ``offers``: by the number of the partition and the count of rows.
Made = Callable[[int, int], pa.RecordBatch]


def everything(count: int, made: Made = part) -> pa.Table:
    return pa.Table.from_batches([made(partition, count) for partition in range(PARTITIONS)])


def numbered(
    count: int,
    most: int,
    may_go_on: Callable[[int, int], bool] = lambda partition, number: True,
    made: Made = part,
) -> Callable[[int, int | None], Iterator[flux.Positioned | None]]:
    """Return a reader of ``count`` rows for each partition, with its own positions: in each life the rows are cut elsewhere, into
    batches of up to ``most``. The reader gives nothing while ``may_go_on`` forbids the next row."""

    def read(partition: int, start: int | None) -> Iterator[flux.Positioned | None]:
        rows, number, cuts = made(partition, count), start or 0, random.Random()
        while number < count:
            if not may_go_on(partition, number):
                yield None
                continue
            size = min(cuts.randint(1, most), count - number)
            yield flux.Positioned(rows.slice(number, size), number + size)
            number += size

    return read


def watermark(count: int, made: Made = part) -> int:
    """Return the watermark behind all rows of all partitions, none of which has ended."""
    newest = [made(partition, count).column(2).cast(pa.int64()).drop_null() for partition in range(PARTITIONS)]
    return min(int(np.max(times.to_numpy())) for times in newest) - DELAY_US


def answers(count: int, final_us: int = END_OF_TIME, offers_final_us: int = END_OF_TIME) -> dict[str, bytes]:
    """Return the answers of the oracle by output: windows and sessions that are final by the watermark of the events, late rows,
    rows without their duplicates, joined rows that are final by the watermark of the offers, and, final by both, events with
    their newest offers and the best joined rows."""
    oracle = EventTimeOracle(everything(count), "ts", DELAY_US)
    late = oracle.late("partition", "number", "time_us", "user", "amount")
    assert 0.03 < len(late) / (count * PARTITIONS) < 0.07
    windows = oracle.windows(["user"], SUMS, SIZE_US, SLIDE_US)
    sessions = oracle.sessions(["user"], SUMS, GAP_US)
    once = oracle.once(["partition", "user"], DELAY_US, "partition", "number", "time_us", "user", "amount")
    oracle.join(EventTimeOracle(everything(count // 2, offers), "at", DELAY_US, "source", "place"), "user", WITHIN_US)
    by = ", ".join([BY, *(f'"{name}"' for name in _JOINED)])
    both_us = min(final_us, offers_final_us)
    return {
        "windows": text([row for row in windows if row[2] <= final_us]),
        "sessions": text([row for row in sessions if row[2] < final_us]),
        "late": text(late),
        "once": text(once),
        "joined": text(oracle.joined(offers_final_us, *_JOINED)),
        "as_of": text(oracle.as_of(both_us, "source desc, place desc", *_JOINED)),
        "best": text(oracle.best(["user"], BEST_SIZE_US, by, BEST, both_us, *_JOINED)),
    }


def lines(table: pa.Table) -> bytes:
    """Return the rows of an output, with times in microseconds."""
    columns = [
        column.cast(TIME).cast(pa.int64()) if pa.types.is_timestamp(column.type) else column for column in table.columns
    ]
    return text(list(zip(*(column.to_pylist() for column in columns), strict=True)))


def text(rows: list[tuple[Any, ...]]) -> bytes:
    return "\n".join(sorted(map(repr, rows))).encode()
