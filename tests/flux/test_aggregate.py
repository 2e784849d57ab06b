"""The built-in operator, used by itself as a user would test it."""

from __future__ import annotations

import pickle

import numpy as np
import pyarrow as pa
import pytest

import flux
from flux.errors import SchemaError, UsageError
from flux.operators import aggregate as agg
from flux.operators.operator import Context, gives_changes
from partitioning.errors import ColumnTypeError, KeyTypeError, SumOverflowError


class Delays(agg.Aggregate):
    flights = agg.count()
    known = agg.count("delay")
    total = agg.sum("delay")
    best = agg.min("delay")
    worst = agg.max("delay")
    usual = agg.mean("delay")


FLIGHTS = pa.record_batch(
    {
        "dest": ["IAH", "MIA", None, "IAH", "MIA", "IAH"],
        "delay": pa.array([11, 20, 33, None, -4, 1], pa.int32()),
    }
)
ANSWER = [
    {"dest": "IAH", "flights": 3, "known": 2, "total": 12, "best": 1, "worst": 11, "usual": 6.0},
    {"dest": "MIA", "flights": 2, "known": 2, "total": 16, "best": -4, "worst": 20, "usual": 8.0},
    {"dest": None, "flights": 1, "known": 1, "total": 33, "best": 33, "worst": 33, "usual": 33.0},
]


def opened(cls: type[agg.Aggregate] = Delays, batch: pa.RecordBatch = FLIGHTS, **context: object) -> agg.Aggregate:
    operator = cls()
    operator.open(Context("delays", **({"key": ("dest",), "schemas": (batch.schema,)} | context)))  # type: ignore[arg-type]
    return operator


def finished(operator: agg.Aggregate) -> list[dict]:
    return [row for batch in operator.finish() or () for row in batch.to_pylist()]


def test_results_come_at_the_end_one_row_per_key_in_order_of_first_appearance() -> None:
    operator = opened()
    assert operator.process(FLIGHTS) is None
    assert finished(operator) == ANSWER


@pytest.mark.parametrize("cut", range(7))
def test_the_answer_is_the_same_however_the_rows_are_cut(cut: int) -> None:
    operator = opened()
    operator.process(FLIGHTS.slice(0, cut))
    operator.process(FLIGHTS.slice(cut))
    assert finished(operator) == ANSWER


@pytest.mark.parametrize("cut", range(7))
def test_a_snapshot_in_the_middle_changes_nothing(cut: int) -> None:
    first, second = opened(), opened()
    first.process(FLIGHTS.slice(0, cut))
    second.process(FLIGHTS)  # a restore replaces all rows that were there
    second.restore(first.snapshot())
    second.process(FLIGHTS.slice(cut))
    assert finished(second) == ANSWER
    assert second.snapshot().equals(pickle.loads(pickle.dumps(second.snapshot())))


def test_a_snapshot_can_travel_as_a_record_batch() -> None:
    first, second = opened(), opened()
    first.process(FLIGHTS)
    (batch,) = first.snapshot().combine_chunks().to_batches()
    second.restore(batch)
    assert finished(second) == ANSWER


def test_a_snapshot_of_another_operator_is_refused() -> None:
    class Other(agg.Aggregate):
        n = agg.count()

    with pytest.raises(SchemaError, match="taken from another operator"):
        opened(Other).restore(opened().snapshot())


def test_updates_give_each_touched_key_once_with_its_current_values() -> None:
    operator = opened(output_mode="update")
    (first,) = operator.process(FLIGHTS.slice(0, 2))
    (second,) = operator.process(FLIGHTS.slice(2))
    assert [(row["dest"], row["flights"]) for row in first.to_pylist()] == [("IAH", 1), ("MIA", 1)]
    assert second.to_pylist() == [ANSWER[2], ANSWER[0], ANSWER[1]]
    assert second.schema == operator.output_schema([FLIGHTS.schema], ("dest",))
    assert operator.process(FLIGHTS.slice(0, 0)) is None
    assert operator.finish() is None


def test_updates_after_a_restore_go_on_from_the_snapshot() -> None:
    first, second = opened(output_mode="update"), opened(output_mode="update")
    first.process(FLIGHTS.slice(0, 3))
    second.restore(first.snapshot())
    (after,) = second.process(FLIGHTS.slice(3))
    assert after.to_pylist() == ANSWER[:2]


def test_results_are_cut_into_batches_of_bounded_size() -> None:
    keys = 2 * agg.RESULT_ROWS_MAX + 5
    batch = pa.record_batch({"dest": np.arange(keys), "delay": pa.array(np.arange(keys), pa.int32())})
    operator = opened(batch=batch)
    operator.process(batch)
    results = list(operator.finish())
    assert [r.num_rows for r in results] == [agg.RESULT_ROWS_MAX, agg.RESULT_ROWS_MAX, 5]
    assert results[2].column("total").to_pylist() == list(range(keys - 5, keys))


