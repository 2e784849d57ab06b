"""Checks and messages at the start of a query, as far as they need no Spark."""

from __future__ import annotations

import contextlib
import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from harness import Rows, ThreadQuery, dataframe
from pyspark.sql import DataFrame, SparkSession

import flux
from controller.planning.checks import check_folders, check_taken
from controller.planning.compiler import compile_plan
from controller.server import Server
from flux.dataflow.source import DataFrameSource
from flux.settings import Settings
from spark_integration.query import query, start
from spark_integration.query import running_queries as active
from spark_integration.query.operations import Operations, checked_timeout
from spark_integration.query.source_setup import prepared
from spark_integration.tasks.jobs import reason_of
from spark_integration.tasks.shipping_checks import check_shipping

SCHEMA = pa.schema([("k", pa.int64())])


def plan(stage: flux.Stage) -> Any:
    return compile_plan([stage(dataframe(SCHEMA))], Settings.of(), lambda schema: schema, "q", b"s")


def session(application: str = "a1", stopped: bool = False) -> Any:
    context = SimpleNamespace(
        applicationId=application, master="local[4]", _jsc=None if stopped else object(), _conf={}
    )
    return SimpleNamespace(sparkContext=context)


def test_a_thread_without_an_active_session_takes_the_default_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparkSession, "getActiveSession", classmethod(lambda cls: None))
    default = session()
    monkeypatch.setattr(SparkSession, "_instantiatedSession", default)
    assert start.session_of([]) is default
    for none in (None, session(stopped=True)):
        monkeypatch.setattr(SparkSession, "_instantiatedSession", none)
        with pytest.raises(flux.UsageError, match=r"no SparkSession: .*spark=\.\.\."):
            start.session_of([])


def test_a_stopped_session_is_told_as_such_however_it_was_given() -> None:
    class Frame(DataFrame):
        sparkSession = session(stopped=True)  # noqa: N815

    flow = flux.stage(lambda batch: batch)(flux.source(lambda partition: iter(()), "user STRING, n BIGINT", 1))
    for run in (flux.start, flux.explain):
        with pytest.raises(
            flux.UsageError, match=r"SparkSession is stopped, the one given as spark=\.\.\.: make a new one"
        ):
            run(flow, spark=session(stopped=True))
    with pytest.raises(flux.UsageError, match="is stopped, that of the DataFrame of source rows"):
        start.session_of([DataFrameSource("rows", object.__new__(Frame))])


def test_the_session_of_a_query_is_that_of_a_dataframe_and_a_schema_in_its_place_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Frame(DataFrame):
        sparkSession = session("a2")  # noqa: N815

    monkeypatch.setattr(SparkSession, "getActiveSession", classmethod(lambda cls: None))
    monkeypatch.setattr(SparkSession, "_instantiatedSession", None)
    with pytest.raises(flux.UsageError, match="no SparkSession"):
        start.session_of([dataframe(SCHEMA)])
    read = flux.stage(key="k", name="Counts")(type("C", (flux.Aggregate,), {"n": flux.count()}))(dataframe(SCHEMA))
    assert flux._column(read, "n") is None
    flux._check_columns(read)
    monkeypatch.setattr(SparkSession, "_instantiatedSession", session())
    assert start.session_of([dataframe(SCHEMA), DataFrameSource("rows", object.__new__(Frame))]) is Frame.sparkSession


def test_copies_on_one_executor_are_told_of_once_for_each_application(caplog: pytest.LogCaptureFixture) -> None:
    copied = plan(flux.stage(key="k", replicas=2, name="Counts")(type("C", (flux.Aggregate,), {"n": flux.count()})))
    with caplog.at_level(logging.WARNING, "flux"):
        for application in ("told-1", "told-1", "told-2"):
            start._tell_of_one_executor(session(application), copied)
    assert caplog.text.count("good for trying things out") == 2


@pytest.mark.parametrize("module", ["flux", "flux.dataflow.plan", "spark_integration"])
def test_executors_without_flux_are_told_by_which_python_they_run(module: str) -> None:
    error = RuntimeError(f"Traceback\n  File x\nModuleNotFoundError: No module named '{module}'")
    assert "that PYSPARK_PYTHON names, and Flux is not installed there" in reason_of(error)
    assert "Flux is not installed there" not in reason_of(RuntimeError("ModuleNotFoundError: No module named 'fluxes'"))


@pytest.mark.parametrize("wrong", ["x", True, None, [1], 0, -1, float("nan")])
def test_a_timeout_is_a_number_of_seconds(wrong: Any) -> None:
    with pytest.raises(flux.UsageError, match=r"timeout must be (a number of seconds|positive), got"):
        checked_timeout(wrong)
    assert checked_timeout(2) == 2.0
    assert checked_timeout(0, least=0) == 0.0
    assert checked_timeout(float("inf")) == threading.TIMEOUT_MAX


