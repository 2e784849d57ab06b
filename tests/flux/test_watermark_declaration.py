"""``withWatermark``: the event time that it declares in the plan, the rows that flows behind it carry, and bad declarations."""

from __future__ import annotations

import json
import re
from typing import Any

import pyarrow as pa
import pytest

import flux
from controller.planning.checks import check_ends
from controller.planning.compiler import compile_plan
from controller.planning.explain import explain
from flux.dataflow.plan import DataFrameSourcePlan, EventTime, FromSource, Plan, Timed
from flux.dataflow.source import DataFrameSource, StreamOptions, StreamSource
from flux.dataflow.write_stream import FlowWriter
from flux.errors import SchemaError, UsageError
from flux.exchange.timed_rows import columns_read
from flux.expressions.tree import Column, FunctionCall, Literal
from flux.settings import Settings
from spark_integration.query.same_plan import description, difference
from tests.flux.resolved import to_steps

LONG, TIME = pa.int64(), pa.timestamp("us", "UTC")
SCHEMA = pa.schema([("note", pa.string()), ("k", LONG), ("ts", TIME), ("x", LONG)])
K, TS, X = Column("k", LONG), Column("ts", TIME), Column("x", LONG)
SECOND = 1_000_000


@pytest.fixture(autouse=True)
def no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flux, "_check_columns", lambda flow: None)


class Reads:
    def __init__(self, endless: bool = False) -> None:
        self.endless = endless

    def __call__(self, partition: int) -> Any:
        yield from ()


def above(limit: int, of: Any = X) -> Any:
    return FunctionCall("greater", (of, Literal(limit, LONG)), pa.bool_())


def source(schema: pa.Schema = SCHEMA, endless: bool = False, name: str = "bids") -> Any:
    return flux.source(Reads(endless), schema, 1, name)


def compiled(*flows: Any) -> Plan:
    return compile_plan(flows, Settings.of(), lambda schema: schema, "q", b"", to_steps=to_steps)


class Counts(flux.Aggregate):
    n = flux.count()


@flux.stage(partitions=1)
class Keep(flux.Operator):
    def process(self, batch: pa.RecordBatch) -> None: ...


