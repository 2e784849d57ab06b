"""Records that come one by one: how often the broker is asked, and what waits is given out together. No broker is needed."""

from __future__ import annotations

import time
from collections.abc import Callable

import pyarrow as pa
import pytest

from flux.dataflow.sources import Positioned
from flux.kafka import reading
from flux.kafka.client import Fetched
from flux.kafka.reading import PartitionReader, Reading, kafka_schema
from flux.kafka.records import Transactions
from flux.kafka.security import Security
from tests.kafka.batches import made

WAIT_S = 10.0
#: Far longer than a test that goes well.
LONG_S = 60.0


class Log:
    """A partition whose leader has ``records`` records from the beginning and gives one for each question. It says that its log
    ends at ``end``: more is to come for whoever asks on."""

    def __init__(self, records: int) -> None:
        self.records, self.end = records, records + 1
        self.asked: list[int] = []

    def fetch(self, topic: str, partition: int, offset: int, *_: object) -> Fetched:
        self.asked.append(offset)
        if offset >= self.records:
            time.sleep(0.01)
            return Fetched(pa.py_buffer(b""), self.end, Transactions([]))
        return Fetched(pa.py_buffer(made([b"%d" % offset], offset)), self.end, Transactions([]))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    made_up = Log(10)
    monkeypatch.setattr(reading.Client, "fetch", lambda _, *asked: made_up.fetch(*asked))
    return made_up


def opened() -> PartitionReader:
    return PartitionReader(Reading([("nowhere", 1)], Security({}), kafka_schema(False)), "clicks", 0, 0)


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def taken(batches: PartitionReader) -> Positioned:
    found: list[Positioned] = []
    until(lambda: found.extend(filter(None, [batches.take()])) or found)
    return found[0]


def test_small_batches_that_wait_are_given_out_together_with_the_position_behind_the_last(log: Log) -> None:
    batches = opened()
    try:
        until(lambda: len(log.asked) > log.records)  # all ten answers are here
        got = taken(batches)
        assert got.batch.column("value").to_pylist() == [b"%d" % number for number in range(10)]
        assert got.position == 10
        assert batches.lag() == (10, 11)
        assert batches.take() is None
    finally:
        batches.close()


def test_no_more_rows_are_joined_than_the_limit(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "JOINED_ROWS", 4)
    batches = opened()
    try:
        until(lambda: len(log.asked) > log.records)
        got = [taken(batches) for _ in range(3)]
    finally:
        batches.close()
    assert [(each.batch.num_rows, each.position) for each in got] == [(4, 4), (4, 8), (2, 10)]


def test_who_has_all_that_the_log_has_does_not_ask_again_at_once(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "GATHER_S", LONG_S)
    log.records, log.end = 5, 3  # two come behind the third
    batches = opened()
    try:
        until(lambda: len(log.asked) == 3)
        time.sleep(0.05)  # for one more, if it comes
        assert log.asked == [0, 1, 2]
    finally:
        batches.close()
    batches._thread.join(WAIT_S)
    assert not batches._thread.is_alive(), "the pause ends with the reader"


def test_who_lags_behind_asks_again_at_once_however_small_the_answers(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "GATHER_S", LONG_S)
    log.records, log.end = 200, 1000
    batches = opened()
    try:
        until(lambda: len(log.asked) > log.records)
    finally:
        batches.close()
