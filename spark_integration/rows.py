"""The output of a running query as an iterator in the program that started it (design: readers)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

import pyarrow as pa

from flux.dataflow.plan import StagePlan
from flux.dataflow.readers import offered
from flux.errors import FluxError, QueryTimeout, UsageError
from flux.host.pulling import Pulling, Survey
from flux.shell.loop import Stopped
from flux.shell.pull_loop import Puller

if TYPE_CHECKING:
    from spark_integration.query import Query

#: Bytes of one answer, and of the output of each partition that may wait in the program.
ANSWER_BYTES = 1 << 20
#: Longest wait before the next look whether the query has ended, and longest wait for the workers' first answers.
LOOK_S, FIRST_S = 0.2, 60.0
#: Longest wait before the next look whether the query knows that all was read.
LAST_S = 0.002


class Outputs:
    """Open iterators of ``Query.rows``, and how far each output was read. One iterator at a time for each output."""

    def __init__(self, query: Query) -> None:
        self._query = query
        self._lock = threading.RLock()  # an iterator may be collected, and closed, wherever objects are made
        self._open: set[int] = set()
        self._read: dict[int, dict[int, int]] = {}  # stage -> partition -> batches below this number were handed out

    def rows(self, stage: str | None) -> Rows:
        found = offered(self._query.plan, stage)
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
        return Rows(self, self._query, found, through, over)

    def closed(self, stage: int, read: dict[int, int]) -> None:
        with self._lock:
            self._open.discard(stage)
            if read:
                self._read[stage] = read


class Rows(Iterator[pa.RecordBatch]):
    """Batches of the output, in order within each partition. The iterator ends when all has been read, or when the query is
    stopped; it raises the query's error. A batch counts as read when it has been handed out: an iterator that is opened
    after ``close`` begins behind it. To be used by one thread at a time."""

    def __init__(
        self, outputs: Outputs, query: Query, stage: StagePlan, through: dict[int, int] | None, over: bool
    ) -> None:
        self._outputs = outputs
        self._query = query
        self._stage = stage
        self._through = through
        self._puller: Puller | None = None
        self._pulling: Pulling | None = None
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
                puller.turn(pulling, LAST_S if pulling.over else LOOK_S)
        except Stopped:
            self._query.wait_for_end()
            if (error := self._query.exception()) is not None:
                raise error from None
        return None

    def _begin(self) -> tuple[Puller, Pulling]:
        """Connect at the first call. The workers know where to go on, and may have to start before they answer."""
        if self._puller is None or self._pulling is None:
            schema, settings = self._stage.output_schema, self._query.plan.settings
            assert schema is not None
            if self._puller is None:
                self._puller = Puller(self._query.rendezvous, schema, settings.controller_timeout)
            begun = self._through or dict.fromkeys(range(self._stage.partitions), 0)
            survey = Survey(self._stage.id, begun)
            self._query.wait_until_running(settings.workers_timeout + FIRST_S)
            self._puller.until_over(survey, settings.controller_timeout)
            at = {partition: max(begun[partition], part.left) for partition, part in survey.parts.items()}
            self._pulling = Pulling(self._stage.id, at, ANSWER_BYTES)
            if survey.table is not None:
                self._pulling.on_table(survey.table)
        return self._puller, self._pulling

    def close(self) -> None:
        """Read no more. Does nothing if the iterator is closed already."""
        if self._one_at_a_time.acquire(timeout=2 * LOOK_S):
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

    def __enter__(self) -> Rows:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self._close()
