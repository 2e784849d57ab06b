"""Errors and objects of the user whose text cannot be made or sent: the query ends with as much of them as can be
said."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from harness import Rows, ThreadQuery, dataframe
from outside_store import ALONE, SCHEMA, batches, same, until

import flux
from controller.planning.compiler import compile_plan
from flux.errors import SchemaError, UsageError, UserCodeError
from flux.exchange.source_streams import packed
from flux.operators.user_code import closed, described, encodable, text_of, user_traceback
from flux.settings import Settings
from flux.shell.sink_threads import RETRY_LINE_S, SinkRetries, SinkThreads
from flux.wire.codec import decode_report
from flux.wire.frames import encode
from flux.worker.effects import failure_of
from spark_integration.tasks.shipping_checks import check_shipping

NAME = os.fsdecode(b"/data/\xff.csv")  # half of a surrogate, for which UTF-8 has no bytes


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Leaving(BaseException):
    def __str__(self) -> str:
        raise SystemExit(3)


class Unpicklable(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)
        self.held = lambda: second


def chained() -> Exception:
    """Make an error with more causes than Python's own stack has room for."""
    error = Exception("the last")
    for number in range(3000):
        cause, error = error, Exception(number)
        error.__cause__ = cause
    return error


ERRORS = {
    "mute": (Mute("x"), "Mute: <no text: str() of this Mute raised RuntimeError>"),
    "leaving": (Leaving("x"), "Leaving: <no text: str() of this Leaving raised SystemExit>"),
    "surrogate": (ValueError(f"cannot read {NAME}"), "ValueError: cannot read /data/\\udcff.csv"),
    "file name": (FileNotFoundError(2, "not there", NAME), "not there"),
    "unpicklable": (Unpicklable("a", "b"), "Unpicklable: a"),
    "chained": (chained(), "Exception: 2999"),
    "group": (BaseExceptionGroup("both", [Mute("x"), Leaving("y")]), "both"),
}
EACH = pytest.mark.parametrize(("error", "said"), ERRORS.values(), ids=ERRORS.keys())
#: The kinds that need another answer each, for tests with a query in them.
SOME = pytest.mark.parametrize(
    ("error", "said"), [ERRORS["leaving"], ERRORS["surrogate"]], ids=["leaving", "surrogate"]
)


def fresh(error: BaseException) -> Any:
    def fails(*_: Any, **__: Any) -> Any:
        raise error

    return fails


@EACH
def test_whatever_is_raised_has_a_text_that_can_be_sent(error: BaseException, said: str) -> None:
    with pytest.raises(type(error)) as caught:
        raise error
    raised = caught.value
    assert said in described(raised)
    assert user_traceback(raised)
    for told in (UserCodeError(described(raised), user_traceback(raised)), raised):
        failure = failure_of(3, told)
        assert said in failure.message
        assert decode_report(encode(failure)) == failure


@SOME
def test_an_operator_that_raises_it_ends_the_query_with_what_can_be_said(error: BaseException, said: str) -> None:
    stage = flux.stage(partitions=1)(type("Mine", (flux.Operator,), {"process": fresh(error)}))
    with ThreadQuery(stage(dataframe(SCHEMA)), workers=1) as query:
        query.started().feed([batches(3)])
        found = query.error()
    assert isinstance(found, UserCodeError)
    assert f"stage Mine, partition 0: process() raised {type(error).__name__}" in found.summary
    assert said in found.summary


@SOME
def test_a_source_that_raises_it_ends_the_query_with_what_can_be_said(error: BaseException, said: str) -> None:
    with ThreadQuery(Rows().stage(flux.source(fresh(error), SCHEMA, 1, "log")), workers=1) as query:
        found = query.error()
    assert isinstance(found, UserCodeError)
    assert found.summary.startswith("source log, partition 0: ")
    assert said in found.summary


class Odd(flux.Sink):
    """A sink whose ``method`` raises, and which has no text of its own if it is ``mute``."""

    def __init__(self, method: str, error: BaseException, mute: bool = False) -> None:
        self._mute = mute
        self._error = error
        self._method = method

    def __deepcopy__(self, memo: Any) -> Odd:
        self.__dict__.setdefault(self._method, fresh(self._error))
        return self

    def __repr__(self) -> str:
        if self._mute:
            raise Mute("x")
        return "odd"

    def write(self, batch: pa.RecordBatch, position: flux.Position) -> None:
        if self._method == "is_transient":
            raise OSError("full")


