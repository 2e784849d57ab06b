"""``join`` of flows: the plan that it gives, and mistakes. A function stands in for Spark's analyser."""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from harness import dataframe

import flux
from controller.planning.compiler import compile_plan
from controller.planning.explain import explain
from controller.planning.relations.lookups import lookup_steps
from flux.dataflow.plan import Plan
from flux.dataflow.relations.join_flow import JoinFlow, Joining, JoinInput, LookupFlow, ResolvedJoin
from flux.errors import SchemaError, UsageError
from flux.expressions.steps import MapRows, RowSteps, Select
from flux.expressions.tree import Column, FunctionCall, Literal
from flux.joins.join import Join
from flux.joins.join_spec import LEFT, JoinSpec, TimeBound
from flux.joins.join_text import told_join
from flux.joins.lookup import LookupTable
from flux.operators.operator import Chained
from flux.settings import Settings
from spark_integration.expressions.joins import with_time
from spark_integration.query.same_plan import description

LONG, TIME = pa.int64(), pa.timestamp("us", "UTC")
CLICKS = pa.schema([("ad", LONG), ("x", LONG), ("at", TIME)])
VIEWS = pa.schema([("id", LONG), ("y", LONG), ("seen", TIME)])


@pytest.fixture(autouse=True)
def no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flux, "_check_columns", lambda flow: None)


def source(schema: pa.Schema, name: str) -> Any:
    return flux.source(lambda partition, start: iter(()), schema, 1, name)


def flows() -> Any:
    return source(CLICKS, "clicks").withWatermark("at", "1 second"), source(VIEWS, "views").withWatermark(
        "seen", "1 hour"
    )


class Keep(flux.Sink):
    def write(self, position: Any, batch: Any) -> None: ...


def to_join(left: JoinInput, right: JoinInput, joining: Joining, behind: Any) -> ResolvedJoin:
    """Join ``ad`` with ``id``, clicks up to a minute behind views."""
    outputs = tuple((name, at) for at, name in enumerate([*left.schema.names, *right.schema.names]))
    bounds = TimeBound(LEFT, False, 2, 0), TimeBound(LEFT, True, 2, 60_000_000)
    times = tuple(2 if side.times else None for side in (left, right))
    spec = JoinSpec(
        joining.how, ((0,), (0,)), outputs, times, bounds if all(times) else (), None, joining.ttl, LEFT if all(times) else None
    )  # fmt: skip
    doubled = Select(tuple((name, Column(name, left.schema.field(name).type)) for name in left.schema.names))
    before = RowSteps.of(left.schema, [doubled]), None
    return ResolvedJoin(before, (("ad",), ("id",)), spec, partial(Join, spec, left.schema, right.schema), None, None)


def compiled(*flows: Any, resolver: Any = to_join, **more: Any) -> Plan:
    return compile_plan(flows, Settings.of(), lambda schema: schema, "q", b"", to_join=resolver, **more)


def test_a_join_is_a_stage_with_a_key_of_its_own_names_on_each_side() -> None:
    clicks, views = flows()
    plan = compiled(clicks.join(views, "ad").to(Keep()))
    (stage,) = plan.stages
    left, right = (plan.edges[edge] for edge in stage.edges_in)
    assert stage.name == "clicks.join.views"
    assert [left.schema.field(at).name for at in left.key] == ["ad"]
    assert [right.schema.field(at).name for at in right.key] == ["id"]
    assert stage.timed_inputs == (0, 1)
    assert stage.output_schema is not None
    assert stage.output_schema.names == ["ad", "x", "at", "id", "y", "seen"]
    text = explain(plan)
    assert "stage clicks.join.views: inner join" in text
    assert "bounds: left.at >= right.seen and left.at <= right.seen + 1 minute" in text
    assert pickle.loads(pickle.dumps(stage.make))().spec == stage.make().spec  # type: ignore[attr-defined]


