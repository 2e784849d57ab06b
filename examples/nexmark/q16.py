"""q16, statistics of a channel and day: the counts of q15 for each channel, with the minute of the newest bid.

Question  How many people bid through each channel on a day, and when was it used last?
Flow      As q15, with some ten thousand channels as keys; half of the bids come through four of them.
Answer    Update mode: channel, day, minute, and the counts of q15. A channel is given again whenever it has changed.
"""

from __future__ import annotations

from pyspark.sql import functions as F  # noqa: N812

import flux
from examples.nexmark import ranks
from examples.nexmark.flows import Nexmark


def query(nexmark: Nexmark) -> flux.Flow:
    bids = nexmark.bid("auction", "bidder", "price", "channel", "dateTime")
    day = F.date_format("dateTime", "yyyy-MM-dd").alias("day")
    minute = F.max(F.date_format("dateTime", "HH:mm")).alias("minute")
    return (
        bids.groupBy("channel", day)
        .agg(minute, *ranks.bids(), *ranks.distinct("bidder"), *ranks.distinct("auction"))
        .in_mode("update")
    )
