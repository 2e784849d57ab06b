"""A running flow: starts everything, watches it, and leaves nothing behind (DESIGN 1, 2).

The handle follows pyspark's StreamingQuery. Where each part runs: the controller in a thread of the driver, workers in
long-running Spark tasks, ingress in an ordinary Spark job over the user's DataFrame.
"""

from __future__ import annotations

import secrets
import threading
import time
import uuid
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from controller.dag import compile_plan, topological
from controller.explain import explain
from controller.server import Server
from controller.wording import count
from flux.api import Flow, Source
from flux.errors import FluxError, QueryTimeout, UsageError
from flux.plan import Plan
from flux.settings import Settings
from flux.transport import Keys
from spark_integration.elastic import LOOK_S, Elastic
from spark_integration.executor import ingress_function
from spark_integration.jobs import Jobs
from spark_integration.operate import Operated
from spark_integration.schema import for_spark, to_arrow
from spark_integration.session import for_bulk_transfer
from spark_integration.settings import (
    Need,
    Room,
    count_slots,
    is_case_sensitive,
    is_local,
    read_settings,
    room_for_workers,
    task_slots,
)
from spark_integration.shipping import check_shipping

_active: dict[str, Query] = {}
_active_lock = threading.Lock()


def active_queries() -> list[Query]:
    """Queries of this process that have not ended, the oldest first."""
    with _active_lock:
        return list(_active.values())


def slots_taken(by_others_than: Query | None = None) -> dict[str, int]:
    """Task slots that the workers of running queries hold, by the query's name."""
    return {query.name or query.id: query.tasks for query in active_queries() if query is not by_others_than}


