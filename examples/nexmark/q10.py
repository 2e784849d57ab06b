"""q10, log to files: every bid with its day and its minute, by which files are arranged.

``sink`` writes Parquet files, each row once, into folders such as ``dt=2015-07-15/hm=00%3A00``. Files end after ten seconds, or
when they have their size together."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import functions as F  # noqa: N812

import flux
from examples.nexmark.flows import Nexmark


def query(nexmark: Nexmark) -> flux.Flow:
    bids = nexmark.bid("auction", "bidder", "price", "dateTime", "extra")
    return bids.withColumns({"dt": F.date_format("dateTime", "yyyy-MM-dd"), "hm": F.date_format("dateTime", "HH:mm")})


def sink(flow: flux.Flow, folder: Path) -> flux.FlowTo:
    return flow.to_parquet(folder, partitionBy=["dt", "hm"], roll_every="10s")
