"""The dataflow as workers see it: sources, stages and edges, frozen and shipped with the task (design: plan).

The plan is made and checked by ``controller.planning.compiler``; everything here is data that any process may read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from flux.arguments import FAIL, MARKS, ONE, STEPS
from flux.dataflow.availability import Availability
from flux.dataflow.sink import Sink
from flux.dataflow.source_reader import SourceReader
from flux.errors import FluxError, UserCodeError
from flux.operators.operator import Operator
from flux.operators.schema import picked
from flux.operators.user_code import described, shortened, text_of
from flux.settings import Settings
from partitioning.ids import ACTIVE

if TYPE_CHECKING:  # the kernels of expressions take a third of a second to import, and few queries need them
    from flux.expressions.steps import RowSteps

#: The column of the numbers of rows, which travels behind the other columns (design: numbered-rows).
NUMBER = pa.field("number of the row", pa.int64(), nullable=False)


class Numbered(Protocol):
    """A part of a plan with an id of its own."""

    @property
    def id(self) -> int: ...


Part = TypeVar("Part", bound=Numbered)


class ById(Generic[Part]):
    """Sources, stages or edges of a plan, each under its id, in ascending order of ids (design: plan).

    An id is never used again, so ids of removed parts are missing: an id is no position, and the number of parts is no bound of
    ids. Walks give the parts themselves; a stage comes behind all stages that it reads."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Iterable[Part] = ()) -> None:
        """Keep parts whose ids ascend."""
        self._parts = {part.id: part for part in parts}
        assert list(self._parts) == sorted(self._parts), f"ids must ascend: {list(self._parts)}"

    def __getitem__(self, id_: int) -> Part:
        return self._parts[id_]

    def __contains__(self, id_: object) -> bool:
        """Tell whether a part has this id."""
        return id_ in self._parts

    def __iter__(self) -> Iterator[Part]:
        return iter(self._parts.values())

    def __len__(self) -> int:
        """Return the number of parts."""
        return len(self._parts)

    def __eq__(self, other: object) -> bool:
        return self._parts == other._parts if isinstance(other, ById) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ById({list(self._parts.values())})"

    @property
    def end(self) -> int:
        """Return the id that a next part would have at the least: one above the highest."""
        return max(self._parts, default=-1) + 1

    def with_part(self, part: Part) -> ById[Part]:
        """Return these parts with another one under its id."""
        return ById(part if each.id == part.id else each for each in self)


class Timed(Enum):
    """The rows of a source that an edge carries, by their event time (design: late-rows)."""

    #: All rows, whatever their time.
    ALL = "all"
    #: The rows that are not late. The streams of the edge state watermarks.
    ON_TIME = "on time"
    #: The rows that are late.
    LATE = "late"


@dataclass(frozen=True)
class EventTime:
    """The event time of a source's rows, as ``withWatermark`` declares it (design: late-rows)."""

    #: Name of the column of times, for messages.
    column: str
    #: Its position in the rows behind ``steps``. It holds timestamps of any unit.
    at: int
    #: Microseconds by which a row may be behind the newest row before it without being late.
    delay: int
    #: Microseconds after which a partition that has given nothing holds the watermark no longer; None: it always holds it.
    idle: int | None = None
    #: Whether the watermark of an idle partition goes on with the wall clock.
    advance: bool = False
    #: Microseconds by which a time may be above the newest one that is believed, or above that of column ``ahead_of``, and still
    #: be believed (design: max-ahead); None: each time is believed.
    max_ahead: int | None = None
    #: The name of a column of times that are always believed, such as those of Kafka records; None: there is none.
    ahead_of: str | None = None
    #: Its position in the rows behind ``steps``.
    sure: int | None = None
    #: Rows in succession with such times after which these are believed, if there are no sure ones.
    believed_after: int = 100
    #: The columns of the source's rows that ``steps`` need, or that come behind them if there are none, by position; None: all.
    columns: tuple[int, ...] | None = None
    #: The steps in front of ``withWatermark``; None: there are none. Edges of on-time and of late rows take rows behind them:
    #: their own columns and steps are by the position there.
    steps: RowSteps | None = None

    @property
    def looked_at(self) -> tuple[int, ...]:
        """The columns of times, by position in the rows behind ``steps``."""
        return (self.at,) if self.sure is None else (self.at, self.sure)

    def rows_of(self, batch: pa.RecordBatch, where: Callable[[], str]) -> tuple[pa.RecordBatch, np.ndarray | None]:
        """Return the rows behind the steps in front, and the index of each in the batch; None: all rows are there. ``where``
        tells the place of the batch for errors."""
        rows, kept = _computed(picked(batch, self.columns), self.steps, where)
        return rows, None if kept is None else kept.to_numpy()


