"""Two flows of an auction house for tests of SQL, with rows that are out of order by less than the delay of the watermark."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
from in_process import source

DELAY = "30 seconds"
SECOND = 1_000_000
_TIME = pa.timestamp("us", "UTC")
BIDS = pa.schema(
    [("auction", pa.int64()), ("bidder", pa.int64()), ("price", pa.int64()), ("channel", pa.string()), ("ts", _TIME)]
)
AUCTIONS = pa.schema(
    [("id", pa.int64()), ("seller", pa.int64()), ("category", pa.int64()), ("ts", _TIME), ("expires", _TIME)]
)
#: 2026-11-28 00:00 UTC.
BEGIN = 1_795_824_000 * SECOND
_CHANNELS = ("apple", "Google", "a_b", "", "Été", " pad ")


def flows() -> dict[str, Any]:
    return {
        name: source(name, schema).withWatermark("ts", DELAY)
        for name, schema in (("bids", BIDS), ("auctions", AUCTIONS))
    }


def tables(seed: int, bids: int = 120, auctions: int = 50) -> dict[str, pa.Table]:
    """Return rows of both flows, of about seven minutes."""
    draw = random.Random(seed)

    def some(value: Any, nulls: float = 0.1) -> Any:
        return None if draw.random() < nulls else value

    def at(number: int, of: int) -> int:
        return BEGIN + (number * 420 // of - draw.randrange(25)) * SECOND

    given = [
        {
            "auction": some(draw.randrange(7)), "bidder": draw.randrange(5), "price": some(draw.randrange(-20, 100)),
            "channel": some(draw.choice(_CHANNELS)), "ts": at(number, bids),
        }
        for number in range(bids)
    ]  # fmt: skip
    opened = [
        {
            "id": some(draw.randrange(7), 0.05), "seller": draw.randrange(5), "category": some(draw.randrange(4)),
            "ts": (opens := at(number, auctions)), "expires": opens + draw.randrange(10, 90) * SECOND,
        }
        for number in range(auctions)
    ]  # fmt: skip
    return {"bids": pa.Table.from_pylist(given, BIDS), "auctions": pa.Table.from_pylist(opened, AUCTIONS)}


def batches(given: dict[str, pa.Table], rows: int = 11) -> dict[str, list[pa.RecordBatch]]:
    return {name: table.combine_chunks().to_batches(max_chunksize=rows) for name, table in given.items()}
