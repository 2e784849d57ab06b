"""q13, a join with a small table: each bid with the value of its key in a table, which every worker has."""

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
