"""Joins, ranks and deduplication in the flows of event time, and the answer of a batch in plain Python.

The operators are those of the product. The answer of a join and of ranks follows from the rows that are not late, whatever the
order in which they meet. The first row of a key does not follow from them alone: of a deduplication the gaps between given rows
are checked, and that each other row has one before it (``DedupSink``).
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import flux
from flux.joins.join import Join
from flux.joins.join_spec import LEFT, JoinSpec, TimeBound
from flux.ranks.dedup import Dedup, DedupSpec
from flux.ranks.top import OrderColumn, RankSpec, TopOfWindow
from flux.windows.window import Window
from tests.simulation.timed_kinds import TimedSink
from tests.simulation.timed_rows import SECOND, TIME, TIMED, TimedRow
from tests.simulation.violation import Violation

#: The columns of rows that are part of an answer, by position and name.
PLAIN = [(at, name) for at, name in enumerate(TIMED.names) if name in ("id", "key", "word", TIME)]
KEY_AT, TIME_AT = TIMED.names.index("key"), TIMED.names.index(TIME)
#: Law (g) for a deduplication.
ONCE_IN = "(g) one row of a key is given in each stretch of time"
#: The operators of flows that are no aggregates.
OPERATORS = (Join, TopOfWindow, Dedup)
#: An answer from the rows of each input.
Answer = Callable[..., list[Any]]


def join(rng: random.Random) -> tuple[type[Join], Answer]:
    """Draw a join of rows by their key, whose times are near each other."""
    how = rng.choice(["inner", "inner", "left_outer", "left_outer", "left_semi", "left_anti"])
    low = rng.choice([-8, -3, 0, 2]) * SECOND
    high = low + rng.choice([0, 4, 10]) * SECOND
    bounds = TimeBound(LEFT, False, TIME_AT, low), TimeBound(LEFT, True, TIME_AT, high)
    outputs = tuple((name, at) for at, name in PLAIN)
    if how in ("inner", "left_outer"):
        outputs += (("other", len(TIMED)),)
    spec = JoinSpec(how, ((KEY_AT,), (KEY_AT,)), outputs, (TIME_AT, TIME_AT), bounds, time_of=LEFT)

    class Joined(Join):
        def __init__(self) -> None:
            super().__init__(spec, TIMED, TIMED)

    return Joined, partial(joined, how, low, high)


def joined(how: str, low: int, high: int, left: list[TimedRow], right: list[TimedRow]) -> list[Any]:
    by_key: dict[int, list[TimedRow]] = defaultdict(list)
    for row in right:
        if row[3] is not None:
            by_key[row[1]].append(row)
    found: list[Any] = []
    for row in left:
        time = row[3]
        mine = [] if time is None else [r for r in by_key[row[1]] if r[3] + low <= time <= r[3] + high]  # type: ignore[operator]
        if how == "left_semi" or how == "left_anti":
            found += [row] * (bool(mine) == (how == "left_semi"))
        else:
            found += [(*row, other[0]) for other in mine] or [(*row, None)] * (how == "left_outer")
    return found


def top(rng: random.Random) -> tuple[type[TopOfWindow], Answer]:
    """Draw ranks of the rows of a key within windows."""
    limit, ties, descending = rng.choice([1, 2, 5]), rng.random() < 0.5, rng.random() < 0.5
    size = rng.choice([5, 10]) * SECOND
    window = flux.window(TIME, f"{size} microseconds", rng.choice([None, "3 seconds"]))
    outputs = tuple(name for _, name in PLAIN)
    spec = RankSpec(limit, (OrderColumn("word", descending, descending),), outputs, ties, window)

    class Best(TopOfWindow):
        def __init__(self) -> None:
            super().__init__(spec)

    return Best, partial(best, limit, ties, descending, window)


def best(limit: int, ties: bool, descending: bool, window: Window, rows: list[TimedRow]) -> list[Any]:
    groups: dict[tuple[int, int], list[TimedRow]] = defaultdict(list)
    for row in rows:
        if (time := row[3]) is not None:
            last = (time - window.offset) // window.slide * window.slide + window.offset
            for start in range(last, time - window.size, -window.slide):
                groups[row[1], start].append(row)
    found: list[Any] = []
    for (_, start), mine in groups.items():
        mine.sort(key=lambda row: row[0])
        mine.sort(key=lambda row: row[2], reverse=descending)  # a stable sort
        for place, row in enumerate(mine):
            rank = 1 + (next(at for at, other in enumerate(mine) if other[2] == row[2]) if ties else place)
            if rank <= limit:
                found.append((*row, start, start + window.size, rank))
    return found


def dedup(rng: random.Random) -> tuple[type[Dedup], int]:
    """Draw a deduplication by the key, and return its time as well."""
    ttl = rng.choice([3, 10, 40]) * SECOND

    class Once(Dedup):
        def __init__(self) -> None:
            super().__init__(DedupSpec(ttl, TIME))

    return Once, ttl


class DedupSink(TimedSink):
    """Keeps rows, and sees to it that those of a key are ``ttl`` apart."""

    ttl = 0

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.state["last"] = {}

    def keep(self, rows: list[Any]) -> None:
        for row in rows:
            _, key, _, time = row
            last = self.state["last"].get(key)
            if last is not None and time <= last + self.ttl:
                raise Violation(ONCE_IN, f"{self.stage_name}: {row} after {last} with {self.ttl}")
            self.state["last"][key] = time
        super().keep(rows)


def lacking(found: list[Any], rows: list[TimedRow], ttl: int) -> str:
    """Return a row that should have been given, or was not to be; empty: there is none."""
    known = {row for row in rows if row[3] is not None}
    if strange := [row for row in found if row not in known] or [row for row in found if found.count(row) > 1]:
        return f"{strange[0]} was given"
    newest: dict[int, int] = {}
    for _, key, _, time in found:
        newest[key] = max(time, newest.get(key, time))
    for row in known:
        if row[1] not in newest or row[3] > newest[row[1]] + ttl:  # type: ignore[operator]
            return f"{row} was left out, and its key was given last at {newest.get(row[1])}"
    return ""
