"""The handle of a running query, in the manner of pyspark's StreamingQuery (design: public-api).

It is made and started by ``spark_integration.query.start``. The running parts behind it are in ``QueryRun``, changes while it
runs in ``Operations``, and kept output in ``FetchedOutput``.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from controller.course.beginnings import incomplete
from controller.course.plan_requests import failures
from controller.operate.all_available import AllAvailable
from controller.planning.compiled_plan import CompiledPlan
from controller.planning.explain import explain
from controller.report.progress import QueryProgress
from controller.text import count, technique
from flux.dataflow.plan import DataFrameSourcePlan, Plan, StagePlan
from flux.dataflow.sink import QueryReaders, guarantee
from flux.errors import FluxError, QueryTimeout
from flux.operators.user_code import text_of
from flux.shell.process import Rendezvous
from spark_integration.growing.additions import GrowingQuery
from spark_integration.query import running_queries
from spark_integration.query.checkpoint_location import CheckpointLocation
from spark_integration.query.interrupts import spare_queries
from spark_integration.query.operations import checked_timeout
from spark_integration.query.output import FetchedOutput, OpenIterators, QueryRows, kept
from spark_integration.query.run import QueryRun
from spark_integration.settings import Need

log = logging.getLogger("flux")

#: Time between two looks of ``processAllAvailable``: shorter than the interval of heartbeats, so that none is missed.
THROUGH_LOOK_S = 0.02
#: Time for which ``processAllAvailable`` waits, at its end, for a look at the files that are left out.
UNREAD_S = 5.0
#: Interval at which ``processAllAvailable`` logs the reason of its wait: a source that never pauses looks like a program that
#: hangs.
ALL_AVAILABLE_SAY_S = 10.0
#: After this time a wait for kept output logs its sources.
OUTPUT_SAY_S = 10.0


class Query(GrowingQuery):
    """Handle of a running flow, in the manner of pyspark's StreamingQuery; changes while it runs are in ``GrowingQuery``
    and ``Operations``."""

    def __init__(
        self,
        spark: SparkSession,
        compiled: CompiledPlan,
        need: Need,
        name: str | None,
        location: CheckpointLocation | None,
    ) -> None:
        """``location`` is where the query goes on when it is started again."""
        super().__init__()
        self._spark = spark
        self._name = name
        self._output = FetchedOutput(self)
        self._outputs = OpenIterators(self)
        self._run = QueryRun(spark, compiled, need, name, self._output.end_fetch, location)
        self._running = self._run.running
        self._server = self._run.server
        self._elastic = self._run.elastic
        self._server.add_flows_by(self._add_named, self.restart)

    def _start(self) -> None:
        """Start the query, once. Nothing is left running if this raises."""
        running_queries.enter(self)
        try:
            spare_queries(self._spark.sparkContext)
            self._run.start()
        except BaseException:
            running_queries.leave(self.id)
            raise

    # ---- identity and progress

    @property
    def id(self) -> str:
        """Id of the query. With a ``checkpointLocation``, it is the same each time that the query is started."""
        return self._plan.query

    @property
    def runId(self) -> str:  # noqa: N802
        """Id of this run. Without a ``checkpointLocation``, another run of the same flow is another query, with another ``id``
        too."""
        return self._run.id

    @property
    def name(self) -> str | None:
        """The name given at start, or None."""
        return self._name

    @property
    def isActive(self) -> bool:  # noqa: N802
        """A part of the query still runs."""
        return not self._run.terminated.is_set()

    @property
    def phase(self) -> str:
        """ "starting" (workers are awaited), "running", "finished" (all output is there) or "ended"."""
        return self._server.phase

    @property
    def status(self) -> dict[str, Any]:
        """The state of the query: ``message`` for people, ``isDataAvailable``: rows wait to be applied,
        ``isTriggerActive``: rows may flow. ``protection``: that of each stage in words, by the newest request. For a query
        with sinks also ``sinks``: the destination and the guarantee of each. ``notRead``: by source, input that came after
        the start, as new partitions of a topic. ``unreadFiles``: by source, files whose rows are not read: incomplete ones,
        and files that are left out."""
        phase, retries = self._server.phase, self._run.retries.text
        messages = {
            "starting": f"Waiting for {count(self._run.need.workers, 'worker')}{self._run.asked}",
            "running": "; ".join(["Processing rows", *filter(None, [retries, self._missing()]), *self._notices()]),
            "finished": "All output is there",
            "ended": f"Failed: {error.summary}" if (error := self._server.error) else self._how_it_ended(),
        }
        progress = self.lastProgress
        waiting = bool(progress and progress["backlog"]["slices"])
        wished = self._server.core.wished.stages
        status = {
            "message": messages[phase],
            "isDataAvailable": waiting,
            "isTriggerActive": phase == "running",
            "protection": {stage.name: technique(stage.replicas, stage.recovery) for stage in wished},
        }
        sinks = [(stage.name, stage.sink) for stage in self._plan.stages if stage.sink is not None]
        said = [f"{name} to {text_of(sink, repr)}, {guarantee(sink)}" for name, sink in sinks]
        sources = (progress or QueryProgress()).get("sources", ())
        for key in ("notRead", "unreadFiles"):
            if of_sources := {source["name"]: source[key] for source in sources if key in source}:
                status[key] = of_sources
        return status | ({"sinks": said} if sinks else {})

    def _how_it_ended(self) -> str:
        """Describe the end of a query that has not failed. Kept output is lost if the query is stopped before ``toDF``."""
        lost = any(stage.collects for stage in self._plan.stages) and not self._output.is_fetched
        return "Stopped" if self._server.core.unfinished or lost else "Finished: all input was read, all output is out"

    def _missing(self) -> str:
        """Describe inputs that are missing, and the results that are tentative for that; empty: none are."""
        progress = self.lastProgress or QueryProgress()
        return str(progress.get("availability", {}).get("message", ""))

    def _notices(self) -> list[str]:
        """Describe stages that have failed, stages with results that lack rows, because partitions have begun empty, and
        partitions that wait because a sink, or a reader, is slower than their stage."""
        progress = self.lastProgress or QueryProgress()
        stages = progress.get("stages", ())
        waiting = [(stage["name"], stage.get("waitForSink", 0)) for stage in stages]
        read = {stage.name for stage in self._plan.stages if isinstance(stage.sink, QueryReaders)}
        slow = [
            f"{count(number, 'partition')} of stage {name} {'waits' if number == 1 else 'wait'} for "
            f"{'its output to be read' if name in read else 'the sink'}"
            for name, number in waiting
            if number
        ]
        return [*failures(progress.get("plan", {}).get("failedStages", ())), *incomplete(stages), *slow]

    @property
    def lastProgress(self) -> QueryProgress | None:  # noqa: N802
        """The newest progress report, None before the first."""
        reports = self.recentProgress
        return reports[-1] if reports else None

    @property
    def recentProgress(self) -> list[QueryProgress]:  # noqa: N802
        """The last hundred progress reports, the oldest first."""
        return list(self._server.progress)

    @property
    def tasks(self) -> int:
        """Number of Spark tasks of its workers: one for each worker, also those that are still to come or have not gone yet."""
        return len(self._server.core.places.tasked)

    @property
    def is_fed_by_spark(self) -> bool:
        """Spark tasks still have to read a DataFrame, or may be asked to fetch the output: they need a slot."""
        return self._run.is_fed_by_spark

    def exception(self) -> FluxError | None:
        """Return the error that ended the query, None if nothing has gone wrong."""
        return self._run.error()

    def explain(self) -> None:
        """Print the plan that runs: sources, stages with keys, partitions and replicas, and policies; and the stages that have
        failed."""
        failed = (self.lastProgress or QueryProgress()).get("plan", {}).get("failedStages", ())
        print("\n".join([explain(self._plan, self._run.need.workers), *failures(failed)]))

    def __repr__(self) -> str:
        return f"<flux query {self._name or self.id}: {self.status['message']}>"

    # ---- waiting

    def wait_until_running(self, timeout: float) -> None:
        """Wait until the workers are there; raises the query's error, or QueryTimeout."""
        with self._server.awaited():
            if not self._server.started.wait(checked_timeout(timeout, 0)):
                raise QueryTimeout(f"query {self.id} has not started within {timeout:g} s")
            if (error := self.exception()) is not None:
                raise error

    def awaitTermination(self, timeout: float | None = None) -> bool | None:  # noqa: N802
        """Wait until the query has ended; raises its error if it failed. With a timeout in seconds: returns whether it ended.

        A query with ``keep_output=True`` has ended when all output is there. The output stays until ``toDF`` or ``stop``,
        and so do the workers, which keep it, with their task slots."""
        timeout = None if timeout is None else checked_timeout(timeout)
        end = None if timeout is None else time.monotonic() + timeout
        with self._server.awaited():
            ended = self._server.finished.wait(timeout)
            if ended and self._server.phase != "finished":  # the query leaves nothing behind, and that takes a moment
                ended = self._run.terminated.wait(None if end is None else max(end - time.monotonic(), 0))
        if ended and (error := self.exception()) is not None:
            raise error
        return ended if timeout is not None else None

    def processAllAvailable(self, timeout: float | None = None) -> None:  # noqa: N802
        """Wait until all rows that the sources had to give at the time of the call have passed all stages; as in pyspark,
        meant for tests. A DataFrame gives all its rows; a source in the workers has given all when it yields None or ends.
        If all sources come to an end, the wait lasts until the query has ended (with ``keep_output=True`` until all output
        is there). A source that always has more keeps this waiting; every ten seconds a line in the log names it.

        Raises the query's error. timeout: seconds, default no limit; QueryTimeout names the rest."""
        timeout = None if timeout is None else checked_timeout(timeout)
        end = None if timeout is None else time.monotonic() + timeout
        self._run.streams.process_all_available(end)
        waiting, say_at = AllAvailable(self._plan), time.monotonic() + ALL_AVAILABLE_SAY_S
        while what := self._server.look(lambda: waiting.look(self._server.core.board)):
            if time.monotonic() >= say_at:
                say_at += ALL_AVAILABLE_SAY_S
                log.warning(
                    "query %s: processAllAvailable() waits; this is still to come: %s", self._name or self.id, what
                )
            if end is not None and time.monotonic() >= end:
                raise QueryTimeout(f"after {timeout:g} s this is still to come: {what}")
            self._server.finished.wait(THROUGH_LOOK_S)
        left = UNREAD_S if end is None else min(UNREAD_S, end - time.monotonic())
        if left > 0:
            self._run.look_at_files(left)
        if self._server.phase == "ended":
            self.awaitTermination(None if end is None else max(end - time.monotonic(), 0.001))

    # ---- its end

    def stop(self, timeout: float | None = None) -> None:
        """End the query and wait until nothing of it is left: no task, thread, socket or file.

        timeout: seconds, default twice ``spark.flux.stop.timeout``. QueryTimeout names the parts that still run."""
        patience = self._plan.settings.stop_timeout
        limit = 2 * patience + 10 if timeout is None else checked_timeout(timeout, 0)
        end = time.monotonic() + limit
        # First: a batch that loses its workers would look as if it failed.
        self._run.streams.end(min(patience, limit))
        self._server.stop()
        if not self._run.terminated.wait(max(end - time.monotonic(), 0)):
            raise QueryTimeout(f"query {self.id} is still ending after {limit:g} s: {self._run.left()}")

    def _cancel(self, timeout: float) -> None:
        """Cancel the Spark tasks of a query that does not stop, and wait at most ``timeout`` seconds."""
        self._run.cancel()
        self._run.terminated.wait(timeout)

    # ---- its output

    def toDF(self, stage: str | None = None) -> DataFrame:  # noqa: N802
        """Wait for the end of the input and return the output as a DataFrame, held by Spark like a local checkpoint; the query
        ends when all its output was fetched. A second call returns the same DataFrame. For a query that was started with
        ``keep_output=True``; UsageError if it was stopped before its output was fetched.

        stage: name of the stage whose output is meant, if there are several."""
        return self._output.get(kept(self._plan, stage))

    def rows(self, stage: str | None = None) -> QueryRows:
        """Return the output of a flow that ends in ``to_readers()``, while the query runs: an iterator of pyarrow.RecordBatch,
        each row once, in order within each partition, even if workers are lost meanwhile. It waits for more until the query
        ends, and raises the query's error.

        stage: name of the stage whose output is meant, if there are several. A batch counts as read when it has been handed
        out. One iterator at a time: ``close()`` it, and the next one goes on behind it. UsageError for a query that was
        stopped before all was read."""
        return self._outputs.rows(stage)

    def was_read(self, stage: StagePlan) -> bool:
        """Tell whether the output of a stage was read to its end."""
        unfinished = tuple(self._server.core.unfinished)  # another thread changes them
        return not any(key.stage == stage.id for key in unfinished)

    def job_groups_of_streams(self) -> list[str]:
        """Return the job groups of Spark's streaming queries that feed this query. It is not known which streaming queries of
        the program write into it, so all of them may."""
        outside = self._spark.streams.active if self._run.streams.fed_from_outside else []
        return self._run.streams.job_groups() + [str(streaming.runId) for streaming in outside]

    def wait_for_end(self) -> None:
        """Wait for the end of a query that is ending, at most three times the time-out of a stop."""
        self._run.terminated.wait(3 * self._plan.settings.stop_timeout)

    def wait_for_output(self) -> None:
        """Wait until all output is there (or the query has failed: raises its error). A source that may never end is named in
        the log after a while: such a wait looks like a program that hangs."""
        with self._server.awaited():
            if not self._server.finished.wait(OUTPUT_SAY_S) and (sources := self._without_known_end()):
                log.warning(
                    "query %s: toDF(), collect() and show() give output when the input has ended, and wait for the end of %s. "
                    "If it never comes, interrupt this call; end the flow with to_readers() for query.rows(), or give it a sink",
                    self._name or self.id, ", ".join(sources),
                )  # fmt: skip
            self._server.finished.wait()
            if self._server.error is not None:
                self.wait_for_end()
                raise self.exception() or self._server.error

    def _without_known_end(self) -> list[str]:
        """Return the sources that are read in the workers or by Structured Streaming: it is not known whether they end."""
        return [source.name for source in self._plan.sources if not isinstance(source, DataFrameSourcePlan)]

    @property
    def plan(self) -> Plan:
        return self._plan

    @property
    def spark(self) -> SparkSession:
        return self._spark

    @property
    def rendezvous(self) -> Rendezvous:
        return self._run.rendezvous
