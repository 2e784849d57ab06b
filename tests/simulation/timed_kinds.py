"""Stages of the flows with event time: operators that check watermarks, timers of event time and results.

``Timed`` passes rows on, ``Keeper`` holds each row until the watermark has reached its time, ``Turns`` gives rows by the order in
which they come, ``Counts`` and ``Sums`` count windows and windows of windows. Sinks keep their input: ``TimedSink`` rows,
``ResultSink`` results of windows that come once, ``NewestSink`` results that are renewed, ``PlaceSink`` ranks that are renewed.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import Any

import pyarrow as pa

import flux
from flux.windows.window import END_OF_TIME, NEVER
from tests.simulation.replaying import STEP_ROWS, Replaying
from tests.simulation.stage_kinds import ELSEWHERE, Watched
from tests.simulation.timed_rows import RENAMED, SECOND, TIMED, TimedRow, make_timed_batch, tuples
from tests.simulation.violation import Violation

#: Law (d): the sentence that a row behind the watermark breaks.
LEFT_OUT = "(d) no row is behind the watermark without idleness"
#: Law (e).
ONCE = "(e) each window of a key is given once"
#: Law (b).
FALLS = "(b) a watermark never falls"
#: Law (m).
IMPROVES = "(m) a rank without a window goes to better rows only"
TIMER = "a timer of event time fires when the watermark reaches it"
#: Event time between two beats of a ``Keeper``.
BEAT = 7 * SECOND


class Timed(Watched):
    """An operator that passes rows with times on."""

    schema: Any = TIMED

    def stamped(self, rows: list[TimedRow], elsewhere: int = 0) -> pa.RecordBatch:  # type: ignore[override]
        tick = self.state["tick"]
        self.state["tick"] += len(rows)
        return make_timed_batch(rows, self.context.partition + elsewhere, tick)

    def process(self, batch: pa.RecordBatch) -> Any:
        hops, ticks = (batch.column(name).to_pylist() for name in ("hop", "tick"))
        seen, entrance = self.state["seen"], self.context.input
        for told, tick in zip(hops, ticks, strict=True):
            hop = told % ELSEWHERE
            if tick <= seen.get((entrance, hop), -1):
                at = (self.stage_name, self.context.partition, entrance, hop)
                raise Violation("order within a stream", f"{at} got row {tick} after row {seen[entrance, hop]}")
            seen[entrance, hop] = tick
        self.ledger.one_home(self.stage_name, self.context, batch)
        return self.through(tuples(batch))  # type: ignore[arg-type]


class TimedReplaying(Replaying, Timed):
    """A ``Timed`` with nothing to remember, so that a stage may have upstream replicas."""

    def stamped(self, rows: list[TimedRow], elsewhere: int = 0) -> pa.RecordBatch:  # type: ignore[override]
        step, given = self.context.step, self._stamped[1] if self._stamped[0] == self.context.step else 0
        self._stamped = (step, given + len(rows))
        return make_timed_batch(rows, self.context.partition + elsewhere, step * STEP_ROWS + given)


class Renamed(Timed):
    """An operator that passes rows on under other names."""

    schema = RENAMED

    def stamped(self, rows: list[TimedRow], elsewhere: int = 0) -> pa.RecordBatch:  # type: ignore[override]
        return super().stamped(rows, elsewhere).rename_columns(RENAMED.names)


class Turns(Timed):
    """An operator that passes a row on if its key differs from that of the row before. So its output depends on the order in
    which rows of several streams come, and steps may give nothing that would have given rows in another order."""

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.state["key"] = None

    def through(self, rows: list[TimedRow]) -> Any:  # type: ignore[override]
        kept = []
        for row in rows:
            if row[1] != self.state["key"]:
                kept.append(row)
            self.state["key"] = row[1]
        return [self.stamped(kept)] if kept else None


class Keeper(Timed):
    """An operator that holds each row until the watermark has reached its time, with one timer for the earliest. Rows without a
    time, rows of inputs whose watermarks do not count and, after idleness, rows behind the watermark go on at once. A second
    timer beats as event time goes on, and a third is cancelled as often as it is set."""

    #: The inputs whose watermarks count.
    timed_inputs: tuple[int, ...] = (0,)

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.state |= {"held": [], "watermark": NEVER, "beats": 0, "behind": 0}

    def through(self, rows: list[TimedRow]) -> Any:  # type: ignore[override]
        at_once, watermark = [], self.context.watermark
        if watermark != self.state["watermark"]:
            raise Violation(TIMER, f"{self._where}: rows come at {watermark}, told of {self.state['watermark']}")
        counts = self.context.input in self.timed_inputs
        for row in rows:
            time = row[3]
            if time is None or not counts:
                at_once.append(row)
            elif time < watermark:
                self.ledger.event_time.behind(self.stage_name, f"{self._where}: {row} behind {watermark}")
                self.state["behind"] += 1
                at_once.append(row)
            else:
                insort(self.state["held"], (time, row))
        self._set()
        self.context.set_event_timer(0, "cancelled")
        self.context.cancel_event_timer("cancelled")
        if "beat" not in self.context.event_timers.pending and rows:
            self.context.set_event_timer(self._next_beat(), "beat")
        return [self.stamped(at_once)] if at_once else None

    def on_event_timer(self, name: str) -> Any:
        watermark, held = self.context.watermark, self.state["held"]
        self.ledger.counts[f"timers of event time: {name}"] += 1
        if name == "beat":
            self.state["beats"] += 1
            self.context.set_event_timer(self._next_beat(), "beat")
            return
        count = bisect_right(held, watermark, key=lambda each: each[0])
        if name != "due" or not count:
            raise Violation(TIMER, f"{self._where}: {name!r} at {watermark}, held {held[:1]}")
        due = [row for _, row in held[:count]]
        self.state["held"] = held[count:]
        self._set()
        for row in due:  # many batches of one step
            yield self.stamped([row])

    def on_watermark(self) -> Any:
        watermark, held = self.context.watermark, self.state["held"]
        if watermark <= self.state["watermark"]:
            raise Violation(FALLS, f"{self._where}: {watermark} after {self.state['watermark']}")
        if held and held[0][0] <= watermark:
            raise Violation(TIMER, f"{self._where}: {held[0]} is still held at {watermark}")
        self.state["watermark"] = watermark

    def finish(self) -> Any:
        if self.state["held"] or self.context.watermark != END_OF_TIME:
            raise Violation(TIMER, f"{self._where}: {len(self.state['held'])} rows are held at the end")

    @property
    def _where(self) -> str:
        return f"{self.stage_name}/{self.context.partition}"

    def _next_beat(self) -> int:
        watermark = self.context.watermark
        return 0 if watermark == NEVER else min(watermark, END_OF_TIME - BEAT) + BEAT

    def _set(self) -> None:
        if self.state["held"]:
            self.context.set_event_timer(self.state["held"][0][0], "due")


class Counts(flux.Aggregate):
    """A count of rows and sum of their ids, by window."""

    _told_share = 1.0
    n = flux.count()
    total = flux.sum("id")


class Sums(flux.Aggregate):
    """A sum of the results of windows, by window."""

    _told_share = 1.0
    n = flux.sum("n")
    total = flux.sum("total")


class TimedSink(Watched):
    """A sink that keeps the rows that arrive."""

    schema: Any = None

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.state = {"rows": []}

    def process(self, batch: pa.RecordBatch) -> Any:
        self.ledger.one_home(self.stage_name, self.context, batch)
        rows = tuples(batch)
        self.keep(rows)
        return self.given(batch)

    def keep(self, rows: list[Any]) -> None:
        self.state["rows"] += rows

    def given(self, batch: pa.RecordBatch) -> Any:
        return None


class ResultSink(TimedSink):
    """A sink that keeps results of windows, each of which comes once."""

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.state["windows"] = {}

    def keep(self, rows: list[Any]) -> None:
        for row in rows:
            window = row[:-2]
            if window in self.state["windows"]:
                where = f"{self.stage_name}/{self.context.partition}"
                raise Violation(ONCE, f"{where}: {row} after {self.state['windows'][window]}")
            self.state["windows"][window] = row[-2:]
        super().keep(rows)


class NewestSink(TimedSink):
    """A sink that keeps the newest result of each window of a key, and checks that counts only grow."""

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.state = {"newest": {}}

    def keep(self, rows: list[Any]) -> None:
        for row in rows:
            window, count = row[:-2], row[-2]
            before = self.state["newest"].get(window, (0, 0))
            if count <= before[0]:
                raise Violation(
                    "order within a stream", f"{self.stage_name}: {window} fell from {before[0]} to {count}"
                )
            self.state["newest"][window] = row[-2:]


class PlaceSink(TimedSink):
    """A sink that keeps the newest row of each place, and checks that each is better than the one before."""

    #: Functions of a row: its place, and a value that is less for better rows.
    place: Any = None
    order: Any = None

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.state = {"newest": {}}

    def keep(self, rows: list[Any]) -> None:
        for row in rows:
            place = self.place(row)
            before = self.state["newest"].get(place)
            if before is not None and self.order(row) >= self.order(before):
                raise Violation(IMPROVES, f"{self.stage_name}/{self.context.partition}: {row} after {before}")
            self.state["newest"][place] = row


class GivesOn:
    """A base beside a sink of the simulation, which also hands the rows on to a sink outside."""

    def output_schema(self, schemas: Any, key: Any) -> Any:
        return schemas[0]

    def given(self, batch: pa.RecordBatch) -> Any:
        return [batch]


class TimedGiving(GivesOn, TimedSink):
    """A sink that keeps the rows and also gives them on."""


class ResultGiving(GivesOn, ResultSink):
    """A sink that keeps the results and also gives them on."""
