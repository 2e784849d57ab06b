"""The versions of a plan in a checkpoint location: ids, versions and shares of log by the names of parts (design: kept-versions),
and the births of streams that have come to running sources (design: kept-births).

They stand in ``flux.json`` beside the description of the newest plan, and are written with it, as one document: a version is kept
as a whole, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from flux.dataflow.plan import Plan, SourcePlan, StagePlan
from flux.errors import UsageError
from flux.exchange.timed_rows import columns_read
from flux.wire.control import EdgeStored
from flux.wire.messages import Mark

#: The key of the versions in the description of a location.
VERSIONS = "versions"
#: Failed stages whose names are kept.
FAILED_KEPT = 1000


class KeptStage(msgspec.Struct, frozen=True):
    """A stage of the newest version."""

    number: int
    #: The version that brought it.
    since: int
    #: The ids of the edges that it reads, in the order of its inputs, and their shares of log; None: computed from the first
    #: version.
    edges: list[int]
    log_bytes: list[int | None]
    #: The edges that it fed when it began, some of which may be gone.
    first_edges: list[int]


class KeptSource(msgspec.Struct, frozen=True):
    """A source of the newest version."""

    number: int
    since: int
    #: The columns that the edges of its beginning read, by position: rows that are read again are compared by these. None: all.
    read: list[int] | None


class GoneName(msgspec.Struct, frozen=True):
    """The name of a part that was removed: it was taken in versions from ``since`` on, and free from ``until`` on."""

    name: str
    since: int
    until: int


class KeptBirth(msgspec.Struct, frozen=True):
    """The row or batch with which a stream of a running source has begun."""

    edge: int
    #: The partition of the source.
    producer: int
    number: int
    #: The newest point before it from which the source can be read again.
    mark: Mark

    def stored(self) -> EdgeStored:
        return EdgeStored(edge=self.edge, producer=self.producer, number=self.number, mark=self.mark)


class PlanRecord(msgspec.Struct, frozen=True):
    """The newest version of a plan, and of each part the version that brought it."""

    version: int
    #: Ids below these have been given: of sources, stages and edges.
    used: tuple[int, int, int]
    #: The numbers of streams of sources and of stages in the first version.
    first_streams: tuple[int, int]
    stages: dict[str, KeptStage]
    sources: dict[str, KeptSource]
    gone: list[GoneName] = []
    #: Stages that have failed and were taken out, and were not added again.
    failed: list[str] = []
    #: The births of streams of this version.
    births: list[KeptBirth] = []

    @classmethod
    def of(
        cls,
        plan: Plan,
        before: PlanRecord | None = None,
        failed: Iterable[str] = (),
        births: Iterable[EdgeStored] = (),
    ) -> PlanRecord:
        """Describe a plan; ``before``: the version that the location has; ``failed``: stages that have failed in this life;
        ``births`` beside those that the location has."""
        stages = {stage.name: _stage(plan, stage) for stage in plan.stages}
        sources = {source.name: _source(plan, source) for source in plan.sources}
        known = [] if before is None else before.failed
        return cls(
            plan.version, plan.next_ids(), plan.first_streams or plan.counted_streams(), stages, sources,
            [] if before is None else before._gone_in_next(plan.version, stages, sources),
            [name for name in dict.fromkeys([*known, *failed]) if name not in stages][-FAILED_KEPT:],
            [] if before is None else before.births,
        ).with_births(births)  # fmt: skip

    @classmethod
    def read(cls, about: Mapping[str, Any]) -> PlanRecord | None:
        """Return the versions of a location by its description; None: an earlier release has written it. UsageError: they cannot
        be read."""
        if VERSIONS not in about:
            return None
        try:
            return msgspec.convert(about[VERSIONS], cls)
        except msgspec.ValidationError as error:
            raise UsageError(
                f"the versions of the plan in the checkpoint location cannot be read: {error}. Start the release of Flux that "
                "has written them"
            ) from error

    def told(self) -> dict[str, Any]:
        """Return them as data for JSON."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    def without(self, names: Iterable[str], sources: Iterable[str]) -> PlanRecord:
        """Return the next version, without these stages and sources."""
        names, sources = frozenset(names), frozenset(sources)
        stages = {name: stage for name, stage in self.stages.items() if name not in names}
        left = {name: source for name, source in self.sources.items() if name not in sources}
        gone, version = self._gone_in_next(self.version + 1, stages, left), self.version + 1
        made = msgspec.structs.replace(self, version=version, stages=stages, sources=left, gone=gone)
        return made.with_births([])

    def with_births(self, births: Iterable[EdgeStored]) -> PlanRecord:
        """Return the same version with further births, and with those of its own edges alone."""
        edges = {edge for stage in self.stages.values() for edge in stage.edges}
        known = {(each.edge, each.producer): each for each in self.births}
        known |= {
            (each.edge, each.producer): KeptBirth(each.edge, each.producer, each.number, each.mark) for each in births
        }
        left = [each for (edge, _), each in sorted(known.items()) if edge in edges]
        return msgspec.structs.replace(self, births=left)

    def gone_in(self, version: int) -> frozenset[str]:
        """Return the names that were taken in a version, and whose parts are gone."""
        return frozenset(each.name for each in self.gone if each.since <= version < each.until)

    def _gone_in_next(
        self, version: int, stages: Mapping[str, KeptStage], sources: Mapping[str, KeptSource]
    ) -> list[GoneName]:
        """Return the names that are gone in a later version with these parts. A name is forgotten when
        none of the parts can have met it."""
        before: list[tuple[str, KeptStage | KeptSource]] = [*self.stages.items(), *self.sources.items()]
        there = {(name, each.number) for parts in (stages, sources) for name, each in parts.items()}
        gone = [GoneName(name, part.since, version) for name, part in before if (name, part.number) not in there]
        since = {part.since for part in stages.values()} | {part.since for part in sources.values()}
        return [each for each in (*self.gone, *gone) if any(each.since <= of < each.until for of in since)]


def _stage(plan: Plan, stage: StagePlan) -> KeptStage:
    edges = [plan.edges[edge] for edge in stage.edges_in]
    shares = [edge.log_bytes for edge in edges]
    return KeptStage(stage.id, stage.since, [edge.id for edge in edges], shares, list(stage.edges_at_birth))


def _source(plan: Plan, source: SourcePlan) -> KeptSource:
    read_by = source.first_edges or plan.edges_of_source(source.id)
    return KeptSource(source.id, source.since, columns_read(source.event_time, read_by))
