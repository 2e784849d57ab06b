"""A running flow: starts everything, watches it, and leaves nothing behind (DESIGN 1, 2).

The handle follows pyspark's StreamingQuery. Where each part runs: the controller in a thread of the driver, workers in
long-running Spark tasks, ingress in an ordinary Spark job over the user's DataFrame.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import threading
import time
import uuid
from dataclasses import replace
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from controller.dag import compile_plan, topological
from controller.explain import explain
from controller.server import Server
from controller.through import Through
from controller.wording import count
from flux.api import Flow, Source
from flux.errors import FluxError, QueryFailed, QueryTimeout, UsageError
from flux.plan import Plan
from flux.settings import Settings
from flux.shell import Rendezvous
from flux.transport import Keys
from spark_integration.console import put_bar_away, put_bar_back
from spark_integration.elastic import ASK_SPARK_S, LOOK_S, Elastic
from spark_integration.executor import ingress_function
from spark_integration.jobs import Jobs, reason_of
from spark_integration.operate import Operated, checked_timeout
from spark_integration.retries import Retries
from spark_integration.schema import for_spark, to_arrow
from spark_integration.session import for_bulk_transfer, session_stopped
from spark_integration.settings import (
    Need,
    Room,
    check_copies,
    count_slots,
    executors_at_most,
    failures_at_most,
    grows_on_demand,
    has_one_executor,
    is_case_sensitive,
    is_local,
    live_slots,
    read_settings,
    room_for_workers,
    says_where_copies_go,
    slots_at_first,
    task_slots,
    told_of_copies,
)
from spark_integration.shipping import check_shipping

log = logging.getLogger("flux")

#: Why a query ends whose Spark is gone.
STOPPED = (
    "Spark's session was stopped while the query was running. End the query first: query.stop(), or wait for it with "
    "query.awaitTermination()"
)
#: How often ``processAllAvailable`` looks: shorter than the interval of heartbeats, so that none is missed.
THROUGH_LOOK_S = 0.02
#: How often it says in the log what it waits for: a source that never pauses looks like a program that hangs.
THROUGH_SAY_S = 10.0
#: Errors of ingress tasks that only follow from the end of the query.
_OURS = "flux.errors."
#: How long a program that ends waits for each query that still runs, before its tasks are cancelled and after that.
EXIT_S = 10.0

_active: dict[str, Query] = {}
_active_lock = threading.Lock()
_told: set[str] = set()  # applications that know what copies on one executor are good for


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

    #: Why an input came to nothing before anything else ended the query; whether what still reads was told to end.
    _input_failed: str | None = None
    _cancelled = False

    def __init__(self, spark: SparkSession, plan: Plan, need: Need, sources: list[Source], name: str | None) -> None:
        self._spark = spark
        self._plan = plan
        self._need = need
        self._sources = sources
        self._name = name
        self._settings = plan.settings
        self._run_id = str(uuid.uuid4())
        self._jobs = Jobs(spark, f"flux-{plan.query}")
        self._ingress = Jobs(spark, f"flux-{plan.query}-ingress")
        keys = Keys.make() if _encrypted(spark, plan.settings) else None
        host = spark.sparkContext.getConf().get("spark.driver.host", "127.0.0.1") or "127.0.0.1"
        context = spark.sparkContext
        application = f"{context.appName} ({context.applicationId})"
        self._server = Server(plan, need.workers, host, keys, plan.query, name, application, self._run_id)
        self._server.explain = self._explain
        self._retries = Retries(spark, f"flux-{plan.query}-ingress", name or plan.query)
        self._look_at = 0.0
        self._elastic = Elastic(spark, plan, self._server, self._jobs, self._room)
        self._terminated = threading.Event()
        self._output: DataFrame | None = None
        self._output_lock = threading.Lock()
        self._fetching = False
        self._asked = ""
        self._supervisor = threading.Thread(target=self._supervise, name=f"flux-query-{plan.query[:8]}", daemon=True)

    # ---- like StreamingQuery

    @property
    def id(self) -> str:
        return self._plan.query

    @property
    def runId(self) -> str:  # noqa: N802
        """Of this run. Another run of the same flow is another query, with another ``id`` too: none goes on where one has
        stopped."""
        return self._run_id

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
            "starting": f"Waiting for {count(self._need.workers, 'worker')}{self._asked}",
            "running": "Processing rows" + (f"; {self._retries.text}" if self._retries.text else ""),
            "finished": "All output is there",
            "ended": "Stopped" if self._server.error is None else f"Failed: {self._server.error.summary}",
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
        error = self._server.error
        if isinstance(error, QueryFailed) and self._input_failed is not None and self._input_failed not in str(error):
            # Spark may end all Python processes of an executor when it gives up a job, and that is heard first.
            return QueryFailed(f"{self._input_failed}. What came of it: {error}")
        return error

    def awaitTermination(self, timeout: float | None = None) -> bool | None:  # noqa: N802
        """Wait until the query has ended; raises its error if it failed. With a timeout in seconds: whether it ended.

        A query with ``keep_output=True`` has ended when all output is there. That stays until ``toDF`` or ``stop``, and the
        workers, which keep it, with their task slots too."""
        timeout = None if timeout is None else checked_timeout(timeout)
        end = None if timeout is None else time.monotonic() + timeout
        ended = self._server.finished.wait(timeout)
        if ended and self._server.phase != "finished":  # it leaves nothing behind, and that takes a moment
            ended = self._terminated.wait(None if end is None else max(end - time.monotonic(), 0))
        if ended and (error := self.exception()) is not None:
            raise error
        return ended if timeout is not None else None

    def processAllAvailable(self, timeout: float | None = None) -> None:  # noqa: N802
        """Wait until all rows that the sources had to give at the time of the call have passed all stages; as in pyspark, meant
        for tests. A DataFrame gives all its rows; a source in the workers has given all when it yields None or ends. Where all
        sources come to an end: until the query has ended (with ``keep_output=True`` until all output is there). A source that
        always has more keeps this waiting; every ten seconds a line in the log says for what.

        Raises the query's error. timeout: seconds, default no limit; QueryTimeout says what is still to come."""
        timeout = None if timeout is None else checked_timeout(timeout)
        end = None if timeout is None else time.monotonic() + timeout
        through, say_at = Through(self._plan), time.monotonic() + THROUGH_SAY_S
        while what := self._server.look(lambda: through.look(self._server.core)):
            if time.monotonic() >= say_at:
                say_at += THROUGH_SAY_S
                log.warning(
                    "query %s: processAllAvailable() waits; this is still to come: %s", self._name or self.id, what
                )
            if end is not None and time.monotonic() >= end:
                raise QueryTimeout(f"after {timeout:g} s this is still to come: {what}")
            self._server.finished.wait(THROUGH_LOOK_S)
        if self._server.phase == "ended":
            self.awaitTermination(None if end is None else max(end - time.monotonic(), 0.001))

    def stop(self, timeout: float | None = None) -> None:
        """End the query and wait until nothing of it is left: no task, thread, socket or file.

        timeout: seconds, default twice ``spark.flux.stop.timeout``. QueryTimeout says what is still running."""
        limit = 2 * self._settings.stop_timeout + 10 if timeout is None else checked_timeout(timeout, 0)
        self._server.stop()
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
        put_bar_away(self._spark)
        with _active_lock:
            _active[self.id] = self
        self._asked = self._ask_for_executors()
        self._elastic.start(self._rendezvous, list(range(self._need.workers)))
        self._supervisor.start()

    def _ask_for_executors(self) -> str:
        """Tasks that wait are what dynamic allocation goes by; people are told. Empty if nothing has to be asked for."""
        if not grows_on_demand(self._spark):
            return ""
        wanted, there = (
            self._need.workers + self._need.others,
            live_slots(self._spark) - sum(slots_taken(self).values()),
        )
        if wanted <= there:
            return ""
        asked = (
            f": {max(there, 0)} of {count(wanted, 'task slot')} are there, and Spark is asked for more (dynamic allocation). "
            f"They may take {self._settings.workers_timeout:g} s (spark.flux.workers.timeout)"
        )
        log.warning("query %s waits for %s%s", self._name or self.id, count(self._need.workers, "worker"), asked)
        return asked

    def _cancel(self) -> None:
        self._ingress.cancel()
        self._jobs.cancel()

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
        if not self._cancelled and not reason.startswith(_OURS):
            self._input_failed = f"the Spark job '{what}' failed: {reason}"
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
            self._look()
        try:
            self._end_fetch()
            still_reading = self._ingress.join(1.0)
            self._cancelled = True
            if still_reading:
                self._ingress.cancel()  # whatever they still read, nobody wants it
            if self._jobs.join(self._settings.stop_timeout if self._server.error is None else 5.0):
                self._jobs.cancel()
                self._jobs.join(self._settings.stop_timeout)
            self._ingress.join(self._settings.stop_timeout)
        finally:
            self._server.close(10.0)
            put_bar_back(self._spark)
            with _active_lock:
                _active.pop(self.id, None)
            self._terminated.set()

    def _look(self) -> None:
        """What goes wrong here is no reason to end a query that runs."""
        if session_stopped(self._spark):
            self._server.job_failed("Spark", STOPPED)
            return
        try:
            self._elastic.look(self._rendezvous)
            if time.monotonic() >= self._look_at:
                self._look_at = time.monotonic() + ASK_SPARK_S
                self._retries.look()
        except Exception as error:
            if not session_stopped(self._spark):
                log.warning("query %s: cannot look after its workers: %s", self.id, error)

    def _explain(self, error: FluxError) -> FluxError:
        """Executors that go with their session look as if they were lost."""
        if session_stopped(self._spark, ask_jvm=True):
            return QueryFailed(STOPPED)
        if isinstance(error, QueryTimeout) and self._asked:
            return QueryTimeout(
                f"{error} Spark was asked for more (dynamic allocation) and did not give enough in time"
            )
        return error

    def toDF(self) -> DataFrame:  # noqa: N802
        """Wait for the end of the input and return the output as a DataFrame, held by Spark like a local checkpoint; the
        query ends with that. Asked again: the same DataFrame. For a query of one flow that was started with
        ``keep_output=True``; UsageError if it was stopped before its output was fetched."""
        if not any(stage.collects for stage in self._plan.stages):
            raise UsageError("the query does not keep its output: start it with keep_output=True")
        with self._output_lock:
            if self._output is None:
                try:
                    self.wait_for_output()
                    self._output = self._fetch()
                finally:
                    self.stop()
            return self._output

    def _fetch(self) -> DataFrame:
        from spark_integration.egress import fetch_all

        context = self._spark.sparkContext
        self._fetching = True
        try:
            if self._server.phase == "finished":
                context.addJobTag(self._fetch_tag)
                return fetch_all(self)
        except Exception as error:
            if (ended_by := self.exception()) is not None:
                raise ended_by from None
            if self._server.phase == "finished":
                raise QueryFailed(f"the output could not be fetched: {reason_of(error)}") from error
        finally:
            self._fetching = False
            if not session_stopped(self._spark):
                context.removeJobTag(self._fetch_tag)
        if (ended_by := self.exception()) is not None:
            raise ended_by
        raise UsageError(
            f"query {self._name or self.id} was stopped before its output was fetched: start the flow again"
        )

    @property
    def _fetch_tag(self) -> str:
        return f"flux-{self.id}-egress"

    def _end_fetch(self) -> None:
        """Its tasks would ask for output that is gone, as often as Spark retries them."""
        end = time.monotonic() + self._settings.stop_timeout
        while self._fetching and time.monotonic() < end and not session_stopped(self._spark):
            self._spark.sparkContext.cancelJobsWithTag(self._fetch_tag)
            time.sleep(LOOK_S)

    def _room(self, slots: int) -> Room:
        return room_for_workers(self._need, slots, slots_taken(self))

    def wait_until_running(self, timeout: float) -> None:
        """Wait until the workers are there; raises the query's error, or QueryTimeout."""
        if not self._server.started.wait(checked_timeout(timeout, 0)):
            raise QueryTimeout(f"query {self.id} has not started within {timeout:g} s")
        if (error := self.exception()) is not None:
            raise error

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
            raise self.exception() or self._server.error

    @property
    def spark(self) -> SparkSession:
        return self._spark

    @property
    def rendezvous(self) -> Rendezvous:
        return self._rendezvous


