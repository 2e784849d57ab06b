"""The user's code fails, or gives values that are not allowed: the query ends with an error that names the place."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from harness import Rows, ThreadQuery, dataframe

import flux

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int64())])


def batch(*values: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([0] * len(values)), pa.array(values, pa.int64())], schema=SCHEMA)


def failure(stage: flux.Stage, *batches: pa.RecordBatch) -> flux.FluxError:
    """Feed these batches to the stage, and return the error with which the query ends."""
    with ThreadQuery(stage(dataframe(SCHEMA)), workers=1, step_max_rows=1) as query:
        query.started()
        query.feed([batches])
        return query.error()


def operator(**methods: Callable[..., Any]) -> flux.Stage:
    schema = pa.schema([("v", pa.int64())])
    given = {"schema": schema, "process": lambda self, rows: None, "finish": lambda self: []} | methods
    if "snapshot" in methods:
        given |= {"restore": lambda self, snapshot: None}
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


@pytest.mark.parametrize(
    ("made", "advice"),
    [
        (lambda rows: rows.to_pylist(), "from_pylist(rows) makes one of a list of rows"),
        (lambda rows: iter([{"v": 1}]), "from_pylist(rows) makes one of a list of rows"),
        (lambda rows: {"v": [1, 2]}, "from_pydict(columns) makes one of a dict of columns"),
    ],
)
def test_rows_and_columns_in_dicts_are_told_how_to_become_a_batch(made: Any, advice: str) -> None:
    error = failure(operator(process=lambda self, rows: made(rows)), batch(1))
    assert f"got dict; pa.RecordBatch.{advice}" in str(error)


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


def test_an_attribute_that_cannot_travel_is_refused_before_any_row() -> None:
    seen: list[int] = []

    def opens(self: Any, context: flux.Context) -> None:
        self.lock = threading.Lock()

    error = failure(operator(open=opens, process=lambda self, rows: seen.append(rows.num_rows)), batch(1))
    assert isinstance(error, flux.SnapshotError)
    assert str(error).startswith("stage Mine, partition 0: attribute 'lock' of Mine, a lock, cannot travel as state (")
    assert "Traceback" not in str(error), "no line of the user's has failed"
    assert seen == []


def test_a_container_of_the_class_that_is_filled_is_refused_with_stage_and_partition() -> None:
    def process(self: Any, rows: pa.RecordBatch) -> None:
        self.counts[0] = rows.num_rows

    error = failure(operator(counts={}, process=process), batch(1))
    assert str(error).startswith("stage Mine, partition 0: Mine.counts is one dict of the class")


@pytest.mark.parametrize("nested", [True, False])
def test_an_attribute_that_comes_with_the_rows_and_cannot_travel_is_refused_at_once(nested: bool) -> None:
    def process(self: Any, rows: pa.RecordBatch) -> None:
        if nested:
            self.seen[5] = (value for value in (1, 2))
        elif rows.column("v")[0].as_py() == 2:
            self.numbers = iter(range(3)), (value for value in (1, 2))

    def opens(self: Any, context: flux.Context) -> None:
        self.seen = {}

    error = failure(operator(open=opens, process=process), batch(1), batch(2), batch(3))
    assert f"attribute {'seen' if nested else 'numbers'!r} of Mine" in str(error)
    assert "generator" in str(error)


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
