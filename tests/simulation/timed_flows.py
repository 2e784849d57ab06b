"""Random flows with event time: sources with disorder, late rows, leaps and idle spells; windows, windows of windows, operators
with timers of event time, stages without event time beside them; and the answer of a batch over the rows that are not late.

Seeds of these flows have their own range (``mixes.EVENT_TIME``), so that no draw of another flow changes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

import flux
from controller.planning.compiler import compile_plan
from flux.arguments import MARKS
from flux.dataflow.flow import Flow, Stage
from flux.dataflow.plan import ById, Plan
from flux.dataflow.row_operators import RowOperator
from flux.dataflow.sink import QueryReaders
from flux.dataflow.source import DataFrameSource, RowStart, Source
from flux.windows.window import SessionWindow, Window
from tests.simulation import timed_kinds as kinds
from tests.simulation import timed_relations as relations
from tests.simulation.checkers import Ledger
from tests.simulation.flows import READ_SHARE, SECRET, TINY_LOG, Dataflow, Node, SourceData, _settings
from tests.simulation.outside import SHARE, Goes
from tests.simulation.telling import perhaps_telling
from tests.simulation.timed_rows import (
    RIGHT_TIME,
    SECOND,
    TIME,
    TIMED,
    WINDOW_TIME,
    Disorder,
    Newest,
    TimedRow,
    judged,
    make_timed_batch,
    windows_of,
)

#: The share of flows with sources that may fall idle.
IDLE_SHARE = 0.25
#: The share of worker sources with positions of their own, and the share of these whose rows bring their numbers.
POSITIONS_SHARE, NUMBERS_SHARE = 0.5, 0.5
#: The share of sources with several partitions of which one ends before the others.
EARLY_SHARE = 0.4
#: Virtual seconds between two batches of a partition, and of a spell in which a partition has nothing.
PERIODS_S, SPELLS_S = (0.0, 0.002, 0.01), (0.02, 0.1, 0.4)
#: Virtual time for which an idle source has given nothing, in microseconds.
IDLE_US = (20_000, 100_000)
#: The share of batches that come after a spell.
SPELLS = 0.1
#: The share of flows that come to their end only when every partition knows the least watermark.
LINGERS_SHARE = 0.6
#: Virtual seconds between two checkpoints in flows whose rows wait for them, and the least in other flows.
OFTEN_S, SELDOM_S = 0.02, 0.1
#: Virtual seconds between two statements, or watermarks, that cross no end of a window.
INTERVALS_S = (0.002, 0.01, 0.05)
#: Seconds of event time by which a partition may be ahead of others.
DRIFTS_S = (0, 1, 5, 30)
#: The share of sources with an empty partition that ends last.
LASTING_SHARE = 0.3
#: The share of sources that do not believe each time; seconds by which a row may be ahead; rows in succession that are believed.
DOUBT_SHARE = 0.5
MAX_AHEAD_S, BELIEVED_AFTER = (5, 20, 60), (2, 3, 6)
#: The share of sources with event time, in flows with relations of all kinds, whose rows look up a table.
LOOKUP_SHARE = 0.4
#: The share of aggregates with replicas without a common order, in flows that may have them.
MARKS_SHARE = 0.9


@dataclass
class TimedData(SourceData):
    """A source whose rows have times."""

    #: Microseconds; None: the rows have no event time, or are those of a DataFrame.
    delay: int | None = None
    idle: int | None = None
    #: Microseconds, and rows in succession; None: each time is believed.
    max_ahead: int | None = None
    believed_after: int = 1
    #: By partition: the virtual seconds from its first reading until each of its batches is there.
    due: list[list[float]] = field(default_factory=list)
    #: Partitions that come to their end while others stand still.
    early: set[int] = field(default_factory=set)
    #: Partitions without rows that come to their end after all others.
    lasting: set[int] = field(default_factory=set)
    #: Columns that Spark reads; None: all.
    columns: tuple[int, ...] | None = None
    #: The clock of the run, and the time at which each partition was read first.
    clock: Callable[[], float] = lambda: 0.0
    begun: dict[int, float] = field(default_factory=dict)

    def rows_of(self, partition: int) -> list[TimedRow]:
        return [row for batch in self.batches[partition] for row in batch]  # type: ignore[misc]

    def judged(self, partition: int) -> tuple[list[TimedRow], list[TimedRow]]:
        rows = self.rows_of(partition)
        return (rows, []) if self.delay is None else judged(rows, self.delay, self._nothing())

    def _nothing(self) -> Newest:
        return Newest(self.max_ahead, self.believed_after)

    def on_time(self) -> list[TimedRow]:
        return [row for partition in range(len(self.batches)) for row in self.judged(partition)[0]]

    def all(self) -> list[TimedRow]:
        return [row for partition in range(len(self.batches)) for row in self.rows_of(partition)]

    def late(self) -> list[TimedRow]:
        return [row for partition in range(len(self.batches)) for row in self.judged(partition)[1]]

    def newest(self, partition: int) -> int | None:
        """Return the greatest time of all rows of a partition that is believed."""
        newest = self._nothing()
        judged(self.rows_of(partition), 0, newest)
        return newest.time

    # ---- readers

    def read(self, partition: int, version: int = 0) -> Iterator[pa.RecordBatch]:
        tick = 0
        for rows in self.batches[partition]:
            batch = make_timed_batch(rows, partition, tick)  # type: ignore[arg-type]
            tick += len(rows)
            yield batch if self.columns is None else batch.select(list(self.columns))

    def waits(self, partition: int, number: int) -> bool:
        """Tell whether a batch is not there yet."""
        began = self.begun.setdefault(partition, self.clock())
        return self.clock() < began + self.due[partition][number]

    def counted(self, partition: int) -> Iterator[pa.RecordBatch | None]:
        for number, batch in enumerate(self.read(partition)):
            while self.waits(partition, number):
                yield None
            yield batch

    def seeking(self, partition: int, start: int) -> Iterator[pa.RecordBatch | None]:
        numbered = [(number, batch) for number, batch in enumerate(self.read(partition)) if batch.num_rows]
        for number, batch in numbered[start:]:
            while self.waits(partition, number):
                yield None
            yield batch


class PositionedReader:
    """The ``read(partition, start)`` of a source with positions. It cuts its rows elsewhere each time. Rows may bring numbers."""

    def __init__(self, data: TimedData, numbers: list[np.ndarray] | None, rng: random.Random) -> None:
        self._data, self._numbers, self._rng = data, numbers, rng
        self.row_numbers = numbers is not None

    def __call__(self, partition: int, start: Any) -> Iterator[Any]:
        data, rng = self._data, self._rng
        rows, numbers = data.rows_of(partition), None if self._numbers is None else self._numbers[partition]
        batch_of = [number for number, batch in enumerate(data.batches[partition]) for _ in batch]
        at = self._place(numbers, start)
        most, often = rng.choice([1, 5, 20]), rng.choice([0.3, 1.0, 1.0])
        while at < len(rows):
            while data.waits(partition, batch_of[at]):
                yield None
            end = at + 1
            while end < min(at + most, len(rows)) and not data.waits(partition, batch_of[end]):
                end += 1
            end = rng.randint(at + 1, end)
            batch = make_timed_batch(rows[at:end], partition, at)
            if numbers is None:
                yield flux.Positioned(batch, [end]) if rng.random() < often else batch
            else:
                position = [end] if rng.random() < often else None
                yield flux.Positioned(batch, position, numbers[at:end])
            at = end

    @staticmethod
    def _place(numbers: np.ndarray | None, start: Any) -> int:
        """Return the place of the first row."""
        if numbers is None:
            return start[0] if start else 0
        if isinstance(start, RowStart):
            return int(np.searchsorted(numbers, start.number))
        return start[0] if start else 0


@dataclass
class TimedNode(Node):
    """A source or a stage."""

    #: The column of the event time; None: the rows have none.
    time: str | None = None
    #: Makes the expected rows.
    rows: Callable[[], list[Any]] = list
    #: The rows are the late ones of a source.
    late: bool = False
    #: This stage, or one before it, leaves rows out that are behind the watermark.
    windowed: bool = False
    #: A source without its watermark.
    raw: Source | None = None
    #: Number of windows of each row, if it is the same for all rows; else 0.
    fold: int = 0
    #: Microseconds in which a deduplication gives one row of a key; 0 for other stages.
    ttl: int = 0
    #: Ranks of a stage whose rows come again with the place of another; None: each row is given once.
    places: relations.Places | None = None
    #: The order of arrival decides which rows the stage gives.
    some: bool = False
    #: A function of the rows of a source, on-time or late, to the rows after a lookup in a table.
    looks: Callable[[list[TimedRow]], list[TimedRow]] = list
    #: The table in which the rows were looked up.
    table: TimedData | None = None

    def model(self, version: dict[tuple[str, int], int]) -> list[Any]:
        return self.rows()


@dataclass
class EventTimeFlow:
    """The event time of a flow's sources and stages, for the laws."""

    nodes: list[TimedNode]
    sinks: list[TimedNode]
    sources: list[TimedData]
    #: Some source may fall idle.
    idles: bool
    #: The sources come to their end only when every partition knows the least watermark.
    lingers: bool


