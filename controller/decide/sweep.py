"""The sweep of a running query: repairs before moves, step by step (design: repairs-first, add-replica).

``repairs`` and ``moving`` decide which replicas are added next. The sweep enters the additions into the table phase by
phase, each when the phase before is confirmed. One table changes as much as possible, because all processes have to
look at each (design: batch).
"""

from __future__ import annotations

from controller.course.query_phases import QueryPhase
from controller.decide.board import Board
from controller.decide.departures import Departures
from controller.decide.protection import Protection
from controller.replicas.addition_limits import LISTED_EVERY_S
from controller.replicas.addition_tracker import AdditionTracker
from controller.replicas.additions import Addition, AdditionEvent, Moment, Phase
from controller.replicas.moves import MoveQueue
from controller.replicas.table_changes import NextTable, changed, drop, dropped, in_place_of, led_by, made_live
from flux.errors import QueryFailed
from flux.replica.kinds import kind_named
from flux.wire.control import CopyState, ReplicaCaughtUp, ReplicaDiverged, Unreached
from partitioning.ids import PartitionKey
from partitioning.table import Table

#: Time between two looks of the sweep for work although nothing has changed: the rest of a partition may be over.
LOOK_EVERY_S = 0.25
#: The phases of an addition whose replica does not follow the order of its primary yet.
BEFORE_IT_FOLLOWS = Phase.RETAIN, Phase.READY, Phase.COPY


