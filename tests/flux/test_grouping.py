"""``groupBy(...).agg(...)`` behind sources and flows: the plan that it gives. A function stands in for Spark's analyser."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

import flux
from controller.planning.compiler import compile_plan
from controller.planning.explain import explain
from flux.dataflow.grouping import Grouping, ResolvedGrouping, WindowKey
from flux.dataflow.plan import Plan
from flux.dataflow.write_stream import FlowWriter
from flux.errors import SchemaError, UsageError
from flux.expressions.steps import RowSteps, Select
from flux.expressions.tree import Column, Expression, FunctionCall, Literal
from flux.operators.aggregate import Measure, grouped_rows
from flux.operators.operator import Chain, chain_of
from flux.operators.windowed_rows import EachGroupFunction, GroupKey
from flux.settings import Settings
from spark_integration.query.same_plan import description
from tests.flux.resolved import to_steps

LONG = pa.int64()
SCHEMA = pa.schema([("note", pa.string()), ("key", LONG), ("x", LONG), ("ts", pa.timestamp("us", "UTC"))])
KEY, X = Column("key", LONG), Column("x", LONG)


@pytest.fixture(autouse=True)
def no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flux, "_check_columns", lambda flow: None)


def twice(of: Expression) -> Expression:
    return FunctionCall("add", (of, of), LONG, (("mode", "ansi"),))


def above(limit: int, of: Expression = X) -> Expression:
    return FunctionCall("greater", (of, Literal(limit, LONG)), pa.bool_())


def to_groups(schema: pa.Schema, grouping: Grouping, frame: Any = None) -> ResolvedGrouping:
    """Sum twice x by the keys, which are names, and give twice the sum."""
    key = tuple(each for each in grouping.keys if not isinstance(each, WindowKey))
    window = None if grouping.window is None else grouping.window.window
    columns = [(name, Column(name, schema.field(name).type)) for name in key]
    if window is not None:
        columns.append(("ts", Column("ts", schema.field("ts").type)))
        window = flux.window("ts", f"{window.size} microseconds")
    before = RowSteps.of(schema, [Select((*columns, ("2x", twice(X))))])
    make = partial(grouped_rows, {"sum": Measure("sum", "2x")}, window)
    given = make().output_schema((before.output,), key)
    names = [*key, *([] if window is None else ["window_start"])]
    last = Select(
        (*((name, Column(name, given.field(name).type)) for name in names), ("s", twice(Column("sum", LONG))))
    )
    return ResolvedGrouping(before, key, make, None if grouping.method == "plain" else RowSteps.of(given, [last]))


def source() -> Any:
    return flux.source(lambda partition, start: iter(()), SCHEMA, 1, "rows")


def compiled(*flows: Any, resolver: Any = to_groups, collect: int = 0) -> Plan:
    given = Settings.of(), lambda schema: schema, "q", b"", collect
    return compile_plan(flows, *given, to_steps=to_steps, to_groups=resolver)


@flux.stage(partitions=1)
def same(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def test_groups_are_resolved_with_the_aliases_of_the_flow() -> None:
    class Named:
        def __init__(self, schema: pa.Schema) -> None:
            self.schema, self.name = schema, ""

        def alias(self, name: str) -> Named:
            self.name = name
            return self

    seen: list[Any] = []

    def resolver(schema: pa.Schema, grouping: Grouping, frame: Any) -> ResolvedGrouping:
        made = None if frame is None else frame(Named)
        seen.append(made and (made.schema.equals(schema), made.name))
        return to_groups(schema, grouping)

    sums = lambda flow: compiled(flow.groupBy("key").agg("sum").to(Keep()), resolver=resolver)  # noqa: E731
    plain = source()
    sums(plain)
    sums(plain.alias("a"))
    sums(plain.alias("a").alias("b").withWatermark("ts", "1 second"))
    plan = sums(plain.union(source()).alias("u"))
    assert seen == [None, (True, "a"), (True, "b"), (True, "u")]
    assert len(plan.stages) == 1, "a union is no stage of its own for an alias"


class Keep(flux.Sink):
    def write(self, position: Any, batch: Any) -> None: ...


def sums(given: Any, *keys: Any) -> Any:
    return given.groupBy(*keys).agg("any")


def test_groups_are_a_stage_with_steps_in_front_and_steps_in_its_own_behind() -> None:
    plan = compiled(sums(source().where(above(3)), "key").where(above(9, Column("s", LONG))).to(Keep()))
    (stage,) = plan.stages
    (edge,) = plan.edges
    assert (stage.name, stage.key, stage.output_mode) == ("rows.groupBy", ("key",), "complete")
    assert edge.schema.names == ["key", "2x"]
    assert edge.columns == (1, 2), "no column travels that nothing looks at"
    assert str(edge.steps).startswith("where greater(`x`, 3:BIGINT):BOOLEAN; select `key` as `key`, add(`x`, `x`")
    assert isinstance(stage.make, Chain)
    assert "select `key` as `key`, add(`sum`" in str(chain_of(stage.make())[1].steps)
    assert stage.output_schema is not None
    assert stage.output_schema.names == ["key", "s"]
    pickle.loads(pickle.dumps(stage.make.first))().output_schema(stage.schemas, ("key",))


def test_columns_behind_groups_travel_through_the_steps_of_the_next_edge() -> None:
    plan = compiled(same(sums(source(), "key").select(("s", Column("s", LONG)))).to(Keep()))
    groups, last = plan.stages
    assert not isinstance(groups.make, Chain)
    edge = plan.edges[last.edges_in[0]]
    assert str(edge.steps) == 'select add(`sum`, `sum`, mode="ansi"):BIGINT as `s`'
    assert edge.columns == (1,)


def test_groups_of_groups_take_the_results_of_the_first() -> None:
    plan = compiled(sums(sums(source(), "key").select(("key", KEY), ("x", Column("s", LONG))), "key").to(Keep()))
    first, second = plan.stages
    assert second.name == "rows.groupBy.groupBy"
    assert str(plan.edges[second.edges_in[0]].steps).startswith("select `key` as `key`, add(")
    assert first.output_schema is not None
    assert first.output_schema.names == ["key", "sum"]


def test_groups_that_two_flows_read_are_computed_once() -> None:
    groups = sums(source(), "key")
    plan = compiled(groups.to(Keep()), groups.where(above(1, Column("s", LONG))).to(Keep()))
    assert [stage.name for stage in plan.stages] == ["rows.groupBy", "rows.groupBy.rows", "rows.groupBy.rows#2"]


def test_a_result_without_steps_behind_needs_no_stage_that_passes_rows_on() -> None:
    flow = source().groupBy("key")._flow("plain")
    plan = compiled(flow.to(Keep()))
    assert [stage.name for stage in plan.stages] == ["rows.groupBy"]
    assert [stage.name for stage in compiled(flow, collect=2).stages] == ["rows.groupBy", "rows.groupBy.toDF"]


def test_without_a_key_there_is_one_partition() -> None:
    (stage,) = compiled(sums(source()).to(Keep())).stages
    assert (stage.key, stage.partitions) == ((), 1)
    (stage,) = compiled(source().agg("any").to(Keep())).stages
    assert stage.partitions == 1


def test_columns_that_groups_do_not_read_do_not_travel() -> None:
    def counts(schema: pa.Schema, grouping: Grouping, frame: Any = None) -> ResolvedGrouping:
        return ResolvedGrouping(None, ("key",), partial(grouped_rows, {"n": Measure("count")}, None), None)

    plan = compiled(source().groupBy("key").count().to(Keep()), resolver=counts)
    assert (plan.edges[0].columns, plan.edges[0].steps) == ((1,), None)


def test_windows_are_in_append_mode_and_keep_their_column() -> None:
    flow = sums(source().withWatermark("ts", "1 second"), flux.window("ts", "1 minute"), "key")
    (stage,) = compiled(flow.to(Keep())).stages
    operator, then = chain_of(stage.make())
    assert stage.output_mode == "append"
    assert operator._flux_window == flux.window("ts", "1 minute")
    assert then.steps.output.names == ["key", "window_start", "s"]
    assert "windows of 1 minute of ts" in explain(compiled(flow.to(Keep())))


class Endless:
    endless = True

    def __call__(self, partition: int, start: int) -> Any:
        return iter(())


def first_rows(table: pa.Table) -> pa.Table:
    return table.slice(0, 1)


def test_a_function_over_windows_is_a_stage_with_all_columns() -> None:
    window = flux.window("ts", "1 minute")

    def applied(schema: pa.Schema, grouping: Grouping, frame: Any = None) -> ResolvedGrouping:
        function, declared = grouping.arguments
        assert (grouping.method, declared) == ("applyInArrow", "key BIGINT")
        key = GroupKey((None, 1), len(schema))
        make = partial(EachGroupFunction, function, pa.schema([("key", LONG)]), window, key)
        return ResolvedGrouping(None, ("key",), make, None)

    timed = source().withWatermark("ts", "1 second")
    flow = timed.groupBy(window, "key").applyInArrow(first_rows, "key BIGINT")
    assert repr(flow).endswith(".groupBy(window of ts, 'key').applyInArrow(first_rows, 'key BIGINT')")
    plan = compiled(flow.withStage(replicas=2, recovery="upstream").to(Keep()), resolver=applied)
    (stage,), (edge,) = plan.stages, plan.edges
    assert (stage.name, stage.key, stage.output_mode) == ("rows.applyInArrow", ("key",), "append")
    assert (edge.columns, stage.timed_inputs, edge.quantum) == (None, (0,), 60_000_000)
    told = explain(plan)
    assert "function first_rows of the rows of a group" in told
    assert "windows of 1 minute of ts" in told
    with pytest.raises(UsageError, match="no aggregate"):
        FlowWriter(flow).outputMode("complete")
    update = sums(source(), "key").in_mode("update")
    behind = update.groupBy(window, "key").applyInArrow(first_rows, "key BIGINT")
    with pytest.raises(UsageError, match="would be counted again"):
        compiled(behind.to(Keep()), resolver=lambda *given: (applied if given[1].window else to_groups)(*given))


def test_a_function_over_windows_of_a_source_without_end_wants_a_watermark() -> None:
    from controller.planning.checks import check_ends

    @flux.stage(key="key", window=flux.window("ts", "1 minute"), schema=pa.schema([("n", LONG)]))
    def sizes(rows: Any, offsets: Any) -> pa.Table:
        return pa.table({"n": offsets[1:] - offsets[:-1]})

    check_ends(compiled(sizes(source()).to(Keep())))  # this source may end
    endless = compiled(sizes(flux.source(Endless(), SCHEMA, 1, "rows")).to(Keep()))
    with pytest.raises(UsageError, match=r"(?s)windows and output_mode=.*withWatermark\('ts', '10 seconds'\)"):
        check_ends(endless)


def test_a_grouping_says_what_it_was_called_with() -> None:
    flow = source().groupBy("key", flux.window(flux.NOW, "1 minute")).sum("x")
    assert repr(flow).endswith(".groupBy('key', window of flux.NOW).sum('x')")
    closing = source().groupBy("key").agg("any", closes="ts")
    assert repr(closing).endswith(".groupBy('key', closes=ts).agg('any')")
    with pytest.raises(UsageError, match="closes= gives each group once"):
        FlowWriter(closing).outputMode("update")
    assert closing.inputs[0].stage.output_mode == "append"


def test_a_window_of_a_source_without_end_wants_a_watermark() -> None:
    from controller.planning.checks import check_ends

    plan = compiled(sums(source(), flux.window("ts", "1 minute"), "key").to(Keep()))
    check_ends(plan)  # this source may end
    assert not plan.edges[0].states


def test_the_mode_of_the_writer_is_that_of_the_groups() -> None:
    flow = sums(source(), "key")
    behind = flow.where(above(1, Column("s", LONG)))
    writer = FlowWriter(behind).outputMode("update")
    (stage,) = compiled(writer._flow_in_mode().to(Keep())).stages
    assert stage.output_mode == "update"
    with pytest.raises(UsageError, match="an aggregate without a window, whose groups change"):
        FlowWriter(behind).outputMode("append")
    windows = sums(source(), flux.window("ts", "1 minute"))
    assert FlowWriter(windows).outputMode("append")._flow_in_mode() is windows
    sessions = sums(source(), flux.session_window("ts", "1 minute"))
    with pytest.raises(UsageError, match="a session window has output_mode 'append' or 'complete'"):
        FlowWriter(sessions).outputMode("update")
    with pytest.raises(UsageError, match="stage same is no aggregate"):
        FlowWriter(same(source()).where(above(1))).outputMode("complete")


def test_an_aggregate_of_groups_that_change_is_refused() -> None:
    update = sums(source(), "key").in_mode("update").select(("key", KEY), ("x", Column("s", LONG)))
    with pytest.raises(
        UsageError, match=r'(?s)rows.groupBy.groupBy: .* rows.groupBy gives a row for each change .*"update"'
    ):
        compiled(sums(update, "key").to(Keep()))
    with pytest.raises(UsageError, match="counted again"):
        compiled(sums(same(update), "key").to(Keep()))


def test_with_stage_changes_the_stage_of_the_groups() -> None:
    flow = sums(source(), "key").where(above(1, Column("s", LONG))).withStage(name="Sums", partitions=3, replicas=2)
    (stage,) = compiled(flow.to(Keep())).stages
    assert (stage.name, stage.partitions, stage.replicas, stage.key) == ("Sums", 3, 2, ("key",))
    (stage,) = compiled(FlowWriter(flow).outputMode("update")._flow_in_mode().to(Keep())).stages
    assert (stage.name, stage.output_mode) == ("Sums", "update")
    with pytest.raises(UsageError, match="partitions must be 1"):
        compiled(sums(source()).withStage(partitions=3).to(Keep()))


def test_flows_copied_for_a_trigger_are_the_same_groups() -> None:
    def copied(given: Any) -> Any:
        if not isinstance(given, flux.Flow):
            return given
        made = given.copied([])
        made.inputs.extend(map(copied, given.inputs))
        return made

    flow = sums(source().where(above(3)), "key").where(above(9, Column("s", LONG)))
    assert description(compiled(flow.to(Keep()))) == description(compiled(copied(flow).to(Keep())))


def test_a_checkpoint_location_tells_other_aggregates() -> None:
    def other(schema: pa.Schema, grouping: Grouping, frame: Any = None) -> ResolvedGrouping:
        found = to_groups(schema, grouping)
        make = partial(grouped_rows, {"sum": Measure("max", "2x")}, None)
        return ResolvedGrouping(found.before, found.key, make, found.after)

    flow = sums(source(), "key").to(Keep())
    assert description(compiled(flow)) != description(compiled(flow, resolver=other))


def test_mistakes_are_refused_at_the_call() -> None:
    for call, words in [
        (lambda: source().groupBy("key").agg(), "expected at least one aggregate"),
        (lambda: source().groupBy(flux.window("ts", "1 minute"), flux.session_window("ts", "1 minute")), "one window"),
        (lambda: source().groupBy("key").agg("n", closes=5), "closes must be the name of a column with a time"),
        (
            lambda: source().groupBy(flux.window("ts", "1 minute")).agg("n", closes="ts"),
            "a window and closes= both say",
        ),
        (lambda: source().groupBy("key").pivot("x"), "FILTER"),
        (lambda: source().groupBy("key").applyInPandas(None, ""), r"groupBy\(F.window\(...\), ...\).applyInArrow"),
        (lambda: source().groupBy("key").transformWithState(None, ""), "KeyedOperator"),
        (lambda: source().groupBy("key").applyInArrow(first_rows, "key BIGINT"), "without a window among the keys"),
        (lambda: source().groupBy(flux.window("ts", "1 minute")).applyInArrow(5, "x INT"), "expected a function of a"),
        (
            lambda: source().groupBy(flux.window("ts", "1 minute")).applyInArrow(first_rows, None),
            "the schema of the rows",
        ),
        (lambda: source().groupBy("key").applyInArrow(lambda: 0, "x INT"), r"must take \(table\), or \(key, table\)"),
        (lambda: source().groupBy("key").applyInArrow(print, None), "schema of the rows"),
        (lambda: source().groupBy("key").applyInArrow(lambda table: None, "x INT"), "returns nothing"),
        (lambda: same(source()).cube("key"), "flow has no cube: flow.groupBy"),
        (lambda: same(source()).count(), r"groupBy\(\).count\(\)"),
        (lambda: compiled(sums(source(), "key").to(Keep()), resolver=None), "there is no session"),
        (lambda: sums(source(), "key").inputs[0].connect(source()), "takes the rows of one flow"),
    ]:
        with pytest.raises(UsageError, match=words):
            call()


# ---- where= of measures


@flux.stage(key="key", partitions=2)
class Spent(flux.Aggregate):
    n = flux.count()
    large = flux.count(where="x > 100")
    total = flux.sum("x", where="note = 'a'")


class Selected:
    """A DataFrame's part: it takes the texts of conditions."""

    def selectExpr(self, *texts: str) -> list[str]:  # noqa: N802
        return list(texts)


