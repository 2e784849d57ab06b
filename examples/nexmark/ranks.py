"""Measures that q15, q16 and q17 share: bids and their bidders and auctions, in all and in three ranks of prices."""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812

RANKS = {"rank1": "price < 10000", "rank2": "price >= 10000 AND price < 1000000", "rank3": "price >= 1000000"}


def bids() -> list[Column]:
    """Count bids, and those of each rank."""
    return _in_all_and_by_rank("count(*)", "bids")


def distinct(column: str) -> list[Column]:
    """Count different values of a column, and those of each rank. The count is exact."""
    return _in_all_and_by_rank(f"count(DISTINCT {column})", f"{column}s")


def _in_all_and_by_rank(count: str, name: str) -> list[Column]:
    ranks = [F.expr(f"{count} FILTER (WHERE {condition})").alias(f"{rank}_{name}") for rank, condition in RANKS.items()]
    return [F.expr(count).alias(f"total_{name}"), *ranks]
