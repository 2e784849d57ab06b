"""Ways to tentative results: which operators are read, which are copied, and where tentative rows end."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import flux
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


def test_an_operator_that_has_to_be_copied_says_so() -> None:
    with pytest.raises(NotImplementedError, match="Summed cannot be read"):
        opened(Summed()).peek(30)
