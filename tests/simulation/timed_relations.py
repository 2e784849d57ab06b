"""Joins, ranks, deduplication and lookups in the flows of event time, and the answer of a batch in plain Python.

The operators are those of the product. The answer of a join and of ranks follows from the rows that are not late, in any order
of their meeting. The first row of a key does not follow from them alone. A deduplication by event time is checked for the gaps
between given rows, and for a given row before each other one (``DedupSink``); a deduplication by the time of steps only for a
row of each key. Rows given by the order in which they meet (``Turns``) are checked only for being there. The version of a table
that a row meets follows from the order of steps: rows of a key meet versions that never go back (``LookupSink``), and replicas
agree on them (``event_time_laws``).
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa

import flux
from flux.expressions.steps import MapRows, RowStep, RowSteps, Select, Where
from flux.expressions.tree import Case, Column
from flux.joins.as_of import AsOfJoin, AsOfSpec
from flux.joins.join import Join
from flux.joins.join_spec import EITHER, KINDS, LEFT, RIGHT, JoinSpec, TimeBound
from flux.joins.lookup import LookupTable
from flux.joins.refreshed_lookup import RefreshedLookup, RefreshedSpec
from flux.ranks.dedup import Dedup, DedupSpec
from flux.ranks.top import Last, OrderColumn, RankSpec, Top, TopOfWindow
from flux.windows.window import Window
from tests.simulation.timed_kinds import TimedSink, Turns
from tests.simulation.timed_rows import RIGHT_TIME, SECOND, TIME, TIMED, TimedRow
from tests.simulation.violation import Violation

#: The columns of rows that are part of an answer, by position and name.
PLAIN = [(at, name) for at, name in enumerate(TIMED.names) if name in ("id", "key", "word", TIME)]
KEY_AT, TIME_AT = TIMED.names.index("key"), TIMED.names.index(TIME)
#: Law (g) for a deduplication.
ONCE_IN = "(g) one row of a key is given in each stretch of time"
#: The operators of relations, none of which is an aggregate.
OPERATORS = (Join, AsOfJoin, TopOfWindow, Top, Dedup, RefreshedLookup)
#: The relations of a flow, by the names of functions below.
RELATIONS = ("join", "join", "top", "dedup")
WIDE = ("join", "join", "join", "as_of", "as_of", "top", "dedup", "once", "best_so_far", "last", "turns")
#: The number of the first version: above all times of random rows, and still a time for Python.
FIRST_VERSION = 220_000_000_000 * SECOND
#: Law (j), as it shows at a sink.
FORWARDS = "(j) the versions of a table go forwards"
#: An answer from the rows of each input.
Answer = Callable[..., list[Any]]


class Places(NamedTuple):
    """The ranks of an answer that is renewed."""

    #: Functions of a given row: its place, and a value that is less for better rows.
    place: Callable[[Any], Any]
    order: Callable[[Any], Any]
    answer: Answer


def join(rng: random.Random, wide: bool = False) -> tuple[type[Join], Answer]:
    """Draw a join of rows with one key whose times are near each other; ``wide``: of any kind."""
    how = rng.choice(KINDS if wide else ("inner", "inner", "left_outer", "left_outer", "left_semi", "left_anti"))
    low = rng.choice([-8, -3, 0, 2]) * SECOND
    high = low + rng.choice([0, 4, 10]) * SECOND
    bounds = TimeBound(LEFT, False, TIME_AT, low), TimeBound(LEFT, True, TIME_AT, high)
    width = len(TIMED)
    outputs = tuple((name, at) for at, name in PLAIN)
    if how == "right_outer":
        outputs = (*((name, width + at) for at, name in PLAIN), ("other", 0))
    elif how in ("inner", "left_outer"):
        outputs += (("other", width),)
    elif how == "full_outer":
        outputs += (("other", width), ("other_key", width + KEY_AT), ("other_ts", width + TIME_AT))
    time_of = {"right_outer": RIGHT, "full_outer": EITHER}.get(how, LEFT)
    spec = JoinSpec(how, ((KEY_AT,), (KEY_AT,)), outputs, (TIME_AT, TIME_AT), bounds, time_of=time_of)

    class Joined(Join):
        def __init__(self) -> None:
            super().__init__(spec, TIMED, TIMED)

    return Joined, partial(joined, how, low, high)


def joined(how: str, low: int, high: int, left: list[TimedRow], right: list[TimedRow]) -> list[Any]:
    if how == "right_outer":
        return joined("left_outer", -high, -low, right, left)
    by_key: dict[int, list[TimedRow]] = defaultdict(list)
    for row in right:
        if row[3] is not None:
            by_key[row[1]].append(row)
    found: list[Any] = []
    matched = set[TimedRow]()
    for row in left:
        time = row[3]
        mine = [] if time is None else [r for r in by_key[row[1]] if r[3] + low <= time <= r[3] + high]  # type: ignore[operator]
        if how == "left_semi" or how == "left_anti":
            found += [row] * (bool(mine) == (how == "left_semi"))
        elif how == "full_outer":
            matched.update(mine)
            found += [(*row, other[0], other[1], other[3]) for other in mine] or [(*row, None, None, None)]
        else:
            found += [(*row, other[0]) for other in mine] or [(*row, None)] * (how == "left_outer")
    if how == "full_outer":
        found += [(None,) * 4 + (row[0], row[1], row[3]) for row in right if row not in matched]
    return found


def as_of(rng: random.Random) -> tuple[type[AsOfJoin], Answer]:
    """Draw an as-of join of rows with renamed ones."""
    tolerance, outer = rng.choice([None, None, 5 * SECOND, 30 * SECOND]), rng.random() < 0.5

    class Newest(AsOfJoin):
        def __init__(self) -> None:
            super().__init__(AsOfSpec((TIME, RIGHT_TIME), tolerance, outer))

    return Newest, partial(newest_before, tolerance, outer)


def newest_before(tolerance: int | None, outer: bool, left: list[TimedRow], right: list[TimedRow]) -> list[Any]:
    by_key: dict[int, list[tuple[int, TimedRow]]] = defaultdict(list)
    for row in right:
        if row[3] is not None:
            by_key[row[1]].append((row[3], row))
    found: list[Any] = []
    for row in left:
        time = row[3]
        older = [] if time is None else [each for each in by_key[row[1]] if each[0] <= time]
        partner = max(older, default=None)
        if partner is not None and (tolerance is None or time is None or partner[0] >= time - tolerance):
            found.append((*row, partner[1][0], partner[1][2], partner[1][3]))
        elif outer:
            found.append((*row, None, None, None))
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


def best_so_far(rng: random.Random) -> tuple[type[Top], Places]:
    """Draw ranks of the rows of a key until now."""
    limit, descending = rng.choice([1, 2, 5]), rng.random() < 0.5
    outputs = tuple(name for _, name in PLAIN)
    spec = RankSpec(limit, (OrderColumn("word", descending, descending),), outputs)

    class Ranked(Top):
        def __init__(self) -> None:
            super().__init__(spec)

    def order(row: Any) -> Any:
        return -len(row[2]) if descending else len(row[2]), row[0]  # words are w, ww, ...

    def answer(rows: list[TimedRow]) -> list[Any]:
        ordered = sorted(rows, key=order)
        by_key = {row[1]: [each for each in ordered if each[1] == row[1]] for row in rows}
        return [(*row, rank) for mine in by_key.values() for rank, row in enumerate(mine[:limit], 1)]

    return Ranked, Places(lambda row: (row[1], row[4]), order, answer)


def last(rng: random.Random) -> tuple[type[Last], Places]:
    """Draw the last row of each key by its time."""
    ttl = rng.choice([None, None, 10 * SECOND, 40 * SECOND])
    outputs = tuple(name for _, name in PLAIN)
    by = (OrderColumn(TIME, descending=True, nulls_last=True),)
    spec = RankSpec(1, by, outputs, ttl=ttl, time=None if ttl is None else TIME, backward=True)

    class Latest(Last):
        def __init__(self) -> None:
            super().__init__(spec)

    def order(row: Any) -> Any:
        return row[3] is None, -(row[3] or 0), -row[0]

    def answer(rows: list[TimedRow]) -> list[Any]:
        known = [row for row in rows if ttl is None or row[3] is not None]
        return [min((each for each in known if each[1] == key), key=order) for key in {row[1] for row in known}]

    return Latest, Places(lambda row: row[1], order, answer)


def turns(rng: random.Random) -> tuple[type[Turns], None]:
    return Turns, None


def once(rng: random.Random) -> tuple[type[Dedup], None]:
    """Draw a deduplication by the key and the time of the steps."""
    ttl = rng.choice([1_000, 20_000, 1_000_000])

    class Once(Dedup):
        def __init__(self) -> None:
            super().__init__(DedupSpec(ttl, None))

    return Once, None


def lookup(rng: random.Random) -> tuple[list[RowStep], Callable[[list[TimedRow]], list[TimedRow]]]:
    """Draw a table with words for some keys, which take the place of the words of the rows. Return the steps in which rows look
    up the words, and the expected rows: rows whose key is not there stay as they are, or are left out."""
    known, inner = sorted(rng.sample(range(4), rng.randint(1, 4))), rng.random() < 0.5
    words = {key: "w" * rng.choice([1, 2, 9]) for key in known}
    rows = pa.table({"key": pa.array(known, pa.int64()), "label": pa.array(words.values(), pa.string())})
    table = LookupTable(rows, [0], ["known", "label", "found"], ["key"], "key in table words")
    found, text = Column("found", pa.bool_()), pa.string()
    word = Case(((found, Column("label", text)),), Column("word", text), text)
    given = tuple((each.name, word if each.name == "word" else Column(each.name, each.type)) for each in TIMED)
    looks = MapRows(table, TIMED, pa.schema([*TIMED, *table.added]), table.read_by)

    def answer(rows: list[TimedRow]) -> list[TimedRow]:
        return [(id_, key, words.get(key, old), time) for id_, key, old, time in rows if not inner or key in words]

    return [looks, *([Where(found)] if inner else []), Select(given)], answer


class Chain:
    """A stand-in for a DataFrame that collects its steps."""

    def __init__(self, *steps: RowStep) -> None:
        self.steps = steps

    def looks_up(self, *steps: RowStep) -> Chain:
        return Chain(*self.steps, *steps)


def to_steps(schema: pa.Schema, operators: Any) -> RowSteps:
    return RowSteps.of(schema, operators(Chain()).steps)


def dedup(rng: random.Random) -> tuple[type[Dedup], int]:
    """Draw a deduplication by the key, and return its time as well."""
    ttl = rng.choice([3, 10, 40]) * SECOND

    class Once(Dedup):
        def __init__(self) -> None:
            super().__init__(DedupSpec(ttl, TIME))

    return Once, ttl


def refreshed(rng: random.Random) -> tuple[type[RefreshedLookup], Answer]:
    """Make a lookup of rows by their key in a table whose versions have the times of its rows."""
    columns = pa.schema(list(TIMED)[:TIME_AT])
    names = [*(f"table {name}" for name in columns.names), "found"]
    first = LookupTable(columns.empty_table(), (KEY_AT,), names, ("key",), "key in table t")
    given = pa.schema([*TIMED, *first.added])
    outputs = [(name, Column(name, TIMED.field(at).type)) for at, name in PLAIN]
    behind = RowSteps.of(given, [Select((*outputs, ("other", Column(names[0], columns.field(0).type))))])
    spec = RefreshedSpec(first, behind, "spell", number=FIRST_VERSION)

    class LooksUp(RefreshedLookup):
        def __init__(self) -> None:
            super().__init__(spec)

    return LooksUp, lambda left, table: left


class LookupSink(TimedSink):
    """A sink that keeps rows which have met versions of a table, and checks that the versions of a key go forwards."""

    #: By the id of a row of the table: its version.
    versions: Mapping[int, int] = {}

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.state["met"] = {}

    def keep(self, rows: list[Any]) -> None:
        for _, key, *_, other in rows:
            if other is not None:
                met = self.versions[other]
                if met < self.state["met"].get(key, met):
                    raise Violation(FORWARDS, f"{self.stage_name}: key {key} met {met} after {self.state['met'][key]}")
                self.state["met"][key] = met
                self.ledger.counts["rows that met a version"] += 1
        super().keep(rows)


class DedupSink(TimedSink):
    """A sink that keeps rows, and checks that the rows of a key are ``ttl`` apart."""

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
    """Describe a row that is missing or should not have been given; empty if there is none."""
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
