"""The sweep of a running query: repairs before moves, step by step (design: repairs-first, add-replica).

``repairs`` and ``moving`` decide which replica is added next. The sweep enters the addition into the table phase by
phase, each when the phase before is confirmed.
"""

from __future__ import annotations

from controller.decide.board import Board
from controller.decide.departures import Departures
from controller.decide.phases import QueryPhase
from controller.replicas.addition_phases import Heard, Phase
from controller.replicas.kinds import wanted as wanted_kinds
from controller.replicas.move_queue import Moving
from controller.replicas.next_additions import Addition, Wanted
from controller.replicas.repairs import Repairs
from controller.replicas.table_changes import drop, make_live, retain, take_place
from flux.errors import QueryFailed
from flux.replicas.kinds import kind_named
from flux.wire.control import CopyState, ReplicaCaughtUp, ReplicaDiverged
from partitioning.ids import PartitionKey

#: How often the sweep looks for work although nothing has changed: the rest of a partition may be over.
LOOK_EVERY_S = 0.25


class Sweeper:
    def __init__(self, board: Board, repairs: Repairs, moving: Moving, departures: Departures) -> None:
        self.board = board
        self.repairs = repairs
        self.moving = moving
        self._departures = departures
        self._look_at = 0.0
        self._apart_as_of = -1  # epoch of a table whose replicas are as far apart as they can be

    # ---- a look

    def sweep(self, now: float) -> None:
        """Go on with confirmed additions, give up overdue ones, and begin those that are due. Does nothing unless the
        query runs."""
        board, repairs = self.board, self.repairs
        if board.table is None or board.phase != QueryPhase.RUNNING:
            return
        self._confirm(now)
        for addition in [addition for addition in repairs.under_way.values() if addition.arrived]:
            self._arrived(addition, now)
        for addition, why in repairs.overdue(now, board.who_is_behind):
            self.abandon(addition, why, now)
        if board.changed or now >= self._look_at:
            board.changed, self._look_at = False, now + LOOK_EVERY_S
            self.keep_apart(now)
            self._departures.empty(now)
            self._spread_out(now)
            while (wanted := self._next(now)) is not None:
                self._begin(wanted, now)
        for addition in repairs.to_ask(now):
            self._order_copy(addition)

    def order_again(self, worker: int) -> None:
        """Repeat CopyState to a worker that is back on a new connection: the command may be lost with the old one. This
        is no further attempt, as the worker does not begin again a copy that it has begun."""
        for addition in self.repairs.asked():
            if self._primary(addition) == worker:
                self._order_copy(addition)

    def _primary(self, addition: Addition) -> int:
        assert self.board.table is not None
        return self.board.table.replicas(*addition.key)[0].worker

    def _order_copy(self, addition: Addition) -> None:
        if not kind_named(addition.kind).copies:
            return  # it follows by itself
        command = CopyState(
            stage=addition.stage,
            partition=addition.partition,
            worker=addition.worker,
            incarnation=addition.incarnation,
        )
        self.board.tell(self.board.members.workers[self._primary(addition)], command)

    def _confirm(self, now: float) -> None:
        if any(addition.phase == Phase.RETAIN for addition in self.repairs.under_way.values()):
            for addition in self.repairs.confirmed(self.board.confirmed_epoch()):
                addition.on(Heard.CONFIRMED, now)

    def _next(self, now: float) -> Wanted | None:
        board, repairs = self.board, self.repairs
        assert board.table is not None
        placement = board.placement()
        repair = repairs.next(board.table, placement, now)
        if repair is not None or any(addition.from_worker is None for addition in repairs.under_way.values()):
            return repair
        if not self.moving.pending or repairs.waits(board.table, placement, now):
            return None
        return self.moving.next(board.table, placement, now)

    def _begin(self, wanted: Wanted, now: float) -> None:
        board = self.board
        assert board.table is not None
        if wanted.from_worker is not None:
            self.moving.begin(wanted, board.table)
        board.publish(retain(board.table, wanted.stage, wanted.partition, wanted.worker, wanted.kind))
        self.repairs.begin(wanted, board.table.epoch, now)

    # ---- how far apart replicas are

    def keep_apart(self, now: float) -> None:
        """Abandon targets of moves that would stay too close to their sources. A target may share an executor or a host
        with its source, because it replaces the source. But if another replica was lost meanwhile, it would stay beside
        the source, and the loss of that executor would cost both. So the lost replica is repaired elsewhere first."""
        board = self.board
        assert board.table is not None
        for key in list(self.moving.under_way):
            addition, replicas = self.repairs.under_way[key], board.table.replicas(*key)
            if self.moving.replaces_another(addition, replicas):
                others = [replica.worker for replica in replicas if replica.worker != addition.worker]
                placement = board.placement()
                obstacle = placement.obstacle(addition.worker, others)
                if obstacle is None and placement.rank(key, addition.worker, others) > placement.best(key, others):
                    obstacle = f"worker {addition.worker} is closer to its other copies than it need be"
                if obstacle is not None:
                    self.abandon(addition, f"another copy was lost meanwhile, and {obstacle}", now, failed=False)

    def _spread_out(self, now: float) -> None:
        """Move replicas apart when nothing else is to be done: for safety, even if load balance is off."""
        board = self.board
        assert board.table is not None
        busy = bool(self.moving) or bool(self.repairs.under_way) or not board.plan.settings.ordered
        if (
            not busy
            and board.table.epoch != self._apart_as_of
            and not self.moving.spread_out(board.table, board.placement(), now)
        ):
            self._apart_as_of = board.table.epoch

    def validate(self) -> None:
        """No partition has more replicas than its stage wants and a move needs, and none has two that may not be side
        by side."""
        board = self.board
        assert board.table is not None
        placement = board.members.placement(board.plan.settings.same_executor, leaving=())
        for stage in board.plan.stages:
            for partition, replicas in enumerate(board.table.stages[stage.id]):
                addition = self.repairs.under_way.get(PartitionKey(stage.id, partition))
                going = None
                if addition is not None and addition.from_worker is not None:
                    # Either the source or the target goes, so these two may share an executor until another replica is
                    # lost.
                    going = None if self.moving.replaces_another(addition, replicas) else addition.from_worker
                asked_for = len(wanted_kinds(stage)) + (addition is not None and addition.from_worker is not None)
                assert len(replicas) <= asked_for, f"{stage.name}/{partition}: more copies than asked for"
                workers = [replica.worker for replica in replicas if replica.worker != going]
                for number, worker in enumerate(workers):
                    obstacle = placement.obstacle(worker, workers[:number])
                    assert obstacle is None, f"{stage.name}/{partition}: {obstacle}"

    # ---- additions and replicas that are dropped

    def abandon(self, addition: Addition, why: str, now: float, failed: bool = True) -> None:
        """Give up an addition and drop its replica, so that nobody waits for it or keeps rows for it. ``failed``: it
        counts as a failed attempt."""
        board = self.board
        assert board.table is not None
        self.repairs.give_up(addition, why, now, failed)
        if addition.from_worker is not None:
            self.moving.failed(addition, why, now)
        board.publish(drop(board.table, addition.stage, addition.partition, addition.worker))

    def stop_moving(self, why: str, now: float) -> None:
        """End all moves. A target that became live later would stay beside its source for good, a replica too many and
        perhaps on the same executor."""
        for key in list(self.moving.under_way):
            self.abandon(self.repairs.under_way[key], why, now, failed=False)
        self.moving.clear(why, now)

    def drop_standing(self, now: float) -> None:
        """Drop replicas that apply nothing although nothing else is in their way: they would hold back their primaries
        for ever. The sweep builds them anew."""
        board = self.board
        while board.table is not None and (life := self.repairs.drop_standing(board.table, now)) is not None:
            self._drop(*life.key, life.worker, now)

    def _drop(self, stage: int, partition: int, worker: int, now: float) -> None:
        """Drop a replica whose worker lives."""
        board = self.board
        assert board.table is not None
        table = drop(board.table, stage, partition, worker)
        self.moving.reconcile(table, now)
        board.publish(table)

    # ---- reports of primaries

    def diverged(self, message: ReplicaDiverged, now: float) -> None:
        """The secondary is dropped; the sweep builds it anew from the primary."""
        board, repairs = self.board, self.repairs
        if board.table is None or not repairs.note_divergence(message, board.table, now):
            return
        if (hopeless := repairs.too_divergent()) is not None:
            name = f"{board.plan.stages[hopeless.stage].name}/{hopeless.partition}"
            board.end(
                QueryFailed(f"the replicas of {name} keep giving different output: its operator is not deterministic")
            )
            return
        self._drop(message.stage, message.partition, message.worker, now)
        self.sweep(now)

    def caught_up(self, message: ReplicaCaughtUp, now: float) -> None:
        board = self.board
        if board.table is None:
            return
        if not message.safe:
            if self.repairs.caught_up(message, now):
                board.publish(make_live(board.table, message.stage, message.partition, message.worker))
            return
        addition = self.repairs.arrived(message, now)
        if addition is not None:
            self._arrived(addition, now)
        self.sweep(now)

    def _arrived(self, addition: Addition, now: float) -> None:
        """A replica has everything that is committed. If it is the target of a move and the remaining replicas would be
        too far behind, the next sweeps look at it again."""
        board = self.board
        assert board.table is not None
        if not self.moving.waits_for_steps(addition, board.table):
            self.repairs.complete(addition, now)
            board.changed = True
            self._safe(addition, now)

    def _safe(self, addition: Addition, now: float) -> None:
        """An addition is done. The source of a move is dropped, if enough replicas are left without it."""
        board, moving = self.board, self.moving
        assert board.table is not None
        if addition.from_worker is None or addition.key not in moving.under_way:
            self.repairs.note_repair(addition, now)
        elif moving.may_drop_source(addition, board.table):
            source = addition.from_worker
            moving.finish(addition, now)
            board.publish(take_place(board.table, addition.stage, addition.partition, source, addition.worker))
        else:
            moving.finish_as_repair(addition, now)
