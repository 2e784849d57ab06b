"""Python data sources inside the workers and through Spark: the same rows. One of them nobody here wrote."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import flux

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
