"""The newest table, which mostly arrives as changes (design: table-change).

A change applies to one table and fits no other. If a change is lost, late or repeated, later ones may not fit. Then the process
asks for the whole table, and asks again for as long as only changes come.
"""

from __future__ import annotations

from flux.wire.control import NewTable, TableChanged
from partitioning.table import Table, changed_by


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
