"""flux.testing: a decorated class or function can be tried without Spark."""

import subprocess
import sys
from typing import Any

import pandas as pd
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


@flux.stage(schema=pa.schema([("now", pa.float64()), ("rows", pa.int64())]))
class Idle(flux.Operator):
    """An operator that gives the number of rows that came before a quiet second."""

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.rows = 0
        context.set_timer(0, "start")

    def process(self, batch: pa.RecordBatch) -> None:
        self.rows += batch.num_rows
        self.context.set_timer(self.context.now + 1)

    def on_timer(self, name: str):  # type: ignore[no-untyped-def]
        yield self.said()

    def finish(self):  # type: ignore[no-untyped-def]
        yield self.said()

    def said(self) -> pa.RecordBatch:
        rows, self.rows = self.rows, 0
        return pa.record_batch({"now": [self.context.now], "rows": [rows]})

    def snapshot(self) -> int:
        return self.rows

    def restore(self, snapshot: int) -> None:
        self.rows = snapshot


def test_an_aggregate_gives_its_groups_at_the_end() -> None:
    assert flux.testing.apply(Totals, ROWS, MORE).to_pylist() == [
        {"k": 1, "n": 2, "total": 1.0},
        {"k": 2, "n": 2, "total": 7.0},
        {"k": 3, "n": 1, "total": 7.0},
    ]


def test_a_restart_from_a_snapshot_changes_nothing() -> None:
    assert flux.testing.apply(Totals, ROWS, MORE, restart_after=1) == flux.testing.apply(Totals, ROWS, MORE)


class DataFrame:
    """A stand-in for Spark's class."""


DataFrame.__module__ = "pyspark.sql.classic.dataframe"

NO_BATCHES = [
    (pd.DataFrame({"k": [1]}), r"pandas\.DataFrame: .*from_pandas"),
    (pa.table({"k": [1]}), r"pyarrow\.Table: .*to_batches"),
    (DataFrame(), r"pyspark\.DataFrame:"),
    ("rows", "str:"),
    ({"k": [1]}, "dict:"),
    ([ROWS, {"k": 1}], "dict:"),
    (None, "NoneType:"),
]


@pytest.mark.parametrize(("given", "named"), NO_BATCHES, ids=lambda value: type(value).__name__)
def test_what_is_no_batch_is_named_by_its_real_type(given: Any, named: str) -> None:
    with pytest.raises(flux.UsageError, match=rf"expected pyarrow\.RecordBatches, got {named}"):
        flux.testing.apply(Totals, given)


def test_batches_may_come_from_an_iterator() -> None:
    assert flux.testing.apply(Totals, iter([ROWS, MORE])) == flux.testing.apply(Totals, ROWS, MORE)


@pytest.mark.parametrize("wrong", ["1", 1.0, True, -1])
def test_restart_after_is_a_number_of_batches(wrong: Any) -> None:
    with pytest.raises(flux.UsageError, match=f"restart_after must be a number of batches .* got {wrong!r}"):
        flux.testing.apply(Totals, ROWS, restart_after=wrong)


@pytest.mark.parametrize("wrong", ["abc", ["a", "b"], 5, [None, 1.0], [True, True]])
def test_times_are_numbers(wrong: Any) -> None:
    with pytest.raises(flux.UsageError, match=r"times: expected numbers of seconds, .*; got"):
        flux.testing.apply(Totals, ROWS, times=wrong)


def test_a_function_is_applied_batch_by_batch() -> None:
    assert flux.testing.apply(positive, ROWS, MORE).column("v").to_pylist() == [2.0, 5.0, 7.0]


def test_the_decorated_function_and_class_are_still_themselves() -> None:
    assert positive(ROWS).num_rows == 1
    assert isinstance(Totals(), flux.Aggregate)


def test_an_operator_is_told_which_input_a_batch_comes_from() -> None:
    out = flux.testing.apply(WhichInput, [ROWS], [MORE, MORE])
    assert out.to_pylist() == [{"input": 0, "rows": 3}, {"input": 1, "rows": 2}, {"input": 1, "rows": 2}]


