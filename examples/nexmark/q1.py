"""q1, currency conversion: every bid with its price in euros.

Question  How much is each bid in euros, at 0.908 euros for a dollar?
Flow      One expression of Spark SQL, computed on whole columns where bids are read. Types are those of Spark: BIGINT times a
          decimal of three digits is a decimal of three digits.
Answer    A row for each bid: auction, bidder, price DECIMAL(24,3), dateTime, extra.
"""

from __future__ import annotations

import flux
from examples.nexmark.flows import Nexmark


def query(nexmark: Nexmark) -> flux.Flow:
    bids = nexmark.bid("auction", "bidder", "price", "dateTime", "extra")
    return bids.selectExpr("auction", "bidder", "0.908 * price AS price", "dateTime", "extra")
