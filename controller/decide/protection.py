"""Changes of the protection of a running stage: number and kinds of its replicas (design: protect, change-keeps-copies,
change-turns, newest-wish).

The sweep adds missing replicas, as in a repair. The rest is here: the requests that are possible, the replicas that are dropped
and the time of that, and the end of a change. Law: a surplus replica goes only when enough safe ones are left without it.
"""

from __future__ import annotations

from collections.abc import Collection

from controller.decide.board import Board
from controller.replicas.addition_limits import LISTED_EVERY_S
from controller.replicas.addition_tracker import AdditionTracker
from controller.replicas.kinds import NEEDS_UNKNOWN, missing, surplus
from controller.replicas.moves import MoveQueue
from controller.replicas.protection_wishes import Change, in_words, places_needed, wished
from controller.replicas.table_changes import NextTable, dropped
from controller.text import count, listed
from flux.arguments import MARKS, RECOVERIES, REPLICAS_MAX
from flux.dataflow.plan import StagePlan
from flux.errors import UsageError
from flux.operators.operator import says_needs
from partitioning.ids import ACTIVE, UPSTREAM, PartitionKey
from partitioning.table import ReplicaAt, Table

Replicas = tuple[ReplicaAt, ...]


class Protection:
    """The changes of protection that are under way: requests, surplus replicas to drop, and the end of each change."""

    def __init__(self, board: Board, repairs: AdditionTracker, moving: MoveQueue) -> None:
        self._board = board
        self._repairs = repairs
        self._moving = moving
        self._droppable_since: dict[int, float] = {}  # stages with replicas that may go

    # ---- asking

    def ask(self, stage: int, replicas: int | None, recovery: str | None, now: float, request: int) -> Change | None:
        """Change the protection of a stage from now on.

        The newest wish counts: a change that is under way is given up for another one, and a request for the same joins it.
        None: the stage is like that already. UsageError, and nothing changes: it is impossible."""
        board = self._board
        table = board.require_running("change how a stage is protected")
        known = board.wishes.plan.stages
        if stage not in known:
            ids = listed([each.id for each in known])
            raise UsageError(f"cannot protect: there is no stage {stage}; there are {ids}")
        before = known[stage]
        problem = _mistake(before, replicas, recovery)
        if problem is None and not board.plan.settings.ordered:
            problem = "replicas that do not keep one order (spark.flux.replicas.ordered=false) are not changed"
        wish = wished(before, replicas, recovery)
        if problem is None and (wish.replicas, wish.recovery) == (before.replicas, before.recovery):
            return board.wishes.open.get(stage)
        problem = problem or self._no_room(before, wish, table)
        if problem is not None:
            raise UsageError(f"cannot protect {before.name}: {problem}")
        earlier = board.wishes.open.get(stage)
        change = board.wishes.ask(wish, table.stages[stage], now, request)
        if earlier is not None:
            self._note("protect given up", earlier, now, f"{earlier}: {earlier.ended}")
        self._note("protect", change, now, f"asked for: {change}")
        change.left = len(self._undone(change, table))
        board.changed = True
        return change

    def _no_room(self, before: StagePlan, wish: StagePlan, table: Table) -> str | None:
        """Return the reason why the workers cannot hold the replicas during a change; None: they can."""
        placement = self._board.placement()
        needed, room = places_needed(table.stages[wish.id], before, wish), placement.room()
        if needed <= room:
            return None
        apart = "" if self._board.plan.settings.same_executor else " on different executors"
        why = f"{in_words(wish)} need {count(wish.replicas, 'worker')}{apart}"
        if needed > wish.replicas:
            why = f"each partition needs {count(needed, 'worker')}{apart} while {in_words(before)} become {in_words(wish)}"
        return f"{why}, and there are {room} that stay: add workers first"

    # ---- what goes

    def shed(self, following: NextTable, now: float) -> None:
        """Drop surplus replicas with the next table: at once if nothing else of the stage is under way, else together with
        others."""
        table = following.table()
        for change in list(self._board.wishes.open.values()):
            gone = [
                (PartitionKey(change.stage, partition), worker)
                for partition, row in enumerate(table.stages[change.stage])
                for worker in self.too_many(change, PartitionKey(change.stage, partition), row)
            ]
            if not gone:
                self._droppable_since.pop(change.stage, None)
                continue
            since = self._droppable_since.setdefault(change.stage, now)
            others = any(addition.stage == change.stage for addition in self._repairs.under_way.values())
            if following.changed or not others or now - since >= LISTED_EVERY_S:
                del self._droppable_since[change.stage]
                for key, worker in gone:
                    following.change(key, dropped(worker))

    def too_many(self, change: Change, key: PartitionKey, row: Replicas) -> list[int]:
        """Return the workers whose replicas of this partition may go now. While one is added or moved, all stay."""
        if key in self._repairs.under_way:
            return []
        stage, repairs = self._board.wishes.plan.stages[key.stage], self._repairs
        gone: list[int] = []
        left = row
        while fit := surplus(stage, left):
            first = self._first_to_go(key, fit, left)
            rest = tuple(replica for replica in left if replica is not first)
            if sum(repairs.safety.is_safe(*key, replica) for replica in rest) < change.least:
                break
            gone.append(first.worker)
            left = rest
        return gone

    def _first_to_go(self, key: PartitionKey, fit: list[ReplicaAt], row: Replicas) -> ReplicaAt:
        """Choose the first replica to go: one on a worker that leaves, then one that is far behind, then the one that shares
        most with the others."""
        if len(fit) == 1:
            return fit[0]
        placement, repairs = self._board.placement(), self._repairs

        def stays(replica: ReplicaAt) -> tuple[bool, bool, int, int]:
            others = [other.worker for other in row if other is not replica]
            behind = repairs.safety.is_behind(*key, replica)
            shared = placement.rank(key, replica.worker, others)
            return replica.worker not in placement.leaving, not behind, -shared, -row.index(replica)

        return min(fit, key=stays)

    # ---- the end

    def settle(self, now: float) -> None:
        """End the changes whose stages are as wished."""
        table = self._board.table
        assert table is not None
        for change in list(self._board.wishes.open.values()):
            undone = self._undone(change, table)
            change.left = len(undone)
            if not undone:
                self._board.wishes.done(change.stage)
                self._note("protected", change, now, str(change), now - change.since)

    def _undone(self, change: Change, table: Table) -> list[int]:
        """Return the partitions that do not have exactly the wished replicas, all of them safe. Targets of moves do not count."""
        stage, repairs = self._board.wishes.plan.stages[change.stage], self._repairs
        found = []
        for partition, row in enumerate(table.stages[stage.id]):
            addition = repairs.under_way.get(PartitionKey(stage.id, partition))
            added = addition is not None and not addition.moves
            if addition is not None and addition.moves:  # its target takes the place of another
                row = tuple(replica for replica in row if replica.worker != addition.worker)
            if added or missing(stage, row) is not None or surplus(stage, row):
                found.append(partition)
        return found

    def wind_down(self, why: str, now: float) -> None:
        """Give up all changes: nothing is added any more."""
        for stage in list(self._board.wishes.open):
            change = self._board.wishes.give_up(stage, why)
            self._note("protect given up", change, now, f"{change}: {why}")

    def forget(self, stages: Collection[int], now: float) -> None:
        """Give up the changes of stages that are about to go."""
        for stage in [stage for stage in self._board.wishes.open if stage in stages]:
            change = self._board.wishes.give_up(stage, "the stage was removed")
            self._note("protect given up", change, now, f"{change}: {change.ended}")
        for stage in stages:
            self._droppable_since.pop(stage, None)

    def _note(self, kind: str, change: Change, now: float, why: str, seconds: float = 0.0) -> None:
        self._repairs.note(kind, now, change.stage, -1, -1, why, seconds=seconds, request=change.request)

    def validate(self) -> None:
        """Check that an open change is not over, and that the wish is the one that it changes to."""
        for stage, change in self._board.wishes.open.items():
            wish = self._board.wishes.plan.stages[stage]
            assert not change.over, f"the change of {wish.name} is over, and still open"
            assert change.after == in_words(wish), f"{wish.name} is to have {in_words(wish)}, not {change.after}"


def _mistake(before: StagePlan, replicas: int | None, recovery: str | None) -> str | None:
    """Return the mistake in a request that no query could carry out; None: there is none."""
    if replicas is None and recovery is None:
        return "say how many replicas, or which recovery"
    if recovery is not None and recovery not in RECOVERIES:
        return f"recovery must be one of {', '.join(RECOVERIES)}; got {recovery!r}"
    number = before.replicas if replicas is None else replicas
    if not 1 <= number <= REPLICAS_MAX:
        return f"replicas must be 1 to {REPLICAS_MAX}; got {number}"
    if recovery not in (None, ACTIVE) and before.collects:
        return "its output is kept for toDF(), which standbys would have to make again: only replicas can be changed"
    if recovery not in (None, ACTIVE) and before.order == MARKS:
        return f"it has order={MARKS!r} and so no order of steps to repeat: only replicas can be changed"
    if recovery not in (None, ACTIVE) and number == 1:
        return f"recovery={recovery!r} says what further replicas do: give replicas=2 or more with it"
    if recovery == UPSTREAM and not says_needs(before.make(), before.output_mode):
        return f"recovery={recovery!r} {NEEDS_UNKNOWN}"
    return None
