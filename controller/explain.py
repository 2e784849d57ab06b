"""A plan as text for people: sources, stages with their keys, partitions and copies, and the policies they run under."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from flux.aggregate import Aggregate
from flux.api import FunctionOperator
from flux.operator import Operator
from flux.plan import EdgePlan, Plan, SourcePlan, StagePlan
from flux.settings import Settings

#: Longer lists of columns are cut.
COLUMNS_MAX = 20
#: So are longer arguments.
ARGUMENTS_CHARS_MAX = 200


def explain(plan: Plan, workers: int = 0) -> str:
    """``workers``: as many as the query has; 0: it has not started."""
    lines = [_heading(plan)]
    for source in plan.sources:
        lines += _source(source)
    for stage in plan.stages:
        lines += _stage(plan, stage)
    lines += ["policies", *_policies(plan, workers)]
    return "\n".join(lines)


def _heading(plan: Plan) -> str:
    return f"Flux plan: {_count(len(plan.sources), 'source')}, {_count(len(plan.stages), 'stage')}"


def _source(source: SourcePlan) -> Iterator[str]:
    yield f"source {source.name}"
    if source.read is None:
        yield "    read by Spark tasks, one for each partition of the DataFrame"
    else:
        again = "from where it stopped" if source.seeks else "from its start"
        yield f"    {_count(source.partitions or 0, 'partition')}, read in the workers; after a loss again {again}"
    yield f"    gives {_columns(source.schema)}"


def _stage(plan: Plan, stage: StagePlan) -> Iterator[str]:
    operator = stage.make()
    yield f"stage {stage.name}: {_what(stage, operator)}"
    for edge_id in stage.edges_in:
        yield f"    reads {_origin(plan, plan.edges[edge_id])}, {_routing(plan.edges[edge_id])}"
    yield f"    {_count(stage.partitions, 'partition')}, {_copies(stage.replicas)}"
    if isinstance(operator, Aggregate):
        when = (
            "once, at the end of the input" if stage.output_mode == "complete" else "after every step that changes it"
        )
        yield f"    gives each group {when} (output mode {stage.output_mode})"
    if stage.output_schema is not None:
        yield f"    gives {_columns(stage.output_schema)}"
    elif not stage.collects:
        yield "    gives nothing: a sink"


def _what(stage: StagePlan, operator: Operator) -> str:
    if stage.collects:
        return "keeps the output in the workers until Spark has fetched it"
    if isinstance(operator, Aggregate):
        return "aggregate, " + ", ".join(f"{name} = {measure}" for name, measure in operator._measures.items())
    if isinstance(operator, FunctionOperator):
        return "function"
    written = getattr(getattr(stage.make, "__self__", None), "_arguments", "")
    arguments = " ".join(written.split())[:ARGUMENTS_CHARS_MAX]
    return f"operator {type(operator).__name__}" + (f"({arguments})" if arguments else "")


def _origin(plan: Plan, edge: EdgePlan) -> str:
    if edge.source is not None:
        return f"source {plan.sources[edge.source].name}"
    assert edge.stage is not None
    return f"stage {plan.stages[edge.stage].name}"


def _routing(edge: EdgePlan) -> str:
    if not edge.key:
        return "batches in rotation"
    return f"rows by hash of {', '.join(edge.schema.field(position).name for position in edge.key)}"


def _copies(replicas: int) -> str:
    if replicas == 1:
        return "1 replica: the loss of its executor ends the query"
    return f"{replicas} replicas: survives the loss of {_count(replicas - 1, 'executor')}"


def _policies(plan: Plan, workers: int) -> Iterator[str]:
    settings = plan.settings
    if workers:
        yield f"    workers: {workers}"
    else:
        yield f"    workers: {settings.workers or 'as many as there is room for'}"
    if any(stage.replicas > 1 for stage in plan.stages):
        yield "    copies: " + _placement(settings)
    yield "    balance: " + _balance(settings)
    yield f"    losses: a worker that is silent for {settings.heartbeat_timeout:g} s is given up"
    yield (
        f"    memory: logs of {_mib(settings.log_max_bytes)} per process, {_mib(settings.credit_max_bytes)} under way to "
        "one worker, then back-pressure"
    )


def _placement(settings: Settings) -> str:
    where = "on one executor where there are too few" if settings.same_executor else "on different executors"
    return f"{where}; repaired {_count(settings.repairs_at_once, 'partition')} of a stage at a time"


def _balance(settings: Settings) -> str:
    if not settings.balance_enabled:
        return "off: partitions stay where they are"
    return (
        f"policy {settings.balance_policy} every {settings.balance_round:g} s, up to "
        f"{_count(settings.balance_max_moves, 'move')} and {_mib(settings.balance_max_bytes_per_second)} per second"
    )


def _columns(schema: pa.Schema) -> str:
    shown = [f"{field.name} {field.type}" for field in schema][:COLUMNS_MAX]
    more = len(schema) - len(shown)
    return ", ".join(shown) + (f" and {more} more columns" if more else "")


def _count(number: Any, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):g} MiB"
