"""Random queries over the flows of ``sql_flows``, each as a text for ``flux.sql`` and as one for DuckDB. The two are written side
by side, because DuckDB has no windows: there they are arithmetic on times, and sessions are gaps between rows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

NUMBER, TEXT, TIME = "number", "text", "time"
SECOND = 1_000_000
TABLES = {
    "bids": {"auction": NUMBER, "bidder": NUMBER, "price": NUMBER, "channel": TEXT, "ts": TIME},
    "auctions": {"id": NUMBER, "seller": NUMBER, "category": NUMBER, "ts": TIME, "expires": TIME},
}


class Both(NamedTuple):
    """A part of a query in both languages."""

    spark: str
    duck: str


def same(text: str) -> Both:
    return Both(text, text)


def joined(template: str, *parts: Both) -> Both:
    """Fill the parts into ``{}`` of a template, in both languages."""
    return Both(template.format(*(part.spark for part in parts)), template.format(*(part.duck for part in parts)))


def listed(parts: Sequence[Both], between: str = ", ") -> Both:
    return Both(between.join(part.spark for part in parts), between.join(part.duck for part in parts))


@dataclass(frozen=True)
class Rows:
    """A relation under a name, with its columns."""

    #: As it stands behind FROM.
    text: Both
    name: str
    columns: dict[str, str]


class Queries:
    """A source of random queries: each seed gives one."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._named: list[tuple[str, Both]] = []
        self._relations: list[Rows] = []
        self._count = 0

    def query(self) -> Both:
        """Return a query."""
        made = self._draw.choice(
            (self._rows, self._windowed, self._windowed, self._sessions, self._grouped, self._interval_join,
             self._window_join, self._union, self._distinct, self._longer_windows)
        )()  # fmt: skip
        if not self._named:
            return made
        named = listed([joined(f"{name} AS ({{}})", text) for name, text in self._named])
        return joined("WITH {} {}", named, made)

    def _one_in(self, number: int) -> bool:
        return self._draw.randrange(number) == 0

    def _name(self, of: str) -> str:
        self._count += 1
        return f"{of}{self._count}"

    # ---- FROM

    def _from(self, depth: int = 2, times: bool = True) -> Rows:
        """Return a relation. ``times``: it has the event time as ``ts``."""
        kind = self._draw.randrange(8) if depth else 0
        name = self._name("r")
        if kind < 4:
            table = self._draw.choice(list(TABLES))
            return Rows(same(f"{table} {self._draw.choice(('', 'AS '))}{name}"), name, TABLES[table])
        if kind == 4 and self._relations:
            known = self._draw.choice(self._relations)
            return Rows(same(f"{known.name} {name}"), name, known.columns)
        if kind == 5:
            text, columns = self._united(depth - 1)
        elif kind == 6:
            text, columns = self._pairs(depth - 1, self._draw.choice(("JOIN", "LEFT JOIN")))
        else:
            text, columns = self._selected(self._from(depth - 1), ["ts"])
        if self._one_in(3):
            relation = Rows(same(""), self._name("w"), columns)
            self._named.append((relation.name, text))
            self._relations.append(relation)
            return Rows(same(f"{relation.name} {name}"), name, columns)
        return Rows(joined(f"({{}}) {name}", text), name, columns)

    def _selected(self, rows: Rows, kept: Sequence[str]) -> tuple[Both, dict[str, str]]:
        """Return a SELECT of some expressions and of the columns ``kept``."""
        columns: dict[str, str] = {}
        items: list[Both] = []
        for _ in range(self._draw.randint(1, 3)):
            kind = self._draw.choice((NUMBER, NUMBER, TEXT, TIME))
            columns[self._name("c")] = kind
            items.append(joined(f"{{}} AS {list(columns)[-1]}", self._expression(rows, kind)))
        for name in kept:
            columns[name] = rows.columns[name]
            items.insert(self._draw.randint(0, len(items)), same(self._draw.choice((name, f"{rows.name}.{name}"))))
        order = sorted(range(len(items)), key=lambda at: items[at].spark)
        items = [items[at] for at in order]
        return joined("SELECT {} FROM {}{}", listed(items), rows.text, self._where(rows)), columns

    def _united(self, depth: int) -> tuple[Both, dict[str, str]]:
        """Return a union whose first column is the event time."""
        parts = []
        for _ in range(self._draw.randint(2, 3)):
            rows = self._from(depth)
            items = [same(f"{rows.name}.ts AS ts"), joined("{} AS n", self._expression(rows, NUMBER)),
                     joined("{} AS word", self._expression(rows, TEXT))]  # fmt: skip
            parts.append(joined("SELECT {} FROM {}{}", listed(items), rows.text, self._where(rows)))
        return listed(parts, " UNION ALL "), {"ts": TIME, "n": NUMBER, "word": TEXT}

    def _where(self, rows: Rows, word: str = " WHERE ") -> Both:
        return joined(word + "{}", self._condition(rows)) if self._one_in(3) else same("")

    # ---- expressions

    def _column(self, rows: Rows, kind: str) -> str | None:
        names = [name for name, each in rows.columns.items() if each == kind]
        return f"{rows.name}.{self._draw.choice(names)}" if names else None

    def _expression(self, rows: Rows, kind: str, depth: int = 2) -> Both:
        found = self._column(rows, kind)
        if depth == 0 or self._one_in(3):
            return same(found) if found is not None else self._constant(kind)
        make = {NUMBER: self._number, TEXT: self._text, TIME: self._time}[kind]
        return make(rows, depth - 1)

    def _constant(self, kind: str) -> Both:
        if kind == NUMBER:
            return same(str(self._draw.randint(0, 40)))
        return same("'" + self._draw.choice(("apple", "x", "Google", "")) + "'") if kind == TEXT else self._moment()

    def _moment(self) -> Both:
        return same(f"TIMESTAMP '2026-11-28 00:0{self._draw.randrange(7)}:{self._draw.randrange(10, 60)}'")

    def _number(self, rows: Rows, depth: int) -> Both:
        one, two = (self._expression(rows, NUMBER, depth) for _ in range(2))
        word, moment = self._expression(rows, TEXT, depth), self._expression(rows, TIME, depth)
        condition, number = self._condition(rows, depth), same(str(self._draw.randint(2, 9)))
        return self._draw.choice(
            (
                joined("({} + {})", one, two), joined("({} - {})", one, two), joined("({} * {})", one, number),
                joined("({} % {})", one, number), joined("(- {})", one), joined("abs({})", one),
                joined("coalesce({}, {})", one, two), joined("greatest({}, {})", one, two),
                joined("least({}, {})", one, two),
                joined("nullif({}, {})", one, number), joined("length({})", word), joined("extract(MINUTE FROM {})", moment),
                joined("CASE WHEN {} THEN {} ELSE {} END", condition, one, two),
                joined("CASE WHEN {} THEN {} END", condition, one),
                joined("CAST(CAST({} AS STRING) AS BIGINT)", one),
            )
        )  # fmt: skip

    def _text(self, rows: Rows, depth: int) -> Both:
        one, two = (self._expression(rows, TEXT, depth) for _ in range(2))
        number, condition = self._expression(rows, NUMBER, depth), self._condition(rows, depth)
        return self._draw.choice(
            (
                joined("upper({})", one), joined("lower({})", one), joined("trim({})", one), joined("reverse({})", one),
                joined("({} || {})", one, two), joined("coalesce({}, {})", one, two), joined("substring({}, 1, 2)", one),
                joined("replace({}, 'a', 'oo')", one), joined("CAST({} AS STRING)", number),
                joined("CASE WHEN {} THEN {} ELSE {} END", condition, one, two), joined("nullif({}, '')", one),
            )
        )  # fmt: skip

    def _time(self, rows: Rows, depth: int) -> Both:
        one, condition = self._expression(rows, TIME, depth), self._condition(rows, depth)
        seconds = self._draw.randint(1, 90)
        return self._draw.choice(
            (
                joined(f"({{}} + INTERVAL {seconds} SECOND)", one), joined(f"({{}} - INTERVAL {seconds} SECOND)", one),
                joined("date_trunc('minute', {})", one),
                joined("CASE WHEN {} THEN {} ELSE {} END", condition, one, self._moment()),
            )
        )  # fmt: skip

    def _condition(self, rows: Rows, depth: int = 1) -> Both:
        number, word, moment = (self._expression(rows, kind, min(depth, 1)) for kind in (NUMBER, TEXT, TIME))
        other, limit = self._expression(rows, NUMBER, 0), same(str(self._draw.randint(0, 30)))
        compared = self._draw.choice(("<", "<=", ">", ">=", "=", "<>"))
        simple = self._draw.choice(
            (
                joined(f"{{}} {compared} {{}}", number, limit), joined(f"{{}} {compared} {{}}", number, other),
                joined("{} IS NULL", number), joined("{} IS NOT NULL", number), joined("{} BETWEEN 2 AND {}", number, limit),
                joined("{} IN (1, 2, 3, 5, {})", number, limit), joined("{} NOT IN (1, 2, 4)", number),
                joined("{} LIKE '%o%'", word), joined("{} NOT LIKE 'a%'", word), joined("{} > 'b'", word),
                joined("{} IS DISTINCT FROM {}", number, other), joined("{} >= {}", moment, self._moment()),
            )
        )  # fmt: skip
        if depth == 0 or self._one_in(2):
            return joined("({})", simple)
        more = self._condition(rows, depth - 1)
        return self._draw.choice(
            (joined("({} AND {})", simple, more), joined("({} OR {})", simple, more), joined("(NOT {})", more))
        )

    # ---- groups

    def _aggregate(self, rows: Rows) -> Both:
        number, other = self._expression(rows, NUMBER, 1), self._expression(rows, NUMBER, 1)
        word, moment = self._expression(rows, TEXT, 1), self._expression(rows, TIME, 0)
        condition, distinct = self._condition(rows, 1), self._column(rows, TEXT) or f"{rows.name}.ts"
        counted = Both(
            f"count_if({condition.spark})", f"count(*) FILTER (WHERE {condition.duck})"
        )  # DuckDB's is null for none
        return self._draw.choice(
            (
                same("count(*)"), joined("count({})", number), joined("sum({})", number), joined("min({})", number),
                joined("max({})", number), joined("avg({})", number), joined("max({})", word), joined("min({})", word),
                joined("max({})", moment), same(f"count(DISTINCT {distinct})"), same(f"count(DISTINCT {distinct}) + 1"),
                joined("count(*) FILTER (WHERE {})", condition), joined("sum({}) FILTER (WHERE {})", number, condition),
                joined("(max({}) - min({}))", number, other), joined("(sum({}) * 2 + count(*))", number),
                joined("coalesce(sum({}), 0)", number), joined("CASE WHEN count(*) > 2 THEN min({}) ELSE 0 END", number),
                joined("bool_or({})", condition), joined("bool_and({})", condition), counted,
            )
        )  # fmt: skip

    def _keys(self, rows: Rows, least: int = 0) -> list[Both]:
        kinds = [self._draw.choice((NUMBER, NUMBER, TEXT)) for _ in range(self._draw.randint(least, 2))]
        found = []
        for kind in kinds:
            column = self._column(rows, kind)
            key = (
                joined("({} % 3)", self._expression(rows, NUMBER, 1))
                if column is None or self._one_in(3)
                else same(column)
            )
            found += [] if key in found else [key]
        return found

    def _groups(self, rows: Rows, fixed: Sequence[Both], keys: Sequence[Both], source: Both, group: Both) -> Both:
        """Return a SELECT of groups: ``fixed`` columns of the window, some of the keys, and aggregates."""
        items = [*fixed, *(key for key in keys if not self._one_in(4))]
        items += [self._aggregate(rows) for _ in range(self._draw.randint(1, 3))]
        named = [joined(f"{{}} AS {self._name('c')}", item) for item in items]
        having = same("")
        if self._one_in(3):
            limit = self._draw.randint(0, 20)
            having = joined(
                f" HAVING {{}} > {limit}",
                self._draw.choice((same("count(*)"), joined("max({})", self._expression(rows, NUMBER, 1)))),
            )
        by = joined(" GROUP BY {}", group) if group.spark else same("")
        return joined("SELECT {} FROM {}{}{}", listed(named), source, by, having)

    def _windows(self, rows: Rows, size: int, hop: int) -> tuple[Both, Both, list[Both]]:
        """Return a relation with its rows in windows, the key, and the columns of the window; all in seconds."""
        where = self._where(rows)
        lengths = f"'{size} seconds'" if size == hop else f"'{size} seconds', '{hop} seconds'"
        call = f"window({self._draw.choice(('ts', f'{rows.name}.ts'))}, {lengths})"
        begin = f"(epoch_us({rows.name}.ts) // {hop * SECOND}) * {hop * SECOND} - many * {hop * SECOND}"
        duck = (
            f"(SELECT * FROM (SELECT {rows.name}.*, {begin} AS ws FROM {rows.text.duck}, range({-(-size // hop)}) AS k(many)"
            f"{where.duck}) WHERE ws + {size * SECOND} > epoch_us(ts)) {rows.name}"
        )
        fixed = [Both(self._draw.choice(("window.start", f"{call}.start")), "make_timestamp(ws)"),
                 Both("window.end", f"make_timestamp(ws + {size * SECOND})")]  # fmt: skip
        return Both(f"{rows.text.spark}{where.spark}", duck), Both(call, "ws"), fixed

    def _lengths(self) -> tuple[int, int]:
        hop = self._draw.choice((10, 30, 60, 100))
        return self._draw.choice((hop, hop, hop * 2, hop * 5 // 2)), hop

    def _windowed(self) -> Both:
        rows = self._from()
        source, window, fixed = self._windows(rows, *self._lengths())
        keys = self._keys(rows)
        group = [window, *keys]
        self._draw.shuffle(group)
        return self._groups(rows, fixed, keys, source, listed(group))

    def _sessions(self) -> Both:
        rows, gap = self._from(), self._draw.choice((5, 12, 30)) * SECOND
        where, keys = self._where(rows), self._keys(rows)
        by = listed(keys).duck or "1"
        steps = (
            f"SELECT {rows.name}.*, CASE WHEN epoch_us(ts) - lag(epoch_us(ts)) OVER (PARTITION BY {by} ORDER BY ts) <= {gap} "
            f"THEN 0 ELSE 1 END AS begins FROM {rows.text.duck}{where.duck}"
        )
        numbered = (
            f"(SELECT {rows.name}.*, sum(begins) OVER (PARTITION BY {by} ORDER BY ts RANGE UNBOUNDED PRECEDING) AS session "
            f"FROM ({steps}) {rows.name}) {rows.name}"
        )
        fixed = [
            Both("session_window.start", "min(ts)"),
            Both("session_window.end", f"max(ts) + INTERVAL {gap} MICROSECOND"),
        ]
        window = Both(f"session_window(ts, '{gap // SECOND} seconds')", "session")
        source = Both(f"{rows.text.spark}{where.spark}", numbered)
        return self._groups(rows, fixed, keys, source, listed([window, *keys]))

    def _grouped(self) -> Both:
        rows = self._from()
        keys = self._keys(rows)
        return self._groups(rows, [], keys, joined("{}{}", rows.text, self._where(rows)), listed(keys))

    def _longer_windows(self) -> Both:
        """Return windows of the results of windows."""
        rows = self._from(1)
        size = self._draw.choice((10, 30))
        source, window, _ = self._windows(rows, size, size)
        name, long = self._name("r"), size * self._draw.choice((2, 4))
        inner = joined("SELECT {}, {} AS n FROM {} GROUP BY {}",
                       Both("window", "ws"), self._aggregate_of_numbers(rows), source, window)  # fmt: skip
        outer = Both(f"window({name}.window, '{long} seconds')", f"(ws // {long * SECOND}) * {long * SECOND}")
        start = joined("{} AS s", Both(f"{outer.spark}.start", f"make_timestamp({outer.duck})"))
        return joined(
            f"SELECT {{}}, sum({name}.n) AS n, count(*) AS m FROM ({{}}) {name} GROUP BY {{}}", start, inner, outer
        )

    def _aggregate_of_numbers(self, rows: Rows) -> Both:
        return joined(self._draw.choice(("sum({})", "count({})", "max({})")), self._expression(rows, NUMBER, 1))

    # ---- joins

    def _interval(self, left: Rows, right: Rows) -> Both:
        """Return a condition with a key, and bounds between the times of both sides."""
        before, after = self._draw.randint(0, 40), self._draw.randint(0, 40)
        one, two = (self._column(side, NUMBER) or f"extract(MINUTE FROM {side.name}.ts)" for side in (left, right))
        mine, other = f"{left.name}.ts", f"{right.name}.ts"
        times = self._draw.choice(
            (
                f"{other} BETWEEN {mine} - INTERVAL {before} SECOND AND {mine} + INTERVAL {after} SECOND",
                f"{mine} >= {other} - INTERVAL {after} SECOND AND {other} > {mine} - INTERVAL 1 MINUTE",
                f"{mine} = {other}",
            )
        )
        parts = [same(f"{one} = {two}"), same(times)]
        if self._one_in(3):
            parts.append(joined("{} <= {}", self._expression(left, NUMBER, 1), self._expression(right, NUMBER, 1)))
        if self._one_in(3):
            parts.append(self._condition(self._draw.choice((left, right)), 1))
        self._draw.shuffle(parts)
        return listed(parts, " AND ")

    def _pairs(self, depth: int, join: str) -> tuple[Both, dict[str, str]]:
        """Return a join with the event time of its left side."""
        left, right = self._from(depth), self._from(depth)
        both = {"ts": TIME, "a": NUMBER, "b": NUMBER, "word": TEXT}
        items = [
            same(f"{left.name}.ts"), joined("{} AS a", self._expression(left, NUMBER, 1)),
            joined("{} AS b", self._expression(right, NUMBER, 1)), joined("{} AS word", self._expression(left, TEXT, 1)),
        ]  # fmt: skip
        condition = self._interval(left, right)
        if join == "JOIN" and self._one_in(3):
            return joined("SELECT {} FROM {}, {} WHERE {}", listed(items), left.text, right.text, condition), both
        return joined(
            f"SELECT {{}} FROM {{}} {join} {{}} ON {{}}", listed(items), left.text, right.text, condition
        ), both

    def _interval_join(self) -> Both:
        join = self._draw.choice(("JOIN", "LEFT JOIN", "RIGHT JOIN", "FULL JOIN", "SEMI", "ANTI"))
        if join not in ("SEMI", "ANTI"):
            return self._pairs(1, join)[0]
        left, right = self._from(1), self._from(1)
        items = listed([joined("{} AS a", self._expression(left, NUMBER, 1)), same(f"{left.name}.ts")])
        kind = Both(f"LEFT {join} JOIN", f"{join} JOIN")
        return joined("SELECT {} FROM {} {} {} ON {}", items, left.text, kind, right.text, self._interval(left, right))

    def _window_join(self) -> Both:
        size, sides = self._draw.choice((20, 60)), []
        for _ in range(2):
            rows = self._from(1)
            source, window, _ = self._windows(rows, size, size)
            key = joined("({} % 3)", self._expression(rows, NUMBER, 1))
            sides.append(joined("SELECT {}, {} AS k, {} AS n FROM {} GROUP BY {}, {}", Both("window", "ws"), key,
                                self._aggregate_of_numbers(rows), source, window, key))  # fmt: skip
        join = self._draw.choice(("JOIN", "LEFT JOIN", "RIGHT JOIN", "FULL JOIN"))
        start = Both("l.window.start", "make_timestamp(l.ws)")
        on = Both("l.window = r.window AND l.k = r.k", "l.ws = r.ws AND l.k = r.k")
        if join == "JOIN" and self._one_in(3):
            using = Both("USING (window, k)", "USING (ws, k)")
            return joined("SELECT {} AS s, k, l.n, r.n AS m FROM ({}) l JOIN ({}) r {}",
                          Both("window.start", "make_timestamp(ws)"), *sides, using)  # fmt: skip
        return joined(f"SELECT {{}} AS s, l.k, l.n, r.n AS m FROM ({{}}) l {join} ({{}}) r ON {{}}", start, *sides, on)

    # ---- rows

    def _rows(self) -> Both:
        rows = self._from()
        if self._one_in(6):
            return joined("SELECT * FROM {}{}", rows.text, self._where(rows))
        text, _ = self._selected(rows, ["ts"] if self._one_in(2) else [])
        return text

    def _union(self) -> Both:
        return self._united(2)[0]

    def _distinct(self) -> Both:
        rows = self._from()
        items = [same(f"{rows.name}.ts"), joined("{} AS n", self._expression(rows, NUMBER, 1))]
        return joined("SELECT DISTINCT {} FROM {}{}", listed(items), rows.text, self._where(rows))
