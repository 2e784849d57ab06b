"""A plan as text for people: sources, stages with their keys, partitions and replicas, and the policies of the
query."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from controller.text import count, some
from flux.dataflow.event_time import told, told_idleness
from flux.dataflow.flow import FunctionOperator, StepsOperator, arguments_of
from flux.dataflow.plan import (
    DataFrameSourcePlan,
    EdgePlan,
    FromSource,
    Plan,
    SourcePlan,
    StagePlan,
    StreamSourcePlan,
    Timed,
    WorkerSourcePlan,
)
from flux.dataflow.sink import guarantee
from flux.expressions.steps import RowSteps
from flux.joins.join import Join
from flux.joins.join_text import told_join, told_table
from flux.operators.aggregate import Aggregate
from flux.operators.operator import Chain, Operator, chain_of
from flux.operators.user_code import shortened, text_of
from flux.operators.windowed_rows import WindowFunction
from flux.replica.kinds import replicated
from flux.settings import Settings
from partitioning.ids import ACTIVE, STANDBY

#: Longer lists of columns are cut.
COLUMNS_MAX = 20
#: Longer texts of arguments are cut too.
ARGUMENTS_CHARS_MAX = 200


def explain(plan: Plan, workers: int = 0) -> str:
    """Describe a plan, line by line. ``workers`` is the number of workers of the query; 0: the query has not started."""
    lines = [_heading(plan)]
    for source in plan.sources:
        lines += _source(source)
    for stage in plan.stages:
        lines += _stage(plan, stage)
    lines += ["policies", *_policies(plan, workers)]
    return "\n".join(lines)


def _heading(plan: Plan) -> str:
    version = f", version {plan.version}" if plan.version else ""
    return f"Flux plan{version}: {count(len(plan.sources), 'source')}, {count(len(plan.stages), 'stage')}"


def _source(source: SourcePlan) -> Iterator[str]:
    yield f"source {source.name}{_since(source)}"
    if isinstance(source, StreamSourcePlan) and source.refresh_us:
        yield f"    {told_table(source.refresh_us)}"
    elif isinstance(source, StreamSourcePlan):
        yield "    micro-batches of Structured Streaming, read by Spark tasks, one for each partition of a batch"
    elif not isinstance(source, WorkerSourcePlan):
        yield "    read by Spark tasks, one for each partition of the DataFrame"
    else:
        again = "from where it stopped" if source.seeks else "from its start"
        yield f"    {count(source.partitions, 'partition')}, read in the workers; after a loss again {again}"
    yield f"    gives {_columns(source.schema)}"
    if isinstance(source, DataFrameSourcePlan | StreamSourcePlan) and source.columns is not None:
        yield "    its other columns are not read: no stage looks at them"
    if source.event_time is not None:
        yield f"    event time: {told(source.event_time)}"
    if source.may_be_silent:
        yield "    availability: results go on without a partition that does not answer, and are corrected"
    if (note := told_idleness(source)) is not None:
        yield f"    {note}"


#: By output mode, when an aggregate gives a group.
GIVES = {
    "append": "once, when the watermark has passed its window",
    "complete": "once, at the end of the input",
    "update": "after every step that changes it",
}


def _stage(plan: Plan, stage: StagePlan) -> Iterator[str]:
    operator, *others = chain_of(stage.make())
    then = "".join(f", then {_then(each)} in the same steps" for each in others)
    yield f"stage {stage.name}{_since(stage)}: {_what(stage, operator)}{then}"
    for edge_id in stage.edges_in:
        edge = plan.edges[edge_id]
        yield f"    reads {_origin(plan, edge)}, {_routing(edge)}{_in_part(edge)}"
        if edge.steps is not None:
            yield f"    through {_steps(edge.steps)}, computed before rows travel"
    yield f"    {count(stage.partitions, 'partition')}, {_copies(stage, plan)}"
    if isinstance(operator, Join):
        yield from (f"    {line}" for line in told_join(operator.spec, stage.schemas))
    if isinstance(operator, Aggregate):
        yield f"    gives each group {GIVES[stage.output_mode]} (output mode {stage.output_mode})"
    elif isinstance(operator, WindowFunction):
        yield "    is called with the groups of a window when it is final"
    if operator._flux_window is not None:
        yield f"    groups are those of {operator._flux_window}"
    if stage.availability is not None:
        yield f"    availability: {stage.availability}"
    if stage.output_schema is not None:
        yield f"    gives {_columns(stage.output_schema)}"
    elif not stage.collects:
        yield "    gives nothing: a sink"
    if stage.sink is not None:
        yield f"    goes to {text_of(stage.sink, repr)}, {guarantee(stage.sink)}"


def _since(part: SourcePlan | StagePlan) -> str:
    """Tell the version of the plan that brought a part, if it was not there from the start."""
    return f" (since version {part.since})" if part.since else ""


def _what(stage: StagePlan, operator: Operator) -> str:
    if stage.collects:
        return "keeps the output in the workers until Spark has fetched it"
    if isinstance(operator, Aggregate):
        return "aggregate, " + ", ".join(f"{name} = {measure}" for name, measure in operator._measures.items())
    if isinstance(operator, FunctionOperator):
        return "function"
    if isinstance(operator, Join):
        return f"{operator.spec.how.replace('_', ' ')} join"
    if (text := operator._flux_text()) is not None:
        return text
    make = stage.make.first if isinstance(stage.make, Chain) else stage.make
    arguments = " ".join(arguments_of(make).split())[:ARGUMENTS_CHARS_MAX]
    return f"operator {type(operator).__name__}" + (f"({arguments})" if arguments else "")


def _origin(plan: Plan, edge: EdgePlan) -> str:
    rows = "the late rows of " if isinstance(edge, FromSource) and edge.timed is Timed.LATE else ""
    return f"{rows}{'stage' if edge.from_stage else 'source'} {plan.origin(edge).name}"


def _routing(edge: EdgePlan) -> str:
    if not edge.key:
        return "batches in rotation"
    return f"rows by hash of {', '.join(edge.schema.field(position).name for position in edge.key)}"


def _then(operator: Operator) -> str:
    return _steps(operator.steps) if isinstance(operator, StepsOperator) else type(operator).__name__


def _steps(steps: RowSteps) -> str:
    return shortened(steps.sql)


def _in_part(edge: EdgePlan) -> str:
    return (
        ""
        if edge.columns is None and edge.steps is None
        else f"; no columns but {some(edge.schema.names, COLUMNS_MAX, 'columns')}"
    )


#: The way in which the copies of a stage are read.
_FEEDS = {
    "one": "",
    "hedged": ", read from a second one while nothing comes from the first",
    "all": ", all of them read",
}


def _copies(stage: StagePlan, plan: Plan) -> str:
    if not replicated(stage):
        return "1 replica" + ("" if plan.durable else ": the loss of its worker ends the query")
    others = (
        count(stage.replicas - 1, "standby") if stage.recovery == STANDBY else f"{stage.replicas - 1} {stage.recovery}"
    )
    kept = "" if stage.recovery == ACTIVE else f", of which {others}"
    kept += " without an order of steps" if stage.at_marks else ""
    kept += _FEEDS[stage.feeds] if stage.recovery == ACTIVE else ""
    lost = count(stage.replicas - 1, "worker" if plan.settings.same_executor else "executor")
    return f"{stage.replicas} replicas{kept}: survives the loss of {lost}"


def _policies(plan: Plan, workers: int) -> Iterator[str]:
    settings = plan.settings
    if workers:
        yield f"    workers: {workers}"
    else:
        yield f"    workers: {settings.workers or 'as many as there is room for'}"
    if any(replicated(stage) for stage in plan.stages):
        yield "    replicas: " + _placement(settings)
    if plan.durable:
        yield (
            "    checkpoint location: survives the loss of everything at once; a checkpoint of each partition every "
            f"{settings.checkpoint_interval:g} s"
        )
    yield "    balance: " + _balance(settings)
    yield f"    losses: a worker that is silent for {settings.heartbeat_timeout:g} s is given up"
    yield (
        f"    memory: logs of {_mib(settings.log_max_bytes)} per process, {_mib(settings.credit_max_bytes)} under way to "
        "one worker, then back-pressure"
    )


def _placement(settings: Settings) -> str:
    where = "on one executor where there are too few" if settings.same_executor else "on different executors"
    return f"{where}; repaired {count(settings.repairs_at_once, 'partition')} of a stage at a time"


def _balance(settings: Settings) -> str:
    if not settings.balance_enabled:
        return "off: partitions stay where they are"
    return (
        f"policy {settings.balance_policy} every {settings.balance_round:g} s, up to "
        f"{count(settings.balance_max_moves, 'move')} and {_mib(settings.balance_max_bytes_per_second)} per second"
    )


def _columns(schema: pa.Schema) -> str:
    return some([f"{field.name} {field.type}" for field in schema], COLUMNS_MAX, "columns")


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):g} MiB"
