"""Conditions and columns behind sources and stages: the plan that they give, and the rows that travel."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import flux
from controller.planning.compiler import compile_plan
from controller.planning.explain import explain
from flux.dataflow.plan import NUMBER, DataFrameSourcePlan, FromSource, FromStage, Plan
from flux.dataflow.source import DataFrameSource
from flux.errors import SchemaError, UsageError, UserCodeError
from flux.exchange.log import LogEntry, Rows
from flux.exchange.producer import Producer
from flux.exchange.replay_check import PriorAttempts
from flux.exchange.source_streams import SourceStreams, packed
from flux.expressions.tree import Column, Expression, FunctionCall, Literal
from flux.replica.output import EdgeOutput
from flux.settings import Settings
from partitioning.ids import StreamId
from spark_integration.query.same_plan import description, difference
from tests.flux import harness
from tests.flux.resolved import to_steps

LONG = pa.int64()
SCHEMA = pa.schema([("note", pa.string()), ("key", LONG), ("x", LONG)])
KEY, X = Column("key", LONG), Column("x", LONG)


@pytest.fixture(autouse=True)
def no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flux, "_check_columns", lambda flow: None)


def above(limit: int, of: Expression = X) -> Any:
    return FunctionCall("greater", (of, Literal(limit, LONG)), pa.bool_())


def per(of: Expression, by: Expression) -> Any:
    return FunctionCall("div", (of, by), LONG, (("mode", "ansi"),))


def twice(of: Expression = X) -> Any:
    return FunctionCall("add", (of, of), LONG, (("mode", "ansi"),))


class Xs(flux.Aggregate):
    total = flux.sum("x")


@flux.stage(partitions=1)
def same(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


class Keep(flux.Operator):
    def process(self, batch: pa.RecordBatch) -> None: ...


def rows(*xs: int, keys: Any = None, note: str = "") -> pa.RecordBatch:
    columns = [pa.array([note] * len(xs)), pa.array(keys or range(len(xs)), LONG), pa.array(xs, LONG)]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def source(positions: bool = False) -> Any:
    return flux.source(lambda partition, start: iter(()), SCHEMA, 1, "rows", positions=positions)


def compiled(*flows: Any) -> Plan:
    return compile_plan(flows, Settings.of(), lambda schema: schema, "q", b"", to_steps=to_steps)


def totals(given: Any, key: str | None = "key", partitions: int | None = 2) -> Any:
    return flux.stage(key=key, partitions=partitions)(Xs)(given)


# ---- the plan


def test_steps_behind_a_source_are_part_of_its_edge_and_cost_no_stage() -> None:
    plan = compiled(totals(source().where(above(3)).select(("x", twice()), ("key", KEY), ("unread", twice(KEY)))))
    assert [stage.name for stage in plan.stages] == ["Xs"]
    (edge,) = plan.edges
    assert edge.columns == (1, 2), "the columns that conditions and wanted columns need"
    assert edge.schema.names == ["x", "key"]
    assert edge.key == (1,)
    assert str(edge.steps) == (
        'where greater(`x`, 3:BIGINT):BOOLEAN; select add(`x`, `x`, mode="ansi"):BIGINT as `x`, `key` as `key`'
    )
    assert plan.stages[0].schemas == (edge.schema,)


def test_a_condition_alone_brings_no_column_that_only_it_needs() -> None:
    plan = compiled(totals(source().where(above(3, KEY)), None, None))
    (edge,) = plan.edges
    assert (edge.columns, edge.schema.names) == ((1, 2), ["x"])
    (all_of_it,) = compiled(flux.stage(Keep)(source().where(above(3)))).edges
    assert (all_of_it.columns, all_of_it.schema) == (None, SCHEMA)


def test_spark_reads_only_the_columns_that_steps_need() -> None:
    plan = compiled(totals(DataFrameSource("rows", SCHEMA).where(above(3, KEY))))
    (origin,) = plan.sources
    assert isinstance(origin, DataFrameSourcePlan)
    assert origin.columns == (1, 2)
    (edge,) = plan.edges
    assert (edge.columns, edge.schema.names) == (None, ["key", "x"])


def test_one_source_gives_each_stage_the_rows_of_its_own_steps() -> None:
    read = source()
    plan = compiled(totals(read.where(above(3))), flux.stage(Keep)(read), totals(read.filter(above(9))))
    assert len(plan.sources) == 1
    assert [edge.steps is None for edge in plan.edges] == [False, True, False]


def test_steps_between_two_stages_are_part_of_the_edge_between_them() -> None:
    plan = compiled(totals(same(source()).where(above(3)).select(("key", KEY), ("x", X)).where(above(5))))
    assert [stage.name for stage in plan.stages] == ["same", "Xs"]
    first, second = plan.edges
    assert isinstance(first, FromSource)
    assert first.steps is None
    assert isinstance(second, FromStage)
    assert second.steps is not None
    assert second.columns == (1, 2)


def test_steps_at_the_end_behind_a_stage_work_in_its_steps() -> None:
    plan = compiled(totals(source()).where(above(3, Column("total", LONG))).select(("t", Column("total", LONG))))
    (stage,) = plan.stages
    assert stage.output_schema.names == ["t"]
    assert "then where total > 3; select total AS t in the same steps" in explain(plan)
    pickle.loads(pickle.dumps(stage.make.then))


def test_steps_at_the_end_behind_a_source_get_a_stage_that_passes_rows_on() -> None:
    plan = compiled(source().where(above(3)).foreach_batch(lambda batch, position: None))
    (stage,) = plan.stages
    assert stage.name == "rows.rows"
    assert stage.sink is not None
    assert plan.edges[0].steps is not None


def test_steps_of_a_flow_that_is_read_elsewhere_too_get_a_stage() -> None:
    flow = same(source())
    plan = compiled(flow.where(above(3)), totals(flow))
    assert [stage.name for stage in plan.stages] == ["same", "same.rows", "Xs"]
    assert [edge.steps is None for edge in plan.edges] == [True, False, True]


def test_steps_that_end_a_flow_and_feed_a_stage_are_one_stage() -> None:
    stepped = same(source()).where(above(3))
    plan = compiled(stepped, totals(stepped))
    assert [stage.name for stage in plan.stages] == ["same", "Xs"]
    assert [edge.steps for edge in plan.edges] == [None, None]


def test_explain_shows_steps_and_columns() -> None:
    text = explain(compiled(totals(source().where(above(3, KEY)))))
    assert "    through where key > 3, computed before rows travel" in text.replace("; select key, x", "")
    assert "no columns but key, x" in text


@pytest.mark.parametrize(
    ("flow", "said"),
    [
        (lambda: source().select(("a", X), ("a", KEY)), "rows, select.*several columns are called 'a'"),
        (lambda: source().select(("a", X), ("A", KEY)), "'a' and 'A' differ only in case"),
        (lambda: source().select(), "no column is left"),
    ],
)
def test_steps_that_do_not_fit_are_refused(flow: Any, said: str) -> None:
    with pytest.raises((SchemaError, UsageError), match=said):
        compiled(flux.stage(Keep)(flow()))


def test_columns_of_micro_batches_are_computed() -> None:
    plan = compiled(flux.stage(Keep)(flux.stream(SCHEMA).select(("x", X))))
    assert plan.edges[0].columns == (2,)


def test_another_input_of_steps_is_refused() -> None:
    with pytest.raises(UsageError, match="conditions and columns behind one"):
        source().where(above(3)).connect(source())


def test_without_a_session_steps_cannot_be_resolved() -> None:
    with pytest.raises(UsageError, match="source rows are resolved by Spark, and there is no session"):
        compile_plan([totals(source().where("x > 3"))], Settings.of(), lambda schema: schema, "q", b"")


# ---- the streams of a source


def streams(plan: Plan, log_bytes: int = 1 << 20, **options: Any) -> SourceStreams:
    producers = [Producer(StreamId(edge.id, 0), 0, edge.partitions, log_bytes, 1.0) for edge in plan.edges]
    return SourceStreams(plan.edges, producers, "rows", **options)


def entries(made: SourceStreams, edge: int = 0) -> list[LogEntry]:
    return made.producers[edge].log.entries()


def batch_of(entry: LogEntry) -> pa.RecordBatch:
    assert isinstance(entry.element, Rows)
    return entry.element.data.batch


BATCHES = [rows(1, 9, 2), rows(1, 2), rows(8), rows(7, 7, 1, 7)]


def filtered(key: str | None = "key") -> Plan:
    return compiled(totals(source().where(above(3)), key, 2 if key else 1), flux.stage(Keep)(source()))


@pytest.mark.parametrize("key", ["key", None])
@pytest.mark.parametrize("together", [False, True])
def test_each_counted_batch_is_an_element_also_if_nothing_is_left_of_it(key: str | None, together: bool) -> None:
    read = source()
    plan = compiled(totals(read.where(above(3)), key, 2 if key else 1), flux.stage(Keep)(read))
    made, plain = streams(plan), streams(compiled(totals(read, key, 2 if key else 1), flux.stage(Keep)(read)))
    for each in (made, plain):
        if together:
            assert each.append_each([(batch, 0.0) for batch in BATCHES]) == len(BATCHES)
        else:
            for batch in BATCHES:
                each.append(batch, 0.0)
    assert [sorted(batch_of(entry)["x"].to_pylist()) for entry in entries(made)] == [[9], [], [8], [7, 7, 7]]
    assert [len(entry.touches) for entry in entries(made)][1] == 0
    assert [entry.checksum for entry in entries(made)] == [entry.checksum for entry in entries(plain)], (
        "of rows as read"
    )
    assert [batch_of(entry).num_rows for entry in entries(made, 1)] == [3, 2, 1, 4]
    assert made.rows == 10


def test_batches_that_are_clustered_together_are_those_that_are_clustered_alone() -> None:
    apart, joint = streams(filtered()), streams(filtered())
    for batch in BATCHES:
        apart.append(batch, 0.0)
    joint.append_each([(batch, 0.0) for batch in BATCHES])
    for one, other in zip(entries(apart), entries(joint), strict=True):
        assert batch_of(one).equals(batch_of(other))
        assert one.touches.tolist() == other.touches.tolist()
        assert one.nbytes == other.nbytes


def test_rows_keep_the_numbers_with_which_they_were_read() -> None:
    plan = compiled(totals(source(positions=True).where(above(3))))
    made = streams(plan, positions=True)
    for batch in BATCHES:
        made.append(batch, 0.0, packed(made.rows + batch.num_rows))
    found = [(entry.begin, entry.sequence, sorted(batch_of(entry)[NUMBER.name].to_pylist())) for entry in entries(made)]
    assert found == [(0, 2, [1]), (3, 4, []), (5, 5, [5]), (6, 9, [6, 7, 9])]
    assert [entry.mark.rows for entry in entries(made)] == [3, 2, 1, 4], "of rows as read"
    assert made.producers[0].next_sequence == 10


def test_numbers_that_rows_bring_are_kept_and_compared_by_the_rows_that_were_read() -> None:
    plan = compiled(totals(source(positions=True).where(above(3))))
    made = streams(plan, positions=True, own_numbers=True)
    made.append(rows(9, 1, 8, 2), 0.0, packed(1), np.array([10, 20, 30, 40]))
    (entry,) = entries(made)
    assert sorted(batch_of(entry)[NUMBER.name].to_pylist()) == [10, 30]
    # Another life with a row that differs where the condition drops it: these are other rows.
    prior = PriorAttempts(StreamId(0, 0))
    prior.numbered = prior.own_numbers = True
    prior.compare(entry, entry.mark, 0)
    with pytest.raises(flux.NonDeterministicInputError):
        prior.compare(entry, entry.mark._replace(checksum=1), 0)


def test_a_row_without_an_answer_is_an_error_that_names_its_place_and_no_stream_has_the_batch() -> None:
    read = source()
    plan = compiled(flux.stage(Keep)(read), flux.stage(Keep)(read.select(("q", per(KEY, X)))))
    made = streams(plan)
    made.append(rows(1, 2), 0.0)
    with pytest.raises(
        UserCodeError, match=r"source rows, partition 0, from batch 1 on: \[DIVIDE_BY_ZERO\].*computed: select"
    ) as raised:
        made.append(rows(3, 0), 0.0)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
    assert [len(entries(made, edge)) for edge in (0, 1)] == [1, 1]


# ---- the output of a stage


def outlet(*, may_lose: bool = False) -> EdgeOutput:
    _, edge = compiled(totals(same(source()).where(above(3)))).edges
    return EdgeOutput(Producer(StreamId(1, 0), 0, 2, 1 << 20, 1.0, may_lose=may_lose), edge)


def test_output_of_which_nothing_is_left_is_no_element() -> None:
    out = outlet()
    for batch in BATCHES:
        out.send(batch, 0.0, lambda: "here")
    sent = [sorted(batch_of(entry)["x"].to_pylist()) for entry in out.producer.log.entries()]
    assert sent == [[9], [8], [7, 7, 7]]
    assert batch_of(out.producer.log[0]).schema.names == ["key", "x"]


def test_output_of_a_stage_that_goes_on_without_rows_keeps_its_numbers() -> None:
    """Send an empty batch in place of the output of a step whose rows are gone: it must not shift the numbers behind
    it."""
    whole, less = outlet(may_lose=True), outlet(may_lose=True)
    for batch in BATCHES:
        whole.send(batch, 0.0, lambda: "here")
        less.send(batch.slice(0, 0) if batch is BATCHES[2] else batch, 0.0, lambda: "here")
    assert whole.producer.next_sequence == less.producer.next_sequence == len(BATCHES)


def test_partitions_that_step_together_compute_their_output_apart() -> None:
    assert outlet().clustered_each(pa.concat_batches(BATCHES), [3, 2, 1, 4]) == [None] * 4


# ---- whole queries, without Spark


def read_all(partition: int, start: int) -> Iterator[pa.RecordBatch]:
    """Yield batches of 100 rows, most of which have no row above 900."""
    for number in range(start, 40):
        values = range(100 * partition, 100 * partition + 100) if number % 10 else range(850, 950)
        yield rows(*values, keys=[value % 7 for value in values])


def read_numbered(partition: int, start: Any) -> Iterator[flux.Positioned]:
    for number, batch in enumerate(read_all(partition, start or 0), start or 0):
        yield flux.Positioned(batch, number + 1)


def expected(least: int) -> list[dict[str, Any]]:
    table = pa.Table.from_batches([batch for partition in (0, 1) for batch in read_all(partition, 0)])
    table = table.filter(pc.field("x") > least)
    doubled = table.set_column(2, "x", pc.multiply(table["x"], 2)).select(["key", "x"])
    return doubled.group_by("key").aggregate([("x", "sum")]).rename_columns(["key", "total"]).to_pylist()


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("behind", ["source", "stage"])
@pytest.mark.parametrize("least", [900, 10_000])
def test_a_query_gives_the_rows_that_pass(positions: bool, behind: str, least: int) -> None:
    read = flux.source(read_numbered if positions else read_all, SCHEMA, 2, "rows", positions=positions)
    before = same(read) if behind == "stage" else read
    seen = harness.Rows()
    flow = seen.stage(totals(before.where(above(least)).select(("key", KEY), ("x", twice()))))
    with harness.ThreadQuery(flow, to_steps=to_steps) as query:
        query.wait()
    assert seen.sorted() == sorted(expected(least), key=repr)


def test_a_query_whose_steps_fail_says_where() -> None:
    read = flux.source(read_all, SCHEMA, 1, "rows")
    flow = flux.stage(Keep)(same(read).select(("q", per(X, KEY))))
    with (
        harness.ThreadQuery(flow, to_steps=to_steps) as query,
        pytest.raises(flux.FluxError, match="DIVIDE_BY_ZERO") as raised,
    ):
        query.wait()
    assert "stage same" in str(raised.value)
    assert "partition 0" in str(raised.value)


def test_a_source_whose_rows_have_no_answer_ends_the_query() -> None:
    flow = flux.stage(Keep)(flux.source(read_all, SCHEMA, 2, "rows").select(("q", per(X, KEY))))
    with (
        harness.ThreadQuery(flow, to_steps=to_steps) as query,
        pytest.raises(flux.FluxError, match=r"source rows, partition \d, from batch 0 on: \[DIVIDE_BY_ZERO\]"),
    ):
        query.wait()


def test_rows_of_a_dataframe_pass_the_steps_where_its_tasks_read_them() -> None:
    seen = harness.Rows()
    flow = seen.stage(DataFrameSource("rows", SCHEMA).where(above(3)).select(("x", twice())))
    with harness.ThreadQuery(flow, to_steps=to_steps) as query:
        query.feed(
            [[batch.select(["x"]) for batch in some] for some in (BATCHES[:2], BATCHES[2:])]
        )  # as Spark reads them
        query.wait()
    assert seen.sorted() == [{"x": 14}, {"x": 14}, {"x": 14}, {"x": 16}, {"x": 18}]


def test_what_a_sink_chains_behind_steps_works_behind_them() -> None:
    """Chain a step as ``to_kafka`` does, which numbers rows in the steps of the stage before."""
    number = flux.stage(partitions=1, name="records")(lambda batch: batch)
    number.chained = True
    plan = compiled(number(same(source()).where(above(3))))
    assert [stage.name for stage in plan.stages] == ["same", "same.rows"]
    assert [edge.steps is None for edge in plan.edges] == [True, False]
    plan = compiled(number(source().where(above(3))))
    assert [stage.name for stage in plan.stages] == ["rows.rows"]


def test_a_plan_with_other_steps_does_not_go_on_from_a_checkpoint_location() -> None:
    def kept(flow: Any) -> dict[str, Any]:
        return description(compiled(flow))

    read = source()
    was = kept(totals(read.where(above(3))))
    assert difference(was, kept(totals(read.filter(above(3))))) == ""
    told = difference(was, kept(totals(read.where(above(4)))))
    assert "it read rows through where x > 3; select key, x and reads it through where x > 4; select key, x" in told
    assert "and reads it through no conditions and columns" in difference(was, kept(totals(read)))
    assert "steps" not in kept(totals(read))["stages"]["Xs"]["reads"][0], "older locations have no word about steps"
    end = Column("total", LONG)
    ended = kept(totals(read).where(above(3, end)))
    assert "its operator was" in difference(ended, kept(totals(read).where(above(4, end))))


@pytest.mark.parametrize("workers", [1, 2])
def test_rows_are_acked_and_leave_the_log_though_few_or_none_pass(workers: int) -> None:
    """Give the log room for a few batches: the query would stop if elements without rows stayed there."""
    read = flux.source(read_all, SCHEMA, 2, "rows")
    seen = harness.Rows()
    flow = seen.stage(flux.stage(partitions=3)(lambda batch: batch)(read.where(above(900))))
    with harness.ThreadQuery(
        flow, workers=workers, to_steps=to_steps, source_log_bytes=2048, batch_max_rows=128
    ) as query:
        query.wait()
    assert len(seen) == 2 * 4 * 49
