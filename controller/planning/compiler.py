"""Compilation of a user's flow to a checked plan: names, schemas, keys, edges, topological order (design: plan).

Stages are numbered in topological order, so that a sweep from input to output is a walk over ascending ids. For ``C(A(x),
B(A(x)))`` with one A: A=0, B=1, C=2; edges x->A, A->B, A->C, B->C.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import pyarrow as pa

from controller.planning.availability import set_availability
from controller.planning.columns import leave_out_columns
from controller.planning.compiled_plan import CompiledPlan, StageRows, given_rows, is_joinable
from controller.planning.event_time_edges import (
    InputTime,
    check_window,
    set_quanta,
    timed_inputs,
    times_given,
    window_of,
)
from controller.planning.inputs import SAY_SCHEMA, Operation, PlanInput, check_sink, source_plan, topological
from controller.planning.names import KeptNames, PlanNames, check_cases, check_names, place_of_errors
from controller.planning.parts import Nodes, Parts
from controller.planning.relations.joins import PlanJoins, PlanTable, ToJoin, ToTable, check_once, split
from controller.planning.relations.lookups import TABLE_ALONE, check_tables
from controller.planning.relations.ranks import resolved_ranking
from controller.planning.relations.unions import united
from controller.planning.replica_kinds import check_kinds, feeds_of, replicas_of
from controller.planning.steps import PlanSteps, Resolvers, ToArrow, ToGroups, ToSteps
from flux.arguments import MARKS, STEPS
from flux.dataflow.event_time import event_time, same_time
from flux.dataflow.flow import Flow, FunctionOperator, StepsOperator
from flux.dataflow.grouping import APPLY, GroupFlow
from flux.dataflow.plan import (
    ById,
    EdgePlan,
    EventTime,
    FromDataFrame,
    FromMicroBatches,
    FromSource,
    FromStage,
    Plan,
    SourcePlan,
    StagePlan,
    StreamSourcePlan,
    Timed,
    WorkerSourcePlan,
)
from flux.dataflow.relations.join_flow import JoinFlow, LookupFlow, ResolvedJoin
from flux.dataflow.relations.lookups import VERSION, LookupSource, RefreshedFlow
from flux.dataflow.relations.ranking import RankFlow, ToOrder
from flux.dataflow.relations.running_flow import Running, RunningSource, RunningStage
from flux.dataflow.row_flow import Applied, RowFlow, UnionFlow
from flux.dataflow.row_operators import RowOperator
from flux.dataflow.sink import FlowTo, Sink, flow_of
from flux.dataflow.source import Source
from flux.errors import SchemaError, UsageError
from flux.expressions.steps import RowSteps
from flux.operators.aggregate import Aggregate, columns_read, computed_columns, takes_any_input
from flux.operators.collect import Collect
from flux.operators.operator import Chain, Operator, never_gives
from flux.operators.plain_columns import plain_schema
from flux.operators.schema import check_key, position
from flux.operators.user_code import text_of
from flux.settings import Settings
from partitioning.errors import ColumnTypeError, KeyTypeError
from partitioning.ids import UPSTREAM

#: Remedies where an aggregate, a join or ranks stand behind rows that change.
GROUPS_ONCE = (
    'let the stage in output mode "update" give each group once: with a window and output mode "append", or "complete" where the '
    "input ends"
)
RANKS_ONCE = "rank within windows, each of which is given once: flux.top(..., window=flux.window('ts', '10 minutes'))"


def compile_plan(
    flows: Sequence[Flow | FlowTo],
    settings: Settings,
    to_arrow: ToArrow,
    query: str,
    secret: bytes,
    collect: int = 0,
    case_sensitive: bool = False,
    began_with: Mapping[str, int] | None = None,
    to_steps: ToSteps | None = None,
    to_groups: ToGroups | None = None,
    to_order: ToOrder | None = None,
    to_join: ToJoin | None = None,
    to_table: ToTable | None = None,
    trial: bool = False,
) -> Plan:
    """Check and number everything.

    ``collect`` is the number of partitions of the collecting stage that is added after each flow that does not go into a sink;
    0: none is added. ``case_sensitive``: columns are found by their exact name only. ``began_with`` has, by name, the
    partitions of the sources when the query was started for the first time; ``to_steps`` resolves conditions and columns of
    flows, ``to_groups`` groups, ``to_order`` orders, and ``to_join`` joins; ``to_table`` reads tables. ``trial``: the flow is
    being written, and a column that has its name twice may yet be left out. UsageError and SchemaError name the stage, the
    expected value and the actual value."""
    resolvers = Resolvers(to_arrow, to_steps, to_groups, to_order, to_join, to_table, case_sensitive)
    return compiled_plan(flows, settings, resolvers, query, secret, collect, began_with, trial).plan


def compiled_plan(
    flows: Sequence[Flow | FlowTo],
    settings: Settings,
    resolvers: Resolvers,
    query: str,
    secret: bytes,
    collect: int = 0,
    began_with: Mapping[str, int] | None = None,
    trial: bool = False,
) -> CompiledPlan:
    """Check and number everything; return the plan together with its declarations. Arguments as for ``compile_plan``."""
    compiler = Compiler(settings, resolvers, began_with or {}, trial)
    compiler.compile(flows, collect)
    parts = ById(compiler.sources), ById(compiler.stages), ById(compiler.edges)
    return compiler.described(Plan(query, *parts, settings, secret))


class Compiler:
    """A compiler of one set of flows. It numbers sources, stages and edges in the order in which it adds them, behind those of a
    running plan, and is used once."""

    def __init__(
        self,
        settings: Settings,
        resolvers: Resolvers,
        began_with: Mapping[str, int],
        trial: bool,
        running: CompiledPlan | None = None,
        kept: KeptNames | None = None,
    ) -> None:
        """``running``: the plan to which the flows are added; None: they are a query of their own. ``kept``: names of the version
        that is compiled again. The others as for ``compile_plan``."""
        self.settings = settings
        self.began_with = began_with
        self.to_arrow, self._to_steps, self._to_groups, self._to_order, to_join, to_table, case_sensitive = resolvers
        self.case_sensitive = case_sensitive
        self._trial = trial
        self._running = running
        known = CompiledPlan(Plan("", ById(), ById(), ById(), settings)) if running is None else running
        source, stage, edge = known.plan.next_ids()
        self.sources, self.stages = Parts(known.plan.sources, source), Parts(known.plan.stages, stage)
        self.edges = Parts(known.plan.edges, edge)
        self._steps = PlanSteps(resolvers)
        self._nodes = Nodes(self.sources, self.stages, self.edges)
        self._joins = PlanJoins(to_join, to_table, self.to_arrow, lambda given: self._input(given).schema, self._nodes)
        #: The declarations of sources and stages; those that run and can be read are here from the start.
        self._source_of = dict(known.sources)
        self._flow_of = dict(known.flows)
        self._source_ids = {id(each): id_ for id_, each in known.sources.items() if is_joinable(self.sources[id_])}
        self._stage_ids = {id(each): id_ for id_, each in known.flows.items()}
        #: By source, its event time as it was declared.
        self._declared_times = dict(known.declared)
        #: The tables that are read anew and that a join looks rows up in.
        self._tables: set[int] = set()
        #: By flow, the steps behind the aggregate of its groups, or behind its join.
        self._behind = {id(each): known.rows[id_].behind for id_, each in known.flows.items()}
        #: Stages that give a row for each change of a group or a rank, and those that pass such rows on, each with what would
        #: give each row once.
        self._changing = {id_: each.changing for id_, each in known.rows.items() if each.changing is not None}
        self._names = PlanNames(known.plan.sources, known.plan.stages, kept)
        #: By stage: the columns that have the event time of its rows.
        self._times_given = {id_: each.times for id_, each in known.rows.items()}
        #: Stages that promise themselves that they give no row below the watermark.
        self._promise = {id_ for id_, each in known.rows.items() if each.promises}
        #: By stage: the bound of availability that it asks for itself, in microseconds.
        self._bounds: dict[int, int] = {}

    def compile(self, flows: Sequence[Flow | FlowTo], collect: int = 0) -> None:
        """Compile flows into parts of the plan: the stages, each after its inputs, then the collecting stages and the sinks
        behind the given flows. ``collect``: the partitions of a collecting stage; 0: no output is collected."""
        if not flows:
            raise UsageError("no flow was given: call a decorated stage with a DataFrame and start what it returns")
        order = topological([flow_of(given) for given in flows], set(self._stage_ids))
        readers = Counter(id(given) for flow in order for given in flow.inputs)
        # A flow that is given itself counts as read: its output must not vanish into a chain.
        readers.update(id(flow_of(given)) for given in flows)
        ends = {id(flow_of(given)) for given in flows}
        before_chained = {id(flow.inputs[0]) for flow in order if flow.stage.chained and flow.inputs}
        for flow in order:
            alone = bool(flow.inputs) and readers[id(flow.inputs[0])] == 1 and not self._names.stands_alone(flow)
            if isinstance(flow, RunningStage):
                self._go_on_from(flow)
            elif isinstance(flow, RowFlow):
                at_end = id(flow) in ends
                if (at_end or id(flow) in before_chained) and not (at_end and alone and self._chain_rows(flow)):
                    self._add_stage(flow)
            elif isinstance(flow, UnionFlow | LookupFlow):
                if id(flow) in ends | before_chained:
                    self._stage_of(flow)
            elif not (flow.stage.chained and alone and self._chain(flow, flow.stage.make)):
                self._add_stage(flow)
        for given in flows:
            if collect and isinstance(given, Flow):
                self._add_collect(self._stage_ids[id(given)], collect)
        for given in flows:
            if isinstance(given, FlowTo):
                self._add_sink(given.flow, given.sink)
        leave_out_columns(self.sources, self.stages, self.edges)
        for stage in self.stages.new:
            behind = tuple(edge.id for edge in self.edges.new if self._leaves(edge, stage))
            self.stages[stage.id] = replace(stage, edges_out=behind)
        set_quanta(self.stages, self.edges)
        set_availability(self.sources, self.stages, self.edges, self._bounds, self.settings)

    def described(self, plan: Plan) -> CompiledPlan:
        """Return a plan with all parts, and their declarations. UsageError: the replicas of a stage do not fit into it."""
        check_kinds(plan, self._promise)
        rows = {
            id_: StageRows(
                self._times_given.get(id_, ()),
                id_ in self._promise,
                self._changing.get(id_),
                self._behind.get(id(flow)),
            )
            for id_, flow in self._flow_of.items()
        }
        sinks = {stage.id: stage.sink for stage in plan.stages if stage.sink is not None}
        return CompiledPlan(plan, self._flow_of, self._source_of, rows, self._declared_times, sinks)

    # ---- stages

    def _chain_rows(self, flow: RowFlow) -> bool:
        """Compute the steps at the end of a flow in the stage before, if they may work there."""
        (before,) = flow.inputs
        if isinstance(before, Source | LookupFlow):
            return False
        steps = self._input(flow).steps
        number = self._stage_ids[id(before)]
        if steps is None:
            self._of_stage(flow, number)
            return True
        return not isinstance(self.stages[number].make, Chain) and self._chain(flow, partial(StepsOperator, steps))

    def _chain(self, flow: Flow, then: Callable[[], Operator]) -> bool:
        """Let the operator work in the stage before, if it may (design: chained)."""
        (before,) = flow.inputs
        number = self._stage_ids[id(before)]
        stage = self.stages[number]
        # Replay points are for operators without state, and the numbers of an operator are state.
        if (
            self.stages.runs(number)
            or stage.recovery == UPSTREAM
            or stage.order == MARKS
            or stage.output_schema is None
        ):
            return False
        make = Chain(stage.make, then, stage.output_schema)
        keys = [tuple(each.schema.names[at] for at in each.key) for each in map(self.edges.__getitem__, stage.edges_in)]
        output = self._output_schema(stage.name, self._instance(stage.name, make), stage.schemas, stage.key, keys)
        self.stages[number] = replace(stage, make=make, output_schema=output)
        self._of_stage(flow, number)
        return True

    def _of_stage(self, flow: Flow, number: int) -> None:
        """Note that a flow has the rows that a stage gives."""
        self._stage_ids[id(flow)] = number
        if not self.stages.runs(number):
            self._flow_of[number] = flow

    def _go_on_from(self, handle: RunningStage) -> None:
        """Take the rows of a running stage. UsageError: it is none of this query."""
        number = self._checked(handle)
        self._stage_ids[id(handle)] = number
        self._behind[id(handle)] = self._behind[id(self._flow_of[number])]

    def _checked(self, handle: Running) -> int:
        if self._running is None:
            raise UsageError(
                f"{handle!r} is a part of a running query: query.add(flow) adds a flow with it to that query"
            )
        return self._running.checked(handle)

    def _add_stage(self, flow: Flow) -> None:
        stage = flow.stage
        name = self._names.of_stage(flow)
        make, keys, inputs = self._operation(flow)
        key = keys[0] if keys else stage.key
        operator = self._instance(name, make)
        partitions = self._partitions(stage.partitions, name, operator._flux_grouped and not key)
        if not flow.inputs:
            raise UsageError(f"stage {name} has no input: call it with a DataFrame, a source or another stage's flow")
        replicas = replicas_of(stage, name, operator, self.settings)
        check_tables(operator, inputs)
        self._check_changing(name, operator, stage.output_mode, inputs)
        inputs = [self._with_computed(name, operator, given) for given in inputs]
        schemas = tuple(given.schema for given in inputs)
        output = self._output_schema(name, operator, schemas, key, keys)
        if output is not None and never_gives(operator):
            raise UsageError(
                f"stage {name} declares a schema, and no method of its operator gives rows: return or yield batches from "
                "process, on_timer or finish; leave the schema out if the stage is a sink"
            )
        read = [given.through(columns_read(operator, given.schema, key)) for given in inputs]
        schemas = tuple(schema for schema, _, _ in read)
        times = [self._time_of(given) for given in inputs]
        counting = timed_inputs(operator, times)
        check_window(name, operator, times, self.case_sensitive)
        edges_in = [
            self._add_edge(
                given.origin, self.stages.end, number, keys[number], schema, partitions, columns, steps, given.timed,
                number in counting and times[number].has,
            )
            for number, (given, (schema, columns, steps)) in enumerate(zip(inputs, read, strict=True))
        ]  # fmt: skip
        made = StagePlan(
            id=self.stages.end,
            name=name,
            partitions=partitions,
            replicas=replicas,
            key=key,
            make=make,
            schemas=schemas,
            output_schema=output,
            edges_in=tuple(edges_in),
            edges_out=(),
            output_mode=stage.output_mode,
            recovery=stage.recovery,
            order=stage.order,
            feeds=feeds_of(stage, name, replicas, self.settings),
            on_loss=stage.on_loss,
            timed_inputs=counting,
            for_sink=stage.for_sink,
        )
        if stage.availability is not None:
            self._bounds[made.id] = stage.availability
        if stage.event_time is not None and window_of(operator) is None:
            self._promise.add(made.id)
        self._times_given[made.id] = times_given(stage, operator, made, times, self.case_sensitive)
        self.stages.append(made)
        self._of_stage(flow, made.id)

    def _partitions(self, asked: int | None, name: str, one_group: bool) -> int:
        """Return the number of partitions of a stage. Without a key an aggregate has one group, which lives in one partition."""
        partitions = asked or (1 if one_group else self.settings.partitions)
        if one_group and partitions > 1:
            raise UsageError(
                f"stage {name}: without a key there is one group, so partitions must be 1, got {partitions}; "
                "give it a key, or leave partitions out"
            )
        return partitions

    def _time_of(self, given: PlanInput) -> InputTime:
        """Return the event time of the rows of an input; that of a table that is read anew is the number of its version."""
        if isinstance(given.origin, StreamSourcePlan) and given.origin.refresh_us:
            return InputTime(given.origin, given.timed, given.steps, (VERSION.name,))
        if isinstance(given.origin, StagePlan):
            columns = self._times_given.get(given.origin.id, ())
        else:
            time = given.origin.event_time
            columns = (time.column,) if time is not None and given.timed is Timed.ON_TIME else ()
        return InputTime(given.origin, given.timed, given.steps, columns)

    def _check_changing(self, name: str, operator: Operator, output_mode: str, inputs: Sequence[PlanInput]) -> None:
        """Note whether the next stage gives a row for each change. UsageError: it would aggregate or join such rows."""
        origins = [each.origin for each in inputs]
        found = [each for each in origins if isinstance(each, StagePlan) and each.id in self._changing]
        if found and operator._flux_counts_rows:
            raise UsageError(
                f"stage {name}: stage {found[0].name} gives a row for each change of a group or rank, and each of them would be "
                f"counted again. Put this in front of that stage, or {self._changing[found[0].id]}"
            )
        passes = operator._flux_passes_changes or isinstance(operator, FunctionOperator)
        if isinstance(operator, Aggregate) and output_mode == "update":
            self._changing[self.stages.end] = GROUPS_ONCE
        elif operator._flux_gives_changes:
            self._changing[self.stages.end] = RANKS_ONCE
        elif found and passes:
            self._changing[self.stages.end] = self._changing[found[0].id]

    def _operation(self, flow: Flow) -> Operation:
        """Return the work of a stage, as it is declared or as Spark resolves it."""
        if isinstance(flow, GroupFlow):
            return self._groups(flow)
        if isinstance(flow, JoinFlow):
            return self._join(flow)
        return self._ranks(flow) if isinstance(flow, RankFlow) else self._declared(flow)

    def _ranks(self, flow: RankFlow) -> Operation:
        """Return the work of ranks and duplicates."""
        inputs = [self._input(each) for each in flow.inputs]
        given = [(each.schema, self._time_of(each)) for each in inputs]
        aliases, to_order = self._joins.aliases(flow.inputs[0], inputs[0].schema), self._to_order
        if to_order is not None and aliases is not None:
            to_order = partial(to_order, frame=aliases)  # type: ignore[call-arg]
        resolved = resolved_ranking(flow, given, self._nodes, to_order)
        behind = [each.behind(before) for each, before in zip(inputs, resolved.before, strict=True)]
        return Operation(resolved.make, [resolved.key] * len(inputs), behind)

    def _declared(self, flow: Flow) -> Operation:
        """Return the work of a stage as it is declared."""
        given = (flow,) if isinstance(flow, RowFlow) else flow.inputs
        if isinstance(flow, UnionFlow):
            inputs = self._rows_of(flow)
        elif isinstance(flow.stage.target, type) and takes_any_input(flow.stage.target):
            inputs = [rows for each in given for rows in self._rows_of(each)]
        else:
            inputs = [self._input(each) for each in given]
        return Operation(flow.stage.make, [flow.stage.key] * len(inputs), inputs)

    def _join(self, flow: JoinFlow) -> Operation:
        """Return the work of a join. UsageError has the words of Spark, or names a missing part."""
        if isinstance(flow, RefreshedFlow):
            self._tables.add(id(flow.source))
        inputs = [self._input(given, unique=True) for given in flow.inputs]
        operation, self._behind[id(flow)] = self._joins.resolved(flow, inputs, [self._time_of(each) for each in inputs])
        return operation

    def _groups(self, flow: GroupFlow) -> Operation:
        """Return the work of groups. UsageError has the words of Spark."""
        (before,) = flow.inputs
        # A function gets all columns, by their names.
        inputs = self._rows_of(before, unique=flow.grouping.method != APPLY)
        given = inputs[0]
        where = f"stage {flow.stage.name}"
        check_names(given.schema, where)
        if self._to_groups is None:
            raise UsageError(f"{where}: keys and aggregates are resolved by Spark, and there is no session")
        with place_of_errors(where):
            resolved = self._to_groups(given.schema, flow.grouping, self._joins.aliases(before, given.schema))
        if resolved.after is not None:
            check_names(resolved.after.output, where)
            if not self.case_sensitive:
                check_cases(resolved.after.output, where)
        self._behind[id(flow)] = resolved.after
        behind = [each.behind(resolved.before) for each in inputs]
        return Operation(resolved.make, [resolved.key] * len(inputs), behind)

    def _with_computed(self, name: str, operator: Operator, given: PlanInput) -> PlanInput:
        """Add the columns of conditions of measures."""
        texts = computed_columns(operator)
        if not texts:
            return given
        if self._to_steps is None:
            raise UsageError(f"stage {name}: where=... of a measure is resolved by Spark, and there is no session")
        with place_of_errors(f"stage {name}, where=... of a measure"):
            return given.behind(self._to_steps(given.schema, Applied((RowOperator("selectExpr", ("*", *texts)),))))

    def _add_collect(self, stage_id: int, partitions: int) -> None:
        stage = self.stages[stage_id]
        if stage.output_schema is None:
            raise UsageError(
                f"stage {stage.name} has no output to make a DataFrame of, because it declares no schema. If its operator gives "
                f"rows, say what they are: {SAY_SCHEMA}. If not, it is a sink: call start() instead"
            )
        name = self._names.unique(f"{stage.name}.toDF")
        edge = self._add_edge(stage, self.stages.end, 0, (), stage.output_schema, partitions)
        memory = self.settings.egress_memory
        self.stages.append(
            StagePlan(
                id=self.stages.end,
                name=name,
                partitions=partitions,
                replicas=stage.replicas,
                key=(),
                make=lambda: Collect(memory),
                schemas=(stage.output_schema,),
                output_schema=None,
                edges_in=(edge,),
                edges_out=(),
                collects=True,
            )  # fmt: skip
        )

    def _add_sink(self, flow: Flow, sink: Sink) -> None:
        """Add a sink to the stage itself, if its output goes nowhere else; else to a stage behind it that passes rows on. Behind
        independent replicas there always is one, because by its order a lost primary cannot go on writing; and so there is behind
        a stage that runs."""
        stage = self.stages[self._stage_ids[id(flow)]]
        runs = self.stages.runs(stage.id)
        schema = check_sink(stage, sink, self.settings)
        alone = not (self._names.sinks_apart(stage.name) or any(self._leaves(edge, stage) for edge in self.edges))
        if stage.sink is None and stage.order == STEPS and alone and not runs:
            self.stages[stage.id] = replace(stage, sink=sink)
            return
        # Tentative rows follow the watermark, which a stage that passes rows on needs for nothing else.
        bounded = not runs and bool(self._bounds.get(stage.id) or self.settings.availability)
        timed = bounded and bool(self._times_given.get(stage.id))
        schema, columns, steps = PlanInput(stage, schema).behind(self._behind.get(id(flow))).through(None)
        where = stage, self.stages.end, 0, (), schema, stage.partitions
        edge = self._add_edge(*where, columns, steps, states=timed)
        if timed and stage.id in self._bounds:
            self._bounds[self.stages.end] = self._bounds[stage.id]
        self.stages.append(
            StagePlan(
                id=self.stages.end,
                name=self._names.unique(f"{stage.name}.sink"),
                partitions=stage.partitions,
                replicas=stage.replicas,
                key=(),
                make=_passing,
                schemas=(schema,),
                output_schema=schema,
                edges_in=(edge,),
                edges_out=(),
                sink=sink,
                for_sink=True,
                recovery=stage.recovery,
                timed_inputs=(0,) if timed else (),
            )
        )

    def _instance(self, name: str, make: Callable[[], Operator]) -> Operator:
        try:
            return make()
        except (Exception, SystemExit) as error:
            what = "it calls sys.exit()" if isinstance(error, SystemExit) else text_of(error)
            raise UsageError(
                f"stage {name}: its operator cannot be made: {what}. Arguments come in a call of their own: "
                f"{name}(...)(input)"
            ) from error

    def _output_schema(
        self, name: str, operator: Operator, schemas: tuple[pa.Schema, ...], key: tuple[str, ...],
        keys: Sequence[tuple[str, ...]],
    ) -> pa.Schema | None:  # fmt: skip
        """Return the schema of the output. ``keys``: the key columns of each input. SchemaError: a stage cannot be like this."""
        try:
            for own, schema in zip(keys, schemas, strict=True):
                check_key(own, schema, self.case_sensitive)
                if self.case_sensitive and isinstance(operator, Aggregate):
                    operator.check_case(schema)
            declared = operator.output_schema(schemas, key)
        except (UsageError, KeyTypeError, ColumnTypeError) as error:
            raise SchemaError(f"stage {name}: {error}") from error
        except SystemExit as error:
            raise UsageError(f"stage {name}: output_schema() calls sys.exit()") from error
        if declared is None:
            return None
        output = plain_schema(self.to_arrow(declared), f"stage {name}, output")
        if not self.case_sensitive:
            check_cases(output, f"stage {name}, output")
        return output

    # ---- inputs and edges

    def _input(self, given: Flow | Source, unique: bool = False) -> PlanInput:
        """Return the rows of an input. ``unique``: columns that have the same name get others, as in front of a join, where
        aliases tell them apart."""
        if isinstance(given, RunningSource):
            source = self.sources[self._checked(given)]
            all_rows = Timed.LATE if given.is_late else Timed.ON_TIME
            return PlanInput(source, given_rows(source), None, all_rows if given.watermark else Timed.ALL)
        if isinstance(given, Source):
            if isinstance(given, LookupSource) and id(given) not in self._tables:
                raise UsageError(TABLE_ALONE)
            source = self.sources[self._source(given)]
            return PlanInput(source, source.schema)
        if isinstance(given, RowFlow) and id(given) not in self._stage_ids:
            return self._through_steps(given, unique)
        if isinstance(given, LookupFlow) and id(given) not in self._stage_ids:
            return self._looked_up(RowFlow(given, ()), given, unique)
        stage = self.stages[self._stage_of(given)]
        if stage.output_schema is None:
            raise UsageError(
                f"stage {given.stage.name} declares no schema, so it has no output for another stage or a sink. If its operator "
                f"gives rows, say what they are: {SAY_SCHEMA}"
            )
        return PlanInput(stage, stage.output_schema).behind(self._behind.get(id(given)))

    def _stage_of(self, flow: Flow) -> int:
        """Return the number of the stage of a flow. That of a union is added where it is needed first."""
        if isinstance(flow, UnionFlow | LookupFlow) and id(flow) not in self._stage_ids:
            self._add_stage(flow)
        return self._stage_ids[id(flow)]

    def _rows_of(self, given: Flow | Source, unique: bool = False) -> list[PlanInput]:
        """Return an input, or those that a union has in its place, all with the same columns. ``unique``: as for an input."""
        if isinstance(given, RowFlow) and isinstance(given.inputs[0], UnionFlow) and id(given) not in self._stage_ids:
            union = given.inputs[0]
            if id(union) not in self._stage_ids:
                inputs = self._rows_of(union)
                steps = self._steps.behind(inputs[0].schema, given.operators, f"stage {union.stage.name}")
                return [each.behind(steps) for each in inputs]
        if not isinstance(given, UnionFlow) or id(given) in self._stage_ids:
            return [self._input(given, unique)]
        inputs = [rows for each in given.inputs for rows in self._rows_of(each)]
        targets = united([each.schema for each in inputs], given.stage.name, self._to_steps)
        return [each.behind(steps) for each, steps in zip(inputs, targets, strict=True)]

    def _behind_join(self, given: RowFlow, join: JoinFlow, unique: bool) -> PlanInput:
        """Resolve the conditions and columns behind a join, which may call its columns by the aliases of both sides."""
        stage, where = self.stages[self._stage_of(join)], f"stage {join.stage.name}"
        assert stage.output_schema is not None
        operators, others = split(given.operators)
        resolved = self._joins.behind(join, operators)
        rows = PlanInput(stage, stage.output_schema).behind(resolved.after)
        return self._behind_both(rows, resolved, others, where, unique)

    def _looked_up(self, given: RowFlow, lookup: LookupFlow, unique: bool) -> PlanInput:
        """Resolve a join with a table, and the conditions and columns behind it."""
        rows, where = self._input(lookup.inputs[0], unique=True), f"stage {lookup.stage.name}"
        schema = plain_schema(self.to_arrow(lookup.dataframe), f"{where}, table")
        before = lookup.table.operators if isinstance(lookup.table, RowFlow) else ()
        table = PlanTable(schema, self._steps.behind(schema, before, f"{where}, table"))
        operators, others = split(given.operators)
        made, resolved = self._joins.looked_up(lookup, rows, table, operators)
        return self._behind_both(made, resolved, others, where, unique)

    def _behind_both(
        self, rows: PlanInput, resolved: ResolvedJoin, others: tuple[RowOperator, ...], where: str, unique: bool
    ) -> PlanInput:
        """Return the rows of a join behind functions of the user's, and what stands behind these."""
        if not unique and not (self._trial and not others):
            check_once(resolved, where)
        self._steps.check_output(rows.schema, where)
        return rows.behind(self._steps.behind(rows.schema, others, where))

    def _through_steps(self, given: RowFlow, unique: bool) -> PlanInput:
        """Resolve the conditions and columns of a flow. UsageError has the words of Spark."""
        (before,) = given.inputs
        if isinstance(before, JoinFlow):
            return self._behind_join(given, before, unique)
        if isinstance(before, LookupFlow) and id(before) not in self._stage_ids:
            return self._looked_up(given, before, unique)
        rows = self._input(before)
        origin, schema, *_ = rows
        where = f"{'source' if isinstance(origin, SourcePlan) else 'stage'} {origin.name}"
        timed = Timed.ALL
        if given.watermark is not None:
            assert isinstance(origin, SourcePlan)
            steps = self._steps.behind(schema, given.watermark.before, where)
            schema = schema if steps is None else steps.output
            origin = self._timed(origin, event_time(given.watermark, schema, steps, where, self.case_sensitive))
            schema = given_rows(origin) if self.sources.runs(origin.id) else schema
            timed = Timed.LATE if given.is_late else Timed.ON_TIME
        steps = self._steps.behind(schema, given.operators, where)
        return PlanInput(origin, schema, rows.steps, timed).behind(steps)

    def _timed(self, source: SourcePlan, time: EventTime) -> SourcePlan:
        """Give a source its event time. UsageError: it has another one, or it runs without any."""
        known = self._declared_times.get(source.id)
        if known is not None:
            same_time(source.name, known, time)
        elif self.sources.runs(source.id):
            raise UsageError(
                f"source {source.name} runs without a watermark, and lateness is judged where its rows are read: declare it in "
                "the program and start the query anew, or read the input by a source of its own"
            )
        self._declared_times[source.id] = time
        if not self.sources.runs(source.id):
            self.sources[source.id] = replace(source, event_time=time)
        return self.sources[source.id]

    def _source(self, given: Source) -> int:
        if id(given) not in self._source_ids:
            index, name = self.sources.end, self._names.of_source(given)
            self._source_ids[id(given)] = index
            self._source_of[index] = given
            schema = plain_schema(self.to_arrow(given.declared), f"source {name}")
            self.sources.append(source_plan(given, index, name, schema, self.began_with.get(name)))
        return self._source_ids[id(given)]

    def _add_edge(
        self,
        origin: SourcePlan | StagePlan,
        consumer: int,
        number: int,
        key: tuple[str, ...],
        schema: pa.Schema,
        partitions: int,
        columns: tuple[int, ...] | None = None,
        steps: RowSteps | None = None,
        timed: Timed = Timed.ALL,
        states: bool = False,
    ) -> int:
        edge_id = self.edges.end
        where = edge_id, consumer, number, tuple(position(schema, column) for column in key), schema, partitions
        match origin:
            case StagePlan():
                self.edges.append(
                    FromStage(*where, origin.partitions, origin.id, columns=columns, steps=steps, states=states)
                )
                return edge_id
            case WorkerSourcePlan():
                make, producers = FromSource, origin.partitions
            case StreamSourcePlan():
                make, producers = FromMicroBatches, 0
            case _:
                make, producers, states = FromDataFrame, 0, False  # it tells nothing before its end
        self.edges.append(make(*where, producers, origin.id, columns=columns, steps=steps, timed=timed, states=states))
        return edge_id

    @staticmethod
    def _leaves(edge: EdgePlan, stage: StagePlan) -> bool:
        return isinstance(edge, FromStage) and edge.stage == stage.id


def _passing() -> Operator:
    """Make the operator of a stage that only passes rows on."""
    return FunctionOperator(lambda batch: batch, None)
