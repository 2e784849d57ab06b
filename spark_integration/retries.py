"""Tasks of the user's DataFrame that fail: Spark starts them again without a word, ``spark.task.maxFailures`` times.

A query that waits for such a task looks as if it stood still, so what fails and why is said in the log and in the status.
"""

from __future__ import annotations

import logging
from typing import Any

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from controller.wording import count
from spark_integration.jobs import line_of
from spark_integration.settings import failures_at_most

log = logging.getLogger("flux")

#: Failed tasks of a stage that are looked at for the newest reason.
LOOKED_AT = 20


class Retries:
    """``look`` now and then; ``text`` says what has failed so far, empty if nothing has."""

    def __init__(self, spark: SparkSession, group: str, query: str) -> None:
        self._spark = spark
        self._group = group
        self._query = query
        self._failed: dict[int, int] = {}  # stage of Spark's -> failed tasks that are known
        self.text = ""

    def look(self) -> None:
        tracker = self._spark.sparkContext.statusTracker()
        for job in tracker.getJobIdsForGroup(self._group):
            about = tracker.getJobInfo(job)
            for stage in about.stageIds if about is not None else ():
                known = tracker.getStageInfo(stage)
                if known is not None and known.numFailedTasks > self._failed.get(stage, 0):
                    self._failed[stage] = known.numFailedTasks
                    self._say(stage, known.currentAttemptId)

    def _say(self, stage: int, attempt: int) -> None:
        most = failures_at_most(self._spark)
        failed = count(sum(self._failed.values()), "task")
        self.text = (
            f"{failed} that read the input failed, the last with: {self._reason(stage, attempt)}. Spark starts a task again "
            f"until it has failed {count(most, 'time')} (spark.task.maxFailures)"
        )
        log.warning("query %s: %s", self._query, self.text)

    def _reason(self, stage: int, attempt: int) -> str:
        """Of the newest failure; it is not worth more than a word if Spark does not tell."""
        try:
            jvm: Any = self._spark._jvm
            failed = jvm.java.util.ArrayList()
            failed.add(self._constant("TaskStatus", "FAILED"))
            store = self._spark.sparkContext._jsc.sc().statusStore()
            first = max(self._failed[stage] - LOOKED_AT // 2, 0)
            tasks = store.taskList(stage, attempt, first, LOOKED_AT, self._constant("TaskSorting", "ID"), failed)
            newest = max((tasks.apply(i) for i in range(tasks.size())), key=lambda task: task.taskId(), default=None)
            if newest is not None and newest.errorMessage().isDefined():
                return line_of(newest.errorMessage().get())
        except (Py4JError, AttributeError, TypeError) as error:
            log.debug("the reason is not known: %s", error)
        return "a reason that is in the log of its executor"

    def _constant(self, kind: str, name: str) -> Any:
        found = self._spark._jvm.java.lang.Class.forName(f"org.apache.spark.status.api.v1.{kind}")
        return next(constant for constant in found.getEnumConstants() if str(constant) == name)
