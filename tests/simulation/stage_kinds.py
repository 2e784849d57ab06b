"""Operators of the simulation that can tell whether rows come in order, with models of their output.

Every row carries the partition of its last producer (``hop``) and its number there (``tick``), both stamped by these
operators, so that order can be checked at each consumer without believing the exchange's sequence numbers.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

import flux
from tests.simulation.checkers import Ledger
from tests.simulation.violation import Violation

ROW = pa.schema(
    [("id", pa.int64()), ("key", pa.int64()), ("word", pa.string()), ("hop", pa.int32()), ("tick", pa.int64())]
)
#: Seconds for which ``Delay`` holds rows back, by their id, and between its beats.
PAUSES_S = (0.0, 0.001, 0.005, 0.02, 0.1, 0.4)
BEAT_S = 0.04
#: Number added to the producer's partition in rows that a replica has given otherwise (``divergence``); readers subtract it.
ELSEWHERE = 1000
#: A row as the model knows it: id, key, word.
Row = tuple[int, int, str]


def make_batch(rows: list[Row], hop: int, tick: int) -> pa.RecordBatch:
    ids, keys, words = zip(*rows, strict=True) if rows else ((), (), ())
    ticks = range(tick, tick + len(rows))
    return pa.record_batch([list(ids), list(keys), list(words), [hop] * len(rows), list(ticks)], schema=ROW)


class Watched(flux.Operator):
    """An operator that checks that rows come in order. A subclass sets ``ledger`` and ``stage_name``."""

    ledger: Ledger
    stage_name: str
    schema: Any = ROW
    restores_in_background = True
    #: Methods that faults replace at one replica.
    transient = ("stamped", "through")

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.state: dict[str, Any] = {"tick": 0, "seen": {}}

    def stamped(self, rows: list[Row], elsewhere: int = 0) -> pa.RecordBatch:
        tick = self.state["tick"]
        self.state["tick"] += len(rows)
        return make_batch(rows, self.context.partition + elsewhere, tick)

    def process(self, batch: pa.RecordBatch) -> Any:
        ids, keys, words, hops, ticks = (column.to_pylist() for column in batch.columns)
        seen, entrance = self.state["seen"], self.context.input
        for told, tick in zip(hops, ticks, strict=True):
            hop = told % ELSEWHERE
            if tick <= seen.get((entrance, hop), -1) and not self.ledger.lossy:
                at = (self.stage_name, self.context.partition, entrance, hop)
                raise Violation("order within a stream", f"{at} got row {tick} after row {seen[entrance, hop]}")
            seen[entrance, hop] = tick
        self.ledger.one_home(self.stage_name, self.context, batch)
        return self.through(list(zip(ids, keys, words, strict=True)))

    def through(self, rows: list[Row]) -> Any:
        return [self.stamped(rows)]

    def state_bytes(self) -> int:
        return 1  # a known size, but not one to rely on


class Filter(Watched):
    """A filter that lets some rows through, and so sends batches without any row."""

    def through(self, rows: list[Row]) -> Any:
        return [self.stamped([row for row in rows if row[0] % 3])]


class Shatter(Watched):
    """An operator that gives one batch per row: many small batches of one step."""

    def through(self, rows: list[Row]) -> Any:
        for row in rows:
            yield self.stamped([row])


class Double(Watched):
    """An operator that gives two rows for one."""

    def through(self, rows: list[Row]) -> Any:
        return [self.stamped([(2 * i + twin, key, word) for i, key, word in rows for twin in (0, 1)])]


class Hold(Watched):
    """An operator that gives no row until its input has ended, then all at once."""

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.state["held"] = []

    def through(self, rows: list[Row]) -> Any:
        self.state["held"] += rows

    def finish(self) -> Any:
        for start in range(0, len(self.state["held"]), 3):
            yield self.stamped(self.state["held"][start : start + 3])


class Delay(Watched):
    """An operator that passes each row on a while after it came: a deadline for each, and one timer for the earliest. Another
    timer beats without end, and one is cancelled as often as it is set."""

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.state["held"] = []  # (deadline, row), the earliest first
        context.set_timer(context.now, "beat")

    def through(self, rows: list[Row]) -> Any:
        self._none_is_late("a row")
        held = self.state["held"] + [(self.context.now + PAUSES_S[row[0] % len(PAUSES_S)], row) for row in rows]
        self.state["held"] = sorted(held)
        self._set()
        self.context.set_timer(self.context.now, "cancelled")
        self.context.cancel_timer("cancelled")

    def on_timer(self, name: str) -> Any:
        self.ledger.counts[f"timers: {name}"] += 1
        if name == "beat":
            self.context.set_timer(self.context.now + BEAT_S, name)
            return
        held, now = self.state["held"], self.context.now
        due = [row for at, row in held if at <= now]
        if name != "pass on" or not due:
            raise Violation("a timer fires at its time", f"{self.stage_name}: {name!r} at {now}, held {held[:1]}")
        self.state["held"] = held[len(due) :]
        self._set()
        yield self.stamped(due)

    def finish(self) -> Any:
        self._none_is_late("the end")
        return [self.stamped([row for _, row in self.state["held"]])]

    def _set(self) -> None:
        if self.state["held"]:
            self.context.set_timer(self.state["held"][0][0], "pass on")

    def _none_is_late(self, what: str) -> None:
        """Check that no held row is overdue. A deadline that had passed when the timer was set lets one step go first: the
        step of that very moment."""
        late = [at for at, _ in self.state["held"] if at < self.context.now]
        if late:
            raise Violation(
                "a timer fires at its time", f"{self.stage_name}: {what} at {self.context.now} before {late[0]}"
            )


class Sink(Watched):
    """A sink that keeps the rows that arrive."""

    schema = None

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.state["rows"] = []

    def through(self, rows: list[Row]) -> Any:
        self.state["rows"] += rows


class Giving(Sink):
    """A sink that keeps the rows that arrive, and also gives them to a sink outside."""

    schema = ROW

    def through(self, rows: list[Row]) -> Any:
        super().through(rows)
        return [self.stamped(rows)]


class Totals(flux.Aggregate):
    _told_share = 1.0  # it has few keys
    n = flux.count()
    total = flux.sum("id")


class TotalsSink(flux.Operator):
    """A sink that keeps the newest result of each key, and checks that counts only grow."""

    ledger: Ledger
    stage_name: str

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.state: dict[str, Any] = {"totals": {}}

    def process(self, batch: pa.RecordBatch) -> None:
        self.ledger.one_home(self.stage_name, self.context, batch)
        totals = self.state["totals"]
        for row in batch.to_pylist():
            before = totals.get(row["key"], (0, 0))[0]
            if row["n"] <= before and not self.ledger.lossy:
                raise Violation(
                    "order within a stream",
                    f"{self.stage_name}: count of {row['key']} fell from {before} to {row['n']}",
                )
            totals[row["key"]] = (row["n"], row["total"])


MODELS = {
    Watched: lambda rows: rows,
    Filter: lambda rows: [row for row in rows if row[0] % 3],
    Shatter: lambda rows: rows,
    Double: lambda rows: [(2 * i + twin, key, word) for i, key, word in rows for twin in (0, 1)],
    Hold: lambda rows: rows,
    Delay: lambda rows: rows,
}
#: Kinds of stages of random flows, beside timers.
KINDS = [Watched, Filter, Shatter, Double, Hold]
