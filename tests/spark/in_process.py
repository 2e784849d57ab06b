"""Flows of sources, run in this process without workers: the operators of the compiled plan, one partition each.

Rows of each source come in batches. Behind each batch the watermark of its input is the newest time less the delay, as in a
query, so that state is forgotten and windows are given on the way. A stage behind a stage gets all rows, then the end of time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

import flux
from flux.dataflow.flow import Flow
from flux.dataflow.plan import EdgePlan, FromSource, Plan, StagePlan, Timed
from flux.operators.attributes import open_operator
from flux.operators.batches import given_batches
from flux.operators.operator import Context, last_output, move_watermarks
from flux.settings import Settings
from flux.windows.window import NEVER
from spark_integration.query.declarations import compiled
from spark_integration.settings import given_settings

Batches = Sequence[pa.RecordBatch]


def source(name: str, schema: pa.Schema) -> Any:
    """Return a source that is never read."""
    return flux.source(lambda partition: iter(()), schema, 1, name)


def rows_of(spark: Any, flow: Flow, given: Mapping[str, Batches]) -> pa.Table:
    """Run a flow over batches by name of the source, and return its rows."""
    plan = compiled(spark, [flow], Settings.of(given_settings(spark))).plan
    out: dict[int, list[pa.RecordBatch]] = {}
    for stage in plan.stages:
        out[stage.id] = _output(plan, stage, given, out)
    last = list(plan.stages)[-1]
    assert last.output_schema is not None
    return pa.Table.from_batches([batch.cast(last.output_schema) for batch in out[last.id]], last.output_schema)


def _output(
    plan: Plan, stage: StagePlan, given: Mapping[str, Batches], out: Mapping[int, Batches]
) -> list[pa.RecordBatch]:
    operator = stage.make()
    context = Context(stage.name, key=stage.key, schemas=stage.schemas, output_mode=stage.output_mode)
    context.watermarks = [NEVER] * len(stage.schemas)
    open_operator(operator, context)
    edges = [plan.edges[at] for at in stage.edges_in]
    inputs = [_arrivals(plan, edge, given, out) for edge in edges]
    found: list[pa.RecordBatch] = []
    for at in range(max(map(len, inputs), default=0)):
        for edge, arrivals in zip(edges, inputs, strict=True):
            if at >= len(arrivals):
                continue
            rows, watermark = arrivals[at]
            context.input = edge.input
            if rows.num_rows:
                found += given_batches(operator.process(rows))
            if watermark is not None:
                marks = list(context.watermarks)
                marks[edge.input] = max(marks[edge.input], watermark)
                found += move_watermarks(operator, context, marks)
            context.step += 1
    return [*found, *last_output(operator, context)]


def _arrivals(
    plan: Plan, edge: EdgePlan, given: Mapping[str, Batches], out: Mapping[int, Batches]
) -> list[tuple[pa.RecordBatch, int | None]]:
    """Return the batches of an edge, each with the watermark behind it."""
    origin = plan.origin(edge)
    if not isinstance(edge, FromSource):
        return [(edge.rows_of(batch, str)[0], None) for batch in out[origin.id]]
    found, newest = [], NEVER
    for batch in given[origin.name]:
        time = origin.event_time
        mark = None
        if edge.timed is not Timed.ALL:
            batch, _ = time.rows_of(batch, str)
            times = pc.max(batch.column(time.at)).cast(pa.int64()).as_py()
            newest = newest if times is None else max(newest, times)
            mark = newest - time.delay if newest > NEVER else None
        found.append((edge.rows_of(batch, str)[0], mark))
    return found
