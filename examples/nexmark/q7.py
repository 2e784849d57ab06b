"""q7, highest bid: the bids with the highest price of each ten seconds; all of them, if several are as high."""

from __future__ import annotations

from pyspark.sql import functions as F  # noqa: N812

import flux
from examples.nexmark.flows import Nexmark


def query(nexmark: Nexmark) -> flux.Flow:
    bids = nexmark.bid("auction", "price", "bidder", "dateTime", "extra")
    highest = flux.top(bids, 1, window=F.window("dateTime", "10 seconds"), by="price DESC", ties=True)
    return highest.select("auction", "price", "bidder", "dateTime", "extra")