@flux.stage(partitions=1)
def same(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def nothing(batch: pa.RecordBatch, position: Any) -> None: ...


def windows(given: Any, column: str = "ts", **how: Any) -> Any:
    return flux.stage(key="k", window=flux.window(column, "1 minute"), **how)(Counts)(given)


def edge_of(plan: Plan, number: int = 0) -> FromSource:
    edge = plan.edges[number]
    assert isinstance(edge, FromSource)
    return edge


# ---- the plan


def test_a_watermark_is_that_of_its_source_and_needs_no_stage() -> None:
    plan = compiled(Keep(source().withWatermark("ts", "10 seconds", idle="1 minute", advance=True)))
    assert [stage.name for stage in plan.stages] == ["Keep"]
    assert plan.sources[0].event_time == EventTime("ts", 2, 10 * SECOND, 60 * SECOND, True)
    edge = edge_of(plan)
    assert (edge.timed, edge.steps, edge.columns, edge.states) == (Timed.ON_TIME, None, None, True)
    assert plan.stages[0].timed_inputs == (0,)


def test_a_column_of_sure_times_is_read_with_the_times() -> None:
    read = source().where(above(0)).select(("when", TS), ("key", K), ("sent", TS))
    (time,) = [each.event_time for each in compiled(windows_of_key(read)).sources]
    assert time is not None
    assert (time.at, time.max_ahead, time.ahead_of, time.sure) == (0, 3600 * SECOND, "sent", 2)
    bids = source(SCHEMA.append(pa.field("sent", TIME))).withWatermark(
        "ts", "0 seconds", maxAhead="1 day", aheadOf="sent"
    )
    (time,) = [each.event_time for each in compiled(windows(bids)).sources]
    assert time is not None
    (read_of,) = (plan := compiled(windows(bids))).sources
    assert (read_of.schema.names[time.at], read_of.schema.names[time.sure or 0]) == ("ts", "sent")
    assert columns_read(time, list(plan.edges)) == [1, 2, 4]


def windows_of_key(read: Any) -> Any:
    timed = read.withWatermark("when", "0 seconds", maxAhead="1 hour", aheadOf="sent")
    return flux.stage(key="key", window=flux.window("when", "1 minute"))(Counts)(timed)


def test_without_a_watermark_nothing_is_declared() -> None:
    plan = compiled(Keep(source()))
    assert plan.sources[0].event_time is None
    assert (edge_of(plan).timed, edge_of(plan).states) == (Timed.ALL, False)
    assert plan.stages[0].timed_inputs == ()
    assert "event time" not in explain(plan)
    assert "event time" not in description(plan)["sources"][0]


def test_steps_in_front_belong_to_the_source_and_steps_behind_to_the_edge() -> None:
    read = source().where(above(0)).select(("when", TS), ("key", K), ("doubled", X))
    plan = compiled(Keep(read.withWatermark("when", "0 seconds").where(above(7, Column("doubled", LONG)))))
    time, edge = plan.sources[0].event_time, edge_of(plan)
    assert time is not None
    assert (time.column, time.at, time.delay, time.idle, time.columns) == ("when", 0, 0, None, (1, 2, 3))
    assert str(time.steps) == (
        "where greater(`x`, 0:BIGINT):BOOLEAN; select `ts` as `when`, `k` as `key`, `x` as `doubled`"
    )
    assert str(edge.steps) == "where greater(`doubled`, 7:BIGINT):BOOLEAN"
    assert edge.schema.names == ["when", "key", "doubled"]


def test_late_rows_are_a_flow_of_their_own_with_the_same_steps() -> None:
    bids = source().withWatermark("ts", "10 seconds")
    plan = compiled(Keep(bids.where(above(7))), Keep(bids.late.select(("k", K))), Keep(bids.where(above(9)).late))
    assert len(plan.sources) == 1
    assert [edge_of(plan, at).timed for at in range(3)] == [Timed.ON_TIME, Timed.LATE, Timed.LATE]
    assert [str(edge.steps)[:6] for edge in plan.edges] == ["where ", "select", "where "]
    assert [edge.states for edge in plan.edges] == [True, False, False]
    assert [stage.timed_inputs for stage in plan.stages] == [(0,), (), ()]


def test_late_rows_may_go_to_a_sink_of_their_own() -> None:
    bids = source().withWatermark("ts", "10 seconds")
    plan = compiled(bids.late.foreach_batch(nothing), windows(bids).foreach_batch(nothing))
    assert [stage.name for stage in plan.stages] == ["bids.late", "Counts"]
    assert [edge_of(plan, at).timed for at in range(2)] == [Timed.LATE, Timed.ON_TIME]


def test_a_source_may_be_read_beside_its_watermark() -> None:
    bids = source()
    plan = compiled(Keep(bids), windows(bids.withWatermark("ts", "1 second")))
    assert [edge_of(plan, at).timed for at in range(2)] == [Timed.ALL, Timed.ON_TIME]
    assert [stage.timed_inputs for stage in plan.stages] == [(), (0,)]


def test_only_columns_that_are_looked_at_and_the_times_are_read() -> None:
    bids = source().withWatermark("ts", "1 second")
    plan = compiled(windows(bids), flux.stage(key="k")(type("Xs", (flux.Aggregate,), {"t": flux.sum("x")}))(bids))
    time = plan.sources[0].event_time
    assert time is not None
    assert (time.columns, time.at) == (None, 2), "edges that are added later may look at any column"
    assert columns_read(time, list(plan.edges)) == [1, 2, 3]
    assert [(edge.columns, edge.schema.names) for edge in plan.edges] == [((1, 2), ["k", "ts"]), ((1, 3), ["k", "x"])]


def test_the_times_are_read_also_where_no_stage_looks_at_them() -> None:
    total = flux.stage(key="k")(type("Xs", (flux.Aggregate,), {"t": flux.sum("x")}))
    time = (plan := compiled(total(source().withWatermark("ts", "1 second")))).sources[0].event_time
    assert time is not None
    assert columns_read(time, list(plan.edges)) == [1, 2, 3]
    assert (edge_of(plan).columns, edge_of(plan).key) == ((1, 3), (0,))


def test_steps_in_front_are_narrowed_to_what_is_looked_at() -> None:
    read = source().select(("unread", X), ("ts", TS), ("k", K)).withWatermark("ts", "1 second")
    time = (plan := compiled(windows(read))).sources[0].event_time
    assert time is not None
    assert (str(time.steps), time.columns, time.at) == ("select `ts` as `ts`, `k` as `k`", (1, 2), 0)
    assert edge_of(plan).columns == (1, 0) or edge_of(plan).columns is None
    assert edge_of(plan).schema.names == ["ts", "k"]


def test_spark_reads_only_the_columns_that_are_needed() -> None:
    read = DataFrameSource("rows", SCHEMA)
    plan = compiled(windows(read.withWatermark("ts", "1 second")))
    (origin,) = plan.sources
    assert isinstance(origin, DataFrameSourcePlan)
    assert (origin.columns, origin.schema.names) == ((1, 2), ["k", "ts"])
    assert origin.event_time is not None
    assert (origin.event_time.columns, origin.event_time.at) == (None, 1)
    assert (edge_of(plan).timed, edge_of(plan).states) == (Timed.ON_TIME, False), "it tells nothing before its end"
    assert plan.stages[0].timed_inputs == (0,)
    plan = compiled(
        windows(read.withWatermark("ts", "1 second")), Keep(read.select(("note", Column("note", pa.string()))))
    )
    assert (plan.sources[0].schema.names, plan.sources[0].event_time.columns) == (["note", "k", "ts"], (1, 2))  # type: ignore[union-attr]


def test_micro_batches_have_a_watermark() -> None:
    read = StreamSource("ticks", SCHEMA, object())  # type: ignore[arg-type]
    plan = compiled(windows(read.withWatermark("ts", "1 second")).to_readers())
    assert (edge_of(plan).timed, edge_of(plan).states) == (Timed.ON_TIME, True)
    check_ends(plan)


def test_a_batch_dataframe_is_a_source_with_these_methods() -> None:
    class DataFrame:
        isStreaming = False  # noqa: N815

    DataFrame.__module__ = "pyspark.sql.dataframe"
    given = DataFrame()
    read = flux.batch(given)
    assert isinstance(read, DataFrameSource)
    assert flux.batch(given) is read, "one DataFrame that feeds two stages is read once"
    assert read.withWatermark("ts", "1 second").late.watermark is not None
    DataFrame.isStreaming = True
    with pytest.raises(UsageError, match=r"got a streaming one .*: flux\.stream\(df\)"):
        flux.batch(DataFrame())
    with pytest.raises(UsageError, match="expected a DataFrame, got int"):
        flux.batch(5)
    for module, words in (
        ("pandas.core.frame", "a pandas DataFrame; spark.createDataFrame"),
        ("polars", "polars.*DataFrame"),
    ):
        with pytest.raises(UsageError, match=f"flux.batch: .*got {words}"):
            flux.batch(type("DataFrame", (), {"__module__": module})())


def test_a_trigger_copies_the_watermark(monkeypatch: pytest.MonkeyPatch) -> None:
    read = StreamSource("ticks", SCHEMA, object(), StreamOptions())  # type: ignore[arg-type]
    flow = Keep(read.withWatermark("ts", "1 second").late)
    triggered = FlowWriter(flow).trigger(availableNow=True)._triggered(flow)
    (late,) = triggered.inputs
    assert late.is_late
    assert late.watermark is flow.inputs[0].watermark


def test_explain_tells_times_and_late_rows() -> None:
    bids = source().withWatermark("ts", "90 seconds", idle="1 minute")
    text = explain(compiled(Keep(bids.late), windows(bids)))
    assert "    event time: ts less 90 seconds, idle after 1 minute\n" in text
    assert "    reads the late rows of source bids" in text
    assert re.search(r"    reads source bids, rows by hash of k", text)


# ---- event time behind stages


def test_event_time_goes_through_stages_that_promise_it() -> None:
    bids = source(endless=True).withWatermark("ts", "1 second")

    @flux.stage(event_time="ts", partitions=2)
    def keeps(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch

    plan = compiled(windows(keeps(bids)).to_readers())
    assert [stage.timed_inputs for stage in plan.stages] == [(0,), (0,)]
    assert [edge.states for edge in plan.edges] == [True, True]
    check_ends(plan)
    chained = compiled(windows(windows(bids).select(("k", K), ("end", Column("window_end", TIME))), "end").to_readers())
    assert [edge.states for edge in chained.edges] == [True, True]
    check_ends(chained)


def test_a_flow_that_is_read_twice_passes_its_event_time_on() -> None:
    bids = source(endless=True).withWatermark("ts", "1 second").where(above(5))
    plan = compiled(bids.foreach_batch(nothing), windows(bids).foreach_batch(nothing))
    assert [stage.name for stage in plan.stages] == ["bids.rows", "Counts", "bids.rows.sink"]
    assert [edge.states for edge in plan.edges] == [True, True, False]
    check_ends(plan)


def test_a_window_waits_for_all_inputs_and_an_operator_for_those_with_event_time() -> None:
    timed, other = source().withWatermark("ts", "1 second"), source(name="other")
    plan = compiled(flux.stage(key="k", window=flux.window("ts", "1 minute"))(Counts)(other, timed), Keep(other, timed))
    assert [stage.timed_inputs for stage in plan.stages] == [(0, 1), (1,)]
    assert [edge.states for edge in plan.edges] == [False, True, False, True]


class WithTimers(Keep.target):
    schema = pa.schema([("k", LONG)])

    def on_event_timer(self, name: str) -> Any:
        yield from ()


class WithTimersByKey(flux.KeyedOperator):
    schema = pa.schema([("k", LONG)])

    def on_row(self, key: Any, row: Any, state: Any) -> None: ...

    def on_key_event_timer(self, key: Any, state: Any) -> None: ...


@pytest.mark.parametrize("operator", [WithTimers, WithTimersByKey])
def test_timers_of_event_time_that_would_never_fire_are_refused(operator: Any) -> None:
    stage = flux.stage(key="k", partitions=1, name="timed")(operator)
    why = r"stage timed has on_.*event_timer.*source bids has no watermark.*bids\.withWatermark\('ts', '10 seconds'\)"
    with pytest.raises(UsageError, match=why):
        check_ends(compiled(stage(source(endless=True)).foreach_batch(nothing)))
    with pytest.raises(UsageError, match=r"rows that stage same gives have no event time.*event_time='ts'"):
        check_ends(compiled(stage(same(source(endless=True).withWatermark("ts", "1 second"))).foreach_batch(nothing)))
    for fires in (source(), source(endless=True).withWatermark("ts", "1 second")):
        check_ends(compiled(stage(fires).foreach_batch(nothing)))


@pytest.mark.parametrize("how", [{"output_mode": "update"}, {"output_mode": "complete"}])
def test_results_that_are_not_final_have_no_event_time(how: Any) -> None:
    plan = compiled(Keep(windows(source().withWatermark("ts", "1 second"), **how)))
    assert [edge.states for edge in plan.edges] == [True, False]


@pytest.mark.parametrize(
    ("flow", "said"),
    [
        (lambda bids: windows(bids), r"bids has no watermark and may never end. .*: bids.withWatermark\('ts', '10 seconds'\)"),
        (lambda bids: windows(same(bids)), r"source bids, some stages before, has no watermark .*bids.withWatermark\('ts', "),
        (lambda bids: windows(same(bids.withWatermark("ts", "1 second"))), r"same gives have no event time.*_time='ts'\)"),
        (lambda bids: windows(bids.withWatermark("ts", "1 second").late), "late rows of source bids have no watermark"),
        (lambda bids: same(windows(bids), bids.withWatermark("ts", "1 second")), "reads source bids beside its watermark"),
    ],
)  # fmt: skip
def test_windows_that_would_never_close_are_refused_with_the_line_to_write(flow: Any, said: str) -> None:
    with pytest.raises(
        UsageError, match=rf"(?s)stage Counts has windows and output_mode=\"append\".*{said}.*\"update\""
    ):
        check_ends(compiled(Keep(flow(source(endless=True)))))
    check_ends(compiled(Keep(flow(source(endless=False)))))


def test_windows_of_another_column_than_that_of_the_watermark_are_refused() -> None:
    bids = source().withWatermark("ts", "1 second")
    renamed = bids.select(("k", K), ("when", TS))
    compiled(windows(renamed, "when"))
    with pytest.raises(
        UsageError, match="windows of 'x2', and the watermark of source bids is that of 'ts', which is not there"
    ):
        compiled(windows(bids.select(("k", K), ("x2", FunctionCall("add_to_time", (TS, TS), TIME))), "x2"))
    frame = DataFrameSource("frame", SCHEMA).withWatermark("ts", "1 second")
    compiled(windows(frame.select(("k", K), ("t", FunctionCall("add_to_time", (TS, TS), TIME))), "t"))  # as in Spark
    later = bids.select(("k", K), ("ts", TS), ("due", FunctionCall("add_to_time", (TS, TS), TIME)))
    with pytest.raises(
        UsageError, match=r"windows of 'due'.*is that of 'ts'\. Windows close.*in front of withWatermark"
    ):
        compiled(windows(later, "due"))


def test_windows_behind_windows_are_those_of_the_end() -> None:
    """Refuse windows of the start: the start of a window that has closed is below the watermark, and its rows would be
    left out without a word."""
    first = windows(source().withWatermark("ts", "1 second"))
    for wrong in (first, first.select(("k", K), ("window_start", Column("window_start", TIME)))):
        with pytest.raises(
            UsageError, match=r"windows of 'window_start', and the watermark of stage Counts is that of 'window_end'"
        ):
            compiled(windows(wrong, "window_start"))
    made = first.select(("k", K), ("t", FunctionCall("add_to_time", (Column("window_end", TIME),) * 2, TIME)))
    compiled(windows(made, "t"))
    keeps = flux.stage(event_time="ts")(lambda batch: batch)
    with pytest.raises(
        UsageError, match=r"windows of 'x', and the watermark of stage .* is that of 'ts'\. Windows close"
    ):
        compiled(
            windows(
                keeps(source(pa.schema([("ts", TIME), ("x", TIME), ("k", LONG)])).withWatermark("ts", "1 second")), "x"
            )
        )


# ---- the checkpoint location


def test_another_declaration_does_not_go_on_from_a_checkpoint_location() -> None:
    def kept(flow: Any) -> dict[str, Any]:
        return json.loads(json.dumps(description(compiled(flow))))  # type: ignore[no-any-return]

    def declared(*how: Any, **more: Any) -> dict[str, Any]:
        return kept(windows(source().withWatermark("ts", *how, **more)))

    was = declared("10 seconds", idle="1 minute")
    assert difference(was, declared("10000 milliseconds", idle="60 seconds")) == ""
    for idle in ({}, {"idle": "2 minutes"}, {"idle": "1 minute", "advance": True}):
        assert difference(was, declared("10 seconds", **idle)) == "", "idleness makes no row late"
    for now, said in [
        (declared("11 seconds", idle="1 minute"), "ts less 10 seconds and is ts less 11 seconds"),
        (declared("10 seconds", idle="1 minute", maxAhead="1 hour"), "and is .*, believed up to 1 hour ahead"),
        (kept(windows(source())), "source 'bids': its event time was .* and is not declared"),
        (kept(windows(source().where(above(3)).withWatermark("ts", "10 seconds", idle="1 minute"))), "is .*, behind where"),
    ]:  # fmt: skip
        assert re.search(said, difference(was, now)), difference(was, now)
    assert "its event time was not declared" in difference(kept(windows(source())), was)
    bids = source().withWatermark("ts", "1 second")
    rows = kept(Keep(bids)), kept(Keep(bids.late))
    assert "the rows of bids that are on time, and reads those that are late" in difference(*rows)


# ---- bad declarations


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("ts", "-1 second"), r"delayThreshold: expected a duration of zero or more, got '-1 second'"),
        (("ts", "1 month"), "a month has no fixed length"),
        (("ts", 10), "delayThreshold: expected a duration as text"),
        (("ts", "soon"), "expected numbers with units"),
        (("ts", "1 second", "0 seconds"), "idle: expected a duration above zero"),
        (("ts", "1 second", "1 year"), "a year has no fixed length"),
        (("ts", "1 second", None, True), "say after which time without rows .* idle='1 minute'"),
        (("ts", "1 second", "1 second", 1), "advance must be True or False, got 1"),
        (("ts", "1 second", None, False, "0 seconds"), "maxAhead: expected a duration above zero"),
        (("ts", "1 second", None, False, "1 month"), "a month has no fixed length"),
        (("ts", "1 second", None, False, None, "ts"), "aheadOf='ts' says from which time maxAhead is measured"),
        (("ts", "1 second", None, False, "1 hour", 3), "aheadOf: expected the name of a column of times"),
        ((TS, "1 second"), "eventTime must be the name of a column"),
        (("", "1 second"), "eventTime must be the name of a column"),
        ((), "missing a required argument: 'eventTime'; it takes eventTime, delayThreshold, idle, advance"),
    ],
)
def test_bad_arguments_are_refused(arguments: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        source().withWatermark(*arguments)


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        (pa.string(), r"withColumn\('when', F.expr\('to_timestamp\(`when`\)'\)\)"),
        (pa.int64(), r".*'timestamp_millis\(`when`\)'.*timestamp_seconds, timestamp_micros"),
        (pa.date32(), r".*'CAST\(`when` AS TIMESTAMP\)'"),
        (pa.float64(), r".*'CAST\(`when` AS TIMESTAMP\)'"),
    ],
)
def test_a_column_that_holds_no_times_is_refused_with_the_remedy(kind: pa.DataType, remedy: str) -> None:
    read = source(pa.schema([("when", kind)])).withWatermark("when", "1 second")
    with pytest.raises(
        SchemaError,
        match=rf"source bids, withWatermark: column 'when' is {re.escape(str(kind))}.* TIMESTAMP. Put {remedy}",
    ):
        compiled(Keep(read))