@pytest.mark.parametrize("restart_after", [None, 1, 2])
def test_timers_fire_between_batches_at_their_time_also_after_a_restart(restart_after: int | None) -> None:
    out = flux.testing.apply(Idle, ROWS, MORE, MORE, restart_after=restart_after, times=[10, 10.5, 20, 20.9])
    assert out.to_pylist() == [{"now": 0, "rows": 0}, {"now": 11.5, "rows": 5}, {"now": 20.9, "rows": 2}]


def test_an_aggregate_can_give_its_totals_every_now_and_then() -> None:
    @flux.stage(key="k")
    class Running(flux.Aggregate):
        n = flux.count()

        def open(self, context: flux.Context) -> None:
            super().open(context)
            context.set_timer(context.now)

        def on_timer(self, name: str):  # type: ignore[no-untyped-def]
            self.context.set_timer(self.context.now + 10)
            return super().finish()

    out = flux.testing.apply(Running, ROWS, MORE, restart_after=1, times=[5, 12, 18])
    assert out.to_pydict() == {"k": [1, 2, 1, 2, 3], "n": [2, 1, 2, 2, 1]}


@pytest.mark.parametrize("times", [[1.0], [1.0, 2.0], [1.0, 3.0, 2.0], [1.0, 2.0, 3.0, 4.0]])
def test_times_are_one_for_each_batch_and_one_for_the_end(times: list[float]) -> None:
    with pytest.raises(flux.UsageError, match="expected those of 2 batches and of the end, 3 in all and ascending"):
        flux.testing.apply(Idle, ROWS, MORE, times=times)


def test_what_is_not_a_stage_is_refused_by_name() -> None:
    with pytest.raises(flux.UsageError, match=r"decorated with flux\.stage, got int"):
        flux.testing.apply(3, ROWS)  # type: ignore[arg-type]


def test_it_is_there_after_importing_flux() -> None:
    subprocess.run([sys.executable, "-c", "import flux; flux.testing.apply"], check=True)


