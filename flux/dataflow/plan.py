"""The dataflow as workers see it: sources, stages and edges, frozen and shipped with the task (design: plan).

Built and checked by ``controller.dag``; everything here is data that any process may read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import pyarrow as pa

from flux.dataflow.operator import Operator
from flux.dataflow.sink import Sink
from flux.settings import Settings
from partitioning.ids import ACTIVE

#: Numbers of rows travel as one column more, the last one (design: numbered-rows).
NUMBER = pa.field("number of the row", pa.int64(), nullable=False)

#: Reads one partition of a source inside the workers. A ``None`` means "nothing just now, ask again".
Reader = Callable[..., Iterable[pa.RecordBatch | None]]


@dataclass(frozen=True)
class SourcePlan:
    """Where rows come from: one of the two classes below."""

    id: int
    name: str
    schema: pa.Schema

    @property
    def worker_partitions(self) -> int:
        """How many partitions workers read: none of a DataFrame."""
        raise NotImplementedError

    seeks = False
    positions = False
    #: Whether it is known that it has no last row.
    endless = False


@dataclass(frozen=True)
class DataFrameSourcePlan(SourcePlan):
    """Read by the tasks of a Spark job. How many partitions it has shows when that runs. ``columns``: those of the DataFrame
    that are read, by position, which are all in ``schema``; None: all. ``cut_by``: settings of Spark by which it is cut into
    partitions in every life of the query (design: cuts); None: those of the session."""

    columns: tuple[int, ...] | None = None
    cut_by: Mapping[str, str | None] | None = None

    @property
    def worker_partitions(self) -> int:
        return 0


@dataclass(frozen=True)
class StreamSourcePlan(SourcePlan):
    """Micro-batches of Structured Streaming: each is read by the tasks of a Spark job of its own, and goes on with the same
    streams. Rows are numbered, so that a batch that is read again may be cut elsewhere."""

    endless: bool = True

    positions = True

    @property
    def worker_partitions(self) -> int:
        return 0


@dataclass(frozen=True)
class WorkerSourcePlan(SourcePlan):
    """Read inside the workers. ``seeks``: ``read`` takes the position to begin with as its second argument; ``positions``: it
    gives positions of its own with its batches."""

    partitions: int
    read: Reader
    seeks: bool = False
    positions: bool = False

    @property
    def own_numbers(self) -> bool:
        """Whether its rows bring their numbers, as offsets of a log are."""
        return self.positions and bool(getattr(self.read, "row_numbers", False))

    @property
    def worker_partitions(self) -> int:
        return self.partitions

    @property
    def endless(self) -> bool:  # type: ignore[override]
        return bool(getattr(self.read, "endless", False))


@dataclass(frozen=True)
class StagePlan:
    """``edges_in`` in the order of the stage's inputs. ``collects``: keeps its output for egress tasks to fetch; ``sink``: takes
    the output of a last stage, a copy of it for each partition; ``recovery``: the kind of the replicas beside the primary."""

    id: int
    name: str
    partitions: int
    replicas: int
    key: tuple[str, ...]
    make: Callable[[], Operator]
    schemas: tuple[pa.Schema, ...]
    output_schema: pa.Schema | None
    edges_in: tuple[int, ...]
    edges_out: tuple[int, ...]
    output_mode: str = "complete"
    collects: bool = False
    sink: Sink | None = None
    recovery: str = ACTIVE


@dataclass(frozen=True)
class EdgePlan:
    """To input number ``input`` of a stage. Where it comes from is its class, one of those below.

    ``key`` has the positions of the key columns in ``schema``; empty: whole batches go to partitions in rotation.
    ``producers``: streams that the plan knows of; all there are, if ``producers_known``. ``columns``: those of the origin's rows
    that travel, by position; None: all."""

    id: int
    consumer: int
    input: int
    key: tuple[int, ...]
    schema: pa.Schema
    partitions: int
    producers: int
    columns: tuple[int, ...] | None = field(default=None, kw_only=True)

    from_stage: ClassVar[bool] = False
    producers_known: ClassVar[bool] = True


@dataclass(frozen=True)
class FromSource(EdgePlan):
    """From a source that workers read."""

    source: int


@dataclass(frozen=True)
class FromDataFrame(FromSource):
    """How many streams there are is known when the Spark job that reads has ended (``EdgeComplete``)."""

    producers_known: ClassVar[bool] = False


@dataclass(frozen=True)
class FromMicroBatches(FromDataFrame):
    """One stream for each partition that any batch had. Between batches nobody sends. ``EdgeComplete`` says that no more
    batches come, and names no streams: none of them has a last element."""


@dataclass(frozen=True)
class FromStage(EdgePlan):
    """Every replica of a partition of the stage offers the same stream."""

    stage: int

    from_stage: ClassVar[bool] = True


@dataclass(frozen=True)
class Forgotten:
    """A new beginning of the output of a stage, after ``flux checkpoints --forget-output`` (design: forgotten-output)."""

    #: The name under which the sink of a stage keeps positions since then.
    query: str
    #: By partition, the position in the output that the sink counts as 0.
    first: tuple[int, ...]

    def first_of(self, partition: int) -> int:
        return self.first[partition] if partition < len(self.first) else 0


@dataclass(frozen=True)
class Plan:
    """``durable``: each partition has a replica in a directory besides, at the vault (design: vault). ``began_with``: workers
    that it had when the directory was new; 0: as many as it has now."""

    query: str
    sources: tuple[SourcePlan, ...]
    stages: tuple[StagePlan, ...]
    edges: tuple[EdgePlan, ...]
    settings: Settings
    secret: bytes = field(repr=False, default=b"")
    durable: bool = False
    began_with: int = 0
    #: The checkpoint location, as errors name it.
    location: str = ""
    #: By stage, where positions of its sink count anew; those of others count from the start of the query.
    forgotten: Mapping[int, Forgotten] = field(default_factory=dict)

    def log_share(self, edge: EdgePlan, workers: int) -> int:
        """Bytes of log for each stream that a worker has of an edge.

        The streams of sources, which are few and fast, have one half and those of stages the other, counting one for
        every replica. The same for every replica of a stream, always: what one of them had room for another must have
        room for, or a replica that reads from the other may wait for ever for rows that its primary has."""
        counts = {True: 0, False: 0}  # streams of stages, and of sources
        for each in self.edges:
            replicas = self.stages[each.stage].replicas if isinstance(each, FromStage) else 1
            counts[each.from_stage] += each.producers * replicas
        limit = self.settings.log_max_bytes
        budget = limit * workers // (2 if all(counts.values()) else 1)
        if not edge.from_stage:
            limit = min(limit, self.settings.source_log_bytes)
        return max(min(limit, budget // max(counts[edge.from_stage], 1)), 1)

    def edges_of_source(self, source: int) -> list[EdgePlan]:
        return [edge for edge in self.edges if isinstance(edge, FromSource) and edge.source == source]

    def numbered(self, edge: EdgePlan) -> bool:
        """Whether its rows carry their numbers (design: numbered-rows)."""
        return isinstance(edge, FromSource) and self.sources[edge.source].positions

    def brings_numbers(self, edge: int) -> bool:
        """Whether the rows of an edge bring their numbers (design: row-numbers)."""
        origin = self.origin(self.edges[edge]) if isinstance(self.edges[edge], FromSource) else None
        return isinstance(origin, WorkerSourcePlan) and origin.own_numbers

    def travels(self, edge: EdgePlan) -> pa.Schema:
        """The schema of what is sent."""
        return edge.schema.append(NUMBER) if self.numbered(edge) else edge.schema

    def origin(self, edge: EdgePlan) -> SourcePlan | StagePlan:
        """Where an edge comes from."""
        match edge:
            case FromStage():
                return self.stages[edge.stage]
            case FromSource():
                return self.sources[edge.source]
        raise AssertionError(edge)

    @property
    def terminal(self) -> list[StagePlan]:
        """Stages that feed no other: when these have finished, so has the query."""
        return [stage for stage in self.stages if not stage.edges_out]

    def describe_stream(self, edge_id: int, producer: int) -> str:
        edge = self.edges[edge_id]
        name = self.origin(edge).name
        whose = f"{name}/{producer}" if edge.from_stage else f"partition {producer} of {name}"
        return f"stream {edge_id}.{producer} (from {whose})"
