"""How the workers' tasks are started: on executors that are there, in Python processes like all others (design: worker)."""

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

#: By this, tasks of Spark's SQL differ from those of RDDs in their environment. Spark has a daemon for each environment.
TRACEBACKS, TRACEBACKS_BY = "SPARK_SIMPLIFIED_TRACEBACK", "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled"
#: How often Spark is asked which executors are there, and how long it may take until the first ones are.
LOOK_S, EXECUTORS_S = 0.1, 30.0
#: From its joining until Spark gives an executor its first task: it starts services, and nobody is told when it is done.
READY_S = 2.0
_environment = threading.Lock()


def collect_in_tasks(spark: SparkSession, run: Callable[[Iterable[int]], Iterator[Any]], tasks: int) -> list[Any]:
    """``run`` in so many tasks, and what they yield."""
    context = spark.sparkContext
    # Whoever cleans up temporary folders after some days removes this one, and a query may last longer.
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
        # With Spark's own default, which another one given here would hide.
        return str(spark.conf.get(TRACEBACKS_BY)) == "true"
    except PySparkException:  # a release that does not know it
        return False


def await_executors(spark: SparkSession, plan: Plan, over: threading.Event) -> None:
    """Until as many executors have joined as copies are to be on different ones, if Spark may have so many: all tasks would go
    to the first one, and stay there. Not longer than ``EXECUTORS_S``, or until ``over``."""
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
    """That have joined so long ago. The driver is in Spark's list, too."""
    executors = spark.sparkContext._jsc.sc().statusStore().executorList(True)
    found = [executors.apply(number) for number in range(executors.size())]
    latest = (time.time() - for_s) * 1e3
    return sum(each.id() != "driver" and each.addTime().getTime() <= latest for each in found)
