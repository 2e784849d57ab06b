"""Rows for the side-by-side runs: parquet files that both sides read, made once and kept in the temporary folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

KEYS = 1_000_000
ROWS_PER_FILE = 1_000_000
#: Rows of one batch read from a file. The batches are counted, so none may be beyond spark.flux.batch.maxBytes.
READ_ROWS, READ_ROWS_WIDE = 131_072, 65_536

_READ = bytearray(1 << 20)


@dataclass(frozen=True)
class Shape:
    """Columns of the rows: "narrow" is 32 bytes (three int64, one double), "wide" has 8 columns and a string key."""

    name: str
    key: str
    schema: pa.Schema
    read_rows: int = READ_ROWS


NARROW = Shape(
    "narrow",
    "key",
    pa.schema([("key", pa.int64()), ("id", pa.int64()), ("amount", pa.int64()), ("value", pa.float64())]),
)
WIDE = Shape(
    "wide",
    "key",
    pa.schema(
        [
            ("key", pa.string()),
            ("id", pa.int64()),
            ("amount", pa.int64()),
            ("value", pa.float64()),
            ("price", pa.float64()),
            ("day", pa.date32()),
            ("flag", pa.bool_()),
            ("note", pa.string()),
        ]
    ),
    READ_ROWS_WIDE,
)
SHAPES = {shape.name: shape for shape in (NARROW, WIDE)}


def files(shape: Shape, rows: int) -> list[str]:
    """Return the paths of uncompressed parquet files with ``rows`` rows together, the same rows in every run."""
    folder = Path(tempfile.gettempdir()) / f"flux-bench-{os.getuid()}" / f"{shape.name}-{rows}"
    if not (folder / "_SUCCESS").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for number, start in enumerate(range(0, rows, ROWS_PER_FILE)):
            table = _rows(shape, start, min(ROWS_PER_FILE, rows - start), seed=number)
            pq.write_table(table, folder / f"part-{number:04}.parquet", compression="none", use_dictionary=False)
        (folder / "_SUCCESS").touch()
    paths = sorted(str(path) for path in folder.glob("*.parquet"))
    for path in paths:  # into the page cache, from which the system may have taken them since the last run
        with open(path, "rb", buffering=0) as file:
            while file.readinto(_READ):
                pass
    return paths


def _rows(shape: Shape, start: int, rows: int, seed: int) -> pa.Table:
    random = np.random.default_rng(seed)
    key = random.integers(0, KEYS, rows)
    columns: dict[str, np.ndarray] = {
        "key": key,
        "id": np.arange(start, start + rows),
        "amount": random.integers(0, 1000, rows),
        # Whole numbers, because their sum is exact in any order, so that the answers can be compared to the last bit.
        "value": random.integers(0, 1000, rows).astype(np.float64),
    }
    if shape is WIDE:
        columns["key"] = np.char.add("customer-", np.char.zfill(key.astype("U7"), 7))
        columns["price"] = random.random(rows)
        columns["day"] = random.integers(15_000, 20_000, rows).astype("datetime64[D]")
        columns["flag"] = random.random(rows) < 0.5
        columns["note"] = np.array(["", "ok", "late delivery", "returned"])[random.integers(0, 4, rows)]
    return pa.table({name: pa.array(column) for name, column in columns.items()}).cast(shape.schema)


def reader(paths: list[str], partitions: int, read_rows: int = READ_ROWS):  # type: ignore[no-untyped-def]
    """Make a source for the workers: partition p reads every ``partitions``-th file, ``read_rows`` at a time."""

    def read_parquet(partition: int, start: int) -> Iterator[pa.RecordBatch]:
        for path in paths[partition::partitions]:
            with pq.ParquetFile(path, memory_map=True) as file:
                batches = -(-file.metadata.num_rows // read_rows)
                if start < batches:
                    yield from islice(file.iter_batches(batch_size=read_rows, use_threads=False), start, None)
                start = max(start - batches, 0)

    return read_parquet