def _computed(
    rows: pa.RecordBatch, steps: RowSteps | None, where: Callable[[], str]
) -> tuple[pa.RecordBatch, pa.Array | None]:
    """Return rows behind steps, and the index of each; None: all rows pass. UserCodeError: Spark has no answer for a row."""
    if steps is None:
        return rows, None
    try:
        return steps.run(rows)
    except Exception as error:
        text = text_of(error) if isinstance(error, FluxError) else described(error)
        raise UserCodeError(f"{where()}: {text} (computed: {shortened(str(steps))})") from None


@dataclass(frozen=True)
class SourcePlan:
    """An origin of rows. Each of the classes below is one kind of it."""

    id: int
    name: str
    schema: pa.Schema
    #: The event time of its rows; None: they have none.
    event_time: EventTime | None = field(default=None, kw_only=True)
    #: Whether results go on without it: availability reaches it, so silence does not end the query (design: availability).
    may_be_silent: bool = field(default=False, kw_only=True)
    #: The version of the plan that brought it.
    since: int = field(default=0, kw_only=True)

    @property
    def worker_partitions(self) -> int:
        """Return the number of partitions that workers read: 0 for a DataFrame."""
        raise NotImplementedError

    #: The edges that left it in the version that brought it, by whose columns rows that are read again are compared; none: the
    #: present ones.
    first_edges: tuple[EdgePlan, ...] = field(default=(), kw_only=True)

    seeks = False
    positions = False
    #: Whether it is certain that the source has no last row.
    endless = False
    #: Microseconds between two readings of the DataFrame of a lookup, each version of which is a micro-batch; 0: it is none.
    refresh_us = 0


@dataclass(frozen=True)
class DataFrameSourcePlan(SourcePlan):
    """A source that the tasks of a Spark job read. The number of its partitions is known only when that job runs."""

    #: The columns of the DataFrame that are read, by position; all of them are in ``schema``. None: all.
    columns: tuple[int, ...] | None = None
    #: Settings of Spark by which the DataFrame is cut into partitions in every life of the query (design: cuts); None: the
    #: settings of the session.
    cut_by: Mapping[str, str | None] | None = None

    @property
    def worker_partitions(self) -> int:
        return 0


@dataclass(frozen=True)
class StreamSourcePlan(SourcePlan):
    """Micro-batches of Structured Streaming: the tasks of a Spark job of its own read each batch, and all batches go through the
    same streams. Rows are numbered, so that a batch that is read again may be cut elsewhere."""

    endless: bool = True
    #: The columns of the streaming DataFrame that are read, by position; all of them are in ``schema``. None: all.
    columns: tuple[int, ...] | None = None
    #: Whether the rows come from a streaming query that the program starts by itself, which writes all columns.
    written: bool = False
    refresh_us: int = 0

    positions = True

    @property
    def worker_partitions(self) -> int:
        return 0


