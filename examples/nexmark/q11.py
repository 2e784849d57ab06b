"""q11, user sessions: the bids of each user without a pause of more than ten seconds.

Question  How often does a user bid at a stretch?
Flow      Bids are grouped by bidder and session. A session grows with each bid, and two become one when a bid comes between
          them.
Answer    Append mode: a session once, when the watermark has passed its end, because then no bid can come that would belong to
          it. bidder, bid_count, starttime, endtime: ten seconds after the last bid.
"""

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
