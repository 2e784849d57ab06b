"""From flows to a plan: topological numbers, edges, keys, and errors that name the fault of a flow."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

import flux
from controller.planning.checks import check_durable
from controller.planning.compiler import compile_plan
from flux.dataflow.flow import Flow
from flux.dataflow.plan import DataFrameSourcePlan, FromDataFrame, FromSource, Plan, WorkerSourcePlan
from flux.dataflow.source import DataFrameSource, Source
from flux.errors import FluxError, SchemaError, UsageError
from flux.settings import Settings

ROWS = pa.schema([("k", pa.string()), ("x", pa.int64()), ("f", pa.list_(pa.int64()))])


def rows(name: str = "rows") -> Source:
    return DataFrameSource(name, ROWS)


def same(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def stage(name: str, **options: Any) -> Any:
    return flux.stage(name=name, **options)(same)


def numbers(partition: int) -> Iterator[pa.RecordBatch]:
    return iter(())


class Sink(flux.Operator):
    def process(self, batch: pa.RecordBatch) -> None: ...


class Total(flux.Aggregate):
    n = flux.count()
    total = flux.sum("x")


def compiled(*flows: Any, collect: int = 0) -> Plan:
    return compile_plan(list(flows), Settings.of(), lambda schema: schema, "q", b"", collect)


def edges(plan: Plan) -> list[tuple[str, str, int]]:
    return [(plan.origin(edge).name, plan.stages[edge.consumer].name, edge.input) for edge in plan.edges]


def test_stages_are_numbered_in_topological_order() -> None:
    x = rows()
    first = stage("A")(x)
    plan = compiled(stage("C")(x, stage("B")(first)), first)
    assert [each.name for each in plan.stages] == ["A", "B", "C"]
    assert edges(plan) == [("rows", "A", 0), ("A", "B", 0), ("rows", "C", 0), ("B", "C", 1)]
    assert plan.stages[2].edges_in == (2, 3)
    assert plan.stages[0].edges_out == (1,)
    assert [each.name for each in plan.terminal] == ["C"]


def test_sources_and_edges_keep_their_kinds_on_the_way_to_the_workers() -> None:
    plan = compiled(stage("A", partitions=3)(rows(), flux.source(numbers, ROWS, 2)))
    sources, edges = pickle.loads(pickle.dumps((plan.sources, plan.edges)))
    assert [(source.id, source.name) for source in sources] == [(source.id, source.name) for source in plan.sources]
    assert edges == plan.edges
    assert [(type(source), source.worker_partitions) for source in sources] == [
        (DataFrameSourcePlan, 0),
        (WorkerSourcePlan, 2),
    ]
    assert [(type(edge), edge.from_stage, edge.producers) for edge in edges] == [
        (FromDataFrame, False, 0),
        (FromSource, False, 2),
    ]


def test_a_flow_used_twice_is_one_stage_with_two_edges() -> None:
    first = stage("A", partitions=3)(rows())
    plan = compiled(stage("B")(first, first))
    assert edges(plan) == [("rows", "A", 0), ("A", "B", 0), ("A", "B", 1)]
    assert [(edge.producers_known, edge.producers) for edge in plan.edges] == [(False, 0), (True, 3), (True, 3)]


def test_one_source_that_feeds_two_stages_is_read_once() -> None:
    x = rows()
    plan = compiled(stage("A")(x), stage("B")(x))
    assert len(plan.sources) == 1
    assert len(plan.edges_of_source(0)) == 2


def test_a_stage_used_twice_gets_a_number() -> None:
    a = stage("A")
    assert [each.name for each in compiled(a(a(a(rows())))).stages] == ["A", "A#2", "A#3"]
    assert [each.name for each in compiled(stage("B")(rows("S"), rows("S"))).sources] == ["S", "S#2"]


def test_key_columns_are_found_by_position_in_each_input() -> None:
    other = DataFrameSource("other", pa.schema([("x", pa.int64()), ("k", pa.string())]))
    plan = compiled(stage("A", key=["k", "x"], partitions=5)(rows(), other))
    assert [(edge.key, edge.partitions) for edge in plan.edges] == [((0, 1), 5), ((1, 0), 5)]


def test_output_schemas_flow_from_stage_to_stage() -> None:
    plan = compiled(stage("B", key="n")(flux.stage(key="k")(Total)(rows())))
    assert plan.stages[1].schemas[0].names == ["k", "n", "total"]
    assert plan.edges[1].key == (1,)


def test_partitions_default_to_the_setting() -> None:
    assert compiled(stage("A")(rows())).stages[0].partitions == 32


def test_output_to_fetch_gets_a_collecting_stage_behind() -> None:
    plan = compiled(stage("A")(rows()), collect=2)
    *_, last = plan.stages
    assert (last.name, last.partitions, last.collects, last.output_schema) == ("A.toDF", 2, True, None)
    assert plan.terminal == [last]


def _cycle() -> Flow:
    first = stage("A")(rows())
    second = stage("B")(first)
    return first.connect(second)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (_cycle, UsageError, r"the flow has a cycle: B -> A -> B|the flow has a cycle: A -> B -> A"),
        (lambda: stage("A", key="nope")(rows()), SchemaError, "stage A: key 'nope' is not a column .* k, x, f"),
        (lambda: stage("A", key="f")(rows()), SchemaError, "stage A: column 'f' of type list.* cannot be a key"),
        (lambda: stage("A", partitions=0)(rows()), UsageError, "stage A: partitions must be .* 1 to 4096, got 0"),
        (lambda: stage("A", partitions=4097)(rows()), UsageError, "1 to 4096, got 4097"),
        (lambda: stage("A", partitions=True)(rows()), UsageError, "got True"),
        (lambda: stage("A", partitions="8")(rows()), UsageError, "got '8'"),
        (lambda: stage("A", replicas=0)(rows()), UsageError, "stage A: replicas must be .* 1 to 3, got 0"),
        (lambda: stage("A", replicas=4)(rows()), UsageError, "got 4"),
        (
            lambda: stage("A")(flux.stage()(Sink)(rows())),
            UsageError,
            "stage Sink declares no schema, so it has no output",
        ),
        (
            lambda: flux.stage(key="x")(type("Empty", (flux.Aggregate,), {}))(rows()),
            SchemaError,
            "stage Empty: .*measure",
        ),
        (lambda: Flow(stage("A"), []), UsageError, "stage A has no input"),
    ],
)
def test_a_flow_that_cannot_run_is_refused_with_the_reason(make: Any, error: type[FluxError], says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        compiled(make())
    assert type(caught.value) is error


def test_a_key_that_two_columns_have_is_refused() -> None:
    twice = DataFrameSource("twice", pa.schema([("k", pa.int64()), ("k", pa.int64())]))
    with pytest.raises(SchemaError, match="key 'k' is the name of several columns"):
        compiled(stage("A", key="k")(twice))


def test_a_sink_has_no_output_to_fetch() -> None:
    with pytest.raises(UsageError, match="stage Sink has no output"):
        compiled(flux.stage()(Sink)(rows()), collect=1)


@pytest.mark.parametrize(
    ("method", "problem"),
    [
        ("__init__", r"its operator cannot be made: it calls sys\.exit\(\)"),
        ("output_schema", r"output_schema\(\) calls sys\.exit\(\)"),
    ],
)
def test_an_operator_that_ends_the_program_is_refused_and_its_stage_named(method: str, problem: str) -> None:
    class Leaves(flux.Operator):
        def process(self, batch: pa.RecordBatch) -> None: ...

    setattr(Leaves, method, lambda self, *_: sys.exit(0))
    with pytest.raises(UsageError, match=f"stage Leaves: {problem}"):
        compiled(flux.stage()(Leaves)(rows()))


def test_an_operator_that_needs_arguments_is_not_made_without() -> None:
    class Needy(flux.Operator):
        def __init__(self, limit: int) -> None: ...

        def process(self, batch: pa.RecordBatch) -> None: ...

    with pytest.raises(UsageError, match=r"stage Needy: its operator cannot be made: .*limit"):
        compiled(flux.stage()(Needy)(rows()))


def test_no_flow_at_all_is_refused() -> None:
    with pytest.raises(UsageError, match="no flow was given"):
        compiled()


def test_an_aggregate_without_a_key_lives_in_one_partition() -> None:
    class Total(flux.Aggregate):
        n = flux.count()

    schema = pa.schema([("k", pa.int64())])
    source = flux.source(lambda p: iter(()), schema, partitions=1)

    def compiled(stage: flux.Stage):  # type: ignore[no-untyped-def]
        return compile_plan([stage(source)], Settings.of(), lambda s: s, "q", b"s")

    assert compiled(flux.stage(Total)).stages[0].partitions == 1
    with pytest.raises(
        flux.UsageError, match="Total: without a key there is one group, so partitions must be 1, got 4"
    ):
        compiled(flux.stage(partitions=4)(Total))


MIXED = pa.schema([("Dest", pa.string()), ("delay", pa.float64())])


class Delays(flux.Aggregate):
    n = flux.count("DEST")
    worst = flux.max("Delay")


def cased(key: str, schema: pa.Schema, case_sensitive: bool) -> Plan:
    flow = flux.stage(key=key)(Delays)(DataFrameSource("rows", schema))
    return compile_plan([flow], Settings.of(), lambda schema: schema, "q", b"", 0, case_sensitive)


def test_columns_are_found_by_names_of_other_case_and_called_as_the_key_is_written() -> None:
    plan = cased("dest", MIXED, case_sensitive=False)
    assert plan.edges[0].key == (0,)
    assert plan.stages[0].output_schema.names == ["dest", "n", "worst"]


def test_where_case_counts_they_are_not() -> None:
    with pytest.raises(
        SchemaError, match="stage Delays: key 'dest' is not a column of its input; there are Dest, delay"
    ):
        cased("dest", MIXED, case_sensitive=True)
    with pytest.raises(
        SchemaError, match=r"no column 'DEST' \(spark.sql.caseSensitive is true\); there are Dest, delay"
    ):
        cased("Dest", MIXED, case_sensitive=True)
    exact = pa.schema([("DEST", pa.string()), ("dest", pa.int64()), ("Delay", pa.float64())])
    assert cased("dest", exact, case_sensitive=True).edges[0].key == (1,)


def test_a_name_that_fits_two_columns_is_refused_unless_one_has_it_exactly() -> None:
    both = pa.schema([("Dest", pa.string()), ("dest", pa.string()), ("delay", pa.float64())])
    with pytest.raises(SchemaError, match="key 'deST' is the name of several columns"):
        cased("deST", both, case_sensitive=False)
    with pytest.raises(SchemaError, match="2 columns called 'DEST'"):
        cased("dest", both, case_sensitive=False)


def test_output_columns_that_differ_only_in_case_are_refused_where_spark_does_not_tell_them_apart() -> None:
    class Twice(flux.Aggregate):
        n = flux.count()
        N = flux.max("delay")

    flow = flux.stage(key="Dest")(Twice)(DataFrameSource("rows", MIXED))
    with pytest.raises(SchemaError, match=r"stage Twice, output: columns 'n' and 'N' differ only in case.*rename"):
        compile_plan([flow], Settings.of(), lambda schema: schema, "q", b"", 0, case_sensitive=False)
    plan = compile_plan([flow], Settings.of(), lambda schema: schema, "q", b"", 0, case_sensitive=True)
    assert plan.stages[0].output_schema.names == ["Dest", "n", "N"]


# ---- a checkpoint location keeps all stages


class Scaled(flux.Operator):
    schema = ROWS

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch


@pytest.mark.parametrize("with_arguments", [False, True], ids=["function", "class with arguments"])
def test_a_stage_that_is_not_to_be_durable_is_refused_wherever_it_stands(with_arguments: bool) -> None:
    made: Any = flux.stage(name="odd", durable=False)(Scaled)(2) if with_arguments else stage("odd", durable=False)
    first = stage("last")(made(rows()))
    last = made(stage("first")(rows()))
    for flow in (first, last):
        with pytest.raises(
            UsageError, match=r"stage odd: durable=False, and the query has a checkpointLocation.*Leave"
        ):
            check_durable([flow])
    assert not first.inputs[0].stage.in_mode("update").durable, "another output mode changes nothing else"


def test_stages_are_durable_unless_said_otherwise() -> None:
    check_durable([stage("last", durable=True)(stage("first")(rows()))])


@pytest.mark.parametrize("durable", [None, 0, "no"])
def test_whether_a_stage_is_durable_is_true_or_false(durable: Any) -> None:
    with pytest.raises(UsageError, match=f"durable must be True or False; got {durable!r}"):
        stage("odd", durable=durable)
