"""What is checked and said when a query is started, as far as it needs no Spark."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from harness import dataframe
from pyspark.sql import SparkSession

import flux
from controller.dag import compile_plan
from flux.settings import Settings
from spark_integration import query
from spark_integration.shipping import check_shipping

SCHEMA = pa.schema([("k", pa.int64())])


def plan(stage: flux.Stage) -> Any:
    return compile_plan([stage(dataframe(SCHEMA))], Settings.of(), lambda schema: schema, "q", b"s")


def session(application: str = "a1", stopped: bool = False) -> Any:
    context = SimpleNamespace(
        applicationId=application, master="local[4]", _jsc=None if stopped else object(), getConf=dict
    )
    return SimpleNamespace(sparkContext=context)


def test_a_thread_without_an_active_session_takes_the_default_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparkSession, "getActiveSession", classmethod(lambda cls: None))
    default = session()
    monkeypatch.setattr(SparkSession, "_instantiatedSession", default)
    assert query._session([]) is default
    for none in (None, session(stopped=True)):
        monkeypatch.setattr(SparkSession, "_instantiatedSession", none)
        with pytest.raises(flux.UsageError, match=r"no SparkSession: .*spark=\.\.\."):
            query._session([])


def test_copies_on_one_executor_are_told_of_once_for_each_application(caplog: pytest.LogCaptureFixture) -> None:
    copied = plan(flux.stage(key="k", replicas=2, name="Counts")(type("C", (flux.Aggregate,), {"n": flux.count()})))
    with caplog.at_level(logging.WARNING, "flux"):
        for application in ("told-1", "told-1", "told-2"):
            query._tell_of_copies(session(application), copied)
    assert caplog.text.count("good for trying things out") == 2


def test_what_cannot_travel_is_refused_and_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    lock = threading.Lock()
    locked = flux.stage(name="locked")(lambda rows: rows if lock.locked() else None)
    with pytest.raises(flux.UsageError, match=r"stage locked cannot be sent to the executors: .*lock"):
        check_shipping(plan(locked))
    assert capfd.readouterr() == ("", "")