def test_windows_stand_behind_a_join_with_bounds_and_go_by_its_time() -> None:
    @flux.stage(key="x", window=flux.window("at", "1 hour"))
    class Counts(flux.Aggregate):
        n = flux.count()

    clicks, views = flows()
    _, counts = compiled(Counts(clicks.join(views, "ad")).to(Keep())).stages
    assert counts.timed_inputs == (0,)

    @flux.stage(key="x", window=flux.window("seen", "1 hour"))
    class Seen(flux.Aggregate):
        n = flux.count()

    with pytest.raises(
        UsageError, match=r"windows of 'seen', and the watermark of stage clicks.join.views is that of 'at'"
    ):
        compiled(Seen(clicks.join(views, "ad")).to(Keep()))


@pytest.mark.parametrize("how", ["inner", "left_outer", "right_outer", "full_outer", "left_semi"])
def test_a_join_without_bounds_gives_old_times_with_new_rows_and_so_has_no_event_time(how: str) -> None:
    bounds = TimeBound(LEFT, False, 2, -5), TimeBound(LEFT, True, 2, 60)
    spec = JoinSpec(how, ((0,), (0,)), (("ad", 0),), (2, 2), ttl=60)
    assert with_time(spec).time_of is None
    assert with_time(replace(spec, bounds=bounds)).time_of is not None


@pytest.mark.parametrize(
    ("spelled", "how"),
    [
        (None, "inner"), ("inner", "inner"), ("left", "left_outer"), ("leftOuter", "left_outer"), ("LEFT_OUTER", "left_outer"),
        ("right", "right_outer"), ("rightouter", "right_outer"), ("outer", "full_outer"), ("full", "full_outer"),
        ("full_outer", "full_outer"), ("semi", "left_semi"), ("leftsemi", "left_semi"), ("anti", "left_anti"),
        ("left_anti", "left_anti"),
    ],
)  # fmt: skip
def test_kinds_have_the_spellings_of_pyspark(spelled: Any, how: str) -> None:
    clicks, views = flows()
    assert clicks.join(views, "ad", spelled).inputs[0].joining.how == how


def test_a_flow_that_gives_changes_is_refused() -> None:
    @flux.stage(key="ad", output_mode="update")
    class Counts(flux.Aggregate):
        x = flux.count()
        at = flux.max("at")

    clicks, views = flows()
    with pytest.raises(UsageError, match=r'join.views: stage Counts gives a row for each change .* "update"'):
        compiled(Counts(clicks).join(views, "ad", ttl=None).to(Keep()))


def test_a_checkpoint_location_tells_other_joins() -> None:
    clicks, views = flows()
    described = [
        description(compiled(clicks.join(views, "ad", ttl=ttl).to(Keep()))) for ttl in ("1 day", "2 days", "1 day")
    ]
    assert described[0] != described[1]
    assert described[0] == described[2]


def test_with_stage_and_copies_keep_the_join() -> None:
    clicks, views = flows()
    flow = clicks.join(views, "ad").withStage(name="Both", partitions=3)
    (stage,) = compiled(flow.to(Keep())).stages
    assert (stage.name, stage.partitions) == ("Both", 3)
    join = flow.inputs[0]
    assert join.copied(list(join.inputs)).stage.name == "Both"
    assert ".join(" in repr(flow)
    assert "'ad', 'inner'" in repr(flow)


@pytest.mark.parametrize("how", ["right", "full"])
def test_batch_dataframes_alone_are_joined_without_bounds_and_without_ttl(how: str) -> None:
    @flux.stage
    def same(batch: Any) -> Any:
        return batch

    ads, views = dataframe(CLICKS, "ads"), dataframe(VIEWS, "views")
    for left in (ads, ads.withWatermark("at", "1 second"), same(ads), ads.union(ads)):
        found = left.join(views, "ad", how).inputs[0]
        assert isinstance(found, JoinFlow)
        assert not found.joining.says_ttl
    assert isinstance(ads.join(views, "ad", "left").inputs[0], LookupFlow)
    clicks, _ = flows()
    for endless in (clicks, ads.union(clicks)):
        with pytest.raises(UsageError, match="gives rows of the DataFrame without a match"):
            endless.join(views, "ad", how)


