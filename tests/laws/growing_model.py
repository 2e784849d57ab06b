"""A model of edges that begin at a step, for random schedules (design: edge-begins).

A partition has two copies, which take the same steps in the order of the product's ``OrderLog``. Two changes of the plan come:
the first gives the partition a second edge, the second takes the first edge away. Meanwhile steps are ordered, committed and
applied, copies of the state are taken and installed, and copies are lost. Consumers read each edge from any copy, and go over to
another.

``WITHOUT`` names the rules that a model may be made without, each of which a law must catch.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from flux.replica.order_log import OrderLog
from flux.wire.messages import OrderEntry, StepKind
from partitioning.table import ReplicaAt

OLD, NEW = 0, 1
#: Elements of a log, by the version of the plan that a process follows, if shares are those of the current plan.
SHARE, SHARES = 6, (6, 3, 6)
STEPS = 40
#: Events of a schedule after which it must have come to its end.
EVENTS_MAX = 20_000
WITHOUT = (
    "steps", "closing", "numbers from 0", "edges in copies", "shares at birth", "plan before table", "marks by edge",
)  # fmt: skip


class GrowingLawBroken(AssertionError):
    """A law that a schedule has broken."""


def edges_of(version: int) -> set[int]:
    """Return the edges that a partition feeds behind the step of a version."""
    return ({OLD}, {OLD, NEW}, {NEW})[version]


@dataclass
class ModelLog:
    """The stream of one copy on one edge: elements ``base`` to the end, each with the step that gave it."""

    base: int = 0
    steps: list[int] = field(default_factory=list)
    #: Elements from here on belong to steps that are not committed.
    held: int | None = None

    @property
    def end(self) -> int:
        return self.base + len(self.steps)

    def drop(self, below: int) -> None:
        del self.steps[: max(below - self.base, 0)]
        self.base = max(self.base, below)


@dataclass
class ModelState:
    """A snapshot of the state of one copy."""

    applied: int
    outlets: dict[int, ModelLog]
    marks: list[tuple[int, dict[int, int]]]
    entries: list[OrderEntry]
    committed: int
    version: int


class ModelCopy:
    """One copy of the partition."""

    def __init__(self, model: GrowingModel, worker: int) -> None:
        self.model, self.worker = model, worker
        self.order = OrderLog()
        self.applied = self.version = 0
        self.outlets = {OLD: ModelLog()}
        #: The start of each held step, by edge.
        self.marks: list[tuple[int, dict[int, int]]] = []
        #: The version of the table that the copy follows, and the newest plan that it knows.
        self.table = self.plan = 0

    # ---- the plan

    def on_table(self, version: int) -> None:
        if self.plan < version and "plan before table" not in self.model.without:
            return  # the copy asks for the plan first
        self.table = version
        if "steps" in self.model.without:
            self.change(version)
        for edge in [each for each in self.outlets if each not in edges_of(version) and version > each]:
            if "closing" not in self.model.without:
                del self.outlets[edge]

    def change(self, version: int) -> None:
        known = edges_of(min(version, self.plan))
        for edge in sorted(known - self.outlets.keys()):
            if edge == NEW and self.version < 1:
                other = self.outlets.get(OLD, ModelLog()).end
                self.outlets[edge] = ModelLog(other if "numbers from 0" in self.model.without else 0)
        self.version = max(self.version, version)

    # ---- steps

    def share(self, edge: int) -> int:
        return SHARES[self.table] if "shares at birth" in self.model.without else SHARE

    @property
    def has_room(self) -> bool:
        return all(len(log.steps) < self.share(edge) for edge, log in self.outlets.items())

    def decide(self, number: int) -> None:
        """Order the change of the table, or the next rows."""
        ordered = max([entry.version for entry in self.order.since(self.applied)], default=0)
        kind = StepKind.CHANGE if self.table > max(self.version, ordered) else StepKind.SLICES
        if kind is StepKind.CHANGE and "steps" not in self.model.without:
            self.order.append(OrderEntry(0.0, 0.0, [], kind, version=self.table))
        else:
            self.order.append(OrderEntry(0.0, 0.0, [(9, 0, number)]))

    def ready(self, leads: bool) -> bool:
        if self.applied >= (self.order.end if leads else self.order.committed):
            return False
        entry = self.order[self.applied]
        if entry.kind is StepKind.CHANGE:
            return self.table >= entry.version
        return self.has_room

    def apply(self) -> None:
        entry = self.order[self.applied]
        if self.applied >= self.order.committed:
            self.marks.append((self.applied, {edge: log.end for edge, log in self.outlets.items()}))
        if entry.kind is StepKind.CHANGE:
            self.change(entry.version)
        else:
            for _, log in sorted(self.outlets.items()):
                log.steps.extend([entry.slices[0][2]] * (1 + self.applied % 2))
        self.applied += 1
        self.release()

    def release(self) -> None:
        while self.marks and self.marks[0][0] < self.order.committed:
            self.marks.pop(0)
        starts = self.marks[0][1] if self.marks else {}
        if "marks by edge" in self.model.without:
            for log, start in zip(self.outlets.values(), [*starts.values(), *[None] * len(self.outlets)], strict=False):
                log.held = start
            return
        for edge, log in self.outlets.items():  # an edge that began behind the mark has nothing in front of it
            log.held = starts.get(edge, 0) if self.marks else None

    # ---- copies

    def state(self) -> ModelState:
        return ModelState(
            self.applied,
            {edge: ModelLog(log.base, list(log.steps)) for edge, log in self.outlets.items()},
            [(step, dict(starts)) for step, starts in self.marks],
            self.order.since(self.applied),
            self.order.committed,
            self.version,
        )

    def adopt(self, state: ModelState) -> None:
        self.applied, self.version, self.marks = state.applied, state.version, state.marks
        self.order = OrderLog.copied_from(state.applied, state.entries, state.committed)
        kept = {OLD} if "edges in copies" in self.model.without else state.outlets.keys()
        self.outlets = {edge: log for edge, log in state.outlets.items() if edge in kept}
        if "closing" not in self.model.without and self.table == 2:
            self.outlets.pop(OLD, None)
        self.release()


class ModelReader:
    """The consumer of one edge. It reads from one copy at a time, and acks to all."""

    def __init__(self, edge: int) -> None:
        self.edge, self.next = edge, 0
        self.got: list[int] = []


class GrowingModel:
    """One schedule, by a seed."""

    def __init__(self, seed: int, without: Iterable[str] = ()) -> None:
        self.without = frozenset(without)
        self.random = random.Random(seed)
        self.copies = {0: ModelCopy(self, 0), 1: ModelCopy(self, 1)}
        self.leader = 0
        self.version = 0
        self.workers = 2
        self.rows = 0
        self.epoch = 0
        self.readers = {OLD: ModelReader(OLD)}
        #: By edge and number, the step of an element that some copy has shown.
        self.shown: dict[tuple[int, int], int] = {}
        #: The steps, by their rows, in the order that was committed; ``None`` in the place of a change.
        self.committed: list[int | None] = []
        self._rows_committed: set[int | None] = set()
        self._coming: tuple[int, ModelState] | None = None
        self._lead()

    def _lead(self) -> None:
        self.epoch += 1
        leader = self.copies[self.leader]
        leader.order.lead([ReplicaAt(w, 0) for w in self.copies if w != self.leader], leader.applied)

    # ---- events

    def run(self) -> None:
        changes = sorted(self.random.sample(range(10, 400), 2))
        for event in range(EVENTS_MAX):
            if changes and event >= changes[0] and self._all_follow():
                changes.pop(0)
                self.version += 1
                if self.version == 1:
                    self.readers[NEW] = ModelReader(NEW)
                else:
                    del self.readers[OLD]
            self.random.choice(
                [self._order, self._tell, self._tell, self._apply, self._apply, self._read, self._read, self._table]
                + [self._plan, self._copy, self._kill] * (event % 3 == 0)
            )()
            self._check()
            if self.rows == STEPS and not changes and self._done():
                return self._check_end()
        raise GrowingLawBroken(f"the partition stands still after {self.rows} steps: {self._where()}")

    def _where(self) -> str:
        return ", ".join(
            f"{w}: {c.applied}/{c.order.committed}/{c.order.end} { {e: len(log.steps) for e, log in c.outlets.items()} }"
            for w, c in self.copies.items()
        )

    def _all_follow(self) -> bool:
        return all(copy.table == self.version for copy in self.copies.values()) and self._coming is None

    def _done(self) -> bool:
        leader = self.copies[self.leader]
        caught_up = all(copy.applied == leader.order.end for copy in self.copies.values())
        logs = [(edge, log.end) for edge, log in leader.outlets.items() if edge in self.readers]
        return caught_up and len(self.copies) == 2 and all(self.readers[edge].next == end for edge, end in logs)

    def _order(self) -> None:
        leader = self.copies[self.leader]
        if leader.applied == leader.order.end and (self.rows < STEPS or leader.table > leader.version):
            before = leader.order.end
            leader.decide(self.rows)
            self.rows += leader.order[before].kind is StepKind.SLICES

    def _tell(self) -> None:
        leader = self.copies[self.leader]
        for worker, copy in self.copies.items():
            if worker != self.leader:
                first = leader.order.peers[worker].acked or 0
                below = min(first + self.random.randint(0, 2), leader.order.end)
                entries = [leader.order[step] for step in range(first, below)]
                copy.order.on_orders(self.epoch, first, entries, leader.order.committed, copy.applied)
                leader.order.on_seen(worker, 0, copy.order.verified, copy.applied)
                copy.release()
        leader.release()

    def _apply(self) -> None:
        worker = self.random.choice(sorted(self.copies))
        copy = self.copies[worker]
        if copy.ready(worker == self.leader):
            copy.apply()

    def _table(self) -> None:
        self.copies[self.random.choice(sorted(self.copies))].on_table(self.version)

    def _plan(self) -> None:
        self.copies[self.random.choice(sorted(self.copies))].plan = self.version

    def _copy(self) -> None:
        """Take a copy of the primary's state, or install one that was taken before."""
        if len(self.copies) == 2:
            return
        if self._coming is None:
            leader = self.copies[self.leader]
            self._coming = self.workers, leader.state()
            leader.order.lead([ReplicaAt(self.workers, 0, False)], leader.applied)
            leader.order.note_copy(self.workers, leader.applied)
            leader.order.note_copy_arrived(self.workers)
            return
        worker, state = self._coming
        leader = self.copies[self.leader]
        made = ModelCopy(self, worker)
        made.plan = made.table = self.random.choice([leader.table, self.version])
        made.adopt(state)
        self.copies[worker], self._coming = made, None
        self.workers += 1
        self._lead()

    def _kill(self) -> None:
        """Lose the primary or the other copy, if its partner has all committed steps."""
        if len(self.copies) == 2 and self.random.random() < 0.1:
            other = next(worker for worker in self.copies if worker != self.leader)
            leader = self.copies[self.leader]
            if self.random.random() < 0.5 and self.copies[other].order.verified >= leader.order.committed:
                del self.copies[self.leader]
                self.leader = other
                self.rows = 1 + max(
                    [entry.slices[0][2] for entry in self.copies[other].order.since(0) if entry.slices]
                    + [step for step in self.committed if step is not None],
                    default=-1,
                )
            else:
                del self.copies[other]
            self._lead()

    def _read(self) -> None:
        for edge, reader in self.readers.items():
            copy = self.copies[self.random.choice(sorted(self.copies))]
            log = copy.outlets.get(edge)
            if log is None or copy.table < edge:
                continue
            end = log.end if log.held is None else min(log.held, log.end)
            if log.base <= reader.next < end:
                reader.got.append(log.steps[reader.next - log.base])
                reader.next += 1
            if self._coming is None:  # a copy under way holds acks back
                for each in self.copies.values():
                    if edge in each.outlets:
                        each.outlets[edge].drop(min(reader.next, each.outlets[edge].end))

    # ---- laws

    def _check(self) -> None:
        leader = self.copies[self.leader]
        for step in range(max(len(self.committed), leader.order.base), min(leader.order.committed, leader.order.end)):
            entry = leader.order[step]
            self.committed.append(None if entry.kind is StepKind.CHANGE else entry.slices[0][2])
            self._rows_committed.add(self.committed[-1])
        shares = {copy.share(edge) for copy in self.copies.values() for edge in copy.outlets}
        if len(shares) > 1:
            raise GrowingLawBroken(f"copies of a stream have logs of {sorted(shares)} elements")
        for copy in self.copies.values():
            for edge, log in copy.outlets.items():
                end = log.end if log.held is None else min(log.held, log.end)
                for number in range(log.base, end):
                    step = log.steps[number - log.base]
                    if step not in self._rows_committed:
                        raise GrowingLawBroken(f"edge {edge} shows step {step}, which is not committed")
                    if self.shown.setdefault((edge, number), step) != step:
                        raise GrowingLawBroken(
                            f"element {number} of edge {edge} is of step {step} on worker {copy.worker}, "
                            f"and was of step {self.shown[edge, number]} elsewhere"
                        )

    def _check_end(self) -> None:
        changes = [at for at, step in enumerate(self.committed) if step is None]
        began = changes[0] if changes else 0
        expected = [
            step for at, step in enumerate(self.committed) if step is not None and at > began for _ in range(1 + at % 2)
        ]
        if self.readers[NEW].got != expected:
            raise GrowingLawBroken(f"the new edge brought {self.readers[NEW].got}, not {expected}")
        for copy in self.copies.values():
            if OLD in copy.outlets and copy.table == 2:
                raise GrowingLawBroken(f"worker {copy.worker} keeps a closed edge")
