"""Rows with times for the flows of event time, and the answers of a batch over them in plain Python.

The model knows nothing of watermarks: it judges each row of a source partition by the rows before it, and counts windows and
sessions over the rows that are not late. Times are whole seconds, written in microseconds.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from flux.windows.window import SessionWindow, Window
from tests.simulation.stage_kinds import ROW

#: The time columns of source rows and of the results of windows.
TIME, WINDOW_TIME = "ts", "window_end"
TIMED = ROW.append(pa.field(TIME, pa.timestamp("us")))
#: The columns of source rows under other names, but for the key, as the right side of an as-of join has them.
RIGHT_TIME = "right_ts"
RENAMED = pa.schema([field if field.name == "key" else field.with_name(f"right_{field.name}") for field in TIMED])
#: Columns with the origin and the order of rows. They are no part of an answer.
ORIGIN = ("hop", "tick", "right_hop", "right_tick")
SECOND = 1_000_000
#: A row as the model knows it: id, key, word, time in microseconds or None.
TimedRow = tuple[int, int, str, int | None]
#: The result of a window: its key columns, start, end, count and sum of ids.
Result = tuple[object, ...]


def make_timed_batch(rows: Sequence[TimedRow], hop: int, tick: int) -> pa.RecordBatch:
    ids, keys, words, times = zip(*rows, strict=True) if rows else ((), (), (), ())
    origin = [hop] * len(rows), list(range(tick, tick + len(rows)))
    columns = [pa.array(values, TIMED.field(at).type) for at, values in enumerate((ids, keys, words, *origin))]
    return pa.record_batch([*columns, pa.array(times, pa.int64()).cast(TIMED.field(TIME).type)], schema=TIMED)


def tuples(batch: pa.RecordBatch) -> list[tuple[object, ...]]:
    """Return the rows of a batch without the columns of their origin, with times in microseconds."""
    names = [name for name in batch.schema.names if name not in ORIGIN]
    columns = [batch.column(name) for name in names]
    plain = [
        column.cast(pa.int64()).to_pylist() if pa.types.is_timestamp(column.type) else column.to_pylist()
        for column in columns
    ]
    return list(zip(*plain, strict=True)) if plain else []


@dataclass(frozen=True)
class Disorder:
    """The manner of the times of one source."""

    #: Seconds by which a row may be behind the time of its moment.
    behind: int
    #: The share of rows without a time, and of moments at which time leaps ahead.
    nulls: float
    leaps: float

    @classmethod
    def draw(cls, rng: random.Random) -> Disorder:
        return cls(rng.choice([0, 2, 4, 8, 15]), rng.choice([0.0, 0.0, 0.1]), rng.choice([0.0, 0.02]))

    def with_leaps(self) -> Disorder:
        """Return the manner with single rows from the future, as many as sources need that do not believe each time."""
        return replace(self, leaps=0.08)

    def times(self, rng: random.Random, count: int, begin: int) -> list[int | None]:
        """Return the times of ``count`` rows of one partition. Half of the leaps are those of a single row from the future,
        which makes all later rows late."""
        now, times = begin, list[int | None]()
        for _ in range(count):
            now += rng.choice([0, 0, 1, 1, 2, 3])
            time = now - rng.randint(0, self.behind)
            if rng.random() < self.leaps:
                time = now + rng.choice([50, 200])
                now = time if rng.random() < 0.5 else now
            times.append(None if rng.random() < self.nulls else time * SECOND)
        return times


class Newest:
    """The greatest time of rows that is believed; None before the first time."""

    def __init__(self, max_ahead: int | None = None, believed_after: int = 1) -> None:
        """Begin before the first row. ``max_ahead`` is that of ``withWatermark``; None: each time is believed."""
        self.time: int | None = None
        self._max_ahead, self._believed_after = max_ahead, believed_after
        self._doubted = list[int]()

    def see(self, time: int) -> None:
        if self.time is None or self._max_ahead is None or time <= self.time + self._max_ahead:
            self.time, self._doubted = time if self.time is None else max(self.time, time), []
            return
        self._doubted.append(time)
        if len(self._doubted) == self._believed_after:
            self.time, self._doubted = min(self._doubted), []


def judged(rows: Iterable[TimedRow], delay: int, newest: Newest) -> tuple[list[TimedRow], list[TimedRow]]:
    """Return the rows of one partition that are not late, and the late ones. ``newest`` comes from the rows before, and moves
    on."""
    on_time, late = list[TimedRow](), list[TimedRow]()
    for row in rows:
        time = row[3]
        is_late = time is not None and newest.time is not None and time < newest.time - delay
        (late if is_late else on_time).append(row)
        if time is not None:
            newest.see(time)
    return on_time, late


def windows_of(rows: Iterable[tuple[object, int, int, int]], window: Window | SessionWindow) -> dict[tuple, list[int]]:
    """Return count and sum for each key, start and end. ``rows``: key, time, count and sum of each."""
    if isinstance(window, SessionWindow):
        return _sessions_of(rows, window.gap)
    found: dict[tuple, list[int]] = {}
    for key, time, count, total in rows:
        last = (time - window.offset) // window.slide * window.slide + window.offset
        for start in range(last, time - window.size, -window.slide):
            group = found.setdefault((key, start, start + window.size), [0, 0])
            group[0] += count
            group[1] += total
    return found


def _sessions_of(rows: Iterable[tuple[object, int, int, int]], gap: int) -> dict[tuple, list[int]]:
    by_key: dict[object, list[tuple[int, int, int]]] = {}
    for key, *row in rows:
        by_key.setdefault(key, []).append((row[0], row[1], row[2]))
    found: dict[tuple, list[int]] = {}
    for key, mine in by_key.items():
        mine.sort()
        start, last, group = mine[0][0], mine[0][0], [0, 0]
        for time, count, total in mine:
            if time - last > gap:
                found[key, start, last + gap] = group
                start, group = time, [0, 0]
            last = time
            group[0] += count
            group[1] += total
        found[key, start, last + gap] = group
    return found
