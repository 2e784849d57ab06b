"""An error of the user's code shows its own frames, and none of ours."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from harness import LIMIT_S, Rows, ThreadQuery, dataframe

import flux
from flux.dataflow.plan import StagePlan
from flux.errors import QueryFailed, UserCodeError
from flux.operators.user_code import TRACEBACK_CHARS_MAX, user_traceback
from flux.replica.replica import Replica
from flux.settings import Settings

SCHEMA = pa.schema([("v", pa.int64())])


def parsed(value: int) -> int:
    try:
        return 10 // value
    except ZeroDivisionError as error:
        raise ValueError("a zero came") from error


def failed(stage: flux.Stage, *values: int) -> flux.FluxError:
    with ThreadQuery(stage(dataframe(SCHEMA)), workers=1) as query:
        query.started().feed([[pa.record_batch({"v": pa.array(values, pa.int64())})]])
        return query.error()


def mine(**methods: Any) -> flux.Stage:
    if "snapshot" in methods:
        methods["restore"] = lambda self, snapshot: None
    return flux.stage(partitions=1)(type("Mine", (flux.Operator,), {"process": lambda self, rows: None} | methods))


def test_a_failure_shows_file_line_and_cause_and_none_of_our_frames(caplog: pytest.LogCaptureFixture) -> None:
    def process(self: Any, rows: pa.RecordBatch) -> None:
        for value in rows.column("v").to_pylist():
            parsed(value)

    with caplog.at_level(logging.ERROR, "flux"):
        error = failed(mine(process=process), 5, 0, 1)
    assert isinstance(error, UserCodeError)
    assert error.summary == (
        "stage Mine, partition 0: process() raised ValueError: a zero came (at stream 0.0 sequence 0; first bad row is "
        "number 1 of the step: {'v': 0})"
    )
    lines = str(error).removeprefix(error.summary).strip().splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: a zero came"
    assert "ZeroDivisionError: integer division or modulo by zero" in lines
    frames = [line for line in lines if line.startswith("  File ")]
    assert [frame.rpartition(" in ")[2] for frame in frames] == ["parsed", "process", "parsed"]
    assert all(f'"{__file__}", line ' in frame for frame in frames)
    assert "    parsed(value)" in lines
    assert "query q failed: UserCodeError: stage Mine" in caplog.text
    assert "in parsed" in caplog.text


@pytest.mark.parametrize("method", ["open", "finish", "snapshot"])
def test_every_method_is_shown(method: str) -> None:
    def broken(self: Any, *_: Any) -> None:
        parsed(0)

    error = failed(mine(**{method: broken}), 1)
    assert f"stage Mine, partition 0: {method}() raised ValueError: a zero came" in error.summary
    assert ", in broken" in str(error)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("method", ["open", "process", "finish", "snapshot", "on_timer"])
def test_code_that_ends_the_program_is_the_users_error_and_no_lost_worker(method: str, error: BaseException) -> None:
    def ends(self: Any, *_: Any) -> None:
        raise error

    def opened(self: Any, context: flux.Context) -> None:
        flux.Operator.open(self, context)
        context.set_timer(0.0)

    methods = {method: ends} if method != "on_timer" else {"open": opened, "on_timer": ends}
    found = failed(mine(**methods), 1)
    assert isinstance(found, UserCodeError)
    assert f"stage Mine, partition 0: {method}() raised {type(error).__name__}" in found.summary
    assert ", in ends" in str(found)


class Leaves:
    def __reduce__(self) -> Any:
        raise SystemExit("no way out")


def test_a_snapshot_that_ends_the_program_while_it_is_pickled_is_the_users_error() -> None:
    found = failed(mine(snapshot=lambda self: Leaves()), 1)
    assert isinstance(found, UserCodeError)
    assert "cannot be serialised (SystemExit: no way out)" in found.summary


@pytest.mark.parametrize("at_once", [True, False])
def test_a_source_that_ends_the_program_is_the_users_error_and_no_lost_worker(at_once: bool) -> None:
    def rows() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"v": [1]})
        raise SystemExit(3)

    def read(partition: int) -> Iterator[pa.RecordBatch]:
        if at_once:
            raise SystemExit(3)
        return rows()

    with ThreadQuery(Rows().stage(flux.source(read, SCHEMA, 1, "log")), workers=1) as query:
        found = query.error()
    assert isinstance(found, UserCodeError)
    assert found.summary == "source log, partition 0: SystemExit: 3"


def test_a_generator_is_shown_where_it_stood() -> None:
    def process(self: Any, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        yield rows
        parsed(0)

    error = failed(flux.stage(schema=SCHEMA)(type("Mine", (flux.Operator,), {"process": process})), 1)
    assert ", in process\n    parsed(0)" in str(error)


def test_a_source_that_fails_is_shown() -> None:
    def read(partition: int) -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"v": [1]})
        parsed(0)

    source = flux.source(read, schema=SCHEMA, partitions=1, name="log")
    with ThreadQuery(Rows().stage(source), workers=1) as query:
        error = query.error()
    assert error.summary == "source log, partition 0: ValueError: a zero came"
    assert ", in read\n    parsed(0)" in str(error)


def test_an_error_that_only_our_code_knows_has_no_traceback() -> None:
    @flux.stage(key="v", name="Sums")
    class Sums(flux.Aggregate):
        total = flux.sum("v")

    error = failed(Sums, 1 << 62, 1 << 62, 1 << 62)
    assert "process() raised SumOverflowError" in str(error)
    assert error.traceback == ""
    error = failed(mine(process=lambda self, rows: 5), 1)
    assert error.traceback == ""
    assert str(error) == error.summary


@pytest.mark.parametrize("raises", [True, False])
def test_close_that_raises_is_logged_and_ends_nothing(raises: bool, caplog: pytest.LogCaptureFixture) -> None:
    def close(self: Any) -> None:
        if raises:
            parsed(0)

    read_from = threading.Event()

    def read(partition: int) -> Iterator[pa.RecordBatch]:
        try:
            read_from.set()
            while True:
                yield None  # type: ignore[misc]
        finally:
            if raises:
                parsed(0)

    with caplog.at_level(logging.WARNING, "flux"):
        with ThreadQuery(mine(close=close)(dataframe(SCHEMA)), workers=1) as query:
            query.started().feed([[pa.record_batch({"v": [1]})]])
            query.wait()
        endless = flux.source(read, schema=SCHEMA, partitions=1, name="log")
        with ThreadQuery(mine()(endless), workers=1) as stopped:
            stopped.started()
            assert read_from.wait(LIMIT_S)
    assert query.raised == stopped.raised == []
    assert ("stage Mine, partition 0: close() raised ValueError: a zero came" in caplog.text) == raises
    assert ("source log, partition 0: close() raised ValueError: a zero came" in caplog.text) == raises
    assert (", in close\n    parsed(0)" in caplog.text) == raises


def test_what_close_raises_is_told_by_one_copy(caplog: pytest.LogCaptureFixture) -> None:
    def close(self: Any) -> None:
        parsed(0)

    stage = mine(close=close)
    plan = StagePlan(0, "Mine", 4, 2, (), stage.make, (SCHEMA,), None, (0,), ())
    copies = [Replica(plan, 2, 0, [], Settings.of()) for _ in range(2)]
    copies[1].follow()
    with caplog.at_level(logging.DEBUG, "flux"):
        for copy in copies:
            copy.close()
    told, aside = ((record.levelno, record.getMessage().partition("\n")[0]) for record in caplog.records)
    assert told == (logging.WARNING, "stage Mine, partition 2: close() raised ValueError: a zero came")
    assert aside == (logging.DEBUG, "stage Mine, partition 2, not the primary: close() raised ValueError: a zero came")


def test_a_long_traceback_is_cut_in_the_middle() -> None:
    def deep(n: int) -> None:
        if n:
            deep_too(n - 1)
        raise ValueError("x" * TRACEBACK_CHARS_MAX)

    def deep_too(n: int) -> None:
        deep(n)

    with pytest.raises(ValueError, match="xxx") as raised:
        deep(50)
    text = user_traceback(raised.value)
    assert len(text) < TRACEBACK_CHARS_MAX + 100
    assert "characters left out" in text


def test_errors_keep_summary_and_traceback_apart() -> None:
    error = UserCodeError("what happened", "Traceback:\n  here")
    assert (str(error), error.summary) == ("what happened\n\nTraceback:\n  here", "what happened")
    assert str(QueryFailed("plain")) == "plain"
