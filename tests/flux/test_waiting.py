"""Slices that wait for a replica, without the replica."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from one_worker import Kept, planned, worker

import flux
from flux.errors import NonDeterministicInputError
from flux.exchange.inbound import Inbound, Packet, RowSlice, WordSlice
from flux.exchange.log import End
from flux.operators.operator import Timers
from flux.replica.step_queue import PASSED_MAX, STEP_BYTES, STEP_ROWS, STEP_S, StepQueue
from flux.settings import Settings
from flux.wire.messages import OrderEntry
from partitioning.ids import PartitionKey, StreamId

STREAM = StreamId(0, 7)


def the_end_as_batch(sequence: int) -> WordSlice:
    return WordSlice(STREAM, sequence, Packet(Inbound(STREAM, 0, 1, 1), 1, 1), 0, 0.0, True, End())


@pytest.mark.parametrize(
    ("from_sources", "error", "said"),
    [({0}, NonDeterministicInputError, "not deterministic"), (set(), AssertionError, r"pending: \[\(2, 2\)\]")],
)
def test_another_batch_than_the_one_ordered_is_the_fault_of_an_input_that_was_read_again(
    from_sources: set[int], error: Any, said: str
) -> None:
    """Let an earlier primary have applied the end as batch 1, and the second reading give the end as batch 2."""
    waits = StepQueue(PartitionKey(0, 0), [0], Timers(), Settings.of(), "stage s, partition 0")
    waits.from_sources = from_sources
    waits.forget_turns()  # the order is that of an earlier primary
    waits.add(the_end_as_batch(2))
    entry = OrderEntry(0.0, 0.0, [(*STREAM, 1)])
    assert waits.has(entry)
    with pytest.raises(error, match=said):
        waits.take(entry)


def test_a_step_that_does_not_fit_its_rows_tells_the_place_of_the_replica_in_its_order() -> None:
    replica = worker(planned(flux.stage(partitions=1)(Kept))).replicas[PartitionKey(0, 0)]
    replica.waits.forget_turns()
    replica.waits.from_sources = set()
    replica.waits.add(the_end_as_batch(2))
    replica.order.append(OrderEntry(0.0, 0.0, [(*STREAM, 1)]))
    with pytest.raises(AssertionError) as found:
        replica.next_step(0.0)
    (note,) = found.value.__notes__
    assert note.startswith("primary of epoch 0, leads since")
    assert "step 0 of 0 to 1, 1 committed" in note


SLICE_ROWS = STEP_ROWS // 2


def rows_as_batch(sequence: int, text: str = "") -> RowSlice:
    rows = pa.record_batch({"n": pa.array([text] * SLICE_ROWS, pa.large_string())})
    return RowSlice(STREAM, sequence, Packet(Inbound(STREAM, 0, 1, 1), 1, 1), 0, 0.0, True, rows)


class Joining:
    """A queue of steps whose rows all wait."""

    def __init__(self, slices: int = 99, **column: Any) -> None:
        self.waits = StepQueue(PartitionKey(0, 0), [0], Timers(), Settings.of(), "stage s, partition 0")
        self.busy_s = 0.0
        for sequence in range(slices):
            self.waits.add(rows_as_batch(sequence, **column))

    def step(self, row_s: float = 0.0, most: int = 8 * SLICE_ROWS) -> int:
        """Take a step of which each row takes ``row_s``, and return the number of its slices."""
        taken = self.waits.choose(most, self.busy_s)
        self.waits.take(OrderEntry(0.0, 0.0, [(*STREAM, taken[-1].sequence)]))
        self.busy_s += row_s * SLICE_ROWS * len(taken)
        return len(taken)


FEW = STEP_ROWS // SLICE_ROWS


@pytest.mark.parametrize(("row_s", "slices"), [(0.0, 8), (1e-9, 8), (STEP_S / (4.1 * SLICE_ROWS), 4), (1.0, FEW)])
def test_fewer_rows_are_joined_where_they_have_taken_long(row_s: float, slices: int) -> None:
    joining = Joining()
    assert joining.step(row_s) == FEW, "nothing is known of what they cost"
    assert joining.step(row_s) == slices
    assert joining.step(row_s, most=SLICE_ROWS) == 1, "so many are allowed"


def test_what_is_ordered_before_the_first_step_is_never_large() -> None:
    waits = Joining().waits
    assert [len(waits.choose(8 * SLICE_ROWS, 0.0)) for _ in range(5)] == [FEW] * 5


def test_dearer_rows_count_at_once_and_cheaper_ones_by_and_by() -> None:
    joining = Joining()
    for _ in range(5):
        joining.step(1e-9)
    assert joining.step(1e-3) == 8, "nobody knows beforehand"
    found = [joining.step(1e-9) for _ in range(14)]
    assert found[0] == FEW
    assert found == sorted(found)
    assert found[-1] == 8, "one dear step is not remembered for ever"


def test_rows_of_many_bytes_are_not_joined_beyond_what_always_was() -> None:
    joining = Joining(text="x" * (STEP_BYTES // (3 * SLICE_ROWS)))
    assert [joining.step(), joining.step()] == [FEW, FEW], "three slices are more than so many bytes"


def alternating(pairs: int) -> StepQueue:
    """Make a queue with slices of one row of two inputs, in turn."""
    waits = StepQueue(PartitionKey(0, 0), [0, 1], Timers(), Settings.of(), "stage s, partition 0")
    for sequence in range(pairs):
        for edge in range(2):
            waits.add(one_row(StreamId(edge, 0), edge, sequence))
    return waits


def one_row(stream: StreamId, input_: int, sequence: int) -> RowSlice:
    rows = pa.record_batch({"n": pa.array([sequence])})
    return RowSlice(stream, sequence, Packet(Inbound(stream, 0, 1, 1), 1, 1), input_, 0.0, True, rows)


def test_slices_of_an_input_are_joined_across_those_of_another_one() -> None:
    waits = alternating(10)
    steps = [waits.choose(4, 0.0) for _ in range(6)]
    assert [[(each.input, each.sequence) for each in step] for step in steps] == [
        [(0, n) for n in range(4)],
        [(1, n) for n in range(4)],
        [(0, n) for n in range(4, 8)],
        [(1, n) for n in range(4, 8)],
        [(0, 8), (0, 9)],
        [(1, 8), (1, 9)],
    ]
    assert not waits.arrivals


def test_slices_that_are_passed_over_are_next() -> None:
    """Take such slices next: an input that is always busy would hold the other one up otherwise."""
    waits = alternating(3)
    waits.choose(100, 0.0)
    for sequence in range(3, 9):
        waits.add(one_row(StreamId(0, 0), 0, sequence))
    assert [(each.input, each.sequence) for each in waits.choose(100, 0.0)] == [(1, 0), (1, 1), (1, 2)]


def test_few_slices_of_other_inputs_are_passed_over() -> None:
    waits = StepQueue(PartitionKey(0, 0), [0, 1], Timers(), Settings.of(), "stage s, partition 0")
    waits.add(one_row(StreamId(1, 0), 1, 0))
    for sequence in range(PASSED_MAX + 1):
        waits.add(one_row(StreamId(0, 0), 0, sequence))
    waits.add(one_row(StreamId(1, 0), 1, 1))
    assert len(waits.choose(PASSED_MAX * 4, 0.0)) == 1
    assert len(waits.choose(PASSED_MAX * 4, 0.0)) == PASSED_MAX + 1
    assert len(waits.choose(PASSED_MAX * 4, 0.0)) == 1
