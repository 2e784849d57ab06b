"""Sources in the workers beside other ways to the same rows: files that keep coming beside a reader of a list of files, and a
Python data source beside ``spark.read.format``.

Both sides take turns; the best of each is compared. Rows are counted at the end and compared with the rows of the source.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from rich.console import Console

import flux
from benchmarks.data import KEYS, NARROW, reader

#: Rows of 32 bytes: a file has 64 MB.
FILE_ROWS = 2_000_000
#: Time between two files. They come somewhat more often than they are read.
EVERY_S = 0.05
PARTITIONS, WAIT_S = 2, 600.0
#: Rows of a batch of the data source.
_EACH = 10_000


class Measured(NamedTuple):
    """Outcome: the ``ratio`` of rows a second over the other way, and the rows of all runs together that are lost or came
    twice."""

    rows_per_s: float
    ratio: float
    lost: int
    duplicated: int


class Totals(flux.Aggregate):
    n = flux.count()
    total = flux.sum("value")


def files(spark: SparkSession, rows: int, rounds: int, console: Console) -> Measured:
    """Measure files of 64 MB that keep coming, into a keyed count and sum, beside a reader that has the list of them. The time
    counts from the first row that is read to the last that is applied."""
    count = max(rows // FILE_ROWS, 1)
    with tempfile.TemporaryDirectory(prefix="flux-bench-files-") as folder:
        paths = [_file(Path(folder), number) for number in range(count)]
        total = count * FILE_ROWS
        ways: dict[str, Callable[[Path], tuple[Any, Callable[[], None]]]] = {
            "listed": lambda at: (
                flux.source(reader(paths, PARTITIONS), NARROW.schema, PARTITIONS),
                lambda: None,
            ),
            "coming": lambda at: (
                flux.files(at, schema=NARROW.schema, partitions=PARTITIONS, poll="50ms"),
                lambda: _come(paths, at),
            ),
        }
        best, lost, duplicated = dict.fromkeys(ways, 0.0), 0, 0
        for round_ in range(rounds + 1):
            for way, made in ways.items():
                at = Path(folder) / f"{way}-{round_}"
                at.mkdir()
                seconds, counted = _files_once(spark, *made(at), total)
                console.print(f"files {way}: {total / seconds:,.0f} rows/s{'' if round_ else ' (warm-up)'}")
                if round_:
                    best[way] = max(best[way], total / seconds)
                lost, duplicated = lost + max(total - counted, 0), duplicated + max(counted - total, 0)
    return Measured(best["coming"], best["coming"] / best["listed"], lost, duplicated)


def _file(folder: Path, number: int) -> str:
    random = np.random.default_rng(number)
    columns = {
        "key": random.integers(0, KEYS, FILE_ROWS),
        "id": np.arange(number * FILE_ROWS, (number + 1) * FILE_ROWS),
        "amount": random.integers(0, 1000, FILE_ROWS),
        "value": random.integers(0, 1000, FILE_ROWS).astype(np.float64),
    }
    path = folder / f"{number:04}.parquet"
    pq.write_table(pa.table(columns), path, compression="none", use_dictionary=False)
    return str(path)


def _come(paths: list[str], folder: Path) -> None:
    for path in paths:
        os.link(path, folder / Path(path).name)
        time.sleep(EVERY_S)


def _files_once(spark: SparkSession, source: Any, come: Callable[[], None], total: int) -> tuple[float, int]:
    """Measure one run: seconds, and rows that the keyed stage has applied."""
    totals: Any = flux.stage(key="key", partitions=32)(Totals)
    query = totals(source).start(
        spark=spark, workers=PARTITIONS, progress_interval="100ms", balance_enabled=False, keep_output=False
    )  # fmt: skip
    try:
        comes = threading.Thread(target=come)
        comes.start()
        end, applied, progress = time.monotonic() + WAIT_S, 0, query.lastProgress
        while time.monotonic() < end and applied < total:
            time.sleep(0.01)
            progress = query.lastProgress or {}
            applied = progress["stages"][0]["rowsIn"] if progress else 0
        seconds = time.time() - (progress or {})["firstRowAt"]
        comes.join()
        return seconds, applied
    finally:
        query.stop()


# ---- Python data sources


class Batches(DataSource):  # type: ignore[misc]
    """Data source with rows of three columns that are made up quickly, as record batches or, with ``rows``, one by one."""

    @classmethod
    def name(cls) -> str:
        return "flux_bench"

    def schema(self) -> str:
        return "key long, text string, value double"

    def reader(self, schema: Any) -> DataSourceReader:
        return BatchesReader(int(self.options["count"]), self.options.get("rows") == "true")


class BatchesReader(DataSourceReader):  # type: ignore[misc]
    def __init__(self, count: int, rows: bool) -> None:
        self.count, self.rows = count, rows

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(number) for number in range(PARTITIONS)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        for start in range(0, self.count // PARTITIONS, _EACH):
            keys = (np.arange(start, start + _EACH) * 7919 + partition.value) % 1000
            if self.rows:
                yield from zip(keys.tolist(), map(str, range(start, start + _EACH)), (keys / 2).tolist(), strict=True)
            else:
                texts = pa.array(np.arange(start, start + _EACH)).cast(pa.string())
                yield pa.record_batch([pa.array(keys), texts, pa.array(keys / 2)], ["key", "text", "value"])


def datasource(spark: SparkSession, count: int, rounds: int, rows: bool, console: Console) -> Measured:
    """Measure a Python data source into a keyed count and sum, inside the workers and as a DataFrame.

    ``rows``: it gives rows one by one, and not record batches. There is one replica, so that the cost that both sides share is
    as low as possible."""
    count = max(count // (PARTITIONS * _EACH), 1) * PARTITIONS * _EACH
    spark.dataSource.register(Batches)
    options = {"count": str(count), "rows": str(rows).lower()}
    ways: dict[str, Callable[[], Any]] = {
        "spark": lambda: spark.read.format("flux_bench").options(**options).load(),
        "inside": lambda: flux.datasource(Batches, options),
    }
    best, lost, duplicated = dict.fromkeys(ways, 0.0), 0, 0
    for round_ in range(rounds + 1):
        for way, made in ways.items():
            totals: Any = flux.stage(key="key", partitions=8, replicas=1)(Totals)
            query = totals(made()).start(spark=spark, workers=PARTITIONS, keep_output=True)
            try:
                query.wait_for_output()
                last = query.lastProgress or {}
                seconds = last["finishedAt"] - last["firstRowAt"]
                counted = query.toDF().agg({"n": "sum"}).collect()[0][0]
            finally:
                query.stop()
            kind = "rows" if rows else "batches"
            console.print(f"{kind} {way}: {count / seconds:,.0f} rows/s{'' if round_ else ' (warm-up)'}")
            if round_:
                best[way] = max(best[way], count / seconds)
            lost, duplicated = lost + max(count - counted, 0), duplicated + max(counted - count, 0)
    return Measured(best["inside"], best["inside"] / best["spark"], lost, duplicated)
