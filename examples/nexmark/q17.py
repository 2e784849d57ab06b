"""q17, statistics of an auction and day: bids in all and by rank, and the least, greatest, mean and sum of their prices.

Question  How does an auction do today?
Flow      Four counts and four measures of the price per auction and day. Auctions are many, and each is busy for a moment.
Answer    Update mode: auction, day, total_bids, rank1_bids to rank3_bids, min_price, max_price, avg_price, sum_price. An auction
          is given again whenever it has changed.
"""

from __future__ import annotations

from pyspark.sql import functions as F  # noqa: N812

import flux
from examples.nexmark import ranks
from examples.nexmark.flows import Nexmark


def query(nexmark: Nexmark) -> flux.Flow:
    bids = nexmark.bid("auction", "price", "dateTime")
    day = F.date_format("dateTime", "yyyy-MM-dd").alias("day")
    prices = [getattr(F, name)("price").alias(f"{name}_price") for name in ("min", "max", "avg", "sum")]
    return bids.groupBy("auction", day).agg(*ranks.bids(), *prices).in_mode("update")
