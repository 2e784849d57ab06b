"""Variants in which the directory holds less than the vault has answered for, or other things (design: vault)."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from controller.course.query_phases import QueryPhase
from controller.decide.driver_events import DriverEvents
from flux.replica.order_log import OrderLog
from flux.state import standby as image
from flux.state.sender import StateSender
from flux.state.standby import CheckpointTaken, Standby, StandbyChange
from flux.vault import journal
from flux.vault.journal import Journal, Whole
from flux.vault.vault import Vault
from flux.worker.effects import Effect
from tests.simulation.vault_process import VaultProcess

Patch = pytest.MonkeyPatch
#: Records that are written down later than they are answered.
LATE = 30


def answers_before_it_is_durable(patch: Patch) -> None:
    """Answer before a record is durable: the newest records may be lost with the vault, though they were answered."""

    def passed(self: Vault, effects: Iterator[Effect], now: float) -> Iterator[Effect]:
        yield from [*effects, *self._handing.poll(now)]
        if len(self.journal._pending) > LATE:
            self.journal.flush()

    patch.setattr(Vault, "passed", passed)


def checkpoints_are_forgotten(patch: Patch) -> None:
    """Leave checkpoints out of the journal, though they are acked."""

    on_change = Journal._on_change

    def noted(self: Journal, standby: Standby, change: StandbyChange) -> None:
        if not isinstance(change, CheckpointTaken):
            on_change(self, standby, change)

    patch.setattr(Journal, "_on_change", noted)


def a_segment_begins_without_earlier_changes(patch: Patch) -> None:
    """Write the newest changes of a checkpoint into a new segment without the changes before them."""
    whole = journal.whole_of

    def shorter(standby: Standby) -> Whole:
        made = whole(standby)
        return msgspec.structs.replace(made, checkpoint=[*made.checkpoint[:1], *made.checkpoint[1:][-1:]])

    patch.setattr(journal, "whole_of", shorter)


def restores_without_a_fence(patch: Patch) -> None:
    """Restore without a fence: a deposed primary may still commit steps that the next one does not get."""
    patch.setattr(Standby, "fence", lambda self, term: None)


def restores_without_the_order(patch: Patch) -> None:
    """Forget the steps behind the checkpoint, though their output was shown."""
    whole = image.decode

    def decode(*given: object) -> Standby:
        standby = whole(*given)  # type: ignore[arg-type]
        standby.order = OrderLog(standby.checkpoint.step)
        return standby

    patch.setattr(image, "decode", decode)


def begins_again_at_the_first_epoch(patch: Patch) -> None:
    """Begin again at epoch 1: earlier primaries in the directory seem newer than the primaries of this life."""
    whole = VaultProcess.__init__

    def init(self: VaultProcess, *given: object) -> None:
        whole(self, *given)  # type: ignore[arg-type]
        self.first_epoch = min(self.first_epoch, 1)

    patch.setattr(VaultProcess, "__init__", init)


def forgets_copies_that_are_asked_early(patch: Patch) -> None:
    """Ignore a request for a copy while the primary is still restored: only the next request is answered."""
    patch.setattr(StateSender, "_comes_to_life", lambda self, key: False)


def starts_no_task_while_it_waits(patch: Patch) -> None:
    """Start no task while a query without workers waits: the slot of a worker that was given up, and lives, stays empty."""
    missing = DriverEvents.missing_slots

    def of_running(self: DriverEvents) -> list[int]:
        return missing(self) if self._board.phase == QueryPhase.RUNNING else []

    patch.setattr(DriverEvents, "missing_slots", of_running)
