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

from flux.errors import QueryFailed, UsageError
from spark_integration.elastic import LOOK_S
from spark_integration.executor import egress_function
from spark_integration.jobs import reason_of
from spark_integration.schema import for_spark
from spark_integration.session import session_stopped

if TYPE_CHECKING:
    from spark_integration.query import Query


def fetch_all(query: Query) -> DataFrame:
    """Of a query whose output is all there."""
    stage = next(stage for stage in query.plan.stages if stage.collects)
    struct, schema = for_spark(stage.schemas[0], f"stage {stage.name}")
    fetch = egress_function(query.plan, query.rendezvous, stage.id, schema)
    numbers = query.spark.range(0, stage.partitions, 1, stage.partitions)
    return numbers.mapInArrow(fetch, struct).localCheckpoint(eager=True)


class Output:
    """Is fetched once, by whoever asks first; who asks later gets the same DataFrame."""

    def __init__(self, query: Query) -> None:
        self._query = query
        self._fetched: DataFrame | None = None
        self._one_at_a_time = threading.Lock()
        self._fetching = False

    @property
    def is_fetched(self) -> bool:
        return self._fetched is not None

    def get(self) -> DataFrame:
        """Wait for the end of the input, fetch, and end the query. Raises what ended the query before."""
        with self._one_at_a_time:
            if self._fetched is None:
                try:
                    self._query.wait_for_output()
                    self._fetched = self._fetch()
                finally:
                    self._query.stop()
            return self._fetched

    def _fetch(self) -> DataFrame:
        query, context = self._query, self._query.spark.sparkContext
        self._fetching = True
        try:
            if query.phase == "finished":
                context.addJobTag(self._tag)
                return fetch_all(query)
        except Exception as error:
            if (ended_by := query.exception()) is not None:
                raise ended_by from None
            if query.phase == "finished":
                raise QueryFailed(f"the output could not be fetched: {reason_of(error)}") from error
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
        """Its tasks would ask for output that is gone, as often as Spark retries them."""
        spark = self._query.spark
        end = time.monotonic() + self._query.plan.settings.stop_timeout
        while self._fetching and time.monotonic() < end and not session_stopped(spark):
            spark.sparkContext.cancelJobsWithTag(self._tag)
            time.sleep(LOOK_S)
