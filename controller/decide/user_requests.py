"""Changes of a running query that people ask for: moves, more workers and fewer (design: move, drain).

An impossible request changes nothing and raises a UsageError with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from controller.balance.rounds import Rounds
from controller.decide.board import Board
from controller.decide.departures import Departures
from controller.decide.driver_events import DriverEvents
from controller.decide.losses import Losses
from controller.decide.plan_changes import PlanChanges
from controller.decide.protection import Protection
from controller.decide.request_book import RequestBook
from controller.decide.slots import Slots, held_by
from controller.decide.sweep import Sweep
from controller.replicas.addition_tracker import AdditionTracker
from controller.replicas.moves import Move, MoveQueue
from controller.text import count, listed, named
from flux.dataflow.plan_change import PlanChange
from flux.errors import UsageError

#: Workers that a query may have, as in ``spark.flux.workers``.
WORKERS_MAX = 4096


class UserRequests:
    """The requests of people. ``book`` has the requests with their numbers. Requests with number 0 are not in it, because no
    client follows them."""

    def __init__(
        self,
        board: Board,
        slots: Slots,
        repairs: AdditionTracker,
        moving: MoveQueue,
        departures: Departures,
        losses: Losses,
        sweeper: Sweep,
        protecting: Protection,
        driver: DriverEvents,
        plans: PlanChanges,
        rounds: Callable[[], Rounds],
    ) -> None:
        self._board = board
        self._slots = slots
        self._repairs = repairs
        self._moving = moving
        self._departures = departures
        self._losses = losses
        self._sweeper = sweeper
        self._protecting = protecting
        self._driver = driver
        self._plans = plans
        self.book = RequestBook(board, repairs, departures, rounds, driver.missing_slots)

    # ---- moves

    def move(self, moves: Sequence[Move], why: str, now: float, request: int) -> None:
        """Move replicas, one after the other in topological order. UsageError, and nothing is moved: one of the moves is
        impossible. A second request for a move under way changes nothing."""
        board = self._board
        table = board.require_running("move partitions")
        asked = self._moving.ask(moves, why, table, board.placement(), request)
        if asked.problem is not None:
            raise UsageError(f"cannot move: {asked.problem}")
        if request:
            self.book.moves(request, asked.jobs)
        board.changed = True
        self._sweeper.sweep(now)

    # ---- how stages are protected

    def protect(self, stage: int, replicas: int | None, recovery: str | None, now: float, request: int) -> None:
        """Change number and kind of a stage's replicas from now on; None: no change. UsageError, and nothing changes: that is
        impossible. If the stage is like that already, the request is done at once."""
        change = self._protecting.ask(stage, replicas, recovery, now, request)
        if request:
            self.book.protect(request, self._board.wishes.plan.stages[stage], change)
        self._sweeper.sweep(now)

    # ---- stages that come and go

    def add(self, change: PlanChange, encoded: bytes, now: float, request: int) -> None:
        """Add stages and sources; all processes get the change as it was ``encoded``. UsageError, and nothing changes: that is
        impossible. PlanHasChanged: compile it by the newest plan."""
        asked = self._plans.add(change, encoded, now, request)
        if request:
            self.book.plan_change(request, asked.what, asked)

    def remove(self, name: str, cascade: bool, now: float, request: int) -> None:
        """Remove a stage or a source; ``cascade``: with all that depends on it. UsageError, and nothing changes: that is
        impossible."""
        asked = self._plans.remove(name, cascade, now, request)
        if request:
            self.book.plan_change(request, f"removal of {name}", asked)

    # ---- fewer workers

    def leave(self, workers: Sequence[int], why: str, now: float, request: int) -> None:
        """Empty workers and let them go: their replicas move to workers that stay, other workers read their partitions of
        sources, and their tasks end normally. UsageError, and nothing changes: the others could not hold all replicas."""
        table = self._board.require_running("drain a worker")
        self._check_known(workers, "drain")
        held = [held_by(table, worker) for worker in workers]
        self._leave(workers, why, now, request)
        wanted, them = self._slots.wanted, named("worker", workers)
        by = (
            f"request {request} drains {them}"
            if request
            else f"{them} {'leaves' if len(workers) == 1 else 'leave'}: {why}"
        )
        self.book.wanted_now(wanted, f"{by}, and {count(wanted, 'worker')} are wanted since")
        if request:
            self.book.drain(request, workers, sum(map(len, held)))

    def fail(self, worker: int, now: float, request: int) -> None:
        """Declare a worker lost, as if its connection had closed: a rehearsal."""
        self._board.require_running("fail a worker")
        self._check_known([worker], "fail")
        self._losses.give_up(self._board.members.workers[worker], "declared lost for a rehearsal", now, request)
        if request:
            self.book.fail(request, worker)

    def _check_known(self, workers: Sequence[int], to: str) -> None:
        known = self._board.members.workers
        for worker in workers:
            if worker not in known:
                raise UsageError(f"cannot {to}: there is no worker {worker}; there are {listed(sorted(known))}")

    def _leave(self, workers: Sequence[int], why: str, now: float, request: int, asked: str = "drain") -> None:
        new = [worker for worker in workers if worker not in self._departures.drains]
        if not new:
            return
        self._departures.begin(new, why, now, request, asked)
        for addition in list(self._repairs.under_way.values()):
            if addition.worker in new:
                self._sweeper.abandon(addition, f"worker {addition.worker} is leaving", now, failed=False)
        self._departures.hand_over_sources(new)
        self._board.changed = True
        self._sweeper.sweep(now)

    # ---- more workers and fewer

    def scale(self, workers: int, now: float, request: int) -> None:
        """Change the number of workers. More workers get ``DriverEvents.missing_slots``; for fewer, the workers in the highest
        slots are drained."""
        board, slots = self._board, self._slots
        board.require_running("change the number of workers")
        if not 1 <= workers <= WORKERS_MAX:
            raise UsageError(f"cannot scale to {count(workers, 'worker')}: 1 to {WORKERS_MAX} are accepted")
        before = len(slots.open)
        room, arithmetic = self._driver.room
        if room is not None and workers > max(before, room):
            raise UsageError(f"cannot scale to {count(workers, 'worker')}: {arithmetic}")
        if workers < before:
            surplus = sorted(slots.open, reverse=True)[: before - workers]
            gone = [board.members.in_slot(slot) for slot in surplus]
            nodes = [member.node for member in gone if member is not None]
            to = f"scale to {count(workers, 'worker')}"
            if len(nodes) < len(surplus):
                self._check_enough(workers, to)
            self._leave(nodes, to, now, request, to)
            for slot in surplus:
                slots.close(slot)  # also slots whose worker has not come yet
        slots.grow(workers)
        slots.settle()
        if workers != before:
            board.note(f"from {before} to {count(workers, 'worker')}", now, "scale", request)
        by = f"request {request} asks" if request else "a later request asks"
        self.book.wanted_now(workers, f"{by} for {count(workers, 'worker')}")
        if request:
            self.book.scale(request, workers)

    def _check_enough(self, workers: int, to: str) -> None:
        """Refuse a number of workers that could not hold all replicas, even if no worker has to leave for it: a slot may be
        empty because its worker was lost a moment ago and is about to come back."""
        wishes = self._board.wishes
        for stage in wishes.plan.stages:
            if wishes.places(stage) > workers:
                raise UsageError(
                    f"cannot {to}: stage {stage.name} has replicas={stage.replicas}: that takes more workers, or fewer replicas "
                    "(flux protect)"
                )