@pytest.mark.parametrize(("source", "says"), [("log", True), ("a DataFrame", False)])
def test_waiting_for_output_says_in_the_log_for_which_source_if_it_may_never_end(
    source: str, says: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query, "OUTPUT_SAY_S", 0.01)
    given = dataframe(SCHEMA) if source == "a DataFrame" else flux.source(lambda partition: iter(()), SCHEMA, 1, source)
    waiting: Any = object.__new__(query.Query)
    plan = compile_plan([flux.stage(lambda rows: rows)(given)], Settings.of(), lambda schema: schema, "q", b"s")
    waiting._running = SimpleNamespace(plan=plan)
    waiting._name, finished = "clicks", threading.Event()
    waiting._server = SimpleNamespace(awaited=contextlib.nullcontext, finished=finished, error=None)
    threading.Timer(0.1, finished.set).start()
    with caplog.at_level(logging.WARNING, "flux"):
        waiting.wait_for_output()
    assert caplog.text.count("wait for the end of log. If it never comes, interrupt this call") == says


def test_a_failure_is_an_error_in_the_log_only_if_no_call_waits_that_raises_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    levels = {}
    for awaited in (False, True):
        caplog.clear()
        with (
            caplog.at_level(logging.INFO, "flux"),
            ThreadQuery(Rows().stage(flux.source(fails, SCHEMA, 1))) as failing,
            failing.server.awaited() if awaited else contextlib.nullcontext(),
        ):
            failing.error()
        levels[awaited] = [each.levelname for each in caplog.records if "query q failed" in each.getMessage()]
    assert levels == {False: ["ERROR"], True: ["INFO"]}


def fails(partition: int) -> Any:
    raise ValueError("no")


def test_waiting_for_all_rows_says_in_the_log_what_it_waits_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query, "ALL_AVAILABLE_SAY_S", 0.0)
    waits = iter(["rows has not paused in partition 0", ""])
    endless: Any = object.__new__(query.Query)
    endless._running = SimpleNamespace(plan=plan(flux.stage(name="same")(lambda rows: rows)))
    endless._name = "clicks"
    endless._server = SimpleNamespace(look=lambda at: next(waits), finished=threading.Event(), phase="running")
    streams = SimpleNamespace(process_all_available=lambda end: None)
    endless._run = SimpleNamespace(streams=streams, look_at_files=lambda timeout: None)
    with caplog.at_level(logging.WARNING, "flux"):
        endless.processAllAvailable(timeout=5)
    assert caplog.messages == [
        "query clicks: processAllAvailable() waits; this is still to come: rows has not paused in partition 0"
    ]
    for wait in (endless.processAllAvailable, endless.awaitTermination, endless.stop):
        with pytest.raises(flux.UsageError, match="timeout must be a number of seconds, got 'x'"):
            wait("x")


def test_a_second_query_of_the_same_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse a second query as Structured Streaming does."""
    running: Any = SimpleNamespace(name="clicks", phase="running")
    monkeypatch.setattr(active, "_active", {"id": running})
    assert flux.queries() == [running]
    flow = flux.stage(lambda rows: rows)(dataframe(SCHEMA))
    with pytest.raises(flux.UsageError, match=r"a query named 'clicks' is running: stop it first .*, or give another"):
        flow.start(queryName="clicks")
    assert active.is_taken("clicks")
    running.phase = "finished"
    assert not active.is_taken("clicks"), "it only keeps its output"


def test_of_two_threads_that_start_queries_of_one_name_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse the second start while the first one is under way: a start takes seconds, and nothing of a query runs for
    most of them."""
    checking, goes_on = threading.Event(), threading.Event()

    def slow(sources: Any) -> Any:
        checking.set()
        assert goes_on.wait(30)
        raise flux.UsageError("no session here")

    monkeypatch.setattr(start, "session_of", slow)
    flow = flux.stage(lambda rows: rows)(dataframe(SCHEMA))
    refused: list[str] = []

    def first() -> None:
        with pytest.raises(flux.UsageError) as caught:
            flow.start(queryName="clicks")
        refused.append(str(caught.value))

    thread = threading.Thread(target=first)
    thread.start()
    assert checking.wait(30)
    with pytest.raises(flux.UsageError, match="a query named 'clicks' is being started: give another"):
        flow.start(queryName="clicks")
    goes_on.set()
    with pytest.raises(flux.UsageError, match="no session here"):
        flow.start(queryName="others")
    for _ in range(2):
        with pytest.raises(flux.UsageError, match="no session here"):
            flow.start()
    thread.join(30)
    assert refused == ["no session here"]
    with pytest.raises(flux.UsageError, match="no session here"):
        flow.start(queryName="clicks")  # a start that has failed gives its name back


def test_following_what_is_no_query_is_refused() -> None:
    flow = flux.stage(lambda rows: rows)(dataframe(SCHEMA))
    with pytest.raises(flux.UsageError, match=r"is a flow that has not been started: .* start"):
        flux.follow(flow)
    with pytest.raises(flux.UsageError, match=r"takes the query that start.. returns, got int"):
        flux.follow(5)  # type: ignore[arg-type]


class Operating(Operations):
    """A query of workers in threads that may have joined or not."""

    def __init__(self, plan: Any, server: Server) -> None:
        self._running, self._server = SimpleNamespace(plan=plan), server
        self._elastic = SimpleNamespace(renew_room=lambda: None)  # type: ignore[assignment]


