"""Nexmark's queries as texts for ``flux.sql``, against their oracle. Each is computed in this process."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from in_process import rows_of, source

import flux
from benchmarks.nexmark import checkout
from examples.nexmark import sql
from examples.nexmark.flows import Nexmark
from examples.nexmark.generator import SCHEMA
from tests.oracles.nexmark import NexmarkOracle

pytestmark = pytest.mark.spark

EVENTS = 20_000


@pytest.fixture(scope="module")
def events() -> list[pa.RecordBatch]:
    """Return twenty seconds of events, out of order by less than the delay of the watermark."""
    made = checkout.events(EVENTS, 1, per_second=1_000, disorder=500)
    return list(pa.Table.from_batches(made.batches(0)).to_batches(max_chunksize=700))


@pytest.fixture(scope="module")
def oracle(events: list[pa.RecordBatch]) -> NexmarkOracle:
    return NexmarkOracle([events])


@pytest.mark.parametrize("name", sql.TEXTS)
def test_a_text_gives_the_answer_of_the_oracle(
    name: str, spark: Any, events: list[pa.RecordBatch], oracle: NexmarkOracle
) -> None:
    found = rows_of(spark, sql.query(name, Nexmark(source("nexmark", SCHEMA))), {"nexmark": events})
    assert found.num_rows > 0
    assert oracle.late() == 0
    assert oracle.differences(name, found) == []


def test_joins_that_keep_rows_for_ever_are_no_texts(spark: Any) -> None:
    nexmark = Nexmark(source("nexmark", SCHEMA))
    text = "SELECT name, city, state, a.id FROM auction a JOIN person p ON a.seller = p.id WHERE category = 10"
    with pytest.raises(flux.UsageError, match="ttl"):
        flux.sql(text, auction=nexmark.auction(), person=nexmark.person())
