"""q6, average price of a seller: for each auction that has closed, the mean of the seller's last ten.

Question  How well do the last ten auctions of a seller do?
Flow      As in q4, bids are joined with their auctions, and ``closes="expires"`` gives each auction with its highest bid when it
          is over. The rest is an operator of one's own, ``SellingPrice``: a Python class with its state in attributes, which
          travels with its partition and is kept in replicas and checkpoints like any other. Auctions come to it when they have
          closed, those of one step in no order; it holds them until the watermark has passed their ends, and takes them in the
          order of these.
Answer    A row for each auction that had a bid: seller, id, expires, price.
"""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812

import flux
from examples.nexmark.flows import Nexmark

LAST = 10


@flux.stage(key="seller")
class SellingPrice(flux.Operator):
    schema = "seller BIGINT, id BIGINT, expires TIMESTAMP, price DOUBLE"

    def open(self, context: flux.Context) -> None:
        super().open(context)
        self.waiting: list[pa.RecordBatch] = []
        self.last: pd.DataFrame | None = None  # the last nine auctions of each seller

    def process(self, batch: pa.RecordBatch) -> None:
        self.waiting.append(batch.select(["seller", "id", "expires", "final"]))

    def on_watermark(self) -> Iterator[pa.RecordBatch]:
        if not self.waiting:
            return
        rows = pa.Table.from_batches(self.waiting).to_pandas().assign(fresh=True)
        over = rows.expires.astype("int64") < self.context.watermark
        self.waiting = [self._batch(rows[~over])] if not over.all() else []
        known = rows[over] if self.last is None else pd.concat([self.last, rows[over]])
        known = known.sort_values(["seller", "expires", "id"], ignore_index=True)
        sellers = known.groupby("seller")
        sums = sellers.final.cumsum()  # whole numbers: exact, however steps are cut
        number = sellers.cumcount() + 1
        known["price"] = (sums - sums.groupby(known.seller).shift(LAST, fill_value=0)) / number.clip(upper=LAST)
        fresh = known[known.fresh]
        self.last = sellers.tail(LAST - 1)[["seller", "id", "expires", "final"]].assign(fresh=False)
        if len(fresh):
            yield pa.RecordBatch.from_pandas(fresh[["seller", "id", "expires", "price"]], preserve_index=False)

    def _batch(self, rows: pd.DataFrame) -> pa.RecordBatch:
        return pa.RecordBatch.from_pandas(
            rows.drop(columns="fresh"), schema=self.waiting[0].schema, preserve_index=False
        )


def query(nexmark: Nexmark) -> flux.Flow:
    bids = nexmark.bid("auction", "price", "dateTime").alias("b")
    auctions = nexmark.auction("id", "seller", "dateTime", "expires").alias("a")
    placed = bids.join(auctions, F.expr("auction = id AND b.dateTime BETWEEN a.dateTime AND expires"))
    placed = placed.select("id", "seller", "price", "expires", "b.dateTime")
    return SellingPrice(placed.groupBy("id", "seller").agg(F.max("price").alias("final"), closes="expires"))