CHANGES: list[Any] = [
    lambda query, t: query.move("Counts", 0, 0, timeout=t),
    lambda query, t: query.rebalance(timeout=t),
    lambda query, t: query.drain(0, timeout=t),
    lambda query, t: query.scale(2, timeout=t),
]


@pytest.mark.parametrize("change", CHANGES, ids=["move", "rebalance", "drain", "scale"])
def test_a_query_whose_workers_have_not_joined_is_waited_for(change: Any) -> None:
    given = plan(flux.stage(key="k", name="Counts")(type("C", (flux.Aggregate,), {"n": flux.count()})))
    server = Server(given, 2, "127.0.0.1", None, "q", None)
    server.start()
    try:
        with pytest.raises(flux.QueryTimeout, match=r"after 0\.05 s .* not running yet: 0 of 2 workers have joined"):
            change(Operating(given, server), 0.05)
    finally:
        server.close(10.0)


def test_a_change_is_made_once_the_workers_have_joined() -> None:
    counts = flux.stage(key="k", partitions=2, name="Counts")(type("C", (flux.Aggregate,), {"n": flux.count()}))
    with ThreadQuery(Rows().stage(counts(dataframe(SCHEMA))), replicas_allow_same_executor=True) as query:
        operating = Operating(query.plan, query.server)
        assert operating.rebalance("even", dry_run=True) == []
        assert {each["stage"] for each in operating.partitions()} >= {"Counts"}
        query.feed([[]])
        query.wait()
        assert operating.partitions() == [], "an ended query has no replicas"


class Sums(flux.Aggregate):
    total = flux.sum("k")


def test_rows_that_no_sink_takes_are_refused_with_all_that_can_be_done() -> None:
    sums = flux.stage(key="k", name="Sums")(Sums)
    with pytest.raises(
        flux.UsageError, match=r"stage Sums gives rows \(k, total\) that nothing takes.*keep_output=True"
    ):
        check_taken(plan(sums))
    to_arrow = lambda schema: schema  # noqa: E731
    first = sums(dataframe(SCHEMA))
    kept = compile_plan([first], Settings.of(), to_arrow, "q", b"s", collect=2)
    sink = compile_plan([first.foreach_batch(lambda batch, position: None)], Settings.of(), to_arrow, "q", b"s")
    feeds = compile_plan([first, Rows().stage(first)], Settings.of(), to_arrow, "q", b"s")
    for each in (kept, sink, feeds):
        check_taken(each)
    with pytest.raises(flux.UsageError, match="stage Sums gives rows"):
        check_taken(compile_plan([sums(dataframe(SCHEMA)), Rows().stage(first)], Settings.of(), to_arrow, "q", b"s"))


def test_rows_of_other_columns_in_one_folder_are_refused(tmp_path: Path) -> None:
    @flux.stage
    def same(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch

    wide = pa.schema([("k", pa.int64()), ("at", pa.timestamp("us"))])
    one, other, third = (same(dataframe(schema, name)) for name, schema in (("a", SCHEMA), ("b", wide), ("c", SCHEMA)))

    def compiled(*flows: Any) -> Any:
        return compile_plan(list(flows), Settings.of(), lambda schema: schema, "q", b"s")

    check_folders(compiled(one.to_parquet(tmp_path), third.to_parquet(tmp_path), other.to_parquet(tmp_path / "b")))
    with pytest.raises(
        flux.UsageError,
        match=rf"same.files and same.files#2 write different rows into one folder, {tmp_path}: \(k int64\) and \(k int64, at",
    ):
        check_folders(compiled(one.to_parquet(tmp_path), other.to_parquet(f"{tmp_path}/")))
    with pytest.raises(flux.UsageError, match=r"\(k int64, at .*\) and \(k int64, at .* by k\)"):
        check_folders(compiled(other.to_parquet(tmp_path), other.to_parquet(tmp_path, partitionBy="k")))


def test_a_folder_that_cannot_be_made_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "below", "/proc/flux"):
        with pytest.raises(flux.UsageError, match=f"to_parquet cannot write to {path}: .* Give the path of a folder"):
            prepared(plan_to(path), None)
    prepared(plan_to(tmp_path / "new" / "folder"), None)
    assert (tmp_path / "new" / "folder").is_dir()
    with pytest.raises(flux.UsageError, match="is not a folder; give the path of one") as told:
        plan_to(tmp_path / "file")
    assert type(told.value) is flux.UsageError


def plan_to(path: Any) -> Any:
    flow = flux.stage(lambda batch: batch)(dataframe(SCHEMA)).to_parquet(path)
    return compile_plan([flow], Settings.of(), lambda schema: schema, "q", b"s")


def test_what_cannot_travel_is_refused_and_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    lock = threading.Lock()
    locked = flux.stage(name="locked")(lambda rows: rows if lock.locked() else None)
    with pytest.raises(flux.UsageError, match=r"stage locked cannot be sent to the executors: .*lock"):
        check_shipping(plan(locked))
    assert capfd.readouterr() == ("", "")
