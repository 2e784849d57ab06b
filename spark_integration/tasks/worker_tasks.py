"""Spark tasks for the workers of a query, also of those that join later (design: later-jobs, slot).

A Spark job cannot grow: workers that come later are a further job each time, whose tasks know their slots. A worker that
was drained ends its task well while the others of its job run on. The controller knows the slots that want a task, whether
the handle, the command line or another caller asked for more workers; here it is asked now and then.

The first tasks wait for executors to join (``await_executors``), and run in Python processes like all others
(``collect_in_tasks``) (design: worker).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from controller.server import Server
from controller.text import count, named
from flux.dataflow.plan import Plan
from flux.errors import FluxError
from flux.shell.process import Rendezvous
from spark_integration.settings import Room, executors_at_most, grows_on_demand, live_slots, task_slots
from spark_integration.tasks.decommission import Decommissioning
from spark_integration.tasks.entry_points import worker_function
from spark_integration.tasks.jobs import Jobs

log = logging.getLogger("flux")

#: Time between two questions to the controller for slots without a task.
SLOT_LOOK_S = 0.2
#: Time between two questions to Spark: for task slots, and for executors that are to go.
ASK_SPARK_S = 1.0


class WorkerTasks:
    """Starter of worker tasks, used by the thread that supervises the query. ``plan`` returns the newest plan, with
    which later workers come; ``room`` the number of workers that have room in a number of task slots, with the arithmetic."""

    def __init__(
        self, spark: SparkSession, plan: Callable[[], Plan], server: Server, jobs: Jobs, room: Callable[[int], Room]
    ) -> None:
        self._spark = spark
        self._newest_plan = plan
        self._server = server
        self._jobs = jobs
        self._room = room
        self._started = False
        self._decommissioning = Decommissioning(spark, server, lambda: room(live_slots(spark)).workers)
        self._ask_spark_at = 0.0
        self._untold: set[int] = set()  # slots with started tasks that the controller may not know of
        #: At the last look, a slot had no worker: its task may have failed.
        self.awaits_workers = True

    @property
    def _plan(self) -> Plan:
        return self._newest_plan()

    def start(self, rendezvous: Rendezvous, slots: list[int]) -> None:
        """Start a Spark job with a task for each of these slots."""
        run = worker_function(self._plan, rendezvous, slots)
        what = f"workers in {named('slot', slots)}" if self._started else "workers"
        first, self._started = not self._started, True
        wanted = len(slots)

        def tasks() -> None:
            if first:
                await_executors(self._spark, self._plan, self._server.ended)
            if not self._server.ended.is_set():
                collect_in_tasks(self._spark, run, wanted)

        def over(reason: str) -> None:
            self._untold.difference_update(slots)
            self._server.tasks_ended(slots, f"the Spark job '{what}'", reason)

        self._jobs.run(
            what,
            tasks,
            lambda _: over("its tasks ended before the query"),
            lambda _, reason: over(reason),
        )

    def look(self, rendezvous: Rendezvous) -> None:
        """Drain and replace workers that are to go, and start missing ones. A failure here is no reason to end a running
        query."""
        try:
            self._ask_spark()
            slots = self._server.look(self._missing)
            if slots:
                self._untold.update(slots)
                try:
                    self.start(rendezvous, slots)
                except Exception:
                    self._untold.difference_update(slots)
                    raise
                self._server.look(self._tell)
        except (FluxError, Py4JError, OSError) as error:
            log.warning("query %s: cannot look after its workers: %s", self._plan.query, error)

    def _missing(self) -> list[int]:
        """Return the slots without a task. Runs in the controller's thread, like ``_tell``. The controller may have been too
        busy before to be told of tasks that were started."""
        self._tell()
        self.awaits_workers = self._server.core.driver.awaits_workers
        return self._server.core.driver.missing_slots()

    def _tell(self) -> None:
        """Tell the controller of started tasks, but not of those that have ended since: it hears of their end in this thread,
        too, and only after this."""
        started = list(self._untold)
        self._server.core.driver.tasks_started(started)
        self._untold.difference_update(started)

    def _ask_spark(self) -> None:
        if time.monotonic() < self._ask_spark_at:
            return
        self._ask_spark_at = time.monotonic() + ASK_SPARK_S
        self.renew_room()
        self._decommissioning.look()

    def renew_room(self) -> None:
        """Tell the controller the number of workers that have room: it refuses more, from any caller."""
        room = self._room(task_slots(self._spark))
        self._server.look(lambda: self._server.core.driver.allow(room.workers, room.arithmetic))


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
    """Wait until enough executors have joined for replicas on different ones, if Spark may have that many: otherwise all tasks
    would go to the first one, and stay there. Waits at most ``EXECUTORS_S``, or until ``over``."""
    replicas = max((stage.replicas for stage in plan.stages), default=1)
    most = executors_at_most(spark)
    if replicas < 2 or plan.settings.same_executor or grows_on_demand(spark) or (most is not None and most < replicas):
        return
    end = time.monotonic() + EXECUTORS_S
    while (there := executors_there(spark, READY_S)) < replicas and not over.is_set():
        if time.monotonic() > end:
            joined = count(there, "executor")
            log.warning("%s joined within %g s, and replicas are to be on %d", joined, EXECUTORS_S, replicas)
            return
        over.wait(LOOK_S)


def executors_there(spark: SparkSession, for_s: float = 0.0) -> int:
    """Count the executors that joined at least ``for_s`` seconds ago. The driver is in Spark's list, too."""
    executors = spark.sparkContext._jsc.sc().statusStore().executorList(True)
    found = [executors.apply(number) for number in range(executors.size())]
    latest = (time.time() - for_s) * 1e3
    return sum(each.id() != "driver" and each.addTime().getTime() <= latest for each in found)