@pytest.mark.parametrize(
    "kind", [pa.timestamp(unit, zone) for unit in ("s", "ms", "us", "ns") for zone in (None, "UTC")]
)
def test_times_of_any_unit_are_taken(kind: pa.DataType) -> None:
    plan = compiled(Keep(source(pa.schema([("x", LONG), ("When", kind)])).withWatermark("when", "1 second")))
    assert plan.sources[0].event_time == EventTime("When", 1, SECOND)


def test_a_name_may_stand_in_backquotes_as_in_spark() -> None:
    read = source(pa.schema([("a.`t", TIME)])).withWatermark("`a.``t`", "1 second")
    assert compiled(Keep(read)).sources[0].event_time == EventTime("a.`t", 0, SECOND)


def test_a_column_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(
        SchemaError, match=r"withWatermark: 'time' is no column there; there are note string, k int64, ts "
    ):
        compiled(Keep(source().withWatermark("time", "1 second")))
    twice = pa.schema([("ts", TIME), ("TS", TIME)])
    with pytest.raises(SchemaError, match="'Ts' is the name of several columns there"):
        compile_plan(
            [Keep(source(twice).withWatermark("Ts", "1 second"))], Settings.of(), lambda schema: schema, "q", b""
        )


def test_one_source_has_one_watermark_in_a_query() -> None:
    bids = source()
    one, same_one, other = (bids.withWatermark("ts", delay) for delay in ("1 second", "1000 milliseconds", "2 seconds"))
    compiled(Keep(one), Keep(same_one))
    with pytest.raises(
        UsageError, match="source bids has two watermarks in this query, ts less 1 second and ts less 2 seconds"
    ):
        compiled(Keep(one), Keep(other))


