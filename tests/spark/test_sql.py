"""``flux.sql`` against ``spark.sql`` over the same rows: same names, types and rows. And the session of a text, which leaves that
of the user alone."""

from __future__ import annotations

from typing import Any

import pytest
from against_spark import assert_same, rows
from in_process import rows_of
from sql_flows import batches, flows, tables

import flux
from flux.settings import Settings
from spark_integration.query.declarations import compiled
from spark_integration.schema import for_spark
from spark_integration.settings import given_settings

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("spark")]

GIVEN = tables(3)
PER_MINUTE = "SELECT window, auction, count(*) AS n FROM bids GROUP BY window(ts, '1 minute'), auction"
TEXTS = [
    "SELECT * FROM bids",
    "TABLE bids",
    "SELECT b.*, b.price + 1, `price` p FROM bids b WHERE b.price > 3",
    "SELECT * EXCEPT (ts) FROM bids WHERE upper(channel) LIKE 'A%' AND price NOT IN (1, 2)",
    "SELECT auction, price * 2 AS twice, twice + 1 AS more FROM bids",
    "select WINDOW.START, Auction, COUNT(*) from Bids group by WINDOW(TS, '1 minute'), auction",
    "SELECT window(ts, '2 minutes', '1 minute').end AS e, max(price) - min(price), b.bidder FROM bids b "
    "GROUP BY b.bidder, window(ts, '2 minutes', '1 minute')",
    "SELECT session_window.start, session_window.end, avg(price) a FROM bids GROUP BY session_window(ts, '20 seconds'), bidder",
    "SELECT price % 3 AS k, count(DISTINCT bidder) FILTER (WHERE price > 9) AS d FROM bids GROUP BY k HAVING d > 1",
    "SELECT bidder, sum(price) AS price FROM bids GROUP BY 1 HAVING sum(price) > 10 AND price < 10000 AND max(price) > 1",
    "SELECT count(*), count(channel), bool_or(price > 90) FROM bids HAVING count(*) > 1",
    f"WITH m AS ({PER_MINUTE}) SELECT window(window, '5 minutes').start AS s, sum(n) AS n FROM m "
    "GROUP BY window(window, '5 minutes')",
    f"WITH m(w, k, n) AS ({PER_MINUTE}), bids AS (SELECT w.start AS s, n FROM m WHERE k > 1) SELECT s, n * 2 FROM bids",
    "SELECT a.id, b.price, a.ts FROM auctions a JOIN bids AS b ON a.id = b.auction AND b.ts BETWEEN a.ts AND a.expires",
    "SELECT seller, price FROM auctions, bids WHERE id = auction AND bids.ts >= auctions.ts "
    "AND bids.ts < auctions.ts + INTERVAL 1 MINUTE AND price > seller",
    "SELECT a.id, a.ts FROM auctions a LEFT ANTI JOIN bids b ON a.id = b.auction AND b.ts BETWEEN a.ts AND a.expires",
    "SELECT l.window.start, l.n, r.m FROM "
    f"({PER_MINUTE}) l FULL JOIN (SELECT window, id, count(*) m FROM auctions GROUP BY window(ts, '1 minute'), id) r "
    "ON l.window = r.window AND l.auction = r.id",
    "SELECT auction AS k, ts, 'bid' AS kind FROM bids UNION ALL SELECT seller, ts, 'auction' FROM auctions",
    "SELECT length('x') AS n FROM bids UNION ALL SELECT category FROM auctions UNION ALL SELECT NULL FROM bids",
    "SELECT DISTINCT bidder, ts FROM bids",
    "SELECT k, v FROM (SELECT bidder, max(price) FROM bids GROUP BY bidder) AS t(k, v) WHERE v > 5",
]  # fmt: skip


@pytest.fixture(scope="module")
def views(spark: Any) -> Any:
    for name, table in GIVEN.items():
        struct, _ = for_spark(table.schema, name)
        spark.createDataFrame(table.to_pylist(), struct).createOrReplaceTempView(name)
    yield
    for name in GIVEN:
        spark.catalog.dropTempView(name)


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_gives_what_spark_gives(text: str, spark: Any, views: Any) -> None:
    flow = flux.sql(text, flows())
    theirs = spark.sql(text)
    assert flow.dtypes == theirs.dtypes
    ours = spark.createDataFrame(rows_of(spark, flow, batches(GIVEN)).to_pylist(), theirs.schema)
    assert [repr(row) for row in rows(ours)] == [repr(row) for row in rows(theirs)] != []


