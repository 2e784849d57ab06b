"""Try a stage without Spark: one partition, in this process, in the order in which the exchange would call it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from flux.api import Stage
from flux.batches import conform
from flux.errors import UsageError
from flux.operator import Context
from flux.snapshot import decode_snapshot, encode_snapshot


def apply(
    stage: Stage, *batches: pa.RecordBatch | Sequence[pa.RecordBatch], restart_after: int | None = None
) -> pa.Table | None:
    """Send batches through a stage and return its output as one table, None for a sink.

    Each argument is a batch of input 0, or a sequence of batches with one argument per input. ``restart_after``: after
    so many batches the operator is replaced by a fresh one that gets its snapshot, as a repair or a move does.
    Declared schemas must be pyarrow schemas here: DDL strings need a Spark session."""
    if not isinstance(stage, Stage):
        raise UsageError(f"expected a class or function decorated with flux.stage, got {type(stage).__name__}")
    inputs = [[given] if isinstance(given, pa.RecordBatch) else list(given) for given in batches]
    if batches and all(isinstance(given, pa.RecordBatch) for given in batches):
        inputs = [[batch for given in inputs for batch in given]]
    if not inputs or not all(inputs):
        raise UsageError("give at least one batch for every input of the stage")
    schemas = tuple(given[0].schema for given in inputs)
    context = Context(stage.name, key=stage.key, schemas=schemas, output_mode=stage.output_mode)
    operator = stage.make()
    schema = operator.output_schema(schemas, stage.key)
    operator.open(context)
    out: list[pa.RecordBatch] = []

    def take(result: Any) -> None:
        out.extend(conform(batch, schema, f"output of stage {stage.name}") for batch in result or ())

    ordered = [(number, batch) for number, given in enumerate(inputs) for batch in given]
    for step, (number, batch) in enumerate(ordered):
        if step == restart_after:
            state = encode_snapshot(operator.snapshot(), f"stage {stage.name}")
            operator.close()
            operator = stage.make()
            operator.open(context)
            operator.restore(decode_snapshot(state))
        context.input, context.step = number, step
        take(operator.process(batch))
    take(operator.finish())
    operator.close()
    return None if schema is None else pa.Table.from_batches(out, schema=schema)
