"""The controller's decisions as a state machine without I/O (DESIGN 2, 4, 7).

starting -> running -> finished -> ended: it waits for the workers, publishes the table, learns which streams there
are, hears that the last stages are through, and sends everybody home. Whatever goes wrong on the way ends the query
with one error that says what would have prevented it. Rows never pass through here.
"""

from __future__ import annotations

import hmac
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import flux.errors
from controller.membership import Member, Membership
from controller.placement import first_table
from flux.control import (
    EdgeComplete,
    Failure,
    FromController,
    Heartbeat,
    HeartbeatSeen,
    NewTable,
    PartitionFinished,
    Register,
    Rejected,
    Stop,
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
        self._deadline = now + plan.settings.workers_timeout
        self._unfinished = {(stage.id, p) for stage in plan.terminal for p in range(stage.partitions)}
        self._keep = any(stage.collects for stage in plan.stages)
        self._effects: list[Tell] = []

    # ---- what processes say

    def on_report(self, connection: Hashable, message: ToController, now: float) -> list[Tell]:
        match message:
            case Register():
                self._on_register(connection, message, now)
            case _ if (member := self.members.by_connection(connection)) is None:
                self.refused += 1  # has not proved the secret
            case Heartbeat():
                member.heard, member.stats, member.progress = now, message.stats, message.progress
                self._tell(member, HeartbeatSeen())
            case PartitionFinished():
                self._unfinished.discard((message.stage, message.partition))
                if not self._unfinished and self.phase == "running":
                    self.phase = "finished"
                    if not self._keep:
                        self._end(None)
            case Failure():
                self._end(_error(message))
        return self._take()

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
        if known is not None and known.connection == connection:
            self._greet(known)  # it asked again before our answer had arrived
        elif known is None:
            self._admit(connection, message, now)
        elif message.attempt < known.about.attempt:
            self._effects.append(Tell(connection, Rejected(reason="a newer attempt of this task has registered")))
        elif message.role == "ingress":
            self._admit(connection, message, now)
        elif now - known.heard > ALIVE_S:
            self._lost(known)
        # else: the older attempt is alive; this one asks again until that changes

    def _admit(self, connection: Hashable, message: Register, now: float) -> None:
        if message.role == "worker" and not 0 <= message.index < self.slots:
            self._effects.append(
                Tell(connection, Rejected(reason=f"slot {message.index} of {self.slots} does not exist"))
            )
            return
        self._greet(self.members.admit(connection, message, now))
        if self.phase == "starting" and len(self.members.workers) == self.slots:
            self._start()

    def _greet(self, member: Member) -> None:
        self._tell(member, Welcome(node=member.node, incarnation=member.about.attempt))
        if self.table is not None:
            self._tell(member, NewTable(table=self.table, complete=self.complete))

    def _start(self) -> None:
        self.phase = "running"
        workers = sorted(self.members.workers, key=lambda node: self.members.workers[node].about.index)
        endpoints = {node: self.members.workers[node].about.endpoint for node in workers}
        self.table = first_table(self.plan, workers, endpoints)
        self._tell_all(NewTable(table=self.table, complete=self.complete))

    def _lost(self, member: Member) -> None:
        """With one copy of each partition a lost worker is the end; a second copy would have taken over."""
        assert self.plan.stages
        if self.table is None:
            del self.members.workers[member.node]  # nothing was placed there yet
            return
        lost = [
            f"{stage.name}/{partition}"
            for stage in self.plan.stages
            for partition, replicas in enumerate(self.table.stages[stage.id])
            if all(replica.worker == member.node for replica in replicas)
        ]
        named = ", ".join(lost[:8]) + (f" and {len(lost) - 8} more" if len(lost) > 8 else "")
        self._end(
            QueryFailed(
                f"worker {member.node} (slot {member.about.index}, {member.about.host} pid {member.about.pid}) was lost, and "
                f"with it the only copy of {named}. Stages with replicas=1 do not survive the loss of a worker"
            )
        )

    # ---- what the driver says

    def on_edge_complete(self, edge: int, producers: list[int]) -> list[Tell]:
        """The Spark job that feeds this edge is over: these were its partitions."""
        self.complete[edge] = producers
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
