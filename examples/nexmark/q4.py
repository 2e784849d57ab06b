"""q4, average price of a category: the mean of the highest bids of its auctions that have closed.

Question  For how much do the auctions of each category go?
Flow      Bids are joined with their auctions while these are open: the condition bounds the time of a bid by two columns of the
          auction, so each side is forgotten when no partner can come any more. Then the highest bid of each auction:
          ``closes="expires"`` gives an auction once, when no bid can come any more. Last, the mean of each category.
Answer    Update mode: a category is given again whenever another auction has closed. category, auctions, final. The last row
          of a category is its answer.
"""

from __future__ import annotations

from pyspark.sql import functions as F  # noqa: N812

import flux
from examples.nexmark.flows import Nexmark


def query(nexmark: Nexmark) -> flux.Flow:
    bids = nexmark.bid("auction", "price", "dateTime").alias("b")
    auctions = nexmark.auction("id", "category", "dateTime", "expires").alias("a")
    placed = bids.join(auctions, F.expr("auction = id AND b.dateTime BETWEEN a.dateTime AND expires"))
    placed = placed.select("id", "category", "price", "expires", "b.dateTime")
    closed = placed.groupBy("id", "category").agg(F.max("price").alias("final"), closes="expires")
    return (
        closed.groupBy("category").agg(F.count("*").alias("auctions"), F.avg("final").alias("final")).in_mode("update")
    )
