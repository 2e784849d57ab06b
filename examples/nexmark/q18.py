"""q18, last bid of each user for each auction.

Question  What is the newest offer of a user for an auction?
Flow      ``flux.last`` keeps one row for each key, the newest by time; of two with the same time the one with the higher price.
Answer    Update mode: all columns of the bid. A key is given again whenever there is a newer bid, so its last row is the answer.
"""

from __future__ import annotations

import flux
from examples.nexmark.flows import Nexmark


def query(nexmark: Nexmark) -> flux.Flow:
    return flux.last(nexmark.bid(), key=["bidder", "auction"], by="dateTime, price")
