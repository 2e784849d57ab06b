"""Parts of a plan that is being compiled: sources, stages and edges by id, those of a running plan in front of new ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from flux.dataflow.plan import ById, DataFrameSourcePlan, EdgePlan, FromStage, Numbered, SourcePlan, StagePlan

Part = TypeVar("Part", bound=Numbered)


class Parts(Generic[Part]):
    """Parts of one kind by id, in ascending order. Parts that run already stay as they are; new ones get the ids behind them and
    may be replaced (design: additions)."""

    def __init__(self, running: ById[Part], first: int) -> None:
        """Begin with the parts of a running plan. ``first``: the id of the first new part."""
        self._running, self._first = running, first
        self._new: dict[int, Part] = {}

    @property
    def end(self) -> int:
        """Return the id of the next part."""
        return self._first + len(self._new)

    @property
    def new(self) -> list[Part]:
        """Return the parts that do not run yet."""
        return list(self._new.values())

    def runs(self, id_: int) -> bool:
        """Tell whether a part is one of the running plan."""
        return id_ in self._running

    def append(self, part: Part) -> None:
        """Add a part, which has the next id."""
        assert part.id == self.end, f"the next id is {self.end}: {part}"
        self._new[part.id] = part

    def __getitem__(self, id_: int) -> Part:
        return self._new[id_] if id_ in self._new else self._running[id_]

    def __setitem__(self, id_: int, part: Part) -> None:
        assert id_ in self._new, f"a part that runs is not replaced: {part}"
        self._new[id_] = part

    def __iter__(self) -> Iterator[Part]:
        yield from self._running
        yield from self._new.values()


class Nodes:
    """The sources, stages and edges that a plan has by now."""

    def __init__(self, sources: Parts[SourcePlan], stages: Parts[StagePlan], edges: Parts[EdgePlan]) -> None:
        self.sources, self.stages, self.edges = sources, stages, edges

    def delay_of(self, origin: SourcePlan | StagePlan) -> int:
        """Return the most microseconds by which rows may be late in any source behind an origin of rows."""
        if isinstance(origin, SourcePlan):
            return 0 if (time := self.sources[origin.id].event_time) is None else time.delay
        edges = [self.edges[number] for number in origin.edges_in]
        return max((self.delay_of(self._origin(edge)) for edge in edges), default=0)

    def all_end(self, origin: SourcePlan | StagePlan) -> bool:
        """Return whether all rows of an origin come from batch DataFrames."""
        if isinstance(origin, SourcePlan):
            return isinstance(origin, DataFrameSourcePlan)
        return all(self.all_end(self._origin(self.edges[number])) for number in origin.edges_in)

    def _origin(self, edge: EdgePlan) -> SourcePlan | StagePlan:
        return self.stages[edge.stage] if isinstance(edge, FromStage) else self.sources[edge.source]  # type: ignore[attr-defined]