def test_without_a_key_all_rows_are_one_group() -> None:
    operator = opened(key=())
    operator.process(FLIGHTS)
    copy = opened(key=())
    copy.restore(operator.snapshot())
    expected = [{"flights": 6, "known": 5, "total": 61, "best": -4, "worst": 33, "usual": 12.2}]
    assert finished(operator) == finished(copy) == expected


def test_without_a_key_no_rows_still_make_one_row_but_only_on_one_partition() -> None:
    nothing = {"flights": 0, "known": 0, "total": None, "best": None, "worst": None, "usual": None}
    assert finished(opened(key=(), partition=0, partitions=2)) == [nothing]
    assert finished(opened(key=(), partition=1, partitions=2)) == []
    assert finished(opened()) == []
    empty = opened(key=())
    empty.restore(opened(key=()).snapshot())
    assert finished(empty) == [nothing]


def test_the_output_has_the_key_then_the_measures_in_the_order_of_their_definition() -> None:
    schema = pa.schema([("when", pa.timestamp("us", "UTC")), pa.field("dest", pa.string(), nullable=False)])
    schema = schema.append(pa.field("delay", pa.decimal128(7, 2)))
    assert Delays().output_schema([schema], ("dest", "when")) == pa.schema(
        [
            pa.field("dest", pa.string(), nullable=False),
            ("when", pa.timestamp("us", "UTC")),
            ("flights", pa.int64()),
            ("known", pa.int64()),
            ("total", pa.decimal128(17, 2)),
            ("best", pa.decimal128(7, 2)),
            ("worst", pa.decimal128(7, 2)),
            ("usual", pa.decimal128(11, 6)),
        ]
    )


def test_measures_are_inherited_added_and_taken_away() -> None:
    class More(Delays):
        latest = agg.max("when")
        total = None  # no measure any more

    schema = FLIGHTS.schema.append(pa.field("when", pa.date32()))
    names = More().output_schema([schema], ("dest",)).names
    assert names == ["dest", "flights", "known", "best", "worst", "usual", "latest"]
    assert "latest" not in Delays().output_schema([schema], ("dest",)).names


def test_several_inputs_may_order_their_columns_differently() -> None:
    turned = FLIGHTS.select(["delay", "dest"])
    operator = opened(schemas=(FLIGHTS.schema, turned.schema))
    operator.process(FLIGHTS.slice(0, 3))
    operator.context.input = 1
    operator.process(turned.slice(3))
    assert finished(operator) == ANSWER


@pytest.mark.parametrize("column", ["dest", "delay"])
def test_a_missing_column_is_named_together_with_those_that_there_are(column: str) -> None:
    schema = pa.schema([field for field in FLIGHTS.schema if field.name != column] + [("hour", pa.int8())])
    with pytest.raises(SchemaError, match=f"no column '{column}'; there are .*, hour"):
        Delays().output_schema([schema], ("dest",))


def test_a_column_that_is_there_twice_is_refused() -> None:
    with pytest.raises(SchemaError, match="2 columns called 'dest'"):
        Delays().output_schema([FLIGHTS.schema.append(pa.field("dest", pa.int8()))], ("dest",))


def test_inputs_that_disagree_about_a_type_are_refused() -> None:
    other = FLIGHTS.schema.set(1, pa.field("delay", pa.int64()))
    with pytest.raises(SchemaError, match="'delay' is int32 in input 0 but int64 in input 1; cast one"):
        Delays().output_schema([FLIGHTS.schema, other], ("dest",))


def test_a_measure_named_like_a_key_column_is_refused() -> None:
    class Clash(agg.Aggregate):
        dest = agg.count()

    with pytest.raises(SchemaError, match=r"\['dest'\] have names of key columns"):
        Clash().output_schema([FLIGHTS.schema], ("dest",))


def test_an_aggregate_without_measures_is_refused() -> None:
    class Empty(agg.Aggregate):
        pass

    with pytest.raises(SchemaError, match="Empty has no measure"):
        Empty().output_schema([FLIGHTS.schema], ("dest",))


@pytest.mark.parametrize("name", ["process", "schema", "state_bytes", "context", "_index"])
def test_a_measure_must_not_hide_what_the_operator_needs(name: str) -> None:
    with pytest.raises(UsageError, match=f"'{name}' cannot be a measure"):
        type("Bad", (agg.Aggregate,), {name: agg.count()})


