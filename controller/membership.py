"""Which processes take part, in which life (DESIGN 2, 4).

Every life of a worker gets an id that is never used again; a slot is the Spark partition of its task, which Spark
fills again when an executor dies.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from controller.apart import Place, Spread
from controller.wording import listed
from flux.control import InStep, Register
from flux.pulse import Pulse


@dataclass
class Member:
    """A registered process. ``heard``: time of its last sign of life; ``turned``: when its loop was last seen to turn, which
    it does not in a long step; ``pulse``, ``in_step``: what it is at, as it said last; ``cut``: its lifeline was reset;
    ``epoch``: of the table it goes by; ``left``: an ingress task that has done its work; ``leaving``: a worker that is
    being emptied."""

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
    left: bool = False
    leaving: bool = False

    @property
    def place(self) -> Place:
        return Place.of(self.about.domain, self.about.host, self.about.executor)


class Membership:
    def __init__(self) -> None:
        self.workers: dict[int, Member] = {}
        self.ingress: dict[tuple[tuple[int, ...], int], Member] = {}  # (edges, Spark partition) -> newest attempt
        self._nodes = 0

    def admit(self, connection: Hashable, about: Register, now: float) -> Member:
        member = Member(self._nodes, connection, about, now, turned=now)
        self._nodes += 1
        if about.role == "worker":
            self.workers[member.node] = member
        else:
            key = tuple(about.edges), about.index
            # What one attempt has finished stays finished: nothing depends on those that come after it.
            member.left = key in self.ingress and self.ingress[key].left
            self.ingress[key] = member
        return member

    def knew(self, node: int) -> bool:
        """Whether there was ever a process of this id."""
        return 0 <= node < self._nodes

    def in_slot(self, slot: int) -> Member | None:
        return next((member for member in self.workers.values() if member.about.index == slot), None)

    def attempt(self, about: Register) -> Member | None:
        """The newest member that plays the same part."""
        if about.role == "worker":
            return self.in_slot(about.index)
        return self.ingress.get((tuple(about.edges), about.index))

    def by_connection(self, connection: Hashable) -> Member | None:
        everyone = [*self.workers.values(), *self.ingress.values()]
        return next((member for member in everyone if member.connection == connection), None)

    def processes(self) -> Iterable[Member]:
        return [*self.workers.values(), *self.ingress.values()]

    @property
    def leaving(self) -> list[int]:
        return [node for node, member in self.workers.items() if member.leaving]

    def spread(self) -> Spread:
        """How far apart the workers of this moment are."""
        places = {node: member.place for node, member in self.workers.items()}
        return Spread(places, [node for node, member in self.workers.items() if not member.leaving])

    def obstacle(self, worker: int, others: Iterable[int], same_executor: bool) -> str | None:
        """Why a worker may not hold a copy of a partition of which ``others`` hold one; None: it may."""
        member = self.workers.get(worker)
        if member is None:
            return f"there is no worker {worker}; there are {listed(sorted(self.workers))}"
        if member.leaving:
            return f"worker {worker} is leaving"
        for other in others:
            if other == worker:
                return f"worker {worker} holds a copy already"
            beside = self.workers.get(other)
            if not same_executor and beside is not None and beside.about.executor == member.about.executor:
                return (
                    f"worker {worker} is on the same executor as worker {other}, which holds another copy; "
                    "spark.flux.replicas.allowSameExecutor would allow it"
                )
        return None
