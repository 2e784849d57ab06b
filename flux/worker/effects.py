"""Requests of a worker's state machine to its shell, in one list for all its parts, and the links that they need (design: links).

A worker greets every worker that hosts consumers of its streams, sends orders and copies of state to the other replicas of
its primaries, and answers all other workers on their own connections. Moves and repairs change these workers: if links were
never closed, a worker of a large cluster would have one to every other worker after a while.

``WorkerExtension`` is the part of a worker of a special kind.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import pyarrow as pa

from flux.dataflow.plan import Plan
from flux.errors import FluxError
from flux.exchange.producer import ToWorker
from flux.operators.user_code import described, encodable, shortened, text_of
from flux.replica.order_exchange import CaughtUp, Diverged
from flux.state.sender import Aside
from flux.wire.control import (
    Checkpointed,
    EdgeBorn,
    Failure,
    GetPlan,
    PartitionFinished,
    PlanSeen,
    ReplicaCaughtUp,
    ReplicaDiverged,
    TableSeen,
    Unreached,
)
from flux.wire.messages import Answered, Installed
from partitioning.table import Table

if TYPE_CHECKING:
    from flux.worker.core import WorkerCore
    from flux.worker.source_scheduler import SourceScheduler

#: The connection of a worker to itself.
LOCAL = "local"


class ToConnection(msgspec.Struct, frozen=True):
    """Effect: answer on a connection to the data port."""

    connection: Hashable
    message: Answered
    payload: bytes | pa.Buffer | None = None


class ToController(msgspec.Struct, frozen=True):
    """Effect: report to the controller."""

    message: (
        PartitionFinished
        | TableSeen
        | ReplicaCaughtUp
        | ReplicaDiverged
        | Checkpointed
        | Unreached
        | PlanSeen
        | GetPlan
        | EdgeBorn
        | Failure
    )


Effect = ToWorker | ToConnection | ToController | Aside


def to_control(node: int, report: CaughtUp | Diverged) -> ReplicaCaughtUp | ReplicaDiverged:
    """Return the report for the controller about an observation of a primary on this worker."""
    kind = ReplicaCaughtUp if isinstance(report, CaughtUp) else ReplicaDiverged
    return kind(node=node, **vars(report))


#: Seconds for which an unneeded link stays open: a move that comes back, or the next of several repairs, finds it open, and the
#: last answers have come by then.
GRACE_S = 5.0


def needed_workers(core: WorkerCore) -> set[int]:
    """Return the workers with consumers of this worker's streams, those with other replicas of its primaries, the vault if it is
    asked for a state, and those over which messages go."""
    found: set[int] = set()
    for producer in core.producers.values():
        found |= producer.readers
    for replica in core.replicas.values():
        found |= replica.order.peers.keys()
    return found | core.reaches | core.shadows.reaches | core.relays.reaches


def taken_reports(effects: deque[Effect]) -> list[ToController]:
    """Take the reports out of pending effects. A change of the plan is done when the slowest worker has reported the table, and
    with many stages everything else takes longer than to follow the table."""
    found = [effect for effect in effects if isinstance(effect, ToController)]
    if found:
        others = [effect for effect in effects if not isinstance(effect, ToController)]
        effects.clear()
        effects.extend(others)
    return found


class UnneededLinks:
    """The unneeded links of a worker, with the time since which each has had nothing to do."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._since: dict[int, float] = {}

    def look(self, linked: Iterable[int], needed: set[int], now: float) -> list[int]:
        """List the workers whose link has not been needed for the grace time."""
        self._since = {worker: self._since.get(worker, now) for worker in linked if worker not in needed}
        return [worker for worker, since in self._since.items() if now - since >= self._grace_s]


class WorkerExtension(Protocol):
    """The part that a worker of a special kind has beside those of every worker: the vault (``flux.vault.vault``) is one."""

    @property
    def written(self) -> tuple[int, int, int]:
        """Counts of writes to a disk: bytes in all, bytes of orders, and slices named by these orders."""

    @property
    def reaches(self) -> set[int]:
        """Workers with which a state is exchanged other than between replicas."""

    def on_table(self, table: Table) -> None:
        """Note a newer table, before the worker follows it."""

    def on_followed(self, now: float) -> None:
        """Note that the worker has followed a newer table."""

    def on_message(self, message: Any, now: float) -> bool:
        """Take a message from the data port that no other part takes. Return False if it is of no known kind."""

    def on_installed(self, worker: int, answer: Installed, now: float) -> None:
        """Take the answer to a part of a copy of state."""

    def passed(self, effects: Iterator[Effect], now: float) -> Iterator[Effect]:
        """Yield the effects that may leave the worker now. The others are held until a later call."""

    def due(self) -> float:
        """Return the time at which ``passed`` must be called again at the latest, if nothing happens before."""


class StageFailures:
    """Errors of the user's code on this worker, by the stage that they end (design: stage-fails)."""

    def __init__(self, worker: int, tell: Callable[[ToController], None]) -> None:
        self._worker = worker
        self._tell = tell
        self._failures: dict[int, Failure] = {}

    def take(self, plan: Plan, stage: int, error: FluxError) -> None:
        """Take an error in a stage. Raises it, and so ends the query, unless the user has asked that only the stage ends. A stage
        that has been removed meanwhile has no errors any more."""
        if plan.settings.on_failure != "stage":
            raise error
        if stage in plan.stages and stage not in self._failures:
            self._failures[stage] = failure_of(self._worker, error, stage)
            self._tell(ToController(self._failures[stage]))

    @contextmanager
    def of_readers(self, plan: Plan, reading: SourceScheduler) -> Iterator[None]:
        """Take an error of a reader as one of all stages that read its source. Raises any other error."""
        try:
            yield
        except FluxError as error:
            source, reading.failing = reading.failing, -1
            stages = sorted({edge.consumer for edge in plan.edges_of_source(source)})
            if not stages:
                raise
            for stage in stages:
                self.take(plan, stage, error)

    def report_again(self, plan: Plan) -> None:
        """Repeat the reports about stages that are still there, because they may be lost."""
        self._failures = {stage: failure for stage, failure in self._failures.items() if stage in plan.stages}
        for failure in self._failures.values():
            self._tell(ToController(failure))


def failure_of(node: int, error: BaseException, stage: int = -1) -> Failure:
    """Return the error that ends the query, as the controller is told, or only a ``stage``. An error that is not one of Flux's is
    a defect: it has all of its frames."""
    if isinstance(error, FluxError):
        message = shortened(text_of(error, lambda failed: failed.summary))
        trace = encodable(error.traceback)
        return Failure(node=node, kind=type(error).__name__, message=message, traceback=trace, stage=stage)
    frames = shortened(encodable("".join(traceback.format_exception(error)).rstrip()))
    message = f"worker {node} ended by {described(error)}"
    return Failure(node=node, kind="QueryFailed", message=message, traceback=frames, stage=stage)
