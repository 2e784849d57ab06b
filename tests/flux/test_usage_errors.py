"""Mistakes in a dataflow that need no Spark to show: each is refused in a sentence, by the decorator or by the plan."""

from __future__ import annotations

import functools
import inspect
import pickle
import pydoc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from harness import Rows, dataframe

import flux
from controller.planning.compiler import compile_plan
from flux.dataflow.flow import Flow
from flux.settings import Settings

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int64())])
BATCH = pa.RecordBatch.from_pydict({"k": [0], "v": [1]}, schema=SCHEMA)


def compiled(*flows: Flow, **options: Any) -> Any:
    return compile_plan(list(flows), Settings.of(None, **options), lambda schema: schema, "q", b"s")


@flux.stage(key="k")
class Sums(flux.Aggregate):
    total = flux.sum("v")


@pytest.mark.parametrize("wrong", [0, -1, 4097, 5000, "8", 2.0, True])
def test_a_number_of_partitions_that_cannot_be_is_refused(wrong: Any) -> None:
    with pytest.raises(flux.UsageError, match=rf"stage Sums: partitions .* from 1 to 4096, got {wrong!r}"):
        flux.stage(key="k", partitions=wrong, name="Sums")(Sums.target)


@pytest.mark.parametrize("wrong", [0, -1, 9, "2"])
def test_a_number_of_replicas_that_cannot_be_is_refused(wrong: Any) -> None:
    with pytest.raises(flux.UsageError, match=rf"stage Sums: replicas .* from 1 to 3, got {wrong!r}"):
        flux.stage(key="k", replicas=wrong, name="Sums")(Sums.target)


def test_the_limits_themselves_are_accepted() -> None:
    for partitions in (1, 4096):
        stage = flux.stage(key="k", partitions=partitions)(Sums.target)
        assert compiled(stage(dataframe(SCHEMA))).stages[0].partitions == partitions
    assert compiled(Sums(dataframe(SCHEMA)), partitions="7").stages[0].partitions == 7


def test_an_unknown_key_column_is_refused_with_those_that_exist() -> None:
    stage = flux.stage(key=("k", "user"))(Sums.target)
    with pytest.raises(flux.SchemaError, match=r"stage Sums: key 'user' is not a column of its input; there are k, v"):
        compiled(stage(dataframe(SCHEMA)))


def test_a_key_column_that_is_there_twice_is_refused() -> None:
    twice = pa.schema([("k", pa.int64()), ("k", pa.int64()), ("v", pa.int64())])
    with pytest.raises(flux.SchemaError, match="stage Sums: key 'k' is the name of several columns"):
        compiled(Sums(dataframe(twice)))


def test_a_measure_over_a_column_that_does_not_exist_or_does_not_fit_is_refused() -> None:
    with pytest.raises(flux.SchemaError, match=r"stage Sums.*no column 'v'; there are k, w"):
        compiled(Sums(dataframe(pa.schema([("k", pa.int64()), ("w", pa.int64())]))))
    with pytest.raises(flux.SchemaError, match=r"stage Sums.*'v'"):
        compiled(Sums(dataframe(pa.schema([("k", pa.int64()), ("v", pa.string())]))))


def test_inputs_whose_types_differ_are_refused() -> None:
    other = pa.schema([("k", pa.int64()), ("v", pa.int32())])
    with pytest.raises(flux.SchemaError, match=r"'v' is int64 in input 0 but int32 in input 1"):
        compiled(Sums(dataframe(SCHEMA), dataframe(other)))


def test_a_cycle_is_refused_with_its_stages() -> None:
    @flux.stage
    def first(rows: pa.RecordBatch) -> pa.RecordBatch:
        return rows

    @flux.stage
    def second(rows: pa.RecordBatch) -> pa.RecordBatch:
        return rows

    start = first(dataframe(SCHEMA))
    end = second(start)
    start.connect(end)
    with pytest.raises(flux.UsageError, match=r"cycle: .*first.*second|cycle: .*second.*first"):
        compiled(end)
    itself = first(dataframe(SCHEMA))
    itself.connect(itself)
    with pytest.raises(flux.UsageError, match=r"cycle: first -> first"):
        compiled(itself)


