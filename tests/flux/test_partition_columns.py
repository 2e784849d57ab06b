"""Parquet files in folders by the values of columns: Spark's names of folders, and each row once, with any number of
lost writers."""

from __future__ import annotations

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from harness import ThreadQuery, dataframe
from outside_store import ALONE, SCHEMA, batches, lose, slowly, until

import flux
from flux.connectors.files.parquet_sink import ParquetFiles
from flux.connectors.files.partition_columns import PartitionColumns
from flux.dataflow.sink import SinkAhead

DAYS = pa.schema([("x", pa.int64()), ("day", pa.string())])
NULL = "__HIVE_DEFAULT_PARTITION__"


def sink(folder: Path, *by: str) -> ParquetFiles:
    made = ParquetFiles(str(folder), 0, by)
    made.open(flux.SinkContext("q", 0, "last", 0, 1))
    return made


def days(*values: str | None) -> pa.RecordBatch:
    return pa.record_batch([pa.array(range(len(values))), pa.array(values, pa.string())], schema=DAYS)


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("values", "folders"),
    [
        (pa.array(["a", None, "", "a"]), {"p=a": [0, 3], f"p={NULL}": [1, 2]}),
        (
            pa.array(["10:30 %", "a/b=c", "{x}", "ünï cödé\n", "it's"]),
            {"p=10%3A30 %25": [0], "p=a%2Fb%3Dc": [1], "p=%7Bx}": [2], "p=ünï cödé%0A": [3], "p=it%27s": [4]},
        ),
        (pa.array([datetime.date(2013, 1, 1), None]), {"p=2013-01-01": [0], f"p={NULL}": [1]}),
        (pa.array([True, False, None]), {"p=true": [0], "p=false": [1], f"p={NULL}": [2]}),
        (pa.array([-3, 7], pa.int8()), {"p=-3": [0], "p=7": [1]}),
        (pa.array([1e10, 0.5, float("nan")]), {"p=1.0E10": [0], "p=0.5": [1], "p=NaN": [2]}),
        (pa.array([Decimal("1.50"), Decimal("-2.00")]), {"p=1.50": [0], "p=-2.00": [1]}),
        (pa.array([datetime.datetime(2013, 1, 1, 5, 30)], pa.timestamp("us")), {"p=2013-01-01 05%3A30%3A00": [0]}),
    ],
)
def test_folders_have_the_names_that_spark_gives_them(values: pa.Array, folders: dict[str, list[int]]) -> None:
    rows = pa.table({"p": values, "x": range(len(values))})
    by = PartitionColumns(["P"])  # names differ in case alone, as for Spark
    by.check(rows.schema)
    found = by.folders(rows)
    assert {name: part.column("x").to_pylist() for name, part in found} == folders
    assert all(part.column_names == ["x"] for _, part in found)


def test_columns_make_folders_in_folders_and_rows_keep_their_order() -> None:
    rows = pa.table({"a": ["u", "v", "u", "v", "u"], "x": range(5), "b=c": [1, 1, 2, 1, 1]})
    found = PartitionColumns(["a", "b=c"]).folders(rows)
    assert [(name, part.column("x").to_pylist()) for name, part in found] == [
        ("a=u/b%3Dc=1", [0, 4]),
        ("a=u/b%3Dc=2", [2]),
        ("a=v/b%3Dc=1", [1, 3]),
    ]


def test_columns_that_cannot_name_folders_are_refused_when_the_query_starts(tmp_path: Path) -> None:
    for by, type_, why in (
        ("p", pa.timestamp("us", "UTC"), r"would depend on the time zone .*F\.to_date\('p'\)"),
        ("p", pa.binary(), "type binary. It can for booleans"),
        ("p", pa.list_(pa.int64()), "It can for booleans"),
        ("q", pa.string(), "names 'q', and its columns are p, x"),
        (["p", "P"], pa.string(), "names a column twice"),
        (["p", "x"], pa.string(), "names all of its columns"),
    ):
        given = dataframe(pa.schema([("p", type_), ("x", pa.int64())]))
        flow = flux.stage(lambda batch: batch)(given).to_parquet(tmp_path, partitionBy=by)
        with pytest.raises(flux.SchemaError, match=why):
            ThreadQuery(flow, **ALONE)


