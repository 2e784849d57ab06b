"""q10, log to files: every bid with its day and its minute, by which the files of a table would be arranged.

``sink`` writes Parquet files, each row once. A file ends after ten seconds, or when it has its size."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import functions as F  # noqa: N812

import flux
from examples.nexmark.flows import Nexmark


def query(nexmark: Nexmark) -> flux.Flow:
    bids = nexmark.bid("auction", "bidder", "price", "dateTime", "extra")
    return bids.withColumns({"dt": F.date_format("dateTime", "yyyy-MM-dd"), "hm": F.date_format("dateTime", "HH:mm")})


def sink(flow: flux.Flow, folder: Path) -> flux.FlowTo:
    return flow.to_parquet(folder, roll_every="10s")
