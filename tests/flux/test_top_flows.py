"""``flux.top`` and ``flux.last`` behind sources and flows: their plans. A function stands in for Spark's analyser."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import flux
from controller.planning.checks import check_ends
from controller.planning.compiler import compile_plan
from controller.planning.explain import explain
from flux.dataflow.plan import Plan
from flux.dataflow.relations.ranking import ResolvedOrder
from flux.errors import SchemaError, UsageError
from flux.expressions.steps import RowSteps, Select
from flux.expressions.tree import Column
from flux.ranks.top import Last, OrderColumn, RankSpec, Top, TopOfWindow
from flux.settings import Settings
from flux.windows.window import Window
from tests.flux.resolved import to_steps

SCHEMA = pa.schema([("user", pa.string()), ("price", pa.int64()), ("ts", pa.timestamp("us", "UTC"))])


@pytest.fixture(autouse=True)
def no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flux, "_check_columns", lambda flow: None)


def to_order(schema: pa.Schema, by: str) -> ResolvedOrder:
    """Read names with DESC; "2x" is a column of the steps in front."""
    steps = None
    if "2x" in by:
        columns = (
            *((field.name, Column(field.name, field.type)) for field in schema),
            ("2x", Column("price", pa.int64())),
        )
        steps = RowSteps.of(schema, [Select(columns)])
    names = [each.split() for each in by.split(",")]
    return ResolvedOrder(steps, tuple(OrderColumn(name, bool(rest), bool(rest)) for name, *rest in names))


def compiled(*flows: Any, order: Any = to_order) -> Plan:
    given = Settings.of(), lambda schema: schema, "q", b"", 0
    return compile_plan(flows, *given, to_steps=to_steps, to_order=order)


class Endless(flux.SourceReader):
    endless = True

    def read(self, partition: int, start: Any) -> Any:
        return iter(())


def source(watermark: bool = True, endless: bool = False) -> Any:
    made: Any = flux.source(Endless() if endless else lambda partition, start: iter(()), SCHEMA, 1, "bids")
    return made.withWatermark("ts", "10 seconds") if watermark else made


@flux.stage(window=flux.window("ts", "1 minute"), key="user")
class Counted(flux.Aggregate):
    n = flux.count()


def test_ranks_of_windows_take_those_of_the_stage_in_front_and_have_its_event_time() -> None:
    plan = compiled(flux.top(Counted(source()), 1, within="window", by="n DESC", ties=True))
    _counted, top = plan.stages
    assert isinstance(top.make(), TopOfWindow)
    assert top.make()._spec == RankSpec(
        1, (OrderColumn("n", True, True),), ("user", "window_start", "window_end", "n"), True
    )
    assert (top.partitions, top.key, top.timed_inputs) == (1, (), (0,))
    assert plan.edges[1].states
    assert top.output_schema.names == ["user", "window_start", "window_end", "n", "rank"]
    behind = compiled(flux.dedup(flux.top(Counted(source()), 1, within="window", by="n"), key="user", ttl="1 hour"))
    assert behind.stages[2].make()._spec.time == "window_end"
    assert "the first 1 by n DESC NULLS LAST, with ties, of each window" in explain(plan)


def test_windows_of_its_own_are_those_of_the_event_time() -> None:
    flow = flux.top(source(), 3, key="user", by="2x DESC, ts", window=flux.window("ts", "10 seconds"))
    (top,) = compiled(flow).stages
    assert top.make()._spec.window == Window("ts", 10_000_000, 10_000_000)
    assert top.output_schema.names == ["user", "price", "ts", "window_start", "window_end", "rank"]
    assert top.schemas[0].names == ["user", "price", "ts", "2x"]
    assert repr(flow).endswith("top(3, key=['user'], by='2x DESC, ts', window=windows of 10 seconds of ts)")


def test_changes_of_ranks_need_no_watermark_and_are_no_rows_of_their_own() -> None:
    top, last = compiled(
        flux.top(source(watermark=False, endless=True), 10, key="user", by="price DESC"),
        flux.last(source(), key="user", by="ts", ttl="1 day"),
    ).stages
    assert isinstance(top.make(), Top)
    assert isinstance(last.make(), Last)
    assert last.make()._spec == RankSpec(
        1, (OrderColumn("ts", True, True),), tuple(SCHEMA.names), ttl=86_400_000_000, time="ts", backward=True
    )
    assert last.output_schema.names == SCHEMA.names
    with pytest.raises(UsageError, match=r"stage bids\.top gives a row for each change .* or rank within windows"):
        compiled(flux.dedup(flux.top(source(), 3, by="price"), key="user", ttl="1 hour"))
    with pytest.raises(UsageError, match=r"stage bids\.last gives a row for each change"):
        compiled(flux.top(flux.last(source(), key="user", by="ts"), 3, by="price"))


def test_mistakes_are_refused_with_what_to_write() -> None:
    for n in (0, -1, True, 2.0, "3"):
        with pytest.raises(UsageError, match="n must be a whole number from 1"):
            flux.top(source(), n, by="price")
    with pytest.raises(UsageError, match="ties=True needs a window"):
        flux.top(source(), 3, by="price", ties=True)
    for by in ("", " ", None, []):
        with pytest.raises(UsageError, match=r"by says the order of rows, as in by='price DESC, ts'"):
            flux.top(source(), 3, by=by)
    with pytest.raises(UsageError, match="within must be 'window'"):
        flux.top(source(), 3, by="price", within="hour")
    with pytest.raises(UsageError, match="sessions differ by key"):
        flux.top(source(), 3, by="price", window=flux.session_window("ts", "1 minute"))
    with pytest.raises(UsageError, match="give one of them"):
        flux.top(source(), 3, by="price", within="window", window=flux.window("ts", "1 minute"))
    with pytest.raises(UsageError, match=r"window=flux.window\('ts', '10 minutes'\)"):
        compiled(flux.top(source(), 3, by="price", within="window"))
    with pytest.raises(UsageError, match="windows are of a column of times, got 'price'"):
        compiled(flux.top(source(), 3, by="price", window=flux.window("price", "1 minute")))
    with pytest.raises(UsageError, match="key must name the columns"):
        flux.last(source(), key=None, by="ts")
    with pytest.raises(UsageError, match="shorter than the '10 seconds'"):
        compiled(flux.last(source(), key="user", by="ts", ttl="1 second"))
    with pytest.raises(UsageError, match="resolved by Spark, and there is no session"):
        compiled(flux.top(source(), 3, by="price"), order=None)
    with pytest.raises(SchemaError, match="key 'usr' is not a column"):
        compiled(flux.top(source(), 3, by="price", key="usr"))


def test_ranks_of_windows_that_would_never_come_are_refused_with_the_line_to_write() -> None:
    flow = flux.top(source(watermark=False, endless=True), 1, by="price", window=flux.window("ts", "1 minute"))
    with pytest.raises(
        UsageError, match=r"gives rows when the watermark has passed.*bids.withWatermark\('ts', '10 seconds'\)"
    ):
        check_ends(compiled(flow.foreach_batch(print)))
    check_ends(
        compiled(
            flux.top(source(endless=True), 1, by="price", window=flux.window("ts", "1 minute")).foreach_batch(print)
        )
    )


WIDE = pa.schema([("note", pa.string()), *SCHEMA, ("other", pa.string())])


def wide(name: str = "bids", schema: pa.Schema = WIDE) -> Any:
    return flux.source(lambda partition, start: iter(()), schema, 1, name).withWatermark("ts", "10 seconds")


def rates() -> Any:
    schema = pa.schema(
        [("user", pa.string()), ("at", WIDE.field("ts").type), ("rate", pa.int64()), ("more", pa.int64())]
    )
    return flux.source(lambda partition, start: iter(()), schema, 1, "rates").withWatermark("at", "1 minute")


@flux.stage(window=flux.window("ts", "1 minute"), key="user")
class Dearest(flux.Aggregate):
    price = flux.max("price")


@pytest.mark.parametrize(
    ("flow", "travels"),
    [
        (flux.dedup(wide(), key="user", ttl="1 hour"), ["user", "price", "ts"]),
        (flux.dedup(wide(), key=("note", "user"), ttl="1 hour"), ["note", "user", "price", "ts"]),
        (wide().dropDuplicatesWithinWatermark(), WIDE.names),
        (flux.asof_join(wide(), rates(), on="user"), ["user", "price", "ts"]),
    ],
)
def test_columns_that_are_given_on_and_looked_at_nowhere_do_not_travel(flow: Any, travels: list[str]) -> None:
    plan = compiled(Dearest(flow))
    first, _ = plan.stages
    to_first, *_, to_behind = plan.edges
    assert to_first.schema.names == first.schemas[0].names == travels
    assert to_first.schema.field(to_first.key[0]).name == first.key[0]
    assert to_behind.schema.names == ["user", "price", "ts"]
    taken = first.output_schema.names
    assert [taken[at] for at in to_behind.columns or range(len(taken))] == ["user", "price", "ts"]
    assert first.make().output_schema(first.schemas, first.key) == first.output_schema
    if len(plan.edges) == 3:
        assert plan.edges[1].schema.names == ["user", "at", "rate", "more"], "all decide between right rows of one time"
    whole = compiled(flow.to(Kept()))
    assert whole.stages[0].output_schema.names[: len(WIDE)] == WIDE.names


class Kept(flux.Sink):
    def write(self, batch: pa.RecordBatch, position: flux.Position) -> None: ...


def test_ranks_that_are_shared_need_no_other_columns_and_ranks_of_their_own_need_all() -> None:
    window = flux.window("ts", "10 seconds")
    for ties, travels in ((True, ["user", "price", "ts"]), (False, WIDE.names)):
        flow = flux.top(wide(), 3, key="user", by="price DESC", window=window, ties=ties)
        plan = compiled(
            flux.dedup(flow, key=("user", "rank"), ttl="1 hour").select(("u", Column("user", pa.string()))).to(Kept())
        )
        top = plan.stages[0]
        assert plan.edges[0].schema.names == travels
        assert top.make().output_schema(top.schemas, top.key) == top.output_schema
        assert top.make()._spec.outputs == (("user", "price", "ts") if ties else tuple(WIDE.names))