@dataclass(frozen=True)
class WorkerSourcePlan(SourcePlan):
    """A source that is read inside the workers."""

    partitions: int
    reader: SourceReader

    @property
    def seeks(self) -> bool:  # type: ignore[override]
        """Return whether a reader may begin in the middle."""
        return self.reader.seeks

    @property
    def positions(self) -> bool:  # type: ignore[override]
        """Return whether the rows come with positions of the reader's own."""
        return self.reader.positions

    @property
    def own_numbers(self) -> bool:
        """Return whether the rows bring their numbers, as the offsets of a log are."""
        return self.reader.positions and bool(self.reader.row_numbers)

    @property
    def goes_on_after_loss(self) -> bool:
        """Return whether rows that have to be read again, and are gone, are to be passed over."""
        return self.own_numbers and bool(self.reader.goes_on_after_loss)

    @property
    def worker_partitions(self) -> int:
        return self.partitions

    @property
    def endless(self) -> bool:  # type: ignore[override]
        return bool(self.reader.endless)


@dataclass(frozen=True)
class StagePlan:
    """A stage, with the edges that feed it and those that it feeds."""

    id: int
    name: str
    partitions: int
    replicas: int
    key: tuple[str, ...]
    make: Callable[[], Operator]
    schemas: tuple[pa.Schema, ...]
    output_schema: pa.Schema | None
    #: In the order of the stage's inputs.
    edges_in: tuple[int, ...]
    edges_out: tuple[int, ...]
    output_mode: str = "complete"
    #: Whether the stage keeps its output for egress tasks to fetch.
    collects: bool = False
    #: The sink that takes the output of a last stage; each partition has a copy of it.
    sink: Sink | None = None
    #: The kind of the replicas beside the primary.
    recovery: str = ACTIVE
    #: The order that replicas of a partition share: that of steps, or that of results at marks (design: independent).
    order: str = STEPS
    #: The inputs whose watermarks count, by number, ascending; empty: the stage has no event time. An input whose streams state
    #: none, as of a DataFrame, holds the watermark until its streams have ended.
    timed_inputs: tuple[int, ...] = ()
    #: The bound on the time to its results while an input is missing; None: they wait.
    availability: Availability | None = None
    #: The edges that it fed when it began; None: it feeds the same ones.
    first_edges: tuple[int, ...] | None = field(default=None, kw_only=True)
    #: The way in which consumers read its copies: one of them, hedged, or all (design: feeds).
    feeds: str = ONE
    #: The consequence of the loss of a partition's last replica: the query fails, or it begins empty (design: converge).
    on_loss: str = FAIL
    #: Whether Flux has made it for a sink of the stage that it reads: the two are removed together.
    for_sink: bool = False
    #: The version of the plan that brought it.
    since: int = field(default=0, kw_only=True)

    @property
    def edges_at_birth(self) -> tuple[int, ...]:
        """Return the edges that it fed when it began, some of which may be gone."""
        return self.edges_out if self.first_edges is None else self.first_edges

    @property
    def at_marks(self) -> bool:
        """Whether its replicas have no common order of steps, and give results at marks (design: independent)."""
        return self.order == MARKS


@dataclass(frozen=True)
class EdgePlan:
    """The way of rows to input number ``input`` of the stage ``consumer``. The class of an edge, one of those below, tells its
    origin. ``schema`` is that of the rows that travel."""

    id: int
    consumer: int
    input: int
    #: Positions of the key columns in ``schema``; empty: whole batches go to partitions in rotation.
    key: tuple[int, ...]
    schema: pa.Schema
    partitions: int
    #: The number of streams that the plan knows of: the number of all streams, if ``producers_known``.
    producers: int
    #: The columns of the origin's rows that travel, or that ``steps`` need, by position; None: all.
    columns: tuple[int, ...] | None = field(default=None, kw_only=True)
    #: Conditions and columns, computed where rows are read or given out (design: steps-of-edges); None: rows travel as they are.
    steps: RowSteps | None = field(default=None, kw_only=True)
    #: Whether its streams state watermarks (design: watermark-statements).
    states: bool = field(default=False, kw_only=True)
    #: Microseconds of event time: windows behind it end at multiples of it, or nearly so. A watermark that passes one is told at
    #: once; 0: none is.
    quantum: int = field(default=0, kw_only=True)
    #: The version of the plan that brought it.
    since: int = field(default=0, kw_only=True)
    #: Bytes of log of each of its streams, given at birth (design: share-at-birth). None: an edge of the first version, whose
    #: share is computed from that version.
    log_bytes: int | None = field(default=None, kw_only=True)

    from_stage: ClassVar[bool] = False
    producers_known: ClassVar[bool] = True

    @property
    def drops(self) -> bool:
        """Whether rows of the origin may be left out."""
        return self.steps is not None and self.steps.drops

    def rows_of(self, batch: pa.RecordBatch, where: Callable[[], str]) -> tuple[pa.RecordBatch, pa.Array | None]:
        """Return what travels of a batch of the origin, and the index of each row that passes; None: all do. ``where`` tells the
        place of the batch for errors. UserCodeError: Spark has no answer for a row."""
        return self.computed(picked(batch, self.columns), where)

    def computed(self, rows: pa.RecordBatch, where: Callable[[], str]) -> tuple[pa.RecordBatch, pa.Array | None]:
        """Return the same for rows that have the columns of the edge alone."""
        return _computed(rows, self.steps, where)


