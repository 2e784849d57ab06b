"""Everything that travels to the executors of a query, checked before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pyspark import cloudpickle

from flux.connectors.files.parquet_sink import ParquetFiles
from flux.dataflow.plan import Plan, StagePlan
from flux.errors import UsageError
from flux.operators.user_code import text_of
from spark_integration.schema import for_spark


def check_outputs(stages: Iterable[StagePlan]) -> None:
    """Raise SchemaError if Spark has no type for a column that it is to get, or to find in files."""
    for stage in stages:
        if stage.collects:
            for_spark(stage.schemas[0], f"stage {stage.name}")
        if isinstance(stage.sink, ParquetFiles) and stage.output_schema is not None:
            for_spark(stage.output_schema, f"stage {stage.name}, which writes files")


def check_shipping(plan: Plan, since: int = 0) -> None:
    """Check everything that is sent to the executors before anything runs, of all parts of the plan that came in version
    ``since`` or later: the user's operators, functions and readers. UsageError names the stage or source that cannot be
    pickled, and the object in it that cannot."""
    parts = list(_parts(plan, since))
    whole = [shipped for _, shipped in parts] if since else plan
    if _fault(whole) is None:
        return
    for what, shipped in parts:
        fault = _fault(shipped)
        if fault is not None:
            raise UsageError(
                f"{what} cannot be sent to the executors: {text_of(fault)}. It refers to something that does not travel, such as "
                "a SparkSession, a DataFrame, a lock, a file or a connection: make that in open() or inside of the function, or "
                "pass its name"
            ) from fault
    fault = _fault(whole)
    raise UsageError(f"the query cannot be sent to the executors: {text_of(fault)}") from fault


def _parts(plan: Plan, since: int) -> Iterator[tuple[str, Any]]:
    for source in (each for each in plan.sources if each.since >= since):
        yield f"source {source.name}", source
    for stage in (each for each in plan.stages if each.since >= since):
        yield f"the sink of stage {stage.name}", stage.sink
        yield f"stage {stage.name}", stage
    for edge in (each for each in plan.edges if each.since >= since):
        yield f"a function of mapInArrow behind {plan.origin(edge).name}", edge.steps


def _fault(shipped: Any) -> BaseException | None:
    try:
        cloudpickle.dumps(shipped)  # as Spark does, but Spark's serializer prints a traceback first
    except (Exception, SystemExit) as error:
        return error
    return None
