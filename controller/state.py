"""The controller's decisions as a state machine without I/O (DESIGN 2, 4, 7).

starting -> running -> finished -> ended: it waits for the workers, publishes the table, learns which streams there
are, hears that the last stages are through, and sends everybody home. A lost worker is taken out of the table in one
epoch, and the sweep adds replicas until there are enough again. Whatever cannot be survived ends the query with one
error that says what would have prevented it. Rows never pass through here.
"""

from __future__ import annotations

import hmac
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import flux.errors
from controller.membership import Member, Membership
from controller.moves import drop, make_live, retain, with_worker, without_worker
from controller.placement import Seat, first_table
from controller.repairs import Repairs
from flux.control import (
    CopyState,
    EdgeComplete,
    Failure,
    FromController,
    Goodbye,
    GoodbyeSeen,
    Heartbeat,
    HeartbeatSeen,
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
from partitioning.table import Table

#: A worker that was heard so recently is alive: another attempt of its task is a speculative copy and has to wait.
ALIVE_S = 2.0


@dataclass(frozen=True, slots=True)
class Tell:
    """Effect: send an order on a connection."""

    connection: Hashable
    order: FromController


class Controller:
    """``phase``: "starting", "running", "finished" (all output is there) or "ended" (everybody is sent home)."""

    def __init__(self, plan: Plan, slots: int, now: float) -> None:
        self.plan = plan
        self.slots = slots
        self.phase = "starting"
        self.error: FluxError | None = None
        self.members = Membership()
        self.table: Table | None = None
        self.complete: dict[int, list[int]] = {}
        self.refused = 0
        self.repairs = Repairs(plan)
        self._deadline = now + plan.settings.workers_timeout
        self._unfinished = {(stage.id, p) for stage in plan.terminal for p in range(stage.partitions)}
        self._keep = any(stage.collects for stage in plan.stages)
        self._effects: list[Tell] = []

    # ---- what processes say

    def on_report(self, connection: Hashable, message: ToController, now: float) -> list[Tell]:
        if isinstance(message, Register):
            self._on_register(connection, message, now)
        elif (member := self.members.by_connection(connection)) is None:
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
                self._tell(member, HeartbeatSeen())
            case TableSeen():
                member.epoch = max(member.epoch, message.epoch)
                self._sweep(now)
            case ReplicaCaughtUp():
                self._caught_up(message, now)
            case ReplicaDiverged():
                self._diverged(message, now)
            case PartitionFinished():
                self._on_finished(message)
            case Goodbye():
                member.left = True
                self._tell(member, GoodbyeSeen())
                self._sweep(now)
            case Failure():
                self._end(_error(message))

    def _on_finished(self, message: PartitionFinished) -> None:
        self._unfinished.discard((message.stage, message.partition))
        if not self._unfinished and self.phase == "running":
            self.phase = "finished"
            if not self._keep:
                self._end(None)

    def _on_register(self, connection: Hashable, message: Register, now: float) -> None:
        if not hmac.compare_digest(message.secret, self.plan.secret):
            self.refused += 1
            self._effects.append(
                Tell(connection, Rejected(reason="wrong secret: this process belongs to another query"))
            )
            return
        if self.phase == "ended":
            self._effects.append(Tell(connection, Stop(reason="the query has ended")))
            return
        known = self.members.attempt(message)
        if known is not None and message.attempt == known.about.attempt and message.node in (-1, known.node):
            known.connection, known.heard = connection, now
            self._greet(known)  # it asked again before our answer had arrived, or comes on another connection
        elif message.node >= 0:
            self._turn_away(connection, message)
        elif known is None:
            self._admit(connection, message, now)
        elif message.attempt < known.about.attempt:
            self._effects.append(Tell(connection, Rejected(reason="a newer attempt of this task has registered")))
        elif message.role == "ingress":
            self._admit(connection, message, now)
        elif now - known.heard > ALIVE_S:
            self._lost(known, "another attempt of its task has come", now)
            if self.phase != "ended":
                self._admit(connection, message, now)
        # else: the older attempt is alive; this one asks again until that changes

    def _turn_away(self, connection: Hashable, message: Register) -> None:
        """A process that was given up, or replaced by another attempt, comes back on a new connection."""
        if message.role == "worker" and self.table is not None:
            # The table without it says all: it ends, and comes back as a new one.
            self._effects.append(Tell(connection, NewTable(table=self.table, complete=self.complete)))
        else:
            self._effects.append(Tell(connection, Rejected(reason="another attempt of this task has registered")))

    def _admit(self, connection: Hashable, message: Register, now: float) -> None:
        if message.role == "worker" and not 0 <= message.index < self.slots:
            self._effects.append(
                Tell(connection, Rejected(reason=f"slot {message.index} of {self.slots} does not exist"))
            )
            return
        member = self.members.admit(connection, message, now)
        self._tell(member, Welcome(node=member.node, incarnation=member.about.attempt, workers=self.slots))
        if message.role == "worker" and self.table is not None:
            self._publish(with_worker(self.table, member.node, message.endpoint))
            self._sweep(now)
        elif self.table is not None:
            self._tell(member, NewTable(table=self.table, complete=self.complete))
        elif len(self.members.workers) == self.slots:
            self._start(now)

    def _greet(self, member: Member) -> None:
        self._tell(member, Welcome(node=member.node, incarnation=member.about.attempt, workers=self.slots))
        if self.table is not None:
            self._tell(member, NewTable(table=self.table, complete=self.complete))

    def _start(self, now: float) -> None:
        workers = sorted(self.members.workers.values(), key=lambda member: member.about.index)
        try:
            table = first_table(self.plan, [Seat(m.node, m.about.executor, m.about.endpoint) for m in workers])
        except QueryFailed as error:
            self._end(error)
            return
        self.phase = "running"
        self._publish(table)

    def _publish(self, table: Table) -> None:
        self.table = table
        self._tell_all(NewTable(table=table, complete=self.complete))

    # ---- losses

    def on_closed(self, worker: int, now: float) -> list[Tell]:
        """The lifeline of a worker is closed: it is gone for certain."""
        member = self.members.workers.get(worker)
        if member is not None:
            self._lost(member, "its connection closed", now)
        return self._take()

    def _lost(self, member: Member, why: str, now: float) -> None:
        """Take a worker out of the table; survivors take over what it had."""
        del self.members.workers[member.node]
        if self.table is None or self.phase == "ended":
            return
        readers = [node for node in self.table.endpoints if node != member.node]
        table, orphans = without_worker(self.table, member.node, self.repairs.is_safe, readers)
        if self.phase == "finished":  # what has been handed on is no loss
            orphans = [(stage, partition) for stage, partition in orphans if self.plan.stages[stage].collects]
        if orphans:
            self._end(self._all_gone(member, orphans, why))
            return
        self.repairs.note_loss(member, why, self.table, table, now)
        self._publish(table)
        # Should it be alive after all, this tells it that it was given up.
        self._tell(member, NewTable(table=table, complete=self.complete))
        self._sweep(now)

    def _all_gone(self, member: Member, orphans: list[tuple[int, int]], why: str) -> QueryFailed:
        lost = [f"{self.plan.stages[stage].name}/{partition}" for stage, partition in orphans]
        named = ", ".join(lost[:8]) + (f" and {len(lost) - 8} more" if len(lost) > 8 else "")
        copies = sorted({self.plan.stages[stage].replicas for stage, _ in orphans})
        advice = (
            "Stages with replicas=1 do not survive the loss of a worker; replicas=2 does"
            if copies[0] == 1
            else f"More losses at once than replicas={copies[0]} survives; a higher number, or more executors, would have helped"
        )
        return QueryFailed(
            f"worker {member.node} (slot {member.about.index}, {member.about.host} pid {member.about.pid}) was lost "
            f"({why}), and with it the only safe copy of {named}. {advice}"
        )

    def _silent(self, now: float) -> None:
        """Give up workers that say nothing, unless one holds the last safe copy of something: it may only be slow."""
        settings = self.plan.settings
        for member in list(self.members.workers.values()):
            quiet = now - member.heard
            if quiet <= settings.heartbeat_timeout or self.table is None:
                continue
            _, orphans = without_worker(self.table, member.node, self.repairs.is_safe, [])
            if not orphans or quiet > settings.heartbeat_last_timeout:
                self._lost(member, f"no heartbeat for {quiet * 1e3:.0f} ms", now)
                if self.phase == "ended":
                    return

    # ---- repair

    def _sweep(self, now: float) -> None:
        if self.table is None or self.phase != "running":
            return
        processes = [*self.members.workers.values(), *self.members.ingress.values()]
        epoch_of_all = min((member.epoch for member in processes if not member.left), default=-1)
        for addition in self.repairs.confirmed(epoch_of_all):
            addition.phase = "copy"
        while (wanted := self.repairs.next(self.table, self.members)) is not None:
            self._publish(retain(self.table, wanted.stage, wanted.partition, wanted.worker))
            self.repairs.begin(wanted, self.table.epoch, now)
        for addition in self.repairs.to_ask(now):
            primary = self.table.stages[addition.stage][addition.partition][0].worker
            order = CopyState(
                stage=addition.stage,
                partition=addition.partition,
                worker=addition.worker,
                incarnation=addition.incarnation,
            )
            self._tell(self.members.workers[primary], order)

    def _caught_up(self, message: ReplicaCaughtUp, now: float) -> None:
        if self.table is None:
            return
        if message.safe:
            self.repairs.safe(message, now)
            self._sweep(now)
        elif self.repairs.caught_up(message):
            self._publish(make_live(self.table, message.stage, message.partition, message.worker))

    def _diverged(self, message: ReplicaDiverged, now: float) -> None:
        """The secondary is dropped; the sweep builds it anew from the primary."""
        if self.table is None or not self.repairs.note_divergence(message, self.table, now):
            return
        if (hopeless := self.repairs.too_divergent()) is not None:
            name = f"{self.plan.stages[hopeless[0]].name}/{hopeless[1]}"
            self._end(
                QueryFailed(f"the replicas of {name} keep giving different output: its operator is not deterministic")
            )
            return
        self._publish(drop(self.table, message.stage, message.partition, message.worker))
        self._sweep(now)

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

    def on_stop(self) -> list[Tell]:
        self._end(None)
        return self._take()

    def on_tick(self, now: float) -> list[Tell]:
        if self.phase == "starting" and now > self._deadline:
            here = sorted(member.about.index for member in self.members.workers.values())
            missing = sorted(set(range(self.slots)) - set(here))
            self._end(
                QueryTimeout(
                    f"{len(here)} of {self.slots} workers joined within {self.plan.settings.workers_timeout:g} s "
                    f"(spark.flux.workers.timeout); missing are slots {missing}. Are there {self.slots} free task slots, and "
                    "can executors reach the driver?"
                )
            )
        if self.phase == "running":
            self._silent(now)
            self._sweep(now)
        return self._take()

    # ---- ends

    def _end(self, error: FluxError | None) -> None:
        if self.phase == "ended":
            return
        self.phase = "ended"
        self.error = error
        self._tell_all(Stop(reason=str(error) if error else "the query has ended"))

    def _tell(self, member: Member, order: FromController) -> None:
        self._effects.append(Tell(member.connection, order))

    def _tell_all(self, order: FromController) -> None:
        for member in [*self.members.workers.values(), *self.members.ingress.values()]:
            self._tell(member, order)

    def _take(self) -> list[Tell]:
        effects, self._effects = self._effects, []
        return effects


def _error(failure: Failure) -> FluxError:
    """The error that the process had, as far as it is one of ours."""
    kind: Any = getattr(flux.errors, failure.kind, QueryFailed)
    if not (isinstance(kind, type) and issubclass(kind, FluxError)) or kind is flux.errors.RefusedError:
        kind = QueryFailed
    return kind(failure.message)
