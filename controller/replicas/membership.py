"""The processes that take part, each life of a process by itself (design: incarnation).

Every life of a worker gets an id that is never used again; a slot is the Spark partition of its task, which Spark
fills again when an executor dies.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from controller.replicas.apart import Place
from controller.replicas.placement import Placement, placement_of
from flux.dataflow.plan import FromMicroBatches, Plan
from flux.host.notes import Pulse
from flux.wire.control import InStep, Register


class IngressTask(NamedTuple):
    """A Spark task that feeds ``edges`` with one Spark partition, whichever of its attempts runs."""

    edges: tuple[int, ...]
    partition: int

    @classmethod
    def of(cls, about: Register) -> IngressTask:
        return cls(tuple(about.edges), about.index)


def goes_on(plan: Plan, about: Register) -> bool:
    """Whether it is an ingress task for one of many batches: another task goes on with its streams."""
    return about.role == "ingress" and any(isinstance(plan.edges[edge], FromMicroBatches) for edge in about.edges)


@dataclass
class Member:
    """A registered process. ``heard``: time of its last sign of life; ``turned``: when its loop was last seen to turn, which
    it does not in a long step; ``pulse``, ``in_step``: what it is at, as it said last; ``cut``: its lifeline was reset;
    ``epoch``: of the table it goes by; ``shown``: of the one that was sent last on its connection; ``left``: an ingress
    task that has done its work; ``leaving``: a worker that is being emptied."""

    node: int
    connection: Hashable
    about: Register
    heard: float
    turned: float = 0.0
    pulse: Pulse | None = None
    in_step: InStep | None = None
    cut: bool = False
    stats: dict[str, Any] = field(default_factory=dict)
    progress: int = -1
    epoch: int = -1
    shown: int = -1
    left: bool = False
    leaving: bool = False

    @property
    def name(self) -> str:
        if self.about.role == "worker":
            return f"worker {self.node}"
        return (
            "the vault"
            if self.about.role == "vault"
            else f"ingress task {self.about.index} of edges {self.about.edges}"
        )

    @cached_property
    def place(self) -> Place:
        return Place.of(self.about.domain, self.about.host, self.about.executor)


class Membership:
    def __init__(self) -> None:
        self.workers: dict[int, Member] = {}
        self.ingress: dict[IngressTask, Member] = {}  # the newest attempt of each
        self.vault: Member | None = None
        self._nodes = 0
        self._found: dict[Hashable, Member] = {}  # by connection; it may have another by now, or be gone

    def admit(self, connection: Hashable, about: Register, now: float) -> Member:
        member = Member(self._nodes, connection, about, now, turned=now)
        self._nodes += 1
        if about.role == "worker":
            self.workers[member.node] = member
        elif about.role == "vault":
            self.vault = member
        else:
            key = IngressTask.of(about)
            # Once an attempt has finished, the task is finished: nobody waits for later attempts.
            member.left = key in self.ingress and self.ingress[key].left
            self.ingress[key] = member
        return member

    def forget(self, member: Member) -> None:
        """An ingress task that takes no part any more."""
        if self.knows(member):
            del self.ingress[IngressTask.of(member.about)]

    def knew(self, node: int) -> bool:
        """Whether there was ever a process of this id."""
        return 0 <= node < self._nodes

    def in_slot(self, slot: int) -> Member | None:
        return next((member for member in self.workers.values() if member.about.index == slot), None)

    def attempt(self, about: Register) -> Member | None:
        """The newest member for the same task."""
        if about.role == "worker":
            return self.in_slot(about.index)
        if about.role == "vault":
            return self.vault
        return self.ingress.get(IngressTask.of(about))

    def knows(self, member: Member) -> bool:
        """Whether it still takes part."""
        if member.about.role == "worker":
            return self.workers.get(member.node) is member
        if member.about.role == "vault":
            return self.vault is member
        return self.ingress.get(IngressTask.of(member.about)) is member

    def by_connection(self, connection: Hashable) -> Member | None:
        found = self._found.get(connection)
        if found is None or found.connection != connection or not self.knows(found):
            found = next((member for member in self.processes() if member.connection == connection), None)
            if found is None or len(self._found) > 2 * len(self.processes()):
                self._found.clear()  # of connections that are long gone
            if found is not None:
                self._found[connection] = found
        return found

    def processes(self) -> list[Member]:
        vault = [] if self.vault is None else [self.vault]
        return [*self.workers.values(), *self.ingress.values(), *vault]

    @property
    def leaving(self) -> list[int]:
        return [node for node, member in self.workers.items() if member.leaving]

    @property
    def places(self) -> dict[int, Place]:
        """Where each worker is."""
        return {node: member.place for node, member in self.workers.items()}

    def placement(self, same_executor: bool, leaving: Iterable[int] | None = None) -> Placement:
        """The placement for the workers of this moment, or as if others were ``leaving``."""
        return placement_of(self.places, self.leaving if leaving is None else leaving, same_executor)
