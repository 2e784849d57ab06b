"""Mistakes of users who come from PySpark: each is answered with a sentence that gives the code to write."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from harness import dataframe

import flux
from controller.planning.compiler import compile_plan
from flux.operators.operator import Context
from flux.settings import Settings

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int64())])


@flux.stage(key="k")
class Sums(flux.Aggregate):
    total = flux.sum("v")


@flux.stage
def same(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def compiled(*flows: Any, **options: Any) -> Any:
    return compile_plan(list(flows), Settings.of(), lambda schema: schema, "q", b"s", **options)


def test_a_class_may_say_its_output_mode_itself() -> None:
    class Said(Sums.target):  # type: ignore[name-defined, misc]
        output_mode = "update"

    stage = flux.stage(key="k")(Said)
    assert compiled(stage(dataframe(SCHEMA)).foreach_batch(print)).stages[0].output_mode == "update"
    batch = pa.record_batch([[1, 1], [2, 3]], schema=SCHEMA)
    assert flux.testing.apply(stage, batch, batch).column("total").to_pylist() == [5, 10]
    assert flux.stage(key="k", output_mode="update")(Said).output_mode == "update"
    assert flux.stage(key="k")(Sums.target).output_mode == "complete"
    with pytest.raises(
        flux.UsageError, match=r"class Said says output_mode = 'update', and its decorator .*say it once"
    ):
        flux.stage(key="k", output_mode="complete")(Said)
    with pytest.raises(flux.UsageError, match="output_mode must be one of complete, update; got 'append'"):
        flux.stage(key="k")(type("Wrong", (Said,), {"output_mode": "append"}))


@pytest.mark.parametrize("mode", ["update", "complete"])
def test_a_function_has_no_output_mode(mode: str) -> None:
    with pytest.raises(
        flux.UsageError, match=f"output_mode={mode!r} is for an aggregate.*same is a function: leave it"
    ):
        flux.stage(output_mode=mode)(same.target)


def test_an_operator_may_go_by_the_output_mode_itself() -> None:
    class Own(flux.Operator):
        def process(self, batch: pa.RecordBatch) -> Any:
            return batch if self.context.output_mode == "update" else None

    assert flux.stage(schema="k BIGINT, v BIGINT", output_mode="update")(Own).output_mode == "update"


@pytest.mark.parametrize(
    "declare",
    [
        lambda text: flux.source(lambda partition: iter(()), schema=text, partitions=1, name="Clicks"),
        lambda text: flux.stream(text, name="Clicks"),
        lambda text: flux.stage(schema=text, name="Clicks")(same.target),
    ],
)
def test_a_schema_that_cannot_be_read_is_told_where_it_is_declared(declare: Any) -> None:
    with pytest.raises(
        flux.SchemaError, match=r"Clicks: cannot read the schema 'k BIGNT': expected a type .*not BIGNT"
    ):
        declare("k BIGNT")
    for text in ("k VARCHAR(3)", "k STRING COLLATE UTF8_LCASE", "struct<k: BIGINT>", "k INT DEFAULT 1"):
        declare(text)  # Spark reads these


def test_a_subclass_of_a_decorated_class_is_told_where_to_derive_from() -> None:
    for stage in (Sums, same):
        with pytest.raises(flux.UsageError, match=rf"stage {stage.name} is no class any more.*{stage.name}\.target"):

            class Derived(stage):  # type: ignore[misc, valid-type]
                pass


def test_a_forgotten_decorator_is_named() -> None:
    class Plain(flux.Aggregate):
        total = flux.sum("v")

    class Given(flux.Operator):
        def __init__(self, given: Any) -> None:
            pass

    for kind in (Plain, Given):
        with pytest.raises(flux.UsageError, match=rf"{kind.__name__} is no stage of a flow yet: decorate the class"):
            kind(dataframe(SCHEMA))
    with pytest.raises(TypeError, match=r"Plain\(\) takes no arguments"):
        Plain(5)
    assert isinstance(Given(5), Given)


@pytest.mark.parametrize("given", [same.target, Sums.target])
def test_an_input_that_lacks_its_decorator_is_named(given: Any) -> None:
    with pytest.raises(flux.UsageError, match=f"got {given.__name__}, which is no stage: decorate it with @flux.stage"):
        Sums(given)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("distinct", "flux.dedup"),
        ("cube", "one row for each group"),
        ("write", "flow.to_parquet"),
        ("crossJoin", "flow.join"),
        ("toPandas", "flow.collect"),
    ],
)
def test_names_of_dataframes_are_answered_and_not_there(name: str, said: str) -> None:
    flow = same(dataframe(SCHEMA))
    with pytest.raises(AttributeError, match=f"a flow has no {name}: .*{said}") as raised:
        getattr(flow, name)
    assert isinstance(raised.value, flux.UsageError)
    assert not hasattr(flow, name)
    assert getattr(flow, name, None) is None


def test_names_that_nobody_knows_are_not_there_either(monkeypatch: pytest.MonkeyPatch) -> None:
    # With pyspark, attributes may be columns, which the session of the DataFrame knows; here is a schema in its place.
    monkeypatch.delitem(sys.modules, "pyspark", raising=False)
    flow = same(dataframe(SCHEMA))
    into = flow.foreach_batch(print)
    for thing in (flow, into, dataframe(SCHEMA)):
        assert not hasattr(thing, "nonsense")
        with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
            thing.nonsense  # noqa: B018
    for thing, name in ((into, "to_parquet"), (dataframe(SCHEMA), "toDF")):
        assert not hasattr(thing, name)
        with pytest.raises(flux.UsageError, match=rf"has no {name}\(\)"):
            getattr(thing, name)


def test_an_aggregate_whose_open_forgets_that_of_its_base_is_told() -> None:
    class Forgets(Sums.target):  # type: ignore[name-defined, misc]
        def open(self, context: Context) -> None:
            self.more = 1

    with pytest.raises(flux.UsageError, match=r"Forgets.open\(self, context\) must call super\(\).open\(context\)"):
        flux.testing.apply(flux.stage(key="k")(Forgets), pa.record_batch([[1], [2]], schema=SCHEMA))


def test_a_table_is_no_input() -> None:
    table = pa.table({"k": [1], "v": [2]})
    for stage in (Sums, same):
        with pytest.raises(flux.UsageError, match=r"got a pyarrow Table; spark\.createDataFrame"):
            stage(table)
    assert same(table.to_batches()[0]).num_rows == 1


def test_the_arguments_of_a_reader_the_wrong_way_round_are_refused() -> None:
    def read(start: int, partition: int) -> Iterator[pa.RecordBatch]:
        yield from ()

    with pytest.raises(flux.UsageError, match=r"with the partition first, read\(partition, start\); got read\(start"):
        flux.source(read, schema=SCHEMA, partitions=1)
    flux.source(lambda partition, start: iter(()), schema=SCHEMA, partitions=1)
    flux.source(lambda number, begin: iter(()), schema=SCHEMA, partitions=1)


def test_an_operator_that_gives_rows_without_a_schema_is_told_to_declare_one() -> None:
    @flux.stage
    class Gives(flux.Operator):
        def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
            return batch

    flow = Gives(dataframe(SCHEMA))
    for call in (
        lambda: compiled(flow, collect=1),
        lambda: compiled(flow.foreach_batch(print)),
        lambda: compiled(same(flow)),
    ):
        with pytest.raises(
            flux.UsageError, match=r"declares no schema.* say what they are: @flux.stage\(\.\.\., schema="
        ):
            call()