def test_a_sink_cannot_feed_another_stage() -> None:
    with pytest.raises(flux.UsageError, match=r"stage Sink declares no schema, so it has no output for another"):
        compiled(Sums(Rows().stage(dataframe(SCHEMA))))


@pytest.mark.parametrize("given", [[1, 2], "table", 3, None, dict])
def test_what_is_neither_dataframe_nor_flow_nor_source_is_no_input(given: Any) -> None:
    with pytest.raises(flux.UsageError, match=f"an input must be .* got {type(given).__name__}"):
        Sums(dataframe(SCHEMA)).connect(given)


def forgets_return(batch: pa.RecordBatch) -> None:
    batch.filter(pa.array([True] * batch.num_rows))


def wraps(function: Any) -> Any:
    def wrapper(*given: Any) -> None:
        function(*given)

    return wrapper


@pytest.mark.parametrize(
    "function", [forgets_return, functools.partial(forgets_return), wraps(lambda batch: batch), lambda batch: None]
)
def test_a_function_without_return_is_refused(function: Any) -> None:
    with pytest.raises(flux.UsageError, match=r"returns nothing, so the stage would lose all rows.*foreach_batch"):
        flux.stage(function)


def raises(batch: Any) -> None:
    raise ValueError(batch)


def gives_some(batch: Any) -> Any:
    if batch.num_rows > 1:
        return batch
    return None


def yields(batch: Any) -> Any:
    yield batch


@pytest.mark.parametrize(
    "function", [raises, gives_some, yields, lambda batch: batch or None, lambda batch: None if batch else batch]
)
def test_a_function_that_may_give_something_is_a_stage(function: Any) -> None:
    assert isinstance(flux.stage(function), flux.Stage)


def test_an_operator_with_a_schema_that_never_gives_rows_is_refused() -> None:
    class Lost(flux.Operator):
        schema = SCHEMA

        def process(self, batch: pa.RecordBatch) -> None:
            batch.filter(batch.column("v"))

        def finish(self) -> None:
            pass

    class Kept(Lost):
        def on_timer(self, name: str) -> Any:
            return []

    with pytest.raises(flux.UsageError, match="stage Lost declares a schema, and no method of its operator gives rows"):
        compiled(flux.stage(Lost)(dataframe(SCHEMA)))
    compiled(flux.stage(Kept)(dataframe(SCHEMA)))


def test_a_class_that_is_no_operator_cannot_be_a_stage() -> None:
    with pytest.raises(flux.UsageError, match=r"class Plain must derive from flux\.Operator"):

        @flux.stage(key="k")
        class Plain:
            pass


def test_an_operator_that_needs_arguments_is_refused_when_the_plan_is_made() -> None:
    @flux.stage
    class Needy(flux.Operator):
        def __init__(self, path: str) -> None:
            self.path = path

        def process(self, batch: pa.RecordBatch) -> None:
            pass

    with pytest.raises(
        flux.UsageError, match=r"stage Needy: its operator cannot be made: .*path.*: Needy\(\.\.\.\)\(input\)"
    ):
        compiled(Needy(dataframe(SCHEMA)))


class Column:
    """A stand-in for a column of pyspark."""


Column.__module__ = "pyspark.sql.classic.column"


@pytest.mark.parametrize("wrong", [5, True, ("k", 5), {"k"}, b"k", "", ("k", ""), Column(), ["k", Column()]])
def test_a_key_that_is_no_name_is_refused_by_the_decorator(wrong: Any) -> None:
    with pytest.raises(
        flux.UsageError, match=r"key must be the name of a column, or a list or tuple of names.*; got "
    ) as raised:
        flux.stage(key=wrong)(Sums.target)
    assert ("df.withColumn" in str(raised.value)) == ("Column" in repr(wrong))


def test_a_key_names_each_column_once() -> None:
    with pytest.raises(flux.UsageError, match="key names column 'k' twice"):
        flux.stage(key=("k", "v", "k"))(Sums.target)


