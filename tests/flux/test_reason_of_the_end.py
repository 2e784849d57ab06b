"""A query names the cause of its end, also where a consequence is heard before the cause."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from flux.errors import QueryFailed
from spark_integration.query.run import QueryRun


def failed(*reasons: str, cancelled: bool = False) -> Any:
    """Make a run whose workers were lost, and whose input failed for these reasons."""
    made: Any = QueryRun.__new__(QueryRun)
    made.server = SimpleNamespace(error=QueryFailed("worker 1 was lost"), job_failed=lambda what, reason, edges: None)
    made._cancelled = cancelled
    for reason in reasons:
        made._job_failed("ingress of DataFrame", reason)
    return made


def test_an_input_that_fails_is_the_reason_although_the_loss_of_its_workers_is_heard_first() -> None:
    told = str(failed("ValueError: bad row 7").error())
    assert told.startswith("the Spark job 'ingress of DataFrame' failed: ValueError: bad row 7. After that: worker 1")


def test_an_input_that_ends_with_the_query_is_no_reason() -> None:
    assert str(failed().error()) == "worker 1 was lost"
    assert str(failed("flux.errors.QueryFailed: the query has ended").error()) == "worker 1 was lost"
    assert str(failed("[SPARK_JOB_CANCELLED]", cancelled=True).error()) == "worker 1 was lost"


def test_tasks_that_failed_just_before_the_end_are_told_too() -> None:
    """Tell of such tasks, because Spark may have given up an input before the first look at it."""
    told: list[str] = []
    made: Any = QueryRun.__new__(QueryRun)
    over = threading.Event()
    over.set()
    made.server = SimpleNamespace(started=over, ended=over, phase="ended")
    made.retries = SimpleNamespace(look=lambda workers: told.append("what failed"))
    made._wind_up = lambda: told.append("the end")
    made._supervise()
    assert told == ["what failed", "the end"]
