"""Python data sources inside the workers and through Spark: the same rows. One of them is a foreign package."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from striking import until

import flux

#: Nothing is judged by it.
WAIT_S = 120.0

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


@flux.stage(partitions=2)
def echo(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


@pytest.mark.usefixtures("nothing_left_behind")
def test_a_data_source_of_others_gives_the_same_rows_as_through_spark(spark: Any, tmp_path: Path) -> None:
    superxml = pytest.importorskip("superxml.datasource", reason="super-xml is not installed")
    for number in range(5):
        books = [
            f'<book id="{number}-{n}"><title>T &amp; {n}</title><year>{1900 + n}</year></book>' for n in range(200)
        ]
        (tmp_path / f"{number}.xml").write_text(f"<all>{''.join(books)}</all>")
    columns = [
        {"name": "id", "kind": "attr", "path": [], "attr": "id", "type": "utf8"},
        {"name": "title", "kind": "text", "path": ["title"], "type": "utf8"},
        {"name": "year", "kind": "text", "path": ["year"], "type": "int64"},
        {"name": "author", "kind": "text", "path": ["author"], "type": "list_utf8"},
    ]
    options = {"path": str(tmp_path), "rowTag": "book", "columns": json.dumps(columns), "maxPartitionBytes": 6000}
    rows = echo(flux.datasource(superxml.SuperXmlSource, options)).collect(spark=spark, workers=2)
    spark.dataSource.register(superxml.SuperXmlSource)
    expected = spark.read.format("superxml").options(**options).load()
    assert expected.rdd.getNumPartitions() > 2
    assert len(rows) == 1000
    assert Counter(map(repr, rows)) == Counter(map(repr, expected.collect()))


class Growing(DataSource):
    """A partition of 20 rows for each file of a folder. The first one stops in the middle until there is a gate."""

    @classmethod
    def name(cls) -> str:
        return "growing"

    def schema(self) -> str:
        return "n long"

    def reader(self, schema: Any) -> Any:
        return GrowingReader(self.options["path"], self.options["gate"])


class GrowingReader(DataSourceReader):
    def __init__(self, path: str, gate: str) -> None:
        self.path, self.gate = path, gate

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(int(name)) for name in sorted(os.listdir(self.path))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        first, end = partition.value * 20, time.monotonic() + WAIT_S
        yield pa.record_batch([pa.array(range(first, first + 10))], names=["n"])
        while not os.path.exists(self.gate) and time.monotonic() < end:
            time.sleep(0.02)
        yield pa.record_batch([pa.array(range(first + 10, first + 20))], names=["n"])


def rows_there(folder: Path) -> list[int]:
    found = folder.glob("*.parquet") if folder.exists() else []
    return [n for path in found for n in pq.read_table(path).column("n").to_pylist()]


@pytest.mark.usefixtures("nothing_left_behind")
def test_a_restart_reads_the_partitions_of_the_first_start_though_more_are_planned(spark: Any, tmp_path: Path) -> None:
    def started() -> Any:
        source = flux.datasource(Growing, {"path": str(tmp_path / "in"), "gate": str(tmp_path / "gate")})
        flow = echo(source).to_parquet(tmp_path / "out", roll_every="50ms")
        return flow.start(spark=spark, workers=2, checkpointLocation=tmp_path / "location", checkpoint_interval="50ms")

    (tmp_path / "in").mkdir()
    for number in range(2):
        (tmp_path / "in" / str(number)).touch()
    query = started()
    try:
        until(lambda: rows_there(tmp_path / "out"), "the first rows")
    finally:
        query.stop()
    for number in range(2, 5):
        (tmp_path / "in" / str(number)).touch()
    (tmp_path / "gate").touch()
    query = started()
    try:
        assert query.awaitTermination(WAIT_S)
    finally:
        query.stop()
    assert Counter(rows_there(tmp_path / "out")) == Counter(range(40))
