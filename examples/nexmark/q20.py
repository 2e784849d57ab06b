"""q20, bids with their auctions, in one category.

Question  Which bids are there for category 10, and for what?
Flow      A join without a bound of time. Nothing says how long an auction may be asked for, so ``ttl=None`` keeps both sides for
          ever; auctions of other categories are left out before the exchange.
Answer    A row for each pair, as soon as both are there: the columns of the bid, then those of the auction.
"""

from __future__ import annotations

from pyspark.sql import functions as F  # noqa: N812

import flux
from examples.nexmark.flows import Nexmark


def query(nexmark: Nexmark) -> flux.Flow:
    bids, auctions = nexmark.bid().alias("b"), nexmark.auction().where("category = 10").alias("a")
    return bids.join(auctions, F.expr("auction = id"), ttl=None).select(
        "auction", "bidder", "price", "channel", "url", F.col("b.dateTime").alias("bid_dateTime"),
        F.col("b.extra").alias("bid_extra"), "itemName", "description", "initialBid", "reserve", "a.dateTime", "expires",
        "seller", "category", "a.extra",
    )  # fmt: skip