def test_a_text_runs_as_a_query(spark: Any, views: Any, nothing_left_behind: None) -> None:
    text = (
        "SELECT window.start AS s, name, count(*) AS n FROM bids b JOIN names n ON b.auction = n.id WHERE price > 0 "
        "GROUP BY window(ts, '1 minute'), name"
    )
    names = spark.range(5).selectExpr("id", "'item ' || id AS name")
    names.createOrReplaceTempView("names")
    query = flux.sql(text, bids=spark.table("bids"), names=names).start(keep_output=True)
    assert_same(query.toDF(), spark.sql(text))
    spark.catalog.dropTempView("names")
    fresh = flux.lookup(names, refresh="1 hour")
    assert flux.sql("SELECT name, price FROM bids JOIN n ON auction = id", flows(), n=fresh).columns == [
        "name",
        "price",
    ]


def test_results_are_flows_of_the_next_text() -> None:
    given = flows()
    first = flux.sql("SELECT auction, price, ts FROM bids WHERE price > 5", bids=given["bids"])
    assert flux.sql("SELECT max(price) AS m FROM high GROUP BY window(ts, '1 minute')", high=first).columns == ["m"]
    assert flux.sql("SELECT `my flow`.price FROM `my flow`", {"my flow": first}).columns == ["price"]


def test_a_text_goes_on_from_a_running_stage(spark: Any) -> None:
    first = flux.sql("SELECT auction, price, ts FROM bids WHERE price > 5", flows()).withStage(name="high")
    running = compiled(spark, [first], Settings.of(given_settings(spark)))
    handle = running.stage("high", lambda: running)
    assert flux.sql("SELECT h.price AS p FROM high h WHERE auction = 3", high=handle).columns == ["p"]


def test_a_text_reads_no_variable_and_leaves_the_session_alone(spark: Any) -> None:
    spark.conf.set("spark.tests.secret", "hidden")
    before = spark.conf.getAll
    flow = flux.sql("SELECT '${env:HOME}' AS a, '${spark.tests.secret}' AS b FROM bids", flows())
    found = rows_of(spark, flow, batches(GIVEN)).to_pylist()[0]
    assert found == {"a": "${env:HOME}", "b": "${spark.tests.secret}"}
    assert spark.conf.getAll == before
    active = spark.getActiveSession()
    assert active is not None
    assert active._jsparkSession.equals(spark._jsparkSession)
    spark.conf.unset("spark.tests.secret")


def test_views_and_functions_of_the_session_are_not_there(spark: Any) -> None:
    spark.range(3).createOrReplaceTempView("secrets")
    spark.udf.register("doubled", lambda each: 2 * each, "int")
    spark.udf.register("upper", lambda each: "mine", "string")
    try:
        for text in ("SELECT * FROM secrets", "SELECT doubled(price) FROM bids"):
            with pytest.raises(flux.UsageError, match=r"flux\.sql, line 1, position"):
                flux.sql(text, flows())
        flow = flux.sql("SELECT upper(channel) AS c FROM bids WHERE channel = 'apple'", flows())
        assert set(rows_of(spark, flow, batches(GIVEN)).column("c").to_pylist()) == {"APPLE"}
    finally:
        spark.catalog.dropTempView("secrets")
        for name in ("doubled", "upper"):
            spark.sql(f"DROP TEMPORARY FUNCTION {name}")


@pytest.mark.parametrize(
    ("args", "kwargs", "told"),
    [
        (("SELECT 1",), {}, "name the flows"),
        (("",), {"bids": "flow"}, "must be a flow, a source or a DataFrame, got str"),
        (("SELECT :p FROM bids", {"p": 3}), {}, "p must be a flow"),
        (("SELECT 1", [1]), {}, "args maps names to flows"),
        ((3,), {}, "name the flows"),
    ],
)
def test_wrong_arguments_are_told(args: Any, kwargs: Any, told: str) -> None:
    with pytest.raises(flux.UsageError, match=told):
        flux.sql(*args, **kwargs)
    given = flows()["bids"]
    with pytest.raises(flux.UsageError, match="'bids' is in args and among the keywords"):
        flux.sql("SELECT 1", {"bids": given}, bids=given)
    with pytest.raises(flux.UsageError, match="differ by more than capitals"):
        flux.sql("SELECT 1", {"bids": given, "Bids": given})
    with pytest.raises(flux.UsageError, match="expected a text"):
        flux.sql(None, {"bids": given})  # type: ignore[arg-type]
