"""The streaming queries of Spark that feed the sources of a query: started, watched and stopped together with it (design:
micro-batches)."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from py4j.clientserver import ClientServer
from pyspark import InheritableThread, SparkContext
from pyspark.sql import DataFrame, SparkSession

from controller.operate.all_available import AllAvailable
from controller.server import Server
from flux.dataflow.plan import Plan, StreamSourcePlan
from flux.dataflow.source import Source, StreamSource
from flux.errors import QueryFailed, QueryTimeout, UsageError
from flux.shell.process import Rendezvous
from flux.vault.location import Place
from flux.vault.plan_without_code import without_code
from flux.windows.window import NEVER
from spark_integration.session import set_for_bulk_transfer
from spark_integration.streaming import ingress_file
from spark_integration.streaming.stream_ends import StreamEnds, quoted, watermark_of
from spark_integration.streaming.table_refresh import TableReader, TableRefresh
from spark_integration.tasks.entry_points import REACHED, micro_batch_function
from spark_integration.tasks.jobs import reason_of

log = logging.getLogger("flux")


#: Operators of streaming DataFrames that keep no state in Spark's checkpoint.
STATELESS = {
    "EventTimeWatermark", "Filter", "Generate", "LocalLimit", "MapInArrow", "MapInPandas", "Project", "PythonMapInArrow",
    "Repartition", "RepartitionByExpression", "StreamingRelation", "StreamingRelationV2", "SubqueryAlias", "Union",
}  # fmt: skip


def is_stateless(streaming: DataFrame) -> bool:
    """Tell whether a streaming DataFrame keeps no state. A projection behind one that does may change the columns of
    the state, with which Spark would not go on from its checkpoint."""
    levels = json.loads(streaming._jdf.queryExecution().analyzed().toJSON())
    return {str(each["class"]).rsplit(".", 1)[-1] for each in levels} <= STATELESS


def some_columns(df: DataFrame, columns: Sequence[int] | None) -> DataFrame:
    """Return these columns of a DataFrame, by position, under names of their own; None: all. ``mapInArrow`` looks columns up by
    name, and finds none whose name has a dot or is there twice."""
    names = [f"c{position}" for position in range(len(df.columns))]
    return df.toDF(*names).select([names[at] for at in range(len(names)) if columns is None or at in columns])


#: Text by which Spark knows that a batch was interrupted because its streaming query is stopped, which is no failure.
INTERRUPTED = "py4j.protocol.Py4JJavaError: An error occurred while calling collect: java.lang.InterruptedException"
#: Logs of py4j, with and without a thread of the JVM for each of Python.
PY4J_LOGS = ("py4j.clientserver", "py4j.java_gateway")
#: Time between two looks whether a call of pyspark has returned.
LOOK_S = 0.05


class Interrupted(QueryFailed):
    """Error in a batch whose streaming query is stopped."""


def _is_news(record: logging.LogRecord) -> bool:
    """Filter the log of py4j, which has the errors of functions called by Spark, with their tracebacks, even if the function
    only was stopped."""
    return not (record.exc_info and isinstance(record.exc_info[1], Interrupted))


class Streams:
    """Streaming queries of one run. ``start`` them once the workers are there; ``look`` now and then; ``stop`` them before the
    workers go.

    Spark calls ``foreachBatch`` for every micro-batch, and that runs one Spark job, whose tasks send the rows. The call
    returns when all consumers have applied them, and Spark commits the batch then."""

    def __init__(
        self,
        plan: Plan,
        sources: Mapping[int, Source],
        name: str | None,
        location: Place | None,
        server: Server,
        failed: Callable[[str, str, Collection[int]], None],
    ) -> None:
        """``location`` is the checkpoint location of the query; ``failed`` is called with a description, a reason, and the
        edges that nothing feeds any more; none: it concerns the query."""
        self._plan = plan
        self._name = name
        self._location = location
        self._server = server
        self._failed = failed
        self._tables = [
            TableRefresh(plan, i, TableReader(plan, i, source.dataframe), location, server)
            for i, source in sources.items()
            if isinstance(source, StreamSource) and plan.sources[i].refresh_us
        ]
        self._given = [
            (i, source)
            for i, source in sources.items()
            if isinstance(source, StreamSource) and not plan.sources[i].refresh_us
        ]
        #: No other source may have more when these have ended.
        self._no_other_source = all(
            isinstance(source, StreamSource) and source.dataframe is not None for source in sources.values()
        )
        #: All sources but the tables come to their ends.
        self._all_end = not any(source.endless for source in plan.sources)
        self._running: dict[int, Any] = {}
        self._temporary: list[str] = []
        #: By it ``df.writeStream.format("flux")`` finds this query.
        self._ingress_file: Path | None = None
        self._started = threading.Event()
        self._stopping = threading.Event()
        self._stopping_when_through: AllAvailable | None = None
        #: By source: the call that stops its stream.
        self._stops: dict[int, Call] = {}
        self._stop_once = threading.Lock()

    @property
    def reads(self) -> bool:
        """Spark tasks read for a source, now or later."""
        return bool(self._given or self._tables)

    def start(self, rendezvous: Rendezvous, context: SparkContext) -> None:
        """Start the streaming queries. A failure ends the query."""
        for name in PY4J_LOGS:
            logging.getLogger(name).addFilter(_is_news)  # it is added once, even if this is called again
        try:
            if any(source.dataframe is None for _, source in self._given):
                self._ingress_file = ingress_file.write(self._plan, self._name, rendezvous)
            for index, source in self._given:
                if source.dataframe is not None and not self._stopping.is_set():
                    self._running[index] = self._start(index, source, rendezvous)
            for table in self._tables:
                table.start(rendezvous, context)
        except Exception as error:
            if not self._stopping.is_set():
                self._failed("start of Spark's streaming query", reason_of(error), ())
        finally:
            self._started.set()

    def _start(self, index: int, source: StreamSource, rendezvous: Rendezvous) -> Any:
        assert source.dataframe is not None
        about, how = self._plan.sources[index], source.how
        assert isinstance(about, StreamSourcePlan)
        streaming, columns = source.dataframe, about.columns
        if columns is not None and is_stateless(streaming):
            streaming, columns = some_columns(streaming, columns), None
        prepared: list[int] = []  # the number of the first batch, once the session is set up for batches
        plan, ends = without_code(self._plan), StreamEnds(self._location, about.name)
        self._tell_watermark(index, ends)

        def each(batch: DataFrame, number: int) -> None:
            if not prepared:  # its session is the same for all batches
                set_for_bulk_transfer(batch, self._plan.settings.batch_max_rows)
                prepared.append(number)
            numbered = some_columns(batch, columns)
            try:
                again = ends.begins(number, numbered._jdf.queryExecution().toRdd().getNumPartitions())
                watermark = watermark_of(about.event_time, ends.newest_before(number))
                feed = micro_batch_function(plan, rendezvous, index, ends.before(number), again, watermark)
                ends.note(number, numbered.mapInArrow(feed, REACHED).collect())
                self._tell_watermark(index, ends)
            except Exception as error:
                # Short: Spark searches the text of this error with a regular expression that is recursive.
                if self._stopping.is_set():
                    raise Interrupted(INTERRUPTED) from None
                raise QueryFailed(reason_of(error)) from None

        writer = streaming.writeStream.foreachBatch(each).outputMode(how.output_mode)
        writer = writer.queryName(f"{self._name or self._plan.query}: {about.name}")
        if how.trigger:
            writer = writer.trigger(**dict(how.trigger))
        return writer.option("checkpointLocation", self._checkpoint(about.name, how.checkpoint)).start()

    def _tell_watermark(self, index: int, ends: StreamEnds) -> None:
        """Tell the stages how far the event time of the source is behind its applied batches."""
        watermark = watermark_of(self._plan.sources[index].event_time, ends.newest)
        for edge in self._plan.edges_of_source(index):
            if edge.states and watermark != NEVER:
                self._server.edge_watermark(edge.id, watermark)
        if self._plan.sources[index].event_time is not None:
            self._server.micro_batches_applied(index, watermark, ends.late)

    def _checkpoint(self, name: str, given: str | None) -> str:
        where = checkpoint_of(name, given, self._location)
        if where is None:
            where = tempfile.mkdtemp(prefix="flux-stream-")
            self._temporary.append(where)
        return where

    # ---- while they run

    def job_groups(self) -> list[str]:
        """Return the groups of the Spark jobs that run micro-batches of this run's streaming queries."""
        running = [str(running.runId) for running in list(self._running.values())]
        return running + [table.group for table in self._tables]

    @property
    def fed_from_outside(self) -> bool:
        """Streaming queries that the program starts by itself write into this query."""
        return any(source.dataframe is None for _, source in self._given)

    def look(self) -> None:
        """Look after the streaming queries. A failed one ends the query; one that has ended is the end of its source."""
        for index, running in list(self._running.items()):
            if running.isActive or self._stopping.is_set():
                continue
            del self._running[index]
            error = running.exception()
            if error is not None:
                edges = [edge.id for edge in self._plan.edges_of_source(index)]
                name = self._plan.sources[index].name
                self._failed(f"Spark's streaming query for source {name}", reason_of(error), edges)
            elif self._location is None:
                for edge in self._plan.edges_of_source(index):
                    self._server.edge_complete(edge.id, [])
            elif not self._running and self._no_other_source:
                self._stopping_when_through = AllAvailable(self._plan)
        self._pause()
        if self._tables and self._all_end and self._tables[0].others_ended():
            for table in self._tables:
                table.complete()
            self._all_end = False

    def _pause(self) -> None:
        """Stop the query once the rows have passed all stages. All available rows were read, and the query goes on another
        time, so it is stopped and not finished."""
        if self._stopping_when_through is None or self._server.phase != "running":
            return
        waiting = self._stopping_when_through
        if not self._server.look(lambda: waiting.look(self._server.core.board)):
            self._stopping_when_through = None
            self._server.stop()

    def process_all_available(self, end: float | None) -> None:
        """Wait until Spark has given all rows that its sources had at the time of the call. QueryTimeout at the time ``end``."""
        while self._given and not (self._started.wait(LOOK_S) or self._server.ended.is_set()):
            _check_time(end, "Spark's streaming queries have not started")
        calls = [Call(running.processAllAvailable) for running in list(self._running.values())]
        try:
            while any(call.is_alive() for call in calls) and not self._server.ended.is_set():
                _check_time(end, "Spark has not given all rows of its streaming queries")
                next(call for call in calls if call.is_alive()).join(LOOK_S)
        finally:
            for call in calls:
                call.interrupt()

    # ---- their end

    def left(self) -> list[str]:
        """Name the streaming queries that Spark was told to stop, and has not stopped yet."""
        return [
            f"Spark's streaming query for source {self._plan.sources[index].name}"
            for index, call in list(self._stops.items())
            if call.is_alive()
        ] + [table.group for table in self._tables if table.left]

    def end(self, within: float) -> None:
        """Stop the streaming queries: Spark ends its present batch, and repeats it another time. Waits for that at most
        ``within`` seconds."""
        end = time.monotonic() + within
        self._stopping.set()
        with self._stop_once:
            for index, running in list(self._running.items()):
                if index not in self._stops:
                    self._stops[index] = Call(running.stop)
        for table in self._tables:
            table.end(max(end - time.monotonic(), 0))
        for call in list(self._stops.values()):
            call.join(max(end - time.monotonic(), 0))

    def stop(self) -> None:
        """Stop them, and remove their files."""
        self.end(self._plan.settings.stop_timeout)
        for where in self._temporary:
            shutil.rmtree(where, ignore_errors=True)
        if self._ingress_file is not None:
            self._ingress_file.unlink(missing_ok=True)


