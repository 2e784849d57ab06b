"""q13, a join with a small table: each bid with the value of its key.

Question  What does a table that does not change say about each bid?
Flow      ``flux.batch`` sends a DataFrame of Spark into every worker as a table, so bids find their rows without an exchange. The
          table is kept in the checkpoint location: a query that is started again has the same one.
Answer    A row for each bid: auction, bidder, price, dateTime, value.
"""

from __future__ import annotations

from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

import flux
from examples.nexmark.flows import Nexmark

KEYS = 10_000


def query(nexmark: Nexmark) -> flux.Flow:
    table = SparkSession.active().range(KEYS).selectExpr("id AS key", "concat('value-', id) AS value")
    bids = nexmark.bid("auction", "bidder", "price", "dateTime")
    joined = bids.join(flux.batch(table), F.expr(f"auction % {KEYS} = key"))
    return joined.select("auction", "bidder", "price", "dateTime", "value")
