"""The stage before a topic, without a broker: partitions and numbers follow from rows and their order alone."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flux.connectors.kafka.formats.text_encode import Columns
from flux.connectors.kafka.records.encoder import partitions_of
from flux.connectors.kafka.write.sequence_operator import MURMUR2, PARTITION, ROUND_ROBIN, SEQUENCE, SequenceOperator
from flux.errors import SchemaError
from flux.operators.operator import Context

ASIDE = frozenset({PARTITION, SEQUENCE})
BY_KEY = Columns("json", ("key",), None, None, None, ASIDE)
ROWS = pa.schema([("key", pa.string()), ("n", pa.int64())])


def stage(
    partitions: int = 3, partitioner: str = MURMUR2, column: str | None = None, number: int = 0
) -> SequenceOperator:
    made = SequenceOperator(BY_KEY, partitions, partitioner, column)
    made.open(Context("records", number))
    return made


def rows(keys: list[str | None]) -> pa.RecordBatch:
    return pa.record_batch([pa.array(keys, pa.string()), pa.array(range(len(keys)), pa.int64())], schema=ROWS)


def told(batches: list[pa.RecordBatch]) -> list[tuple[int, int]]:
    return [
        pair
        for batch in batches
        for pair in zip(batch.column(PARTITION).to_pylist(), batch.column(SEQUENCE).to_pylist(), strict=True)
    ]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(st.none(), st.sampled_from("abcdefg")), min_size=1, max_size=60), st.data())
def test_a_copy_that_takes_over_anywhere_numbers_as_if_nothing_had_happened(
    keys: list[str | None], data: st.DataObject
) -> None:
    whole = told([stage().process(rows(keys))])  # type: ignore[list-item]
    first, at, parts = stage(), 0, []
    while at < len(keys):
        end = data.draw(st.integers(at + 1, len(keys)))
        if data.draw(st.booleans()):
            second = stage()
            second.restore(first.snapshot())
            first = second
        parts.append(first.process(rows(keys[at:end])))
        at = end
    assert told(parts) == whole  # type: ignore[arg-type]


def test_numbers_of_a_partition_have_no_gaps_and_keys_choose_as_in_java() -> None:
    keys = [f"key-{i % 17}" for i in range(1000)]
    made = stage(5).process(rows(keys))
    assert made is not None
    partitions, sequences = np.asarray(made.column(PARTITION)), np.asarray(made.column(SEQUENCE))
    assert partitions.tolist() == partitions_of(pa.array(keys), 5).tolist()
    for each in range(5):
        assert sequences[partitions == each].tolist() == list(range(int((partitions == each).sum())))


def test_rows_without_a_key_take_turns_and_writers_begin_with_different_partitions() -> None:
    made = stage(3, number=1).process(rows([None, "a", None, None, None]))
    assert made is not None
    chosen = made.column(PARTITION).to_pylist()
    assert [chosen[i] for i in (0, 2, 3, 4)] == [1, 2, 0, 1]


def test_round_robin_looks_at_no_key() -> None:
    made = stage(3, ROUND_ROBIN).process(rows(["a"] * 7))
    assert made is not None
    assert made.column(PARTITION).to_pylist() == [0, 1, 2, 0, 1, 2, 0]


def test_a_column_may_say_the_partition() -> None:
    made = stage(4, column="n").process(rows(["a"] * 4))
    assert made is not None
    assert told([made]) == [(0, 0), (1, 0), (2, 0), (3, 0)]
    with pytest.raises(ValueError, match="'n' says partition 3; the topic has 0 to 2"):
        stage(3, column="n").process(rows(["a"] * 4))


def test_no_rows_make_no_batch() -> None:
    assert stage().process(rows([])) is None


def test_state_of_another_number_of_partitions_is_refused() -> None:
    with pytest.raises(ValueError, match="3 partitions of a topic, not of 4"):
        stage(4).restore(stage(3).snapshot())


@pytest.mark.parametrize(
    ("schema", "column", "why"),
    [
        ([("n", pa.int64())], None, "no single column 'key'"),
        ([("key", pa.list_(pa.int8()))], None, "key column 'key' has type list"),
        ([("key", pa.string()), (SEQUENCE, pa.int64())], None, "name it otherwise"),
        ([("key", pa.string()), ("to", pa.string())], "to", "must be an integer"),
        ([("key", pa.string())], "to", "no single column 'to'"),
    ],
)
def test_what_cannot_be_written_is_refused_before_it_runs(schema: list[object], column: str | None, why: str) -> None:
    with pytest.raises(SchemaError, match=why):
        stage(column=column).output_schema([pa.schema(schema)], ())
