"""``join`` of a flow against Spark's own over the same rows: same names, types and rows; and mistakes, each told when the flow is
written.

Joins are resolved by Spark. Most are computed in this process, one partition of each stage, with both inputs in odd cuts.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from decimal import Decimal
from itertools import zip_longest
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from against_spark import assert_same

import flux
from flux.dataflow.plan import FromStage, Plan, StagePlan, Timed
from flux.operators.batches import given_batches
from flux.operators.operator import Context, last_output
from flux.settings import Settings
from flux.windows.window import NEVER
from spark_integration.query.checkpoint_location import CheckpointLocation
from spark_integration.query.declarations import compiled
from spark_integration.query.lookup_tables import LookupTables
from spark_integration.schema import for_spark

pytestmark = pytest.mark.spark
F = pytest.importorskip("pyspark.sql.functions")

NAN = float("nan")
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
ROWS = 400


def table(seed: int, key: pa.DataType) -> pa.Table:
    """Random rows with nulls, NaN, zeros of both signs and times before 1970; keys of a type of their own on each side."""
    rng = np.random.default_rng(seed)

    def some(values: list, type_: pa.DataType, nulls: float = 0.1) -> pa.Array:
        picked = [values[i] for i in rng.integers(0, len(values), ROWS)]
        return pa.array([None if rng.random() < nulls else v for v in picked], type_)

    times = [EPOCH + datetime.timedelta(seconds=int(at)) for at in rng.integers(-1_500, 1_500, 300)]
    return pa.table(
        {
            "k": some(list(range(12 + seed)), key),
            "word": some(["", "a", "Ab", "ab", "été"], pa.string()),
            "x": some([0.0, -0.0, NAN, 1.5, 7.25], pa.float64()),
            "money": some([Decimal(v) / 100 for v in range(9)], pa.decimal128(5 + seed, 2)),
            "ts": some(times, pa.timestamp("us", "UTC"), 0.05),
            "until": some(times, pa.timestamp("us", "UTC"), 0.05),
            "tags": some([["a"], ["b", None], []], pa.list_(pa.string())),
        }
    )


LEFT, RIGHT = table(1, pa.int32()), table(2, pa.int64())


@pytest.fixture(scope="module")
def data(spark: Any) -> Any:
    made = [spark.createDataFrame(rows, for_spark(rows.schema, "rows")[0]) for rows in (LEFT, RIGHT)]
    return [each.coalesce(1).cache() for each in made]


@pytest.fixture(scope="module")
def flows(spark: Any) -> Any:
    made = [
        flux.source(lambda partition, rows=rows: rows.to_batches(max_chunksize=37), rows.schema, 1, name)
        for name, rows in (("clicks", LEFT), ("views", RIGHT))
    ]
    return [each.withWatermark("ts", "2 days") for each in made]  # no row is as late as that


def joined(left: Any, right: Any, on: Any, how: Any = None, **more: Any) -> Any:
    """Join two flows without an end of the wait, or two DataFrames."""
    return left.join(right, on, how, **(more or {"ttl": None} if isinstance(left, flux.Flow) else {}))


BOUNDS = "c.ts BETWEEN v.ts - INTERVAL 3 MINUTES AND v.ts + INTERVAL 10 MINUTES"


def named(a: Any, b: Any) -> tuple[Any, Any]:
    return a.alias("c"), b.alias("v")


def interval(a: Any, b: Any, how: str) -> Any:
    """Keys of two types, bounds, a rest, and conditions on one side alone."""
    c, v = named(a, b)
    on = F.expr(f"c.k = v.k AND {BOUNDS} AND c.word <> v.word AND c.x > 0 AND v.money < 0.06")
    found = c.join(v, on, how)
    if how in ("left_semi", "leftanti"):
        return found.select("c.*")
    return found.select(
        "c.k", F.col("v.k").alias("vk"), "c.ts", F.col("v.ts").alias("seen"), F.upper("v.word").alias("w")
    )


def windows(a: Any, b: Any) -> Any:
    first, second = (
        each.groupBy(F.window("ts", "10 minutes"), (F.col("k") % 3).alias("g")).agg(F.count("*").alias(name))
        for each, name in ((a, "clicks"), (b, "views"))
    )
    return first.join(second, ["window", "g"], "left").select("window.start", "g", "clicks", "views")


def three(a: Any, b: Any) -> Any:
    """Columns of one name on three sides, told apart by aliases behind two joins."""
    c, v = named(a, b)
    both = joined(c, v, F.expr("c.k = v.k AND c.word = v.word")).where("c.x = v.x")
    more = joined(
        both, a.select("k", "word", "money").alias("m"), F.expr("m.k = v.k AND m.word = c.word AND m.money > v.money")
    )
    return more.select("c.k", F.col("m.money"), F.col("v.money").alias("less"), "v.tags")


QUERIES = {
    **{
        f"interval {how}": lambda a, b, how=how: interval(a, b, how)
        for how in ("inner", "left", "right_outer", "full", "left_semi", "leftanti")
    },
    "names": lambda a, b: joined(a, b.select("k", "word", "money"), ["word", "k"], "rightouter").drop("money"),
    "name, full": lambda a, b: joined(a.select("k", "x"), b.select("k", "word"), "k", "fullouter"),
    "name, semi": lambda a, b: joined(a, b, ["k"], "semi").where("x > 1").withColumn("y", F.col("x") + 1),
    "computed keys": lambda a, b: joined(
        *named(a, b), F.expr("lower(c.word) = v.word AND c.k % 3 = v.k % 3 AND c.x < v.x")
    ).select("c.word", F.col("v.word").alias("w")),
    "numbers": lambda a, b: joined(*named(a, b), F.expr("c.x = v.x AND c.money = v.money AND c.k > v.k"), "leftouter").select(
        "c.x", F.col("v.x").alias("y"), F.col("v.k").alias("k"), "c.tags"
    ),
    "valid until": lambda a, b: a.alias("c").join(
        b.alias("v"), F.expr("c.k = v.k AND c.ts >= v.ts AND c.ts <= v.until")
    ).select("c.k", "v.until"),
    "equal times": lambda a, b: a.join(b.select("k", "ts", F.col("x").alias("y")), ["ts", "k"]),
    "windows": windows,
    "groups by aliases": lambda a, b: (
        joined(*named(a, b), F.expr("c.k = v.k AND c.word <> v.word")).withColumn("y", F.expr("c.x + v.x")).where("c.k > 2")
        .groupBy("v.word", F.window("c.ts", "20 minutes"), F.col("c.word").alias("w"))
        .agg(F.count("*").alias("n"), F.min("v.money").alias("m"), F.max("y").alias("y"))
        .select("window.start", "word", "w", "n", "m", "y")
    ),
    "sums by aliases": lambda a, b: joined(*named(a, b), F.expr("c.word = v.word")).groupBy("v.word").max("c.k", "v.money"),
    "three": three,
}  # fmt: skip


def computed(spark: Any, flow: Any) -> pa.Table:
    """Compute a flow over sources of workers in this process."""
    plan = compiled(spark, [flow], Settings.of(), tables=LookupTables(1 << 20)).plan
    rows = {"clicks": LEFT, "views": RIGHT}
    read = {each.id: rows[each.name].to_batches(max_chunksize=37) for each in plan.sources}
    given: dict[int, list[pa.RecordBatch]] = {}
    for stage in plan.stages:
        given[stage.id] = list(stage_output(plan, stage, read, given))
    *_, last = plan.stages
    return pa.Table.from_batches(given[last.id], schema=last.output_schema)


def stage_output(plan: Plan, stage: StagePlan, read: Any, given: Any) -> Iterator[pa.RecordBatch]:
    inputs = [list(edge_rows(plan, plan.edges[edge], read, given)) for edge in stage.edges_in]
    context = Context(stage.name, 0, 1, stage.key, stage.schemas, stage.output_mode)
    context.watermarks = [NEVER] * len(inputs)
    operator = stage.make()
    operator.open(context)
    for turn in zip_longest(*inputs):
        for number, batch in enumerate(turn):
            if batch is not None and batch.num_rows:
                context.input = number
                yield from given_batches(operator.process(batch))
                context.step += 1
    yield from last_output(operator, context)


def edge_rows(plan: Plan, edge: Any, read: Any, given: Any) -> Iterator[pa.RecordBatch]:
    for batch in given[edge.stage] if isinstance(edge, FromStage) else read[edge.source]:
        if not isinstance(edge, FromStage) and edge.timed is not Timed.ALL:
            time = plan.sources[edge.source].event_time
            assert time is not None
            batch = time.rows_of(batch, lambda: "source")[0]
        yield edge.rows_of(batch, lambda: "edge")[0]


@pytest.mark.parametrize("name", QUERIES)
def test_joins_are_those_of_spark(spark: Any, data: Any, flows: Any, name: str) -> None:
    ours = computed(spark, QUERIES[name](*flows))
    assert_same(spark.createDataFrame(ours, for_spark(ours.schema, "rows")[0]), QUERIES[name](*data))


C_V = "c.k = v.k"
REFUSED = {
    "no condition": (lambda a, b: a.join(b, ttl=None), "no equality between a column of the left side"),
    "no equality": (lambda a, b: joined(*named(a, b), F.expr("c.k < v.k")), r"no equality .*c\.k < v\.k.*F\.expr"),
    "one side": (lambda a, b: joined(*named(a, b), F.expr("c.k = 3")), "no equality between a column"),
    "types": (lambda a, b: joined(*named(a, b), F.expr("c.k = v.tags")), "DATATYPE_MISMATCH"),
    "lists": (lambda a, b: joined(*named(a, b), F.expr("c.tags = v.tags")), "arrays, structs and intervals of months are not"),
    "no name": (lambda a, b: joined(a, b, "nonsense"), r"UNRESOLVED_USING_COLUMN_FOR_JOIN"),
    "text": (lambda a, b: joined(*named(a, b), "c.k = v.k"), r"(?s)UNRESOLVED_USING_COLUMN.*A condition is a Column: F\.expr"),
    "ambiguous": (lambda a, b: joined(a, b, F.expr("k = k")), r"(?s)AMBIGUOUS_REFERENCE.*apart by alias.*There are k INT"),
    "ambiguous behind": (
        lambda a, b: joined(*named(a, b), F.expr(C_V)).select("word"), r"(?s)AMBIGUOUS_REFERENCE.*apart by alias, as in clicks"
    ),
    "twice": (lambda a, b: flux.explain(joined(*named(a, b), F.expr(C_V))), "several columns are called 'k'; choose columns"),
    "no end": (
        lambda a, b: a.alias("c").join(b.alias("v"), F.expr(C_V)),
        r"rows of clicks and of views would be kept for ever, .* no upper bound of the event time of views and of clicks",
    ),
    "half an end": (
        lambda a, b: a.alias("c").join(b.alias("v"), F.expr("c.k = v.k AND c.ts >= v.ts")),
        "rows of views would be kept for ever, because its condition has no upper bound of the event time of clicks",
    ),
    "no event time": (
        lambda a, b: a.alias("c").join(b.alias("v"), F.expr("c.k = v.k AND c.until < v.until")),
        r"its condition compares `until` of clicks with `until` of views, and neither is the event time",
    ),
    "one watermark": (
        lambda a, b: a.alias("c").join(b.inputs[0].alias("v"), F.expr(f"c.k = v.k AND {BOUNDS}")),
        r"rows of clicks would be kept for ever, because views has no event time: declare it",
    ),
    "short ttl": (
        lambda a, b: a.join(b.inputs[0].select("k"), "k", ttl="1 day"),
        "ttl='1 day' is shorter than the 2 days by which rows of clicks",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_when_the_flow_is_written(flows: Any, name: str) -> None:
    write, words = REFUSED[name]
    with pytest.raises(flux.UsageError, match=f"(?s){words}") as refused:
        write(*flows)
    assert "'Join" not in str(refused.value)


def test_explain_tells_keys_bounds_the_rest_and_for_how_long_rows_wait(flows: Any) -> None:
    c, v = named(*flows)
    text = flux.explain(c.join(v, F.expr(f"c.k = v.k AND {BOUNDS} AND c.x < v.x"), "left").select("c.k", "v.word"))
    assert "stage clicks.join.views: left outer join, then select" in text
    assert 'keys: left.cast(`k`, mode="ansi"):BIGINT = right.k' in text
    assert "bounds: left.ts >= right.ts - 3 minutes and left.ts <= right.ts + 10 minutes" in text
    assert "rest of the condition, for each pair: left.x < right.x" in text
    assert "left rows wait until the watermark of the right side has passed their bounds" in text
    text = flux.explain(flows[0].join(flows[1].select("k"), "k", ttl="3 days"))
    assert "right rows wait for 3 days (ttl)" in text
    text = flux.explain(flows[0].join(flows[1].select("k", F.col("ts").alias("seen")), "k", ttl="1 day"))
    assert "bounds: left.ts >= right.seen - 1 day and left.ts <= right.seen + 1 day" in text
    assert "right rows wait until the watermark of the left side has passed their bounds" in text


def test_a_join_has_event_time_where_bounds_say_how_old_its_rows_may_be(flows: Any) -> None:
    c, v = named(*flows)
    bounded = c.join(v, F.expr(f"c.k = v.k AND {BOUNDS}")).select("c.ts", "c.k")
    assert "groups are those of windows" in flux.explain(bounded.groupBy(F.window("ts", "1 hour"), "k").count())
    unbounded = joined(c, v, F.expr(C_V)).select("c.ts", "c.k").groupBy(F.window("ts", "1 hour"), "k").count()
    assert "groups are those of windows" in flux.explain(unbounded)


def test_a_real_query_joins_dataframes_as_spark_does(spark: Any, data: Any) -> None:
    left, right = (flux.batch(each).withWatermark("ts", "1 minute") for each in data)
    assert_same(interval(left, right, "full").withStage(partitions=2).toDF(), interval(*data, "full"))


def test_right_and_full_joins_of_batch_dataframes_alone_need_no_ttl(data: Any) -> None:
    left, right = (flux.batch(each).select("k") for each in data)
    for how in ("right", "full"):
        text = flux.explain(left.join(right, "k", how))
        assert f"{how} outer join" in text
        assert "left rows wait until the input ends (no bounds, no ttl)" in text


# ---- tables in every worker


def labels(df: Any) -> Any:
    """Return a table with one row of each key, null among them."""
    return df.groupBy("k").agg(F.max("word").alias("label"), F.max("x").alias("top"), F.max("ts").alias("ts"))


LOOKUPS = {
    "name": lambda a, table: a.join(labels(table).drop("ts"), "k").where("x > 0"),
    "rest": lambda a, table: a.alias("c").join(
        labels(table).alias("v"), F.expr("c.k = v.k AND c.x < v.top AND c.word <> 'a'"), "left"
    ).select("c.k", "c.ts", "v.label", F.col("v.top").alias("y"), F.col("v.ts").alias("seen")),
    "computed keys": lambda a, table: a.join(
        labels(table).withColumnRenamed("k", "id").drop("ts"), F.expr("k % 5 = id AND upper(word) = upper(label)")
    ),
    "semi": lambda a, table: a.join(table.where("money > 0.01").select("word"), "word", "leftsemi"),
    "anti": lambda a, table: a.alias("c").join(labels(table).alias("v"), F.expr("c.k = v.k AND c.x > v.top"), "anti").drop("x"),
    "numbers": lambda a, table: a.join(table.select("x").distinct(), "x").select("x", "k"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups_are_joins_of_spark(spark: Any, data: Any, flows: Any, name: str) -> None:
    ours = computed(spark, LOOKUPS[name](flows[0], data[1]))
    assert_same(spark.createDataFrame(ours, for_spark(ours.schema, "rows")[0]), LOOKUPS[name](*data))


def test_a_lookup_is_a_step_of_the_edge_and_keeps_event_time(data: Any, flows: Any) -> None:
    table = flux.batch(labels(data[1])).where("top > 0").select("k", "label")
    found = flows[0].join(table, "k").groupBy(F.window("ts", "1 hour"), "label").count()
    text = flux.explain(found)
    assert "Flux plan: 1 source, 1 stage" in text
    assert "look up k in table DataFrame" in text


def test_tables_are_those_with_which_the_query_began(spark: Any, data: Any, flows: Any, tmp_path: Any) -> None:
    def lookup(df: Any) -> Any:
        return flows[0].join(df, "k").inputs[0]

    tmp_path.chmod(0o700)
    location = CheckpointLocation.open(tmp_path)
    first = LookupTables(1 << 20, location)
    rows = first.rows(lookup(data[1].selectExpr("k", "word AS label")))
    first.keep()
    assert not location.place.used(), "a table is nobody's, and a start that ends here leaves the location new"
    other = lookup(data[1].selectExpr("k", "'other' AS label"))
    assert LookupTables(1 << 20, CheckpointLocation(location.place, {})).rows(other).equals(rows)
    wider = lookup(data[1].selectExpr("CAST(k AS STRING) AS k", "word AS label"))
    with pytest.raises(
        flux.UsageError, match="began, struct<k:bigint,label:string>, and the DataFrame is struct<k:string,"
    ):
        LookupTables(1 << 20, CheckpointLocation(location.place, {})).rows(wider)
    whole = (tmp_path / ".table-0000").read_bytes()
    changed = bytearray(whole)
    changed[len(whole) // 2] ^= 1
    for damaged in (bytes(changed), whole[:-100], b""):
        (tmp_path / ".table-0000").write_bytes(damaged)
        with pytest.raises(flux.UsageError, match=r"cannot be read \(.table-0000\): it is damaged"):
            LookupTables(1 << 20, CheckpointLocation(location.place, {})).rows(other)
    (tmp_path / ".table-0000").unlink()
    with pytest.raises(
        flux.UsageError, match=r"table of clicks.join.DataFrame, with which the query began, cannot be read"
    ):
        LookupTables(1 << 20, CheckpointLocation(location.place, {})).rows(other)


REFUSED_TABLES = {
    "twice": (lambda a, b: flux.explain(a.join(b.select("k"), "k")), r"several rows of the table DataFrame have k = \d+, and"),
    "large": (
        lambda a, b: flux.explain(a.join(b, "k"), lookup_max_bytes="1k"),
        r"clicks.join.DataFrame: the table has [\d.]+ MiB or more, .*lookup.maxBytes allows 0.000976562 MiB.*or say ttl=None",
    ),
    "right": (lambda a, b: a.join(b, "k", "right"), "gives rows of the DataFrame without a match, .* say ttl=None"),
    "fails": (
        lambda a, b: flux.explain(a.join(b.selectExpr("k", "raise_error('lost') AS y"), "k")),
        "clicks.join.DataFrame: the table cannot be read: .*lost",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_TABLES)
def test_tables_that_do_not_fit_are_refused(data: Any, flows: Any, name: str) -> None:
    write, words = REFUSED_TABLES[name]
    with pytest.raises(flux.UsageError, match=f"(?s){words}"):
        write(flows[0], data[1])


MINUTE = 60_000_000


def endless(rows: list[tuple[int, int]]) -> Any:
    """Return a function that reads rows of an ad and a time in minutes, and never ends."""

    def read(partition: int) -> Iterator[pa.RecordBatch | None]:
        ads, minutes = zip(*rows, strict=True)
        times = pa.array([MINUTE * at for at in minutes], pa.timestamp("us", "UTC"))
        yield pa.record_batch({"ad": pa.array(ads, pa.int64()), "ts": times})
        while True:
            yield None

    read.endless = True  # type: ignore[attr-defined]
    return read


def test_rows_of_endless_sources_come_when_they_are_final(spark: Any) -> None:
    """Here are a view with a click, and one without; the last rows move both watermarks to minute 60 and wait."""
    schema = "ad BIGINT, ts TIMESTAMP"
    views, clicks = (
        flux.source(endless(rows), schema, 1, name).withWatermark("ts", "1 minute")
        for name, rows in (("views", [(1, 1), (2, 2), (3, 61)]), ("clicks", [(1, 4), (2, 13), (4, 61)]))
    )
    on = F.expr("v.ad = c.ad AND c.ts BETWEEN v.ts AND v.ts + INTERVAL 10 MINUTES")
    seen = views.alias("v").join(clicks.alias("c"), on, "left").select("v.ad", F.minute("c.ts").alias("clicked"))
    names = spark.createDataFrame([(1, "one"), (2, "two")], "ad BIGINT, name STRING")
    query = seen.join(names, "ad").withStage(partitions=2).to_readers().start(spark=spark, workers=1)
    try:
        found: list[Any] = []
        for batch in query.rows():
            found += [tuple(row.values()) for row in batch.to_pylist()]
            if len(found) >= 2:
                break
        assert sorted(found) == [(1, 4, "one"), (2, None, "two")]
    finally:
        query.stop()
