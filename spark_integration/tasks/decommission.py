"""Decommissioned executors give their partitions away before they go, and other workers come in their place.

With ``spark.decommission.enabled`` an executor that is told to go (SIGPWR, or by the cluster manager) takes no new tasks
and ends when its tasks are over. A worker is such a task, and would keep the executor until it is killed: so the worker is
drained, which ends the task well. Spark does not start such a task again elsewhere, so another worker is asked for, as soon
as a slot is free on an executor that stays. It comes first if the drain would leave too few workers.

Workers report the name of their executor (``entry_points.name_of_executor``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from pyspark.sql import SparkSession

from controller.server import Server
from controller.text import named
from flux.errors import UsageError
from spark_integration.settings import context_conf
from spark_integration.tasks.entry_points import spark_id

log = logging.getLogger("flux")


class Decommissioning:
    """Watch over decommissioned executors. ``room`` returns the number of workers that have room on executors that stay."""

    def __init__(self, spark: SparkSession, server: Server, room: Callable[[], int]) -> None:
        self._context = spark.sparkContext
        self._server = server
        self._room = room
        self._on = str(context_conf(spark).get("spark.decommission.enabled", "false")).lower() == "true"
        self._refused: dict[str, str] = {}  # executor -> reason why it cannot be emptied; logged once

    def look(self) -> None:
        """Drain the workers on executors that are to go, and replace them. A step that is impossible now is tried again at the
        next look: more workers may have come, or more room."""
        if not self._on:
            return
        staying, owed = self._server.look(lambda: (self._staying(), bool(self._server.core.places.owed)))
        going = {executor: workers for executor, workers in staying.items() if self._is_leaving(executor)}
        if going or owed:
            room = self._room()
            all_going = [worker for workers in going.values() for worker in workers]
            self._server.command(lambda now: self._server.core.driver.replace(all_going, room, now))
        for executor, workers in going.items():
            self._drain(executor, workers)

    def _staying(self) -> dict[str, list[int]]:
        """Return the workers that are not leaving yet, by executor. Runs in the controller's thread."""
        found: dict[str, list[int]] = {}
        if self._server.core.phase == "running":
            for node, member in self._server.core.members.workers.items():
                if not member.leaving:
                    found.setdefault(member.about.executor, []).append(node)
        return found

    def _is_leaving(self, executor: str) -> bool:
        identifier = spark_id(executor)
        scheduler = self._context._jsc.sc().taskScheduler()
        return identifier is not None and bool(scheduler.getExecutorDecommissionState(identifier).isDefined())

    def _drain(self, executor: str, workers: list[int]) -> None:
        why = f"Spark decommissions executor {spark_id(executor)}"
        try:
            self._server.command(lambda now: self._server.core.leave(workers, why, now))
        except UsageError as error:
            if self._refused.get(executor) != str(error):
                self._refused[executor] = str(error)
                log.warning("%s, and its partitions stay until it goes: %s", why, error)
        else:
            log.info("%s: partitions of %s move away", why, named("worker", workers))
