"""The newest table, which mostly arrives as changes (design: table-change).

A change applies to one table and fits no other. If a change is lost, late or repeated, later ones may not fit. Then the process
asks for the whole table, and asks again for as long as only changes come.

``Unneeded`` finds links that have had nothing to do for a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from flux.wire.control import NewTable, TableChanged
from partitioning.table import Table, changed_by

if TYPE_CHECKING:
    from flux.worker.core import WorkerCore


class TableFollower:
    """The newest table of one process."""

    def __init__(self, again_s: float) -> None:
        """Begin without a table. ``again_s``: seconds that an answer may take."""
        self.table: Table | None = None
        #: A change came that does not fit, and the whole table has not come since.
        self.missed = False
        self._again_s = again_s
        self._ask_at = 0.0

    @property
    def epoch(self) -> int:
        return -1 if self.table is None else self.table.epoch

    def take(self, command: NewTable | TableChanged) -> Table | None:
        """Take a table or a change. Return the table to go by from now on; None: it stays as it is."""
        if isinstance(command, NewTable):
            if command.table.epoch < self.epoch:
                return None
            self.missed = False
            newer = command.table.epoch > self.epoch
            self.table = command.table
            return self.table if newer else None
        change = command.change
        if change.epoch <= self.epoch:
            return None
        if self.table is None or change.base != self.epoch:
            self.missed = True
            return None
        try:
            self.table = changed_by(self.table, change)
        except ValueError:
            self.missed = True
            return None
        self.missed = False
        return self.table

    def heard_of(self, epoch: int) -> None:
        """Note the epoch by which the controller goes. It has sent that table before it said so."""
        self.missed |= epoch > self.epoch

    def ask(self, now: float) -> bool:
        """Tell whether it is time to ask for the whole table."""
        if not self.missed or now < self._ask_at:
            return False
        self._ask_at = now + self._again_s
        return True


#: Seconds for which an unneeded link stays open: a move that comes back, or the next of several repairs, finds it open, and the
#: last answers have come by then.
GRACE_S = 5.0


def partners(core: WorkerCore) -> set[int]:
    """Return the workers with consumers of its streams, those with other replicas of its primaries, and the vault if it is
    asked."""
    found: set[int] = set()
    for producer in core.producers.values():
        found |= producer.readers
    for replica in core.replicas.values():
        found |= replica.order.peers.keys()
    return found | core.reaches


class Unneeded:
    """The unneeded links of a worker, with the time since which each has had nothing to do.

    The workers that this one has to reach, and the time for which links to others have had nothing to do (design: links).

    A worker greets every worker that hosts consumers of its streams, sends orders and copies of state to the other replicas of
    its primaries, and answers all other workers on their own connections. Moves and repairs change these workers: if links were
    never closed, a worker of a large cluster would have one to every other worker after a while."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._since: dict[int, float] = {}

    def look(self, linked: Iterable[int], needed: set[int], now: float) -> list[int]:
        """List the workers whose link has not been needed for the grace time."""
        self._since = {worker: self._since.get(worker, now) for worker in linked if worker not in needed}
        return [worker for worker, since in self._since.items() if now - since >= self._grace_s]
