"""q8, new users: people with an auction in the window of ten seconds in which they registered.

Question  Who registers and sells something at once?
Flow      People are grouped by window and id, auctions by window and seller, and the two are joined on window and person. A
          window is joined when it is final on both sides, and then forgotten.
Answer    Append mode: a row for each such person and window. id, name, starttime of the window.
"""

from __future__ import annotations

from pyspark.sql import functions as F  # noqa: N812

import flux
from examples.nexmark.flows import Nexmark


def query(nexmark: Nexmark) -> flux.Flow:
    window = F.window("dateTime", "10 seconds")
    people = nexmark.person("id", "name", "dateTime").groupBy(window, "id", "name").count().alias("p")
    sellers = nexmark.auction("seller", "dateTime").groupBy(window, "seller").count().alias("a")
    new = people.join(sellers, F.expr("p.id = a.seller AND p.window = a.window"))
    return new.select("id", "name", F.col("p.window.start").alias("starttime"))