class _Builder:
    def __init__(
        self,
        rng: random.Random,
        ledger: Ledger,
        copies_max: int,
        copies: int,
        clock: Callable[[], float],
        ahead: random.Random | None,
        wide: random.Random | None,
    ) -> None:
        self.ahead, self.wide = ahead, wide
        self.rng, self.ledger, self.clock = rng, ledger, clock
        chosen = [1] if copies_max == 1 else rng.choice([[2], [2], [3], [2, 3], [1, 2, 3]])
        self.copies = [copies] if copies else [min(each, copies_max) for each in chosen]
        self.idles = rng.random() < IDLE_SHARE
        self.nodes: list[TimedNode] = []
        self.sinks: list[TimedNode] = []
        self.outside = rng.random() < SHARE
        self._ids, self._begin = 0, rng.choice([0, 0, -30, 1_000_000])
        self._spread = rng.choice([1, 3, 20])
        self._readers = random.Random(rng.random())

    # ---- data

    def _data(self, name: str, partitions: int) -> TimedData:
        rng = self.rng
        doubts = self.ahead is not None and self.ahead.random() < DOUBT_SHARE
        disorder, rows_max, batches_max = Disorder.draw(rng), rng.choice([1, 4, 10]), rng.choice([5, 15, 30])
        period = rng.choice(PERIODS_S)
        data = TimedData(name, [], clock=self.clock)
        if self.ahead is not None and doubts:
            disorder = disorder.with_leaps()
            data.max_ahead = self.ahead.choice(MAX_AHEAD_S) * SECOND
            data.believed_after = self.ahead.choice(BELIEVED_AFTER)
        for _ in range(partitions):
            count = 0 if rng.random() < 0.07 else rng.randint(1, batches_max)
            sizes = [rng.choice([0, 1, rows_max, rng.randint(0, rows_max)]) for _ in range(count)]
            times = iter(disorder.times(rng, sum(sizes), self._begin + rng.randint(0, 10)))
            data.batches.append([[self._row(next(times)) for _ in range(size)] for size in sizes])  # type: ignore[misc]
            now, due = 0.0, []
            for _ in sizes:
                now += period + (rng.choice(SPELLS_S) if rng.random() < SPELLS else 0.0)
                due.append(now)
            data.due.append(due)
        if partitions > 1 and rng.random() < EARLY_SHARE:
            data.early.add(rng.randrange(partitions))
        if self.ahead is not None and partitions > 1 and self.ahead.random() < LASTING_SHARE:
            empty = self.ahead.randrange(partitions)
            data.batches[empty], data.due[empty] = [], []
            data.lasting.add(empty)
        return data

    def _row(self, time: int | None) -> TimedRow:
        self._ids += 1
        return self._ids, self.rng.randrange(self._spread), "w" * self.rng.choice([1, 5, 40]), time

    def source(self, timed: bool = True) -> TimedNode:
        rng = self.rng
        name = f"source{len(self.nodes)}"
        frame = rng.random() < 0.15
        data = self._data(name, rng.randint(1, 3))
        given: Source
        if frame:
            given = DataFrameSource(name, TIMED)
        else:
            given = self._worker_source(data, len(data.batches), name)
        node = TimedNode(given, name, data=data, time=TIME if timed else None, rows=data.on_time, raw=given)
        if timed:
            delay = rng.choice([0, 2, 5, 10])
            idle = rng.choice(IDLE_US) if self.idles and rng.random() < 0.7 and not frame else None
            most = None if data.max_ahead is None else f"{data.max_ahead} microseconds"
            node.given = given.withWatermark(
                TIME, f"{delay} seconds", idle=None if idle is None else f"{idle} microseconds", maxAhead=most
            )
            data.delay, data.idle = None if frame else delay * SECOND, idle
            if self.wide is not None and self.wide.random() < LOOKUP_SHARE:
                steps, node.looks = relations.lookup(self.wide)
                node.given = node.given._with_operator(RowOperator("looks_up", tuple(steps)))
                node.rows = lambda: node.looks(data.on_time())
        self.nodes.append(node)
        return node

    def table(self, rng: random.Random) -> TimedNode:
        """Add a table whose versions are the times of its rows, each with at most one row of a key."""
        name, partitions, versions = f"source{len(self.nodes)}", rng.choice([1, 1, 2]), rng.randint(2, 9)
        data = TimedData(name, [], clock=self.clock, delay=0)
        for partition in range(partitions):
            batches, due, now = list[list[TimedRow]](), list[float](), 0.0
            for number in range(1, versions + 1):
                keys = [key for key in range(partition, self._spread, partitions) if rng.random() < 0.8]
                rows = [self._row(relations.FIRST_VERSION + number) for _ in keys]
                rows = [(row[0], key, *row[2:]) for key, row in zip(keys, rows, strict=True)]
                most = rng.choice([1, 3, 50])
                batches += [rows[at : at + most] for at in range(0, len(rows), most)]
                now += rng.choice((*PERIODS_S, *SPELLS_S))
                due += [now] * (len(batches) - len(due))
            data.batches.append(batches)  # type: ignore[arg-type]
            data.due.append(due)
        given = self._worker_source(data, partitions, name)
        node = TimedNode(given, name, data=data, time=TIME, rows=data.on_time, raw=given)
        node.given = given.withWatermark(TIME, "0 seconds")
        self.nodes.append(node)
        return node

    def _worker_source(self, data: TimedData, partitions: int, name: str) -> Source:
        rng = self.rng
        if rng.random() < POSITIONS_SHARE:
            numbers = None
            if rng.random() < NUMBERS_SHARE:
                numbers = [self._numbers(len(data.rows_of(partition))) for partition in range(partitions)]
            reader = PositionedReader(data, numbers, self._readers)
            return flux.source(reader, TIMED, partitions, name, positions=True)
        if rng.random() < 0.5:
            return flux.source(lambda p: data.counted(p), TIMED, partitions, name)
        return flux.source(lambda p, start: data.seeking(p, start), TIMED, partitions, name)

    def _numbers(self, count: int) -> np.ndarray:
        steps = [self.rng.choice([1, 1, 1, 2, 5]) for _ in range(count)]
        return np.cumsum(np.array([self.rng.choice([-1, 0, 7]), *steps], np.int64))[1:]

    # ---- stages

    def _stage(
        self, kind: Any, inputs: list[TimedNode], key: tuple[str, ...], mode: str = "complete",
        window: Window | SessionWindow | None = None, partitions: int = 0, event_time: str | None = None,
    ) -> TimedNode:  # fmt: skip
        name = f"{kind.__name__.lower()}{len(self.nodes) + len(self.sinks)}"
        bases = perhaps_telling(kind, self.rng)
        about = {"ledger": self.ledger, "stage_name": name, "transient": ("ledger",)}
        if issubclass(kind, kinds.Keeper):
            about["timed_inputs"] = self._timed_inputs(inputs)
        plain = issubclass(kind, (flux.Aggregate, *relations.OPERATORS))
        if issubclass(kind, relations.DedupSink):
            about["ttl"] = inputs[0].ttl
        if (places := inputs[0].places) is not None and issubclass(kind, kinds.PlaceSink):
            about |= {"place": staticmethod(places.place), "order": staticmethod(places.order)}
        if issubclass(kind, relations.LookupSink):
            table = inputs[0].table
            assert table is not None
            about["versions"] = {row[0]: row[3] for row in table.all()}
        target = type(name, (kind,), {}) if plain else type(name, bases, about)
        partitions = partitions or self.rng.randint(1, 3)
        copies = self.rng.choice(self.copies)
        stage = Stage(target, key, partitions, copies, None, mode, name, window=window, event_time=event_time)
        if not plain:
            self.ledger.keys[name] = key
        for node in inputs:
            node.used = True
        windowed = window is not None or any(node.windowed for node in inputs)
        flow = Flow(stage, [node.given for node in inputs])
        return TimedNode(flow, name, kind, inputs, windowed=windowed, some=any(node.some for node in inputs))

    def _timed_inputs(self, inputs: list[TimedNode]) -> tuple[int, ...]:
        return tuple(number for number, node in enumerate(inputs) if node.time is not None)

    def passing(self, inputs: list[TimedNode]) -> TimedNode:
        """Add a stage that passes rows with times on at once, or when the watermark has reached them."""
        rng = self.rng
        kind = rng.choice([kinds.Keeper, kinds.Keeper, kinds.Timed, kinds.TimedReplaying])
        # Rows of an input without event time have any time.
        time = TIME if all(each.time is not None for each in inputs) and rng.random() < 0.9 else None
        node = self._stage(kind, inputs, rng.choice([(), ("key",), ("id",)]), event_time=time)
        node.time = time
        node.rows = lambda: [row for each in inputs for row in each.rows()]
        self.nodes.append(node)
        return node

    def windows(self, inputs: list[TimedNode], mode: str = "append") -> TimedNode:
        """Count the rows of windows of inputs with event time, or sum the results of windows."""
        rng = self.rng
        results = inputs[0].time == WINDOW_TIME
        window: Window | SessionWindow
        if rng.random() < 0.3:
            window = flux.session_window(inputs[0].time or TIME, f"{rng.choice([1, 3, 8])} seconds")
        else:
            size = rng.choice([5, 10, 20]) * (2 if results else 1)
            slide = rng.choice([None, None, f"{size // 2} seconds" if size % 2 == 0 else "2 seconds", "3 seconds"])
            window = flux.window(inputs[0].time or TIME, f"{size} seconds", slide)
        keyed = all("key" in self._columns(node) for node in inputs) and rng.random() < 0.8
        kind = kinds.Sums if results else kinds.Counts
        node = self._stage(kind, inputs, ("key",) if keyed else (), mode, window, 0 if keyed else 1)
        node.time = WINDOW_TIME if mode == "append" else None
        if isinstance(window, SessionWindow):
            node.fold = 0 if results else 1
        elif window.size % window.slide == 0 and not results:
            node.fold = window.size // window.slide
        node.rows = lambda: _answer([row for each in inputs for row in each.rows()], window, results, keyed)
        self.nodes.append(node)
        return node

    def relation(self, rng: random.Random | None, what: str, inputs: list[TimedNode]) -> TimedNode:
        """Join the rows of two inputs, look them up in a table, rank those of one within windows, or leave out duplicates."""
        make: Any = getattr(relations, what)
        kind, answer = make(rng, True) if what == "join" and self.wide is not None else make(rng)
        node = self._stage(kind, inputs, () if what == "turns" else ("key",), "append", event_time=_time_behind(what))
        node.time = {"top": WINDOW_TIME, "refreshed": TIME}.get(what, _time_behind(what))
        if what == "dedup":
            node.ttl = answer
            node.rows = inputs[0].rows
        elif what in ("once", "turns"):
            node.some, node.rows = True, inputs[0].rows
        elif isinstance(answer, relations.Places):
            node.places = answer
            node.rows = lambda: answer.answer(inputs[0].rows())
        else:
            node.rows = lambda: answer(*(each.rows() for each in inputs))
        if what == "refreshed":
            assert isinstance(inputs[1].data, TimedData)
            node.table = inputs[1].data
        self.nodes.append(node)
        return node

    def renamed(self, given: TimedNode) -> TimedNode:
        """Pass rows on under the names of the right side of an as-of join."""
        key = self.rng.choice([(), ("key",), ("id",)])
        node = self._stage(kinds.Renamed, [given], key, event_time=RIGHT_TIME)
        node.time, node.rows = RIGHT_TIME, given.rows
        self.nodes.append(node)
        return node

    @staticmethod
    def _columns(node: TimedNode) -> tuple[str, ...]:
        if node.kind in (kinds.Counts, kinds.Sums):
            assert isinstance(node.given, Flow)
            return (*node.given.stage.key, "window_start", "window_end")
        return tuple(TIMED.names)

    def sink(self, node: TimedNode, late: bool = False, raw: bool = False) -> TimedNode:
        """Add a sink. ``late``: for the late rows of a source; ``raw``: for a source without its watermark, which has all
        rows."""
        results = node.kind in (kinds.Counts, kinds.Sums)
        kind: Any
        if node.places is not None:
            kind = kinds.PlaceSink
        elif node.ttl:
            kind = relations.DedupSink
        elif node.table is not None:
            kind = relations.LookupSink
        elif results and node.time is None:
            kind = kinds.NewestSink
        elif results:
            kind = kinds.ResultGiving if self.outside else kinds.ResultSink
        else:
            kind = kinds.TimedGiving if self.outside else kinds.TimedSink
        columns = self._columns(node)
        key = ("key",) if "key" in columns else ()
        read, data = node, node.data
        if late or raw:
            assert isinstance(data, TimedData)
            assert isinstance(node.given, Flow)
            given = node.given.late if late else node.raw  # type: ignore[attr-defined]
            rows = (lambda: node.looks(data.late())) if late else data.all
            read = TimedNode(given, node.name, data=data, rows=rows)
            node.used = True
        sink = self._stage(kind, [read], key, partitions=0 if key else 1)
        sink.late = late
        sink.rows = read.rows
        self.sinks.append(sink)
        return sink