def _stop_all(of_process: int = os.getpid()) -> None:
    """At the end of the program: Spark's JVM goes with it, and workers that it takes along look like crashes."""
    for query in active_queries() if os.getpid() == of_process else []:
        log.warning("the program ends while query %s is running: it is stopped", query.name or query.id)
        try:
            query.stop(EXIT_S)
        except QueryTimeout:
            query._cancel()
            query._terminated.wait(EXIT_S)
        except Exception as error:
            log.warning("query %s: %s", query.id, error)


atexit.register(_stop_all)


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
    shared = has_one_executor(spark) and not says_where_copies_go(spark, options)
    if shared:
        settings = replace(settings, same_executor=True)
    at_first = slots_at_first(spark) if grows_on_demand(spark) else None
    need = count_slots(settings.workers, spark_tasks, task_slots(spark), slots_taken(), _copies(flows), at_first)
    plan = compile_plan(
        flows, settings, lambda declared: to_arrow(spark, declared), str(uuid.uuid4()), secrets.token_bytes(32),
        collect=need.workers if keep_output else 0, case_sensitive=is_case_sensitive(spark),
    )  # fmt: skip
    for stage in plan.stages:
        if stage.collects:
            for_spark(stage.schemas[0], f"stage {stage.name}")
    check_shipping(plan)
    check_copies(plan, need.workers, executors_at_most(spark))
    query = Query(spark, plan, need, sources, name)
    if shared:
        _tell_of_copies(spark, plan)
    query._start()
    return query


def _tell_of_copies(spark: SparkSession, plan: Plan) -> None:
    """Once per application: it holds for every query of it."""
    application = str(spark.sparkContext.applicationId)
    told = told_of_copies(plan, str(spark.sparkContext.master), failures_at_most(spark))
    if told and application not in _told:
        _told.add(application)
        log.warning("%s", told)


def _copies(flows: list[Flow]) -> int:
    """The most of any stage; whether they are numbers is checked with the rest of the flow."""
    wanted = [flow.stage.replicas for flow in topological(flows)]
    return max((copies for copies in wanted if isinstance(copies, int)), default=1)


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
    # A session is active in the thread that made it; the default one is that of the whole program.
    session = SparkSession.getActiveSession() or SparkSession._instantiatedSession
    if session is None or session_stopped(session):
        raise UsageError("there is no SparkSession: make one with SparkSession.builder, or give spark=...")
    return session


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
