"""flux.testing: a decorated class or function can be tried without Spark."""

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import flux
import flux.testing

ROWS = pa.record_batch({"k": [1, 2, 1], "v": [1.0, 2.0, None]})
MORE = pa.record_batch({"k": [2, 3], "v": [5.0, 7.0]})


@flux.stage(key="k")
class Totals(flux.Aggregate):
    n = flux.count()
    total = flux.sum("v")


@flux.stage
def positive(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.filter(pc.greater(batch.column("v"), 1.5))


@flux.stage(schema=pa.schema([("input", pa.int64()), ("rows", pa.int64())]))
class WhichInput(flux.Operator):
    def process(self, batch: pa.RecordBatch):  # type: ignore[no-untyped-def]
        yield pa.record_batch({"input": [self.context.input], "rows": [batch.num_rows]})


def test_an_aggregate_gives_its_groups_at_the_end() -> None:
    assert flux.testing.apply(Totals, ROWS, MORE).to_pylist() == [
        {"k": 1, "n": 2, "total": 1.0},
        {"k": 2, "n": 2, "total": 7.0},
        {"k": 3, "n": 1, "total": 7.0},
    ]


def test_a_restart_from_a_snapshot_changes_nothing() -> None:
    assert flux.testing.apply(Totals, ROWS, MORE, restart_after=1) == flux.testing.apply(Totals, ROWS, MORE)


def test_a_function_is_applied_batch_by_batch() -> None:
    assert flux.testing.apply(positive, ROWS, MORE).column("v").to_pylist() == [2.0, 5.0, 7.0]


def test_the_decorated_function_and_class_are_still_themselves() -> None:
    assert positive(ROWS).num_rows == 1
    assert isinstance(Totals(), flux.Aggregate)


def test_an_operator_is_told_which_input_a_batch_comes_from() -> None:
    out = flux.testing.apply(WhichInput, [ROWS], [MORE, MORE])
    assert out.to_pylist() == [{"input": 0, "rows": 3}, {"input": 1, "rows": 2}, {"input": 1, "rows": 2}]


def test_what_is_not_a_stage_is_refused_by_name() -> None:
    with pytest.raises(flux.UsageError, match=r"decorated with flux\.stage, got int"):
        flux.testing.apply(3, ROWS)  # type: ignore[arg-type]
