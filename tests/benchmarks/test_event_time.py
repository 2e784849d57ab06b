"""``flux bench eventtime``: its rows, and its figures of ages."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from benchmarks import event_time, join_age
from benchmarks.result_age import SIZE_US, WARM_UP_S, ages


def test_no_row_of_the_files_is_late_and_a_reader_begins_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_time, "FILE_ROWS", 1000)
    monkeypatch.setattr(event_time, "READ_ROWS", 300)
    paths = [str(tmp_path / f"{number}.parquet") for number in range(3)]
    for number, path in enumerate(paths):
        pq.write_table(event_time._rows(number, 10), path)
    read = event_time.reader(paths, 2, ("user", "ts"))
    whole = list(read(0, 0))
    assert [batch.num_rows for batch in whole] == [300, 300, 300, 100] * 2
    assert list(read(0, 5)) == whole[5:]
    times = pa.concat_arrays([batch.column("ts") for batch in whole]).cast(pa.int64()).to_numpy()
    newest = 0
    for time in times.tolist():
        assert time > newest - event_time.DISORDER_S * 1e6 - 1, "the delay of the watermark is four times that"
        newest = max(newest, time)


def test_ages_are_those_of_windows_that_rows_have_closed_and_no_row_is_lost() -> None:
    first = int(WARM_UP_S * 1e6)
    results = [(end, 1000 + end // SIZE_US, 5) for end in range(0, first + 10 * SIZE_US, SIZE_US)]
    figures = ages(results, 5 * len(results), 100, Console(quiet=True))
    assert figures["age_windows"] == 7
    assert figures["age_p50_ms"] == pytest.approx(1 + (15 + 3) / 1000, abs=0.01)
    with pytest.raises(AssertionError, match="the windows have"):
        ages(results, 5 * len(results) + 1, 100, Console(quiet=True))


def test_the_pairs_of_the_join_are_counted_and_each_side_completes_half_of_them() -> None:
    for total, apart in ((100, 10), (41, 6), (5, 8), (8, 8)):
        rows = np.arange(total)
        found: Counter[int] = Counter()
        for partition in range(2):
            left, right = (join_age.keys(rows, side, apart, partition, 2).tolist() for side in (0, 1))
            at = {key: row for row, key in enumerate(left)}
            found.update(abs(row - at[key]) for row, key in enumerate(right) if key in at)
        assert found.total() == 2 * join_age.pairs(total, apart)
        assert set(found) <= {apart}


def test_ages_of_pairs_are_those_of_all_and_none_is_missing() -> None:
    found = [(10, 99, 100), (500, 1, 100)]
    figures = join_age.pair_ages(found, 100, 20_000, Console(quiet=True))
    assert (figures["join_age_pairs"], figures["join_age_p50_ms"], figures["join_age_p99_ms"]) == (100, 1.1, 1.1)
    with pytest.raises(AssertionError, match="the join gave 100 pairs, and there are 101"):
        join_age.pair_ages(found, 101, 20_000, Console(quiet=True))
