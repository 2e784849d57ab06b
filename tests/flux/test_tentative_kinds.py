"""Ways to tentative results: which operators are read, which are copied, and where tentative rows end."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import flux
from flux.connectors.kafka.formats.text_encode import Columns
from flux.connectors.kafka.write.sequence_operator import ROUND_ROBIN, SEQUENCE, SequenceOperator
from flux.operators.attributes import open_operator
from flux.operators.collect import Collect
from flux.operators.operator import Chained, Context, Operator
from flux.operators.tentative import BARRIER, FORK, PEEK, TentativeRows, tentative_kind

SCHEMA = pa.schema([("n", pa.int64())])


def numbers(*given: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(given, pa.int64())], schema=SCHEMA)


def opened(operator: Operator) -> Operator:
    open_operator(operator, Context("stage", schemas=(SCHEMA,), watermarks=[10]))
    return operator


@flux.stage
def doubled(batch: pa.RecordBatch) -> Any:
    return numbers(*(2 * n for n in batch.column("n").to_pylist()))


class Summed(flux.Operator):
    schema = "n BIGINT"

    def __init__(self) -> None:
        self.sum = 0

    def process(self, batch: pa.RecordBatch) -> Any:
        self.sum += sum(batch.column("n").to_pylist())
        return numbers(self.sum)


class Written(flux.Operator):
    def process(self, batch: pa.RecordBatch) -> Any:
        return [] if batch.num_rows else None


class Read(Summed):
    def peek(self, watermark: int, overlay: Any = (), after: int = flux.NEVER) -> list[pa.RecordBatch]:
        return [numbers(self.sum)]


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        (doubled.make(), PEEK),
        (Summed(), FORK),
        (Written(), BARRIER),
        (Read(), PEEK),
        (Collect(1), BARRIER),
        (Chained(Summed(), doubled.make(), SCHEMA), FORK),
        (Chained(Read(), doubled.make(), SCHEMA), PEEK),
        (Chained(Read(), Collect(1), SCHEMA), BARRIER),
    ],
)
def test_the_way_to_tentative_results_follows_from_the_class(operator: Operator, kind: str) -> None:
    assert tentative_kind(operator) == kind


def test_a_function_gives_the_tentative_rows_of_a_watermark_and_not_those_of_an_earlier_one() -> None:
    operator = opened(doubled.make())
    overlay = [TentativeRows(0, numbers(3), 20), TentativeRows(0, numbers(5), 30)]
    assert pa.Table.from_batches(operator.peek(30, overlay)) == pa.Table.from_batches([numbers(6), numbers(10)])
    assert operator.peek(30, overlay, after=20) == [numbers(10)]
    assert operator.context.watermarks == [10]


def test_tentative_results_go_through_the_operators_of_a_chain() -> None:
    operator = opened(Chained(Read(), doubled.make(), SCHEMA))
    for _ in operator.process(numbers(4)):  # type: ignore[union-attr]
        pass
    assert operator.peek(30) == [numbers(8)]


def test_tentative_rows_get_the_numbers_that_they_would_have_in_a_topic() -> None:
    schema = pa.schema([("n", pa.int64()), ("at", pa.int64())])
    batch = pa.record_batch([[1, 2], [0, 0]], schema=schema)
    operator = SequenceOperator(Columns("json", (), None, None, None, frozenset()), 1, ROUND_ROBIN, "at")
    open_operator(operator, Context("stage", schemas=(schema,), watermarks=[10]))
    operator.process(batch)
    for _ in range(2):
        (given,) = operator.peek(30, [TentativeRows(0, batch, 20)])
        assert given.column(SEQUENCE).to_pylist() == [2, 3]
    assert operator.note_of_output() == [2]


def test_an_operator_that_has_to_be_copied_says_so() -> None:
    with pytest.raises(NotImplementedError, match="Summed cannot be read"):
        opened(Summed()).peek(30)
