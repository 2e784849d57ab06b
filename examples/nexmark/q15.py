"""q15, statistics of a day: bids, bidders and auctions, in all and by rank of price.

There is no window: the counts of a day are given again whenever they have changed (update mode)."""

from __future__ import annotations

from pyspark.sql import functions as F  # noqa: N812

import flux
from examples.nexmark import ranks
from examples.nexmark.flows import Nexmark


def query(nexmark: Nexmark) -> flux.Flow:
    bids = nexmark.bid("auction", "bidder", "price", "dateTime")
    day = F.date_format("dateTime", "yyyy-MM-dd").alias("day")
    return bids.groupBy(day).agg(*ranks.bids(), *ranks.distinct("bidder"), *ranks.distinct("auction")).in_mode("update")
