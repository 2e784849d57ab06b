"""Failed attempts at tasks: their reports, and the failures that end the query at once."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from spark_integration.tasks import jobs as retries
from spark_integration.tasks.jobs import Retries, reason_of


class FailingTasks:
    """Retries over one Spark stage for each job group, with numbers of failed tasks and a reason that tests set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
        self.failed = {"input": 0, "micro-batches": 0, "workers": 0}
        self.told: list[tuple[str, str]] = []
        self.asked: list[str] = []
        groups = list(self.failed)

        def jobs(group: str) -> list[int]:
            self.asked.append(group)
            return [groups.index(group)]

        tracker = SimpleNamespace(
            getJobIdsForGroup=jobs,
            getJobInfo=lambda job: SimpleNamespace(stageIds=[job]),
            getStageInfo=lambda stage: SimpleNamespace(numFailedTasks=self.failed[groups[stage]], currentAttemptId=0),
        )
        spark: Any = SimpleNamespace(sparkContext=SimpleNamespace(statusTracker=lambda: tracker))
        monkeypatch.setattr(retries, "failures_at_most", lambda _: 100)
        monkeypatch.setattr(Retries, "_reason", lambda *_: reason)
        self.retries = Retries(
            spark, lambda: ["input", "micro-batches"], "workers", "q", lambda *told: self.told.append(told)
        )


MISSING = "ModuleNotFoundError: No module named 'examples'"


@pytest.mark.parametrize(
    ("group", "what"), [("input", "ingress"), ("micro-batches", "ingress"), ("workers", "workers")]
)
def test_a_module_that_executors_lack_is_named_at_the_first_failure_with_what_to_do(
    group: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = FailingTasks(monkeypatch, MISSING)
    tasks.retries.look()
    assert tasks.told == []
    tasks.failed[group] = 1
    tasks.retries.look()
    ((job, reason),) = tasks.told
    assert job == what
    assert reason.startswith(f"{MISSING}. The executors do not find it. Ship it before the query is started")
    assert "addPyFile" in reason
    assert reason == reason_of(RuntimeError(f"Traceback\n  File x\n{MISSING}")), "the same where Spark gives up first"


def test_the_cause_of_an_error_that_the_jvm_waited_for_is_told() -> None:
    cause = "org.apache.spark.SparkException: [FAILED_READ_FILE.FILE_NOT_EXIST] Encountered error while reading file a.parquet"
    waited = "An error occurred while calling getResult.\n: org.apache.spark.SparkException: Exception thrown in awaitResult: "
    text = f"{waited}\n\tat x.y(Z.java)\nCaused by: {cause}\n\tat x.y\nCaused by: java.io.FileNotFoundException: File a.parquet"
    assert reason_of(RuntimeError(text)) == cause
    assert reason_of(RuntimeError(waited)).endswith("Exception thrown in awaitResult"), "there is no cause"


def test_code_of_another_version_on_the_executors_ends_the_query_too(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = FailingTasks(monkeypatch, "AttributeError: Can't get attribute 'same' on <module 'app' from '/x/app.py'>")
    tasks.failed["workers"] = 1
    tasks.retries.look()
    assert "have another version of this module" in tasks.told[0][1]


def test_tasks_of_workers_are_left_out_while_all_workers_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = FailingTasks(monkeypatch, MISSING)
    tasks.failed["workers"] = 1
    tasks.asked.clear()
    tasks.retries.look(workers=False)
    assert (tasks.asked, tasks.told) == (["input", "micro-batches"], [])
    tasks.retries.look(workers=True)
    assert [job for job, _ in tasks.told] == ["workers"], "the failure is seen as soon as a worker is awaited"


def test_failures_that_may_pass_are_told_of_the_input_alone_and_not_again_and_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = FailingTasks(monkeypatch, "ValueError: bad row 7")
    with caplog.at_level(logging.WARNING, "flux"):
        tasks.failed["workers"] = 3
        tasks.retries.look()
        assert (tasks.retries.text, caplog.messages) == ("", [])
        for failed in range(1, 65):
            tasks.failed["input"] = failed
            tasks.retries.look()
    assert tasks.told == []
    assert tasks.retries.text.startswith(
        "64 tasks that read the input failed, the last with: ValueError: bad row 7. Spark"
    )
    assert [message.split()[2] for message in caplog.messages] == ["1", "4", "16", "64"]
