"""Aggregates get the columns that they look at, and no others."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import flux
from controller.planning.compiler import compile_plan
from controller.planning.explain import explain
from flux.dataflow.plan import DataFrameSourcePlan, Plan
from flux.dataflow.source import DataFrameSource, Source
from flux.errors import SchemaError
from flux.settings import Settings

ROWS = pa.schema([("note", pa.string()), ("Key", pa.string()), ("x", pa.int64()), ("y", pa.int64())])


def rows() -> Source:
    return DataFrameSource("rows", ROWS)


def read_in_workers() -> Any:
    return flux.source(lambda partition: iter(()), ROWS, 2, "rows")


def compiled(*flows: Any, collect: int = 0) -> Plan:
    return compile_plan(list(flows), Settings.of(), lambda schema: schema, "q", b"", collect)


class Xs(flux.Aggregate):
    n = flux.count()
    total = flux.sum("x")


class Ys(flux.Aggregate):
    least = flux.min("y")


class Counts(flux.Aggregate):
    n = flux.count()


class OwnProcess(Xs):
    def process(self, batch: pa.RecordBatch) -> Any:
        return super().process(batch.filter(pa.compute.field("note") != ""))


class OwnTimer(Xs):
    def on_timer(self, name: str) -> Any:
        return self.finish()


class More(Xs):
    """An aggregate of measures alone, with a setting."""

    most = flux.max("x")
    unit = "kB"


class Sink(flux.Operator):
    def process(self, batch: pa.RecordBatch) -> None: ...


def test_an_edge_brings_what_the_aggregate_behind_it_looks_at() -> None:
    plan = compiled(flux.stage(key="key", partitions=2)(Xs)(read_in_workers()))
    (edge,), (stage,) = plan.edges, plan.stages
    assert (edge.columns, edge.schema.names, edge.key) == ((1, 2), ["Key", "x"], (0,))
    assert stage.schemas == (edge.schema,)
    assert stage.output_schema is not None
    assert stage.output_schema.names == ["key", "n", "total"], "as the user has named it"
    assert plan.sources[0].schema == ROWS, "its reader gives all of them"
    assert "reads source rows, rows by hash of Key; no columns but Key, x" in explain(plan)


def test_spark_reads_no_column_of_a_dataframe_that_no_stage_looks_at() -> None:
    x, keyed = rows(), flux.stage(key="Key", partitions=2)
    plan = compiled(keyed(Xs)(x), keyed(Ys)(x))
    (source,) = plan.sources
    assert isinstance(source, DataFrameSourcePlan)
    assert (source.columns, source.schema.names) == ((1, 2, 3), ["Key", "x", "y"])
    assert [(edge.columns, edge.schema.names) for edge in plan.edges] == [
        ((0, 1), ["Key", "x"]),
        ((0, 2), ["Key", "y"]),
    ]
    assert "    gives Key string, x int64, y int64\n    its other columns are not read" in explain(plan)
    (alone,) = compiled(keyed(Xs)(rows())).edges
    assert (alone.columns, alone.schema.names) == (None, ["Key", "x"])


def test_whoever_has_code_of_its_own_gets_all() -> None:
    keyed = flux.stage(key="Key", partitions=2)
    (edge,) = compiled(keyed(More)(read_in_workers())).edges
    assert edge.columns == (1, 2)
    for operator in (OwnProcess, OwnTimer, Sink):
        x = rows()
        plan = compiled(keyed(operator)(x), keyed(Xs)(x))
        assert plan.edges[0].columns is None
        assert plan.edges[0].schema == plan.sources[0].schema == ROWS
        assert plan.edges[1].columns == (1, 2)


def test_output_of_a_stage_travels_in_part_and_is_collected_whole() -> None:
    passed = flux.stage(lambda batch: batch)(rows())
    plan = compiled(flux.stage(key="Key", partitions=2)(Ys)(passed), passed, collect=2)
    assert {plan.stages[edge.consumer].name: edge.columns for edge in plan.edges if edge.from_stage} == {
        "Ys": (1, 3),
        "Ys.toDF": None,
        "<lambda>.toDF": None,
    }


def test_rows_are_counted_by_one_narrow_column() -> None:
    (edge,) = compiled(flux.stage(Counts)(read_in_workers())).edges
    assert edge.columns == (2,)
    (edge,) = compiled(flux.stage(Counts)(DataFrameSource("rows", pa.schema([])))).edges
    assert edge.columns is None


def test_errors_name_all_columns_that_there_are() -> None:
    with pytest.raises(SchemaError, match="there are note, Key, x, y"):
        compiled(flux.stage(key="z", partitions=2)(Xs)(rows()))
