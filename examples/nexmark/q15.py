"""q15, statistics of a day: bids, bidders and auctions, in all and by rank of price.

Question  How many different people bid on a day, for how many auctions, and how many of them high, middling or low?
Flow      Twelve counts per day, eight of them of different values and nine with a condition. Different values are counted
          exactly: each is kept once per day. A day is one key, so one partition counts; the others are there for the next days.
Answer    Update mode: there is no window, and the counts of a day are given again whenever they have changed. day, four
          counts of bids, four of bidders, four of auctions.
"""

from __future__ import annotations

from pyspark.sql import functions as F  # noqa: N812

import flux
from examples.nexmark import ranks
from examples.nexmark.flows import Nexmark


def query(nexmark: Nexmark) -> flux.Flow:
    bids = nexmark.bid("auction", "bidder", "price", "dateTime")
    day = F.date_format("dateTime", "yyyy-MM-dd").alias("day")
    return bids.groupBy(day).agg(*ranks.bids(), *ranks.distinct("bidder"), *ranks.distinct("auction")).in_mode("update")