class Query(Operated):
    """Handle of a running flow, in the manner of pyspark's StreamingQuery; what changes it while it runs is in
    ``Operated``."""

    def __init__(self, spark: SparkSession, plan: Plan, need: Need, sources: list[Source], name: str | None) -> None:
        self._spark = spark
        self._plan = plan
        self._need = need
        self._sources = sources
        self._name = name
        self._settings = plan.settings
        self._jobs = Jobs(spark, f"flux-{plan.query}")
        self._ingress = Jobs(spark, f"flux-{plan.query}-ingress")
        keys = Keys.make() if _encrypted(spark, plan.settings) else None
        host = spark.sparkContext.getConf().get("spark.driver.host", "127.0.0.1") or "127.0.0.1"
        context = spark.sparkContext
        application = f"{context.appName} ({context.applicationId})"
        self._server = Server(plan, need.workers, host, keys, plan.query, name, application)
        self._elastic = Elastic(spark, plan, self._server, self._jobs, self._room)
        self._terminated = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name=f"flux-query-{plan.query[:8]}", daemon=True)

    # ---- like StreamingQuery

    @property
    def id(self) -> str:
        return self._plan.query

    @property
    def name(self) -> str | None:
        """The name given at start, or None."""
        return self._name

    @property
    def isActive(self) -> bool:  # noqa: N802
        """Whether anything of the query still runs."""
        return not self._terminated.is_set()

    @property
    def phase(self) -> str:
        """ "starting" (workers are awaited), "running", "finished" (all output is there) or "ended"."""
        return self._server.phase

    @property
    def status(self) -> dict[str, Any]:
        """``message`` for people, ``isDataAvailable``: rows wait to be applied, ``isTriggerActive``: rows may flow."""
        phase = self._server.phase
        messages = {
            "starting": f"Waiting for {count(self._need.workers, 'worker')}",
            "running": "Processing rows",
            "finished": "All output is there",
            "ended": "Stopped" if self._server.error is None else f"Failed: {self._server.error}",
        }
        progress = self.lastProgress
        waiting = bool(progress and progress["backlog"]["slices"])
        return {"message": messages[phase], "isDataAvailable": waiting, "isTriggerActive": phase == "running"}

    @property
    def lastProgress(self) -> dict[str, Any] | None:  # noqa: N802
        """The newest progress report, None before the first."""
        reports = self.recentProgress
        return reports[-1] if reports else None

    @property
    def recentProgress(self) -> list[dict[str, Any]]:  # noqa: N802
        """The last hundred progress reports, the oldest first."""
        return list(self._server.progress)

    def exception(self) -> FluxError | None:
        """What ended the query, None if nothing went wrong so far."""
        return self._server.error

    def awaitTermination(self, timeout: float | None = None) -> bool | None:  # noqa: N802
        """Wait until the query has ended; raises its error if it failed. With a timeout in seconds: whether it ended."""
        if timeout is not None and timeout <= 0:
            raise UsageError(f"timeout must be positive, got {timeout!r}")
        ended = self._terminated.wait(timeout)
        if ended and self._server.error is not None:
            raise self._server.error
        return ended if timeout is not None else None

    def stop(self, timeout: float | None = None) -> None:
        """End the query and wait until nothing of it is left: no task, thread, socket or file.

        timeout: seconds, default twice ``spark.flux.stop.timeout``. QueryTimeout says what is still running."""
        self._server.stop()
        limit = 2 * self._settings.stop_timeout + 10 if timeout is None else timeout
        if not self._terminated.wait(limit):
            left = ", ".join(self._jobs.join(0) + self._ingress.join(0)) or "controller"
            raise QueryTimeout(f"query {self.id} is still ending after {limit:g} s: {left}")

    def explain(self) -> None:
        """Print what runs: sources, stages with keys, partitions and replicas, and policies."""
        print(explain(self._plan, self._need.workers))

    def __repr__(self) -> str:
        return f"<flux query {self._name or self.id}: {self.status['message']}>"

    # ---- from start to end

    def _start(self) -> None:
        self._rendezvous = self._server.start()
        with _active_lock:
            _active[self.id] = self
        self._elastic.start(self._rendezvous, list(range(self._need.workers)))
        self._supervisor.start()

    def _start_ingress(self, index: int, source: Source) -> None:
        name = self._plan.sources[index].name
        feed = ingress_function(self._plan, self._rendezvous, index)

        def read() -> list[Any]:
            df = for_bulk_transfer(source.dataframe, self._settings.batch_max_rows)
            # mapInArrow looks columns up by name, and finds none whose name has a dot or is there twice.
            df = df.toDF(*(f"c{position}" for position in range(len(df.columns))))
            return df.mapInArrow(feed, "partition int, rows long").collect()

        def done(rows: list[Any]) -> None:
            partitions = sorted(row.partition for row in rows)
            for edge in self._plan.edges_of_source(index):
                self._server.edge_complete(edge.id, partitions)

        self._ingress.run(f"ingress of {name}", read, done, self._job_failed)

    def _job_failed(self, what: str, reason: str) -> None:
        self._server.job_failed(f"the Spark job '{what}'", reason)

    def _supervise(self) -> None:
        """Start reading once the workers are there, and workers that are asked for later; when the controller has sent
        everybody home see them off, cancel who does not go, close up."""
        # Not earlier: ingress tasks that come first could take the slots that the workers need.
        self._server.started.wait()
        if self._server.phase == "running":
            for index, source in enumerate(self._sources):
                if source.dataframe is not None:
                    self._start_ingress(index, source)
        while not self._server.ended.wait(LOOK_S):
            self._elastic.look(self._rendezvous)
        try:
            if self._ingress.join(1.0):
                self._ingress.cancel()  # whatever they still read, nobody wants it
            if self._jobs.join(self._settings.stop_timeout if self._server.error is None else 5.0):
                self._jobs.cancel()
                self._jobs.join(self._settings.stop_timeout)
            self._ingress.join(self._settings.stop_timeout)
        finally:
            self._server.close(10.0)
            with _active_lock:
                _active.pop(self.id, None)
            self._terminated.set()

    def toDF(self) -> DataFrame:  # noqa: N802
        """Wait for the end of the input and return the output as a DataFrame, held by Spark like a local checkpoint; the
        query ends with that. For a query of one flow that was started with ``keep_output=True``."""
        from spark_integration.egress import fetch_all

        if not any(stage.collects for stage in self._plan.stages):
            raise UsageError("the query does not keep its output: start it with keep_output=True")
        try:
            self.wait_for_output()
            return fetch_all(self)
        finally:
            self.stop()

    def _room(self, slots: int) -> Room:
        return room_for_workers(self._need, slots, slots_taken(self))

    def wait_until_running(self, timeout: float) -> None:
        """Wait until the workers are there; raises the query's error, or QueryTimeout."""
        if not self._server.started.wait(timeout):
            raise QueryTimeout(f"query {self.id} has not started within {timeout:g} s")
        if self._server.error is not None:
            raise self._server.error

    @property
    def tasks(self) -> int:
        """Spark tasks of its workers: one for each worker, also those that are still to come or have not gone yet."""
        return len(self._server.core.places.tasked)

    # ---- for egress

    @property
    def plan(self) -> Plan:
        return self._plan

    def wait_for_output(self) -> None:
        """Wait until all output is there (or the query has failed: raises its error)."""
        self._server.finished.wait()
        if self._server.error is not None:
            self._terminated.wait(3 * self._settings.stop_timeout)
            raise self._server.error

    def endpoints(self) -> dict[int, str]:
        assert self._server.core.table is not None
        return self._server.core.table.endpoints

    def owner(self, stage: int, partition: int) -> int:
        assert self._server.core.table is not None
        return self._server.core.table.stages[stage][partition][0].worker

    @property
    def keys(self) -> Keys | None:
        return self._rendezvous.keys