def test_mistakes_are_refused_at_the_call() -> None:
    clicks, views = flows()
    for call, words in [
        (lambda: clicks.join(views, "ad", "cross"), "how='cross' gives every pair of rows"),
        (lambda: clicks.join(views, "ad", "inner outer"), "how must be one of inner, left, right, full"),
        (lambda: clicks.join(views, "ad", 5), "how must be one of .* got 5"),
        (lambda: clicks.join(views, 5), "on must be the name of a column .* got int 5"),
        (lambda: clicks.join(views, ["ad", 5]), "names of columns, or Columns, and not both"),
        (lambda: clicks.join(views, "ad", ttl="1 month"), "join, ttl: a month has no fixed length"),
        (lambda: clicks.join(views, "ad", ttl="0 seconds"), "join, ttl: expected a duration above zero"),
        (lambda: clicks.join("views", "ad"), "an input must be a DataFrame, a flow or a source"),
        (lambda: clicks.join(views, "ad").crossJoin(views), "flow has no crossJoin: .*flow.join"),
        (lambda: clicks.join(views, "ad").inputs[0].connect(views), "takes the rows of two flows"),
        (lambda: compiled(clicks.join(views, "ad").to(Keep()), resolver=None), "there is no session"),
    ]:
        with pytest.raises(UsageError, match=words):
            call()


def test_a_column_that_is_there_twice_is_refused_where_names_are_needed() -> None:
    def twice(*given: Any) -> ResolvedJoin:
        found = to_join(*given)
        return ResolvedJoin(found.before, found.keys, found.spec, found.make, found.after, "ts")

    def other(left: JoinInput, right: JoinInput, joining: Joining, behind: Any) -> ResolvedJoin:
        found = twice(left, right, joining, behind)
        keys = ("ad",), (right.schema.names[0],)
        return ResolvedJoin(found.before, keys, found.spec, found.make, found.after, found.twice)

    clicks, views = flows()
    flow = clicks.join(views, "ad")
    with pytest.raises(SchemaError, match=r"clicks.join.views: several columns are called 'ts'; choose columns"):
        compiled(flow.to(Keep()), resolver=twice)
    compiled(flow, resolver=twice, trial=True)
    schema = pa.schema([("other", LONG), ("z", LONG), ("then", TIME)])
    both = compiled(flow.join(source(schema, "others"), "ad", ttl=None), resolver=other, trial=True)
    assert [stage.name for stage in both.stages] == ["clicks.join.views", "clicks.join.views.join.others"]


def test_a_join_tells_its_rest_and_for_how_long_rows_wait() -> None:
    rest = FunctionCall("less", (Column("1", LONG), Column("4", LONG)), pa.bool_())
    spec = JoinSpec(
        "inner", ((0,), (0,)), (("ad", 0),), (2, None), (TimeBound(LEFT, True, 2, -5_000_000),), rest, 3_600_000_000
    )
    assert list(told_join(spec, (CLICKS, VIEWS))) == [
        "keys: left.ad = right.id",
        "bounds: left.at <= right.seen - 5 seconds",
        "rest of the condition, for each pair: left.x < right.y",
        "left rows wait for 1 hour (ttl)",
        "right rows wait until the watermark of the left side has passed their bounds or for 1 hour (ttl)",
    ]


# ---- tables in every worker

TABLE = pa.table({"id": pa.array([3, 1, None, 2], LONG), "name": ["c", "a", "null", "b"]})


def table(rows: pa.Table, key: Any = (0,), read_by: Any = ("ad",)) -> LookupTable:
    return LookupTable(rows, key, [*rows.column_names, "found"], read_by, "id in table t")


