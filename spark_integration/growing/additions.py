"""Changes of the plan of a running query, from its own program: stages, sinks and sources come and go (design: additions).

The controller carries a change out: all of it, or nothing.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession

from controller.course.plan_requests import PlanHasChanged
from flux.connectors.files.parquet_sink import ParquetFiles
from flux.dataflow.flow import Flow, Stage
from flux.dataflow.plan import StagePlan
from flux.dataflow.plan_change import encode_change, texts_of
from flux.dataflow.sink import FlowTo
from flux.dataflow.source import Source
from flux.errors import FluxError, QueryFailed, QueryTimeout, UsageError
from flux.operators.user_code import described
from spark_integration.growing.added_flows import added_sources, checked_addition
from spark_integration.growing.flow_ends import FlowEnds, failed_with
from spark_integration.growing.imported_files import check_unchanged, note_imported
from spark_integration.query.declarations import check_flows
from spark_integration.query.operations import Operations, checked_timeout

if TYPE_CHECKING:
    from spark_integration.query.run import QueryRun


#: Seconds between two looks whether a failed stage is gone.
REMOVED_LOOK_S = 0.02


class GrowingQuery(Operations):
    """Additions to a running query, and removals: the part of ``Query`` that changes its plan."""

    _spark: SparkSession
    _run: QueryRun

    def __init__(self) -> None:
        self._one_at_a_time = threading.Lock()
        self._ends = FlowEnds()
        note_imported()

    # ---- handles

    def __getitem__(self, stage: str) -> Flow:
        """Return a running stage as a flow of the rows that it gives from now on: the input of stages, joins and sinks that are
        added (``add``). It has the columns that the stage gives, and its event time. UsageError: there is no such stage, or it
        gives no rows."""
        running = self._running
        return running.compiled.stage(stage, lambda: running.compiled)

    def source(self, name: str) -> Source:
        """Return a running source of the workers as a source of the rows that it reads from now on: the input of stages and joins
        that are added (``add``), which begin with the same row or batch of a partition whichever worker reads it. A source with a
        watermark gives its rows on time; ``late`` are the late ones. UsageError: there is no such source, or Spark reads it."""
        running = self._running
        return running.compiled.source(name, lambda: running.compiled)

    # ---- changes

    def add(self, *flows: Flow | FlowTo, timeout: float | None = None) -> None:
        """Add flows to the query while it runs: all of them, or none. They go on from running stages (``query["Delays"]``) and
        from running sources (``query.source("flights")``), or bring sources of their own. A new stage gets each row from one step
        of each partition on, or from one row or batch of each partition of a source, once and in order; the output of running
        stages stays the same. Returns when every process goes by the new plan, and rows that come from then on are for the new
        stages.

        timeout: seconds, default ``spark.flux.change.timeout``. UsageError or SchemaError: the flows do not fit, or a process
        cannot take them; QueryTimeout: not every process has confirmed in time. Then nothing has changed, and the message names
        stage, process and reason."""
        if not flows:
            raise UsageError("query.add() takes flows, as in query.add(Alarm(query['Delays']).to_kafka(...))")
        check_flows(flows)
        with self._changing(timeout) as left:
            while True:
                try:
                    self._add(flows, left)
                    return
                except PlanHasChanged:  # by a removal from the command line, say
                    if left() <= 0:
                        raise

    def remove(self, name: str, cascade: bool = False, timeout: float | None = None) -> None:
        """Remove a running stage, or a source that nothing reads; a source that is read by nothing else goes with its stage.
        ``cascade``: with all stages that depend on it. Its sink is closed, and its state and logs are gone when this returns.

        UsageError: there is no such stage, or others depend on it; the message names them. QueryTimeout and timeout as for
        ``add``. Then nothing has changed."""
        if not isinstance(name, str):
            raise UsageError(f"remove takes the name of a stage, got {type(name).__name__}")
        with self._changing(timeout) as left:
            self._server.remove(name, cascade, left())
            self._run.shrink()

    def restart(self, name: str, timeout: float | None = None) -> None:
        """Begin a stage that has failed anew, together with the stages that went with it because they depended on it: empty, with
        the rows from now on; a source that only they have read is read as at the start of a query. The flows are those that the
        query was given. Returns when every process goes by the new plan.

        UsageError: the stage has not failed, or another one has failed first; the message names it. Errors and timeout are those
        of ``add``."""
        if not isinstance(name, str):
            raise UsageError(f"restart takes the name of a stage that has failed, got {type(name).__name__}")
        limit = self._plan.settings.change_timeout if timeout is None else checked_timeout(timeout)
        end = time.monotonic() + limit
        group = self._server.look(lambda: failed_with(name, self._server.core.plans.failed))
        while any(stage in self._server.plan.stages for stage in group):  # their removal is under way
            if time.monotonic() > end:
                raise QueryTimeout(
                    f"after {limit:g} s {name}, which has failed, is still being removed. Restart it later"
                )
            time.sleep(REMOVED_LOOK_S)
        flows = self._ends.anew(group, self._server.plan)
        if not flows:
            raise UsageError(f"stage {name} ends in no flow of this program: add its flow again (query.add)")
        left = end - time.monotonic()
        if left <= 0:
            raise QueryTimeout(
                f"after {limit:g} s {name} was not begun anew. Nothing was changed: give a longer timeout"
            )
        self.add(*flows, timeout=left)

    def seal(self) -> None:
        """Accept no more additions, so that the query finishes as soon as all its input has ended. Without it, a query that has
        been added to waits with that for the time of a progress report."""
        self._server.seal()

    def failure_of(self, stage: StagePlan | str) -> QueryFailed | None:
        """Return the error of a stage that has failed while the query goes on, given by its name or as it was in the plan. None:
        it runs, or was removed."""
        if not isinstance(stage, str | StagePlan):
            raise UsageError(f"failure_of takes the name of a stage, got {type(stage).__name__}")
        name = stage if isinstance(stage, str) else stage.name
        failed = self._server.look(lambda: self._server.core.plans.failed.get(name))
        if failed is None or (isinstance(stage, StagePlan) and failed.stage != stage.id):
            return None
        return QueryFailed(f"stage {name} has failed: {failed.error}")

    def _add_named(self, target: str) -> None:
        """Add the flows of ``module:name``, for the command line."""
        self.add(*flows_of(target, self))

    @contextmanager
    def _changing(self, timeout: float | None) -> Iterator[Callable[[], float]]:
        """Wait until the query runs, and no other change of the program is under way. Yields a function that returns the seconds
        that are left."""
        limit = self._plan.settings.change_timeout if timeout is None else checked_timeout(timeout)
        end = time.monotonic() + limit
        if not self._one_at_a_time.acquire(timeout=limit):
            raise QueryTimeout(
                f"after {limit:g} s another change of this query is still under way. Nothing was changed"
            )
        try:
            self._wait_until_running(end, limit)
            yield lambda: max(end - time.monotonic(), 0.0)
        finally:
            self._one_at_a_time.release()

    def _add(self, flows: Sequence[Flow | FlowTo], left: Callable[[], float]) -> None:
        # Refused here, before user code is called, where nothing can be added.
        self._server.look(self._server.core.plans.newest)
        began = time.monotonic()
        wanted, began_with = self._server.core.places.wanted, self._run.need.workers
        addition = checked_addition(self._spark, flows, self._running.compiled, wanted, began_with)
        try:
            encoded = encode_change(addition.change, self._plan.secret)
            note_imported()
            stages = ", ".join(stage.name for stage in addition.change.stages)
            check_unchanged(texts_of(encoded), f"cannot add {stages} to the query")
            if self._run.keeper is not None:
                self._run.keeper.settle(addition.facts)
            if left() <= 0:
                raise QueryTimeout(
                    f"the time for the addition of {stages} is over: its check in the program alone, which makes operators, "
                    f"has taken {time.monotonic() - began:.1f} s. Let the __init__ of {stages} do less, or give a longer "
                    "timeout. Nothing was changed"
                )
            plan = self._server.add(addition.change, encoded, left())
        except FluxError:
            for stage in addition.change.stages:
                if isinstance(stage.sink, ParquetFiles):
                    stage.sink.take_back()
            raise
        self._run.grow(addition.made.with_plan(plan), added_sources(addition))
        failed = self._server.look(lambda: [each.stage for each in self._server.core.plans.failed.values()])
        self._ends.take(flows, addition.made.with_plan(plan), failed)


def flows_of(target: str, query: GrowingQuery) -> tuple[Flow | FlowTo, ...]:
    """Return the flows of ``module:name``, for ``flux add``: a flow, several, or a function of the running query that returns
    them, as in ``def alarm(query): return Alarm(query["Delays"]).to(...)``. The module is imported in the program of the query.
    UsageError: there are none, or the file of the module has changed since its import."""
    module, _, name = target.partition(":")
    if not module or not name:
        raise UsageError(f"expected MODULE:FLOW, as in my_flows:alarm, got {target!r:.200}")
    try:
        imported = importlib.import_module(module)
        note_imported()
        check_unchanged([module], f"cannot add {target} to the query")
        found = attrgetter(name)(imported)
        if callable(found) and not isinstance(found, Flow | FlowTo | Stage):
            found = found(query)
    except FluxError:
        raise
    except Exception as error:
        raise UsageError(
            f"{target} cannot be had in the program of the query (process {os.getpid()}, {sys.executable}): {described(error)}"
        ) from error
    flows = tuple(found) if isinstance(found, list | tuple) else (found,)
    for each in flows:
        if not isinstance(each, Flow | FlowTo):
            raise UsageError(
                f"{target} is no flow: expected the result of calling a stage, a list of such, or a function of the query that "
                f"returns one, got {type(each).__name__}"
            )
    return flows