@EACH
@pytest.mark.parametrize("method", ["open", "committed", "write", "is_transient"])
def test_a_sink_that_raises_it_fails_with_what_can_be_said(
    method: str, error: BaseException, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flux.shell.sink_threads.LED_ELSEWHERE_S", 0.0)
    found = failure_of_sink(Odd(method, error))
    assert found.summary.startswith("sink odd of stage last, partition 0: ")
    assert said in found.summary
    if method == "is_transient":
        assert "is_transient() raised " in found.summary
        assert "asked about OSError: full" in found.summary


def failure_of_sink(sink: flux.Sink) -> UserCodeError:
    """Give one batch to the sink, and return the failure that its thread reports."""
    stage = SimpleNamespace(id=0, name="last", partitions=1, sink=sink)
    failed = threading.Event()
    plan: Any = SimpleNamespace(query="q", stages=[stage], settings=Settings.of(), forgotten={})
    sinks = SinkThreads(plan, failed.set)
    sinks.begins(0, 0, 0, True)
    sinks.write(0, 0, 0, next(batches(1)))
    until(lambda: not sinks._failed.empty(), "the failure is there")
    with pytest.raises(UserCodeError) as found:
        sinks.check()
    sinks.close()
    return found.value


def test_a_sink_without_a_text_of_its_own_ends_the_query_and_is_named_by_its_class() -> None:
    with ThreadQuery(same(dataframe(SCHEMA)).to(Odd("write", Mute("x"), mute=True)), **ALONE) as query:
        query.started().feed([batches(10)])
        found = query.error()
    assert isinstance(found, UserCodeError)
    assert found.summary.startswith("sink <no text: repr() of this Odd raised Mute> of stage ")
    assert "Mute: <no text: str() of this Mute raised RuntimeError>" in found.summary


class Hidden:
    """An object that raises the given error when it is pickled."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


@pytest.mark.parametrize("error", [Mute("x"), SystemExit(3)], ids=["mute", "exit"])
def test_what_is_raised_before_anything_runs_is_refused_with_what_can_be_said(error: BaseException) -> None:
    said = "<no text: str() of this Mute raised RuntimeError>" if isinstance(error, Mute) else "3"
    kept = Hidden(error)
    stage = flux.stage(name="kept")(lambda batch: (kept, batch)[1])
    plan = compile_plan([stage(dataframe(SCHEMA))], Settings.of(), lambda schema: schema, "q", b"s")
    with pytest.raises(UsageError) as refused:
        check_shipping(plan)
    assert f"stage kept cannot be sent to the executors: {said}. It refers to" in str(refused.value)

    class Checks(flux.Sink):
        check = fresh(error)

        def write(self, batch: pa.RecordBatch, position: flux.Position) -> None: ...

    with pytest.raises(SchemaError) as refused:
        compile_plan([same(dataframe(SCHEMA)).to(Checks())], Settings.of(), lambda schema: schema, "q", b"s")
    assert str(refused.value) == f"stage same: its output cannot go to Checks: {said}"


def test_traits_of_a_sink_that_are_none_are_refused_before_anything_runs() -> None:
    with pytest.raises(UsageError, match="SinkTraits: holds_bytes must be a number of bytes, got '64m'"):
        flux.SinkTraits(holds_bytes="64m")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="SinkTraits: exactly_once must be True or False, got 1"):
        flux.SinkTraits(exactly_once=1)  # type: ignore[arg-type]
    said = r"is not looked at: a sink tells its abilities in traits = flux.SinkTraits\(exactly_once=True\)"
    with pytest.raises(UsageError, match=rf"Old.exactly_once {said}"):
        type("Old", (flux.Sink,), {"exactly_once": True})
    with pytest.raises(UsageError, match=r"Odd.traits must be flux.SinkTraits\(...\), not {'exactly_once': True}"):
        type("Odd", (flux.Sink,), {"traits": {"exactly_once": True}})
    sink = Odd("send", Mute("x"))
    sink.exactly_once = True  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=f"Odd.exactly_once {said}"):
        same(dataframe(SCHEMA)).to(sink)


def test_a_row_that_python_has_no_values_for_does_not_hide_the_error() -> None:
    late = pa.array([3_000_000], pa.int32()).cast(pa.date32())  # after the year 9999
    with pytest.raises((ValueError, OverflowError)):
        late.to_pylist()
    schema = pa.schema([("day", pa.date32())])
    stage = flux.stage(partitions=1)(type("Mine", (flux.Operator,), {"process": fresh(ValueError("too late"))}))
    with ThreadQuery(stage(dataframe(schema)), workers=1) as query:
        query.started().feed([[pa.record_batch([late], schema=schema)]])
        found = query.error()
    assert isinstance(found, UserCodeError)
    assert "process() raised ValueError: too late" in found.summary
    assert "first bad row is number 0 of the step: <no text: " in found.summary


def test_an_argument_without_a_text_of_its_own_makes_an_operator() -> None:
    class Takes(flux.Operator):
        def __init__(self, given: Any) -> None:
            self.given = given

        def process(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
            yield batch

    stage = flux.stage(partitions=1, schema=SCHEMA)(Takes)
    flow = stage(Mute("x"))(dataframe(SCHEMA))
    assert "<no text: repr() of this Mute raised RuntimeError>" in repr(flow.stage)


def test_a_position_without_a_text_of_its_own_is_refused_with_what_can_be_said() -> None:
    for position, said in ((Mute("x"), "<no text: repr() of this Mute raised"), (NAME, "surrogates not allowed")):
        with pytest.raises(UsageError, match="the position of a source must be") as refused:
            packed(position)
        assert said in str(refused.value)


def test_text_is_never_more_than_can_be_read_and_sent() -> None:
    assert encodable("plain \N{SNOWMAN}") == "plain \N{SNOWMAN}"
    assert text_of(NAME) == "/data/\\udcff.csv"
    assert len(described(ValueError("x" * 1_000_000))) < 10_000


def test_a_close_that_raises_it_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "flux"):
        closed("sink odd", fresh(Mute("x")))
    assert "sink odd: close() raised Mute: <no text: str() of this Mute raised RuntimeError>" in caplog.text


def test_retries_of_a_stage_are_one_line_a_second_and_the_line_counts_the_others() -> None:
    lines = SinkRetries()
    said = [(now, lines.others(0, now)) for now in (10.0, 10.05, 10.15, 10.9, 11.0, 11.01, 30.0)]
    assert [(now, others) for now, others in said if others is not None] == [(10.0, 0), (11.0, 3), (30.0, 1)]
    assert lines.others(1, 11.02) == 0, "another stage"
    assert RETRY_LINE_S == 1.0
