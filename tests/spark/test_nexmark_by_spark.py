"""The oracle of Nexmark against Spark's batch engine, for the queries whose windows the two express differently; and the peer of
``flux bench nexmark`` against the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.nexmark import checkout, spark_peer
from tests.oracles.nexmark import KINDS, NexmarkOracle

pytestmark = [pytest.mark.spark, pytest.mark.long]

COUNTS = """count(*), count(*) filter (where price < 10000), count(*) filter (where price >= 10000 and price < 1000000),
    count(*) filter (where price >= 1000000)"""
DISTINCT = ", ".join(
    f"count(distinct {column}){condition}"
    for column in ("bidder", "auction")
    for condition in (
        "",
        " filter (where price < 10000)",
        " filter (where price >= 10000 and price < 1000000)",
        " filter (where price >= 1000000)",
    )
)
PLACED = "auction a join bid b on a.id = b.auction and b.dateTime between a.dateTime and a.expires"
BY_SPARK = {
    "q3": """select p.name, p.city, p.state, a.id from auction a join person p on a.seller = p.id
        where a.category = 10 and p.state in ('OR', 'ID', 'CA')""",
    "q4": f"""select category, count(*), avg(final) from (select max(b.price) final, a.category from {PLACED}
        group by a.id, a.category) group by category""",
    "q5": """with counts as (select auction, count(*) num, window.start s from (select auction,
            window(dateTime, '10 seconds', '2 seconds') window from bid) group by auction, window)
        select auction, num, s from (select *, max(num) over (partition by s) most from counts) where num = most""",
    "q7": """with bids as (select *, window(dateTime, '10 seconds') w from bid)
        select auction, price, bidder, dateTime, extra
        from (select *, max(price) over (partition by w) most from bids) where price = most""",
    "q8": """select p.id, p.name, p.w.start from (select distinct id, name, window(dateTime, '10 seconds') w from person) p
        join (select distinct seller, window(dateTime, '10 seconds') w from auction) a on p.id = a.seller and p.w = a.w""",
    "q11": """select bidder, count(*), session_window.start, session_window.end from bid
        group by bidder, session_window(dateTime, '10 seconds')""",
    "q12": "select bidder, count(*) from bid group by bidder, window(dateTime, '10 seconds')",
    "q15": f"select date_format(dateTime, 'yyyy-MM-dd') day, {COUNTS}, {DISTINCT} from bid group by day",
    "q18": """select auction, bidder, price, channel, url, dateTime, extra from (select *, row_number() over
        (partition by bidder, auction order by dateTime desc, price desc, channel desc, url desc, extra desc) r from bid)
        where r = 1""",
}


@pytest.fixture(scope="module")
def oracle() -> NexmarkOracle:
    given: NexmarkOracle = checkout.oracle(checkout.events(200_000, 2, per_second=4_000, disorder=1_000, late=0.03))
    return given


@pytest.mark.parametrize("query", BY_SPARK)
def test_spark_gives_the_answer_of_the_oracle(query: str, oracle: NexmarkOracle, spark: Any) -> None:
    for kind in KINDS:
        if not spark.catalog.tableExists(kind):
            spark.createDataFrame(oracle.on_time(kind)).createOrReplaceTempView(kind)
    found = spark.sql(BY_SPARK[query]).toArrow()
    if query == "q12":
        found = found.rename_columns(["bidder", "bid_count"])
    assert found.num_rows > 0
    assert oracle.differences(query, found) == []


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("peer")


@pytest.mark.parametrize("query", spark_peer.QUERIES)
def test_structured_streaming_gives_the_answer_of_the_oracle(query: str, files: Path, spark: Any) -> None:
    options = {"per_second": 1_000, "disorder": 250}
    assert spark_peer.differences(spark, query, 50_000, files, **options) == []
