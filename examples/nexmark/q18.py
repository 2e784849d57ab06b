"""q18, last bid: the newest bid of each user for each auction. It is given again whenever there is a newer one."""

from __future__ import annotations

import flux
from examples.nexmark.flows import Nexmark


def query(nexmark: Nexmark) -> flux.Flow:
    return flux.last(nexmark.bid(), key=["bidder", "auction"], by="dateTime, price")