class Call:
    """A call of pyspark, which has no time limit, in a thread of its own. Its errors are dropped: ``look`` learns of them as
    well."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._java: Any = None
        self._lock = threading.Lock()
        self._thread: threading.Thread = InheritableThread(target=self._run, name="flux-streaming", daemon=True)
        self.is_alive, self.join = self._thread.is_alive, self._thread.join
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(Exception):
            context = SparkContext._active_spark_context
            if context is not None and isinstance(context._gateway, ClientServer):
                # Each thread of Python has one of its own in the JVM, which waits in its place.
                self._java = context._jvm.java.lang.Thread.currentThread()
            self._call()
        with self._lock:  # from here on the thread of the JVM may have another task
            self._java = None

    def interrupt(self) -> None:
        """End a wait in the JVM, whose thread would stay there until the streaming query ends."""
        with self._lock, contextlib.suppress(Exception):
            if self._java is not None:
                self._java.interrupt()


def _check_time(end: float | None, what: str) -> None:
    if end is not None and time.monotonic() >= end:
        raise QueryTimeout(f"the time is over, and {what}")


def checkpoint_of(name: str, given: str | None, location: Place | None) -> str | None:
    """Return the place of Spark's own checkpoint; None: a temporary directory."""
    if given is not None or location is None:
        return given
    where = location.uri_of(f"stream-{quoted(name)}")
    if where is None:
        raise UsageError(
            f"source {name}: say where Spark keeps its own checkpoint, with flux.stream(..., checkpoint=...). Beside "
            f"checkpointLocation={str(location)!r} it cannot be: Spark reaches object stores by file systems and "
            "credentials of its own"
        )
    return where


