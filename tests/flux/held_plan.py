"""A plan of a service that is a dictionary."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from flux.errors import UsageError
from flux.registry.convergence import PlanParts
from flux.registry.definitions import QueryDefinition, RegisteredQuery

STREAMS = ("clicks", "users")


class HeldPlan:
    """A plan that lasts, as one with a checkpoint location. ``effect`` is called before and after each change."""

    def __init__(self, effect: Callable[[], None]) -> None:
        self.queries: dict[str, list[str]] = {}
        self.streams: set[str] = set()
        self.failed: dict[str, str] = {}
        self.outputs: set[str] = set()
        self.refused: set[str] = set()
        #: Streams that the plan has been asked to leave, in order, which it does not read.
        self.forgotten: list[str] = []
        #: Bytes of state by query.
        self.state: dict[str, int] = {}
        self._effect = effect

    def read_by(self, definition: QueryDefinition) -> list[str]:
        return definition.sql.split()

    def schema_of(self, definition: QueryDefinition) -> str:
        return "`n` BIGINT"

    def parts(self) -> PlanParts:
        return PlanParts(dict(self.queries), set(self.streams), dict(self.failed))

    def add(self, query: RegisteredQuery) -> None:
        self._effect()
        assert query.name not in self.queries
        for name in query.reads:
            assert name in self.queries or name in STREAMS, f"{query.name} reads {name}, which is not there"
        if query.name in self.refused:
            raise UsageError("a worker cannot have it")
        self.outputs.add(query.name)
        self._effect()
        self.streams |= set(query.reads) & set(STREAMS)
        self.queries[query.name] = query.reads
        self.failed.pop(query.name, None)
        self._effect()

    def take(self, name: str) -> None:
        self._effect()
        assert all(name not in reads for reads in self.queries.values()), f"{name} is still read"
        self.queries.pop(name, None)
        self.streams.discard(name)
        self.failed.pop(name, None)
        self._effect()

    def forget_unread(self, names: Iterable[str]) -> None:
        self.forgotten += [name for name in names if name in STREAMS and name not in self.streams]

    def state_bytes(self) -> dict[str, int]:
        return self.state

    def forget_output(self, name: str) -> None:
        self._effect()
        self.outputs.discard(name)
        self._effect()
