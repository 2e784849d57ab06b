"""Variants of the code in which tables that travel as changes go wrong."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flux.wire.control import TableChanged
from flux.worker.table_follower import TableFollower

Patch = pytest.MonkeyPatch


def applies_changes_to_any_table(patch: Patch) -> None:
    """Apply a change to the table that is there, though it is a change of another one."""
    take = TableFollower.take

    def broken(self: TableFollower, command: Any) -> Any:
        if isinstance(command, TableChanged) and self.table is not None:
            command = TableChanged(change=msgspec.structs.replace(command.change, base=self.epoch))
        return take(self, command)

    patch.setattr(TableFollower, "take", broken)


def never_asks_for_a_table(patch: Patch) -> None:
    """Let a process that has missed a change wait for the next whole table."""
    patch.setattr(TableFollower, "ask", lambda self, now: False)
