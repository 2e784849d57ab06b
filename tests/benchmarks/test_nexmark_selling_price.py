"""The operator of q6 against a plain model, however rows are cut into steps, and with a restart in between."""

from __future__ import annotations

import random
from datetime import UTC, datetime

import pyarrow as pa
import pytest

import flux
from examples.nexmark.q6 import SellingPrice

SCHEMA = pa.schema(
    [("id", pa.int64()), ("seller", pa.int64()), ("expires", pa.timestamp("us", "UTC")), ("final", pa.int64())]
)


def wanted(rows: list[dict[str, int]]) -> list[tuple[int, int, int, float]]:
    """Compute the mean of the seller's last ten auctions, up to each auction."""
    found, known = [], dict[int, list[int]]()
    for row in sorted(rows, key=lambda row: (row["expires"], row["id"])):
        prices = known.setdefault(row["seller"], [])
        prices.append(row["final"])
        found.append((row["seller"], row["id"], row["expires"], sum(prices[-10:]) / len(prices[-10:])))
    return sorted(found)


@pytest.mark.parametrize("seed", range(3))
def test_the_mean_of_the_last_ten_auctions_does_not_depend_on_steps(seed: int) -> None:
    rng = random.Random(seed)
    rows = [
        {"id": number, "seller": rng.randrange(4), "expires": number // 3 * 1000, "final": rng.randrange(1, 10**8)}
        for number in range(200)
    ]
    batches, marks, at = [], [], 0
    while at < len(rows):
        part = rows[at : (at := at + rng.randint(1, 40))]
        closed = part[-1]["expires"]  # as ``closes`` does: later rows of this very time are left out of the promise
        rng.shuffle(part)
        batches.append(pa.RecordBatch.from_pylist(part, schema=SCHEMA))
        marks.append(datetime.fromtimestamp(closed / 1e6, UTC))
    given = flux.testing.apply(SellingPrice, *batches, watermarks=marks, restart_after=rng.randrange(len(batches)))
    assert given is not None
    times = given.set_column(2, "expires", given["expires"].cast(pa.int64()))
    assert sorted(tuple(row.values()) for row in times.to_pylist()) == wanted(rows)