def start_query(
    flows: list[Flow],
    name: str | None = None,
    spark: SparkSession | None = None,
    keep_output: bool = False,
    **options: Any,
) -> Query:
    """Check everything that can be checked, then start. Nothing is running if this raises."""
    for flow in flows:
        if not isinstance(flow, Flow):
            raise UsageError(f"expected a flow, the result of calling a decorated stage; got {type(flow).__name__}")
    sources = _sources(flows)
    spark = spark or _session(sources)
    settings = read_settings(spark, options)
    spark_tasks = keep_output or any(source.dataframe is not None for source in sources)
    need = count_slots(settings.workers, spark_tasks, task_slots(spark), slots_taken())
    plan = compile_plan(
        flows, settings, lambda declared: to_arrow(spark, declared), str(uuid.uuid4()), secrets.token_bytes(32),
        collect=need.workers if keep_output else 0, case_sensitive=is_case_sensitive(spark),
    )  # fmt: skip
    for stage in plan.stages:
        if stage.collects:
            for_spark(stage.schemas[0], f"stage {stage.name}")
    check_shipping(plan)
    query = Query(spark, plan, need, sources, name)
    query._start()
    return query


def _sources(flows: list[Flow]) -> list[Source]:
    """In the order in which the compiler numbers them."""
    found: list[Source] = []
    for flow in topological(flows):
        for given in flow.inputs:
            if isinstance(given, Source) and not any(given is known for known in found):
                found.append(given)
    return found


def _session(sources: list[Source]) -> SparkSession:
    for source in sources:
        if source.dataframe is not None:
            return source.dataframe.sparkSession
    active = SparkSession.getActiveSession()
    if active is None:
        raise UsageError("there is no active SparkSession: make one with SparkSession.builder, or give spark=...")
    return active


def _encrypted(spark: SparkSession, settings: Settings) -> bool:
    if settings.encrypt not in ("auto", "true", "false"):
        raise UsageError(f"spark.flux.encrypt must be true, false or auto, got {settings.encrypt!r}")
    return settings.encrypt == "true" or (settings.encrypt == "auto" and not is_local(spark))


def await_any_progress(query: Query, after: dict[str, Any] | None, timeout: float) -> dict[str, Any] | None:
    """The next progress report after the one given, or None if none came in time or the query has ended."""
    end = time.monotonic() + timeout
    while time.monotonic() < end and query.isActive:
        newest = query.lastProgress
        if newest is not None and newest is not after:
            return newest
        time.sleep(0.05)
    return None