@pytest.mark.parametrize("wrong", [5, None, Column()])
def test_a_measure_of_what_is_no_column_is_refused_at_once(wrong: Any) -> None:
    with pytest.raises(flux.UsageError, match=r"flux\.sum takes the name of a column, as in flux\.sum\('price'\); got"):
        flux.sum(wrong)
    if wrong is not None:
        with pytest.raises(flux.UsageError, match=r"flux\.count takes the name of a column, or nothing"):
            flux.count(wrong)


@pytest.mark.parametrize(("function", "call"), [(flux.count, r"count\(\)"), (flux.mean, r"mean\('n'\)")])
def test_a_measure_without_parentheses_is_not_ignored(function: Any, call: str) -> None:
    with pytest.raises(
        flux.UsageError, match=rf"Delays: n is the function flux\.\w+ itself; call it: n = flux\.{call}"
    ):
        type("Delays", (flux.Aggregate,), {"n": function})


class GroupedData:
    """A stand-in for the class of pyspark."""


GroupedData.__module__ = "pyspark.sql.group"


class DataFrame:
    """A stand-in for a DataFrame of Spark that reads a stream."""

    isStreaming = True  # noqa: N815


DataFrame.__module__ = "pyspark.sql.classic.dataframe"

MISTAKEN = [
    (pd.DataFrame({"k": [1]}), "got a pandas DataFrame; spark.createDataFrame"),
    (pa.table({"k": [1]}), "got a pyarrow Table; spark.createDataFrame"),
    (BATCH, "got a pyarrow RecordBatch; .*flux.testing.apply"),
    (GroupedData(), "got the result of groupBy; give the DataFrame itself, and name the columns in @flux.stage"),
    (Sums, "got the stage Sums itself; call it with its own input first"),
    (7, "got int"),
]


@pytest.mark.parametrize(("given", "named"), MISTAKEN, ids=lambda value: type(value).__name__)
def test_what_is_often_taken_for_an_input_is_refused_in_a_sentence(given: Any, named: str) -> None:
    with pytest.raises(
        flux.UsageError, match=rf"stage Sums: an input must be a DataFrame, a flow or a source, {named}"
    ):
        Sums(given)
    with pytest.raises(flux.UsageError, match=rf"an input must be a DataFrame, a flow or a source, {named}"):
        Sums(dataframe(SCHEMA)).connect(given)


def test_a_streaming_dataframe_is_refused_in_a_sentence() -> None:
    with pytest.raises(flux.UsageError, match=r"this one is streaming .*: give flux\.stream\(df"):
        Sums(DataFrame())


def test_a_function_is_told_too_but_may_be_tried_with_batches() -> None:
    rows = flux.stage(lambda rows: rows.num_rows)
    assert rows(BATCH) == 1
    with pytest.raises(flux.UsageError, match="got a pandas DataFrame"):
        rows(pd.DataFrame({"k": [1]}))


def test_an_instance_cannot_be_decorated() -> None:
    for wrong in (Sums(), Sums, 5):
        with pytest.raises(flux.UsageError, match=r"flux\.stage decorates a class or a function, got"):
            flux.stage(wrong)


@pytest.mark.parametrize(
    ("wrong", "shown"),
    [
        (lambda: None, r"<lambda>\(\)"),
        (lambda a, b: a, r"<lambda>\(a, b\)"),
        (lambda a, *, b: a, r"<lambda>\(a, \*, b\)"),
        (lambda *, b: b, r"<lambda>\(\*, b\)"),
    ],
)
def test_a_function_of_a_stage_takes_the_batch_and_nothing_else(wrong: Any, shown: str) -> None:
    with pytest.raises(flux.UsageError, match=rf"exactly one argument, the batch, to be a stage; got {shown}"):
        flux.stage(wrong)


def test_functions_that_need_no_more_than_the_batch_or_do_not_say_are_accepted() -> None:
    for right in (lambda rows: rows, lambda rows, more=1: rows, lambda *rows: rows[0], functools.partial(max, 1), max):
        flux.stage(name="right")(right)