def test_two_watermarks_in_one_chain_are_refused() -> None:
    with pytest.raises(UsageError, match=r"twice: source bids has withWatermark\('ts', '1 second'\) already"):
        source().withWatermark("ts", "1 second").where(above(3)).withWatermark("ts", "1 second")


@pytest.mark.parametrize("behind", [lambda flow: flow, lambda flow: flow.where(above(3))])
def test_a_watermark_behind_a_stage_is_refused_with_the_line_to_write(behind: Any) -> None:
    with pytest.raises(
        UsageError, match=r"behind stage same: .*same\(source.withWatermark\('ts', '10 seconds'\)\).*event_time='ts'"
    ):
        behind(same(source())).withWatermark("ts", "1 second")


def test_rows_that_another_streaming_query_writes_have_no_watermark() -> None:
    with pytest.raises(UsageError, match=r"source stream: .*have no watermark yet.*flux.stream\(df\).withWatermark"):
        flux.stream(SCHEMA).select(("ts", TS)).withWatermark("ts", "1 second")
    with pytest.raises(UsageError, match="does not go on with the clock: leave advance out"):
        StreamSource("ticks", SCHEMA, object()).withWatermark("ts", "1 second", "1 minute", True)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [source(), source().where(above(3)), same(source()), same(source()).where(above(3))])
