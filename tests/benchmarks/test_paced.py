"""The source of the benchmarks: the same rows however often they are made, and as many as are expected."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest

from benchmarks import paced
from benchmarks.paced import END, FLAT, FLAT_ROWS, START, Script


@pytest.fixture
def script() -> Iterator[Script]:
    made = Script(rate=6000, partitions=3, keys=1000, load=True)
    yield made
    made.clear()


def batches(script: Script, partition: int, start: int = 0) -> list[pa.RecordBatch]:
    return [batch for batch in script.read(partition, start) if batch is not None]


def counted(script: Script) -> np.ndarray:
    keys = [batch.column("key").to_numpy() for partition in range(3) for batch in batches(script, partition)]
    return np.bincount(np.concatenate(keys), minlength=script.keys)


def test_loaded_and_paced_rows_are_as_many_as_expected(script: Script) -> None:
    script.say(START, 1.0)  # long ago: all is due
    script.say(END, script.loads + 7)
    assert (counted(script) == script.expected()).all()
    assert script.expected().sum() == 1000 + 3 * 7 * script.per_batch


def test_rows_as_fast_as_they_go_follow_those_that_are_due(script: Script) -> None:
    script.say(START, 1.0)
    script.say(FLAT, script.loads + 7)
    script.say(END, script.loads + 9)
    assert (counted(script) == script.expected()).all()
    assert script.expected().sum() == 1000 + 3 * (7 * script.per_batch + 2 * FLAT_ROWS)
    assert [batch.num_rows for batch in batches(script, 0)][-3:] == [script.per_batch, FLAT_ROWS, FLAT_ROWS]


def test_whoever_seeks_makes_the_same_rows_as_the_one_before_him(script: Script) -> None:
    script.say(START, 1.0)
    script.say(FLAT, script.loads + 3)
    script.say(END, script.loads + 5)
    whole = batches(script, 1)
    for start in range(len(whole)):
        rest = batches(script, 1, start)
        assert len(rest) == len(whole) - start
        assert all(left.equals(right) for left, right in zip(rest, whole[start:], strict=True))


def test_nothing_is_due_before_the_start_is_said(script: Script) -> None:
    rows = script.read(0, script.loads)
    assert [next(rows) for _ in range(3)] == [None, None, None]


def test_zipf_keys_are_drawn_as_often_as_their_rank_says() -> None:
    script = Script(rate=100, partitions=1, keys=1000, zipf=1.2)
    script.clear()
    counts = np.bincount(script._draw(0, 0, 200_000), minlength=1000)
    weights = 1 / np.arange(1, 1001) ** 1.2
    expected = 200_000 * weights / weights.sum()
    assert np.abs(counts[:10] / expected[:10] - 1).max() < 0.05


def test_partitions_do_not_draw_the_same_keys() -> None:
    script = Script(rate=100, partitions=2, keys=1 << 30)
    script.clear()
    assert not set(script._draw(0, 0, 1000)) & set(script._draw(1, 0, 1000))
    assert paced.SCHEMA.names == ["key", "due_ns", "value"]
