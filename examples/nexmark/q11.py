"""q11, user sessions: how often each user bids without a pause of more than ten seconds.

A session is given once, when the watermark has passed its end: then no bid can come that would belong to it."""

from __future__ import annotations

from pyspark.sql import functions as F  # noqa: N812

import flux
from examples.nexmark.flows import Nexmark


def query(nexmark: Nexmark) -> flux.Flow:
    bids = nexmark.bid("bidder", "dateTime")
    sessions = bids.groupBy("bidder", F.session_window("dateTime", "10 seconds")).agg(F.count("*").alias("bid_count"))
    return sessions.selectExpr(
        "bidder", "bid_count", "session_window.start AS starttime", "session_window.end AS endtime"
    )
