"""The events of Nexmark: each follows from its number, so that a reader may begin anywhere; and their oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import flux
from examples.nexmark import generator
from examples.nexmark.flows import Nexmark
from examples.nexmark.generator import AUCTION, BID, COLUMNS, KINDS, PERSON, Events, Generator
from tests.oracles.nexmark import ANSWERS, DELAY_US, NexmarkOracle


def events(*given: int, **options: Any) -> Events:
    """Make events with all of their columns."""
    return Events(*given, **options).ask_for_all()


def rows_of(given: Events) -> pa.Table:
    return pa.Table.from_batches(batch for each in range(given.partitions) for batch in given.batches(each))


def of_kind(rows: pa.Table, kind: int) -> pa.Table:
    return rows.filter(pc.equal(rows["kind"], kind)).select(COLUMNS[KINDS[kind]])


def test_the_generator_keeps_the_contract_of_a_source() -> None:
    reader = Generator(2_345, 3, per_second=1_000, disorder=40, late=0.05)
    reader.events.ask_for_all()
    flux.testing.check_source(reader)


def test_one_event_in_fifty_is_a_person_and_three_are_auctions() -> None:
    rows = rows_of(events(50_000, 2))
    assert [of_kind(rows, kind).num_rows for kind in (PERSON, AUCTION, BID)] == [1_000, 3_000, 46_000]
    for kind, name in ((PERSON, "id"), (AUCTION, "id")):
        ids = sorted(of_kind(rows, kind)[name].to_pylist())
        assert ids == list(range(generator.FIRST_ID, generator.FIRST_ID + len(ids)))


def test_half_of_the_bids_are_for_hot_auctions() -> None:
    bids = of_kind(rows_of(events(100_000, 2)), BID)
    hot = np.mean((bids["auction"].to_numpy() - generator.FIRST_ID) % 100 == 0)
    assert 0.5 < hot < 0.52
    people = np.mean((bids["bidder"].to_numpy() - generator.FIRST_ID) % 100 == 1)
    assert 0.75 < people < 0.77
    assert 90 < pc.quantile(bids["price"], 0.001)[0].as_py() < 110
    assert 70e6 < pc.max(bids["price"]).as_py() <= 100e6


@pytest.mark.parametrize("partitions", [1, 3])
def test_partitions_share_the_same_events(partitions: int) -> None:
    """Sorted, the events of every number of partitions are equal."""
    order = [("kind", "ascending"), ("dateTime", "ascending"), ("extra", "ascending")]
    rows = rows_of(events(30_000, partitions, per_second=10_000, disorder=7, late=0.1))
    alone = rows_of(events(30_000, 2, per_second=10_000, disorder=7, late=0.1))
    assert rows.sort_by(order).equals(alone.sort_by(order))


def test_only_columns_that_a_flow_reads_are_made() -> None:
    reader = Generator(1_000, 1)
    nexmark = Nexmark(flux.source(reader), reader.events.asked)
    nexmark.bid("auction", "price")
    nexmark.person("name")
    for batch in reader.events.batches(0):
        kind = batch["kind"][0].as_py()
        made = {name for name in batch.schema.names if batch[name].null_count < batch.num_rows}
        wanted = {PERSON: {"name"}, AUCTION: set(), BID: {"auction", "price"}}[kind]
        assert made == {"kind", "dateTime", *wanted}


def test_an_auction_is_open_for_as_long_as_others_open() -> None:
    auctions = of_kind(rows_of(events(300_000, 1, per_second=10_000)), AUCTION)
    ms = pc.milliseconds_between(auctions["dateTime"], auctions["expires"]).to_numpy()
    assert ms.min() >= 1
    assert 150 < ms.mean() < 185  # 1,666 events of 10,000 a second


def test_late_events_are_late_by_the_rows_before_them() -> None:
    given = events(20_000, 2, per_second=1_000, disorder=400, late=0.05)
    oracle = NexmarkOracle(given.batches(partition) for partition in range(2))
    assert 0.045 < oracle.late() / 20_000 < 0.055
    assert oracle.late() == sum(_late_rows(list(given.batches(partition))) for partition in range(2))
    in_time = events(20_000, 2, per_second=1_000, disorder=400)
    assert NexmarkOracle(in_time.batches(partition) for partition in range(2)).late() == 0


def _late_rows(batches: list[pa.RecordBatch]) -> int:
    """Count the late rows of a partition with a loop over rows."""
    newest, late = -1, 0
    for batch in batches:
        for at in batch["dateTime"].cast(pa.int64()).to_pylist():
            late += at < newest - DELAY_US
            newest = max(newest, at)
    return late


def test_disorder_mixes_events_within_groups() -> None:
    times = rows_of(Events(10_000, 1, 1_000, disorder=100))["dateTime"].cast(pa.int64()).to_numpy()
    ordered = rows_of(Events(10_000, 1, 1_000))["dateTime"].cast(pa.int64()).to_numpy()
    assert not np.array_equal(times, ordered)
    assert np.array_equal(np.sort(times), np.sort(ordered))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"events": 0}, "events must be a whole number from 1"),
        ({"per_second": 49}, "per_second must be a whole number from 50"),
        ({"disorder": 953 * 2}, "a multiple of 953, which mixes nothing"),
        ({"late": 1.0}, "late is a share from 0 to below 1, got 1.0"),
        ({"pace": 0}, "pace is a number of events per second above 0"),
    ],
)
def test_a_mistake_in_the_events_is_told(wrong: dict[str, float], said: str) -> None:
    with pytest.raises(flux.UsageError, match=said):
        Generator(**wrong)


@pytest.fixture(scope="module")
def oracle() -> NexmarkOracle:
    given = events(10_000, 2, per_second=500, disorder=400, late=0.05)
    return NexmarkOracle(given.batches(partition) for partition in range(2))


def test_the_oracle_finds_a_row_more_a_row_less_and_another_row(oracle: NexmarkOracle) -> None:
    answer = oracle.answer("q2")
    assert oracle.differences("q2", answer) == []
    assert any("is missing" in told for told in oracle.differences("q2", answer.slice(1)))
    twice = pa.concat_tables([answer, answer.slice(0, 1)])
    assert any("should not be there" in told for told in oracle.differences("q2", twice))
    other = answer.set_column(1, "price", pc.add(answer["price"], 1))
    assert len(oracle.differences("q2", other)) == 6


def test_the_oracle_has_an_answer_to_each_query(oracle: NexmarkOracle) -> None:
    assert list(ANSWERS) == [f"q{number}" for number in range(23)]
    for query in ANSWERS:
        assert oracle.rows(query) > 0, query
        given = oracle.answer(query)
        assert oracle.differences(query, given) == [], query


def test_the_last_rows_of_an_update_count(oracle: NexmarkOracle) -> None:
    answer = oracle.answer("q15")
    before = answer.set_column(1, "total_bids", pc.subtract(answer["total_bids"], 1))
    assert oracle.differences("q15", pa.concat_tables([answer, before])) == []
    assert oracle.differences("q15", before) != []
