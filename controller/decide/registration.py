"""Attendance: processes that register, and are admitted, turned away or left waiting (design: incarnation,
given-up-worker, started-elsewhere)."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from controller.course.query_phases import QueryPhase
from controller.decide.balancer import Balancer
from controller.decide.board import Board
from controller.decide.departures import Departures
from controller.decide.losses import Losses
from controller.decide.slots import Slots
from controller.decide.sweep import Sweep
from controller.replicas.membership import Member, goes_on
from controller.replicas.spread import WorkerPlace
from controller.replicas.table_changes import with_worker
from flux.wire.control import Register, Rejected, Stop, Welcome

#: A worker that was heard within this time is alive: another attempt of its task is a speculative one and has to wait.
ALIVE_S = 2.0
#: The most workers in succession that are started elsewhere. Spark chooses among executors with a free core, and rarely misses
#: one without a worker as often as that.
ELSEWHERE_MAX = 8
#: Seconds until the next one is started elsewhere; they double, up to the second number, or ``spark.flux.controller.timeout`` if
#: that is less, as a worker without an answer ends then. That is some twenty seconds in all: another executor may be on its way
#: in place of one that was lost.
ELSEWHERE_S, ELSEWHERE_MOST_S = 0.25, 5.0


class Registration:
    """Registration of processes. ``all_here(now)`` is called when the last worker that the query waits for at its start has
    come."""

    def __init__(
        self,
        board: Board,
        slots: Slots,
        departures: Departures,
        losses: Losses,
        sweeper: Sweep,
        balancer: Balancer,
        all_here: Callable[[float], None],
    ) -> None:
        self._board = board
        self._slots = slots
        self._departures = departures
        self._losses = losses
        self._sweeper = sweeper
        self._balancer = balancer
        self._all_here = all_here
        self._workers_at_first = board.plan.began_with or slots.count
        #: Workers that have been started elsewhere since replicas had executors enough, and the earliest time for the next one.
        self._elsewhere, self._elsewhere_at = 0, 0.0

    def register(self, connection: Hashable, message: Register, now: float) -> None:
        """Answer a process that registers: greet it again, admit it, or turn it away. A newer attempt gets no answer while the
        older one is alive. The present attempt comes first, so that it may register again at any time. Any other process that
        already has a number was given up or replaced: it is turned away, and never becomes a new member."""
        board = self._board
        if board.phase == QueryPhase.ENDED:
            board.answer(connection, Stop(reason="the query has ended"))
            return
        if message.role == "egress":
            self.show_table(connection, message)
            return
        known = board.members.attempt(message)
        same = known is not None and (message.role != "vault" or message.endpoint == known.about.endpoint)
        if known is not None and same and message.attempt == known.about.attempt and message.node in (-1, known.node):
            known.connection, known.heard, known.turned = connection, now, now
            # The process registered again before the answer had arrived, or comes on another connection.
            self._greet(known)
            self._sweeper.order_again(known.node)
            self._departures.ask_again(known)
        elif known is not None and message.role == "vault":
            board.answer(connection, Rejected(reason="the query has a vault"))
        elif message.node >= 0:
            self._departures.turn_away(connection, message, replaced=known is not None)
        elif known is None:
            self._admit(connection, message, now)
        elif message.attempt < known.about.attempt:
            board.answer(connection, Rejected(reason="a newer attempt of this task has registered"))
        elif message.role == "ingress":
            self._admit(connection, message, now)
        elif now - known.heard > ALIVE_S:
            self._losses.lose(known, "another attempt of its task has come", now)
            self._replace(known, connection, message, now)
        # else: the older attempt is alive; the new one registers again and again until that changes

    def _replace(self, known: Member, connection: Hashable, message: Register, now: float) -> None:
        """Admit a newer attempt after the loss of the older one, unless that loss has ended the query."""
        board = self._board
        if board.phase == QueryPhase.ENDED:
            return
        if board.table is not None:
            # If the older attempt still lives, its task must fail: Spark would take a normal end for success and kill
            # the new attempt.
            board.tell(known, Rejected(reason="another attempt of this task has registered"))
        self._admit(connection, message, now)

    def show_table(self, connection: Hashable, message: Register) -> None:
        """Show the table to a task that fetches output. The task asks again when the worker with the output does not answer."""
        if self._board.table is not None:
            self._board.answer(connection, Welcome(node=-1, incarnation=message.attempt))
            self._board.show_table(connection)

    def _admit(self, connection: Hashable, message: Register, now: float) -> None:
        board, slots = self._board, self._slots
        if message.role == "worker" and not 0 <= message.index < slots.count:
            board.answer(connection, Rejected(reason=f"slot {message.index} of {slots.count} does not exist"))
            return
        if message.role == "worker" and message.index in slots.closed:
            slots.vacate(message.index)
            board.answer(connection, Stop(reason=f"slot {message.index} was closed: the query has shrunk"))
            return
        if message.role == "worker" and self._is_started_elsewhere(connection, message, now):
            return
        if message.role == "ingress" and not any(edge in board.plan.edges for edge in message.edges):
            # Repairs and changes wait for each process that takes part, and nothing tells of the death of this one.
            board.answer(connection, Stop(reason="nothing reads its source any more"))
            return
        member = board.members.admit(connection, message, now)
        if goes_on(board.plan, message):
            member.left = False  # it may have rows of another batch than the attempt before
        self._welcome(member)
        if message.role == "worker":
            slots.owed.discard(message.index)  # Spark has started its task again on another executor
        if message.role == "worker" and board.table is not None:
            board.note_worker("join", member, f"slot {message.index}, {message.host} pid {message.pid}", now)
            board.publish(with_worker(board.table, member.node, message.endpoint))
            self._balancer.rounds.joined(now)
            self._sweeper.sweep(now)
        elif board.table is not None:
            board.show_member(member)
            return
        if message.role == "vault":
            board.disks.open(member.node, message.endpoint, message.first_epoch)
        if board.table is None and len(board.members.workers) >= len(slots.open) and self._has_vault:
            self._all_here(now)

    def _is_started_elsewhere(self, connection: Hashable, message: Register, now: float) -> bool:
        """Tell whether a worker is not admitted, because it has come to the executor of another worker, and replicas lack
        executors: another slot is opened in the place of its own, and it ends. Before that is due it gets no answer, registers
        again, and is admitted if there are executors enough by then (design: started-elsewhere)."""
        board = self._board
        if board.phase != QueryPhase.RUNNING or board.plan.settings.same_executor:
            return False
        needed = max((board.wishes.places(stage) for stage in board.wishes.plan.stages), default=0)
        executor = WorkerPlace.of(message.domain, message.host, message.executor).executor
        staying = [member for member in board.members.workers.values() if not member.leaving]
        beside = [member.node for member in staying if member.place.executor == executor]
        if not beside or board.placement().room() >= needed:
            self._elsewhere, self._elsewhere_at = 0, 0.0
            return False
        if now < self._elsewhere_at:
            return True
        if self._elsewhere == ELSEWHERE_MAX:
            board.note(
                f"slot {message.index} gets a worker on the executor of worker {beside[0]}, and replicas of a partition may not "
                f"share one: Spark has started none on another executor in {ELSEWHERE_MAX} attempts. If one has a free core by "
                "now, flux scale adds a worker",
                now,
            )
            return False
        most = min(ELSEWHERE_MOST_S, board.plan.settings.controller_timeout)
        self._elsewhere_at = now + min(ELSEWHERE_S * 2**self._elsewhere, most)
        self._elsewhere += 1
        self._slots.renew(message.index)
        self._slots.vacate(message.index)
        board.answer(connection, Stop(reason="replicas need another executor: a worker is started in another slot"))
        return True

    @property
    def _has_vault(self) -> bool:
        """The vault is there, or the query needs none."""
        return self._board.members.vault is not None or not self._board.plan.durable

    def _welcome(self, member: Member) -> None:
        about = member.about
        # Streams of an earlier life of the query, which the directory knows, are older than those of this life.
        incarnation = about.attempt + self._board.disks.first_epoch
        self._board.tell(member, Welcome(node=member.node, incarnation=incarnation, workers=self._workers_at_first))

    def _greet(self, member: Member) -> None:
        self._welcome(member)
        self._board.show_member(member)
