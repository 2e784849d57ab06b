"""Variants of the code in which runs of batches go wrong."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from flux.exchange.inbound import Inbound, RowSlice, Slice
from flux.exchange.slices import SliceRun
from flux.replica.replica import Replica
from flux.replica.step_queue import StepQueue
from flux.worker.step_scheduler import StepScheduler

Patch = pytest.MonkeyPatch


def takes_runs_whole(patch: Patch) -> None:
    """Let a partition take also the batches of a run that it has already."""
    of_run = Inbound._of_run

    def broken(self: Inbound, message: Any, packet: Any, run: SliceRun, batch: Any, had: int, held: bool) -> Any:
        return of_run(self, message, packet, run, batch, 0, held)

    patch.setattr(Inbound, "_of_run", broken)


def gathers_what_an_order_waits_for(patch: Patch) -> None:
    """Let a slice for a step of an earlier primary's order wait for others."""
    gathers = StepScheduler.gathers

    def broken(self: StepScheduler, replica: Replica, slice_: Slice, now: float) -> bool:
        order = replica.order
        end, order.end = order.end, replica.applied
        try:
            return gathers(self, replica, slice_, now)
        finally:
            order.end = end

    patch.setattr(StepScheduler, "gathers", broken)


def orders_name_slices(patch: Patch) -> None:
    """Take each slice that begins within a step's order whole, with its batches behind the ordered ones."""

    def broken(self: StepQueue, entry: Any) -> list[Any]:
        slices = []
        for edge, producer, through in entry.slices:
            waiting = self.by_stream[edge, producer]  # type: ignore[index]
            while waiting and waiting[0].first <= through:
                slices.append(waiting.popleft())
                if self.arrivals is not None:
                    self._ordered[edge, producer] -= 1  # type: ignore[index]
            if not waiting:
                del self.by_stream[edge, producer]  # type: ignore[arg-type]
        return slices

    patch.setattr(StepQueue, "take", broken)


def drops_what_is_cut_off(patch: Patch) -> None:
    """Apply only the first part of a slice that is cut, and drop the rest."""
    cut = RowSlice.cut

    def broken(self: RowSlice, through: int, partition: int) -> Any:
        parts = cut(self, through, partition)
        return parts and (parts[0], Forgotten(parts[1].sequence))

    class Forgotten:
        def __init__(self, sequence: int) -> None:
            self.first = self.sequence = sequence

    take = StepQueue.take

    def without(self: StepQueue, entry: Any) -> list[Any]:
        slices = take(self, entry)
        for stream, waiting in list(self.by_stream.items()):
            kept: Iterable[Any] = [slice_ for slice_ in waiting if not isinstance(slice_, Forgotten)]
            waiting.clear()
            waiting.extend(kept)
            if not waiting:
                del self.by_stream[stream]
        return slices

    patch.setattr(RowSlice, "cut", broken)
    patch.setattr(StepQueue, "take", without)
