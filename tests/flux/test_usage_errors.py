"""Mistakes of the user that need no Spark to show: each is refused, or ends the query, with an error that says where."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from harness import Rows, ThreadQuery, dataframe

import flux
from controller.dag import compile_plan
from flux.api import Flow
from flux.settings import TABLE, Settings
from spark_integration.executor import spark_id
from spark_integration.settings import Need, count_slots, room_for_workers

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int64())])


def batch(*values: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([0] * len(values)), pa.array(values, pa.int64())], schema=SCHEMA)


def compiled(*flows: Flow, **options: Any) -> Any:
    return compile_plan(list(flows), Settings.of(None, **options), lambda schema: schema, "q", b"s")


def failure(stage: flux.Stage, *batches: pa.RecordBatch) -> flux.FluxError:
    """How a query ends that feeds these batches to the stage."""
    with ThreadQuery(stage(dataframe(SCHEMA)), workers=1, step_max_rows=1) as query:
        query.started()
        query.feed([batches])
        return query.error()


# ---- the dataflow


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
    with pytest.raises(flux.UsageError, match=r"stage Sink is a sink .* cannot feed another"):
        compiled(Sums(Rows().stage(dataframe(SCHEMA))))


@pytest.mark.parametrize("given", [[1, 2], "table", 3, None, dict])
def test_what_is_neither_dataframe_nor_flow_nor_source_is_no_input(given: Any) -> None:
    with pytest.raises(flux.UsageError, match=f"an input must be .* got {type(given).__name__}"):
        Sums(dataframe(SCHEMA)).connect(given)


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
    """Stands for one of pyspark."""


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
    """Stands for the one of pyspark."""


GroupedData.__module__ = "pyspark.sql.group"


class DataFrame:
    """Stands for one of Spark that reads a stream."""

    isStreaming = True  # noqa: N815


DataFrame.__module__ = "pyspark.sql.classic.dataframe"

MISTAKEN = [
    (pd.DataFrame({"k": [1]}), "got a pandas DataFrame; spark.createDataFrame"),
    (pa.table({"k": [1]}), "got a pyarrow Table; spark.createDataFrame"),
    (batch(1), "got a pyarrow RecordBatch; .*flux.testing.apply"),
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
    with pytest.raises(flux.UsageError, match=r"streaming DataFrames .* are not taken.*flux\.source"):
        Sums(DataFrame())


def test_a_function_is_told_too_but_may_be_tried_with_anything_that_has_rows() -> None:
    rows = flux.stage(lambda rows: rows.num_rows)
    assert rows(pa.table({"k": [1]})) == rows(batch(1)) == 1
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
    assert [flux.source(read, SCHEMA, 1).seeks for read in reads] == [False, False, False, True]


TWICE: list[Any] = ["v BIGINT, v STRING", pa.schema([("v", pa.int64()), ("v", pa.string())])]


@pytest.mark.parametrize("schema", TWICE, ids=["ddl", "arrow"])
def test_columns_with_one_name_are_refused_by_the_decorator(schema: Any) -> None:
    with pytest.raises(flux.SchemaError, match="stage named: its schema has column 'v' twice"):
        flux.stage(schema=schema, name="named")(lambda rows: rows)
    with pytest.raises(flux.SchemaError, match="stage Mine: its schema has column 'v' twice"):
        flux.stage(type("Mine", (flux.Operator,), {"process": lambda self, rows: None, "schema": schema}))
    with pytest.raises(flux.SchemaError, match="source named: its schema has column 'v' twice"):
        flux.source(lambda partition: (), schema, 1, "named")


# ---- slots and settings


def test_too_few_task_slots_are_counted_aloud() -> None:
    with pytest.raises(flux.UsageError) as raised:
        count_slots(0, True, 1, {})  # what a DataFrame on local[1] needs
    assert str(raised.value).startswith(
        "too few task slots: 1 worker + 1 for the Spark tasks that read the input or fetch the output = 2 slots "
        "needed; existing: 1, free: 1."
    )
    assert "local[2]" in str(raised.value)
    with pytest.raises(flux.UsageError, match=r"3 workers = 3 slots needed; existing: 4, 2 held by query x, free: 2"):
        count_slots(3, False, 4, {"x": 2})
    assert count_slots(0, True, 2, {}).workers == 1
    assert count_slots(0, True, 8, {"x": 2}).workers == 3
    assert count_slots(0, False, 8, {"x": 2}).workers == 6
    assert count_slots(7, True, 8, {}).workers == 7


def test_room_for_more_workers_is_counted_aloud() -> None:
    room = room_for_workers(Need(2, 1), 6, {"x": 2})
    assert room.workers == 3
    assert room.arithmetic.startswith(
        "6 task slots exist, 2 held by query x, 1 for the Spark tasks that read the input or fetch the output: there is "
        "room for 3 workers."
    )
    assert room_for_workers(Need(2, 0), 2, {}).arithmetic.startswith("2 task slots exist: there is room for 2 workers")
    assert room_for_workers(Need(1, 1), 1, {"x": 4}).workers == 0


def test_the_name_of_an_executor_tells_sparks_own_id() -> None:
    assert spark_id("12@host:4711") == "12"
    assert spark_id("host:4711") is None


@pytest.mark.parametrize(
    ("setting", "raw"),
    [
        (s, raw)
        for s in TABLE
        for raw in ("many", "12 parsecs", "", "-1 s", [1])
        if s.kind != "text" and (s.kind != "labels" or raw not in ("many", ""))
    ],
    ids=lambda value: getattr(value, "name", repr(value)),
)
def test_a_setting_that_cannot_be_read_names_key_value_and_an_example(setting: Any, raw: Any) -> None:
    named = rf"spark\.flux\.{re.escape(setting.key)}: cannot read {re.escape(repr(raw))} .*example '{setting.default}'"
    with pytest.raises(flux.UsageError, match=named):
        Settings.of(None, **{setting.keyword: raw})
    if isinstance(raw, str):
        with pytest.raises(flux.UsageError, match=named):
            Settings.of({f"spark.flux.{setting.key}": raw})


def test_a_setting_out_of_range_says_what_is_accepted() -> None:
    with pytest.raises(flux.UsageError, match=r"spark\.flux\.partitions: '0' is out of range, at least 1"):
        Settings.of({"spark.flux.partitions": "0"})
    with pytest.raises(flux.UsageError, match=r"spark\.flux\.partitions: 4097 is out of range, at most 4096"):
        Settings.of(None, partitions=4097)


def test_unknown_settings_are_refused_with_those_that_exist() -> None:
    with pytest.raises(flux.UsageError, match=r"unknown option 'log_max_byte'; known are .*log_max_bytes"):
        Settings.of(None, log_max_byte="1m")
    with pytest.raises(flux.UsageError, match=r"unknown setting spark\.flux\.worker; known are .*workers"):
        Settings.of({"spark.flux.worker": "1", "spark.other": "x"})


@pytest.mark.parametrize("raw", ["nan", "inf", "1e999"])
def test_a_number_is_finite(raw: str) -> None:
    with pytest.raises(flux.UsageError, match=r"spark\.flux\.balance\.threshold: cannot read .* as number"):
        Settings.of(None, balance_threshold=raw)


def test_the_readme_lists_every_setting_with_its_default_and_meaning() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    rows = [line for line in readme.splitlines() if line.startswith("| `spark.flux.")]
    assert rows == [f"| `spark.flux.{s.key}` | {s.default} | {s.meaning} |" for s in TABLE]


def test_every_keyword_follows_from_its_key() -> None:
    """As a reader of the README makes it: dots and changes of case become underscores."""
    for s in TABLE:
        words = [word for part in s.key.split(".") for word in re.findall("[A-Z]?[a-z]+", part)]
        keyword = "_".join(words).lower()
        assert s.keyword == keyword
        value = getattr(Settings.of(), s.name)
        assert Settings.of(None, **{keyword: s.default}) == Settings.of(), (keyword, value)
    assert Settings.of(None, repair_at_once=3).repairs_at_once == 3
    assert Settings.of(None, replicas_allow_same_executor=True).same_executor
    with pytest.raises(flux.UsageError, match=r"unknown option 'repairs_at_once'; known are .* repair_at_once"):
        Settings.of(None, repairs_at_once=3)


def test_the_version_is_that_of_the_newest_changes() -> None:
    changes = (Path(__file__).parents[2] / "CHANGELOG.md").read_text()
    newest = re.search(r"^## (\S+)$", changes, re.MULTILINE)
    assert newest is not None
    assert flux.__version__ == newest[1]


def test_units_mean_what_they_say() -> None:
    settings = Settings.of({"spark.flux.log.maxBytes": "1.5 kb"}, ack_interval="20ms", credit_max_bytes=4096)
    assert (settings.log_max_bytes, settings.ack_interval, settings.credit_max_bytes) == (1536, 0.02, 4096)


# ---- the user's code


def operator(**methods: Callable[..., Any]) -> flux.Stage:
    given = {"schema": pa.schema([("v", pa.int64())]), "process": lambda self, rows: None} | methods
    return flux.stage(key="k", partitions=1)(type("Mine", (flux.Operator,), given))


def raising(error: BaseException) -> Callable[..., Any]:
    def method(*_: Any) -> None:
        raise error

    return method


@pytest.mark.parametrize("method", ["open", "finish", "snapshot"])
def test_code_that_raises_is_named_with_stage_and_partition(method: str) -> None:
    error = failure(operator(**{method: raising(ValueError("what now?"))}), batch(1))
    assert isinstance(error, flux.UserCodeError)
    assert str(error).startswith("stage Mine, partition 0: ")
    assert "raised ValueError: what now?" in str(error)


def test_a_row_that_process_cannot_take_is_shown_with_stream_and_sequence() -> None:
    def process(self: Any, rows: pa.RecordBatch) -> None:
        for row in rows.to_pylist():
            if row["v"] == 13:
                raise ValueError("unlucky")

    error = failure(operator(process=process), batch(1, 2), batch(3, 13, 5), batch(6))
    assert isinstance(error, flux.UserCodeError)
    assert error.summary == (
        "stage Mine, partition 0: process() raised ValueError: unlucky (at stream 0.0 sequence 1; first bad row is number "
        "1 of the step: {'k': 0, 'v': 13})"
    )


def test_code_that_fails_by_what_it_remembers_blames_no_row() -> None:
    def process(self: Any, rows: pa.RecordBatch) -> None:
        self.seen = getattr(self, "seen", 0) + rows.num_rows
        if self.seen > 3:
            raise MemoryError("too many")

    error = failure(operator(process=process), batch(1, 2), batch(3), batch(4))
    assert isinstance(error, flux.UserCodeError)
    assert "no single row is at fault" in str(error)
    assert "MemoryError: too many" in str(error)


def test_an_assertion_of_the_user_is_the_users_fault_and_not_ours() -> None:
    assert isinstance(failure(operator(process=raising(AssertionError("never"))), batch(1)), flux.UserCodeError)


@pytest.mark.parametrize("made", [{"v": 1}, "text", 5, pa.array([1]), None], ids=lambda made: type(made).__name__)
def test_output_that_is_no_batch_is_refused_by_its_type(made: Any) -> None:
    def process(self: Any, rows: pa.RecordBatch) -> Iterator[Any]:
        yield made

    error = failure(operator(process=process), batch(1))
    wanted = f"output of stage Mine: expected a pyarrow.RecordBatch, got {type(made).__name__}"
    assert isinstance(error, flux.UserCodeError)
    assert wanted in str(error)
    assert str(error).startswith("stage Mine, partition 0, process(): ")
    assert "row is at fault" not in str(error)


@pytest.mark.parametrize("made", [{"v": 1}, "text", 5, True, pa.array([1])], ids=lambda made: type(made).__name__)
def test_what_is_returned_and_no_batch_is_refused_by_its_type(made: Any) -> None:
    error = failure(operator(process=lambda self, rows: made), batch(1))
    assert f"output of stage Mine: expected a pyarrow.RecordBatch, got {type(made).__name__}" in str(error)


@pytest.mark.parametrize("returned", [True, False])
def test_pandas_is_told_how_to_become_a_batch(returned: bool) -> None:
    frame = pd.DataFrame({"v": [1]})
    error = failure(operator(process=lambda self, rows: frame if returned else iter([frame])), batch(1))
    assert "got pandas.DataFrame; pa.RecordBatch.from_pandas(df, preserve_index=False) makes one" in str(error)


@pytest.mark.parametrize("method", ["process", "finish"])
@pytest.mark.parametrize("table", [True, False])
@pytest.mark.parametrize("returned", [True, False])
def test_a_batch_or_a_table_may_be_yielded_or_returned(method: str, table: bool, returned: bool) -> None:
    made = pa.record_batch({"v": [1, 2]})
    given = pa.Table.from_batches([made]) if table else made
    stage = operator(**{method: lambda self, *rows: given if returned else iter([given])})
    assert flux.testing.apply(stage, batch(7)).to_pydict() == {"v": [1, 2]}
    rows = Rows()
    with ThreadQuery(rows.stage(stage(dataframe(SCHEMA))), workers=1) as query:
        query.started().feed([[batch(7)]])
        query.wait()
    assert rows == [{"v": 1}, {"v": 2}]


def test_other_columns_than_declared_are_refused_with_both() -> None:
    @flux.stage(schema=pa.schema([("v", pa.int64()), ("n", pa.string())]), partitions=1)
    def renamed(rows: pa.RecordBatch) -> pa.RecordBatch:
        return pa.RecordBatch.from_pydict({"v": rows.column("v"), "m": ["x"] * rows.num_rows})

    error = failure(renamed, batch(1))
    assert "output of stage renamed: declared (v int64, n string), got (v int64, m string)" in str(error)


def test_a_sink_that_yields_rows_is_told_to_declare_a_schema() -> None:
    error = failure(operator(schema=None, process=lambda self, rows: [rows]), batch(1))
    assert "declares no schema; give schema=... to the decorator, or yield nothing" in str(error)


def test_a_snapshot_that_cannot_travel_is_refused_before_any_row() -> None:
    seen: list[int] = []

    def process(self: Any, rows: pa.RecordBatch) -> None:
        seen.append(rows.num_rows)

    locked = operator(snapshot=lambda self: {"state": threading.Lock()}, process=process)
    error = failure(locked, batch(1))
    assert isinstance(error, flux.SnapshotError)
    assert re.match(r"stage Mine, partition 0: the snapshot, a dict, cannot be serialised .*lock", str(error))
    assert seen == []


def test_a_source_that_raises_is_named_with_its_partition() -> None:
    def read(partition: int) -> Iterator[pa.RecordBatch]:
        yield batch(1)
        raise OSError(f"file {partition} is gone")

    source = flux.source(read, schema=SCHEMA, partitions=1, name="files")
    with ThreadQuery(Rows().stage(source), workers=1) as query:
        error = query.error()
    assert isinstance(error, flux.UserCodeError)
    assert "source files, partition 0" in str(error)
    assert "file 0 is gone" in str(error)


def test_a_source_that_yields_other_rows_than_declared_is_refused_by_name() -> None:
    def read(partition: int) -> Iterator[Any]:
        yield pa.RecordBatch.from_pydict({"other": [1]})

    source = flux.source(read, schema=SCHEMA, partitions=1, name="files")
    with ThreadQuery(Rows().stage(source), workers=1) as query:
        error = query.error()
    assert isinstance(error, flux.SchemaError)
    assert "source files: declared (k int64, v int64), got (other int64)" in str(error)


def test_a_source_that_cannot_even_start_is_named() -> None:
    def read(partition: int) -> Iterator[pa.RecordBatch]:
        raise OSError("no such folder")

    source = flux.source(read, schema=SCHEMA, partitions=1, name="files")
    with ThreadQuery(Rows().stage(source), workers=1) as query:
        error = query.error()
    assert isinstance(error, flux.UserCodeError)
    assert "source files, partition 0" in str(error)


@pytest.mark.parametrize("partitions", [0, -1, 4097, "2", None])
def test_a_source_with_impossible_partitions_is_refused_at_once(partitions: Any) -> None:
    with pytest.raises(flux.UsageError, match="partitions must be 1 to 4096"):
        flux.source(lambda p: [], schema=SCHEMA, partitions=partitions)
