"""What waits for a replica, by itself."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from flux.errors import NonDeterministicInputError
from flux.replicas.waiting import STEP_ROWS, STEP_S, Waiting
from flux.stream.elements import End
from flux.stream.receiver import Inbound, Packet, RowSlice, WordSlice
from flux.wire.messages import OrderEntry
from partitioning.ids import StreamId

STREAM = StreamId(0, 7)


def the_end_as_batch(sequence: int) -> WordSlice:
    return WordSlice(STREAM, sequence, Packet(Inbound(STREAM, 0, 1, 1), 1, 1), 0, 0.0, True, End())


@pytest.mark.parametrize(("from_sources", "error"), [({0}, NonDeterministicInputError), (set(), AssertionError)])
def test_another_batch_than_the_one_ordered_is_the_fault_of_an_input_that_was_read_again(
    from_sources: set[int], error: Any
) -> None:
    """An earlier primary had applied the end as batch 1; the second reading has it as batch 2."""
    waits = Waiting([0], 0, "stage s, partition 0")
    waits.from_sources = from_sources
    waits.forget_turns()  # the order is that of an earlier primary
    waits.add(the_end_as_batch(2))
    entry = OrderEntry(0.0, 0.0, [(*STREAM, 1)])
    assert waits.has(entry)
    with pytest.raises(error):
        waits.take(entry)


SLICE_ROWS = STEP_ROWS // 2


def rows_as_batch(sequence: int) -> RowSlice:
    return RowSlice(
        STREAM, sequence, Packet(Inbound(STREAM, 0, 1, 1), 1, 1), 0, 0.0, True, pa.record_batch({"n": range(SLICE_ROWS)})
    )  # fmt: skip


@pytest.mark.parametrize(
    ("row_s", "slices"), [(0.0, 7), (1e-9, 7), (STEP_S / (4 * SLICE_ROWS), 4), (1.0, STEP_ROWS // SLICE_ROWS)]
)
def test_fewer_rows_are_joined_where_they_have_taken_long(row_s: float, slices: int) -> None:
    waits = Waiting([0], 0, "stage s, partition 0")
    for sequence in range(9):
        waits.add(rows_as_batch(sequence))
    taken = waits.choose(2 * SLICE_ROWS, busy_s=0.0)
    assert len(taken) == 2, "nothing is known of what they cost, and so many are allowed"
    waits.take(OrderEntry(0.0, 0.0, [(*STREAM, taken[-1].sequence)]))
    assert len(waits.choose(7 * SLICE_ROWS, busy_s=2 * SLICE_ROWS * row_s)) == slices