def test_rows_find_those_of_their_key_in_their_order() -> None:
    batch = pa.record_batch({"ad": pa.array([2, None, 1, 9, 2], LONG), "x": [1, 2, 3, 4, 5]})
    for lookup in (table(TABLE), pickle.loads(pickle.dumps(table(TABLE)))):
        found = lookup(batch)
        assert found.schema.names == ["ad", "x", "id", "name", "found"]
        assert found.column("name").to_pylist() == ["b", None, "a", None, "b"]
        assert found.column("found").to_pylist() == [True, False, True, False, True]
        assert found.column("x").to_pylist() == [1, 2, 3, 4, 5]
    assert [(field.name, field.type) for field in table(TABLE).added] == list(
        zip(found.schema.names[2:], found.schema.types[2:], strict=True)
    )
    assert table(TABLE.slice(0, 0))(batch).column("found").to_pylist() == [False] * 5
    assert table(TABLE)(batch.slice(0, 0)).num_rows == 0


def test_more_text_than_a_column_holds_is_refused_with_the_setting_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flux.joins.lookup.TEXT_MAX", 1000)
    lookup = table(pa.table({"id": pa.array([1, 2], LONG), "name": ["a" * 300, "b"], "tags": [["c"], None]}))
    assert lookup(pa.record_batch({"ad": pa.array([1, 2, 3] * 3, LONG)})).num_rows == 9
    with pytest.raises(
        UsageError, match=r"id in table t gives 4 rows .* up to 309 bytes .* say spark.flux.batch.maxRows=3,"
    ):
        lookup(pa.record_batch({"ad": pa.array([1, 1, 3, 1, 1], LONG)}))


def test_keys_are_equal_as_in_spark() -> None:
    nan = float("nan")
    rows = pa.table({"id": [nan, 0.0], "word": ["a", "b"], "n": [1, 2]})
    batch = pa.record_batch({"ad": [nan, -0.0, 0.0, 1.0], "w": ["a", "b", "a", "a"]})
    found = table(rows, (0, 1), ("ad", "w"))(batch)
    assert found.column("n").to_pylist() == [1, 2, None, None]


def test_many_keys_find_their_rows() -> None:
    keys = np.random.default_rng(3).permutation(50_000)
    rows = pa.table({"id": keys, "name": [f"n{key}" for key in keys]})
    batch = pa.record_batch({"ad": np.arange(-100, 50_100)})
    names = table(rows)(batch).column("name").to_pylist()
    assert names == [None] * 100 + [f"n{key}" for key in range(50_000)] + [None] * 100


