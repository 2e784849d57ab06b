"""Departures: workers that are emptied and then leave, and workers that were given up and may still live (design:
drain, given-up-worker).

Both kinds end their Spark tasks normally: they are told to stop, and their goodbye is still heard.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from controller.course.query_phases import QueryPhase
from controller.decide.balancer import Balancer
from controller.decide.board import Board
from controller.decide.slots import Drain, Slots, held_by, reads
from controller.replicas.addition_tracker import AdditionTracker
from controller.replicas.membership import Member
from controller.replicas.moves import MoveQueue
from controller.replicas.table_changes import read_elsewhere, without_worker
from controller.text import named
from flux.errors import UsageError
from flux.wire.control import Checkpointed, LastCheckpoints, Register, Rejected, Stop
from partitioning.table import ReplicaAt

#: If emptying a worker takes longer than this, a warning says so.
DRAIN_TOLD_S = 30.0
#: The longest time for which a stopped query waits for its last checkpoints.
LAST_CHECKPOINTS_S = 8.0

#: Primaries, readers of sources, and workers.
Asked = tuple[Sequence[Sequence[ReplicaAt]], Sequence[Sequence[int]], frozenset[int]]


class Departures:
    """The workers that leave. ``drains``: workers that are being emptied; ``dismissed``: workers that were emptied and told to
    stop; ``slots``: the Spark tasks that may bring workers."""

    def __init__(
        self, board: Board, slots: Slots, repairs: AdditionTracker, moving: MoveQueue, balancer: Balancer
    ) -> None:
        self.slots = slots
        self.drains: dict[int, Drain] = {}
        self.dismissed: set[int] = set()
        self._board = board
        self._repairs = repairs
        self._moving = moving
        self._balancer = balancer
        #: Workers whose last checkpoints are kept, by their answers to the newest order, and whether these have all that the
        #: worker has read. None: the query is not being stopped.
        self._kept: dict[int, bool] | None = None
        self._wait_until = 0.0
        #: The epoch of the newest order to keep last checkpoints; primaries, readers and workers of that time.
        self._asked_epoch = -1
        self._asked: Asked = ((), (), frozenset())
        self._sent_home: dict[int, Member] = {}  # the dismissed, and those that were given up and may live

    # ---- workers that are emptied

    def begin(self, workers: Sequence[int], why: str, now: float, request: int = 0, asked: str = "drain") -> None:
        """Begin to empty workers, which get no new replicas from now on. UsageError, and nothing changes: the others could not
        hold all replicas. The message names the request (``asked``)."""
        board = self._board
        if not board.plan.settings.ordered:
            raise UsageError(
                f"cannot {asked}: replicas that do not keep one order (spark.flux.replicas.ordered) do not move"
            )
        problem = board.placement().too_few(board.wishes, {*self.drains, *workers})
        if problem is not None:
            raise UsageError(f"cannot {asked}: {problem}")
        for worker in workers:
            member = board.members.workers[worker]
            board.members.empty(worker)
            self.slots.close(member.about.index)
            self.drains[worker] = Drain(worker, member.about.index, why, now, request)

    def hand_over_sources(self, workers: Sequence[int]) -> None:
        """Let other workers read the partitions of sources that these workers read."""
        table = self._board.table
        assert table is not None
        if any(reads(table, worker) for worker in workers):
            self._board.publish(read_elsewhere(table, workers, self.readers(*workers)))

    def readers(self, *without: int) -> list[int]:
        """Return the workers that may be given partitions of sources: those that stay; if there are none, those that are
        leaving."""
        assert self._board.table is not None
        others = [node for node in self._board.table.endpoints if node not in without]
        return [node for node in others if node not in self.drains] or others

    def empty(self, now: float) -> None:
        """Move everything that is still on leaving workers, and dismiss the empty ones."""
        board = self._board
        for drain in list(self.drains.values()):
            assert board.table is not None
            stay = [node for node in board.table.endpoints if node not in self.drains]
            if stay and reads(board.table, drain.worker):
                # The worker got partitions back when all workers that stayed were lost. Others have joined since.
                board.publish(read_elsewhere(board.table, [drain.worker], stay))
            held = held_by(board.table, drain.worker)
            if held or reads(board.table, drain.worker):
                why = f"worker {drain.worker} leaves: {drain.why}"
                self._moving.empty(drain.worker, held, lambda: self._balancer.prefer(now), why, drain.request)
                if not drain.told and now > drain.since + DRAIN_TOLD_S:
                    drain.told = True
                    text = f"still holds {len(held)} replicas after {now - drain.since:.0f} s"
                    board.note_worker("warning", board.members.workers[drain.worker], text, now)
            else:
                self._dismiss(drain, now)

    def _dismiss(self, drain: Drain, now: float) -> None:
        board = self._board
        assert board.table is not None
        member = board.members.remove(drain.worker)
        del self.drains[drain.worker]
        self._balancer.forget(drain.worker)
        self.dismissed.add(drain.worker)
        table, orphans = without_worker(board.table, drain.worker, self._repairs.safety.is_safe, [])
        assert not orphans, orphans
        self._repairs.safety.lags.forget(drain.worker)
        board.note_worker("drain", member, drain.why, now, now - drain.since, drain.request)
        board.publish(table)
        self._sent_home[member.node] = member
        board.tell(member, Stop(reason=f"worker {drain.worker} has left the query: {drain.why}"))

    # ---- a query that is stopped

    @property
    def stopping(self) -> bool:
        """The query is being stopped, and waits for its last checkpoints."""
        return self._kept is not None

    def wait_for_checkpoints(self, now: float) -> None:
        """Ask all workers to give the vault their last checkpoints. A second call changes nothing."""
        if self._kept is None:
            self._wait_until = now + LAST_CHECKPOINTS_S
            self._ask_for_checkpoints()

    def _ask_for_checkpoints(self) -> None:
        self._kept, self._asked = {}, self._concerned()
        self._asked_epoch = -1 if self._board.table is None else self._board.table.epoch
        for member in self._board.members.workers.values():
            self.ask_again(member)

    def _concerned(self) -> Asked:
        """Return the primaries, the readers of sources, and the workers."""
        table = self._board.table
        workers = frozenset(self._board.members.workers)
        if table is None:
            return (), (), workers
        return tuple(row[:1] for rows in table.stages for row in rows), table.sources, workers

    def ask_again(self, member: Member) -> None:
        """Ask a worker for its last checkpoints, if the query is being stopped; it has come, or has a new connection."""
        if self._kept is not None and member.about.role == "worker":
            self._board.tell(member, LastCheckpoints(epoch=self._asked_epoch))

    def checkpointed(self, message: Checkpointed) -> None:
        """Note that the vault has the last checkpoints of a worker's primaries, by the table of an epoch."""
        if self._kept is not None and message.epoch >= self._asked_epoch:
            self._kept[message.node] = message.settled

    def end_with_checkpoints(self, now: float) -> None:
        """End a stopped query when the vault has its last checkpoints, or when that takes too long: steps after the checkpoints
        are repeated then.

        All workers are asked again when other replicas lead or other workers read, or a worker joins. After the loss of a worker,
        its replicas and sources are with workers that may have answered already: the steps since its last checkpoint would have
        to be repeated, by rows that the log may not have any more. A worker that joins would read on if it were not asked."""
        board = self._board
        if self._kept is None or board.phase == QueryPhase.ENDED:
            return
        if board.members.workers and now < self._wait_until and self._concerned() != self._asked:
            self._ask_for_checkpoints()
            return
        lacking = sorted(board.members.workers.keys() - self._kept.keys())
        if lacking and now < self._wait_until:
            return
        if lacking:
            text = f"the last checkpoints of {named('worker', lacking)} were not kept within {LAST_CHECKPOINTS_S:g} s"
            board.note(f"{text}: the steps after the earlier ones are repeated when the query goes on", now)
        if unsettled := sorted(worker for worker, settled in self._kept.items() if not settled):
            text = f"{named('worker', unsettled)} had read rows that were not in all checkpoints soon enough"
            board.note(f"{text}: these rows are read again when the query goes on", now)
        board.end(None)

    def stop_draining(self, worker: int) -> Drain | None:
        """End the drain of a lost worker, and return it if there was one."""
        return self.drains.pop(worker, None)

    def note_lost(self, member: Member, drain: Drain | None, now: float) -> None:
        if drain is not None:
            text = f"{drain.why}: it was lost before it was empty"
            self._board.note_worker("drain", member, text, now, now - drain.since, drain.request)

    # ---- workers that were given up and may live

    def fence(self, member: Member) -> None:
        """Send a worker the table without it, which tells it that it was given up. Its task counts as there until its
        goodbye."""
        board = self._board
        self.slots.renew(member.about.index)
        self._sent_home[member.node] = member
        if board.table is None:  # that was the last worker
            board.tell(member, Stop(reason=f"worker {member.node} was given up"))
        else:
            board.tell(member, board.whole_table())

    def turn_away(self, connection: Hashable, message: Register, replaced: bool) -> None:
        """Answer a process that comes back after it was given up, or after it was ``replaced`` by another attempt."""
        board = self._board
        member = self._sent_home.get(message.node) or Member(message.node, connection, message, 0.0)
        member.connection = connection
        if message.node in self.dismissed:
            board.tell(member, Stop(reason="this worker has left the query"))
        elif message.role == "worker" and board.has_begun and not replaced and board.members.knew(message.node):
            self.fence(member)  # this includes workers that were taken for dead when their connections closed
        else:
            board.tell(member, Rejected(reason="another attempt of this task has registered"))

    def validate(self) -> None:
        """Check that the membership knows the workers that are leaving, that they get nothing new, and that workers that have
        left are no members."""
        members = self._board.members
        assert set(self.drains) == set(members.leaving), "who is being emptied"
        assert all(drain.slot in self.slots.closed for drain in self.drains.values()), (
            "the slot of who leaves is closed"
        )
        targets = {addition.worker for addition in self._repairs.under_way.values()}
        assert not targets & set(self.drains), "who leaves gets nothing"
        assert not (self.dismissed | set(self._sent_home)) & set(members.workers), "who has left is no member"

    # ---- their last words

    def says_goodbye(self, worker: int, connection: Hashable) -> bool:
        """Tell whether this is the goodbye of a worker that was told to stop, so that its Spark task ends normally."""
        gone = self._sent_home.get(worker)
        if gone is None or gone.connection != connection:
            return False
        self.slots.vacate(gone.about.index)
        return True

    def closed(self, worker: int) -> None:
        """Take the closed lifeline of a worker that takes part no more. Its goodbye may be lost: if Spark starts the task
        again, the new attempt is told to stop."""
        gone = self._sent_home.get(worker)
        if gone is not None:
            self.slots.vacate(gone.about.index)
