"""q3, local items: who sells in a category, in three states.

No bound of time ends the wait for a match, so ``ttl=None`` says that people and auctions are kept for ever."""

from __future__ import annotations

from pyspark.sql import functions as F  # noqa: N812

import flux
from examples.nexmark.flows import Nexmark


def query(nexmark: Nexmark) -> flux.Flow:
    people = nexmark.person("id", "name", "city", "state").where("state IN ('OR', 'ID', 'CA')").alias("p")
    auctions = nexmark.auction("id", "seller", "category").where("category = 10").alias("a")
    return auctions.join(people, F.expr("a.seller = p.id"), ttl=None).select("name", "city", "state", "a.id")
