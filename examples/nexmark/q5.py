"""q5, hot items: the auctions with the most bids in the last ten seconds.

Question  Every two seconds: for which auction were there the most bids within ten seconds?
Flow      Bids are counted per auction in windows of ten seconds that begin every two seconds, so a bid is in five of them. Then
          the first rank within each window; ``ties=True`` keeps all auctions with as many bids.
Answer    Append mode: each window once, when the watermark has passed its end, because only then its counts and ranks are
          final. auction, num, starttime of the window.
"""

from __future__ import annotations

from pyspark.sql import functions as F  # noqa: N812

import flux
from examples.nexmark.flows import Nexmark


def query(nexmark: Nexmark) -> flux.Flow:
    window = F.window("dateTime", "10 seconds", "2 seconds")
    counts = nexmark.bid("auction", "dateTime").groupBy(window, "auction").agg(F.count("*").alias("num"))
    hot = flux.top(counts, 1, within="window", by="num DESC", ties=True)
    return hot.select("auction", "num", F.col("window.start").alias("starttime"))
