"""Members: the processes that take part in a query, each life of a process by itself (design: incarnation).

Every life of a worker gets an id that is never used again; a slot is the Spark partition of its task, which Spark
fills again when an executor dies.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from controller.replicas.placement import Placement, placement_of
from controller.replicas.spread import WorkerPlace
from flux.dataflow.plan import FromMicroBatches, Plan
from flux.wire.control import Heartbeat, InStep, Register
from flux.wire.pulse import Pulse


class IngressTaskId(NamedTuple):
    """The id of a Spark task that feeds ``edges`` with one Spark partition, whichever of its attempts runs."""

    edges: tuple[int, ...]
    partition: int

    @classmethod
    def of(cls, about: Register) -> IngressTaskId:
        return cls(tuple(about.edges), about.index)


def goes_on(plan: Plan, about: Register) -> bool:
    """Tell whether a task is an ingress task for one of many micro-batches, so that another task goes on with its streams."""
    edges = [plan.edges[edge] for edge in about.edges if edge in plan.edges]
    return about.role == "ingress" and any(isinstance(edge, FromMicroBatches) for edge in edges)


@dataclass
class Member:
    """A registered process."""

    node: int
    connection: Hashable
    about: Register
    #: Time of its last sign of life.
    heard: float
    #: Time at which its loop was last seen to turn. In a long step it does not.
    turned: float = 0.0
    #: Its activity, by its last pulse.
    pulse: Pulse | None = None
    #: Its long call of user code, by its last report.
    in_step: InStep | None = None
    #: Its lifeline was reset.
    cut: bool = False
    #: By its last heartbeat; so is ``progress``. A heartbeat may lack the figures of some stages, which are as they were told
    #: last.
    stats: dict[str, Any] = field(default_factory=dict)
    progress: int = -1
    #: The epoch of the table that it goes by.
    epoch: int = -1
    #: The epoch of the table that was sent last on its connection.
    shown: int = -1
    #: The newest version of the plan that it has confirmed.
    plan: int = 0
    #: An ingress task that has done its work.
    left: bool = False
    #: A worker that is being emptied.
    leaving: bool = False

    def take(self, message: Heartbeat, now: float, stages: Container[int]) -> None:
        """Take a heartbeat. ``stages``: the ids of those that are there."""
        before, stats = self.stats.get("stages", ()), dict[str, Any](message.stats)
        if "stages" in stats:
            known = {each.get("stage"): each for each in before if each.get("stage") in stages}
            stats["stages"] = list((known | {each.get("stage"): each for each in stats["stages"]}).values())
        self.heard = self.turned = now
        self.stats, self.progress = stats, message.progress

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
    def place(self) -> WorkerPlace:
        return WorkerPlace.of(self.about.domain, self.about.host, self.about.executor)


class Membership:
    """All members. A worker's id counts the processes that have ever registered."""

    def __init__(self) -> None:
        self.workers: dict[int, Member] = {}
        self.ingress: dict[IngressTaskId, Member] = {}  # the newest attempt of each
        self.vault: Member | None = None
        #: All members, workers first. It is a new list whenever a process joins or goes, or a worker begins to leave, and never
        #: changes itself: answers that were worked out for one list hold as long as it is this one.
        self.processes: list[Member] = []
        self._nodes = 0
        self._found: dict[
            Hashable, Member
        ] = {}  # by connection; a member may have another connection by now, or be gone

    def admit(self, connection: Hashable, about: Register, now: float) -> Member:
        member = Member(self._nodes, connection, about, now, turned=now)
        self._nodes += 1
        if about.role == "worker":
            self.workers[member.node] = member
        elif about.role == "vault":
            self.vault = member
        else:
            key = IngressTaskId.of(about)
            # When an attempt has finished, the task is finished, and later attempts have nothing to do.
            member.left = key in self.ingress and self.ingress[key].left
            self.ingress[key] = member
        self._changed()
        return member

    def forget(self, member: Member) -> None:
        """Forget an ingress task that takes no part any more."""
        if self.knows(member):
            del self.ingress[IngressTaskId.of(member.about)]
            self._changed()

    def remove(self, worker: int) -> Member:
        """Take a worker out, and return it."""
        member = self.workers.pop(worker)
        self._changed()
        return member

    def empty(self, worker: int) -> None:
        """Note that a worker is being emptied."""
        self.workers[worker].leaving = True
        self._changed()

    def _changed(self) -> None:
        vault = [] if self.vault is None else [self.vault]
        self.processes = [*self.workers.values(), *self.ingress.values(), *vault]

    def knew(self, node: int) -> bool:
        """Tell whether there was ever a process of this id."""
        return 0 <= node < self._nodes

    def in_slot(self, slot: int) -> Member | None:
        return next((member for member in self.workers.values() if member.about.index == slot), None)

    def attempt(self, about: Register) -> Member | None:
        """Return the newest member for the same task."""
        if about.role == "worker":
            return self.in_slot(about.index)
        if about.role == "vault":
            return self.vault
        return self.ingress.get(IngressTaskId.of(about))

    def knows(self, member: Member) -> bool:
        """Tell whether a process still takes part."""
        if member.about.role == "worker":
            return self.workers.get(member.node) is member
        if member.about.role == "vault":
            return self.vault is member
        return self.ingress.get(IngressTaskId.of(member.about)) is member

    def by_connection(self, connection: Hashable) -> Member | None:
        """Return the process that talks on a connection. Each message asks, so answers are remembered as long as they are
        true."""
        found = self._found.get(connection)
        if found is None or found.connection != connection or not self.knows(found):
            found = next((member for member in self.processes if member.connection == connection), None)
            if found is None or len(self._found) > 2 * len(self.processes):
                self._found.clear()  # drops connections that are long gone
            if found is not None:
                self._found[connection] = found
        return found

    @property
    def leaving(self) -> list[int]:
        return [node for node, member in self.workers.items() if member.leaving]

    @property
    def places(self) -> dict[int, WorkerPlace]:
        """The place of each worker."""
        return {node: member.place for node, member in self.workers.items()}

    def placement(self, same_executor: bool, leaving: Iterable[int] | None = None) -> Placement:
        """Make the placement for the workers of this moment, or as if others were ``leaving``."""
        return placement_of(self.places, self.leaving if leaving is None else leaving, same_executor)
