"""q12, windows of processing time: how often each user bids within ten seconds of the clock.

The time of a row is that of the step in which it is applied. It is the same on every replica, and a take-over changes no window
that was given. Another run has other windows, but each bid is in one of them."""

from __future__ import annotations

from pyspark.sql import functions as F  # noqa: N812

import flux
from examples.nexmark.flows import Nexmark


def query(nexmark: Nexmark) -> flux.Flow:
    window = F.window(F.current_timestamp(), "10 seconds")
    counts = nexmark.bid("bidder").groupBy("bidder", window).agg(F.count("*").alias("bid_count"))
    return counts.selectExpr("bidder", "bid_count", "window.start AS starttime", "window.end AS endtime")
