"""What a user builds with the exchange gives what Spark's own batch operators give for the same rows."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import flux

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("nothing_left_behind")]

F = pytest.importorskip("pyspark.sql.functions")
WAIT_S = 60.0


def rows(df: Any) -> list[Any]:
    return sorted(df.collect(), key=repr)


def assert_same(ours: Any, theirs: Any) -> None:
    """Same column names and types, same rows in whatever order, and at least one row."""
    assert [(f.name, f.dataType) for f in ours.schema] == [(f.name, f.dataType) for f in theirs.schema]
    expected = [repr(row) for row in rows(theirs)]  # NaN is equal to nothing, its name is
    assert expected
    assert [repr(row) for row in rows(ours)] == expected


def numbers(spark: Any, n: int = 20_000, partitions: int = 4) -> Any:
    """k: 0..96, v: exact as double, w: 0..3."""
    return spark.range(0, n, 1, partitions).selectExpr("id % 97 as k", "id * 7 % 1001 / 2 as v", "id % 4 as w", "id")


@flux.stage(key="k", partitions=5)
class ByK(flux.Aggregate):
    n = flux.count()
    total = flux.sum("v")


@flux.stage(key="group", partitions=3)
class ByGroup(flux.Aggregate):
    keys = flux.count()
    n = flux.sum("n")
    largest = flux.max("total")


@flux.stage(schema="group BIGINT, n BIGINT, total DOUBLE")
def grouped(batch: pa.RecordBatch) -> pa.RecordBatch:
    group = pc.bit_wise_and(batch.column("k"), 7)
    return pa.RecordBatch.from_arrays([group, batch.column("n"), batch.column("total")], ["group", "n", "total"])


def by_k(df: Any) -> Any:
    return df.groupBy("k").agg(F.count("*").alias("n"), F.sum("v").alias("total"))


def by_group(df: Any) -> Any:
    inner = by_k(df).selectExpr("k & 7 as group", "n", "total")
    return inner.groupBy("group").agg(
        F.count("*").alias("keys"), F.sum("n").alias("n"), F.max("total").alias("largest")
    )


# ---- shapes of a dataflow


def test_a_chain_of_three_stages_gives_the_answer_of_two_group_bys(spark: Any) -> None:
    df = numbers(spark)
    assert_same(ByGroup(grouped(ByK(df))).toDF(), by_group(df))


def test_a_stage_that_feeds_two_gives_both_the_same_rows(spark: Any) -> None:
    df = numbers(spark)
    shared = ByK(df)

    @flux.stage(key="n", partitions=2)
    class BySize(flux.Aggregate):
        keys = flux.count()

    assert_same(ByGroup(grouped(shared)).toDF(), by_group(df))
    assert_same(BySize(shared).toDF(), by_k(df).groupBy("n").agg(F.count("*").alias("keys")))


def file_sink(folder: Path, key: str | None = None, partitions: int = 2) -> flux.Stage:
    """A stage that writes a line of JSON for every row, into a file for every partition."""
    name = str(folder)

    @flux.stage(key=key, partitions=partitions)
    class Sink(flux.Operator):
        def open(self, context: flux.Context) -> None:
            self.file = open(f"{name}/{context.stage}-{context.partition}", "x")  # noqa: SIM115

        def process(self, batch: pa.RecordBatch) -> None:
            self.file.writelines(json.dumps(row) + "\n" for row in batch.to_pylist())

        def close(self) -> None:
            self.file.close()

    return Sink


def written(folder: Path, stage: str = "Sink") -> list[dict[str, Any]]:
    lines = [line for path in sorted(folder.glob(f"{stage}-*")) for line in path.read_text().splitlines()]
    return sorted((json.loads(line) for line in lines), key=repr)


def as_dicts(df: Any) -> list[dict[str, Any]]:
    return sorted((row.asDict() for row in df.collect()), key=repr)


def test_two_sinks_of_one_query_share_what_feeds_them(spark: Any, tmp_path: Path) -> None:
    df = numbers(spark)
    shared = ByK(df)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    query = flux.start(
        file_sink(tmp_path / "a")(shared), file_sink(tmp_path / "b", key="group")(grouped(shared)), workers=2
    )
    assert query.awaitTermination(WAIT_S)
    assert written(tmp_path / "a") == as_dicts(by_k(df))
    assert written(tmp_path / "b", "Sink#2") == as_dicts(by_k(df).selectExpr("k & 7 as group", "n", "total"))
    names = [stage["name"] for stage in query.lastProgress["stages"]]
    assert names.count("ByK") == 1
    assert query.lastProgress["totalInputRows"] == df.count()  # the DataFrame was read once


def test_a_sink_sees_each_key_in_one_partition_and_writes_through_the_end(spark: Any, tmp_path: Path) -> None:
    df = numbers(spark, 5_000)
    query = file_sink(tmp_path, key="k", partitions=3)(df.select("k", "id")).start()
    assert query.awaitTermination(WAIT_S)
    assert written(tmp_path) == as_dicts(df.select("k", "id"))
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == ["Sink-0", "Sink-1", "Sink-2"]
    keys = [{json.loads(line)["k"] for line in path.read_text().splitlines()} for path in files]
    assert all(keys)
    assert len(set.union(*keys)) == sum(len(some) for some in keys)


def test_a_stage_takes_two_dataframes(spark: Any) -> None:
    low, high = numbers(spark, 3_000), numbers(spark, 9_000, 2).where("k > 50")
    assert_same(ByK(low, high).toDF(), by_k(low.unionByName(high)))


def test_a_stage_takes_the_same_dataframe_twice(spark: Any) -> None:
    df = numbers(spark, 3_000)
    assert_same(ByK(df, df).toDF(), by_k(df.union(df)))


@flux.stage(key="k", partitions=4)
class Joined(flux.Operator):
    """Rows of input 0 that wait for the one row with the same key of input 1; written as users write it."""

    schema = "k BIGINT, id BIGINT, total DOUBLE"

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.left: dict[int, list[int]] = {}
        self.right: dict[int, float] = {}

    def process(self, batch: pa.RecordBatch) -> None:
        for row in batch.to_pylist():
            if self.context.input == 0:
                self.left.setdefault(row["k"], []).append(row["id"])
            else:
                assert row["k"] not in self.right
                self.right[row["k"]] = row["total"]

    def finish(self) -> Iterator[pa.RecordBatch]:
        for k, ids in self.left.items():
            if k in self.right:
                count = len(ids)
                yield pa.RecordBatch.from_pydict({"k": [k] * count, "id": ids, "total": [self.right[k]] * count})

    def snapshot(self) -> Any:
        return self.left, self.right

    def restore(self, snapshot: Any) -> None:
        self.left, self.right = snapshot


def test_a_stage_takes_a_dataframe_and_another_stage_and_knows_them_apart(spark: Any) -> None:
    df = numbers(spark, 3_000)
    ours = Joined(df.select("k", "id"), ByK(df.where("k < 40"))).toDF()
    assert_same(ours, df.select("k", "id").join(by_k(df.where("k < 40")).select("k", "total"), "k"))


# ---- keys

KEYED = [
    ("whole", "integer"), ("small", "short"), ("word", "string"), ("flag", "boolean"), ("day", "date"),
    ("moment", "timestamp"), ("wall", "timestamp_ntz"), ("money", "decimal(12,2)"), ("huge", "decimal(38,10)"),
    ("real", "double"), ("raw", "binary"),
]  # fmt: skip


def keyed(spark: Any, n: int = 300) -> Any:
    """Every column has nulls and about ten values."""
    start = datetime.datetime(2024, 3, 31, 0, 30)

    def some(i: int, value: Any) -> Any:
        return None if i % 11 == 10 else value

    made = [
        (
            some(i, i % 9 - 4),
            some(i + 1, (i % 7 - 3) * 10_000),
            some(i + 2, ["", "a", "été", "a longer one, beyond eight bytes", "a "][i % 5]),
            some(i + 3, i % 2 == 0),
            some(i + 4, start.date() + datetime.timedelta(days=i % 8 - 20_000)),
            some(i + 5, start + datetime.timedelta(minutes=30 * (i % 9), microseconds=i % 2)),
            some(i + 6, start - datetime.timedelta(hours=i % 6, days=30_000)),
            some(i + 7, Decimal(i % 10 - 5) / 4),
            some(i + 8, Decimal(i % 10 - 5).scaleb(20)),
            some(i + 9, [0.0, -0.0, float("nan"), 1.5, float("-inf")][i % 5]),
            some(i + 10, bytes([i % 3, 0, i % 2])),
            i,
        )
        for i in range(n)
    ]
    schema = ", ".join(f"{name} {kind}" for name, kind in KEYED) + ", v bigint"
    return spark.createDataFrame(made, schema).repartition(3)


@pytest.mark.parametrize(
    "key",
    [(name,) for name, _ in KEYED] + [("word", "whole"), ("flag", "day", "money", "real")],
    ids="+".join,
)
def test_keys_of_every_type_and_their_nulls_group_as_in_spark(spark: Any, key: tuple[str, ...]) -> None:
    df = keyed(spark)

    @flux.stage(key=key, partitions=4)
    class Total(flux.Aggregate):
        n = flux.count()
        total = flux.sum("v")

    theirs = df.groupBy(*key).agg(F.count("*").alias("n"), F.sum("v").alias("total"))
    assert_same(Total(df).toDF(), theirs)


@pytest.mark.parametrize("zone", ["America/New_York", "+05:30"])
def test_timestamps_keep_their_instant_in_any_session_time_zone(spark: Any, zone: str) -> None:
    df = keyed(spark)

    @flux.stage(key=("moment", "wall", "day"), partitions=4)
    class Moments(flux.Aggregate):
        n = flux.count()
        last = flux.max("moment")
        last_wall = flux.max("wall")

    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        theirs = df.groupBy("moment", "wall", "day").agg(
            F.count("*").alias("n"), F.max("moment").alias("last"), F.max("wall").alias("last_wall")
        )
        ours = Moments(df).toDF()
        assert_same(ours, theirs)
        shown = [f"cast({name} as string) as {name}" for name in ours.columns]
        assert_same(ours.selectExpr(*shown), theirs.selectExpr(*shown))
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)


def test_keys_that_are_all_null_form_one_group(spark: Any) -> None:
    df = spark.range(0, 100, 1, 3).selectExpr("cast(null as string) as k", "cast(id as double) as v")
    (row,) = ByK(df).toDF().collect()
    assert row.asDict() == {"k": None, "n": 100, "total": 4950.0}


def test_column_names_may_be_anything_that_spark_allows(spark: Any) -> None:
    df = spark.range(0, 50, 1, 2).selectExpr("id % 3 as `a key.with dots`", "id as `größe (m²)`")

    @flux.stage(key="a key.with dots", partitions=2)
    class Odd(flux.Aggregate):
        n = flux.sum("größe (m²)")

    assert_same(Odd(df).toDF(), df.groupBy("`a key.with dots`").agg(F.sum("`größe (m²)`").alias("n")))


# ---- operators


@flux.stage(key="k", partitions=4)
class RunningMax(flux.Operator):
    """A row whenever the greatest value of a key grows."""

    schema = "k BIGINT, best BIGINT"

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.best: dict[int, int] = {}

    def process(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        grown = []
        for row in batch.to_pylist():
            if row["k"] not in self.best or row["x"] > self.best[row["k"]]:
                self.best[row["k"]] = row["x"]
                grown.append({"k": row["k"], "best": row["x"]})
        if grown:
            yield pa.RecordBatch.from_pylist(grown)

    def snapshot(self) -> Any:
        return self.best

    def restore(self, snapshot: Any) -> None:
        self.best = dict(snapshot)


def test_a_stateful_operator_sees_the_rows_of_a_key_once_and_in_order(spark: Any) -> None:
    df = spark.range(0, 6_000, 1, 1).selectExpr("id", "id % 23 as k", "id * 7919 % 6007 as x")
    so_far = "max(x) over (partition by k order by id rows between unbounded preceding and 1 preceding)"
    theirs = df.selectExpr("k", "x as best", f"coalesce({so_far} < x, true) as grows").where("grows").drop("grows")
    assert_same(RunningMax(df.select("k", "x")).toDF(batch_max_rows=100), theirs)


def test_an_operator_can_be_tried_without_spark_and_goes_on_from_its_snapshot() -> None:
    batches = [pa.RecordBatch.from_pydict({"k": [1, 2, 1], "x": [i, 9 - i, 2 * i]}) for i in range(8)]
    one, two = RunningMax(), RunningMax()
    for operator in (one, two):
        operator.open(flux.Context("RunningMax", key=("k",), schemas=(batches[0].schema,)))
    before = [list(one.process(batch)) for batch in batches[:4]]
    two.restore(one.snapshot())
    assert [list(one.process(batch)) for batch in batches[4:]] == [list(two.process(batch)) for batch in batches[4:]]
    assert before[0][0].to_pylist() == [{"k": 1, "best": 0}, {"k": 2, "best": 9}]


@flux.stage
def even(batch: pa.RecordBatch) -> pa.RecordBatch | None:
    kept = batch.filter(pc.equal(pc.bit_wise_and(batch.column("id"), 1), 0))
    return kept if kept.num_rows else None


def test_a_function_decorated_without_parentheses_keeps_the_schema_and_filters(spark: Any) -> None:
    df = numbers(spark, 5_000)
    assert_same(even(df).toDF(), df.where("id % 2 = 0"))
    assert even(pa.RecordBatch.from_pydict({"id": [1, 2, 3]})).to_pydict() == {"id": [2]}  # usable by itself


def test_a_function_with_a_key_gets_every_row_of_the_key_in_one_partition(spark: Any) -> None:
    @flux.stage(key="k", partitions=6, schema="k BIGINT, id BIGINT, where BIGINT")
    class Where(flux.Operator):
        def process(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
            here = pa.array([self.context.partition] * batch.num_rows, pa.int64())
            half = batch.num_rows // 2  # several batches for one, some of them empty
            whole = pa.RecordBatch.from_arrays([batch.column("k"), batch.column("id"), here], ["k", "id", "where"])
            yield from (whole.slice(0, half), whole.slice(half), whole.slice(0, 0))

    @flux.stage(key=["k"], partitions=3)
    def same(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
        return [batch]

    df = numbers(spark, 5_000).select("k", "id")
    ours = same(Where(df)).toDF()
    assert_same(ours.select("k", "id"), df)
    spread = ours.groupBy("k").agg(F.countDistinct("where").alias("places"))
    assert spread.where("places != 1").count() == 0
    assert ours.select("where").distinct().count() == 6


def test_update_mode_gives_changes_whose_last_is_the_result(spark: Any) -> None:
    @flux.stage(key="k", partitions=3, output_mode="update")
    class Growing(flux.Aggregate):
        n = flux.count()

    df = numbers(spark, 4_000)
    ours = Growing(df).toDF(batch_max_rows=500, step_max_rows=1)
    assert ours.count() > 97
    assert_same(ours.groupBy("k").agg(F.max("n").alias("n")), df.groupBy("k").agg(F.count("*").alias("n")))


def test_an_aggregate_without_a_key_in_one_partition_is_the_global_one(spark: Any) -> None:
    @flux.stage(partitions=1)
    class All(flux.Aggregate):
        n = flux.count()
        total = flux.sum("v")
        mean = flux.mean("v")

    df = numbers(spark, 4_000)
    theirs = [F.count("*").alias("n"), F.sum("v").alias("total"), F.mean("v").alias("mean")]
    assert_same(All(df).toDF(), df.agg(*theirs))
    assert_same(All(df.limit(0)).toDF(), df.limit(0).agg(*theirs))


# ---- inputs


def read(partition: int) -> Iterator[pa.RecordBatch | None]:
    for start in range(0, 1_000, 100):
        yield None  # nothing just now
        ids = pa.array(range(start, start + 100), pa.int64())
        yield pa.RecordBatch.from_arrays([pc.add(ids, partition * 1_000)], ["id"])


def test_a_source_read_inside_the_workers_feeds_stages(spark: Any) -> None:
    @flux.stage(schema="k BIGINT, v DOUBLE")
    def cut(batch: pa.RecordBatch) -> pa.RecordBatch:
        ids = batch.column("id")
        k = pc.subtract(ids, pc.multiply(pc.divide(ids, 97), 97))
        return pa.RecordBatch.from_arrays([k, pc.cast(ids, pa.float64())], ["k", "v"])

    source = flux.source(read, schema="id BIGINT", partitions=5)
    df = spark.range(5_000).selectExpr("id % 97 as k", "cast(id as double) as v")
    assert_same(ByK(cut(source)).toDF(spark), by_k(df))


@pytest.mark.parametrize("kind", ["no rows", "no partitions", "some empty partitions", "a single row"])
def test_small_inputs_give_what_spark_gives(spark: Any, kind: str) -> None:
    df = {
        "no rows": lambda: numbers(spark).where("id < 0"),
        "no partitions": lambda: spark.createDataFrame(spark.sparkContext.emptyRDD(), "k bigint, v double"),
        "some empty partitions": lambda: numbers(spark, 1_000, 4).where("id > 600"),
        "a single row": lambda: numbers(spark, 1, 1),
    }[kind]()
    ours = ByK(df).toDF()
    assert ours.columns == ["k", "n", "total"]
    assert rows(ours) == rows(by_k(df))
    assert ours.count() == {"no rows": 0, "no partitions": 0, "a single row": 1}.get(kind, 97)


def test_a_dataframe_may_have_more_partitions_than_there_are_slots(spark: Any) -> None:
    df = numbers(spark, 7_000, 23)
    assert_same(ByK(df).toDF(), by_k(df))


def test_wide_strings_and_batches_that_must_be_split_arrive_whole(spark: Any) -> None:
    df = spark.range(0, 40, 1, 3).selectExpr("id % 3 as k", "repeat(cast(id as string), 200000) as text")

    @flux.stage(key="k", partitions=2)
    def same(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch

    options = {"batch_max_bytes": "100k", "log_max_bytes": "1m", "credit_max_bytes": "1m", "egress_memory_bytes": "1k"}
    digest = ["k", "length(text) as l", "md5(text) as m"]
    assert_same(same(df).toDF(**options).selectExpr(*digest), df.selectExpr(*digest))


def test_nested_types_pass_through_as_payload(spark: Any) -> None:
    df = (
        spark.range(0, 500, 1, 3)
        .selectExpr(
            "id % 5 as k",
            "if(id % 7 = 0, null, sequence(0, id % 4)) as list",
            "if(id % 5 = 0, null, struct(id as a, struct(cast(id as string) as c, null as d) as b)) as nested",
            "if(id % 6 = 0, null, map(cast(id as string), array(id, null))) as mapped",
            "cast(id % 3 as decimal(30, 5)) as money",
            "cast(cast(id as string) as binary) as raw",
            "make_dt_interval(id % 3, id % 24) as lasting",
            "cast(null as void) as nothing",
            "array(struct(date_add(date'2020-01-01', cast(id as int)) as day)) as days",
        )
        .drop("nothing")
    )

    @flux.stage(key="k", partitions=3)
    def same(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch

    assert_same(same(df).toDF(batch_max_rows=64), df)


# ---- what toDF gives


def test_the_result_can_be_evaluated_twice_joined_and_written(spark: Any, tmp_path: Path) -> None:
    df = numbers(spark)
    ours = ByK(df).toDF()
    assert rows(ours) == rows(ours)
    names = spark.range(97).selectExpr("id as k", "concat('key ', id) as name")
    assert_same(ours.join(names, "k").where("n > 1"), by_k(df).join(names, "k").where("n > 1"))
    ours.write.parquet(str(tmp_path / "out"))
    assert_same(spark.read.parquet(str(tmp_path / "out")), by_k(df))


def test_one_flow_can_be_run_twice(spark: Any) -> None:
    df = numbers(spark, 3_000)
    flow = ByK(df)
    assert_same(flow.toDF(), by_k(df))
    assert_same(flow.toDF(workers=1, encrypt="true"), by_k(df))


def test_two_queries_run_at_the_same_time(spark: Any) -> None:
    one, two = numbers(spark, 30_000), numbers(spark, 9_000).where("k > 9")
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(lambda df=df: ByK(df).toDF(workers=1)) for df in (one, two)]
        ours = [future.result(WAIT_S) for future in both]
    assert_same(ours[0], by_k(one))
    assert_same(ours[1], by_k(two))


def test_the_users_session_is_as_it_was(spark: Any) -> None:
    df = numbers(spark, 3_000)
    before = dict(spark.conf.getAll)
    ByK(df).toDF()
    assert dict(spark.conf.getAll) == before
    assert spark.sparkContext.getLocalProperty("spark.jobGroup.id") is None
