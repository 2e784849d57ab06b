"""Start of the workers' tasks: on executors that are there, in Python processes like all others (design: worker)."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from controller.wording import count
from flux.dataflow.plan import Plan
from spark_integration.settings import executors_at_most, grows_on_demand

log = logging.getLogger("flux")

#: Variable by which the environment of tasks of Spark's SQL differs from that of RDDs, and its setting. Spark has a daemon
#: for each environment.
TRACEBACKS, TRACEBACKS_BY = "SPARK_SIMPLIFIED_TRACEBACK", "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled"
#: Time between two questions to Spark for its executors, and the longest wait for the first ones.
LOOK_S, EXECUTORS_S = 0.1, 30.0
#: Time from its joining until an executor gets its first task: it starts services, and gives no sign when that is done.
READY_S = 2.0
_environment = threading.Lock()


def collect_in_tasks(spark: SparkSession, run: Callable[[Iterable[int]], Iterator[Any]], tasks: int) -> list[Any]:
    """Run ``run`` in ``tasks`` tasks, and return the yielded values."""
    context = spark.sparkContext
    # A query may last longer than the age at which a clean-up of temporary folders removes this one.
    os.makedirs(context._temp_dir, exist_ok=True)
    job = context.parallelize(range(tasks), tasks).mapPartitions(run)
    with _environment:
        before = context.environment
        if _has_simple_tracebacks(spark):
            context.environment = {**before, TRACEBACKS: "1"}
        try:
            job._jrdd  # noqa: B018  # made once, with the environment of now
        finally:
            context.environment = before
    return list(job.collect())


def _has_simple_tracebacks(spark: SparkSession) -> bool:
    try:
        # Without a default here, which would hide Spark's own.
        return str(spark.conf.get(TRACEBACKS_BY)) == "true"
    except PySparkException:  # a release that does not know it
        return False


def await_executors(spark: SparkSession, plan: Plan, over: threading.Event) -> None:
    """Wait until enough executors have joined for copies on different ones, if Spark may have that many: otherwise all tasks
    would go to the first one, and stay there. Waits at most ``EXECUTORS_S``, or until ``over``."""
    copies = max((stage.replicas for stage in plan.stages), default=1)
    most = executors_at_most(spark)
    if copies < 2 or plan.settings.same_executor or grows_on_demand(spark) or (most is not None and most < copies):
        return
    end = time.monotonic() + EXECUTORS_S
    while (there := executors_there(spark, READY_S)) < copies and not over.is_set():
        if time.monotonic() > end:
            joined = count(there, "executor")
            log.warning("%s joined within %g s, and copies are to be on %d", joined, EXECUTORS_S, copies)
            return
        over.wait(LOOK_S)


def executors_there(spark: SparkSession, for_s: float = 0.0) -> int:
    """Count the executors that joined at least ``for_s`` seconds ago. The driver is in Spark's list, too."""
    executors = spark.sparkContext._jsc.sc().statusStore().executorList(True)
    found = [executors.apply(number) for number in range(executors.size())]
    latest = (time.time() - for_s) * 1e3
    return sum(each.id() != "driver" and each.addTime().getTime() <= latest for each in found)
