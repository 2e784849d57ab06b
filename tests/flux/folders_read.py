"""Folders that are written and read in tests of ``flux.files``, without Spark."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import flux
from flux.connectors.files.reader import FILE_ROWS
from flux.connectors.files.source import FilesReader
from flux.dataflow.source import RowStart

ROWS = pa.schema([("n", pa.int64())])
#: Readers run in threads: the longest wait for rows on a busy machine, and the wait after which a reader counts as
#: quiet.
LONG_S, QUIET_S = 30.0, 0.15


def write(folder: Path, name: str, first: int, rows: int = 3, group: int = 2) -> Path:
    """Write a parquet file as a careful program does: under a hidden name first."""
    hidden = folder / f".{name}.hidden"
    pq.write_table(pa.table({"n": range(first, first + rows)}), hidden, row_group_size=group)
    os.replace(hidden, folder / name)
    return folder / name


def started(folder: Path, partitions: int = 1, kept: Any = None, **options: Any) -> FilesReader:
    options = {"schema": ROWS, "poll": "10ms", **options}
    reader = flux.files(folder, partitions=partitions, **options).reader  # type: ignore[attr-defined]
    reader.prepare(None if kept is None else {"numbers": "file and row", **kept})
    return reader


def at(reader: FilesReader, partition: int, place: list[int] | None) -> RowStart | None:
    """Return the start of a later life that knows no position. ``place`` has the numbers of the file and of the row
    with which that life begins."""
    if place is None:
        return None
    return RowStart((place[0] - partition) // reader.partitions * FILE_ROWS + place[1])


def take(rows: Iterator[flux.Positioned | None], count: int) -> list[tuple[Any, Any]]:
    """Take ``count`` rows of the first column, each with the position behind its batch."""
    found: list[tuple[Any, Any]] = []
    end = time.monotonic() + LONG_S
    while len(found) < count:
        given = next(rows)
        if given is None or given is flux.SILENT:
            assert time.monotonic() < end, f"{found} of {count} rows"
            time.sleep(0.002)
            continue
        found += [(value, given.position) for value in given.batch.column(0).to_pylist()]
    return found


def numbers(reader: FilesReader, count: int, partition: int = 0, start: Any = None) -> list[int]:
    rows = reader.read(partition, start if isinstance(start, RowStart) else at(reader, partition, start))
    try:
        return [value for value, _ in take(rows, count)]
    finally:
        rows.close()


def gives_nothing(rows: Iterator[flux.Positioned | None]) -> None:
    end = time.monotonic() + QUIET_S
    while time.monotonic() < end:
        assert next(rows) is None
        time.sleep(0.002)


def drain(rows: Iterator[flux.Positioned | None]) -> None:
    end = time.monotonic() + LONG_S
    while time.monotonic() < end:
        next(rows)
        time.sleep(0.002)


def fails(reader: FilesReader, error: type[Exception], match: str, start: Any = None) -> None:
    rows = reader.read(0, start if isinstance(start, RowStart) else at(reader, 0, start))
    with pytest.raises(error, match=match):
        drain(rows)
    rows.close()


def given(rows: Iterator[flux.Positioned | None], count: int) -> Iterator[pa.RecordBatch]:
    end = time.monotonic() + LONG_S
    while count:
        assert time.monotonic() < end
        taken = next(rows)
        if taken is not None:
            count -= taken.batch.num_rows
            yield taken.batch
