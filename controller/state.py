"""The controller's decisions as a state machine without I/O (DESIGN 2, 4, 7).

starting -> running -> finished -> ended: it waits for the workers, publishes the table, learns which streams there
are, hears that the last stages are through, and sends everybody home. A lost worker is taken out of the table in one
epoch, and the sweep adds replicas until there are enough again. The same sweep moves replicas: for balance, because
somebody asked for it, or to empty a worker that leaves. Whatever cannot be survived ends the query with one error that
says what would have prevented it. Rows never pass through here.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import flux.errors
from controller.membership import Member
from controller.moves import with_worker
from controller.operating import Operating
from controller.placement import Seat, first_table
from controller.publishing import Tell
from controller.wording import count, named
from flux.control import (
    EdgeComplete,
    Failure,
    Goodbye,
    GoodbyeSeen,
    Heartbeat,
    HeartbeatSeen,
    InStep,
    NewTable,
    PartitionFinished,
    Register,
    RegisterAgain,
    Rejected,
    ReplicaCaughtUp,
    ReplicaDiverged,
    Stop,
    TableSeen,
    ToController,
    Welcome,
)
from flux.errors import FluxError, QueryFailed, QueryTimeout
from flux.plan import Plan

__all__ = ["ALIVE_S", "Controller", "Tell"]

#: A worker that was heard so recently is alive: another attempt of its task is a speculative copy and has to wait.
ALIVE_S = 2.0


class Controller(Operating):
    """``phase``: "starting", "running", "finished" (all output is there) or "ended" (everybody is sent home).

    Built in layers, a file each: ``publishing`` (the table goes out), ``sweeping`` (repairs and moves), ``losing`` (who is
    given up), ``operating`` (what people and policies ask for), and here who takes part and when it is over."""

    def __init__(self, plan: Plan, slots: int, now: float) -> None:
        super().__init__(plan, slots)
        self.refused = 0
        self._workers_at_first = slots
        self._deadline = now + plan.settings.workers_timeout
        self._unfinished = {(stage.id, p) for stage in plan.terminal for p in range(stage.partitions)}
        self._keep = any(stage.collects for stage in plan.stages)

    @property
    def slots(self) -> int:
        """Slots that there are or were: numbers below this."""
        return self.places.count

    # ---- what processes say

    def on_report(self, connection: Hashable, message: ToController, now: float) -> list[Tell]:
        if isinstance(message, Register):
            self._on_register(connection, message, now)
        elif (member := self.members.by_connection(connection)) is None:
            if self._goes_home(connection, message):
                return self._take()
            self.refused += 1  # has not proved the secret, has lost its connection, or was given up
            ended = self.phase == "ended"
            answer = Stop(reason="the query has ended") if ended else RegisterAgain()
            self._effects.append(Tell(connection, answer))
        else:
            self._on_member(member, message, now)
        return self._take()

    def _on_member(self, member: Member, message: ToController, now: float) -> None:
        match message:
            case Heartbeat():
                member.heard, member.stats, member.progress = now, message.stats, message.progress
                member.turned = now
                self._count(member, message.stats, now)
                self._tell(member, HeartbeatSeen())
            case InStep():
                self._on_in_step(member, message, now)
            case TableSeen():
                member.epoch = max(member.epoch, message.epoch)
                self._sweep(now)
            case ReplicaCaughtUp():
                self._caught_up(message, now)
            case ReplicaDiverged():
                self._diverged(message, now)
            case PartitionFinished():
                self._on_finished(message, now)
            case Goodbye() if member.about.role == "worker":
                self.places.vacate(member.about.index)  # all go home: the query has ended
            case Goodbye():
                member.left = True
                self._tell(member, GoodbyeSeen())
                self._sweep(now)
            case Failure():
                self._end(_error(message))

    def _goes_home(self, connection: Hashable, message: ToController) -> bool:
        """Whether this is the last word of a worker that was sent home: its Spark task ends well."""
        gone = self._sent_home.get(message.node) if isinstance(message, Goodbye) else None
        if gone is None or gone.connection != connection:
            return False
        self.places.vacate(gone.about.index)
        return True

    def _count(self, member: Member, stats: dict[str, Any], now: float) -> None:
        if member.about.role == "worker":
            self._loads.take(member.node, stats)
            if self.table is not None:
                self.repairs.note_behind(member.node, stats.get("behind", ()), self.table, now)
            self.inputs.from_worker(member.node, stats.get("sources", ()))
        else:
            self.inputs.from_ingress(member.about.edges, member.about.index, stats.get("source_rows", 0))

    def _on_finished(self, message: PartitionFinished, now: float) -> None:
        self._unfinished.discard((message.stage, message.partition))
        if not self._unfinished and self.phase == "running":
            self.phase = "finished"
            if self._keep:
                self.moving.clear("the query is through; output that is fetched stays where it is", now)
            else:
                self._end(None)

    def _on_register(self, connection: Hashable, message: Register, now: float) -> None:
        if self.phase == "ended":
            self._effects.append(Tell(connection, Stop(reason="the query has ended")))
            return
        if message.role == "egress":
            self._show_table(connection, message)
            return
        known = self.members.attempt(message)
        if known is not None and message.attempt == known.about.attempt and message.node in (-1, known.node):
            known.connection, known.heard, known.turned = connection, now, now
            self._greet(known)  # it asked again before our answer had arrived, or comes on another connection
        elif message.node >= 0:
            self._turn_away(connection, message, replaced=known is not None)
        elif known is None:
            self._admit(connection, message, now)
        elif message.attempt < known.about.attempt:
            self._effects.append(Tell(connection, Rejected(reason="a newer attempt of this task has registered")))
        elif message.role == "ingress":
            self._admit(connection, message, now)
        elif now - known.heard > ALIVE_S:
            self._lost(known, "another attempt of its task has come", now)
            if self.phase != "ended":
                if self.table is not None:
                    # Should it live, its task must not end well: that would be the end of the new attempt too.
                    self._tell(known, Rejected(reason="another attempt of this task has registered"))
                self._admit(connection, message, now)
        # else: the older attempt is alive; this one asks again until that changes

    def _show_table(self, connection: Hashable, message: Register) -> None:
        """To a task that fetches output: it asks again when who has it does not answer."""
        if self.table is not None:
            self._effects.append(Tell(connection, Welcome(node=-1, incarnation=message.attempt)))
            self._effects.append(Tell(connection, NewTable(table=self.table, complete=self.complete)))

    def _turn_away(self, connection: Hashable, message: Register, replaced: bool) -> None:
        """A process that was given up, or ``replaced`` by another attempt, comes back."""
        member = self._sent_home.get(message.node) or Member(message.node, connection, message, 0.0)
        member.connection = connection
        if message.node in self._dismissed:
            self._tell(member, Stop(reason="this worker has left the query"))
        elif message.role == "worker" and self.table is not None and not replaced and self.members.knew(message.node):
            self._fence(member)  # also one that was taken for dead when its connection closed
        else:
            self._tell(member, Rejected(reason="another attempt of this task has registered"))

    def _admit(self, connection: Hashable, message: Register, now: float) -> None:
        if message.role == "worker" and not 0 <= message.index < self.slots:
            self._effects.append(
                Tell(connection, Rejected(reason=f"slot {message.index} of {self.slots} does not exist"))
            )
            return
        if message.role == "worker" and message.index in self.places.closed:
            self.places.vacate(message.index)
            self._effects.append(
                Tell(connection, Stop(reason=f"slot {message.index} was closed: the query has shrunk"))
            )
            return
        member = self.members.admit(connection, message, now)
        self._welcome(member)
        if message.role == "worker":
            self.places.owed.discard(message.index)  # Spark has started its task again on another executor
        if message.role == "worker" and self.table is not None:
            self._note_worker("join", member, f"slot {message.index}, {message.host} pid {message.pid}", now)
            self._publish(with_worker(self.table, member.node, message.endpoint))
            self.rounds.joined(now)
            self._sweep(now)
        elif self.table is not None:
            self._tell(member, NewTable(table=self.table, complete=self.complete))
        elif len(self.members.workers) == self.slots:
            self._start(now)

    def _welcome(self, member: Member) -> None:
        about = member.about
        self._tell(member, Welcome(node=member.node, incarnation=about.attempt, workers=self._workers_at_first))

    def _greet(self, member: Member) -> None:
        self._welcome(member)
        if self.table is not None:
            self._tell(member, NewTable(table=self.table, complete=self.complete))

    def _start(self, now: float) -> None:
        workers = sorted(self.members.workers.values(), key=lambda member: member.about.index)
        try:
            seats = [Seat(m.node, a.executor, a.endpoint, a.host, a.domain) for m in workers for a in [m.about]]
            table = first_table(self.plan, seats)
        except QueryFailed as error:
            self._end(error)
            return
        self.phase = "running"
        self._publish(table)

    # ---- what the driver says

    def on_edge_complete(self, edge: int, producers: list[int]) -> list[Tell]:
        """The Spark job that feeds this edge is over: these were its partitions."""
        self.complete[edge] = producers
        for member in self.members.ingress.values():
            member.left |= edge in member.about.edges  # also attempts that died without a word
        if self.table is not None:
            self._tell_all(EdgeComplete(edge=edge, producers=producers))
        return self._take()

    def on_job_failed(self, what: str, reason: str) -> list[Tell]:
        self._end(QueryFailed(f"{what} failed: {reason}"))
        return self._take()

    def on_tasks_ended(self, slots: Sequence[int], what: str, reason: str) -> list[Tell]:
        """The Spark tasks for these slots are over, and will not be started again. That of a closed slot may be."""
        for slot in slots:
            self.places.vacate(slot)
        wanted = [slot for slot in slots if slot not in self.places.closed]
        if wanted:
            self._end(QueryFailed(f"{what} failed: {reason} ({named('slot', wanted)})"))
        return self._take()

    def on_stop(self) -> list[Tell]:
        self._end(None)
        return self._take()

    def on_tick(self, now: float) -> list[Tell]:
        if self.phase == "starting" and now > self._deadline:
            here = sorted(member.about.index for member in self.members.workers.values())
            missing = sorted(set(range(self.slots)) - set(here))
            self._end(
                QueryTimeout(
                    f"{len(here)} of {count(self.slots, 'worker')} joined within {self.plan.settings.workers_timeout:g} s "
                    f"(spark.flux.workers.timeout); missing: {named('slot', missing)}. Are there "
                    f"{count(self.slots, 'free task slot')}, and can executors reach the driver?"
                )
            )
        if self.phase in ("running", "finished"):
            self._silent(now)  # output that is to be fetched has copies too
        if self.phase == "running":
            self._rebalance(now)
            self._sweep(now)
        return self._take()


def _error(failure: Failure) -> FluxError:
    """The error that the process had, as far as it is one of ours."""
    kind: Any = getattr(flux.errors, failure.kind, QueryFailed)
    if not (isinstance(kind, type) and issubclass(kind, FluxError)) or kind is flux.errors.RefusedError:
        kind = QueryFailed
    error: FluxError = kind(failure.message)
    error.traceback = failure.traceback
    return error