def _time_behind(relation: str) -> str | None:
    """Return the column with the event time of the rows of a relation; None: the rows have none, or the operator names it."""
    return None if relation in ("top", "best_so_far", "last", "refreshed") else TIME


def _answer(rows: list[Any], window: Window | SessionWindow, results: bool, keyed: bool) -> list[Any]:
    """Return the results of windows over rows, or over results of windows."""
    if results:
        # The time of a result is the end of the window; its count and its sum are the last columns.
        given = [(row[:-4] if keyed else (), row[-3], row[-2], row[-1]) for row in rows]
    else:
        given = [((row[1],) if keyed else (), row[3], 1, row[0]) for row in rows if row[3] is not None]
    return [(*key, start, end, count, total) for (key, start, end), (count, total) in windows_of(given, window).items()]


def draw(
    rng: random.Random,
    ledger: Ledger,
    copies_max: int,
    copies: int,
    clock: Callable[[], float],
    ahead: random.Random | None = None,
    related: random.Random | None = None,
    wide: bool = False,
    looks_up: bool = False,
    marks: random.Random | None = None,
) -> Dataflow:
    """Draw a flow with event time. ``copies``: number of replicas of every partition; 0: drawn, up to ``copies_max``. ``clock``:
    the clock of the run. ``ahead`` decides on alignment and times that are not believed, and ``related`` on joins, ranks and
    deduplication: each has its own draws, so that flows without it are as before. ``wide``: relations of all kinds, and lookups;
    ``looks_up``: in their place, lookups in a table that is read anew; ``marks`` chooses the aggregates that have replicas
    without a common order."""
    builder = _Builder(rng, ledger, copies_max, copies, clock, ahead, related if wide else None)
    what = ""
    if related is not None:
        what = "refreshed" if looks_up else related.choice(relations.WIDE if wide else relations.RELATIONS)
    if what or marks is not None:  # the rows left out after idleness are only known for windows, and for one order
        builder.idles = False
    both = what in ("join", "as_of")
    timed = [builder.source() for _ in range(2 if both else rng.choice([1, 1, 2]))]
    other = [builder.source(timed=False)] if rng.random() < 0.25 else []
    inputs = [rng.choice(timed)]
    if len(timed) > 1 and rng.random() < 0.6:
        inputs = list(timed)
    last = inputs[0]
    if rng.random() < 0.5:
        last = builder.passing([*inputs, *(other if rng.random() < 0.6 else [])])
        inputs = [last]
    elif other and rng.random() < 0.2:  # such an input holds the watermark until its end
        inputs = [*inputs, *other]
    if what:
        last = _related(builder, related, what, timed, last)
        inputs = [last]
    windows = not what or ((both or looks_up) and rng.random() < 0.5)
    if windows and last.time is not None and rng.random() < 0.85:
        mode = rng.choice(["append", "append", "append", "update", "complete"])
        last = builder.windows(inputs, mode)
        if last.time is not None and rng.random() < 0.5:
            last = builder.windows([last], rng.choice(["append", "append", "update"]))
    for source in timed:
        if rng.random() < 0.2:
            builder.sink(source)
        if rng.random() < 0.2:  # without event time, beside the others
            builder.sink(source, raw=True)
        if rng.random() < 0.6:
            builder.sink(source, late=True)
    for node in builder.nodes:
        if not node.used or (node.data is None and rng.random() < 0.15):
            builder.sink(node)
    drift_s = 0 if ahead is None else ahead.choice(DRIFTS_S)
    # A source that stands still with rows of others in front of it would never end.
    lingers = rng.random() < LINGERS_SHARE and not drift_s
    return _with_marks(_compiled(builder, rng, lingers, drift_s), marks)


