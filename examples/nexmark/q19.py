"""q19, the ten highest bids of each auction.

Question  Which ten bids lead an auction, and in which order?
Flow      ``flux.top`` keeps ten rows for each auction; the order by time and bidder decides between bids of the same price.
Answer    Update mode: all columns of the bid, and its rank. A bid is given whenever its rank has changed, so the last row of an
          auction and rank is the answer.
"""

from __future__ import annotations

import flux
from examples.nexmark.flows import Nexmark


def query(nexmark: Nexmark) -> flux.Flow:
    return flux.top(nexmark.bid(), 10, key="auction", by="price DESC, dateTime, bidder")