def test_unfit_types_are_refused_at_planning_time() -> None:
    class Text(agg.Aggregate):
        total = agg.sum("dest")

    with pytest.raises(ColumnTypeError, match=r"sum\('dest'\)"):
        Text().output_schema([FLIGHTS.schema], ())
    with pytest.raises(KeyTypeError, match="'dest'"):
        Delays().output_schema([FLIGHTS.schema.set(0, pa.field("dest", pa.list_(pa.int8())))], ("dest",))


def test_an_unknown_output_mode_is_refused() -> None:
    with pytest.raises(UsageError, match="not 'append'"):
        opened(output_mode="append")


def test_an_overflowing_sum_names_its_column() -> None:
    batch = pa.record_batch({"dest": ["IAH"] * 2, "delay": [(1 << 63) - 1, 1]})
    with pytest.raises(SumOverflowError, match="'delay'"):
        opened(batch=batch).process(batch)


def test_state_bytes_grow_with_the_keys() -> None:
    batch = pa.record_batch({"dest": np.arange(10_000), "delay": pa.array([1] * 10_000, pa.int32())})
    operator = opened(batch=batch)
    before = operator.state_bytes()
    operator.process(batch)
    # seven arrays of 8 bytes, two of flags, and the key index: of the order of 100 bytes per key
    assert 50 * 10_000 < operator.state_bytes() - before < 300 * 10_000


def test_batches_are_not_kept() -> None:
    """Batches may be views into memory that is written over after the call."""
    memory = np.array([1, 2, 1])
    operator = opened(batch=pa.record_batch({"dest": memory, "delay": pa.array([1, 2, 3], pa.int32())}))
    operator.process(pa.record_batch({"dest": memory, "delay": pa.array([1, 2, 3], pa.int32())}))
    memory[:] = 9
    assert [(row["dest"], row["total"]) for row in finished(operator)] == [(1, 4), (2, 2)]


def test_count_of_a_star_counts_rows_as_in_spark() -> None:
    class Rows(flux.Aggregate):
        n = flux.count("*")

    batch = pa.record_batch({"k": [1, None, 1]})
    assert flux.testing.apply(flux.stage(key="k")(Rows), batch).sort_by("k").to_pydict() == {
        "k": [1, None],
        "n": [2, 1],
    }
    assert flux.count("*") == flux.count()
    with pytest.raises(flux.SchemaError, match=r"no column '\*'"):
        flux.testing.apply(flux.stage(type("Total", (flux.Aggregate,), {"n": flux.sum("*")})), batch)


def test_changes_hold_only_the_keys_that_changed() -> None:
    schema = pa.schema([("k", pa.int64()), ("delay", pa.int32())])
    many = pa.record_batch([list(range(1000)), [1] * 1000], schema=schema)
    operator = opened(batch=many, key=("k",))
    operator.process(many)
    assert operator.changes() is None, "nobody has asked before"
    operator.process(many.slice(5, 3))
    operator.process(pa.record_batch([[5, 2000], [9, 9]], schema=schema))
    changes = operator.changes()
    assert changes is not None
    assert changes["slots"].tolist() == [5, 6, 7]
    assert [key.to_pylist() for key in changes["keys"]] == [[2000]]
    assert changes["state"]["flights.counts"].to_pylist() == [3, 2, 2, 1]
    again = operator.changes()
    assert again is not None
    assert len(again["state"]) == 0, "nothing since"
    operator.process(many.slice(0, 600))
    assert operator.changes() is None, "more than half: the whole snapshot is less"


def test_changes_of_another_state_are_not_applied() -> None:
    schema = pa.schema([("k", pa.int64()), ("delay", pa.int32())])
    rows = [pa.record_batch([[k], [1]], schema=schema) for k in range(10)]
    operator, other, longer = (opened(batch=rows[0], key=("k",)) for _ in range(3))
    for row in rows[:5]:
        operator.process(row)
        longer.process(row)
    for row in rows[5:]:
        other.process(row)
    operator.changes()
    operator.process(rows[5])
    changes = operator.changes()
    assert changes is not None
    longer.process(rows[7])
    with pytest.raises(SchemaError, match="a state of 5 keys cannot be applied to one of 6"):
        longer.apply_changes(changes)
    with pytest.raises(SchemaError, match="new to it are there already"):
        other.apply_changes(changes)


def test_an_aggregate_with_a_state_of_its_own_gives_no_changes_of_the_rest_alone() -> None:
    class Noted(Delays):
        def snapshot(self) -> object:
            return {"rest": super().snapshot(), "seen": self.seen}

        def restore(self, snapshot: dict) -> None:  # type: ignore[override]
            super().restore(snapshot["rest"])
            self.seen = snapshot["seen"]

    assert gives_changes(Delays())
    assert not gives_changes(Noted())