class Sweep:
    """The sweep over the replicas of a running query: it goes on with additions, gives up overdue ones, and begins repairs and
    then moves (design: repairs-first, add-replica).

    Law: no move begins while a repair is under way or due. ``sweep`` may be called at any time; it begins something only
    when the table or the workers have changed, or ``LOOK_EVERY_S`` after the last look."""

    def __init__(
        self, board: Board, repairs: AdditionTracker, moving: MoveQueue, departures: Departures, protecting: Protection
    ) -> None:
        self.board = board
        self.repairs = repairs
        self.moving = moving
        self._departures = departures
        self._protecting = protecting
        self._look_at = 0.0
        self._apart_as_of = -1  # epoch of a table whose replicas are as far apart as possible

    # ---- a look

    def sweep(self, now: float) -> None:
        """Go on with confirmed additions, give up overdue ones, and begin those that are due, while the query runs. Once it is
        finished, only additions go on whose copies are on their way: these may still save kept output."""
        board, repairs = self.board, self.repairs
        if board.table is None or board.phase not in (QueryPhase.RUNNING, QueryPhase.FINISHED):
            return
        if repairs.under_way:
            self._go_on(now)
        if board.phase == QueryPhase.FINISHED:
            self._next_table(False, now)
            self._order_copies(repairs.to_ask(now))
            return
        looks = board.changed or now >= self._look_at
        if looks:
            board.changed, self._look_at = False, now + LOOK_EVERY_S
            self.keep_apart(now)
            if self._departures.drains:
                self._departures.empty(now)
        self._next_table(looks, now)
        if repairs.under_way:
            self._order_copies(repairs.copies_due(board.is_confirmed, now))

    def _go_on(self, now: float) -> None:
        """Give up overdue additions, and go on with those whose table all processes have confirmed."""
        for addition, why in self.repairs.overdue(now, self.board.who_is_behind):
            self.abandon(addition, why, now)
        if self.board.phase == QueryPhase.RUNNING:
            for addition in self.repairs.confirmed(self.board.is_confirmed):
                addition.on(AdditionEvent.CONFIRMED, now)
            self._put_back(now)

    def _order_copies(self, additions: list[Addition]) -> None:
        for addition in additions:
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
            return  # the replica follows by itself
        command = CopyState(
            stage=addition.stage,
            partition=addition.partition,
            worker=addition.worker,
            incarnation=addition.incarnation,
        )
        self.board.tell(self.board.members.workers[self._primary(addition)], command)

    # ---- the next table

    def _next_table(self, looks: bool, now: float) -> None:
        """Publish one table with all changes that are due: replicas that are live from now on, targets of moves in the places
        of their sources, and, if it ``looks`` for these, new replicas. Changes that could wait come along with the others."""
        board = self.board
        assert board.table is not None
        following = NextTable(board.table)
        waiting, due = self._waiting(board.table, now)
        if due:
            self._list(waiting, following, now)
        # Additions that have ended may have made room. Once the query is finished, nothing begins.
        begins = board.phase == QueryPhase.RUNNING and (looks or board.changed)
        if begins and board.wishes.open:
            self._protecting.shed(following, now)
        begun = begins and self._begin(following, now)
        if begun and not due:
            self._list(waiting, following, now)
        if following.changed:
            board.publish(following.table())
        if begins and board.wishes.open:
            self._protecting.settle(now)

    def _waiting(self, table: Table, now: float) -> tuple[list[Addition], bool]:
        """Return the additions that the next table takes further, and whether it is due for them: they have waited long enough,
        or there are no others to wait for. The source of a move stays as long as the remaining replicas would be too far
        behind."""
        waiting, first, others = [], now, False
        running = self.board.phase == QueryPhase.RUNNING
        for addition in self.repairs.under_way.values():
            arrived = addition.arrived_at is not None and not self.moving.waits_for_steps(addition, table)
            if arrived or addition.phase == Phase.FOLLOWS:
                waiting.append(addition)
                first = min(first, addition.since if addition.arrived_at is None else addition.arrived_at)
            else:
                others |= addition.moves or addition.phase != Phase.LIVE
        return waiting, bool(waiting) and (not others or now - first >= LISTED_EVERY_S or not running)

    def _list(self, waiting: list[Addition], following: NextTable, now: float) -> None:
        for addition in waiting:
            if addition.phase == Phase.FOLLOWS:
                addition.on(AdditionEvent.LISTED, now)
                following.change(addition.key, made_live(addition.worker))
            else:
                self._end(addition, following, now)

    def _begin(self, following: NextTable, now: float) -> bool:
        """Begin the repairs or moves that are due, in the table ``following``; False: there are none."""
        board, repairs = self.board, self.repairs
        assert board.table is not None
        if self._repairs_under_way() and not repairs.may_begin:
            return False
        table = following.table() if following.changed else board.table
        attempts = repairs.attempts
        moment = board.moment(table, attempts.resting(now) if attempts.failures else frozenset(), now)
        due = repairs.due(moment)
        for wanted in due:
            addition = repairs.begin(wanted, following.epoch, now)
            following.add(addition.key, addition.worker, addition.kind)
        if due:
            repairs.batches.begun(due[0].stage, len(due))
        if self._repairs_under_way():
            return bool(due)
        self._spread_out(moment)  # looks at all partitions, so only if no repair is due
        if not self.moving.pending or (repairs.under_way and repairs.waits(moment)):
            return False
        return self._begin_moves(following, moment)

    def _repairs_under_way(self) -> bool:
        return any(not addition.moves for addition in self.repairs.under_way.values())

    def _begin_moves(self, following: NextTable, moment: Moment) -> bool:
        """Begin moves. A worker that leaves is emptied in batches, like repairs; other moves begin ``repair.atOnce`` at a
        time."""
        repairs, moving = self.repairs, self.moving
        stage = min((key.stage for key in repairs.under_way), default=moving.pending[0].move.stage)
        batch = 0
        if moment.placement.leaving and repairs.may_begin:
            batch = repairs.batches.size(stage, moment.log_room)
        begun = moving.begin(moment, following.epoch, len(repairs.under_way) + batch)
        for addition in begun:
            following.add(addition.key, addition.worker, addition.kind)
        if batch:
            repairs.batches.begun(stage, len(begun))
        return bool(begun)

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
                    obstacle = f"worker {addition.worker} is closer to its other replicas than it need be"
                if obstacle is not None:
                    self.abandon(addition, f"another replica was lost meanwhile, and {obstacle}", now, failed=False)

    def _spread_out(self, moment: Moment) -> None:
        """Move replicas apart when nothing else is to be done: for safety, even if load balance is off."""
        board, moving = self.board, self.moving
        assert board.table is not None
        busy = moving.pending or moving.under_way or self.repairs.under_way or not board.plan.settings.ordered
        if not busy and board.table.epoch != self._apart_as_of and not moving.spread_out(board.table, moment):
            self._apart_as_of = board.table.epoch

    def validate(self) -> None:
        """Check that no partition has more replicas than its stage wants, a change of the stage allows, and a move needs, and
        that none has two replicas that may not be side by side."""
        board = self.board
        assert board.table is not None
        placement = board.members.placement(board.plan.settings.same_executor, leaving=())
        for stage in board.wishes.plan.stages:
            for partition, replicas in enumerate(board.table.stages[stage.id]):
                addition = self.repairs.under_way.get(PartitionKey(stage.id, partition))
                going = None
                if addition is not None and addition.from_worker is not None:
                    # Either the source or the target goes, so these two may share an executor until another replica is
                    # lost.
                    going = None if self.moving.replaces_another(addition, replicas) else addition.from_worker
                asked_for = board.wishes.most(stage) + (addition is not None and addition.from_worker is not None)
                assert len(replicas) <= asked_for, f"{stage.name}/{partition}: more replicas than asked for"
                workers = [replica.worker for replica in replicas if replica.worker != going]
                for number, worker in enumerate(workers):
                    obstacle = placement.obstacle(worker, workers[:number])
                    assert obstacle is None, f"{stage.name}/{partition}: {obstacle}"

    # ---- additions and replicas that are dropped

    def abandon(self, addition: Addition, why: str, now: float, failed: bool = True) -> None:
        """Give up an addition and drop its replica, so that no process waits for it or keeps rows for it. ``failed``: it counts
        as a failed attempt."""
        self._abandon([addition], why, now, failed)

    def _abandon(self, additions: list[Addition], why: str, now: float, failed: bool) -> None:
        board = self.board
        assert board.table is not None
        following = NextTable(board.table)
        for addition in additions:
            self.repairs.give_up(addition, why, following.epoch, now, failed)
            if addition.moves:
                self.moving.failed(addition, why, now)
            following.change(addition.key, dropped(addition.worker))
        if following.changed:
            board.publish(following.table())

    def _put_back(self, now: float) -> None:
        """Take out replicas that have waited for their copies for too long: their batch was too large."""
        waiting = self.repairs.waiting_too_long(now)
        for addition in waiting:
            self.repairs.batches.waited_too_long(addition.stage)
            self.moving.put_back(addition)
        self._abandon(waiting, "it has waited long for its turn to be copied", now, failed=False)

    def wind_down(self, why: str, now: float) -> None:
        """End all moves, and the repairs that still wait for their copies: no further copy is ordered, and producers would
        keep rows for these replicas. The target of a move that became live later would stay beside its source for good, a
        replica too many and perhaps on the same executor."""
        waiting = [a for a in self.repairs.under_way.values() if a.phase in (Phase.RETAIN, Phase.READY) and not a.moves]
        moving = [self.repairs.under_way[key] for key in self.moving.under_way]
        self._abandon([*waiting, *moving], why, now, failed=False)
        self._protecting.wind_down(why, now)
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
        """Drop a secondary that has diverged; the sweep builds it anew from the primary."""
        board, repairs = self.board, self.repairs
        if board.table is None or not repairs.note_divergence(message, board.table, now):
            return
        if (hopeless := repairs.too_divergent()) is not None:
            name = f"{board.plan.stages[hopeless.stage].name}/{hopeless.partition}"
            error = f"the replicas of {name} keep giving different output: its operator is not deterministic"
            board.fail(QueryFailed(error), [hopeless.stage])
            return
        self._drop(message.stage, message.partition, message.worker, now)
        self.sweep(now)

    def unreached(self, message: Unreached, now: float) -> None:
        """Let another replica lead in place of a primary that is out of reach for a producer or a consumer. The primary is
        dropped, and the sweep adds a replica on another worker (design: unreached)."""
        board, repairs = self.board, self.repairs
        if board.table is None or board.phase != QueryPhase.RUNNING:
            return
        heir = repairs.heir_of_unreached(message, board.table)
        if heir is None:
            return
        repairs.note_unreached(message, now)
        # A copy whose link is down holds back all repairs until it is given up, for half a minute.
        self._abandon(self._copies_of_moves(), "a primary that is out of reach leaves the lead", now, failed=False)
        table = changed(board.table, {PartitionKey(message.stage, message.partition): led_by(heir.worker)})
        self.moving.reconcile(table, now)
        board.publish(table)
        self.sweep(now)

    def _copies_of_moves(self) -> list[Addition]:
        """Return the additions of moves that wait for their copies. The moves begin again once no repair is due."""
        waiting = [a for a in self.repairs.under_way.values() if a.moves and a.phase in BEFORE_IT_FOLLOWS]
        for addition in waiting:
            self.moving.put_back(addition)
        return waiting

    def caught_up(self, message: ReplicaCaughtUp, now: float) -> None:
        board = self.board
        if board.table is None:
            return
        if not message.safe:
            # Further copies may begin, and a batch after them.
            board.changed |= self.repairs.caught_up(message, now)
        else:
            addition = self.repairs.arrived(message, now)
            if addition is not None and not addition.moves:
                self._end_repair(addition, now)
        self.sweep(now)

    def _end_repair(self, addition: Addition, now: float) -> None:
        """End an addition whose replica is safe, and takes the place of none that is there."""
        self.repairs.complete(addition, now)
        self.board.changed = True
        self.repairs.note_repair(addition, now)

    def _end(self, addition: Addition, following: NextTable, now: float) -> None:
        """End an addition whose replica is safe. The source of a move is dropped with the next table, if enough replicas are
        left without it."""
        board, moving = self.board, self.moving
        assert board.table is not None
        if addition.from_worker is None or addition.key not in moving.under_way:
            self._end_repair(addition, now)
            return
        self.repairs.complete(addition, now)
        board.changed = True
        if moving.may_drop_source(addition, board.table):
            moving.finish(addition, now)
            following.change(addition.key, in_place_of(addition.from_worker, addition.worker))
        else:
            moving.finish_as_repair(addition, now)
