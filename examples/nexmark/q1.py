"""q1, currency conversion: every bid with its price in euros. Types are those of Spark: a price is a decimal of three digits."""

from __future__ import annotations

import flux
from examples.nexmark.flows import Nexmark


def query(nexmark: Nexmark) -> flux.Flow:
    bids = nexmark.bid("auction", "bidder", "price", "dateTime", "extra")
    return bids.selectExpr("auction", "bidder", "0.908 * price AS price", "dateTime", "extra")