def test_the_same_hash_is_not_the_same_key(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = lambda columns: np.asarray(columns[0]).astype(np.int64) % 2  # noqa: E731
    monkeypatch.setattr("flux.joins.lookup.hash_columns", hashes)
    rows = pa.table({"id": [4, 1, 2, 3], "n": [40, 10, 20, 30]})
    batch = pa.record_batch({"ad": [1, 2, 3, 4, 5, 6]})
    assert table(rows)(batch).column("n").to_pylist() == [10, 20, 30, 40, None, None]
    assert table(rows).first_twice() is None
    assert table(pa.table({"id": [4, 1, 2, 1]})).first_twice() == [1]
    assert table(pa.table({"id": [4, 1, 2, 1], "n": [4, 1, 2, 9]})).unique()(batch).column("n").to_pylist()[0] == 1


@pytest.mark.parametrize("how", ["inner", "left_outer", "left_semi", "left_anti"])
@pytest.mark.parametrize("rest", [False, True])
def test_each_kind_of_join_is_steps_behind_a_lookup(how: str, rest: bool) -> None:
    above = FunctionCall("greater", (Column("1", LONG), Literal(1, LONG)), pa.bool_()) if rest else None
    outputs = (("ad", 0), ("x", 1)) if how.endswith(("semi", "anti")) else (("ad", 0), ("x", 1), ("name", 3))
    left = pa.schema([("ad", LONG), ("x", LONG)])
    spec = JoinSpec(how, ((0,), (0,)), outputs, rest=above)
    resolved = ResolvedJoin((None, None), (("ad",), ("id",)), spec, partial(Join, spec, left, TABLE.schema), None, None)
    steps = lookup_steps(resolved, left, TABLE, "t")
    given = [(2, 1), (None, 2), (1, 3), (9, 4)]
    names = {1: "a", 2: "b", 3: "c"}
    batch = pa.record_batch([pa.array(column, LONG) for column in zip(*given, strict=True)], schema=left)
    expected: list[Any] = []
    for ad, x in given:
        name = names.get(ad) if ad is not None and (not rest or x > 1) else None
        if how == "left_outer" or (name is None) == (how == "left_anti"):
            expected.append((ad, x) if len(outputs) == 2 else (ad, x, name))
    found, kept = steps.run(batch)
    assert [tuple(row.values()) for row in found.to_pylist()] == expected
    if kept is not None:
        assert len(kept) == len(expected)
    assert steps.names_of("x") == ["x"], "a time in front of it is the same time behind it"


def test_a_lookup_reads_the_columns_that_are_wanted_and_keeps_those_of_the_table() -> None:
    left = pa.schema([("ad", LONG), ("x", LONG), ("p", pa.string()), ("q", pa.string())])
    rows = TABLE.append_column("more", pa.array(["m"] * 4)).append_column("unread", pa.array(["u"] * 4))
    outputs = tuple((name, at) for at, name in enumerate([*left.names, *rows.column_names]))
    spec = JoinSpec("left_outer", ((0,), (0,)), outputs)
    given = Join(spec, left, rows.schema).output_schema((), ())
    after = to_steps(given, lambda chosen: chosen.select("p", "name", "more"))
    resolved = ResolvedJoin((None, None), (("ad",), ("id",)), spec, partial(Join, spec, left, rows.schema), after, None)
    steps = lookup_steps(resolved, left, rows, "t")
    assert steps.needs() == ["ad", "p"]
    assert steps.only(["name"]).needs() == ["ad"]
    (looked_up,) = (step for step in steps.chain if isinstance(step, MapRows))
    assert looked_up.output.names == [*left.names, "id", "name", "more", "found"]
    batch = pa.record_batch({"ad": pa.array([3, 9], LONG), "p": ["v", "w"]})
    expected = [{"p": "v", "name": "c", "more": "m"}, {"p": "w", "name": None, "more": None}]
    assert steps.apply(batch).to_pylist() == expected
    whole = pa.record_batch({"ad": pa.array([3, 9], LONG), "x": [1, 2], "p": ["v", "w"], "q": ["", ""]})
    assert steps.apply(whole).to_pylist() == expected


def test_a_key_that_is_there_twice_is_refused_unless_it_makes_no_difference() -> None:
    rows = pa.table({"id": [1, 1], "name": ["a", "b"]})
    left = pa.schema([("ad", LONG)])

    def steps(how: str) -> RowSteps:
        outputs = (("ad", 0),) if how == "left_semi" else (("ad", 0), ("name", 2))
        spec = JoinSpec(how, ((0,), (0,)), outputs)
        made = ResolvedJoin((None, None), (("ad",), ("id",)), spec, partial(Join, spec, left, rows.schema), None, None)
        return lookup_steps(made, left, rows, "ads")

    with pytest.raises(UsageError, match=r"several rows of the table ads have id = 1, .*or say ttl=None"):
        steps("inner")
    assert steps("left_semi").apply(pa.record_batch({"ad": [1, 2]})).column("ad").to_pylist() == [1]
    assert "look up id in table ads" in str(steps("left_semi"))


# ---- columns that something looks at

WIDE = [("p", pa.string()), ("q", pa.string())]


def to_steps(schema: pa.Schema, operators: Any) -> RowSteps:
    """Choose the columns that ``select`` names."""

    class Chosen:
        def select(self, *names: str) -> RowSteps:
            return RowSteps.of(schema, [Select(tuple((name, Column(name, schema.field(name).type)) for name in names))])

    found: RowSteps = operators(Chosen())
    return found


def chosen(left: JoinInput, right: JoinInput, joining: Joining, behind: Any) -> ResolvedJoin:
    """Join ``ad`` with ``id``, and take the columns that ``select`` names behind it."""
    found = to_join(left, right, joining, behind)
    given = found.make().output_schema((left.schema, right.schema), ())
    after = behind(type("All", (), {"select": lambda _, *names: names})())
    steps = to_steps(given, lambda rows: rows.select(*after)) if isinstance(after, tuple) else None
    return replace(found, after=steps)


def wide(kind: Any = source) -> Any:
    clicks = kind(pa.schema([*CLICKS, *WIDE]), "clicks").withWatermark("at", "1 second")
    views = kind(pa.schema([*VIEWS, ("r", pa.string())]), "views").withWatermark("seen", "1 hour")
    return clicks, views


def test_columns_at_which_nothing_looks_do_not_travel_to_a_join() -> None:
    clicks, views = wide()
    plan = compiled(clicks.join(views, "ad").select("y", "p").to(Keep()), resolver=chosen, to_steps=to_steps)
    (stage,) = plan.stages
    left, right = (plan.edges[edge] for edge in stage.edges_in)
    assert left.schema.names == ["ad", "at", "p"]
    assert right.schema.names == ["id", "y", "seen"]
    assert [edge.key for edge in (left, right)] == [(0,), (0,)]
    assert stage.schemas == (left.schema, right.schema)
    assert stage.output_schema is not None
    assert stage.output_schema.names == ["y", "p"]
    text = explain(plan)
    assert "rows by hash of ad; no columns but ad, at, p" in text
    assert "bounds: left.at >= right.seen and left.at <= right.seen + 1 minute" in text
    rows = pa.record_batch(
        [pa.nulls(3, type_) for type_ in CLICKS.types] + [pa.array(["a", "b", "c"])] * 2, [*CLICKS.names, "p", "q"]
    )
    assert left.rows_of(rows, lambda: "")[0].schema.names == ["ad", "at", "p"]


def test_a_join_in_front_of_a_join_gives_the_columns_that_both_need() -> None:
    def keyed(left: JoinInput, right: JoinInput, joining: Joining, behind: Any) -> ResolvedJoin:
        return replace(chosen(left, right, joining, behind), keys=(("ad",), (right.schema.names[0],)))

    clicks, views = wide()
    others = source(pa.schema([("other", LONG), ("z", LONG), ("w", LONG)]), "others")
    both = clicks.join(views, "ad").select("ad", "x", "at", "p", "r").join(others, "ad", ttl=None)
    plan = compiled(both.select("p", "z").to(Keep()), resolver=keyed, to_steps=to_steps)
    first, second = plan.stages
    between, right = (plan.edges[edge] for edge in second.edges_in)
    assert between.schema.names == ["ad", "at", "p"]
    assert right.schema.names == ["other", "z"]
    assert [plan.edges[edge].schema.names for edge in first.edges_in] == [["ad", "at", "p"], ["id", "seen"]]
    assert first.output_schema is not None
    assert first.output_schema.names == ["ad", "at", "p"]
    rows = pa.record_batch([pa.nulls(2, type_) for type_ in first.output_schema.types], schema=first.output_schema)
    assert between.rows_of(rows, lambda: "")[0].schema.equals(between.schema)
    assert isinstance(second.make(), Chained)


def test_all_columns_of_a_join_are_there_where_somebody_gets_all() -> None:
    clicks, views = wide()
    flow = clicks.join(views, "ad")

    @flux.stage(key="x", window=flux.window("at", "1 hour"))
    class Counts(flux.Aggregate):
        n = flux.count()

    names = ["ad", "x", "at", "p", "q", "id", "y", "seen", "r"]
    for given in ([flow.to(Keep())], [flow.to(Keep()), Counts(flow).to(Keep())]):
        plan = compiled(*given, resolver=chosen)
        assert plan.stages[0].output_schema is not None
        assert plan.stages[0].output_schema.names == names
    plan = compiled(Counts(flow).to(Keep()), resolver=chosen)
    assert plan.stages[0].output_schema is not None
    assert plan.stages[0].output_schema.names == ["x", "at"]
    assert plan.edges[plan.stages[1].edges_in[0]].columns is None, "the stage reads both"
    assert [field.name for field in plan.edges[1].schema] == ["id", "seen"]