def _with_marks(flow: Dataflow, rng: random.Random | None) -> Dataflow:
    """Return the flow with replicas without a common order in most of the aggregates that may have them."""
    if rng is None:
        return flow
    stages = ById(
        replace(stage, order=MARKS, replicas=max(stage.replicas, min(2, most)))
        if stage.sink is None
        and isinstance(made := stage.make(), flux.Aggregate)
        and not made._flux_needs_order(stage.schemas, stage.output_mode)
        and rng.random() < MARKS_SHARE
        else stage
        for most in (max(stage.replicas for stage in flow.plan.stages),)
        for stage in flow.plan.stages
    )
    return replace(flow, plan=replace(flow.plan, stages=stages))


def _related(
    builder: _Builder, rng: random.Random | None, what: str, timed: list[TimedNode], last: TimedNode
) -> TimedNode:
    """Return the stage that joins, looks up, ranks or leaves out duplicates, over rows with times."""
    left = last if last.time == TIME else timed[0]
    if what in ("join", "as_of"):
        right = next(each for each in reversed(timed) if each is not left)
        return builder.relation(rng, what, [left, builder.renamed(right) if what == "as_of" else right])
    if what == "refreshed":
        assert rng is not None
        return builder.relation(rng, what, [left, builder.table(rng)])
    made = builder.relation(rng, what, [left])
    return builder.passing([made]) if what == "turns" and builder.rng.random() < 0.5 else made