def test_an_operator_without_process_is_refused_by_the_decorator() -> None:
    with pytest.raises(flux.UsageError, match=r"class Idle must define process\(self, batch\)"):
        flux.stage(type("Idle", (flux.Operator,), {"finish": lambda self: None}))
    flux.stage(type("Mixed", (type("Base", (flux.Operator,), {"process": lambda self, rows: None}),), {}))


@pytest.mark.parametrize("wrong", [lambda: iter(()), lambda a, b, c: iter(()), lambda a, *, b: iter(())])
def test_a_source_reads_a_partition_perhaps_from_a_batch_on(wrong: Any) -> None:
    with pytest.raises(
        flux.UsageError, match=r"flux\.source: read must take .*read\(partition, start\); got <lambda>\("
    ):
        flux.source(wrong, SCHEMA, 1)


def test_a_source_that_seeks_is_known_by_two_arguments() -> None:
    reads: list[Any] = [lambda p: (), lambda p, more=1: (), lambda *where: (), lambda p, start: ()]
    assert [flux.source(read, SCHEMA, 1).reader.seeks for read in reads] == [False, False, False, True]


TWICE: list[Any] = ["v BIGINT, v STRING", pa.schema([("v", pa.int64()), ("v", pa.string())])]


@pytest.mark.parametrize("schema", TWICE, ids=["ddl", "arrow"])
def test_columns_with_one_name_are_refused_by_the_decorator(schema: Any) -> None:
    with pytest.raises(flux.SchemaError, match="stage named: its schema has column 'v' twice"):
        flux.stage(schema=schema, name="named")(lambda rows: rows)
    with pytest.raises(flux.SchemaError, match="stage Mine: its schema has column 'v' twice"):
        flux.stage(type("Mine", (flux.Operator,), {"process": lambda self, rows: None, "schema": schema}))
    with pytest.raises(flux.SchemaError, match="source named: its schema has column 'v' twice"):
        flux.source(lambda partition: (), schema, 1, "named")


@pytest.mark.parametrize("partitions", [0, -1, 4097, "2", None])
def test_a_source_with_impossible_partitions_is_refused_at_once(partitions: Any) -> None:
    with pytest.raises(flux.UsageError, match="partitions must be 1 to 4096"):
        flux.source(lambda p: [], schema=SCHEMA, partitions=partitions)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (
            lambda: flux.stream("x BIGINT", chekpoint="/x"),
            r"flux.stream has no option 'chekpoint', did you mean 'checkpoint'\?",
        ),
        (
            lambda: flux.files("/tmp", formt="csv"),
            r"flux.files has no option 'formt', did you mean 'format'\?; it has path, form",
        ),
        (lambda: flux.files("/tmp", nulvalue=""), r"'nulvalue', did you mean 'nullValue'\?.*, multiLine$"),
        (
            lambda: flux.kafka("t", "h:1", shema="x BIGINT"),
            r"flux.kafka has no option 'shema', did you mean 'schema'\?; .*ssl_caf",
        ),
        (
            lambda: flux.kafka("t", "h:1", starting="latest", zzz=1),
            "flux.kafka has no option 'zzz'; it has topics, bootstrap",
        ),
        (
            lambda: flux.datasource(object, strem=True),
            r"flux.datasource has no option 'strem', did you mean 'stream'\?",
        ),
        (lambda: flux.source(lambda p: [], "x BIGINT", 1, position=True), r"'position', did you mean 'positions'\?"),
        (lambda: flux.source(), "flux.source: missing a required argument: 'read'; it takes read, schema, partitions"),
        (
            lambda: Sums(dataframe(SCHEMA)).to_kafka("t", "h:1", Key="v"),
            r"to_kafka has no option 'Key', did you mean 'key'\?",
        ),
        (  # before a broker is asked
            lambda: Sums(dataframe(SCHEMA)).withStage(on_loss="converge").to_kafka("t", "h:1", timeout=1),
            r"has on_loss='converge', and to_kafka numbers rows",
        ),
        (
            lambda: Sums(dataframe(SCHEMA)).to_parquet("/x", rollBytes=1),
            "no option 'rollBytes', did you mean 'roll_bytes'",
        ),
        (lambda: Sums(dataframe(SCHEMA)).to_parquet(), "to_parquet: missing a required argument: 'path'"),
        (
            lambda: Sums(dataframe(SCHEMA)).to_readers(1),
            "to_readers: too many positional arguments; it takes max_bytes",
        ),
        (
            lambda: Sums(dataframe(SCHEMA)).foreach_batch(print, commited=len),
            r"did you mean 'committed'\?; it has function, c",
        ),
        (
            lambda: Sums(dataframe(SCHEMA)).writeStream.foreachBatch(print, x=1).start(),
            "foreach_batch has no option 'x'",
        ),
        (lambda: flux.stage(kye="k"), r"flux.stage has no option 'kye', did you mean 'key'\?; it has key, partitions"),
        (
            lambda: Sums(dataframe(SCHEMA)).start(checkpointLocaton="/x"),
            r"flux.start .*mean 'checkpointLocation'\?; it has query",
        ),
        (
            lambda: Sums(dataframe(SCHEMA)).toDF(worker=1),
            r"flux.to_df has no option 'worker', did you mean 'workers'\?",
        ),
    ],
)
def test_an_argument_that_does_not_exist_is_refused_with_those_that_do(call: Any, why: str) -> None:
    with pytest.raises(flux.UsageError, match=why):
        call()