def conditions(schema: pa.Schema, operators: Any) -> RowSteps:
    star, large, total = operators(Selected())
    assert (star, large) == ("*", "CASE WHEN (x > 100\n) THEN true END AS `* where x > 100`")
    assert total == "CASE WHEN (note = 'a'\n) THEN `x` END AS `x where note = 'a'`"
    columns = [(field.name, Column(field.name, field.type)) for field in schema]
    more = [("* where x > 100", above(100)), ("x where note = 'a'", twice(X))]
    return RowSteps.of(schema, [Select((*columns, *more))])


def test_conditions_of_measures_are_columns_of_the_steps_in_front() -> None:
    given = Settings.of(), lambda schema: schema, "q", b""
    plan = compile_plan([Spent(source()).to(Keep())], *given, to_steps=conditions)
    (stage,), (edge,) = plan.stages, plan.edges
    assert edge.schema.names == ["key", "* where x > 100", "x where note = 'a'"]
    assert edge.columns == (1, 2)
    assert stage.output_schema is not None
    assert stage.output_schema.names == ["key", "n", "large", "total"]
    assert "large = count() where x > 100" in explain(plan)
    with pytest.raises(
        UsageError, match=r"stage Spent: where=\.\.\. of a measure is resolved by Spark, and there is no session"
    ):
        compile_plan([Spent(source()).to(Keep())], *given)


def test_conditions_that_are_no_text_are_refused() -> None:
    for wrong in (5, "", " "):
        with pytest.raises(UsageError, match="where must be a condition as text of SQL"):
            flux.count(where=wrong)  # type: ignore[arg-type]
    with pytest.raises((UsageError, SchemaError), match="there is no session"):
        flux.testing.apply(Spent, pa.RecordBatch.from_pylist([{"key": 1, "x": 1, "note": ""}]))
