"""The judge of the soak run finds each kind of fault: a check that nothing can trip proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from soak_files import Deviation, Files
from striking import ROWS

NAMES = ("key", "sequence", "seen")
Row = tuple[int, int, int]


def written(folder: Path, first: int, next_: int, *rows: Row, partition: int = 0) -> Path:
    """Write a file as the sink names it, with the positions from ``first`` to below ``next_``."""
    path = folder / f"part-{partition:05}-4f4b0e0e-1c1e-2-{first:010}-{next_:010}.parquet"
    columns: Sequence[Sequence[int]] = list(zip(*rows, strict=True)) or [(), (), ()]
    pq.write_table(pa.table([pa.array(column, pa.int64()) for column in columns], names=NAMES), path)
    return path


def source(*rows: tuple[int, int]) -> Callable[[], list[pa.RecordBatch]]:
    columns = zip(*rows, strict=True)
    batch = pa.record_batch([pa.array(column, pa.int64()) for column in columns], schema=ROWS)
    return lambda: [batch]


def test_rows_that_are_those_of_the_source_are_right_in_whichever_files_they_come(tmp_path: Path) -> None:
    files = Files(tmp_path, 2)
    written(tmp_path, 0, 2, (0, 0, 0), (1, 0, 0), (0, 1, 1))
    files.look()
    assert files.newest_of_all == 0
    written(tmp_path, 2, 4, (0, 3, 3))
    written(tmp_path, 0, 1, (0, 2, 2), (1, 1, 1), partition=1)
    files.check_through(source((1, 1), (0, 0), (0, 1), (0, 2), (0, 3), (1, 0)))
    assert (files.rows, files.newest_of_all) == (6, 1)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([(0, 1, 1)], "1 rows again, the first: key 0, sequence 1"),
        ([(0, 3, 2)], "1 rows with another count than expected, the first: key 0, sequence 3, 2 before it"),
        ([(0, 3, 3), (0, 2, 2)], "key 0 has sequence 2 after 3"),
    ],
)
def test_what_a_file_may_not_have_behind_another(tmp_path: Path, rows: list[Row], said: str) -> None:
    files = Files(tmp_path, 2)
    written(tmp_path, 0, 2, (0, 0, 0), (0, 1, 1))
    files.look()
    written(tmp_path, 0, 2, *rows, partition=1)
    with pytest.raises(Deviation, match=said):
        files.look()


def test_an_order_is_checked_from_file_to_file(tmp_path: Path) -> None:
    files = Files(tmp_path, 2)
    written(tmp_path, 0, 2, (0, 1, 1))
    written(tmp_path, 2, 4, (0, 0, 0))
    with pytest.raises(Deviation, match="key 0 has sequence 0 after 1"):
        files.look()


def test_positions_that_no_file_has_are_found(tmp_path: Path) -> None:
    files = Files(tmp_path, 2)
    written(tmp_path, 0, 2, (0, 0, 0))
    written(tmp_path, 4, 5, (0, 1, 1))
    with pytest.raises(Deviation, match="begins with position 4, expected 2"):
        files.look()


def test_what_was_there_must_stay_as_it_was(tmp_path: Path) -> None:
    files = Files(tmp_path, 2)
    path = written(tmp_path, 0, 2, (0, 0, 0))
    files.look()
    written(tmp_path, 0, 2, (0, 0, 0))  # once more by another writer, with the same rows
    files.look()
    written(tmp_path, 0, 2, (1, 0, 0))
    with pytest.raises(Deviation, match="has other rows than before"):
        files.look()
    path.unlink()
    with pytest.raises(Deviation, match="was there and has gone"):
        files.look()


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([(0, 0), (1, 0), (1, 1)], r"1 rows are missing \[\(1, 1\)\], 0 are others"),
        ([(0, 0)], r"0 rows are missing \[\], 1 are others \[\(1, 0\)\]"),
    ],
)
def test_rows_other_than_those_of_the_source_are_told(tmp_path: Path, rows: list[tuple[int, int]], said: str) -> None:
    files = Files(tmp_path, 2)
    written(tmp_path, 0, 2, (0, 0, 0), (1, 0, 0))
    with pytest.raises(Deviation, match=said):
        files.check_through(source(*rows))


def test_who_reads_the_folder_has_at_least_what_was_there_before_and_nothing_twice(tmp_path: Path) -> None:
    files = Files(tmp_path, 2)
    written(tmp_path, 0, 2, (0, 0, 0), (1, 0, 0))
    files.look()
    later = files.history[-1][0] + 1
    files.check_read(later, rows=2, distinct=2, wrong=0)
    files.check_read(later, rows=3, distinct=3, wrong=None)
    for rows, distinct, wrong in ((1, 1, 0), (3, 2, 0), (2, 2, 1)):
        with pytest.raises(Deviation, match="Spark reads"):
            files.check_read(later, rows, distinct, wrong)
