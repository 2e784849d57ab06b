"""q2, selection: the bids for one auction in 123.

Question  How much is bid for the auctions whose number is a multiple of 123?
Flow      The condition is computed where bids are read, so the other bids never travel.
Answer    A row for each bid that is left: auction, price.
"""

from __future__ import annotations

import flux
from examples.nexmark.flows import Nexmark


def query(nexmark: Nexmark) -> flux.Flow:
    return nexmark.bid("auction", "price").where("auction % 123 = 0")
