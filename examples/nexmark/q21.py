"""q21, channel ids: the number of each bid's channel, by its name or out of the page.

Question  Through which channel did a bid come?
Flow      CASE and a regular expression of Spark SQL, computed on whole columns where bids are read; a condition on the new column
          leaves out the bids whose page names no channel.
Answer    A row for each bid that is left: auction, bidder, price, channel, channel_id.
"""

from __future__ import annotations

import flux
from examples.nexmark.flows import Nexmark

CHANNEL_ID = r"""
    CASE lower(channel) WHEN 'apple' THEN '0' WHEN 'google' THEN '1' WHEN 'facebook' THEN '2' WHEN 'baidu' THEN '3'
         ELSE nullif(regexp_extract(url, '(&|^)channel_id=([^&]*)', 2), '') END AS channel_id
"""


def query(nexmark: Nexmark) -> flux.Flow:
    bids = nexmark.bid("auction", "bidder", "price", "channel", "url")
    return bids.selectExpr("auction", "bidder", "price", "channel", CHANNEL_ID).where("channel_id IS NOT NULL")
