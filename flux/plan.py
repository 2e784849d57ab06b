"""The dataflow as workers see it: sources, stages and edges, frozen and shipped with the task (DESIGN 2).

Built and checked by ``controller.dag``; everything here is data that any process may read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pyarrow as pa

from flux.operator import Operator
from flux.settings import Settings

#: Reads one partition of a source inside the workers. A ``None`` means "nothing just now, ask again".
Reader = Callable[..., Iterable[pa.RecordBatch | None]]


@dataclass(frozen=True)
class SourcePlan:
    """``partitions`` is None for a Spark DataFrame: how many tasks its job has shows when it runs. ``seeks``: ``read``
    takes the number of the batch to begin with as its second argument."""

    id: int
    name: str
    schema: pa.Schema
    partitions: int | None = None
    read: Reader | None = None
    seeks: bool = False


@dataclass(frozen=True)
class StagePlan:
    """``edges_in`` in the order of the stage's inputs. ``collects``: keeps its output for egress tasks to fetch."""

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


@dataclass(frozen=True)
class EdgePlan:
    """From a source or a stage (exactly one of the two is not None) to input number ``input`` of a stage.

    ``key`` has the positions of the key columns in ``schema``; empty: whole batches go to partitions in rotation."""

    id: int
    source: int | None
    stage: int | None
    consumer: int
    input: int
    key: tuple[int, ...]
    schema: pa.Schema
    partitions: int
    producers: int | None


@dataclass(frozen=True)
class Plan:
    query: str
    sources: tuple[SourcePlan, ...]
    stages: tuple[StagePlan, ...]
    edges: tuple[EdgePlan, ...]
    settings: Settings
    secret: bytes = field(repr=False, default=b"")

    def log_share(self, stage: int | None, workers: int) -> int:
        """Bytes of log for each stream of a stage, or of a source in the workers (None).

        The streams of sources, which are few and fast, have one half and those of stages the other, counting one for
        every replica. The same for every replica of a stream, always: what one of them had room for another must have
        room for, or a replica that reads from the other may wait for ever for rows that its primary has."""
        copies = [1 if edge.stage is None else self.stages[edge.stage].replicas for edge in self.edges]
        counts = {True: 0, False: 0}
        for edge, count in zip(self.edges, copies, strict=True):
            counts[edge.stage is None] += (edge.producers or 0) * count
        limit = self.settings.log_max_bytes
        budget = limit * workers // (2 if all(counts.values()) else 1)
        if stage is None:
            limit = min(limit, self.settings.source_log_bytes)
        return max(min(limit, budget // max(counts[stage is None], 1)), 1)

    def edges_of_source(self, source: int) -> list[EdgePlan]:
        return [edge for edge in self.edges if edge.source == source]

    @property
    def terminal(self) -> list[StagePlan]:
        """Stages that feed no other: when these have finished, so has the query."""
        return [stage for stage in self.stages if not stage.edges_out]

    def describe_stream(self, edge_id: int, producer: int) -> str:
        edge = self.edges[edge_id]
        if edge.stage is not None:
            return f"stream {edge_id}.{producer} (from {self.stages[edge.stage].name}/{producer})"
        assert edge.source is not None
        return f"stream {edge_id}.{producer} (from partition {producer} of {self.sources[edge.source].name})"