def _compiled(builder: _Builder, rng: random.Random, lingers: bool, drift_s: float) -> Dataflow:
    settings, read, room = replace(_settings(rng), watermark_drift=float(drift_s)), False, 1 << 27
    interval = rng.choice(INTERVALS_S)
    if hasattr(settings, "watermark_interval"):
        settings = replace(settings, watermark_interval=interval)
    if builder.outside:
        room = rng.choice([1, 2_000, 1 << 27])
        settings = replace(settings, sink_max_bytes=room)
        read = rng.random() < READ_SHARE
    ends = []
    for sink in builder.sinks:
        assert isinstance(sink.given, Flow)
        gives = issubclass(sink.kind, kinds.GivesOn)
        ends.append(sink.given.to(QueryReaders(room) if read else Goes()) if gives else sink.given)
    plan = compile_plan(ends, settings, lambda given: given, "q", SECRET, to_steps=relations.to_steps)
    data = {node.name: node.data for node in builder.nodes if node.data is not None}
    sources = [data[source.name] for source in plan.sources]
    for source, each in zip(plan.sources, sources, strict=True):
        each.columns = getattr(source, "columns", None)  # type: ignore[attr-defined]
    plan = _believing(plan, sources)
    about = EventTimeFlow(builder.nodes, builder.sinks, sources, builder.idles, lingers)  # type: ignore[arg-type]
    flow = Dataflow(plan, sources, builder.sinks, rng.choice([1, 500, 64 << 10]), False)  # type: ignore[arg-type]
    return replace(flow, event_time=about)


def _believing(plan: Plan, sources: list[Any]) -> Plan:
    """Return the plan with sources that believe times after few rows: partitions have few."""
    made = [
        source
        if source.event_time is None
        else replace(source, event_time=replace(source.event_time, believed_after=data.believed_after))
        for source, data in zip(plan.sources, sources, strict=True)
    ]
    return replace(plan, sources=ById(made))


def with_checkpoints(flow: Dataflow) -> Dataflow:
    """Return the flow with checkpoints as often as its logs need them. A log that takes a row or two waits for a checkpoint of
    each, for a minute in all if checkpoints are rare; in other flows a worker that looks for checkpoints all the time takes most
    of the cost of a run."""
    settings = flow.plan.settings
    interval = OFTEN_S if settings.log_max_bytes <= TINY_LOG else max(settings.checkpoint_interval, SELDOM_S)
    return replace(flow, plan=replace(flow.plan, settings=replace(settings, checkpoint_interval=interval)))
