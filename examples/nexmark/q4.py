"""q4, average price of a category: the mean of the highest bids of its auctions that have closed.

Bids wait for their auction, and an auction for its bids, no longer than the watermark allows. ``closes="expires"`` gives each
auction once, when no bid can come any more. The mean of a category is given again whenever it has changed."""

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