def test_there_are_no_late_rows_without_a_watermark(given: Any) -> None:
    with pytest.raises(AttributeError, match=r"source.withWatermark\('ts', '10 seconds'\)"):
        _ = given.late


@pytest.mark.parametrize(("promised", "schema"), [("when", None), ("x", None), ("ts", pa.schema([("y", LONG)]))])
def test_a_promised_column_has_to_be_one_of_times(promised: str, schema: Any) -> None:
    stage = flux.stage(event_time=promised, schema=schema)(lambda batch: batch)
    with pytest.raises(
        SchemaError, match=f"event_time='{promised}' must be a column of times of its output; there are"
    ):
        compiled(Keep(stage(source().withWatermark("ts", "1 second"))))


def test_a_promise_that_is_no_name_is_refused() -> None:
    with pytest.raises(UsageError, match="event_time must be the name of a column of the output"):
        flux.stage(event_time=5)  # type: ignore[call-overload]
    keeps: Any = flux.stage(event_time="ts")(Keep.target)
    with pytest.raises(SchemaError, match="is a column of the output, and the stage gives no rows"):
        compiled(keeps(source()))


def test_windows_of_processing_time_need_no_watermark_and_their_rows_have_no_event_time() -> None:
    def of_clock(**how: Any) -> Plan:
        return compiled(same(windows(source(endless=True), flux.NOW, **how)).foreach_batch(nothing))

    plan = of_clock()
    check_ends(plan)
    assert not plan.edges[1].states
    with pytest.raises(UsageError, match="it gives its groups once, when all input has ended"):
        check_ends(of_clock(output_mode="complete"))


def test_groups_that_close_at_a_column_go_by_the_watermark_of_another_and_have_event_time() -> None:
    schema = SCHEMA.append(pa.field("expires", TIME))
    declared = flux.stage(key="k", closes="expires")(Counts)
    plan = compiled(same(declared(source(schema, endless=True).withWatermark("ts", "1 second"))).foreach_batch(nothing))
    check_ends(plan)
    assert plan.edges[1].states
    assert plan.edges[1].schema.names == ["k", "expires", "n"]
    with pytest.raises(UsageError, match=r"has no watermark and may never end. Declare it"):
        check_ends(compiled(declared(source(schema, endless=True)).foreach_batch(nothing)))
    with pytest.raises(SchemaError, match="a part of each group by itself; leave it out of the key"):
        compiled(flux.stage(key=("k", "ts"), closes="ts")(Counts)(source()).foreach_batch(nothing))
