"""Variants of the code in which replicas without a common order give different output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from flux.operators import windowed_groups
from flux.operators.windowed_groups import WindowedGroups
from flux.replica.replica import Replica
from flux.windows.statements import StreamBound, bound_of
from flux.worker.watermarks import WatermarkScheduler
from partitioning.ids import StreamId

Patch = pytest.MonkeyPatch


def gives_results_in_the_order_of_slots(patch: Patch) -> None:
    """Give the results of a mark in the order of the first rows of their groups."""
    patch.setattr(windowed_groups, "in_canonical_order", lambda results, *given: iter(results))


def fires_marks_before_all_rows_below_are_applied(patch: Patch) -> None:
    """Let a replica go by statements behind slices that still wait to be applied."""
    bound = WatermarkScheduler._bound

    def broken(self: WatermarkScheduler, replica: Replica, stream: StreamId) -> StreamBound:
        inbound = self._streams.get(stream)
        if inbound is None or not replica.orders_itself:
            return bound(self, replica, stream)
        return bound_of(inbound.said, inbound.received[replica.partition], None, ended=False)

    patch.setattr(WatermarkScheduler, "_bound", broken)


def joins_results_of_all_marks_that_it_jumps_over(patch: Patch) -> None:
    """Put results of several marks into common batches if the watermark passes these marks at once."""

    def broken(self: WindowedGroups, watermark: int) -> Iterator[pa.RecordBatch]:
        results: Any = self._ended(watermark)
        return self._in_order(results)

    patch.setattr(WindowedGroups, "_at_marks", broken)
