"""Outputs of queries outside, thrown away where they are only measured, and kept in files where they are compared; and the late
rows that a query reports.

A batch is kept under its position, which is the same on every replica and after every take-over. A batch that comes again
replaces itself, so each row is there once.
"""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc

import flux
from spark_integration.query.query import Query


def dropped(batch: pa.RecordBatch, position: flux.Position) -> None:
    """Throw a batch away."""


class KeptOutput:
    """A function for ``foreach_batch`` that keeps the output of one query in a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = str(folder)

    def __call__(self, batch: pa.RecordBatch, position: flux.Position) -> None:
        path = f"{self._folder}/{position.partition:04}-{position.sequence:09}.arrow"
        with pa.OSFile(f"{path}.new", "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
            writer.write_batch(batch)
        os.replace(f"{path}.new", path)  # a file appears whole


def kept(folder: Path, schema: pa.Schema | None = None) -> pa.Table:
    """Return the rows that a folder keeps, partition by partition in their order. ``schema`` is that of none."""
    tables = [pa.ipc.open_file(path).read_all() for path in sorted(folder.glob("*.arrow"))]
    if not tables and schema is not None:
        return schema.empty_table()
    return pa.concat_tables(tables)


def late_rows(query: Query) -> int:
    """Return the number of late rows that a query reports."""
    progress = query.lastProgress
    return 0 if progress is None else sum(source["eventTime"]["lateRows"] for source in progress["sources"])
