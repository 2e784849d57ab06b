"""The board, which all parts of the controller read and write: the processes that take part, the table, and the
commands that go out.

Law: every table goes as a whole, with a higher epoch than the one before, to all processes that take part. A process
that has confirmed an epoch goes by that table and by none before it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from controller.course.query_phases import QueryEvent, QueryPhase, after
from controller.replicas.additions import Moment
from controller.replicas.membership import Member, Membership
from controller.replicas.placement import Placement
from controller.replicas.protection_wishes import ProtectionWishes
from controller.replicas.table_index import TableIndex
from controller.replicas.vault_replicas import VaultReplicas
from controller.report.events import Event, EventLog
from controller.text import some
from flux.dataflow.plan import Plan
from flux.errors import FluxError, UsageError
from flux.operators.user_code import text_of
from flux.wire.control import FromController, NewTable, Stop, TableChanged
from partitioning.ids import PartitionKey
from partitioning.table import Table, change_between

#: Processes that a sentence names; further ones are only counted.
NAMED = 4


@dataclass(frozen=True, slots=True)
class StageFailure:
    """A failure of some stages. Stages that do not depend on them go on."""

    stages: tuple[int, ...]
    error: FluxError


@dataclass(frozen=True, slots=True)
class Tell:
    """Effect: send a command on a connection."""

    connection: Hashable
    command: FromController


class Board:
    """The common state of the controller's parts.

    ``phase`` is that of the query; ``error`` the one with which it ended; ``complete`` has the partitions of the edges whose
    Spark jobs are over; ``changed``: the sweep may have something to begin; ``wishes`` are the protections of the stages by
    now, where ``plan`` has those of the start."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        #: The checkpoint location, as errors name it.
        self.location = plan.location or "of this query"
        self.wishes = ProtectionWishes(plan)
        self.phase = QueryPhase.STARTING
        self.error: FluxError | None = None
        self.members = Membership()
        self.disks = VaultReplicas()
        self.events = EventLog()
        self.table: Table | None = None
        self.complete: dict[int, list[int]] = {}
        #: Watermarks of edges from micro-batches.
        self.watermarks: dict[int, int] = {}
        #: There was a table before.
        self.has_begun = False
        self.changed = True
        self._columns = TableIndex(plan)
        self._failures: list[StageFailure] = []
        self._effects: list[Tell] = []
        self._placement: Placement | None = None
        self._placed_for: list[Member] = []  # the members for which that placement is
        self._late: list[Member] = []  # members that had not confirmed some table; others may have joined since

    # ---- the plan

    def follow(self, plan: Plan) -> None:
        """Go by another version of the plan from now on, before the table that needs it."""
        self.plan = plan
        self._columns = TableIndex(plan, self._columns.version + 1)
        self.wishes.follow(plan)
        for known in (self.complete, self.watermarks):
            for edge in [edge for edge in known if edge not in plan.edges]:
                del known[edge]

    # ---- the table

    def publish(self, table: Table) -> None:
        """Let all processes go by this table from now on."""
        before = None if self.table is None else self.shown
        assert before is None or table.epoch > before.epoch, "an epoch is used once"
        self.table, self.changed, self.has_begun = table, True, True
        shown = self.shown
        whole = self.whole_table()
        change = None if before is None else TableChanged(change=change_between(before, shown))
        for member in self.members.processes:
            if member.left:
                continue  # all that it has sent is applied, so no table concerns it
            if before is not None and change is not None and member.shown == before.epoch:
                self.tell(member, change)
            else:
                self.tell(member, whole)
            member.shown = table.epoch

    def whole_table(self) -> NewTable:
        """Return the command to go by the present table."""
        return NewTable(table=self.shown, complete=self.complete, watermarks=self.watermarks)

    @property
    def shown(self) -> Table:
        """Return the table with the replica of the vault at the end of each row, if there is a vault."""
        assert self.table is not None
        return self.table if self.members.vault is None else self.disks.shown(self.table)

    def wait_for_workers(self) -> None:
        """Begin again, with nothing hosted except at the vault. The next table is a first one, with an epoch above all before."""
        assert self.table is not None
        self.disks.begin_again(self.table.epoch + 1)
        self.table = None
        self.on(QueryEvent.ALL_GONE)

    def columns(self) -> TableIndex | None:
        """Return the table as arrays, None before the first. Ask for it again after every change."""
        return None if self.table is None else self._columns.look(self.table)

    def show_table(self, connection: Hashable) -> None:
        """Show the whole table to a process that takes no part; nothing before the first table."""
        if self.table is not None:
            self.answer(connection, self.whole_table())

    def show_member(self, member: Member) -> None:
        """Show the whole table to a process that comes later, or has missed a change."""
        if self.table is not None:
            self.show_table(member.connection)
            member.shown = self.table.epoch

    def is_confirmed(self, epoch: int) -> bool:
        """Tell whether all processes go by the table of this epoch, or by a newer one. This is called for each confirmation, so
        the members that were late at the last call are checked first."""
        while self._late:
            member = self._late[-1]
            if self.members.knows(member) and not member.left and member.epoch < epoch:
                return False
            self._late.pop()
        self._late = [member for member in self.members.processes if not member.left and member.epoch < epoch]
        return not self._late

    def who_is_behind(self, epoch: int) -> str:
        """Name the processes that do not go by this epoch yet."""
        late = [member for member in self.members.processes if not member.left and member.epoch < epoch]
        return some([member.name for member in late], NAMED)

    def log_room(self) -> float:
        """Return the free share of the fullest log of all processes, by their last reports."""
        logs = [member.stats.get("log_bytes", 0) for member in self.members.processes if not member.left]
        return max(1.0 - max(logs, default=0) / self.plan.settings.log_max_bytes, 0.0)

    # ---- placement

    def placement(self) -> Placement:
        """Return the placement for the workers of this moment. Ask for another one after every change."""
        if self._placement is None or self._placed_for is not self.members.processes:
            self._placement = self.members.placement(self.plan.settings.same_executor)
            self._placed_for = self.members.processes
        return self._placement

    def moment(self, table: Table, resting: AbstractSet[PartitionKey], now: float) -> Moment:
        """Make the facts by which additions to this table are chosen. The partitions that are ``resting`` get none."""
        return Moment(table, self.placement(), resting, self.log_room(), now)

    # ---- the course of the query

    def on(self, event: QueryEvent) -> None:
        self.phase = after(self.phase, event)

    def fail(self, error: FluxError, stages: Iterable[int] = ()) -> bool:
        """Take an error. It ends the ``stages`` in which it has happened, and all that depends on them, if the user has asked for
        that (``spark.flux.onFailure``), else the query. Return whether the query goes on."""
        meant = list(stages)
        concerned = tuple(stage for stage in meant if stage in self.plan.stages)
        if meant and not concerned:
            return True  # the stages are gone already
        if concerned and self.plan.settings.on_failure == "stage" and self.phase == QueryPhase.RUNNING:
            self._failures.append(StageFailure(concerned, error))
            return True
        self.end(error)
        return False

    def take_failures(self) -> list[StageFailure]:
        """Return the failures of stages since the last call."""
        failures, self._failures = self._failures, []
        return failures

    def end(self, error: FluxError | None) -> None:
        """Tell all processes to stop. The first error stays."""
        if self.phase == QueryPhase.ENDED:
            return
        self.on(QueryEvent.OVER)
        self.error = error
        self.tell_all(Stop(reason=text_of(error) if error else "the query has ended"))

    def require_running(self, what: str) -> Table:
        """Return the table. UsageError: the query is not running; ``what`` names the call in the message, such as "move
        partitions"."""
        if self.phase != QueryPhase.RUNNING or self.table is None:
            raise UsageError(f"cannot {what}: the query is {self.phase}, and that needs one that is running")
        return self.table

    # ---- commands

    def answer(self, connection: Hashable, command: FromController) -> None:
        self._effects.append(Tell(connection, command))

    def tell(self, member: Member, command: FromController) -> None:
        self.answer(member.connection, command)

    def tell_all(self, command: FromController) -> None:
        for member in self.members.processes:
            self.tell(member, command)

    def take(self) -> list[Tell]:
        """Return the commands since the last call."""
        effects, self._effects = self._effects, []
        return effects

    def validate(self) -> None:
        """Check that the table is about workers that take part, and about each at most once per partition."""
        table = self.table
        assert (table is None) == (self.phase == QueryPhase.STARTING) or self.phase == QueryPhase.ENDED
        if table is None or self.phase == QueryPhase.ENDED:
            return
        assert set(table.endpoints) == set(self.members.workers), "workers in the table, and those that take part"
        assert all(member.epoch <= table.epoch for member in self.members.processes), "an epoch that is not made yet"
        assert {owner for owners in table.sources for owner in owners} <= set(table.endpoints), "who reads sources"
        for stage, partitions in enumerate(table.stages):
            for partition, replicas in enumerate(partitions):
                workers = {replica.worker for replica in replicas}
                assert len(workers) == len(replicas), f"{stage}/{partition}: two replicas on a worker"
                assert workers <= set(table.endpoints), f"{stage}/{partition}: a replica on a worker that is gone"
                served = replicas or self.phase != QueryPhase.RUNNING or self.plan.settings.on_failure == "stage"
                assert served, f"{stage}/{partition}: nobody has it"

    # ---- events

    def note(
        self, text: str, now: float, kind: str = "warning", request: int = 0, stage: str = "", seconds: float = 0.0
    ) -> Event:
        """Note an event of the query as a whole, or of a stage. Return it with the time of the wall clock."""
        return self.events.note(Event(kind, now, stage, -1, -1, text, seconds=round(seconds, 6), request=request))

    def note_worker(
        self, kind: str, member: Member, why: str, now: float, seconds: float = 0.0, request: int = 0
    ) -> None:
        self.events.note(Event(kind, now, "", -1, member.node, why, round(seconds, 6), request=request))
