"""The Spark jobs behind a query, and the failed attempts at their tasks."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from py4j.protocol import Py4JError
from pyspark import InheritableThread
from pyspark.errors.exceptions.captured import CapturedException
from pyspark.sql import SparkSession

from controller.text import count
from flux.operators.user_code import text_of
from spark_integration.settings import failures_at_most

log = logging.getLogger("flux")

#: Failed tasks of a stage that are looked at for the newest reason.
LOOKED_AT = 20
#: A reason is logged again when the number of failed tasks has grown by this factor.
LOGGED_AGAIN = 4


class Retries:
    """Watch over failed attempts, by a ``look`` now and then. ``text`` describes the failures of the input until now, and is
    empty without any.

    Spark starts a failed task again without a word, ``spark.task.maxFailures`` times. A query that waits for a task of the user's
    DataFrame looks as if it stood still, so the failure and its reason are told in the log and in the status. A task that lacks a
    module fails in every attempt: the query ends with the first one, since a hundred attempts would take minutes and fail alike.
    Other failures of workers' tasks are losses of workers, which the controller sees.

    ``inputs`` returns the job groups of the tasks that read the input; ``workers`` is that of the workers' tasks;
    ``hopeless`` is called with a job and a reason, if no further attempt can succeed."""

    def __init__(
        self,
        spark: SparkSession,
        inputs: Callable[[], Sequence[str]],
        workers: str,
        query: str,
        hopeless: Callable[[str, str], None],
    ) -> None:
        self._spark = spark
        self._inputs = inputs
        self._workers = workers
        self._query = query
        self._hopeless = hopeless
        self._failed: dict[int, int] = {}  #: Known failed tasks of the input, by Spark's stage.
        self._lost: dict[int, int] = {}  #: Known failed tasks of the workers, by stage.
        self._said = ("", 0)  #: The reason logged last, and the number of failed tasks by then.
        self.text = ""

    def look(self, workers: bool = True) -> None:
        """Look for failed attempts at the input and, if ``workers``, at the tasks of workers. A query whose workers are all there
        leaves their tasks out: each look is several calls into the JVM, which takes its time from the rows while it is new."""
        for group in self._inputs():
            for stage, attempt in self._news(group, self._failed):
                reason = self._reason(stage, attempt, self._failed[stage])
                if remedy := remedy_of(reason):
                    self._hopeless("ingress", reason + remedy)
                else:
                    self._say(reason)
        for stage, attempt in self._news(self._workers, self._lost) if workers else ():
            reason = self._reason(stage, attempt, self._lost[stage])
            if remedy := remedy_of(reason):
                self._hopeless("workers", reason + remedy)

    def _news(self, group: str, known: dict[int, int]) -> list[tuple[int, int]]:
        """Return the stages, each with its attempt, that have more failed tasks than are known, and note the numbers."""
        tracker, found = self._spark.sparkContext.statusTracker(), []
        for job in tracker.getJobIdsForGroup(group):
            about = tracker.getJobInfo(job)
            for stage in about.stageIds if about is not None else ():
                info = tracker.getStageInfo(stage)
                if info is not None and info.numFailedTasks > known.get(stage, 0):
                    known[stage] = info.numFailedTasks
                    found.append((stage, info.currentAttemptId))
        return found

    def _say(self, reason: str) -> None:
        most, failed = failures_at_most(self._spark), sum(self._failed.values())
        self.text = (
            f"{count(failed, 'task')} that read the input failed, the last with: {reason}. Spark starts a task again "
            f"until it has failed {count(most, 'time')} (spark.task.maxFailures)"
        )
        before, then = self._said
        if reason != before or failed >= LOGGED_AGAIN * then:
            self._said = (reason, failed)
            log.warning("query %s: %s", self._query, self.text)

    def _reason(self, stage: int, attempt: int, failed: int) -> str:
        """Return the reason of the newest of ``failed`` failures, or a general sentence if Spark does not tell."""
        try:
            jvm: Any = self._spark._jvm
            kind = jvm.java.util.ArrayList()
            kind.add(self._constant("TaskStatus", "FAILED"))
            store = self._spark.sparkContext._jsc.sc().statusStore()
            first = max(failed - LOOKED_AT // 2, 0)
            tasks = store.taskList(stage, attempt, first, LOOKED_AT, self._constant("TaskSorting", "ID"), kind)
            newest = max((tasks.apply(i) for i in range(tasks.size())), key=lambda task: task.taskId(), default=None)
            if newest is not None and newest.errorMessage().isDefined():
                return line_of(newest.errorMessage().get())
        except (Py4JError, AttributeError, TypeError) as error:
            log.debug("the reason is not known: %s", error)
        return "a reason that is in the log of its executor"

    def _constant(self, kind: str, name: str) -> Any:
        found = self._spark._jvm.java.lang.Class.forName(f"org.apache.spark.status.api.v1.{kind}")
        return next(constant for constant in found.getEnumConstants() if str(constant) == name)


#: Remedy for executors that do not find Flux itself.
OTHER_PYTHON = (
    ". Spark's workers run the Python that PYSPARK_PYTHON names, and Flux is not installed there: set it to the Python that "
    "has Flux, before the session is made"
)
#: Remedy for executors that do not find a module of the program.
OTHER_MODULES = (
    ". The executors do not find it. Ship it before the query is started, with spark.sparkContext.addPyFile(path) or "
    "spark-submit --py-files (a .py file, or a package as .zip), or install it for the Python that PYSPARK_PYTHON names, or name "
    "the folder that has it in spark.executorEnv.PYTHONPATH before the session is made"
)
OTHER_CODE = (
    ". The executors have another version of this module than the program: ship the same one with "
    "spark.sparkContext.addPyFile(path), or install it there"
)

#: Texts of the JVM: an exception that waited for another thread, and the head of a cause.
WAITED, CAUSED = "Exception thrown in awaitResult", "Caused by: "


class Jobs:
    """Spark jobs of one group, each in a thread of its own: one for the workers, one per DataFrame that is read. ``run`` them,
    ``join`` them, or ``cancel`` the rest. No task of them is interrupted: a task that waits for its Python process would take all
    Python processes of the executor with it (design: no-interrupts)."""

    def __init__(self, spark: SparkSession, group: str) -> None:
        self._context = spark.sparkContext
        self._group = group
        self._threads: list[threading.Thread] = []

    def run(
        self, what: str, action: Callable[[], Any], done: Callable[[Any], None], failed: Callable[[str, str], None]
    ) -> None:
        """Run the action in the background. ``done`` gets its result, ``failed`` its description and the reason."""

        def body() -> None:
            self._context.setJobGroup(self._group, what, interruptOnCancel=False)
            try:
                result = action()
            except Exception as error:
                failed(what, reason_of(error))
            else:
                done(result)

        thread = InheritableThread(target=body, name=f"{self._group} {what}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self, timeout: float) -> list[str]:
        """Wait for the jobs. Returns the names of those that are still running after ``timeout`` seconds."""
        end = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0))
        return [thread.name for thread in self._threads if thread.is_alive()]

    def cancel(self) -> None:
        """Cancel the jobs. If Spark was stopped, its jobs have ended with it."""
        try:
            self._context.cancelJobGroup(self._group)
        except (Py4JError, AttributeError, OSError) as error:
            log.debug("jobs of %s are not cancelled: %s", self._group, error)


def reason_of(error: BaseException) -> str:
    """Return the line of a Spark exception that a person needs: the last of the Python traceback inside it, if there is one."""
    line = line_of((isinstance(error, CapturedException) and error._desc) or text_of(error)) or type(error).__name__
    return line + remedy_of(line)


def remedy_of(line: str) -> str:
    """Return a remedy for a task that failed because its executor lacks a module: another attempt would fail like it. Empty
    for any other failure."""
    if re.search(r"No module named '(flux|spark_integration)\b|spark_integration\.daemon's stdout", line):
        return OTHER_PYTHON
    if re.search(r"\bModuleNotFoundError: No module named '", line):
        return OTHER_MODULES
    return OTHER_CODE if re.search(r"\bAttributeError: Can't get attribute '.*' on <module '", line) else ""


def line_of(text: str) -> str:
    """Return that line of an exception's text. A wait of the JVM for another thread says nothing, and its cause does."""
    lines = [line.strip(" \t:") for line in text.splitlines() if line.strip() and not line.lstrip().startswith("at ")]
    raised = [line for line in lines if line.partition(":")[0].endswith(("Error", "Exception", "Failed", "Timeout"))]
    if raised and WAITED in raised[-1]:
        causes = [line.removeprefix(CAUSED) for line in lines if line.startswith(CAUSED) and WAITED not in line]
        raised = causes[:1] or raised
    return (raised[-1] if raised else lines[0] if lines else "")[:2000]
