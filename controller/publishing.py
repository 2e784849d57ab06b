"""What every part of the controller stands on: the table, who takes part, and how orders go out."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from controller.membership import Member, Membership
from flux.control import FromController, NewTable, Stop
from flux.errors import FluxError
from flux.plan import Plan
from partitioning.table import Table


@dataclass(frozen=True, slots=True)
class Tell:
    """Effect: send an order on a connection."""

    connection: Hashable
    order: FromController


class Publishing:
    """``phase``: "starting", "running", "finished" (all output is there) or "ended" (everybody is sent home)."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.phase = "starting"
        self.error: FluxError | None = None
        self.members = Membership()
        self.table: Table | None = None
        self.complete: dict[int, list[int]] = {}
        self._changed = True  # there may be something to begin
        self._effects: list[Tell] = []

    def _publish(self, table: Table) -> None:
        self.table = table
        self._changed = True
        self._tell_all(NewTable(table=table, complete=self.complete))

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