def test_schemas_in_ddl_need_no_session() -> None:
    @flux.stage(schema="k BIGINT, twice DOUBLE")
    def doubled(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch([batch.column("k"), pc.multiply(batch.column("v"), 2)], names=["k", "twice"])

    assert flux.testing.apply(doubled, ROWS).to_pydict() == {"k": [1, 2, 1], "twice": [2.0, 4.0, None]}
    with pytest.raises(flux.SchemaError, match=r"declared \(k int64\), got \(k int64, v double\)"):
        flux.testing.apply(flux.stage(schema="k BIGINT")(positive.target), ROWS)


@pytest.mark.parametrize(
    ("key", "refused"),
    [
        ("user", r"stage Totals: key 'user' is not a column of its input; there are k, v"),
        ("f", "'f' .* cannot be a key"),
    ],
)
def test_key_columns_are_checked(key: str, refused: str) -> None:
    given = ROWS if key == "user" else ROWS.append_column("f", pa.array([[1], [2], [3]]))
    with pytest.raises(flux.SchemaError, match=refused):
        flux.testing.apply(flux.stage(key=key, name="Totals")(Totals.target), given)


def test_measures_are_checked() -> None:
    with pytest.raises(flux.SchemaError, match=r"stage Totals: .*no column 'v'; there are k, w"):
        flux.testing.apply(Totals, ROWS.rename_columns(["k", "w"]))


@pytest.mark.parametrize("restart_after", [0, 1, 2])
def test_a_restart_may_come_before_the_first_batch_and_after_the_last(restart_after: int) -> None:
    assert flux.testing.apply(Totals, ROWS, MORE, restart_after=restart_after) == flux.testing.apply(Totals, ROWS, MORE)


@pytest.mark.parametrize("restart_after", [-1, 3, 100])
def test_a_restart_after_more_batches_than_there_are_is_refused(restart_after: int) -> None:
    with pytest.raises(flux.UsageError, match=rf"restart_after must be .* from 0 to 2.*; got {restart_after}"):
        flux.testing.apply(Totals, ROWS, MORE, restart_after=restart_after)


def test_what_is_no_batch_is_refused() -> None:
    with pytest.raises(flux.UsageError, match=r"expected pyarrow\.RecordBatches, got dict"):
        flux.testing.apply(Totals, [{"k": 1}])
    with pytest.raises(flux.SchemaError, match=r"batch of input 0: declared \(k int64, v double\), got \(k int64\)"):
        flux.testing.apply(Totals, ROWS, pa.record_batch({"k": [1]}))


def test_columns_are_found_whatever_their_case_as_in_spark() -> None:
    rows = pa.record_batch({"K": [1, 2, 1], "V": [1.0, 2.0, None]})
    assert flux.testing.apply(Totals, rows, rows, restart_after=1).to_pylist() == [
        {"k": 1, "n": 4, "total": 2.0}, {"k": 2, "n": 2, "total": 4.0},
    ]  # fmt: skip


@flux.stage(key="k", schema="k long, most double")
class Largest(flux.Operator):
    """An operator with the largest value of each key, which can forget to report the changed ones."""

    def __init__(self, forgets: bool = False) -> None:
        self.forgets = forgets

    def open(self, context: flux.Context) -> None:
        self.most: dict[int, float] = {}
        self.changed: set[int] = set()

    def process(self, batch: pa.RecordBatch) -> None:
        for row in batch.to_pylist():
            self.most[row["k"]] = max(row["v"] or 0.0, self.most.get(row["k"], 0.0))
            if not self.forgets:
                self.changed.add(row["k"])

    def finish(self) -> Any:
        return pa.RecordBatch.from_pylist([{"k": k, "most": v} for k, v in sorted(self.most.items())])

    def snapshot(self) -> Any:
        return self.most

    def restore(self, snapshot: Any) -> None:
        self.most = snapshot

    def changes(self) -> Any:
        changed, self.changed = self.changed, set()
        return {key: self.most[key] for key in changed}

    def apply_changes(self, changes: Any) -> None:
        self.most |= changes


@pytest.mark.parametrize("stage", [Totals, Largest])
@pytest.mark.parametrize(("checkpoint_after", "restart_after"), [(0, 0), (0, 1), (1, 2), (0, 2), (2, 2)])
def test_a_restart_from_a_checkpoint_and_the_changes_since_changes_nothing(
    stage: Any, checkpoint_after: int, restart_after: int
) -> None:
    out = flux.testing.apply(stage, ROWS, MORE, checkpoint_after=checkpoint_after, restart_after=restart_after)
    assert out == flux.testing.apply(stage, ROWS, MORE)


def test_changes_that_lack_something_are_seen() -> None:
    whole = flux.testing.apply(Largest(forgets=True), ROWS, MORE, restart_after=2)
    assert whole == flux.testing.apply(Largest, ROWS, MORE)
    assert flux.testing.apply(Largest(forgets=True), ROWS, MORE, checkpoint_after=1, restart_after=2) != whole


def test_a_checkpoint_comes_before_the_restart_and_needs_changes() -> None:
    for given in ({"checkpoint_after": 1}, {"checkpoint_after": 2, "restart_after": 1}):
        with pytest.raises(
            flux.UsageError, match="checkpoint_after must be a number of batches from 0 to restart_after"
        ):
            flux.testing.apply(Largest, ROWS, MORE, **given)
    with pytest.raises(flux.UsageError, match=r"stage Idle defines no changes\(\) and apply_changes\(\)"):
        flux.testing.apply(Idle, ROWS, MORE, checkpoint_after=0, restart_after=1)


@pytest.mark.parametrize(("has", "lacks"), [("changes", "apply_changes"), ("apply_changes", "changes")])
def test_an_operator_defines_both_of_what_changes_need_or_none(has: str, lacks: str) -> None:
    with pytest.raises(
        flux.UsageError, match=rf"Half defines {has}\(\) and not {lacks}\(\): define both, .* or neither"
    ):
        type("Half", (flux.Operator,), {has: lambda self, *given: None})