@pytest.mark.parametrize("wrong", [3, "", ["day", 3], ["day", "day"], {"day": 1}])
def test_names_of_columns_are_checked_at_the_call(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(flux.UsageError, match="partitionBy"):
        flux.stage(lambda batch: batch)(dataframe(SCHEMA)).to_parquet(tmp_path, partitionBy=wrong)


def test_files_that_a_lost_writer_left_in_part_are_completed_by_the_next_one(tmp_path: Path) -> None:
    first = sink(tmp_path, "day")
    assert first.write(days("mo", None, "tu", "mo"), flux.Position(0, 0)) == 0
    assert first.write(days(), flux.Position(0, 1)) is None
    whole = names(tmp_path)
    part = "part-00000-q-0-0000000000-0000000002"
    assert whole == [
        f"day={NULL}/{part}-00002-00003.parquet",
        f"day=mo/{part}-00001-00003.parquet",
        f"day=tu/{part}-00003-00003.parquet",
    ]
    assert pq.read_table(tmp_path / whole[1]).to_pydict() == {"x": [0, 3]}
    assert sink(tmp_path, "day").committed(0) == 2
    (tmp_path / whole[0]).unlink()
    (tmp_path / "day=mo" / f".{part}-00001-00003.parquet.abc").write_bytes(b"of a writer that was lost")
    kept = (tmp_path / whole[1]).stat().st_mtime_ns
    heir = sink(tmp_path, "day")
    assert heir.committed(0) == 0
    heir.recovered(2)
    with pytest.raises(SinkAhead, match="the first 2 batches, and the location knows of 1"):
        heir.recovered(1)
    heir.write(days("mo", None, "tu", "mo"), flux.Position(0, 0))
    heir.write(days(), flux.Position(0, 1))
    assert names(tmp_path) == whole
    assert (tmp_path / whole[1]).stat().st_mtime_ns == kept, "a file that is there stays"
    heir.write(days("tu"), flux.Position(0, 2))
    heir.write(days(), flux.Position(0, 3))
    (tmp_path / whole[2]).unlink()
    with pytest.raises(FileNotFoundError, match="begins with position 0 is missing, files from 2 on are there"):
        sink(tmp_path, "day").committed(0)


def test_output_without_rows_leaves_its_place_where_spark_does_not_look(tmp_path: Path) -> None:
    made = sink(tmp_path, "day")
    for position, batch in enumerate([days(), days("mo"), days()]):
        made.write(batch, flux.Position(0, position))
    assert made.committed(0) == 3
    assert names(tmp_path)[0].startswith("_part-00000")


def test_a_write_that_fails_leaves_no_hidden_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove hidden files, because a full disk stays full if each attempt leaves its files."""
    write, calls = pq.write_table, []

    def full(rows: pa.Table, out: Any) -> None:
        calls.append(rows)
        write(rows, out)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")

    made = sink(tmp_path, "day")
    made.write(days("mo", "tu", "we"), flux.Position(0, 0))
    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(OSError, match="No space"):
        made.write(days(), flux.Position(0, 1))
    assert names(tmp_path) == []
    made.write(days(), flux.Position(0, 1))
    assert len(names(tmp_path)) == 3


def test_a_value_that_is_too_long_for_a_folder_is_told_with_its_column(tmp_path: Path) -> None:
    made = sink(tmp_path, "day")
    made.write(days("mo", "ü" * 200), flux.Position(0, 0))
    with pytest.raises(ValueError, match=r"'day=üü.*longer than a name of a folder may be \(404 bytes\)"):
        made.write(days(), flux.Position(0, 1))
    assert names(tmp_path) == []


NUMBERED = pa.schema([("x", pa.int64()), ("day", pa.int64())])


@flux.stage(key="x", partitions=2, replicas=2, schema=NUMBERED)
def with_day(batch: pa.RecordBatch) -> pa.RecordBatch:
    day = pa.array([value % 7 for value in batch.column("x").to_pylist()])
    return pa.record_batch([batch.column("x"), day], schema=NUMBERED)


def test_each_row_is_there_once_after_a_take_over(tmp_path: Path) -> None:
    flow = with_day(dataframe(SCHEMA)).to_parquet(str(tmp_path), partitionBy="day", roll_bytes=4000, partitions=2)
    with ThreadQuery(flow, **ALONE) as query:
        query.started().feed([slowly(batches(4000))])
        until(lambda: len(names(tmp_path)) > 20, "files come")
        assert query.server.core.table is not None
        lose(query, query.server.core.table.stages[1][0][0].worker)
        query.wait()
    found = pq.read_table(tmp_path).to_pydict()
    assert sorted(zip(found["x"], map(int, found["day"]), strict=True)) == [(x, x % 7) for x in range(4000)]
    assert {path.name for path in tmp_path.iterdir()} == {f"day={day}" for day in range(7)}
