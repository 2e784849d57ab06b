"""q9, winning bids: each auction with its highest bid; the first one, if several are as high.

Question  Who wins an auction, and for how much?
Flow      Bids are joined with their auctions while these are open, as in q4. Each auction keeps its best pair, by price, time and
          bidder.
Answer    Update mode: an auction is given again whenever there is a better bid, so its last row is its winner. All columns of the
          auction, then those of the bid.
"""

from __future__ import annotations

from pyspark.sql import functions as F  # noqa: N812

import flux
from examples.nexmark.flows import Nexmark


def query(nexmark: Nexmark) -> flux.Flow:
    bids = nexmark.bid("auction", "bidder", "price", "dateTime", "extra").alias("b")
    auctions = nexmark.auction().alias("a")
    placed = bids.join(auctions, F.expr("auction = id AND b.dateTime BETWEEN a.dateTime AND expires")).select(
        "id", "itemName", "description", "initialBid", "reserve", "a.dateTime", "expires", "seller", "category", "a.extra",
        "auction", "bidder", "price", F.col("b.dateTime").alias("bid_dateTime"), F.col("b.extra").alias("bid_extra"),
    )  # fmt: skip
    return flux.top(placed, 1, key="id", by="price DESC, bid_dateTime, bidder").drop("rank")
