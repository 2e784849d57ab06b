"""q12, windows of processing time: the bids of each user within ten seconds of the clock.

Question  How often does a user bid while the clock of the query goes on by ten seconds?
Flow      As q5, with ``F.current_timestamp()`` in place of a column. The time of a row is that of the step that applies it.
          It is the same on every replica, and a take-over changes no window that was given.
Answer    Append mode: bidder, bid_count, starttime, endtime. Another run has other windows, but each bid is in one of them.
"""

from __future__ import annotations

from pyspark.sql import functions as F  # noqa: N812

import flux
from examples.nexmark.flows import Nexmark


def query(nexmark: Nexmark) -> flux.Flow:
    window = F.window(F.current_timestamp(), "10 seconds")
    counts = nexmark.bid("bidder").groupBy("bidder", window).agg(F.count("*").alias("bid_count"))
    return counts.selectExpr("bidder", "bid_count", "window.start AS starttime", "window.end AS endtime")
