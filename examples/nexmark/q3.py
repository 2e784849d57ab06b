"""q3, local items: sellers of a category in three states.

Question  Who in Oregon, Idaho or California sells something of category 10, and what?
Flow      Two flows, each with its condition, are joined on the seller. People may come before or after their auctions, so the
          join keeps both sides. No bound of time ends the wait for a match, and ``ttl=None`` keeps both for ever.
Answer    A row for each auction that has found its seller, as soon as both are there: name, city, state, id of the auction.
"""

from __future__ import annotations

from pyspark.sql import functions as F  # noqa: N812

import flux
from examples.nexmark.flows import Nexmark


def query(nexmark: Nexmark) -> flux.Flow:
    people = nexmark.person("id", "name", "city", "state").where("state IN ('OR', 'ID', 'CA')").alias("p")
    auctions = nexmark.auction("id", "seller", "category").where("category = 10").alias("a")
    return auctions.join(people, F.expr("a.seller = p.id"), ttl=None).select("name", "city", "state", "a.id")