@dataclass(frozen=True)
class FromSource(EdgePlan):
    """An edge from a source that workers read."""

    source: int
    #: The rows that it carries. If these are not all rows, ``columns`` and ``steps`` are for rows behind ``EventTime.steps``.
    timed: Timed = field(default=Timed.ALL, kw_only=True)

    @property
    def drops(self) -> bool:
        return self.timed is not Timed.ALL or super().drops


@dataclass(frozen=True)
class FromDataFrame(FromSource):
    """An edge from a DataFrame. The number of its streams is known when the Spark job that reads has ended (``EdgeComplete``)."""

    producers_known: ClassVar[bool] = False


@dataclass(frozen=True)
class FromMicroBatches(FromDataFrame):
    """An edge with one stream for each partition that any batch had. Nothing is sent between batches. ``EdgeComplete`` tells that
    no more batches come, and names no streams: none of them has a last element."""


@dataclass(frozen=True)
class FromStage(EdgePlan):
    """An edge from another stage. Every replica of a partition of that stage offers the same stream."""

    stage: int

    from_stage: ClassVar[bool] = True


@dataclass(frozen=True)
class Forgotten:
    """A new beginning of the output of a stage, after ``flux checkpoints --forget-output`` (design: forgotten-output)."""

    #: The name under which the sink of a stage has kept positions since then.
    query: str
    #: By partition, the position in the output that counts as 0 for the sink.
    first: tuple[int, ...]

    def first_of(self, partition: int) -> int:
        return self.first[partition] if partition < len(self.first) else 0


