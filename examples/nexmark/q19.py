"""q19, the ten highest bids of each auction. A bid is given with its rank whenever its rank has changed."""

from __future__ import annotations

import flux
from examples.nexmark.flows import Nexmark


def query(nexmark: Nexmark) -> flux.Flow:
    return flux.top(nexmark.bid(), 10, key="auction", by="price DESC, dateTime, bidder")
