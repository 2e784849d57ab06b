"""The output that a query keeps, as a DataFrame (design: egress).

The last stage feeds a collecting stage inside the workers; when the input has ended, Spark tasks fetch from there
(``flux.shell.egress_loop``). Fetching can be repeated, so a task may be retried. Spark then holds the rows like those of a
local checkpoint, and the workers give their task slots back.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame

from flux.dataflow.plan import Plan, StagePlan
from flux.dataflow.user_code import text_of
from flux.errors import QueryFailed, UsageError
from spark_integration.elastic import LOOK_S
from spark_integration.executor import egress_function
from spark_integration.jobs import reason_of
from spark_integration.schema import for_spark
from spark_integration.session import session_stopped

if TYPE_CHECKING:
    from spark_integration.query import Query


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


class Output:
    """The kept output of a query. The output of each stage is fetched once, and every further call gets the same DataFrame.
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
            time.sleep(LOOK_S)
