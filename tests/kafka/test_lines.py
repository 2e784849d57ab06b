"""Rows by partition of the topic: the record batches that are made together are those that each line makes alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flux.connectors.kafka.records.decoder import HEADER
from flux.connectors.kafka.records.encoder import BATCH_BYTES, ProducerIdentity
from flux.connectors.kafka.write.partition_batches import PartitionBatches, by_partition, make_together

PARTITIONS = 5
BYTES = st.one_of(st.none(), st.binary(max_size=9))
HEADERS = st.one_of(
    st.none(), st.lists(st.fixed_dictionaries({"key": st.text(max_size=3), "value": BYTES}), max_size=2)
)
ROW = st.tuples(st.integers(0, PARTITIONS - 1), BYTES, BYTES, HEADERS, st.integers(0, 1 << 42))


def made(
    rows: list[tuple[Any, ...]], firsts: list[int], keys: bool = True, headers: bool = True
) -> list[PartitionBatches]:
    counts, sequences = list(firsts), []
    for row in rows:
        sequences.append(counts[row[0]])
        counts[row[0]] += 1
    return by_partition(
        np.array([row[0] for row in rows], np.int32), np.array(sequences, np.int64), PARTITIONS,
        pa.array([row[1] for row in rows], pa.binary()) if keys else None,
        pa.array([row[2] for row in rows], pa.binary()),
        pa.array([row[3] for row in rows], pa.list_(HEADER)) if headers else None,
        np.array([row[4] for row in rows], np.int64),
    )  # fmt: skip


def begun(
    lines: list[PartitionBatches], transactional: bool = False, batch_bytes: int = BATCH_BYTES
) -> list[PartitionBatches]:
    for line in lines:
        line.begin(0, ProducerIdentity(77, 3, line.first), None, batch_bytes, transactional)
    return lines


def taken(line: PartitionBatches) -> list[tuple[bytes, int]]:
    """Take all record batches of a partition."""
    found = []
    line.make()
    while line.ahead is not None:
        data, rows = line.take()
        found.append((data.tobytes(), rows))
        line.make()
    return found


@settings(max_examples=200, deadline=None)
@given(
    st.lists(ROW, min_size=1, max_size=30), st.lists(st.integers(0, 1 << 40), min_size=PARTITIONS, max_size=PARTITIONS),
    st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip
def test_together_they_are_what_each_makes_alone(
    rows: list[tuple[Any, ...]], firsts: list[int], keys: bool, headers: bool, transactional: bool
) -> None:
    firsts = [first % (1 << 31) for first in firsts]
    together = begun(made(rows, firsts, keys, headers), transactional)
    make_together(together, BATCH_BYTES, transactional)
    assert all(line.ahead is not None for line in together)
    alone = begun(made(rows, firsts, keys, headers), transactional)

    assert [(line.partition, line.first, line.rows) for line in together] == [
        (each, firsts[each], count) for each in range(PARTITIONS) if (count := sum(row[0] == each for row in rows))
    ]
    assert [taken(line) for line in together] == [taken(line) for line in alone]


ROWS = [(each % 3, b"k%d" % each, b"v" * 50, None, each) for each in range(12)]


def test_what_is_too_large_for_one_record_batch_is_made_alone() -> None:
    lines = begun(made(ROWS, [0] * PARTITIONS), batch_bytes=150)
    make_together(lines, 150, transactional=False)
    assert [line.ahead for line in lines] == [None] * 3
    for line in lines:
        assert sum(rows for _, rows in taken(line)) == 4


def test_a_line_that_begins_later_begins_there() -> None:
    lines = begun(made(ROWS, [0] * PARTITIONS))
    make_together(lines, BATCH_BYTES, transactional=False)
    whole, (again, *_) = taken(lines[0]), begun(made(ROWS, [0] * PARTITIONS))
    lines[0].begin(3, ProducerIdentity(77, 3, 3), None, BATCH_BYTES)
    make_together(lines, BATCH_BYTES, transactional=False)
    ((data, rows),) = taken(lines[0])
    assert (rows, data.count(b"k9"), data.count(b"k0")) == (1, 1, 0)
    assert taken(again) == whole


@pytest.mark.parametrize("left", [[0, 2], [0, 1], [1, 2], [1]])
def test_lines_that_the_broker_has_leave_the_others_their_own_rows(left: list[int]) -> None:
    lines = begun(made(ROWS, [0] * PARTITIONS))
    make_together([lines[each] for each in left], BATCH_BYTES, transactional=False)
    alone = begun(made(ROWS, [0] * PARTITIONS))
    assert [taken(lines[each]) for each in left] == [taken(alone[each]) for each in left]


def test_partitions_are_those_of_the_topic_and_their_numbers_have_no_gaps() -> None:
    with pytest.raises(AssertionError, match="no gaps"):
        by_partition(
            np.zeros(2, np.int32), np.array([4, 6]), 1, None, pa.array([b"a", b"b"]), None, np.zeros(2, np.int64)
        )
    for partition in (-1, 3, 1 << 30):
        with pytest.raises(AssertionError, match="those of the topic"):
            by_partition(
                np.array([0, partition], np.int32), np.array([4, 5]), 3, None, pa.array([b"a", b"b"]), None,
                np.zeros(2, np.int64),
            )  # fmt: skip