def test_what_is_checked_is_still_the_function_that_it_was() -> None:
    assert list(inspect.signature(flux.files).parameters)[:3] == ["path", "format", "schema"]
    assert "never ends" in (flux.files.__doc__ or "").lower()
    assert pickle.loads(pickle.dumps(flux.files)) is flux.files


@pytest.mark.parametrize("kind", ["sum", "min", "max", "mean"])
def test_measures_without_their_column_or_with_arguments_they_do_not_have_are_refused(kind: str) -> None:
    measure = getattr(flux, kind)
    with pytest.raises(flux.UsageError, match=rf"flux.{kind}: missing a required argument: 'column'; it takes column"):
        measure()
    with pytest.raises(flux.UsageError, match=rf"flux.{kind} has no option 'col', did you mean 'column'\?"):
        measure(col="v")


@pytest.mark.parametrize("wrong", [(), []])
def test_a_key_without_columns_is_refused(wrong: Any) -> None:
    with pytest.raises(flux.UsageError, match="names no column: leave key out"):
        flux.stage(key=wrong)


@pytest.mark.parametrize("name", ["kafka", "stream", "files"])
def test_help_shows_a_function_for_each_source(name: str) -> None:
    """Look at the function itself: a package of its name would hide it once that package was imported."""
    function = getattr(flux, name)
    assert inspect.isfunction(function)
    assert pydoc.plain(pydoc.render_doc(function)).splitlines()[2].startswith(f"{name}(")
    assert (inspect.getdoc(function) or "").strip()


def wrong_calls() -> list[Callable[[], Any]]:
    given = flux.stage(lambda batch: batch, name="same")
    return [
        lambda: flux.source(1, schema="k BIGINT"),
        lambda: flux.stage(partitions=0)(lambda batch: batch),
        lambda: flux.source(lambda partition: iter(()), schema="k BIGNT"),
        lambda: Sums(pa.table({"k": [1]})),
        lambda: given(flux.source(lambda partition: iter(()), schema="k BIGINT")).start(spark=None, replica=2),
    ]


@pytest.mark.parametrize("number", range(len(wrong_calls())))
def test_a_wrong_call_is_printed_with_the_line_of_the_call_and_no_frame_of_ours(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(flux.UsageError) as caught:
        wrong_calls()[number]()
    sys.excepthook(caught.type, caught.value, caught.tb)
    printed = capsys.readouterr().err
    files = [line for line in printed.splitlines() if line.lstrip().startswith("File ")]
    assert files, printed
    assert all(f'"{__file__}"' in line for line in files), printed
    assert printed.rstrip().endswith(str(caught.value))


def test_other_errors_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(flux.UsageError):
        flux.source(1, schema="k BIGINT")
    with pytest.raises(OSError, match="not") as caught:
        Path("/not/there").read_text()
    sys.excepthook(caught.type, caught.value, caught.tb)
    assert "pathlib" in capsys.readouterr().err
