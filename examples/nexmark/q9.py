"""q9, winning bids: each auction with its highest bid; the first one, if several are as high.

An auction is given again whenever there is a better bid, so the last row of each is its winner. The join forgets an auction when
the watermark has passed its end."""

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
