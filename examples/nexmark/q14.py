"""q14, calculation: bids of a middling price, with the time of day and the number of letters c in their text.

Question  When of the day do bids of one to fifty million come?
Flow      A condition and functions of Spark SQL: Spark resolves names, types and casts, and the workers compute on whole columns.
Answer    A row for each such bid: auction, bidder, price in euros, bidTimeType, dateTime, extra, c_counts.
"""

from __future__ import annotations

import flux
from examples.nexmark.flows import Nexmark

TIME_OF_DAY = """
    CASE WHEN hour(dateTime) BETWEEN 8 AND 18 THEN 'dayTime'
         WHEN hour(dateTime) <= 6 OR hour(dateTime) >= 20 THEN 'nightTime'
         ELSE 'otherTime' END AS bidTimeType
"""


def query(nexmark: Nexmark) -> flux.Flow:
    bids = nexmark.bid("auction", "bidder", "price", "dateTime", "extra")
    return bids.where("0.908 * price > 1000000 AND 0.908 * price < 50000000").selectExpr(
        "auction", "bidder", "0.908 * price AS price", TIME_OF_DAY, "dateTime", "extra",
        "length(extra) - length(replace(extra, 'c', '')) AS c_counts",
    )  # fmt: skip
