"""Random dataflows with their data, and the rows that must come out of them, worked out in plain Python."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

import flux
from controller.planning.compiler import compile_plan
from flux.arguments import FEEDS, HEDGED, STEPS
from flux.dataflow.flow import Flow, Stage
from flux.dataflow.plan import ById, Plan, StagePlan
from flux.dataflow.sink import QueryReaders
from flux.dataflow.source import DataFrameSource, Source
from flux.operators.operator import says_needs
from flux.settings import Settings
from partitioning.ids import STANDBY, UPSTREAM
from tests.simulation.checkers import Ledger
from tests.simulation.fetches import InSmallChunks
from tests.simulation.losing_logs import LogFaults, Logs, losing_reader
from tests.simulation.outside import SHARE, Goes
from tests.simulation.replaying import Replaying, perhaps_replaying
from tests.simulation.stage_kinds import (
    KINDS,
    MODELS,
    ROW,
    Delay,
    Giving,
    Row,
    Sink,
    Totals,
    TotalsSink,
    Watched,
    make_batch,
)
from tests.simulation.telling import perhaps_telling

if TYPE_CHECKING:
    from tests.simulation.timed_flows import EventTimeFlow

SECRET = b"of this query"
#: The share of sources that workers read which have positions of their own.
NUMBERED_SHARE = 0.3
#: The share of random flows with timers, among flows with a stage that can have some.
TIMED_SHARE = 0.25
#: The share of random flows with tiny bounds on the distance between replicas.
BOUNDED_SHARE = 0.25
#: The share of stages with standbys of the kind "upstream", among stages whose operators allow these.
UPSTREAM_SHARE = 0.8
#: The share of flows that keep their output for a reader, among flows whose output goes outside.
READ_SHARE = 0.5
#: The share of flows whose output is fetched at the end, instead of going into sinks, among flows with copies.
COLLECTED_SHARE = 0.2


@dataclass
class Node:
    """A source or a stage of a random flow."""

    given: Flow | Source
    name: str
    kind: Any = None
    inputs: list[Node] = field(default_factory=list)
    data: SourceData | None = None
    used: bool = False

    def model(self, version: dict[tuple[str, int], int]) -> list[Row]:
        """Compute the rows that come out, from the rows in these versions of the data."""
        if self.data is not None:
            return self.data.rows(version)
        rows = [row for node in self.inputs for row in node.model(version)]
        return MODELS[self.kind](rows) if self.kind in MODELS else rows


@dataclass
class SourceData:
    """The data of a source."""

    name: str
    #: By partition: the batches as every attempt reads them.
    batches: list[list[list[Row]]]
    #: By partition with input that is not deterministic: the batches as another attempt reads them.
    other: dict[int, list[list[Row]]] = field(default_factory=dict)
    #: The contents of the logs from which the source is read, if these lose records.
    logs: Logs | None = None

    def of(self, partition: int, version: int) -> list[list[Row]]:
        return self.other[partition] if version and partition in self.other else self.batches[partition]

    def rows(self, version: dict[tuple[str, int], int]) -> list[Row]:
        lost = set() if self.logs is None else set(self.logs.lost_rows())
        later = [] if self.logs is None else [row for row in self.logs.later_rows() if row not in lost]
        return later + [
            row
            for partition in range(len(self.batches))
            for batch in self.of(partition, version.get((self.name, partition), 0))
            for row in batch
            if row not in lost
        ]

    def read(self, partition: int, version: int = 0) -> Iterator[pa.RecordBatch]:
        tick = 0
        for rows in self.of(partition, version):
            yield make_batch(rows, partition, tick)
            tick += len(rows)


def numbered_reader(data: SourceData, idle: float, rng: random.Random) -> Callable[..., Iterator[Any]]:
    """Return a reader that cuts its rows elsewhere each time, and gives positions now and then."""

    def read(partition: int, start: list[int] | None) -> Iterator[pa.RecordBatch | flux.Positioned | None]:
        batches = list(data.read(partition))
        rows = pa.Table.from_batches(batches, ROW).combine_chunks() if batches else ROW.empty_table()
        at, most, often = start[0] if start else 0, rng.choice([1, 5, 20, 60]), rng.choice([0.3, 1.0, 1.0])
        while at < rows.num_rows:
            while rng.random() < idle:
                yield None
            taken = min(rng.randint(1, most), rows.num_rows - at)
            (batch,) = rows.slice(at, taken).to_batches()
            at += taken
            yield flux.Positioned(batch, [at]) if rng.random() < often else batch

    return read


@dataclass
class Dataflow:
    plan: Plan
    sources: list[SourceData]
    sinks: list[Node]
    credit_floor: int
    timed: bool
    collected: bool = False
    #: Event time of its sources and stages, for the laws; None: rows have no event time.
    event_time: EventTimeFlow | None = None


class _Builder:
    def __init__(
        self,
        rng: random.Random,
        ledger: Ledger,
        nondeterministic: bool,
        copies_max: int,
        copies: int,
        timers: random.Random | None = None,
        telling: random.Random | None = None,
        replaying: random.Random | None = None,
    ) -> None:
        self.rng = rng
        self.telling = telling
        self.replaying = replaying
        self.timers = timers if timers is not None and timers.random() < TIMED_SHARE else None
        self.ledger = ledger
        self.nondeterministic = nondeterministic
        chosen = [1] if copies_max == 1 else rng.choice([[2], [2], [3], [3], [2, 3], [1, 2, 3]])
        self.copies = [copies] if copies else [min(each, copies_max) for each in chosen]
        self.nodes: list[Node] = []
        self.sinks: list[Node] = []
        self.collect = 0
        self.numbered, self.numbered_share, self.losing = random.Random(0), 0.0, False
        self.log_faults: LogFaults | None = None
        self.outside = False  # whether rows that arrive at a sink are handed on to a sink outside
        self._ids = 0
        self._spread = rng.choice([1, 3, 50])

    # ---- data

    def _rows(self, count: int) -> list[Row]:
        rng = self.rng
        rows = []
        for _ in range(count):
            self._ids += 1
            rows.append((self._ids, rng.randrange(self._spread), "w" * rng.choice([1, 1, 5, 60])))
        return rows

    def _source_data(self, name: str, partitions: int, batches_max: int) -> SourceData:
        rng = self.rng
        rows_max = rng.choice([1, 6, 20])
        batches = [
            [
                self._rows(rng.choice([0, 1, rows_max, rng.randint(0, rows_max)]))
                for _ in range(rng.randint(0, batches_max))
            ]
            for _ in range(partitions)
        ]
        return SourceData(name, batches)

    def _disturbed(self, batches: list[list[Row]]) -> list[list[Row]]:
        """Make another reading of the same partition: rows changed, missing or added, or the same rows cut elsewhere."""
        rng = self.rng
        changed = [list(rows) for rows in batches]
        kind = rng.choice(["other row", "cut", "shorter", "longer", "empty batch"])
        at = rng.randrange(len(changed))
        if kind == "cut" and at + 1 < len(changed) and changed[at]:
            changed[at + 1].insert(0, changed[at].pop())
        elif kind == "shorter":
            changed = changed[:at]
        elif kind == "longer":
            changed.append(self._rows(2))
        elif kind == "empty batch":
            changed.insert(at, [])
        else:
            changed[at] = [*changed[at][:-1], *self._rows(1)]
        return changed

    def source(self) -> None:
        rng = self.rng
        name = f"source{len(self.nodes)}"
        spark = rng.random() < 0.65 and self.numbered_share < 1
        many = spark and self.copies == [1] and rng.random() < 0.15
        partitions = rng.randint(8, 25) if many else rng.randint(0 if spark else 1, 3)
        data = self._source_data(name, partitions, 2 if many else rng.choice([3, 8, 20]))
        if spark and self.nondeterministic:
            for partition, batches in enumerate(data.batches):
                if batches and rng.random() < 0.7:
                    data.other[partition] = self._disturbed(batches)
        if spark:
            source = DataFrameSource(name, ROW)
        else:
            idle = rng.choice([0.0, 0.0, 0.3])
            plain = rng.random() < 0.5
            if self.numbered.random() < self.numbered_share:
                read: Any = numbered_reader(data, idle, self.numbered)
                if self.losing:
                    read, data.logs = losing_reader(
                        lambda p: list(data.read(p)), partitions, idle, self.numbered, self.log_faults
                    )
                source = flux.source(read, ROW, partitions, name, positions=True)
            elif plain:
                source = flux.source(lambda p: self._read(data, p, idle), ROW, partitions, name)
            else:
                source = flux.source(lambda p, start: self._seek(data, p, start), ROW, partitions, name)
        self.nodes.append(Node(source, name, data=data))

    def _read(self, data: SourceData, partition: int, idle: float) -> Iterator[pa.RecordBatch | None]:
        for batch in data.read(partition):
            while self.rng.random() < idle:
                yield None
            yield batch

    def _seek(self, data: SourceData, partition: int, start: int) -> Iterator[pa.RecordBatch]:
        batches = [batch for batch in data.read(partition) if batch.num_rows]
        yield from batches[start:]

    # ---- stages

    def _stage(
        self, kind: Any, inputs: list[Node], key: tuple[str, ...], mode: str = "complete", partitions: int = 0
    ) -> Node:
        name = f"{kind.__name__.lower()}{len(self.nodes) + len(self.sinks)}"
        bases = perhaps_telling(perhaps_replaying(kind, self.replaying), self.telling)
        target = type(name, bases, {"ledger": self.ledger, "stage_name": name, "transient": ("ledger",)})
        partitions = partitions or self.rng.randint(1, 3)
        stage = Stage(target, key, partitions, self.rng.choice(self.copies), None, mode, name)
        if kind is not Totals:
            self.ledger.keys[name] = key
        for node in inputs:
            node.used = True
        return Node(Flow(stage, [node.given for node in inputs]), name, kind, inputs)

    def _key(self) -> tuple[str, ...]:
        return self.rng.choice([(), ("key",), ("id",), ("word",), ("key", "word")])

    def stage(self) -> None:
        rng = self.rng
        latest = self.nodes[-1]
        inputs = [latest]
        if rng.random() < 0.3:
            inputs.append(rng.choice(self.nodes))  # perhaps the same node again
        rng.shuffle(inputs)
        kind = rng.choice(KINDS)
        if self.timers is not None and self.timers.random() < 0.7:
            kind = Delay
        self.nodes.append(self._stage(kind, inputs, self._key()))

    def sink(self, node: Node) -> None:
        """Add a sink behind a node; if the output is to be fetched (``collect``), a stage that keeps it."""
        if self.collect:
            self.sinks.append(self._stage(Watched, [node], self._key()))
            return
        if node.data is None and self.rng.random() < 0.25:
            mode = self.rng.choice(["complete", "update"])
            totals = self._stage(Totals, [node], ("key",), mode)
            sink = self._stage(TotalsSink, [totals], ("key",))
        else:
            sink = self._stage(Giving if self.outside else Sink, [node], self._key())
        self.sinks.append(sink)


#: Bytes of a log that takes some rows, and then waits until they are in a checkpoint of every standby.
TINY_LOG = 300


def _settings(rng: random.Random) -> Settings:
    tiny = rng.choice(["1", "300", "2000", "100000"])
    log = int(rng.choice([tiny, "4000", "1000000"]))
    return replace(
        Settings.of(),
        log_max_bytes=log,
        credit_max_bytes=int(rng.choice([tiny, "1000", "1000000"])),
        step_max_rows=rng.choice([1, 8, 4096]),
        ack_interval=rng.choice([0.0, 0.005, 0.05 if log > 300 else 0.01]),  # a batch at a time takes a round trip each
        resend_timeout=rng.choice([0.03, 0.1, 0.1, 0.4]),
        heartbeat_interval=0.05,
        heartbeat_timeout=0.25,
        heartbeat_last_timeout=3.0,
        repairs_at_once=rng.choice([1, 1, 2, 8]),
        same_executor=rng.random() < 0.15,
    )


def bounded(flow: Dataflow, rng: random.Random, share: float = BOUNDED_SHARE) -> Dataflow:
    """Give a flow, now and then, bounds on the distance between replicas that are reached all the time."""
    if rng.random() >= share:
        return flow
    settings = replace(
        flow.plan.settings,
        order_max_steps=rng.choice([1, 2, 5, 20]),
        replicas_max_steps_behind=rng.choice([1, 3, 10]),
    )
    return replace(flow, plan=replace(flow.plan, settings=settings))


def with_standbys(flow: Dataflow, rng: random.Random, share: float) -> Dataflow:
    """Put standbys in place of secondaries in a ``share`` of the stages that have any. If the operator allows it, these standbys
    may be of the kind "upstream"."""
    stages = ById[StagePlan](
        replace(stage, recovery=_standby_of(stage, rng))
        if rng.random() < share and stage.replicas > 1 and not stage.collects and stage.order == STEPS
        else stage
        for stage in flow.plan.stages
    )
    settings = replace(
        flow.plan.settings,
        checkpoint_interval=rng.choice([0.02, 0.2, 1.0]),
        checkpoint_max_bytes_per_second=rng.choice([10_000, 1 << 26]),
    )
    return replace(flow, plan=replace(flow.plan, stages=stages, settings=settings))


def _standby_of(stage: StagePlan, rng: random.Random) -> str:
    operator = stage.make()
    windowed = getattr(operator, "_flux_window", None) is not None and says_needs(operator, stage.output_mode)
    may = isinstance(operator, Replaying) or windowed
    return UPSTREAM if may and rng.random() < UPSTREAM_SHARE else STANDBY


def chain(
    ledger: Ledger, kinds: Sequence[Any], copies: int, partitions: int = 2, batches: int = 40,
    outside: bool = False, readers: int = 0, totals: str = "", **settings: Any,
) -> Dataflow:  # fmt: skip
    """Make a source of two partitions that gives a batch of four rows each millisecond, stages of these kinds one after the
    other, and a sink. Each partition has ``copies``, and all is fast enough, unless ``settings`` say otherwise.

    ``outside``: the rows of the sink go outside; ``readers``: the bytes that are kept for readers, to which the rows go then;
    ``totals``: the output mode of an aggregate before the sink, if there is to be one."""
    builder = _Builder(random.Random(0), ledger, False, copies, copies)
    builder.rng, builder._spread = random.Random(0), 50  # the same rows for any number of copies
    data = SourceData("source", [[builder._rows(4) for _ in range(batches)] for _ in range(2)])

    def read(partition: int, start: int) -> Iterator[pa.RecordBatch | None]:
        for batch in builder._seek(data, partition, start):
            yield None
            yield batch

    node = Node(flux.source(read, ROW, 2, "source"), "source", data=data)
    builder.nodes.append(node)
    for kind in kinds:
        node = builder._stage(kind, [node], ("key",), partitions=partitions)
        builder.nodes.append(node)
    if totals:
        node = builder._stage(Totals, [node], ("key",), totals, partitions)
        sink = builder._stage(TotalsSink, [node], ("key",))
    else:
        sink = builder._stage(Giving if outside or readers else Sink, [node], ("key",), partitions=partitions)
    given = {
        "ack_interval": 0.005,
        "resend_timeout": 0.1,
        "heartbeat_interval": 0.05,
        "heartbeat_timeout": 0.25,
        "heartbeat_last_timeout": 3.0,
        "step_max_rows": 8,
    }
    chosen = replace(Settings.of(), **(given | settings))
    assert isinstance(sink.given, Flow)
    ended = sink.given.to(QueryReaders(readers) if readers else Goes()) if outside or readers else sink.given
    plan = compile_plan([ended], chosen, lambda given: given, "q", SECRET)
    return Dataflow(plan, [data], [sink], 64 << 10, Delay in kinds)


def spark_chain(ledger: Ledger, batches: int = 5, **settings: Any) -> Dataflow:
    """Make a DataFrame of one partition, and a sink that reads it in one replica."""
    builder = _Builder(random.Random(0), ledger, False, 1, 1)
    data = SourceData("table", [[builder._rows(4) for _ in range(batches)]])
    node = Node(DataFrameSource("table", ROW), "table", data=data)
    sink = builder._stage(Sink, [node], ("key",), partitions=1)
    assert isinstance(sink.given, Flow)
    plan = compile_plan([sink.given], replace(Settings.of(), **settings), lambda given: given, "q", SECRET)
    return Dataflow(plan, [data], [sink], 1, False)


def draw(
    rng: random.Random,
    ledger: Ledger,
    nondeterministic: bool,
    copies_max: int,
    copies: int = 0,
    timers: random.Random | None = None,
    collects: random.Random | None = None,
    fetched: bool = False,
    outside: random.Random | None = None,
    telling: random.Random | None = None,
    numbered: random.Random | None = None,
    numbered_share: float = 0.0,
    replaying: random.Random | None = None,
    read_share: float = 0.0,
    losing: bool = False,
    log_faults: LogFaults | None = None,
) -> Dataflow:
    """Draw a random dataflow.

    Each optional ``random.Random`` decides about one trait of the flow on its own, so that flows without the trait are the same
    with and without the argument.

    ``copies``: of every partition of every stage; 0: drawn, and not more than ``copies_max``. ``timers``: decides which stages
    have timers. ``collects``: whether the output is to be fetched; with ``fetched`` it always is. ``outside``: whether the output
    goes outside instead; a ``read_share`` of such flows has a reader. ``telling``: which operators tell their changes.
    ``numbered``: which sources have positions of their own: a ``numbered_share`` of the sources that workers read, and if that
    is 1, workers read all sources. ``losing``: these sources are logs that lose records, with ``log_faults`` also records that
    are still needed. ``replaying``: which operators say from which step on rows matter."""
    builder = _Builder(rng, ledger, nondeterministic, copies_max, copies, timers, telling, replaying)
    if numbered is not None:
        builder.numbered, builder.numbered_share, builder.losing = numbered, numbered_share, losing
        builder.log_faults = log_faults
    collected = collects is not None and (copies or copies_max) > 1 and collects.random() < COLLECTED_SHARE
    if collects is not None and (fetched or collected):
        builder.collect = collects.choice([1, 2, 3])
    elif outside is not None:
        builder.outside = outside.random() < SHARE
    for _ in range(rng.choice([1, 1, 2])):
        builder.source()
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        builder.stage()
    for node in builder.nodes:
        if not node.used or rng.random() < 0.15:
            builder.sink(node)
    settings, room, read = _settings(rng), 0, False
    if builder.outside and outside is not None:
        room = outside.choice([1, 2_000, 1 << 27])
        settings = replace(settings, sink_max_bytes=room)
        read = outside.random() < read_share
    plan = compile_plan(
        [
            sink.given if sink.kind is not Giving else sink.given.to(QueryReaders(room) if read else Goes())
            for sink in builder.sinks
            if isinstance(sink.given, Flow)
        ],
        settings,
        lambda given: given,
        "q",
        SECRET,
        builder.collect,
    )
    plan = replace(plan, stages=ById(_in_small_chunks(stage) for stage in plan.stages))
    sources = {node.name: node.data for node in builder.nodes if node.data is not None}
    return Dataflow(
        plan,
        [sources[source.name] for source in plan.sources],
        builder.sinks,
        rng.choice([1, 500, 64 << 10]),
        any(node.kind is Delay for node in builder.nodes),
        bool(builder.collect),
    )


def _in_small_chunks(stage: StagePlan) -> StagePlan:
    return replace(stage, make=lambda: InSmallChunks(1 << 20)) if stage.collects else stage


def with_feeds(plan: Plan, rng: random.Random) -> Plan:
    """Read the copies of each stage in a way that is drawn."""
    return replace(plan, stages=ById([replace(stage, feeds=rng.choice((HEDGED, *FEEDS))) for stage in plan.stages]))
