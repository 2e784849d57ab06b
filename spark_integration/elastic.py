"""Spark tasks for the workers of a query, also of those that join later (design: later-jobs, slot).

A Spark job cannot grow: workers that come later are a further job each time, whose tasks know their slots. A worker that
was drained ends its task well while the others of its job run on. The controller knows the slots that want a task, whether
the handle, the command line or another caller asked for more workers; here it is asked now and then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from controller.server import Server
from controller.wording import named
from flux.dataflow.plan import Plan
from flux.errors import FluxError
from flux.shell.loop import Rendezvous
from spark_integration.decommission import Decommissioning
from spark_integration.executor import worker_function
from spark_integration.jobs import Jobs
from spark_integration.settings import Room, live_slots, task_slots
from spark_integration.tasks import await_executors, collect_in_tasks

log = logging.getLogger("flux")

#: Time between two questions to the controller for slots without a task.
LOOK_S = 0.2
#: Time between two questions to Spark: for task slots, and for executors that are to go.
ASK_SPARK_S = 1.0


class Elastic:
    """Starter of worker tasks, used by the thread that supervises the query. ``room`` returns the number of workers that have
    room in a number of task slots, with the arithmetic."""

    def __init__(
        self, spark: SparkSession, plan: Plan, server: Server, jobs: Jobs, room: Callable[[int], Room]
    ) -> None:
        self._spark = spark
        self._plan = plan
        self._server = server
        self._jobs = jobs
        self._room = room
        self._started = False
        self._decommissioning = Decommissioning(spark, server, lambda: room(live_slots(spark)).workers)
        self._ask_spark_at = 0.0
        self._untold: set[int] = set()  # slots with started tasks that the controller may not know of

    def start(self, rendezvous: Rendezvous, slots: list[int]) -> None:
        """Start a Spark job with a task for each of these slots."""
        run = worker_function(self._plan, rendezvous, slots)
        what = f"workers in {named('slot', slots)}" if self._started else "workers"
        first, self._started = not self._started, True

        def tasks() -> None:
            if first:
                await_executors(self._spark, self._plan, self._server.ended)
            if not self._server.ended.is_set():
                collect_in_tasks(self._spark, run, count)

        def over(reason: str) -> None:
            self._untold.difference_update(slots)
            self._server.tasks_ended(slots, f"the Spark job '{what}'", reason)

        count = len(slots)
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
        return self._server.core.missing_slots()

    def _tell(self) -> None:
        """Tell the controller of started tasks, but not of those that have ended since: it hears of their end in this thread,
        too, and only after this."""
        started = list(self._untold)
        self._server.core.tasks_started(started)
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
        self._server.look(lambda: self._server.core.allow(room.workers, room.arithmetic))
