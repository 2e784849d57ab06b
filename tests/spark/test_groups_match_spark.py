"""``groupBy(...).agg(...)`` of a flow against Spark's own over the same rows: same names, types, values and errors.

Most groups are resolved by Spark and computed in this process, one partition, in odd cuts of the rows.
"""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from against_spark import assert_same

import flux
from flux.dataflow.flow import Stage
from flux.dataflow.grouping import GroupedData, GroupFlow, Grouping, ResolvedGrouping
from flux.operators.operator import Operator
from spark_integration.expressions.aggregates import groups_of
from spark_integration.schema import for_spark, to_arrow

pytestmark = pytest.mark.spark
F = pytest.importorskip("pyspark.sql.functions")

NAN, INF = float("nan"), float("inf")
ROWS = 3_000
UTC = pa.timestamp("us", "UTC")
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def table() -> pa.Table:
    """Random rows with nulls, NaN, negative times. Sums of doubles are exact in any order."""
    rng = np.random.default_rng(11)

    def some(values: list, type_: pa.DataType, nulls: float = 0.1) -> pa.Array:
        picked = [values[i] for i in rng.integers(0, len(values), ROWS)]
        return pa.array([None if rng.random() < nulls else v for v in picked], type_)

    times = [EPOCH + datetime.timedelta(microseconds=int(at)) for at in rng.integers(-3 * 10**9, 3 * 10**9, 500)]
    return pa.table(
        {
            "k": some(list(range(7)), pa.int64()),
            "word": some(["", "a", "Ab", "ab", "été"], pa.string()),
            "f": some([0.0, NAN, 1.5, -INF], pa.float64()),
            "i": some([-(1 << 31), 5, (1 << 31) - 1, 0], pa.int32()),
            "l": some([-(1 << 44), 8, 1 << 44], pa.int64()),
            "x": some([v / 8 for v in range(-80, 80)], pa.float64()),
            "r": some([0.5, -1.25, 8.0], pa.float32()),
            "money": some([Decimal(v) / 100 for v in range(-999, 1000, 7)], pa.decimal128(7, 2)),
            "huge": some([Decimal(10**30 // 3), Decimal(-7), Decimal(1)], pa.decimal128(33, 2)),
            "flag": some([True, False], pa.bool_()),
            "day": some([times[0].date(), datetime.date(2013, 6, 30)], pa.date32()),
            "ts": some(times, pa.timestamp("us", "UTC"), 0.05),
            "wall": some([each.replace(tzinfo=None) for each in times], pa.timestamp("us")),
            "window": some(["a column of that name"], pa.string()),
        }
    )


@pytest.fixture(scope="module")
def data(spark: Any) -> Any:
    return dataframe(spark, table()).cache()


def dataframe(spark: Any, rows: pa.Table) -> Any:
    """Return rows as a DataFrame in which times without a zone are TIMESTAMP_NTZ, as in flows."""
    return spark.createDataFrame(rows, for_spark(rows.schema, "rows")[0])


class Resolved(Stage):
    """A stage of a resolved grouping, without the steps around it."""

    def __init__(self, grouping: ResolvedGrouping, mode: str) -> None:
        super().__init__(Operator, grouping.key, 1, 1, None, mode, "groups")
        self._grouping = grouping

    def make(self) -> Operator:
        return self._grouping.make()


class Local:
    """A DataFrame's part in queries: it computes groups in this process."""

    def __init__(self, spark: Any, rows: pa.Table, **how: Any) -> None:
        self._spark, self._rows, self._how = spark, rows, how

    def groupBy(self, *keys: Any) -> Any:  # noqa: N802
        local = self

        class Groups(GroupedData):
            def _flow(self, method: str, *arguments: Any) -> Any:
                return local.computed(Grouping(self._keys, method, arguments))

        return Groups(flux.source(lambda partition: iter(()), local._rows.schema, 1, "rows"), keys)

    def computed(self, grouping: Grouping) -> Any:
        found = groups_of(self._spark, to_arrow(self._spark, self._rows.schema), grouping)
        batches = self._rows.combine_chunks().to_batches(max_chunksize=211)
        if found.before is not None:
            batches = [found.before.apply(batch) for batch in batches]
        mode = GroupFlow(flux.source(lambda p: iter(()), self._rows.schema, 1, "rows"), grouping).stage.output_mode
        made = flux.testing.apply(Resolved(found, mode), *batches, **self._how)
        assert made is not None
        if found.after is not None:
            made = pa.Table.from_batches(
                [found.after.apply(batch) for batch in made.to_batches()], schema=found.after.output
            )
        return dataframe(self._spark, made)


WINDOW = ("ts", "10 minutes", "4 minutes", "1 minute")
QUERIES = {
    "counts": lambda df: df.groupBy("k").count(),
    "everything": lambda df: df.groupBy("word", "k").agg(
        F.count("*").alias("n"), F.count("x"), F.sum("i"), F.sum("l"), F.sum("x").alias("x"), F.sum("r"), F.sum("money"),
        F.sum("huge"), F.avg("i"), F.mean("l"), F.avg("x"), F.avg("money"), F.avg("huge"), F.min("f"), F.max("f"),
        F.min("word"), F.max("money"), F.min("day"), F.max("ts"), F.min("wall"), F.max("flag"), F.countDistinct("l"),
        F.count_distinct("word"), F.count_distinct("f").alias("fs"), F.expr("count(k, x)"), F.count(F.lit(None)),
    ),
    "global": lambda df: df.groupBy().agg(F.count("*"), F.sum("l"), F.avg("money"), F.max("word")),
    "expressions": lambda df: df.groupBy(F.lower("word").alias("w"), F.col("k") % 3, F.col("f")).agg(
        F.sum(F.col("l") * 2), (F.sum("x") / F.count("*")).alias("mean"), F.sum("l") + F.max("i") - F.lit(1),
        F.concat(F.lower("word"), F.lit("!"), F.count("*").cast("string")).alias("text"), F.upper(F.lower("word")),
        F.expr("sum(l) BETWEEN 0 AND 100 AS some"), F.coalesce(F.sum("huge"), F.lit(0)), F.lit(7).alias("seven"),
        F.expr("CASE WHEN count(x) > 2 THEN max(x) - min(x) END AS spread"),
    ),
    "filters": lambda df: df.groupBy("k").agg(
        F.expr("count(*) FILTER (WHERE x > 1) AS n"), F.expr("sum(i) FILTER (WHERE flag)"),
        F.expr("count(DISTINCT word) FILTER (WHERE l > 0 OR flag) AS words"), F.expr("avg(x) FILTER (WHERE word = 'ab')"),
        F.expr("max(l) FILTER (WHERE x IS NULL)"), F.count_if(F.col("x") > 1), F.bool_and("flag"), F.some("flag"),
        F.expr("sum(if(k <> 0, l div k, 0)) FILTER (WHERE k <> 0) AS no_error"), F.expr("count(*) FILTER (WHERE false)"),
    ),
    "between": lambda df: df.groupBy(F.expr("k between 1 and 4"), F.expr("x between 0 and 5").alias("b")).agg(F.max("k")),
    "short": lambda df: df.groupBy(["k"]).sum("x", "l"),
    "all_numbers": lambda df: df.groupBy("k", "word").max(),
    "dictionary": lambda df: df.groupBy("k").agg({"x": "max", "*": "count"}),
    "keys_alone": lambda df: df.groupBy("k", "flag").agg(F.lit(1).alias("one")),
    "hopping": lambda df: df.groupBy(F.window(*WINDOW), "k").agg(F.count("*").alias("n"), F.sum("money")),
    "tumbling": lambda df: df.groupBy("k", F.window("ts", "5 minutes").alias("w")).agg(F.max("x"), F.avg("l")),
    "window_alone": lambda df: df.groupBy(F.expr("window(ts, '7 minutes')")).agg(F.count_distinct("k")),
    "wall": lambda df: df.groupBy(F.window("wall", "1 hour"), F.upper("word")).count(),
    "computed_time": lambda df: df.groupBy(F.window(F.col("ts") + F.expr("INTERVAL 3 SECONDS"), "1 hour")).count(),
    "sessions": lambda df: df.groupBy("k", F.session_window("ts", "20 seconds")).agg(F.count("*"), F.sum("l")),
    "sessions_alone": lambda df: df.groupBy(F.session_window("ts", "3 seconds").alias("s")).agg(F.min("word")),
}  # fmt: skip


REFUSED = {
    "other aggregate": (lambda df: df.groupBy("k").agg(F.stddev("x")), r"stddev\(x\) .* there is no StddevSamp there.*KeyedOp"),
    "lists": (lambda df: df.groupBy("k").agg(F.collect_list("x")), "there is no CollectList there"),
    "distinct sum": (lambda df: df.groupBy("k").agg(F.sum_distinct("l")), "DISTINCT is for the count of one column"),
    "two distinct": (lambda df: df.groupBy("k").agg(F.count_distinct("l", "k")), "DISTINCT is for the count of one column"),
    "try_sum": (lambda df: df.groupBy("k").agg(F.expr("try_sum(l)")), "a sum that does not fit is an error there"),
    "try_avg": (lambda df: df.groupBy("k").agg(F.expr("try_avg(money)")), "a sum that does not fit is an error there"),
    "struct": (lambda df: df.groupBy("k").agg(F.max(F.struct("x", "l"))), r"max\(.*is not defined for type struct"),
    "key": (lambda df: df.groupBy(F.array("k")).count(), "cannot be a key"),
    "no kernel": (lambda df: df.groupBy("k").agg(F.max(F.sha2("word", 256))), "there is no Sha2 there"),
    "no kernel behind": (lambda df: df.groupBy("k").agg(F.sha2(F.max("word"), 256)), "there is no Sha2 there"),
    "random": (lambda df: df.groupBy("k").agg(F.sum(F.rand())), "NONDETERMINISTIC_EXPRESSION"),
    "unknown column": (lambda df: df.groupBy("kk").count(), r"UNRESOLVED_COLUMN.*There are k BIGINT"),
    "no aggregate": (lambda df: df.groupBy("k").agg(F.col("x")), "MISSING_AGGREGATION"),
    "a number": (lambda df: df.groupBy("k").agg(5), "expected a Column, as in F.sum.*got int 5"),
    "a part": (lambda df: df.groupBy(F.window("ts", "1 minute")["start"]).count(), "a window has to be a key of its own"),
    "text as times": (lambda df: df.groupBy(F.window("word", "1 minute")).count(), "times of type TIMESTAMP, got STRING"),
    "long slide": (lambda df: df.groupBy(F.window("ts", "1 minute", "2 minutes")).count(), "is longer than windowDuration"),
    "months": (lambda df: df.groupBy(F.window("ts", "1 month")).count(), "a month has no fixed length"),
    "zero": (lambda df: df.groupBy(F.window("ts", "0 seconds")).count(), "expected a duration above zero"),
    "negative": (lambda df: df.groupBy(F.session_window("ts", "-1 second")).count(), "expected a duration above zero"),
    "gap": (lambda df: df.groupBy(F.session_window("ts", F.col("word"))).count(), "expected a constant, as in '10 minutes'"),
    "clock": (lambda df: df.groupBy(F.window(F.localtimestamp(), "1 minute")).count(), "LocalTimestamp gives other values"),
    "closes": (lambda df: df.groupBy("k").agg(F.max("x"), closes="word"), "times of type TIMESTAMP, got STRING"),
    "two windows": (lambda df: df.groupBy(F.window("ts", "1 hour"), F.window("ts", "1 day")).count(), "one window at most"),
    "same names": (lambda df: df.groupBy("k").agg(F.max("x").alias("k")).where("k > 1"), "several columns are called 'k'"),
}  # fmt: skip


@pytest.fixture(scope="module")
def rows(spark: Any) -> Any:
    return flux.source(lambda partition: table().to_batches(max_chunksize=500), table().schema, 1, "rows")


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_by_name_when_the_flow_is_written(rows: Any, name: str) -> None:
    write, words = REFUSED[name]
    with pytest.raises(flux.UsageError, match=f"(?s){words}") as refused:
        write(rows)
    assert "'Aggregate" not in str(refused.value)


def test_a_sum_that_does_not_fit_is_an_error_in_both(spark: Any) -> None:
    given = pa.table({"l": pa.array([(1 << 63) - 1, 1])})
    for df in (spark.createDataFrame(given).coalesce(1), Local(spark, given)):
        with pytest.raises(Exception, match=r"(?i)overflow|does not fit int64"):
            df.groupBy().agg(F.sum("l") - 1).collect()


@flux.stage(key="k", partitions=2)
class Spent(flux.Aggregate):
    n = flux.count(where="x > 1 OR flag")
    total = flux.sum("l", where="word <> 'a'")


def test_conditions_of_measures_are_those_of_spark(spark: Any, data: Any, rows: Any) -> None:
    theirs = data.groupBy("k").agg(
        F.expr("count(*) FILTER (WHERE x > 1 OR flag) AS n"), F.expr("sum(l) FILTER (WHERE word <> 'a') AS total")
    )
    batches = table().to_batches(max_chunksize=500)
    assert_same(spark.createDataFrame(flux.testing.apply(Spent, *batches)), theirs)
    wrong = flux.stage(key="k")(type("Wrong", (flux.Aggregate,), {"n": flux.count(where="y > 1")}))
    with pytest.raises(flux.UsageError, match=r"(?s)stage Wrong, where=.*UNRESOLVED_COLUMN.*There are k BIGINT"):
        wrong(rows).explain()


@flux.stage(key="word", partitions=2)
class Windows(flux.Aggregate):
    windows = flux.count()
    n = flux.sum("n")


def counted(df: Any) -> Any:
    """Put windows, conditions and columns behind a DataFrame or a source."""
    found = df.where("k > 1").groupBy(F.window("ts", "10 minutes"), F.lower("word").alias("word")).agg(
        F.count("*").alias("n"), (F.sum("x") / F.count("x")).alias("mean")
    )  # fmt: skip
    return found.where("n > 2").select("window.start", F.col("window"), "word", "n", "mean")


def test_columns_of_flows_are_attributes_as_of_dataframes(data: Any, rows: Any) -> None:
    """Spark's guide has this program, whose columns are attributes."""

    def guide(words: Any) -> Any:
        return words.groupBy(F.window(words.ts, "10 minutes", "5 minutes"), words.WORD, words["k"] % 2).count()

    assert "word, (k % 2)" in flux.explain(guide(rows.where(rows.k > 1)))
    counts = guide(rows)
    assert str(counts["count"]) == "Column<'count'>"
    assert str(counts.window) == "Column<'window'>"
    assert not hasattr(counts, "nonsense")
    assert not hasattr(rows, "nonsense")
    with pytest.raises(flux.SchemaError, match="has no column 'nonsense'"):
        counts["nonsense"]
    with pytest.raises(flux.UsageError, match="takes the name of a column"):
        rows[0]
    with pytest.raises(TypeError):
        iter(rows)


def test_a_flow_of_groups_is_that_of_spark(spark: Any, data: Any, rows: Any) -> None:
    """Flows here lead from a source through steps, groups of windows, steps, and groups of their results, in both ways of writing
    them."""
    timed = rows.withWatermark("ts", "2 hours")  # no row is as late as that
    theirs = counted(data).groupBy("word").agg(F.count("*").alias("windows"), F.sum("n").alias("n"))
    assert_same(Windows(counted(timed)).toDF(), theirs)
    hours = [F.window(F.window_time("window"), "1 hour").alias("hour"), F.sum("n").alias("n")]
    theirs = counted(data).groupBy(F.window("start", "1 hour").alias("hour")).agg(hours[1])
    assert_same(counted(flux.batch(data)).groupBy(hours[0]).agg(hours[1]).toDF(), theirs)
    with pytest.raises(flux.UsageError, match=r"window is a window of an earlier .*groupBy\(F.window\('window', "):
        counted(rows).groupBy("window").count()


def summed(key: tuple, rows: pa.Table) -> pa.Table:
    """Give the key of a group, the columns of its rows, and values that do not depend on their order."""
    window, word, number = (part.as_py() for part in key)
    total = sum(value for value in rows.column("l").to_pylist() if value is not None)
    text = f"{window['start']} {window['end']} {word} {number} {','.join(rows.column_names)}"
    return pa.table(
        {
            "n": [rows.num_rows],
            "text": [text],
            "total": pa.array([total], pa.int64()),
            "start": pa.array([window["start"]], UTC),
        }
    )


def counted_rows(rows: pa.Table) -> pa.Table:
    return pa.table({"n": [rows.num_rows], "least": [min(rows.column("x").drop_null().to_pylist(), default=None)]})


APPLIED = {
    "key": lambda df: df.groupBy(F.window(*WINDOW), F.lower("word"), F.col("k") % 3).applyInArrow(
        summed, "total BIGINT, n BIGINT, text STRING, start TIMESTAMP"
    ),
    "rows": lambda df: df.groupBy("flag", F.window("ts", "5 minutes")).applyInArrow(
        counted_rows, "n BIGINT, least DOUBLE"
    ),
}


@pytest.mark.parametrize("name", APPLIED)
def test_functions_over_windows_are_those_of_spark(spark: Any, data: Any, name: str) -> None:
    assert_same(APPLIED[name](Local(spark, table())), APPLIED[name](data))


def test_a_flow_of_functions_over_windows_is_that_of_spark(spark: Any, data: Any, rows: Any) -> None:
    timed = rows.withWatermark("ts", "2 hours")  # no row is as late as that
    assert_same(APPLIED["key"](timed).where("n > 1").toDF(), APPLIED["key"](data).where("n > 1"))
    groups = rows.groupBy(F.window("ts", "1 hour"), F.array("k"))
    with pytest.raises(flux.UsageError, match="cannot be a key"):
        groups.applyInArrow(counted_rows, "n BIGINT, least DOUBLE")


@pytest.mark.parametrize("zone", ["America/St_Johns"])
def test_windows_are_in_the_zone_of_the_session(spark: Any, data: Any, zone: str) -> None:
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        for query in (*(QUERIES[name] for name in ("hopping", "wall", "expressions", "sessions")), APPLIED["key"]):
            assert_same(query(Local(spark, table())), query(data))
        hour = F.window("ts", "1 hour"), F.hour("ts").alias("h"), F.date_format("ts", "yyyy-MM-dd HH").alias("text")
        queries = [df.groupBy(*hour).agg(F.max("ts"), F.hour(F.min("ts"))) for df in (Local(spark, table()), data)]
        assert_same(*queries)
        plain = flux.batch(data).groupBy("ts").agg(F.max("ts").alias("last"))
        assert "select" not in flux.explain(plain), "a column is the same in whatever zone it is shown"
        assert_same(plain.toDF(), data.groupBy("ts").agg(F.max("ts").alias("last")))
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)


def test_windows_are_recognised_where_no_session_is_active(spark: Any, rows: Any) -> None:
    """Sessions are not active in a thread of the program's, for example, or after Ctrl-C in a call of the JVM."""
    sessions = spark._jvm.org.apache.spark.sql.classic.SparkSession
    sessions.clearActiveSession()
    try:
        for given in F.expr("window(ts, '1 hour')"), F.window(F.timestamp_seconds("k"), "1 hour"):
            assert "window" in flux.explain(rows.groupBy(given).count())
    finally:
        sessions.setActiveSession(spark._jsparkSession)


def test_groups_that_a_column_closes_have_it_as_a_key(spark: Any, data: Any) -> None:
    ours = Local(spark, table()).groupBy("k").agg(F.count("*").alias("n"), F.expr("max(x) + 1"), closes="ts")
    theirs = data.where("ts IS NOT NULL").groupBy("k", "ts").agg(F.count("*").alias("n"), F.expr("max(x) + 1"))
    assert_same(ours, theirs)


def test_windows_of_processing_time_take_the_time_of_the_step(spark: Any, data: Any) -> None:
    """At 1970 in a trial, where no time is given."""
    for times in (F.current_timestamp(), flux.NOW):
        window = F.window(times, "1 minute") if times is not flux.NOW else flux.window(flux.NOW, "1 minute")
        ours = Local(spark, table()).groupBy(window, "k").agg(F.sum("l").alias("total"))
        theirs = data.groupBy(F.window(F.timestamp_seconds(F.lit(0)), "1 minute"), "k").agg(F.sum("l").alias("total"))
        assert_same(ours, theirs)


@pytest.mark.parametrize("name", QUERIES)
def test_groups_are_those_of_spark(spark: Any, data: Any, name: str) -> None:
    ours = QUERIES[name](Local(spark, table(), restart_after=3))
    assert_same(ours, QUERIES[name](data))
