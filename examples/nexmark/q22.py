"""q22, folders of pages: the first three folders of the page of each bid.

Question  Where in the shop was the bid made?
Flow      ``split_part`` of Spark SQL three times over one column, computed where bids are read.
Answer    A row for each bid: auction, bidder, price, channel, dir1, dir2, dir3.
"""

from __future__ import annotations

import flux
from examples.nexmark.flows import Nexmark


def query(nexmark: Nexmark) -> flux.Flow:
    bids = nexmark.bid("auction", "bidder", "price", "channel", "url")
    folders = [f"split_part(url, '/', {part}) AS dir{part - 3}" for part in (4, 5, 6)]
    return bids.selectExpr("auction", "bidder", "price", "channel", *folders)
