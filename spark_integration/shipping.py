"""Check of everything that is sent to the executors with the tasks: the user's operators, functions and readers, before
anything runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark import cloudpickle

from flux.dataflow.plan import Plan
from flux.dataflow.user_code import text_of
from flux.errors import UsageError


def check_shipping(plan: Plan) -> None:
    """Raise UsageError, which names the stage or source that cannot be pickled, and the object in it that cannot."""
    if _fault(plan) is None:
        return
    for what, shipped in _parts(plan):
        fault = _fault(shipped)
        if fault is not None:
            raise UsageError(
                f"{what} cannot be sent to the executors: {text_of(fault)}. It refers to something that does not travel, such as "
                "a SparkSession, a DataFrame, a lock, a file or a connection: make that in open() or inside of the function, or "
                "pass its name"
            ) from fault
    fault = _fault(plan)
    raise UsageError(f"the query cannot be sent to the executors: {text_of(fault)}") from fault


def _parts(plan: Plan) -> Iterator[tuple[str, Any]]:
    for source in plan.sources:
        yield f"source {source.name}", source
    for stage in plan.stages:
        yield f"the sink of stage {stage.name}", stage.sink
        yield f"stage {stage.name}", stage


def _fault(shipped: Any) -> BaseException | None:
    try:
        cloudpickle.dumps(shipped)  # as Spark does, but Spark's serializer prints a traceback first
    except (Exception, SystemExit) as error:
        return error
    return None
