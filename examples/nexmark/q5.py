"""q5, hot items: the auctions with the most bids of the last ten seconds, every two seconds; several, if they have as many.

The counts of a window are final when the watermark has passed its end, and so is their order."""

from __future__ import annotations

from pyspark.sql import functions as F  # noqa: N812

import flux
from examples.nexmark.flows import Nexmark


def query(nexmark: Nexmark) -> flux.Flow:
    window = F.window("dateTime", "10 seconds", "2 seconds")
    counts = nexmark.bid("auction", "dateTime").groupBy(window, "auction").agg(F.count("*").alias("num"))
    hot = flux.top(counts, 1, within="window", by="num DESC", ties=True)
    return hot.select("auction", "num", F.col("window.start").alias("starttime"))
