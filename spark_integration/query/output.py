"""The output of a query in the program that started it: kept to the end as a DataFrame, or read by an iterator meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import DataFrame

from flux.dataflow.plan import Plan, StagePlan
from flux.dataflow.sink import offered
from flux.errors import FluxError, QueryFailed, QueryTimeout, UsageError
from flux.operators.user_code import text_of
from flux.shell.output_loops import Puller
from flux.shell.process import Stopped
from flux.tasks.output_pull import OutputPull, OutputSurvey, StageRemoved
from spark_integration.schema import for_spark
from spark_integration.session import session_stopped
from spark_integration.tasks.entry_points import egress_function
from spark_integration.tasks.jobs import reason_of
from spark_integration.tasks.worker_tasks import SLOT_LOOK_S

if TYPE_CHECKING:
    from spark_integration.query.query import Query


#: End of the name of a collecting stage. The name begins with that of the stage whose output it keeps.
SUFFIX = ".toDF"


def kept(plan: Plan, stage: str | None) -> StagePlan:
    """Return the collecting stage that keeps the output of the stage with this name. None: there must be one only."""
    found = {each.name.removesuffix(SUFFIX): each for each in plan.stages if each.collects}
    if not found:
        raise UsageError(
            "the query does not keep its output: start it with keep_output=True if its input ends; if it does not, end the "
            "flow with to_readers(), and query.rows() gives the output while the query runs"
        )
    if stage is None and len(found) == 1:
        return next(iter(found.values()))
    if stage is None:
        calls = " or ".join(f"toDF({name!r})" for name in found)
        raise UsageError(f"the query keeps the output of several stages, say which: {calls}")
    if stage not in found:
        names = ", ".join(found)
        raise UsageError(f"no output of a stage {text_of(stage, repr)} is kept for toDF(); there is that of {names}")
    return found[stage]


def fetch_all(query: Query, stage: StagePlan | None = None) -> DataFrame:
    """Return the output that this collecting stage of the query keeps, or the only such stage. All of it is there already."""
    stage = stage or kept(query.plan, None)
    struct, schema = for_spark(stage.schemas[0], f"stage {stage.name}")
    fetch = egress_function(query.plan, query.rendezvous, stage.id, schema)
    numbers = query.spark.range(0, stage.partitions, 1, stage.partitions)
    return numbers.mapInArrow(fetch, struct).localCheckpoint(eager=True)


class FetchedOutput:
    """The output that a query keeps, as a DataFrame (design: egress).

    The last stage feeds a collecting stage inside the workers; when the input has ended, Spark tasks fetch from there
    (``flux.shell.output_loops``). Fetching can be repeated, so a task may be retried. Spark then holds the rows like those of a
    local checkpoint, and the workers give their task slots back.

    The output of each stage is fetched once, and every further call gets the same DataFrame.
    The workers keep all of it until the last was fetched."""

    def __init__(self, query: Query) -> None:
        self._query = query
        self._fetched: dict[int, DataFrame] = {}  #: By the number of the collecting stage.
        self._one_at_a_time = threading.Lock()
        self._fetching = False

    @property
    def is_fetched(self) -> bool:
        """All output has been fetched."""
        return all(stage.id in self._fetched for stage in self._query.plan.stages if stage.collects)

    def get(self, stage: StagePlan) -> DataFrame:
        """Wait for the end of the input, fetch, and end the query if that was the last output. Raises the error that ended the
        query before, and ends the query if the wait is interrupted."""
        with self._one_at_a_time:
            if stage.id not in self._fetched:
                try:
                    self._query.wait_for_output()
                    self._fetched[stage.id] = self._fetch(stage)
                except BaseException:
                    self._query.stop()
                    raise
                if self.is_fetched:
                    self._query.stop()
            return self._fetched[stage.id]

    def _fetch(self, stage: StagePlan) -> DataFrame:
        query, context = self._query, self._query.spark.sparkContext
        self._fetching = True
        try:
            if query.phase == "finished":
                context.addJobTag(self._tag)
                return fetch_all(query, stage)
        except Exception as error:
            if (ended_by := query.exception()) is not None:
                raise ended_by from None
            if query.phase == "finished":
                raise QueryFailed(f"the output could not be fetched: {reason_of(error)}") from error
        except BaseException:  # Ctrl-C: only this job is given up
            context.cancelJobsWithTag(self._tag)
            raise
        finally:
            self._fetching = False
            if not session_stopped(query.spark):
                context.removeJobTag(self._tag)
        if (ended_by := query.exception()) is not None:
            raise ended_by
        raise UsageError(
            f"query {query.name or query.id} was stopped before its output was fetched: start the flow again"
        )

    @property
    def _tag(self) -> str:
        return f"flux-{self._query.id}-egress"

    def end_fetch(self) -> None:
        """Cancel a fetch: its tasks would ask for output that is gone, as often as Spark retries them."""
        spark = self._query.spark
        end = time.monotonic() + self._query.plan.settings.stop_timeout
        while self._fetching and time.monotonic() < end and not session_stopped(spark):
            spark.sparkContext.cancelJobsWithTag(self._tag)
            time.sleep(SLOT_LOOK_S)


#: Bytes of one answer, and of the output of each partition that may wait in the program.
ANSWER_BYTES = 1 << 20
#: Longest wait before the next look whether the query has ended, and longest wait for the workers' first answers.
ROWS_LOOK_S, FIRST_S = 0.2, 60.0
#: Longest wait before the next look whether the query knows that all was read.
LAST_S = 0.002


class OpenIterators:
    """Open iterators of ``Query.rows``, and how far each output was read. One iterator at a time for each output."""

    def __init__(self, query: Query) -> None:
        self._query = query
        self._lock = threading.RLock()  # an iterator may be collected, and closed, wherever objects are made
        self._open: set[int] = set()
        self._read: dict[int, dict[int, int]] = {}  # stage -> partition -> batches below this number were handed out

    def rows(self, stage: str | None) -> QueryRows:
        try:
            found = offered(self._query.plan, stage)
        except UsageError:
            if stage is not None and (failed := self._query.failure_of(stage)) is not None:
                raise failed from None
            raise
        if (error := self._query.exception()) is not None:
            raise error
        with self._lock:
            if found.id in self._open:
                raise UsageError(
                    f"an iterator over the output of stage {found.name} is open: go on with that, or close() it before you "
                    "ask for another"
                )
            through = self._read.get(found.id)
            over = self._query.phase in ("finished", "ended")
            if over and not self._query.was_read(found):
                raise UsageError(
                    f"query {self._query.name or self._query.id} was stopped, and with it went the output that was not read"
                )
            self._open.add(found.id)
        return QueryRows(self, self._query, found, through, over)

    def closed(self, stage: int, read: dict[int, int]) -> None:
        with self._lock:
            self._open.discard(stage)
            if read:
                self._read[stage] = read


class QueryRows(Iterator[pa.RecordBatch]):
    """Batches of the output, in order within each partition. The iterator ends when all has been read, or when the query is
    stopped or the stage removed. It raises the error of the query, or of a stage that has failed. A batch counts as read when it
    has been handed out: an iterator that is opened after ``close`` begins behind it. To be used by one thread at a time."""

    def __init__(
        self, outputs: OpenIterators, query: Query, stage: StagePlan, through: dict[int, int] | None, over: bool
    ) -> None:
        self._outputs = outputs
        self._query = query
        self._stage = stage
        self._through = through
        self._puller: Puller | None = None
        self._pulling: OutputPull | None = None
        self._over = over
        self._closed = False
        self._one_at_a_time = threading.Lock()

    def __next__(self) -> pa.RecordBatch:
        if not self._one_at_a_time.acquire(blocking=False):
            raise UsageError("another thread waits for the next batch of this iterator: use it in one thread at a time")
        try:
            batch = None if self._over else self._next()
            if batch is None:
                self._close()
                raise StopIteration
            return batch
        except FluxError as error:
            if not isinstance(error, QueryTimeout):
                self._close()
            raise
        finally:
            self._one_at_a_time.release()

    def _next(self) -> pa.RecordBatch | None:
        try:
            puller, pulling = self._begin()
            while not (pulling.over and self._query.was_read(self._stage)):
                if (got := pulling.take()) is not None:
                    return got.batch
                if self._query.phase == "ended":
                    raise Stopped("the query has ended")
                puller.turn(pulling, LAST_S if pulling.over else ROWS_LOOK_S)
        except Stopped:
            self._query.wait_for_end()
            if (error := self._query.exception()) is not None:
                raise error from None
        except StageRemoved:
            if (error := self._query.failure_of(self._stage)) is not None:
                raise error from None
        return None

    def _begin(self) -> tuple[Puller, OutputPull]:
        """Connect at the first call. The workers know where to go on, and may have to start before they answer."""
        if self._puller is None or self._pulling is None:
            schema, settings = self._stage.output_schema, self._query.plan.settings
            assert schema is not None
            if self._puller is None:
                self._puller = Puller(self._query.rendezvous, schema, settings.controller_timeout)
            begun = self._through or dict.fromkeys(range(self._stage.partitions), 0)
            survey = OutputSurvey(self._stage.id, begun)
            self._query.wait_until_running(settings.workers_timeout + FIRST_S)
            self._puller.until_over(survey, settings.controller_timeout)
            at = {partition: max(begun[partition], part.left) for partition, part in survey.parts.items()}
            self._pulling = OutputPull(self._stage.id, at, ANSWER_BYTES)
            if survey.table is not None:
                self._pulling.on_table(survey.table)
        return self._puller, self._pulling

    def close(self) -> None:
        """Read no more. Does nothing if the iterator is closed already."""
        if self._one_at_a_time.acquire(timeout=2 * ROWS_LOOK_S):
            try:
                self._close()
            finally:
                self._one_at_a_time.release()
        else:
            raise UsageError("another thread waits for the next batch of this iterator: close it there")

    def _close(self) -> None:
        if self._closed:
            return
        self._over = self._closed = True
        read = dict(self._through or {})
        if self._pulling is not None:
            self._pulling.settle()
            read = self._pulling.acknowledged
        if self._puller is not None:
            puller, self._puller = self._puller, None
            if self._pulling is not None:
                puller.say(self._pulling.last_words())
            puller.close()
        self._outputs.closed(self._stage.id, read)

    def __enter__(self) -> QueryRows:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self._close()
