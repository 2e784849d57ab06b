"""One run of a query: starts everything, watches it, and leaves nothing behind (design: where-it-runs).

The controller runs in a thread of the driver, workers in long-running Spark tasks, ingress in an ordinary Spark job over
the user's DataFrame. A thread of the driver looks after them, from the first task to the last.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Any

from py4j.protocol import Py4JError
from pyspark.sql import DataFrame, SparkSession

from controller.planning.compiled_plan import CompiledPlan
from controller.server import Server
from controller.text import count
from flux.dataflow.plan import DataFrameSourcePlan, Plan
from flux.dataflow.sink import QueryReaders
from flux.dataflow.source import DataFrameSource, Source
from flux.errors import FluxError, QueryFailed, QueryTimeout
from flux.shell.process import Rendezvous
from flux.shell.transport import Keys
from spark_integration.growing.plan_keeper import PlanKeeper
from spark_integration.growing.running_plan import RunningPlan
from spark_integration.query import running_queries
from spark_integration.query.checkpoint_location import CheckpointLocation, VaultProcess
from spark_integration.query.source_setup import UnreadRows, forget
from spark_integration.session import for_reading, session_stopped
from spark_integration.settings import (
    Need,
    Room,
    context_conf,
    grows_on_demand,
    is_encrypted,
    live_slots,
    room_for_workers,
)
from spark_integration.streaming.stream_source import Streams
from spark_integration.tasks.dataframe_partitions import cutting_by, partitions_of
from spark_integration.tasks.entry_points import ingress_function
from spark_integration.tasks.jobs import Jobs, Retries
from spark_integration.tasks.worker_tasks import ASK_SPARK_S, SLOT_LOOK_S, WorkerTasks

log = logging.getLogger("flux")

_lock = threading.Lock()
_queries = 0
_put_away = False

FAILURES = (Py4JError, AttributeError, TypeError, OSError)


def put_bar_away(spark: SparkSession) -> None:
    """Hide Spark's own progress bar while queries run. Each query calls this once, and ``put_bar_back`` at its end, which
    shows the bar again after the last.

    The bar would stay on the console for as long as a query runs, and say nothing: it counts tasks that have ended, and
    workers do not end.

    Spark has no public way to do that. In a release of Spark where the way used here does not work, the bar stays."""
    global _queries, _put_away
    with _lock:
        _queries += 1
        if _queries == 1:
            _put_away = _attempt(lambda: _stop(spark))


def put_bar_back(spark: SparkSession) -> None:
    global _queries, _put_away
    with _lock:
        _queries -= 1
        if _queries == 0 and _put_away:
            _put_away = False
            _attempt(lambda: _start(spark))


def _stop(spark: SparkSession) -> bool:
    """Stop the bar. False: there is none."""
    context = spark.sparkContext._jsc.sc()
    bar = context.progressBar()
    if not bar.isDefined():
        return False
    bar.get().finishAll()
    bar.get().stop()
    _field(context).set(context, spark._jvm.scala.Option.empty())
    return True


def _start(spark: SparkSession) -> bool:
    context = spark.sparkContext._jsc.sc()
    if context.isStopped():
        return False
    made = spark._jvm.org.apache.spark.ui.ConsoleProgressBar(context)
    _field(context).set(context, spark._jvm.scala.Option.apply(made))
    return True


def _field(context: Any) -> Any:
    field = context.getClass().getDeclaredField("_progressBar")
    field.setAccessible(True)
    return field


def _attempt(change: Callable[[], bool]) -> bool:
    try:
        return change()
    except FAILURES as error:
        log.debug("Spark's progress bar is left as it is: %s", error)
        return False


#: Reason for the end of a query whose Spark is gone.
STOPPED = (
    "Spark's session was stopped while the query was running. End the query first: query.stop(), or wait for it with "
    "query.awaitTermination()"
)
#: Beginning of errors of ingress tasks that only follow from the end of the query.
_OURS = "flux.errors."


class QueryRun:
    """Run of a query; ``start`` it once. ``terminated`` is set when nothing of it is left."""

    rendezvous: Rendezvous  # once it has been started
    #: Request for executors that workers wait for, in words.
    asked = ""
    #: Failure of an input before anything else ended the query.
    _input_failed: str | None = None
    #: From now on failures of jobs count as no failure of an input, because they come from the cancelling. Set before
    #: ``cancel``.
    _cancelled = False
    #: Tasks lack a module, so that no attempt at them can succeed.
    _lacking = False

    def __init__(
        self,
        spark: SparkSession,
        compiled: CompiledPlan,
        need: Need,
        name: str | None,
        end_fetch: Callable[[], None],
        location: CheckpointLocation | None = None,
    ) -> None:
        """``end_fetch`` is called when the controller has ended the query, before the query waits for its tasks."""
        self.id = str(uuid.uuid4())
        self.need = need
        self.terminated = threading.Event()
        self._spark = spark
        plan, sources = compiled.plan, compiled.sources
        self._unread = {index for index, source in sources.items() if isinstance(source, DataFrameSource)}
        self._called = name or plan.query
        self._end_fetch = end_fetch
        self._location = place = None if location is None else location.place
        self._vault: VaultProcess | None = None
        self._jobs = Jobs(spark, f"flux-{plan.query}")
        self._ingress = Jobs(spark, f"flux-{plan.query}-ingress")
        keys = Keys.make() if is_encrypted(spark, plan.settings) else None
        host = context_conf(spark).get("spark.driver.host", "127.0.0.1") or "127.0.0.1"
        context = spark.sparkContext
        application = f"{context.appName} ({context.applicationId})"
        self.server = Server(plan, need.workers, host, keys, plan.query, name, application, self.id)
        self.server.explain = self._explain
        #: The writer of versions into the checkpoint location; None: there is none.
        self.keeper = None if location is None else PlanKeeper(location)
        #: The newest plan, by which jobs that are started later go.
        self.running = RunningPlan(compiled, lambda: self.server.core.board.plan)
        self.streams = Streams(plan, sources, name, place, self.server, self._job_failed)
        ingress, workers = f"flux-{plan.query}-ingress", f"flux-{plan.query}"
        self.retries = Retries(
            spark, lambda: [ingress, *self.streams.job_groups()], workers, self._called, self._hopeless
        )
        self.elastic = WorkerTasks(spark, lambda: self.running.plan, self.server, self._jobs, self._room)
        self._unread_there = UnreadRows(plan, self._called, self.server.note_unread, self.server.note_unread_files)
        self._look_at = 0.0
        self._supervisor = threading.Thread(target=self._supervise, name=f"flux-query-{plan.query[:8]}", daemon=True)

    def start(self) -> None:
        """Start the run. Nothing is left running if this raises."""
        if self.keeper is not None:
            self.keeper.start(self.server.kept)
            self.server.keep_versions(self.keeper.keep, self.keeper.births)
        self.rendezvous = self.server.start()
        try:
            put_bar_away(self._spark)
            self.asked = self._ask_for_executors()
            if self._location is not None:
                self._vault = VaultProcess(self._plan, self.rendezvous, self._location, self._location_failed)
            self.elastic.start(self.rendezvous, list(range(self.need.workers)))
            self._unread_there.start()
            self._supervisor.start()
        except BaseException:
            self.server.stop()
            self._wind_up()
            raise

    def look_at_files(self, timeout: float) -> None:
        """Have the next report name the files that are left out by now."""
        self._unread_there.look_now(timeout)

    def error(self) -> FluxError | None:
        """Return the error that ended the query, None if nothing has gone wrong."""
        error = self.server.error
        if isinstance(error, QueryFailed) and self._input_failed is not None and self._input_failed not in str(error):
            # Spark may end all Python processes of an executor when it gives up a job, and their loss is heard first.
            return QueryFailed(f"{self._input_failed}. After that: {error}")
        return error

    def left(self) -> str:
        """Name the parts of an ending query that still run."""
        return ", ".join(self.streams.left() + self._jobs.join(0) + self._ingress.join(0)) or "controller"

    def cancel(self) -> None:
        """End the Spark jobs without waiting for them."""
        self._ingress.cancel()
        self._jobs.cancel()

    def _location_failed(self, reason: str) -> None:
        if self.keeper is not None:
            self.keeper.put_back()
        self.server.job_failed(f"the checkpoint location {self._location}", reason)

    # ---- task slots

    def _room(self, slots: int) -> Room:
        return room_for_workers(self.need, slots, running_queries.others(than=self._plan.query))

    @property
    def is_fed_by_spark(self) -> bool:
        """Spark tasks still have to read a DataFrame, or may be asked to fetch the output."""
        fetched = (stage.collects or isinstance(stage.sink, QueryReaders) for stage in self._plan.stages)
        return bool(self._unread) or self.streams.reads or any(fetched)

    def _ask_for_executors(self) -> str:
        """Log that workers wait for executors, and return that text. Spark asks for executors by itself while tasks wait
        (dynamic allocation). Empty if there are enough slots."""
        if not grows_on_demand(self._spark):
            return ""
        wanted = self.need.workers + self.need.spark_tasks
        there = live_slots(self._spark) - running_queries.others(than=self._plan.query).slots
        if wanted <= there:
            return ""
        asked = (
            f": {max(there, 0)} of {count(wanted, 'task slot')} are there, and Spark is asked for more (dynamic allocation). "
            f"They may take {self._plan.settings.workers_timeout:g} s (spark.flux.workers.timeout)"
        )
        log.warning("query %s waits for %s%s", self._called, count(self.need.workers, "worker"), asked)
        return asked

    # ---- reading

    @property
    def _plan(self) -> Plan:
        return self.running.plan

    def _read(self, sources: Mapping[int, Source]) -> None:
        """Start the Spark jobs that read DataFrames."""
        for index, source in sources.items():
            if isinstance(source, DataFrameSource):
                self._start_ingress(index, source)

    def grow(self, compiled: CompiledPlan, added: Mapping[int, Source]) -> None:
        """Go by a later plan that every process has confirmed, and read the sources that it has brought."""
        self._unread.update(index for index, source in added.items() if isinstance(source, DataFrameSource))
        self.running.take(compiled)
        self._unread_there.watch(compiled.plan.sources[index] for index in added)
        self._read(added)

    def shrink(self) -> None:
        """Go by a plan without the parts that were removed."""
        compiled = self.running.compiled
        self.running.take(compiled)
        self._unread &= set(compiled.sources)

    def _start_ingress(self, index: int, source: DataFrameSource) -> None:
        about = self._plan.sources[index]
        assert isinstance(about, DataFrameSourcePlan)
        name, cut_by = about.name, about.cut_by
        feed = ingress_function(self._plan, self.rendezvous, index)

        def planned() -> DataFrame:
            df = for_reading(source.dataframe, about.columns, self._plan.settings.batch_max_rows, cut_by)
            return df.mapInArrow(feed, "partition int, rows long")

        def read() -> list[Any]:
            if cut_by is None:
                return list(planned().collect())
            with cutting_by(source.dataframe.sparkSession, cut_by):
                df = planned()
                partitions_of(df)
            return list(df.collect())

        def done(rows: list[Any]) -> None:
            partitions = sorted(row.partition for row in rows)
            for edge in self._plan.edges_of_source(index):
                self.server.edge_complete(edge.id, partitions)
            self._unread.discard(index)

        edges = [edge.id for edge in self._plan.edges_of_source(index)]
        self._ingress.run(f"ingress of {name}", read, done, lambda what, why: self._job_failed(what, why, edges))

    def _job_failed(self, what: str, reason: str, edges: Collection[int] = ()) -> None:
        """Note that a job has failed. ``edges``: those that it feeds; if stages fail alone, the query goes on without their
        stages."""
        alone = bool(edges) and self._plan.settings.on_failure == "stage"
        if not alone and not self._cancelled and not reason.startswith(_OURS):
            self._input_failed = f"the Spark job '{what}' failed: {reason}"
        self.server.job_failed(f"the Spark job '{what}'", reason, edges)

    def _hopeless(self, what: str, reason: str) -> None:
        if not self._lacking:
            self._lacking = True
            self._job_failed(what, reason)

    # ---- from start to end

    def _supervise(self) -> None:
        """Start reading once the workers are there, and start workers that are asked for later. When the controller has sent
        all workers home, wait for them, cancel those that do not go, and close everything."""
        # Not earlier: ingress tasks that come first could take the slots that the workers need.
        while not self.server.started.wait(SLOT_LOOK_S):
            self._look_at_tasks()  # workers that lack a module never come
        if self.server.phase == "running":
            self._read(self.running.compiled.sources)
            self.streams.start(self.rendezvous, self._spark.sparkContext)
        while not self.server.ended.wait(SLOT_LOOK_S):
            self._look()
        self._look_at_input()  # Spark may have given up the input since the last look
        self._wind_up()

    def _look(self) -> None:
        """Look after streams and workers. A failure here is no reason to end a running query."""
        if session_stopped(self._spark):
            self.server.job_failed("Spark", STOPPED)
            return
        try:
            self.streams.look()
            self.elastic.look(self.rendezvous)
        except Exception as error:
            if not session_stopped(self._spark):
                log.warning("query %s: cannot look after its workers: %s", self._plan.query, error)
        self._look_at_tasks()

    def _look_at_tasks(self) -> None:
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + ASK_SPARK_S
            self._look_at_input(self.elastic.awaits_workers)

    def _look_at_input(self, workers: bool = True) -> None:
        try:
            self.retries.look(workers)
        except Exception as error:
            if not session_stopped(self._spark):
                log.warning("query %s: cannot look after its input: %s", self._plan.query, error)

    def _wind_up(self) -> None:
        """Close everything, once the controller has sent all workers home, or no worker has come."""
        patience_s = self._plan.settings.stop_timeout
        try:
            self._end_fetch()
            self._unread_there.end()
            self.streams.stop()
            still_reading = self._ingress.join(0.0 if self._lacking else 1.0)
            self._cancelled = True
            if still_reading:
                self._ingress.cancel()  # their rows are not wanted any more
            if self._jobs.join(1.0 if self._lacking else patience_s if self.server.error is None else 5.0):
                self._jobs.cancel()
                self._jobs.join(patience_s)
            self._ingress.join(patience_s)
            if self._vault is not None:
                self._vault.end()
            if self.keeper is not None:
                self.keeper.end(patience_s)
            if self._location is None:
                forget(self._plan)
        finally:
            self.server.close(10.0)
            put_bar_back(self._spark)
            running_queries.leave(self._plan.query)
            self.terminated.set()

    def _explain(self, error: FluxError) -> FluxError:
        """Replace an error that comes from Spark's end: executors that end with their session look as if they were lost."""
        if session_stopped(self._spark, ask_jvm=True):
            return QueryFailed(STOPPED)
        if isinstance(error, QueryTimeout) and self.asked:
            return QueryTimeout(
                f"{error} Spark was asked for more (dynamic allocation) and did not give enough in time"
            )
        return error
