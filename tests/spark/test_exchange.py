"""Flows that users build with the exchange give the results of Spark's own batch operators for the same rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from against_spark import ByGroup, ByK, F, assert_same, by_group, by_k, grouped, numbers, rows

import flux

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("nothing_left_behind")]

WAIT_S = 180.0

# ---- shapes of a dataflow


def test_spark_computes_no_column_that_no_stage_looks_at(spark: Any) -> None:
    """Columns that are left out stand before, between and behind those that are read, one of them twice and with a dot."""
    df = numbers(spark)
    never = F.raise_error(F.lit("nobody looks at this column")).cast("string")
    wide = df.select(never.alias("k.k"), *df.columns, never.alias("k.k"), never.alias("text"))
    assert_same(ByK(wide).toDF(), by_k(df))
    with pytest.raises(flux.FluxError, match="nobody looks at this column"):
        flux.stage(lambda batch: batch)(wide).toDF().count()


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
    """Make a stage that writes a line of JSON for every row, into a file for every partition."""
    name = str(folder)

    @flux.stage(key=key, partitions=partitions)
    class Sink(flux.Operator):
        transient = ("file",)

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


# ---- results of toDF


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