@dataclass(frozen=True)
class Plan:
    """The dataflow of one query."""

    query: str
    sources: ById[SourcePlan]
    stages: ById[StagePlan]
    edges: ById[EdgePlan]
    settings: Settings
    secret: bytes = field(repr=False, default=b"")
    #: Whether each partition has a further replica in a directory, at the vault (design: vault).
    durable: bool = False
    #: The number of workers when the directory was new; 0: the present number.
    began_with: int = 0
    #: The checkpoint location, as errors name it.
    location: str = ""
    #: By stage, the new beginnings of sinks. Positions of other sinks count from the start of the query.
    forgotten: Mapping[int, Forgotten] = field(default_factory=dict)
    #: Grows by one with each change (``flux.dataflow.plan_change``).
    version: int = 0
    #: The numbers of streams of sources and of stages in the first version (``counted_streams``); None: this is that version.
    first_streams: tuple[int, int] | None = None
    #: Ids below these have been given: of sources, stages and edges.
    used: tuple[int, int, int] = (0, 0, 0)

    def log_share(self, edge: EdgePlan, workers: int) -> int:
        """Return the bytes of log for each stream of an edge on a worker.

        The streams of sources, which are few and fast, share one half and the streams of stages the other half, counting one for
        every replica. The share is the same for every replica of a stream, always: if one replica had room for an element,
        another must have room for it too, or a replica that reads from the second may wait for ever for rows of its primary."""
        if edge.log_bytes is not None:
            return edge.log_bytes
        counts = self.first_streams or self.counted_streams()
        limit = self.settings.log_max_bytes
        budget = limit * workers // (2 if all(counts) else 1)
        if not edge.from_stage:
            limit = min(limit, self.settings.source_log_bytes)
        return max(min(limit, budget // max(counts[edge.from_stage], 1)), 1)

    def streams_of(self, edge: EdgePlan) -> int:
        """Return the number of streams of an edge, counting one for every replica of the stage that feeds it."""
        return edge.producers * (self.stages[edge.stage].replicas if isinstance(edge, FromStage) else 1)

    def counted_streams(self) -> tuple[int, int]:
        """Return the numbers of streams of sources and of stages."""
        sources, stages = (
            sum(self.streams_of(edge) for edge in self.edges if edge.from_stage is of_stage)
            for of_stage in (False, True)
        )
        return sources, stages

    def log_left(self, workers: int) -> int:
        """Return the bytes of log, on this number of workers, that are left for edges of later versions. Together these edges get
        as much as the first version. The share of a removed edge is left again."""
        given = sum(edge.log_bytes * self.streams_of(edge) for edge in self.edges if edge.log_bytes is not None)
        return max(self.settings.log_max_bytes * workers - given, 0)

    def next_ids(self) -> tuple[int, int, int]:
        """Return the least ids that new sources, stages and edges may have. None of them was given before."""
        sources, stages, edges = self.used
        return max(sources, self.sources.end), max(stages, self.stages.end), max(edges, self.edges.end)

    def edges_of_source(self, source: int) -> list[EdgePlan]:
        return [edge for edge in self.edges if isinstance(edge, FromSource) and edge.source == source]

    def numbered(self, edge: EdgePlan) -> bool:
        """Return whether the rows of an edge carry their numbers (design: numbered-rows)."""
        return isinstance(edge, FromSource) and self.sources[edge.source].positions

    def brings_numbers(self, edge: int) -> bool:
        """Return whether the reader of an edge's source gives the numbers of its rows (design: row-numbers)."""
        origin = self.origin(self.edges[edge]) if isinstance(self.edges[edge], FromSource) else None
        return isinstance(origin, WorkerSourcePlan) and origin.own_numbers

    def may_lose(self, edge: EdgePlan, passed_over: bool = False) -> bool:
        """Return whether rows of an edge may be others when they are made again, because a log before it, near or far, may have
        lost some by then. ``passed_over``: and whether the query goes on then (design: rows-that-are-gone)."""
        match origin := self.origin(edge):
            case WorkerSourcePlan():
                return origin.goes_on_after_loss if passed_over else origin.own_numbers
            case StagePlan():
                return any(self.may_lose(self.edges[each], passed_over) for each in origin.edges_in)
        return False

    def travels(self, edge: EdgePlan) -> pa.Schema:
        """Return the schema of the rows as they are sent."""
        return edge.schema.append(NUMBER) if self.numbered(edge) else edge.schema

    def origin(self, edge: EdgePlan) -> SourcePlan | StagePlan:
        """Return the source or the stage from which the rows of an edge come."""
        match edge:
            case FromStage():
                return self.stages[edge.stage]
            case FromSource():
                return self.sources[edge.source]
        raise AssertionError(edge)

    @property
    def terminal(self) -> list[StagePlan]:
        """Return the stages that feed no other, or a sink: once they have finished, the query has finished."""
        return [stage for stage in self.stages if not stage.edges_out or stage.sink is not None]

    def describe_stream(self, edge_id: int, producer: int) -> str:
        edge = self.edges[edge_id]
        name = self.origin(edge).name
        whose = f"{name}/{producer}" if edge.from_stage else f"partition {producer} of {name}"
        return f"stream {edge_id}.{producer} (from {whose})"
