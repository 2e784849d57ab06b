"""Tables that are read anew while a query runs: read, kept, and sent as micro-batches, version by version (design:
refreshed-lookup).

Law: a version is kept before anything of it is sent, and the next one is not read before all consumers have applied it and the
stages were told. So a version that was begun is sent again with the same rows, by this program or by the next one that goes on
from the checkpoint location, and nothing needs an older one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark import InheritableThread, SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from controller.server import Server
from flux.dataflow.plan import Plan, StreamSourcePlan
from flux.errors import FluxError, QueryFailed, UsageError
from flux.operators.user_code import text_of
from flux.shell.process import Rendezvous
from flux.vault.location import Place
from flux.vault.plan_without_code import without_code
from flux.windows.window import FIRST_VERSION
from spark_integration.query.lookup_tables import OR_RAISE, read_table
from spark_integration.streaming.stream_ends import StreamEnds
from spark_integration.streaming.table_versions import (
    KeptVersions,
    RefreshSchedule,
    Version,
    key_twice,
    others_ended,
    with_number,
)
from spark_integration.tasks.entry_points import table_function
from spark_integration.tasks.jobs import reason_of

log = logging.getLogger("flux")

#: Seconds between two looks whether it is time, and before a version that could not be sent is sent again.
LOOK_S, AGAIN_S = 0.1, 2.0
#: Spark jobs that try to send a version, each with several attempts of Spark's own.
TRIES = 5


class TableReader:
    """The DataFrame of a table, which is read again and again with the columns that the plan looks at."""

    def __init__(self, plan: Plan, source: int, dataframe: DataFrame) -> None:
        about = plan.sources[source]
        assert isinstance(about, StreamSourcePlan)
        self._dataframe, self._bytes_max = dataframe, plan.settings.lookup_max_bytes
        self._columns = None if about.columns is None else about.columns[:-1]  # the last one is that of the version
        #: By relation of the DataFrame: whether it has had files.
        self._has_had: list[bool] = []

    def __call__(self) -> pa.Table:
        """Read the rows. UsageError: they cannot be read, or are too many. Spark lists the files of a DataFrame once, when it is
        made, and lists none of a folder that is gone when it lists them again: the table would be empty. So a relation that has
        lost all of its files cannot be read."""
        try:
            plan = self._dataframe._jdf.queryExecution().analyzed()
            has_had = self._has_had or has_files(plan)
            plan.refresh()
            has = has_files(plan)
        except (Py4JError, PySparkException) as error:
            raise UsageError(f"it cannot be read: {reason_of(error)}") from error
        self._has_had = [before or now for before, now in zip(has_had, has, strict=True)]
        if has != self._has_had:
            raise UsageError("it cannot be read: its files are gone")
        return read_table(self._dataframe, self._bytes_max, "it", OR_RAISE, self._columns)


def has_files(plan: Any) -> list[bool]:
    """Tell of each relation of a logical plan of Spark whether it has files. One that has none by its kind has none."""
    leaves, found = plan.collectLeaves(), []
    for at in range(leaves.size()):
        try:
            found.append(len(leaves.apply(at).relation().location().inputFiles()) > 0)
        except Py4JError:  # it has no such methods
            found.append(False)
    return found


class TableRefresh:
    """The readings of one table, in a thread of its own. ``read``: reads the DataFrame; FluxError: it cannot be read, or is too
    large."""

    def __init__(
        self,
        plan: Plan,
        source: int,
        read: Callable[[], pa.Table],
        place: Place | None,
        server: Server,
    ) -> None:
        """``place``: the checkpoint location of the query; None: it has none."""
        about = plan.sources[source]
        assert isinstance(about, StreamSourcePlan)
        self._plan, self._source, self._about, self._read, self._server = plan, source, about, read, server
        self._ends, self._versions = StreamEnds(place, about.name), KeptVersions(place, about.name)
        every_s, now = about.refresh_us / 1e6, time.monotonic()
        # The version of an earlier start may be old: then the table is read at once.
        first = self._ends.begun < 0
        self._schedule = RefreshSchedule(every_s, now + every_s if first else now, now if first else None)
        #: The query ends; and no row is left that could look anything up.
        self._ending, self._completing = threading.Event(), threading.Event()
        #: The groups of the Spark jobs that send a version, and that read the table.
        self.group = f"flux-{plan.query}-table-{source}"
        self._reading = f"{self.group}-read"
        self._thread: threading.Thread | None = None

    def start(self, rendezvous: Rendezvous, context: SparkContext) -> None:
        self._rendezvous, self._context = rendezvous, context
        self._thread = InheritableThread(target=self._run, name=f"flux-table-{self._about.name}", daemon=True)
        self._thread.start()

    @property
    def left(self) -> bool:
        """The thread has not ended yet."""
        return self._thread is not None and self._thread.is_alive()

    def end(self, within: float) -> None:
        """End the readings: no later version comes. A version that is being sent is given up."""
        self._ending.set()
        if self._thread is not None:
            self._cancel(self._reading, self.group)
            self._thread.join(within)

    def _cancel(self, *groups: str) -> None:
        for group in groups:
            try:
                self._context.cancelJobGroup(group)
            except (Py4JError, AttributeError, OSError) as error:  # Spark was stopped, and its jobs with it
                log.debug("jobs of %s are not cancelled: %s", group, error)

    def others_ended(self) -> bool:
        """Tell whether no row is left that could be looked up."""
        return self._server.look(lambda: others_ended(self._plan, self._server.core.board))

    def complete(self) -> None:
        """End the table, because no row is left that could look anything up in it: when the version that is being sent, if there
        is one, has been applied. Its streams are known by then."""
        self._completing.set()
        self._cancel(self._reading)

    # ---- in the thread

    def _run(self) -> None:
        try:
            self._refresh()
            if self._completing.is_set() and not self._ending.is_set():
                for edge in self._plan.edges_of_source(self._source):
                    self._server.edge_complete(edge.id, [])
        except Exception as error:
            if not self._ending.is_set():
                self._fail(reason_of(error))

    def _refresh(self) -> None:
        """Read and send versions until the end."""
        if self._ends.begun < 0:
            self._ends.begins(0, 1)
        self._tell(0)
        version = self._begun()
        while True:
            if version is not None and not self._completing.is_set():
                self._send(version)
            if not self._is_time():
                return
            version = self._new(self._next)

    @property
    def _next(self) -> int:
        """The number of the next version: that with which the query begins is number 0."""
        return max(self._ends.batch, 0) + 1

    def _begun(self) -> Version | None:
        """Return the newest version of an earlier start, which is sent again: it was begun, and perhaps not applied; or it was
        applied, and perhaps no stage was told. None: there is none."""
        try:
            found = self._versions.kept(self._next)
            return self._versions.kept(self._ends.batch) if found is None and self._ends.batch > 0 else found
        except (OSError, pa.ArrowInvalid) as error:
            if self._ends.begun < self._next:  # it is not needed
                return None
            raise QueryFailed(f"version {self._next}, which was begun, cannot be read: {text_of(error)}") from error

    def _is_time(self) -> bool:
        """Wait until the table is to be read. False: it is not, because the table ends."""
        while not self._ending.wait(LOOK_S) and not self._completing.is_set():
            if time.monotonic() >= self._schedule.due_at:
                return True
        return False

    def _new(self, number: int) -> Version | None:
        """Read the next version and keep it. None: the table stays as it is."""
        self._context.setJobGroup(self._reading, f"table {self._about.name}")
        try:
            version = with_number(self._read(), self._about.schema, number)
            reason = key_twice(self._plan, self._source, version)
            if not reason:
                self._versions.keep(version)
                self._schedule.read(time.monotonic())
                return version
        except (FluxError, OSError, pa.ArrowException) as error:
            reason = text_of(error)
        ended = self._ending.is_set() or self._completing.is_set()
        if not ended and (warning := self._schedule.failed(time.monotonic(), reason)):
            self._warn(warning)
        return None

    def _send(self, version: Version) -> None:
        """Send a version until all consumers have applied it, and tell the stages that it counts."""
        self._context.setJobGroup(self.group, f"table {self._about.name}")
        plan, tries = without_code(self._plan), 0
        out = pa.BufferOutputStream()
        with pa.ipc.new_stream(out, version.rows.schema) as writer:
            writer.write_table(version.rows)
        while not self._ending.is_set():
            again = self._ends.begins(version.number, 1)
            rows = self._context.broadcast(out.getvalue().to_pybytes())
            feed = table_function(
                plan, self._rendezvous, self._source, rows, self._ends.before(version.number), again, version.number
            )
            try:
                reached = self._context.parallelize([0], 1).mapPartitions(feed).collect()
            except Exception as error:
                if self._ending.wait(AGAIN_S):
                    return
                tries += 1
                if tries == TRIES:
                    raise QueryFailed(f"version {version.number} cannot be sent: {reason_of(error)}") from error
                self._warn(f"version {version.number} could not be sent, and is sent again: {reason_of(error)}")
                continue
            finally:
                rows.destroy()  # it has a file of its own until then
            self._ends.note(version.number, reached)
            self._tell(version.number)
            return

    def _tell(self, number: int) -> None:
        """Tell the stages the number of a version that all of their replicas have."""
        for edge in self._plan.edges_of_source(self._source):
            self._server.edge_watermark(edge.id, FIRST_VERSION + number + 1)

    def _fail(self, reason: str) -> None:
        """End the query: a part of a version may be applied, and no other one may be mixed with it."""
        self._ending.set()
        self._server.job_failed(f"table {self._about.name}", reason)

    def _warn(self, text: str) -> None:
        text = f"table {self._about.name}: {text}"
        log.warning("%s", text)
        self._server.warn(text)