def check_checkpoints(
    spark: SparkSession, plan: Plan, sources: Mapping[int, Source], location: Place | None, new: bool
) -> None:
    """Raise UsageError if Spark would go on behind batches that the state of the query does not have. ``new``: it has no
    state."""
    if not new:
        return
    for index, source in sources.items():
        if not isinstance(source, StreamSource) or source.dataframe is None or plan.sources[index].refresh_us:
            continue
        where = checkpoint_of(plan.sources[index].name, source.how.checkpoint, location)
        if where is not None and (last := _last_commit(spark, where)) is not None:
            raise UsageError(
                f"source {plan.sources[index].name}: checkpoint {where!r} has batches through {last}, and their rows are not in "
                "the state of this query, which is new. Give the checkpointLocation of the query that has read them, or another "
                "checkpoint, with which Spark begins anew"
            )


def _last_commit(spark: SparkSession, checkpoint: str) -> int | None:
    """Return the last batch that Spark has committed there."""
    jvm: Any = spark._jvm
    path = jvm.org.apache.hadoop.fs.Path(f"{checkpoint}/commits")
    files = path.getFileSystem(spark.sparkContext._jsc.hadoopConfiguration())
    if not files.exists(path):
        return None
    names = [str(status.getPath().getName()) for status in files.listStatus(path)]
    return max((int(name) for name in names if name.isdigit()), default=None)
