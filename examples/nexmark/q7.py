"""q7, highest bid of each ten seconds.

Question  Which bid was the highest within ten seconds?
Flow      The first rank within each window by price, without counting anything before; ``ties=True`` keeps all bids that are as
          high. Only the best bids until now are state.
Answer    Append mode: each window once, when the watermark has passed its end. auction, price, bidder, dateTime, extra.
"""

from __future__ import annotations

from pyspark.sql import functions as F  # noqa: N812

import flux
from examples.nexmark.flows import Nexmark


def query(nexmark: Nexmark) -> flux.Flow:
    bids = nexmark.bid("auction", "price", "bidder", "dateTime", "extra")
    highest = flux.top(bids, 1, window=F.window("dateTime", "10 seconds"), by="price DESC", ties=True)
    return highest.select("auction", "price", "bidder", "dateTime", "extra")
