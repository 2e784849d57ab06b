"""q0, pass-through: every bid as it is.

Question  None. The query shows what reading, an exchange and an output cost by themselves.
Flow      Bids are read in the workers with the five columns that are named, and go to the output. There is no state.
Answer    A row for each bid: auction, bidder, price, dateTime, extra.
"""

from __future__ import annotations

import flux
from examples.nexmark.flows import Nexmark


def query(nexmark: Nexmark) -> flux.Flow:
    return nexmark.bid("auction", "bidder", "price", "dateTime", "extra")
